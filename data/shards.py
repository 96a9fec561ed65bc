"""What this folder's tools share: where files are, the shard format, reading and writing files.

A shard is 256 little-endian int32 header words (magic, version, token count, zeros), then as many
little-endian uint16 tokens, and nothing else. The download uses this file without numpy.
"""

import json
import os
import struct
from pathlib import Path
from typing import Any

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 4 * 256

# The challenge's repository on the hub, and the folder in it that is laid out as this one here.
REPO_ID = os.environ.get("MATCHED_FINEWEB_REPO_ID", "willdepueoai/parameter-golf")
REMOTE_ROOT = os.environ.get("MATCHED_FINEWEB_REMOTE_ROOT_PREFIX", "datasets")
DOCS = "docs_selected.jsonl"
SIDECAR = "docs_selected.source_manifest.json"  # beside the documents; may be absent
DATASET_PREFIX = "fineweb10B_"
MANIFEST = "manifest.json"
UNFINISHED_MANIFEST = "manifest.part"  # lies in its place while a rebuild is under way


def count_tokens(path: Path) -> int:
    """The number of tokens in a shard. Raises ValueError if its header or its size is wrong."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(HEADER_BYTES)
    if len(start) < HEADER_BYTES:
        raise ValueError(f"{path}: {size} bytes are too few for a shard")
    magic, version, num_tokens = struct.unpack_from("<3i", start)
    if (magic, version) != (MAGIC, VERSION):
        raise ValueError(f"{path} is not a shard: magic {magic}, version {version}")
    if size != HEADER_BYTES + 2 * num_tokens:
        raise ValueError(f"{path}: {size} bytes, but the header promises {num_tokens} tokens")
    return num_tokens


def write_shard(path: Path, tokens: Any) -> None:
    """tokens: little-endian uint16 (n,)."""
    header = struct.pack("<3i", MAGIC, VERSION, tokens.size).ljust(HEADER_BYTES, b"\0")
    write_file(path, header, tokens)


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises ValueError naming the file if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from None


def write_file(path: Path, *parts: Any) -> None:
    """Write the parts (bytes or arrays) to a temporary file, then rename it: path is never half a
    file, also if several processes write it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as file:
            for part in parts:
                file.write(part)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    write_file(path, json.dumps(content, indent=2).encode())
