"""Make tokenizers and shards from documents, as the challenge's own were made.

    python3 data/download_hf_docs_and_tokenize.py --output-root DIR                 the hub's
    python3 data/download_hf_docs_and_tokenize.py --output-root DIR --docs FILE     yours, or -

Documents are lines of JSON, {"text": ...}. Each tokenizer of --tokenizer-config gets a folder
DIR/datasets/fineweb10B_SUFFIX with the first --num-val-docs documents as the validation split and
the rest as train shards. DIR/manifest.json, written last, lists it all.
"""

import argparse
import functools
import hashlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import shards
import tokenizer_specs
from cached_challenge_fineweb import download_file
from tokenizer_specs import Spec
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
PIPED_DOCS = "docs_piped.jsonl"  # what came through a pipe
DEFAULT_NUM_VAL_DOCS = 50_000
BATCH_SIZE = int(os.environ.get("MATCHED_FINEWEB_SP_BATCH_SIZE", 512))  # documents
NUM_THREADS = int(os.environ.get("MATCHED_FINEWEB_TOKENIZER_THREADS", os.cpu_count() or 1))

Encoder = Callable[[list[str]], np.ndarray]  # texts -> tokens, uint16 (n,)


def find_documents(args: argparse.Namespace) -> Path:
    """The file of --docs, or the hub's. What comes through a pipe is kept, to be read again."""
    if args.docs is None:
        for name in (shards.DOCS, shards.SIDECAR):
            if not (args.output_root / name).exists():
                download_file(name, args.output_root, args.repo_id, args.remote_root)
        return args.output_root / shards.DOCS
    if args.docs != "-" and not Path(args.docs).is_fifo():
        return Path(args.docs)
    docs = args.output_root / PIPED_DOCS
    with open(0 if args.docs == "-" else args.docs, "rb") as pipe, open(docs, "wb") as file:
        shutil.copyfileobj(pipe, file)
    return docs


def read_documents(path: Path, digest: Any = None) -> Iterator[str]:
    """The texts of a file of JSON lines; `digest` is updated with each line. Raises ValueError
    naming the file and the line that is not {"text": string}."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = json.loads(line)["text"]
                # Half a surrogate pair has no UTF-8: it becomes a question mark.
                text = text.encode("utf-8", "replace").decode("utf-8")
            except (ValueError, LookupError, TypeError, AttributeError):
                raise ValueError(f'{path}: line {number} must be {{"text": "..."}}') from None
            if digest is not None:
                digest.update(line)
            yield text


def count_documents(docs: Path, num_val_docs: int) -> tuple[dict[str, int], str]:
    """The number of documents in each split, and the SHA-256 of the file. Raises ValueError."""
    digest = hashlib.sha256()
    num_docs = sum(1 for _ in read_documents(docs, digest))
    if not 0 <= num_val_docs <= num_docs:
        raise ValueError(f"--num-val-docs {num_val_docs}: {docs} has {num_docs} documents")
    return {"val": num_val_docs, "train": num_docs - num_val_docs}, digest.hexdigest()


def encode_batches(texts: Iterator[str], encode: Encoder) -> Iterator[np.ndarray]:
    """The tokens of BATCH_SIZE texts at a time."""
    batch = list(itertools.islice(texts, BATCH_SIZE))
    while batch:
        yield encode(batch)
        batch = list(itertools.islice(texts, BATCH_SIZE))


def split_into_shards(batches: Iterable[np.ndarray], shard_size: int) -> Iterator[np.ndarray]:
    """All tokens of the batches, shard_size at a time, in an array that is used again; the last
    time there may be fewer."""
    shard = np.empty(shard_size, dtype="<u2")
    filled = 0
    for tokens in batches:
        while tokens.size:
            part = tokens[: shard_size - filled]
            shard[filled : filled + part.size] = part
            filled += part.size
            tokens = tokens[part.size :]
            if filled == shard_size:
                yield shard
                filled = 0
    if filled:
        yield shard[:filled]


def export_dataset(
    texts: Iterator[str], num_docs: dict[str, int], encode: Encoder, folder: Path, shard_size: int
) -> dict[str, int]:
    """Write both splits in place of any shards that are there. Returns docs_val, files_val, ..."""
    for old in folder.glob("fineweb_*"):
        old.unlink()
    stats = {}
    for split, part in {"val": itertools.islice(texts, num_docs["val"]), "train": texts}.items():
        sizes: list[int] = []
        for shard in split_into_shards(encode_batches(part, encode), shard_size):
            shards.write_shard(folder / f"fineweb_{split}_{len(sizes):06d}.bin", shard)
            sizes.append(shard.size)
        stats[f"docs_{split}"] = num_docs[split]
        stats[f"files_{split}"] = len(sizes)
        stats[f"tokens_{split}"] = sum(sizes)
    for what in ("docs", "files", "tokens"):
        stats[f"{what}_total"] = stats[f"{what}_val"] + stats[f"{what}_train"]
    return stats


def write_dataset(
    spec: Spec, model: bytes | None, num_docs: dict[str, int], args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write a tokenizer and its dataset. Returns their entries in the manifest."""
    tokenizer = tokenizer_specs.write_tokenizer(spec, model, args.output_root)
    sp = None if model is None else tokenizer_specs.open_model(model, spec.name)
    encode = functools.partial(tokenizer_specs.encode_texts, sp, NUM_THREADS)
    total = sum(num_docs.values())
    texts = iter(tqdm(read_documents(args.docs), spec.dataset, total=total, unit="doc"))
    path = f"datasets/{spec.dataset}"
    stats = export_dataset(texts, num_docs, encode, args.output_root / path, args.chunk_tokens)
    print(f"{spec.dataset}: {stats}", flush=True)
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


def rebuild(args: argparse.Namespace) -> None:
    """Documents, tokenizers, datasets, manifest. Raises OSError, ValueError or RuntimeError."""
    output = args.output_root
    specs = tokenizer_specs.read_specs(
        args.tokenizer_config, dict(args.reuse_sp_model), args.tokenizer_train_docs, args.skip_byte
    )
    output.mkdir(parents=True, exist_ok=True)
    from_hub = args.docs is None
    args.docs = find_documents(args)
    sidecar_path = args.docs.with_name(shards.SIDECAR)
    has_sidecar = args.docs.name == shards.DOCS and sidecar_path.exists()
    sidecar = shards.read_json(sidecar_path) if has_sidecar else {}
    if args.num_val_docs is None:
        args.num_val_docs = sidecar.get("docs_val", DEFAULT_NUM_VAL_DOCS)
    num_docs, docs_sha256 = count_documents(args.docs, args.num_val_docs)
    models = [tokenizer_specs.make_model(spec, read_documents(args.docs)) for spec in specs]

    manifest: dict[str, Any] = {
        "version": "10B",
        "num_docs": sum(num_docs.values()),
        "num_val_docs": num_docs["val"],
        "shuffle_seed": sidecar.get("shuffle_seed"),
        "shard_size": args.chunk_tokens,
        "append_eos": False,
        "docs_jsonl": os.path.relpath(args.docs, output),
        "docs_meta": {
            "remote_repo_id": args.repo_id if from_hub else None,
            "remote_root": args.remote_root if from_hub else None,
            "num_docs": sum(num_docs.values()),
            "docs_sha256": docs_sha256,
            "source_manifest": os.path.relpath(sidecar_path, output) if has_sidecar else None,
            "source_sidecar": sidecar or None,
        },
        "tokenizer_specs": [spec.fields for spec in specs],
        "tokenizers": [],
        "datasets": [],
    }
    # Until all is written the manifest has another name, so that half a rebuild is seen as such.
    unfinished = output / shards.UNFINISHED_MANIFEST
    shards.write_json(unfinished, manifest)
    (output / shards.MANIFEST).unlink(missing_ok=True)
    for spec, model in zip(specs, models, strict=True):
        tokenizer, dataset = write_dataset(spec, model, num_docs, args)
        manifest["tokenizers"].append(tokenizer)
        manifest["datasets"].append(dataset)
    specs_used = {"tokenizers": manifest["tokenizer_specs"]}
    shards.write_json(output / "tokenizer_config.export.json", specs_used)
    shards.write_json(output / shards.MANIFEST, manifest)
    unfinished.unlink()


def positive_number(text: str) -> int:
    if int(text) < 1:
        raise ValueError(f"{text} must be above 0")
    return int(text)


def vocab_and_model(text: str) -> tuple[int, str]:
    vocab_size, model = text.split("=", 1)
    return int(vocab_size), model


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-root", type=Path, required=True)
    parser.add_argument("--docs", help="a file of JSON lines, or -; the hub's if left out")
    parser.add_argument("--repo-id", default=shards.REPO_ID)
    parser.add_argument("--remote-root", default=shards.REMOTE_ROOT)
    parser.add_argument("--tokenizer-config", type=Path, default=HERE / "tokenizer_specs.json")
    val = "validation documents: docs_val of the sidecar, else 50000"
    parser.add_argument("--num-val-docs", type=int, metavar="N", help=val)
    size = {"type": positive_number, "metavar": "N"}
    parser.add_argument("--chunk-tokens", default=100_000_000, help="tokens in a shard", **size)
    parser.add_argument("--tokenizer-train-docs", help="train on the first N documents", **size)
    parser.add_argument("--skip-byte", action="store_true", help="make no byte dataset")
    reuse = {"type": vocab_and_model, "metavar": "VOCAB=MODEL", "action": "append", "default": []}
    parser.add_argument("--reuse-sp-model", help="do not train one of this size", **reuse)
    args = parser.parse_args(arguments)
    try:
        rebuild(args)
    except (OSError, ValueError, RuntimeError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command starts it anew")


if __name__ == "__main__":
    main()
