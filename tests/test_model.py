"""GPT: its size, dtypes and optimizer groups. Figures of the script against those of the baseline's
own file: helpers/reference_figures.py."""

import json

import pytest
import reference_figures
import torch
from scripts import randomize
from torch import nn

import train_gpt
from train_gpt import GPT, Hyperparameters, InputError, parameter_groups

HP = Hyperparameters(
    vocab_size=96, num_layers=5, model_dim=32, num_heads=4, num_kv_heads=2, train_seq_len=24,
    control_tensor_name_patterns=("c_q",),
)  # fmt: skip


@pytest.mark.baseline
def test_the_default_model_has_17_million_parameters():
    params = GPT(Hyperparameters()).parameters()
    assert sum(param.numel() for param in params) == 17_059_912


@pytest.mark.baseline
def test_bf16_stays_close_to_fp32_and_keeps_its_dtype():
    gpt = randomize(GPT(HP, torch.float32))
    x, y = torch.randint(HP.vocab_size, (2, 3, HP.train_seq_len))
    half = GPT(HP, torch.bfloat16)
    half.load_state_dict(gpt.state_dict())
    seen = []
    for block in half.blocks:
        block.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    assert abs(half(x, y).item() - gpt(x, y).item()) < 0.05
    assert set(seen) == {torch.bfloat16} and half(x, y).dtype == torch.float32


@pytest.mark.baseline
def test_control_patterns_move_matrices_from_muon_to_adam():
    gpt = GPT(HP)
    groups = parameter_groups(gpt, HP)
    block = gpt.blocks[0]
    assert any(p is block.attn.c_q.weight for p in groups["scalar"])
    assert any(p is block.resid_mix for p in groups["matrix"])  # its pattern is gone
    assert any(p is block.attn_scale for p in groups["scalar"])  # but it is a vector


def test_a_parameter_without_a_group_and_an_unknown_group_are_named(monkeypatch):
    gpt = GPT(HP)
    gpt.test_layer = nn.Linear(2, 3)
    gpt.test_vector = nn.Parameter(torch.zeros(3))
    with pytest.raises(InputError, match=r"^test_vector .*OPTIMIZER_GROUPS"):
        parameter_groups(gpt, HP)
    monkeypatch.setitem(train_gpt.OPTIMIZER_GROUPS, "test_layer.", "scalar")  # by prefix
    monkeypatch.setitem(train_gpt.OPTIMIZER_GROUPS, "test_vector", "head")
    groups = parameter_groups(gpt, HP)
    assert any(p is gpt.test_vector for p in groups["head"])
    assert {id(p) for p in gpt.test_layer.parameters()} <= {id(p) for p in groups["scalar"]}
    monkeypatch.setitem(train_gpt.OPTIMIZER_GROUPS, "test_vector", "adam")
    with pytest.raises(InputError, match="^OPTIMIZER_GROUPS has adam: use embed, head, matrix, sc"):
        parameter_groups(gpt, HP)


@pytest.mark.baseline
def test_figures_are_the_baselines():
    wanted = json.loads(reference_figures.REFERENCE.read_text())
    found = reference_figures.compute(train_gpt)
    assert list(reference_figures.differences(found, wanted)) == []
