"""The optimizer group of each parameter. Muon's steps: test_reference.py and test_training.py."""

import pytest
import torch
from torch import nn

import train_gpt
from train_gpt import GPT, Hyperparameters, InputError, parameter_groups

HP = Hyperparameters(num_layers=1, model_dim=32, control_tensor_name_patterns=("c_q",))


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
