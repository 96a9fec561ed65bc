"""What one rank of test_accumulation.py does, under torchrun: some optimizer steps of the trainer's
own functions. It leaves the first step's gradients, the final weights, every step's loss, the
number of gradient all-reduces and validation losses in FOLDER/W_rank.pt."""

import dataclasses
import os
import sys
from pathlib import Path

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import train_gpt


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
    validation = train_gpt.Validation.load(hp, train_gpt.load_tokenizer(hp))
    least = dataclasses.replace(hp, val_batch_size=hp.batch_slots * hp.train_seq_len)
    short = validation.tokens[: hp.train_seq_len + 1]
    cases = [(validation.tokens, hp), (validation.tokens, least), (short, hp)]
    return [train_gpt.evaluate(model, tokens, knobs, runtime) for tokens, knobs in cases]


def main() -> None:
    folder, num_steps = Path(sys.argv[1]), int(sys.argv[2])
    hp = train_gpt.Hyperparameters.from_env(os.environ)
    runtime = train_gpt.open_runtime(hp, os.environ)
    torch.manual_seed(hp.seed)
    gpt = train_gpt.GPT(hp, runtime.dtype)
    model, _ = train_gpt.compile_and_wrap(gpt, hp, runtime, lambda line: None)
    counter = [0]
    model.register_comm_hook(counter, counting_hook)
    keeper = GradientKeeper(gpt)
    optimizers = [keeper, *train_gpt.build_optimizers(gpt, hp, runtime.dtype)]
    loader = train_gpt.build_loader(hp, runtime)
    validation = validation_losses(model, hp, runtime)
    losses = []
    for _ in range(num_steps):
        rank_loss, _ = train_gpt.train_step(model, loader, optimizers, hp, runtime)
        losses.append(sum(runtime.gather(rank_loss.item())) / runtime.world_size)
    momenta = [len(optimizer.state) for optimizer in optimizers[1:]]
    result = {
        "gradients": keeper.steps[0],
        "weights": gpt.state_dict(),
        "losses": losses,
        "all_reduces": counter[0],
        "momenta": momenta[-1],
        "validation": validation,
    }
    torch.save(result, folder / f"{runtime.world_size}_{runtime.rank}.pt")
    train_gpt.leave(0, runtime)


if __name__ == "__main__":
    main()
