"""Damaged, foreign and hostile model files: one error that names the file; nothing in them is run.
Shards: test_loader.py."""

import io
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


def damaged(data: bytes, chance: random.Random) -> bytes:
    """With one byte changed, most of the time near an end, where the structure is; or cut short."""
    place = chance.choice([range(len(data)), range(100), range(-100, 0)])
    changed = bytearray(data)
    changed[chance.choice(place)] ^= chance.randrange(1, 256)
    return chance.choice([bytes(changed), bytes(changed), data[: chance.choice(place)]])


@pytest.mark.parametrize("load, name", WAYS)
def test_a_damaged_file_is_refused_or_loads_the_same_weights(trained, tmp_path, state, load, name):
    """The same: there are bytes that mean nothing, padding say."""
    data, path = (trained[0] / name).read_bytes(), tmp_path / "file"
    chance = random.Random(0)
    load(state, path, data)
    wanted = {name: tensor.clone() for name, tensor in state.gpt.state_dict().items()}
    refused = 0
    for _ in range(80):
        try:
            load(state, path, damaged(data, chance))
            for name, tensor in state.gpt.state_dict().items():
                assert torch.equal(tensor, wanted[name]), name
        except InputError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 55


class Hostile:
    """Makes a file where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return Path.touch, (self.marker,)


def saved(content: dict, **settings: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **settings)
    return buffer.getvalue()


@pytest.mark.parametrize("load", [score, resume])
def test_no_code_is_run_from_a_file(tmp_path, state, load):
    """In any wrapping that a loader might take off."""
    marker = tmp_path / "marker"
    content = {"model": Hostile(marker)}
    torch.load(io.BytesIO(saved(content)), weights_only=False)
    assert marker.exists()  # it would work
    marker.unlink()
    legacy = saved(content, _use_new_zipfile_serialization=False)
    for data in (saved(content), legacy, pickle.dumps(content)):
        for wrapped in (data, zlib.compress(data)):
            with pytest.raises(InputError, match="hostile.pt"):
                load(state, tmp_path / "hostile.pt", wrapped)
            assert not marker.exists()


@pytest.mark.parametrize("load, name", WAYS)
@pytest.mark.parametrize("knob, tensor", [("vocab_size", "tok_emb"), ("num_layers", "blocks.3")])
def test_a_model_of_another_shape_names_the_tensor(
    trained, tmp_path, state, load, name, knob, tensor
):
    other = make_state(replace(state.hp, **{knob: {"vocab_size": 400, "num_layers": 4}[knob]}))
    with pytest.raises(InputError, match=f"file.*{tensor}"):
        load(other, tmp_path / "file", (trained[0] / name).read_bytes())


@pytest.mark.parametrize("load, name", [(score, "extra"), (resume, ARTIFACT), (resume, MODEL)])
def test_a_file_with_other_contents_is_refused(trained, tmp_path, state, load, name):
    extra = {**state.gpt.state_dict(), "blocks.7.extra": torch.zeros(2)}
    data = saved(extra) if name == "extra" else (trained[0] / name).read_bytes()
    with pytest.raises(InputError, match="file"):
        load(state, tmp_path / "file", data)


@pytest.mark.parametrize("knob", ["EVAL_ONLY", "RESUME"])
@pytest.mark.parametrize("data", [None, b"", b"x" * 1000])
def test_a_run_ends_with_one_error_that_names_knob_and_file(tmp_path, quantized_knobs, knob, data):
    path = tmp_path / "file.pt"
    if data is not None:
        path.write_bytes(data)
    failed(run_here(tmp_path, {**quantized_knobs, knob: str(path)}), "InputError", knob, str(path))
