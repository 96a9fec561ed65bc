"""Is a change real? Compares the logs of two groups of runs:

    python tests/benchmarks/compare_runs.py --baseline logs/base-*.txt --candidate logs/silu-*.txt

The runs of a group differ by their seed alone. A log is OUTPUT_DIR/logs/RUN_ID.txt, or what a run
printed. Where a file holds several runs, the last one counts; a run and its resumption are one. The
score is the last line named `..._exact` with a val_loss and a val_bpb; in a log whose script prints
no such line, the last line with both that is no step of training.

Exit code 0: shown to be better, or nothing was to be tested (no --candidate). 1: not shown.
2: it could not be tested, or an argument or a file is wrong.

The test needs pip install scipy, a picture matplotlib, event files tensorboard."""

import argparse
import glob
import importlib
import json
import math
import os
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from statistics import fmean, stdev, variance
from types import ModuleType
from typing import Any, NoReturn

POWER = 0.8  # the chance to show a difference that is there, for the number of runs
MOST_RUNS = 1_000_000
DRAWN_POINTS = 150  # of a curve, at most

# ---- reading logs --------------------------------------------------------------------------------
# A script's text stands in a log before these two lines, and its output after them.
PYTHON_LINE = re.compile(r"(Running )?Python \d+\.\d")
TORCH_LINE = re.compile(r"(Running )?PyTorch \d+\.\d")
PATH_LINE = re.compile(r"(\S.*/)?logs/[^/]+\.txt$")  # the first line that a run prints
SOURCE_LINE = re.compile(r"[rR]?(\"\"\"|''')|#!|import \w|from \S+ import ")
EXACT_COMES = re.compile(r"_exact|^size_check:|^device:\S+ dtype:", re.M)

STEP_LINE = re.compile(
    r"step:(\d{1,12})/(\d{1,12}) (train|val)_loss:(\S+)(?: val_bpb:(\S+))?"
    r".*? train_time:([\d.]+)ms(?: step_avg:([\d.]+)ms)?"
)
SCORE_LINE = re.compile(r"(?!step:|sample:)(\S.*?) val_loss:(\S+) val_bpb:(\S+)")
# The very last line counts without its line break, too, if all of its digits are there.
WHOLE_SCORE = re.compile(r"(?!step:|sample:)\S*_exact val_loss:\d+\.\d{8} val_bpb:\d+\.\d{8}(?!\d)")
RESUME_LINE = re.compile(r"resume:.+ step:(\d{1,12})( |$)")
FACT_LINES = [
    re.compile(pattern)
    for pattern in (
        r"val_bpb:enabled .*tokenizer_path=(?P<tokenizer>.+)$",
        r"train_loader:dataset:(?P<dataset>.+) train_shards:(?P<train_shards>\d+)$",
        r"val_loader:shards pattern=.* tokens:(?P<val_tokens>\d+)",
        r"model_params:(?P<model_params>\d+)$",
        r"train_batch_tokens:(?P<train_batch_tokens>\d+) train_seq_len:(?P<train_seq_len>\d+) "
        r"iterations:(?P<iterations>\d+) .*max_wallclock_seconds:(?P<max_wallclock_seconds>\S+)",
        r"seed:(?P<seed>\d{1,18})$",
        r"stopped: signal:(?P<signal>\d+)",
        r"peak memory allocated: (?P<memory_mib>\d{1,18}) MiB",
        r"Serialized model \S+: (?P<artifact_bytes>\d{1,18}) bytes",
        r"Total submission size \S+: (?P<total_bytes>\d{1,18}) bytes",
        r".* partial:(?P<partial_validation>\d+/\d+)$",
    )
]
# Facts in which runs should agree.
TRAITS = (
    "dataset", "train_shards", "val_tokens", "partial_validation", "tokenizer", "model_params",
    "train_batch_tokens", "train_seq_len", "iterations", "max_wallclock_seconds", "score_line",
)  # fmt: skip


class InputError(ValueError):
    """What a user can put right."""


@dataclass(frozen=True)
class Point:
    """A loss that was logged in training."""

    step: int
    seconds: float  # of training until then
    loss: float  # nats per token
    bits_per_byte: float | None  # of a validation


@dataclass
class Run:
    """What a log tells of a run."""

    path: Path
    name: str
    facts: dict[str, str] = field(default_factory=dict)
    train: dict[int, Point] = field(default_factory=dict)  # by step
    val: dict[int, Point] = field(default_factory=dict)
    steps: int | None = None
    steps_planned: int | None = None
    ms_per_step: float | None = None
    val_loss: float | None = None  # the score, in nats per token
    val_bpb: float | None = None  # the score, in bits per byte
    problem: str = ""  # why the run cannot be counted, if it cannot

    def fact(self, name: str) -> int | None:
        """A whole number that the log tells, or None."""
        return int(self.facts[name]) if name in self.facts else None

    def figures(self) -> dict[str, float | None]:
        """The columns of the table."""
        return {
            "seed": self.fact("seed"),
            "steps": self.steps,
            "ms_per_step": self.ms_per_step,
            "val_loss": self.val_loss,
            "val_bpb": self.val_bpb,
            "memory_mib": self.fact("memory_mib"),
            "artifact_bytes": self.fact("artifact_bytes"),
            "total_bytes": self.fact("total_bytes"),
        }


@dataclass
class Part:
    """What one start of the script has added to a log."""

    source: str = ""  # the script's text
    lines: list[str] = field(default_factory=list)
    has_path: bool = False
    rest: str = ""  # a last line without its line break


def number(text: str) -> float | None:
    """A number that can be meant, which inf and nan cannot, or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < 1e12 else None


def split_parts(text: str) -> list[Part]:
    """The starts of the script in a log, in order, each with its source apart from its lines."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    rest = lines.pop()
    first = next((line for line in lines if line.strip(" =")), "")
    versions = find_versions(lines)
    # A log without any version line is what a run printed, or a source that was cut short.
    in_source = bool(versions or SOURCE_LINE.match(first) or first.startswith("#"))
    parts: list[Part] = []
    source: list[str] = []
    for i, line in enumerate(lines):
        if i in versions:
            parts.append(Part("\n".join(source)))
            in_source = False
        elif versions and not in_source and (line == first or SOURCE_LINE.match(line)):
            in_source = True
            source = []
        if in_source:
            source.append(line)
            continue
        if not parts or (parts[-1].has_path and PATH_LINE.match(line)):
            parts.append(Part())
        parts[-1].has_path |= bool(PATH_LINE.match(line))
        parts[-1].lines.append(line)
    if in_source:
        parts.append(Part())  # the start of a run of which only the source is there
    else:
        parts = parts or [Part()]
        parts[-1].rest = rest
    return parts


def find_versions(lines: list[str]) -> set[int]:
    """Where the line with Python's version stands, with torch's below it. Python's version may
    take two lines."""
    return {
        i
        for i, line in enumerate(lines)
        if PYTHON_LINE.match(line) and any(map(TORCH_LINE.match, lines[i + 1 : i + 3]))
    }


def read_step_line(run: Run, match: re.Match) -> None:
    """Add a line of training or validation to its run."""
    step = int(match[1])
    milliseconds = number(match[6])
    loss = number(match[4])
    average = number(match[7] or "")
    run.steps = step
    run.steps_planned = int(match[2])
    if milliseconds is None:
        return
    if step > 0:
        run.ms_per_step = milliseconds / step if average is None else average
    if loss is not None:
        curve = run.train if match[3] == "train" else run.val
        curve[step] = Point(step, milliseconds / 1000, loss, number(match[5] or ""))


def read_part(part: Part, path: Path, before: Run | None) -> Run:
    """The run that a part of a log holds, or goes on with from the run before."""
    run = Run(path, path.stem)
    scores: list[re.Match] = []
    for line in part.lines:
        for pattern in FACT_LINES:
            if match := pattern.match(line):
                run.facts |= match.groupdict()
        if match := STEP_LINE.match(line):
            read_step_line(run, match)
        elif match := SCORE_LINE.match(line):
            scores.append(match)
        elif (match := RESUME_LINE.match(line)) and before is not None:
            resumed_at = int(match[1])
            run.train = {step: p for step, p in before.train.items() if step <= resumed_at}
            run.val = {step: p for step, p in before.val.items() if step <= resumed_at}
    if WHOLE_SCORE.match(part.rest):
        scores.append(SCORE_LINE.match(part.rest))
    exact = [score for score in scores if score[1].split()[0].endswith("_exact")]
    exact_comes = EXACT_COMES.search(part.source) or EXACT_COMES.search("\n".join(part.lines))
    if exact or (scores and not exact_comes):
        take_score(run, (exact or scores)[-1])
    else:
        run.problem = why_no_score(run, bool(scores))
    return run


def take_score(run: Run, match: re.Match) -> None:
    """Let a line with a score be the run's."""
    run.val_loss = number(match[2])
    run.val_bpb = number(match[3])
    run.facts["score_line"] = match[1]
    if run.val_loss is None or run.val_bpb is None:
        run.problem = f"its score is no number: val_loss:{match[2]} val_bpb:{match[3]}"


def why_no_score(run: Run, has_scores: bool) -> str:
    """In words, for a run that lacks its last line."""
    if has_scores:
        return "cut short before its last score, the one called _exact"
    if "signal" in run.facts:
        return f"no score: a signal stopped it at step {run.steps or 0}"
    if run.steps is not None:
        return f"no score: cut short, or still running, at step {run.steps} of {run.steps_planned}"
    return "no score, nor any step of a run"


def read_run(path: Path) -> Run:
    """The last run in a log. Raises InputError if the file cannot be read."""
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}): name the log of a run"
        ) from None
    run = None
    for part in split_parts(text):
        run = read_part(part, path, run)
    run.facts.setdefault("partial_validation", "no")
    if "tokenizer" in run.facts:  # which may lie elsewhere on each machine
        run.facts["tokenizer"] = PurePath(run.facts["tokenizer"]).name
    return run


# ---- groups --------------------------------------------------------------------------------------
@dataclass
class Group:
    """Runs that should differ by their seed alone."""

    name: str
    runs: list[Run] = field(default_factory=list)  # those that count
    left_out: list[Run] = field(default_factory=list)

    def values(self, figure: str) -> list[float]:
        """A figure of all runs; nothing if one of them lacks it."""
        values = [run.figures()[figure] for run in self.runs]
        return [] if None in values else values


def find_files(option: str, names: list[str]) -> list[Path]:
    """The files that names and patterns mean. Raises InputError for those that mean none."""
    paths: list[Path] = []
    for name in names:
        found = [name] if os.path.exists(name) else sorted(glob.glob(name, recursive=True))
        if not found:
            raise InputError(f"{option}: no file matches {name}: name logs, as in logs/base-*.txt")
        paths += map(Path, found)
    return paths


def read_group(name: str, names: list[str], warnings: list[str]) -> Group:
    """The runs of one side. A file named twice is one run."""
    group = Group(name)
    paths = find_files(f"--{name}", names)
    for path, times in Counter(path.resolve() for path in paths).items():
        if times > 1:
            warnings.append(f"{name}: {path.name} is named {times} times, and counted once")
    for path in {path.resolve(): path for path in paths}.values():
        run = read_run(path)
        (group.left_out if run.problem else group.runs).append(run)
    return group


def name_runs(groups: list[Group]) -> None:
    """Runs are called by their files' names, with the folder where these are not enough."""
    runs = [run for group in groups for run in group.runs + group.left_out]
    files = {run.path.resolve(): run.name for run in runs}
    times = Counter(files.values())
    for run in runs:
        if times[run.name] > 1:
            run.name = str(run.path)


def by_value(group: Group, fact: str) -> dict[str, list[str]]:
    """The names of the runs with each value of a fact, as far as their logs tell it."""
    names: dict[str, list[str]] = {}
    for run in group.runs:
        if fact in run.facts:
            names.setdefault(run.facts[fact], []).append(run.name)
    return names


def warn_of_differences(groups: list[Group]) -> list[str]:
    """A line for each trait in which runs differ, within a group or between the two."""
    warnings = []
    for fact in TRAITS:
        values = [by_value(group, fact) for group in groups]
        for group, names in zip(groups, values, strict=True):
            if len(names) > 1:
                each = "; ".join(f"{value} ({', '.join(runs)})" for value, runs in names.items())
                warnings.append(f"{group.name}: the runs differ in {fact}: {each}")
        if all(values) and len(groups) == 2 and set(values[0]) != set(values[1]):
            first, second = (", ".join(names) for names in values)
            warnings.append(f"the groups differ in {fact}: {first} against {second}")
    return warnings


def warn_of_copies(groups: list[Group]) -> list[str]:
    """A line for each thing that makes runs look like copies, which are no evidence."""
    warnings = []
    for group in groups:
        for seed, names in by_value(group, "seed").items():
            if len(names) > 1:
                warnings.append(f"{group.name}: seed {seed} was used by {', '.join(names)}")
        losses = group.values("val_loss")
        if len(losses) > 1 and len(set(losses)) == 1:
            warnings.append(f"{group.name}: all runs have the same score: are they copies?")
    files = [{run.path.resolve(): run.name for run in group.runs} for group in groups]
    if len(files) == 2:
        both = [name for path, name in files[0].items() if path in files[1]]
        warnings += [f"{name} stands on both sides" for name in both]
    return warnings


# ---- statistics ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Welch:
    """Welch's t test of two means whose groups may have different spreads."""

    difference: float  # baseline minus candidate: above 0 the candidate is better
    error: float  # standard error of the difference
    df: float  # degrees of freedom

    def p_value(self, by: float) -> float:
        """The chance of a difference like this one, or a larger one, if the true one were `by`."""
        return float(need("scipy.stats").t.sf((self.difference - by) / self.error, self.df))

    def interval(self, share: float = 0.95) -> tuple[float, float]:
        """Where the true difference lies, with a confidence of `share`."""
        width = self.error * float(need("scipy.stats").t.isf((1 - share) / 2, self.df))
        return self.difference - width, self.difference + width


@dataclass(frozen=True)
class Claim:
    """That the candidate is better by more than some nats."""

    by: float
    p: float  # of a result like this one if it were untrue
    shown: bool
    runs_needed: int | None  # a side, to show it with a chance of POWER; None: none would, or shown


@dataclass(frozen=True)
class Verdict:
    """What the runs say about the candidate."""

    nats: Welch
    bits_per_byte: Welch | None  # None if these have no spread
    asked: Claim  # better by more than --by
    at_all: Claim  # better by more than 0


def need(module: str) -> ModuleType:
    """A module of a package that not everybody has. Raises InputError with the way to get it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = {"torch.utils.tensorboard": "torch tensorboard"}.get(module, module.split(".")[0])
        raise InputError(f"this needs a package: pip install {package}") from None


def welch(baseline: list[float], candidate: list[float]) -> Welch | None:
    """The test of two groups of at least two values; None if no value differs within a group."""
    parts = [variance(values) / len(values) for values in (baseline, candidate)]
    total = sum(parts)
    if total == 0:
        return None
    sizes = (len(baseline), len(candidate))
    shares = [part / total for part in parts]
    df = 1 / sum(share**2 / (n - 1) for share, n in zip(shares, sizes, strict=True))
    return Welch(fmean(baseline) - fmean(candidate), math.sqrt(total), df)


def power_of_test(n: int, gain: float, variances: tuple[float, float], alpha: float) -> float:
    """The chance that Welch's test of n runs a side shows a true difference which is larger than
    the asked one by `gain`."""
    stats = need("scipy.stats")
    total = sum(variances)
    df = (n - 1) / sum((value / total) ** 2 for value in variances)
    return float(stats.nct.sf(stats.t.isf(alpha, df), df, gain / math.sqrt(total / n)))


def count_runs_needed(
    baseline: list[float], candidate: list[float], by: float, alpha: float
) -> int | None:
    """The least number of runs a side with which a difference and spreads like these would be shown
    with a chance of POWER; at most MOST_RUNS. None if the difference is not above `by`."""
    gain = fmean(baseline) - fmean(candidate) - by
    variances = (variance(baseline), variance(candidate))
    if gain <= 0:
        return None
    too_few = min(len(baseline), len(candidate))  # these have not shown it
    enough = too_few + 1
    while enough < MOST_RUNS and not power_of_test(enough, gain, variances, alpha) >= POWER:
        too_few, enough = enough, 2 * enough
    if enough >= MOST_RUNS:
        return MOST_RUNS
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if power_of_test(middle, gain, variances, alpha) >= POWER:
            enough = middle
        else:
            too_few = middle
    return enough


def judge(groups: list[Group], by: float, alpha: float) -> tuple[Verdict | None, str]:
    """The verdict, or the reason why there is none."""
    for group in groups:
        if len(group.runs) < 2:
            count = f"{len(group.runs)} run{'s' * (len(group.runs) != 1)} with a score"
            return None, f"the {group.name} has {count}: each side needs two, better three or more"
    losses = [group.values("val_loss") for group in groups]
    nats = welch(*losses)
    if nats is None:
        return None, "no score differs within a group: give every run another SEED"
    bits_per_byte = welch(*(group.values("val_bpb") for group in groups))
    claims = []
    for amount in (by, 0.0):
        p = nats.p_value(amount)
        runs_needed = None if p < alpha else count_runs_needed(*losses, amount, alpha)
        claims.append(Claim(amount, p, p < alpha, runs_needed))
    return Verdict(nats, bits_per_byte, *claims), ""


# ---- words and numbers ---------------------------------------------------------------------------
COLUMNS = {  # figure: title, format
    "seed": ("seed", "d"),
    "steps": ("steps", "d"),
    "ms_per_step": ("ms/step", ".2f"),
    "val_loss": ("val_loss", ".6f"),
    "val_bpb": ("val_bpb", ".6f"),
    "memory_mib": ("MiB", "d"),
    "artifact_bytes": ("artifact bytes", ",.0f"),
    "total_bytes": ("total bytes", ",.0f"),
}
AVERAGED = ("ms_per_step", "val_loss", "val_bpb", "artifact_bytes", "total_bytes")


def summarize(group: Group) -> dict[str, dict[str, float | None]]:
    """Mean and standard deviation of what can be averaged; None where it is not known."""
    summary: dict[str, dict[str, float | None]] = {"mean": {}, "sd": {}}
    for figure in AVERAGED:
        values = group.values(figure)
        summary["mean"][figure] = fmean(values) if values else None
        summary["sd"][figure] = stdev(values) if len(values) > 1 else None
    return summary


def format_row(name: str, figures: dict[str, float | None]) -> list[str]:
    """Cells: empty without a figure, a dash where its value is not known."""
    row = [name]
    for figure, (_, form) in COLUMNS.items():
        if figure not in figures:
            row.append("")
        elif figures[figure] is None:
            row.append("-")
        else:
            row.append(format(figures[figure], form))
    return row


def format_table(groups: list[Group]) -> str:
    """Each run, then n, mean and standard deviation of its group."""
    rows = [["", *(title for title, _ in COLUMNS.values())]]
    for group in groups:
        rows.append([group.name, *[""] * len(COLUMNS)])
        rows += [format_row(f"  {run.name}", run.figures()) for run in group.runs]
        summary = summarize(group)
        rows.append(format_row(f"  n = {len(group.runs)}, mean", summary["mean"]))
        rows.append(format_row("  standard deviation", summary["sd"]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def format_p(p: float) -> str:
    return f"p = {p:.2g}" if p >= 1e-12 else "p < 1e-12"


def describe_claim(claim: Claim, difference: float) -> str:
    """Whether it was shown, in words."""
    if claim.shown:
        return f"better, by {difference:.4f} nats ({format_p(claim.p)})"
    if difference < 0:
        outlook = f"worse, by {-difference:.4f} nats: no number of runs would show it"
    elif claim.runs_needed is None:
        outlook = (
            f"{difference:.4f} nats are not above {claim.by:g}: no number of runs would show it"
        )
    elif claim.runs_needed >= MOST_RUNS:
        outlook = f"at this spread {MOST_RUNS:,} runs a side would not show it"
    else:
        outlook = f"at this spread some {claim.runs_needed:,} runs a side would show it"
    return f"not shown: {format_p(claim.p)}; {outlook}"


def describe_verdict(verdict: Verdict) -> str:
    """The difference with its interval, and both tests."""
    difference = verdict.nats.difference
    lines = ["baseline minus candidate, with the 95 % confidence interval:"]
    for test, unit in ((verdict.nats, "nats"), (verdict.bits_per_byte, "bits per byte")):
        if test is not None:
            low, high = test.interval()
            lines.append(f"  {test.difference:.4f} {unit} ({low:.4f} to {high:.4f})")
    asked = describe_claim(verdict.asked, difference)
    lines.append(f"better by more than {verdict.asked.by:g} nats? {asked}")
    if verdict.asked.by != 0:
        lines.append(f"better at all? {describe_claim(verdict.at_all, difference)}")
    return "\n".join(lines)


def format_report(
    groups: list[Group], warnings: list[str], verdict: Verdict | None, reason: str
) -> str:
    left_out = [f"left out: {run.path}: {run.problem}" for g in groups for run in g.left_out]
    notes = left_out + [f"warning: {line}" for line in warnings]
    blocks = [format_table(groups), "\n".join(notes)]
    if verdict is not None:
        blocks.append(describe_verdict(verdict))
    elif reason:
        blocks.append(f"not tested: {reason}")
    return "\n\n".join(block for block in blocks if block)


def as_json(groups: list[Group], warnings: list[str], verdict: Verdict | None, reason: str) -> str:
    """The report for machines: one object."""
    report: dict[str, Any] = {"groups": {}, "left_out": [], "warnings": warnings}
    for group in groups:
        runs = [{"file": str(run.path), **run.figures(), **traits(run)} for run in group.runs]
        report["groups"][group.name] = {"n": len(runs), **summarize(group), "runs": runs}
        for run in group.left_out:
            entry = {"group": group.name, "file": str(run.path), "reason": run.problem}
            report["left_out"].append(entry)
    report["tested"] = verdict is not None
    report["reason"] = reason or None
    report["verdict"] = None if verdict is None else verdict_as_dict(verdict)
    return json.dumps(report, indent=1, allow_nan=False)


def traits(run: Run) -> dict[str, str | None]:
    return {name: run.facts.get(name) for name in TRAITS}


def verdict_as_dict(verdict: Verdict) -> dict[str, Any]:
    result = asdict(verdict)
    for unit in ("nats", "bits_per_byte"):
        test = getattr(verdict, unit)
        if test is not None:
            result[unit]["interval_95"] = test.interval()
    return {**result, "words": describe_claim(verdict.asked, verdict.nats.difference)}


# ---- curves --------------------------------------------------------------------------------------
# Told apart in grey, too: by lightness, dashes and markers. The second is drawn over the first.
STYLES = (
    {
        "color": "#e08a2e",
        "linestyle": (0, (4, 2)),
        "marker": "o",
        "markersize": 8,
        "markerfacecolor": "white",
    },
    {"color": "#1f2a6b", "linestyle": "-", "marker": "s", "markersize": 4},
)


def align(curves: list[dict[int, Point]]) -> list[list[Point]]:
    """Rows of one point of each run: the steps that all have logged, and the last one of each,
    since runs that end by the clock end at different steps."""
    if not curves or not all(curves):
        return []
    common = sorted(set.intersection(*map(set, curves)))
    rows = [[curve[step] for curve in curves] for step in common]
    lasts = [curve[max(curve)] for curve in curves]
    if len({point.step for point in lasts}) > 1:
        rows.append(lasts)
    stride = math.ceil(len(rows) / DRAWN_POINTS)
    return rows[::-1][::stride][::-1]  # the last one always


def draw_curve(axes: Any, rows: list[list[Point]], x: str, style: dict[str, Any]) -> None:
    """The mean of a group's runs, and a band from the lowest to the highest."""
    places = [fmean(point.step if x == "steps" else point.seconds for point in row) for row in rows]
    losses = [[point.loss for point in row] for row in rows]
    axes.plot(places, list(map(fmean, losses)), **style)
    lowest = list(map(min, losses))
    highest = list(map(max, losses))
    axes.fill_between(places, lowest, highest, color=style["color"], alpha=0.25, linewidth=0)


def draw_losses(axes: Any, groups: list[Group], x: str) -> None:
    """Training, thin, and validation, with markers, of each group."""
    ends = []
    for group, style in zip(groups, STYLES, strict=False):
        for kind in ("train", "val"):
            rows = align([getattr(run, kind) for run in group.runs])
            if not rows:
                continue
            drawn = {**style, "linewidth": 1.8, "label": f"{group.name}, validation"}
            if kind == "train":
                drawn |= {"linewidth": 0.8, "marker": "", "label": f"{group.name}, training"}
            draw_curve(axes, rows, x, drawn)
            last = rows[-1][0].step
            ends += [point.loss for row in rows for point in row if point.step >= last / 10]
    if not ends:
        raise InputError("--picture: no losses to draw: the logs share no step that they logged")
    margin = 0.05 * (max(ends) - min(ends)) or 0.1
    axes.set_ylim(min(ends) - margin, max(ends) + margin)  # the first steps would flatten the rest
    axes.set_xlabel("optimizer step" if x == "steps" else "training time (seconds)")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("mean of the runs; band: lowest to highest", fontsize=9)
    axes.legend(frameon=False)


def draw_scores(axes: Any, groups: list[Group]) -> None:
    """The score of each run, and the mean of its group."""
    for i, (group, style) in enumerate(zip(groups, STYLES, strict=False)):
        losses = group.values("val_loss")
        if not losses:
            continue
        axes.plot([i] * len(losses), losses, **{**style, "linestyle": "", "alpha": 0.8})
        axes.hlines(fmean(losses), i - 0.3, i + 0.3, color=style["color"], linewidth=1.8)
        axes.annotate(
            f"mean {fmean(losses):.4f}",
            (i, max(losses)),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
        )
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_xticks(
        range(len(groups)), [f"{group.name}\nn = {len(group.runs)}" for group in groups]
    )
    axes.margins(y=0.15)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.set_title("score of each run (nats per token)", fontsize=9)


def draw(groups: list[Group], picture: Path, x: str) -> None:
    """Write the picture, SVG or PNG. Raises InputError if there is nothing to draw."""
    matplotlib = need("matplotlib")
    matplotlib.use("Agg")
    pyplot = need("matplotlib.pyplot")
    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "runs", "font.size": 9})
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(9, 4), width_ratios=(2.4, 1), layout="constrained"
    )
    draw_losses(left, groups, x)
    draw_scores(right, groups)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    is_svg = picture.suffix.lower() == ".svg"
    try:
        figure.savefig(picture, dpi=150, metadata={"Date": None} if is_svg else None)
    except OSError as error:
        raise InputError(f"--picture {picture} cannot be written: {error.strerror}") from None
    pyplot.close(figure)


def write_events(groups: list[Group], folder: Path) -> None:
    """The curves of all runs for TensorBoard, those without a score included. A run's older event
    files from here are replaced. Times are seconds of training."""
    SummaryWriter = need("torch.utils.tensorboard").SummaryWriter
    suffix = ".compare_runs"
    for group in groups:
        for run in group.runs + group.left_out:
            name = run.name if run.name == run.path.stem else re.sub(r"[^\w.-]+", "_", run.name)
            target = folder / group.name / name
            try:
                for old in target.glob(f"events.out.tfevents.*{suffix}"):
                    old.unlink()
                writer = SummaryWriter(target, filename_suffix=suffix)
            except OSError as error:
                problem = f"--tensorboard {folder} cannot be written: {error.strerror}"
                raise InputError(problem) from None
            for point in run.train.values():
                writer.add_scalar("train_loss", point.loss, point.step, point.seconds)
            for point in run.val.values():
                writer.add_scalar("val_loss", point.loss, point.step, point.seconds)
                if point.bits_per_byte is not None:
                    writer.add_scalar("val_bpb", point.bits_per_byte, point.step, point.seconds)
            writer.close()


# ---- command line --------------------------------------------------------------------------------
class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{Path(__file__).name}: {message}\n")


def build_parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--baseline",
        nargs="+",
        action="extend",
        required=True,
        metavar="LOG",
        help="files or patterns",
    )
    add("--candidate", nargs="+", action="extend", metavar="LOG", help="none: nothing is tested")
    add("--by", type=float, default=0.005, help="nats to be better by (default: 0.005)")
    add("--alpha", type=float, default=0.01, help="level of the test (default: 0.01)")
    add("--picture", type=Path, metavar="FILE", help="draw the losses into an .svg or .png")
    add("--x", choices=["steps", "seconds"], default="steps", help="what they are drawn over")
    add("--tensorboard", type=Path, metavar="DIR", help="write curves, each run a folder")
    add("--json", action="store_true", help="print one JSON object instead of the report")
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Raise InputError for a value that cannot be meant."""
    if not 0 <= args.by < math.inf:
        raise InputError(f"--by {args.by:g} must be 0 or more: nats")
    if not 1e-6 <= args.alpha < 0.5:
        raise InputError(f"--alpha {args.alpha:g} must lie between 1e-6 and 0.5, as 0.01 does")
    if args.picture is None:
        return
    if args.picture.suffix.lower() not in (".svg", ".png"):
        raise InputError(f"--picture {args.picture} must end in .svg or .png")
    if not args.picture.parent.is_dir():
        raise InputError(f"--picture {args.picture}: there is no folder {args.picture.parent}")


def compare(args: argparse.Namespace) -> tuple[list[Group], str, int]:
    """The runs, the report on them and the exit code."""
    warnings: list[str] = []
    groups = [read_group("baseline", args.baseline, warnings)]
    if args.candidate is not None:
        groups.append(read_group("candidate", args.candidate, warnings))
    name_runs(groups)
    warnings += warn_of_differences(groups) + warn_of_copies(groups)
    verdict, reason, code = None, "", 0
    if args.candidate is not None:
        verdict, reason = judge(groups, args.by, args.alpha)
        code = 2 if verdict is None else int(not verdict.asked.shown)
    format_as = as_json if args.json else format_report
    return groups, format_as(groups, warnings, verdict, reason), code


def main(arguments: list[str] | None = None) -> NoReturn:
    parser = build_parser()
    args = parser.parse_args(arguments)
    try:
        check_arguments(args)
        groups, report, code = compare(args)
        print(report, flush=True)
        if args.picture is not None:
            draw(groups, args.picture, args.x)
        if args.tensorboard is not None:
            write_events(groups, args.tensorboard)
    except InputError as error:
        parser.error(str(error))
    sys.exit(code)


if __name__ == "__main__":
    main()
