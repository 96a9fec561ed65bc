"""Fit the best learning rate of each batch size to runs of the demo, and draw them.

    python tests/figures/batch_rates.py tests/figures/batches.txt tests/figures/batches.svg

A line of the first file is a run: the tokens it trained on, tokens per step, k (all learning rates
times f = 2**(k/2)), seed, final loss. The best k of a batch is the lowest point of the parabola
through the losses at most 2 from the k of the lowest mean. Intervals (95 %): 4,000 times, noise is
added to all losses and all is fitted again. The noise has the standard deviation of all runs from
their parabolas. Needs matplotlib."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # for python -P

import demo_curve  # noqa: F401  (its style)
import numpy as np
from matplotlib.figure import Figure
from trained import existing_file, files, start_program

FIRST_LENGTH = 884_736  # tokens of the runs that give the exponent and the picture
REPEATS = 4000


def near_the_best(runs: np.ndarray) -> np.ndarray:
    """The runs of a batch (k, loss) at most 2 from the k with the lowest mean loss."""
    means = {k: runs[runs[:, 0] == k, 1].mean() for k in runs[:, 0]}
    return runs[abs(runs[:, 0] - min(means, key=means.get)) <= 2]


def interval(values: np.ndarray) -> str:
    low, high = np.quantile(values, [0.025, 0.975])
    return f"({low:.3f} to {high:.3f})"


def fit(batches: dict[tuple[int, int], np.ndarray]) -> dict[tuple[int, int], np.ndarray]:
    """Print a line for each batch, and the exponents. Returns the parabolas."""
    near = {name: near_the_best(runs) for name, runs in batches.items()}
    parabolas = {name: np.polyfit(*runs.T, 2) for name, runs in near.items()}
    errors = [runs[:, 1] - np.polyval(parabolas[name], runs[:, 0]) for name, runs in near.items()]
    errors = np.concatenate(errors)
    noise = np.sqrt((errors**2).sum() / (len(errors) - 3 * len(near)))
    random, log_f = np.random.default_rng(0), {}
    for name, runs in near.items():
        repeats = runs[:, 1:] + random.normal(0, noise, (len(runs), REPEATS))
        a, b, _ = np.polyfit(runs[:, 0], np.hstack([runs[:, 1:], repeats]), 2)
        log_f[name] = -b / (4 * a)  # of base 2, at the lowest point
        best, lowest = 2 ** log_f[name], np.polyval(parabolas[name], 2 * log_f[name][0])
        print(f"{name[0]} tokens, {name[1]} a step, {len(batches[name])} runs: best f "
              f"{best[0]:.3f} {interval(best[1:])}, loss {lowest:.4f}")  # fmt: skip
    print(f"standard deviation of a run: {noise:.4f}")
    for length in sorted({name[0] for name in batches}):
        sizes = np.log2([size for tokens, size in batches if tokens == length])
        if len(sizes) > 1:
            points = np.array([log_f[name] for name in batches if name[0] == length])
            slopes, starts = np.polyfit(sizes, points, 1)
            print(f"{length} tokens: f ~ B**{slopes[0]:.3f} {interval(slopes[1:])}")
            ahead = 2 ** (starts + slopes * (sizes[-1] + 1))
            print(f"  at twice the largest batch: f = {ahead[0]:.3f} {interval(ahead[1:])}")
    return parabolas


def draw(batches: dict[tuple[int, int], np.ndarray], parabolas: dict) -> Figure:
    """Draw mean losses against f, and the parabolas."""
    title = f"Final loss by learning rate and tokens per step, after {FIRST_LENGTH:,} tokens"
    figure = Figure(figsize=(7.2, 3.6))
    axes = figure.add_subplot(title=title)
    for i, (name, runs) in enumerate(batches.items()):
        k = np.unique(runs[:, 0])
        axes.plot(2 ** (k / 2), [runs[runs[:, 0] == x, 1].mean() for x in k], "o", color=f"C{i}")
        near = near_the_best(runs)[:, 0]
        curve = np.linspace(near.min(), near.max(), 50)
        losses = np.polyval(parabolas[name], curve)
        axes.plot(2 ** (curve / 2), losses, color=f"C{i}")
        place = {"xytext": (-7, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
        axes.annotate(f"{name[1]:,}", (2 ** (curve[0] / 2), losses[0]), color=f"C{i}", **place)
    ticks = [0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 2.8, 4]
    axes.set(xscale="log", xlabel="all learning rates times f", ylabel="loss")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    return figure


def main() -> None:
    parser = start_program(__doc__)
    parser.add_argument("runs", type=existing_file)
    parser.add_argument("picture", type=files.path, help="the .svg to write")
    args = parser.parse_args()
    rows = np.loadtxt(args.runs)
    names = sorted({(int(row[0]), int(row[1])) for row in rows})
    batches = {name: rows[(rows[:, :2] == name).all(axis=1)][:, [2, 4]] for name in names}
    parabolas = fit(batches)
    drawn = {name: runs for name, runs in batches.items() if name[0] == FIRST_LENGTH}
    draw(drawn, parabolas).savefig(args.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
