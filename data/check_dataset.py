"""Check a dataset: its shards, its token ids, its tokenizer and its manifest.

    python3 data/check_dataset.py FOLDER [--tokenizer MODEL] [--manifest FILE]

FOLDER has the shards, or is the --output-root of one dataset. Its manifest names the tokenizer.
Prints counts, the beginnings of the first documents, and how many validation documents are also in
train shards. Exits with 1 after a line for each problem.
"""

import collections
import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from sentencepiece import SentencePieceProcessor

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for python -P
sys.path.append(str(Path(__file__).resolve().parents[1]))  # for train_gpt

import caseops
import files
from tokenizer_tools import open_model

CHUNK = 2**22  # tokens counted at a time
RUN = 10  # this many documents in a row, in both splits, are a leak
LONG = 50  # tokens; a document that is shorter may repeat by chance
HOLE = 500  # equal tokens, from a multiple of it on: any run of 999 has that many
GET_AGAIN = "download or rebuild the dataset again"
WRONG_TOKENIZER = f"set --tokenizer to the model that made it, or {GET_AGAIN}"


def read_shard(path: Path, sp: SentencePieceProcessor) -> tuple[int, int, list[str]]:
    """Return a shard's numbers of documents and bytes, and its first texts. Raises ValueError."""
    import train_gpt  # not for --help: torch takes seconds

    tokens = np.fromfile(path, "<u2", offset=files.HEADER_BYTES)
    largest = tokens.max(initial=0)
    if largest >= sp.vocab_size():
        raise ValueError(f"{path}: id {largest}, but {sp.vocab_size()} pieces: {WRONG_TOKENIZER}")
    blocks = tokens[: tokens.size // HOLE * HOLE].reshape(-1, HOLE)
    holes = np.flatnonzero((blocks == blocks[:, :1]).all(axis=1)) * HOLE
    if holes.size:
        raise ValueError(f"{path}: {HOLE} equal tokens from {holes[0]} on, not text: {GET_AGAIN}")
    is_bos = tokens == sp.bos_id()
    starts = np.flatnonzero(is_bos[:CHUNK])[:4]
    if starts.size and not train_gpt.retokenizes(sp, tokens[:CHUNK]):
        raise ValueError(f"{path}: encoding its text gives other tokens: {WRONG_TOKENIZER}")
    # Each part but the first begins with the last token of the one before: it is not a target.
    parts = (tokens[max(end - 1, 0) : end + CHUNK] for end in range(0, tokens.size, CHUNK))
    num_bytes = sum(train_gpt.count_bytes(sp, part) for part in parts)
    # The decoder keeps U+2581 where three byte tokens write it: it is a space.
    documents = np.split(tokens[:CHUNK], starts)[1:4]
    texts = [sp.decode(ids[1:100].tolist()).replace("\u2581", " ") for ids in documents]
    return int(is_bos.sum()), num_bytes, texts


def hash_documents(paths: Iterable[Path], bos_id: int) -> Iterator[tuple[int, int]]:
    """Yield a hash and the number of tokens of each document in all shards of a split."""
    # 64 bits are enough: 50,000 documents and 10 million agree by chance once in 37 million checks.
    rest = b""  # the last document of a shard may go on in the next one
    for path in paths:
        data = rest + path.read_bytes()[files.HEADER_BYTES :]
        starts = (2 * np.flatnonzero(np.frombuffer(data, "<u2") == bos_id)).tolist()
        for start, end in itertools.pairwise(starts):
            yield hash(data[start:end]), (end - start) // 2 - 1  # without BOS
        rest = data[starts[-1] :] if starts else b""
    yield hash(rest), len(rest) // 2 - 1


def find_leaks(
    val_paths: Iterable[Path], train_paths: Iterable[Path], bos_id: int
) -> tuple[int, int, int]:
    """Return how many documents good validation shards have, how many of them are also in the train
    shards, and how many make a leak: RUN different ones in a row (or all, if there are fewer), or
    more than a tenth of those of LONG tokens or more. One shard is in memory at a time."""
    val, lengths = zip(*hash_documents(val_paths, bos_id), strict=True)
    known, repeated, leaked = {*val}, set(), set()
    # Rows that repeat a document are left out: short ones may follow each other by chance.
    run = min(RUN, len(val))
    rows = zip(*(val[i:] for i in range(run)), strict=False)
    places = {row: range(i, i + run) for i, row in enumerate(rows) if len({*row}) == run}
    last = collections.deque(maxlen=run)
    for document, _ in hash_documents(train_paths, bos_id):
        last.append(document)
        if document in known:
            repeated.add(document)
            leaked.update(places.get(tuple(last), ()))
    long = [i for i, length in enumerate(lengths) if length >= LONG]
    long_repeated = [i for i in long if val[i] in repeated]
    if 10 * len(long_repeated) > len(long):
        leaked.update(long_repeated)
    return len(val), sum(document in repeated for document in val), len(leaked)


def check_leaks(folder: Path, bos_id: int) -> list[str]:
    """Print how many validation documents are also in train shards. Return a line if they leak."""
    paths = [sorted(folder.glob(f"fineweb_{split}_*.bin")) for split in ("val", "train")]
    docs, repeated, leaked = find_leaks(*paths, bos_id)
    print(f"val: {repeated} of {docs} documents ({repeated / docs:.2%}) are also in train shards")
    if leaked:
        problem = f"{folder}: {leaked} of {docs} validation documents are in the train shards"
        advice = f"remove duplicates from the text, or {GET_AGAIN}, with one --num-val-docs"
        return [f"{problem}, so a score on them is worth nothing: {advice}"]
    if 10 * repeated > docs:
        print(f"WARNING: many documents of under {LONG} tokens repeat, which lowers the score")
    return []


def check_split(
    folder: Path, split: str, sp: SentencePieceProcessor, problems: list[str]
) -> dict[str, int]:
    """Print the counts of a split and return them with the manifest's keys. Adds missing and
    damaged shards to `problems`; raises ValueError if another tokenizer made the tokens."""
    paths = sorted(folder.glob(f"fineweb_{split}_*.bin"))
    expected = {folder / f"fineweb_{split}_{index:06d}.bin" for index in range(len(paths) or 1)}
    problems += [f"{path} is missing: {GET_AGAIN}" for path in sorted(expected - {*paths})]
    tokens = docs = num_bytes = 0
    beginnings: list[str] = []
    for path in paths:
        try:
            tokens += files.count_tokens(path)
        except (OSError, ValueError) as error:
            problems.append(f"{error}: {GET_AGAIN}")
            continue
        shard_docs, shard_bytes, texts = read_shard(path, sp)
        docs, num_bytes = docs + shard_docs, num_bytes + shard_bytes
        beginnings += map(caseops.decode, texts) if caseops.is_caseops(sp) else texts
    if tokens and not docs:
        raise ValueError(f"{folder}: no {split} token is BOS ({sp.bos_id()}): {WRONG_TOKENIZER}")
    if tokens and not num_bytes:
        raise ValueError(f"{folder}: the {split} documents have no text: remove empty documents")
    counts = f"shards:{len(paths)} tokens:{tokens} documents:{docs}"
    print(f"{split}: {counts} bytes_per_token:{num_bytes / max(tokens, 1):.4f}")
    for text in beginnings[:3]:
        print(f"{split}: begins: {' '.join(text.split())[:80]}")
    return {f"files_{split}": len(paths), f"tokens_{split}": tokens, f"docs_{split}": docs}


def compare(path: Path, listed: dict, found: dict[str, int]) -> list[str]:
    """Return a line for each number that differs; the last train shards may be missing."""
    expected = {**listed, **listed.get("stats", {})}
    if found["files_train"] < expected.get("files_train", 0):
        print(f"train: {found['files_train']} of {expected['files_train']} shards are here")
        found = {key: value for key, value in found.items() if not key.endswith("_train")}
    return [
        f"{path} says {key}:{expected[key]}, but {value} was found: {GET_AGAIN}"
        for key, value in found.items()
        if expected.get(key, value) != value
    ]


def find_shards(folder: Path) -> Path:
    """Return a folder, or the one in its subfolder datasets. Raises ValueError if unfinished."""
    inside = sorted(path for path in folder.glob("datasets/*") if path.is_dir())
    folder = inside[0] if len(inside) == 1 else folder
    if (unfinished := folder / files.UNFINISHED).exists():
        raise ValueError(f"{unfinished} exists: its command still runs, or must run again")
    if not any(folder.glob("fineweb_*.bin")):
        problem = "has no fineweb_*.bin" if folder.is_dir() else "is not a folder"
        wanted = " or ".join(map(str, inside)) or "the folder that has the shards"
        raise ValueError(f"{folder} {problem}: give {wanted}")
    return folder


def check(folder: Path, tokenizer: Path | None, manifest: Path | None) -> list[str]:
    """Print counts and return a line for each problem. Raises ValueError or OSError."""
    folder = find_shards(folder)
    place, name = files.find_manifest(folder, manifest)
    listed = files.read_manifest(place) if manifest or place.exists() else {}
    dataset = listed.get("datasets", {}).get(name, {})
    if tokenizer is None:
        entry = listed.get("tokenizers", {}).get(dataset.get("tokenizer_name"), {})
        if "model_path" not in entry:
            raise ValueError(f"no {place} lists the tokenizer of {name}: set --tokenizer")
        tokenizer = place.parent / entry["model_path"]
    sp = open_model(tokenizer.read_bytes(), str(tokenizer))
    problems: list[str] = []
    found = {"vocab_size": sp.vocab_size()}
    for split in ("val", "train"):
        found |= check_split(folder, split, sp, problems)
    if found["tokens_val"] and found["tokens_train"] and not problems:
        problems += check_leaks(folder, sp.bos_id())
    if not dataset:
        print(f"no {place} lists {name}: there is nothing to compare with")
    return problems or compare(place, dataset, found)


def main(arguments: list[str] | None = None) -> int:
    """Check the dataset that the arguments name. Returns the exit status."""
    parser = files.start_program(__doc__)
    parser.add_argument("folder", type=files.path, help="of fineweb_{train,val}_*.bin")
    parser.add_argument("--tokenizer", type=files.path, help="its .model (default: the manifest's)")
    parser.add_argument("--manifest", type=files.path, help="default: two levels above the shards")
    args = parser.parse_args(arguments)
    try:
        problems = check(Path(os.path.abspath(args.folder)), args.tokenizer, args.manifest)
    except (OSError, ValueError) as error:
        problems = [str(error)]
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
