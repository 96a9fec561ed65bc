"""Make tokenizers and shards from documents, as the challenge's own were made.

    python3 data/download_hf_docs_and_tokenize.py --output-root DIR                 the hub's
    python3 data/download_hf_docs_and_tokenize.py --output-root DIR --docs FILE     yours, or -

Documents are lines of JSON, {"text": ...}. Each tokenizer of --tokenizer-config gets a folder
DIR/datasets/fineweb10B_NAME with the first --num-val-docs documents as the validation split and the
rest as train shards; DIR/manifest.json, written last, lists it all.

    Recipe     the tokenizer that everybody gets
    Encoders   from a text to the bytes of its tokens
    Export     from documents to shards
    main       the command line
"""

import argparse
import collections
import functools
import io
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from cached_challenge_fineweb import DOCS, DownloadError, File, Hub, default_hub, fetch_all
from shards import header, locked, write_file

HERE = Path(__file__).resolve().parent
BOS = 1  # pad, bos, eos, unk = 0, 1, 2, 3 in every tokenizer
BYTE_OFFSET = 4  # byte b is token b + 4 of the byte tokenizer
DEFAULT_NUM_VAL_DOCS = 50_000
PIPED_DOCS = "docs_piped.jsonl"  # what came through a pipe

# ---- Recipe --------------------------------------------------------------------------------------


def train_sentencepiece(texts: Iterable[str], vocab_size: int) -> bytes:
    """A SentencePiece BPE model with the settings of the challenge's own. The same texts in the
    same order give the same bytes. Raises RuntimeError if they are too few for vocab_size."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.splitlines() if line),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        character_coverage=0.999,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="nmt_nfkc",
        add_dummy_prefix=False,
        pad_id=0,
        bos_id=BOS,
        eos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    return model.getvalue()


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
            data, bounds = tokens.tobytes(), [*starts.tolist(), 2 * len(tokens)]
            self.words.update(zip(plain, map(data.__getitem__, map(slice, bounds, bounds[1:]))))
            words = words.difference(plain)
        for word in words:  # other alphabets, spaces of other kinds, nothing
            self.words[word] = self.whole(f". {word.decode()}")[2:]


def encode_bytes(texts: list[str]) -> list[bytes]:
    """Each UTF-8 byte of each text as a token, without BOS, as little-endian uint16."""
    arrays = (np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8) for text in texts)
    return [(data.astype("<u2") + BYTE_OFFSET).tobytes() for data in arrays]


@functools.lru_cache(maxsize=1)
def load_encoder(model_path: Path | None) -> Callable[[list[str]], list[bytes]]:
    """The encoder of a SentencePiece model, or of bytes if there is none: one for each process."""
    return encode_bytes if model_path is None else WordEncoder(model_path.read_bytes())


def encode_documents(model_path: Path | None, texts: list[str]) -> bytes:
    """BOS and the tokens of each document, end to end."""
    encode, bos = load_encoder(model_path), np.array([BOS], dtype="<u2").tobytes()
    return b"".join(bos + tokens for tokens in encode(texts))


# ---- Export --------------------------------------------------------------------------------------


class ShardWriter:
    """Writes a stream of tokens as shards PREFIX_%06d.bin of chunk_tokens each, the last one
    shorter. A shard gets its name when it is whole."""

    def __init__(self, folder: Path, prefix: str, chunk_tokens: int) -> None:
        self.folder, self.prefix, self.chunk_tokens = folder, prefix, chunk_tokens
        self.num_files = self.num_tokens = self.in_file = 0
        self.file: io.BufferedWriter | None = None

    def add(self, data: bytes) -> None:
        """data: tokens as little-endian uint16."""
        while data:
            if self.file is None:
                self.file = open(self.folder / f"{self.prefix}.part", "wb")
                self.file.write(header(0))
            part = data[: 2 * (self.chunk_tokens - self.in_file)]
            self.file.write(part)
            self.in_file += len(part) // 2
            data = data[len(part) :]
            if self.in_file == self.chunk_tokens:
                self.close()

    def close(self) -> None:
        """Finish the shard in hand."""
        if self.file is None:
            return
        self.file.seek(0)
        self.file.write(header(self.in_file))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.file.name, self.folder / f"{self.prefix}_{self.num_files:06d}.bin")
        self.num_files += 1
        self.num_tokens += self.in_file
        self.file, self.in_file = None, 0


def split_batches(
    texts: Iterable[str], num_val_docs: int, batch_size: int
) -> Iterator[tuple[str, list[str]]]:
    """("val", batch), then ("train", batch): lists of at most batch_size texts."""
    texts = iter(texts)
    for split, limit in (("val", num_val_docs), ("train", None)):
        part = itertools.islice(texts, limit)
        while batch := list(itertools.islice(part, batch_size)):
            yield split, batch


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
    ignore = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
    with ProcessPoolExecutor(workers, mp_context=context, **ignore) as pool:
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
    for old in [*folder.glob("fineweb_*.bin"), *folder.glob("fineweb_*.part")]:
        old.unlink()
    chunk = settings.chunk_tokens
    writers = {split: ShardWriter(folder, f"fineweb_{split}", chunk) for split in ("val", "train")}
    documents = {"val": 0, "train": 0}
    batches = split_batches(texts, settings.num_val_docs, settings.batch_size)
    try:
        for split, count, tokens in encoded_batches(batches, model_path, settings.workers):
            writers[split].add(tokens)
            documents[split] += count
            report(count, len(tokens) // 2)
        for writer in writers.values():
            writer.close()
    finally:
        for part in folder.glob("fineweb_*.part"):
            part.unlink()
    stats = {}
    for split, writer in writers.items():
        stats[f"files_{split}"] = writer.num_files
        stats[f"tokens_{split}"] = writer.num_tokens
        stats[f"docs_{split}"] = documents[split]
    return stats


# ---- main ----------------------------------------------------------------------------------------


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


def read_specs(path: Path, skip_byte: bool) -> list[dict[str, Any]]:
    """The tokenizers of a --tokenizer-config. Raises ValueError naming the file if it is wrong."""
    try:
        specs = json.loads(path.read_text())["tokenizers"]
        kinds = {(spec["kind"], spec.get("vocab_size", 0) > 0) for spec in specs}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} must list tokenizers, each with a kind: {error}") from None
    if not specs or not kinds <= {("sentencepiece_bpe", True), ("bytes", False)}:
        raise ValueError(f"{path}: kinds are sentencepiece_bpe with a vocab_size, and bytes")
    return [spec for spec in specs if not (skip_byte and spec["kind"] == "bytes")]


def documents_from_hub(repo_id: str, remote_root: str, output_root: Path) -> Path:
    """Download docs_selected.jsonl and its sidecar, unless they are there; the former's path.
    Raises DownloadError."""
    hub = Hub(repo_id, remote_root.strip("/"))
    sizes = hub.sizes(list(DOCS))
    files = {File(path, output_root): size for path, size in sizes.items()}
    wanted = {file: size for file, size in files.items() if not file.is_whole(size)}
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


def default_num_val_docs(docs: Path) -> int:
    """docs_val of the sidecar beside the documents, else the challenge's 50,000."""
    sidecar = docs.with_name("docs_selected.source_manifest.json")
    if not sidecar.exists() or docs.name == PIPED_DOCS:
        return DEFAULT_NUM_VAL_DOCS
    try:
        number = json.loads(sidecar.read_text()).get("docs_val", DEFAULT_NUM_VAL_DOCS)
    except (ValueError, AttributeError):
        number = None
    if type(number) is not int or number < 1:
        raise ValueError(f"{sidecar}: docs_val must be a number above 0: set --num-val-docs")
    return number


def make_tokenizer(
    spec: dict[str, Any], docs: Path, reused: Path | None, args: argparse.Namespace
) -> dict[str, Any]:
    """Put a tokenizer into the output folder and return its entry in the manifest. A reused model
    is copied, another one is trained on the first documents behind the validation split."""
    if spec["kind"] == "bytes":
        facts = {"kind": "bytes", "vocab_size": 256 + BYTE_OFFSET, "byte_offset": BYTE_OFFSET}
        path = "tokenizers/fineweb_pure_byte_260.json"
        write_file(args.output_root / path, json.dumps(facts).encode())
        return {"name": "pure_byte_260", **facts, "path": path}
    size = spec["vocab_size"]
    name = f"tokenizers/fineweb_{size}_bpe"
    if reused is not None:
        model = reused.read_bytes()
    else:
        first = args.num_val_docs
        last = first + args.tokenizer_train_docs
        try:
            model = train_sentencepiece(itertools.islice(read_documents(docs), first, last), size)
        except RuntimeError as error:
            raise ValueError(
                f"{docs}: no tokenizer of {size} pieces from what follows the first {first} "
                f"documents ({str(error).strip()}): check --num-val-docs and vocab_size"
            ) from None
    try:
        sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError:
        raise ValueError(f"--reuse-sp-model {size}={reused} is no SentencePiece model") from None
    if sp.vocab_size() != size:
        raise ValueError(f"{reused} has {sp.vocab_size()} pieces, not the {size} that it is for")
    vocab = "".join(f"{sp.id_to_piece(i)}\t{sp.get_score(i):g}\n" for i in range(size))
    write_file(args.output_root / f"{name}.model", model)
    write_file(args.output_root / f"{name}.vocab", vocab.encode())
    return {
        "name": f"sp_bpe_{size}",
        "kind": spec["kind"],
        "vocab_size": size,
        "model_path": f"{name}.model",
        "vocab_path": f"{name}.vocab",
    }


def run(args: argparse.Namespace) -> None:
    """Documents, then tokenizers and datasets one by one, then the manifest."""
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread: workers are forked
    specs = read_specs(args.tokenizer_config, args.skip_byte)
    reused = dict(args.reuse_sp_model)
    for size in set(reused).difference(str(spec.get("vocab_size")) for spec in specs):
        raise ValueError(f"--reuse-sp-model {size}=...: {args.tokenizer_config} has no such size")
    output = args.output_root
    docs = find_documents(args)
    if args.num_val_docs is None:
        args.num_val_docs = default_num_val_docs(docs)
    batch_size = read_knob("MATCHED_FINEWEB_SP_BATCH_SIZE", Settings.batch_size)
    workers = read_knob("MATCHED_FINEWEB_TOKENIZER_THREADS", os.cpu_count() or 1)
    settings = Settings(args.num_val_docs, args.chunk_tokens, batch_size, workers)
    (output / "manifest.json").unlink(missing_ok=True)  # of shards that are about to go
    manifest: dict[str, Any] = {"datasets": [], "tokenizers": []}
    for spec in specs:
        model = reused.get(str(spec.get("vocab_size")))
        tokenizer = make_tokenizer(spec, docs, Path(model) if model else None, args)
        suffix = "byte260" if spec["kind"] == "bytes" else f"sp{spec['vocab_size']}"
        name = f"fineweb10B_{suffix}"
        model_path = output / tokenizer["model_path"] if "model_path" in tokenizer else None
        with tqdm(total=docs.stat().st_size, unit="B", unit_scale=True, desc=name) as bar:
            counter = Counter(bar)
            texts = read_documents(docs, bar.update)
            folder = output / "datasets" / name
            stats = export_dataset(texts, model_path, folder, settings, counter)
        if stats["docs_train"] == 0:
            raise ValueError(
                f"{docs}: all of its {stats['docs_val']} documents are validation: "
                "set --num-val-docs below that"
            )
        entry = {"name": name, "tokenizer_name": tokenizer["name"], "stats": stats}
        manifest["tokenizers"].append(tokenizer)
        manifest["datasets"].append({**entry, "path": f"datasets/{name}"})
        print(f"{name}: {stats}")
    write_file(output / "manifest.json", json.dumps(manifest, indent=2).encode())


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


def above_zero(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number above 0")
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
    parser.add_argument(
        "--num-val-docs", type=above_zero, help="docs_val of the sidecar, else 50000"
    )
    parser.add_argument("--chunk-tokens", type=above_zero, default=Settings.chunk_tokens)
    parser.add_argument("--tokenizer-train-docs", type=above_zero, default=100_000)
    parser.add_argument("--skip-byte", action="store_true")
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
