"""Bytes of tokens, the validation split, the loss over it, the lines of the score."""

import math
from dataclasses import replace

import numpy as np
import pytest
import sentencepiece
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from runs import ALONE
from scripts import randomize
from texts import TEXTS, VOCAB_SIZE, train_tokenizer, write_shard

import train_gpt
from train_gpt import GPT, Hyperparameters, InputError, TokenStream, Validation


@pytest.fixture(scope="module")
def sp(tokenizer) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))


@settings(max_examples=100, deadline=None)
@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=60)))
def test_bytes_are_those_of_the_decoded_text(sp, text):
    """For any text: words, runs of spaces, characters that fall back to bytes."""
    ids = sp.encode(text)
    # A literal U+2581 is encoded like a space. Unknown characters have no bytes.
    assume("\u2581" not in text and "\ufffd" not in sp.decode(ids) and sp.unk_id() not in ids)
    # A letter first, so that the decoder keeps a leading space.
    ids = [*sp.encode("a"), *ids]
    assert train_gpt.count_bytes(sp, np.array(ids)) == len(sp.decode(ids).encode()) - 1


def test_bytes_by_the_rules(sp):
    """Those that the text alone does not show."""
    letter, bos, unk = sp.piece_to_id("a"), sp.bos_id(), sp.unk_id()
    word = next(i for i in range(VOCAB_SIZE) if sp.id_to_piece(i) == "\u2581the")
    assert train_gpt.count_bytes(sp, np.array([bos, word])) == 3  # no space after a control piece
    assert train_gpt.count_bytes(sp, np.array([unk, word])) == 3
    assert train_gpt.count_bytes(sp, np.array([word, bos, unk, letter])) == 1  # a target's bytes


def test_a_space_inside_a_piece_is_one_byte():
    model = train_tokenizer(split_by_whitespace=False, vocab_size=1000)
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = [sp.bos_id(), *sp.encode(" ".join(TEXTS))]
    assert any("\u2581" in sp.id_to_piece(i)[1:] for i in ids)
    assert train_gpt.count_bytes(sp, np.array(ids)) == len(sp.decode(ids).encode())


@pytest.fixture
def small(tmp_path, tokenizer) -> Hyperparameters:
    """A validation split of two shards and 100 tokens; T = 16."""
    tokens = np.random.default_rng(0).integers(4, VOCAB_SIZE, 100)
    write_shard(tmp_path / "fineweb_val_000000.bin", tokens[:37])
    write_shard(tmp_path / "fineweb_val_000001.bin", tokens[37:])
    return Hyperparameters(
        tokenizer_path=str(tokenizer), vocab_size=VOCAB_SIZE, data_path=str(tmp_path),
        train_seq_len=16, val_batch_size=8 * 16,
        num_layers=2, model_dim=16, num_heads=2, num_kv_heads=1,
    )  # fmt: skip


def test_a_tokenizer_of_another_size_is_an_error_that_names_its_path_first(small):
    with pytest.raises(InputError, match=f"^TOKENIZER_PATH.*or VOCAB_SIZE={VOCAB_SIZE}$"):
        Validation(replace(small, vocab_size=1024))


@pytest.mark.parametrize(
    "settings, texts",
    [({}, TEXTS[:5]), ({"model_type": "unigram", "add_dummy_prefix": True}, TEXTS[:5])]
    + [({}, [max(TEXTS, key=len)])],
)
def test_another_tokenizer_of_the_same_size_is_noticed(knobs, tmp_path, settings, texts):
    """The right one is not, whatever its kind, even if the only document was cut."""
    path = tmp_path / "tokenizer.model"
    path.write_bytes(train_tokenizer(**settings))
    sp = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokens = [token for text in texts for token in (sp.bos_id(), *sp.encode(text))]
    cut = 1500 if len(texts) == 1 else None
    write_shard(tmp_path / "fineweb_val_000000.bin", tokens[:cut])
    paths = {"TOKENIZER_PATH": str(path), "DATA_PATH": str(tmp_path)}
    hp = Hyperparameters.from_env({**knobs, **paths})
    assert Validation(hp).is_tokenizer_right
    path.write_bytes(train_tokenizer(**settings, sentence_iterator=iter(TEXTS[0].splitlines())))
    assert not Validation(hp).is_tokenizer_right


def test_the_split_is_cut_to_whole_sequences(small, sp):
    tokens = np.concatenate([shard.numpy() for shard in TokenStream(small.files("val")).shards])
    for T, limit, kept in [(16, 0, 97), (16, 50, 49), (16, 999, 97), (99, 0, 100)]:
        validation = Validation(replace(small, train_seq_len=T, max_val_tokens=limit))
        assert validation.tokens.dtype == torch.uint16
        assert validation.tokens.tolist() == tokens[:kept].tolist()
        bits = 3 * (kept - 1) / train_gpt.count_bytes(sp, tokens[:kept])
        assert validation.bits_per_byte(math.log(8)) == pytest.approx(bits)


def test_too_few_tokens_and_foreign_tokens(small, tmp_path):
    with pytest.raises(InputError, match="100 validation tokens .*TRAIN_SEQ_LEN=100"):
        Validation(replace(small, train_seq_len=100))
    write_shard(tmp_path / "fineweb_val_000002.bin", [5, VOCAB_SIZE])
    with pytest.raises(InputError, match=f"fineweb_val_000002.bin: token id {VOCAB_SIZE}"):
        Validation(small)


@pytest.mark.parametrize("eval_stride", [0, 1, 4, 5, 15, 16])
def test_each_target_is_scored_once_in_the_first_window_that_contains_it(small, eval_stride):
    """By one rank. The reference scores token by token. For any number of ranks and windows in a
    batch. With 0 or 16 windows are side by side."""
    gpt, stride = randomize(GPT(small, torch.float32)).eval(), eval_stride or 16
    ids = Validation(small).tokens.to(torch.int64)
    ends = [16, *range(16 + stride, 96, stride), 96]  # of windows, in targets
    expected = []
    for t in range(96):
        begin = next(end for end in ends if t < end) - 16
        with torch.no_grad():
            logits = gpt.logits(ids[begin : t + 1][None])[-1]
        expected.append(-logits.log_softmax(0)[ids[t + 1]])
    for world_size, batch in [(1, 1), (1, 3), (1, 100), (2, 1), (8, 3), (8, 100)]:
        hp = replace(small, eval_stride=eval_stride, val_batch_size=8 * 16 * batch)
        validation = Validation(hp)
        runtimes = [replace(ALONE, rank=r, world_size=world_size) for r in range(world_size)]
        parts = torch.stack([train_gpt.final_losses(gpt, validation, r) for r in runtimes])
        torch.testing.assert_close(parts.sum(0), torch.stack(expected), rtol=1e-4, atol=1e-5)
        assert parts.dtype == torch.float32 and (parts != 0).sum(0).tolist() == [1] * 96


def test_validation_calls_the_model_with_one_shape_and_in_eval_mode(small):
    """Another shape would be compiled. Seventeen windows are not a multiple of four."""
    hp = replace(small, val_batch_size=8 * 16 * 4)
    gpt, calls = GPT(hp, torch.float32), set()

    def watch(model: torch.nn.Module, arguments: tuple) -> None:
        x, y, _ = arguments
        is_training = any(module.training for module in model.modules())
        calls.add((x.shape, y.shape, x.is_contiguous(), is_training, torch.is_grad_enabled()))

    gpt.register_forward_pre_hook(watch)
    train_gpt.evaluate(gpt, Validation(small).tokens, 5, hp, ALONE)
    assert calls == {((4, 16), (4, 16), True, False, False)}
    assert all(module.training for module in gpt.modules())
