"""Simulate how many of a hundred changes each rule keeps, for the tools' page.

    python tests/figures/keep_rules.py      prints the table

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


def looks(
    gains: np.ndarray, most: int, by: float = 0.0, alpha: float = anytime.ALPHA, early: bool = True
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Look after each pair from the second on, until the verdict is better or hopeless. Returns
    which changes are better, the pairs they took, and the mean gain at the end. early: a mean gain
    that is not above `by` ends the experiment, as in experiment.py."""
    n, gains = np.arange(2, most + 1), gains[..., :most]
    means = gains.cumsum(axis=2)[..., 1:] / n
    squares = (gains**2).cumsum(axis=2)[..., 1:]
    deviations = np.sqrt((squares - n * means**2) / (n - 1))
    half = np.array([anytime.quantile(k, alpha) for k in n]) * deviations / np.sqrt(n)
    is_better = means - half > by
    is_over = is_better | (means + half < by) | (early & (means < by))
    last = np.where(is_over.any(axis=2), is_over.argmax(axis=2), most - 2)[..., None]
    kept, mean = (np.take_along_axis(each, last, axis=2)[..., 0] for each in (is_better, means))
    return kept, last[..., 0] + 2, mean


def draw_gains() -> np.ndarray:
    """Gains of 16 pairs for 60,000 changes, each with a spread of its own and no true gain."""
    random = np.random.default_rng(1)
    return random.choice(PAIRS, (600, 100, 1)) * random.standard_normal((600, 100, 16))


def experiment(gains: np.ndarray, most: int, **options: float) -> tuple[np.ndarray, float]:
    """Return which changes it keeps, and the runs for a hundred changes."""
    kept, pairs, _ = looks(gains, most, **options)
    return kept, 100 * pairs.mean() + most


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
    # Nearly all of the hundred are useless, so they decide the deviation.
    center = np.median(single, axis=1, keepdims=True)
    deviation = np.median(np.abs(single - center), axis=1, keepdims=True)
    fixed = "p < 0.01 with a fixed standard deviation, at the first of 8 pairs that passes"
    sure = {"by": 0.005, "alpha": 0.01, "early": False}
    shares: dict[str, list[float]] = {}
    runs = {}
    for effect in EFFECTS:
        one, pairs = single + effect * PAIR, gains + effect * PAIR
        # A z-test with the spread of the median change, after each of eight pairs.
        passes = pairs[..., :8].cumsum(axis=2) / np.sqrt(np.arange(1, 9)) / PAIR > 2.326
        spent = np.where(passes.any(axis=2), passes.argmax(axis=2) + 1, 8).mean()
        results = {
            "lower in one run": (one > 0, 101),
            "lower by twice the difference of two baseline runs": (one > 2 * two_baselines, 102),
            "lower by two median absolute deviations of all results": (one > 2 * deviation, 101),
            fixed: (passes.any(axis=2), 100 * spent + 8),
            "surely lower by 0.005, at 1 %, 8 pairs": experiment(pairs, 8, **sure),
            "experiment.py: 16 pairs, and it ends when the mean gain is negative": (
                experiment(pairs, 16)
            ),
        }
        for name, (kept, number) in results.items():
            share = 100 * kept.mean()
            shares.setdefault(name, []).append(round(share, 1) if share < 10 else round(share))
            runs.setdefault(name, round(number))  # those of the useless changes, the first effect
    return {name: [*shares[name], runs[name]] for name in shares}


if __name__ == "__main__":
    heads = ["keep what is", "useless", *(f"gain {effect:g}" for effect in EFFECTS[1:]), "runs"]
    lines = [heads, ["---"] * len(heads)]
    lines += [[name, *map(str, numbers)] for name, numbers in simulate().items()]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    for effect in (-1, *EFFECTS):
        kept, pairs, mean = looks(draw_gains() + effect * PAIR, 16)
        winners = mean[kept].mean() / PAIR
        print(f"true gain {effect:g}: {pairs.mean():.1f} pairs, a winner's gain {winners:.2f}")
