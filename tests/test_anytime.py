"""The evidence of tests/tools/anytime.py, by simulation and against scipy's noncentral t."""

import math

import numpy as np
import pytest
from anytime import (
    EFFECTS,
    EXIT_CODES,
    claims_that_stand,
    describe,
    evidence,
    interval,
    quantile,
    verdict,
    welch,
)
from scipy import stats


@pytest.mark.parametrize("alpha", [0.01, 0.05])
def test_looks_after_each_pair_call_few_useless_changes_better(alpha):
    """20,000 tries of 30 pairs without a gain. A repeated t-test calls more of them better."""
    gains, n = np.random.default_rng(0).standard_normal((20_000, 30)), np.arange(2, 31)
    means = gains.cumsum(axis=1)[:, 1:] / n
    variances = ((gains**2).cumsum(axis=1)[:, 1:] - n * means**2) / (n - 1)
    t = means / np.sqrt(variances / n)
    assert alpha / 5 < (t > [quantile(k, alpha) for k in n]).any(axis=1).mean() < alpha
    assert (t > stats.t.isf(0.01, n - 1)).any(axis=1).mean() > 0.05


def test_runs_that_diverge_make_no_useless_change_better_and_some_worse():
    """3,000 experiments of 16 pairs, without a gain. One run in 20 diverges, on both sides alike.
    The share of worse is that of tests/figures/keep_rules.py."""
    random = np.random.default_rng(0)
    losses = random.standard_normal((3000, 16, 2))
    losses[random.random(losses.shape) < 0.05] = math.inf
    words = []
    for pairs in losses:
        gains, word = [], "not yet"
        for baseline, candidate in pairs[pairs[:, 0] < math.inf]:
            gains.append(baseline - candidate)
            word = verdict(gains)
            if word != "not yet":
                break
        words.append(word)
        assert evidence(gains) >= 20 if word == "better" else evidence(gains) < 20
    assert 0.01 < words.count("better") / 3000 <= 0.05
    assert words.count("worse") / 3000 == pytest.approx(0.22, abs=0.02)


@pytest.mark.parametrize("n, t", [(2, -3), (3, 25), (6, 1), (30, 15)])
def test_the_evidence_is_a_ratio_of_densities(n, t):
    gains = np.linspace(-1, 1, n)
    gains += t * gains.std(ddof=1) / math.sqrt(n) + 0.5  # t is the t for a margin of 0.5
    ratios = stats.nct.pdf(t, n - 1, math.sqrt(n) * EFFECTS) / stats.t.pdf(t, n - 1)
    assert evidence(list(gains), by=0.5) == pytest.approx(ratios.mean(), rel=1e-3)


def test_equal_gains_say_nothing():
    """A large gain with hardly any deviation is evidence, although scipy's noncentral t is nan."""
    gains = [1, 1 + 1e-9, 1 - 1e-9, 1]
    assert evidence(gains) > 5000 and verdict(gains, by=0.005) == "better"
    for gains in ([], [1.0], [1.0, 1.0, 1.0, 1.0]):
        assert (evidence(gains), verdict(gains)) == (1, "not yet")


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


@pytest.mark.parametrize(
    "gain, by, word",
    [(0.01, 0.005, "better"), (0.0052, 0.005, "not better"), (0.0, 0, "not better"),
     (-0.01, 0.005, "worse"), (-0.01, -0.02, "better"), (-0.01, -0.0099, "not better"),
     (-0.01, -0.005, "worse"), (-0.0002, 0.005, "not better")],
)  # fmt: skip
def test_verdicts_of_welchs_test(gain, by, word):
    """It never says "not yet", which would invite further seeds. Only "better" has exit code 0."""
    baseline = np.array([3.5, 3.501, 3.502, 3.503])
    found, _, (low, high) = welch(list(baseline), list(baseline - gain), by, alpha=0.01)
    assert found == word and (EXIT_CODES[word] == 0) == (word == "better")
    assert low + high == pytest.approx(2 * gain)


def test_two_pairs_can_say_no_without_limits_but_not_yes():
    assert describe([0.01, -0.012], "nats") == "-0.00100 nats, not better"
    assert interval([1.0, 1.1]) == (-math.inf, math.inf)
    assert verdict([0.01, -0.009]) == verdict([-0.01]) == "not yet"
    assert describe([0.01, 0.011], "nats").endswith("not yet: needs at least three pairs")


def test_claims_that_stand_together():
    """The k largest evidences stand if the smallest of them is at least m / (0.1 k)."""
    assert claims_that_stand([]) == []
    assert claims_that_stand([9.9]) == [False]
    assert claims_that_stand([1, 40, 15, 26, 3]) == [False, True, False, True, False]
    assert claims_that_stand([25, 25, 1, 1, 1]) == [True, True, False, False, False]
