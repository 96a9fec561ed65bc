"""Several nodes, and errors of one rank or all: torchrun as its users start it."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import (
    SCRIPT,
    free_port,
    process_environ,
    ranks_of,
    read_until,
    rest_of,
    run_here,
    run_script,
    start_script,
    without_gloo,
    write_worker,
)


def test_two_nodes_that_share_no_files(tmp_path, dataset, tokenizer, knobs):
    """Two agents in two folders, each with its own copy of the data and a rank. The first node
    has the log and the models; the other one ends well without a file."""
    port, agents = free_port(), []
    local = {"DATA_PATH": "data", "TOKENIZER_PATH": "small.model", "GLOO_SOCKET_IFNAME": "lo"}
    for node in ("a", "b"):
        folder = tmp_path / node
        shutil.copytree(dataset, folder / "data")
        shutil.copy(tokenizer, folder)
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        command += ["--nproc_per_node=1", "--rdzv_backend=c10d"]
        command += [f"--rdzv_endpoint=127.0.0.1:{port}", str(SCRIPT)]
        environ = process_environ({**knobs, **local, "BATCH_SLOTS": "16"}, 1)
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        agents.append(subprocess.Popen(command, cwd=folder, env=environ, **pipes))
    outputs = [agent.communicate(timeout=120) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    # Which agent becomes the first node is torchrun's choice.
    (first,) = [node for node in "ab" if (tmp_path / node / "logs").exists()]
    logs = [without_gloo(output) for output, _ in outputs]
    (lines,) = [log.splitlines() for log in logs if log]
    assert "world_size:2 grad_accum_steps:8" in lines and "replicas:identical" in lines
    assert lines[-1].startswith("final_int8_zlib_roundtrip_exact ")
    files = {
        node: sorted(p.name for p in (tmp_path / node).iterdir() if p.is_file()) for node in "ab"
    }
    other = files.pop("b" if first == "a" else "a")
    assert other == ["small.model"]
    assert files[first] == [
        "final_model.int8.ptz",
        "final_model.pt",
        "final_result.json",
        "small.model",
    ]
    alone = run_here(tmp_path / first, {**knobs, "BATCH_SLOTS": "16", "OUTPUT_DIR": "alone"})
    losses = [
        [float(s.split("val_loss:")[1].split()[0]) for s in text if "val_loss:" in s]
        for text in (lines, alone.stdout.splitlines())
    ]
    assert len(losses[0]) == 5
    for found, expected in zip(*losses, strict=True):
        assert abs(found - expected) < 2e-3


FAULT = """
def train_step(state, train_step=train_gpt.train_step):
    assert state.runtime.rank != 2 or state.step < 3, "the fault of rank 2"
    return train_step(state)

train_gpt.train_step = train_step"""


def test_a_rank_that_raises_takes_the_run_down_with_its_own_error_last(tmp_path, knobs):
    """Rank 2 breaks in step 4, as one with an edited script may."""
    started = time.monotonic()
    result = run_script(tmp_path, knobs, ranks=4, script=write_worker(tmp_path, FAULT))
    assert time.monotonic() - started < 30
    assert result.returncode == 1
    assert "step:3/6 train_loss" in result.stdout and "step:4/6" not in result.stdout
    errors = [s for s in result.stderr.splitlines() if "Error: " in s]
    assert errors[0] == errors[-1].strip() == "AssertionError: the fault of rank 2", errors
    assert last_words(result) == errors[-1] and "rank      : 2 " in result.stderr


def last_words(result: subprocess.CompletedProcess) -> str:
    """Of torchrun, about the first rank that failed."""
    root = result.stderr.split("Root Cause")[-1].splitlines()
    return [line for line in root if line.strip("= ")][-1]


@pytest.mark.parametrize(
    ("knob", "value", "problem"),
    [
        ("MODEL_DIM", "33", "MODEL_DIM=33 must be an even multiple of NUM_HEADS=4"),  # all ranks
        ("RESUME", "no.pt", "RESUME='no.pt' is not a file that can be read: check the path"),
    ],
)
def test_an_error_of_the_users_is_one_message_from_one_rank(tmp_path, knobs, knob, value, problem):
    """Whether all ranks meet it, or only rank 0. torchrun repeats it as its last words."""
    result = run_script(tmp_path, {**knobs, knob: value}, ranks=2)
    assert result.returncode == 1
    said = [line for line in result.stderr.splitlines() if problem in line]
    assert said == [f"ValueError: {problem}", last_words(result)], result.stderr
    assert 'train_gpt.py", line' not in result.stderr and "warmup_step:" not in result.stdout


def test_a_killed_rank_ends_the_run(tmp_path, knobs):
    """Nothing is left behind: no process waits for the one that is gone."""
    environ = {**knobs, "ITERATIONS": "1000000", "VAL_LOSS_EVERY": "0"}
    agent = start_script(tmp_path, environ, ranks=2)
    read_until(agent, "step:10/")
    ranks = ranks_of(agent)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    rest_of(agent, seconds=30)
    assert agent.returncode == 1
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks)
