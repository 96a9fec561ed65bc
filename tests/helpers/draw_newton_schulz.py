"""Draw what Newton-Schulz does to the singular values of a gradient, for README.md.

    PRESET=demo python tests/helpers/draw_newton_schulz.py tests/tools/newton_schulz.svg

The gradient is that of an MLP matrix after 20 steps. Start it where the demo ran. Needs
matplotlib."""

import os
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/tools")]

import demo_curve  # noqa: E402, F401  (its style)

import train_gpt  # noqa: E402

ITERATIONS = (0, 1, 3, 5)
NAMES = ("before", "after 1", "after 3", "after 5")


def read_gradient(steps: int) -> Tensor:
    """Train, then return the last gradient of an MLP's first matrix, with the short side first."""
    hp = train_gpt.Hyperparameters.from_env(os.environ)
    runtime = train_gpt.Runtime(0, 1, torch.device("cpu"), torch.float32, False)
    state = train_gpt.TrainingState(hp, runtime)
    for _ in range(steps):
        train_gpt.train_step(state)
    gradient = state.gpt.blocks[hp.num_layers // 2].mlp.fc.weight.grad
    return gradient.mT if gradient.size(0) > gradient.size(1) else gradient


def draw(gradient: Tensor) -> Figure:
    """Draw the singular values, largest first, on white, for a dark page, too."""
    figure = Figure(figsize=(7.2, 3.2), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    for count, name, color in zip(ITERATIONS, NAMES, ("C7", "C2", "C1", "C0"), strict=True):
        result = train_gpt.newton_schulz(gradient[None], count)[0]
        values = torch.linalg.svdvals(result).tolist()
        axes.plot(range(1, len(values) + 1), values, color=color, linewidth=2)
        label = f"{name}: {values[-1]:.2g} to {values[0]:.2g}"
        style = {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "color": color}
        axes.annotate(label, (len(values), values[-1]), annotation_clip=False, **style)
    axes.set(yscale="log", xlim=(1, len(values)), xlabel="singular values, largest first")
    axes.set_yticks([0.001, 0.01, 0.1, 1], ["0.001", "0.01", "0.1", "1"])
    axes.set_ylabel("singular value")
    axes.set_title("Newton-Schulz brings the singular values of an update closer together")
    axes.title.set_fontsize("medium")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    draw(read_gradient(steps=20)).savefig(sys.argv[1], metadata={"Date": None})
