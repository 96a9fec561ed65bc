"""Simulate experiment.py's verdicts if runs diverge, for the tools' page.

    python tests/figures/divergence.py      prints percentages of 100,000 experiments of 16 pairs

The gain of a pair is normal with deviation 1. Each run diverges by itself with a fixed probability.
Where the baseline diverges, the pair does not count; where only the candidate does, the experiment
ends with `worse`. Else it ends with any verdict but "not yet"."""

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

import anytime  # noqa: E402

PAIRS, TRIES = 16, 100_000
LIMITS = np.array([anytime.quantile(n) for n in range(PAIRS + 1)])


def simulate(gain: float, baseline: float, candidate: float) -> tuple[float, float]:
    """Return the percentages of experiments that end with better and with worse. baseline,
    candidate: the probability that a run of this side diverges."""
    random = np.random.default_rng(0)
    counts = random.random((TRIES, PAIRS)) >= baseline  # pairs that count
    has_diverged = (random.random((TRIES, PAIRS)) < candidate) & counts
    gains = counts * random.normal(gain, 1, (TRIES, PAIRS))
    n = counts.cumsum(axis=1)
    means = gains.cumsum(axis=1) / np.maximum(n, 1)
    squares = (gains**2).cumsum(axis=1) - n * means**2
    errors = np.sqrt(np.maximum(squares, 0) / np.maximum(n - 1, 1) / np.maximum(n, 1))
    with np.errstate(invalid="ignore"):  # 0 * inf, without a pair
        half = np.where(n > 1, LIMITS[n] * errors, np.inf)
    is_worse = has_diverged | (means + half < 0)
    is_better = ~has_diverged & (means - half > 0)
    is_over = is_worse | is_better | ((n > 1) & (means <= 0))
    last = np.where(is_over.any(axis=1), is_over.argmax(axis=1), PAIRS - 1)[:, None]
    ends = [np.take_along_axis(each, last, axis=1).mean() for each in (is_better, is_worse)]
    return 100 * ends[0], 100 * ends[1]


if __name__ == "__main__":
    print("gain   diverge: baseline, candidate   better   worse")
    for gain, baseline, candidate in [
        (0, 0, 0), (0, 0.05, 0), (0, 0.2, 0), (0, 0.5, 0), (0, 0.05, 0.05), (0, 0.1, 0.1),
        (0, 0.2, 0.2), (0, 0, 0.1), (1, 0, 0), (2, 0, 0), (1, 0, 0.1), (2, 0, 0.1),
    ]:  # fmt: skip
        better, worse = simulate(gain, baseline, candidate)
        print(f"{gain:4}   {baseline:16.0%}, {candidate:9.0%}   {better:6.1f}   {worse:5.1f}")
