"""Time the loader alone: opening many shards, tokens per second, the stall where a shard ends.

    python tests/benchmarks/bench_loader.py [--shards 80] [--tokens 100000000]

The shards are sparse files, zeros that take no room on the disk; small ones at the end, so that the
stream crosses from one to the next again and again. Memory is this process's own ("anonymous"):
mapped pages of the shards belong to the page cache.
"""

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt
from tests.conftest import write_shard

GLOBAL_TOKENS, SEQ_LEN = 524_288, 1024  # the defaults: 65,536 tokens in each of 8 slots


def write_sparse_shard(path: Path, tokens: int) -> None:
    write_shard(path, [], count=tokens)
    os.truncate(path, 1024 + 2 * tokens)


def own_mib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) // 1024


def batches(pattern: str, count: int, device: str) -> tuple[list[float], list[bool]]:
    """Milliseconds of each next_batch, and whether it crossed into another shard."""
    loader = train_gpt.DistributedTokenLoader(pattern, 0, 1, device, 1024)
    loader.next_batch(GLOBAL_TOKENS, SEQ_LEN, 8)
    times, crossed = [], []
    for _ in range(count):
        shard = loader.stream.shard
        started = time.perf_counter()
        loader.next_batch(GLOBAL_TOKENS, SEQ_LEN, 8)
        times.append(1000 * (time.perf_counter() - started))
        crossed.append(loader.stream.shard != shard)
    return times, crossed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=100_000_000, help="in each shard")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.shards):
            write_sparse_shard(Path(folder) / f"fineweb_train_{i:06d}.bin", args.tokens)
        pattern = f"{folder}/fineweb_train_*.bin"
        started = time.perf_counter()
        train_gpt.DistributedTokenLoader(pattern, 0, 1, device)
        print(f"opening {args.shards} shards: {time.perf_counter() - started:.3f} s")
        before = own_mib()
        times, _ = batches(pattern, 1000, device)
        print(f"tokens/s: {1000 * GLOBAL_TOKENS / 8 / statistics.mean(times):.0f}")
        print(f"own memory: {before} MiB before, {own_mib()} MiB after 66 M tokens")
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.shards):
            write_sparse_shard(Path(folder) / f"fineweb_train_{i:06d}.bin", 500_000)
        times, crossed = batches(f"{folder}/fineweb_train_*.bin", 500, device)
    at_changes = [t for t, c in zip(times, crossed, strict=True) if c]
    others = [t for t, c in zip(times, crossed, strict=True) if not c]
    stall = statistics.median(at_changes) - statistics.median(others)
    print(
        f"a batch: {statistics.median(others):.2f} ms; across a shard's end: "
        f"{statistics.median(at_changes):.2f} ms (most: {max(at_changes):.2f}), {stall:+.2f} ms"
    )


if __name__ == "__main__":
    main()
