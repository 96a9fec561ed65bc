"""Draw learning rate and Muon's momentum over a run of the demo and of the default, for README.md.

    python tests/helpers/draw_schedule.py tests/pictures/schedule.svg

Needs matplotlib."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/tools")]

from demo_curve import Figure  # noqa: E402  (with its style)

from train_gpt import Hyperparameters, lr_factor, muon_momentum  # noqa: E402

# Preset, title, steps, milliseconds of a step. In the default run the time limit ends the training.
RUNS = [
    ("demo", "the demo: 200 steps", 200, 583.5),
    ("", "the default: 600 s, 13,780 steps of 43.5 ms", 13_780, 43.5),
]


def draw() -> Figure:
    figure = Figure()
    for place, (preset, title, steps, ms) in enumerate(RUNS, 1):
        hp = Hyperparameters.from_env({"PRESET": preset})
        factors = [lr_factor(hp, step, step * ms) for step in range(steps + 1)]
        momenta = [muon_momentum(hp, step) for step in range(steps + 1)]
        axes = figure.add_subplot(1, 2, place, title=title, xlabel="step", ylim=(0, 1.1))
        [rate] = axes.plot(factors, linewidth=2)
        [momentum] = axes.plot(momenta, linewidth=2)
    names = ["learning rates, as multiples of their base values", "Muon's momentum"]
    figure.legend([rate, momentum], names, loc="outside lower center", ncols=2, frameon=False)
    return figure


if __name__ == "__main__":
    draw().savefig(sys.argv[1], metadata={"Date": None})
