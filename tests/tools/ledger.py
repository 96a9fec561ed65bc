"""The ledger of experiment.py: a table with a row for each change, --by and first seed."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import anytime
from trained import files


def seeds_of(rows: Iterable[dict]) -> list[int]:
    return [int(seed) for row in rows for seed in row["seeds"].split()]


def fresh_seeds(number: int, stored: Iterable[int]) -> list[int]:
    """Return the smallest seeds from 1 on that are not among the stored ones."""
    stored = {*stored}
    return [seed for seed in range(1, number + len(stored) + 1) if seed not in stored][:number]


def read(path: Path) -> list[dict]:
    """Read the rows. Raises ValueError with the line that is damaged."""
    text = path.read_text(encoding="utf-8-sig", errors="replace") if path.exists() else ""
    header, *lines = [line.split("\t") for line in text.splitlines() if line] or [[]]
    rows = []
    for number, fields in enumerate(lines, start=2):
        try:
            row = dict(zip(header, fields, strict=True))
            numbers = [int(row["first_seed"]), int(row["pairs"]), *seeds_of([row])]
            numbers += [float(row["evidence"]), float(row["by"])]
            if math.isnan(sum(numbers)) or not {"baseline", "candidate", "verdict"} <= {*row}:
                raise ValueError(row)
        except (KeyError, ValueError):
            raise ValueError(f"{path}, line {number} is damaged: correct or delete it") from None
        rows.append(row)
    return rows


def write(path: Path, rows: list[dict]) -> None:
    """Write the rows. A field has no tabs or line ends, which would break the table."""
    header = list(dict.fromkeys(name for row in reversed(rows) for name in row))
    table = [header, *([row.get(name, "") for name in header] for row in rows)]
    lines = ["\t".join(" ".join(field.split()) for field in fields) + "\n" for fields in table]
    files.write_file(path, "".join(lines).encode(errors="backslashreplace"))


def update(path: Path, row: dict, gains_of: Callable[[list[int]], dict[int, float]]) -> None:
    """Write a row in place of the one with the same change, margin and first seed. All rows of the
    change and the margin get the evidence of all their seeds, and `worse` if one diverged."""
    rows = read(path)
    change = [old for old in rows if all(old[k] == row[k] for k in ("baseline", "candidate", "by"))]
    same = [old for old in change if old["first_seed"] == row["first_seed"]]
    # The first `pairs` seeds are those of the gain; then come others that the row has had.
    row["seeds"] = " ".join(map(str, dict.fromkeys(seeds_of([row, *same]))))
    seeds = [*dict.fromkeys(seeds_of([*change, row]))]
    gains = gains_of(seeds)
    evidence = anytime.evidence([*gains.values()], float(row["by"]))
    diverged = " ".join(str(seed) for seed, gain in gains.items() if gain == -math.inf)
    found = {"evidence": f"{evidence:.3g}", "diverged": diverged}  # not the last: may be empty
    found |= {"evidence_seeds": " ".join(map(str, seeds))}
    for each in (row, *change):
        each |= {**found, "verdict": "worse" if diverged else each["verdict"]}
    write(path, [*(old for old in rows if old not in same), row])


def claims(rows: list[dict]) -> dict[tuple[str, str], dict]:
    """Return a row for each change: of those with its smallest margin, one that is better, if any.
    A margin below 0 claims no gain."""
    order = sorted(rows, key=lambda row: (-float(row["by"]), row["verdict"] == "better"))
    # Of rows with the same key, the last one stays.
    return {(row["baseline"], row["candidate"]): row for row in order if float(row["by"]) >= 0}
