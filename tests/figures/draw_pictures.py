"""Draw two pictures of README.md: learning rate and Muon's momentum over a run of the demo and a
default run; what Newton-Schulz does to the singular values of an MLP's gradient after 20 steps.

    PRESET=demo python tests/figures/draw_pictures.py

Start it where the demo ran. It writes into tests/figures, and needs matplotlib."""

import os
import sys
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/tools")]

from demo_curve import Figure  # noqa: E402  (with its style)

import train_gpt  # noqa: E402

# Preset, title, steps, milliseconds of a step. In the default run the time limit ends the training.
RUNS = [
    ("demo", "the demo: 200 steps", 200, 583.5),
    ("", "the default: 600 s, 13,780 steps of 43.5 ms", 13_780, 43.5),
]
CURVES = {0: ("divided by its norm", "C7"), 1: ("after 1 iteration", "C2")}
CURVES |= {3: ("after 3 iterations", "C1"), 5: ("after 5 iterations", "C0")}


def draw_schedule() -> Figure:
    figure = Figure()
    for place, (preset, title, steps, ms) in enumerate(RUNS, 1):
        hp = train_gpt.Hyperparameters.from_env({"PRESET": preset})
        factors = [train_gpt.lr_factor(hp, step, step * ms) for step in range(steps + 1)]
        momenta = [train_gpt.muon_momentum(hp, step) for step in range(steps + 1)]
        axes = figure.add_subplot(1, 2, place, title=title, xlabel="step", ylim=(0, 1.1))
        [rate] = axes.plot(factors, linewidth=2)
        [momentum] = axes.plot(momenta, linewidth=2)
    names = ["learning rates, as multiples of their base values", "Muon's momentum"]
    figure.legend([rate, momentum], names, loc="outside lower center", ncols=2, frameon=False)
    return figure


def read_gradient(steps: int) -> Tensor:
    """Train, then return the last gradient of an MLP's first matrix, with the short side first."""
    hp = train_gpt.Hyperparameters.from_env(os.environ)
    runtime = train_gpt.Runtime(0, 1, torch.device("cpu"), torch.float32, False)
    state = train_gpt.TrainingState(hp, runtime)
    for _ in range(steps):
        train_gpt.train_step(state)
    gradient = state.gpt.blocks[hp.num_layers // 2].mlp.fc.weight.grad
    return gradient.mT if gradient.size(0) > gradient.size(1) else gradient


def draw_newton_schulz(gradient: Tensor) -> Figure:
    """Draw the singular values, largest first."""
    figure = Figure()
    axes = figure.add_subplot(yscale="log", xlabel="singular values, largest first")
    for iterations, (name, color) in CURVES.items():
        result = train_gpt.newton_schulz(gradient[None], iterations)[0]
        values = torch.linalg.svdvals(result).tolist()
        axes.plot(range(1, len(values) + 1), values, color=color, linewidth=2)
        label = f"{name}:\n{values[-1]:.2g} to {values[0]:.2g}"
        style = {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "color": color}
        axes.annotate(label, (len(values), values[-1]), annotation_clip=False, **style)
    axes.set(xlim=(1, len(values)), ylabel="singular value")
    axes.set_yticks([0.001, 0.01, 0.1, 1], ["0.001", "0.01", "0.1", "1"])
    axes.set_title("Newton-Schulz brings the singular values of an update closer together")
    return figure


if __name__ == "__main__":
    pictures = {"schedule": draw_schedule(), "newton_schulz": draw_newton_schulz(read_gradient(20))}
    for name, figure in pictures.items():
        figure.savefig(ROOT / f"tests/figures/{name}.svg", metadata={"Date": None})
