"""The trainer's fast forms against the plain reading of the contract, over a short training."""

from pathlib import Path

import pytest
import torch

import train_gpt
from tests import plain
from train_gpt import GPT, Hyperparameters, Runtime, build_optimizers

STEPS = 200


def losses(hp: Hyperparameters, seed: int, fast: bool) -> torch.Tensor:
    """The losses of STEPS steps in bf16, from the weights of a seed: (STEPS,)."""
    cpu = torch.device("cpu")
    runtime = Runtime(0, 1, 0, False, cpu, torch.bfloat16)
    torch.manual_seed(seed)
    gpt = GPT(hp)
    if fast:
        optimizers = build_optimizers(gpt, hp, torch.bfloat16)
        loader = train_gpt.build_loader(hp, runtime)
        steps = [
            train_gpt.train_step(gpt, loader, optimizers, hp, runtime)[0] for _ in range(STEPS)
        ]
        return torch.stack(steps)
    model = plain.PlainGPT.like(gpt, hp)
    optimizers = plain.PlainOptimizers(model, hp)
    loader = plain.PlainLoader(sorted(Path(hp.data_path).glob("fineweb_train_*")), cpu)
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
