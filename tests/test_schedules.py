"""Learning rate and momentum as functions of step and time. The host and the GPU's queue."""

from types import SimpleNamespace

import pytest
import torch
from conftest import ALONE

import train_gpt
from train_gpt import Hyperparameters, Stopwatch, lr_factor


def factor(step, elapsed_ms=0.0, **knobs):
    return lr_factor(Hyperparameters(**knobs), step, elapsed_ms)


@pytest.mark.baseline
def test_warmdown_by_steps():
    knobs = dict(iterations=100, warmdown_iters=20, max_wallclock_seconds=0.0)
    steps = (0, 79, 80, 85, 90, 99, 100, 150)
    assert [factor(s, 1e9, **knobs) for s in steps] == pytest.approx(
        [1, 1, 1, 0.75, 0.5, 0.05, 0, 0]
    )
    knobs["iterations"] = 10  # shorter than its warmdown
    assert [factor(s, **knobs) for s in (0, 5, 9)] == pytest.approx([0.5, 0.25, 0.05])
    assert factor(99, **{**knobs, "warmdown_iters": 0}) == 1


@pytest.mark.baseline
def test_warmdown_by_time():
    """At 100 ms a step, 20 steps of warmdown are the last 2 of 10 seconds."""
    knobs = dict(iterations=1000, warmdown_iters=20, max_wallclock_seconds=10.0)
    steps = (1, 79, 80, 85, 90, 99, 100, 120)
    factors = [factor(s, 100.0 * s, **knobs) for s in steps]
    assert factors == pytest.approx([1, 1, 1, 0.75, 0.5, 0.05, 0, 0])
    assert factor(0, 0.0, **knobs) == 1
    assert factor(99, 9_900.0, **{**knobs, "warmdown_iters": 0}) == 1


@pytest.mark.baseline
def test_warmdown_over_a_fraction_of_the_run():
    """In steps or in time, whichever ends first. WARMDOWN_ITERS is ignored."""
    knobs = dict(warmdown_frac=0.2, iterations=100, max_wallclock_seconds=0.0, warmdown_iters=0)
    steps = (0, 79, 80, 85, 90, 99, 100)
    expected = pytest.approx([1, 1, 1, 0.75, 0.5, 0.05, 0])
    assert [factor(s, 1e9, **knobs) for s in steps] == expected
    knobs |= dict(max_wallclock_seconds=10.0, iterations=20_000, warmdown_iters=1200)
    assert [factor(s, 100.0 * s, **knobs) for s in steps] == expected  # the time ends first
    knobs["iterations"] = 100
    assert [factor(s, 1.0 * s, **knobs) for s in steps] == expected  # the steps end first


@pytest.mark.baseline
def test_momentum_rises_in_a_straight_line():
    hp = Hyperparameters(muon_momentum_warmup_steps=10)
    assert [train_gpt.muon_momentum(hp, s) for s in (0, 5, 10, 99)] == pytest.approx(
        [0.85, 0.9, 0.95, 0.95]
    )
    assert train_gpt.muon_momentum(Hyperparameters(muon_momentum_warmup_steps=0), 0) == 0.95


def test_the_host_stays_one_step_ahead_of_the_device(monkeypatch):
    """Events in the device's queue are numbered in their order. waits: for which of them the host
    waits."""
    numbers, waits = iter(range(9)), []

    def event() -> SimpleNamespace:
        mark = SimpleNamespace(record=lambda: setattr(mark, "number", next(numbers)))
        mark.synchronize = lambda: waits.append(mark.number)
        return mark

    monkeypatch.setattr(torch.cpu, "Event", event)
    monkeypatch.setattr(torch.cpu, "synchronize", lambda: waits.append("all"))
    watch = Stopwatch(ALONE)
    watch.start()
    for _ in range(4):
        watch.lap()
    assert waits == ["all", 0, 1, 2]  # never for the current step
    watch.pause()
    watch.start()
    watch.lap()
    assert waits == ["all", 0, 1, 2, "all", "all"]  # after a pause no event is left
