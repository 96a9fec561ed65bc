"""Time the trainer's optimizer step against the plain implementation in tests/helpers/plain.py.

    PRESET=demo python tests/tools/bench_step.py [--rounds 15]
    torchrun --standalone --nproc_per_node=2 tests/tools/bench_step.py

Knobs come from the environment. Both sides get the same weights, random tokens and dtype, and take
turns, so that other load on the machine slows both. The last line, the ratio, is the result."""

import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "data"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
import plain
from files import number, start_program, write_shard

import train_gpt


def measure(steps: dict[str, Callable], rounds: int, device: torch.device) -> dict[str, float]:
    """Return the median milliseconds of each step. They take turns, after two rounds of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    synchronize = torch.get_device_module(device).synchronize
    for _ in range(rounds + 2):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            synchronize()
            times[name].append(1000 * (time.perf_counter() - started))
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def product_rate(runtime: train_gpt.Runtime) -> float:
    """TFLOP/s of a large product of matrices, in the dtype of activations."""
    size = 8192 if runtime.device.type == "cuda" else 128
    a, b = torch.randn(2, size, size, device=runtime.device, dtype=runtime.dtype)
    ms = measure({"product": lambda: a @ b}, 20, runtime.device)["product"]
    return 2e-9 * size**3 / ms


def model_flops(gpt: torch.nn.Module) -> dict[str, int]:
    """FLOPs per token, forward and backward: 6 N in matrix products, 6 L T D in attention. N:
    parameters without an untied embedding. Causal attention looks at T/2 tokens on average."""
    hp, params = gpt.hp, sum(param.numel() for param in gpt.parameters())
    lookup = 0 if hp.tie_embeddings else gpt.tok_emb.weight.numel()
    attention = 6 * hp.num_layers * hp.train_seq_len * hp.model_dim
    return {"matrix products": 6 * (params - lookup), "attention": attention}


# A kernel counts in the first class that has a part of its name.
CLASSES = {
    "attention": "flash|sdpa|fmha|attention|dot_do_o|convert_dq",  # PyTorch's and cuDNN's
    "matrix products": "nvjet|gemm|gemv|cutlass|xmma|cublas|splitk|triton_tem",  # cuBLAS's
    "elementwise": "triton|elementwise|reduce|multi_tensor|norm|softmax|CatArray",
    "the rest": "",
}


def profile_kernels(step: Callable) -> list[tuple[float, int, str]]:
    """Milliseconds, number of calls and name of each kernel that a step launches on the GPU."""
    with torch.profiler.profile(acc_events=True) as profile:
        step()
        torch.cuda.synchronize()
    events = [e for e in profile.key_averages() if not e.is_user_annotation]
    events = [e for e in events if e.device_type.name == "CUDA"]
    return [(event.self_device_time_total / 1000, event.count, event.key) for event in events]


def list_kernels(kernels: list[tuple[float, int, str]], flops_ms: dict[str, float]) -> list[str]:
    """The ten that take most time, then the sum of each class and its share. flops_ms: the time
    that a class's FLOPs take at the rate of a large product."""
    slowest = sorted(kernels, reverse=True)[:10]
    lines = [f"{ms:9.2f} ms {count:5} x `{name[:80]}`" for ms, count, name in slowest]
    sums = dict.fromkeys(CLASSES, 0.0)
    for ms, _, name in kernels:
        sums[next(kind for kind, part in CLASSES.items() if re.search(part, name, re.I))] += ms
    for kind, ms in sums.items():
        best = f"; at a large product's rate {flops_ms[kind]:.2f} ms" if kind in flops_ms else ""
        lines.append(f"{ms:9.2f} ms {100 * ms / sum(sums.values()):5.1f} % {kind}{best}")
    return lines


def plain_steps(state: train_gpt.TrainingState) -> Callable[[], float]:
    """Return a step of the plain implementation that starts with the same weights."""
    hp, runtime = state.hp, state.runtime
    plain_gpt = plain_model = plain.PlainGPT.like(state.gpt, hp).to(runtime.device)
    optimizers = plain.PlainOptimizers(plain_gpt, hp, bf16=runtime.dtype == torch.bfloat16)
    if runtime.compiled:
        plain_model = torch.compile(plain_gpt, dynamic=False)
        plain.newton_schulz = torch.compile(plain.newton_schulz, dynamic=False)
    if dist.is_initialized():
        plain_model = DistributedDataParallel(plain_model)
    slot = hp.train_batch_tokens // hp.batch_slots
    slots = plain.batches(state.loader.stream.paths, runtime.device, slot, hp.train_seq_len)
    A = hp.batch_slots // runtime.world_size
    return lambda: plain.plain_step(plain_model, optimizers, slots, A)


def main() -> int:
    parser = start_program(__doc__)
    parser.add_argument("--rounds", type=number(int, 1), default=15, help="timed steps (15)")
    parser.add_argument("--without-cudnn", action="store_true", help="use FlashAttention on Hopper")
    parser.add_argument("--kernels", action="store_true", help="on a GPU: the slowest, classes")
    parser.add_argument("--alone", action="store_true", help="do not time the plain implementation")
    args = parser.parse_args()
    if args.without_cudnn:
        backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        train_gpt.attention_backends = lambda device, seq_len: backends
    with tempfile.TemporaryDirectory() as folder:
        hp = train_gpt.Hyperparameters.from_env({**os.environ, "DATA_PATH": folder})
        tokens = np.random.default_rng(0).integers(hp.vocab_size, size=4_000_000).astype("<u2")
        write_shard(Path(folder, "fineweb_train_000000.bin"), tokens)
        runtime = train_gpt.open_runtime(hp)
        report = print if runtime.rank == 0 else str
        state = train_gpt.TrainingState(hp, runtime)
        attention = train_gpt.attention_backends(runtime.device, hp.train_seq_len)[0].name
        settings = f"slots:{hp.batch_slots} compile:{runtime.compiled} {attention}"
        report(f"{runtime.device} {runtime.dtype} {settings}")
        if runtime.device.type == "cuda":
            for _ in range(2):  # the first one makes the optimizers' state
                train_gpt.train_step(state)
            mebibytes = torch.cuda.max_memory_allocated() >> 20
            report(f"memory   {mebibytes:9} MiB at the trainer's peak")
        steps = {"trainer": lambda: train_gpt.train_step(state)}
        if not args.alone:
            steps["plain"] = plain_steps(state)
        times = measure(steps, args.rounds, runtime.device)
        flops = {k: n * hp.train_batch_tokens for k, n in model_flops(state.gpt).items()}
        if args.kernels and runtime.device.type == "cuda":
            rate = 1e9 * product_rate(runtime) * runtime.world_size  # FLOPs in a millisecond
            flops_ms = {kind: value / rate for kind, value in flops.items()}
            for line in list_kernels(profile_kernels(steps["trainer"]), flops_ms):
                report(line)
        for name, ms in times.items():
            report(f"{name:8} {ms:9.1f} ms/step {1000 * hp.train_batch_tokens / ms:9.0f} tokens/s")
        rate = sum(flops.values()) / times["trainer"] / 1e9
        report(f"model    {rate:9.2f} TFLOP/s, with 6 N + 6 L T D FLOPs per token")
        if not args.alone:
            report(f"ratio    {times['plain'] / times['trainer']:9.2f}x")
    return 0


if __name__ == "__main__":
    train_gpt.leave(main)
