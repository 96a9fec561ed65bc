"""From documents to tokenizers, shards and manifest: data/download_hf_docs_and_tokenize.py."""

import functools
import hashlib
import json
import os
import sys
import threading

import numpy as np
import pytest
import sentencepiece
from conftest import ROOT, TEXTS, train_tokenizer

sys.path.insert(0, str(ROOT / "data"))
import check_dataset
import download_hf_docs_and_tokenize as rebuild
import shards
from tokenizer_specs import encode_texts, read_specs

ODD_TEXTS = [
    "", " ", "  two leading", "trailing ", "a  doubled   space", "a\ttab\nand\r\na line ", "\n\n",
    "x" * 3000, "\u2581 mark\u2581", "\x00 control \x01", "\U0001f600 12345 \u4e2d\u6587", "e\u0301"
]  # fmt: skip
SPECS = [
    {"kind": "sentencepiece_bpe", "vocab_size": 384},
    {"name": "mine", "dataset_suffix": "mine", "model_prefix": "mine", "vocab_size": 5000,
     "tokenizer_train_docs": 8, "trainer_overrides": {"character_coverage": 0.98}},
    {"kind": "bytes"},
]  # fmt: skip
SP = {"vocab_size": 512}
(OUR_SPEC,) = json.loads((ROOT / "data" / "tokenizer_specs.json").read_text())["tokenizers"]


def write_documents(path, texts=TEXTS):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def run(folder, *args, specs=SPECS[:1], docs=None) -> dict:
    """The tool in this process, on folder/docs.jsonl, into folder/out; the manifest."""
    (folder / "specs.json").write_text(json.dumps(specs))
    arguments = ["--output-root", folder / "out", "--tokenizer-config", folder / "specs.json"]
    arguments += ["--docs", docs or folder / "docs.jsonl", *args]
    rebuild.main([str(argument) for argument in arguments])
    return json.loads((folder / "out" / "manifest.json").read_text())


def failure(folder, *args, **more) -> str:
    with pytest.raises(SystemExit) as stop:
        run(folder, *args, **more)
    assert "\n" not in str(stop.value)
    return str(stop.value)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The output for 40 documents and odd ones, which come through a pipe; 4 for validation."""
    folder = tmp_path_factory.mktemp("export")
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    docs = write_documents(folder / "docs.jsonl", TEXTS + ODD_TEXTS).read_bytes()
    threading.Thread(target=pipe.write_bytes, args=(docs,), daemon=True).start()
    run(folder, "--num-val-docs", "4", "--chunk-tokens", "20000", specs=SPECS, docs=pipe)
    return folder / "out"


ODD_SETTINGS = [
    {"split_by_whitespace": False, "vocab_size": 600},
    {"user_defined_symbols": ["of the", " an", "  "], "vocab_size": 400},
    {"remove_extra_whitespaces": False, "bos_id": 2, "eos_id": 1},
]


@pytest.mark.parametrize("settings", [{}, *ODD_SETTINGS], ids=str)
def test_shards_are_what_sentencepiece_says(tmp_path, monkeypatch, settings):
    """Document by document, whatever the pieces span, and however documents come in batches."""
    sp = sentencepiece.SentencePieceProcessor(model_proto=train_tokenizer(**settings))
    texts = [*ODD_TEXTS, *TEXTS[:8], *(f" {text} " for text in TEXTS[8:12])]
    monkeypatch.setattr(rebuild, "BATCH_SIZE", 5)
    encode = functools.partial(encode_texts, sp, 2)
    num_docs = {"val": 7, "train": len(texts) - 7}
    stats = rebuild.export_dataset(iter(texts), num_docs, encode, tmp_path, 3000)
    for split, part in (("val", texts[:7]), ("train", texts[7:])):
        paths = sorted(tmp_path.glob(f"fineweb_{split}_*.bin"))
        sizes = [shards.count_tokens(path) for path in paths]
        assert set(sizes[:-1]) <= {3000} and 0 < sizes[-1] <= 3000
        assert (stats[f"files_{split}"], stats[f"tokens_{split}"]) == (len(paths), sum(sizes))
        tokens = [id for path in paths for id in np.fromfile(path, dtype="<u2", offset=1024)]
        assert tokens == [id for text in part for id in (sp.bos_id(), *sp.encode(text))]


def pieces(model: bytes) -> list[str]:
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [sp.id_to_piece(i) for i in range(sp.vocab_size())]


def test_the_same_documents_give_the_same_tokenizer(exported):
    """As SentencePiece's own trainer, told the settings plainly."""
    sentences = [text.replace("\0", " ").strip() for text in TEXTS + ODD_TEXTS]
    sentences = [sentence for sentence in sentences if sentence]
    own = {"character_coverage": 0.999, "hard_vocab_limit": False}
    whole = pieces(train_tokenizer(sentence_iterator=iter(sentences), **own))
    assert pieces((exported / "tokenizers/fineweb_384_bpe.model").read_bytes()) == whole
    own |= {"character_coverage": 0.98, "vocab_size": 5000}
    first = pieces(train_tokenizer(sentence_iterator=iter(sentences[:8]), **own))
    assert pieces((exported / "tokenizers/mine.model").read_bytes()) == first
    vocab = (exported / "tokenizers/mine.vocab").read_text().splitlines()
    assert [line.split("\t")[0] for line in vocab] == first and vocab[0] == "<pad>\t0"


def test_the_manifest(exported):
    """The keys that other tools read."""
    manifest = json.loads((exported / "manifest.json").read_text())
    stats = manifest["datasets"][0].pop("stats")
    assert (stats["docs_val"], stats["docs_train"]) == (4, 48)
    assert stats["tokens_total"] == stats["tokens_val"] + stats["tokens_train"]
    assert manifest["num_docs"] == 52 and manifest["shard_size"] == 20_000
    sha256 = hashlib.sha256((exported.parent / "docs.jsonl").read_bytes()).hexdigest()
    assert manifest["docs_meta"]["docs_sha256"] == sha256
    assert manifest["tokenizer_specs"] == SPECS
    ids = {"bos_id": 1, "eos_id": 2, "recommended_bigram_vocab_size": 1920}
    assert manifest["datasets"][0] == {
        "name": "fineweb10B_sp384", "tokenizer_name": "sp_bpe_384", "vocab_size": 384, **ids,
        "tokenizer_kind": "sentencepiece_bpe", "path": "datasets/fineweb10B_sp384",
        "train_glob": "datasets/fineweb10B_sp384/fineweb_train_*.bin",
        "val_glob": "datasets/fineweb10B_sp384/fineweb_val_*.bin",
    }  # fmt: skip


def test_bytes_as_tokens(exported):
    tokens = [1, *(byte + 4 for byte in TEXTS[4].encode())]
    shard = exported / "datasets/fineweb10B_byte260/fineweb_train_000000.bin"
    assert np.fromfile(shard, "<u2", len(tokens), offset=1024).tolist() == tokens


def specs_of(tmp_path, content, reused=None, train_docs=None, skip_byte=False) -> list:
    path = tmp_path / "specs.json"
    path.write_text(json.dumps(content))
    return read_specs(path, reused or {}, train_docs, skip_byte)


@pytest.mark.parametrize(
    "entry, expected",
    [
        (OUR_SPEC, "sp_bpe_1024 sp1024 fineweb_1024_bpe.model"),
        ({"kind": "sentencepiece", "vocab_size": 9, "name": None, "dataset_suffix": "d"},
         "sp_bpe_9 d fineweb_9_bpe.model"),
        ({"builder": "a.b:build_sentencepiece_tokenizer", "vocab_size": 7, "model_prefix": "p"},
         "sp_bpe_7 sp7 p.model"),
        ({"kind": "byte", "name": "n"}, "n byte260 fineweb_pure_byte_260.json"),
        ({"builder": "a.b:build_pure_byte_tokenizer", "filename": "f"}, "pure_byte_260 byte260 f"),
    ],
)  # fmt: skip
def test_specs_that_players_have(tmp_path, entry, expected):
    for content in ([entry], {"tokenizers": [entry]}, {"tokenizer_specs": [entry]}):
        (spec,) = specs_of(tmp_path, content)
        assert f"{spec.name} {spec.dataset} {spec.file}".replace("fineweb10B_", "") == expected
        assert spec.kind == ("byte" if "byte" in expected else "sentencepiece_bpe")


@pytest.mark.parametrize(
    "content, words",
    [
        ([SP, {"vocab_sise": 5}], "tokenizer 2: .*vocab_sise"),
        ([{"kind": "tiktoken"}], "'tiktoken' is not one of"),
        ([{"kind": "byte", "vocab_size": 256}], "vocab_size 256 must be 260"),
        ([SP, {**SP, "name": "n", "model_prefix": "p"}], "2: fineweb10B_sp512 is another"),
    ],
)
def test_specs_that_cannot_be(tmp_path, content, words):
    with pytest.raises(ValueError, match=rf"specs\.json.*{words}"):
        specs_of(tmp_path, content)


def test_what_the_command_line_says_of_specs(tmp_path, tokenizer):
    """It comes before the file. A reused model may be smaller than the spec says, not larger."""
    content = [{"kind": "bytes"}, {"kind": "sentencepiece", "reuse_model_path": str(tokenizer)}]
    (spec,) = specs_of(tmp_path, content, train_docs=7, skip_byte=True)
    assert (spec.name, spec.model) == ("sp_bpe_384", tokenizer.read_bytes())
    assert spec.fields == {**content[1], "tokenizer_train_docs": 7}
    with pytest.raises(ValueError, match="384 pieces, more than vocab_size 300"):
        specs_of(tmp_path, [{"vocab_size": 300}], {300: str(tokenizer)})


def test_a_smaller_model_and_a_sidecar(tmp_path, tokenizer):
    """The model is copied, its own size counts; the sidecar says how many documents validate."""
    docs = write_documents(tmp_path / "docs_selected.jsonl", TEXTS[:6])
    sidecar = {"docs_val": 2, "shuffle_seed": 7}
    (tmp_path / "docs_selected.source_manifest.json").write_text(json.dumps(sidecar))
    manifest = run(tmp_path, "--reuse-sp-model", f"512={tokenizer}", specs=[SP], docs=docs)
    copy = tmp_path / "out/tokenizers/fineweb_512_bpe.model"
    assert copy.read_bytes() == tokenizer.read_bytes()
    assert [manifest[key][0]["vocab_size"] for key in ("tokenizers", "datasets")] == [384, 384]
    assert (manifest["num_val_docs"], manifest["shuffle_seed"]) == (2, 7)
    assert manifest["docs_meta"]["source_sidecar"] == sidecar


def test_an_unfinished_rebuild_says_so(tmp_path, tokenizer, capsys):
    """The check refuses its folder, and the same command starts it anew."""
    write_documents(tmp_path / "docs.jsonl")
    reuse = ["--reuse-sp-model", f"384={tokenizer}", "--num-val-docs", "4"]
    first = run(tmp_path, *reuse)
    folder = tmp_path / "out" / "datasets" / "fineweb10B_sp384"
    check = [str(folder), "--tokenizer", str(tokenizer)]
    assert check_dataset.main(check) == 0
    (folder.parent / "fineweb10B_byte260").write_text("not a folder: the second dataset fails")
    capsys.readouterr()
    assert "fineweb10B_byte260" in failure(tmp_path, *reuse, specs=[SPECS[0], SPECS[2]])
    assert check_dataset.main(check) == 1
    assert "manifest.part" in capsys.readouterr().err
    assert run(tmp_path, *reuse) == first and check_dataset.main(check) == 0


@pytest.mark.parametrize("line", ["{", '{"txt": "x"}', '{"text": 5}'])
def test_a_bad_line_names_its_number(tmp_path, line):
    # Half a surrogate pair is not a bad line.
    (tmp_path / "docs.jsonl").write_text('{"text": "a \\ud800 b"}\n' + line + "\n")
    assert next(rebuild.read_documents(tmp_path / "docs.jsonl")) == "a ? b"
    assert "docs.jsonl: line 2 must be" in failure(tmp_path)


def test_errors_are_one_line(tmp_path):
    write_documents(tmp_path / "docs.jsonl")
    specs = [{**SP, "trainer_overrides": {"coverage": 1}}]
    message = failure(tmp_path, "--num-val-docs", "4", specs=specs)
    assert "sp_bpe_512" in message and "coverage" in message
    assert "docs.jsonl has 40 documents" in failure(tmp_path, "--num-val-docs", "41")
    assert "nowhere.jsonl" in failure(tmp_path, docs="nowhere.jsonl")
    reuse = ["--reuse-sp-model", f"384={tmp_path}/docs.jsonl"]
    assert "docs.jsonl is not" in failure(tmp_path, *reuse)
