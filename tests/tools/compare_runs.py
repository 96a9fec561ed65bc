"""Show the losses and scores of runs, or test whether a change makes them better:

    python tests/tools/compare_runs.py               # the newest log in logs/, with a picture
    python tests/tools/compare_runs.py logs/*.txt --picture loss.png
    python tests/tools/compare_runs.py --baseline logs/base-*.txt --candidate logs/silu-*.txt

A log is logs/RUN_ID.txt or the printed output of a run; the run may still be going. The runs of a
side should differ only by their seed. Exit code 0: better, or there is nothing to test. 1: worse,
not better, or not yet. 2: it could not be tested, or an argument or a file is wrong. 3: nothing to
draw. Needs pip install scipy matplotlib."""

import math
import os
import sys
from dataclasses import dataclass
from itertools import combinations, islice, product
from pathlib import Path
from statistics import fmean, stdev
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for python -P

import anytime
import numpy as np
from logs import Run, list_checksums, list_texts, read_run
from matplotlib import colormaps, rcParams
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from trained import check_picture, existing_file, files, start_program

# Facts in which all finished runs should agree; the first two depend on the tokenizer.
SHARED_FACTS = ("data", "validation", "batch", "length", "time_limit", "stride")
# Columns of the table: width and format.
COLUMNS = {
    "seed": (8, ".0f"), "steps": (7, ".0f"), "ms_per_step": (13, ".2f"),
    "val_loss": (10, ".6f"), "val_bpb": (10, ".6f"), "peak_memory_mib": (17, ".0f"),
    "artifact_bytes": (16, ",.0f"), "bytes_total": (13, ",.0f"),
}  # fmt: skip
AVERAGED = [name for name in COLUMNS if name not in ("seed", "steps", "peak_memory_mib")]


# ---- the runs -----------------------------------------------------------------------------------
@dataclass
class Group:
    """A side, whose runs should differ only by their seed, or any runs ("runs")."""

    name: str
    runs: list[Run]

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if not run.unfinished]

    def values(self, figure: str) -> list[float]:
        """This figure of the finished runs that have it."""
        return [run.figures[figure] for run in self.finished if figure in run.figures]

    def find_repeat(self) -> str:
        """Name two logs of one model, which are not two samples, or return "". Such logs have one
        seed and the same training losses, or no training losses (logs of score.py)."""
        for a, b in combinations(self.finished, 2):
            is_one_seed = a.facts.get("seed") == b.facts.get("seed")
            is_score_only = "seed" in a.facts and not (a.train and b.train)
            is_one_curve = is_score_only or a.train == b.train != {}
            if a.crc32 == b.crc32 or (is_one_seed and is_one_curve):
                return f"{a.path} and {b.path} are one run, or scores of one model: keep one"
        return ""


def common_unit(runs: list[Run], tolerance: float) -> str:
    """Return "nats" (per token) if all runs have the same tokens, else "bits per byte"."""
    factors = [run.bpb_per_nat for run in runs if not math.isnan(run.bpb_per_nat)] or [0.0]
    return "nats" if max(factors) - min(factors) < tolerance else "bits per byte"


def list_different(runs: list[Run], fact: str) -> str:
    """List the values of a fact, or return "" if all runs agree. Runs may lack it."""
    values = sorted({value for run in runs if (value := run.facts.get(fact))})
    return ", ".join(values) if len(values) > 1 else ""


def find_warnings(groups: list[Group]) -> list[str]:
    """List differences that make a comparison meaningless."""
    runs = [run for group in groups for run in group.finished]
    warnings, facts = [], SHARED_FACTS
    if any(list_different(runs, fact) for fact in ("tokenizer", "tokenizer_crc")):
        facts = SHARED_FACTS[2:]  # compare the bytes of the validation texts
        if texts := list_texts(runs):
            warnings.append(f"the runs differ in validation text: {texts}")
    for fact in facts:
        if values := list_different(runs, fact):
            warnings.append(f"the runs differ in {fact}: {values}")
    for group in groups if groups[0].name != "runs" else ():
        seeds = group.values("seed")
        if len({*seeds}) < len(seeds):
            warnings.append(f"{group.name}: runs have the same seed")
    return warnings


# ---- the verdict ---------------------------------------------------------------------------------
def pair_by_seed(sides: list[list[Run]]) -> list[tuple[Run, Run]]:
    """Pair all runs of the smaller side by their seed. Returns [] if a seed is missing or repeated,
    or if the scripts differ: the same seed then gives other weights."""
    first, second = ({run.facts.get("seed", ""): run for run in side} for side in sides)
    seeds = sorted(first.keys() & second.keys() - {""}, key=int)
    is_repeated = len(first) + len(second) < sum(map(len, sides))
    is_missing = len(seeds) < min(map(len, sides))
    if is_repeated or is_missing or list_different(sum(sides, []), "score"):
        return []
    return [(first[seed], second[seed]) for seed in seeds]


def find_obstacle(groups: list[Group]) -> str:
    """Say why the sides cannot be compared, or return ""."""
    for group in groups:
        for run in group.runs:
            if not math.isfinite(run.figures.get("val_loss", 0)):
                return f"{group.name}: {run.path} diverged: {run.unfinished}"
        if len(group.finished) < 2:
            return f"{group.name}: {len(group.finished)} finished; each side needs two or more"
        if repeat := group.find_repeat():
            return f"{group.name}: {repeat}"
        if len({*group.values("val_loss")}) == 1:
            return f"{group.name}: all runs end with the same loss: let the script use its seed"
    for a, b in product(*(group.finished for group in groups)):
        known = [(run.facts.get("seed"), run.facts["val_loss"], run.train) for run in (a, b)]
        if a.crc32 == b.crc32 or known[0] == known[1]:
            return f"{a.path} and {b.path} are one run, or the change does nothing"
    runs = sum((group.finished for group in groups), [])
    if checksums := list_checksums(runs):
        return f"SCORES OF DIFFERENT VALIDATION TEXTS (checksums {checksums})"
    for mark, name in (("stride", "STRIDES"), ("part", "PARTS OF THE TEXT")):
        if values := list_different(runs, mark):
            return f"SCORES OF DIFFERENT {name} ({values}): score the models again alike"
    return ""


def judge(groups: list[Group], by: float, alpha: float) -> tuple[int, str]:
    """Compare pairs of one seed, else all runs. Returns the exit code and the verdict, or why there
    is none. Nobody is better by the digits that a log lacks: then the baseline's losses are half a
    unit of the last digit lower, and the candidate's half a unit higher."""
    if obstacle := find_obstacle(groups):
        return 2, f"not tested: {obstacle}"
    sides = [group.finished for group in groups]
    few_digits = max(r.rounding("val_loss") + r.rounding("val_bpb") for r in sum(sides, []))
    unit = common_unit(sum(sides, []), tolerance=1e-6 + few_digits)
    figure = anytime.SCORES[unit]
    rounding = sum(max(run.rounding(figure) for run in side) for side in sides)
    rule, pairs = "Welch's t-test", pair_by_seed(sides)
    for less in (0, rounding):
        if pairs:
            gains = [round(a.figures[figure] - b.figures[figure], 9) - less for a, b in pairs]
            word, rule = anytime.verdict(gains, by, alpha), "evidence of pairs"
            text = f"{len(pairs)} pairs of one seed: {anytime.describe(gains, unit, by, alpha)}\n"
            text += f"  {anytime.describe_evidence(gains, by, alpha)}"
        else:
            baseline, candidate = (group.values(figure) for group in groups)
            candidate = [loss + less for loss in candidate]
            word, p, (low, high) = anytime.welch(baseline, candidate, by, alpha)
            text = f"all runs, as seeds or scripts differ: {(low + high) / 2:.5f} {unit}, 95 % "
            text += f"confidence interval {low:.5f} to {high:.5f}\n"
            text += f"  better by more than {by:g}? {word} (p = {p:.2g})"
        if word != "better":
            break
    note = f"the logs' scores have few digits: a gain counts {rounding:.2g} less\n"
    text = f"rule: {rule}, level {alpha:g}; baseline minus candidate:\n{text}"
    return anytime.EXIT_CODES[word], note * (rounding > 1e-6) + text


# ---- the report ----------------------------------------------------------------------------------
def format_table(groups: list[Group]) -> str:
    """One row per run, then n, mean and standard deviation of a side's finished runs, unless a
    model occurs twice. The cell of an unknown figure stays empty."""
    rows: list[tuple[str, dict[str, float]]] = []
    for group in groups:
        rows.append((group.name, {}))
        rows += [(f"  {run.path}", run.figures) for run in group.runs]
        if group.name != "runs" and not group.find_repeat():
            values = {figure: group.values(figure) for figure in AVERAGED}
            means = {figure: fmean(known) for figure, known in values.items() if known}
            spread = {figure: stdev(known) for figure, known in values.items() if len(known) > 1}
            rows.append((f"  n = {len(group.finished)}, mean", means))
            rows.append(("  standard deviation", spread))
    indent = max(len(name) for name, _ in rows)
    lines = [" " * indent + "".join(f"{name:>{width}}" for name, (width, _) in COLUMNS.items())]
    for name, figures in rows:
        shown = {k: f"{figures[k]:{form}}" for k, (_, form) in COLUMNS.items() if k in figures}
        cells = [f"{shown.get(k, ''):>{width}}" for k, (width, _) in COLUMNS.items()]
        lines.append(f"{name:{indent}}{''.join(cells)}".rstrip())
    return "\n".join(lines)


def format_report(groups: list[Group], verdict: str) -> str:
    runs = [run for group in groups for run in group.runs]
    notes = [f"no final line: {run.path}: {run.unfinished}" for run in runs if run.unfinished]
    anew = "has runs that began anew: the last start counts, not the"
    notes += [f"{run.path} {anew} {run.earlier} before it" for run in runs if run.earlier]
    twins = [(a.path, b.path) for a, b in combinations(runs, 2) if a.crc32 == b.crc32]
    notes += [f"warning: {a} and {b} are one log" for a, b in twins]
    notes += [f"warning: {warning}" for warning in find_warnings(groups)]
    runs = [run for run in runs if not run.unfinished]
    if len(runs) > 1 and (unknown := [str(r.path) for r in runs if "val_crc" not in r.facts]):
        notes.append(f"no checksum, so the validation text was not checked: {', '.join(unknown)}")
    for line in sorted({run.facts["score"] for run in runs}):
        names = [str(run.path) for run in runs if run.facts["score"] == line]
        notes.append(f"scores: {line}" + f" in {', '.join(names)}" * (len(names) < len(runs)))
    blocks = [format_table(groups), "\n".join(notes), verdict]
    return "\n\n".join(block for block in blocks if block)


# ---- the picture ---------------------------------------------------------------------------------
def draw_curves(axes: Axes, groups: list[Group], colors: list[str], unit: str) -> None:
    """Draw training losses as lines and validation losses as points."""
    curves = []
    for group, color in zip(groups, colors, strict=True):
        style = {"linewidth": 0.9, "alpha": 0.7, "markersize": 4, "color": color}
        style["marker"] = "x" if group.name == "candidate" else "o"
        axes.plot([], [], label="x", **style)  # for the legend
        for run in group.runs:
            # Without a validation yet, bits per byte are unknown: nan leaves the run out.
            factor = 1.0 if unit == "nats" else run.bpb_per_nat
            for losses, absent in ((run.train, "marker"), (run.val, "linestyle")):
                if losses:
                    curves.append({step: factor * loss for step, loss in sorted(losses.items())})
                    axes.plot([*curves[-1]], [*curves[-1].values()], **style | {absent: "None"})
    # The losses of the first fifth would flatten the rest. A run's last loss stays in view.
    end = max(step for losses in curves for step in losses)
    first = end / 5 if end >= 300 else 0
    late = [y for losses in curves for x, y in losses.items() if x >= first or x == max(losses)]
    if late := [*filter(math.isfinite, late)]:
        axes.set_ylim(top=1.01 * max(late))
    # Tokenizers may differ, and no log has the bytes of the training text.
    bytes_of = "" if unit == "nats" else ", with validation's bytes per token"
    title = f"validation (points) and training (lines{bytes_of})"
    axes.set(title=title, xlabel="step", ylabel=f"loss in {unit}")
    axes.grid(alpha=0.3)


def draw_scores(axes: Axes, groups: list[Group], colors: list[str], unit: str) -> None:
    """Draw the final losses. Lines join the pairs of two sides."""
    figure = anytime.SCORES[unit]
    for x, (group, color) in enumerate(zip(groups, colors, strict=True)):
        axes.plot([x] * len(group.values(figure)), group.values(figure), "o", color=color)
    sides = [group.finished for group in groups]
    for pair in pair_by_seed(sides) if groups[-1].name == "candidate" else ():
        losses = [run.figures[figure] for run in pair]
        axes.plot([0, 1], losses, color="gray", linewidth=0.8, zorder=0)
    axes.set(title=f"final losses in {unit}", xticks=[], xlim=(-0.8, len(groups) - 0.2))
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.grid(alpha=0.3)


def draw(groups: list[Group]) -> Figure:
    """Draw the losses of each side, or of each run, in the order of seeds."""
    rcParams.update({"text.usetex": False, "axes.titlesize": "medium"})  # whatever users set
    runs = [run for group in groups for run in group.runs if run.train or run.val]
    unit = common_unit(runs, tolerance=1e-3)
    if groups[0].name == "runs":
        runs.sort(key=lambda run: run.figures.get("seed", math.inf))
        folder = os.path.commonpath([run.path.absolute().parent for run in runs])
        groups = []
        for run in runs:
            name = os.path.relpath(run.path.with_suffix(""), folder)[-60:]
            score = "" if run.unfinished else f", val_bpb {run.figures['val_bpb']:.4f}"
            groups.append(Group(f"{name}: seed {run.facts.get('seed', 'unknown')}{score}", [run]))
    legend = {"loc": "outside lower center", "fontsize": "small", "frameon": False}
    colors = [*map(to_hex, colormaps["turbo"](np.linspace(0.1, 0.9, len(groups))))]
    legend["ncols"] = max(1, 120 // (max(len(group.name) for group in groups) + 8))
    height = 4.5 + 0.2 * math.ceil(len(groups) / legend["ncols"])  # in inches
    figure = Figure(figsize=(9, height), layout="constrained")
    is_compared = sum(len(group.finished) for group in groups) > 1
    draw_curves(figure.add_subplot(1, 4, (1, 3 if is_compared else 4)), groups, colors, unit)
    if is_compared:
        draw_scores(figure.add_subplot(1, 4, 4), groups, colors, unit)
    for text, group in zip(figure.legend(**legend).get_texts(), groups, strict=True):
        text.set(text=group.name, parse_math=False)  # also a name that begins with _ or has two $
    return figure


# ---- command line --------------------------------------------------------------------------------
def is_training(path: Path) -> bool:
    """Return whether this is the log of a run, not of score.py, and not another file."""
    try:
        return "model" not in read_run(path).facts
    except OSError:
        return False


def main(arguments: list[str] | None = None) -> NoReturn:
    parser = start_program(__doc__)
    logs = {"type": existing_file, "metavar": "LOG"}
    by, alpha = files.number(float), files.number(float, 0, 1, exclusive=True)
    parser.add_argument("logs", nargs="*", help="default: the newest one in logs/", **logs)
    parser.add_argument("--baseline", nargs="+", **logs)
    parser.add_argument("--candidate", nargs="+", help="to be tested", **logs)
    parser.add_argument("--by", type=by, default=0.005, help="nats or bits per byte (0.005)")
    parser.add_argument("--alpha", type=alpha, default=0.01, help="level (0.01)")
    parser.add_argument("--picture", type=files.path, metavar="FILE", help="an .svg or .png")
    args = parser.parse_args(arguments)
    if not (args.logs or args.baseline or args.candidate):
        found = [path for path in Path("logs").glob("*.txt") if path.is_file()]
        newest = sorted(found, key=os.path.getmtime, reverse=True)
        args.logs = [*islice(filter(is_training, newest), 1)]
        if not args.logs:
            parser.error("there is no log in logs/: name the LOG files")
        args.picture = args.picture or args.logs[0].with_suffix(".png")
    if bool(args.logs) == bool(args.baseline) or (args.candidate and not args.baseline):
        parser.error("give either logs, or --baseline and perhaps --candidate")
    inputs = args.logs + (args.baseline or []) + (args.candidate or [])
    check_picture(parser, args.picture, inputs)
    sides = {"runs": args.logs, "baseline": args.baseline, "candidate": args.candidate}
    try:
        groups = [Group(name, [*map(read_run, paths)]) for name, paths in sides.items() if paths]
        runs = [run for group in groups for run in group.runs]
        code, verdict = judge(groups, args.by, args.alpha) if args.candidate else (0, "")
        print(format_report(groups, verdict), flush=True)
        if args.picture and not any(run.train or run.val for run in runs):
            print("nothing to draw: no log has a loss of a step yet", file=sys.stderr)
            code = code or 3
        elif args.picture:
            draw(groups).savefig(args.picture, dpi=150)
            print(f"\npicture: {args.picture}")
    except OSError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    main()
