"""Count the parts of a training process's memory or, under torchrun, the bytes that ranks exchange.

    PRESET=demo OMP_NUM_THREADS=1 python tests/figures/measure_step.py
    PRESET=demo torchrun --standalone --nproc_per_node=2 tests/figures/measure_step.py

Start it where the demo ran. tests/ACCUMULATION.md has its figures, and their knobs."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import begin  # noqa: F401  (first: it says what to install)
import torch
import torch.distributed as dist
from bench_step import peak_memory
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from trained import start_program

import train_gpt


def mib(tensors: list[Tensor]) -> float:
    """MiB of the tensors' memory. Views of one memory count once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values()) / 2**20


def saved_by_a_slot(state: train_gpt.TrainingState) -> list[Tensor]:
    """Tensors that a slot's forward pass keeps for its backward pass, without the weights."""
    hp, saved = state.hp, []
    weights = {param.untyped_storage().data_ptr() for param in state.gpt.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved.append(tensor)
        return tensor

    batch = state.loader.next_batch(hp.train_batch_tokens, hp.train_seq_len, hp.batch_slots)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        state.gpt(*batch)
    return saved


def measure_memory(hp: train_gpt.Hyperparameters, runtime: train_gpt.Runtime) -> None:
    """Print the peak of this process after two steps, and its parts."""
    before = peak_memory(runtime.device)
    state = train_gpt.TrainingState(hp, runtime)
    built = peak_memory(runtime.device)
    for _ in range(2):
        train_gpt.train_step(state)
    peak = peak_memory(runtime.device)
    params = [*state.gpt.parameters()]
    momenta = [x for o in state.optimizers for part in o.state.values() for x in part.values()]
    weights, later = mib(params), {
        "gradients": mib([param.grad for param in params if param.grad is not None]),
        "momenta of Adam and Muon": mib(momenta),
        "saved by a slot's forward pass for its backward pass": mib(saved_by_a_slot(state)),
    }  # fmt: skip
    parts = {"imported modules": before, "weights": weights}
    parts["the rest of what exists before the first step"] = built - before - weights
    parts |= later
    parts["the rest: temporaries, libraries' buffers"] = peak - built - sum(later.values())
    print(f"{peak} MiB at the peak of two steps, {hp.batch_slots} slots:")
    for name, size in parts.items():
        print(f"{size:8.1f} MiB {name}")


def count_exchanges(hp: train_gpt.Hyperparameters, runtime: train_gpt.Runtime) -> None:
    """Print how many all-reduces a step has, and their bytes, with DDP's flag set in the last
    micro-step and in all of them."""
    report = print if runtime.rank == 0 else str
    state = train_gpt.TrainingState(hp, runtime)
    gradients, others = [], []  # in bytes, of each all-reduce

    def count_bucket(_, bucket):
        gradients.append(bucket.buffer().nbytes)
        return allreduce_hook(None, bucket)

    def count(tensor: Tensor, *args, all_reduce=dist.all_reduce, **options):
        others.extend([] if options.get("async_op") else [tensor.nbytes])  # True: of DDP
        return all_reduce(tensor, *args, **options)

    state.model.register_comm_hook(None, count_bucket)
    dist.all_reduce = count
    for name in ("with the flag", "always"):
        train_gpt.train_step(state)  # DDP makes its final buckets after its first step
        gradients.clear()
        others.clear()
        train_gpt.train_step(state)
        report(f"gradients exchanged {name}: {len(gradients)} all-reduces, {sum(gradients):,} "
               f"bytes: {gradients}; Muon's updates: {sum(others):,} bytes")  # fmt: skip
        flag = property(lambda model: True, lambda model, value: None)
        type(state.model).require_backward_grad_sync = flag


def main() -> int:
    start_program(__doc__).parse_args()
    hp = train_gpt.Hyperparameters.from_env(os.environ)
    runtime = train_gpt.open_runtime(hp)
    measure = measure_memory if runtime.world_size == 1 else count_exchanges
    measure(hp, runtime)
    return 0


if __name__ == "__main__":
    train_gpt.leave(main)
