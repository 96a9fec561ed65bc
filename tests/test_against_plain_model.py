"""A short training in fp32 against the plain model and optimizers."""

import pytest
from conftest import ALONE, make_state

from tests import plain
from train_gpt import Hyperparameters, train_step

STEPS = 20


@pytest.mark.baseline
@pytest.mark.parametrize("tied", ["1", "0"])
def test_losses_are_the_plain_ones(knobs, tied):
    small = {"TRAIN_BATCH_TOKENS": "256", "BATCH_SLOTS": "2", "TIE_EMBEDDINGS": tied}
    hp = Hyperparameters.from_env({**knobs, **small, "EMBED_LR": "0.05"})
    state = make_state(hp)
    model = plain.PlainGPT.like(state.gpt, hp)
    optimizers = plain.PlainOptimizers(model, hp, bf16=False)
    slots = plain.batches(state.loader.stream.paths, ALONE.device, 128, hp.train_seq_len)
    fast, slow = [], []
    for _ in range(STEPS):
        fast.append(train_step(state).item())
        slow.append(plain.train_step(model, optimizers, slots, 2))
    assert fast == pytest.approx(slow, rel=1e-3)
    assert fast[-1] < fast[0] - 0.5  # there was something to agree about
