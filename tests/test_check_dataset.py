"""data/check_dataset.py: what it finds in a good dataset, and that it finds each kind of damage."""

import json
import shutil
import sys

import numpy as np
import pytest
import sentencepiece
from conftest import ROOT, TEXTS, VOCAB_SIZE, train_tokenizer, write_shard

sys.path.insert(0, str(ROOT / "data"))
import check_dataset

VAL, TRAIN = "fineweb_val_000000.bin", "fineweb_train_000000.bin"


def problems_of(capsys, folder, tokenizer) -> list[str]:
    """The lines on stderr; the status is 1 if there are any."""
    status = check_dataset.main([str(folder), "--tokenizer", str(tokenizer)])
    lines = capsys.readouterr().err.splitlines()
    assert status == int(bool(lines))
    return lines


def read(path) -> np.ndarray:
    return np.fromfile(path, "<u2", offset=1024)


@pytest.fixture
def folder(dataset, tmp_path):
    """A copy of the dataset to be damaged, deep enough for a manifest two levels above."""
    return shutil.copytree(dataset, tmp_path / "datasets" / "small")


def write_manifest(folder, **facts):
    path = folder.parent.parent / "manifest.json"
    path.write_text(json.dumps({"datasets": [{"name": "other"}, {"name": "small", **facts}]}))


def test_every_figure_of_a_good_dataset(capsys, monkeypatch, folder, tokenizer):
    monkeypatch.setattr(check_dataset, "CHUNK", 40_000)
    sp = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    documents = [[1, *sp.encode(text)] for text in TEXTS]
    write_shard(folder / VAL, sum(documents[:5], []))
    write_manifest(folder, vocab_size=VOCAB_SIZE, stats={"files_train": 2, "docs_val": 5})
    assert check_dataset.main([str(folder), "--tokenizer", str(tokenizer)]) == 0
    output = capsys.readouterr().out
    for split, part, shards in (("val", documents[:5], 1), ("train", documents[5:], 2)):
        tokens = sum(map(len, part))
        num_bytes = sum(len(sp.decode(ids[1:]).encode()) for ids in part)
        figures = f"shards:{shards} tokens:{tokens} documents:{len(part)}"
        assert f"{split}: {figures} bytes_per_token:{num_bytes / tokens:.4f}\n" in output


def test_damaged_and_missing_shards(capsys, folder, tokenizer):
    last = folder / "fineweb_train_000001.bin"
    write_shard(folder / VAL, read(folder / VAL), magic=7)
    write_shard(last, read(last), count=100)
    (folder / TRAIN).unlink()
    val, missing, train = problems_of(capsys, folder, tokenizer)
    assert str(folder / VAL) in val and "magic 7" in val
    assert f"{folder / TRAIN} is missing" in missing
    assert str(last) in train and "promises 100 tokens" in train


def test_another_tokenizer(capsys, folder, tokenizer, tmp_path):
    """Ids outside its vocabulary are found anywhere, others in documents that read as noise."""
    ids = read(folder / TRAIN)
    ids[-7] = VOCAB_SIZE
    write_shard(folder / TRAIN, ids)
    (line,) = problems_of(capsys, folder, tokenizer)
    assert str(folder / TRAIN) in line and "id 384, but 384 pieces" in line
    other = tmp_path / "other.model"
    other.write_bytes(train_tokenizer(sentence_iterator=iter(TEXTS[20:]), vocab_size=385))
    lines = problems_of(capsys, folder, other)
    assert len(lines) == 3 and all("0 are the same" in line for line in lines)


def test_the_manifest(capsys, folder, tokenizer):
    """Each of its numbers is compared; of the train shards the first few may be there alone."""
    write_manifest(folder, stats={"files_train": 80, "tokens_train": 10**9, "tokens_val": 1500})
    assert problems_of(capsys, folder, tokenizer) == []
    for key in ("tokens_val", "docs_val", "tokens_train", "files_train", "vocab_size"):
        write_manifest(folder, stats={key: 1})
        (line,) = problems_of(capsys, folder, tokenizer)
        assert f"manifest.json says {key}:" in line
