"""Time optimizer steps of the trainer against the plain reading of the contract in plain.py.

    PRESET=demo python tests/benchmarks/bench_step.py [--rounds 15]
    torchrun --standalone --nproc_per_node=2 tests/benchmarks/bench_step.py

Takes the trainer's own knobs from the environment. Both start from the same weights and read the
same shards of random tokens; they take turns, so that what else the machine does meets both.
Prints, for each, the median time of a step, tokens per second, the share of the floor (the
arithmetic of a step at the speed of a large matrix product, measured at the start) and the memory
that a step takes beyond what is held before it; then the ratio, which is the result, and the
trainer's own line of figures (waiting for data, optimizer, gradient exchange).
"""

import argparse
import ctypes
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt
from tests import plain
from tests.conftest import write_shard


def write_random_shards(folder: Path, vocab_size: int, count: int = 4, tokens: int = 1_000_000):
    rng = np.random.default_rng(0)
    for i in range(count):
        write_shard(folder / f"fineweb_train_{i:06d}.bin", rng.integers(vocab_size, size=tokens))


def held_bytes(device: torch.device, reset: bool) -> int:
    """What the process holds now and, from then on, the most that it has held since."""
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        return torch.cuda.max_memory_allocated()
    if reset:
        ctypes.CDLL(None).malloc_trim(0)  # else what earlier steps freed counts as held
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak begins here
    field = "VmRSS" if reset else "VmHWM"
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def peak_flops(runtime: train_gpt.Runtime) -> float:
    """Of one device, in a large matrix product in the trainer's dtype."""
    side = 8192 if runtime.device.type == "cuda" else 2048
    square = torch.ones(side, side, device=runtime.device, dtype=runtime.dtype)
    return 2 * side**3 / train_gpt.seconds(lambda: square @ square)


def measure(steps: dict, rounds: int, runtime: train_gpt.Runtime) -> dict[str, tuple[float, float]]:
    """Median milliseconds and most bytes of a step of each, taking turns; two rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    peaks = dict.fromkeys(steps, 0)
    for i in range(rounds + 2):
        for name, step in steps.items():
            runtime.synchronize()
            before = held_bytes(runtime.device, reset=True)
            started = time.perf_counter()
            step()
            runtime.synchronize()
            times[name].append(1000 * (time.perf_counter() - started))
            if i >= 2:
                peaks[name] = max(peaks[name], held_bytes(runtime.device, reset=False) - before)
    return {name: (statistics.median(times[name][2:]), peaks[name]) for name in steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="steps of each that are timed")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        hp = train_gpt.Hyperparameters.from_env({**os.environ, "DATA_PATH": folder})
        write_random_shards(Path(folder), hp.vocab_size)
        runtime = train_gpt.open_runtime(hp, os.environ)
        say = print if runtime.rank == 0 else str
        peak = peak_flops(runtime)
        torch.manual_seed(hp.seed)
        gpt = train_gpt.GPT(hp, runtime.dtype).to(runtime.device)
        train_gpt.choose_attention(gpt, hp, runtime)
        plain_gpt = plain_model = plain.PlainGPT.like(train_gpt.GPT(hp), hp).to(runtime.device)
        plain_optimizers = plain.PlainOptimizers(plain_gpt, hp)
        if runtime.distributed:
            plain_model = DistributedDataParallel(plain_gpt)
        model, chain = train_gpt.compile_and_wrap(gpt, hp, runtime, say)
        optimizers = train_gpt.build_optimizers(gpt, hp, runtime.dtype, chain)
        loader, stopwatch = train_gpt.build_loader(hp, runtime), train_gpt.Stopwatch(runtime)
        plain_loader = plain.PlainLoader(sorted(Path(folder).iterdir()), runtime.device)
        A = hp.batch_slots // runtime.world_size
        steps = {
            "trainer": lambda: train_gpt.train_step(model, loader, optimizers, hp, runtime),
            "plain": lambda: plain.train_step(plain_model, plain_optimizers, plain_loader, hp, A),
        }
        results = measure(steps, rounds, runtime)
        floor = hp.train_batch_tokens * train_gpt.flops_per_token(hp) / peak / runtime.world_size
        for name, (ms, memory) in results.items():
            say(
                f"{name:8} {ms:9.1f} ms/step {1000 * hp.train_batch_tokens / ms:9.0f} tokens/s "
                f"{1000 * floor / ms:6.1%} of the floor {memory / 2**20:7.0f} MiB for a step"
            )
        say(f"ratio    {results['plain'][0] / results['trainer'][0]:9.2f}x")
        where = hp, runtime, say, gpt, model, optimizers, loader, stopwatch
        stopwatch.before_ms = (rounds + 2) * results["trainer"][0]
        train_gpt.log_figures(train_gpt.TrainingState(*where, step=rounds + 2))
    train_gpt.leave(0, runtime)


if __name__ == "__main__":
    main()
