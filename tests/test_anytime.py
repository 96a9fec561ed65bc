"""The evidence of tests/tools/anytime.py, by simulation and against scipy's noncentral t."""

import math
import re
from functools import cache

import keep_rules
import numpy as np
import pytest
from anytime import (
    EFFECTS,
    claims_that_stand,
    describe,
    evidence,
    interval,
    quantile,
    verdict,
)
from runs import ROOT
from scipy import stats

PAIRS = np.arange(2, 31)


@cache
def running_t(true_gain: float, tries: int = 20_000) -> np.ndarray:
    """The t of the first 2, 3, ... 30 gains, (tries, 29): normal gains of deviation 1."""
    gains = np.random.default_rng(0).normal(true_gain, 1, (tries, PAIRS[-1]))
    n = np.arange(1, PAIRS[-1] + 1)
    means = gains.cumsum(axis=1) / n
    variances = ((gains**2).cumsum(axis=1) / n - means**2)[:, 1:] * n[1:] / (n[1:] - 1)
    return means[:, 1:] / np.sqrt(variances / n[1:])


def share_called_better(limits: list[float], true_gain: float = 0.0) -> float:
    """Share of tries in which t reaches its limit after any number of pairs."""
    return (running_t(true_gain) > np.array(limits)).any(axis=1).mean()


@pytest.mark.parametrize("alpha", [0.01, 0.05])
def test_looks_after_each_pair_call_few_useless_changes_better(alpha):
    assert alpha / 5 < share_called_better([quantile(n, alpha) for n in PAIRS]) < alpha
    assert share_called_better(list(stats.t.isf(0.01, PAIRS - 1))) > 0.05  # a repeated t-test


def test_a_gain_of_two_deviations_is_found():
    """Half of the tries find it after 8 pairs at 1 %, nearly all after 30."""
    limits = [quantile(n, 0.01) for n in PAIRS]
    assert share_called_better(limits, 2.0) > 0.99
    assert 0.45 < share_called_better(limits[:7] + [math.inf] * 22, 2.0) < 0.75


@pytest.mark.parametrize("n, t", [(2, -3), (3, 25), (6, 1), (30, 15)])
def test_the_evidence_is_a_ratio_of_densities(n, t):
    gains = np.linspace(-1, 1, n)
    gains += t * gains.std(ddof=1) / math.sqrt(n) + 0.5  # t is the t for a margin of 0.5
    ratios = stats.nct.pdf(t, n - 1, math.sqrt(n) * EFFECTS) / stats.t.pdf(t, n - 1)
    assert evidence(list(gains), by=0.5) == pytest.approx(ratios.mean(), rel=1e-3)


def test_equal_gains_and_two_pairs_say_nothing():
    """A large gain with hardly any deviation is evidence, although scipy's noncentral t is nan."""
    gains = [1, 1 + 1e-9, 1 - 1e-9, 1]
    assert evidence(gains) > 5000 and verdict(gains, by=0.005) == "better"
    for gains in ([], [1.0], [1.0, 1.0, 1.0, 1.0]):
        assert (evidence(gains), verdict(gains)) == (1, "not yet")
    assert interval([1.0, 1.1]) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    "mean, by, word",
    [(0.008, 0.005, "better"), (0.007, 0.005, "not yet"), (0.005, 0.005, "not better"),
     (-0.0022, 0.005, "not better"), (-0.0024, 0.005, "worse"), (0.003, 0, "better"),
     (0.002, 0, "not yet"), (0.0, 0, "not better"), (-0.003, 0, "worse"),
     (-0.002, -0.005, "better"), (-0.004, -0.005, "not yet"), (-0.005, -0.005, "not better"),
     (-0.008, -0.005, "worse")],
)  # fmt: skip
def test_verdicts(mean, by, word):
    """The interval is mean +- 0.0023: 3.84 times the standard error."""
    gains = [mean + offset for offset in 3 * [-0.002, 0.0, 0.002]]
    low, high = interval(gains)
    assert high - mean == pytest.approx(mean - low) == pytest.approx(0.0023, abs=5e-5)
    assert verdict(gains, by) == word


def test_two_pairs_can_say_no_without_limits_but_not_yes():
    assert describe([0.01, -0.012], "nats") == "-0.00100 nats, not better"
    assert verdict([0.01, -0.009]) == verdict([-0.01]) == "not yet"
    assert describe([0.01, 0.011], "nats").endswith("not yet: needs at least three pairs")


@cache
def simulated_verdicts(true_gain: float) -> list[list[str]]:
    """The verdicts after each of 16 pairs, for a thousand changes with the demo's spreads."""
    random = np.random.default_rng(0)
    gains = true_gain * keep_rules.PAIR + random.choice(keep_rules.PAIRS, (1000, 1)) * (
        random.standard_normal((1000, 16))
    )
    return [[verdict(row[:n]) for n in range(1, 17)] for row in gains.tolist()]


def test_to_stop_for_a_no_keeps_no_useless_change_and_costs_few_gains():
    """An experiment ends with the first verdict. Without an end for a "no", it ends with "better"
    or after 16 pairs."""
    shares = {}
    for true_gain in (0, 1):
        tries = simulated_verdicts(true_gain)
        ends = [next((word for word in words if word != "not yet"), "") for words in tries]
        shares[true_gain] = [ends.count("better"), sum("better" in words for words in tries)]
    assert 10 < shares[0][0] <= shares[0][1] < 50
    kept, possible = shares[1]
    assert kept > 630 and 0.01 < 1 - kept / possible < 0.04  # one in forty


def test_claims_that_stand_together():
    """The k largest evidences stand if the smallest of them is at least m / (0.1 k)."""
    assert claims_that_stand([]) == []
    assert claims_that_stand([9.9]) == [False]
    assert claims_that_stand([1, 40, 15, 26, 3]) == [False, True, False, True, False]
    assert claims_that_stand([25, 25, 1, 1, 1]) == [True, True, False, False, False]


def test_the_tools_page_says_what_other_rules_keep():
    """helpers/keep_rules.py prints the table for an update."""
    page = (ROOT / "tests/tools/README.md").read_text(encoding="utf-8")
    for rule, numbers in keep_rules.simulate().items():
        row = re.search(rf"^\| {re.escape(rule)} \| (.*) \|$", page, re.M)
        assert [*map(float, row[1].split(" | "))] == pytest.approx(numbers, abs=0.2, rel=0.02), rule
