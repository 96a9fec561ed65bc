"""Bytes of a token, the validation split, the loss over it."""

import dataclasses
import math

import numpy as np
import pytest
import sentencepiece
import torch
from conftest import ALONE, TEXTS, VOCAB_SIZE, train_tokenizer, write_shard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from train_gpt import (
    GPT,
    Hyperparameters,
    Validation,
    evaluate,
    evaluate_sliding,
    load_tokenizer,
)


def tokenizer_knobs(path, **knobs) -> Hyperparameters:
    return Hyperparameters(**{"tokenizer_path": str(path), "vocab_size": VOCAB_SIZE, **knobs})


@pytest.fixture(scope="module")
def token_bytes(tokenizer):
    return load_tokenizer(tokenizer_knobs(tokenizer))


@settings(max_examples=200, deadline=None)
@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=60)))
def test_bytes_are_those_of_the_decoded_text(tokenizer, token_bytes, text):
    """For any text: words, runs of spaces, characters that fall back to bytes."""
    sp = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    ids = sp.encode(text)
    if "\u2581" in text or "\ufffd" in sp.decode(ids) or sp.unk_id() in ids:
        return  # a literal U+2581 cannot be told from a space; the rest has no bytes of its own
    # A letter in front, so that the decoder keeps a leading space.
    front = sp.encode("a")
    assert (
        token_bytes.count(np.array([*front, *ids])) == len(sp.decode([*front, *ids]).encode()) - 1
    )


def test_bytes_by_the_rules(tokenizer, token_bytes):
    sp = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    lone, letter, byte = sp.piece_to_id("\u2581"), sp.piece_to_id("a"), sp.piece_to_id("<0xE2>")
    word = next(i for i in range(VOCAB_SIZE) if sp.id_to_piece(i) == "\u2581the")
    bos, unk = sp.bos_id(), sp.unk_id()
    assert token_bytes.count(np.array([letter, lone])) == 1
    assert token_bytes.count(np.array([letter, word])) == 4
    assert token_bytes.count(np.array([bos, word])) == 3  # no space behind a control piece
    assert token_bytes.count(np.array([unk, word])) == 3
    assert token_bytes.count(np.array([word, byte])) == 1
    assert token_bytes.count(np.array([word, bos, unk, letter])) == 1
    assert token_bytes.count(np.array([word])) == 0


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", ["SentencePiece .model"]),
        (b"no tokenizer", ["SentencePiece .model"]),
    ],
)
def test_a_file_that_is_no_tokenizer(tmp_path, content, words):
    path = tmp_path / "x.model"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        load_tokenizer(tokenizer_knobs(path))
    assert all(word in str(caught.value) for word in [f"TOKENIZER_PATH='{path}'", *words])


def test_a_missing_tokenizer_names_the_ways_out(tmp_path):
    for path in (tmp_path / "x.model", tmp_path):  # nothing, and a folder
        with pytest.raises(FileNotFoundError) as caught:
            load_tokenizer(tokenizer_knobs(path))
        assert str(caught.value).startswith(f"TOKENIZER_PATH='{path}' is not a file\n")
        assert "PRESET=demo" in str(caught.value)


def test_a_tokenizer_of_another_size(tokenizer):
    with pytest.raises(ValueError, match=f"VOCAB_SIZE={VOCAB_SIZE}, not 1024"):
        load_tokenizer(tokenizer_knobs(tokenizer, vocab_size=1024))


def test_a_tokenizer_without_a_lone_space(tmp_path):
    path = tmp_path / "x.model"
    words = ["ab", "abc", "b", "c"] * 20
    settings = dict(vocab_size=12, byte_fallback=False, hard_vocab_limit=False, pad_id=-1)
    path.write_bytes(train_tokenizer(sentence_iterator=iter(words), **settings))
    size = sentencepiece.SentencePieceProcessor(model_file=str(path)).vocab_size()
    with pytest.raises(ValueError, match="U\\+2581"):
        load_tokenizer(tokenizer_knobs(path, vocab_size=size))


@pytest.fixture
def small(tmp_path, tokenizer):
    """A validation split of two shards, 100 tokens; T = 16."""
    rng = np.random.default_rng(0)
    for i, n in enumerate((37, 63)):
        write_shard(tmp_path / f"fineweb_val_{i:06d}.bin", rng.integers(4, VOCAB_SIZE, n))
    return tokenizer_knobs(
        tokenizer, data_path=str(tmp_path), train_seq_len=16, val_batch_size=8 * 16,
        num_layers=2, model_dim=16, num_heads=2, num_kv_heads=1,
    )  # fmt: skip


def test_the_split_is_cut_to_whole_sequences(small, token_bytes):
    validation = Validation(small)
    assert len(validation.tokens) == 97 and validation.tokens.dtype == torch.uint16
    assert validation.num_bytes == token_bytes.count(validation.tokens.numpy())


def test_a_split_without_text_is_refused(small, tmp_path):
    """BOS alone stands for no text: its bits per byte would be a division by zero."""
    for path in tmp_path.glob("fineweb_val_*.bin"):
        path.unlink()
    write_shard(tmp_path / "fineweb_val_000000.bin", [1] * 100)
    with pytest.raises(ValueError) as caught:
        Validation(small)
    problem = f"DATA_PATH='{tmp_path}': 100 validation tokens stand for no text"
    assert str(caught.value).startswith(problem)


def test_a_uniform_model_scores_ln_v(small):
    validation = Validation(small)
    gpt = GPT(dataclasses.replace(small, tie_embeddings=False), torch.float32)
    loss = evaluate(gpt, validation.tokens, small, ALONE)
    assert loss == pytest.approx(math.log(VOCAB_SIZE), abs=1e-6)
    bits = validation.bits_per_byte(loss)
    assert bits == pytest.approx(math.log2(VOCAB_SIZE) * 96 / validation.num_bytes)


def test_too_few_tokens_and_foreign_tokens(small, tmp_path):
    with pytest.raises(ValueError, match="TRAIN_SEQ_LEN=100"):
        Validation(dataclasses.replace(small, train_seq_len=100))
    assert len(Validation(dataclasses.replace(small, train_seq_len=99)).tokens) == 100
    write_shard(tmp_path / "fineweb_val_000002.bin", [5, VOCAB_SIZE])
    with pytest.raises(
        ValueError, match=f"fineweb_val_000002.bin: token id {VOCAB_SIZE} at position 1"
    ):
        Validation(small)


class Seen(nn.Module):
    """Keeps every window that it is asked about; each loss is the target itself."""

    def __init__(self):
        super().__init__()
        self.windows = []

    def forward(self, x, y, reduction):
        self.windows += [(tuple(a.tolist()), tuple(b.tolist())) for a, b in zip(x, y, strict=True)]
        return y.float()


class Mode(nn.Module):
    """Keeps the mode of every call, of its own and of a layer's inside, and whether gradients are
    kept."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Dropout()
        self.seen = set()

    def forward(self, x, y, reduction):
        self.seen.add((self.training, self.layer.training, torch.is_grad_enabled()))
        return y.float()


@pytest.mark.parametrize("function", [evaluate, evaluate_sliding])
def test_validation_runs_in_eval_mode_and_training_goes_on_in_train_mode(small, function):
    model = Mode()
    tokens = Validation(small).tokens
    function(model, tokens, dataclasses.replace(small, eval_stride=4), ALONE)
    assert model.seen == {(False, False, False)}
    assert model.training and model.layer.training


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("batch", [1, 4, 5, 100])
def test_every_window_is_scored_once_for_any_world_and_batch(small, world_size, batch):
    hp = dataclasses.replace(small, val_batch_size=8 * 16 * batch)
    tokens = Validation(small).tokens
    model, total = Seen(), 0.0
    for rank in range(world_size):  # 6 windows: with 8 ranks some have none
        part = dataclasses.replace(ALONE, rank=rank, world_size=world_size)
        # Without a process group this rank's share stands for that of every rank.
        total += evaluate(model, tokens, hp, part) / world_size
    ids = tokens.to(torch.int64)
    windows = [
        (tuple(ids[i : i + 16].tolist()), tuple(ids[i + 1 : i + 17].tolist()))
        for i in range(0, 96, 16)
    ]
    assert model.windows == windows
    assert total == pytest.approx(ids[1:].float().mean().item(), rel=1e-6)


def test_the_loss_does_not_depend_on_the_batch(small):
    torch.manual_seed(0)
    gpt = GPT(small, torch.float32)
    with torch.no_grad():
        for p in gpt.parameters():
            p.add_(0.1 * torch.randn_like(p))
    tokens = Validation(small).tokens
    losses = [
        evaluate(gpt, tokens, dataclasses.replace(small, val_batch_size=8 * 16 * n), ALONE)
        for n in (1, 4, 6)
    ]
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-6)


@pytest.fixture
def trained(small):
    """A model with something to say."""
    torch.manual_seed(0)
    gpt = GPT(small, torch.float32)
    with torch.no_grad():
        for p in gpt.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return gpt


@pytest.mark.parametrize("stride", [1, 4, 5, 15, 16])
@pytest.mark.parametrize("batch", [1, 3, 100])
def test_sliding_windows_score_each_token_once_with_its_context(small, trained, stride, batch):
    """Against scoring token by token: target t of 96 is predicted from the tokens in the window
    that holds it first."""
    tokens = Validation(small).tokens
    ids = tokens.to(torch.int64)
    ends = [16, *range(16 + stride, 96, stride), 96]  # of windows, in targets
    expected = []
    for t in range(96):
        end = next(end for end in ends if t < end)
        begin = max(end - 16, 0)
        with torch.no_grad():
            logits = trained.logits(ids[begin : t + 1][None])[-1]
        expected.append(-logits.log_softmax(0)[ids[t + 1]].item())
        assert t - begin + 1 >= min(16 - stride + 1, t + 1)  # what comes before it
    hp = dataclasses.replace(small, val_batch_size=8 * 16 * batch, eval_stride=stride)
    for world_size in (1, 2, 8):
        parts = [
            dataclasses.replace(ALONE, rank=r, world_size=world_size) for r in range(world_size)
        ]
        losses = [evaluate_sliding(trained, tokens, hp, part) for part in parts]
        loss = sum(losses) / world_size
        assert loss == pytest.approx(sum(expected) / 96, rel=1e-5)
    if stride == 16:
        assert loss == pytest.approx(evaluate(trained, tokens, hp, ALONE), rel=1e-6)


def test_a_partial_validation_says_so(small):
    whole = Validation(small)
    part = Validation(dataclasses.replace(small, max_val_tokens=50))
    assert whole.partial == "" and part.partial == " partial:3/6"
    assert torch.equal(part.tokens, whole.tokens[:49]) and part.num_bytes < whole.num_bytes
    more = Validation(dataclasses.replace(small, max_val_tokens=1000))
    assert more.partial == "" and len(more.tokens) == 97
