"""Draw what eight mistakes do to the weights of targets, measured on two ranks.

    python tests/figures/mistakes.py

It writes tests/figures/mistakes.svg: the second step after each edit of ACCUMULATION.md's loop
(tests/helpers/loops.py). Needs matplotlib."""

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

FOLDER = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(FOLDER / "tools"), str(FOLDER / "helpers")]

import check_accumulation  # noqa: E402
import loops  # noqa: E402

NAMES = (
    "zeroed too early", "flag set too late", "off by one", "never exchanged", "mean of means",
    "each rank alone", "not divided by the micro-steps", "divided twice",
)  # fmt: skip


def main() -> None:
    panels = []
    for name in NAMES:
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "loop.py")
            script.write_text(loops.wrong_loop(name))
            args = SimpleNamespace(steps=2, minutes=10, verbose=False, words=[str(script)])
            code = check_accumulation.run_ranks(2, args, Path(folder))
            steps, _ = check_accumulation.check(2, code, args, Path(folder))
        panels.append((name, steps[-1]))
    check_accumulation.draw(panels, FOLDER / "figures/mistakes.svg")


if __name__ == "__main__":
    main()
