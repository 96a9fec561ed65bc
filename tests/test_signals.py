"""Signals: during the training they end the run after the current step, with a checkpoint; before
and after it, at once. (Signals to one of several ranks, and to torchrun: test_checkpoints.py.)"""

import json
import os
import signal
import time

import pytest
import torch
from runs import (
    ALONE,
    WORKER,
    finished,
    launch_command,
    run_here,
    run_ranks,
    send_signals,
    start_in_terminal,
)

import train_gpt
from train_gpt import Hyperparameters

ADVICE = "rerun this command with RESUME=auto RUN_ID=test"
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
QUICK = {"ITERATIONS": "2", "VAL_LOSS_EVERY": "0", "WARMUP_STEPS": "0", "NUM_LAYERS": "1"}


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_step_and_saves_and_further_ones_change_nothing(
    tmp_path, knobs, monkeypatch, number
):
    send_signals(monkeypatch, 4, number, *SIGNALS)
    result = run_here(tmp_path, {**knobs, "VAL_LOSS_EVERY": "0", "WARMUP_STEPS": "0"})
    assert (result.returncode, result.stderr) == (128 + number, "")
    last = result.stdout.splitlines()[-2:]
    path = "checkpoints/test.pt"
    assert last == [f"checkpoint:{path} step:4", f"stopped: signal:{number} step:4/6: {ADVICE}"]
    assert torch.load(tmp_path / path, weights_only=True)["step"] == 4
    assert not (tmp_path / "final_model.pt").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(tmp_path, knobs, monkeypatch, number):
    """By nohup, or by a script's `train_gpt.py &`. Also after the training."""

    def export(*arguments, export=train_gpt.export):
        os.kill(os.getpid(), number)
        return export(*arguments)

    send_signals(monkeypatch, 1, number)
    monkeypatch.setattr(train_gpt, "export", export)
    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert finished(run_here(tmp_path, {**knobs, **QUICK}))
    finally:
        signal.signal(number, before)


def test_a_signal_during_a_validation_is_obeyed_after_the_next_step(tmp_path, knobs, monkeypatch):

    def evaluate(*arguments, evaluate=train_gpt.evaluate):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*arguments)

    monkeypatch.setattr(train_gpt, "evaluate", evaluate)
    result = run_here(tmp_path, {**knobs, **QUICK, "VAL_LOSS_EVERY": "1"})
    assert result.returncode == 143
    assert result.stdout.splitlines()[-1] == f"stopped: signal:15 step:1/2: {ADVICE}"
    assert torch.load(tmp_path / "checkpoints" / "test.pt", weights_only=True)["step"] == 1


def signal_in_write() -> None:
    """SIGTERM comes while final_model.pt is written."""

    def write_file(path, data, log, write_file=train_gpt.write_file):
        if path.name == "final_model.pt":
            os.kill(os.getpid(), signal.SIGTERM)
        return write_file(path, data, log)

    train_gpt.write_file = write_file


def test_a_signal_while_final_model_is_written_ends_the_run_when_all_is_written(tmp_path, knobs):
    (result,) = run_ranks(tmp_path, {**knobs, **QUICK}, 1, edit=signal_in_write)
    assert result.returncode == -signal.SIGTERM
    files = {"final_model.pt", "final_model.int8.ptz", "final_result.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"logs", *files}
    assert torch.load(tmp_path / "final_model.pt", weights_only=True)


def signal_in_evaluate() -> None:
    """SIGTERM comes in the last validation."""

    def evaluate(*arguments, evaluate=train_gpt.evaluate):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*arguments)

    train_gpt.evaluate = evaluate


def test_a_signal_in_the_last_validation_leaves_weights_and_artifact(tmp_path, knobs):
    """They are written before. The result has the knobs, not the scores."""
    (result,) = run_ranks(tmp_path, {**knobs, **QUICK}, 1, edit=signal_in_evaluate)
    assert result.returncode == -signal.SIGTERM
    files = {"final_model.pt", "final_model.int8.ptz", "final_result.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"logs", *files}
    assert json.loads((tmp_path / "final_result.json").read_text()).keys() == {"knobs"}
    state = train_gpt.new_state(Hyperparameters.from_env({**knobs, **QUICK}), ALONE)
    train_gpt.load_weights(state.gpt, (tmp_path / "final_model.int8.ptz").read_bytes(), "it")


def test_ctrl_c_before_the_training_ends_without_a_traceback(tmp_path, knobs, monkeypatch):
    def warm_up(state):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(train_gpt, "warm_up", warm_up)
    result = run_here(tmp_path, knobs)
    assert (result.returncode, result.stderr) == (130, "")


@pytest.mark.parametrize(
    "changes, ranks, codes",
    [
        ([], 0, [129]),
        (["ignore_sighup"], 0, [0]),
        ([], 2, [1, 120]),  # torchrun's own: Python gives 120 without a stderr
    ],
    ids=["step", "nohup", "torchrun"],
)
def test_a_closed_terminal_loses_nothing(tmp_path, knobs, changes, ranks, codes):
    """A checkpoint is saved. If SIGHUP is ignored, the run goes on."""
    command = [*launch_command(ranks), WORKER, "wait_for_closing", *changes]
    environ = {**knobs, "WARMUP_STEPS": "0"}
    process, master = start_in_terminal(tmp_path, environ, command)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None, os.read(master, 9999).decode()
        time.sleep(0.05)
    os.close(master)
    assert process.wait(timeout=240) in codes
    lines = (tmp_path / "logs" / "test.txt").read_text().splitlines()
    if codes == [0]:
        assert lines[-1].startswith("final_int8_zlib_roundtrip_exact ")
    else:
        assert lines[-1].startswith("stopped: signal:") and lines[-1].endswith(ADVICE)
        assert (tmp_path / "checkpoints" / "test.pt").is_file()
