"""The tables and the picture of tests/recipes/README.md show the figures of effects.csv."""

import csv
import re

import pytest
from test_recipes import NAMES, RECIPES, RECORD, RECORD_1493

pytestmark = pytest.mark.baseline

RUN_IT = "run python tests/tools/effects.py, which writes the table and the picture"


def read_effects() -> list[dict[str, str]]:
    with (RECIPES / "effects.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_tables() -> list[dict[str, list[str]]]:
    """Return the cells of each row by its name, of each table with a column "here by seed"."""
    page = (RECIPES / "README.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\|.*here by seed.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.M)
    rows = [[line.strip("| ").split(" | ") for line in table.splitlines()] for table in tables]
    return [{re.match(r"\W*([\w=]+)", cells[0])[1]: cells for cells in table} for table in rows]


def test_each_patch_has_a_row():
    assert sorted(read_tables()[0]) == NAMES


def test_the_tables_have_the_figures_of_the_file():
    cells = {name: row for table in read_tables() for name, row in table.items()}
    effects = read_effects()
    assert {row["recipe"] for row in effects} <= set(cells)
    for name, row in cells.items():
        assert len(row) == 5, name
        own = [effect for effect in effects if effect["recipe"] == name]
        found = re.findall(r"[−+]\d+\.\d+", row[3])
        wanted = [effect[column] for effect in own for column in ("effect", "low", "high")]
        assert [float(figure.replace("−", "-")) for figure in found] == [*map(float, wanted)], (
            RUN_IT
        )
        assert all(effect["setting"] in row[3] for effect in own), RUN_IT
        better = [effect for effect in own if float(effect["p"]) < 0.01]
        assert row[3].count("better") == len(better), RUN_IT
        worse = [effect for effect in own if float(effect["low"]) > 0]
        assert row[3].count("worse") == len(worse), RUN_IT
        assert own or row[3] == "—", RUN_IT


def test_the_picture_has_the_figures_of_the_file():
    picture = (RECIPES / "effects.svg").read_text(encoding="utf-8")
    for effect in read_effects():
        name = f"{effect['recipe']} ({effect['setting']})".removesuffix(" ()")
        figure = re.escape(effect["effect"].lstrip("-"))
        assert re.search(rf">{re.escape(name)} [−+]{figure}<", picture), f"{name}: {RUN_IT}"


def test_the_records_are_made_of_patches():
    assert set(RECORD) < set(RECORD_1493) <= set(NAMES)
