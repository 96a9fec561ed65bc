"""GPT: its initial weights and dtypes. Its loss and gradients: test_training.py."""

import pytest
import torch
from scripts import randomize
from torch import nn

from train_gpt import GPT, Hyperparameters

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
