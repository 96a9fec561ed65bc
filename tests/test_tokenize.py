"""From documents to tokenizers, shards and manifest: data/download_hf_docs_and_tokenize.py."""

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import sentencepiece
from conftest import ROOT, TEXTS, process_environ, run_script, train_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(ROOT / "data"))
from download_hf_docs_and_tokenize import (
    Settings,
    WordEncoder,
    encode_bytes,
    export_dataset,
    read_documents,
)
from shards import HEADER_BYTES, count_tokens

pytest.importorskip("tqdm")
SCRIPT = ROOT / "data" / "download_hf_docs_and_tokenize.py"
SPECS = {"tokenizers": [{"kind": "sentencepiece_bpe", "vocab_size": 384}, {"kind": "bytes"}]}


def run(folder, *args, stdin=None, **environ) -> subprocess.CompletedProcess:
    (folder / "specs.json").write_text(json.dumps(SPECS))
    command = [sys.executable, SCRIPT, "--output-root", "out", "--tokenizer-config", "specs.json"]
    return subprocess.run(
        [*command, *args],
        cwd=folder,
        env=process_environ(environ, 1),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )


def write_documents(path, texts=TEXTS):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def shard_documents(folder, split) -> list[list[int]]:
    """The documents in the shards of a split, without BOS."""
    paths = sorted(folder.glob(f"fineweb_{split}_*.bin"))
    assert all(count_tokens(path) for path in paths)
    tokens = np.concatenate([np.fromfile(p, dtype="<u2", offset=HEADER_BYTES) for p in paths])
    assert tokens[0] == 1
    return [part[1:].tolist() for part in np.split(tokens, np.flatnonzero(tokens == 1)[1:])]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The script's output for 40 documents, 4 of them validation, in small shards."""
    folder = tmp_path_factory.mktemp("export")
    write_documents(folder / "docs.jsonl")
    args = ["--docs", "docs.jsonl", "--num-val-docs", "4", "--chunk-tokens", "20000"]
    knobs = {"MATCHED_FINEWEB_SP_BATCH_SIZE": "3", "MATCHED_FINEWEB_TOKENIZER_THREADS": "2"}
    result = run(folder, *args, **knobs)
    assert result.returncode == 0, result.stderr
    return folder / "out"


def test_documents_come_back_as_their_normalized_text(exported):
    sp = sentencepiece.SentencePieceProcessor(
        model_file=str(exported / "tokenizers" / "fineweb_384_bpe.model")
    )
    folder = exported / "datasets" / "fineweb10B_sp384"
    documents = shard_documents(folder, "val") + shard_documents(folder, "train")
    assert [sp.decode(ids) for ids in documents] == [
        sp.normalize(text).replace("\u2581", " ") for text in TEXTS
    ]
    assert documents == sp.encode(TEXTS)


def test_bytes_come_back_as_they_were(exported):
    folder = exported / "datasets" / "fineweb10B_byte260"
    documents = shard_documents(folder, "val") + shard_documents(folder, "train")
    assert [bytes(b - 4 for b in ids).decode() for ids in documents] == TEXTS


def test_splits_shards_and_manifest(exported):
    manifest = json.loads((exported / "manifest.json").read_text())
    for dataset in manifest["datasets"]:
        folder, stats = exported / dataset["path"], dataset["stats"]
        assert (stats["docs_val"], stats["docs_train"]) == (4, 36)
        assert len(shard_documents(folder, "val")) == 4
        for split in ("val", "train"):
            sizes = [count_tokens(path) for path in sorted(folder.glob(f"fineweb_{split}_*.bin"))]
            assert len(sizes) == stats[f"files_{split}"] and sum(sizes) == stats[f"tokens_{split}"]
            assert set(sizes[:-1]) <= {20_000} and sizes[-1] <= 20_000
        assert stats["files_train"] > 1
    names = [tokenizer["name"] for tokenizer in manifest["tokenizers"]]
    assert names == [dataset["tokenizer_name"] for dataset in manifest["datasets"]]
    assert manifest["tokenizers"][0]["vocab_size"] == 384
    assert (exported / manifest["tokenizers"][0]["vocab_path"]).read_text().startswith("<pad>\t0\n")


def test_a_training_run_on_the_result(exported, knobs):
    environ = {
        **knobs,
        "DATA_PATH": str(exported / "datasets" / "fineweb10B_sp384"),
        "TOKENIZER_PATH": str(exported / "tokenizers" / "fineweb_384_bpe.model"),
    }
    result = run_script(exported, environ)
    assert result.returncode == 0, result.stderr
    environ["TOKENIZER_PATH"] = str(exported / "manifest.json")  # what a byte260 run would need
    assert "must be a SentencePiece .model file" in run_script(exported, environ).stderr


def test_the_same_documents_give_the_same_files_and_no_old_shard_stays(exported, tmp_path):
    docs = write_documents(tmp_path / "docs.jsonl").read_text()
    old = tmp_path / "out" / "datasets" / "fineweb10B_sp384"
    old.mkdir(parents=True)
    for name in ("fineweb_train_000099.bin", "fineweb_train.part"):
        (old / name).write_bytes(b"left by a run that was killed")
    manifest = tmp_path / "out" / "manifest.json"
    manifest.write_text("of the run that was killed")
    cut = docs[: len(docs) // 2]
    failed = run(tmp_path, "--docs", "-", "--num-val-docs", "4", "--skip-byte", stdin=cut)
    assert failed.returncode == 1 and "line" in failed.stderr and not manifest.exists()
    args = ["--docs", "-", "--num-val-docs", "4", "--chunk-tokens", "20000", "--skip-byte"]
    result = run(tmp_path, *args, stdin=docs, MATCHED_FINEWEB_TOKENIZER_THREADS="1")
    assert result.returncode == 0, result.stderr
    folder = exported / "datasets" / "fineweb10B_sp384"
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {path.name: path.read_bytes() for path in old.iterdir()} == files
    assert not (tmp_path / "out" / "datasets" / "fineweb10B_byte260").exists()
    assert "40 docs" in result.stderr  # the progress


def test_a_reused_model_is_copied(exported, tmp_path):
    model = exported / "tokenizers" / "fineweb_384_bpe.model"
    write_documents(tmp_path / "docs.jsonl", TEXTS[:6])
    (tmp_path / "docs_selected.source_manifest.json").write_text('{"docs_val": 2}')
    args = ["--docs", "docs.jsonl", "--skip-byte", "--reuse-sp-model", f"384={model}"]
    assert run(tmp_path, *args).returncode == 0
    copy = tmp_path / "out" / "tokenizers" / "fineweb_384_bpe.model"
    assert copy.read_bytes() == model.read_bytes()
    stats = json.loads((tmp_path / "out" / "manifest.json").read_text())["datasets"][0]["stats"]
    assert (stats["docs_val"], stats["docs_train"]) == (2, 4)  # by the sidecar
    wrong = tmp_path / "wrong.model"
    wrong.write_bytes(train_tokenizer(vocab_size=400))
    result = run(tmp_path, *args[:-1], f"384={wrong}")
    assert result.returncode == 1 and "has 400 pieces, not the 384" in result.stderr


@pytest.mark.parametrize(
    "line", ["{", '{"txt": "x"}', '{"text": 5}', "[]", '"text"', "", '{"text": null}']
)
def test_a_bad_line_names_its_number(tmp_path, line):
    path = tmp_path / "docs.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"docs.jsonl: line 2 must be"):
        list(read_documents(path))


@pytest.mark.parametrize(
    "args, words",
    [
        (["--docs", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--docs", "docs.jsonl", "--num-val-docs", "1000"], "check --num-val-docs"),
        (["--docs", "docs.jsonl", "--tokenizer-config", "docs.jsonl"], "docs.jsonl"),
        (["--docs", "docs.jsonl", "--reuse-sp-model", "384"], "VOCAB=MODEL"),
    ],
)
def test_errors_are_one_line(tmp_path, args, words):
    write_documents(tmp_path / "docs.jsonl")
    result = run(tmp_path, *args)
    assert result.returncode != 0 and words in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr and not (tmp_path / "out" / "manifest.json").exists()


@pytest.fixture(scope="module")
def encoder(tokenizer):
    encoder = WordEncoder(tokenizer.read_bytes())
    assert encoder.by_words
    return encoder


@settings(max_examples=300, deadline=None)
@given(
    texts=st.lists(
        st.one_of(
            st.sampled_from(TEXTS),
            st.text(max_size=40),
            st.text(
                alphabet="ab. \t\n\r\f\x0b\x00\x01\u00a0\u200b\u2581\u0301\u00e9\u3000'",
                max_size=30,
            ),
        ),
        max_size=4,
    )
)
def test_word_by_word_equals_the_whole_text(encoder, texts):
    assert encoder(texts) == [encoder.whole(text) for text in texts]


def test_the_memory_of_words_is_bounded(encoder, monkeypatch):
    monkeypatch.setattr(WordEncoder, "MAX_WORDS", 100)
    for text in TEXTS:
        assert encoder([text]) == [encoder.whole(text)]
    assert len(encoder.words) <= max(len(set(text.split())) for text in TEXTS) + 100


def test_a_model_that_does_not_go_word_by_word_encodes_whole_texts():
    other = WordEncoder(train_tokenizer(split_by_whitespace=False, add_dummy_prefix=True))
    assert other(TEXTS[:3]) == [other.whole(text) for text in TEXTS[:3]]


def test_the_byte_encoder():
    assert np.frombuffer(encode_bytes(["a\u00e9"])[0], "<u2").tolist() == [101, 199, 173]


def test_all_documents_may_be_validation(tmp_path, tokenizer):
    stats = export_dataset(TEXTS[:3], tokenizer, tmp_path, Settings(num_val_docs=5))
    assert (stats["docs_val"], stats["files_train"]) == (3, 0)


def test_a_lone_surrogate_is_replaced(tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_text('{"text": "a \\ud800 b"}\n')
    assert list(read_documents(path)) == ["a ? b"]


def test_a_named_pipe_and_a_failure_that_leaves_nothing_half_done(tmp_path, tokenizer):
    """A pipe is kept in a file of its own; a bad last line leaves no part of a shard."""
    (tmp_path / "out").mkdir()
    docs = write_documents(tmp_path / "out" / "docs_selected.jsonl").read_text()
    os.mkfifo(tmp_path / "pipe")
    writer = subprocess.Popen(["tee", tmp_path / "pipe"], stdin=-1, stdout=-3, text=True)
    threading.Thread(target=writer.communicate, args=(docs + "{\n",), daemon=True).start()
    args = ["--docs", "pipe", "--num-val-docs", "4", "--skip-byte"]
    result = run(tmp_path, *args, "--reuse-sp-model", f"384={tokenizer}")
    assert result.returncode == 1 and "docs_piped.jsonl: line 41 must be" in result.stderr
    assert (tmp_path / "out" / "docs_selected.jsonl").read_text() == docs
    assert not list((tmp_path / "out").rglob("*.part"))


@pytest.mark.parametrize(
    "args, sidecar, words",
    [
        (["--num-val-docs", "0"], "{}", "above 0"),
        ([], '{"docs_val": null}', "docs_val must be a number above 0"),
        ([], "[1]", "docs_selected.source_manifest.json"),
        (["--reuse-sp-model", "512=x.model"], '{"docs_val": 1}', "has no such size"),
        (["--reuse-sp-model", "384=docs.jsonl"], '{"docs_val": 1}', "no SentencePiece model"),
    ],
)
def test_more_errors_of_one_line(tmp_path, args, sidecar, words):
    write_documents(tmp_path / "docs.jsonl", TEXTS[:3])
    (tmp_path / "docs_selected.source_manifest.json").write_text(sidecar)
    result = run(tmp_path, "--docs", "docs.jsonl", *args)
    assert result.returncode != 0 and words in result.stderr.splitlines()[-1], result.stderr
    assert "Traceback" not in result.stderr
