"""Simulate experiment.py's verdicts if runs diverge, for the tools' page.

    python tests/figures/divergence.py      prints percentages of 100,000 experiments of 16 pairs

The gain of a pair is normal with deviation 1. Each run diverges by itself with a fixed probability.
Where the baseline diverges, the pair does not count; where only the candidate does, the experiment
ends with `worse`. Else it ends with any verdict but "not yet"."""

import keep_rules
import numpy as np

PAIRS, TRIES = 16, 100_000


def simulate(gain: float, baseline: float, candidate: float) -> list[float]:
    """Return the percentages of experiments that end with better and with worse. baseline,
    candidate: the probability that a run of this side diverges."""
    random = np.random.default_rng(0)
    counts = random.random((TRIES, PAIRS)) >= baseline
    has_diverged = random.random((TRIES, PAIRS)) < candidate
    gains = np.where(has_diverged, -np.inf, random.normal(gain, 1, (TRIES, PAIRS)))
    return [100 * ends.mean() for ends in keep_rules.looks(gains, counts)[:2]]


if __name__ == "__main__":
    print("gain   diverge: baseline, candidate   better   worse")
    for gain, baseline, candidate in [
        (0, 0, 0), (0, 0.05, 0), (0, 0.2, 0), (0, 0.5, 0), (0, 0.05, 0.05), (0, 0.1, 0.1),
        (0, 0.2, 0.2), (0, 0, 0.1), (1, 0, 0), (2, 0, 0), (1, 0, 0.1), (2, 0, 0.1),
    ]:  # fmt: skip
        better, worse = simulate(gain, baseline, candidate)
        print(f"{gain:4}   {baseline:16.0%}, {candidate:9.0%}   {better:6.1f}   {worse:5.1f}")
