"""Model files: scoring them (score.py), and damaged, foreign and hostile ones, which are one error
that names the file and never run code. (Shards: test_data.py. Resuming: test_checkpoints.py.)"""

import copy
import io
import json
import os
import pickle
import random
import re
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import score
import torch
from runs import ALONE, failed, finished, run_here, run_ranks, scores

import train_gpt
from train_gpt import Hyperparameters, InputError, TrainingState, load_checkpoint, load_weights

ARTIFACT, MODEL, CHECKPOINT = "final_model.int8.ptz", "final_model.pt", "checkpoints/test.pt"
RESULT = "final_result.json"


@pytest.fixture(scope="module")
def state(quantized_knobs) -> TrainingState:
    """State of a run with the knobs of the files."""
    return TrainingState(Hyperparameters.from_env(quantized_knobs), ALONE)


def resume(state: TrainingState, path: Path, data: bytes) -> TrainingState:
    path.write_bytes(data)
    resumed = copy.copy(state)
    resumed.hp = replace(state.hp, resume=str(path))
    load_checkpoint(resumed)
    return resumed


def load_model(state: TrainingState, path: Path, data: bytes) -> TrainingState:
    load_weights(state.gpt, data, str(path))
    return state


ALL = [*((load_model, name) for name in (MODEL, CHECKPOINT, ARTIFACT)), (resume, CHECKPOINT)]


# ---- damaged and foreign files -------------------------------------------------------------------
@pytest.mark.parametrize("load, name", ALL)
def test_a_flipped_byte_is_refused_or_changes_nothing(trained, tmp_path, state, load, name):
    """Mostly near an end of the file, where its structure is. Some bytes, such as padding, have no
    meaning."""
    data, path = (trained[0] / name).read_bytes(), tmp_path / "file"
    chance = random.Random(0)
    wanted = train_gpt.serialize(load(state, path, data).state_dict())
    refused = 0
    for _ in range(80):
        place = chance.choice([range(len(data)), range(100), range(-100, 0)])
        changed, i = bytearray(data), chance.choice(place)
        changed[i] ^= chance.randrange(1, 256)
        try:
            found = load(state, path, bytes(changed)).state_dict()
        except InputError as error:
            assert str(path) in str(error)
            refused += 1
        else:
            assert train_gpt.serialize(found) == wanted, f"byte {i} of {len(data)}"
    assert refused > 20, refused


@pytest.mark.parametrize("load, name", ALL)
def test_a_file_cut_short_is_refused(trained, tmp_path, state, load, name):
    data = (trained[0] / name).read_bytes()
    for length in (0, 1, 100, len(data) // 2, len(data) - 100, len(data) - 1):
        with pytest.raises(InputError, match="file'? is damaged"):
            load(state, tmp_path / "file", data[:length])


class Hostile:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("marker",)


@pytest.mark.parametrize("load", [load_model, resume])
@pytest.mark.parametrize("save", [torch.save, pickle.dump])
@pytest.mark.parametrize("wrap", [train_gpt.compress, bytes])
def test_no_code_is_run_from_a_file(tmp_path, monkeypatch, state, load, save, wrap):
    """Whatever the file is wrapped in."""
    monkeypatch.chdir(tmp_path)
    file = io.BytesIO()
    save({"model": Hostile()}, file)
    with pytest.raises(InputError, match="hostile.pt'? is damaged") as caught:
        load(state, tmp_path / "hostile.pt", wrap(file.getvalue()))
    assert "weights_only" not in str(caught.value)  # torch advises to run the code
    assert not Path("marker").exists()


@pytest.mark.parametrize("load, name", ALL)
def test_weights_of_another_model_are_an_error_that_names_the_file(
    trained, tmp_path, state, load, name
):
    other = TrainingState(replace(state.hp, num_layers=3, model_dim=64), ALONE)
    with pytest.raises(InputError, match="file'? does not fit: use the script"):
        load(other, tmp_path / "file", (trained[0] / name).read_bytes())


@pytest.mark.parametrize("name", [ARTIFACT, MODEL])
def test_what_is_not_a_checkpoint_cannot_be_resumed(trained, tmp_path, state, name):
    with pytest.raises(InputError, match="file'? has no .*optimizers.*: resume a checkpoint"):
        resume(state, tmp_path / "file", (trained[0] / name).read_bytes())


def test_a_bug_in_a_codec_is_named_and_one_in_dequantize_keeps_its_traceback(
    trained, tmp_path, state, monkeypatch
):
    """If a codec fails, the file may be damaged, too."""
    data = (trained[0] / ARTIFACT).read_bytes()
    monkeypatch.setattr(train_gpt, "dequantize_state_dict_int8", lambda obj: obj["x"])
    with pytest.raises(KeyError, match="'x'"):
        load_model(state, tmp_path / "file", data)
    monkeypatch.setattr(train_gpt, "decompress", lambda data: lzma.decompress(data))  # noqa: F821
    with pytest.raises(InputError, match="is damaged or not a model file: NameError: .*'lzma'"):
        load_model(state, tmp_path / "file", data)


# ---- score.py ------------------------------------------------------------------------------------
@pytest.fixture
def score_knobs(tmp_path, quantized_knobs) -> dict[str, str]:
    """Knobs with a validation split, but no training shards."""
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(Path(quantized_knobs["DATA_PATH"]) / "fineweb_val_000000.bin", data)
    return {"DATA_PATH": str(data), "DEVICE": "cpu"}


def copy_result(run: Path, folder: Path, knobs: dict[str, object], **changes) -> None:
    """Copy the result of a run without checksums, with further knobs and other changes."""
    result = {**json.loads((run / RESULT).read_bytes()), "crc32": {}, **changes}
    result["knobs"] |= knobs
    (folder / RESULT).write_text(json.dumps(result))


def score_file(folder: Path, knobs: dict, path: Path) -> list[str]:
    """Run score.py, which must succeed. Returns its log."""
    result = run_here(folder, knobs, score, [str(path)])
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_an_artifact_has_the_same_score_as_after_its_training(trained, tmp_path, score_knobs):
    """With the knobs of its run, which are next to it."""
    left_over = {"RESUME": "auto"}  # exported for a run: they change nothing
    lines = score_file(tmp_path, {**score_knobs, **left_over}, trained[0] / ARTIFACT)
    assert lines[-1] == trained[1][-1]
    assert lines[-2].startswith("final_int8_zlib_roundtrip val_loss:")
    assert not [line for line in lines if line.startswith(("step:", "warmup_step:", "WARNING"))]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "logs"]


def test_the_environment_overrides_the_knobs_of_the_run(
    trained, tmp_path, score_knobs, quantized_knobs
):
    lines = score_file(tmp_path, {**score_knobs, "EVAL_STRIDE": "16"}, trained[0] / ARTIFACT)
    (knobs,) = (line.split(":", 1)[1] for line in lines if line.startswith("knobs:"))
    taken = {f"{knob}={quantized_knobs[knob]}" for knob in ("MODEL_DIM", "VOCAB_SIZE")}
    assert {*taken, "EVAL_STRIDE=16", f"DATA_PATH={score_knobs['DATA_PATH']}"} < {*knobs.split()}
    assert lines[-2].endswith(" stride:16")
    assert scores(lines[-1]) != scores(trained[1][-1])


@pytest.mark.parametrize("name", [MODEL, CHECKPOINT])
def test_unquantized_weights_have_another_line(trained, tmp_path, score_knobs, name):
    lines = score_file(tmp_path, score_knobs, trained[0] / name)
    assert "final_int8" not in "".join(lines)
    assert re.fullmatch(r"score_exact val_loss:\d+\.\d{8} val_bpb:\d+\.\d{8}", lines[-1])
    (end,) = (line for line in trained[1] if line.startswith("step:6/6 val_loss:"))
    assert scores(lines[-1]) == pytest.approx(scores(end), abs=6e-5)
    assert scores(lines[-1]) != pytest.approx(scores(trained[1][-1]), abs=2e-6)


def test_two_ranks_score_as_one(trained, tmp_path, score_knobs):
    command = [score.__file__, trained[0] / ARTIFACT, "--losses", tmp_path / "losses.npy"]
    results = run_ranks(tmp_path, score_knobs, 2, command)
    assert [result.returncode for result in results] == [0, 0], results[1].stderr
    found = scores(finished(results[0])[-1])
    assert found == pytest.approx(scores(trained[1][-1]), abs=2e-6)
    losses = np.load(tmp_path / "losses.npy")  # one for each target
    assert losses.dtype == np.float32 and losses.shape == (1472,)
    assert losses.mean(dtype=np.float64) == pytest.approx(found[0], abs=1e-7) and losses.all()
    assert results[1].stdout == ""
    own = {1: {"EVAL_STRIDE": "16"}}
    for result in run_ranks(tmp_path, score_knobs, 2, [score.__file__, trained[0] / MODEL], own):
        failed(result, "ranks 0 and 1 differ in EVAL_STRIDE")


def test_a_score_that_is_not_finite_is_printed_and_fails(trained, tmp_path, score_knobs):
    weights = torch.load(trained[0] / MODEL, weights_only=True)
    weights["tok_emb.weight"].fill_(torch.nan)
    torch.save(weights, tmp_path / "nan.pt")
    copy_result(trained[0], tmp_path, {})
    result = run_here(tmp_path, score_knobs, score, [str(tmp_path / "nan.pt")])
    assert result.returncode == 1 and "\nscore_exact val_loss:nan " in result.stdout


@pytest.mark.parametrize(
    "lacking, words",
    [
        ({"ema_decay": 0.5}, "EMA_DECAY=0.5: use tests/records/train_record.py (--script)"),
        ({"own": True}, "OWN=1: use the script of the run (--script)"),
        ({}, "differs: use the script of the run (--script)"),
    ],
)
def test_another_script_is_a_warning(trained, tmp_path, score_knobs, lacking, words):
    copy_result(trained[0], tmp_path, lacking, bytes_code=7)
    lines = score_file(tmp_path, score_knobs, Path(shutil.copy(trained[0] / ARTIFACT, tmp_path)))
    (warning,) = [line for line in lines if line.startswith("WARNING")]
    assert words in warning


def test_a_split_that_is_not_the_manifests_is_a_warning(trained, tmp_path, score_knobs):
    """A shard that was cut, and has the right header."""
    data = shutil.copytree(score_knobs["DATA_PATH"], tmp_path / "datasets" / "name")
    manifest = {"datasets": [{"name": "name", "stats": {"tokens_val": 1501}}]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    lines = score_file(tmp_path, {**score_knobs, "DATA_PATH": str(data)}, trained[0] / ARTIFACT)
    (warning,) = [line for line in lines if line.startswith("WARNING")]
    assert "has 1,500 of 1,501 tokens in " in warning and "manifest.json" in warning


@pytest.mark.parametrize("name", [ARTIFACT, MODEL])
def test_a_file_with_the_result_of_another_run_is_refused(trained, tmp_path, score_knobs, name):
    """Its knobs may be wrong, but fit: another ROPE_BASE is another score."""
    path = Path(shutil.copy(trained[0] / name, tmp_path))
    checksums = {ARTIFACT: 1, MODEL: 2, name: zlib.crc32(path.read_bytes())}
    copy_result(trained[0], tmp_path, {}, crc32=checksums)
    score_file(tmp_path, score_knobs, path)
    copy_result(trained[0], tmp_path, {}, crc32={**checksums, name: 3})
    result = run_here(tmp_path, score_knobs, score, [str(path)])
    failed(result, f"{name} is damaged, or not of the run of ", 'remove "crc32" from')


def test_what_cannot_be_scored_is_one_error(trained, tmp_path, score_knobs, quantized_knobs):
    def fail(environ: dict[str, str], *words: str) -> None:
        failed(run_here(tmp_path, environ, score, [str(tmp_path / ARTIFACT)]), *words)

    shutil.copy(trained[0] / ARTIFACT, tmp_path)
    other = {**quantized_knobs, "NUM_LAYERS": "3"}
    fail(other, f"{RESULT} have no knobs", f"{ARTIFACT} does not fit")
    shutil.copy(trained[0] / RESULT, tmp_path)
    other = {**score_knobs, "TOKENIZER_PATH": "none.model"}
    fail(other, "'none.model' is not a file: start in the folder where the run")
    (tmp_path / RESULT).write_text("{")
    fail(score_knobs, f"{RESULT} is damaged")
