"""Is a change real? Compares the logs of two groups of runs:

    python tests/tools/compare_runs.py --baseline logs/base-*.txt --candidate logs/silu-*.txt

The runs of a group differ by their seed alone. A log is logs/RUN_ID.txt, or what a run printed, of
train_gpt.py or of the reference baseline. Of a file that holds several starts, the last one counts.

Exit code 0: shown to be better, or there is nothing to test (no --candidate). 1: not shown.
2: it could not be tested, or an argument or a file is wrong.

Needs pip install scipy, and matplotlib for a picture."""

import argparse
import json
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any, NoReturn

import numpy as np
from scipy import stats

POWER = 0.8  # the chance to show a difference that is there, for the number of runs
MOST_RUNS = 1000

# ---- reading logs --------------------------------------------------------------------------------
# A log file begins with the script's source, which ends at a line of 100 "=". The first line that a
# run prints is the path of its log. The last of these lines begins what counts.
START_LINE = r"={100}|(.+/)?logs/[^/]+\.txt"
STEP_LINE = (
    r"step:(?P<steps>\d+)/\d+ (?P<kind>train|val)_loss:(?P<loss>\S+) "
    r".*train_time:\d+ms step_avg:(?P<ms_per_step>\S+)ms"
)
FACT_LINES = (
    r"train_loader:dataset:(?P<dataset>\S+) train_shards:(?P<train_shards>\d+)",
    r"val_loader:shards pattern=.* tokens:(?P<val_tokens>\d+)",
    r"train_batch_tokens:(?P<train_batch_tokens>\d+) train_seq_len:(?P<train_seq_len>\d+) "
    r"iterations:(?P<iterations>\d+) .*max_wallclock_seconds:(?P<max_wallclock_seconds>\S+)",
    r"seed:(?P<seed>\d+)$",
    r"peak memory allocated: (?P<memory_mib>\d+) MiB",
    r"Serialized model int8\+zlib: (?P<artifact_bytes>\d+) bytes",
    r"Total submission size int8\+zlib: (?P<total_bytes>\d+) bytes",
    r"final_int8_zlib_roundtrip_exact val_loss:(?P<val_loss>\d+\.\d{8}) "
    r"val_bpb:(?P<val_bpb>\d+\.\d{8})(?P<partial> partial:\S+)?$",
)
# Facts in which all runs of both groups should agree.
SHARED_FACTS = "dataset train_shards val_tokens partial train_batch_tokens train_seq_len"
SHARED_FACTS += " iterations max_wallclock_seconds"
# The table's columns: title and format.
COLUMNS = {
    "seed": ("seed", ".0f"),
    "steps": ("steps", ".0f"),
    "ms_per_step": ("ms/step", ".2f"),
    "val_loss": ("val_loss", ".6f"),
    "val_bpb": ("val_bpb", ".6f"),
    "memory_mib": ("MiB", ".0f"),
    "artifact_bytes": ("artifact bytes", ",.0f"),
    "total_bytes": ("total bytes", ",.0f"),
}


@dataclass
class Run:
    """What a log tells of a run."""

    path: Path
    facts: dict[str, str | None] = field(default_factory=dict)
    train: dict[int, float] = field(default_factory=dict)  # loss in nats per token, by step
    val: dict[int, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)  # by COLUMNS, as far as they are known
    problem: str = ""  # why the run cannot be counted, if it cannot


@dataclass
class Group:
    """Runs that should differ by their seed alone."""

    name: str
    runs: list[Run]  # those that count
    left_out: list[Run]

    def values(self, figure: str) -> list[float]:
        return [run.figures[figure] for run in self.runs if figure in run.figures]


def read_run(path: Path) -> Run:
    """The last run in a log."""
    lines = path.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    starts = [i for i, line in enumerate(lines) if re.fullmatch(START_LINE, line)]
    run = Run(path)
    for line in lines[starts[-1] if starts else 0 :]:
        for pattern in (*FACT_LINES, STEP_LINE):
            match = re.match(pattern, line)
            if match:
                run.facts |= match.groupdict()
                if pattern == STEP_LINE:
                    losses = run.train if match["kind"] == "train" else run.val
                    losses[int(match["steps"])] = float(match["loss"])
    if "val_loss" not in run.facts:
        end = "".join(lines[-1:])[:80]
        run.problem = f"no final_int8_zlib_roundtrip_exact line; its end is {end!r}"
    run.figures = {name: float(run.facts[name]) for name in COLUMNS if name in run.facts}
    return run


def read_group(name: str, paths: list[Path]) -> Group:
    """The runs of one side. A file that is named twice is one run."""
    runs = [read_run(path) for path in dict.fromkeys(paths)]
    finished = [run for run in runs if not run.problem]
    return Group(name, finished, [run for run in runs if run.problem])


def find_warnings(groups: list[Group]) -> list[str]:
    """What makes a comparison worthless without being an error."""
    warnings = []
    runs = [run for group in groups for run in group.runs]
    for fact in SHARED_FACTS.split():
        values = sorted({run.facts.get(fact) or "none" for run in runs})
        if len(values) > 1:
            warnings.append(f"the runs differ in {fact}: {', '.join(values)}")
    for group in groups:
        for seed, times in Counter(group.values("seed")).items():
            if times > 1:
                warnings.append(f"{group.name}: {times} runs have seed {seed:.0f}")
    return warnings


# ---- statistics ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Verdict:
    """What the runs say about the candidate. Differences are baseline minus candidate: mean, and
    low and high of the 95 % confidence interval. Above 0 the candidate is better."""

    nats: dict[str, float]
    bits_per_byte: dict[str, float]
    by: float  # nats
    p: float  # of a difference like this one, or a larger one, if the true one were `by`
    shown: bool
    runs_needed: int | None  # a side, to show it with a chance of POWER; None: shown, or too many


def find_difference(baseline: list[float], candidate: list[float]) -> dict[str, float]:
    interval = stats.ttest_ind(baseline, candidate, equal_var=False).confidence_interval(0.95)
    mean = fmean(baseline) - fmean(candidate)
    return {"mean": mean, "low": float(interval.low), "high": float(interval.high)}


def count_runs_needed(
    baseline: list[float], candidate: list[float], by: float, alpha: float
) -> int | None:
    """The least number of runs a side, more than the smaller side has, with which a difference and
    spreads like these would be shown with a chance of POWER. None: more than MOST_RUNS."""
    gain = fmean(baseline) - fmean(candidate) - by
    variances = np.array([variance(baseline), variance(candidate)])
    total = variances.sum()
    runs = np.arange(min(len(baseline), len(candidate)) + 1, MOST_RUNS + 1)
    degrees_of_freedom = (runs - 1) / np.sum((variances / total) ** 2)
    # If the true difference is this one, the test's t follows a noncentral t distribution.
    noncentrality = gain / np.sqrt(total / runs)
    critical = stats.t.isf(alpha, degrees_of_freedom)
    enough = runs[stats.nct.sf(critical, degrees_of_freedom, noncentrality) >= POWER]
    return int(enough[0]) if len(enough) else None


def judge(baseline: Group, candidate: Group, by: float, alpha: float) -> Verdict | str:
    """The verdict, or the reason why there is none."""
    for group in (baseline, candidate):
        if len(group.runs) < 2:
            return f"{group.name}: {len(group.runs)} finished; each side needs two, better three"
    losses = baseline.values("val_loss"), candidate.values("val_loss")
    if [len(set(side)) for side in losses] == [1, 1]:
        return "no score differs within a group: give every run another SEED"
    # Welch's one-sided test: the candidate, `by` worse, is still better than the baseline.
    shifted = [loss + by for loss in losses[1]]
    p = float(stats.ttest_ind(losses[0], shifted, equal_var=False, alternative="greater").pvalue)
    return Verdict(
        nats=find_difference(*losses),
        bits_per_byte=find_difference(baseline.values("val_bpb"), candidate.values("val_bpb")),
        by=by,
        p=p,
        shown=p < alpha,
        runs_needed=None if p < alpha else count_runs_needed(*losses, by, alpha),
    )


# ---- the report ----------------------------------------------------------------------------------
AVERAGED = ("ms_per_step", "val_loss", "val_bpb", "artifact_bytes", "total_bytes")


def format_row(name: str, figures: dict[str, float]) -> list[str]:
    """Cells, empty where a figure is not known."""
    cells = [name]
    for figure, (_, form) in COLUMNS.items():
        cells.append(format(figures[figure], form) if figure in figures else "")
    return cells


def format_table(groups: list[Group]) -> str:
    """Each run, then n, mean and standard deviation of its group."""
    rows = [["", *(title for title, _ in COLUMNS.values())]]
    for group in groups:
        values = {figure: group.values(figure) for figure in AVERAGED}
        means = {figure: fmean(known) for figure, known in values.items() if known}
        deviations = {figure: stdev(known) for figure, known in values.items() if len(known) > 1}
        rows.append(format_row(group.name, {}))
        rows += [format_row(f"  {run.path.stem}", run.figures) for run in group.runs]
        rows.append(format_row(f"  n = {len(group.runs)}, mean", means))
        rows.append(format_row("  standard deviation", deviations))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(lines)


def format_verdict(verdict: Verdict) -> str:
    lines = ["baseline minus candidate, with the 95 % confidence interval:"]
    for unit, difference in (("nats", verdict.nats), ("bits per byte", verdict.bits_per_byte)):
        mean, low, high = difference.values()
        lines.append(f"  {mean:.4f} {unit} ({low:.4f} to {high:.4f})")
    if verdict.shown:
        answer = "shown"
    elif verdict.nats["mean"] <= verdict.by:
        answer = "not shown, and no number of runs like these would show it"
    elif verdict.runs_needed is None:
        answer = f"not shown; at this spread {MOST_RUNS} runs a side would not show it"
    else:
        answer = f"not shown; at this spread some {verdict.runs_needed} runs a side would show it"
    lines.append(f"better by more than {verdict.by:g} nats? {answer} (p = {verdict.p:.2g})")
    return "\n".join(lines)


def format_report(groups: list[Group], warnings: list[str], verdict: Verdict | str | None) -> str:
    notes = [f"left out: {run.path}: {run.problem}" for g in groups for run in g.left_out]
    notes += [f"warning: {warning}" for warning in warnings]
    blocks = [format_table(groups), "\n".join(notes)]
    if isinstance(verdict, Verdict):
        blocks.append(format_verdict(verdict))
    elif verdict is not None:
        blocks.append(f"not tested: {verdict}")
    return "\n\n".join(block for block in blocks if block)


def format_json(groups: list[Group], warnings: list[str], verdict: Verdict | str | None) -> str:
    """The report for machines: one object. Its verdict may be the reason why there is none."""
    report: dict[str, Any] = {"left_out": {}, "warnings": warnings}
    for group in groups:
        report[group.name] = [{"file": str(run.path), **run.figures} for run in group.runs]
        report["left_out"] |= {str(run.path): run.problem for run in group.left_out}
    report["verdict"] = asdict(verdict) if isinstance(verdict, Verdict) else verdict
    return json.dumps(report, indent=1)


# ---- the picture ---------------------------------------------------------------------------------
COLORS = ("#e08a2e", "#1f2a6b")  # of the groups: one light, one dark, so that grey tells them, too


def draw(groups: list[Group], picture: Path) -> None:
    """Losses over steps, without the first tenth, which would flatten the rest, a line for each
    run, and beside them each run's score."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    thin, dots = {"lw": 0.5, "alpha": 0.5}, {"marker": "o", "ms": 3}
    curves, scores = figure.subplots(1, 2, width_ratios=(2.4, 1))
    for i, (group, color) in enumerate(zip(groups, COLORS, strict=False)):
        curves.plot([], [], color=color, label=group.name, **dots)
        for run in group.runs:
            for losses, style in ((run.train, thin), (run.val, dots)):
                late = [step for step in losses if step >= max(losses) / 10]
                curves.plot(late, [losses[step] for step in late], color=color, **style)
            scores.plot(i, run.figures["val_loss"], color=color, marker="o", alpha=0.7)
    curves.set(title="training (thin) and validation", xlabel="step", ylabel="nats per token")
    curves.legend()
    names = [f"{group.name}\nn = {len(group.runs)}" for group in groups]
    scores.set_xticks(range(len(groups)), names)
    scores.set(title="score of each run", xlim=(-0.6, len(groups) - 0.4))
    scores.ticklabel_format(axis="y", useOffset=False)
    figure.savefig(picture, dpi=150)


# ---- command line --------------------------------------------------------------------------------
def main(arguments: list[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--baseline", nargs="+", type=Path, required=True, metavar="LOG")
    parser.add_argument("--candidate", nargs="+", type=Path, metavar="LOG", help="to be tested")
    parser.add_argument("--by", type=float, default=0.005, help="nats (default: 0.005)")
    parser.add_argument("--alpha", type=float, default=0.01, help="level (default: 0.01)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw into an .svg or .png")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)
    if args.picture is not None and args.picture.suffix not in (".svg", ".png"):
        parser.error(f"--picture {args.picture} must end in .svg or .png")
    try:
        groups = [read_group("baseline", args.baseline)]
        verdict = None
        code = 0
        if args.candidate is not None:
            groups.append(read_group("candidate", args.candidate))
            verdict = judge(*groups, args.by, args.alpha)
            code = 2
        if isinstance(verdict, Verdict):
            code = 0 if verdict.shown else 1
        format_as = format_json if args.json else format_report
        print(format_as(groups, find_warnings(groups), verdict), flush=True)
        if args.picture is not None:
            draw(groups, args.picture)
    except (ImportError, OSError) as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    main()
