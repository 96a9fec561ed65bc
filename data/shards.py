"""What all of this folder's tools use: the shard format, whole files, and folders of one's own.

A shard is 256 little-endian int32 header words (magic, version, token count, zeros), then as many
little-endian uint16 tokens, and nothing else."""

import contextlib
import fcntl
import os
import stat
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 4 * 256
MAX_TOKENS = 2**31 - 1  # what a header's int32 can say
MANIFEST = "manifest.json"
UNFINISHED_MANIFEST = "manifest.part"  # in its place while a rebuild is under way
LOCK_NOTE = "lock.part"  # in a locked folder: the id of the process that has it


def header(num_tokens: int) -> bytes:
    """The header of a shard of num_tokens tokens."""
    return struct.pack("<3i", MAGIC, VERSION, num_tokens).ljust(HEADER_BYTES, b"\0")


def require_regular(path: str | Path) -> None:
    """Raises ValueError naming a file that has no end, or never begins: a device or a pipe."""
    kind = os.stat(path).st_mode
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
        raise ValueError(f"{path} is no regular file: put the file itself there")


def count_tokens(path: str | Path) -> int:
    """The number of tokens in a shard. Raises ValueError naming the file if its header or its size
    is wrong."""
    require_regular(path)
    with open(path, "rb") as file:
        start = file.read(HEADER_BYTES)
        size = file.seek(0, os.SEEK_END)
    if len(start) < HEADER_BYTES:
        raise ValueError(f"{path}: {size} bytes are too few for a shard")
    magic, version, num_tokens = struct.unpack_from("<3i", start)
    if (magic, version) != (MAGIC, VERSION):
        raise ValueError(f"{path}: no shard: magic {magic}, version {version}")
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


def take_lock(handle: int, folder: Path) -> None:
    """Lock an open folder. While another process has it, wait, and say for which one."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            holder = f"process {int((folder / LOCK_NOTE).read_text())}"
        except (OSError, ValueError):  # it has not said yet who it is
            holder = "another process"
        print(f"waiting for {holder}, which is at work in {folder}", file=sys.stderr, flush=True)
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError:
        pass  # a file system without locks


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder and have it alone: another process that wants the same waits."""
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / LOCK_NOTE
    handle = os.open(folder, os.O_RDONLY)
    try:
        take_lock(handle, folder)
        with contextlib.suppress(OSError):  # a folder that can only be read
            note.write_text(f"{os.getpid()}\n")
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                note.unlink()
    finally:
        os.close(handle)
