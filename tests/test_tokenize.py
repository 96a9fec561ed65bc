"""data/download_hf_docs_and_tokenize.py: documents become tokenizers, shards and a manifest."""

import functools
import hashlib
import json
import lzma
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import caseops
import check_dataset
import download_hf_docs_and_tokenize as rebuild
import files
import pytest
import sentencepiece
from runs import ROOT, run_here
from texts import TEXTS, read_shard, train_tokenizer, write_documents
from tokenizer_tools import encode_texts, read_specs, sentences_of

ODD_TEXTS = [
    "", " ", "  two leading", "trailing ", "a  doubled   space", "a\ttab\nand\r\na line ", "\n\n",
    "x" * 3000, "\u2581 mark\u2581", "\x00 control \x01", "\U0001f600 12345 \u4e2d\u6587", "e\u0301"
]  # fmt: skip
SPECS = [
    {"kind": "sentencepiece_bpe", "vocab_size": 384},
    {"name": "mine", "dataset_suffix": "mine", "model_prefix": "mine", "vocab_size": 5000,
     "tokenizer_train_docs": 8, "trainer_overrides": {"character_coverage": 0.98}},
]  # fmt: skip
SIDECAR = "docs_selected.source_manifest.json"
(OUR_SPEC,) = json.loads((ROOT / "data" / "tokenizer_specs.json").read_text())["tokenizers"]


def run(folder, *args, specs=SPECS[:1], docs=()) -> dict:
    """Rebuild docs (or folder/docs.jsonl) into folder/out in this process. Returns the manifest."""
    config, out = folder / "specs.json", folder / "out"
    config.write_text(json.dumps(specs))
    docs = docs or [folder / "docs.jsonl"]
    arguments = ["--output-root", out, "--tokenizer-config", config, "--docs", *docs, *args]
    rebuild.main([str(argument) for argument in arguments])
    return json.loads((out / "manifest.json").read_text())


def failure(folder, *args, **more) -> str:
    """Return the last line on stderr, after progress bars. The exit code must be 2."""
    result = run_here(folder, {}, SimpleNamespace(main=lambda: run(folder, *args, **more)))
    assert result.returncode == 2
    return result.stderr.splitlines()[-1]


def test_shards_have_the_tokens_that_sentencepiece_makes(tmp_path, monkeypatch):
    """Documents begin with the model's own BOS. The batch size does not matter."""
    settings = {"remove_extra_whitespaces": False, "bos_id": 2, "eos_id": 1}
    sp = sentencepiece.SentencePieceProcessor(model_proto=train_tokenizer(**settings))
    texts = [*ODD_TEXTS, *TEXTS[:12]]
    monkeypatch.setattr(rebuild, "BATCH_SIZE", 5)
    encode = functools.partial(encode_texts, sp, 2)
    num_docs = {"val": 7, "train": len(texts) - 7}
    stats = rebuild.export_dataset(iter(texts), num_docs, encode, tmp_path, 3000)
    for split, part in (("val", texts[:7]), ("train", texts[7:])):
        paths = sorted(tmp_path.glob(f"fineweb_{split}_*.bin"))
        sizes = [files.count_tokens(path) for path in paths]
        assert set(sizes[:-1]) <= {3000} and 0 < sizes[-1] <= 3000
        assert (stats[f"files_{split}"], stats[f"tokens_{split}"]) == (len(paths), sum(sizes))
        tokens = [id for path in paths for id in read_shard(path)]
        assert tokens == [id for text in part for id in (2, *sp.encode(text))]


def pieces(model: bytes) -> list[str]:
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [sp.id_to_piece(i) for i in range(sp.vocab_size())]


def test_the_hubs_documents_give_the_challenges_tokenizer(tmp_path):
    """Its pieces are those of SentencePiece's own trainer, which skips long documents."""
    docs = write_documents(tmp_path / "docs_selected.jsonl", TEXTS + ODD_TEXTS)
    (tmp_path / SIDECAR).write_text('{"docs_val": 4, "shuffle_seed": 7}')
    manifest = run(tmp_path, "--skip-byte", specs=SPECS, docs=[docs])
    assert (manifest["num_val_docs"], manifest["shuffle_seed"]) == (4, 7)
    assert manifest["tokenizer_specs"] == SPECS
    assert manifest["docs_meta"]["source_sidecar"] == {"docs_val": 4, "shuffle_seed": 7}
    sentences = list(filter(None, (text.replace("\0", " ").strip() for text in TEXTS + ODD_TEXTS)))
    own = {"character_coverage": 0.999, "hard_vocab_limit": False}
    whole = pieces(train_tokenizer(sentence_iterator=iter(sentences), **own))
    assert pieces((tmp_path / "out/tokenizers/fineweb_384_bpe.model").read_bytes()) == whole
    own |= {"character_coverage": 0.98, "vocab_size": 5000}
    first = pieces(train_tokenizer(sentence_iterator=iter(sentences[:8]), **own))
    assert pieces((tmp_path / "out/tokenizers/mine.model").read_bytes()) == first
    vocab = (tmp_path / "out/tokenizers/mine.vocab").read_text().splitlines()
    assert [line.split("\t")[0] for line in vocab] == first and vocab[0] == "<pad>\t0"


def test_the_manifest(tmp_path):
    write_documents(tmp_path / "docs.jsonl", TEXTS + ODD_TEXTS)
    manifest = run(tmp_path, "--num-val-docs", 4, "--chunk-tokens", 20_000, specs=SPECS)
    stats, sha256 = (manifest["datasets"][0].pop(key) for key in ("stats", "docs_sha256"))
    assert sha256 == hashlib.sha256((tmp_path / "docs.jsonl").read_bytes()).hexdigest()
    assert (stats["docs_val"], stats["docs_train"]) == (4, 48)
    assert stats["tokens_total"] == stats["tokens_val"] + stats["tokens_train"]
    assert manifest["shard_size"] == 20_000 and manifest["tokenizer_specs"] == SPECS
    ids = {"bos_id": 1, "eos_id": 2, "recommended_bigram_vocab_size": 1920}
    assert manifest["datasets"][0] == {
        "name": "fineweb10B_sp384", "tokenizer_name": "sp_bpe_384", "vocab_size": 384, **ids,
        "tokenizer_kind": "sentencepiece_bpe", "path": "datasets/fineweb10B_sp384",
        "train_glob": "datasets/fineweb10B_sp384/fineweb_train_*.bin",
        "val_glob": "datasets/fineweb10B_sp384/fineweb_val_*.bin",
    }  # fmt: skip


def test_specs_that_players_have_are_accepted(tmp_path):
    """Except those of bytes, on which the trainer cannot train."""
    players = {
        "sp_bpe_1024 sp1024 fineweb_1024_bpe": OUR_SPEC,
        "sp_bpe_9 d fineweb_9_bpe":
            {"kind": "sentencepiece", "vocab_size": 9, "name": None, "dataset_suffix": "d"},
        "sp_bpe_7 sp7 p":
            {"builder": "a:build_sentencepiece_tokenizer", "vocab_size": 7, "model_prefix": "p"},
    }  # fmt: skip
    path = tmp_path / "specs.json"
    for expected, entry in players.items():
        for content in ([entry], {"tokenizers": [entry]}, {"tokenizer_specs": [entry]}):
            path.write_text(json.dumps(content))
            (spec,) = read_specs(path, {}, {})
            dataset, prefix = spec.folder.split("_", 1)[1], Path(spec.model_path).stem
            assert f"{spec.name} {dataset} {prefix}" == expected
    for entry in ({"kind": "byte"}, {"dataset_suffix": "byte260"}, {"builder": "a:pure_byte"}):
        path.write_text(json.dumps([OUR_SPEC, entry]))
        with pytest.raises(ValueError, match="tokenizer 2: train_gpt.py cannot train on bytes"):
            read_specs(path, {}, {})
    for field, name in (("dataset_suffix", "a/b"), ("model_prefix", "../x"), ("model_prefix", "")):
        path.write_text(json.dumps([{"vocab_size": 9, field: name}]))
        with pytest.raises(ValueError, match=f"1: {field} .* without a slash"):
            read_specs(path, {}, {})
    path.write_text('[{"vocab_size": 9}, {"vocab_size": 9, "name": "n"}]')
    with pytest.raises(ValueError, match="2: fineweb10B_sp9 is another"):
        read_specs(path, {}, {})


def test_your_own_text(tmp_path, capsys, monkeypatch):
    """5 % are for validation, all of it trains the tokenizer, and the last line is the command that
    trains a model. No package of the download is needed."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("huggingface_hub", "tqdm"):
        monkeypatch.setitem(sys.modules, name, None)  # its import fails
    monkeypatch.delitem(sys.modules, "cached_challenge_fineweb", raising=False)
    (tmp_path / "my.txt").write_text("\n\n".join(TEXTS))
    arguments = ["--docs", "~/my.txt", "--vocab-size=60000", "--output-root=~/my out"]
    runpy.run_path(rebuild.__file__)["main"](arguments)
    output, out = capsys.readouterr().out, tmp_path / "my out"
    texts = list(rebuild.read_documents(tmp_path / "my.txt"))
    num_val_docs = json.loads((out / "manifest.json").read_text())["num_val_docs"]
    assert num_val_docs == len(texts) // 20 > 1
    val = "".join(map(caseops.normalize, texts[:num_val_docs])).encode()
    bpb = 8 * len(lzma.compress(val, preset=9 | lzma.PRESET_EXTREME)) / len(val)
    assert f"val: lzma_bpb:{bpb:.4f} (xz -9e on {len(val)} validation bytes)" in output
    assert f"val: 0 of {num_val_docs} documents (0.00%) are also in train shards" in output
    size = len(pieces((out / "tokenizers/fineweb_60000_bpe.model").read_bytes()))
    assert f"WARNING: fineweb10B_sp60000 has {size} pieces, not 60000" in output
    assert check_dataset.main([str(out)]) == 0
    note, command = output.splitlines()[-2:]
    assert note == "Train with (on a CPU, put PRESET=demo in front):" and shlex.split(command) == [
        f"DATA_PATH={out}/datasets/fineweb10B_sp60000",
        f"TOKENIZER_PATH={out}/tokenizers/fineweb_60000_bpe.model",
        *(f"VOCAB_SIZE={size}", "python", os.path.relpath(ROOT / "train_gpt.py")),
    ]


def test_a_short_split_is_named(tmp_path, tokenizer, capsys):
    """The training command gets shorter sequences."""
    reuse = ["--reuse-sp-model", f"384={tokenizer}"]
    write_documents(tmp_path / "docs.jsonl", [text[:500] for text in TEXTS])
    run(tmp_path, *reuse)
    output = capsys.readouterr().out
    assert re.search(r"\nNote: \d+ training tokens are less than one step \(524288\)", output)
    assert "pieces, not" not in output
    docs = int(re.search(r"so few .*: --num-val-docs (\d+) is enough", output)[1])
    assert " VOCAB_SIZE=384 TRAIN_SEQ_LEN=128 python " in output
    stats = run(tmp_path, *reuse, "--num-val-docs", docs)["datasets"][0]["stats"]
    assert 2000 <= stats["tokens_val"] < 3000 and "so few" not in capsys.readouterr().out
    write_documents(tmp_path / "docs.jsonl", [text[:500] for text in [*TEXTS[:30], *TEXTS[:10]]])
    run(tmp_path, *reuse, "--num-val-docs", 30, "--replace")
    output = capsys.readouterr().out
    assert re.search(r"WARNING: .*10 of 30 validation documents are in the train shards", output)
    assert re.search(r"WARNING: \d+ training .* one step of the demo \(6144\)", output)
    assert re.search(r"WARNING: validation has \d+ of \d+ tokens, more than a tenth", output)


def test_documents_of_plain_text_and_json_lines(tmp_path):
    """Text is cut at a blank line after 2,000 bytes without CR, and read in parts of 16 MB. Of JSON
    lines, which may have any name, half are objects. A bad one is named."""
    a, b, c, d, e = ("\u00e9\n" + f"{letter}\n" * 350 for letter in "abcde")
    text, path = "\n\n".join(["\ufeff\n", a, b, c, d, f"{e}\n"]), tmp_path / "my.txt"
    for ends in ("\n", "\r\n"):
        path.write_bytes(text.replace("\n", ends).encode())
        documents = [re.sub("\n+", "\n", text) for text in rebuild.read_documents(path)]
        assert documents == [f"{a}{b}{c}".strip(), f"{d}{e}".strip()]
    long = [f"{number:04} " * (8000 + number) for number in range(900)]
    path.write_text("\n\n \n".join(long))
    assert list(rebuild.read_documents(path)) == [text.strip() for text in long]
    path.write_text('{"text": "a"}\nis one line\nof JSON lines')
    assert len(list(rebuild.read_documents(path))) == 1
    path.write_text('\n{"id": 1, "text": "a \\ud800"}\n\n{"text": "b"}\n')
    assert list(rebuild.read_documents(path)) == ["a ?", "b"]
    digits = '{"n": 1%s}' % ("0" * 5000)
    for line, why in (("{}", "KeyError"), ("[" * 10**5, "Recursion"), (digits, "4300")):
        path.write_text(f'{line}\n{{"text": "a"}}\n{{"text": "b"}}\n')
        with pytest.raises(ValueError, match=f'{path}: line 1 must be {{"text": "..."}} .*{why}'):
            list(rebuild.read_documents(path))


@pytest.mark.parametrize("texts", [TEXTS[:20], TEXTS * 2])
def test_text_that_changes_while_it_is_read_is_an_error(tmp_path, monkeypatch, texts):
    """In one reading, or between two. Nothing takes its place."""
    docs, text, make_model = tmp_path / "my.txt", "\n\n".join(TEXTS), rebuild.make_model
    change = functools.partial(docs.write_text, "\n\n".join(texts))
    monkeypatch.setattr(rebuild, "make_model", lambda *args: change() and make_model(*args))
    docs.write_text(text)
    assert "my.txt changed while it was read" in failure(tmp_path, docs=[docs])
    assert not [*(tmp_path / "out").glob("*/*/*.bin"), *(tmp_path / "out").glob("*.json")]
    next(documents := rebuild.read_documents(docs))
    docs.write_text(text)
    with pytest.raises(ValueError, match="my.txt changed while it was read"):
        list(documents)


def test_documents_of_several_files_and_folders(tmp_path, tokenizer, capsys):
    """Files keep the order of --docs; those of a folder are sorted. No document spans two files. A
    seed shuffles the documents before the split, in the same order on every platform. A command
    may read a copy that it replaces."""
    folder, mixed = tmp_path / "folder", tmp_path / "out/docs_mixed"
    folder.mkdir()
    for name in ("b.txt", "a.JSONL", "C.TXT", "d.md", ".e.txt"):
        (folder / name).write_text('{"text": "json"}' if "JSON" in name else f"from {name}")
    (tmp_path / "0.txt").write_text("one\n\nand two")
    reuse = ["--reuse-sp-model", f"384={tokenizer}"]
    run(tmp_path, *reuse, docs=[tmp_path / "0.txt", folder])
    texts = list(rebuild.read_documents(mixed))
    assert texts == ["one\n\nand two", "from C.TXT", "json", "from b.txt"]
    assert f"{folder}: 3 of 4 files are read" in capsys.readouterr().out
    texts += [f"\u00e9 {number}\n" for number in range(36)]
    docs = write_documents(tmp_path / "docs.jsonl", texts[4:])
    manifest = run(tmp_path, *reuse, "--shuffle", 7, "--replace", docs=[mixed, docs])
    shuffled = list(rebuild.read_documents(mixed))
    assert shuffled[:5] == [texts[i] for i in (5, 35, 12, 19, 15)] and {*shuffled} == {*texts}
    assert (manifest["num_docs"], manifest["shuffle_seed"]) == (40, 7)
    sp = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    val = read_shard(tmp_path / "out/datasets/fineweb10B_sp384/fineweb_val_000000.bin")
    assert val.tolist() == sum(sp.encode(shuffled[:2], add_bos=True), [])


def test_long_texts_become_lines_for_the_tokenizers_training():
    text = "word " * 2000 + "\n" + "\u4e2d" * 5000 + "\nend"
    sentences = list(sentences_of([text], 4192, True))
    assert max(len(sentence.encode()) for sentence in sentences) <= 4192
    assert "".join(sentences).replace(" ", "") == "".join(text.split())
    assert sentences[0].endswith(" word") and sentences[-1] == "end"


def named(name) -> dict:
    return {"name": name, "dataset_suffix": name, "model_prefix": name, "vocab_size": 384}


def test_an_unfinished_dataset_is_refused_until_it_is_finished(tmp_path, tokenizer, capsys):
    """Other commands change nothing about that. Datasets of earlier commands stay good."""
    write_documents(tmp_path / "docs.jsonl")
    reuse = ["--reuse-sp-model", f"384={tokenizer}"]
    folders = [tmp_path / f"out/datasets/fineweb10B_{name}" for name in ("first", "last", "half")]
    run(tmp_path, *reuse, specs=[named("first")])
    (tmp_path / "out/datasets/fineweb10B_bad").symlink_to("nowhere")
    assert "10B_bad" in failure(tmp_path, *reuse, specs=[named("half"), named("bad")])
    run(tmp_path, *reuse, specs=[named("last")])
    assert [check_dataset.main([str(folder)]) for folder in folders] == [0, 0, 1]
    assert "fineweb10B_half/unfinished exists" in capsys.readouterr().err
    manifest = run(tmp_path, *reuse, specs=[named("half")])
    assert [entry["name"] for entry in manifest["datasets"]] == [path.name for path in folders]
    assert [check_dataset.main([str(folder)]) for folder in folders] == [0, 0, 0]
    assert "nothing to compare" not in capsys.readouterr().out


def test_two_commands_do_not_write_to_one_folder_at_once(tmp_path):
    """The second says who does. The first waits for its documents, of which it keeps a copy."""
    docs, out = write_documents(tmp_path / "docs.jsonl"), tmp_path / "out"
    command = [sys.executable, rebuild.__file__, "--docs", "-", "--vocab-size", "384"]
    first = subprocess.Popen([*command, "--output-root", out], stdin=subprocess.PIPE)
    while first.poll() is None and not ((out / "lock").exists() and (out / "lock").read_text()):
        time.sleep(0.01)
    assert f"process {first.pid} on" in failure(tmp_path, specs=[named("second")])
    first.communicate(docs.read_bytes())
    assert first.returncode == 0 and (out / "docs_piped").read_bytes() == docs.read_bytes()
    manifest = run(tmp_path, specs=[named("second")])
    assert [entry["name"] for entry in manifest["tokenizers"]] == ["sp_bpe_384", "second"]


def test_only_on_request_is_another_texts_dataset_replaced(tmp_path, tokenizer):
    """A dataset of unknown documents is another's. The same documents may replace theirs."""
    shuffle, out = ["--reuse-sp-model", f"384={tokenizer}", "--shuffle", 1], tmp_path / "out"
    a, b = (write_documents(tmp_path / name, TEXTS[:count]) for name, count in (("a", 9), ("b", 8)))
    for name, docs in (("one", a), ("two", b), ("one", a)):
        run(tmp_path, *shuffle, specs=[named(name)], docs=[docs])
    kept = [out / "manifest.json", out / "docs_mixed", *out.rglob("*.bin"), *out.rglob("*.model")]
    before = [path.read_bytes() for path in kept]
    message = failure(tmp_path, *shuffle, specs=[named("one")], docs=[b])
    assert "fineweb10B_one is of other documents" in message and "add --replace" in message
    assert [path.read_bytes() for path in kept] == before
    manifest = run(tmp_path, *shuffle, "--replace", specs=[named("one")], docs=[b])
    assert len({entry.pop("docs_sha256") for entry in manifest["datasets"]}) == 1
    kept[0].write_text(json.dumps(manifest))
    result = run_here(tmp_path, {}, rebuild, ["--output-root=out", "--tokenizer-config=specs.json"])
    assert "fineweb10B_one is of other documents, or no" in result.stderr  # without a download
    model = {**named("one"), "dataset_suffix": "new"}
    assert "tokenizers/one.model is of other" in failure(tmp_path, specs=[model], docs=[a])


def test_only_on_request_is_another_datasets_tokenizer_replaced(tmp_path):
    """A command of the same documents may share it, but not replace its file or its entry."""
    write_documents(tmp_path / "docs.jsonl")
    for name in ("first", "second"):
        run(tmp_path, specs=[{"vocab_size": 384, "dataset_suffix": name}])
    other = {"vocab_size": 384, "dataset_suffix": "second", "tokenizer_train_docs": 9}
    for spec in (other, {**other, "name": "new"}, {**other, "model_prefix": "new"}):
        assert "fineweb_384_bpe.model is of other" in failure(tmp_path, specs=[spec])
    run(tmp_path, specs=[{**other, "name": "new", "model_prefix": "new"}])
    assert check_dataset.main([f"{tmp_path}/out/datasets/fineweb10B_first"]) == 0
    run(tmp_path, "--replace", specs=[other])


def test_errors_are_one_line(tmp_path):
    """Validation may have no document, but both splits must have text."""
    empty = ["", " \n", "\u200b\x01"]
    for texts, count, split in ((empty + TEXTS, 3, "val"), (TEXTS + empty, 40, "train")):
        docs = write_documents(tmp_path / "docs.jsonl", texts)
        assert f"3 documents for {split}, none" in failure(tmp_path, "--num-val-docs", count)
    alone = write_documents(tmp_path / "alone.jsonl", TEXTS[:1])
    assert "0 documents for train" in failure(tmp_path, docs=[alone])
    run(tmp_path, "--num-val-docs", 0)
    (tmp_path / "a").write_bytes(b"caf\xe9")
    message = failure(tmp_path, docs=[tmp_path / "a"])
    assert re.search("/a: .*after 'caf' is not UTF-8: iconv -c .*a > fixed.txt", message)
    docs = write_documents(tmp_path / "docs_selected.jsonl")
    message = failure(tmp_path, specs=[{"vocab_size": 262}], docs=[docs])
    assert "vocab_size 262 is too small" in message
    (tmp_path / SIDECAR).write_text('{"docs_val": null}')
    assert "get 50000" in failure(tmp_path, docs=[docs])
    for key, value in {"num_docs": 80, "docs_sha256": "0" * 64}.items():  # half was downloaded
        (tmp_path / SIDECAR).write_text(json.dumps({"docs_val": 4, key: value}))
        assert f"has another {key} than {SIDECAR}" in failure(tmp_path, docs=[docs])
    part = write_documents(tmp_path / "out/docs_piped.part")
    os.mkfifo(tmp_path / "pipe")
    assert f"{part} is an input" in failure(tmp_path, docs=[tmp_path / "pipe", part])
