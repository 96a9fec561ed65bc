"""Find the best learning rate of each batch in runs of the demo, compare warm-ups, draw the rates.

    python tests/figures/batch_rates.py tests/figures/batches.txt tests/figures/batches.svg

A line of the first file is a run: the tokens it trained on, tokens per step, k (all learning rates
times f = 2**(k/2)), seed, arm, final loss. The best f of a batch comes from the runs of the first
arm with a whole k: a parabola with an offset for each seed is fitted to those at most 2 from the k
with the lowest mean loss. Intervals (95 %): 4,000 times, noise with the standard deviation of the
batch's runs from their parabola is added to all losses, and the same is done again. Every other arm
is compared with the first by a t interval of the pairs with the same seed. Needs matplotlib."""

import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # for python -P

import demo_curve  # noqa: F401  (its style)
import numpy as np
from matplotlib.figure import Figure
from scipy.stats import t as student
from trained import check_picture, existing_file, files, start_program

FIRST_ARM = "equal"  # Muon's momentum warms up over equal numbers of tokens
REPEATS = 4000


class Run(NamedTuple):
    tokens: int
    size: int  # tokens per step
    k: float
    seed: int
    arm: str
    loss: float


class Fit(NamedTuple):
    near: np.ndarray  # (n, 3): k, seed and loss of the runs that it uses
    parabola: np.ndarray  # (3,): for the mean seed
    noise: float  # standard deviation of a run
    degrees: int  # of freedom
    best: float  # k of the lowest point between the fitted runs, perhaps one of their ends


def read_runs(path: Path) -> list[Run]:
    """Read the lines of a file. Ends the program at a line that is not a run."""
    runs: dict[tuple, Run] = {}
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        if not (words := line.split("#")[0].split()):
            continue
        try:
            tokens, size, k, seed, arm, loss = words
            run = Run(int(tokens), int(size), float(k), int(seed), arm, float(loss))
            if not (0 < run.size <= run.tokens and math.isfinite(run.k + run.loss)):
                raise ValueError
        except ValueError:
            form = "tokens size k seed arm loss"
            sys.exit(f"{path}, line {number}: {line[:80]!r} is not `{form}`: correct or delete it")
        if run[:5] in runs:
            sys.exit(f"{path}, line {number}: {line[:80]!r} was there before: delete one of them")
        runs[run[:5]] = run
    if not runs:
        sys.exit(f"{path} has no runs: a run is a line `tokens size k seed arm loss`")
    return sorted(runs.values())


def fit(runs: np.ndarray) -> Fit:
    """Fit a parabola to the runs (n, 3: k, seed, loss) at most 2 from the best k."""
    (k, seeds, losses), values = runs.T, np.unique(runs[:, 0])
    # The mean loss of each k, if all seeds had a run there.
    design = np.column_stack([k[:, None] == values, seeds[:, None] == np.unique(seeds)])
    levels = np.linalg.lstsq(design, losses - losses.mean(), rcond=None)[0][: len(values)]
    near = runs[abs(k - values[levels.argmin()]) <= 2]
    k, seeds, losses = near.T
    design = np.column_stack([k**2, k, seeds[:, None] == np.unique(seeds)])
    (a, b, *offsets), _, rank, _ = np.linalg.lstsq(design, losses, rcond=None)
    degrees = len(near) - rank
    noise = math.sqrt(((losses - design @ [a, b, *offsets]) ** 2).sum() / max(degrees, 1))
    vertex = np.clip(-b / (2 * a), k.min(), k.max())
    best = min(k.min(), vertex, k.max(), key=lambda k: a * k**2 + b * k)
    return Fit(near, np.array([a, b, np.mean(offsets)]), noise, degrees, best)


def best_rates(
    name: str, runs: np.ndarray, random: np.random.Generator
) -> tuple[Fit, np.ndarray] | None:
    """Print the best f of a batch. Returns the fit, and log2 of the best f (1 + REPEATS,), the
    first without noise; None if there are too few runs. Ends the program if the best f is not
    between the runs."""
    first = fit(runs)
    values = np.unique(first.near[:, 0])
    if len(values) < 3 or first.degrees < 1:
        print(f"{name}, {len(runs)} runs: too few: add two seeds of three whole k around the best")
        return None
    if not values[0] < first.best < values[-1]:
        kind = "is a maximum" if first.parabola[0] <= 0 else "is outside the runs"
        where = f"the best rate at f = {2 ** (first.best / 2):.3g} or beyond it: add runs there"
        sys.exit(f"{name}: the parabola's vertex {kind}, and {where}")
    # A standard deviation from few runs is uncertain, too.
    scale = first.noise * np.sqrt(first.degrees / random.chisquare(first.degrees, REPEATS))
    fits = [first]
    for losses in runs[:, 2] + scale[:, None] * random.standard_normal((REPEATS, len(runs))):
        fits.append(fit(np.column_stack([runs[:, :2], losses])))
    log_f = np.array([each.best for each in fits]) / 2
    ends = [each.best in each.near[:, 0] for each in fits]
    print(f"{name}, {len(runs)} runs: best f {interval(2**log_f)}, loss "
          f"{np.polyval(first.parabola, first.best):.4f}, deviation of a run {first.noise:.4f}; "
          f"{100 * np.mean(ends):.1f} % of the refits have no minimum between runs")  # fmt: skip
    return first, log_f


def interval(values: np.ndarray) -> str:
    """Format the first value and the 95 % interval of the others."""
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return f"{values[0]:.3f} ({low:.3f} to {high:.3f})"


def print_exponents(tokens: int, log_f: dict[int, np.ndarray]) -> None:
    """Print the exponents x of f ~ B**x between neighbours B, and one for all if none of them
    contradicts it. log_f: by tokens per step."""
    if len(log_f) < 2:
        return
    sizes = np.log2([*log_f])
    power = np.polyfit(sizes, np.array([*log_f.values()]), 1)[0]
    contradicted = []
    for small, large in pairwise(log_f):
        local = (log_f[large] - log_f[small]) / math.log2(large / small)
        print(f"{tokens} tokens, from {small} to {large} a step: f ~ B**{interval(local)}")
        low, high = np.quantile(local[1:], [0.025, 0.975])
        contradicted += [] if low <= power[0] <= high else [f"{small} to {large}"]
    verdict = f"is contradicted from {' and '.join(contradicted)}" if contradicted else "fits all"
    print(f"{tokens} tokens: one exponent, {interval(power)}, {verdict}")


def compare_arms(runs: list[Run]) -> None:
    """Print how much each arm's loss is above that of the first arm, in pairs with equal seeds."""
    losses: dict[tuple, dict[int, float]] = {}
    for run in runs:
        losses.setdefault((run.tokens, run.size, run.k, run.arm), {})[run.seed] = run.loss
    for (tokens, size, k, arm), other in losses.items():
        first = losses.get((tokens, size, k, FIRST_ARM), {})
        gaps = np.array([other[seed] - first[seed] for seed in sorted(other.keys() & first.keys())])
        if arm == FIRST_ARM or len(gaps) < 2:
            continue
        half = student.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / math.sqrt(len(gaps))
        mean = gaps.mean()
        print(f"{tokens} tokens, {size} a step, f = {2 ** (k / 2):.3f}: loss with {arm} minus with "
              f"{FIRST_ARM}: {mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f}), "
              f"{len(gaps)} pairs")  # fmt: skip


def draw(tokens: int, batches: dict[int, tuple[np.ndarray, Fit, np.ndarray]]) -> Figure:
    """Draw each run, hollow if its fit does not use it, the parabolas, and their lowest points."""
    figure = Figure(figsize=(7.2, 4))
    title = f"Final loss by learning rate and tokens per step, after {tokens:,} tokens"
    axes = figure.add_subplot(title=title)
    for i, (size, (runs, fitted, log_f)) in enumerate(batches.items()):
        color, k = {"color": f"C{i}"}, fitted.near[:, 0]
        is_near = (k.min() <= runs[:, 0]) & (runs[:, 0] <= k.max())
        for shown, fill in ((runs[is_near], f"C{i}"), (runs[~is_near], "none")):
            f = 2 ** (shown[:, 0] / 2)
            axes.plot(f, shown[:, 2], "o", markersize=3.5, markerfacecolor=fill, **color)
        curve = np.linspace(k.min(), k.max(), 50)
        losses = np.polyval(fitted.parabola, curve)
        axes.plot(2 ** (curve / 2), losses, linewidth=1, **color)
        lowest = np.polyval(fitted.parabola, fitted.best)
        axes.plot(2 ** np.quantile(log_f[1:], [0.025, 0.975]), [lowest] * 2, linewidth=4, **color)
        axes.plot(2 ** log_f[0], lowest, "D", color="black", markersize=4)
        place = {"xytext": (8, 3), "textcoords": "offset points", "ha": "left", "va": "center"}
        axes.annotate(f"{size:,}", (2 ** (curve[-1] / 2), losses[-1]), **place, **color)
    note = "dot: a run; hollow: not in the fit\ndiamond: lowest point; bar: its 95 % interval"
    axes.text(0.02, 0.97, note, transform=axes.transAxes, va="top", fontsize="small")
    ticks = [0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 2.8, 4]
    axes.set(xscale="log", xlabel="all learning rates times f (logarithmic)", ylabel="loss")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    return figure


def main() -> None:
    parser = start_program(__doc__)
    parser.add_argument("runs", type=existing_file)
    parser.add_argument("picture", type=files.path, help="the .svg to write")
    args = parser.parse_args()
    check_picture(parser, args.picture, [args.runs])
    runs, random = read_runs(args.runs), np.random.default_rng(0)
    grids: dict[tuple[int, int], list] = {}  # by tokens, and tokens per step
    for run in runs:
        if run.arm == FIRST_ARM and run.k == round(run.k):
            grids.setdefault((run.tokens, run.size), []).append((run.k, run.seed, run.loss))
    results: dict[int, dict[int, tuple]] = {}
    for (tokens, size), rows in grids.items():
        grid = np.array(rows)
        if best := best_rates(f"{tokens} tokens, {size} a step", grid, random):
            results.setdefault(tokens, {})[size] = (grid, *best)
    if not results:
        sys.exit(f"{args.runs} has too few runs of the arm {FIRST_ARM} with whole k: add some")
    for tokens, batches in results.items():
        print_exponents(tokens, {size: log_f for size, (_, _, log_f) in batches.items()})
    compare_arms(runs)
    shortest = min(results)
    draw(shortest, results[shortest]).savefig(args.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
