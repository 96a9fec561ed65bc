"""Seconds from the start of the script to its first training step: imports, data, model.

    python tests/benchmarks/bench_start.py
    PRESET=demo python tests/benchmarks/bench_start.py

The script runs as a process of its own on random shards, without warm-up, validation before
training, and compilation. Prints the median and the slowest of --rounds."""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.benchmarks.bench_step import write_random_shards
from tests.conftest import SCRIPT, train_tokenizer


def seconds_to_first_step(environ: dict[str, str]) -> float:
    """From starting the process to its first step's line, without the time of that step."""
    started = time.perf_counter()
    command = [sys.executable, str(SCRIPT)]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if match := re.match(r"step:1/.* train_time:(\d+)ms", line):
                elapsed = time.perf_counter() - started
                process.kill()
                return elapsed - int(match[1]) / 1000
    raise SystemExit("the script ended before its first step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="starts")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_random_shards(folder, 1024)
        shutil.copy(folder / "fineweb_train_000000.bin", folder / "fineweb_val_000000.bin")
        tokenizer = folder / "random.model"
        tokenizer.write_bytes(train_tokenizer(vocab_size=1024))
        environ = {
            **os.environ,
            "DATA_PATH": name,
            "TOKENIZER_PATH": str(tokenizer),
            "OUTPUT_DIR": name,
            "WARMUP_STEPS": "0",
            "VAL_LOSS_EVERY": "0",
            "COMPILE": "0",
            "TRAIN_BATCH_TOKENS": os.environ.get("TRAIN_BATCH_TOKENS", "8192"),
        }
        times = [seconds_to_first_step(environ) for _ in range(rounds)]
    print(
        f"start to first step: median {statistics.median(times):.2f} s, slowest {max(times):.2f} s"
    )


if __name__ == "__main__":
    main()
