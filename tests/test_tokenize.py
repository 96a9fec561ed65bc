"""From documents to tokenizers, shards and manifest: data/download_hf_docs_and_tokenize.py."""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import sentencepiece
from conftest import ROOT, TEXTS, process_environ, run_here, train_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(ROOT / "data"))
import check_dataset
from download_hf_docs_and_tokenize import (
    Settings,
    WordEncoder,
    encode_bytes,
    export_dataset,
    read_documents,
)
from shards import HEADER_BYTES, count_tokens, locked
from tokenizer_specs import read_specs

pytest.importorskip("tqdm")
SCRIPT = ROOT / "data" / "download_hf_docs_and_tokenize.py"
SPECS = {"tokenizers": [{"kind": "sentencepiece_bpe", "vocab_size": 384}, {"kind": "bytes"}]}


def start(folder, *args, specs=SPECS, **environ) -> subprocess.Popen:
    """The script in `folder`, writing into `folder`/out."""
    (folder / "specs.json").write_text(json.dumps(specs))
    command = [sys.executable, SCRIPT, "--output-root", "out", "--tokenizer-config", "specs.json"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [*command, *args], cwd=folder, env=process_environ(environ, 1), text=True, **pipes
    )


def run(folder, *args, stdin=None, **more) -> subprocess.CompletedProcess:
    process = start(folder, *args, **more)
    output = process.communicate(stdin, timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, *output)


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


def test_manifest_and_specs_in_full(exported):
    """Each key that other tools read."""
    docs = exported.parent / "docs.jsonl"
    manifest = json.loads((exported / "manifest.json").read_text())
    sp, byte = SPECS["tokenizers"]
    ids = {"bos_id": 1, "eos_id": 2}
    sizes = {"sp384": (384, 1920), "byte260": (260, 1920)}
    names = {"sp384": ("sp_bpe_384", "sentencepiece_bpe"), "byte260": ("pure_byte_260", "byte")}
    datasets = []
    for (suffix, (size, bigrams)), dataset in zip(sizes.items(), manifest["datasets"], strict=True):
        path = f"datasets/fineweb10B_{suffix}"
        stats = dataset["stats"]
        for what in ("docs", "files", "tokens"):
            parts = stats[f"{what}_val"] + stats[f"{what}_train"]
            assert stats[f"{what}_total"] == parts > 0
        assert len(stats) == 9
        facts = {"vocab_size": size, **ids, "recommended_bigram_vocab_size": bigrams}
        globs = {f"{split}_glob": f"{path}/fineweb_{split}_*.bin" for split in ("train", "val")}
        datasets.append({"name": f"fineweb10B_{suffix}", "tokenizer_name": names[suffix][0]})
        datasets[-1] |= {"tokenizer_kind": names[suffix][1], "path": path, **globs, **facts}
        datasets[-1]["stats"] = stats
    facts = {**ids, "recommended_bigram_vocab_size": 1920}
    files = {key: f"tokenizers/fineweb_384_bpe.{key[:5]}" for key in ("model_path", "vocab_path")}
    path = "tokenizers/fineweb_pure_byte_260.json"
    expected_sp = {"name": "sp_bpe_384", "kind": "sentencepiece_bpe", "vocab_size": 384, **facts}
    expected_byte = {"name": "pure_byte_260", "kind": "byte", "vocab_size": 260, **facts}
    assert manifest == {
        "version": "10B",
        "num_docs": 40,
        "num_val_docs": 4,
        "shuffle_seed": None,
        "shard_size": 20_000,
        "append_eos": False,
        "docs_jsonl": "../docs.jsonl",
        "docs_meta": {
            "remote_repo_id": None,
            "remote_root": None,
            "num_docs": 40,
            "docs_sha256": hashlib.sha256(docs.read_bytes()).hexdigest(),
            "source_manifest": None,
            "source_sidecar": None,
        },
        "tokenizer_specs": [sp, byte],
        "tokenizers": [
            {**expected_sp, "source_spec": sp, **files},
            {**expected_byte, "source_spec": byte, "path": path, "pad_id": 0, "unk_id": 3},
        ],
        "datasets": datasets,
    }
    specs = json.loads((exported / "tokenizer_config.export.json").read_text())
    assert specs == {"tokenizers": [sp, byte]}
    config = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "byte_offset": 4}
    assert json.loads((exported / path).read_text()) == {
        "tokenizer_type": "pure_byte",
        "config": {**config, "byte_count": 256},
        "vocab_size": 260,
    }
    assert not list(exported.rglob("*.part"))


def train_directly(folder, texts, **settings) -> list[str]:
    """The lines of the .vocab that SentencePiece's trainer writes, told the challenge's settings
    plainly."""
    sentences = [text.replace("\0", " ").strip() for text in texts]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([sentence for sentence in sentences if sentence]),
        model_prefix=str(folder / "direct"),
        **{
            "model_type": "bpe",
            "character_coverage": 0.999,
            "byte_fallback": True,
            "split_digits": True,
            "normalization_rule_name": "nmt_nfkc",
            "add_dummy_prefix": False,
            "pad_id": 0,
            "bos_id": 1,
            "eos_id": 2,
            "unk_id": 3,
            "hard_vocab_limit": False,
            "minloglevel": 2,
            **settings,
        },
    )
    return (folder / "direct.vocab").read_text().splitlines()


def test_the_same_documents_give_the_same_tokenizer(tmp_path):
    """Of 200 documents, the 50 for validation among them; some are blank, begin with spaces, hold a
    NUL, or are too long for SentencePiece."""
    texts = [topics[name] for name in sorted(topics)][:60]
    paragraphs = [part for text in texts[20:] for part in text.split("\n\n")]
    texts = [*texts[:20], "", " \0 ", " a\0b\0\n", *paragraphs][:200]
    write_documents(tmp_path / "docs.jsonl", texts)
    overrides = {"character_coverage": 0.98, "max_sentence_length": 20_000}
    part = {"name": "mine", "dataset_suffix": "mine", "model_prefix": "mine", "vocab_size": 5000}
    part |= {"tokenizer_train_docs": 8, "trainer_overrides": overrides}
    specs = [{"vocab_size": 512}, part]
    args = ["--docs", "docs.jsonl", "--num-val-docs", "50"]
    result = run(tmp_path, *args, specs=specs)
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "out" / "tokenizers"
    whole = train_directly(tmp_path, texts, vocab_size=512)
    assert (folder / "fineweb_512_bpe.vocab").read_text().splitlines() == whole
    first = train_directly(tmp_path, texts[:8], vocab_size=5000, **overrides)
    assert (folder / "mine.vocab").read_text().splitlines() == first
    assert 300 < len(first) < 5000  # all that eight documents give
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    for entries in (manifest["tokenizers"], manifest["datasets"]):
        assert [entry["vocab_size"] for entry in entries] == [512, len(first)]
    assert manifest["datasets"][1]["name"] == "fineweb10B_mine"
    longest = [sum(len(text.encode()) > 4192 for text in texts)]
    taken = f"trained on {200 - longest[0] - 2} of 200 documents"
    assert taken in result.stdout and longest[0] > 3


def specs_of(tmp_path, content, *reused, **args) -> list:
    """What read_specs makes of a file with this content."""
    path = tmp_path / "specs.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    given = {"skip_byte": False, "tokenizer_train_docs": None, **args}
    config = argparse.Namespace(tokenizer_config=path, reuse_sp_model=list(reused), **given)
    return read_specs(config)


BUILDER = "some.module:build_"


@pytest.mark.parametrize(
    "entry, expected",
    [
        ({"vocab_size": 512}, "sentencepiece_bpe sp_bpe_512 sp512 fineweb_512_bpe.model"),
        (
            {"kind": "sentencepiece", "vocab_size": 9, "name": None},
            "sentencepiece_bpe sp_bpe_9 sp9 fineweb_9_bpe.model",
        ),
        (
            {"builder": BUILDER + "sentencepiece_tokenizer", "vocab_size": 7, "name": "n"},
            "sentencepiece_bpe n sp7 fineweb_7_bpe.model",
        ),
        (
            {"vocab_size": 512, "dataset_suffix": "d", "model_prefix": "p"},
            "sentencepiece_bpe sp_bpe_512 d p.model",
        ),
        ({"kind": "byte"}, "byte pure_byte_260 byte260 fineweb_pure_byte_260.json"),
        ({"kind": "pure_byte", "filename": "f.json"}, "byte pure_byte_260 byte260 f.json"),
        (
            {"kind": "bytes", "vocab_size": 260, "dataset_suffix": "b"},
            "byte pure_byte_260 b fineweb_pure_byte_260.json",
        ),
        (
            {"builder": BUILDER + "pure_byte_tokenizer", "name": "n"},
            "byte n byte260 fineweb_pure_byte_260.json",
        ),
        (
            {"dataset_suffix": "byte260"},
            "byte pure_byte_260 byte260 fineweb_pure_byte_260.json",
        ),
    ],
)
@pytest.mark.parametrize("key", [None, "tokenizers", "tokenizer_specs"])
def test_specs_that_players_have(tmp_path, entry, expected, key):
    (spec,) = specs_of(tmp_path, [entry] if key is None else {"note": 1, key: [entry]})
    found = f"{spec.kind} {spec.name} {spec.dataset.removeprefix('fineweb10B_')} {spec.file}"
    assert found == expected


def test_our_own_specs_are_the_one_tokenizer_of_the_challenge():
    path = ROOT / "data" / "tokenizer_specs.json"
    args = {"reuse_sp_model": [], "skip_byte": False, "tokenizer_train_docs": None}
    (spec,) = read_specs(argparse.Namespace(tokenizer_config=path, **args))
    assert (spec.name, spec.dataset) == ("sp_bpe_1024", "fineweb10B_sp1024")
    assert (spec.file, spec.settings["vocab_size"]) == ("fineweb_1024_bpe.model", 1024)


SP = {"vocab_size": 512}


@pytest.mark.parametrize(
    "content, words",
    [
        ("{", "is no JSON"),
        ({"tokenizer": []}, "must be a list"),
        ([], "has no tokenizer"),
        ([5], "tokenizer 1: 5 is no object"),
        ([SP, {"vocab_sise": 5}], "tokenizer 2: field 'vocab_sise' is not known"),
        (
            [{**SP, "filename": "x"}],
            "field 'filename' is not for a tokenizer of kind sentencepiece",
        ),
        ([{"kind": "byte", "model_prefix": "x"}], "field 'model_prefix' is not for"),
        ([{"kind": "tiktoken"}], "kind 'tiktoken' is not known"),
        ([{"builder": "a:b"}], "builder 'a:b' is not known"),
        ([{"kind": "byte", "builder": BUILDER + "sentencepiece_tokenizer"}], "leave one out"),
        ([{"name": "x"}], "set kind to one of"),
        ([{"kind": "sentencepiece"}], "needs a vocab_size"),
        ([{"vocab_size": 70_000}], "vocab_size 70000 must be a whole number from 1 to 65536"),
        ([{"vocab_size": 0}], "vocab_size 0 must be"),
        ([{"vocab_size": "512"}], "vocab_size '512' must be a whole number"),
        ([{"vocab_size": True}], "vocab_size True must be a whole number"),
        ([{"kind": "byte", "vocab_size": 256}], "vocab_size of a byte tokenizer is 260"),
        ([{**SP, "trainer_overrides": {"vocab_size": 70_000}}], "vocab_size 70000"),
        ([{**SP, "trainer_overrides": {"coverage": 1}}], 'unknown field name "coverage"'),
        ([{**SP, "trainer_overrides": {"bos_id": 0}}], "SentencePiece refuses the settings {"),
        (
            [{**SP, "trainer_overrides": {"model_type": "x"}}],
            "SentencePiece refuses the settings {",
        ),
        ([{**SP, "trainer_overrides": {"input": "x"}}], "cannot set input"),
        ([{**SP, "trainer_overrides": []}], "trainer_overrides [] must be an object"),
        ([{**SP, "tokenizer_train_docs": 0}], "tokenizer_train_docs 0 must be above 0"),
        ([{**SP, "model_prefix": "../x"}], "model_prefix '../x' must be the name of a file"),
        ([{**SP, "dataset_suffix": ""}], "dataset_suffix '' must be the name of a file"),
        ([{"kind": "byte", "filename": ".."}], "filename '..' must be the name of a file"),
        ([{**SP, "reuse_model_path": "/dev/zero"}], "/dev/zero is no regular file"),
        ([SP, {**SP, "dataset_suffix": "d", "model_prefix": "p"}], "have the name sp_bpe_512"),
        ([SP, {**SP, "name": "n", "model_prefix": "p"}], "have the dataset fineweb10B_sp512"),
        ([SP, {**SP, "name": "n", "dataset_suffix": "d"}], "have the file fineweb_512_bpe.model"),
    ],
)
def test_specs_that_cannot_be(tmp_path, content, words):
    with pytest.raises(ValueError) as error:
        specs_of(tmp_path, content)
    assert str(error.value).startswith(str(tmp_path / "specs.json"))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_what_the_command_line_says_of_specs(tmp_path, tokenizer):
    """It comes before the file; a model that is there says how large its vocabulary is."""
    content = [{"kind": "bytes"}, {"kind": "sentencepiece", "reuse_model_path": str(tokenizer)}]
    (spec,) = specs_of(tmp_path, content, skip_byte=True, tokenizer_train_docs=7)
    assert (spec.name, spec.model) == ("sp_bpe_384", tokenizer.read_bytes())
    assert spec.source == {**content[1], "tokenizer_train_docs": 7}
    content = [{"vocab_size": 384, "reuse_model_path": "nowhere", "tokenizer_train_docs": 5}]
    (spec,) = specs_of(tmp_path, content, ("384", str(tokenizer)))
    assert spec.source == {**content[0], "reuse_model_path": str(tokenizer)}
    with pytest.raises(ValueError, match="tokenizer 1: nowhere: No such file or directory: name"):
        specs_of(tmp_path, content)
    with pytest.raises(ValueError, match="none but those that --skip-byte leaves out"):
        specs_of(tmp_path, [{"kind": "bytes"}], skip_byte=True)
    other = tmp_path / "no_bos.model"
    other.write_bytes(train_tokenizer(bos_id=-1))
    with pytest.raises(ValueError, match="no_bos.model has no BOS"):
        specs_of(tmp_path, [{**SP, "vocab_size": 384, "reuse_model_path": str(other)}])


def test_a_training_run_on_the_result(exported, knobs):
    environ = {
        **knobs,
        "DATA_PATH": str(exported / "datasets" / "fineweb10B_sp384"),
        "TOKENIZER_PATH": str(exported / "tokenizers" / "fineweb_384_bpe.model"),
    }
    result = run_here(exported, environ)
    assert result.returncode == 0, result.stderr
    environ["TOKENIZER_PATH"] = str(exported / "manifest.json")  # what a byte260 run would need
    assert "must be a SentencePiece .model file" in run_here(exported, environ).stderr


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
    assert failed.returncode == 1 and "line" in failed.stderr
    assert manifest.exists() and len(list(old.iterdir())) == 2  # nothing is lost so far
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
    (tmp_path / "docs_selected.source_manifest.json").write_text(
        '{"docs_val": 2, "shuffle_seed": 7, "num_docs": 5}'
    )
    args = ["--docs", "docs.jsonl", "--skip-byte", "--reuse-sp-model", f"384={model}"]
    result = run(tmp_path, *args)
    assert result.returncode == 0, result.stderr
    copy = tmp_path / "out" / "tokenizers" / "fineweb_384_bpe.model"
    assert copy.read_bytes() == model.read_bytes()
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    stats = manifest["datasets"][0]["stats"]
    assert (stats["docs_val"], stats["docs_train"]) == (2, 4)  # by the sidecar
    sidecar = {"docs_val": 2, "shuffle_seed": 7, "num_docs": 5}
    assert (manifest["shuffle_seed"], manifest["docs_meta"]["source_sidecar"]) == (7, sidecar)
    assert manifest["docs_meta"]["source_manifest"] == "../docs_selected.source_manifest.json"
    assert manifest["num_docs"] == 6 and "num_docs is 5, but docs.jsonl has 6" in result.stderr
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
        (["--docs", "docs.jsonl", "--num-val-docs", "40"], "40 documents, and the first 40 are"),
        (["--docs", "docs.jsonl", "--num-val-docs", "-1"], "'-1' must be a whole number, 0 to"),
        (["--docs", "docs.jsonl", "--chunk-tokens", "2147483648"], "1 to 2147483647"),
        (["--docs", "/dev/zero"], "/dev/zero is no regular file"),
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
    # What there is of the dataset says that it is not whole, until it is made anew.
    folder = tmp_path / "out" / "datasets" / "fineweb10B_sp384"
    assert refusal(folder, tokenizer) == ["fineweb_train.part", "fineweb_val.part", "manifest.part"]
    args = ["--docs", "out/docs_selected.jsonl", "--num-val-docs", "0", "--skip-byte"]
    result = run(tmp_path, *args, "--reuse-sp-model", f"384={tokenizer}")
    assert result.returncode == 0, result.stderr
    assert refusal(folder, tokenizer) == [] and not list((tmp_path / "out").rglob("*.part"))
    stats = json.loads((tmp_path / "out" / "manifest.json").read_text())["datasets"][0]["stats"]
    assert (stats["docs_val"], stats["files_val"], stats["docs_train"]) == (0, 0, 40)


def refusal(folder, tokenizer) -> list[str]:
    """The unfinished files that a check of the dataset names, or what else it does not like; none
    if it accepts it."""
    args = [sys.executable, check_dataset.__file__, folder, "--tokenizer", tokenizer, "--no-hash"]
    result = subprocess.run(args, capture_output=True, text=True, timeout=60)
    lines = result.stderr.splitlines()
    named = [Path(line.split(" is there:")[0].split(" is missing, ")[-1]).name for line in lines]
    assert result.returncode == int(bool(lines)), result.stderr
    return [name for name in named if name.endswith(".part")] or lines


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_an_export_that_is_killed(tmp_path, tokenizer, kind):
    """Its workers end with it, the check refuses what it left, and the next run goes on at once."""
    write_documents(tmp_path / "docs.jsonl", TEXTS * 100)
    folder = tmp_path / "out" / "datasets" / "fineweb10B_sp384"
    args = ["--docs", "docs.jsonl", "--skip-byte", "--reuse-sp-model", f"384={tokenizer}"]
    knobs = {"MATCHED_FINEWEB_SP_BATCH_SIZE": "1", "MATCHED_FINEWEB_TOKENIZER_THREADS": "2"}
    process = start(tmp_path, *args, "--num-val-docs", "3000", "--chunk-tokens", "50000", **knobs)
    deadline = time.monotonic() + 30
    while not list(folder.glob("fineweb_val_*.bin")) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(kind)
    process.communicate(timeout=10)  # to the end of the last process that has its pipes
    assert process.returncode == -kind
    assert list(folder.glob("fineweb_val_*.bin")) and not list(folder.glob("fineweb_train_*.bin"))
    parts = ["fineweb_train.part", "fineweb_val.part", "manifest.part"]
    if kind == signal.SIGKILL:
        assert refusal(folder, tokenizer) == parts
        write_documents(tmp_path / "docs.jsonl", TEXTS)
        result = run(tmp_path, *args, "--num-val-docs", "4", **knobs)
        assert result.returncode == 0 and "waiting" not in result.stderr, result.stderr
        assert refusal(folder, tokenizer) == []
        assert not list((tmp_path / "out").rglob("*.part"))


def test_who_waits_says_for_whom(tmp_path, tokenizer):
    write_documents(tmp_path / "docs.jsonl", TEXTS[:5])
    args = ["--docs", "docs.jsonl", "--num-val-docs", "2", "--reuse-sp-model", f"384={tokenizer}"]
    with locked(tmp_path / "out"):
        process = start(tmp_path, *args, "--skip-byte")
        line = process.stderr.readline()
    assert line == f"waiting for process {os.getpid()}, which is at work in out\n"
    process.communicate(timeout=60)
    assert process.returncode == 0 and (tmp_path / "out" / "manifest.json").exists()


def test_a_model_with_another_bos(tmp_path):
    """Documents begin with the model's own, and the check looks for it."""
    (tmp_path / "other.model").write_bytes(train_tokenizer(bos_id=2, eos_id=1))
    write_documents(tmp_path / "docs.jsonl", TEXTS[:5])
    args = ["--docs", "docs.jsonl", "--num-val-docs", "2", "--skip-byte"]
    result = run(tmp_path, *args, "--reuse-sp-model", "384=other.model")
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "out" / "datasets" / "fineweb10B_sp384"
    tokens = np.fromfile(folder / "fineweb_train_000000.bin", dtype="<u2", offset=HEADER_BYTES)
    assert tokens[0] == 2 and (tokens == 2).sum() == 3
    assert refusal(folder, tmp_path / "other.model") == []


@pytest.mark.parametrize(
    "args, sidecar, words",
    [
        ([], '{"docs_val": null}', "docs_val None must be a number from 0 on"),
        ([], '{"docs_val": -1}', "docs_val -1 must be a number from 0 on"),
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
