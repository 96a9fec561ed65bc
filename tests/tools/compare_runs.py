"""Show the losses and scores of runs, or test whether a change makes them better:

    python tests/tools/compare_runs.py               # the newest log in logs/, with a picture
    python tests/tools/compare_runs.py logs/*.txt --picture loss.png
    python tests/tools/compare_runs.py --baseline logs/base-*.txt --candidate logs/silu-*.txt

A log is logs/RUN_ID.txt or the printed output of a run; the run may still be going. The runs of a
side should differ only by their seed. tests/tools/README.md explains the output.

Exit code 0: shown to be better, or there is nothing to test. 1: not shown. 2: it could not be
tested, or an argument or a file is wrong. 3: nothing to draw.

Needs pip install scipy matplotlib."""

import math
import os
import sys
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for python -P

import anytime
import numpy as np
from logs import HEADER, Run, list_texts, read_run
from matplotlib import colormaps, rcParams
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from scipy import stats
from trained import check_picture, existing_file, files, start_program

# Facts in which all finished runs should agree; the first two depend on the tokenizer.
SHARED_FACTS = ("data", "validation", "batch", "length", "time_limit", "stride")
# Columns of the table: width and format.
COLUMNS = {
    "seed": (8, ".0f"), "steps": (7, ".0f"), "ms_per_step": (13, ".2f"),
    "val_loss": (10, ".6f"), "val_bpb": (10, ".6f"), "memory_mib": (12, ".0f"),
    "artifact_bytes": (16, ",.0f"), "total_bytes": (13, ",.0f"),
}  # fmt: skip
AVERAGED = [name for name in COLUMNS if name not in ("seed", "steps", "memory_mib")]


# ---- the runs -----------------------------------------------------------------------------------
@dataclass
class Group:
    """A side, whose runs should differ only by their seed, or any runs ("runs")."""

    name: str
    runs: list[Run]
    label: str = ""  # in the picture; "": the seed of each run

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
            is_score_only = not a.train or not b.train
            if a.facts.get("seed") == b.facts.get("seed") and (is_score_only or a.train == b.train):
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
    if list_different(runs, "tokenizer"):  # then compare the bytes of the validation texts
        facts = SHARED_FACTS[2:]
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


def run_welch(groups: list[Group], unit: str, by: float, alpha: float) -> tuple[bool, str]:
    """Run Welch's t-test: is the candidate better by more than `by`? Also returns a text."""
    baseline, candidate = (np.array(group.values(anytime.SCORES[unit])) for group in groups)
    low, high = stats.ttest_ind(baseline, candidate, equal_var=False).confidence_interval()
    p = stats.ttest_ind(baseline, candidate + by, equal_var=False, alternative="greater").pvalue
    verdict = "no, it is worse" if high < 0 else "shown" if p < alpha else "not shown"
    gain = f"{(low + high) / 2:.5f} {unit}, 95 % confidence interval {low:.5f} to {high:.5f}"
    gain = f"all runs, as seeds or scripts differ: {gain}"
    return p < alpha, f"{gain}\n  better by more than {by:g}? {verdict} (p = {p:.2g})"


def judge(groups: list[Group], by: float, alpha: float) -> tuple[int, str]:
    """Compare pairs of one seed, else all runs. Returns the exit code and the verdict, or why there
    is none."""
    for group in groups:
        if len(group.finished) < 2:
            few = f"{len(group.finished)} finished; each side needs two, preferably more"
            return 2, f"not tested: {group.name}: {few}"
        if repeat := group.find_repeat():
            return 2, f"not tested: {group.name}: {repeat}"
    sides = [group.finished for group in groups]
    runs = sum(sides, [])
    if strides := list_different(runs, "stride"):
        return 2, f"not tested: SCORES OF DIFFERENT STRIDES ({strides}): use one EVAL_STRIDE"
    unit = common_unit(runs, tolerance=1e-6)
    pairs = pair_by_seed(sides)
    if pairs:
        rule = "evidence of pairs"
        figure = anytime.SCORES[unit]
        gains = [a.figures[figure] - b.figures[figure] for a, b in pairs]
        is_shown = anytime.verdict(gains, by, alpha) == "better"
        text = f"{len(pairs)} pairs of one seed: {anytime.describe(gains, unit, by, alpha)}\n"
        text += f"  {anytime.describe_evidence(gains, by, alpha)}"
    else:
        rule = "Welch's t-test"
        is_shown, text = run_welch(groups, unit, by, alpha)
    return int(not is_shown), f"rule: {rule}, level {alpha:g}; baseline minus candidate:\n{text}"


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
        line = f"{name:{indent}}"
        for figure, (width, form) in COLUMNS.items():
            line += f"{figures[figure]:{width}{form}}" if figure in figures else " " * width
        lines.append(line.rstrip())
    return "\n".join(lines)


def format_report(groups: list[Group], verdict: str) -> str:
    unfinished = [run for group in groups for run in group.runs if run.unfinished]
    notes = [f"no final line: {run.path}: it ends with {run.unfinished}" for run in unfinished]
    notes += [f"warning: {warning}" for warning in find_warnings(groups)]
    runs = [run for group in groups for run in group.finished]
    lines = sorted({run.facts["score"] for run in runs})
    for line in lines:
        names = [str(run.path) for run in runs if run.facts["score"] == line]
        notes.append(f"scores: {line}" + f" in {', '.join(names)}" * (len(lines) > 1))
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
                    curves.append({step: factor * loss for step, loss in losses.items()})
                    axes.plot([*curves[-1]], [*curves[-1].values()], **style | {absent: "None"})
            # The log may lack the training loss of the last step.
            if run.train and max(run.val, default=0) > max(run.train):
                ends = max(run.train), max(run.val)
                between = [factor * run.train[ends[0]], factor * run.val[ends[1]]]
                axes.plot(ends, between, **style | {"linestyle": ":", "marker": "None"})
    # The losses of the first fifth would flatten the rest. The last loss of a shorter run stays in
    # view, unless that run has hardly begun.
    end = max(step for losses in curves for step in losses)
    first = end / 5 if end >= 300 else 0
    late = [loss for losses in curves for step, loss in losses.items() if step >= first]
    late += [losses[max(losses)] for losses in curves if max(losses) >= end / 50]
    late = [loss for loss in late if math.isfinite(loss)] or [0.0]
    margin = 0.05 * (max(late) - min(late)) or 0.1
    low, high = min(late) - margin, max(late) + margin
    title = "training (lines) and validation (points)"
    if unit != "nats":  # tokenizers differ, and no log has the bytes of the training text
        title = "validation (points), training (lines, with validation's bytes per token)"
    axes.set(title=title, xlabel="step", ylabel=f"loss in {unit}", ylim=(low, high))
    axes.grid(alpha=0.3)
    val = groups[0].runs[0].val if len(groups) == len(groups[0].runs) == 1 else {}
    style = {"textcoords": "offset points", "arrowprops": {"arrowstyle": "-", "color": "gray"}}
    for step in sorted(val)[:1] + sorted(val)[1:][-1:]:  # the first and the last
        style |= {"xytext": (30, -3) if step == min(val) else (-90, 30), "fontsize": "small"}
        axes.annotate(f"validation: {val[step]:.4f}", (step, val[step]), **style)


def format_spread(losses: list[float]) -> str:
    return f"\nstandard\ndeviation\n{stdev(losses):.4f}" if len(losses) > 1 else ""


def has_seeds(runs: list[Run]) -> bool:
    """Return whether each run has a seed of its own."""
    return len({run.facts.get("seed") for run in runs} - {None}) == len(runs)


def draw_scores(axes: Axes, groups: list[Group], colors: list[str], unit: str) -> None:
    """Draw the final losses, a dot with a label for each run. Lines join the pairs of two sides."""
    figure, columns = anytime.SCORES[unit], []
    for x, (group, color) in enumerate(zip(groups, colors, strict=True)):
        losses = group.values(figure)
        axes.plot([x] * len(losses), losses, "o", color=color)
        columns.append(f"{group.name}{format_spread(losses)}")
        side = -1 if group.name == "baseline" else 1
        # Dots may be close: every other label is farther away.
        for i, run in enumerate(sorted(group.finished, key=lambda run: run.figures[figure])):
            place, label = (x, run.figures[figure]), group.label or run.facts.get("seed") or ""
            style = {"xytext": (side * (6 + 14 * (i % 2)), 0), "textcoords": "offset points"}
            style |= {"ha": "right" if side < 0 else "left", "va": "center", "fontsize": "small"}
            axes.annotate(label, place, **style)
    if groups[0].name == "baseline":
        axes.set_xticks(range(len(groups)), columns)
        for pair in pair_by_seed([group.finished for group in groups]) if len(groups) == 2 else ():
            losses = [run.figures[figure] for run in pair]
            axes.plot([0, 1], losses, color="gray", linewidth=0.8, zorder=0)
    else:
        runs = [run for group in groups for run in group.finished]
        spread = format_spread([run.figures[figure] for run in runs]).strip()
        axes.set(xticks=[], xlabel=spread if has_seeds(runs) else "")
    axes.set(title=f"final losses in {unit}", xlim=(-0.8, len(groups) - 0.2))
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.grid(alpha=0.3)


def short_name(path: Path, folder: str) -> str:
    """Return a log's path from this folder on, without its suffix and, if long, its middle."""
    name = os.path.relpath(path.with_suffix(""), folder)
    return name if len(name) <= 60 else f"{name[:28]} … {name[-28:]}"


def draw(groups: list[Group]) -> Figure:
    """Draw the losses of each side, or of each run, in the order of seeds."""
    rcParams.update({"text.usetex": False, "axes.titlesize": "medium"})  # whatever users set
    runs = [run for group in groups for run in group.runs if run.train or run.val]
    unit = common_unit(runs, tolerance=1e-3)
    legend = {"loc": "outside lower center", "fontsize": "small", "frameon": False}
    if groups[0].name == "runs":
        runs.sort(key=lambda run: run.figures.get("seed", math.inf))
        folder = os.path.commonpath([run.path.absolute().parent for run in runs])
        groups = []
        for number, run in enumerate(runs, 1):
            label = run.facts["seed"] if has_seeds(runs) else str(number)
            score = "" if run.unfinished else f", {run.figures['val_bpb']:.4f}"
            groups.append(Group(f"{short_name(run.path, folder)}: {label}{score}", [run], label))
        kind = "seed" if has_seeds(runs) else "number"
        legend |= {"title": f"log: {kind}, score in bits per byte", "title_fontsize": "small"}
    colors = [*map(to_hex, colormaps["turbo"](np.linspace(0.1, 0.9, len(groups))))]
    legend["ncols"] = max(1, 120 // (max(len(group.name) for group in groups) + 8))
    height = 4.5 + 0.2 * math.ceil(len(groups) / legend["ncols"])  # in inches
    figure = Figure(figsize=(9, height), layout="constrained")
    is_compared = sum(len(group.finished) for group in groups) > 1
    axes = figure.add_subplot(1, 4, (1, 3 if is_compared else 4))
    draw_curves(axes, groups, colors, unit)
    known = [run.bpb_per_nat for run in runs if not math.isnan(run.bpb_per_nat)]
    if unit == "nats" and known:
        limits = [known[0] * loss for loss in axes.get_ylim()]
        axes.twinx().set(ylim=limits, ylabel="bits per byte")
    if is_compared:
        draw_scores(figure.add_subplot(1, 4, 4), groups, colors, unit)
    for text, group in zip(figure.legend(**legend).get_texts(), groups, strict=True):
        text.set(text=group.name, parse_math=False)  # also a name that begins with _ or has two $
    return figure


# ---- command line --------------------------------------------------------------------------------
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
        logs = sorted(Path("logs").glob("*.txt"), key=os.path.getmtime)
        outputs = {log: log.read_bytes().rpartition(HEADER)[2] for log in logs}  # without scripts
        args.logs = [log for log in logs if b"\nscore:" not in outputs[log]][-1:]  # score.py's
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
