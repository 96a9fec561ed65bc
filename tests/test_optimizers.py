"""Newton-Schulz, Muon, and the table that gives every parameter its optimizer."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from tests import plain
from train_gpt import (
    GPT,
    Hyperparameters,
    Muon,
    build_optimizers,
    newton_schulz,
    orthogonalize,
    parameter_groups,
)

SHAPES = [(16, 16), (8, 32), (32, 8), (16, 16), (8, 32), (1, 5), (2, 40)]


@pytest.mark.parametrize("shape", [(32, 32), (16, 64), (64, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_singular_values_come_near_one(shape, dtype):
    torch.manual_seed(0)
    (update,) = orthogonalize([torch.randn(shape).to(dtype)], 5)
    assert update.shape == shape and update.dtype == dtype
    values = torch.linalg.svdvals(update.float()) / math.sqrt(max(1, shape[0] / shape[1]))
    assert values.min() > 0.5 and values.max() < 1.35


def test_newton_schulz_keeps_the_singular_vectors():
    torch.manual_seed(0)
    u, v = torch.linalg.qr(torch.randn(8, 8))[0], torch.linalg.qr(torch.randn(20, 8))[0]
    values = torch.linspace(0.5, 1.5, 8)
    result = newton_schulz((u @ torch.diag(values) @ v.T)[None], 5)[0]
    core = u.T @ result @ v
    torch.testing.assert_close(core, torch.diag(core.diagonal()), atol=1e-4, rtol=0)


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
    assert torch.equal(newton_schulz(x, 5), expected)


def test_batched_equals_one_by_one():
    torch.manual_seed(0)
    matrices = [torch.randn(shape) for shape in SHAPES]
    for matrix, update in zip(matrices, orthogonalize(matrices, 5), strict=True):
        rows, columns = matrix.shape
        expected = plain.newton_schulz(matrix, 5) * math.sqrt(max(1, rows / columns))
        torch.testing.assert_close(update, expected, rtol=1e-4, atol=1e-5)


def test_a_zero_gradient_moves_nothing():
    assert all(not u.any() for u in orthogonalize([torch.zeros(4, 4), torch.zeros(8, 2)], 5))


def test_two_muon_steps_by_hand():
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in ((6, 4), (4, 6))]
    expected = [p.detach().clone() for p in params]
    buffers = [torch.zeros_like(p) for p in params]
    muon = Muon(params, lr=0.1, momentum=0.9, backend_steps=3, dtype=torch.float32)
    for _ in range(2):
        for p, value, buffer in zip(params, expected, buffers, strict=True):
            p.grad = torch.randn_like(p)
            buffer.mul_(0.9).add_(p.grad)
            u = p.grad + 0.9 * buffer
            u = u.T if u.size(0) > u.size(1) else u
            u = u / (u.norm() + 1e-7)
            for _ in range(3):
                A = u @ u.T
                u = 3.4445 * u + (-4.7750 * A + 2.0315 * A @ A) @ u
            u = u.T if p.size(0) > p.size(1) else u
            value -= 0.1 * (u * math.sqrt(max(1, p.size(0) / p.size(1))))
        muon.step()
    for p, value, buffer in zip(params, expected, buffers, strict=True):
        torch.testing.assert_close(p.detach(), value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(muon.state[p]["momentum_buffer"], buffer)


def test_updates_pass_through_the_given_dtype():
    p = nn.Parameter(torch.zeros(4, 4))
    for dtype in (torch.bfloat16, torch.float32):
        p.grad = torch.randn(4, 4)
        p.data.zero_()
        Muon([p], lr=1.0, momentum=0.0, backend_steps=5, dtype=dtype).step()
        assert torch.equal(p, p.bfloat16().float()) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 64])
def test_the_work_is_shared_completely_and_evenly(world_size):
    hp = Hyperparameters()
    matrices = parameter_groups(GPT(hp), hp)["matrix"]
    muon = Muon(matrices, lr=1.0, momentum=0.0, backend_steps=5)
    muon.world_size = world_size
    shares = muon.shares(matrices)
    assert sorted(id(p) for share in shares for p in share) == sorted(map(id, matrices))
    costs = [sum(min(p.shape) ** 2 * (2 * max(p.shape) + min(p.shape)) for p in share)
             for share in shares]  # fmt: skip
    if world_size <= 8:
        assert max(costs) < 1.25 * sum(costs) / world_size


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_exactly_one_group_of_one_optimizer(tied):
    hp = Hyperparameters(num_layers=3, model_dim=32, tie_embeddings=tied)
    gpt = GPT(hp)
    adam, muon = build_optimizers(gpt, torch.bfloat16)
    found = [p for o in (adam, muon) for group in o.param_groups for p in group["params"]]
    assert sorted(map(id, found)) == sorted(id(p) for p in gpt.parameters())
    names = {id(p): name for name, p in gpt.named_parameters()}
    groups = {
        group["lr"]: {names[id(p)] for p in group["params"]}
        for o in (adam, muon)
        for group in o.param_groups[: len(o.param_groups)]
        if group["lr"] != hp.scalar_lr or o is muon
    }
    assert {n for n in groups[hp.matrix_lr]} == {
        n for n, p in gpt.named_parameters() if n.endswith("weight") and n.startswith("blocks")
    }
    assert groups[hp.tied_embed_lr if tied else hp.embed_lr] == {"tok_emb.weight"}
    if not tied:
        assert groups[hp.head_lr] == {"lm_head.weight"}
    assert adam.defaults["betas"] == (0.9, 0.95) and adam.defaults["eps"] == 1e-8
    assert adam.defaults["weight_decay"] == 0


def test_control_patterns_move_matrices_from_muon_to_adam():
    hp = Hyperparameters(num_layers=1, model_dim=32, control_tensor_name_patterns=("c_q",))
    groups = parameter_groups(GPT(hp), hp)
    names = {id(p): n for n, p in GPT(hp).named_parameters()}
    assert len(names) == sum(map(len, groups.values()))
    assert (32, 32) in [tuple(p.shape) for p in groups["scalar"]]
    assert (2, 32) in [tuple(p.shape) for p in groups["matrix"]]  # resid_mix, no longer named
    everything = dataclasses.replace(hp, control_tensor_name_patterns=("blocks",))
    assert len(build_optimizers(GPT(everything), torch.bfloat16)) == 1  # no matrix left


def test_a_parameter_that_nobody_takes_is_an_error():
    hp = Hyperparameters(num_layers=1, model_dim=32)
    gpt = GPT(hp)
    gpt.new_thing = nn.Parameter(torch.zeros(3))
    with pytest.raises(AssertionError, match="new_thing"):
        parameter_groups(gpt, hp)


def test_a_step_equals_the_plain_optimizers():
    torch.manual_seed(0)
    hp = Hyperparameters(num_layers=3, model_dim=32, vocab_size=64)
    gpt = GPT(hp, torch.float32)
    other = plain.PlainGPT.like(gpt, hp)
    optimizers = build_optimizers(gpt, torch.float32)
    plain_optimizers = plain.PlainOptimizers(other, hp)
    names = dict(other.named_parameters())
    for _ in range(3):
        for name, p in gpt.named_parameters():
            p.grad = torch.randn_like(p)
            names[name].grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        for adam in plain_optimizers.adams:
            adam.step()
        plain_optimizers.muon_step(hp.matrix_lr, hp.muon_momentum, torch.float32)
    for name, p in gpt.named_parameters():
        torch.testing.assert_close(p, names[name], rtol=1e-4, atol=1e-5, msg=name)
