"""Newton-Schulz, Muon, and the group of each parameter."""

import pytest
import torch
from torch import nn

import train_gpt
from train_gpt import GPT, Hyperparameters, InputError, Muon, build_optimizers, parameter_groups


@pytest.mark.baseline
def test_bf16_rounds_where_the_reference_does():
    """b A + (c A) A: the scalar comes before the product. The other order gives other bits."""
    torch.manual_seed(0)
    x = torch.randn(3, 16, 40).bfloat16()
    expected = x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        A = expected @ expected.mT
        B = -4.7750 * A + (2.0315 * A) @ A
        assert not torch.equal(B, -4.7750 * A + 2.0315 * (A @ A))
        expected = 3.4445 * expected + B @ expected
    assert torch.equal(train_gpt.newton_schulz(x, 5), expected)


@pytest.mark.baseline
def test_matrices_of_one_shape_are_orthogonalized_together_as_if_each_were_alone():
    """A rank may have none. (That ranks share the work: test_training.py.)"""
    torch.manual_seed(0)
    shapes = [(16, 16), (8, 32), (32, 8), (16, 16), (8, 32), (1, 5), (2, 40)]
    matrices = [torch.randn(shape) for shape in shapes]
    muon = Muon([nn.Parameter(torch.zeros(1, 1))], lr=0.0, momentum=0.0, backend_steps=5)
    for matrix, result in zip(matrices, muon.orthogonalize(matrices, 5), strict=True):
        rows, columns = matrix.shape
        U, _, V = torch.linalg.svd(matrix, full_matrices=False)
        ideal = U @ V * max(1, rows / columns) ** 0.5  # Newton-Schulz comes within a third
        assert (result - ideal).norm() < 0.35 * ideal.norm(), matrix.shape
    assert muon.orthogonalize([], 5) == []


@pytest.mark.baseline
@pytest.mark.parametrize("tied", [True, False])
def test_each_parameter_has_its_learning_rate(tied):
    hp = Hyperparameters(
        num_layers=2, model_dim=32, tie_embeddings=tied, matrix_lr=0.1, scalar_lr=0.2, head_lr=0.3,
        embed_lr=0.4, tied_embed_lr=0.5,
    )  # fmt: skip
    gpt = GPT(hp)
    adam, muon = build_optimizers(gpt)
    groups = [group for optimizer in (adam, muon) for group in optimizer.param_groups]
    found = [(id(p), group["lr"]) for group in groups for p in group["params"]]
    rates = dict(found)
    assert len(found) == len(rates) == len(list(gpt.parameters()))  # each in exactly one group
    embed_lr = 0.5 if tied else 0.4
    matrices = {name: 0.1 for name in gpt.state_dict() if name.endswith("weight")}
    expected = {**matrices, "tok_emb.weight": embed_lr, "lm_head.weight": 0.3}
    for name, p in gpt.named_parameters():
        assert rates[id(p)] == expected.get(name, 0.2), name
    assert [group["lr"] for group in muon.param_groups] == [0.1]
    assert all(group["betas"] == (0.9, 0.95) for group in adam.param_groups)
    assert adam.defaults["eps"] == 1e-8
    assert adam.defaults["weight_decay"] == 0


@pytest.mark.baseline
def test_control_patterns_move_matrices_from_muon_to_adam():
    hp = Hyperparameters(num_layers=1, model_dim=32, control_tensor_name_patterns=("c_q",))
    gpt = GPT(hp)
    groups = parameter_groups(gpt, hp)
    block = gpt.blocks[0]
    assert any(p is block.attn.c_q.weight for p in groups["scalar"])
    assert any(p is block.resid_mix for p in groups["matrix"])  # its pattern is gone
    assert any(p is block.attn_scale for p in groups["scalar"])  # but it is a vector


def test_a_parameter_without_a_group_is_named(monkeypatch):
    hp = Hyperparameters(num_layers=1, model_dim=32)
    gpt = GPT(hp)
    gpt.test_layer = nn.Linear(2, 3)
    gpt.test_vector = nn.Parameter(torch.zeros(3))
    with pytest.raises(InputError, match=r"^test_vector .*OPTIMIZER_GROUPS"):
        parameter_groups(gpt, hp)
    monkeypatch.setitem(train_gpt.OPTIMIZER_GROUPS, "test_layer.", "scalar")  # by prefix
    monkeypatch.setitem(train_gpt.OPTIMIZER_GROUPS, "test_vector", "head")
    groups = parameter_groups(gpt, hp)
    assert any(p is gpt.test_vector for p in groups["head"])
    assert {id(p) for p in gpt.test_layer.parameters()} <= {id(p) for p in groups["scalar"]}
