"""What rules for keeping a change do to a hundred changes: a simulation for the tools' page.

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
PAIRS = np.array(
    [
        0.0086, 0.0100, 0.0195, 0.0099, 0.0061, 0.0033, 0.0040, 0.0036, 0.0115, 0.0035, 0.0066,
        0.0055, 0.0074, 0.0008, 0.0090, 0.0051, 0.0008, 0.0033, 0.0121, 0.0095,
    ]
)  # fmt: skip
PAIR = float(np.median(PAIRS))
EFFECTS = (0, 0.5, 1, 2)  # true gains, in PAIR
GROUPS = 4000  # of a hundred changes each
MOST = 30  # pairs that are simulated; experiment.py's default is 8

Rule = tuple[np.ndarray, float]  # which changes are kept; runs for a hundred of them


class Changes:
    """Changes with one true gain, in nats. Each has a spread of its own."""

    def __init__(self, gain: float) -> None:
        random = np.random.default_rng(0)
        half = PAIR / math.sqrt(2)  # share of each side in the spread of a pair
        spreads = random.choice(PAIRS, (GROUPS, 100, 1))
        # Of pairs with many seeds; these groups do not share anything, so that fewer suffice.
        self.gains = gain + spreads[:300] * random.standard_normal((300, 100, MOST))
        # A loop that trains one run with one seed compares all with the same baseline.
        baseline, second = random.normal(0, half, (2, GROUPS, 1))
        candidates = random.normal(0, 1, (GROUPS, 100)) * spreads[..., 0] / math.sqrt(2)
        self.single_gains = gain + baseline - candidates
        other_seed = random.normal(0, math.sqrt(2 * (RUN**2 - half**2)), (GROUPS, 1))
        self.two_baselines = np.abs(baseline - second + other_seed)


def lower(changes: Changes) -> Rule:
    return changes.single_gains > 0, 101


def above_two_baselines(changes: Changes) -> Rule:
    return changes.single_gains > 2 * changes.two_baselines, 102


def above_deviations(changes: Changes) -> Rule:
    """Nearly all of the hundred are useless, so they decide the deviation."""
    useless = Changes(0).single_gains
    center = np.median(useless, axis=1, keepdims=True)
    deviation = np.median(np.abs(useless - center), axis=1, keepdims=True)
    return changes.single_gains > 2 * deviation, 101


def first_that_passes(changes: Changes) -> Rule:
    """A z-test with the spread of the median change, after each of eight pairs."""
    n = np.arange(1, 9)
    passes = changes.gains[..., :8].cumsum(axis=2) / np.sqrt(n) / PAIR > 2.326
    kept = passes.any(axis=2)
    pairs = np.where(kept, passes.argmax(axis=2) + 1, 8)
    return kept, 100 * pairs.mean() + 8


def experiment(changes: Changes, by: float, most: int = 8) -> Rule:
    """Stop at the first verdict, as experiment.py does."""
    n = np.arange(2, most + 1)
    gains = changes.gains[..., :most]
    means = gains.cumsum(axis=2)[..., 1:] / n
    squares = (gains**2).cumsum(axis=2)[..., 1:]
    deviations = np.sqrt((squares - n * means**2) / (n - 1))
    half = np.array([anytime.quantile(k) for k in n]) * deviations / np.sqrt(n)
    is_better = means - half > by
    is_sure = is_better | (means + half < by)
    first = np.where(is_sure.any(axis=2), is_sure.argmax(axis=2), most - 2)
    kept = np.take_along_axis(is_better, first[..., None], axis=2)[..., 0]
    return kept, 100 * (first + 2).mean() + most


RULES = {
    "lower in one run": lower,
    "lower by twice the difference of two baseline runs": above_two_baselines,
    "lower by two median absolute deviations of all results": above_deviations,
    "p < 0.01 with a fixed standard deviation, at the first pair that passes": first_that_passes,
    "surely lower (`--by 0`)": lambda changes: experiment(changes, 0),
    "surely lower, up to 30 pairs": lambda changes: experiment(changes, 0, most=30),
    "surely lower by 0.005 (experiment.py's default)": lambda changes: experiment(changes, 0.005),
}


def simulate() -> dict[str, list[int]]:
    """For each rule, how many of a hundred changes it keeps, by EFFECTS, and the runs that it
    spends on a hundred useless ones."""
    rows = {}
    changes = [Changes(effect * PAIR) for effect in EFFECTS]
    for name, rule in RULES.items():
        kept = [round(100 * rule(some)[0].mean()) for some in changes]
        rows[name] = [*kept, round(rule(changes[0])[1])]
    return rows


def table() -> str:
    heads = ["keep what is", "useless", *(f"gain {effect:g}" for effect in EFFECTS[1:]), "runs"]
    lines = [heads, ["---"] * len(heads)]
    lines += [[name, *map(str, numbers)] for name, numbers in simulate().items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table())
