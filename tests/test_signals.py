"""How signals end a run: in training after the step in hand and with a checkpoint, elsewhere at
once. (SIGTERM to torchrun: test_checkpoints.py.)"""

import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ALONE, make_state, run_here, run_ranks, write_worker

import train_gpt
from train_gpt import Hyperparameters, StopSignal, Validation

GO_ON = "to go on, set RESUME=auto and RUN_ID=test"


def send_at(monkeypatch, step: int, number: int) -> None:
    """Let this process get the signal `number` while it takes a step."""

    def train_step(state, train_step=train_gpt.train_step):
        if state.step + 1 == step:
            os.kill(os.getpid(), number)
        return train_step(state)

    monkeypatch.setattr(train_gpt, "train_step", train_step)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_in_training_ends_the_step_and_saves(tmp_path, knobs, monkeypatch, number):
    send_at(monkeypatch, 4, number)
    result = run_here(tmp_path, {**knobs, "VAL_LOSS_EVERY": "0", "WARMUP_STEPS": "0"})
    assert (result.returncode, result.stderr) == (128 + number, "")
    last = result.stdout.splitlines()[-2:]
    path = "checkpoints/test.pt"
    assert last == [f"checkpoint:{path} step:4", f"stopped: signal:{number} step:4/6: {GO_ON}"]
    assert torch.load(tmp_path / path, weights_only=True)["step"] == 4
    assert not (tmp_path / "final_model.pt").exists()


def test_a_second_signal_ends_at_once_unless_it_comes_within_a_second(monkeypatch):
    """Sooner it is torchrun's copy of a signal that went to all processes."""
    codes, stop, times = [], StopSignal(), iter([50.0, 50.1, 51.0, 51.1])
    monkeypatch.setattr(train_gpt, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(train_gpt.os, "_exit", codes.append)
    for _ in range(3):
        stop.handle(signal.SIGTERM, None)
    assert stop.signum == signal.SIGTERM and codes == []
    stop.handle(signal.SIGINT, None)
    assert codes == [130]


def test_under_nohup_the_closing_of_the_terminal_does_nothing():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    StopSignal().set_action(signal.SIG_DFL)
    after = [signal.getsignal(number) for number in numbers]
    for number in numbers:
        signal.signal(number, before[number])
    assert after == [signal.SIG_DFL, signal.SIG_DFL, signal.SIG_IGN]


def test_a_signal_in_a_validation_is_obeyed_without_another_step(tmp_path, knobs):
    """At step 0, in the first of several batches."""
    environ = {**knobs, "OUTPUT_DIR": str(tmp_path), "VAL_BATCH_SIZE": "256"}
    hp = Hyperparameters.from_env(environ)
    state = make_state(hp, replace(ALONE, stop=StopSignal()))
    batches = []

    def hear(model, inputs):
        batches.append(len(inputs[0]))
        state.runtime.stop.handle(signal.SIGTERM, None)

    state.gpt.register_forward_pre_hook(hear)
    assert train_gpt.train(state, Validation(hp)) == signal.SIGTERM
    assert state.step == 0 and len(batches) == 1
    assert (tmp_path / "checkpoints" / "test.pt").exists()


def test_a_signal_on_one_rank_stops_all_after_the_same_step(tmp_path, knobs):
    change = """
def train_step(state, train_step=train_gpt.train_step):
    if state.step == 2 and state.runtime.rank == 1:
        os.kill(os.getpid(), 2)
    return train_step(state)

train_gpt.train_step = train_step"""
    environ = {**knobs, "VAL_LOSS_EVERY": "0"}
    first, second = run_ranks(tmp_path, environ, 2, [write_worker(tmp_path, change)])
    assert (first.returncode, second.returncode) == (130, 130)
    assert first.stdout.splitlines()[-1] == f"stopped: signal:2 step:3/6: {GO_ON}"
    assert "Traceback" not in first.stderr + second.stderr


def test_a_signal_after_the_training_ends_at_once(tmp_path, knobs, monkeypatch):
    """The weights are on the disk by then."""
    seen = []

    def validate(state, validation, validate=train_gpt.validate):
        seen.append((signal.getsignal(signal.SIGTERM), (tmp_path / "final_model.pt").exists()))
        return validate(state, validation)

    monkeypatch.setattr(train_gpt, "validate", validate)
    environ = {**knobs, "ITERATIONS": "1", "VAL_LOSS_EVERY": "0"}
    assert run_here(tmp_path, environ).returncode == 0
    assert seen == [(signal.SIG_DFL, True)]
