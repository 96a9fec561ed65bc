"""data/check_dataset.py: what it finds in a good dataset, and that it finds each kind of damage."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import sentencepiece
from conftest import ROOT, TEXTS, VOCAB_SIZE, process_environ, train_tokenizer, write_shard

sys.path.insert(0, str(ROOT / "data"))
import check_dataset

from train_gpt import Hyperparameters, load_tokenizer

SCRIPT = ROOT / "data/check_dataset.py"
VAL, TRAIN = "fineweb_val_000000.bin", "fineweb_train_000000.bin"


def run(folder, tokenizer, *args) -> subprocess.CompletedProcess:
    """The script as a process, elsewhere than in the repository."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), "--tokenizer", str(tokenizer), *args],
        cwd=folder.parent,
        env=process_environ({}, 1),
        capture_output=True,
        text=True,
        timeout=60,
    )


def problems_of(capsys, folder, tokenizer, *args) -> list[str]:
    """The lines on stderr; the status is 1 if one of them is no warning, else 0."""
    status = check_dataset.main([str(folder), "--tokenizer", str(tokenizer), "--no-hash", *args])
    lines = capsys.readouterr().err.splitlines()
    assert status == int(any(not line.startswith("warning") for line in lines))
    return lines


def read(path) -> np.ndarray:
    return np.fromfile(path, "<u2", offset=1024)


@pytest.fixture(scope="module")
def documents(tokenizer) -> list[list[int]]:
    sp = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    return [[1, *sp.encode(text)] for text in TEXTS]


@pytest.fixture
def folder(dataset, tmp_path):
    """A copy of the dataset to be damaged, deep enough for a manifest two levels above."""
    return shutil.copytree(dataset, tmp_path / "datasets" / "small")


def write_manifest(folder, name="small", **facts):
    path = folder.parent.parent / "manifest.json"
    path.write_text(json.dumps({"datasets": [{"name": "other"}, {"name": name, **facts}]}))
    return path


def test_every_figure_of_a_good_dataset(tmp_path, tokenizer, documents):
    """Train document 12 runs across the join of the shards, and is validation document 2 again."""
    val, train = documents[:5], [*documents[5:12], [1], documents[2], *documents[12:]]
    folder = tmp_path / "datasets" / "small"
    folder.mkdir(parents=True)
    val_ids, train_ids = sum(val, []), sum(train, [])
    join = sum(map(len, train[:8])) + 20
    shards = {
        VAL: val_ids,
        TRAIN: train_ids[:join],
        "fineweb_train_000001.bin": train_ids[join:],
    }
    for name, ids in shards.items():
        write_shard(folder / name, ids)
    write_manifest(
        folder,
        vocab_size=VOCAB_SIZE,
        stats={"files_train": 2, "files_val": 1, "tokens_val": len(val_ids), "docs_val": 5},
    )
    hp = Hyperparameters(tokenizer_path=str(tokenizer), vocab_size=VOCAB_SIZE)
    num_bytes = load_tokenizer(hp).count(np.array(val_ids))
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in shards}
    sp = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    begins = [" ".join(sp.decode(ids[1:]).split())[:80] for ids in (*val[:3], *train[:3])]

    result = run(folder, tokenizer)
    assert result.stderr == "warning: train and validation share documents\n"
    assert result.returncode == 0
    assert result.stdout.splitlines() == [
        f"val: shards:1 tokens:{len(val_ids)} documents:5 min_id:{min(val_ids)} "
        f"max_id:{max(val_ids)}",
        f"val: bytes:{num_bytes} bytes_per_token:{num_bytes / (len(val_ids) - 1):.4f}",
        f"val: sha256:{sums[VAL]} {VAL}",
        *(f"val: begins: {line}" for line in begins[:3]),
        f"train: shards:2 tokens:{len(train_ids)} documents:{len(train)} min_id:{min(train_ids)} "
        f"max_id:{max(train_ids)}",
        *(f"train: sha256:{sums[name]} {name}" for name in list(shards)[1:]),
        *(f"train: begins: {line}" for line in begins[3:]),
        "train documents that are in val, too: 1",
    ]


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 1000])
def test_document_hashes_do_not_depend_on_the_pieces(documents, chunk):
    """Equal for equal documents only, wherever they stand; empty ones are left out."""
    stream = [
        *documents[:6],
        [1],
        [1],
        documents[0],
        [1, 4],
        [1, 5],
        [1, 4, 5],
        [1, 5, 4],
        [1, 4],
        [1],
    ]
    ids = np.array(sum(stream, []), dtype=np.uint16)
    hashes = check_dataset.DocumentHashes(bos_id=1)
    parts = [hashes.add(ids[at : at + chunk]) for at in range(0, ids.size, chunk)]
    found = np.concatenate([*parts, hashes.finish()]).tolist()
    expected = [tuple(document) for document in stream if len(document) > 1]
    assert [found.index(h) for h in found] == [expected.index(d) for d in expected]


def test_figures_do_not_depend_on_the_pieces(capsys, monkeypatch, dataset, tokenizer):
    outputs = []
    for chunk in (check_dataset.CHUNK, 777):
        monkeypatch.setattr(check_dataset, "CHUNK", chunk)
        assert problems_of(capsys, dataset, tokenizer) == []
        check_dataset.main([str(dataset), "--tokenizer", str(tokenizer)])
        outputs.append([x for x in capsys.readouterr().out.splitlines() if "begins" not in x])
    assert outputs[0] == outputs[1] and len(outputs[0]) == 8


@pytest.mark.parametrize(
    "damage, reason",
    [
        ({"magic": 7}, "no shard: magic 7"),
        ({"version": 2}, "version 2"),
        ({"count": 10**6}, "bytes, but the header promises 1000000 tokens"),
        ({"count": 100}, "bytes, but the header promises 100 tokens"),
    ],
)
@pytest.mark.parametrize("name", [VAL, TRAIN])
def test_a_wrong_header_or_size(capsys, folder, tokenizer, name, damage, reason):
    write_shard(folder / name, read(folder / name), **damage)
    lines = problems_of(capsys, folder, tokenizer)
    assert str(folder / name) in lines[0] and reason in lines[0]


def test_a_shard_cut_in_its_header_and_one_that_cannot_be_read(capsys, folder, tokenizer):
    (folder / VAL).write_bytes(b"x" * 100)
    (folder / TRAIN).unlink()
    (folder / TRAIN).mkdir()
    lines = problems_of(capsys, folder, tokenizer)
    assert "100 bytes are too few for a shard" in lines[0]
    assert "no document" in lines[1]
    assert f"{folder / TRAIN} cannot be read: Is a directory" == lines[2]


@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_what_is_no_regular_file(capsys, folder, tokenizer, tmp_path, kind):
    """It would be read for ever, or waited for: as a shard, as a tokenizer, as a manifest."""
    other = tmp_path / "other"
    other.symlink_to("/dev/zero") if kind == "device" else os.mkfifo(other)
    (folder / TRAIN).unlink()
    (folder / TRAIN).symlink_to(other)
    (line,) = problems_of(capsys, folder, tokenizer)
    assert line == f"{folder / TRAIN} is no regular file: put the file itself there"
    (line,) = problems_of(capsys, folder, other)
    assert line == f"{other} is no regular file: put the file itself there"
    (line,) = problems_of(capsys, folder, tokenizer, "--manifest", str(other))
    assert f"{other}: no manifest" in line and "no regular file" in line


@pytest.mark.parametrize("name", [VAL, TRAIN])
def test_an_id_outside_the_vocabulary_or_padding(capsys, monkeypatch, folder, tokenizer, name):
    monkeypatch.setattr(check_dataset, "CHUNK", 100)
    for id, reason in ((VOCAB_SIZE, "outside the tokenizer's 384 pieces"), (0, "padding")):
        ids = read(folder / name)
        ids[1234] = id
        write_shard(folder / name, ids)
        (line,) = problems_of(capsys, folder, tokenizer)
        assert f"{folder / name}: token id {id} at position 1234 is " in line and reason in line
        ids[1234] = 5
        write_shard(folder / name, ids)
        assert problems_of(capsys, folder, tokenizer) == []


def test_missing_shards(capsys, folder, tokenizer):
    shutil.copy(folder / TRAIN, folder / "fineweb_train_000004.bin")
    lines = problems_of(capsys, folder, tokenizer)
    assert lines == ["fineweb_train_000002.bin is missing (2 in all): get the files"]
    for path in folder.glob("fineweb_train_*"):
        path.unlink()
    (line,) = problems_of(capsys, folder, tokenizer)
    assert line == "fineweb_train_000000.bin is missing (1 in all): get the files"
    (folder / VAL).rename(folder / "fineweb_train_mine.bin")
    (line,) = problems_of(capsys, folder, tokenizer)
    assert "fineweb_val_000000.bin is missing" in line


def test_no_document(capsys, folder, tokenizer):
    for name in (VAL, TRAIN):
        ids = read(folder / name)
        write_shard(folder / name, ids[ids != 1])
    (line,) = problems_of(capsys, folder, tokenizer)  # the second train shard has some
    assert line == "the val shards hold no document: no token is BOS (id 1)"


def test_noise(capsys, folder, tokenizer, tmp_path):
    ids = read(folder / VAL)
    noise = np.random.default_rng(0).integers(4, VOCAB_SIZE, ids.size)
    write_shard(folder / VAL, np.where(ids == 1, 1, noise))
    (line,) = problems_of(capsys, folder, tokenizer)
    assert f"{folder / VAL}: the tokens decode to noise" in line
    write_shard(folder / VAL, ids)
    other = tmp_path / "other.model"
    other.write_bytes(train_tokenizer(sentence_iterator=iter(TEXTS[20:]), vocab_size=VOCAB_SIZE))
    lines = problems_of(capsys, folder, other)
    assert [line.split(": ")[1][:27] for line in lines] == ["the tokens decode to noise "] * 3


def test_text_of_every_kind_is_no_noise(capsys, folder, tokenizer):
    """Scripts that the tokenizer knows as bytes only, digits, spaces, one-letter documents."""
    texts = ["".join(map(chr, range(0x4E00, 0x5200))), "7 1 9 " * 300, "a", "   x \t\n y " * 200]
    sp = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    write_shard(folder / TRAIN, [id for text in texts * 3 for id in (1, *sp.encode(text))])
    assert problems_of(capsys, folder, tokenizer) == []
    write_shard(folder / TRAIN, [1, *sp.encode("a")])  # too little to be judged
    assert problems_of(capsys, folder, tokenizer) == []


def test_the_manifest(capsys, folder, tokenizer):
    tokens = {"train": sum(read(p).size for p in folder.glob("fineweb_train_*"))}
    tokens["val"] = read(folder / VAL).size
    right = {f"tokens_{name}": count for name, count in tokens.items()}
    right |= {"val_tokens": 1500, "files_train": 2, "files_val": 1, "docs_train": None}
    right |= {"train_files": "2"}  # no number: not compared
    wrong = {"tokens_val": 1501, "val_tokens": 9, "tokens_train": 5, "files_val": 2, "docs_val": 9}
    for facts in ({}, {"stats": right}, right, {"vocab_size": VOCAB_SIZE}):
        write_manifest(folder, **facts)
        assert problems_of(capsys, folder, tokenizer) == []
    for key, value in [*wrong.items(), ("files_train", 1), ("vocab_size", 1024)]:
        write_manifest(folder, stats={**right, key: value})
        (line,) = problems_of(capsys, folder, tokenizer)
        assert f"the manifest says {key}={value}, but here it is " in line
    # The first few train shards, but never more tokens than there are in all.
    write_manifest(folder, stats={**right, "files_train": 80, "tokens_train": 10**9})
    assert problems_of(capsys, folder, tokenizer) == []
    write_manifest(folder, stats={**right, "files_train": 80, "tokens_train": 10})
    assert len(problems_of(capsys, folder, tokenizer)) == 1
    write_manifest(folder, stats={**right, "files_train": 80, "tokens_val": 1501})
    assert len(problems_of(capsys, folder, tokenizer)) == 1


def test_a_manifest_that_says_nothing(capsys, folder, tokenizer):
    """Beside the dataset by chance it is no problem; named by the user it is one."""
    path = write_manifest(folder, name="another", vocab_size=5)
    assert problems_of(capsys, folder, tokenizer) == []
    (line,) = problems_of(capsys, folder, tokenizer, "--manifest", str(path))
    assert line == f"{path} says nothing about small: name another --manifest"
    for text in ("[]", "{}", "no json", '{"datasets": 5}', '{"datasets": [{"stats": 5}]}'):
        path.write_text(text)
        (line,) = problems_of(capsys, folder, tokenizer)
        assert line.startswith(f"{path}: no manifest of datasets")
    path.unlink()
    (line,) = problems_of(capsys, folder, tokenizer, "--manifest", str(path))
    assert line.startswith(f"{path}: no manifest of datasets")


def test_what_an_export_or_a_download_left_unfinished(capsys, folder, tokenizer):
    """A .part beside the shards, or one in place of the manifest, is a problem that is named; a
    missing manifest alone is not: shards are copied without it."""
    shutil.copytree(folder, elsewhere := folder.parent.parent / "copied" / "here" / "small")
    manifest = folder.parent.parent / "manifest.json"
    for left in ("fineweb_val.part", "fineweb_train_000002.bin.part", "lock.part"):
        (folder / left).mkdir() if ".bin" in left else (folder / left).touch()
        (line,) = problems_of(capsys, folder, tokenizer)
        assert line.startswith(f"{folder / left} is there: ") and "run the same command" in line
        (folder / left).rmdir() if ".bin" in left else (folder / left).unlink()
    manifest.with_suffix(".part").touch()
    (line,) = problems_of(capsys, folder, tokenizer)
    assert line.startswith(f"{manifest} is missing, {manifest.with_suffix('.part')} is there: ")
    write_manifest(folder, stats={"files_val": 1})  # a download came later
    assert problems_of(capsys, folder, tokenizer) == []
    assert problems_of(capsys, elsewhere, tokenizer) == []
    check_dataset.main([str(elsewhere), "--tokenizer", str(tokenizer), "--no-hash"])
    path = elsewhere.parent.parent / "manifest.json"
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"manifest: {path} has nothing about small to compare with"
    for path in folder.glob("*.bin"):  # killed before the first shard
        path.unlink()
    (folder / "fineweb_val.part").touch()
    lines = problems_of(capsys, folder, tokenizer)
    assert "fineweb_val.part is there" in lines[0] and "has no fineweb_*.bin" in lines[1]


def test_no_validation_by_the_manifest(capsys, folder, tokenizer):
    """Shards that the manifest says there are none of are not missing."""
    (folder / VAL).unlink()
    (line,) = problems_of(capsys, folder, tokenizer)
    assert line == "fineweb_val_000000.bin is missing (1 in all): get the files"
    write_manifest(folder, stats={"files_val": 0})
    assert problems_of(capsys, folder, tokenizer) == []
    write_manifest(folder, stats={"files_val": 0, "docs_val": 3})
    assert len(problems_of(capsys, folder, tokenizer)) == 1


def test_no_dataset_and_no_tokenizer(capsys, folder, tokenizer, tmp_path):
    empty = tmp_path / "empty.model"
    empty.touch()
    cases = [
        (folder / "nowhere", tokenizer, f"{folder / 'nowhere'} has no fineweb_*.bin: name "),
        (folder.parent, tokenizer, f"{folder.parent} has no fineweb_*.bin: name "),
        (folder, folder / "no.model", f"{folder / 'no.model'}: No such file or directory: name "),
        (folder, folder, f"{folder}: Is a directory: name "),
        (folder, folder / VAL, f"{folder / VAL}: no SentencePiece .model: name "),
        (folder, empty, f"{empty}: no SentencePiece .model: name "),
    ]
    for dataset, model, reason in cases:
        (line,) = problems_of(capsys, dataset, model)
        assert line.startswith(reason)


def test_a_damaged_dataset_as_a_process(folder, tokenizer):
    """Status 1, a line for each problem, and the figures of what is good."""
    ids = read(folder / TRAIN)
    ids[[7, 8]] = 60_000
    write_shard(folder / TRAIN, ids)
    write_manifest(folder, stats={"tokens_val": 1})
    result = run(folder, tokenizer, "--no-hash")
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        f"{folder / TRAIN}: token id 60000 at position 7 is outside the tokenizer's 384 pieces: "
        "name the right --tokenizer, or get the file again",
        "the manifest says tokens_val=1, but here it is 1500: get the files again",
    ]
    assert "val: shards:1 tokens:1500 documents:" in result.stdout
    assert "sha256" not in result.stdout
