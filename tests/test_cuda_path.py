"""The GPU's path on a machine without one: fake_cuda_worker.py calls the trainer's own functions on
fake CUDA tensors. A tensor on the wrong device is an error there; a wait for the GPU is counted."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, process_environ

CXX = os.environ.get("CXX", "c++")
pytestmark = [
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has CUDA of its own"),
    pytest.mark.skipif(not shutil.which(CXX), reason=f"the device guard needs a compiler: {CXX}"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory, knobs) -> dict[str, dict]:
    """For each check of the worker its value, or a traceback, and the waits for the GPU."""
    folder = tmp_path_factory.mktemp("fake_cuda")
    more = {"NUM_LAYERS": "2", "EVAL_STRIDE": "8", "GRAD_CLIP_NORM": "1", "DEVICE": "auto"}
    worker = Path(__file__).with_name("fake_cuda_worker.py")
    environ = {**knobs, **more, "PYTHONPATH": str(ROOT), "CXX": CXX}
    process = subprocess.run(
        [sys.executable, str(worker), str(folder)],
        env=process_environ(environ, 1),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize(
    "name, value",
    [
        ("attention of sm_90", ["cudnn"]),
        ("attention of sm_80", ["flash"]),
        ("the batch read ahead", ["cuda:0"]),
        ("a batch", ["cuda:0"]),
        ("a step", ["cuda:0"]),
        ("a step after restore", ["cuda:0"]),
        ("a lap of the stopwatch", None),
    ],
)
def test_training_stays_on_the_gpu_and_never_waits_for_it(results, name, value):
    assert results[name]["value"] == value
    assert results[name]["waits"] == []


@pytest.mark.parametrize("name", ["evaluate", "evaluate_sliding"])
def test_an_evaluation_waits_once_for_its_sum(results, name):
    assert results[name] == {"value": 0.0, "waits": ["a value is fetched"]}


def test_a_snapshot_is_on_the_cpu(results):
    assert results["a snapshot"]["value"] == ["cpu"]


def test_a_restored_optimizer_is_back_on_the_gpu(results):
    assert results["the optimizers after a step"]["value"] == ["cuda:0"]
    assert results["restore"]["value"] is None
    assert results["the optimizers after restore"]["value"] == ["cuda:0"]
