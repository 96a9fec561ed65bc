"""A verdict on gains that holds even if you check after every pair. Shared by the tools.

A gain is the baseline's loss minus the candidate's, in two runs with the same seed. A t-test at
0.01, repeated after each of 2 to 30 pairs, calls 7 % of useless changes better. The evidence here
is a test martingale: at most 5 % of them ever reach 20, and 1 % reach 100 (Ville, 1939). It assumes
that gains are roughly normal, without rare disasters: a useless change that gains 1 in nine of ten
pairs and loses 9 in the tenth reaches 20 in two thirds of simulated experiments of 16 pairs; a
picture of more pairs shows it. A run that diverges is worth -inf. Needs pip install scipy."""

import math
from collections.abc import Sequence
from functools import cache
from statistics import fmean, stdev

import begin  # noqa: F401  (first: it says what to install)
import numpy as np
from scipy import optimize, special, stats

ALPHA = 0.05  # probability that a limit of the interval is ever wrong
SCORES = {"nats": "val_loss", "bits per byte": "val_bpb"}  # figures of a run by unit
# Exit codes of a verdict, in experiment.py and compare_runs.py; 2: an error, so no verdict.
EXIT_CODES = {"better": 0, "worse": 1, "not better": 1, "not yet": 1}
EFFECTS = np.array([0.5, 1, 2, 4, 8, 16])  # true gains to look for, in standard deviations


def evidence_of_t(t: float, n: int) -> float:
    """Return the likelihood ratio of t after n pairs: the noncentral t density, averaged over the
    true gains in EFFECTS, over the central density (no gain). It grows with t."""
    # The ratio is exp(-shift²/2) times the mean of exp(tilt * w), where w has a chi distribution
    # with n degrees of freedom. Sum it around its peak: scipy's nct.pdf fails for large t.
    shift = EFFECTS[:, None] * math.sqrt(n)
    tilt = shift * t / math.hypot(t, math.sqrt(n - 1))
    peak = (tilt + np.sqrt(tilt**2 + 4 * (n - 1))) / 2
    w, width = peak + np.linspace(-10, 10, 2001), 0.01
    logs = stats.chi.logpdf(w, n) + tilt * w - shift**2 / 2 + math.log(width)
    return math.exp(min(special.logsumexp(logs) - math.log(len(EFFECTS)), 700))


@cache
def quantile(n: int, alpha: float = ALPHA) -> float:
    """The t of n pairs at which the evidence is 1 / alpha. Infinite for one pair or two."""
    if n < 2 or evidence_of_t(1e9, n) < 1 / alpha:
        return math.inf
    return optimize.brentq(lambda t: evidence_of_t(t, n) - 1 / alpha, 0, 1e9)


def evidence(gains: Sequence[float], by: float = 0.0) -> float:
    """Evidence that the true gain is above `by`. 0 if one is -inf: the candidate diverged. 1 if all
    are equal, which says nothing."""
    if -math.inf in gains:
        return 0.0
    if len({*gains}) < 2:
        return 1.0
    return evidence_of_t((fmean(gains) - by) / stdev(gains) * math.sqrt(len(gains)), len(gains))


def interval(gains: Sequence[float], alpha: float = ALPHA) -> tuple[float, float]:
    """Limits of the true gain. Each is ever wrong with probability alpha, over all looks."""
    if -math.inf in gains:
        return -math.inf, -math.inf
    if len({*gains}) < 2:
        return -math.inf, math.inf
    half = quantile(len(gains), alpha) * stdev(gains) / math.sqrt(len(gains))
    return fmean(gains) - half, fmean(gains) + half


def verdict(gains: Sequence[float], by: float = 0.0, alpha: float = ALPHA) -> str:
    """Say whether the true gain is above `by`. "not yet": more pairs may show it.

    "not better" is a reason to stop, and claims nothing: stopping there cannot make a useless
    change look better, since it only ends experiments that might still have won."""
    low, high = interval(gains, alpha)
    if low > by:
        return "better"
    if high < 0 and high <= by:
        return "worse"
    if len(gains) > 1 and (fmean(gains) <= by or high <= by):
        return "not better"
    return "not yet"


def welch(
    baseline: Sequence[float], candidate: Sequence[float], by: float, alpha: float
) -> tuple[str, float, tuple[float, float]]:
    """Run Welch's t-test of losses without pairs, whose number was chosen before. Returns the
    verdict, p for a gain of at most `by`, and the 95 % confidence interval of the gain."""
    moved = [loss + by for loss in candidate]
    p = stats.ttest_ind(baseline, moved, equal_var=False, alternative="greater").pvalue
    low, high = stats.ttest_ind(baseline, candidate, equal_var=False).confidence_interval()
    word = "better" if p < alpha else "worse" if high < min(0, by) else "not better"
    return word, p, (low, high)


def describe(gains: Sequence[float], unit: str, by: float = 0.0, alpha: float = ALPHA) -> str:
    """The mean gain, its interval and the verdict."""
    mean, (low, high) = fmean(gains or [math.nan]), interval(gains, alpha)
    limits = f" ({low:.5f} to {high:.5f})" if math.isfinite(high) else ""
    word = verdict(gains, by, alpha)
    if word == "not yet" and len(gains) < 3:
        word += ": needs at least three pairs"
    return f"{mean:.5f} {unit}{limits}, {word}"


def describe_evidence(gains: Sequence[float], by: float = 0.0, alpha: float = ALPHA) -> str:
    found = evidence(gains, by)
    return f"better by more than {by:g}? evidence {found:.3g}; {1 / alpha:g} or more shows it"


def claims_that_stand(evidences: Sequence[float], rate: float = 0.1) -> list[bool]:
    """Find claims that stand if about this share may be false (e-BH, Wang and Ramdas, 2022)."""
    ranked = sorted(evidences, reverse=True)
    enough = [e for k, e in enumerate(ranked, start=1) if e >= len(ranked) / (rate * k)]
    return [bool(enough) and e >= enough[-1] for e in evidences]
