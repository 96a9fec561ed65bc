"""A step on 1, 2, 4 and 8 ranks: real gloo processes against one large batch in this process. A
run against the plain model and optimizers."""

import dataclasses
import itertools
import math
import os
import random
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from edits import edit_script
from plain import PlainGPT, PlainOptimizers, batches, plain_step
from runs import ALONE, SCRIPT, finished, run_here, run_ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.utils import get_total_norm

import train_gpt
from train_gpt import Hyperparameters, TrainingState, train_step

STEPS = 10


def keep_gradients(state: TrainingState) -> list[dict[str, torch.Tensor]]:
    """Return a list to which each later step appends the gradients that the optimizers get."""
    steps = []

    def keep(*_) -> None:
        steps.append({name: p.grad.clone() for name, p in state.gpt.named_parameters()})

    state.optimizers[0].register_step_pre_hook(keep)
    return steps


def take_steps() -> None:
    """Take some steps as one of several ranks, then write what happened to RANK.pt."""
    hp = Hyperparameters.from_env(os.environ)
    state, all_reduces = TrainingState(hp, train_gpt.open_runtime(hp)), []

    def count(_, bucket):
        all_reduces.append(bucket)
        return allreduce_hook(None, bucket)

    state.model.register_comm_hook(None, count)
    gradients = keep_gradients(state)
    losses = [state.runtime.gather(train_step(state).item()) for _ in range(STEPS)]
    result = {"gradients": gradients[:2], "losses": [sum(step) / len(step) for step in losses]}
    result |= {"weights": state.gpt.state_dict(), "all_reduces": len(all_reduces)}
    result["sends_buffers"] = state.model.will_sync_module_buffers()  # in each forward pass
    torch.save(result, f"{state.runtime.rank}.pt")
    train_gpt.leave(lambda: 0)


@pytest.fixture(scope="module", params=[1, 2, 4, 8])
def ranks(request, tmp_path_factory, knobs) -> list[dict]:
    """The files that the ranks wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    for result in run_ranks(folder, knobs, request.param, edit=take_steps):
        assert result.returncode == 0, result.stderr
    return [torch.load(folder / f"{i}.pt", weights_only=True) for i in range(request.param)]


@pytest.fixture(scope="module")
def hp(knobs) -> Hyperparameters:
    return Hyperparameters.from_env(knobs)


def one_batch(hp: Hyperparameters, seed: int = 0) -> list[tuple[dict[str, torch.Tensor], float]]:
    """Gradients and loss of two steps, each with its tokens as one batch. seed: of dropout."""
    state, steps = TrainingState(hp, ALONE), []
    shape = (hp.train_batch_tokens, hp.train_seq_len, hp.batch_slots)
    torch.manual_seed(seed)
    for _ in range(2):
        slots = [state.loader.next_batch(*shape) for _ in range(hp.batch_slots)]
        state.gpt.zero_grad()
        loss = state.gpt(torch.cat([x for x, _ in slots]), torch.cat([y for _, y in slots]))
        loss.backward()
        grads = {name: p.grad.clone() for name, p in state.gpt.named_parameters()}
        steps.append((grads, loss.item()))
        for optimizer in state.optimizers:
            optimizer.step()
    return steps


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float):
    """Compare tensors by name. tolerance: distance relative to each tensor's norm."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name] - tensor).norm() <= tolerance * tensor.norm() + 1e-9, name


@pytest.fixture(scope="module")
def alone(hp) -> dict:
    """The same steps in this process, without any process group."""
    state = TrainingState(hp, ALONE)
    losses = [train_step(state).item() for _ in range(STEPS)]
    weights = {name: tensor.clone() for name, tensor in state.gpt.state_dict().items()}
    return {"losses": losses, "weights": weights}


def test_accumulated_gradients_are_those_of_one_batch(ranks, hp):
    """The second step begins without the gradients of the first. Its weights are those of the same
    optimizers, whose rounding the tolerance allows for."""
    steps = one_batch(hp)
    if steps[0][1] != one_batch(hp, seed=1)[0][1]:
        pytest.skip("dropout draws other masks for one batch")
    for rank, (step, tolerance) in itertools.product(ranks, enumerate([1e-5, 0.01])):
        gradients, loss = steps[step]
        assert rank["losses"][step] == pytest.approx(loss, rel=tolerance / 10)
        assert_close(rank["gradients"][step], gradients, tolerance)


def test_gradients_are_all_reduced_once_a_step(ranks):
    assert {rank["all_reduces"] for rank in ranks} == {STEPS}  # all fit into one DDP bucket
    assert not any(rank["sends_buffers"] for rank in ranks)


def test_world_sizes_agree_to_rounding(ranks, alone):
    assert alone["losses"][-1] < alone["losses"][0] - 0.3  # there was something to agree about
    assert_close(ranks[0]["weights"], alone["weights"], 0.02)
    for rank in ranks:
        assert_close(rank["weights"], ranks[0]["weights"], 0.0)
        assert rank["losses"] == pytest.approx(alone["losses"], abs=2e-3)


@pytest.mark.parametrize("limit", [0.0, 1e-3, 1e3])
def test_the_norm_of_all_gradients_is_clipped_after_accumulation(hp, limit):
    """A limit of 0 disables clipping."""
    state = TrainingState(dataclasses.replace(hp, grad_clip_norm=limit), ALONE)
    steps = keep_gradients(state)
    train_step(state)
    batch, _ = one_batch(hp)[0]
    found, whole = (get_total_norm(list(grads.values())) for grads in (steps[0], batch))
    expected = limit if 0 < limit < whole else whole.item()
    assert found.item() == pytest.approx(expected, rel=1e-2)


def dropout_masks(hp: Hyperparameters, steps: list[int], **place: int) -> list[tuple]:
    """Draw a mask in each forward pass of these steps, as a layer with dropout does."""
    state, masks = TrainingState(hp, dataclasses.replace(ALONE, **place)), []

    def draw(*_) -> None:
        masks.append(tuple(F.dropout(torch.ones(64)).tolist()))

    state.gpt.register_forward_hook(draw)
    for step in steps:
        state.step = step
        train_step(state)
    return masks


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_dropout_is_the_same_on_any_number_of_ranks_and_after_a_resume(hp, world_size):
    """Each slot has its own noise, like its own tokens. No two slots, steps or seeds share it."""
    alone = dropout_masks(hp, [0, 1])
    places = [{"rank": rank, "world_size": world_size} for rank in range(world_size)]
    ranks = [dropout_masks(hp, [0, 1], **place) for place in places]
    assert list(itertools.chain(*zip(*ranks, strict=True))) == alone
    assert dropout_masks(hp, [1]) == alone[8:]
    other_seed = dropout_masks(dataclasses.replace(hp, seed=hp.seed + 1), [0, 1])
    assert len({*alone, *other_seed}) == 32


def test_python_and_numpy_draw_alike_on_all_ranks_and_after_a_resume(hp):
    def numbers(steps: list[int], hp: Hyperparameters = hp, **place: int) -> list[tuple]:
        state, drawn = TrainingState(hp, dataclasses.replace(ALONE, **place)), []
        for state.step in steps:
            train_step(state)
            drawn.append((random.random(), np.random.rand()))
        return drawn

    alone = numbers([0, 1])
    assert numbers([0, 1], rank=1, world_size=2) == alone and numbers([1]) == alone[1:]
    assert len({*alone, *numbers([0, 1], dataclasses.replace(hp, seed=hp.seed + 1))}) == 4


# ---- whole runs ----------------------------------------------------------------------------------
@pytest.mark.baseline
@pytest.mark.parametrize(
    "tied, layers, kv_heads", [("1", "1", "4"), ("0", "4", "1"), ("1", "3", "2")]
)
def test_a_run_is_the_plain_training(tmp_path, knobs, tied, layers, kv_heads):
    """Ten steps, with the learning rates and the momentum of each step written out."""
    environ = {**knobs, "TIE_EMBEDDINGS": tied, "NUM_LAYERS": layers, "NUM_KV_HEADS": kv_heads}
    environ |= dict(EMBED_LR="0.1", HEAD_LR="0.02", MATRIX_LR="0.03", SCALAR_LR="0.01", BETA1="0.8")
    environ |= dict(ITERATIONS="10", MUON_MOMENTUM_WARMUP_STEPS="5", ADAM_EPS="1e-5")
    hp = Hyperparameters.from_env(environ)
    log = finished(run_here(tmp_path, environ))
    state = TrainingState(hp, ALONE)
    model = PlainGPT.like(state.gpt, hp)
    optimizers = PlainOptimizers(model, hp)
    slots = batches(state.loader.stream.paths, ALONE.device, 512 // 8, hp.train_seq_len)
    groups = optimizers.adam.param_groups
    rates = [group["lr"] for group in groups]
    losses = []
    for step, factor in enumerate([1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]):
        for group, lr in zip(groups, rates, strict=True):
            group["lr"] = factor * lr
        momentum = 0.85 + 0.10 * min(step / 5, 1)
        optimizers.hp = dataclasses.replace(hp, matrix_lr=0.03 * factor, muon_momentum=momentum)
        losses.append(plain_step(model, optimizers, slots, 8))
    logged = [float(loss) for loss in re.findall(r"train_loss:(\S+)", "\n".join(log))]
    assert logged == pytest.approx(losses, abs=1e-3)
    trained = torch.load(tmp_path / "final_model.pt", weights_only=True)
    initial = state.gpt.state_dict()
    assert trained.keys() == initial.keys()
    for name, tensor in model.state_dict().items():
        change = (tensor - initial[name]).norm()
        assert (trained[name] - tensor).norm() <= 1e-2 * change, name


def test_an_infinite_fp16_gradient_of_one_optimizer_stops_both(hp):
    """tok_emb is Adam's, c_q Muon's. In the 17th step, the scale falls below 1."""
    state = TrainingState(hp, dataclasses.replace(ALONE, dtype=torch.float16))
    for name in ("tok_emb.weight", "blocks.0.attn.c_q.weight"):
        before = {key: value.clone() for key, value in state.gpt.state_dict().items()}
        hook = state.gpt.get_parameter(name).register_hook(lambda grad: grad * math.inf)
        train_step(state)
        hook.remove()
        torch.testing.assert_close(state.gpt.state_dict(), before, rtol=0, atol=0)
        assert state.is_skipped
    state.gpt.skip_weights.register_hook(lambda grad: grad * math.nan)
    with pytest.raises(train_gpt.InputError, match="even at a loss scale of 1: set DTYPE=fp32"):
        for _ in range(15):
            train_step(state)
    assert state.scaler.get_scale() == 0.5


def test_fp16_skips_an_overflow_on_all_ranks(tmp_path, knobs):
    """The loss overflows, which does not end the run, then one of Adam's gradients, which clipping
    would spread to Muon's. Both are local to train_step, so the ranks run an edited copy."""
    infinite = "(math.inf if state.step == 3 and state.runtime.rank == 1 else 1)"
    norm = "nn.utils.get_total_norm([p.grad for p in state.gpt.parameters()])"
    report = f"print('scale', state.scaler.get_scale(), {norm}.item()); return total_loss"
    unscale = "    state.is_skipped = state.scaler.is_enabled()"
    in_adam = "    state.gpt.tok_emb.weight.grad += math.nan if state.step == 4 else 0\n"
    factor = "* (1 / grad_accum_steps)"
    edit = {factor: f"{factor} * {infinite}", unscale: in_adam + unscale}
    script = tmp_path / "train_gpt.py"
    script.write_text(edit_script(SCRIPT.read_text(), edit, {"return total_loss": report}))
    settings = {"DTYPE": "fp16", "WARMUP_STEPS": "3", "CHECKPOINT_EVERY": "6"}
    ranks = run_ranks(tmp_path, {**knobs, **settings, "GRAD_CLIP_NORM": "0.01"}, 2, [script])
    assert "replicas:identical" in finished(ranks[0])
    for rank in ranks:
        lines = [line.split()[1:] for line in rank.stdout.splitlines() if "scale " in line][-6:]
        assert [float(scale) for scale, _ in lines] == 3 * [65536] + [32768] + 2 * [16384]
        norms = [float(norm) for _, norm in lines]
        assert norms[:3] + norms[5:] == pytest.approx(4 * [0.01], rel=1e-3)
    saved = torch.load(tmp_path / "checkpoints" / "test.pt")
    assert saved["step"] == 6 and saved["scaler"]["scale"] == 16384
    assert {state["step"].item() for state in saved["optimizers"][0]["state"].values()} == {4}
    assert "WARNING: 2 steps skipped" in ranks[0].stdout and "train_loss:inf" in ranks[0].stdout
