"""Time the trainer's optimizer step, on random tokens. Knobs come from the environment.

    PRESET=demo python tests/tools/bench_step.py
    torchrun --standalone --nproc_per_node=2 tests/tools/bench_step.py --kernels
    PRESET=demo python tests/tools/bench_step.py --slots 1 2 4 8 16 48

With --slots, steps with these values of BATCH_SLOTS take turns, so that other load on the machine
slows all of them."""

import os
import re
import resource
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from subprocess import PIPE, STDOUT, TimeoutExpired, check_output, run

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # for python -P

import begin  # noqa: F401  (first: it says what to install)
import numpy as np
import torch
from torch.nn.attention import SDPBackend
from trained import files

import train_gpt


def measure(
    steps: dict[str, Callable], seconds: float, runtime: train_gpt.Runtime
) -> dict[str, list[float]]:
    """Return the milliseconds of each step. Two rounds of warm-up, in which the steps take
    turns, precede those that count, which take at least this many seconds in all."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    synchronize = torch.get_device_module(runtime.device).synchronize

    def take_turns() -> None:
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            synchronize()
            times[name].append(1000 * (time.perf_counter() - started))

    for _ in range(2):
        take_turns()
    end = time.perf_counter() + seconds
    take_turns()
    while runtime.from_rank_0(lambda: time.perf_counter() < end):  # all ranks stop together
        take_turns()
    return {name: values[2:] for name, values in times.items()}


def format_times(times: list[float], tokens: int) -> str:
    spread = f"{median(times):.5g} ({min(times):.5g} to {max(times):.5g})"
    return f"{spread} ms/step, {1000 * tokens / median(times):.0f} tokens/s"


def peak_memory(device: torch.device) -> int:
    """MiB that tensors took on the GPU at most; on a CPU, MiB that this process took."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() >> 20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak >> (20 if sys.platform == "darwin" else 10)  # Linux counts KiB


CARD = "clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active"


def ask_nvidia_smi(fields: str, delay: float = 0) -> str:
    """Return nvidia-smi's answer, or why there is none: with a broken driver it hangs."""
    time.sleep(delay)
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        answer = run(command, stdout=PIPE, stderr=STDOUT, timeout=5).stdout
    except OSError as error:
        return f"no nvidia-smi: {error.strerror}"
    except TimeoutExpired:
        return "nvidia-smi did not answer within five seconds"
    return "; ".join(answer.decode(errors="replace").splitlines())


def model_flops(gpt: torch.nn.Module) -> dict[str, int]:
    """FLOPs per token, forward and backward: 6 N in matrix products, 6 L T D in attention. N:
    parameters without an untied embedding. Causal attention looks at T/2 tokens on average."""
    hp, params = gpt.hp, sum(param.numel() for param in gpt.parameters())
    products = params if hp.tie_embeddings else params - gpt.tok_emb.weight.numel()
    attention = 6 * hp.num_layers * hp.train_seq_len * hp.model_dim
    return {"matrix products": 6 * products, "attention": attention}


# A kernel counts in the first class that has a part of its name.
CLASSES = {
    "exchanges between GPUs": "nccl",  # while other kernels run
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


def bench_slots(args: Namespace, hp: train_gpt.Hyperparameters, runtime: train_gpt.Runtime) -> None:
    """Print the time of a step for each number of slots, and its memory in a process of its own."""
    steps, memory = {}, {}
    for slots in args.slots:
        environ = {**os.environ, "DATA_PATH": hp.data_path, "BATCH_SLOTS": str(slots)}
        hp = train_gpt.Hyperparameters.from_env(environ)
        steps[slots] = partial(train_gpt.train_step, train_gpt.TrainingState(hp, runtime))
        command = [sys.executable, __file__, "--seconds", "0"]
        memory[slots] = re.search(r"\d+ MiB", check_output(command, env=environ, text=True))[0]
    for slots, times in measure(steps, args.seconds * len(steps), runtime).items():
        print(f"slots:{slots:<3} {format_times(times, hp.train_batch_tokens)}, {memory[slots]}")


def bench_step(args: Namespace, hp: train_gpt.Hyperparameters, runtime: train_gpt.Runtime) -> None:
    """Print the time of a step and, with --kernels, that of its kernels."""
    report = print if runtime.rank == 0 else str
    state = train_gpt.TrainingState(hp, runtime)
    attention = train_gpt.attention_backends(runtime.device, hp.train_seq_len)[0].name
    settings = f"slots:{hp.batch_slots} compile:{runtime.compiled} {attention}"
    report(f"{runtime.device} {runtime.dtype} {settings}")
    step = partial(train_gpt.train_step, state)
    for _ in range(2):  # the first one makes the optimizers' state
        step()
    report(f"memory   {peak_memory(runtime.device)} MiB at the trainer's peak")
    with ThreadPoolExecutor() as pool:  # an idle card says nothing of a busy one
        card = pool.submit(ask_nvidia_smi, CARD, 0.8 * args.seconds)
        times = measure({"trainer": step}, args.seconds, runtime)["trainer"]
    report(f"card     {card.result()}")
    flops = {k: n * hp.train_batch_tokens for k, n in model_flops(state.gpt).items()}
    if args.kernels and runtime.device.type == "cuda":
        a, b = torch.randn(2, 8192, 8192, device=runtime.device, dtype=runtime.dtype)
        ms = median(measure({"product": lambda: a @ b}, 2, runtime)["product"])
        rate = 2 * 8192**3 / ms * runtime.world_size
        flops_ms = {k: n / rate for k, n in flops.items()}
        for line in list_kernels(profile_kernels(step), flops_ms):
            report(line)
    report(f"trainer  {format_times(times, hp.train_batch_tokens)}")
    rate = sum(flops.values()) / median(times) / 1e9
    report(f"model    {rate:.2f} TFLOP/s, with 6 N + 6 L T D FLOPs per token")


def main() -> int:
    parser = files.start_program(__doc__)
    add, number = parser.add_argument, files.number
    add("--seconds", type=number(float, 0), default=20, help="for each step (20)")
    add("--slots", type=number(int, 1), nargs="+", help="compare BATCH_SLOTS")
    add("--without-cudnn", action="store_true", help="use FlashAttention on Hopper")
    add("--kernels", action="store_true", help="on a GPU: the slowest, classes")
    args = parser.parse_args()
    if args.slots and "RANK" in os.environ:
        parser.error("--slots compares steps of one process: start it without torchrun")
    if args.without_cudnn:
        backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        train_gpt.attention_backends = lambda device, seq_len: backends
    with tempfile.TemporaryDirectory() as folder:
        hp = train_gpt.Hyperparameters.from_env({**os.environ, "DATA_PATH": folder})
        if hp.vocab_size > 2**16:
            problem = f"VOCAB_SIZE={hp.vocab_size} is above 65536, and tokens are uint16"
            raise train_gpt.InputError(f"{problem}: lower it")
        tokens = np.random.default_rng(0).integers(hp.vocab_size, size=4_000_000, dtype="<u2")
        files.write_shard(Path(folder, "fineweb_train_000000.bin"), tokens)
        bench = bench_slots if args.slots else bench_step
        bench(args, hp, train_gpt.open_runtime(hp))
    return 0


if __name__ == "__main__":
    train_gpt.leave(main)
