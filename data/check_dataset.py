"""Check a dataset: its shards, its ids, its manifest, and that the tokenizer is the one it is from.

    python3 data/check_dataset.py DATASET_DIR --tokenizer MODEL [--no-hash] [--manifest FILE]

Reads every shard once, a piece at a time, and prints what it found. Exits with status 1 if
something is off, with a line for each problem on stderr.
"""

import argparse
import hashlib
import json
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from shards import HEADER_BYTES, MANIFEST, UNFINISHED_MANIFEST, count_tokens, require_regular

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from train_gpt import Hyperparameters, TokenBytes, load_tokenizer

CHUNK = 2**18  # tokens in hand at a time: what is computed from them stays in the cache
WINDOW, WINDOWS = 128, 8  # tokens in a sample of a chunk, samples of a chunk
# Share of the sampled pairs of neighbouring tokens that decoding and encoding must give back.
# Measured: 0.98 and more with the right tokenizer, whatever the language (samples cut words and
# characters at their ends); 0.93 and less with another tokenizer or random tokens.
LEAST_REENCODED = 0.95
# A document's hash is the sum of VALUES[token] * FACTOR**place modulo 2**64.
FACTOR = 0x9E3779B97F4A7C15  # odd, so that it has an inverse
VALUES = np.random.default_rng(0).integers(2**64, size=2**16, dtype=np.uint64)


def powers(base: int) -> np.ndarray:
    """base**0, base**1, ... modulo 2**64, uint64 (CHUNK,)."""
    factors = np.full(CHUNK, base, dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


POWERS, INVERSE_POWERS = powers(FACTOR), powers(pow(FACTOR, -1, 2**64))


class DocumentHashes:
    """64-bit hashes of the documents in a stream of tokens that comes in pieces."""

    def __init__(self, bos_id: int) -> None:
        self.bos_id = bos_id
        self.hash = self.length = 0  # of the document that the stream is in

    def add(self, chunk: np.ndarray) -> np.ndarray:
        """The hashes, uint64 (n,), of the documents that the next 1 to CHUNK tokens show to have
        ended. A BOS without text is no document."""
        starts = np.union1d(0, np.flatnonzero(chunk == self.bos_id))
        sums = np.add.reduceat(VALUES[chunk] * POWERS[: chunk.size], starts)
        hashes = [np.uint64(self.hash), *sums * INVERSE_POWERS[starts]]
        lengths = [self.length, *np.diff(starts, append=chunk.size)]
        if chunk[0] != self.bos_id:  # the first part goes on with the open document
            scale = pow(FACTOR, self.length, 2**64)
            hashes[1] = np.uint64((self.hash + int(hashes[1]) * scale) % 2**64)
            lengths[1] += lengths[0]
            del hashes[0], lengths[0]
        self.hash, self.length = int(hashes[-1]), int(lengths[-1])
        return np.array(hashes[:-1], dtype=np.uint64)[np.array(lengths[:-1]) > 1]

    def finish(self) -> np.ndarray:
        """The hash of the last document, uint64 (1,), or (0,) if there is none."""
        return np.array([self.hash] if self.length > 1 else [], dtype=np.uint64)


@dataclass
class Split:
    """What is known of the train or the validation shards so far."""

    name: str  # train or val
    paths: list[Path]
    bos_id: int
    tokens: int = 0
    documents: int = 0
    min_id: int = 2**16
    max_id: int = -1
    num_bytes: int = 0  # of the text of tokens[1:]; validation only
    last: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.uint16))
    opening: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.uint16))
    stream: DocumentHashes = field(init=False)
    hashes: list[np.ndarray] = field(default_factory=list)  # validation only
    known: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    shared: int = 0  # documents whose hash is among the known ones, which are sorted
    sha256: dict[str, str] = field(default_factory=dict)  # by file name

    def __post_init__(self) -> None:
        self.stream = DocumentHashes(self.bos_id)

    def add(self, chunk: np.ndarray, token_bytes: TokenBytes) -> None:
        """Take in the next tokens."""
        if not self.tokens:
            self.opening = chunk
        self.tokens += chunk.size
        self.documents += int(np.count_nonzero(chunk == self.bos_id))
        self.min_id = min(self.min_id, int(chunk.min()))
        self.max_id = max(self.max_id, int(chunk.max()))
        if self.name == "val":
            self.num_bytes += token_bytes.count(np.concatenate((self.last, chunk)))
            self.last = chunk[-1:]
        self.add_documents(self.stream.add(chunk))

    def add_documents(self, hashes: np.ndarray) -> None:
        """Keep the documents of the validation split, look up those of the train split."""
        if self.name == "val":
            self.hashes.append(hashes)
        elif self.known.size:
            places = np.minimum(np.searchsorted(self.known, hashes), self.known.size - 1)
            self.shared += int(np.count_nonzero(self.known[places] == hashes))


def open_tokenizer(path: str) -> tuple[Any, TokenBytes]:
    """The SentencePiece model and the metric's own count of its bytes. Raises ValueError naming the
    file if it cannot be read, is no such model or has none for a lone space."""
    sp = sentencepiece.SentencePieceProcessor()
    try:
        require_regular(path)
        sp.LoadFromSerializedProto(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: name another --tokenizer") from None
    except RuntimeError:
        raise ValueError(f"{path}: no SentencePiece .model: name another --tokenizer") from None
    return sp, load_tokenizer(Hyperparameters(tokenizer_path=path, vocab_size=sp.vocab_size()))


def check_ids(chunk: np.ndarray, sp: Any, path: Path, position: int) -> None:
    """Raise ValueError naming shard, position and id if a token of the part of the shard that
    begins at `position` cannot be right."""
    size, pad = sp.vocab_size(), sp.pad_id()
    if chunk.max() >= size:
        first = int(np.argmax(chunk >= size))
        raise ValueError(
            f"{path}: token id {chunk[first]} at position {position + first} is outside the "
            f"tokenizer's {size} pieces: name the right --tokenizer, or get the file again"
        )
    if chunk.min() <= pad and (chunk == pad).any():
        first = int(np.argmax(chunk == pad))
        raise ValueError(
            f"{path}: token id {pad} at position {position + first} is padding, which no document "
            "holds: get the file again"
        )


def reencode(chunk: np.ndarray, sp: Any) -> tuple[int, int]:
    """How many pairs of neighbouring tokens in samples of the chunk decoding and encoding gives
    back, and how many there are."""
    texts, bos_id = [], sp.bos_id()
    for part in np.array_split(chunk, max(1, min(WINDOWS, chunk.size // WINDOW))):
        texts += np.split(part[:WINDOW], np.flatnonzero(part[:WINDOW] == bos_id))
    ids = [text[text != bos_id].tolist() for text in texts]
    again = sp.encode(sp.decode(ids), num_threads=1)
    same = sum(
        (Counter(pairwise(before)) & Counter(pairwise(after))).total()
        for before, after in zip(ids, again, strict=True)
    )
    return same, sum(max(len(text) - 1, 0) for text in ids)


def read_shard(path: Path, split: Split, tokenizer: tuple[Any, TokenBytes], hashing: bool) -> None:
    """Take a shard into its split. Raises ValueError naming the file if it is damaged or is not
    the tokenizer's, OSError if it cannot be read."""
    sp, token_bytes = tokenizer
    count_tokens(path)
    digest = hashlib.sha256()
    position = same = pairs = 0
    with open(path, "rb") as file:
        digest.update(file.read(HEADER_BYTES))
        while (chunk := np.fromfile(file, "<u2", CHUNK)).size:
            check_ids(chunk, sp, path, position)
            split.add(chunk, token_bytes)
            if hashing:
                digest.update(chunk)
            counts = reencode(chunk, sp)
            same, pairs, position = same + counts[0], pairs + counts[1], position + chunk.size
    if hashing:
        split.sha256[path.name] = digest.hexdigest()
    if position > WINDOW and same <= LEAST_REENCODED * pairs:
        raise ValueError(
            f"{path}: the tokens decode to noise (decoding and encoding gives back {same} of "
            f"{pairs} sampled pairs): name the right --tokenizer, or get the file again"
        )


def show_progress(text: str) -> None:
    """Put the text in place of the last one, on stderr if that is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def missing_shards(split: Split, may_be_empty: bool) -> list[str]:
    """A line if there are gaps in the shards' numbers."""
    numbers = [re.fullmatch(r"fineweb_[a-z]+_(\d{6})\.bin", path.name) for path in split.paths]
    if not all(numbers):  # one is named in a way of its own
        return []
    present = {int(number[1]) for number in numbers}
    gaps = sorted(set(range(max(present, default=0) + 1)) - present)
    if not gaps or (may_be_empty and not present):
        return []
    first = f"fineweb_{split.name}_{gaps[0]:06d}.bin"
    return [f"{first} is missing ({len(gaps)} in all): get the files"]


def check_split(split: Split, tokenizer: tuple[Any, TokenBytes], hashing: bool) -> list[str]:
    """Read all shards of a split. Returns a line for each problem."""
    problems = []
    for path in split.paths:
        show_progress(f"reading {path.name}")
        try:
            read_shard(path, split, tokenizer, hashing)
        except ValueError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror}")
    show_progress("")
    split.add_documents(split.stream.finish())
    if split.paths and not split.documents:
        problems.append(
            f"the {split.name} shards hold no document: no token is BOS (id {split.bos_id})"
        )
    return problems


def read_manifest(path: Path, name: str) -> dict[str, int]:
    """The numbers that the manifest has for the dataset `name`, its stats among them; none if
    it does not list the dataset. Raises ValueError naming the file if it is no manifest."""
    try:
        require_regular(path)
        entries = json.loads(path.read_text(encoding="utf-8"))["datasets"]
        entry = next((entry for entry in entries if entry["name"] == name), None)
        facts = {**entry, **(entry.get("stats") or {})} if entry else {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: no manifest of datasets ({error!r}): get it again") from None
    return {key: value for key, value in facts.items() if type(value) is int}


def manifest_problems(facts: dict[str, int], splits: list[Split], vocab_size: int) -> list[str]:
    """A line for each number of the manifest that differs from what was found. Of the train shards
    the first few may be there alone."""
    found = {"vocab_size": vocab_size}
    for split in splits:
        counts = {"files": len(split.paths), "tokens": split.tokens, "docs": split.documents}
        for what, count in counts.items():
            found |= {f"{what}_{split.name}": count, f"{split.name}_{what}": count}
    in_part = any(found[key] < facts.get(key, 0) for key in ("files_train", "train_files"))
    return [
        f"the manifest says {key}={facts[key]}, but here it is {count}: get the files again"
        for key, count in found.items()
        if facts.get(key, count) != count
        and not (in_part and "train" in key and count < facts[key])
    ]


def unfinished_problems(folder: Path, manifest: Path) -> list[str]:
    """A line for each trace of an export or a download that is under way or was killed: both have
    a .part beside the shards until the last shard is whole, and a rebuild has one in place of the
    manifest until its last dataset is."""
    problems = [
        f"{part} is there: an export or a download is under way or did not come to its end, and "
        "shards or parts of them are missing: run the same command again"
        for part in sorted(folder.glob("*.part"))
    ]
    unfinished = manifest.with_name(UNFINISHED_MANIFEST)
    if unfinished.exists() and not manifest.exists():
        problems.append(
            f"{manifest} is missing, {unfinished} is there: the rebuild that writes it is under "
            "way or did not come to its end: run the same command again"
        )
    return problems


def first_lines(tokens: np.ndarray, sp: Any) -> list[str]:
    """How the first three documents begin; what cannot be printed is U+FFFD."""
    starts = np.flatnonzero(tokens == sp.bos_id())[:3]
    documents = [document[1:400] for document in np.split(tokens, starts)[1:]]
    texts = sp.decode([document[document != sp.bos_id()].tolist() for document in documents])
    lines = [" ".join(text.split())[:80] for text in texts]
    return ["".join(c if c.isprintable() else "\ufffd" for c in line) for line in lines]


def report(splits: list[Split], sp: Any) -> list[str]:
    """What was found, in lines."""
    lines = []
    for split in splits:
        lines.append(
            f"{split.name}: shards:{len(split.paths)} tokens:{split.tokens} "
            f"documents:{split.documents} min_id:{split.min_id} max_id:{split.max_id}"
        )
        if split.name == "val":
            per_token = split.num_bytes / max(split.tokens - 1, 1)
            lines.append(f"val: bytes:{split.num_bytes} bytes_per_token:{per_token:.4f}")
        lines += [f"{split.name}: sha256:{sum} {name}" for name, sum in split.sha256.items()]
        lines += [f"{split.name}: begins: {line}" for line in first_lines(split.opening, sp)]
    return [*lines, f"train documents that are in val, too: {splits[1].shared}"]


def check_splits(
    folder: Path, tokenizer: tuple[Any, TokenBytes], facts: dict[str, int], hashing: bool
) -> tuple[list[Split], list[str]]:
    """Read validation, then train. Returns what was found, and a line for each problem."""
    sp, problems = tokenizer[0], []
    val, train = (
        Split(name, sorted(folder.glob(f"fineweb_{name}_*.bin")), sp.bos_id())
        for name in ("val", "train")
    )
    problems += missing_shards(val, facts.get("files_val") == 0)
    problems += check_split(val, tokenizer, hashing)
    train.known = np.unique(np.concatenate(val.hashes))
    problems += missing_shards(train, facts.get("files_train") == 0)
    problems += check_split(train, tokenizer, hashing)
    problems += manifest_problems(facts, [val, train], sp.vocab_size())
    return [val, train], problems


def main(argv: list[str] | None = None) -> int:
    """Check, report, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset", help="folder of fineweb_{train,val}_*.bin")
    parser.add_argument("--tokenizer", required=True, help="SentencePiece .model file")
    parser.add_argument("--no-hash", action="store_true", help="leave out the sha256 sums")
    parser.add_argument("--manifest", type=Path, help="default: DATASET_DIR/../../manifest.json")
    args = parser.parse_args(argv)
    sys.stdout.reconfigure(errors="backslashreplace")
    folder = Path(os.path.abspath(args.dataset))
    manifest = args.manifest or folder.parent.parent / MANIFEST
    problems = unfinished_problems(folder, manifest)
    try:
        if not any(folder.glob("fineweb_*.bin")):
            raise ValueError(
                f"{folder} has no fineweb_*.bin: name the folder of the shards, or download them: "
                "python3 data/cached_challenge_fineweb.py --variant sp1024"
            )
        tokenizer = open_tokenizer(args.tokenizer)
        facts = read_manifest(manifest, folder.name) if args.manifest or manifest.exists() else {}
    except ValueError as error:
        print(*problems, error, sep="\n", file=sys.stderr)
        return 1
    if args.manifest and not facts:
        problems.append(f"{manifest} says nothing about {folder.name}: name another --manifest")
    splits, found = check_splits(folder, tokenizer, facts, not args.no_hash)
    problems += found
    print("\n".join(report(splits, tokenizer[0])), flush=True)
    if not facts:
        print(f"manifest: {manifest} has nothing about {folder.name} to compare with", flush=True)
    if splits[1].shared:
        print("warning: train and validation share documents", file=sys.stderr)
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
