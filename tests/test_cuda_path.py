"""The GPU's path on a machine without one: fake_cuda_worker.py calls the trainer's own functions on
fake CUDA tensors. A tensor on the wrong device is an error there; a wait for the GPU is counted."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, process_environ

from train_gpt import attention_backends

CXX = os.environ.get("CXX", "c++")


@pytest.fixture(scope="module")
def results(tmp_path_factory, knobs) -> dict[str, dict]:
    """For each check of the worker the devices of what it makes, and the waits for the GPU."""
    if torch.backends.cuda.is_built() or not shutil.which(CXX):
        pytest.skip(f"needs a torch without CUDA and a compiler ({CXX})")
    folder = tmp_path_factory.mktemp("fake_cuda")
    command = [sys.executable, Path(__file__).with_name("fake_cuda_worker.py"), folder]
    own = {"NUM_LAYERS": "2", "GRAD_CLIP_NORM": "1", "DEVICE": "auto"}
    environ = process_environ({**knobs, **own, "PYTHONPATH": str(ROOT), "CXX": CXX}, 1)
    process = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    return json.loads((folder / "result.json").read_text())


def test_the_host_waits_for_the_gpu_only_for_an_evaluations_sum(results):
    for name in ("batch", "step", "step after load_state_dict"):
        assert results[name]["waits"] == [], name
    assert results["evaluate"]["waits"] == ["a value is fetched"]


def test_only_what_is_saved_is_on_the_cpu(results):
    devices = {name: result["devices"] for name, result in results.items() if result["devices"]}
    assert devices.pop("state_dict") == ["cpu"]
    assert {"batch", "step", "optimizer state"} <= devices.keys()
    assert all(places == ["cuda:0"] for places in devices.values())


@pytest.mark.parametrize("major, first", [(8, "FLASH"), (9, "CUDNN"), (10, "FLASH")])
def test_cudnn_comes_first_on_hopper_and_is_left_out_elsewhere(monkeypatch, major, first):
    properties = SimpleNamespace(major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    order = ["CUDNN", "FLASH", "EFFICIENT", "MATH"]
    found = [backend.name.split("_")[0] for backend in attention_backends(torch.device("cuda"))]
    assert found == order[order.index(first) :]
