"""Simulate how many of a hundred changes each rule keeps, for the tools' page.

    python tests/helpers/keep_rules.py      prints the table

Losses are normal around the baseline's. The spreads are those of the demo with --quick."""

import math
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

import anytime  # noqa: E402

RUN = 0.0061  # standard deviation of the baseline's loss between seeds, in nats
# Standard deviations of the gain between pairs, of 20 changes with three to five pairs each.
PAIRS = np.array([
    0.0086, 0.0100, 0.0195, 0.0099, 0.0061, 0.0033, 0.0040, 0.0036, 0.0115, 0.0035,
    0.0066, 0.0055, 0.0074, 0.0008, 0.0090, 0.0051, 0.0008, 0.0033, 0.0121, 0.0095,
])  # fmt: skip
PAIR = float(np.median(PAIRS))
EFFECTS = (0, 0.5, 1, 2)  # true gains, in units of PAIR
GROUPS = 4000  # each has a hundred changes

Rule = tuple[np.ndarray, float]  # mask of the changes it keeps; runs for a hundred changes


def first_that_passes(gains: np.ndarray) -> Rule:
    """A z-test with the spread of the median change, after each of eight pairs."""
    passes = gains[..., :8].cumsum(axis=2) / np.sqrt(np.arange(1, 9)) / PAIR > 2.326
    kept = passes.any(axis=2)
    pairs = np.where(kept, passes.argmax(axis=2) + 1, 8)
    return kept, 100 * pairs.mean() + 8


def experiment(gains: np.ndarray, by: float, most: int = 8) -> Rule:
    """Stop at the first verdict, as experiment.py does."""
    n, gains = np.arange(2, most + 1), gains[..., :most]
    means = gains.cumsum(axis=2)[..., 1:] / n
    squares = (gains**2).cumsum(axis=2)[..., 1:]
    deviations = np.sqrt((squares - n * means**2) / (n - 1))
    half = np.array([anytime.quantile(k) for k in n]) * deviations / np.sqrt(n)
    is_better = means - half > by
    is_sure = is_better | (means + half < by)
    first = np.where(is_sure.any(axis=2), is_sure.argmax(axis=2), most - 2)
    kept = np.take_along_axis(is_better, first[..., None], axis=2)[..., 0]
    return kept, 100 * (first + 2).mean() + most


def simulate() -> dict[str, list[int]]:
    """Return for each rule the percentage of changes that it keeps, for each of EFFECTS, and the
    runs that it spends on a hundred useless changes."""
    random = np.random.default_rng(0)
    half = PAIR / math.sqrt(2)  # share of each side in the spread of a pair
    spreads = random.choice(PAIRS, (GROUPS, 100, 1))  # each change has its own
    # Gains of pairs with many seeds. These groups share nothing, so fewer of them suffice.
    gains = spreads[:300] * random.standard_normal((300, 100, 30))
    # A loop that trains one run with one seed compares all with the same baseline.
    baseline, second = random.normal(0, half, (2, GROUPS, 1))
    single = baseline - random.normal(0, 1, (GROUPS, 100)) * spreads[..., 0] / math.sqrt(2)
    other_seed = random.normal(0, math.sqrt(2 * (RUN**2 - half**2)), (GROUPS, 1))
    two_baselines = np.abs(baseline - second + other_seed)
    # Nearly all of the hundred are useless, so they decide the deviation.
    center = np.median(single, axis=1, keepdims=True)
    deviation = np.median(np.abs(single - center), axis=1, keepdims=True)
    z_test = "p < 0.01 with a fixed standard deviation, at the first pair that passes"
    rules = {
        "lower in one run": lambda gain: (single + gain > 0, 101),
        "lower by twice the difference of two baseline runs": (
            lambda gain: (single + gain > 2 * two_baselines, 102)
        ),
        "lower by two median absolute deviations of all results": (
            lambda gain: (single + gain > 2 * deviation, 101)
        ),
        z_test: lambda gain: first_that_passes(gains + gain),
        "surely lower (`--by 0`)": lambda gain: experiment(gains + gain, 0),
        "surely lower, up to 30 pairs": lambda gain: experiment(gains + gain, 0, most=30),
        "surely lower by 0.005 (experiment.py's default)": (
            lambda gain: experiment(gains + gain, 0.005)
        ),
    }
    rows = {}
    for name, rule in rules.items():
        results = [rule(effect * PAIR) for effect in EFFECTS]
        rows[name] = [round(100 * kept.mean()) for kept, _ in results] + [round(results[0][1])]
    return rows


if __name__ == "__main__":
    heads = ["keep what is", "useless", *(f"gain {effect:g}" for effect in EFFECTS[1:]), "runs"]
    lines = [heads, ["---"] * len(heads)]
    lines += [[name, *map(str, numbers)] for name, numbers in simulate().items()]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))
