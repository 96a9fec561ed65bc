"""Learning rate and momentum as functions of step and time."""

import pytest

from train_gpt import Hyperparameters, lr_factor, muon_momentum

pytestmark = pytest.mark.baseline
BY_STEPS = {"iterations": 100, "max_wallclock_seconds": 0.0, "warmdown_iters": 20}
BY_TIME = {"iterations": 1000, "max_wallclock_seconds": 10.0, "warmdown_iters": 20}


def test_warmdown_over_the_last_fifth_of_a_run():
    steps = (0, 1, 79, 80, 85, 90, 99, 100, 120)
    for knobs, step_ms in [
        (BY_STEPS, 1e9),
        (BY_TIME, 100.0),  # 20 steps of warmdown take the last 2 of 10 seconds
        ({**BY_STEPS, "warmdown_frac": 0.2, "warmdown_iters": 0}, 1e9),
        ({**BY_TIME, "warmdown_frac": 0.2, "warmdown_iters": 1200}, 100.0),  # the time ends first
        ({**BY_TIME, "warmdown_frac": 0.2, "iterations": 100}, 1.0),  # the steps end first
    ]:
        factors = [lr_factor(Hyperparameters(**knobs), step, step * step_ms) for step in steps]
        assert factors == pytest.approx([1, 1, 1, 1, 0.75, 0.5, 0.05, 0, 0]), knobs


def test_a_run_shorter_than_its_warmdown_and_one_without():
    short = Hyperparameters(**{**BY_STEPS, "iterations": 10})
    assert [lr_factor(short, s, 0.0) for s in (0, 5, 9)] == pytest.approx([0.5, 0.25, 0.05])
    for knobs in (BY_STEPS, BY_TIME):
        assert lr_factor(Hyperparameters(**{**knobs, "warmdown_iters": 0}), 99, 9900.0) == 1


def test_momentum_rises_in_a_straight_line():
    hp = Hyperparameters(muon_momentum_warmup_steps=10)
    momenta = [muon_momentum(hp, step) for step in (0, 5, 10, 99)]
    assert momenta == pytest.approx([0.85, 0.9, 0.95, 0.95])
    assert muon_momentum(Hyperparameters(muon_momentum_warmup_steps=0), 0) == 0.95
