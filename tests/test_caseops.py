"""CaseOps (data/caseops.py): lossless, the original text's bytes, datasets and their tools."""

import caseops
import check_dataset
import download_hf_docs_and_tokenize as rebuild
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from texts import TEXTS, read_shard, train_tokenizer, write_documents
from tokenizer_tools import read_specs

import train_gpt

# Combining marks, spaces, ligatures, full width, Kelvin and Angstrom signs, dotted and dotless i,
# characters that normalization deletes or makes several of, emoji, U+2581 and literal marks.
ODD = "\u0300\u0308\u0345\u200d\u3000\xa0\t\n\ufb01\ufb03\ufb05\uff21\uff22\uff41\u212a\u212b\u1e9e"
ODD += "\u0130\u0131\u24b6\u33a6\u2167\U0001d400\U0001f130\U0001f600\u4e2d\u2581\1\2\3\x7f\ufeff"
STRINGS = st.one_of(st.text(alphabet=f"ABTabt .'1\xc4\xe4{ODD}", max_size=30), st.text(max_size=60))
SYMBOLS = ["\1\u2581the", "e\1e"]  # pieces with a mark at the start and in the middle


def train(lines=None, **more) -> bytes:
    lines = lines or (caseops.encode(line) for text in TEXTS for line in text.splitlines())
    return train_tokenizer(sentence_iterator=iter(lines), **caseops.TRAINER_SETTINGS, **more)


@pytest.fixture(scope="module")
def base(tokenizer) -> SentencePieceProcessor:
    """A tokenizer with the challenge's normalization, without CaseOps."""
    return SentencePieceProcessor(model_file=str(tokenizer))


@pytest.fixture(scope="module")
def sp() -> SentencePieceProcessor:
    return SentencePieceProcessor(model_proto=train(user_defined_symbols=SYMBOLS))


def original(base, text: str) -> str:
    """Return the text that the base tokenizer scores, from its own normalizer."""
    return base.normalize(text).replace("\u2581", " ")


def count_bytes(sp, text: str) -> int:
    """Return the bytes of a document as the trainer counts them."""
    return train_gpt.count_bytes(sp, np.array([sp.bos_id(), *sp.encode(text)]))


def test_capitals_become_marks_before_the_space():
    text = "The NASA's iPhone: I am A. USA1 ABc aBC x-Y \xc4B ONE TWO"
    marked = "\1the\2 nasa's i\1phone:\1 i am\1 a.\2 usa1\1 a\1bc a\1b\1c x-\1y \xc4\1b\2 one\2 two"
    assert caseops.encode(text) == marked and caseops.decode(marked) == text
    # A model may write a mark anywhere.
    assert caseops.decode("\1 5\2\2 \xe4 a\1\1b\2") == " 5 \xe4 aB"


@settings(max_examples=300, deadline=None)
@given(text=STRINGS)
@example("\n".join(TEXTS))  # pieces with a mark at the start, in the middle and at the end
@example("T\u0308")  # two characters, but the normalization makes one of t + U+0308
def test_random_text_comes_back_and_keeps_its_bytes(base, sp, text):
    expected = original(base, text)
    marked = caseops.encode(text)
    assert caseops.decode(sp.decode(sp.encode(marked))) == expected
    assert count_bytes(sp, marked) == len(expected.encode())


def test_no_code_point_becomes_a_mark():
    valid = (chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    assert not {*caseops.MARKS} & {*caseops.normalize("0".join(valid))}


def test_marks_are_pieces_even_if_the_training_text_has_none():
    """A mark that is not a piece would become byte tokens, which count."""
    sp = SentencePieceProcessor(model_proto=train(["the lazy dog"], vocab_size=280))
    assert not any(sp.is_byte(id) for id in sp.encode(caseops.MARKS))
    assert count_bytes(sp, caseops.encode("The DOG")) == len("The DOG")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The dataset and the tokenizer of --caseops."""
    folder = tmp_path_factory.mktemp("export")
    docs = write_documents(folder / "docs.jsonl")
    arguments = f"--docs {docs} --output-root {folder} --num-val-docs 4 --vocab-size 512 --caseops"
    rebuild.main(arguments.split())
    model = folder / "tokenizers/fineweb_512_bpe_caseops.model"
    return folder / "datasets/fineweb10B_sp512_caseops", model


def test_a_datasets_bytes_are_those_of_its_documents(base, exported, capsys):
    folder, model = exported
    assert check_dataset.main([str(folder), "--tokenizer", str(model)]) == 0
    output = capsys.readouterr().out
    sp = SentencePieceProcessor(model_file=str(model))
    assert sp.piece_to_id(".\1") != sp.unk_id()  # trained on marked text
    for split, texts in (("val", TEXTS[:4]), ("train", TEXTS[4:])):
        tokens = read_shard(folder / f"fineweb_{split}_000000.bin")
        num_bytes = sum(len(original(base, text).encode()) for text in texts)
        assert train_gpt.count_bytes(sp, tokens) == num_bytes
        assert train_gpt.retokenizes(sp, tokens)
        assert f"bytes_per_token:{num_bytes / len(tokens):.4f}\n" in output
        assert f"{split}: begins: {original(base, texts[0])[:80]}\n" in output


def test_several_processes_keep_the_order(monkeypatch):
    monkeypatch.setattr(caseops, "BATCH_SIZE", 17)
    assert list(caseops.encode_many(TEXTS, 2)) == [*map(caseops.encode, TEXTS)]


def test_a_model_that_does_not_fit_is_an_error(exported, tokenizer):
    read_specs(512, {"caseops": True}, {512: str(exported[1])})
    with pytest.raises(ValueError, match="use it with --caseops"):
        read_specs(512, {}, {512: str(exported[1])})
    with pytest.raises(ValueError, match="is not a CaseOps"):
        read_specs(512, {"caseops": True}, {512: str(tokenizer)})
