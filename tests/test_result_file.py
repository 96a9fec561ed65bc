"""final_result.json, the size of what is handed in, and how files are written."""

import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from conftest import SCRIPT, scores, write_shard

import train_gpt
from train_gpt import (
    GPT,
    Hyperparameters,
    dataset_fingerprint,
    export,
    load_weights,
    write_file,
)

ARTIFACT = "final_model.int8.ptz"


@pytest.fixture(scope="module")
def result(trained) -> dict:
    return json.loads((trained[0] / "final_result.json").read_text())


def test_it_tells_what_was_run_and_where(result, quantized_knobs):
    hp = Hyperparameters.from_env({**quantized_knobs, "CHECKPOINT_EVERY": "6"})
    assert result["knobs"] == json.loads(json.dumps(vars(hp)))
    assert result["versions"]["torch"] == torch.__version__
    assert result["versions"]["numpy"] == np.__version__
    assert result["versions"]["sentencepiece"] == sentencepiece.__version__
    assert re.fullmatch(r"3\.\d+\.\d+.*", result["versions"]["python"])
    machine = result["machine"]
    assert (machine["device"], machine["dtype"], machine["world_size"]) == (
        "cpu",
        "torch.float32",
        1,
    )
    assert machine["cpus"] == os.cpu_count() and machine["platform"]


def test_its_scores_are_the_round_trips(trained, result):
    """As in the challenge's submission.json. Those before quantization have names of their own."""
    _, lines = trained
    after = [result["val_loss"], result["val_bpb"]]
    assert after == pytest.approx(scores(lines[-1]), abs=6e-9)
    (end,) = [line for line in lines if line.startswith("step:6/6 val_loss:")]
    before = [result["pre_quant_val_loss"], result["pre_quant_val_bpb"]]
    assert before == pytest.approx(scores(end), abs=6e-5)
    assert before != pytest.approx(after, abs=2e-6)
    assert result["steps"] == 6 and result["partial"] == ""
    train_ms = float(re.search(r"train_time:(\d+)ms", end)[1])
    assert result["train_ms"] == pytest.approx(train_ms, abs=1)
    assert result["eval_ms"] == pytest.approx(int(lines[-2].split("eval_time:")[1][:-2]), abs=1)


def test_it_has_the_sizes_and_the_log_the_verdict(trained, result):
    folder, lines = trained
    code, artifact = SCRIPT.stat().st_size, (folder / ARTIFACT).stat().st_size
    assert (result["bytes_code"], result["bytes_total"]) == (code, code + artifact)
    left = 16_000_000 - code - artifact
    assert (result["fits"], result["bytes_left"]) == (True, left)
    model = (folder / "final_model.pt").stat().st_size
    assert f"Serialized model: {model} bytes" in lines
    assert f"Total submission size int8+zlib: {code + artifact} bytes" in lines
    assert f"size_check:fits limit:16000000 bytes_left:{left}" in lines


def test_it_has_the_fingerprint_of_the_data(result, quantized_knobs):
    assert result["dataset"] == fingerprint_by_hand(quantized_knobs)


def fingerprint_by_hand(knobs: dict[str, str]) -> dict:
    tokenizer = Path(knobs["TOKENIZER_PATH"]).read_bytes()
    expected = {"tokenizer": hashlib.sha256(tokenizer).hexdigest()}
    for path in Path(knobs["DATA_PATH"]).glob("fineweb_*.bin"):
        data = path.read_bytes()
        parts = data[: 1024 + 2**20] + data[-(2**20) :]
        expected[path.name] = [len(data), hashlib.sha256(parts).hexdigest()]
    return expected


def test_the_fingerprint_of_a_long_shard_reads_only_its_ends(tmp_path, knobs):
    """Every byte of the header and of the first and the last MiB counts; the middle does not."""
    environ = {**knobs, "DATA_PATH": str(tmp_path)}
    hp = Hyperparameters.from_env(environ)
    write_shard(tmp_path / "fineweb_val_000000.bin", range(100))
    shard = write_shard(tmp_path / "fineweb_train_000000.bin", [5] * (3 * 2**19))
    before = dataset_fingerprint(hp)
    assert before == fingerprint_by_hand(environ)
    size = shard.stat().st_size
    ends = (4, 1023, 1024, 1023 + 2**20, size - 2**20, size - 1)
    for place, counts in [*((end, True) for end in ends), (1024 + 2**20, False)]:
        data = bytearray(shard.read_bytes())
        data[place] ^= 1
        shard.write_bytes(data)
        assert (dataset_fingerprint(hp) != before) == counts, place
        data[place] ^= 1
        shard.write_bytes(data)


@pytest.mark.parametrize("spare", [0, -1])
def test_the_verdict_at_the_limit(trained, tmp_path, monkeypatch, quantized_knobs, spare):
    """Of code so long that the same model fits to the byte, or not."""
    code = tmp_path / "long.py"
    code.write_bytes(b"#" * (16_000_000 - (trained[0] / ARTIFACT).stat().st_size - spare))
    monkeypatch.setattr(train_gpt, "__file__", str(code))
    hp = Hyperparameters.from_env({**quantized_knobs, "OUTPUT_DIR": str(tmp_path)})
    gpt, text = GPT(hp, torch.float32), []
    load_weights(gpt, (trained[0] / "final_model.pt").read_bytes(), "final_model.pt")
    artifact, sizes, problems = export(gpt, text.append)
    assert artifact == (trained[0] / ARTIFACT).read_bytes() and problems == []
    verdict = "fits" if spare == 0 else "too_large"
    line = f"size_check:{verdict} limit:16000000 bytes_left:{spare}"
    assert line in "\n".join(text).splitlines()
    assert sizes["bytes_left"] == spare and sizes["fits"] == (spare == 0)
    assert sizes["bytes_code"] == code.stat().st_size


def test_a_file_is_flushed_to_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    path, done = tmp_path / "folder" / "file", []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (fsync(fd), done.append(path.exists())))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append((str(a), b)), replace(a, b)))
    write_file(path, b"some bytes")
    assert done[:2] == [False, (f"{path}.part", path)]
    assert path.read_bytes() == b"some bytes" and len(list(path.parent.iterdir())) == 1
