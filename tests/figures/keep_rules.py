"""Simulate how many of a hundred changes each rule keeps, and what diverging runs do to verdicts.

    python tests/figures/keep_rules.py      prints the tables

Losses are normal around the baseline's. The spreads are those of the demo with --quick."""

import math
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

import anytime  # noqa: E402

RUN = 0.0081  # standard deviation of the baseline's loss between seeds, in nats
# Standard deviations of the gain between pairs, of 20 changes with three to five pairs each.
PAIRS = np.array([
    0.0086, 0.0100, 0.0195, 0.0099, 0.0061, 0.0033, 0.0040, 0.0036, 0.0115, 0.0035,
    0.0066, 0.0055, 0.0074, 0.0008, 0.0090, 0.0051, 0.0008, 0.0033, 0.0121, 0.0095,
])  # fmt: skip
PAIR = float(np.median(PAIRS))
EFFECTS = (0, 0.5, 1, 2, 3)  # true gains, in units of PAIR
GROUPS = 4000  # each has a hundred changes


def looks(gains: np.ndarray, counts: bool | np.ndarray = True) -> tuple[np.ndarray, ...]:
    """Look after each pair (the last axis), until the verdict is better, worse or hopeless. Returns
    which changes are better and worse, the pairs they took, and the mean gain at the end. counts:
    the pairs that count. Gains of -inf are those of a candidate that diverged."""
    counts = np.broadcast_to(counts, gains.shape)
    n, has_diverged = counts.cumsum(axis=-1), np.isneginf(gains) & counts
    gains = np.where(counts & ~has_diverged, gains, 0)
    means = gains.cumsum(axis=-1) / np.maximum(n, 1)
    squares = (gains**2).cumsum(axis=-1) - n * means**2
    errors = np.sqrt(np.maximum(squares, 0) / np.maximum(n - 1, 1) / np.maximum(n, 1))
    limits = np.array([anytime.quantile(k) for k in range(gains.shape[-1] + 1)])
    with np.errstate(invalid="ignore"):  # inf * 0
        half = np.where(n > 1, limits[n] * errors, np.inf)
    is_worse = has_diverged | (means + half < 0)
    is_better = ~has_diverged & (means - half > 0)
    is_over = is_worse | is_better | ((n > 1) & (means <= 0))
    last = np.where(is_over.any(axis=-1), is_over.argmax(axis=-1), n.shape[-1] - 1)[..., None]
    return tuple(np.take_along_axis(x, last, -1)[..., 0] for x in (is_better, is_worse, n, means))


def draw_gains() -> np.ndarray:
    """Gains of 16 pairs for 60,000 changes, each with a spread of its own and no true gain."""
    random = np.random.default_rng(1)
    return random.choice(PAIRS, (600, 100, 1)) * random.standard_normal((600, 100, 16))


def simulate() -> dict[str, list[float]]:
    """Return for each rule the percentage of changes that it keeps, for each of EFFECTS, and the
    runs that it spends on a hundred useless changes."""
    random = np.random.default_rng(0)
    half = PAIR / math.sqrt(2)  # share of each side in the spread of a pair
    spreads = random.choice(PAIRS, (GROUPS, 100))  # each change has its own
    gains = draw_gains()
    # A loop that trains one run with one seed compares all with the same baseline.
    drawn = random.normal(0, half, (2, GROUPS // 2, 1))
    baseline, second = np.concatenate([drawn, -drawn], axis=1)  # mirrored: their mean is 0
    single = baseline - random.normal(0, 1, (GROUPS, 100)) * spreads / math.sqrt(2)
    other_seed = random.normal(0, math.sqrt(2 * (RUN**2 - half**2)), (GROUPS, 1))
    two_baselines = np.abs(baseline - second + other_seed)
    fixed = "p < 0.01 with a fixed standard deviation, at the first of 8 pairs that passes"
    found: dict[str, list[float]] = {}
    for effect in reversed(EFFECTS):  # the useless changes, whose runs count, come last
        one, pairs = single + effect * PAIR, gains + effect * PAIR
        # A z-test with the spread of the median change, after each of eight pairs.
        passes = pairs[..., :8].cumsum(axis=2) / np.sqrt(np.arange(1, 9)) / PAIR > 2.326
        spent = np.where(passes.any(axis=2), passes.argmax(axis=2) + 1, 8).mean()
        better, _, taken, _ = looks(pairs)
        for name, kept, runs in [
            ("lower in one run", one > 0, 101),
            ("lower by twice the difference of two baseline runs", one > 2 * two_baselines, 102),
            (fixed, passes.any(axis=2), 100 * spent + 8),
            ("`better` by experiment.py", better, 100 * taken.mean() + 16),
        ]:
            share = 100 * kept.mean()
            shares = [round(share, 1) if share < 10 else round(share), *found.get(name, [])[:-1]]
            found[name] = [*shares, round(runs)]
    return found


def simulate_divergence(gain: float, baseline: float, candidate: float) -> list[float]:
    """Return the percentages of 100,000 experiments of 16 pairs that end with better and with
    worse. The gain of a pair has deviation 1. baseline, candidate: the probability that a run of
    this side diverges. Where the baseline's does, the pair does not count."""
    random = np.random.default_rng(0)
    counts = random.random((100_000, 16)) >= baseline
    has_diverged = random.random(counts.shape) < candidate
    gains = np.where(has_diverged, -np.inf, random.normal(gain, 1, counts.shape))
    return [100 * ends.mean() for ends in looks(gains, counts)[:2]]


if __name__ == "__main__":
    heads = ["keep what is", "useless", *(f"gain {effect:g}" for effect in EFFECTS[1:]), "runs"]
    lines = [heads, ["---"] * len(heads)]
    lines += [[name, *map(str, numbers)] for name, numbers in simulate().items()]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    for effect in (-1, *EFFECTS):
        kept, _, pairs, mean = looks(draw_gains() + effect * PAIR)
        winners = mean[kept].mean() / PAIR
        print(f"true gain {effect:g}: {pairs.mean():.1f} pairs, a winner's gain {winners:.2f}")
    print("gain   diverge: baseline, candidate   better   worse")
    for gain, baseline, candidate in [
        (0, 0, 0), (0, 0.05, 0), (0, 0.2, 0), (0, 0.5, 0), (0, 0.05, 0.05), (0, 0.1, 0.1),
        (0, 0.2, 0.2), (0, 0, 0.1), (1, 0, 0), (2, 0, 0), (1, 0, 0.1), (2, 0, 0.1),
    ]:  # fmt: skip
        better, worse = simulate_divergence(gain, baseline, candidate)
        print(f"{gain:4}   {baseline:16.0%}, {candidate:9.0%}   {better:6.1f}   {worse:5.1f}")
