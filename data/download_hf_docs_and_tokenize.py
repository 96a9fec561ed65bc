"""Train tokenizers and write shards from documents, as the challenge did.

    python3 data/download_hf_docs_and_tokenize.py --output-root DIR                 the hub's
    python3 data/download_hf_docs_and_tokenize.py --output-root DIR --docs FILE     your own, or -

FILE is plain text or JSON lines, {"text": ...}. Each tokenizer gets a dataset, a folder of shards
DIR/datasets/fineweb10B_SUFFIX: the first --num-val-docs documents are its validation split, the
rest its training split. DIR/manifest.json, written last, lists everything.
"""

import argparse
import functools
import hashlib
import itertools
import json
import mmap
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import caseops
import files
import numpy as np
import tokenizer_tools
from cached_challenge_fineweb import download_file
from tokenizer_tools import Spec
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
PIPED_DOCS = "docs_piped"  # a copy of documents from a pipe
DEFAULT_NUM_VAL_DOCS = 50_000
# Plain text: a document ends at the first blank line after 2,000 bytes, or with the file.
TEXT_DOCUMENT = re.compile(rb"(?s)\S.{1999,}?(?=\n\s*\n|\Z)|\S.*")
COMPRESSED = {b"\x1f\x8b": "gzip", b"\xfd7zXZ": "xz", b"(\xb5/\xfd": "zstd", b"BZh": "bzip2"}
COMPRESSED |= {b"PK\3\4": "zip"}
BATCH_SIZE = int(os.environ.get("MATCHED_FINEWEB_SP_BATCH_SIZE", 512))  # documents
NUM_THREADS = int(os.environ.get("MATCHED_FINEWEB_TOKENIZER_THREADS", os.cpu_count() or 1))

Encoder = Callable[[list[str]], np.ndarray]  # texts -> tokens, uint16 (n,)


def find_documents(args: argparse.Namespace) -> Path:
    """Return the file of --docs or the hub's. A pipe is copied to a file, to be read again."""
    if args.docs is None:
        for name in (files.DOCS, files.SIDECAR):
            if not (args.output_root / name).exists():
                download_file(name, args.output_root, args.repo_id, args.remote_root)
        return args.output_root / files.DOCS
    if args.docs != "-" and not Path(args.docs).is_fifo():
        return Path(args.docs)
    docs = args.output_root / PIPED_DOCS
    with open(0 if args.docs == "-" else args.docs, "rb") as pipe, open(docs, "wb") as file:
        shutil.copyfileobj(pipe, file)
    return docs


def read_documents(path: Path) -> Iterator[str]:
    """Yield the texts of JSON lines or the documents of plain text. Raises ValueError."""
    with open(path, "rb") as file:
        start = file.read(1000)
        file.seek(0)
        for magic, program in COMPRESSED.items():
            if start.startswith(magic):
                raise ValueError(f"{path} is compressed with {program}: decompress it first")
        if start.startswith(b"%PDF") or b"\0" in start:
            raise ValueError(f"{path} is not UTF-8 text: extract its text, or convert it")
        is_json = path.suffix in (".jsonl", ".json") or re.match(rb'(\xef\xbb\xbf)?\s*{\s*"', start)
        unit, documents = "line", file
        if start and not is_json:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            unit, documents = "document", (match[0] for match in TEXT_DOCUMENT.finditer(content))
        for number, document in enumerate(documents, start=1):
            try:
                if not is_json:
                    yield document.decode("utf-8-sig").replace("\r\n", "\n").strip()
                elif document.strip():
                    # Half a surrogate pair has no UTF-8: it becomes a question mark.
                    yield json.loads(document)["text"].encode("utf-8", "replace").decode("utf-8")
            except UnicodeDecodeError as error:
                before = document[: error.start].decode(errors="replace")[-40:]
                place = f"{unit} {number}, after {before!r}"
                advice = f"iconv -c -f utf-8 -t utf-8 {shlex.quote(str(path))} removes such bytes"
                raise ValueError(f"{path}: {place} is not UTF-8: {advice}") from None
            except (ValueError, LookupError, TypeError, AttributeError):
                wanted = '{"text": "..."}'
                raise ValueError(f"{path}: {unit} {number} must be {wanted}") from None


def read_texts(docs: Path, spec: Spec) -> Iterator[str]:
    """Yield the texts to tokenize: with CaseOps marks if the spec asks for them."""
    texts = read_documents(docs)
    return caseops.encode_many(texts, NUM_THREADS) if spec.fields.get("caseops") else texts


def read_sidecar(args: argparse.Namespace, docs: Path) -> dict | None:
    """Return the facts about the hub's documents; None for your own. Raises ValueError."""
    path = docs.with_name(files.SIDECAR)
    if docs.name != files.DOCS or not path.exists():
        return {} if args.docs is None else None
    sidecar = files.read_json(path)
    if not isinstance(sidecar, dict):
        raise ValueError(f"{path} must be a JSON object: correct it or delete it")
    return sidecar


def count_splits(args: argparse.Namespace, docs: Path, sidecar: dict | None) -> dict[str, int]:
    """Return the number of documents in each split. Raises ValueError."""
    most = num_docs = sum(1 for _ in read_documents(docs))
    num_val_docs = args.num_val_docs
    if num_val_docs is None and sidecar is None:
        num_val_docs = min(max(num_docs // 20, 1), DEFAULT_NUM_VAL_DOCS)
        most = num_docs - 1
    elif num_val_docs is None:
        docs_val = sidecar.get("docs_val")
        num_val_docs = DEFAULT_NUM_VAL_DOCS if docs_val is None else docs_val
    if not isinstance(num_val_docs, int) or not 0 <= num_val_docs <= most:
        raise ValueError(
            f"{docs} has {num_docs} documents, and validation cannot get {num_val_docs!r}: set "
            "--num-val-docs, or put blank lines between the documents of plain text"
        )
    return {"val": num_val_docs, "train": num_docs - num_val_docs}


def docs_meta(args: argparse.Namespace, docs: Path, sidecar: dict | None, num_docs: int) -> dict:
    """Describe the documents for the manifest."""
    digest = hashlib.sha256()
    with open(docs, "rb") as file:
        for line in file:
            digest.update(line)
    path = os.path.relpath(docs.with_name(files.SIDECAR), args.output_root)
    return {
        "remote_repo_id": args.repo_id if args.docs is None else None,
        "remote_root": args.remote_root if args.docs is None else None,
        "num_docs": num_docs,
        "docs_sha256": digest.hexdigest(),
        "source_manifest": path if sidecar else None,
        "source_sidecar": sidecar or None,
    }


def encode_into_shards(texts: Iterator[str], encode: Encoder, size: int) -> Iterator[np.ndarray]:
    """Yield the tokens of the texts, `size` at a time, in an array that is reused."""
    batches = iter(lambda: list(itertools.islice(texts, BATCH_SIZE)), [])
    shard = np.empty(size, dtype="<u2")
    filled = 0
    for tokens in map(encode, batches):
        while tokens.size:
            part = tokens[: size - filled]
            shard[filled : filled + part.size] = part
            filled += part.size
            tokens = tokens[part.size :]
            if filled == size:
                yield shard
                filled = 0
    if filled:
        yield shard[:filled]


def export_dataset(
    texts: Iterator[str], num_docs: dict[str, int], encode: Encoder, folder: Path, shard_size: int
) -> dict[str, int]:
    """Write both splits, replacing older shards. Returns docs_val, files_val, tokens_val, ..."""
    for old in [*folder.glob("fineweb_*"), *folder.glob("demo_corpus.json")]:
        old.unlink()
    stats: dict[str, int] = {}
    for split, part in {"val": itertools.islice(texts, num_docs["val"]), "train": texts}.items():
        sizes: list[int] = []
        for shard in encode_into_shards(part, encode, shard_size):
            files.write_shard(folder / f"fineweb_{split}_{len(sizes):06d}.bin", shard)
            sizes.append(shard.size)
        stats |= {f"docs_{split}": num_docs[split], f"files_{split}": len(sizes)}
        stats[f"tokens_{split}"] = sum(sizes)
    for what in ("docs", "files", "tokens"):
        stats[f"{what}_total"] = stats[f"{what}_val"] + stats[f"{what}_train"]
    return stats


def write_dataset(
    spec: Spec, model: bytes | None, docs: Path, num_docs: dict[str, int], args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write a tokenizer and its dataset. Returns their entries in the manifest."""
    tokenizer = tokenizer_tools.write_tokenizer(spec, model, args.output_root)
    sp = None if model is None else tokenizer_tools.open_model(model, spec.name)
    encode = functools.partial(tokenizer_tools.encode_texts, sp, NUM_THREADS)
    texts = iter(tqdm(read_texts(docs, spec), spec.dataset, sum(num_docs.values()), unit="doc"))
    path = f"datasets/{spec.dataset}"
    stats = export_dataset(texts, num_docs, encode, args.output_root / path, args.chunk_tokens)
    print(f"{spec.dataset}:", *(f"{name}:{number}" for name, number in stats.items()), flush=True)
    facts = ("vocab_size", "bos_id", "eos_id", "recommended_bigram_vocab_size")
    dataset = {
        "name": spec.dataset,
        "tokenizer_name": spec.name,
        "tokenizer_kind": spec.kind,
        "path": path,
        "train_glob": f"{path}/fineweb_train_*.bin",
        "val_glob": f"{path}/fineweb_val_*.bin",
        **{fact: tokenizer[fact] for fact in facts},
        "stats": stats,
    }
    return tokenizer, dataset


def print_training_command(spec: Spec, tokenizer: dict[str, Any], output: Path) -> None:
    size, wanted = tokenizer["vocab_size"], spec.fields.get("vocab_size", 0)
    if size < wanted:
        print(f"WARNING: {spec.dataset} has {size} pieces, not {wanted}: use VOCAB_SIZE={size}")
    if spec.kind == tokenizer_tools.SENTENCEPIECE:  # train_gpt.py does not take bytes
        data, model = output / "datasets" / spec.dataset, output / tokenizer["model_path"]
        knobs = f"DATA_PATH={shlex.quote(str(data))} TOKENIZER_PATH={shlex.quote(str(model))}"
        script = shlex.quote(os.path.relpath(HERE.parent / "train_gpt.py"))
        print("Train with (on a CPU, put PRESET=demo in front):")
        print(f"{knobs} VOCAB_SIZE={size} python {script}")


def rebuild(args: argparse.Namespace) -> None:
    """Write tokenizers, datasets and manifest. Raises OSError, ValueError or RuntimeError."""
    specs = tokenizer_tools.read_specs(args)
    output = args.output_root
    output.mkdir(parents=True, exist_ok=True)
    docs = find_documents(args)
    sidecar = read_sidecar(args, docs)
    num_docs = count_splits(args, docs, sidecar)
    cut = sidecar is None  # the hub's documents must give the challenge's pieces
    models = [tokenizer_tools.make_model(spec, read_texts(docs, spec), cut) for spec in specs]
    # Until the end there is no manifest, so that check_dataset.py refuses an unfinished rebuild.
    unfinished = output / files.UNFINISHED_MANIFEST
    files.write_json(unfinished, {})
    (output / files.MANIFEST).unlink(missing_ok=True)
    pairs = zip(specs, models, strict=True)
    entries = [write_dataset(spec, model, docs, num_docs, args) for spec, model in pairs]
    specs_used = [spec.fields for spec in specs]
    manifest = {
        "version": "10B",
        "num_docs": sum(num_docs.values()),
        "num_val_docs": num_docs["val"],
        "shuffle_seed": (sidecar or {}).get("shuffle_seed"),
        "shard_size": args.chunk_tokens,
        "append_eos": False,
        "docs_jsonl": os.path.relpath(docs, output),
        "docs_meta": docs_meta(args, docs, sidecar, sum(num_docs.values())),
        "tokenizer_specs": specs_used,
        "tokenizers": [tokenizer for tokenizer, _ in entries],
        "datasets": [dataset for _, dataset in entries],
    }
    files.write_json(output / "tokenizer_config.export.json", {"tokenizers": specs_used})
    files.write_json(output / files.MANIFEST, manifest)
    unfinished.unlink()
    for spec, tokenizer in zip(specs, manifest["tokenizers"], strict=True):
        print_training_command(spec, tokenizer, output)


def positive_number(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return int(text)


def size_and_model(text: str) -> tuple[int, str]:
    size, _, model = text.partition("=")
    if not size.isdecimal() or not model:
        raise argparse.ArgumentTypeError(f"{text!r} must be VOCAB_SIZE=MODEL, as 1024=my.model")
    return int(size), model


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    number = {"type": positive_number, "metavar": "N"}
    parser.add_argument("--output-root", type=Path, required=True)
    docs = "plain text or JSON lines, - for stdin (default: the hub's documents)"
    parser.add_argument("--docs", metavar="FILE", help=docs)
    parser.add_argument("--repo-id", default=files.REPO_ID)
    parser.add_argument("--remote-root", default=files.REMOTE_ROOT)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--vocab-size", help="make one SentencePiece tokenizer", **number)
    which.add_argument("--tokenizer-config", type=Path, default=HERE / "tokenizer_specs.json")
    val = "validation documents (default: the hub's number, or 5 %% of your own)"
    parser.add_argument("--num-val-docs", type=int, metavar="N", help=val)
    parser.add_argument("--chunk-tokens", default=100_000_000, help="tokens in a shard", **number)
    parser.add_argument("--tokenizer-train-docs", help="train on the first N documents", **number)
    marks = "lower-case the text, with marks for capitals (CaseOps)"
    parser.add_argument("--caseops", action="store_true", help=marks)
    parser.add_argument("--skip-byte", action="store_true", help="make no byte dataset")
    reuse = {"type": size_and_model, "metavar": "VOCAB_SIZE=MODEL", "action": "append"}
    parser.add_argument("--reuse-sp-model", help="use a model you have", default=[], **reuse)
    args = parser.parse_args(arguments)
    try:
        rebuild(args)
    except (OSError, ValueError, RuntimeError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.exit("interrupted: run the same command again to start over")


if __name__ == "__main__":
    main()
