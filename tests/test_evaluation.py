"""Bytes of tokens, the validation split, the loss over it, the lines of the score."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from runs import ALONE
from scripts import randomize
from sentencepiece import SentencePieceProcessor
from texts import TEXTS, VOCAB_SIZE, train_tokenizer, write_shard

import train_gpt
from train_gpt import GPT, Hyperparameters, InputError, TokenStream, Validation


@pytest.fixture(scope="module")
def sp(tokenizer) -> SentencePieceProcessor:
    return SentencePieceProcessor(model_file=str(tokenizer))


def train_sp(**settings) -> SentencePieceProcessor:
    return SentencePieceProcessor(model_proto=train_tokenizer(**settings))


def encode(sp: SentencePieceProcessor, texts: list[str]) -> list[list[int]]:
    """Return the texts as documents: BOS, then the tokens."""
    return [[sp.bos_id(), *sp.encode(text)] for text in texts]


def is_right(sp: SentencePieceProcessor, documents: list[list[int]]) -> bool:
    return train_gpt.retokenizes(sp, np.array(sum(documents, []), dtype=np.uint16))


@settings(max_examples=100, deadline=None)
@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=60)))
def test_bytes_are_those_of_the_decoded_text(sp, text):
    """The text has words, runs of spaces, and characters that fall back to bytes."""
    ids = sp.encode(text)
    # A literal U+2581 is encoded like a space. Unknown characters have no bytes.
    assume("\u2581" not in text and "\ufffd" not in sp.decode(ids) and sp.unk_id() not in ids)
    # A letter first, so that the decoder keeps a leading space.
    ids = [*sp.encode("a"), *ids]
    assert train_gpt.count_bytes(sp, np.array(ids)) == len(sp.decode(ids).encode()) - 1


def test_bytes_by_the_rules(sp):
    """BOS and unknown pieces have no bytes, nor has a space after them. Only targets count."""
    letter, bos, unk = sp.piece_to_id("a"), sp.bos_id(), sp.unk_id()
    word = next(i for i in range(VOCAB_SIZE) if sp.id_to_piece(i) == "\u2581the")
    assert train_gpt.count_bytes(sp, np.array([bos, word])) == 3  # no space after a control piece
    assert train_gpt.count_bytes(sp, np.array([unk, word])) == 3
    assert train_gpt.count_bytes(sp, np.array([word, bos, unk, letter])) == 1  # a target's bytes


def test_a_space_inside_a_piece_is_one_byte():
    sp = train_sp(split_by_whitespace=False, vocab_size=1000)
    ids = [sp.bos_id(), *sp.encode(" ".join(TEXTS))]
    assert any("\u2581" in sp.id_to_piece(i)[1:] for i in ids)
    assert train_gpt.count_bytes(sp, np.array(ids)) == len(sp.decode(ids).encode())


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_lone_space_without_a_piece_is_one_byte(model_type):
    """Its three byte tokens count like a leading space: 0 at the start of a document, else 1."""
    settings = {"model_type": model_type, "normalization_rule_name": "identity"}
    model = train_tokenizer(**settings, remove_extra_whitespaces=False)
    # The piece of a lone space gets another name, as if the tokenizer had been trained without it.
    model = model.replace(b"\n\3\xe2\x96\x81\x15", b"\n\3\xe9\xbf\xbf\x15")
    sp = SentencePieceProcessor(model_proto=model)
    space = [sp.piece_to_id(f"<0x{byte:02X}>") for byte in "\u2581".encode()]
    texts = [*TEXTS, "a  b", " \u00e2 \u2580", "a   "]
    assert sp.encode(" 1  ")[-3:] == space
    for text, tokens in zip(texts, encode(sp, texts), strict=True):
        wanted = len(text.encode()) - text.startswith(" ")
        assert train_gpt.count_bytes(sp, np.array(tokens)) == wanted, text
    assert train_gpt.count_bytes(sp, np.array([sp.bos_id(), *space])) == 0
    letter = sp.piece_to_id("a")
    assert train_gpt.count_bytes(sp, np.array([letter, *space, *space])) == 2
    for tokens in ([letter, *space[:2]], [*space], [letter, *space[::-1]]):  # no whole space
        assert train_gpt.count_bytes(sp, np.array(tokens)) == len(tokens) - 1
    assert is_right(sp, encode(sp, texts))


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


@pytest.mark.parametrize("settings", [{}, {"model_type": "unigram", "add_dummy_prefix": True}])
def test_another_tokenizer_of_the_same_size_is_noticed(settings):
    """The right tokenizer is accepted, whatever its kind, even if the only document was cut."""
    right = train_sp(**settings)
    other = train_sp(**settings, sentence_iterator=iter(TEXTS[0].splitlines()))
    for texts in (TEXTS, [max(TEXTS, key=len)]):
        documents = encode(right, texts)
        with_eos = [[*document, right.eos_id()] for document in documents]  # as others write them
        documents[-1] = documents[-1][:1500]
        assert is_right(right, documents) and is_right(right, with_eos)
        assert not is_right(other, documents)
        assert not is_right(right, [document[1:] for document in documents])  # without BOS


def test_the_split_is_cut_to_whole_sequences(small, sp):
    tokens = np.concatenate([shard.numpy() for shard in TokenStream(small.files("val")).shards])
    for T, limit, kept in [(16, 0, 97), (16, 50, 49), (16, 999, 97), (99, 0, 100)]:
        validation = Validation(replace(small, train_seq_len=T, max_val_tokens=limit))
        assert validation.tokens.dtype == torch.uint16
        assert validation.tokens.tolist() == tokens[:kept].tolist()
        bits = 3 * (kept - 1) / train_gpt.count_bytes(sp, tokens[:kept])
        assert validation.bits_per_byte(math.log(8)) == pytest.approx(bits)
    with pytest.raises(InputError, match="100 validation tokens .*TRAIN_SEQ_LEN=100: lower it"):
        Validation(replace(small, train_seq_len=100))


@pytest.mark.parametrize("eval_stride", [0, 1, 4, 5, 15, 16])
def test_each_target_is_scored_once_in_the_first_window_that_contains_it(small, eval_stride):
    """Exactly one rank scores it, for any number of ranks and of windows in a batch. The expected
    losses are computed token by token. A stride of 0 or 16 means windows side by side."""
    gpt, stride = randomize(GPT(small, torch.float32)).eval(), eval_stride or 16
    ids = Validation(small).tokens.to(torch.int64)
    ends = [16, *range(16 + stride, 96, stride), 96]  # ends of windows, in targets
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
    """Another shape would be compiled again. Seventeen windows do not fill batches of four."""
    hp = replace(small, val_batch_size=8 * 16 * 4)
    gpt, calls = GPT(hp, torch.float32), set()

    def watch(model: torch.nn.Module, arguments: tuple) -> None:
        x = arguments[0]
        calls.add((x.shape, x.is_contiguous(), model.training, torch.is_grad_enabled()))

    gpt.register_forward_pre_hook(watch)
    train_gpt.evaluate(gpt, Validation(small).tokens, 5, hp, ALONE)
    assert calls == {((4, 16), True, False, False)} and gpt.training
