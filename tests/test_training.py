"""A step on 1, 2, 4 and 8 ranks: real gloo processes against one large batch in this process."""

import dataclasses

import pytest
import rank_worker
import torch
from conftest import ALONE, run_ranks
from rank_worker import keep_gradients, validation_losses

from train_gpt import DistributedTokenLoader, Hyperparameters, new_state, train_step

STEPS = 10


@pytest.fixture(scope="module", params=[1, 2, 4, 8])
def ranks(request, tmp_path_factory, knobs) -> list[dict]:
    """The file that each rank of rank_worker.py wrote."""
    folder, world_size = tmp_path_factory.mktemp("ranks"), request.param
    worker = [rank_worker.__file__, folder, str(STEPS)]
    for result in run_ranks(folder, knobs, world_size, worker):
        assert result.returncode == 0, result.stderr
    names = [f"{world_size}_{rank}.pt" for rank in range(world_size)]
    return [torch.load(folder / name, weights_only=True) for name in names]


@pytest.fixture(scope="module")
def hp(knobs) -> Hyperparameters:
    return Hyperparameters.from_env(knobs)


def one_batch(hp: Hyperparameters) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients and loss of the first step's tokens as one batch."""
    loader = DistributedTokenLoader(hp.files("train"), 0, 1, "cpu")
    A = hp.batch_slots  # micro-steps
    slots = [loader.next_batch(hp.train_batch_tokens, hp.train_seq_len, A) for _ in range(A)]
    assert loader.stream.position == hp.train_batch_tokens + hp.batch_slots
    gpt = new_state(hp, ALONE).gpt
    loss = gpt(torch.cat([x for x, _ in slots]), torch.cat([y for _, y in slots]))
    loss.backward()
    return {name: p.grad for name, p in gpt.named_parameters()}, loss.item()


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float):
    """tolerance: of each tensor's norm."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name] - tensor).norm() <= tolerance * tensor.norm() + 1e-9, name


@pytest.fixture(scope="module")
def alone(hp) -> dict:
    """The same steps in this process, without any process group."""
    state = new_state(hp, ALONE)
    losses = [train_step(state).item() for _ in range(STEPS)]
    weights = {name: tensor.clone() for name, tensor in state.gpt.state_dict().items()}
    return {"losses": losses, "weights": weights, "validation": validation_losses(state)}


def test_accumulated_gradients_are_those_of_one_batch(ranks, hp):
    gradients, loss = one_batch(hp)
    for rank in ranks:
        assert rank["losses"][0] == pytest.approx(loss, rel=1e-6)
        assert_close(rank["gradients"], gradients, 1e-5)


def test_gradients_are_all_reduced_once_a_step(ranks):
    assert {rank["all_reduces"] for rank in ranks} == {STEPS}  # all fit into one DDP bucket


def test_ranks_end_with_the_same_bits(ranks):
    for rank in ranks[1:]:
        assert_close(rank["weights"], ranks[0]["weights"], 0.0)
        assert rank["losses"] == ranks[0]["losses"]


def test_world_sizes_agree_to_rounding(ranks, alone):
    assert ranks[0]["losses"] == pytest.approx(alone["losses"], abs=2e-3)
    assert alone["losses"][-1] < alone["losses"][0] - 0.3  # there was something to agree about
    assert_close(ranks[0]["weights"], alone["weights"], 0.02)


def test_validation_is_the_same_for_every_world_size(ranks, alone):
    for rank in ranks:
        assert rank["validation"] == pytest.approx(alone["validation"], abs=2e-3)


@pytest.mark.parametrize("limit", [0.0, 1e-3, 1e3])
def test_the_norm_of_all_gradients_is_clipped_after_accumulation(hp, limit):
    """0 disables it."""
    state = new_state(dataclasses.replace(hp, grad_clip_norm=limit), ALONE)
    steps = keep_gradients(state)
    train_step(state)
    found, whole = (
        torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
        for gradients in (steps[0], one_batch(hp)[0])
    )
    expected = limit if 0 < limit < whole else whole
    assert found == pytest.approx(expected, rel=1e-2)
