"""Newton-Schulz, Muon, and the optimizer group of each parameter. Whole steps: test_training.py."""

import plain
import pytest
import torch
from torch import nn

import train_gpt
from train_gpt import GPT, Hyperparameters, InputError, parameter_groups

HP = Hyperparameters(num_layers=1, model_dim=32, control_tensor_name_patterns=("c_q",))


@pytest.mark.baseline
def test_bf16_rounds_where_the_reference_does():
    """In b A + (c A) A, the scalar comes before the product. Another order gives other bits."""
    torch.manual_seed(0)
    x = torch.randn(3, 16, 40).bfloat16()
    assert torch.equal(train_gpt.newton_schulz(x, 5), plain.newton_schulz(x, 5))


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
def test_muon_takes_the_steps_of_torch():
    """An oracle that nobody here wrote. It rounds to bf16: a difference of one percent."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 64), (32, 64), (128, 64), (128, 16)]
    start = [0.02 * torch.randn(shape, generator=generator) for shape in shapes]
    ours, theirs = ([nn.Parameter(values.clone()) for values in start] for _ in range(2))
    muon = train_gpt.Muon(ours, 0.04, momentum=0.95, backend_steps=5, dtype=torch.float32)
    oracle = torch.optim.Muon(theirs, 0.04, momentum=0.95, weight_decay=0.0)
    for _ in range(4):
        for first, second in zip(ours, theirs, strict=True):
            first.grad = torch.randn(first.shape, generator=generator)
            second.grad = first.grad.clone()
        muon.step()
        oracle.step()
    for first, second, values in zip(ours, theirs, start, strict=True):
        assert (first - second).norm() < 0.02 * (second - values).norm()
