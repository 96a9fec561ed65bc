"""GPT: its size and dtypes. Its initial weights, loss and gradients: test_reference.py."""

import pytest
import torch
from scripts import randomize

from train_gpt import GPT, Hyperparameters

HP = Hyperparameters(
    vocab_size=96, num_layers=5, model_dim=32, num_heads=4, num_kv_heads=2, train_seq_len=24
)


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
