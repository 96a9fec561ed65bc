"""A step on 1, 2, 4 and 8 ranks: real gloo processes against one large batch in this process."""

import dataclasses
import re
from pathlib import Path

import pytest
import rank_worker
import torch
from rank_worker import keep_gradients, validation_losses
from runs import ALONE, SCRIPT, finished, run_ranks
from trained import load_script

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


# ---- noise ---------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def dropout_script(tmp_path_factory) -> Path:
    """The script with dropout in each block."""
    script = tmp_path_factory.mktemp("dropout") / "train_gpt.py"
    dropout = "self.mlp(F.dropout(rms_norm(x), 0.3, self.training))"
    source = SCRIPT.read_text()
    assert source.count("self.mlp(rms_norm(x))") == 1
    script.write_text(source.replace("self.mlp(rms_norm(x))", dropout))
    return script


def test_dropout_is_the_same_on_any_number_of_ranks(tmp_path, knobs, dropout_script):
    """Noise, like tokens, belongs to a slot. Other seeds and steps draw other noise."""

    def losses(ranks: int, **changes: str) -> list[float]:
        environ = {**knobs, "VAL_LOSS_EVERY": "0", "MATRIX_LR": "0", "SCALAR_LR": "0"} | changes
        environ |= {"TIED_EMBED_LR": "0"}  # each step has the same weights
        folder = tmp_path / "_".join([str(ranks), *changes])
        log = finished(run_ranks(folder, environ, ranks, [dropout_script])[0])
        return [float(loss) for loss in re.findall(r"train_loss:(\S+)", "\n".join(log))]

    alone = losses(1)
    assert losses(2) == losses(4) == alone
    assert losses(1, SEED="2") != alone


def test_dropout_is_the_same_after_a_resume(hp, dropout_script):
    script = load_script(dropout_script)
    whole, resumed = (script.new_state(hp, ALONE) for _ in range(2))
    for step in range(4):
        whole.step = step
        if step == 2:
            saved = whole.state_dict()
        script.train_step(whole)
    torch.manual_seed(0)
    resumed.load_state_dict(saved)
    for step in (2, 3):
        resumed.step = step
        script.train_step(resumed)
    assert_close(resumed.gpt.state_dict(), whole.gpt.state_dict(), 0.0)
