"""Quantization, the artifact and the files."""

import errno
import itertools
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import ALONE, ARTIFACT, MODEL, RESULT, Lines, call_before, finished, run_here

import train_gpt
from train_gpt import Hyperparameters, dequantize_state_dict_int8, quantize_state_dict_int8


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "matrix": torch.randn(300, 256),
        "half_matrix": torch.randn(300, 256).bfloat16(),
        "small": torch.randn(256, 256),  # 65,536 elements: not above the limit
        "small_half": torch.randn(7).bfloat16(),
        "x.q_gain": torch.randn(5),
        "x.q_gain_half": torch.randn(5).bfloat16(),
        "cube": torch.randn(70, 40, 30),
        "count": torch.arange(5),
        "fp64": torch.randn(3).double(),
        "none": torch.ones(0, 8),
    }


@pytest.mark.baseline
def test_each_tensor_is_in_its_part_of_the_artifact():
    obj, stats = quantize_state_dict_int8(tensors())
    assert obj["__quant_format__"] == "int8_clean_per_row_v1"
    names = {"matrix", "half_matrix", "cube"}
    assert set(obj["quantized"]) == set(obj["scales"]) == names
    assert obj["dtypes"] == {"matrix": "float32", "half_matrix": "bfloat16", "cube": "float32"}
    row = {"scheme": "per_row", "axis": 0}
    assert obj["qmeta"] == {"matrix": row, "half_matrix": row}
    origins = {"small": "float32", "small_half": "bfloat16", "none": "float32"}
    assert obj["passthrough_orig_dtypes"] == origins
    others = {"count": torch.int64, "fp64": torch.float64}
    exact = {"x.q_gain": torch.float32, "x.q_gain_half": torch.float32}
    dtypes = {**dict.fromkeys(origins, torch.float16), **exact, **others}
    assert {name: tensor.dtype for name, tensor in obj["passthrough"].items()} == dtypes
    matrix, cube, small = 300 * 256, 70 * 40 * 30, 256 * 256
    assert stats == {
        "param_count": 2 * matrix + cube + small + 7 + 5 + 5 + 5 + 3,
        "num_tensors": 10,
        "num_float_tensors": 3,  # quantized ones, as the reference counts
        "num_nonfloat_tensors": 1,
        "baseline_tensor_bytes": 6 * matrix + 4 * (cube + small + 5) + 2 * (7 + 5) + 8 * (5 + 3),
        "int8_payload_bytes": 2 * (matrix + 600) + cube + 4 + 2 * (small + 7) + 4 * 10 + 8 * 8,
    }
    other = Hyperparameters(int8_keep_float_fp32_name_patterns=("small",))
    kept = quantize_state_dict_int8(tensors(), other)[0]["passthrough"]
    assert (kept["small"].dtype, kept["x.q_gain"].dtype) == (torch.float32, torch.float16)


@pytest.mark.baseline
@pytest.mark.parametrize("levels", [127, 31])
def test_rows_by_the_contracts_formula(levels, monkeypatch):
    monkeypatch.setattr(train_gpt, "INT8_LEVELS", levels)
    weight = tensors()["matrix"] * torch.logspace(-3, 2, 300)[:, None]  # below and above the floor
    # The rank of the quantile is computed in fp32, as in torch up to 2.14.
    clip = np.quantile(weight.abs().numpy(), np.float32(0.9999984), axis=1, keepdims=True)
    clip = torch.from_numpy(clip)
    scale = torch.maximum(clip / levels, torch.tensor(1 / 127))
    wanted = torch.round(weight.clamp(-clip, clip) / scale).clamp(-levels, levels)
    values, scales = train_gpt.quantize_tensor(weight)
    assert torch.equal(values, wanted.to(torch.int8))
    assert torch.equal(scales, scale[:, 0].half())
    assert (scale == 1 / 127).any() and (scale > 1 / 127).any()


@pytest.mark.baseline
def test_a_tensor_of_zeros_has_the_scale_1():
    values, scale = train_gpt.quantize_tensor(torch.zeros(2, 2, 2))
    assert not values.any() and scale == 1.0


def test_a_bank_of_more_values_than_torchs_quantile_takes_is_quantized():
    """A stack of matrices has more than 2**24 values in one row. None of them is clipped."""
    torch.manual_seed(0)
    bank = torch.randn(17, 1000, 1000)
    bank[3, 5, 7] = 9.0
    restored = dequantize_state_dict_int8(quantize_state_dict_int8({"bank": bank})[0])["bank"]
    assert (restored - bank).abs().max() <= 9 / 127 / 2 + 1e-6


@pytest.mark.baseline
def test_dequantize_undoes_quantize():
    original = tensors()
    restored = dequantize_state_dict_int8(quantize_state_dict_int8(original)[0])
    assert restored.keys() == original.keys()
    for name, tensor in restored.items():
        dtype = torch.float32 if name == "x.q_gain_half" else original[name].dtype
        assert (tensor.shape, tensor.dtype) == (original[name].shape, dtype), name
        torch.testing.assert_close(tensor.to(original[name]), original[name], rtol=0.01, atol=0.03)
    for name in ("x.q_gain", "count", "fp64", "none"):
        assert torch.equal(restored[name], original[name]), name


def test_without_qmeta_a_scale_with_one_dimension_is_one_per_row():
    """Artifacts of other scripts may lack qmeta."""
    values, scales = torch.randint(-127, 128, (3, 2, 2), dtype=torch.int8), torch.rand(3)
    weight = {"quantized": {"w": values}, "scales": {"w": scales}, "dtypes": {"w": "float32"}}
    restored = dequantize_state_dict_int8({**weight, "passthrough": {}})
    assert torch.equal(restored["w"], values * scales[:, None, None])


@pytest.fixture(scope="module")
def gpt(quantized_knobs) -> train_gpt.GPT:
    return train_gpt.TrainingState(Hyperparameters.from_env(quantized_knobs), ALONE).gpt


def export(gpt: train_gpt.GPT, source: bytes) -> tuple[bytes, list[str]]:
    """The artifact, and the report after a run of this source."""
    artifact, report = train_gpt.export(gpt, gpt.hp, replace(ALONE, source=source))
    return artifact, report.splitlines()


@pytest.mark.baseline
def test_the_artifact_is_zlib_at_level_9(gpt):
    artifact, _ = export(gpt, b"")
    assert artifact == zlib.compress(zlib.decompress(artifact), 9)


@pytest.mark.parametrize("spare, verdict", [(0, "fits"), (-1, "too_large")])
def test_the_artifact_and_the_lines_of_its_size(gpt, spare, verdict):
    """The code fits to the byte, or is one byte too long."""
    artifact, _ = export(gpt, b"")
    size, total = len(artifact), 16_000_000 - spare
    _, code_line, _, model, submission, check = export(gpt, b"#" * (total - size))[1]
    assert code_line == f"Code size: {total - size} bytes"
    assert model.startswith(f"Serialized model int8+zlib: {size} bytes (payload:")
    assert submission == f"Total submission size int8+zlib: {total} bytes"
    assert check == f"size_check:{verdict} limit:16000000 bytes_left:{spare}"


# ---- writing files -------------------------------------------------------------------------------
def test_a_file_gets_its_name_when_its_bytes_are_on_the_disk(tmp_path, monkeypatch):
    """Otherwise a power cut or a full disk could leave an empty file in place of the old one."""
    path, log, flushed = tmp_path / "model", Lines(), []

    def fsync(number: int) -> None:
        flushed.extend((part.name == path.name, part.read_bytes()) for part in tmp_path.iterdir())

    def fail(code: int, number: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    assert train_gpt.write_file(path, b"new", log)
    assert flushed == [(False, b"new")] and path.read_bytes() == b"new"
    for code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):  # a file system without fsync
        monkeypatch.setattr(os, "fsync", partial(fail, code))
        assert train_gpt.write_file(path, b"new", log) and log.text == ""
    monkeypatch.setattr(os, "fsync", partial(fail, errno.ENOSPC))
    assert not train_gpt.write_file(path, b"newer", log)
    assert log.text == f"WARNING: {path} cannot be written: No space left on device\n"
    assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == b"new"


def final_files(folder: Path) -> dict[str, bytes]:
    names = (MODEL, ARTIFACT, RESULT)
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


@pytest.fixture(scope="module")
def scored(tmp_path_factory, knobs):
    """The folder of a finished run, and knobs of runs that write into it. None has a RUN_ID."""
    folder = tmp_path_factory.mktemp("scored")
    environ = {**knobs, "WARMUP_STEPS": "0", "VAL_LOSS_EVERY": "0", "ITERATIONS": "0"}
    del environ["RUN_ID"]
    finished(run_here(folder, {**environ, "SEED": "2"}))
    return folder, environ


def moved_files(folder: Path) -> list[dict[str, bytes]]:
    return [final_files(older) for older in sorted((folder / "previous").iterdir())]


def test_older_files_move_together_into_a_folder_of_their_time(tmp_path, scored, monkeypatch):
    """Also those of the baseline, which writes no result. Older ones are never replaced, not even
    by files of the same second. If the warm-up then crashes, no older score is left in place."""
    source, environ = scored
    for count, names in enumerate([(MODEL, ARTIFACT, RESULT), (MODEL, ARTIFACT)], start=1):
        for name in names:
            shutil.copy(source / name, tmp_path)
            os.utime(tmp_path / name, (0, 86_400 * 365 - (name != ARTIFACT)))  # the newest counts
        with monkeypatch.context() as patches:
            patches.setattr(train_gpt, "warm_up", None)
            assert run_here(tmp_path, environ).returncode == 1
        assert final_files(tmp_path) == {} and len(moved_files(tmp_path)) == count
        older = final_files(source)
        assert moved_files(tmp_path)[-1] == {name: older[name] for name in names}
    taken = time.strftime("%y%m%d-%H%M%S", time.localtime(86_400 * 365))
    assert {path.name for path in (tmp_path / "previous").iterdir()} == {taken, f"{taken}+"}


def test_runs_that_are_killed_at_their_end_lose_no_model(tmp_path, scored, monkeypatch):
    """Two runs are killed before the same change of a file, so at any stage of the export and the
    scoring. Then one finishes. A move that was cut goes on into the same folder."""
    source, environ = scored

    def is_killed(folder: Path, number: int) -> bool:
        calls = []

        def kill_before(change: Callable) -> Callable:
            def killed(*paths):
                calls.append(paths)
                if len(calls) == number:
                    raise SystemExit(9)
                change(*paths)

            return killed

        with monkeypatch.context() as patches:
            for name in ("rename", "replace", "unlink"):
                patches.setattr(os, name, kill_before(getattr(os, name)))
            return run_here(folder, environ).returncode == 9

    for number in itertools.count(1):
        folder = shutil.copytree(source, tmp_path / str(number))
        models = {(source / MODEL).read_bytes(), (source / ARTIFACT).read_bytes()}
        if not is_killed(folder, number):
            break
        for seed in ("3", "4"):
            models |= {data for name, data in final_files(folder).items() if name != RESULT}
            is_killed(folder, number)
            environ["SEED"] = seed  # another model
        finished(run_here(folder, environ))
        kept = [*moved_files(folder), final_files(folder)]
        assert models <= {data for files in kept for data in files.values()}
        assert final_files(source) in kept
    assert number > 8  # three files move, five are written


@pytest.mark.parametrize("function", ["train", "serialize", "export"])
def test_the_files_of_another_run_that_ends_in_the_same_folder_are_not_lost(
    tmp_path, scored, monkeypatch, function
):
    """The other run ends while this one trains, or writes its weights, or has written them."""
    source, environ = scored

    def end_another_run(*_: object) -> None:
        train_gpt.move_older_files(Hyperparameters(), None, MODEL, ARTIFACT, RESULT)
        shutil.copytree(source, tmp_path, dirs_exist_ok=True)

    call_before(monkeypatch, train_gpt, function, end_another_run)
    finished(run_here(tmp_path, environ))
    kept = [*moved_files(tmp_path), final_files(tmp_path)]
    for name in (MODEL, ARTIFACT):
        assert final_files(source)[name] in [files.get(name) for files in kept]
        checksum = json.loads((tmp_path / RESULT).read_bytes())["crc32"][name]
        assert checksum in [zlib.crc32(files.get(name, b"")) for files in kept]


@pytest.mark.parametrize("name", [MODEL, ARTIFACT, RESULT])
def test_a_run_that_cannot_write_a_file_warns_and_is_scored(tmp_path, scored, monkeypatch, name):
    """The run fails at its end. The file of an older run stays, and is not listed as written."""
    source, environ = scored
    folder = tmp_path / "run"

    def train(state, validation, train=train_gpt.train):
        """Another run ends, and its files cannot move."""
        shutil.copytree(source, folder, dirs_exist_ok=True)
        (folder / "previous").write_bytes(b"")
        return train(state, validation)

    monkeypatch.setattr(train_gpt, "train", train)

    def replace(part: Path, path: Path, replace=os.replace) -> None:
        if path.name == name:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        replace(part, path)

    monkeypatch.setattr(os, "replace", replace)
    result = run_here(folder, environ)
    assert (result.returncode, result.stderr) == (1, "")
    lines = result.stdout.splitlines()
    assert f"WARNING: {name} cannot be written: Is a directory" in lines
    assert any(re.search(" cannot be moved to previous/.*: Not a dir", line) for line in lines)
    others = [other for other in (MODEL, ARTIFACT, RESULT) if other != name]
    assert lines[-3] == f"files: {' '.join(others)}"
    assert lines[-1].startswith("final_int8_zlib_roundtrip_exact val_loss:")
    assert final_files(folder)[name] == final_files(source)[name]
