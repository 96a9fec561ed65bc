"""A rank of test_training.py: take some optimizer steps with the trainer's own functions, and
write the first gradients, all losses and the last weights to FOLDER/W_rank.pt."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import train_gpt


def keep_gradients(state: train_gpt.TrainingState) -> list[dict[str, torch.Tensor]]:
    """Return a list to which each later step appends the gradients that the optimizers get."""
    steps = []

    def keep(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        steps.append({name: p.grad.clone() for name, p in state.gpt.named_parameters()})

    state.optimizers[0].register_step_pre_hook(keep)
    return steps


def counting_hook(counter: list[int], bucket: dist.GradBucket):
    counter[0] += 1
    return allreduce_hook(None, bucket)


def validation_losses(state: train_gpt.TrainingState) -> list[float]:
    """Losses in windows side by side, in sliding windows, and in one window for all ranks."""
    T = state.hp.train_seq_len
    tokens = train_gpt.Validation(state.hp).tokens
    cases = [(tokens, T), (tokens, 20), (tokens[: T + 1], T)]
    losses = [train_gpt.evaluate(state.model, *case, state.hp, state.runtime) for case in cases]
    return [train_gpt.mean_loss(part, state.runtime) for part in losses]


def main() -> None:
    folder, num_steps = Path(sys.argv[1]), int(sys.argv[2])
    hp = train_gpt.Hyperparameters.from_env(os.environ)
    runtime = train_gpt.open_runtime(hp)
    state = train_gpt.TrainingState(hp, runtime)
    counter = [0]
    state.model.register_comm_hook(counter, counting_hook)
    gradients = keep_gradients(state)
    losses = []
    for _ in range(num_steps):
        rank_loss = train_gpt.train_step(state)
        losses.append(sum(runtime.gather(rank_loss.item())) / runtime.world_size)
    result = {"gradients": gradients[0], "all_reduces": counter[0], "losses": losses}
    result["sends_buffers"] = state.model.will_sync_module_buffers()  # in each forward pass
    result |= {"weights": state.gpt.state_dict(), "validation": validation_losses(state)}
    torch.save(result, folder / f"{runtime.world_size}_{runtime.rank}.pt")
    dist.barrier()
    os._exit(0)  # as the script does: the interpreter's own exit may hang in gloo's threads


if __name__ == "__main__":
    main()
