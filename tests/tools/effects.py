"""Fill the column "here by seed" of tests/recipes/README.md from effects.csv; draw effects.svg.
Start it with `python tests/tools/effects.py`. Needs matplotlib."""

import csv
import re
from pathlib import Path

RECIPES = Path(__file__).parents[1] / "recipes"
ROW = re.compile(r"^(\| [\[`]([^\]`]+).*\| )[^|]*( \| [^|]* \|)$", re.M)  # begins with [ or `
COLORS = {"better": "#1667b7", "worse": "#c4420f", "not shown": "#777777"}


def verdict(row: dict[str, str]) -> str:
    return "better" if float(row["p"]) < 0.01 else "worse" if float(row["low"]) > 0 else "not shown"


def signed(figure: str) -> str:
    return figure.replace("-", "−") if figure.startswith("-") else "+" + figure


def fill(page: str, rows: list[dict[str, str]]) -> str:
    """Return the page with all effects of a recipe in its cell, or a dash."""
    cells = {}
    for row in rows:
        setting = f"{row['setting']}: " if row["setting"] else ""
        effect, low, high = (signed(row[name]) for name in ("effect", "low", "high"))
        cell = f"{setting}{effect} ({low} to {high}), {verdict(row)}"
        cells.setdefault(row["recipe"], []).append(cell)
    return ROW.sub(lambda match: match[1] + "; ".join(cells.get(match[2], "—")) + match[3], page)


def draw(rows: list[dict[str, str]], picture: Path) -> None:
    """Draw the effects, best first, on white, so that they can be read on a dark page, too."""
    from matplotlib import pyplot

    pyplot.rc("svg", fonttype="none", hashsalt="")
    pyplot.rc("font", **{"size": 9, "sans-serif": "DejaVu Sans"})  # one name: a small file
    figure = pyplot.figure(figsize=(8.5, 0.2 * len(rows) + 1), layout="constrained")
    axes = figure.add_subplot(frame_on=False)
    labels = []
    for y, row in enumerate(sorted(rows, key=lambda row: float(row["effect"]))):
        x = [float(row[name]) for name in ("low", "effect", "high")]
        axes.plot(x, 3 * [y], color=COLORS[verdict(row)], marker="o", ms=4.5, markevery=[1])
        name = f"{row['recipe']} ({row['setting']})".removesuffix(" ()")
        labels.append(f"{name} {signed(row['effect'])}")
    axes.set_yticks(range(len(rows)), labels)
    axes.axvline(0, color="black", linewidth=0.8, zorder=0)
    axes.text(0, -1, "← better    worse →", ha="center", va="center", weight="bold")
    axes.set_ylim(len(rows) - 0.3, -1.7)
    axes.set_xlabel("loss with minus without, nats unless marked\n95 % interval; gray: not shown")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    rows = list(csv.DictReader((RECIPES / "effects.csv").open(encoding="utf-8")))
    page = RECIPES / "README.md"
    page.write_text(fill(page.read_text(encoding="utf-8"), rows), encoding="utf-8")
    draw(rows, RECIPES / "effects.svg")
