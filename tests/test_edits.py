"""What people change first, changed: a bias, a hook, a term of the loss, LoRA. Each edit must act.

An edit is a subclass or a module that takes another's place, as in a copy of the script."""

import dataclasses
import math
import re
from subprocess import CompletedProcess

import pytest
import torch
import torch.nn.functional as F
from conftest import ALONE, ROOT, make_state, run_ranks
from edited_script import EDITS
from torch import Tensor, nn

import train_gpt
from train_gpt import GPT, CastedLinear, Hyperparameters, build_optimizers, train_step

WORKER = ROOT / "tests" / "edited_script.py"


@pytest.fixture
def hp(knobs) -> Hyperparameters:
    return Hyperparameters.from_env({**knobs, "EVAL_STRIDE": "16"})


def state_of(gpt: GPT) -> train_gpt.TrainingState:
    """A state as the script would make it of an edited model."""
    state = make_state(gpt.hp)
    state.gpt = state.model = gpt
    state.optimizers = build_optimizers(gpt, torch.float32)
    return state


def edited(hp: Hyperparameters, edit: str, monkeypatch) -> GPT:
    """A model with another MLP, with the weights of the seed."""
    torch.manual_seed(hp.seed)
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt, "MLP", EDITS[edit])
        return GPT(hp, torch.float32)


def test_a_bias_of_fc_acts(hp, monkeypatch):
    """It starts at zero, so that the first loss is that of a model without it."""
    gpt, plain = edited(hp, "bias", monkeypatch), make_state(hp).gpt
    for model in (gpt, plain):
        torch.manual_seed(0)
        for block in model.blocks:
            nn.init.normal_(block.mlp.proj.weight)
    tokens = torch.randint(hp.vocab_size, (2, hp.train_seq_len + 1))
    loss = gpt(tokens[:, :-1], tokens[:, 1:])
    assert loss == plain(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    assert all(block.mlp.fc.bias.grad.any() for block in gpt.blocks)
    with torch.no_grad():
        gpt.blocks[0].mlp.fc.bias += 1
    assert abs(gpt(tokens[:, :-1], tokens[:, 1:]) - loss) > 1e-3


def run_edit(folder, knobs, edit: str) -> list[CompletedProcess]:
    """Two gloo ranks of the script with an edit, at full rates: what each left behind."""
    off = dict.fromkeys(("WARMUP_STEPS", "WARMDOWN_ITERS", "MUON_MOMENTUM_WARMUP_STEPS"), "0")
    environ = {**knobs, **off, "ITERATIONS": "3", "CHECKPOINT_EVERY": "3"}
    return run_ranks(folder, environ, 2, [WORKER, edit])


def test_a_bias_of_fc_is_trained_on_one_process_and_on_two_ranks(tmp_path, hp, knobs, monkeypatch):
    alone = state_of(edited(hp, "bias", monkeypatch))
    expected = [train_step(alone).item() for _ in range(3)]
    first, second = run_edit(tmp_path, knobs, "bias")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    losses = [float(loss) for loss in re.findall(r"train_loss:(\S+)", first.stdout)]
    assert losses == pytest.approx(expected, abs=2e-3)
    weights = torch.load(tmp_path / "final_model.pt", weights_only=True)
    (checkpoint,) = tmp_path.glob("checkpoints/test/*.pt")
    held = torch.load(checkpoint, weights_only=True)["optimizers"]
    for i, block in enumerate(alone.gpt.blocks):
        bias = weights[f"blocks.{i}.mlp.fc.bias"]
        assert bias.abs().min() > 0 and block.mlp.fc.bias.abs().min() > 0  # all left zero
        assert held[f"blocks.{i}.mlp.fc.bias"]["exp_avg"].any()


def test_a_parameter_without_a_gradient_is_named(hp, monkeypatch):
    state = state_of(edited(hp, "dead", monkeypatch))
    with pytest.raises(AssertionError, match="blocks.0.mlp.dead got no gradient"):
        train_step(state)


def test_a_parameter_without_a_gradient_ends_two_ranks(tmp_path, knobs):
    for rank in run_edit(tmp_path, knobs, "dead"):
        assert rank.returncode == 1
        assert "blocks.0.mlp.dead got no gradient" in rank.stderr
        assert "step:1/" not in rank.stdout


def test_a_hook_on_attn_proj_changes_what_the_layer_gives(hp):
    """One that doubles it is as good as a doubled weight."""
    state, other = make_state(hp), make_state(hp)
    for gpt in (state.gpt, other.gpt):
        torch.manual_seed(0)
        for param in gpt.parameters():
            param.data += 0.1 * torch.randn_like(param)
    for block, other_block in zip(state.gpt.blocks, other.gpt.blocks, strict=True):
        block.attn.proj.register_forward_hook(lambda module, args, output: 2 * output)
        other_block.attn.proj.weight.data *= 2
    tokens = torch.randint(hp.vocab_size, (2, hp.train_seq_len + 1))
    losses = [gpt(tokens[:, :-1], tokens[:, 1:]) for gpt in (state.gpt, other.gpt)]
    torch.testing.assert_close(*losses)
    assert train_step(state).item() == pytest.approx(train_step(other).item(), rel=1e-5)


class ZLossGPT(GPT):
    """Keeps the logits small in training; what is reported stays the cross-entropy."""

    def forward(self, input_ids: Tensor, target_ids: Tensor, reduction: str = "mean") -> Tensor:
        loss = super().forward(input_ids, target_ids, reduction)
        if self.training:
            loss = loss + 0.1 * self.logits(input_ids).logsumexp(dim=1).square().mean()
        return loss


@pytest.mark.parametrize("compiled", [False, True])
def test_a_z_loss_counts_in_training_and_not_in_validation(hp, compiled):
    hp = dataclasses.replace(hp, num_layers=1)
    plain, state = make_state(hp), state_of(ZLossGPT(hp, torch.float32))
    state.gpt.load_state_dict(plain.gpt.state_dict())
    if compiled:
        state.model = torch.compile(state.gpt, backend="eager", fullgraph=True, dynamic=False)
    tokens = torch.randint(hp.vocab_size, (5 * hp.train_seq_len + 1,)).to(torch.uint16)
    for evaluate in (train_gpt.evaluate, train_gpt.evaluate_sliding):
        assert evaluate(state.model, tokens, hp, ALONE) == evaluate(plain.model, tokens, hp, ALONE)
        assert all(module.training for module in state.gpt.modules())
    z_loss = 0.1 * math.log(hp.vocab_size) ** 2  # at the start all logits are near zero
    expected = train_step(plain).item() + z_loss
    assert train_step(state).item() == pytest.approx(expected, rel=0.02)


class Lora(nn.Module):
    """A frozen linear layer and what is learned beside it, of rank 2 (Hu et al., 2021)."""

    def __init__(self, base: CastedLinear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        low = F.linear(F.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype))
        return self.base(x, scale) + scale.to(x.dtype) * low


@pytest.mark.parametrize("part", ["attn", "mlp"])
def test_lora_around_an_output_projection_learns(hp, part):
    gpt = make_state(hp).gpt
    for block in gpt.blocks:
        layer = getattr(block, part)
        layer.proj = Lora(layer.proj)
    before = {name: param.clone() for name, param in gpt.named_parameters()}
    state = state_of(gpt)
    losses = [train_step(state).item() for _ in range(8)]
    assert losses[-1] < losses[0] - 0.1
    for name, param in gpt.named_parameters():
        assert torch.equal(param, before[name]) == name.endswith("proj.base.weight"), name
    state.restore(state.snapshot())
