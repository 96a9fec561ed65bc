"""The evidence of tests/tools/anytime.py, by simulation and against scipy's noncentral t."""

import math
import re
from functools import cache

import keep_rules
import numpy as np
import pytest
from anytime import EFFECTS, claims_that_stand, evidence, interval, quantile, verdict
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


def test_looks_after_each_pair_call_fewer_than_one_useless_change_in_a_hundred_better():
    assert 0.002 < share_called_better([quantile(n) for n in PAIRS]) < 0.01
    assert share_called_better(list(stats.t.isf(0.01, PAIRS - 1))) > 0.05  # a repeated t-test


def test_a_gain_of_two_deviations_is_found():
    """Half of the tries find it after 8 pairs, nearly all after 30."""
    limits = [quantile(n) for n in PAIRS]
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
    "mean, word",
    [(0.02, "better"), (0.005, "not yet"), (0.0, "no matter"), (-0.0025, "not better"),
     (-0.0038, "worse"), (-0.02, "worse")],
)  # fmt: skip
def test_verdicts(mean, word):
    """The interval is mean +- 0.0030, the margin 0.005."""
    gains = [mean + offset for offset in 3 * [-0.002, 0.0, 0.002]]
    low, high = interval(gains)
    assert high - mean == pytest.approx(mean - low) == pytest.approx(0.0030, abs=1e-4)
    assert verdict(gains, by=0.005) == word


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
        assert [*map(int, row[1].split(" | "))] == pytest.approx(numbers, abs=1, rel=0.01), rule
