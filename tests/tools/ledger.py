"""The ledger of experiment.py: a table with a row for each change, --by and first seed."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import anytime
from trained import files

Row = dict[str, str]
NEEDED = {"baseline", "candidate", "first_seed", "pairs", "evidence", "verdict"}


def seeds_of(rows: Iterable[Row]) -> list[int]:
    return [int(seed) for row in rows for seed in row["seeds"].split()]


def fresh_seeds(number: int, stored: Iterable[int]) -> list[int]:
    """Return the smallest seeds from 1 on that are not among the stored ones."""
    stored = {*stored}
    return [seed for seed in range(1, number + len(stored) + 1) if seed not in stored][:number]


def parse(fields: list[str], header: list[str]) -> Row:
    """Convert a line to a row. Raises ValueError if it is damaged."""
    if len(fields) != len(header):
        raise ValueError(f"{len(fields)} columns, not {len(header)}")
    row = dict(zip(header, fields, strict=True))
    first, pairs = int(row["first_seed"]), int(row["pairs"])
    # Earlier versions had neither column, and this margin.
    row.setdefault("by", "0.005")
    row.setdefault("seeds", " ".join(map(str, range(first, first + pairs))))
    if math.isnan(float(row["evidence"]) + float(row["by"]) + sum(seeds_of([row]))):
        raise ValueError("nan is not a number")
    return row


def read(path: Path) -> list[Row]:
    """Read the rows. Raises ValueError with the line that is damaged."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            fields = line.decode("utf-8-sig").rstrip("\r").split("\t")
            if number == 1:
                header = fields
                if missing := NEEDED - {*header}:
                    raise ValueError(f"no column {min(missing)}")
            elif fields != [""]:
                rows.append(parse(fields, header))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}: correct or delete it") from None
    return rows


def write(path: Path, rows: list[Row]) -> None:
    """Write the rows. A field has no tabs or line ends, which would break the table."""
    header = list(dict.fromkeys(name for row in reversed(rows) for name in row))
    table = [header, *([row.get(name, "") for name in header] for row in rows)]
    lines = ["\t".join(" ".join(field.split()) for field in fields) + "\n" for fields in table]
    files.write_file(path, "".join(lines).encode(errors="backslashreplace"))


def update(path: Path, row: Row, evidence: Callable[[list[int]], float]) -> None:
    """Write a row in place of the one with the same change, margin and first seed. All rows of the
    change and the margin get the evidence of all their seeds."""
    rows = read(path)
    change = [old for old in rows if all(old[k] == row[k] for k in ("baseline", "candidate", "by"))]
    same = [old for old in change if old["first_seed"] == row["first_seed"]]
    # The first `pairs` seeds are those of the gain; then come others that the row has had.
    row["seeds"] = " ".join(map(str, dict.fromkeys(seeds_of([row, *same]))))
    found = f"{evidence(seeds_of([row, *change])):.3g}"
    for each in (row, *change):
        each["evidence"] = found
    write(path, [*(old for old in rows if old not in same), row])


def claims(rows: list[Row]) -> dict[tuple[str, str], tuple[float, bool]]:
    """Return for each change (its two sides) the evidence, and whether a verdict is "better". A
    margin below 0 claims no gain, so its rows do not count."""
    changes: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if float(row["by"]) >= 0:
            changes.setdefault((row["baseline"], row["candidate"]), []).append(row)
    found = {}
    for sides, own in changes.items():
        # The claim of the smallest margin. Its rows have one evidence, but not in old ledgers.
        row = min(own, key=lambda row: (float(row["by"]), -int(row["pairs"])))
        is_better = any(row["verdict"] == "better" for row in own)
        found[sides] = (float(row["evidence"]), is_better)
    return found


def describe(rows: list[Row]) -> str:
    """Count the changes, those that are better, and those of them that stand together."""
    found = claims(rows).values()
    stands = anytime.claims_that_stand([evidence for evidence, _ in found])
    better = [is_better for _, is_better in found]
    stand = sum(map(all, zip(better, stands, strict=True)))
    return f"changes tried: {len(better)}, better: {sum(better)}, stand together: {stand}"
