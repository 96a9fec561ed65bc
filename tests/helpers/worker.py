"""Run the trainer with changes: python worker.py [CHANGE ...]. Each change is a function below."""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt


# ---- test_checkpoints.py -------------------------------------------------------------------------
def signal_one_rank() -> None:
    """Rank 1 gets SIGINT in step 3."""

    def train_step(state, train_step=train_gpt.train_step):
        if state.step == 2 and state.runtime.rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return train_step(state)

    train_gpt.train_step = train_step


def kill_rank_1() -> None:
    """Rank 1 kills itself in step 12. After the restart it is late, and rank 0 must not find its
    old address. In step 18 all ranks wait for a signal."""
    first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    is_last = os.environ["RANK"] == "1"
    if is_last and not first_start:
        time.sleep(2)

    def train_step(state, train_step=train_gpt.train_step):
        if is_last and first_start and state.step == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.step == 17:
            state.runtime.log("waiting")
            while not state.signum:
                time.sleep(0.05)
        return train_step(state)

    train_gpt.train_step = train_step


# ---- test_edits.py -------------------------------------------------------------------------------
def dead_parameters() -> None:
    """The MLP has parameters that the loss does not depend on."""

    class DeadMLP(train_gpt.MLP):
        def __init__(self, hp: train_gpt.Hyperparameters) -> None:
            super().__init__(hp)
            self.dead = torch.nn.Parameter(torch.zeros(3))
            self.dead_matrix = torch.nn.Parameter(torch.zeros(3, 4))

    train_gpt.MLP = DeadMLP


# ---- test_main.py --------------------------------------------------------------------------------
def print_rank() -> None:
    """Print to a stdout that keeps its lines until it is flushed, as a pipe's."""
    sys.stdout.reconfigure(line_buffering=False, write_through=False)
    print("from rank", os.environ["RANK"])


# ---- test_runtime.py -----------------------------------------------------------------------------
def another_script() -> None:
    """The script is the file that SCRIPT names, if it is set."""
    train_gpt.__file__ = os.environ.get("SCRIPT", train_gpt.__file__)


def knob_of_rank_1() -> None:
    """The script of rank 1 has another knob."""
    if os.environ["RANK"] == "1":
        kinds = {"__annotations__": {"new_knob": int}, "new_knob": 3}
        edited = dataclass(frozen=True)(type("Edited", (train_gpt.Hyperparameters,), kinds))
        train_gpt.Hyperparameters = edited


def nan_at_the_cap() -> None:
    """In step 4 rank 1's loss is nan, and rank 0's clock passes the cap."""

    def train_step(state, train_step=train_gpt.train_step):
        loss = train_step(state)
        if state.step == 3 and state.runtime.rank == 0:
            state.stopwatch.before_ms += 10**6
        return loss + torch.nan if state.step == 3 and state.runtime.rank == 1 else loss

    train_gpt.train_step = train_step


def differing_replicas() -> None:
    """After the training a weight of rank 1 differs from rank 0's."""

    def train(state, validation, train=train_gpt.train):
        signum = train(state, validation)
        next(state.gpt.parameters()).data[0, 3] += 1e-5 * state.runtime.rank
        return signum

    train_gpt.train = train


def clock_of_steps() -> None:
    """Time passes in steps, twice as fast on rank 1, in validations and while a file is written."""
    now = 1000.0

    def let_pass(function: Callable, seconds: float) -> Callable:
        def changed(*arguments):
            nonlocal now
            now += seconds
            return function(*arguments)

        return changed

    train_gpt.time = SimpleNamespace(perf_counter=lambda: now)
    step_seconds = (1 + int(os.environ["RANK"])) / 16
    train_gpt.train_step = let_pass(train_gpt.train_step, step_seconds)
    train_gpt.write_file = let_pass(train_gpt.write_file, 100)
    train_gpt.evaluate = let_pass(train_gpt.evaluate, 100)


def fault_of_rank_2() -> None:
    """Rank 2 raises an error in step 4."""

    def train_step(state, train_step=train_gpt.train_step):
        assert state.runtime.rank != 2 or state.step < 3, "the fault of rank 2"
        return train_step(state)

    train_gpt.train_step = train_step


# ---- test_signals.py -----------------------------------------------------------------------------
def signal_in_write() -> None:
    """SIGTERM comes while final_model.pt is written."""

    def write_file(path, data, log, write_file=train_gpt.write_file):
        if path.name == "final_model.pt":
            os.kill(os.getpid(), signal.SIGTERM)
        return write_file(path, data, log)

    train_gpt.write_file = write_file


def signal_in_evaluate() -> None:
    """SIGTERM comes in the last validation."""

    def evaluate(*arguments, evaluate=train_gpt.evaluate):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*arguments)

    train_gpt.evaluate = evaluate


def ignore_sighup() -> None:
    """As nohup does."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def wait_for_closing() -> None:
    """The second step writes the file `ready` and waits until the terminal is closed. (On several
    ranks the warm-up takes the first one.)"""
    calls = count()

    def train_step(state, train_step=train_gpt.train_step):
        if next(calls) == 1:
            open("ready", "w").close()
            while os.isatty(1):
                time.sleep(0.01)
        return train_step(state)

    train_gpt.train_step = train_step


if __name__ == "__main__":
    for change in sys.argv[1:]:
        globals()[change]()
    del sys.argv[1:]
    train_gpt.main()
