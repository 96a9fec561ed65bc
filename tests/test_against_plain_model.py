"""The trainer's fast forms against the plain reading of the contract, over a short training."""

import dataclasses

import pytest
import torch
from conftest import ALONE, make_state

from tests import plain
from train_gpt import Hyperparameters, find_shards, train_step

STEPS = 200


def losses(hp: Hyperparameters, seed: int, fast: bool) -> torch.Tensor:
    """The losses of STEPS steps in bf16, from the weights of a seed: (STEPS,)."""
    runtime = dataclasses.replace(ALONE, dtype=torch.bfloat16)
    state = make_state(dataclasses.replace(hp, seed=seed), runtime)
    if fast:
        return torch.stack([train_step(state) for _ in range(STEPS)])
    model = plain.PlainGPT.like(state.gpt, hp)
    optimizers = plain.PlainOptimizers(model, hp)
    loader = plain.PlainLoader(find_shards(hp.files("train")), runtime.device)
    return torch.tensor([plain.train_step(model, optimizers, loader, hp, 2) for _ in range(STEPS)])


@pytest.fixture(scope="module")
def curves(knobs):
    small = dict(NUM_LAYERS="1", TRAIN_BATCH_TOKENS="256", BATCH_SLOTS="2", MUON_MOMENTUM="0.85")
    hp = Hyperparameters.from_env({**knobs, **small, "MATRIX_LR": "0.02"})
    return losses(hp, 1, True), losses(hp, 1, False), losses(hp, 2, True)


def test_200_losses_are_closer_to_the_plain_ones_than_another_seeds(curves):
    fast, slow, other = (curve.unflatten(0, (-1, 20)).mean(1) for curve in curves)
    assert (fast - slow).abs().mean() < (fast - other).abs().mean()
    assert (fast - slow).abs().max() < max(0.03, (fast - other).abs().max())
    assert fast[-1] < fast[0] - 0.5  # there was something to agree about


def test_the_first_loss_is_the_same(curves):
    assert curves[0][0] == pytest.approx(curves[1][0].item(), abs=0.01)
