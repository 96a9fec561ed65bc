"""Bytes of a token, the validation split, the loss over it, the lines that say it."""

import math
from dataclasses import replace

import numpy as np
import pytest
import sentencepiece
import torch
from conftest import ALONE, TEXTS, VOCAB_SIZE, Lines, write_shard
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import train_gpt
from train_gpt import GPT, Hyperparameters, InputError, StopSignal, TrainingState, Validation


@pytest.fixture(scope="module")
def sp(tokenizer) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))


@settings(max_examples=100, deadline=None)
@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=60)))
def test_bytes_are_those_of_the_decoded_text(sp, text):
    """For any text: words, runs of spaces, characters that fall back to bytes."""
    ids = sp.encode(text)
    # A literal U+2581 cannot be told from a space; the rest has no bytes of its own.
    assume("\u2581" not in text and "\ufffd" not in sp.decode(ids) and sp.unk_id() not in ids)
    # A letter in front, so that the decoder keeps a leading space.
    ids = [*sp.encode("a"), *ids]
    assert train_gpt.count_bytes(sp, np.array(ids)) == len(sp.decode(ids).encode()) - 1


def test_bytes_by_the_rules(sp):
    lone, letter, byte = sp.piece_to_id("\u2581"), sp.piece_to_id("a"), sp.piece_to_id("<0xE2>")
    word = next(i for i in range(VOCAB_SIZE) if sp.id_to_piece(i) == "\u2581the")
    bos, unk = sp.bos_id(), sp.unk_id()
    for ids, expected in [
        ([letter, lone], 1),
        ([letter, word], 4),
        ([bos, word], 3),  # no space behind a control piece
        ([unk, word], 3),
        ([word, byte], 1),
        ([word, bos, unk, letter], 1),
        ([word], 0),  # not a target
    ]:
        assert train_gpt.count_bytes(sp, np.array(ids)) == expected, ids


@pytest.fixture
def small(tmp_path, tokenizer) -> Hyperparameters:
    """A validation split of two shards, 100 tokens; T = 16."""
    rng = np.random.default_rng(0)
    for i, n in enumerate((37, 63)):
        write_shard(tmp_path / f"fineweb_val_{i:06d}.bin", rng.integers(4, VOCAB_SIZE, n))
    return Hyperparameters(
        tokenizer_path=str(tokenizer), vocab_size=VOCAB_SIZE, data_path=str(tmp_path),
        train_seq_len=16, val_batch_size=8 * 16,
        num_layers=2, model_dim=16, num_heads=2, num_kv_heads=1,
    )  # fmt: skip


def state_of(hp: Hyperparameters) -> TrainingState:
    """As under EVAL_ONLY, with a model that has something to say."""
    torch.manual_seed(0)
    gpt = GPT(hp, torch.float32)
    with torch.no_grad():
        for param in gpt.parameters():
            param.add_(0.1 * torch.randn_like(param))
    runtime = replace(ALONE, log=Lines(), stop=StopSignal())
    return TrainingState(hp, runtime, gpt, gpt, [], None, train_gpt.Stopwatch(runtime))


def test_a_tokenizer_that_does_not_fit_is_named_with_the_way_out(small):
    with pytest.raises(InputError, match="TOKENIZER_PATH='/nowhere'(.|\n)*PRESET=demo"):
        Validation(replace(small, tokenizer_path="/nowhere"))
    with pytest.raises(InputError, match=f"TOKENIZER_PATH.* set VOCAB_SIZE={VOCAB_SIZE}"):
        Validation(replace(small, vocab_size=1024))


def test_the_split_is_cut_to_whole_sequences(small, tmp_path, sp):
    shards = sorted(tmp_path.glob("fineweb_val_*.bin"))
    tokens = np.concatenate([np.fromfile(path, "<u2", offset=1024) for path in shards])
    cases = [(16, 0, 97, ""), (16, 50, 49, " partial:3/6"), (16, 999, 97, ""), (99, 0, 100, "")]
    for T, limit, kept, partial in cases:
        validation = Validation(replace(small, train_seq_len=T, max_val_tokens=limit))
        assert validation.tokens.dtype == torch.uint16
        assert validation.tokens.tolist() == tokens[:kept].tolist()
        assert validation.partial == partial
        assert validation.num_bytes == train_gpt.count_bytes(sp, tokens[:kept])
        bits = validation.bits_per_byte(math.log(8)) * validation.num_bytes
        assert bits == pytest.approx(3 * (kept - 1))


def test_too_few_tokens_and_foreign_tokens(small, tmp_path):
    with pytest.raises(InputError, match="100 validation tokens .*TRAIN_SEQ_LEN=100"):
        Validation(replace(small, train_seq_len=100))
    write_shard(tmp_path / "fineweb_val_000002.bin", [5, VOCAB_SIZE])
    with pytest.raises(InputError, match=f"fineweb_val_000002.bin: token id {VOCAB_SIZE}"):
        Validation(small)


@pytest.mark.parametrize("stride", [1, 4, 5, 15, 16])
def test_each_target_is_scored_once_in_the_first_window_that_holds_it(small, stride):
    """Against scoring token by token, for any number of ranks and windows in a batch. A stride of
    16 is the metric: windows side by side."""
    state, tokens = state_of(small), Validation(small).tokens
    ids = tokens.to(torch.int64)
    ends = [16, *range(16 + stride, 96, stride), 96]  # of windows, in targets
    expected = 0.0
    for t in range(96):
        begin = next(end for end in ends if t < end) - 16
        with torch.no_grad():
            logits = state.gpt.logits(ids[begin : t + 1][None])[-1]
        expected -= logits.log_softmax(0)[ids[t + 1]].item() / 96
    for world_size, batch in [(1, 1), (1, 3), (1, 100), (2, 1), (8, 3), (8, 100)]:
        state.hp = replace(small, val_batch_size=8 * 16 * batch)
        loss = 0.0
        for rank in range(world_size):
            state.runtime = replace(ALONE, rank=rank, world_size=world_size, stop=StopSignal())
            # Without a process group this rank's share stands for that of every rank.
            loss += train_gpt.evaluate(state, tokens, stride) / world_size
        assert loss == pytest.approx(expected, rel=1e-5)


class Watched(nn.Module):
    """Keeps the mode of every call, of its own and of a layer's inside, and whether gradients are
    kept. Gets a signal in the third call."""

    def __init__(self, stop: StopSignal) -> None:
        super().__init__()
        self.layer, self.stop, self.seen = nn.Dropout(), stop, []

    def forward(self, x: torch.Tensor, y: torch.Tensor, reduction: str) -> torch.Tensor:
        self.seen.append((self.training, self.layer.training, torch.is_grad_enabled()))
        if len(self.seen) == 3:
            self.stop.handle(15, None)
        return y.float()


def test_validation_is_in_eval_mode_until_a_signal_ends_it(small):
    state = state_of(small)
    state.model = Watched(state.runtime.stop)
    assert train_gpt.evaluate(state, Validation(small).tokens, 16) is None
    assert state.model.seen == 3 * [(False, False, False)]
    assert state.model.training and state.model.layer.training


def test_the_last_lines_are_the_score_rounded_and_exact(small):
    hp = replace(small, eval_stride=4)
    state, validation = state_of(hp), Validation(hp)
    name = "final_int8_zlib_roundtrip"
    figures = train_gpt.score(state, validation, name)
    loss, sliding = (train_gpt.evaluate(state, validation.tokens, stride) for stride in (16, 4))
    bpb, sliding_bpb = (validation.bits_per_byte(value) for value in (loss, sliding))
    first, rounded, exact = state.runtime.log.text.splitlines()
    assert first == f"{name}_sliding stride:4 val_loss:{sliding:.8f} val_bpb:{sliding_bpb:.8f}"
    assert rounded.startswith(f"{name} val_loss:{loss:.4f} val_bpb:{bpb:.4f} eval_time:")
    assert exact == f"{name}_exact val_loss:{loss:.8f} val_bpb:{bpb:.8f}"
    assert (figures["val_loss"], figures["sliding_val_bpb"]) == (loss, sliding_bpb)
    partial = Validation(replace(hp, max_val_tokens=50))
    train_gpt.score(state, partial, "eval_only")
    *_, sliding, last = state.runtime.log.text.splitlines()
    assert sliding.startswith("eval_only_sliding stride:4 val_loss:")
    assert last.startswith("eval_only val_loss:")
    assert sliding.endswith(" partial:3/6") and last.endswith(" partial:3/6")
