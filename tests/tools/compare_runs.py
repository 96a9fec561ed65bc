"""Show the losses and scores of runs, or test whether a change makes them better:

    python tests/tools/compare_runs.py logs/*.txt --picture loss.png
    python tests/tools/compare_runs.py --baseline logs/base-*.txt --candidate logs/silu-*.txt

A log is logs/RUN_ID.txt, or the printed output of a run, of train_gpt.py or of the reference
baseline; the run may still be going. Of several starts in one file, the last one counts. The runs
of a side should differ only by their seed. Mean and deviation are those of a side; --baseline
alone is enough for them.

Exit code 0: shown to be better, or there is nothing to test. 1: not shown. 2: it could not be
tested, or an argument or a file is wrong. 3: nothing to draw, and no other code applies.

Needs pip install scipy, and matplotlib for a picture."""

import argparse
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from os.path import commonprefix
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from scipy import stats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POWER = 0.8  # probability that the suggested number of runs shows a real difference
MOST_RUNS = 1000
SCORES = {"nats": "val_loss", "bits per byte": "val_bpb"}  # figures by unit
AXIS_LABELS = {"nats": "nats per token", "bits per byte": "bits per byte"}

# ---- reading logs --------------------------------------------------------------------------------
# A log file begins with the script's source, which ends with a line of 100 "=". The first line that
# a run prints is the path of its log. The log of the last start follows the last of these lines.
START_LINE = r"={100}|(.+/)?logs/[^/]+\.txt"
STEP_LINE = (
    r"step:(?P<steps>\d+)/\d+ (?P<kind>train|val)_loss:(?P<loss>\S+) (val_bpb:(?P<bpb>\S+) )?"
    r".*train_time:\d+ms step_avg:(?P<ms_per_step>\S+)ms"
)
FINAL_LINE = (
    r"final_int8_zlib_roundtrip_exact val_loss:(?P<val_loss>\d+\.\d{8}) "
    r"val_bpb:(?P<val_bpb>\d+\.\d{8})( stride:\d+)?$"
)
FACT_LINES = (
    FINAL_LINE,
    r"train_loader:dataset:(?P<dataset>\S+) train_shards:(?P<train_shards>\d+)",
    r"val_loader:shards pattern=.* tokens:(?P<val_tokens>\d+)",
    r"train_batch_tokens:(?P<train_batch_tokens>\d+) train_seq_len:(?P<train_seq_len>\d+) "
    r"iterations:(?P<iterations>\d+) .*max_wallclock_seconds:(?P<max_wallclock_seconds>\S+)",
    r"seed:(?P<seed>\d+)$",
    r"peak memory allocated: (?P<memory_mib>\d+) MiB",
    r"Serialized model int8\+zlib: (?P<artifact_bytes>\d+) bytes",
    r"Total submission size int8\+zlib: (?P<total_bytes>\d+) bytes",
    r"final_int8_zlib_roundtrip\S* val_loss:.* stride:(?P<stride>\d+)",
)
# Facts in which all finished runs should agree.
SHARED_FACTS = "dataset train_shards val_tokens stride train_batch_tokens train_seq_len"
SHARED_FACTS += " iterations max_wallclock_seconds"
# Columns of the table: title and format.
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
AVERAGED = ("ms_per_step", "val_loss", "val_bpb", "artifact_bytes", "total_bytes")
Figures = dict[str, float]  # of a run, by column, as far as they are known


@dataclass
class Run:
    """What a log says about a run."""

    path: Path
    facts: dict[str, str | None] = field(default_factory=dict)
    train: dict[int, float] = field(default_factory=dict)  # loss in nats per token, by step
    val: dict[int, float] = field(default_factory=dict)
    figures: Figures = field(default_factory=dict)
    unfinished: str = ""  # the last line of a log without a final line
    bpb_per_nat: float = 0.0  # bits per byte of a loss of 1 nat per token; 0: unknown


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
        """Name two logs of one model, which are not two samples, or return ""."""
        for a, b in combinations(self.finished, 2):
            if are_of_one_model(a, b):
                return f"{a.path} and {b.path} are one run, or scores of one model: keep one"
        return ""


def are_of_one_model(a: Run, b: Run) -> bool:
    """Compare two runs of a side by seed and training losses. A log without training losses
    (of score.py) is a score of the side's model of its seed."""
    is_score_only = not a.train or not b.train
    return a.facts.get("seed") == b.facts.get("seed") and (is_score_only or a.train == b.train)


def read_run(path: Path) -> Run:
    """Read the last start in a log."""
    *lines, last = path.read_text(encoding="utf-8", errors="replace").split("\n")
    if re.match(FINAL_LINE, last):  # any other line without a line end may be half-written
        lines.append(last)
    starts = [i for i, line in enumerate(lines) if re.fullmatch(START_LINE, line)]
    run = Run(path)
    for line in lines[starts[-1] if starts else 0 :]:
        for pattern in (*FACT_LINES, STEP_LINE):
            if match := re.match(pattern, line):
                run.facts |= match.groupdict()
                if pattern == STEP_LINE:
                    losses = run.train if match["kind"] == "train" else run.val
                    losses[int(match["steps"])] = float(match["loss"])
                    if match["bpb"] and float(match["loss"]) > 0:
                        run.bpb_per_nat = float(match["bpb"]) / float(match["loss"])
    run.figures = {name: float(run.facts[name]) for name in COLUMNS if name in run.facts}
    if "val_loss" in run.figures:  # with more digits than in a step's line
        run.bpb_per_nat = run.figures["val_bpb"] / run.figures["val_loss"]
    else:
        run.unfinished = repr("".join(lines[-1:])[:80])
    return run


def list_different(runs: list[Run], fact: str) -> str:
    """The values of a fact, separated by commas, or "" if all runs agree."""
    values = sorted({run.facts.get(fact) or "none" for run in runs})
    return ", ".join(values) if len(values) > 1 else ""


def find_warnings(groups: list[Group]) -> list[str]:
    """List differences that make a comparison meaningless."""
    warnings = []
    runs = [run for group in groups for run in group.finished]
    for fact in SHARED_FACTS.split():
        if values := list_different(runs, fact):
            warnings.append(f"the runs differ in {fact}: {values}")
    for group in groups:
        if group.name == "runs":
            continue
        if repeat := group.find_repeat():
            warnings.append(f"{group.name}: {repeat}")
            continue
        for seed, times in Counter(group.values("seed")).items():
            if times > 1:
                warnings.append(f"{group.name}: {times} runs have seed {seed:.0f}")
    return warnings


# ---- statistics ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Test:
    """A one-sided t-test: is the candidate better by more than --by? Differences are baseline minus
    candidate: mean, and low and high of the 95 % confidence interval."""

    paired: bool
    unit: str  # of the score that is tested
    nats: dict[str, float]
    bits_per_byte: dict[str, float]
    p: float
    shown: bool
    runs_needed: int | None  # per side, to show it with probability POWER; None: above MOST_RUNS


def count_runs_needed(gain: float, variances: list[float], alpha: float) -> int | None:
    """Return the least number of runs per side, or of pairs, that shows a gain (beyond --by) with
    probability POWER. variances: of the two sides, or of the differences of the pairs."""
    total = sum(variances)
    runs = np.arange(2, MOST_RUNS + 1)
    degrees_of_freedom = (runs - 1) / np.sum((np.array(variances) / total) ** 2)
    # If the true gain is this one, the test's t follows a noncentral t distribution.
    noncentrality = gain / np.sqrt(total / runs)
    critical = stats.t.isf(alpha, degrees_of_freedom)
    enough = runs[stats.nct.sf(critical, degrees_of_freedom, noncentrality) >= POWER]
    return int(enough[0]) if len(enough) else None


def unit_to_test(runs: list[Figures]) -> str:
    """Losses per token can be compared only between runs with the same tokens."""
    factors = [run["val_bpb"] / run["val_loss"] for run in runs]
    return "nats" if max(factors) - min(factors) < 1e-6 else "bits per byte"


def run_test(sides: list[list[Figures]], paired: bool, unit: str, by: float, alpha: float) -> Test:
    """Run Welch's t-test or the paired one: is the candidate still better with `by` added?"""
    t_test = stats.ttest_rel if paired else partial(stats.ttest_ind, equal_var=False)
    differences = {}
    for name, figure in SCORES.items():
        values = [[figures[figure] for figures in side] for side in sides]
        low, high = map(float, t_test(*values).confidence_interval(0.95))
        differences[name] = {"mean": (low + high) / 2, "low": low, "high": high}
    baseline, candidate = (np.array([run[SCORES[unit]] for run in side]) for side in sides)
    p = float(t_test(baseline, candidate + by, alternative="greater").pvalue)
    spread = [baseline - candidate] if paired else [baseline, candidate]
    gain = differences[unit]["mean"] - by
    needed = count_runs_needed(gain, [values.var(ddof=1) for values in spread], alpha)
    return Test(paired, unit, *differences.values(), p, p < alpha, needed)


def pair_by_seed(sides: list[list[Figures]]) -> list[list[Figures]]:
    """Return the runs whose seed occurs once on each side, in the same order."""
    first, second = (Counter(run["seed"] for run in side if "seed" in run) for side in sides)
    seeds = [seed for seed in first if first[seed] == second[seed] == 1]
    return [[run for seed in seeds for run in side if run.get("seed") == seed] for side in sides]


def judge(groups: list[Group], by: float, alpha: float) -> list[Test] | str:
    """Test the candidate with all runs, then with pairs of one seed. Or return why not."""
    for group in groups:
        if len(group.finished) < 2:
            return f"{group.name}: {len(group.finished)} finished; each side needs two, better more"
        if group.find_repeat():
            return f"{group.name}: a model counts only once"
    if strides := list_different([run for group in groups for run in group.finished], "stride"):
        return f"SCORES OF DIFFERENT STRIDES ({strides}): score all runs with the same EVAL_STRIDE"
    if all(len(set(group.values("val_loss"))) == 1 for group in groups):
        return "no score differs within a group: give every run another SEED"
    sides = [[run.figures for run in group.finished] for group in groups]
    pairs = pair_by_seed(sides)
    unit = unit_to_test([*sides[0], *sides[1]])
    tests = [run_test(sides, False, unit, by, alpha)]
    if len({a["val_loss"] - b["val_loss"] for a, b in zip(*pairs, strict=True)}) > 1:
        tests.append(run_test(pairs, True, unit, by, alpha))
    return tests


# ---- the report ----------------------------------------------------------------------------------
def format_row(name: str, figures: Figures) -> list[str]:
    """Cells of a row. An unknown figure leaves its cell empty."""
    forms = {figure: form for figure, (_, form) in COLUMNS.items()}
    return [name, *(format(figures[f], forms[f]) if f in figures else "" for f in forms)]


def format_table(groups: list[Group]) -> str:
    """One row per run, then n, mean and standard deviation of a side's finished runs, unless a
    model is there twice."""
    rows = [["", *(title for title, _ in COLUMNS.values())]]
    for group in groups:
        rows.append(format_row(group.name, {}))
        rows += [format_row(f"  {run.path.stem}", run.figures) for run in group.runs]
        if group.name == "runs" or group.find_repeat():
            continue
        values = {figure: group.values(figure) for figure in AVERAGED}
        means = {figure: fmean(known) for figure, known in values.items() if known}
        deviations = {figure: stdev(known) for figure, known in values.items() if len(known) > 1}
        rows.append(format_row(f"  n = {len(group.finished)}, mean", means))
        rows.append(format_row("  standard deviation", deviations))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(lines)


def format_test(test: Test, by: float) -> str:
    runs = "pairs" if test.paired else "runs per side"
    difference = test.nats if test.unit == "nats" else test.bits_per_byte
    advice = f"at this spread, even {MOST_RUNS} {runs} would not show it"
    if test.runs_needed is not None:
        advice = f"at this spread, {test.runs_needed} {runs} show it with {POWER:.0%} probability"
    elif difference["mean"] <= by:
        advice = f"more {runs} like these would not show it"
    verdict = "shown" if test.shown else "not shown"
    if difference["high"] < 0:
        verdict = "no, it is worse"
    form = "{mean:.4f} {unit} ({low:.4f} to {high:.4f})"
    nats = form.format(unit="nats", **test.nats)
    bits_per_byte = form.format(unit="bits per byte", **test.bits_per_byte)
    return (
        f"{'pairs of one seed' if test.paired else 'all runs'}: {nats}, {bits_per_byte}\n"
        f"  better by more than {by:g} {test.unit}? {verdict} "
        f"(p = {test.p:.2g}); {advice}"
    )


def format_report(groups: list[Group], verdict: list[Test] | str, by: float) -> str:
    unfinished = [run for group in groups for run in group.runs if run.unfinished]
    notes = [f"no final line: {run.path}: it ends with {run.unfinished}" for run in unfinished]
    notes += [f"warning: {warning}" for warning in find_warnings(groups)]
    blocks = [format_table(groups), "\n".join(notes)]
    if isinstance(verdict, str):
        blocks.append(f"not tested: {verdict}")
    elif verdict:
        head = "baseline minus candidate, with the 95 % confidence interval:"
        blocks.append("\n".join([head, *(format_test(test, by) for test in verdict)]))
    return "\n\n".join(block for block in blocks if block)


# ---- the picture ---------------------------------------------------------------------------------
def short_names(paths: list[Path]) -> list[str]:
    """What differs between the paths; of long names, eight characters."""
    names = [str(path.with_suffix("")) for path in paths]
    if len(names) == 1:
        names = [paths[0].stem]
    else:  # cut them between words
        first, last = commonprefix(names), commonprefix([name[::-1] for name in names])
        start, end = (len(re.match(r"(.*[-_/. ])?", part)[0]) for part in (first, last))
        names = [name[start : len(name) - end] or name for name in names]
    short = [name if len(name) <= 20 else name[:8] for name in names]
    return short if len(set(short)) == len(names) else names


@dataclass
class Part:
    """Runs of one color: a side, or one run."""

    name: str
    color: str
    runs: list[Run]


def split_into_parts(groups: list[Group], by_run: bool) -> list[Part]:
    """Give each side, or each run, its color. Runs come with their scores, best first."""
    if not by_run:
        colors = ("#e08a2e", "#1f2a6b")  # light and dark: different in greyscale, too
        names = [f"{group.name}, n = {len(group.runs)}" for group in groups]
        sides = zip(names, colors, groups, strict=False)
        return [Part(name, color, group.runs) for name, color, group in sides]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    runs = [run for group in groups for run in group.runs if run.train or run.val]
    runs.sort(key=lambda run: run.figures.get("val_bpb", math.inf))
    palette = colormaps["tab10" if len(runs) <= 10 else "turbo"]
    spread = 1 if len(runs) <= 10 else 255 // (len(runs) - 1)
    names = short_names([run.path for run in runs])
    for i, run in enumerate(runs):
        if not run.unfinished:
            names[i] += f": {run.figures['val_bpb']:.4f}"
    return [Part(names[i], to_hex(palette(i * spread)), [run]) for i, run in enumerate(runs)]


def unit_to_draw(runs: list[Run]) -> str:
    """Return bits per byte if the tokenizers differ: their tokens are of different lengths."""
    factors = [run.bpb_per_nat for run in runs if run.bpb_per_nat]
    return "nats" if not factors or max(factors) - min(factors) < 1e-3 else "bits per byte"


def losses_in_view(curves: list[dict[int, float]]) -> tuple[float, float]:
    """Limits of the axis: the losses of the first fifth would flatten the rest. The last loss of a
    run that is not that far stays in view, unless the run has hardly begun."""
    end = max(step for losses in curves for step in losses)
    late = [loss for losses in curves for step, loss in losses.items() if step >= end / 5]
    late += [losses[max(losses)] for losses in curves if max(losses) >= end / 50]
    late = [loss for loss in late if math.isfinite(loss)] or [0.0]
    margin = 0.05 * (max(late) - min(late)) or 0.1
    return min(late) - margin, max(late) + margin


def draw_curves(axes: "Axes", parts: list[Part], unit: str) -> None:
    """Draw training losses as lines and validation losses as points."""
    from matplotlib.transforms import offset_copy

    curves = []
    for i, part in enumerate(parts):
        axes.plot([], [], color=part.color, marker="o", ms=4, lw=1, label=part.name)
        line = {"lw": 0.9, "alpha": max(0.3, len(part.runs) ** -0.5)}
        dots = {"ls": "", "marker": "o", "ms": 4, "alpha": 0.8, "zorder": 3}
        if len(parts) == 2:  # or the first part's points would be hidden
            dots["transform"] = offset_copy(axes.transData, axes.figure, 4 * i - 2, units="points")
        for run in part.runs:
            # Without a validation yet, bits per byte are unknown: nan leaves the run out.
            factor = 1.0 if unit == "nats" else run.bpb_per_nat or math.nan
            for losses, style in ((run.train, line), (run.val, dots)):
                if losses:
                    curves.append({step: factor * loss for step, loss in losses.items()})
                    axes.plot([*curves[-1]], [*curves[-1].values()], color=part.color, **style)
    low, high = losses_in_view(curves)
    title = "training (lines) and validation (points)"
    if any(loss > high for losses in curves for loss in losses.values()):
        title += "; the first steps are above"
    axes.set_title(title, fontsize="medium")
    last = max(step for losses in curves for step in losses)  # matplotlib overlooks shifted points
    axes.set(xlim=(-0.02 * last, 1.02 * last), ylim=(low, high))
    axes.set(xlabel="step", ylabel=AXIS_LABELS[unit])
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)


def draw_scores(axes: "Axes", parts: list[Part], unit: str) -> None:
    """Draw the score of each finished run next to those of its side, with their mean as a bar."""
    for i, part in enumerate(parts):
        scores = [run.figures[SCORES[unit]] for run in part.runs if not run.unfinished]
        if scores:
            places = i + 0.5 * (np.arange(len(scores)) + 0.5) / len(scores) - 0.25
            axes.plot(places, scores, color=part.color, ls="", marker="o", ms=4, alpha=0.8)
            axes.plot([i - 0.35, i + 0.35], 2 * [fmean(scores)], color=part.color, lw=1.6)
    axes.set_xticks((0, 1), ("baseline", "candidate"))
    axes.set_title("final scores and mean", fontsize="medium")
    axes.set(xlim=(-0.5, 1.5), ylabel=AXIS_LABELS[unit])
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.yaxis.tick_right()
    axes.yaxis.set_label_position("right")
    axes.grid(axis="y", alpha=0.3)


def draw(groups: list[Group], by_run: bool) -> "Figure":
    """Draw the losses of each run and, next to them, the scores of two sides."""
    from matplotlib.figure import Figure

    runs = [run for group in groups for run in group.runs]
    unit = unit_to_draw(runs)
    parts = split_into_parts(groups, by_run)
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    if len(groups) > 1:
        curves, scores = figure.subplots(1, 2, width_ratios=(2.4, 1))
        draw_scores(scores, parts, unit)
    else:
        curves = figure.subplots()
    draw_curves(curves, parts, unit)
    # Bits per byte for each nat per token.
    factor = max(run.bpb_per_nat for run in runs)
    if unit == "nats" and factor:
        nats_to_bpb = (lambda nats: nats * factor, lambda bpb: bpb / factor)
        curves.secondary_yaxis("right", functions=nats_to_bpb).set_ylabel("bits per byte")
    place = {"loc": "outside upper left", "ncols": 3}
    if len(parts) > 3:
        place = {"loc": "outside right upper", "ncols": 1 + len(parts) // 25}
    title = "score in bits per byte" if by_run else None
    figure.legend(fontsize="small", title=title, title_fontsize="small", frameon=False, **place)
    return figure


# ---- command line --------------------------------------------------------------------------------
def main(arguments: list[str] | None = None) -> NoReturn:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("logs", nargs="*", type=Path, metavar="LOG", help="runs to show")
    parser.add_argument("--baseline", nargs="+", type=Path, metavar="LOG")
    parser.add_argument("--candidate", nargs="+", type=Path, metavar="LOG", help="to be tested")
    parser.add_argument(
        "--by", type=float, default=0.005, help="nats or bits per byte (default: 0.005)"
    )
    parser.add_argument("--alpha", type=float, default=0.01, help="level (default: 0.01)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw into an .svg or .png")
    args = parser.parse_args(arguments)
    if args.picture is not None and args.picture.suffix not in (".svg", ".png"):
        parser.error(f"--picture {args.picture} must end in .svg or .png")
    if bool(args.logs) == bool(args.baseline) or (args.candidate and not args.baseline):
        parser.error("give either logs, or --baseline and perhaps --candidate")
    sides = {"runs": args.logs, "baseline": args.baseline, "candidate": args.candidate}
    try:
        # A file that is named twice is one run.
        given = {name: dict.fromkeys(paths) for name, paths in sides.items() if paths}
        groups = [Group(name, [*map(read_run, paths)]) for name, paths in given.items()]
        verdict = judge(groups, args.by, args.alpha) if args.candidate else []
        code = 2 if isinstance(verdict, str) else int(not all(test.shown for test in verdict[:1]))
        print(format_report(groups, verdict, args.by), flush=True)
        runs = [run for group in groups for run in group.runs]
        if args.picture is not None and not any(run.train or run.val for run in runs):
            print("nothing to draw: no log has a loss of a step yet", file=sys.stderr)
            code = code or 3
        elif args.picture is not None:
            draw(groups, by_run=args.baseline is None).savefig(args.picture, dpi=150)
    except (ImportError, OSError) as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    main()
