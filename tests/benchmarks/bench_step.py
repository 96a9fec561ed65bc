"""Time optimizer steps of the trainer against the plain reading of the contract in tests/plain.py.

    PRESET=demo python tests/benchmarks/bench_step.py [--rounds 15]
    torchrun --standalone --nproc_per_node=2 tests/benchmarks/bench_step.py

Takes the trainer's own knobs from the environment. Both start from the same weights and read the
same shards of random tokens; they take turns, so that what else the machine does meets both.
Prints, for each, the median time of a step, tokens per second, the share of the floor (the
arithmetic of a step at the speed of a large matrix product, measured at the start) and the memory
that a step takes beyond what is held before it; then the ratio, which is the result, and the row
for the table in README.md; then what part of the trainer's step the updates and the exchange of
gradients take, each timed alone.
"""

import argparse
import ctypes
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.benchmark import Timer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt
from tests import plain
from tests.conftest import make_state, write_shard
from train_gpt import Hyperparameters, Runtime, TrainingState


def write_random_shards(folder: Path, vocab_size: int, count: int = 4, tokens: int = 1_000_000):
    rng = np.random.default_rng(0)
    for i in range(count):
        write_shard(folder / f"fineweb_train_{i:06d}.bin", rng.integers(vocab_size, size=tokens))


def leave(runtime: Runtime) -> None:
    """End all ranks together, as the script does: not through the interpreter's own exit."""
    if dist.is_initialized():
        dist.barrier()
        os._exit(0)


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


def seconds(action: Callable) -> float:
    """How long action keeps the device busy, on average."""
    threads = torch.get_num_threads()
    return Timer("action()", globals={"action": action}, num_threads=threads).timeit(3).mean


def peak_flops(runtime: Runtime) -> float:
    """Of one device, in a large matrix product in the trainer's dtype. The numbers are random: on
    equal ones a GPU takes less power, and runs faster than it ever does in training."""
    side = 8192 if runtime.device.type == "cuda" else 2048
    square = torch.randn(side, side, device=runtime.device, dtype=runtime.dtype)
    return 2 * side**3 / seconds(lambda: square @ square)


def flops_per_token(hp: Hyperparameters) -> float:
    """Forward and backward: 6 for each weight of a matrix, and causal attention."""
    weights = hp.model_dim**2 * (2 + 2 * hp.num_kv_heads / hp.num_heads + 2 * hp.mlp_mult)
    block = weights + hp.train_seq_len * hp.model_dim
    return 6 * (hp.num_layers * block + hp.vocab_size * hp.model_dim)


def measure(steps: dict, rounds: int, runtime: Runtime) -> dict[str, tuple[float, float]]:
    """Median milliseconds and most bytes of a step of each, taking turns; two rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    peaks = dict.fromkeys(steps, 0)
    synchronize = torch.get_device_module(runtime.device).synchronize
    for i in range(rounds + 2):
        for name, step in steps.items():
            synchronize()
            before = held_bytes(runtime.device, reset=True)
            started = time.perf_counter()
            step()
            synchronize()
            times[name].append(1000 * (time.perf_counter() - started))
            if i >= 2:
                peaks[name] = max(peaks[name], held_bytes(runtime.device, reset=False) - before)
    return {name: (statistics.median(times[name][2:]), peaks[name]) for name in steps}


def parts(state: TrainingState, step_s: float) -> str:
    """Shares of a step of step_s seconds. Changes the weights: call it last."""
    params = list(state.gpt.parameters())
    for param in params:
        param.grad = torch.randn_like(param)
    updates_s = seconds(lambda: [optimizer.step() for optimizer in state.optimizers])
    flat = torch.cat([param.grad.float().flatten() for param in params])
    exchange_s = seconds(lambda: dist.all_reduce(flat)) if dist.is_initialized() else 0.0
    return f"optimizer:{updates_s / step_s:.3f} gradient_exchange:{exchange_s / step_s:.3f}"


def machine_name(runtime: Runtime) -> str:
    """The GPU, or the CPU, and the version of torch: the first cell of the README's table."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    on_gpu = runtime.device.type == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else f"{cpu[1] if cpu else 'a CPU'}"
    return f"{runtime.world_size}x {name}, torch {torch.__version__}"


def chosen_knobs() -> str:
    """The knobs that the environment sets."""
    fields = {name.upper() for name in Hyperparameters.__dataclass_fields__}
    return " ".join(f"{k}={v}" for k, v in os.environ.items() if k in fields) or "the default model"


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="steps of each that are timed")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        data.mkdir()
        knobs = {"DATA_PATH": str(data), "OUTPUT_DIR": folder}
        hp = Hyperparameters.from_env({**os.environ, **knobs})
        write_random_shards(data, hp.vocab_size)
        runtime = train_gpt.open_runtime(hp)
        peak = peak_flops(runtime)
        state = make_state(hp, runtime)
        # Autocast wants the embedding in bf16, whatever the trainer's dtype is.
        plain_gpt = plain_model = plain.PlainGPT.like(train_gpt.GPT(hp), hp).to(runtime.device)
        plain_gpt.load_state_dict(state.gpt.state_dict())
        plain_optimizers = plain.PlainOptimizers(plain_gpt, hp)
        if dist.is_initialized():
            plain_model = DistributedDataParallel(plain_gpt)
        plain_loader = plain.PlainLoader(sorted(data.iterdir()), runtime.device)
        A = hp.batch_slots // runtime.world_size
        steps = {
            "trainer": lambda: train_gpt.train_step(state),
            "plain": lambda: plain.train_step(plain_model, plain_optimizers, plain_loader, hp, A),
        }
        results = measure(steps, rounds, runtime)
        floor = hp.train_batch_tokens * flops_per_token(hp) / peak / runtime.world_size
        for name, (ms, memory) in results.items():
            runtime.log(
                f"{name:8} {ms:9.1f} ms/step {1000 * hp.train_batch_tokens / ms:9.0f} tokens/s "
                f"{1000 * floor / ms:6.1%} of the floor {memory / 2**20:7.0f} MiB for a step"
            )
        trainer_ms, plain_ms = results["trainer"][0], results["plain"][0]
        runtime.log(f"ratio    {plain_ms / trainer_ms:9.2f}x")
        runtime.log(
            f"| {machine_name(runtime)} | {chosen_knobs()} | {commit()} | {trainer_ms:.1f} ms | "
            f"{plain_ms:.1f} ms | {plain_ms / trainer_ms:.2f}x | {1000 * floor / trainer_ms:.1%} |"
        )
        runtime.log(f"parts    {parts(state, trainer_ms / 1000)}")
        leave(runtime)


if __name__ == "__main__":
    main()
