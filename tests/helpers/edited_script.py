"""Edits of train_gpt.py. As a program: a rank that trains with them, saves and resumes."""

import dataclasses
import os

import torch
import torch.distributed as dist
from conftest import make_state
from torch import nn

import train_gpt

base_optimizers = train_gpt.build_optimizers


class BiasedAttention(train_gpt.CausalSelfAttention):
    def __init__(self, hp: train_gpt.Hyperparameters, layer: int) -> None:
        super().__init__(hp, layer)
        self.c_q.bias = nn.Parameter(torch.zeros(hp.model_dim))


class Factored(torch.optim.Optimizer):
    """One second moment per row and per column (Shazeer and Stern, 2018), and a number; no state
    for vectors."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p in [p for group in self.param_groups for p in group["params"]]:
            if p.ndim != 2:
                p.sub_(0.001 * p.grad.sign())
                continue
            squares = p.grad.square() + 1e-12
            state = self.state[p]
            rows = state.setdefault("rows", squares.mean(1)).lerp_(squares.mean(1), 0.1)
            columns = state.setdefault("columns", squares.mean(0)).lerp_(squares.mean(0), 0.1)
            state["count"] = state.get("count", 0) + 1
            p.sub_(0.001 * p.grad * (rows.mean() / torch.outer(rows, columns)).sqrt())


def odd_optimizers(gpt: train_gpt.GPT, compiled: bool = False) -> list[torch.optim.Optimizer]:
    adam, muon = base_optimizers(gpt, compiled)
    return [Factored(adam.param_groups, {}), muon]


def begin(hp: train_gpt.Hyperparameters, runtime: train_gpt.Runtime) -> train_gpt.TrainingState:
    state = make_state(hp, runtime)
    train_gpt.load_checkpoint(state)
    train_gpt.warm_up(state)
    return state


def resume(hp: train_gpt.Hyperparameters, runtime: train_gpt.Runtime) -> list[float]:
    """Two steps, a checkpoint and two more steps must give the same bits as two steps from the
    checkpoint. Returns the losses."""
    whole = begin(hp, runtime)
    losses = [train_gpt.train_step(whole) for _ in range(2)]
    assert train_gpt.save_checkpoint(whole)
    losses += [train_gpt.train_step(whole) for _ in range(2)]
    resumed = begin(dataclasses.replace(hp, resume="auto"), runtime)
    for _ in range(2):
        train_gpt.train_step(resumed)
    for part in ("model", "optimizers", "stream"):
        found, expected = resumed.state_dict()[part], whole.state_dict()[part]
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=part)
    return [sum(runtime.gather(loss.item())) / runtime.world_size for loss in losses]


if __name__ == "__main__":
    hp = train_gpt.Hyperparameters.from_env(os.environ)
    runtime = train_gpt.open_runtime(hp)
    train_gpt.CausalSelfAttention = BiasedAttention
    train_gpt.build_optimizers = odd_optimizers
    print("losses", *resume(hp, runtime), flush=True)
    dist.barrier()
    os._exit(0)  # as the script does
