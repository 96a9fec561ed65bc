"""Damaged, foreign and hostile files: refused by name, with little memory, and nothing in them is
run. RESUME=auto among such files: test_checkpoints.py."""

import io
import os
import pickle
import random
import subprocess
import sys
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from conftest import make_state, run_script, write_shard, write_worker

from train_gpt import (
    GPT,
    Hyperparameters,
    InputError,
    load_data_shard,
    load_weights,
    read_file,
    size_limit,
)

ARTIFACT = "final_model.int8.ptz"
CHECKPOINT = "checkpoints/test/step_00000006.pt"
FUZZ_SEED, FUZZ_ROUNDS = 20240520, 300


@pytest.fixture(scope="module")
def gpt(quantized_knobs) -> GPT:
    """A model of the shape that the files are for."""
    return GPT(Hyperparameters.from_env(quantized_knobs), torch.float32)


def state_for(path: Path, knobs: dict[str, str]):
    """The state of a run that is about to go on from `path`."""
    return make_state(Hyperparameters.from_env({**knobs, "RESUME": str(path)}))


def written(obj) -> bytes:
    """The file that torch.save makes of it."""
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


# ---- damaged, foreign and hostile files ----------------------------------------------------------


def damage(data: bytes, chance: random.Random) -> bytes:
    """Cut short, or with one to eight bytes changed: half of the time among the first or the last
    hundred, where the structure is."""
    if chance.random() < 0.3:
        return data[: chance.randrange(len(data))]
    damaged = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        edge = chance.choice([range(100), range(len(data) - 100, len(data))])
        place = chance.choice([edge, range(len(data))])
        damaged[chance.choice(place)] = chance.randrange(256)
    return bytes(damaged)


def outcomes(load, path: Path, data: bytes) -> list[int]:
    """How many of FUZZ_ROUNDS damaged files were loaded, and how many were refused."""
    chance, found = random.Random(FUZZ_SEED), [0, 0]
    for i in range(FUZZ_ROUNDS):
        path.write_bytes(damage(data, chance))
        try:
            load(path)
        except (InputError, FileNotFoundError) as error:
            assert str(path) in str(error), (i, error)
            found[1] += 1
        else:
            found[0] += 1
    assert sum(found) == FUZZ_ROUNDS
    return found


def test_fuzzed_artifacts_load_or_are_refused(trained, tmp_path, knobs):
    gpt = small_gpt(knobs)
    path, data = tmp_path / "fuzzed.ptz", (trained[0] / ARTIFACT).read_bytes()
    found = outcomes(lambda p: load_weights(gpt, p.read_bytes(), p), path, data)
    assert found[1] > FUZZ_ROUNDS * 0.9  # zlib and zip have checksums


def test_fuzzed_checkpoints_load_or_are_refused(trained, tmp_path, knobs):
    """To go on with, and to score."""
    gpt = small_gpt(knobs)
    path, data = tmp_path / "fuzzed.pt", (trained[0] / CHECKPOINT).read_bytes()
    hp = Hyperparameters.from_env({**with_quantized(knobs), "RESUME": str(path)})
    state = state_of(hp)
    found = outcomes(lambda p: (state.find(), load_weights(gpt, p.read_bytes(), p)), path, data)
    assert found[1] > FUZZ_ROUNDS * 0.7


def test_fuzzed_shards_load_or_are_refused(tmp_path):
    path = write_shard(tmp_path / "fineweb_train_000000.bin", range(300))
    found = outcomes(load_data_shard, path, path.read_bytes())
    assert min(found) > 20  # most of the header and any token are as good as others


@pytest.mark.parametrize("name", [ARTIFACT, "final_model.pt", CHECKPOINT])
def test_models_of_another_make_load_or_are_refused(trained, knobs, name):
    """Whole files that torch can read, but with something else somewhere in them."""
    chance, gpt = random.Random(FUZZ_SEED), small_gpt(knobs)
    data = (trained[0] / name).read_bytes()
    data = zlib.decompress(data) if name == ARTIFACT else data
    for _ in range(60):
        obj, buffer = torch.load(io.BytesIO(data), weights_only=True), io.BytesIO()
        put_junk_into(obj, chance)
        torch.save(obj, buffer)
        try:
            load_weights(gpt, buffer.getvalue(), "a file")
        except InputError as error:
            assert "a file" in str(error)


def test_a_checkpoint_that_lacks_a_part_is_no_start(trained, tmp_path, knobs):
    """Whatever its format version says."""
    path = tmp_path / "foreign.pt"
    hp = Hyperparameters.from_env({**with_quantized(knobs), "RESUME": str(path)})
    state = state_of(hp)
    whole = torch.load(trained[0] / CHECKPOINT, weights_only=True)
    for key in whole:
        torch.save({name: part for name, part in whole.items() if name != key}, path)
        with pytest.raises(InputError, match="foreign.pt"):
            state.find()


def put_junk_into(obj: dict, chance: random.Random) -> None:
    """Replace or drop an entry at a random depth."""
    key = chance.choice(list(obj))
    if isinstance(obj[key], dict) and obj[key] and chance.random() < 0.7:
        return put_junk_into(obj[key], chance)
    junk = [None, 7, "text", [], {}, (1, 2), torch.zeros(()), torch.zeros(3, dtype=torch.int64)]
    if chance.random() < 0.3:
        del obj[key]
    else:
        obj[key] = chance.choice(junk)


class Hostile:
    """Makes a file where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


def hostile_files(marker: Path) -> dict[str, bytes]:
    """A pickle that makes the marker, in every wrapping that a loader might take off."""
    plain = pickle.dumps({"model": Hostile(marker), "checkpoint_format": 1})
    files = {"plain": plain, "zlib": zlib.compress(plain)}
    for name, new in (("zip", True), ("legacy", False)):
        buffer = io.BytesIO()
        torch.save(
            {"model": Hostile(marker), "checkpoint_format": 1},
            buffer,
            _use_new_zipfile_serialization=new,
        )
        files |= {name: buffer.getvalue(), f"{name} in zlib": zlib.compress(buffer.getvalue())}
    return files


def test_no_code_is_run_from_a_file(tmp_path, knobs):
    marker, path = tmp_path / "marker", tmp_path / "hostile.pt"
    files = hostile_files(marker)
    torch.load(io.BytesIO(files["zip"]), weights_only=False)
    assert marker.exists()  # it would work
    marker.unlink()
    gpt = small_gpt(knobs)
    for data in files.values():
        path.write_bytes(data)
        hp = Hyperparameters.from_env({**with_quantized(knobs), "RESUME": str(path)})
        with pytest.raises(InputError, match="hostile.pt is no model file"):
            load_weights(gpt, data, path)
        with pytest.raises(InputError, match="hostile.pt is no model file"):
            state_of(hp).find()
        assert not marker.exists()


def zip_bomb(size: int, claimed: int) -> bytes:
    """A zip file of zeros that says to be `claimed` bytes large when unpacked."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(size))
    data = bytearray(buffer.getvalue())
    entry = data.rindex(b"PK\1\2")
    data[entry + 24 : entry + 28] = claimed.to_bytes(4, "little")
    return bytes(data)


@pytest.mark.parametrize(
    ("bomb", "reason"),
    [
        (lambda: zlib.compress(bytes(2**28)), "too large when unpacked"),
        (lambda: zip_bomb(2**28, claimed=2**28), "too large when unpacked: 268435456 bytes"),
        (lambda: zip_bomb(2**28, claimed=100), "is no model file, or is damaged"),
        (lambda: zlib.compress(zip_bomb(2**28, claimed=2**28)), "too large when unpacked"),
    ],
)
def test_a_bomb_is_refused_and_takes_little_memory(knobs, bomb, reason):
    gpt, data = small_gpt(knobs), bomb()
    assert len(data) < 2**20
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=reason):
            load_weights(gpt, data, "a bomb")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * size_limit(gpt) < 2**27


def test_a_file_far_too_large_is_refused_unread(tmp_path, knobs):
    path = tmp_path / "large.ptz"
    path.touch()
    os.truncate(path, 2**38)  # zeros that take no room on the disk
    environ = with_quantized(knobs)
    result = run_script(tmp_path, {**environ, "EVAL_ONLY": str(path)})
    assert result.returncode == 1
    assert result.stderr.startswith(f"ValueError: {path} is too large for this model")
    hp = Hyperparameters.from_env({**environ, "RESUME": str(path)})
    with pytest.raises(InputError, match="is too large for this model"):
        state_of(hp).find()


