"""The CUDA path without a GPU: fake_cuda_worker.py counts waits and devices on fake tensors."""

import json
import os
import shutil
from types import SimpleNamespace

import fake_cuda_worker
import pytest
import torch
from runs import run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode

from train_gpt import attend, attention_backends

CXX = os.environ.get("CXX", "c++")


@pytest.fixture(scope="module")
def results(tmp_path_factory, knobs) -> dict[str, dict]:
    """Tensor devices and waits for the GPU, for each of the worker's checks."""
    if torch.backends.cuda.is_built() or not shutil.which(CXX):
        pytest.skip(f"needs a torch without CUDA and a compiler ({CXX})")
    folder = tmp_path_factory.mktemp("fake_cuda")
    own = {"NUM_LAYERS": "2", "GRAD_CLIP_NORM": "1", "DEVICE": "auto", "CXX": CXX}
    (worker,) = run_ranks(folder, {**knobs, **own}, 1, [fake_cuda_worker.__file__, folder])
    assert worker.returncode == 0, worker.stderr
    return json.loads((folder / "result.json").read_text())


def test_the_host_waits_for_the_gpu_only_for_the_mean_of_losses(results):
    for name in ("batch", "schedule", "step", "step after load_state_dict", "evaluate"):
        assert results[name]["waits"] == [], name
    assert results["mean_loss"]["waits"] == ["a value is fetched"]


def test_only_what_is_saved_is_on_the_cpu(results):
    devices = {name: result["devices"] for name, result in results.items() if result["devices"]}
    assert devices.pop("state_dict") == ["cpu"]
    assert {"batch", "step", "optimizer state"} <= devices.keys()
    assert all(places == ["cuda:0"] for places in devices.values())


@pytest.mark.parametrize("dtype, heads", [("float32", [4, 4, 4]), ("bfloat16", [4, 2, 2])])
def test_k_and_v_are_repeated_for_each_query_head_in_fp32_only(monkeypatch, dtype, heads):
    """Without bf16, no fused kernel takes fewer KV heads than query heads."""
    found = []

    def attention(*parts: torch.Tensor, **settings) -> torch.Tensor:
        found.extend(part.size(1) for part in parts)
        return parts[0]

    if torch.cuda.is_available():
        torch.cuda.init()  # before its properties are replaced
    properties = SimpleNamespace(major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    settings = {"device": "cuda", "dtype": getattr(torch, dtype)}
    with FakeTensorMode():
        attend(*(torch.empty(2, 8, n, 16, **settings) for n in (4, 2, 2)))
    assert found == heads


@pytest.mark.parametrize(
    "major, seq_len, first",
    [(8, 1024, "FLASH"), (9, 384, "CUDNN"), (9, 1000, "FLASH"), (10, 1024, "FLASH")],
)
def test_cudnn_is_for_hopper_and_multiples_of_128_tokens(monkeypatch, major, seq_len, first):
    properties = SimpleNamespace(major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    order = ["CUDNN", "FLASH", "EFFICIENT", "MATH"]
    backends = attention_backends(torch.device("cuda"), seq_len)
    assert [backend.name.split("_")[0] for backend in backends] == order[order.index(first) :]
