"""Learning rate and momentum as functions of step and time."""

import time

import pytest
import torch
from conftest import ALONE
from torch import nn

from train_gpt import (
    Hyperparameters,
    Muon,
    Stopwatch,
    lr_factor,
    muon_momentum,
    set_schedule,
)


def factor(step, elapsed_ms=0.0, **knobs):
    return lr_factor(Hyperparameters(**knobs), step, elapsed_ms)


def test_warmdown_by_steps():
    knobs = dict(iterations=100, warmdown_iters=20, max_wallclock_seconds=0.0)
    assert [factor(s, 1e9, **knobs) for s in (0, 79, 80, 90, 99, 100, 150)] == pytest.approx(
        [1, 1, 1, 0.5, 0.05, 0, 0]
    )
    knobs["iterations"] = 10  # shorter than its warmdown
    assert [factor(s, **knobs) for s in (0, 5, 9)] == pytest.approx([0.5, 0.25, 0.05])
    assert factor(0, iterations=0, warmdown_iters=5, max_wallclock_seconds=0.0) == 0


def test_warmdown_by_time():
    """At 100 ms a step, 20 steps of warmdown are the last 2 of 10 seconds."""
    knobs = dict(iterations=1000, warmdown_iters=20, max_wallclock_seconds=10.0)
    steps = (1, 79, 80, 90, 99, 100, 120)
    assert [factor(s, 100.0 * s, **knobs) for s in steps] == pytest.approx(
        [1, 1, 1, 0.5, 0.05, 0, 0]
    )
    assert factor(0, 0.0, **knobs) == 1
    assert factor(0, 10_000.0, **knobs) == 0
    assert factor(0, 9_990.0, **knobs) == pytest.approx(10 / (20 * 9_990))  # step 0 counts as one


@pytest.mark.parametrize("warmdown", [0, -5])
def test_no_warmdown(warmdown):
    for cap in (0.0, 10.0):
        for step, elapsed in ((0, 0.0), (50, 1e9), (100, 0.0)):
            assert factor(step, elapsed, warmdown_iters=warmdown, max_wallclock_seconds=cap) == 1.0


def test_warmdown_over_a_fraction_of_the_run():
    """In steps or in time, whatever ends first; WARMDOWN_ITERS does not matter then."""
    knobs = dict(warmdown_frac=0.2, iterations=100, max_wallclock_seconds=0.0, warmdown_iters=0)
    steps = (0, 79, 80, 90, 99, 100)
    expected = pytest.approx([1, 1, 1, 0.5, 0.05, 0])
    assert [factor(s, 1e9, **knobs) for s in steps] == expected
    knobs |= dict(max_wallclock_seconds=10.0, iterations=20_000, warmdown_iters=1200)
    assert [factor(s, 100.0 * s, **knobs) for s in steps] == expected  # the time ends first
    knobs["iterations"] = 100
    assert [factor(s, 1.0 * s, **knobs) for s in steps] == expected  # the steps end first
    assert factor(50, 5000.0, **{**knobs, "warmdown_frac": 1.0}) == pytest.approx(0.5)
    assert factor(0, warmdown_frac=0.5, iterations=0) == 0


def test_momentum_rises_in_a_straight_line():
    hp = Hyperparameters(muon_momentum_warmup_steps=10)
    assert [muon_momentum(hp, s) for s in (0, 5, 10, 99)] == pytest.approx([0.85, 0.9, 0.95, 0.95])
    assert muon_momentum(Hyperparameters(muon_momentum_warmup_steps=0), 0) == 0.95


def test_the_factor_scales_every_rate_from_its_full_value():
    params = [nn.Parameter(torch.zeros(2, 2)) for _ in range(3)]
    adam = torch.optim.Adam([dict(params=[params[0]], lr=0.6), dict(params=[params[1]], lr=0.008)])
    muon = Muon([params[2]], lr=0.04, momentum=0.95, backend_steps=5)
    for optimizer in (adam, muon):
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    for value in (0.5, 0.25):
        set_schedule([adam, muon], value, 0.9)
        rates = [group["lr"] for optimizer in (adam, muon) for group in optimizer.param_groups]
        assert rates == pytest.approx([0.6 * value, 0.008 * value, 0.04 * value])
    assert muon.param_groups[0]["momentum"] == 0.9


class SlowEvent:
    """A mark on a device whose work is done when somebody waits for it. Notes who waits for what:
    marks are numbered as they are recorded."""

    waits: list
    recorded = 0

    def record(self):
        self.number = SlowEvent.recorded
        SlowEvent.recorded += 1

    def synchronize(self):
        SlowEvent.waits.append(self.number)


def test_the_host_stays_one_step_ahead_of_the_device(monkeypatch):
    waits = SlowEvent.waits = []
    monkeypatch.setattr(torch.cpu, "Event", SlowEvent)
    monkeypatch.setattr(torch.cpu, "synchronize", lambda: waits.append("all"))
    watch = Stopwatch(ALONE)
    watch.start()
    for _ in range(4):
        watch.lap()
    assert waits == ["all", 0, 1, 2]  # never for the step in hand
    watch.pause()
    watch.start()
    watch.lap()
    assert waits == ["all", 0, 1, 2, "all", "all"]  # after a pause no mark is left to wait for


def test_the_stopwatch_stands_still_while_paused():
    watch = Stopwatch(ALONE)
    assert watch.elapsed_ms() == 0
    for _ in range(2):
        watch.start()
        time.sleep(0.02)
        watch.pause()
        time.sleep(0.05)
    assert 40 <= watch.elapsed_ms() < 90
    assert watch.report(4) == (
        f"train_time:{watch.elapsed_ms():.0f}ms step_avg:{watch.elapsed_ms() / 4:.2f}ms"
    )
