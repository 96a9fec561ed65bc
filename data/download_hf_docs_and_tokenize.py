"""Make tokenizers and shards from documents, as the challenge's own were made.

    python3 data/download_hf_docs_and_tokenize.py --output-root DIR                 the hub's
    python3 data/download_hf_docs_and_tokenize.py --output-root DIR --docs FILE     yours, or -

Documents are lines of JSON, {"text": ...}. Each tokenizer of --tokenizer-config gets a folder
DIR/datasets/fineweb10B_SUFFIX with the first --num-val-docs documents as the validation split and
the rest as train shards; DIR/manifest.json, written last, lists it all.

    Documents  their texts, and what is known of them
    Encoders   from a text to the bytes of its tokens
    Export     from documents to shards
    main       the command line

The tokenizers themselves are made in tokenizer_specs.py.
"""

import argparse
import collections
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from cached_challenge_fineweb import (
    DOCS,
    SIDECAR,
    DownloadError,
    File,
    Hub,
    default_hub,
    fetch_all,
)
from shards import (
    MANIFEST,
    MAX_TOKENS,
    UNFINISHED_MANIFEST,
    header,
    locked,
    require_regular,
    write_file,
)
from tokenizer_specs import BOS, BYTE_OFFSET, Spec, make_model, read_specs, write_tokenizer

HERE = Path(__file__).resolve().parent
DEFAULT_NUM_VAL_DOCS = 50_000
PIPED_DOCS = "docs_piped.jsonl"  # what came through a pipe

# ---- Documents -----------------------------------------------------------------------------------


def read_documents(path: Path, progress: Callable[[int], Any] = lambda size: None) -> Iterator[str]:
    """The texts of a file of JSON lines. progress is told the bytes of each line. Raises ValueError
    naming the file and the line that is no {"text": string}."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = json.loads(line)["text"]
                if not isinstance(text, str):
                    raise TypeError
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ValueError(f'{path}: line {number} must be {{"text": "..."}}') from None
            progress(len(line))
            yield text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates are no text


def documents_from_hub(repo_id: str, remote_root: str, output_root: Path) -> Path:
    """Download docs_selected.jsonl and its sidecar, unless they are there; the former's path.
    Raises DownloadError."""
    hub = Hub(repo_id, remote_root.strip("/"))
    remotes = hub.ask_all(list(DOCS))
    files = {File(path, output_root): remote for path, remote in remotes.items()}
    wanted = {file: remote for file, remote in files.items() if not file.is_whole(remote)}
    if wanted:
        fetch_all(hub, wanted)
    return output_root / DOCS[0]


def find_documents(args: argparse.Namespace) -> Path:
    """The file of --docs, or the hub's. What comes through a pipe is kept, to be read again."""
    if args.docs is None:
        return documents_from_hub(args.repo_id, args.remote_root, args.output_root)
    if args.docs != "-" and not Path(args.docs).is_fifo():
        return Path(args.docs)
    docs = args.output_root / PIPED_DOCS
    with open(sys.stdin.fileno() if args.docs == "-" else args.docs, "rb") as pipe:
        with open(docs, "wb") as file:
            shutil.copyfileobj(pipe, file)
    return docs


@dataclass(frozen=True)
class Documents:
    """A file of documents, and what is known of it."""

    path: Path
    num_docs: int
    sha256: str
    sidecar: dict[str, Any]  # what the file beside it says; empty if there is none

    @property
    def sidecar_path(self) -> Path:
        return self.path.with_name(SIDECAR)

    def num_val_docs(self, asked: int | None) -> int:
        """`asked`, or docs_val of the sidecar, or the challenge's. Raises ValueError if no document
        is left to train on."""
        number = self.sidecar.get("docs_val", DEFAULT_NUM_VAL_DOCS) if asked is None else asked
        if type(number) is not int or number < 0:
            raise ValueError(
                f"{self.sidecar_path}: docs_val {number!r} must be a number from 0 on: set "
                "--num-val-docs"
            )
        if number >= self.num_docs:
            raise ValueError(
                f"{self.path} has {self.num_docs} documents, and the first {number} are for "
                "validation: set --num-val-docs below their number"
            )
        return number


def look_at_documents(path: Path) -> Documents:
    """Count and hash the documents, and read their sidecar. Raises ValueError, OSError."""
    require_regular(path)
    num_docs, digest = 0, hashlib.sha256()
    with open(path, "rb") as file:
        for line in file:
            digest.update(line)
            num_docs += 1
    sidecar = path.with_name(SIDECAR)
    facts: Any = {}
    if path.name != PIPED_DOCS and sidecar.exists():
        try:
            facts = json.loads(sidecar.read_text(encoding="utf-8"))
        except ValueError:
            facts = None
        if not isinstance(facts, dict):
            raise ValueError(f"{sidecar} is no JSON object: get it again, or remove it")
    documents = Documents(path, num_docs, digest.hexdigest(), facts)
    for key, found in (("num_docs", num_docs), ("docs_sha256", documents.sha256)):
        if facts.get(key, found) != found:
            print(f"{sidecar}: {key} is {facts[key]}, but {path} has {found}", file=sys.stderr)
    return documents


# ---- Encoders ------------------------------------------------------------------------------------


class WordEncoder:
    """A SentencePiece model that remembers words.

    Text is spaces between words, pieces do not reach over a space, and most words have been seen
    before: looking them up is faster than encoding them again. What comes out equals encoding the
    whole text; where a model does not behave like that, the whole text is encoded.
    """

    MAX_WORDS = 300_000  # some 60 MB
    SPACES = bytes.maketrans(b"\t\n\r\f", b"    ")  # SentencePiece makes these a space
    PROBE = (
        "The cat\tsat \u00a0on\x0b 12 mats.\nNo\u00ebl  e\u0301t\u00e9 \x01 x\u2581y \U0001f600!\n"
    )

    def __init__(self, model: bytes) -> None:
        self.sp = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.words: dict[bytes, bytes] = {}
        size = range(self.sp.vocab_size())
        self.begins_word = np.array([self.sp.id_to_piece(i).startswith("\u2581") for i in size])
        self.by_words = len(self.sp.encode(".")) == 1
        self.by_words = self.by_words and self([self.PROBE]) == [self.whole(self.PROBE)]

    def __call__(self, texts: list[str]) -> list[bytes]:
        """The tokens of each text, without BOS, as little-endian uint16."""
        if not self.by_words:
            return [self.whole(text) for text in texts]
        split = [
            text.encode("utf-8", "replace").translate(self.SPACES).split(b" ") for text in texts
        ]
        if len(self.words) > self.MAX_WORDS:
            self.words.clear()
        self.learn(set().union(*split).difference(self.words))
        return [self.first(words) + b"".join(map(self.words.__getitem__, words)) for words in split]

    def first(self, words: list[bytes]) -> bytes:
        """Take the first word that is not empty, with what is before it, out of a list, and encode
        it: it has no space before it."""
        for i, word in enumerate(words):
            if tokens := self.whole(word.decode()):
                del words[: i + 1]
                return tokens
        words.clear()
        return b""

    def whole(self, text: str) -> bytes:
        return np.array(self.sp.encode(text), dtype="<u2").tobytes()

    def learn(self, words: set[bytes]) -> None:
        """Encode words as they are behind a space: behind one token, which is cut off again."""
        plain = [word for word in words if word.isascii() and word.decode().isprintable() and word]
        tokens = np.array(self.sp.encode(". " + b" ".join(plain).decode())[1:], dtype="<u2")
        starts = 2 * np.flatnonzero(self.begins_word[tokens])
        if len(starts) == len(plain):  # all at once
            data = tokens.tobytes()
            bounds = itertools.pairwise([*starts.tolist(), len(data)])
            for word, (start, end) in zip(plain, bounds, strict=True):
                self.words[word] = data[start:end]
            words = words.difference(plain)
        for word in words:  # other alphabets, spaces of other kinds, nothing
            self.words[word] = self.whole(f". {word.decode()}")[2:]


def encode_bytes(texts: list[str]) -> list[bytes]:
    """Each UTF-8 byte of each text as a token, without BOS, as little-endian uint16."""
    arrays = (np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8) for text in texts)
    return [(data.astype("<u2") + BYTE_OFFSET).tobytes() for data in arrays]


@functools.lru_cache(maxsize=1)
def load_encoder(model_path: Path | None) -> tuple[Callable[[list[str]], list[bytes]], int]:
    """The encoder of a SentencePiece model, or of bytes if there is none, and the id of its BOS:
    one for each process."""
    if model_path is None:
        return encode_bytes, BOS
    encoder = WordEncoder(model_path.read_bytes())
    return encoder, encoder.sp.bos_id()


def encode_documents(model_path: Path | None, texts: list[str]) -> bytes:
    """BOS and the tokens of each document, end to end."""
    encode, bos_id = load_encoder(model_path)
    bos = bos_id.to_bytes(2, "little")
    return b"".join(bos + tokens for tokens in encode(texts))


# ---- Export --------------------------------------------------------------------------------------


class ShardWriter:
    """Writes a stream of tokens as shards PREFIX_%06d.bin of chunk_tokens each, the last one
    shorter. A shard gets its name when it is whole; until the stream is closed a file PREFIX.part
    lies beside, so that whoever finds one knows that shards are missing."""

    def __init__(self, folder: Path, prefix: str, chunk_tokens: int) -> None:
        self.folder, self.prefix, self.chunk_tokens = folder, prefix, chunk_tokens
        self.part = folder / f"{prefix}.part"
        self.num_files = self.num_tokens = 0
        self.begin_shard()

    def begin_shard(self) -> None:
        self.file = open(self.part, "wb")
        self.file.write(header(0))
        self.in_file = 0

    def add(self, data: bytes) -> None:
        """data: tokens as little-endian uint16."""
        while data:
            part = data[: 2 * (self.chunk_tokens - self.in_file)]
            self.file.write(part)
            self.in_file += len(part) // 2
            data = data[len(part) :]
            if self.in_file == self.chunk_tokens:
                self.finish_shard()
                self.begin_shard()

    def finish_shard(self) -> None:
        """Write the header of the shard in hand and give it its name."""
        self.file.seek(0)
        self.file.write(header(self.in_file))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.part, self.folder / f"{self.prefix}_{self.num_files:06d}.bin")
        self.num_files += 1
        self.num_tokens += self.in_file

    def close(self) -> None:
        """Finish the stream."""
        if self.in_file:
            self.finish_shard()
        else:
            self.file.close()
            self.part.unlink()


def split_batches(
    texts: Iterable[str], num_val_docs: int, batch_size: int
) -> Iterator[tuple[str, list[str]]]:
    """("val", batch), then ("train", batch): lists of at most batch_size texts."""
    texts = iter(texts)
    for split, limit in (("val", num_val_docs), ("train", None)):
        part = itertools.islice(texts, limit)
        while batch := list(itertools.islice(part, batch_size)):
            yield split, batch


def end_with_parent() -> None:
    """Wait until the parent has ended, in whatever way, then end this process."""
    multiprocessing.parent_process().join()
    os._exit(1)


def depend_on_parent() -> None:
    """In a worker: leave Ctrl-C to the parent, and do not outlive it: its locks would be held."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()


def encoded_batches(
    batches: Iterable[tuple[str, list[str]]], model_path: Path | None, workers: int
) -> Iterator[tuple[str, int, bytes]]:
    """(split, number of documents, tokens) of each batch, in order, encoded by `workers` processes
    (by this one if there is only one). Few batches are in memory at a time."""
    if workers == 1:
        for split, texts in batches:
            yield split, len(texts), encode_documents(model_path, texts)
        return
    # Forked workers are there at once; elsewhere than on Linux forking is not safe.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=depend_on_parent) as pool:
        waiting: collections.deque = collections.deque()
        for split, texts in batches:
            future = pool.submit(encode_documents, model_path, texts)
            waiting.append((split, len(texts), future))
            if len(waiting) > 2 * workers:
                split, count, future = waiting.popleft()
                yield split, count, future.result()
        for split, count, future in waiting:
            yield split, count, future.result()


@dataclass(frozen=True)
class Settings:
    """How documents become shards."""

    num_val_docs: int = DEFAULT_NUM_VAL_DOCS  # the first documents are the validation split
    chunk_tokens: int = 100_000_000  # in a shard
    batch_size: int = 512  # documents that a worker takes at a time
    workers: int = 1  # processes


def export_dataset(
    texts: Iterable[str],
    model_path: Path | None,
    folder: Path,
    settings: Settings,
    report: Callable[[int, int], None] = lambda documents, tokens: None,
) -> dict[str, int]:
    """Write the shards of a dataset, in place of any that are there; return their statistics.

    model_path: of a SentencePiece model, or None for bytes. report is told of every batch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chunk = settings.chunk_tokens
    # From here to the end there is a .part: what is killed or fails in between is seen as such.
    writers = {split: ShardWriter(folder, f"fineweb_{split}", chunk) for split in ("val", "train")}
    remove_old_shards(folder, {writer.part for writer in writers.values()})
    documents = {"val": 0, "train": 0}
    batches = split_batches(texts, settings.num_val_docs, settings.batch_size)
    for split, count, tokens in encoded_batches(batches, model_path, settings.workers):
        writers[split].add(tokens)
        documents[split] += count
        report(count, len(tokens) // 2)
    for writer in writers.values():
        writer.close()
    counts = {
        "docs": documents,
        "files": {split: writer.num_files for split, writer in writers.items()},
        "tokens": {split: writer.num_tokens for split, writer in writers.items()},
    }
    stats = {}
    for what, of in counts.items():
        stats[f"{what}_total"] = of["val"] + of["train"]
        stats[f"{what}_val"] = of["val"]
        stats[f"{what}_train"] = of["train"]
    return stats


def remove_old_shards(folder: Path, kept: set[Path]) -> None:
    """Make room for new shards; half of a download goes, too."""
    for old in [*folder.glob("fineweb_*.bin"), *folder.glob("fineweb_*.part")]:
        if old.is_dir():
            shutil.rmtree(old)
        elif old not in kept:
            old.unlink()


# ---- main ----------------------------------------------------------------------------------------


def relative(path: Path, output: Path) -> str:
    return Path(os.path.relpath(path, output)).as_posix()


def begin_manifest(
    documents: Documents, settings: Settings, specs: list[Spec], args: argparse.Namespace
) -> dict[str, Any]:
    """The manifest without its tokenizers and datasets."""
    from_hub = args.docs is None
    sidecar = relative(documents.sidecar_path, args.output_root) if documents.sidecar else None
    return {
        "version": "10B",
        "num_docs": documents.num_docs,
        "num_val_docs": settings.num_val_docs,
        "shuffle_seed": documents.sidecar.get("shuffle_seed"),
        "shard_size": settings.chunk_tokens,
        "append_eos": False,
        "docs_jsonl": relative(documents.path, args.output_root),
        "docs_meta": {
            "remote_repo_id": args.repo_id if from_hub else None,
            "remote_root": args.remote_root if from_hub else None,
            "num_docs": documents.num_docs,
            "docs_sha256": documents.sha256,
            "source_manifest": sidecar,
            "source_sidecar": documents.sidecar or None,
        },
        "tokenizer_specs": [spec.source for spec in specs],
        "tokenizers": [],
        "datasets": [],
    }


def dataset_entry(spec: Spec, tokenizer: dict[str, Any], stats: dict[str, int]) -> dict[str, Any]:
    """A dataset's entry in the manifest."""
    path = f"datasets/{spec.dataset}"
    facts = ("vocab_size", "bos_id", "eos_id", "recommended_bigram_vocab_size")
    return {
        "name": spec.dataset,
        "tokenizer_name": tokenizer["name"],
        "tokenizer_kind": tokenizer["kind"],
        "path": path,
        "train_glob": f"{path}/fineweb_train_*.bin",
        "val_glob": f"{path}/fineweb_val_*.bin",
        **{fact: tokenizer[fact] for fact in facts},
        "stats": stats,
    }


def write_dataset(
    spec: Spec, tokenizer: dict[str, Any], docs: Path, output: Path, settings: Settings
) -> dict[str, Any]:
    """Export the documents with a tokenizer that is in the output folder; the dataset's entry in
    the manifest."""
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread: workers are forked
    model_path = output / tokenizer["model_path"] if "model_path" in tokenizer else None
    with tqdm(total=docs.stat().st_size, unit="B", unit_scale=True, desc=spec.dataset) as bar:
        counter = Counter(bar)
        texts = read_documents(docs, bar.update)
        folder = output / "datasets" / spec.dataset
        stats = export_dataset(texts, model_path, folder, settings, counter)
    print(f"{spec.dataset}: {stats}")
    return dataset_entry(spec, tokenizer, stats)


def run(args: argparse.Namespace) -> None:
    """Specs, documents, tokenizers, datasets, manifest: nothing that is there is touched before all
    tokenizers are trained."""
    specs = read_specs(args)
    batch_size = read_knob("MATCHED_FINEWEB_SP_BATCH_SIZE", Settings.batch_size)
    workers = read_knob("MATCHED_FINEWEB_TOKENIZER_THREADS", os.cpu_count() or 1)
    documents = look_at_documents(find_documents(args))
    num_val_docs = documents.num_val_docs(args.num_val_docs)
    settings = Settings(num_val_docs, args.chunk_tokens, batch_size, workers)
    models = [make_model(spec, read_documents(documents.path)) for spec in specs]

    # From here on the manifest is unfinished, and has another name.
    output, manifest = args.output_root, begin_manifest(documents, settings, specs, args)
    unfinished = output / UNFINISHED_MANIFEST
    write_json(unfinished, manifest)
    (output / MANIFEST).unlink(missing_ok=True)
    for spec, model in zip(specs, models, strict=True):
        tokenizer = write_tokenizer(spec, model, output)
        dataset = write_dataset(spec, tokenizer, documents.path, output, settings)
        manifest["tokenizers"].append(tokenizer)
        manifest["datasets"].append(dataset)
        write_json(unfinished, manifest)
    write_json(output / "tokenizer_config.export.json", {"tokenizers": manifest["tokenizer_specs"]})
    os.replace(unfinished, output / MANIFEST)


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_file(path, json.dumps(content, indent=2).encode())


def read_knob(name: str, default: int) -> int:
    """A number above 0 from the environment. Raises ValueError naming the variable."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name}={text!r} must be a whole number above 0")
    return int(text)


def vocab_and_model(text: str) -> tuple[str, str]:
    """(VOCAB, MODEL) of VOCAB=MODEL."""
    vocab, _, model = text.partition("=")
    if not vocab.isdecimal() or not model:
        raise argparse.ArgumentTypeError(f"{text!r} must be VOCAB=MODEL, as 1024=my.model")
    return vocab, model


def number(text: str, least: int = 1, most: int = sys.maxsize) -> int:
    """A whole number from an argument."""
    if not text.isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, {least} to {most}")
    return int(text)


class Counter:
    """Shows documents and tokens beside a progress bar."""

    def __init__(self, bar: Any) -> None:
        self.bar, self.documents, self.tokens = bar, 0, 0

    def __call__(self, documents: int, tokens: int) -> None:
        self.documents += documents
        self.tokens += tokens
        self.bar.set_postfix_str(f"{self.documents} docs, {self.tokens / 1e6:.1f}M tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-root", type=Path, required=True)
    parser.add_argument("--docs", help="a file of JSON lines, or -; the hub's if left out")
    parser.add_argument("--repo-id", default=default_hub().repo_id)
    parser.add_argument("--remote-root", default=default_hub().folder)
    parser.add_argument("--tokenizer-config", type=Path, default=HERE / "tokenizer_specs.json")
    from_zero = functools.partial(number, least=0)
    val = "documents of the validation split: docs_val of the sidecar, else 50000"
    parser.add_argument("--num-val-docs", type=from_zero, metavar="N", help=val)
    shard = functools.partial(number, most=MAX_TOKENS)
    chunk = {"default": Settings.chunk_tokens, "metavar": "N", "help": "tokens in a shard"}
    parser.add_argument("--chunk-tokens", type=shard, **chunk)
    first = "train tokenizers on the first N documents, not on all"
    parser.add_argument("--tokenizer-train-docs", type=number, metavar="N", help=first)
    parser.add_argument("--skip-byte", action="store_true", help="make no byte dataset")
    reuse = "use this model instead of training one; may stand several times"
    parser.add_argument(
        "--reuse-sp-model",
        action="append",
        default=[],
        type=vocab_and_model,
        metavar="VOCAB=MODEL",
        help=reuse,
    )
    try:
        args = parser.parse_args()
        with locked(args.output_root):
            run(args)
    except KeyboardInterrupt:
        print("interrupted: run the same command again", file=sys.stderr)
        sys.exit(130)
    except ImportError as error:
        sys.exit(f"{error}: pip install -r data/requirements.txt")
    except (DownloadError, OSError, ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
