"""One step, any number of ranks: real gloo processes against one large batch in this process."""

import dataclasses

import pytest
import torch
from conftest import ALONE, ROOT, make_state, run_ranks
from rank_worker import GradientKeeper

from train_gpt import (
    GPT,
    DistributedTokenLoader,
    Hyperparameters,
    Validation,
    evaluate,
    train_step,
)

STEPS = 20


@pytest.fixture(scope="module", params=[1, 2, 4, 8])
def ranks(request, tmp_path_factory, knobs):
    """What every rank of a run of 1, 2, 4 and 8 ranks left behind."""
    folder, world_size = tmp_path_factory.mktemp("ranks"), request.param
    worker = [ROOT / "tests" / "rank_worker.py", folder, str(STEPS)]
    for result in run_ranks(folder, {**knobs, "PYTHONPATH": str(ROOT)}, world_size, worker):
        assert result.returncode == 0, result.stderr
    return [
        torch.load(folder / f"{world_size}_{rank}.pt", weights_only=True)
        for rank in range(world_size)
    ]


@pytest.fixture(scope="module")
def hp(knobs):
    return Hyperparameters.from_env(knobs)


@pytest.fixture(scope="module")
def one_batch(hp):
    """Gradients and loss of the first step's tokens as one batch."""
    loader = DistributedTokenLoader(hp.files("train"), 0, 1, "cpu")
    slots = [loader.next_batch(hp.train_batch_tokens, hp.train_seq_len, 8) for _ in range(8)]
    torch.manual_seed(hp.seed)
    gpt = GPT(hp, torch.float32)
    loss = gpt(torch.cat([x for x, _ in slots]), torch.cat([y for _, y in slots]))
    loss.backward()
    return {name: p.grad for name, p in gpt.named_parameters()}, loss.item()


@pytest.fixture(scope="module")
def alone(hp):
    """Weights and losses of the same steps in this process, without any process group."""
    state = make_state(hp)
    losses = [train_step(state).item() for _ in range(STEPS)]
    return state.gpt.state_dict(), losses


@pytest.mark.parametrize("limit, norm", [(0.0, 0.65), (0.01, 0.01), (100.0, 0.65)])
def test_the_global_norm_is_clipped_after_accumulation(hp, limit, norm):
    """The norm of this model's first gradient is 0.65; 0 means off."""
    state = make_state(dataclasses.replace(hp, grad_clip_norm=limit))
    keeper = GradientKeeper(state.gpt)
    state.optimizers = [keeper]
    train_step(state)
    found = torch.cat([g.flatten() for g in keeper.steps[0].values()]).norm().item()
    assert found == pytest.approx(norm, rel=0.01)


def test_accumulated_gradients_are_those_of_one_batch(ranks, one_batch):
    gradients, loss = one_batch
    for rank in ranks:
        assert rank["losses"][0] == pytest.approx(loss, rel=1e-6)
        for name, expected in gradients.items():
            error = (rank["gradients"][name] - expected).norm()
            assert error <= 1e-5 * expected.norm() + 1e-9, name


@pytest.mark.parametrize("slots", [1, 2, 16])
def test_slots_change_memory_not_the_gradient(hp, slots):
    """But for the token between two slots, which each boundary takes out of the stream."""
    hp = dataclasses.replace(hp, batch_slots=slots)
    loader = DistributedTokenLoader(hp.files("train"), 0, 1, "cpu")
    parts = [
        loader.next_batch(hp.train_batch_tokens, hp.train_seq_len, slots) for _ in range(slots)
    ]
    assert loader.position == (0, hp.train_batch_tokens + slots)
    state = make_state(hp)
    state.gpt(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])).backward()
    expected = {name: p.grad.clone() for name, p in state.gpt.named_parameters()}
    state.gpt.zero_grad()
    keeper = GradientKeeper(state.gpt)
    state.optimizers = [keeper]
    train_step(state)
    for name, gradient in keeper.steps[0].items():
        error = (gradient - expected[name]).norm()
        assert error <= 1e-5 * expected[name].norm() + 1e-9, name


def test_validation_is_the_same_for_every_world_and_batch(ranks, hp):
    torch.manual_seed(hp.seed)
    gpt = GPT(hp, torch.float32)
    tokens = Validation(hp).tokens
    whole, short = (evaluate(gpt, part, hp, ALONE) for part in (tokens, tokens[:33]))
    for rank in ranks:
        assert rank["validation"] == pytest.approx([whole, whole, short], abs=1e-6)


def test_gradients_travel_once_a_step(ranks):
    assert {rank["all_reduces"] for rank in ranks} == {STEPS}  # all fit into one DDP bucket


def test_ranks_end_with_the_same_bits(ranks):
    for rank in ranks[1:]:
        for name, tensor in ranks[0]["weights"].items():
            assert torch.equal(rank["weights"][name], tensor), name
        assert rank["losses"] == ranks[0]["losses"]


def test_world_sizes_agree_to_rounding(ranks, alone):
    weights, losses = alone
    assert ranks[0]["losses"] == pytest.approx(losses, abs=2e-3)
    assert losses[-1] < losses[0] - 0.5  # there was something to agree about
    for name, tensor in weights.items():
        error = (ranks[0]["weights"][name] - tensor).norm()
        assert error <= 0.02 * tensor.norm(), name


def test_each_rank_holds_the_momentum_of_its_own_matrices_only(ranks):
    assert sum(rank["momenta"] for rank in ranks) == 18  # six matrices in each of three blocks
    if len(ranks) > 1:
        assert max(rank["momenta"] for rank in ranks) < 18
