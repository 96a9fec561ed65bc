"""Fill the column "here by seed" of tests/recipes/README.md from effects.csv; draw effects.svg.
Start it with `python tests/tools/effects.py`. Needs matplotlib and scipy."""

import csv
import re
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from scipy import stats

RECIPES = Path(__file__).parents[1] / "recipes"
# A row of a table: a recipe as [a link](#it) or `code`, then perhaps a colon and the setting.
ROW = re.compile(
    r"^(\| [\[`]([^\]`]+)(?:\]\([^)]*\)|`)(?:: ([^|]+))? \| .*\| )[^|]*( \| [^|]* \|)$", re.M
)
COLORS = {"better": "#1667b7", "worse": "#c4420f", "not shown": "#777777"}
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "",  # the same file each time
    "font.sans-serif": "DejaVu Sans",  # one name: a small file
    "font.size": 9,
}
Row = dict[str, str]  # of effects.csv


def read_rows(folder: Path = RECIPES) -> list[Row]:
    with (folder / "effects.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def verdict(row: Row) -> str:
    """Better or worse if the 98 % interval is on one side of 0, so that p, one-sided and in the
    direction of the effect, is below 0.01. The file's own p is that of "better"."""
    effect, low, high = (float(row[name]) for name in ("effect", "low", "high"))
    quantiles = stats.t.isf([0.01, 0.025], int(row["seeds"]) - 1)  # of 98 % and 95 % intervals
    if abs(effect) <= (high - low) / 2 * quantiles[0] / quantiles[1]:
        return "not shown"
    return "better" if effect < 0 else "worse"


def signed(figure: str) -> str:
    return figure.replace("-", "−") if figure.startswith("-") else "+" + figure


def label(row: Row) -> str:
    return f"{row['recipe']} ({row['setting']})".removesuffix(" ()") + f" {signed(row['effect'])}"


def fill(page: str, rows: list[Row]) -> str:
    """Return the page with the effect of each recipe and setting in its row, or a dash."""
    cells = {}
    for row in rows:
        effect, low, high = (signed(row[name]) for name in ("effect", "low", "high"))
        cell = f"{effect} ({low} to {high}), {verdict(row)}"
        cells[row["recipe"], row["setting"]] = cell
    return ROW.sub(lambda m: m[1] + cells.get((m[2], m[3] or ""), "—") + m[4], page)


def draw(rows: list[Row]) -> Figure:
    """Draw the effects, best first, on white, so that they can be read on a dark page, too."""
    figure = Figure(figsize=(8.5, 0.2 * len(rows) + 1), layout="constrained")
    axes = figure.add_subplot(frame_on=False)
    rows = sorted(rows, key=lambda row: float(row["effect"]))
    for y, row in enumerate(rows):
        x = [float(row[name]) for name in ("low", "effect", "high")]
        axes.plot(x, 3 * [y], color=COLORS[verdict(row)], marker="o", ms=4.5, markevery=[1])
    axes.set_yticks(range(len(rows)), [label(row) for row in rows])
    axes.set_ylim(len(rows) - 0.3, -1.7)
    axes.set_xscale("symlog", linthresh=0.01, linscale=0.7)  # most effects are small
    ticks = (-0.3, -0.1, -0.03, 0, 0.03, 0.1)
    axes.set_xticks(ticks, [f"{tick:g}".replace("-", "−") for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.axvline(0, color="black", linewidth=0.8, zorder=0)
    for words, align, x in ("← better", "right", -6), ("worse →", "left", 6):
        style = {"ha": align, "va": "center", "weight": "bold", "textcoords": "offset points"}
        axes.annotate(words, (0, -1), (x, 0), color=COLORS[words.strip("← →")], **style)
    axes.set_xlabel(
        "loss with minus without, nats unless marked\n"
        "95 % interval; gray: not shown; log scale beyond ±0.01"
    )
    axes.grid(axis="x", alpha=0.3)
    return figure


def write(folder: Path) -> None:
    """Write the table and the picture into the folder of effects.csv."""
    rows, page = read_rows(folder), folder / "README.md"
    page.write_text(fill(page.read_text(encoding="utf-8"), rows), encoding="utf-8")
    with rc_context(STYLE):
        draw(rows).savefig(folder / "effects.svg", metadata={"Date": None})


if __name__ == "__main__":
    write(RECIPES)
