"""How a signal ends a run: in training after the step in hand and with a checkpoint, elsewhere at
once, always quietly and with its exit code. (SIGTERM in training: test_checkpoints.py.)"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import (
    SCRIPT,
    finished,
    free_port,
    launch_command,
    process_environ,
    ranks_of,
    read_until,
    rest_of,
    saved_in,
    start_script,
    write_worker,
)

ENDLESS = {"ITERATIONS": "1000000", "VAL_LOSS_EVERY": "0"}


def assert_quiet(folder: Path) -> None:
    assert (folder / "stderr.txt").read_text() == ""


def shell_code(process: subprocess.Popen) -> int:
    """The exit code as a shell shows it: 128 + N for a process that signal N ended."""
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def assert_gone(pids: list[int]) -> None:
    """Nothing is left behind, at the latest two seconds from now."""
    deadline = time.monotonic() + 2
    while left := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_in_training_ends_the_step_and_saves(tmp_path, knobs, number):
    process = start_script(tmp_path, {**knobs, **ENDLESS})
    read_until(process, "step:10/")
    process.send_signal(number)
    lines = rest_of(process, seconds=20).splitlines()
    assert process.returncode == 128 + number
    assert_quiet(tmp_path)
    way_on = "to go on, set RESUME=auto and RUN_ID=test"
    step = int(
        re.fullmatch(rf"stopped: signal:{number} step:(\d+)/1000000: {way_on}", lines[-1])[1]
    )
    assert saved_in(tmp_path) == [f"step_{step:08d}.pt"] and step >= 10


def test_under_nohup_the_closing_of_the_terminal_does_nothing(tmp_path, knobs):
    with open(tmp_path / "stderr.txt", "w") as errors:
        process = subprocess.Popen(
            ["nohup", *launch_command(), str(SCRIPT)],
            cwd=tmp_path,
            env=process_environ({**knobs, "ITERATIONS": "30"}, 1),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    read_until(process, "step:1/")
    process.send_signal(signal.SIGHUP)
    output = rest_of(process, seconds=30)
    lines = finished(subprocess.CompletedProcess([], process.returncode, output))
    assert "step:10/30 " in output and lines[-1]
    assert_quiet(tmp_path)


def test_a_second_signal_ends_at_once_unless_it_comes_within_a_second(tmp_path, knobs):
    """In the middle of a step that takes far longer than the test waits. Sooner it is torchrun's
    copy of a signal that went to all processes."""
    slots = {"BATCH_SLOTS": "8192", "TRAIN_BATCH_TOKENS": str(2**19), "VAL_BATCH_SIZE": str(2**19)}
    change = """
def train(*arguments, train=train_gpt.train):
    print("training", flush=True)
    return train(*arguments)

train_gpt.train = train"""
    environ = {**knobs, **ENDLESS, **slots, "WARMUP_STEPS": "0"}
    process = start_script(tmp_path, environ, script=write_worker(tmp_path, change))
    read_until(process, "training")
    time.sleep(0.3)
    for wait in (0.2, 1.2):
        process.send_signal(signal.SIGTERM)
        time.sleep(wait)
        assert process.poll() is None  # it finishes the step
    process.send_signal(signal.SIGINT)
    rest_of(process, seconds=2)
    assert process.returncode == 130 and not (tmp_path / "checkpoints").exists()
    assert_quiet(tmp_path)


def test_a_signal_in_the_warm_up_ends_at_once(tmp_path, knobs):
    process = start_script(tmp_path, {**knobs, "WARMUP_STEPS": "1000000"})
    read_until(process, "warmup_step:10/")
    process.send_signal(signal.SIGTERM)
    rest_of(process, seconds=2)
    assert shell_code(process) == 143
    assert_quiet(tmp_path)


def test_a_signal_while_data_are_loaded_ends_at_once(tmp_path, knobs):
    """A worker says when it begins to read the shards, and takes its time."""
    change = """
def load_slowly(path):
    print("loading", flush=True)
    time.sleep(60)

train_gpt.load_data_shard = load_slowly"""
    process = start_script(tmp_path, knobs, script=write_worker(tmp_path, change))
    read_until(process, "loading")
    process.send_signal(signal.SIGINT)
    rest_of(process, seconds=2)
    assert shell_code(process) == 130
    assert_quiet(tmp_path)


def test_a_signal_while_ranks_are_waited_for_ends_at_once(tmp_path, knobs):
    """Rank 1 never comes. The wait is in C++, where Python's own handlers are deaf."""
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    change = """
def rendezvous(url, rendezvous=train_gpt.dist.rendezvous):
    print("waiting", flush=True)
    return rendezvous(url)

train_gpt.dist.rendezvous = rendezvous"""
    environ = {**knobs, **place, "MASTER_PORT": str(free_port())}
    process = start_script(tmp_path, environ, script=write_worker(tmp_path, change))
    read_until(process, "waiting")
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    rest_of(process, seconds=2)
    assert shell_code(process) == 143
    assert_quiet(tmp_path)


def test_a_signal_in_the_last_evaluation_ends_at_once(tmp_path, knobs):
    """One is enough. The models are on the disk already."""
    environ = {**knobs, "ITERATIONS": "1", "EVAL_STRIDE": "1", "MODEL_DIM": "128"}
    process = start_script(tmp_path, environ)
    read_until(process, "size_check:")
    process.send_signal(signal.SIGINT)
    rest = rest_of(process, seconds=5)
    assert shell_code(process) == 130 and "final_int8" not in rest
    assert (tmp_path / "final_model.int8.ptz").exists()
    assert_quiet(tmp_path)


def test_a_signal_to_torchrun_and_its_ranks_saves_however_long_the_disk_takes(tmp_path, knobs):
    """So a cluster stops a job. torchrun's copy reaches the ranks while rank 0 is writing the
    checkpoint, after the last step."""
    change = """
def fsync(fd, sync=os.fsync):
    time.sleep(0.7)
    sync(fd)

os.fsync = fsync"""
    worker = write_worker(tmp_path, change)
    agent = start_script(tmp_path, {**knobs, **ENDLESS}, ranks=2, script=worker)
    read_until(agent, "step:10/")
    ranks = ranks_of(agent)
    for pid in ranks:
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.2)
    agent.terminate()
    lines = rest_of(agent, seconds=20).splitlines()
    assert_gone(ranks)
    way_on = "to go on, set RESUME=auto and RUN_ID=test"
    step = int(re.fullmatch(rf"stopped: signal:15 step:(\d+)/1000000: {way_on}", lines[-1])[1])
    assert saved_in(tmp_path) == [f"step_{step:08d}.pt"]
    assert_only_torchruns_words(tmp_path)


def assert_only_torchruns_words(folder: Path) -> None:
    """torchrun has a traceback of its own at a Ctrl-C; its ranks have none."""
    errors = (folder / "stderr.txt").read_text()
    assert "train_gpt.py" not in errors.replace("train_gpt.py FAILED", ""), errors


def test_ctrl_c_under_torchrun_in_the_last_evaluation_ends_all_ranks(tmp_path, knobs):
    environ = {**knobs, "ITERATIONS": "1", "EVAL_STRIDE": "1", "MODEL_DIM": "128"}
    agent = start_script(tmp_path, environ, ranks=2)
    read_until(agent, "size_check:")
    ranks = ranks_of(agent)
    agent.send_signal(signal.SIGINT)
    rest = rest_of(agent, seconds=10)
    assert_gone(ranks)
    assert len(ranks) == 2 and "final_int8" not in rest
    assert_only_torchruns_words(tmp_path)


def test_ranks_whose_torchrun_was_killed_save_and_end(tmp_path, knobs):
    agent = start_script(tmp_path, {**knobs, **ENDLESS}, ranks=2)
    read_until(agent, "step:10/")
    ranks = ranks_of(agent)
    try:
        agent.kill()
        lines = rest_of(agent, seconds=20).splitlines()  # until the last rank has closed the pipe
        assert_gone(ranks)
    finally:
        for pid in ranks:
            if os.path.exists(f"/proc/{pid}"):
                os.kill(pid, signal.SIGKILL)
    way_on = "to go on, set RESUME=auto and RUN_ID=test"
    step = int(re.fullmatch(rf"stopped: signal:15 step:(\d+)/1000000: {way_on}", lines[-1])[1])
    assert saved_in(tmp_path) == [f"step_{step:08d}.pt"]
    assert_quiet(tmp_path)
