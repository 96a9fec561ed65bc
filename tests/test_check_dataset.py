"""data/check_dataset.py: the counts of a good dataset, and an error for each kind of damage."""

import json
import shutil

import check_dataset
import pytest
from sentencepiece import SentencePieceProcessor
from texts import TEXTS, VOCAB_SIZE, read_shard, train_tokenizer, write_shard

VAL, TRAIN = "fineweb_val_000000.bin", "fineweb_train_000000.bin"


def check(capsys, folder, tokenizer, *more) -> tuple[str, list[str]]:
    """Return stdout and the lines on stderr; the exit status must be 1 if there are any."""
    status = check_dataset.main([str(folder), "--tokenizer", str(tokenizer), *more])
    output, errors = capsys.readouterr()
    assert status == int(bool(errors))
    return output, errors.splitlines()


@pytest.fixture
def folder(dataset, tmp_path):
    """A copy of the dataset for a test to damage, with room for a manifest two levels up."""
    return shutil.copytree(dataset, tmp_path / "datasets" / "small")


def write_manifest(folder, **facts):
    path = folder.parent.parent / "manifest.json"
    path.write_text(json.dumps({"datasets": [{"name": "other"}, {"name": "small", **facts}]}))


def test_a_good_dataset_gives_its_counts(capsys, monkeypatch, folder, tokenizer):
    monkeypatch.setattr(check_dataset, "CHUNK", 40_000)
    sp = SentencePieceProcessor(model_file=str(tokenizer))
    documents = [[1, *sp.encode(text)] for text in TEXTS]
    write_shard(folder / VAL, sum(documents[:5], []))
    write_manifest(folder, vocab_size=VOCAB_SIZE, stats={"files_train": 2, "docs_val": 5})
    output, problems = check(capsys, folder, tokenizer)
    assert problems == [] and f"val: begins: {TEXTS[0][:20]}" in output
    for split, part, shards in (("val", documents[:5], 1), ("train", documents[5:], 2)):
        tokens = sum(map(len, part))
        num_bytes = sum(len(sp.decode(ids[1:]).encode()) for ids in part)
        figures = f"shards:{shards} tokens:{tokens} documents:{len(part)}"
        assert f"{split}: {figures} bytes_per_token:{num_bytes / tokens:.4f}\n" in output


def test_damaged_and_missing_shards_are_named(capsys, folder, tokenizer):
    write_manifest(folder, stats={"tokens_val": 1500, "files_train": 2})
    last = folder / "fineweb_train_000001.bin"
    write_shard(folder / VAL, read_shard(folder / VAL), magic=7)
    write_shard(last, read_shard(last), count=100)
    (folder / TRAIN).unlink()
    val, missing, train = check(capsys, folder, tokenizer)[1]
    assert str(folder / VAL) in val and "magic 7" in val
    assert f"{folder / TRAIN} is missing" in missing
    assert str(last) in train and "header says 100 tokens" in train
    (folder / VAL).unlink()
    assert f"{folder / VAL} is missing" in check(capsys, folder, tokenizer)[1][0]
    assert "nowhere is not a folder" in check(capsys, folder / "nowhere", tokenizer)[1][0]


def test_a_wrong_tokenizer_gives_one_error(capsys, folder, tokenizer, tmp_path):
    """The text is noise, a token does not exist, or BOS never occurs."""
    other = tmp_path / "other.model"
    other.write_bytes(train_tokenizer(sentence_iterator=iter(TEXTS[20:]), vocab_size=385))
    assert check_dataset.main([str(folder)]) == 1
    assert "manifest.json lists the tokenizer of small: set --tokenizer" in capsys.readouterr().err
    write_manifest(folder, vocab_size=VOCAB_SIZE, stats={"docs_val": 5, "docs_train": 35})
    (line,) = check(capsys, folder, other)[1]
    assert "encoding its text gives other tokens: set --tokenizer" in line
    write_shard(folder / TRAIN, [*read_shard(folder / TRAIN)[:-7], VOCAB_SIZE])
    (line,) = check(capsys, folder, tokenizer)[1]
    assert str(folder / TRAIN) in line and "id 384, but 384 pieces: set --tokenizer" in line
    write_shard(folder / VAL, read_shard(folder / VAL).clip(2))
    (line,) = check(capsys, folder, tokenizer)[1]
    assert "no val token is BOS (1): set --tokenizer" in line


def test_a_hole_and_a_split_without_text_are_found(capsys, folder, tokenizer):
    """No manifest is needed: an unfinished download may have zeros in its middle."""
    tokens = read_shard(folder / TRAIN)
    write_shard(folder / TRAIN, [*tokens[:2100], *[0] * 999, *tokens[2100:]])
    assert f"{TRAIN}: 500 equal tokens from 2500 on" in check(capsys, folder, tokenizer)[1][0]
    write_shard(folder / VAL, [1, 1, 1])
    assert "the val documents have no text" in check(capsys, folder, tokenizer)[1][0]


def test_counts_must_be_those_of_the_manifest(capsys, folder, tokenizer, tmp_path):
    """The tool compares each number. Having only the first train shards is fine."""
    write_manifest(folder, stats={"files_train": 80, "tokens_train": 10**9, "tokens_val": 1500})
    output, problems = check(capsys, folder, tokenizer)
    assert "train: 2 of 80 shards are here\n" in output and problems == []
    for key in ("tokens_val", "docs_val", "tokens_train", "files_train", "vocab_size"):
        write_manifest(folder, stats={key: 1})
        (line,) = check(capsys, folder, tokenizer)[1]
        assert f"manifest.json says {key}:" in line
    other = (tmp_path / "manifest.json").rename(tmp_path / "other.json")
    (line,) = check(capsys, folder, tokenizer, f"--manifest={other}")[1]
    assert f"{other} says vocab_size:1, but 384 was found" in line


def write_splits(folder, tokenizer, val: list[str], train: list[str]) -> None:
    """Write both splits, training in two shards, of which the first ends inside a document."""
    sp = SentencePieceProcessor(model_file=str(tokenizer))
    write_shard(folder / VAL, sum(sp.encode(val, add_bos=True), []))
    tokens = sum(sp.encode(train, add_bos=True), [])
    middle = len(tokens) // 2 - 1
    write_shard(folder / TRAIN, tokens[:middle])
    write_shard(folder / "fineweb_train_000001.bin", tokens[middle:])


def test_validation_documents_in_training_are_a_leak(capsys, folder, tokenizer):
    """The splits were made with different --num-val-docs (50 and 10, or 4 and 0), so a run of
    documents is in both. Documents in another order are a leak if they are more than a tenth."""
    texts = [f"{number}: {TEXTS[number % 3][:400]} {number}" for number in range(70)]
    write_splits(folder, tokenizer, texts[:50], texts[10:])
    output, (line,) = check(capsys, folder, tokenizer)
    assert "val: 40 of 50 documents (80.00%) are also in train shards" in output
    assert "40 of 50 validation documents are in the" in line and "--num-val-docs" in line
    short = [text[:40] for text in texts]
    write_splits(folder, tokenizer, short[:4], short)
    assert "4 of 4 validation documents are in the" in check(capsys, folder, tokenizer)[1][0]
    write_splits(folder, tokenizer, texts[:50], texts[68:43:-1])
    assert "6 of 50 validation documents are in the" in check(capsys, folder, tokenizer)[1][0]
    write_splits(folder, tokenizer, texts[:50], texts[68:44:-1])
    output, problems = check(capsys, folder, tokenizer)  # FineWeb has some duplicates
    assert "val: 5 of 50 documents (10.00%) are also" in output and problems == []
