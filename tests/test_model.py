"""GPT: its parameters, its function and its training against the plain model."""

import pytest
import torch
from plain import PlainGPT, PlainOptimizers, batches, plain_step
from runs import ALONE
from scripts import randomize
from torch import nn

from train_gpt import GPT, Hyperparameters, new_state, train_step

SMALL = dict(
    vocab_size=96, num_layers=5, model_dim=32, num_heads=4, num_kv_heads=2, train_seq_len=24
)


def build(dtype=torch.float32, seed=0, **knobs) -> tuple[GPT, Hyperparameters]:
    hp = Hyperparameters(**{**SMALL, **knobs})
    torch.manual_seed(seed)
    return GPT(hp, dtype), hp


def batch(hp: Hyperparameters, sequences: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(hp.vocab_size, (sequences, hp.train_seq_len + 1))
    return tokens[:, :-1], tokens[:, 1:]


def gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(x, y).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.baseline
@pytest.mark.parametrize("tied", [True, False])
def test_initial_weights_are_the_contracts_for_a_seed(tied):
    gpt, hp = build(torch.bfloat16, seed=5, tie_embeddings=tied, num_layers=3)
    torch.manual_seed(5)
    D, kv = hp.model_dim, 16
    embedding = nn.Embedding(hp.vocab_size, D).weight
    shapes = {
        "attn.c_q": (D, D), "attn.c_k": (kv, D), "attn.c_v": (kv, D), "attn.proj": (D, D),
        "mlp.fc": (2 * D, D), "mlp.proj": (D, 2 * D),
    }  # fmt: skip
    drawn = {
        f"blocks.{i}.{name}.weight": nn.Linear(columns, rows, bias=False).weight
        for i in range(3)
        for name, (rows, columns) in shapes.items()
    }
    if tied:
        embedding = torch.empty(hp.vocab_size, D).normal_(0, hp.tied_embed_init_std)
    else:
        drawn["lm_head.weight"] = torch.zeros(hp.vocab_size, D)
    drawn["tok_emb.weight"] = embedding
    state = gpt.state_dict()
    assert [n for n, p in state.items() if p.dtype != torch.float32] == ["tok_emb.weight"]
    assert state["tok_emb.weight"].dtype == torch.bfloat16
    for name, weight in drawn.items():
        if "proj" in name:
            weight = torch.zeros_like(weight)
        assert torch.equal(state[name].float(), weight.bfloat16().float()), name
    assert torch.equal(state["blocks.1.resid_mix"], torch.stack((torch.ones(D), torch.zeros(D))))
    assert torch.equal(state["blocks.2.attn.q_gain"], torch.full((4,), hp.qk_gain_init))
    for name in ("skip_weights", "blocks.0.attn_scale", "blocks.0.mlp_scale"):
        assert torch.equal(state[name], torch.ones_like(state[name]))


@pytest.mark.baseline
@pytest.mark.parametrize("tied, layers, kv_heads", [(True, 1, 4), (False, 4, 1), (True, 5, 2)])
def test_equals_the_plain_model(tied, layers, kv_heads):
    """With the same names and shapes of parameters."""
    gpt, hp = build(tie_embeddings=tied, num_layers=layers, num_kv_heads=kv_heads)
    plain = PlainGPT.like(randomize(gpt), hp)
    x, y = batch(hp)
    torch.testing.assert_close(gpt(x, y), plain(x, y), rtol=1e-5, atol=1e-5)
    expected = gradients(plain, x, y)
    found = gradients(gpt, x, y)
    if layers == 1:
        expected.pop("skip_weights", None)
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.baseline
def test_bf16_stays_close_to_fp32_and_keeps_its_dtype():
    gpt, hp = build()
    x, y = batch(hp)
    half = GPT(hp, torch.bfloat16)
    half.load_state_dict(randomize(gpt).state_dict())
    seen = []
    for block in half.blocks:
        block.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    assert abs(half(x, y).item() - gpt(x, y).item()) < 0.05
    assert set(seen) == {torch.bfloat16} and half(x, y).dtype == torch.float32


def test_no_loss_depends_on_later_tokens():
    gpt, hp = build(num_layers=4)
    randomize(gpt).eval()
    x, y = batch(hp, 1)
    with torch.no_grad():
        before = gpt(x, y, "none")[0]
        for position in (1, 12, 23):
            changed = x.clone()
            changed[0, position] = (x[0, position] + 1) % hp.vocab_size
            moved = (gpt(changed, y, "none")[0] - before).abs()
            assert moved[:position].max() < 1e-6 < 1e-3 < moved[position]


@pytest.mark.baseline
@pytest.mark.parametrize("tied", ["1", "0"])
def test_the_losses_of_a_training_are_the_plain_ones(knobs, tied):
    small = {"TRAIN_BATCH_TOKENS": "256", "BATCH_SLOTS": "2", "TIE_EMBEDDINGS": tied}
    hp = Hyperparameters.from_env({**knobs, **small, "EMBED_LR": "0.05"})
    state = new_state(hp, ALONE)
    model = PlainGPT.like(state.gpt, hp)
    optimizers = PlainOptimizers(model, hp, bf16=False)
    slots = batches(state.loader.stream.paths, ALONE.device, 128, hp.train_seq_len)
    steps = [(train_step(state).item(), plain_step(model, optimizers, slots, 2)) for _ in range(20)]
    fast, slow = zip(*steps, strict=True)
    assert fast == pytest.approx(slow, rel=1e-3)
    assert fast[-1] < fast[0] - 0.5  # there was something to agree about
