"""Time the trainer's optimizer step against the plain implementation in tests/helpers/plain.py.

    PRESET=demo python tests/tools/bench_step.py [--rounds 15]
    torchrun --standalone --nproc_per_node=2 tests/tools/bench_step.py

Knobs come from the environment. Both sides get the same weights, random tokens and dtype, and take
turns, so that other load on the machine slows both. The last line, the ratio, is the result."""

import os
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


def model_flops(gpt: torch.nn.Module) -> int:
    """FLOPs per token, forward and backward: 6 N + 6 L T D. N: parameters without an untied
    embedding. Causal attention looks at T/2 tokens on average."""
    hp, params = gpt.hp, sum(param.numel() for param in gpt.parameters())
    lookup = 0 if hp.tie_embeddings else gpt.tok_emb.weight.numel()
    return 6 * (params - lookup) + 6 * hp.num_layers * hp.train_seq_len * hp.model_dim


def list_kernels(step: Callable, device: torch.device) -> list[str]:
    """The ten kernels (on a CPU: operators) that take most time in a step."""
    with torch.profiler.profile(acc_events=True) as profile:
        step()
        torch.get_device_module(device).synchronize()
    name = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
    events = [e for e in profile.key_averages() if not e.is_user_annotation]
    events = [e for e in events if e.device_type.name.lower() == device.type]
    events.sort(key=lambda event: -getattr(event, name))
    return [f"{getattr(e, name) / 1000:9.2f} ms {e.count:5} x `{e.key[:80]}`" for e in events[:10]]


def main() -> int:
    parser = start_program(__doc__)
    parser.add_argument("--rounds", type=number(int, 1), default=15, help="timed steps (15)")
    parser.add_argument("--without-cudnn", action="store_true", help="use FlashAttention on Hopper")
    parser.add_argument("--kernels", action="store_true", help="list the ten that take most time")
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
        steps = {
            "trainer": lambda: train_gpt.train_step(state),
            "plain": lambda: plain.plain_step(plain_model, optimizers, slots, A),
        }
        times = measure(steps, args.rounds, runtime.device)
        for line in list_kernels(steps["trainer"], runtime.device) if args.kernels else ():
            report(line)
        for name, ms in times.items():
            report(f"{name:8} {ms:9.1f} ms/step {1000 * hp.train_batch_tokens / ms:9.0f} tokens/s")
        rate = model_flops(state.gpt) * hp.train_batch_tokens / times["trainer"] / 1e9
        report(f"model    {rate:9.2f} TFLOP/s, with 6 N + 6 L T D FLOPs per token")
        report(f"ratio    {times['plain'] / times['trainer']:9.2f}x")
    return 0


if __name__ == "__main__":
    train_gpt.leave(main)
