"""EVAL_ONLY: the score of a file is that of the run that wrote it, without any training."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import run_here, run_ranks, scores

from train_gpt import Hyperparameters

ARTIFACT, MODEL, CHECKPOINT = "final_model.int8.ptz", "final_model.pt", "checkpoints/test.pt"


@pytest.fixture
def score_knobs(tmp_path, quantized_knobs) -> dict[str, str]:
    """Knobs with a validation split, but no training shards."""
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(Path(quantized_knobs["DATA_PATH"]) / "fineweb_val_000000.bin", data)
    return {**quantized_knobs, "DATA_PATH": str(data)}


def eval_only(folder: Path, knobs: dict, path: Path, ranks: int = 0, code: int = 0) -> list[str]:
    """Run EVAL_ONLY=path, which must exit with this code. Returns its log."""
    environ = {**knobs, "EVAL_ONLY": str(path)}
    result = run_ranks(folder, environ, ranks)[0] if ranks else run_here(folder, environ)
    assert result.returncode == code, result.stderr
    assert f"eval_only:{path}" in result.stdout.splitlines()
    return result.stdout.splitlines()


def test_an_artifact_has_the_same_score_as_after_its_training(trained, tmp_path, score_knobs):
    lines = eval_only(tmp_path, score_knobs, trained[0] / ARTIFACT)
    assert lines[-1] == trained[1][-1]
    assert lines[-2].startswith("final_int8_zlib_roundtrip val_loss:")
    assert not any(line.startswith(("step:", "warmup_step:")) for line in lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "logs"]


@pytest.mark.parametrize("name", [ARTIFACT, CHECKPOINT])
def test_the_knobs_of_a_files_training_are_defaults(trained, tmp_path, quantized_knobs, name):
    """The environment and the preset override them."""
    lines = eval_only(tmp_path, {"EVAL_STRIDE": "16"}, trained[0] / name)
    (knobs,) = (line.split(":", 1)[1] for line in lines if line.startswith("knobs:"))
    taken = {f"file:{knob}={quantized_knobs[knob]}" for knob in ("MODEL_DIM", "VOCAB_SIZE")}
    assert {*taken, "EVAL_STRIDE=16"} < {*knobs.split()}
    assert lines[-2 if name == ARTIFACT else -1].endswith(" stride:16")
    for knob in ("EVAL_ONLY", "RESUME"):
        hp = Hyperparameters.from_env({knob: str(trained[0] / name), "PRESET": "demo"})
        assert (hp.model_dim, hp.val_loss_every, hp.vocab_size) == (128, 100, 384)
        assert (hp.run_id != "test", hp.output_dir, hp.checkpoint_every) == (True, ".", 100)


@pytest.mark.parametrize("name, ranks", [(MODEL, 0), (CHECKPOINT, 0), (CHECKPOINT, 2)])
def test_unquantized_weights_have_another_line(trained, tmp_path, score_knobs, name, ranks):
    lines = eval_only(tmp_path, score_knobs, trained[0] / name, ranks)
    assert "final_int8" not in "".join(lines)
    assert re.fullmatch(r"eval_only val_loss:\d+\.\d{8} val_bpb:\d+\.\d{8}", lines[-1])
    (end,) = (line for line in trained[1] if line.startswith("step:6/6 val_loss:"))
    assert scores(lines[-1]) == pytest.approx(scores(end), abs=6e-5)
    assert scores(lines[-1]) != pytest.approx(scores(trained[1][-1]), abs=2e-6)


def test_a_score_that_is_not_finite_is_printed_and_fails_the_run(trained, tmp_path, score_knobs):
    weights = torch.load(trained[0] / MODEL, weights_only=True)
    weights["tok_emb.weight"].fill_(torch.nan)
    torch.save(weights, tmp_path / "nan.pt")
    lines = eval_only(tmp_path, score_knobs, tmp_path / "nan.pt", code=1)
    assert lines[-1].startswith("eval_only val_loss:nan ")
