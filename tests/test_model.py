"""GPT: its initial weights and dtypes. Its loss and gradients: test_training.py."""

from dataclasses import replace

import pytest
import torch
from plain import PlainGPT
from scripts import randomize

from train_gpt import GPT, Hyperparameters

HP = Hyperparameters(
    vocab_size=96, num_layers=5, model_dim=32, num_heads=4, num_kv_heads=2, train_seq_len=24
)


@pytest.mark.baseline
@pytest.mark.parametrize("tied", [True, False])
def test_initial_weights_are_the_contracts_for_a_seed(tied):
    """torch's layers draw them in the plain model's order, except zeros and a tied embedding."""
    hp = replace(HP, tie_embeddings=tied)
    torch.manual_seed(5)
    gpt = GPT(hp, torch.bfloat16)
    torch.manual_seed(5)
    expected = PlainGPT(hp).state_dict()
    for name, tensor in expected.items():
        if name.endswith(("proj.weight", "lm_head.weight")):
            tensor.zero_()
    if tied:
        expected["tok_emb.weight"].normal_(0, hp.tied_embed_init_std)
    found = gpt.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == (torch.bfloat16 if name == "tok_emb.weight" else torch.float32)
        assert torch.equal(tensor.float(), expected[name].bfloat16().float()), name


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
