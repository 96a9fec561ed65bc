"""Check a dataset: its shards, its ids, its manifest, and that the tokenizer is the one it is from.

    python3 data/check_dataset.py DATASET_DIR --tokenizer MODEL [--manifest FILE]

Reads every shard once, prints what it found and how the first documents begin. Exits with 1 if
something is off, with a line for each problem on stderr.
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np
from sentencepiece import SentencePieceProcessor
from shards import HEADER_BYTES, MANIFEST, UNFINISHED_MANIFEST, count_tokens, read_json
from tokenizer_specs import open_model

CHUNK = 2**20  # tokens in memory at a time
SAMPLE = 20  # documents of a shard that are decoded and encoded again
WRONG_TOKENIZER = "name the right --tokenizer, or get the file again"


def read_shard(path: Path, sp: SentencePieceProcessor) -> tuple[np.ndarray, list[list[int]]]:
    """How often each id occurs, int64 (65536,), and the first whole documents, without BOS. Raises
    ValueError naming the file if it is damaged or its tokens are not this tokenizer's; OSError."""
    count_tokens(path)
    id_counts = np.zeros(2**16, dtype=np.int64)
    with open(path, "rb") as file:
        file.seek(HEADER_BYTES)
        first = chunk = np.fromfile(file, "<u2", CHUNK)
        while chunk.size:
            id_counts += np.bincount(chunk, minlength=id_counts.size)
            chunk = np.fromfile(file, "<u2", CHUNK)
    largest = max(np.flatnonzero(id_counts), default=0)
    if largest >= sp.vocab_size():
        raise ValueError(f"{path}: id {largest}, but {sp.vocab_size()} pieces: {WRONG_TOKENIZER}")
    # Before the first BOS and after the last one there may be only a part of a document.
    documents = np.split(first, np.flatnonzero(first == sp.bos_id()))[1:-1]
    sample = [document[1:].tolist() for document in documents[:SAMPLE]]
    same = sum(sp.encode(sp.decode(document)) == document for document in sample)
    if same < len(sample) / 2:
        raise ValueError(
            f"{path}: of {len(sample)} documents {same} are the same when they are decoded and "
            f"encoded again: {WRONG_TOKENIZER}"
        )
    return id_counts, sample


def count_bytes(id_counts: np.ndarray, sp: SentencePieceProcessor) -> int:
    """The bytes of text that the tokens stand for."""
    total = 0
    for id in range(sp.vocab_size()):
        if sp.is_byte(id):
            total += int(id_counts[id])
        elif not (sp.is_control(id) or sp.is_unknown(id) or sp.is_unused(id)):
            text = sp.id_to_piece(id).replace("\u2581", " ")
            total += int(id_counts[id]) * len(text.encode())
    return total


def check_split(
    folder: Path, split: str, sp: SentencePieceProcessor, problems: list[str]
) -> dict[str, int]:
    """Read the shards of a split and print what they hold. Returns the numbers of files, tokens and
    documents under their names in the manifest; a line for each problem goes to `problems`."""
    paths = sorted(folder.glob(f"fineweb_{split}_*.bin"))
    expected = {folder / f"fineweb_{split}_{index:06d}.bin" for index in range(len(paths))}
    problems += [f"{path} is missing: get it again" for path in sorted(expected - {*paths})]
    total = np.zeros(2**16, dtype=np.int64)
    beginnings: list[str] = []
    for path in paths:
        try:
            id_counts, documents = read_shard(path, sp)
            total += id_counts
            beginnings += [sp.decode(document[:100]) for document in documents[:3]]
        except (OSError, ValueError) as error:
            problems.append(str(error))
    tokens, docs = int(total.sum()), int(total[sp.bos_id()])
    if tokens and not docs:
        problems.append(f"{folder}: no {split} token is BOS (id {sp.bos_id()}): no document begins")
    per_token = count_bytes(total, sp) / max(tokens, 1)
    counts = f"shards:{len(paths)} tokens:{tokens} documents:{docs}"
    print(f"{split}: {counts} bytes_per_token:{per_token:.4f}")
    for text in beginnings[:3]:
        print(f"{split}: begins: {' '.join(text.split())[:80]}")
    return {f"files_{split}": len(paths), f"tokens_{split}": tokens, f"docs_{split}": docs}


def compare_with_manifest(path: Path, name: str, found: dict[str, int]) -> list[str]:
    """A line for each number of the manifest that differs from what was found. Of the train shards
    the first ones may be there alone."""
    datasets = {entry["name"]: entry for entry in read_json(path).get("datasets", [])}
    if name not in datasets:
        print(f"{path} says nothing about {name}: nothing to compare with")
        return []
    promised = {**datasets[name], **datasets[name]["stats"]}
    if found["files_train"] < promised.get("files_train", 0):
        print(f"train: {found['files_train']} of {promised['files_train']} shards are here")
        found = {key: value for key, value in found.items() if not key.endswith("_train")}
    return [
        f"{path} says {key}:{promised[key]}, but here it is {value}: get the files again"
        for key, value in found.items()
        if promised.get(key, value) != value
    ]


def check(folder: Path, tokenizer: Path, manifest: Path | None) -> list[str]:
    """Print what was found. Returns a line for each problem. Raises ValueError or OSError for what
    is not a dataset, a tokenizer or a manifest."""
    if not any(folder.glob("fineweb_*.bin")):
        raise ValueError(f"{folder} has no fineweb_*.bin: name the folder of the shards")
    sp = open_model(tokenizer.read_bytes(), str(tokenizer))
    found = {"vocab_size": sp.vocab_size()}
    problems: list[str] = []
    for split in ("val", "train"):
        found |= check_split(folder, split, sp, problems)
    place = manifest or folder.parent.parent / MANIFEST
    unfinished = place.with_name(UNFINISHED_MANIFEST)
    if manifest or place.exists():
        problems += compare_with_manifest(place, folder.name, found)
    elif unfinished.exists():
        problems.append(f"{unfinished} is there: the rebuild has not come to its end: run it again")
    else:
        print(f"{place} is missing: nothing to compare with")
    return problems


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset", help="folder of fineweb_{train,val}_*.bin")
    parser.add_argument("--tokenizer", type=Path, required=True, help="SentencePiece .model file")
    parser.add_argument("--manifest", type=Path, help="default: DATASET_DIR/../../manifest.json")
    args = parser.parse_args(arguments)
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        problems = check(Path(os.path.abspath(args.dataset)), args.tokenizer, args.manifest)
    except (OSError, ValueError) as error:
        problems = [str(error)]
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
