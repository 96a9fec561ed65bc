"""Check a dataset: its shards, its token ids, its tokenizer and its manifest.

    python3 data/check_dataset.py DATASET_DIR --tokenizer MODEL [--manifest FILE]

Reads every shard, then prints counts, the beginnings of the first documents, and how many documents
of the validation split also train. If something is wrong, prints a line for each problem to stderr
and exits with 1.
"""

import argparse
import collections
import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import caseops
import numpy as np
from files import HEADER_BYTES, MANIFEST, UNFINISHED_MANIFEST, count_tokens, read_json
from sentencepiece import SentencePieceProcessor
from tokenizer_tools import open_model

CHUNK = 2**20  # tokens read at a time
SAMPLE = 20  # documents per shard to decode and encode again
RUN = 10  # this many documents in a row, in both splits, are a leak
GET_AGAIN = "download or rebuild the dataset again"
WRONG_TOKENIZER = f"set --tokenizer to the model that made it, or {GET_AGAIN}"


def read_shard(path: Path, sp: SentencePieceProcessor) -> tuple[np.ndarray, list[list[int]]]:
    """Count each token id, int64 (65536,), and return the first complete documents, without BOS.
    Raises ValueError if another tokenizer made the tokens."""
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
    # The tokens before the first BOS and after the last one may be parts of documents.
    documents = np.split(first, np.flatnonzero(first == sp.bos_id()))[1:-1]
    sample = [document[1:].tolist() for document in documents[:SAMPLE]]
    same = sum(sp.encode(sp.decode(document)) == document for document in sample)
    if same < len(sample) / 2:
        counts = f"{same} of {len(sample)} documents"
        raise ValueError(f"{path}: only {counts} re-encode to the same tokens: {WRONG_TOKENIZER}")
    return id_counts, sample


def count_bytes(id_counts: np.ndarray, sp: SentencePieceProcessor) -> int:
    """Return the number of bytes of text in these tokens."""
    total = 0
    for id in range(sp.vocab_size()):
        if sp.is_byte(id):
            total += int(id_counts[id])
        elif not (sp.is_control(id) or sp.is_unknown(id) or sp.is_unused(id)):
            text = sp.id_to_piece(id).replace("\u2581", " ").translate(caseops.WITHOUT_MARKS)
            total += int(id_counts[id]) * len(text.encode())
    return total


class Leaks(NamedTuple):
    """Validation documents that are also in the train shards."""

    documents: int  # all of the validation split
    repeated: int  # those that are also in the train shards
    in_a_row: int  # those in the same row of RUN or more in both: a leak


def hash_documents(paths: Iterable[Path], bos_id: int) -> Iterator[int]:
    """Yield a hash of each document: 64 bits, so no two of FineWeb have the same by chance."""
    rest = b""  # the last document may go on in the next shard
    for path in paths:
        data = rest + path.read_bytes()[HEADER_BYTES:]
        starts = (2 * np.flatnonzero(np.frombuffer(data, "<u2") == bos_id)).tolist()
        yield from (hash(data[start:end]) for start, end in itertools.pairwise(starts))
        rest = data[starts[-1] :] if starts else b""
    yield hash(rest)


def find_leaks(val_paths: Iterable[Path], train_paths: Iterable[Path], bos_id: int) -> Leaks:
    """Compare all documents of two lists of good shards, with one shard in memory at a time."""
    val = [*hash_documents(val_paths, bos_id)]
    known, repeated, in_a_row = {*val}, set(), set()
    # Without those that repeat a document: short ones may follow each other by chance.
    rows = zip(*(val[place:] for place in range(RUN)), strict=False)
    places = {hash(row): place for place, row in enumerate(rows) if len({*row}) == RUN}
    last = collections.deque(maxlen=RUN)
    for document in hash_documents(train_paths, bos_id):
        last.append(document)
        if document in known:
            repeated.add(document)
            place = places.get(hash(tuple(last)))
            if place is not None:
                in_a_row.update(range(place, place + RUN))
    num_repeated = sum(document in repeated for document in val)
    return Leaks(len(val), num_repeated, len(in_a_row))


def check_leaks(folder: Path, bos_id: int) -> list[str]:
    """Print how many validation documents are in the train shards. Returns a line if they leak."""
    val, train = (sorted(folder.glob(f"fineweb_{split}_*.bin")) for split in ("val", "train"))
    docs, repeated, in_a_row = find_leaks(val, train, bos_id)
    print(f"val: {repeated} of {docs} documents ({repeated / docs:.2%}) are also in train shards")
    message = (
        f"{folder}: {in_a_row} of {docs} validation documents are in the train shards in the same "
        "order: the splits were made with different --num-val-docs, and a score on them is worth "
        f"nothing: {GET_AGAIN}, both splits at once"
    )
    return [message] if in_a_row else []


def check_split(
    folder: Path, split: str, sp: SentencePieceProcessor, problems: list[str]
) -> dict[str, int]:
    """Print the counts of a split and return them with the manifest's keys. Adds missing and
    damaged shards to `problems`; raises ValueError if another tokenizer made the tokens."""
    paths = sorted(folder.glob(f"fineweb_{split}_*.bin"))
    expected = {folder / f"fineweb_{split}_{index:06d}.bin" for index in range(len(paths))}
    problems += [f"{path} is missing: {GET_AGAIN}" for path in sorted(expected - {*paths})]
    total = np.zeros(2**16, dtype=np.int64)
    beginnings: list[str] = []
    for path in paths:
        try:
            count_tokens(path)
        except (OSError, ValueError) as error:
            problems.append(f"{error}: {GET_AGAIN}")
            continue
        id_counts, documents = read_shard(path, sp)
        total += id_counts
        texts = [sp.decode(document[:100]) for document in documents[:3]]
        beginnings += map(caseops.decode, texts) if caseops.is_caseops(sp) else texts
    tokens, docs = int(total.sum()), int(total[sp.bos_id()])
    if tokens and not docs:
        raise ValueError(f"{folder}: no {split} token is BOS ({sp.bos_id()}): {WRONG_TOKENIZER}")
    per_token = count_bytes(total, sp) / max(tokens, 1)
    counts = f"shards:{len(paths)} tokens:{tokens} documents:{docs}"
    print(f"{split}: {counts} bytes_per_token:{per_token:.4f}")
    for text in beginnings[:3]:
        print(f"{split}: begins: {' '.join(text.split())[:80]}")
    return {f"files_{split}": len(paths), f"tokens_{split}": tokens, f"docs_{split}": docs}


def compare_with_manifest(path: Path, name: str, found: dict[str, int]) -> list[str]:
    """Return a line for each number that differs; the last train shards may be missing."""
    datasets = {entry["name"]: entry for entry in read_json(path).get("datasets", [])}
    if name not in datasets:
        print(f"{path} does not list {name}: there is nothing to compare with")
        return []
    expected = {**datasets[name], **datasets[name]["stats"]}
    if found["files_train"] < expected.get("files_train", 0):
        print(f"train: {found['files_train']} of {expected['files_train']} shards are here")
        found = {key: value for key, value in found.items() if not key.endswith("_train")}
    return [
        f"{path} says {key}:{expected[key]}, but {value} was found: {GET_AGAIN}"
        for key, value in found.items()
        if expected.get(key, value) != value
    ]


def check(folder: Path, tokenizer: Path, manifest: Path | None) -> list[str]:
    """Print counts and return a line for each problem. Raises ValueError or OSError."""
    if not any(folder.glob("fineweb_*.bin")):
        raise ValueError(f"{folder} has no fineweb_*.bin: give the folder that has the shards")
    place = manifest or folder.parent.parent / MANIFEST
    unfinished = place.with_name(UNFINISHED_MANIFEST)
    if unfinished.exists() and not place.exists():
        raise ValueError(f"{unfinished} exists: the rebuild did not finish: run it again")
    sp = open_model(tokenizer.read_bytes(), str(tokenizer))
    problems: list[str] = []
    found = {"vocab_size": sp.vocab_size()}
    for split in ("val", "train"):
        found |= check_split(folder, split, sp, problems)
    if found["tokens_val"] and found["tokens_train"] and not problems:
        problems += check_leaks(folder, sp.bos_id())
    if not (manifest or place.exists()):
        print(f"{place} is missing: there is nothing to compare with")
        return problems
    return problems or compare_with_manifest(place, folder.name, found)


def main(arguments: list[str] | None = None) -> int:
    """Check the dataset that the arguments name. Returns the exit status."""
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
