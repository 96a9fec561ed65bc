"""Edits that players make: each must have an effect, or an error or a warning must name it. An edit
here replaces a class or a function of the script."""

import dataclasses

import edited_script
import pytest
import torch
from conftest import ALONE, Lines, failed, make_state, run_ranks, write_worker
from edited_script import BiasedAttention, odd_optimizers, resume
from torch import Tensor, nn

import train_gpt
from train_gpt import CausalSelfAttention, Hyperparameters


@pytest.fixture
def hp(knobs, tmp_path) -> Hyperparameters:
    return Hyperparameters.from_env({**knobs, "OUTPUT_DIR": str(tmp_path)})


# ---- Parameters that do not train ----------------------------------------------------------------
class ScaledAttention(CausalSelfAttention):
    """Two new parameters, below layers that start at zero, and a frozen one."""

    start = 1.0

    def __init__(self, hp: Hyperparameters, layer: int) -> None:
        super().__init__(hp, layer)
        self.one, self.two = nn.Parameter(torch.tensor(self.start)), nn.Parameter(torch.zeros(()))
        self.frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)

    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        return super().forward(x * (1 + self.one * self.two), *tables)


def warnings(hp: Hyperparameters) -> str:
    """Run the warm-up. Returns its warnings."""
    log = Lines()
    train_gpt.warm_up(make_state(hp, dataclasses.replace(ALONE, log=log)))
    return " ".join(line for line in log.text.splitlines() if "WARNING" in line)


def test_a_parameter_that_three_warm_up_steps_do_not_change_is_named(hp, monkeypatch):
    """But not a frozen one."""
    monkeypatch.setattr(train_gpt, "CausalSelfAttention", ScaledAttention)
    hp = dataclasses.replace(hp, warmup_steps=3, num_layers=1)
    assert warnings(hp) == ""  # `one` changes in step 3
    monkeypatch.setattr(ScaledAttention, "start", 0.0)
    named = [word for word in warnings(hp).split() if word.startswith("blocks.")]
    assert named == ["blocks.0.attn.one", "blocks.0.attn.two"]
    assert warnings(dataclasses.replace(hp, warmup_steps=2)) == ""  # too early to say


# A parameter that the loss does not depend on.
DEAD = """
import torch

class DeadMLP(train_gpt.MLP):
    def __init__(self, hp):
        super().__init__(hp)
        self.dead = torch.nn.Parameter(torch.zeros(SHAPE))

train_gpt.MLP = DeadMLP"""


@pytest.mark.parametrize("shape", ["3", "3, 4"])
def test_a_parameter_without_a_gradient_is_named(tmp_path, knobs, shape):
    """Also a matrix, and before DistributedDataParallel refuses a second step."""
    worker = write_worker(tmp_path, DEAD.replace("SHAPE", shape))
    for result in run_ranks(tmp_path, knobs, 2, [worker]):
        failed(result, "blocks.0.mlp.dead got no gradient")


# ---- Optimizers ----------------------------------------------------------------------------------
def test_optimizers_with_odd_states_resume_to_the_same_bits(hp, knobs, tmp_path, monkeypatch):
    """Factored moments, a number, or nothing. On one process and on two ranks."""
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    environ = {**knobs, "OUTPUT_DIR": str(ranks)}
    results = run_ranks(ranks, environ, 2, [edited_script.__file__])
    monkeypatch.setattr(train_gpt, "CausalSelfAttention", BiasedAttention)
    monkeypatch.setattr(train_gpt, "build_optimizers", odd_optimizers)
    alone = resume(hp, ALONE)
    for result in results:
        assert result.returncode == 0, result.stderr
        losses = result.stdout.splitlines()[-1].split()[1:]
        assert [float(loss) for loss in losses] == pytest.approx(alone, abs=2e-3)
