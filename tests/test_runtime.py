"""Devices, ranks that differ or fail, the wallclock cap on several ranks, the clock, the log."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import runs
import torch
from runs import SCRIPT, failed, finished, run_here, run_ranks
from scripts import read
from texts import write_shard

import train_gpt
from train_gpt import Hyperparameters, Log, open_runtime


@pytest.mark.parametrize("world_size", ["0", "3", "16"])
def test_a_world_size_that_does_not_divide_the_slots(tmp_path, knobs, world_size):
    environ = {**knobs, "BATCH_SLOTS": "2", "RANK": "0", "WORLD_SIZE": world_size}
    failed(run_here(tmp_path, environ), f"WORLD_SIZE={world_size}", "BATCH_SLOTS=2")


def test_what_a_job_left_over_and_a_missing_gpu_are_one_error(tmp_path, knobs):
    words = {"RANK=0 WORLD_SIZE=1": "torchrun", "LOCAL_RANK=99 DEVICE=cuda": "no GPU 99"}
    for left, word in words.items():
        error = failed(run_here(tmp_path, {**knobs, **read(left)}), word)
        assert error.count("\n") == 0


def test_inductors_mix_order_reduction_is_off():
    """The script sets a variable, which Inductor reads when it is imported."""
    program = "import train_gpt as t; t.open_runtime(t.Hyperparameters(device='cpu')); "
    program += "from torch._inductor.config import triton as t; "
    program += "print(getattr(t, 'mix_order_reduction', 'not yet'))"
    settings = {"cwd": runs.ROOT, "env": runs.process_environ({}), "capture_output": True}
    result = subprocess.run([sys.executable, "-c", program], text=True, **settings)
    assert result.stdout in ("False\n", "not yet\n"), result.stderr


@pytest.mark.parametrize("has_bf16", [True, False])
def test_activations_are_bf16_if_the_gpu_has_it(monkeypatch, has_bf16):
    """T4 and V100 only emulate bf16, which is slow."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else the CPU's case would change the threads
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: including_emulation or has_bf16,
    )
    wanted = torch.bfloat16 if has_bf16 else torch.float32
    assert open_runtime(Hyperparameters()).dtype == wanted
    assert open_runtime(Hyperparameters(device="cpu")).dtype == torch.float32


def another_script() -> None:
    """Let train_gpt take the file that SCRIPT names, if it is set, for its own source."""
    train_gpt.__file__ = os.environ.get("SCRIPT", train_gpt.__file__)


@pytest.mark.parametrize(
    "own, word",
    [
        ({"TRAIN_LOG_EVERY": "15", "SEED": "2"}, "SEED, TRAIN_LOG_EVERY"),
        ({"DATA_PATH": "other"}, "data"),
        ({"TOKENIZER_PATH": "other/small.model"}, "data"),
        ({"SCRIPT": "other/edited.py"}, "the script"),
    ],
)
def test_an_error_names_what_differs_between_ranks(tmp_path, dataset, knobs, own, word):
    """Two nodes, for example, may have different files."""
    other = shutil.copytree(dataset, tmp_path / "other")
    write_shard(other / "fineweb_train_000001.bin", range(9))
    (other / "small.model").write_bytes(b"another tokenizer")
    (other / "edited.py").write_text("another script")
    environ = {**knobs, "TRAIN_LOG_EVERY": "12"}
    for result in run_ranks(tmp_path, environ, 2, edit=another_script, own={1: own}):
        failed(result, word)
        assert result.stdout == ""


def test_a_log_file_that_cannot_be_opened_is_an_error_of_all_ranks(tmp_path, knobs):
    """All ranks fail at once, without waiting for rank 0."""
    for rank in run_ranks(tmp_path, {**knobs, "OUTPUT_DIR": "/dev/null"}, 2):
        assert failed(rank, "OUTPUT_DIR='/dev/null'").count("\n") == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_log_file_on_a_full_disk_ends_no_run(capsys):
    log = Log(file=open("/dev/full", "w", buffering=1))
    log("a line")
    assert capsys.readouterr().out == "a line\n"
    with contextlib.suppress(OSError):
        log.file.close()


def differing_replicas() -> None:
    """A weight of rank 1 changes before and after each validation, and each rank prints to an ASCII
    stdout that is buffered until a flush, as for a pipe."""
    sys.stdout.reconfigure(encoding="ascii", line_buffering=False, write_through=False)

    def change(gpt, *_) -> None:
        print("\xe9 from rank", os.environ["RANK"])
        next(gpt.parameters()).data[0, 3] += 1e-5 * int(os.environ["RANK"])

    runs.call_before(pytest.MonkeyPatch(), train_gpt.GPT, "train", change)


def test_replicas_that_differ_are_a_warning_and_what_any_rank_prints_is_kept(tmp_path, knobs):
    """With PYTHONIOENCODING=ascii, other letters are escaped."""
    first, second = run_ranks(tmp_path, {**knobs, "ITERATIONS": "1"}, 2, edit=differing_replicas)
    (warning,) = [line for line in finished(first) if line.startswith("WARNING")]
    assert "replicas" in warning and "\\xe9 from rank 1\n" in second.stdout


def clock_of_steps() -> None:
    """Let time pass in validations, while a file is written and in steps, twice as fast on rank 1.
    Make the loss of rank 1 nan in step 16."""
    now, rank = 1000.0, int(os.environ["RANK"])

    def train_step(state, train_step=train_gpt.train_step):
        loss = train_step(state)
        return loss + torch.nan if state.step == 15 and rank == 1 else loss

    def let_pass(place: object, name: str, seconds: float) -> None:
        def wait(*_) -> None:
            nonlocal now
            now += seconds

        runs.call_before(pytest.MonkeyPatch(), place, name, wait)

    time.perf_counter = lambda: now
    train_gpt.train_step = train_step
    let_pass(train_gpt, "train_step", (1 + rank) / 16)
    let_pass(os, "fsync", 100)
    let_pass(train_gpt.GPT, "train", 50)  # called before and after each validation


def test_the_wallclock_cap_stops_all_ranks_after_the_same_step(tmp_path, knobs):
    """Rank 0's clock, paused in checkpoints and validations, decides. Learning rates follow it,
    too, so that all ranks keep the same weights. The last loss, a mean over ranks, may be nan."""
    settings = "ITERATIONS=100000 MAX_WALLCLOCK_SECONDS=1 TRAIN_LOG_EVERY=16 CHECKPOINT_EVERY=6"
    environ = {**knobs, **read(f"{settings} VAL_LOSS_EVERY=8 WARMDOWN_ITERS=12")}
    result, second = run_ranks(tmp_path, environ, 2, edit=clock_of_steps)
    lines = finished(result)
    assert second.returncode == 0
    assert any(line.startswith("step:16/100000 train_loss:nan ") for line in lines)
    (stop,) = [i for i, line in enumerate(lines) if line.startswith("stopping_early")]
    assert lines[stop] == "stopping_early: wallclock_cap train_time:1000ms step:16/100000"
    assert lines[stop - 1].startswith("step:16/100000 val_loss:")
    assert lines[stop - 1].endswith(" train_time:1000ms step_avg:62.50ms")
    assert "replicas:identical" in lines
    saved = [line.split()[1] for line in lines if line.startswith("checkpoint:")]
    assert saved == ["step:6", "step:12", "step:16"]  # the last step, too
    assert lines[-2].endswith(" eval_time:100000ms")
    result = json.loads((tmp_path / "final_result.json").read_text())
    assert (result["train_ms"], result["eval_ms"]) == (1000, 100_000)


@pytest.mark.parametrize("cap", ["0.11", "0.15", "4.001", "4.1"])
def test_a_run_ends_within_a_step_of_the_cap_on_a_late_device(tmp_path, knobs, monkeypatch, cap):
    """A step takes 10 ms of the host and 100 ms of the device, which starts it after the one before
    has ended. The host never waits for the current step, except near the cap."""
    now, done, waits = 0.0, 0.0, 0

    def train_step(state: train_gpt.TrainingState, take: Callable = train_gpt.train_step):
        nonlocal now, done
        now += 0.01
        done = max(done, now) + 0.1
        return take(state)

    def wait(end: float) -> None:
        nonlocal now, waits
        waits += end == done
        now = max(now, end)

    def event() -> SimpleNamespace:
        mark = SimpleNamespace(record=lambda: setattr(mark, "end", done))
        mark.synchronize = lambda: wait(mark.end)
        return mark

    monkeypatch.setattr(train_gpt, "train_step", train_step)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(torch.cpu, "Event", event)
    monkeypatch.setattr(torch.cpu, "synchronize", lambda: wait(done))
    environ = {**knobs, "MAX_WALLCLOCK_SECONDS": cap, "ITERATIONS": "99", "TRAIN_LOG_EVERY": "0"}
    log = finished(run_here(tmp_path, {**environ, "VAL_LOSS_EVERY": "0", "WARMUP_STEPS": "0"}))
    (line,) = [line for line in log if line.startswith("stopping_early")]
    elapsed_ms, steps = map(int, re.search(r":(\d+)ms step:(\d+)/", line).groups())
    assert 0 <= elapsed_ms - 1000 * float(cap) < 100
    assert waits < steps / 2 or float(cap) < 1


def test_only_rank_0_writes_files_and_ranks_need_not_share_any(tmp_path, dataset, knobs):
    """As on two nodes, rank 1 is the first of its node, and has its own copy of the data."""
    data = shutil.copytree(dataset, tmp_path / "copy")
    own = {"LOCAL_RANK": "0", "RUN_ID": "other", "OUTPUT_DIR": "other"}
    own |= {"DATA_PATH": str(data), "TOKENIZER_PATH": str(data / "small.model")}
    first, second = run_ranks(tmp_path, knobs, 2, own={1: own})
    assert (second.returncode, second.stdout) == (0, "")
    lines = finished(first)
    assert "world_size:2 grad_accum_steps:4" in lines and "replicas:identical" in lines
    files = {"logs", "final_model.pt", "final_model.int8.ptz", "final_result.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"copy", *files}


HAS_LO = "lo" in [name for _, name in socket.if_nameindex()]


@pytest.mark.skipif(not HAS_LO, reason="needs an interface called lo")
def test_torchrun_starts_two_nodes(tmp_path, knobs):
    """Each node has an agent. torchrun chooses the first node, which prints the log."""
    command = [runs.TORCHRUN, "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d"]
    command += [f"--rdzv_endpoint=127.0.0.1:{runs.free_port()}", SCRIPT]
    own = {number: {"OUTPUT_DIR": f"node{number}"} for number in (0, 1)}
    agents = run_ranks(tmp_path, {**knobs, "GLOO_SOCKET_IFNAME": "lo"}, 2, command, own)
    assert [agent.returncode for agent in agents] == [0, 0], agents
    (log,) = filter(None, (agent.stdout for agent in agents))
    assert {"world_size:2 grad_accum_steps:4", "replicas:identical"} < {*log.splitlines()}


def rank_2_fails() -> None:
    if os.environ["RANK"] == "2":
        train_gpt.GPT.forward = None


def test_a_rank_that_raises_takes_all_down(tmp_path, knobs):
    """An edited script, for example, may raise on one rank only."""
    results = run_ranks(tmp_path, knobs, 4, edit=rank_2_fails)
    assert [result.returncode for result in results] == [1, 1, 1, 1]
    assert "TypeError" in results[2].stderr.splitlines()[-1]


def test_the_host_stays_one_step_ahead_of_the_device(tmp_path, knobs, monkeypatch):
    """The test numbers the events in the device's queue, and lists in `waits` those that the host
    waits for. A validation waits for all, and leaves no event."""
    numbers, waits = iter(range(9)), []

    def event() -> SimpleNamespace:
        mark = SimpleNamespace(record=lambda: setattr(mark, "number", next(numbers)))
        mark.synchronize = lambda: waits.append(mark.number)
        return mark

    monkeypatch.setattr(torch.cpu, "Event", event)
    monkeypatch.setattr(torch.cpu, "synchronize", lambda: waits.append("all"))
    finished(run_here(tmp_path, {**knobs, "NUM_LAYERS": "1", "WARMUP_STEPS": "0"}))
    around = ["all", "all"]  # a pause and a start, or two pauses
    assert waits == [*around, 0, 1, *around, 3, 4, *around]  # never for the current step
