"""The files of a dataset: their names, the shard format, and helpers of the data programs.

A shard is 256 little-endian int32 header words (magic, version, token count, zeros), followed by
the tokens as little-endian uint16. This module must not need numpy, which the download lacks.
"""

import argparse
import contextlib
import errno
import hashlib
import json
import math
import os
import signal
import struct
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 4 * 256

# The challenge's repository on the hub. Its folder REMOTE_ROOT has the same layout as data/.
REPO_ID = os.environ.get("MATCHED_FINEWEB_REPO_ID", "willdepueoai/parameter-golf")
REMOTE_ROOT = os.environ.get("MATCHED_FINEWEB_REMOTE_ROOT_PREFIX", "datasets")
DOCS = "docs_selected.jsonl"
SIDECAR = "docs_selected.source_manifest.json"  # next to the documents; optional
DATASET_PREFIX = "fineweb10B_"
MANIFEST = "manifest.json"
UNFINISHED = "unfinished"  # a dataset's folder for shards until all of them are written


def start_program(doc: str | None) -> argparse.ArgumentParser:
    """Let stdout print any text, line by line. Return a parser whose help shows this docstring."""
    with contextlib.suppress(AttributeError):  # a closed stdout
        sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    if sys.stdout is sys.__stdout__:  # not pytest's
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly with a reader such as head
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=layout)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")  # one line
    return parser


def number(
    kind: type, low: float = -math.inf, high: float = math.inf, *, exclusive: bool = False
) -> Callable[[str], float]:
    """Return the `type` of an argument: a finite number of this kind between low and high."""
    noun = "a whole number" if kind is int else "a number"
    signs = (">", "<") if exclusive else (">=", "<=")
    limits = [(sign, x) for sign, x in zip(signs, (low, high), strict=True) if math.isfinite(x)]
    wanted = " and ".join(f"{sign} {x}" for sign, x in limits)

    def convert(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = kind(text)
            is_inside = low < value < high if exclusive else low <= value <= high
            if is_inside and abs(value) != math.inf:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {noun} {wanted}".rstrip())

    return convert


def path(text: str) -> Path:
    """Expand ~, as a shell does where a path begins with it: the `type` of an argument."""
    return Path(os.path.expanduser(text))


def cores() -> int:
    """Return the number of cores that this process may use: taskset, SLURM, containers limit it."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no cgroup 2, or no quota: "max 100000"
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        count = min(count, math.ceil(quota / period))
    return count


def count_tokens(path: Path) -> int:
    """Return the number of tokens in a shard. Raises ValueError if header or size is wrong."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        magic, version, num_tokens = struct.unpack("<3i", file.read(12).ljust(12, b"\0"))
    if (magic, version) != (MAGIC, VERSION):
        raise ValueError(f"{path} is not a shard: {size} bytes, magic {magic}, version {version}")
    if size < HEADER_BYTES or size != HEADER_BYTES + 2 * num_tokens:
        raise ValueError(f"{path}: {size} bytes, but its header says {num_tokens} tokens")
    return num_tokens


def write_shard(path: Path, tokens: Any) -> None:
    """Write the header and the tokens, little-endian uint16 (n,)."""
    header = struct.pack("<3i", MAGIC, VERSION, tokens.size).ljust(HEADER_BYTES, b"\0")
    write_file(path, header, tokens)


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises ValueError with the file's name if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): correct or delete it") from None


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest, with tokenizers and datasets by their names. Raises ValueError."""
    manifest = read_json(path)
    try:
        for kind in ("tokenizers", "datasets"):
            manifest[kind] = {entry["name"]: entry for entry in manifest.get(kind, [])}
        return manifest
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a manifest ({error!r}): delete it") from None


def find_manifest(folder: Path, manifest: Path | None = None) -> tuple[Path, str]:
    """Return the manifest of a dataset (default: two levels above it), and the dataset's name in
    it. If it does not list a link, return those of the link's target. Raises ValueError."""
    folders = (Path(os.path.abspath(folder)), folder.resolve())
    places = [(manifest or path.parent.parent / MANIFEST, path.name) for path in folders]
    there = [place for place in places if place[0].exists()]
    listed = [p for p in there if p[0].is_file() and p[1] in read_manifest(p[0])["datasets"]]
    return [*listed, *reversed(there), *places][0]


def check_outputs(inputs: list[Path | int], outputs: list[Path]) -> None:
    """Raise ValueError if an output is also an input: by another name, a link, or an open file."""
    for output in filter(Path.exists, outputs):
        if any(os.path.samestat(output.stat(), os.stat(source)) for source in inputs):
            raise ValueError(f"{output} is an input, and would be overwritten: copy or rename it")


def hash_file(path: Path, digest: Any = None) -> str:
    """Return a file's hash in hexadecimal: SHA-256, or that of a hashlib object."""
    digest = digest or hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(2**20):
            digest.update(data)
    return digest.hexdigest()


def write_file(path: Path, *parts: Any) -> None:
    """Write the parts (bytes, arrays or open files) to a temporary file and rename it, so that
    `path` is always a complete file, even if several processes write it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        with open(temporary, "wb") as file:
            for part in parts:
                file.writelines(part if isinstance(part, Iterator) else [part])
            file.flush()
            try:
                os.fsync(file.fileno())  # else a power cut could leave an empty file
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
                    raise  # the three mean: no fsync here
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    write_file(path, json.dumps(content, indent=2).encode())
