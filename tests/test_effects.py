"""The tables and the picture of tests/recipes/README.md show the figures of effects.csv."""

import re
from math import pi, tan

import effects
import pytest
from effects import COLORS, RECIPES, ROW
from matplotlib.colors import to_hex
from scipy import stats
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


def test_each_figure_of_the_file_has_one_row():
    found = [(match[2], match[3] or "") for match in ROW.finditer(read_page())]
    assert len(set(found)) == len(found)
    assert {(row["recipe"], row["setting"]) for row in ROWS} <= set(found)


def test_one_rule_for_better_and_worse():
    """p below 0.01, not an interval that leaves out zero. With two seeds, t has a Cauchy
    distribution, so the interval that belongs to a p is known by hand."""
    for p, is_shown in (0.0099, True), (0.0101, False), (0.02, False), (0.3, False):
        half = 0.5 / tan(pi * (0.5 - p)) * tan(pi * 0.475)
        for effect, word in (-0.5, "better"), (0.5, "worse"):
            figures = {"effect": effect, "low": effect - half, "high": effect + half, "seeds": 2}
            assert effects.verdict(figures) == (word if is_shown else "not shown")


def test_the_files_p_is_that_of_its_interval():
    for row in ROWS:
        effect, low, high = (float(row[name]) for name in ("effect", "low", "high"))
        degrees_of_freedom = int(row["seeds"]) - 1
        standard_error = (high - low) / 2 / stats.t.isf(0.025, degrees_of_freedom)
        p = stats.t.cdf(effect / standard_error, degrees_of_freedom)
        assert p == pytest.approx(float(row["p"]), rel=0.5, abs=0.03), row


def test_the_picture_shows_the_rows():
    """Best first; the color is the verdict's."""
    axes = effects.draw(ROWS).axes[0]
    rows = sorted(ROWS, key=lambda row: float(row["effect"]))
    for line, row in zip(axes.lines, rows, strict=False):  # the line at zero comes last
        assert list(line.get_xdata()) == [float(row[name]) for name in ("low", "effect", "high")]
        assert to_hex(line.get_color()) == COLORS[effects.verdict(row)]
    labels = [label.get_text() for label in axes.yaxis.get_majorticklabels()]
    assert labels == [effects.label(row) for row in rows]
    assert axes.yaxis_inverted()


def test_the_page_and_the_picture_are_up_to_date(tmp_path):
    (tmp_path / "effects.csv").write_bytes((RECIPES / "effects.csv").read_bytes())
    (tmp_path / "README.md").write_text(read_page().replace(", better", ""), encoding="utf-8")
    effects.write(tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == read_page(), RUN_IT
    shown = re.compile(r">([^<>]+)</text>|stroke: (#\w{6}); stroke-width: 1.5")
    drawn, kept = (
        shown.findall((folder / "effects.svg").read_text(encoding="utf-8"))
        for folder in (tmp_path, RECIPES)
    )
    assert drawn == kept and len(kept) > 2 * len(ROWS), RUN_IT


def test_the_records_are_made_of_patches():
    assert set(RECORD) < set(RECORD_1493) <= set(NAMES)
