"""Signals: during the training they end the run after the current step, with a checkpoint; before
and after it, at once. (Signals to one of several ranks, and to torchrun: test_checkpoints.py.)"""

import itertools
import json
import os
import re
import signal
import sys
import zlib
from functools import partial

import pytest
import torch
from runs import SCRIPT, call_before, finished, run_here, run_ranks, send_signals, start_in_terminal

import train_gpt
from train_gpt import GPT, Hyperparameters

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]
QUICK = {"ITERATIONS": "2", "VAL_LOSS_EVERY": "0", "WARMUP_STEPS": "0", "NUM_LAYERS": "1"}


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_step_and_saves_and_further_ones_change_nothing(
    tmp_path, knobs, monkeypatch, number
):
    send_signals(monkeypatch, 4, number, *SIGNALS)
    result = run_here(tmp_path, {**knobs, "VAL_LOSS_EVERY": "0", "WARMUP_STEPS": "0"})
    assert (result.returncode, result.stderr) == (128 + number, "")
    saved, stopped = result.stdout.splitlines()[-2:]
    assert saved == "checkpoint:checkpoints/test.pt step:4" and "RESUME=auto RUN_ID=test" in stopped
    assert torch.load(tmp_path / "checkpoints" / "test.pt", weights_only=True)["step"] == 4
    assert not (tmp_path / "final_model.pt").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(tmp_path, knobs, monkeypatch, number):
    """nohup and a script's `train_gpt.py &` ignore signals. This lasts after the training, too."""
    send_signals(monkeypatch, 1, number)
    call_before(monkeypatch, GPT, "eval", lambda *_: signal.raise_signal(number))
    before = signal.signal(number, signal.SIG_IGN)
    result = run_here(tmp_path, {**knobs, **QUICK})
    signal.signal(number, before)
    finished(result)


def signal_in(name: str) -> None:
    """SIGTERM comes in the export, or when the last validation begins."""
    place = GPT if name == "train" else train_gpt
    call_before(pytest.MonkeyPatch(), place, name, lambda *_: signal.raise_signal(signal.SIGTERM))


@pytest.mark.parametrize("name", ["quantize_state_dict_int8", "train"])
def test_a_signal_after_the_training_leaves_weights_and_artifact(tmp_path, knobs, name):
    """Both files are written first. Then the last validation begins, and the signal ends it. The
    result has the knobs and checksums, but no score."""
    (result,) = run_ranks(tmp_path, {**knobs, **QUICK}, 1, edit=partial(signal_in, name))
    waits = name != "train"  # for the end of the export, and says so at once
    assert result.returncode == (143 if waits else -signal.SIGTERM)
    assert ("signal:15: stopping" in result.stdout) == ("score.py" in result.stdout) == waits
    assert "val_loss:" not in result.stdout
    files = ("final_model.pt", "final_model.int8.ptz")
    assert {path.name for path in tmp_path.iterdir()} == {"logs", "final_result.json", *files}
    facts = json.loads((tmp_path / "final_result.json").read_text())
    assert facts["knobs"]["num_layers"] == 1 and "val_loss" not in facts
    gpt = GPT(Hyperparameters.from_env({**knobs, **QUICK}), torch.float32)
    for file in files:
        data = (tmp_path / file).read_bytes()
        assert facts["crc32"][file] == zlib.crc32(data)
        train_gpt.load_weights(gpt, data, file)


def signal_rank_1() -> None:
    """Rank 1 gets SIGTERM while rank 0 exports."""
    if os.environ["RANK"] == "1":
        call_before(pytest.MonkeyPatch(), train_gpt, "finish", lambda *_: signal.raise_signal(15))


def test_a_signal_to_one_rank_in_the_export_ends_all(tmp_path, knobs):
    results = run_ranks(tmp_path, {**knobs, **QUICK}, 2, edit=signal_rank_1)
    assert [result.returncode for result in results] == [143, 143]
    assert results[0].stdout.splitlines()[-1].startswith("stopped: signal:15: not scored")


def test_a_signal_ends_the_scoring_also_as_pid_1(tmp_path, knobs, monkeypatch):
    """The first process of a container gets no signals without a handler of its own."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    call_before(monkeypatch, train_gpt, "evaluate", lambda *_: signal.raise_signal(15))
    assert run_here(tmp_path, {**knobs, **QUICK}).returncode == 143


def test_ctrl_c_before_the_training_ends_without_a_traceback(tmp_path, knobs, monkeypatch):
    """The signal comes in the warm-up."""
    call_before(monkeypatch, GPT, "forward", lambda *_: signal.raise_signal(signal.SIGINT))
    result = run_here(tmp_path, knobs)
    assert (result.returncode, result.stderr) == (130, "")


def test_a_closed_terminal_loses_nothing(tmp_path, knobs):
    environ = {**knobs, **QUICK, "ITERATIONS": "100000"}
    process, terminal = start_in_terminal(tmp_path, environ, [sys.executable, SCRIPT])
    with open(terminal, "rb", buffering=0) as lines:
        status = rb"tokens/s, step:1/100000\r\x1b\[Kstep:2/"  # cleared before the next line
        assert any(re.search(status, line) for line in itertools.islice(lines, 20))
    assert process.wait(timeout=240) == 129
    last = (tmp_path / "logs" / "test.txt").read_text().splitlines()[-1]
    assert last.startswith("stopped: signal:1 step:")
    assert (tmp_path / "checkpoints" / "test.pt").is_file()
