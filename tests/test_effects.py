"""The tables and the picture of tests/recipes/README.md show the figures of effects.csv."""

import re
from math import pi, tan

import effects
import pytest
from effects import COLORS, RECIPES, ROW
from matplotlib import rc_context
from matplotlib.colors import to_hex
from scripts import NAMES, RECORD, RECORD_1493

pytestmark = pytest.mark.baseline

RUN_IT = "run python tests/tools/effects.py, which writes the table and the picture"
ROWS = effects.read_rows()


def read_page() -> str:
    return (RECIPES / "README.md").read_text(encoding="utf-8")


def test_each_patch_has_a_row():
    table = re.search(r"^\|.*here by seed.*\n\|[-|]+\n((?:\|.*\n)+)", read_page(), re.M)[1]
    assert sorted({match[2] for match in ROW.finditer(table)}) == NAMES
    assert all(line.count(" | ") == 4 for line in table.splitlines())


def test_the_tables_have_the_figures_of_the_file():
    page = read_page()
    found = [(match[2], match[3] or "") for match in ROW.finditer(page)]
    assert len(set(found)) == len(found)
    assert {(row["recipe"], row["setting"]) for row in ROWS} <= set(found)
    assert effects.fill(page, ROWS) == page, RUN_IT


def test_one_rule_for_better_and_worse():
    """p below 0.01, not an interval that leaves out zero. With two seeds, t has a Cauchy
    distribution, so the interval that belongs to a p is known by hand."""
    for p, is_shown in (0.0099, True), (0.0101, False), (0.02, False), (0.3, False):
        half = 0.5 / tan(pi * (0.5 - p)) * tan(pi * 0.475)
        for effect, word in (-0.5, "better"), (0.5, "worse"):
            figures = {"effect": effect, "low": effect - half, "high": effect + half, "seeds": 2}
            row = {name: str(figure) for name, figure in figures.items()}
            assert effects.p_of_direction(row) == pytest.approx(p)
            assert effects.verdict(row) == (word if is_shown else "not shown")


def test_fill_replaces_the_cells():
    names = ("recipe", "setting", "effect", "low", "high", "seeds")
    figures = ["ema,,-0.50,-0.60,-0.40,2", "ema,width 320,0.50,0.40,0.60,2"]
    rows = [dict(zip(names, line.split(","), strict=True)) for line in figures]
    others = "| `LR=2` | x | y | {} | — |\n| Other | x | old |\n"
    page = "| [ema](#ema) | x | y | {} | +1 |\n| [ema](#ema): width 320 |  |  | {} | — |\n" + others
    cells = "−0.50 (−0.60 to −0.40), better", "+0.50 (+0.40 to +0.60), worse", "—"
    assert effects.fill(page.format("old", "old", "old"), rows) == page.format(*cells)


def test_the_files_p_is_that_of_its_interval():
    for row in ROWS:
        p = effects.p_of_direction(row)
        p = p if float(row["effect"]) <= 0 else 1 - p
        assert p == pytest.approx(float(row["p"]), rel=0.5, abs=0.03), row


def test_the_picture_shows_the_rows():
    """Best first; colors by verdict; the words on their side of zero."""
    with rc_context(effects.STYLE):
        axes = effects.draw(ROWS).axes[0]
        axes.figure.draw_without_rendering()
    *lines, zero = axes.lines
    rows = sorted(ROWS, key=lambda row: float(row["effect"]))
    figures = [[float(row[name]) for name in ("low", "effect", "high")] for row in rows]
    assert [list(line.get_xdata()) for line in lines] == figures
    assert [set(line.get_ydata()) for line in lines] == [{y} for y in range(len(rows))]
    colors = [COLORS[effects.verdict(row)] for row in rows]
    assert [to_hex(line.get_color()) for line in lines] == colors
    assert all(line.get_markevery() == [1] for line in lines)
    assert axes.yaxis_inverted() and set(zero.get_xdata()) == {0}
    assert f"log scale beyond ±{axes.xaxis.get_transform().linthresh}" in axes.get_xlabel()
    middle = axes.transData.transform((0, 0))[0]
    better, worse = (text.get_window_extent() for text in axes.texts)
    assert better.x1 < middle < worse.x0 and better.y0 > axes.transData.transform((0, 0))[1]
    labels = axes.yaxis.get_majorticklabels()
    assert [label.get_text() for label in labels] == [effects.label(row) for row in rows]
    whole = axes.figure.bbox
    boxes = [text.get_window_extent() for text in (*labels, axes.xaxis.label)]
    assert all(whole.x0 <= box.x0 and box.x1 <= whole.x1 for box in boxes)


def test_the_page_and_the_picture_are_up_to_date(tmp_path):
    (tmp_path / "effects.csv").write_bytes((RECIPES / "effects.csv").read_bytes())
    (tmp_path / "README.md").write_text(read_page().replace(", better", ""), encoding="utf-8")
    effects.write(tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == read_page(), RUN_IT
    texts, colors = [], []
    for folder in (tmp_path, RECIPES):
        picture = (folder / "effects.svg").read_text(encoding="utf-8")
        texts.append(re.findall(r">([^<>]+)</text>", picture))
        colors.append(re.findall(r"stroke: (#\w{6}); stroke-width: 1.5", picture))
    assert texts[0] == texts[1] and colors[0] == colors[1], RUN_IT
    assert len(texts[0]) > len(ROWS) <= len(colors[0])


def test_the_records_are_made_of_patches():
    assert set(RECORD) < set(RECORD_1493) <= set(NAMES)
