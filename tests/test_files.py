"""Damaged, foreign and hostile model files: one error that names the file, and their code never
runs. (Shards: test_data.py.) Files that cannot be written."""

import io
import os
import pickle
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ALONE, Lines, run_here

import train_gpt
from train_gpt import (
    Hyperparameters,
    InputError,
    TrainingState,
    load_checkpoint,
    load_weights,
    new_state,
)

ARTIFACT, MODEL, CHECKPOINT = "final_model.int8.ptz", "final_model.pt", "checkpoints/test.pt"
RESULT = "final_result.json"


@pytest.fixture(scope="module")
def state(quantized_knobs) -> TrainingState:
    """State of a run with the knobs of the files."""
    return new_state(Hyperparameters.from_env(quantized_knobs), ALONE)


def resume(state: TrainingState, path: Path, data: bytes) -> None:
    path.write_bytes(data)
    load_checkpoint(replace(state, hp=replace(state.hp, resume=str(path))))


def load_model(state: TrainingState, path: Path, data: bytes) -> None:
    load_weights(state.gpt, data, str(path))


PLAIN = [(load_model, MODEL), (load_model, CHECKPOINT), (resume, CHECKPOINT)]


@pytest.mark.parametrize("load, name", [*PLAIN, (load_model, ARTIFACT)])
def test_a_damaged_file_is_refused_or_loads_the_same_weights(trained, tmp_path, state, load, name):
    """The file is cut short, or one byte of the artifact is changed, mostly near an end, where the
    structure is. Some bytes have no meaning, such as padding."""
    data, path = (trained[0] / name).read_bytes(), tmp_path / "file"
    chance = random.Random(0)
    load(state, path, data)
    wanted = {name: tensor.clone() for name, tensor in state.gpt.state_dict().items()}
    refused = 0
    for _ in range(80):
        place = chance.choice([range(len(data)), range(100), range(-100, 0)])
        changed = bytearray(data)
        changed[chance.choice(place)] ^= chance.randrange(1, 256)
        short = data[: chance.choice(place)]
        try:
            load(state, path, bytes(changed) if name == ARTIFACT else short)
            for name, tensor in state.gpt.state_dict().items():
                assert torch.equal(tensor, wanted[name]), name
        except InputError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 55


class Hostile:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("marker",)


@pytest.mark.parametrize("load", [load_model, resume])
@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("wrap", [train_gpt.compress, bytes])
def test_no_code_is_run_from_a_file(tmp_path, monkeypatch, state, load, is_zip, wrap):
    """Whatever the file is wrapped in."""
    monkeypatch.chdir(tmp_path)
    file = io.BytesIO()
    torch.save({"model": Hostile()}, file, _use_new_zipfile_serialization=is_zip)
    for data in (file.getvalue(), pickle.dumps(Hostile())):
        with pytest.raises(InputError, match="hostile.pt'? is damaged") as caught:
            load(state, tmp_path / "hostile.pt", wrap(data))
        assert "weights_only" not in str(caught.value)  # torch advises to run the code
        assert not Path("marker").exists()
    pickle.loads(pickle.dumps(Hostile()))
    assert Path("marker").exists()  # it would have worked


@pytest.mark.parametrize("load, name", [*PLAIN, (load_model, ARTIFACT)])
def test_weights_of_another_model_are_an_error_that_names_the_file(
    trained, tmp_path, state, load, name
):
    other = new_state(replace(state.hp, num_layers=3, model_dim=64), ALONE)
    with pytest.raises(InputError, match="file'? does not fit: use the script, recipes and knobs"):
        load(other, tmp_path / "file", (trained[0] / name).read_bytes())


@pytest.mark.parametrize("name", [ARTIFACT, MODEL])
def test_what_is_not_a_checkpoint_cannot_be_resumed(trained, tmp_path, state, name):
    with pytest.raises(InputError, match="file"):
        resume(state, tmp_path / "file", (trained[0] / name).read_bytes())


def test_a_codec_that_fails_is_shown_with_the_type_of_its_error(tmp_path, state, monkeypatch):
    """The file may be damaged, or the player's codec may have a bug."""
    monkeypatch.setattr(train_gpt, "decompress", lambda data: lzma.decompress(data))  # noqa: F821
    with pytest.raises(InputError, match="is damaged or not a model file: NameError: .*'lzma'"):
        load_model(state, tmp_path / "file", b"compressed")


def test_a_bug_in_dequantize_keeps_its_traceback(trained, tmp_path, quantized_knobs, monkeypatch):
    """The file is not damaged."""

    def dequantize(obj: dict) -> dict:
        return obj["quantised"]

    monkeypatch.setattr(train_gpt, "dequantize_state_dict_int8", dequantize)
    result = run_here(tmp_path, {**quantized_knobs, "EVAL_ONLY": str(trained[0] / ARTIFACT)})
    assert result.returncode == 1 and result.stderr.endswith("KeyError: 'quantised'\n")
    assert 'return obj["quantised"]\n' in result.stderr


def test_a_write_that_fails_warns_and_leaves_the_old_file_without_a_part_of_the_new_one(tmp_path):
    path, log = tmp_path / "model", Lines()
    assert train_gpt.write_file(path, b"old", log) and log.text == ""
    (tmp_path / "model.part").symlink_to("/dev/full")  # writes to it find the disk full
    assert not train_gpt.write_file(path, b"new", log)
    assert log.text == f"WARNING: {path} cannot be written: No space left on device\n"
    assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == b"old"


def test_a_file_gets_its_name_when_its_bytes_are_on_the_disk(tmp_path, monkeypatch):
    """Else a power cut could leave an empty file in place of the old one."""
    flushed = []

    def fsync(number: int, fsync=os.fsync) -> None:
        flushed.append((Path(f"{path}.part").read_bytes(), path.exists()))
        fsync(number)

    path = tmp_path / "model"
    monkeypatch.setattr(os, "fsync", fsync)
    assert train_gpt.write_file(path, b"new", Lines())
    assert flushed == [(b"new", False)] and path.read_bytes() == b"new"


@pytest.mark.parametrize("name, code", [(MODEL, 0), (ARTIFACT, 1), (RESULT, 0)])
def test_a_run_that_cannot_write_a_file_warns_and_is_scored(tmp_path, knobs, name, code):
    """Without an artifact the run fails in the end."""
    (tmp_path / name).mkdir()
    result = run_here(tmp_path, {**knobs, "ITERATIONS": "1", "VAL_LOSS_EVERY": "0"})
    assert (result.returncode, result.stderr) == (code, "")
    lines = result.stdout.splitlines()
    assert f"WARNING: {name} cannot be written: Is a directory" in lines
    assert lines[-1].startswith("final_int8_zlib_roundtrip_exact val_loss:")
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"logs", MODEL, ARTIFACT, RESULT}
    assert all((tmp_path / other).is_file() for other in {MODEL, ARTIFACT, RESULT} - {name})
