"""Damaged, foreign and hostile model files: one error that names the file; nothing in them is run.
Shards: test_loader.py."""

import io
import os
import pickle
import random
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import failed, make_state, run_here

from train_gpt import Hyperparameters, InputError, TrainingState, load_checkpoint, load_weights

ARTIFACT, MODEL, CHECKPOINT = "final_model.int8.ptz", "final_model.pt", "checkpoints/test.pt"


@pytest.fixture(scope="module")
def state(quantized_knobs) -> TrainingState:
    """Of a run that the files are for."""
    return make_state(Hyperparameters.from_env(quantized_knobs))


def resume(state: TrainingState, path: Path, data: bytes) -> None:
    path.write_bytes(data)
    load_checkpoint(replace(state, hp=replace(state.hp, resume=str(path))))


def score(state: TrainingState, path: Path, data: bytes) -> None:
    load_weights(state.gpt, data, str(path))


WAYS = [(score, ARTIFACT), (score, MODEL), (score, CHECKPOINT), (resume, CHECKPOINT)]


@pytest.mark.parametrize("load, name", WAYS)
def test_a_damaged_file_is_refused_or_loads_the_same_weights(trained, tmp_path, state, load, name):
    """One byte is changed, mostly near an end, where the structure is; or the file is cut short.
    Some bytes mean nothing: padding, say."""
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
            load(state, path, chance.choice([bytes(changed), bytes(changed), short]))
            for name, tensor in state.gpt.state_dict().items():
                assert torch.equal(tensor, wanted[name]), name
        except InputError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 55


class Hostile:
    """Makes a folder where it is unpickled."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("marker",)


@pytest.mark.parametrize("load", [score, resume])
@pytest.mark.parametrize("new_format", [True, False])
def test_no_code_is_run_from_a_file(tmp_path, monkeypatch, state, load, new_format):
    """In any wrapping that a loader might take off."""
    monkeypatch.chdir(tmp_path)
    file = io.BytesIO()
    torch.save({"model": Hostile()}, file, _use_new_zipfile_serialization=new_format)
    for data in (file.getvalue(), zlib.compress(file.getvalue()), pickle.dumps(Hostile())):
        with pytest.raises(InputError, match="hostile.pt"):
            load(state, tmp_path / "hostile.pt", data)
        assert not Path("marker").exists()
    pickle.loads(pickle.dumps(Hostile()))
    assert Path("marker").exists()  # it would have worked


@pytest.mark.parametrize("load, name", WAYS)
def test_a_model_of_another_shape_names_the_tensor(trained, tmp_path, state, load, name):
    data = (trained[0] / name).read_bytes()
    changes = {"tok_emb": {"vocab_size": 400}, "blocks.3": {"num_layers": 4}}
    changes["blocks.1"] = {"num_layers": 1}  # the file has more than the model
    for tensor, change in changes.items():
        other = make_state(replace(state.hp, **change))
        with pytest.raises(InputError, match=f"file.*{tensor}"):
            load(other, tmp_path / "file", data)


@pytest.mark.parametrize("name", [ARTIFACT, MODEL])
def test_what_is_not_a_checkpoint_cannot_be_resumed(trained, tmp_path, state, name):
    with pytest.raises(InputError, match="file"):
        resume(state, tmp_path / "file", (trained[0] / name).read_bytes())


@pytest.mark.parametrize("knob", ["EVAL_ONLY", "RESUME"])
def test_a_run_ends_with_one_error_that_names_knob_and_file(tmp_path, quantized_knobs, knob):
    path = tmp_path / "file.pt"
    environ = {**quantized_knobs, knob: str(path)}
    assert "InputError" in failed(run_here(tmp_path, environ), knob, str(path))  # it is missing
    path.write_bytes(b"x" * 1000)
    assert "InputError" in failed(run_here(tmp_path, environ), knob, str(path))
