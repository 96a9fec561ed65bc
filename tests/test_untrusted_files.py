"""Files that a run reads and leaves: models to score, damaged, foreign and hostile ones, and
final_result.json."""

import hashlib
import io
import json
import os
import pickle
import random
import re
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from conftest import SCRIPT, run_script, write_shard

import train_gpt
from train_gpt import (
    GPT,
    Hyperparameters,
    InputError,
    Runtime,
    Stopwatch,
    TrainingState,
    build_loader,
    build_optimizers,
    dataset_fingerprint,
    export,
    load_data_shard,
    load_weights,
    size_limit,
    write_file,
)

ALONE = Runtime(0, 1, 0, False, torch.device("cpu"), torch.float32)
ARTIFACT = "final_model.int8.ptz"
CHECKPOINT = "checkpoints/test/step_00000006.pt"
FUZZ_SEED, FUZZ_ROUNDS = 20240520, 300


@pytest.fixture(scope="module")
def trained(tmp_path_factory, knobs):
    """The folder of a finished run, and its log. Its embedding is large enough to be quantized."""
    folder = tmp_path_factory.mktemp("trained")
    environ = with_quantized(knobs)
    result = run_script(folder, {**environ, "CHECKPOINT_EVERY": "6"})
    assert result.returncode == 0, result.stderr
    return folder, result.stdout.splitlines()


def with_quantized(knobs: dict[str, str]) -> dict[str, str]:
    """One thread: among other processes two would wait for each other more than they work."""
    size = {"MODEL_DIM": "192", "NUM_LAYERS": "2", "OMP_NUM_THREADS": "1"}
    return {**knobs, **size, "VAL_LOSS_EVERY": "0"}


def small_gpt(knobs: dict[str, str]) -> GPT:
    return GPT(Hyperparameters.from_env(with_quantized(knobs)), torch.float32)


def state_of(hp: Hyperparameters) -> TrainingState:
    gpt = GPT(hp, torch.float32)
    optimizers, loader = build_optimizers(gpt, hp, torch.float32), build_loader(hp, ALONE)
    return TrainingState(hp, ALONE, str, gpt, gpt, optimizers, loader, Stopwatch(ALONE))


def scores(line: str) -> list[float]:
    """val_loss and val_bpb of a line."""
    return [float(value) for value in re.findall(r"val_(?:loss|bpb):(\S+)", line)]


# ---- EVAL_ONLY -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ranks"), [(ARTIFACT, 0), ("final_model.pt", 0), (CHECKPOINT, 0), (CHECKPOINT, 2)]
)
def test_eval_only_scores_a_file(trained, tmp_path, knobs, name, ranks):
    """As the run that made it did: the artifact to the last digit. Nothing is trained or written,
    and training shards are not needed."""
    folder, lines = trained
    data = tmp_path / "data"
    data.mkdir()
    (data / "fineweb_val_000000.bin").symlink_to(
        Path(knobs["DATA_PATH"]) / "fineweb_val_000000.bin"
    )
    environ = {**with_quantized(knobs), "EVAL_ONLY": str(folder / name), "DATA_PATH": str(data)}
    result = run_script(tmp_path, environ, ranks=ranks)
    assert result.returncode == 0, result.stderr
    rounded, exact = result.stdout.splitlines()[-2:]
    assert re.fullmatch(
        r"final_int8_zlib_roundtrip val_loss:\d+\.\d{4} val_bpb:\d+\.\d{4} eval_time:\d+ms", rounded
    )
    assert re.fullmatch(
        r"final_int8_zlib_roundtrip_exact val_loss:\d+\.\d{8} val_bpb:\d+\.\d{8}", exact
    )
    assert scores(rounded) == pytest.approx(scores(exact), abs=6e-5)
    if name == ARTIFACT:
        assert exact == lines[-1]
    else:
        (end,) = [line for line in lines if line.startswith("step:6/6 val_loss:")]
        assert scores(exact) == pytest.approx(scores(end), abs=6e-5)
        assert scores(exact) != pytest.approx(scores(lines[-1]), abs=2e-6)  # not quantized
    assert "step:" not in result.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "logs"]


def test_eval_only_of_a_damaged_file_is_one_line(trained, tmp_path, knobs):
    path = tmp_path / "cut.ptz"
    path.write_bytes((trained[0] / ARTIFACT).read_bytes()[:-9])
    environ = {**with_quantized(knobs), "EVAL_ONLY": str(path)}
    result = run_script(tmp_path, environ)
    assert result.returncode == 1 and "final_int8" not in result.stdout
    assert result.stderr.startswith(f"ValueError: {path} is no model file, or is damaged: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", [ARTIFACT, "final_model.pt", CHECKPOINT])
@pytest.mark.parametrize(
    ("knob", "value", "key", "shapes"),
    [
        ("VOCAB_SIZE", "400", "tok_emb.weight", "(384, 192) in the file and (400, 192) in"),
        ("NUM_LAYERS", "3", "blocks.2.attn_scale", "absent in the file and (192,) in"),
        ("NUM_LAYERS", "1", "skip_weights", "(1, 192) in the file and (0, 192) in"),
        ("TIE_EMBEDDINGS", "0", "lm_head.weight", "absent in the file and (384, 192) in"),
    ],
)
def test_a_model_of_another_shape_names_the_first_key(
    trained, knobs, name, knob, value, key, shapes
):
    gpt = GPT(Hyperparameters.from_env({**with_quantized(knobs), knob: value}), torch.float32)
    with pytest.raises(InputError) as caught:
        load_weights(gpt, (trained[0] / name).read_bytes(), name)
    assert f"{name}: {key} is {shapes} the model" in str(caught.value)


def test_a_tensor_too_many_is_named(trained, knobs):
    state = torch.load(trained[0] / "final_model.pt", weights_only=True)
    buffer = io.BytesIO()
    torch.save({**state, "blocks.7.extra": torch.zeros(2)}, buffer)
    with pytest.raises(InputError, match=r"blocks.7.extra is \(2,\) in the file and absent in"):
        load_weights(small_gpt(knobs), buffer.getvalue(), "a file")


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


# ---- writing -------------------------------------------------------------------------------------


def test_a_file_is_flushed_to_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    path, done = tmp_path / "folder" / "file", []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (fsync(fd), done.append(path.exists())))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append((str(a), b)), replace(a, b)))
    write_file(path, b"some bytes")
    assert done[:2] == [False, (f"{path}.part", path)]
    assert path.read_bytes() == b"some bytes" and len(list(path.parent.iterdir())) == 1


# ---- final_result.json ---------------------------------------------------------------------------


def test_final_result_json_tells_what_was_run_where_on_what_and_what_came_of_it(trained, knobs):
    folder, lines = trained
    result = json.loads((folder / "final_result.json").read_text())
    hp = Hyperparameters.from_env({**with_quantized(knobs), "CHECKPOINT_EVERY": "6"})
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
    (end,) = [line for line in lines if line.startswith("step:6/6 val_loss:")]
    assert result["steps"] == 6
    assert [result["val_loss"], result["val_bpb"]] == pytest.approx(scores(end), abs=6e-5)
    after = [result["int8_val_loss"], result["int8_val_bpb"]]
    assert after == pytest.approx(scores(lines[-1]), abs=6e-9)
    train_ms = float(re.search(r"train_time:(\d+)ms", end)[1])
    assert result["train_ms"] == pytest.approx(train_ms, abs=1)
    assert result["step_avg_ms"] == pytest.approx(result["train_ms"] / 6)
    assert result["eval_ms"] == pytest.approx(int(lines[-2].split("eval_time:")[1][:-2]), abs=1)


def test_final_result_json_has_the_sizes_and_the_log_the_verdict(trained):
    folder, lines = trained
    result = json.loads((folder / "final_result.json").read_text())
    code, artifact = SCRIPT.stat().st_size, (folder / ARTIFACT).stat().st_size
    assert result["model_bytes"] == (folder / "final_model.pt").stat().st_size
    assert (result["code_bytes"], result["artifact_bytes"]) == (code, artifact)
    assert result["total_bytes"] == code + artifact
    left = 16_000_000 - code - artifact
    assert (result["fits"], result["bytes_left"]) == (True, left)
    assert lines[-4] == f"size_check:fits limit:16000000 bytes_left:{left}"


def test_final_result_json_has_the_fingerprint_of_the_data(trained, knobs):
    result = json.loads((trained[0] / "final_result.json").read_text())
    assert result["dataset"] == fingerprint_by_hand(knobs)


def fingerprint_by_hand(knobs: dict[str, str]) -> dict:
    tokenizer = Path(knobs["TOKENIZER_PATH"]).read_bytes()
    expected = {"tokenizer": hashlib.sha256(tokenizer).hexdigest()}
    for path in Path(knobs["DATA_PATH"]).glob("fineweb_*.bin"):
        data = path.read_bytes()
        parts = data[: 1024 + 2**20] + data[-(2**20) :]
        expected[path.name] = [len(data), hashlib.sha256(parts).hexdigest()]
    return expected


def test_the_fingerprint_of_a_long_shard_reads_only_its_ends(tmp_path, knobs, tokenizer):
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
def test_the_verdict_at_the_limit(trained, tmp_path, monkeypatch, knobs, spare):
    """Of code so long that the same model fits to the byte, or not."""
    code = tmp_path / "long.py"
    code.write_bytes(b"#" * (16_000_000 - (trained[0] / ARTIFACT).stat().st_size - spare))
    monkeypatch.setattr(train_gpt, "__file__", str(code))
    hp = Hyperparameters.from_env({**with_quantized(knobs), "OUTPUT_DIR": str(tmp_path)})
    gpt, lines = small_gpt(knobs), []
    load_weights(gpt, (trained[0] / "final_model.pt").read_bytes(), "final_model.pt")
    _, sizes = export(gpt, hp, lines.append)
    verdict = "fits" if spare == 0 else "too_large"
    assert lines[-2] == f"size_check:{verdict} limit:16000000 bytes_left:{spare}"
    assert sizes["bytes_left"] == spare and sizes["code_bytes"] == code.stat().st_size
