"""Draw two pictures of README.md: learning rate and Muon's momentum over a run of the demo and a
default run; what Newton-Schulz does to the singular values of an MLP's gradient in step 20.

    PRESET=demo python tests/figures/draw_pictures.py

Start it where the demo ran. It writes into tests/figures, and needs matplotlib."""

import os
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/tools")]

from demo_curve import Figure  # noqa: E402  (with its style)

import train_gpt  # noqa: E402

# Preset, title, steps, milliseconds of a step, why the rate falls. The time limit ends the default.
RUNS = [
    ("demo", "the demo: 200 steps", 200, 583.5, "WARMDOWN_FRAC=0.8:\nfalls for 80 % of the run"),
    ("", "the default: 600 s, 13,780 steps of 43.5 ms", 13_780, 43.5,
     "WARMDOWN_ITERS=1200:\nfalls for the time\nof the last 1,200 steps"),
]  # fmt: skip
SMALLEST = 0.003  # singular values below it need more than five iterations
CURVES = {0: ("divided by its norm", "C7"), 1: ("1 iteration", "C2")}
CURVES |= {3: ("3 iterations", "C1"), 5: ("5 iterations", "C0")}


def draw_schedule() -> Figure:
    """Draw learning rates (left axis) and Muon's momentum (right axis) over two runs."""
    figure = Figure()
    for place, (preset, title, steps, ms, reason) in enumerate(RUNS, 1):
        hp = train_gpt.Hyperparameters.from_env({"PRESET": preset})
        factors = [train_gpt.lr_factor(hp, step, step * ms) for step in range(steps + 1)]
        momenta = [train_gpt.muon_momentum(hp, step) for step in range(steps + 1)]
        axes = figure.add_subplot(1, 2, place, title=title, xlabel="step", ylim=(0, 1.1))
        axes.plot(factors, linewidth=2, color="C0")
        axes.set_xticks([0, steps // 2, steps], [f"{n:,}" for n in (0, steps // 2, steps)])
        axes.text(0.45 * steps, 0.12, reason, color="C0", ha="center", fontsize="small")
        right = axes.twinx()
        right.plot(momenta, linewidth=2, color="C1")
        right.set(ylim=(0.8, 1.02))
        right.spines["right"].set_visible(True)
        for side, color in ((axes, "C0"), (right, "C1")):
            side.tick_params(axis="y", colors=color)
        if place == 1:
            axes.set_ylabel("learning rates / base values", color="C0")
        else:
            right.set_ylabel("Muon's momentum", color="C1")
    return figure


def read_gradient(steps: int) -> torch.Tensor:
    """Train, then return the last gradient of an MLP's first matrix, with the short side first."""
    hp = train_gpt.Hyperparameters.from_env(os.environ)
    runtime = train_gpt.Runtime(0, 1, torch.device("cpu"), torch.float32, False)
    state = train_gpt.TrainingState(hp, runtime)
    for _ in range(steps):
        train_gpt.train_step(state)
    gradient = state.gpt.blocks[hp.num_layers // 2].mlp.fc.weight.grad
    return gradient.mT if gradient.size(0) > gradient.size(1) else gradient


def draw_newton_schulz(gradient: torch.Tensor) -> Figure:
    """Draw each singular value after some iterations against its value before."""
    figure = Figure()
    axes = figure.add_subplot(xscale="log", yscale="log", ylabel="singular value")
    axes.set_title("Newton-Schulz on the gradient of an MLP's matrix, step 20 of the demo")
    left, values, right = torch.linalg.svd(gradient / gradient.norm(), full_matrices=False)
    shown = values >= SMALLEST
    for iterations, (name, color) in CURVES.items():
        result = train_gpt.newton_schulz(gradient[None], iterations)[0]
        # The iterations keep the singular vectors, but not the order of the values.
        after = torch.einsum("ri,rc,ic->i", left, result, right)[shown].tolist()
        axes.plot(values[shown].tolist(), after, ".-", color=color, linewidth=1)
        text = f"{name}:\n{min(after):.2g} to {max(after):.2g}"
        style = {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "color": color}
        axes.annotate(text, (values[shown][-1].item(), after[-1]), annotation_clip=False, **style)
    axes.invert_xaxis()  # largest first
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    count = f"the {int(shown.sum())} of {len(values)} from {SMALLEST} on"
    axes.set_xlabel(f"singular value of the gradient divided by its norm: {count}")
    return figure


if __name__ == "__main__":
    pictures = {"schedule": draw_schedule(), "newton_schulz": draw_newton_schulz(read_gradient(20))}
    for name, figure in pictures.items():
        figure.savefig(ROOT / f"tests/figures/{name}.svg", metadata={"Date": None})
