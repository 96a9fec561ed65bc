"""Time how long saving a checkpoint of the default model stops training.

    python tests/benchmarks/bench_checkpoint.py [--saves 5]
    torchrun --standalone --nproc_per_node=2 tests/benchmarks/bench_checkpoint.py

Saving copies everything, gathers what the ranks hold, and writes in the background. Prints for
each save the seconds until training may go on, and until the file is on the disk.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt
from tests.benchmarks.bench_step import leave
from tests.conftest import make_state, write_shard


def write_data(folder: Path) -> None:
    """A shard of each split, and something in the tokenizer's place: only their ends are read."""
    tokens = np.random.default_rng(0).integers(1024, size=1_000_000)
    for split in ("train", "val"):
        write_shard(folder / f"fineweb_{split}_000000.bin", tokens)
    (folder / "tokenizer").write_bytes(b"")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--saves", type=int, default=5)
    saves = parser.parse_args().saves
    with tempfile.TemporaryDirectory() as name:
        write_data(Path(name))
        knobs = {"DATA_PATH": name, "OUTPUT_DIR": name, "TOKENIZER_PATH": f"{name}/tokenizer"}
        knobs |= {"TRAIN_BATCH_TOKENS": "1024", "TRAIN_SEQ_LEN": "128", "VAL_BATCH_SIZE": "1024"}
        hp = train_gpt.Hyperparameters.from_env({**os.environ, **knobs, "COMPILE": "0"})
        runtime = train_gpt.open_runtime(hp, os.environ)
        state = make_state(hp, runtime)
        for _ in range(saves):
            train_gpt.train_step(state)
            state.step += 1
            runtime.gather(None)  # all ranks begin together
            started = time.perf_counter()
            state.save()
            stall = time.perf_counter() - started
            state.wait()
            stalls, written = runtime.gather(stall), time.perf_counter() - started
            figures = f"stall:{max(stalls):.3f} s, on disk: {written:.3f} s"
            runtime.log(f"ranks:{runtime.world_size} {figures}")
        leave(runtime)


if __name__ == "__main__":
    main()
