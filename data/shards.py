"""The shard format: 256 little-endian int32 header words (magic, version, token count, zeros), then
as many little-endian uint16 tokens, and nothing else. Used by everything in this folder."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 4 * 256


def header(num_tokens: int) -> bytes:
    """The header of a shard of num_tokens tokens."""
    words = np.zeros(256, dtype="<i4")
    words[:3] = MAGIC, VERSION, num_tokens
    return words.tobytes()


def count_tokens(path: str | Path) -> int:
    """The number of tokens in a shard. Raises ValueError naming the file if its header or its size
    is wrong."""
    with open(path, "rb") as file:
        start = file.read(HEADER_BYTES)
        size = file.seek(0, os.SEEK_END)
    if len(start) < HEADER_BYTES:
        raise ValueError(f"{path}: {size} bytes are too few for a shard")
    words = np.frombuffer(start, dtype="<i4")
    if (words[0], words[1]) != (MAGIC, VERSION):
        raise ValueError(f"{path}: no shard: magic {words[0]}, version {words[1]}")
    num_tokens = int(words[2])
    if size != HEADER_BYTES + 2 * num_tokens:
        raise ValueError(f"{path}: {size} bytes, but the header promises {num_tokens} tokens")
    return num_tokens


def write_file(path: Path, *parts: bytes) -> None:
    """Write the parts beside, flush to the disk, rename: path is never half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(beside, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder and have it alone: another process that wants the same waits."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
