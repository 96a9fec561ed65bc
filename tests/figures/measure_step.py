"""Print the parts of a training process's memory, its first gradient's distance to that of the
undivided batch, and times; under torchrun, the bytes that ranks exchange.

    PRESET=demo OMP_NUM_THREADS=1 python tests/figures/measure_step.py
    PRESET=demo torchrun --standalone --nproc_per_node=2 tests/figures/measure_step.py

Start it where the demo ran. tests/ACCUMULATION.md has its figures, and their knobs."""

import os
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import begin  # noqa: F401  (first: it says what to install)
import torch
import torch.distributed as dist
from bench_step import measure, peak_memory
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
    gradients, weights = mib([p.grad for p in params if p.grad is not None]), mib(params)
    own, saved = mib(momenta), mib(saved_by_a_slot(state))
    print(f"""{peak} MiB at the peak of two steps, {hp.batch_slots} slots:
{before:8.1f} MiB imported modules
{weights:8.1f} MiB weights
{built - before - weights:8.1f} MiB the rest of what exists before the first step
{gradients:8.1f} MiB gradients
{own:8.1f} MiB momenta of Adam and Muon
{saved:8.1f} MiB saved by a slot's forward pass for its backward pass
{peak - built - gradients - own - saved:8.1f} MiB the rest: temporaries, libraries' buffers""")


def measure_distance(hp: train_gpt.Hyperparameters, runtime: train_gpt.Runtime) -> None:
    """Print how far the gradient of the slots is from that of the undivided batch."""
    state = train_gpt.TrainingState(hp, runtime)
    sizes = (hp.train_batch_tokens, hp.train_seq_len, hp.batch_slots)
    slots, grads = [state.loader.next_batch(*sizes) for _ in range(hp.batch_slots)], []
    for batches in (slots, [map(torch.cat, zip(*slots, strict=True))]):
        state.gpt.zero_grad()
        for batch in batches:
            (state.gpt(*batch) * (1 / len(batches))).backward()
        found = [p.grad.flatten() for p in state.gpt.parameters() if p.grad is not None]
        grads.append(torch.cat(found))
    distance = (grads[0] - grads[1]).norm() / grads[1].norm()
    print(f"{distance:8.1e} of its length: the first gradient's distance to the undivided batch's")


def measure_time(hp: train_gpt.Hyperparameters, runtime: train_gpt.Runtime, seconds: float) -> None:
    """Print the milliseconds of a step, of its optimizers, and of two steps of half the batch."""
    state, tokens = train_gpt.TrainingState(hp, runtime), str(hp.train_batch_tokens // 2)
    steps = {"a step": lambda: train_gpt.train_step(state)}
    steps |= {type(optimizer).__name__: optimizer.step for optimizer in state.optimizers}
    if hp.train_batch_tokens % (2 * hp.batch_slots * hp.train_seq_len) == 0:
        hp = train_gpt.Hyperparameters.from_env({**os.environ, "TRAIN_BATCH_TOKENS": tokens})
        half = train_gpt.TrainingState(hp, runtime)
        steps["two of half the batch"] = lambda: [train_gpt.train_step(half) for _ in range(2)]
    for name, ms in measure(steps, seconds, runtime).items():
        print(f"{median(ms):8.2f} ({min(ms):.2f} to {max(ms):.2f}) ms {name}")


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
    parser = start_program(__doc__)
    parser.add_argument("--seconds", type=float, default=20, help="for the times (20)")
    args = parser.parse_args()
    hp = train_gpt.Hyperparameters.from_env(os.environ)
    runtime = train_gpt.open_runtime(hp)
    if runtime.world_size > 1:
        count_exchanges(hp, runtime)
    else:
        measure_memory(hp, runtime)
        measure_distance(hp, runtime)
        measure_time(hp, runtime, args.seconds)
    return 0


if __name__ == "__main__":
    train_gpt.leave(main)
