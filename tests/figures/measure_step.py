"""Count what a step keeps and exchanges, and how far it differs from that of one process.

    PRESET=demo torchrun --standalone --nproc_per_node=2 tests/figures/measure_step.py
    PRESET=demo DTYPE=bf16 NUM_LAYERS=9 MODEL_DIM=512 NUM_HEADS=8 NUM_KV_HEADS=4 \\
        torchrun --standalone --nproc_per_node=2 tests/figures/measure_step.py

The second is the default model, with the demo's short sequences. Start it where the demo ran. For
tests/ACCUMULATION.md."""

import copy
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import begin  # noqa: F401  (first: it says what to install)
import torch
from bench_step import peak_memory
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import train_gpt


def flat_gradient(gpt: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten().float() for p in gpt.parameters()])


def gradient_alone(state: train_gpt.TrainingState) -> tuple[Tensor, int]:
    """The next step's gradient if one process adds up all slots, and the bytes that one slot's
    forward pass saves for the backward pass."""
    hp, gpt, saved = state.hp, copy.deepcopy(state.gpt), {}
    weights = {param.untyped_storage().data_ptr() for param in gpt.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    loader = train_gpt.DistributedTokenLoader(hp.files("train"), 0, 1, state.runtime.device)
    for _ in range(hp.batch_slots):
        saved.clear()
        batch = loader.next_batch(hp.train_batch_tokens, hp.train_seq_len, hp.batch_slots)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = gpt(*batch) * (1 / hp.batch_slots)
        loss.backward()
    return flat_gradient(gpt), sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def main() -> int:
    hp = train_gpt.Hyperparameters.from_env(os.environ)
    runtime = train_gpt.open_runtime(hp)
    report = print if runtime.rank == 0 else str
    state = train_gpt.TrainingState(hp, runtime)
    before = peak_memory(runtime.device)
    alone, saved = gradient_alone(state)
    sizes: list[int] = []  # in bytes, of the gradients' all-reduces

    def count(_, bucket):
        sizes.append(bucket.buffer().nbytes)
        return allreduce_hook(None, bucket)

    state.model.register_comm_hook(None, count)
    train_gpt.train_step(state)
    found = flat_gradient(state.gpt)
    share = (found != alone)[alone != 0].float().mean()
    distance = (found - alone).norm() / alone.norm()
    report(f"gradient of {runtime.world_size} ranks and of one process: {100 * share:.1f} % of the "
           f"values that are not 0 differ in their bits; distance {distance:.1e}")  # fmt: skip
    for name in ("with the flag", "always"):
        sizes.clear()
        train_gpt.train_step(state)
        report(f"exchanged {name}: {len(sizes)} all-reduces, {sum(sizes):,} bytes: {sizes}")
        always = property(lambda model: True, lambda model, value: None)
        DistributedDataParallel.require_backward_grad_sync = always
    report(f"process before its first step: {before} MiB")
    kinds = {"weights": [*state.gpt.parameters()]}
    kinds["gradients"] = [param.grad for param in state.gpt.parameters()]
    states = [part for optimizer in state.optimizers for part in optimizer.state.values()]
    kinds["momenta"] = [tensor for part in states for tensor in part.values()]
    for kind, tensors in kinds.items():
        report(f"{kind}: {sum(tensor.nbytes for tensor in tensors) / 2**20:.2f} MiB")
    report(f"saved by a slot for its backward pass: {saved / 2**20:.2f} MiB")
    return 0


if __name__ == "__main__":
    train_gpt.leave(main)
