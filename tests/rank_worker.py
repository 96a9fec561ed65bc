"""What each rank of test_accumulation.py does: some optimizer steps of the trainer's own functions.
It leaves the first step's gradients, the final weights, every step's loss, the number of gradient
all-reduces and validation losses in FOLDER/W_rank.pt."""

import dataclasses
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import train_gpt
from tests.conftest import make_state


class GradientKeeper:
    """Stands among the optimizers and keeps a copy of the gradients that they get."""

    param_groups: list = []

    def __init__(self, gpt):
        self.gpt, self.steps = gpt, []

    def step(self):
        self.steps.append({name: p.grad.clone() for name, p in self.gpt.named_parameters()})

    def zero_grad(self, set_to_none):
        pass


def counting_hook(counter, bucket):
    counter[0] += 1
    return allreduce_hook(None, bucket)


def validation_losses(model, hp, runtime) -> list[float]:
    """Of two batch sizes and of two splits: with the second most ranks have no sequence."""
    validation = train_gpt.Validation(hp)
    least = dataclasses.replace(hp, val_batch_size=hp.batch_slots * hp.train_seq_len)
    short = validation.tokens[: hp.train_seq_len + 1]
    cases = [(validation.tokens, hp), (validation.tokens, least), (short, hp)]
    return [train_gpt.evaluate(model, tokens, knobs, runtime) for tokens, knobs in cases]


def main() -> None:
    folder, num_steps = Path(sys.argv[1]), int(sys.argv[2])
    hp = train_gpt.Hyperparameters.from_env(os.environ)
    runtime = train_gpt.open_runtime(hp, os.environ)
    state = make_state(hp, runtime)
    counter = [0]
    state.model.register_comm_hook(counter, counting_hook)
    keeper = GradientKeeper(state.gpt)
    state.optimizers.insert(0, keeper)
    validation = validation_losses(state.model, hp, runtime)
    losses = []
    for _ in range(num_steps):
        rank_loss = train_gpt.train_step(state)
        losses.append(sum(runtime.gather(rank_loss.item())) / runtime.world_size)
    result = {
        "gradients": keeper.steps[0],
        "weights": state.gpt.state_dict(),
        "losses": losses,
        "all_reduces": counter[0],
        "momenta": len(state.optimizers[-1].state),
        "validation": validation,
    }
    torch.save(result, folder / f"{runtime.world_size}_{runtime.rank}.pt")
    dist.barrier()
    os._exit(0)  # as the script does: the interpreter's own exit may hang in gloo's threads


if __name__ == "__main__":
    main()
