"""Damaged, foreign and hostile files: refused by name, with little memory, and nothing in them is
run. RESUME=auto among such files: test_checkpoints.py."""

import io
import os
import pickle
import random
import re
import subprocess
import sys
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from conftest import ROOT, make_state, run_here, write_shard

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
    """How many of FUZZ_ROUNDS damaged files were loaded, and how many were refused by name."""
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


def load_unchanged(load, gpt: GPT, expected: dict[str, torch.Tensor]) -> None:
    """Damage that is not noticed, in padding say, has changed no weight."""
    load()
    for name, tensor in gpt.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_fuzzed_artifacts_load_unchanged_or_are_refused(trained, tmp_path, gpt):
    path, data = tmp_path / "fuzzed.ptz", (trained[0] / ARTIFACT).read_bytes()
    load_weights(gpt, data, path)
    expected = {name: tensor.clone() for name, tensor in gpt.state_dict().items()}

    def load(path: Path) -> None:
        load_unchanged(lambda: load_weights(gpt, path.read_bytes(), path), gpt, expected)

    assert outcomes(load, path, data)[1] > FUZZ_ROUNDS * 0.9  # zlib and zip have checksums


def test_fuzzed_checkpoints_load_unchanged_or_are_refused(trained, tmp_path, quantized_knobs):
    """To go on with, and to score."""
    path, data = tmp_path / "fuzzed.pt", (trained[0] / CHECKPOINT).read_bytes()
    state = state_for(path, quantized_knobs)
    expected = torch.load(trained[0] / "final_model.pt", weights_only=True)

    def load(path: Path) -> None:
        load_unchanged(state.find, state.gpt, expected)
        score = lambda: load_weights(state.gpt, path.read_bytes(), path)  # noqa: E731
        load_unchanged(score, state.gpt, expected)

    assert outcomes(load, path, data)[1] > FUZZ_ROUNDS * 0.7


def payload_flips(data: bytes, number: int) -> list[bytes]:
    """Copies of a zip file, each with one byte changed somewhere inside what it holds."""
    chance, places = random.Random(FUZZ_SEED), []
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for entry in archive.infolist():
            start = entry.header_offset
            name, extra = data[start + 26 : start + 28], data[start + 28 : start + 30]
            start += 30 + int.from_bytes(name, "little") + int.from_bytes(extra, "little")
            places.append(range(start, start + entry.file_size))
    sizes = [len(place) for place in places]
    assert sum(sizes) > 0.9 * len(data)
    flips = []
    for place in chance.choices(places, weights=sizes, k=number):
        flipped = bytearray(data)
        flipped[chance.choice(place)] ^= chance.randrange(1, 256)
        flips.append(bytes(flipped))
    return flips


def test_every_flipped_byte_in_a_model_is_refused(trained, gpt):
    for i, data in enumerate(payload_flips((trained[0] / "final_model.pt").read_bytes(), 200)):
        with pytest.raises(InputError, match=f"model {i} is no model file, or is damaged: "):
            load_weights(gpt, data, f"model {i}")


def test_every_flipped_byte_in_a_checkpoint_is_refused(trained, tmp_path, quantized_knobs):
    path = tmp_path / "flipped.pt"
    state = state_for(path, quantized_knobs)
    for data in payload_flips((trained[0] / CHECKPOINT).read_bytes(), 200):
        path.write_bytes(data)
        with pytest.raises(InputError, match=f"RESUME='{path}' is no model file, or is damaged: "):
            state.find()
    assert state.step == 0


def test_fuzzed_shards_load_or_are_refused(tmp_path):
    path = write_shard(tmp_path / "fineweb_train_000000.bin", range(300))
    found = outcomes(load_data_shard, path, path.read_bytes())
    assert min(found) > 20  # most of the header and any token are as good as others


@pytest.mark.parametrize("name", [ARTIFACT, "final_model.pt", CHECKPOINT])
def test_models_of_another_make_load_or_are_refused(trained, gpt, name):
    """Whole files that torch can read, but with something else somewhere in them."""
    chance = random.Random(FUZZ_SEED)
    data = (trained[0] / name).read_bytes()
    data = zlib.decompress(data) if name == ARTIFACT else data
    for _ in range(60):
        obj = torch.load(io.BytesIO(data), weights_only=True)
        put_junk_into(obj, chance)
        try:
            load_weights(gpt, written(obj), "a file")
        except InputError as error:
            assert "a file" in str(error)


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
    content = {"model": Hostile(marker), "checkpoint_format": 1}
    plain, legacy = pickle.dumps(content), io.BytesIO()
    torch.save(content, legacy, _use_new_zipfile_serialization=False)
    files = {"plain": plain, "zip": written(content), "legacy": legacy.getvalue()}
    return files | {f"{name} in zlib": zlib.compress(data) for name, data in files.items()}


def test_no_code_is_run_from_a_file(tmp_path, quantized_knobs, gpt):
    """And the message does not repeat torch's advice to load it in a way that would run it."""
    marker, path = tmp_path / "marker", tmp_path / "hostile.pt"
    files = hostile_files(marker)
    torch.load(io.BytesIO(files["zip"]), weights_only=False)
    assert marker.exists()  # it would work
    marker.unlink()
    state = state_for(path, quantized_knobs)
    for data in files.values():
        path.write_bytes(data)
        for load in (lambda: load_weights(gpt, path.read_bytes(), path), state.find):
            with pytest.raises(InputError) as caught:
                load()
            message = r".*hostile.pt'? is no model file, or is damaged: [\w ]+"
            assert re.fullmatch(message, str(caught.value))
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
def test_a_bomb_is_refused_and_takes_little_memory(gpt, bomb, reason):
    data = bomb()
    assert len(data) < 2**20
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=reason):
            load_weights(gpt, data, "a bomb")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * size_limit(gpt) < 2**27


# Loads a small artifact in which one tensor of `part` says to be large and repeats one number in
# memory (stride 0), and prints the MiB that this took at its worst. (tracemalloc does not see
# torch's memory.)
STRIDE_0 = """
import torch
from train_gpt import *

def peak():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM:")]
    return int(line.split()[1]) >> 10

gpt, name = GPT(Hyperparameters()), "blocks.0.mlp.fc.weight"
for part, dtype, shape in [
    ("scales", torch.float16, (1024, 100_000)),
    ("scales", torch.float16, (10**9,)),
    ("quantized", torch.int8, (1024, 200_000)),
    ("quantized", torch.int8, (200_000_000,)),
    ("passthrough", torch.int8, (1024, 200_000)),
]:
    obj, _ = quantize_state_dict_int8(gpt.state_dict())
    obj[part][name] = torch.zeros(1, dtype=dtype).expand(shape)
    data = zlib.compress(serialize(obj), 1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before = peak()
    try:
        load_weights(gpt, data, "a file")
    except InputError as error:
        print(len(data) >> 20, peak() - before)
"""


def test_tensors_that_only_say_to_be_large_take_little_memory(tmp_path):
    """They are refused at once. An honest artifact of this model takes 90 MiB."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", STRIDE_0]
    result = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = [tuple(map(int, line.split())) for line in result.stdout.splitlines()]
    assert len(found) == 5, result.stderr
    assert all(size < 8 and taken < 128 for size, taken in found), found


def test_a_file_far_too_large_is_refused_unread(tmp_path, quantized_knobs):
    path = tmp_path / "large.ptz"
    path.touch()
    os.truncate(path, 2**38)  # zeros that take no room on the disk
    result = run_here(tmp_path, {**quantized_knobs, "EVAL_ONLY": str(path)})
    assert result.returncode == 1
    assert result.stderr.startswith(f"ValueError: EVAL_ONLY='{path}' is too large for this model")
    with pytest.raises(InputError, match="is too large for this model"):
        state_for(path, quantized_knobs).find()


@pytest.fixture(params=["device", "pipe", "folder", "nothing", "link to nothing"])
def no_file(request, tmp_path) -> Path:
    """A path at which no regular file is: to read it may never end."""
    path = tmp_path / "step_00000001.pt"
    if request.param == "device":
        path.symlink_to("/dev/zero")
    elif request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "folder":
        path.mkdir()
    elif request.param == "link to nothing":
        path.symlink_to(tmp_path / "nothing")
    return path


def test_what_is_no_regular_file_is_refused_by_name(no_file, quantized_knobs, gpt):
    """With the knob, and the way out."""
    with pytest.raises(InputError, match=f"RESUME='{no_file}' is not a file.*: check the path"):
        state_for(no_file, quantized_knobs).find()
    with pytest.raises(InputError, match="EVAL_ONLY='x' is not a file.*: check the path"):
        read_file(no_file, "EVAL_ONLY='x'", gpt)
    with pytest.raises(InputError, match=f"DATA_PATH: {no_file} is not a file.*: check the path"):
        load_data_shard(no_file)


def test_a_file_on_a_bad_disk_is_refused_by_name(quantized_knobs):
    """/proc/self/mem is a regular file whose first bytes are an input/output error for anybody."""
    with pytest.raises(InputError, match="RESUME='/proc/self/mem' .* Input/output error"):
        state_for(Path("/proc/self/mem"), quantized_knobs).find()
