"""Quantization, the artifact and the files."""

import io
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from train_gpt import (
    GPT,
    Hyperparameters,
    abs_quantile,
    dequantize_state_dict_int8,
    export,
    load_weights,
    quantize_state_dict_int8,
    serialize,
    unpack,
    write_file,
)


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "matrix": torch.randn(300, 256),
        "half_matrix": torch.randn(300, 256).bfloat16(),
        "small": torch.randn(256, 256),  # 65,536 elements: not above the limit
        "small_half": torch.randn(7).bfloat16(),
        "x.q_gain": torch.randn(5),
        "x.q_gain_half": torch.randn(5).bfloat16(),
        "cube": torch.randn(70, 40, 30),
        "zeros": torch.zeros(300, 256),
        "zero_cube": torch.zeros(70, 40, 30),
        "count": torch.arange(5),
        "fp64": torch.randn(3).double(),
        "scalar": torch.tensor(2.5),
        "none": torch.ones(0, 8),
    }


def linear_quantile(rows: torch.Tensor, q: float) -> torch.Tensor:
    """NumPy's, of |row|, with the rank in fp32 as torch has it up to 2.14."""
    return torch.from_numpy(np.quantile(rows.abs().numpy(), np.float32(q), axis=1))


def test_where_each_tensor_goes():
    obj, stats = quantize_state_dict_int8(state())
    assert obj["__quant_format__"] == "int8_clean_per_row_v1"
    quantized = {"matrix", "half_matrix", "cube", "zeros", "zero_cube"}
    assert set(obj["quantized"]) == set(obj["scales"]) == set(obj["dtypes"]) == quantized
    assert all(t.dtype == torch.int8 for t in obj["quantized"].values())
    assert obj["dtypes"]["half_matrix"] == "bfloat16" and obj["dtypes"]["matrix"] == "float32"
    matrices = {"matrix", "half_matrix", "zeros"}
    assert obj["qmeta"] == {name: {"scheme": "per_row", "axis": 0} for name in matrices}
    for name in matrices:
        assert obj["scales"][name].dtype == torch.float16 and obj["scales"][name].shape == (300,)
    for name in ("cube", "zero_cube"):
        assert obj["scales"][name].dtype == torch.float32 and obj["scales"][name].shape == ()
    dtypes = {name: tensor.dtype for name, tensor in obj["passthrough"].items()}
    assert dtypes == {
        "small": torch.float16, "small_half": torch.float16, "scalar": torch.float16,
        "none": torch.float16, "x.q_gain": torch.float32, "x.q_gain_half": torch.float32,
        "count": torch.int64, "fp64": torch.float64,
    }  # fmt: skip
    assert obj["passthrough_orig_dtypes"] == {
        "small": "float32", "small_half": "bfloat16", "scalar": "float32", "none": "float32",
    }  # fmt: skip
    tensors = [*obj["quantized"].values(), *obj["scales"].values(), *obj["passthrough"].values()]
    assert stats == {
        "param_count": sum(t.numel() for t in state().values()),
        "num_tensors": 13,
        "num_float_tensors": 12,  # all but "count"
        "num_nonfloat_tensors": 1,
        "baseline_tensor_bytes": sum(t.numel() * t.element_size() for t in state().values()),
        "int8_payload_bytes": sum(t.numel() * t.element_size() for t in tensors),
    }


def test_optional_keys_stand_only_when_needed():
    obj, _ = quantize_state_dict_int8({"x.q_gain": torch.ones(3)})
    assert set(obj) == {"__quant_format__", "quantized", "scales", "dtypes", "passthrough"}


def test_other_patterns_keep_other_tensors_in_fp32():
    obj, _ = quantize_state_dict_int8({"x.q_gain": torch.ones(3), "y": torch.ones(3)}, ("y",))
    assert obj["passthrough"]["y"].dtype == torch.float32
    assert obj["passthrough"]["x.q_gain"].dtype == torch.float16


def test_rows_by_the_contracts_formula():
    weight = state()["matrix"] * torch.logspace(-3, 2, 300)[:, None]  # below and above the floor
    obj, _ = quantize_state_dict_int8({"w": weight})
    clip = linear_quantile(weight, 0.9999984)
    scale = torch.maximum(clip / 127, torch.tensor(1 / 127))
    clipped = torch.minimum(torch.maximum(weight, -clip[:, None]), clip[:, None])
    q = torch.round(clipped / scale[:, None]).clamp(-127, 127)
    assert torch.equal(obj["quantized"]["w"], q.to(torch.int8))
    assert torch.equal(obj["scales"]["w"], scale.half())
    assert (scale == 1 / 127).any() and (scale > 1 / 127).any()


def test_whole_tensors_by_the_contracts_formula():
    obj, _ = quantize_state_dict_int8({k: v for k, v in state().items() if "cube" in k})
    cube = state()["cube"]
    clip = linear_quantile(cube.flatten()[None], 0.9999984)[0]
    q = torch.round(cube.clamp(-clip, clip) / (clip / 127)).clamp(-127, 127)
    assert torch.equal(obj["quantized"]["cube"], q.to(torch.int8))
    assert obj["scales"]["cube"] == clip / 127 and obj["scales"]["zero_cube"] == 1.0
    assert not obj["quantized"]["zero_cube"].any()


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 4), columns=st.integers(1, 3000), q=st.sampled_from([0.9999984, 0.999, 1.0])
)
def test_the_quantile_is_numpys(rows, columns, q):
    values = torch.randn(rows, columns)
    torch.testing.assert_close(
        abs_quantile(values, q), linear_quantile(values, q), rtol=1e-6, atol=0
    )


def test_the_quantile_of_more_values_than_torchs_takes():
    values = torch.arange(20_000_000, dtype=torch.float32)[None]
    assert 19_999_960 < abs_quantile(values, 0.9999984).item() < 19_999_975


def test_back_and_forth():
    original = state()
    obj, _ = quantize_state_dict_int8(original)
    restored = dequantize_state_dict_int8(obj)
    assert restored.keys() == original.keys()
    kept_fp32 = {"x.q_gain_half"}
    for name, tensor in restored.items():
        assert tensor.shape == original[name].shape
        assert tensor.dtype == (torch.float32 if name in kept_fp32 else original[name].dtype), name
    for name in ("matrix", "half_matrix"):
        clip = original[name].float().abs().amax(dim=1, keepdim=True)
        step = (clip / 127).clamp_min(1 / 127)
        error = (restored[name].float() - original[name].float()).abs()
        slack = 2**-8 if name == "half_matrix" else 2**-10  # bf16 result, fp16 scale
        assert (error <= 0.51 * step + slack * clip).all()
    for name in ("zeros", "zero_cube", "x.q_gain", "count", "fp64", "none", "scalar"):
        assert torch.equal(restored[name], original[name]), name
    restored["x.q_gain"].add_(1)  # not the object's own memory
    assert torch.equal(obj["passthrough"]["x.q_gain"], original["x.q_gain"])


def test_without_qmeta_a_scale_with_one_dimension_is_one_per_row():
    """As in objects that older and other scripts wrote."""
    values = torch.randint(-127, 128, (3, 4), dtype=torch.int8)
    cube = torch.randint(-127, 128, (3, 2, 2), dtype=torch.int8)
    rows, whole = torch.tensor([0.5, 2.0, 0.25]).half(), torch.tensor(0.125)
    obj = {
        "__quant_format__": "int8_clean_per_row_v1",
        "quantized": {"matrix": values, "cube": cube, "whole": values},
        "scales": {"matrix": rows, "cube": rows, "whole": whole},
        "dtypes": {"matrix": "float32", "cube": "bfloat16", "whole": "float32"},
        "passthrough": {},
    }
    restored = dequantize_state_dict_int8(obj)
    assert torch.equal(restored["matrix"], values * torch.tensor([[0.5], [2.0], [0.25]]))
    by_row = torch.stack([0.5 * cube[0], 2.0 * cube[1], 0.25 * cube[2]]).bfloat16()
    assert restored["cube"].dtype == torch.bfloat16 and torch.equal(restored["cube"], by_row)
    assert torch.equal(restored["whole"], 0.125 * values)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_scales_that_are_not_one_a_row_are_refused(size):
    """Before they are multiplied: a scale of another shape may blow up a tiny artifact."""
    obj, _ = quantize_state_dict_int8({"w": torch.randn(300, 256)})
    obj["scales"]["w"] = torch.ones(size)
    with pytest.raises(ValueError, match=rf"w has \({size},\) scales, not one or one a row"):
        dequantize_state_dict_int8(obj)


def test_a_whole_model_comes_back_through_the_bytes():
    hp = Hyperparameters(num_layers=2, model_dim=128, vocab_size=1024)
    gpt, other = GPT(hp), GPT(hp)
    obj, _ = quantize_state_dict_int8(gpt.state_dict())
    load_weights(other, zlib.compress(serialize(obj), 9), "x.ptz")
    tokens = torch.randint(1024, (2, 65))
    for model in (gpt, other):
        assert model.tok_emb.weight.dtype == torch.bfloat16
    first, second = (m(tokens[:, :-1], tokens[:, 1:]).item() for m in (gpt, other))
    assert first == pytest.approx(second, abs=0.02)


def test_a_damaged_artifact_does_not_load():
    data = zlib.compress(serialize(quantize_state_dict_int8(state())[0]), 9)
    for broken in (data[: len(data) // 2], b"y" + data[1:], data[:5000] + b"\0" * 9 + data[5009:]):
        with pytest.raises(ValueError, match="x.ptz is no model file, or is damaged"):
            unpack(broken, "x.ptz", 10**8)


def test_serializing_twice_gives_the_same_bytes():
    obj, _ = quantize_state_dict_int8(state())
    assert serialize(obj) == serialize(quantize_state_dict_int8(state())[0])
    assert torch.load(io.BytesIO(serialize(obj)), weights_only=True).keys() == obj.keys()


def test_a_failed_write_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / "final_model.pt"
    write_file(path, b"old")
    with pytest.raises(TypeError):
        write_file(path, "no bytes")
    assert path.read_bytes() == b"old"
    write_file(path, b"new")
    assert path.read_bytes() == b"new" and [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("blocked", ["final_model.pt", "final_model.int8.ptz"])
def test_the_model_that_can_be_written_is(tmp_path, blocked):
    """The other one is a problem to report at the end, and no exception."""
    (tmp_path / f"{blocked}.part").mkdir()
    hp = Hyperparameters(output_dir=str(tmp_path), num_layers=1, model_dim=64, vocab_size=256)
    lines = []
    artifact, sizes, problems = export(GPT(hp), lines.append)
    assert problems == [f"{tmp_path / blocked} cannot be written: Is a directory"]
    (written,) = [path for path in tmp_path.iterdir() if path.is_file()]
    assert {written.name, blocked} == {"final_model.pt", "final_model.int8.ptz"}
    load_weights(GPT(hp), written.read_bytes(), written.name)
    load_weights(GPT(hp), artifact, "the artifact")
    assert written.name.endswith(".pt") or written.read_bytes() == artifact
    assert sizes["bytes_total"] == len(artifact) + sizes["bytes_code"]
    assert f"Serialized model int8+zlib: {len(artifact)} bytes" in lines[0]


def test_without_a_floor_small_rows_keep_fine_steps():
    small = {"w": 1e-4 * torch.randn(300, 300)}
    small["w"][7] = 0.0
    errors = []
    for floor in (1 / 127, 0.0):
        obj, _ = quantize_state_dict_int8(small, scale_floor=floor)
        restored = dequantize_state_dict_int8(obj)["w"]
        errors.append(((restored - small["w"]).norm() / small["w"].norm()).item())
        assert torch.equal(restored[7], small["w"][7])
    assert errors[0] == 1.0 and errors[1] < 0.02  # all of it, or a rounding
