"""Test a change: train pairs of runs, without it and with it, until the verdict is sure.

    PRESET=demo python tests/tools/experiment.py --quick                       your edits
    PRESET=demo python tests/tools/experiment.py --quick --set MATRIX_LR=0.06
    python tests/tools/experiment.py --script tests/records/train_record.py --set XSA_LAYERS=4

The baseline is the script of the last commit; with --set, the script as it is. Both sides have the
knobs of the environment. After Ctrl-C or --minutes, the same command continues.

Exit code 0: better. 1: not, or not yet. 2: an error. 130: stopped. Needs pip install scipy."""

import difflib
import fcntl
import hashlib
import importlib.util
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for python -P

import anytime
from jobs import Machine, Run, Side, show, train
from trained import OWN, RECORD, SCRIPT, files, load_script, start_program, unknown_knobs

QUICK = {"ITERATIONS": "150", "MAX_WALLCLOCK_SECONDS": "0", "WARMDOWN_FRAC": "0.3"}
QUICK |= {"VAL_LOSS_EVERY": "0", "TRAIN_LOG_EVERY": "10"}
SET_PER_RUN = ("SEED", "RUN_ID", "OUTPUT_DIR", "RESUME")


# ---- the two sides -------------------------------------------------------------------------------
def git(script: Path, *words: str) -> bytes:
    """The output of git in the script's folder; b"" without git or a commit."""
    command = shlex.join(["git", "-C", str(script.resolve().parent), *words])
    return subprocess.run(command, shell=True, capture_output=True).stdout


def write_scripts(args: Namespace) -> str:
    """Write both sides' scripts into the folder. Returns the change in a line."""
    sources = [args.script.read_bytes()] * 2
    if args.base:
        sources[0] = args.base.read_bytes()
    elif not args.set:
        sources[0] = git(args.script, "show", f"HEAD:./{args.script.name}")
    if not sources[0]:
        raise ValueError(f"the last commit has no {args.script.name}: name a baseline with --base")
    (args.out / "baseline.py").write_bytes(sources[0])
    (args.out / "candidate.py").write_bytes(sources[1])
    texts = [importlib.util.decode_source(source).splitlines() for source in sources]
    diff = difflib.unified_diff(*texts, n=0)
    lines = [" ".join(line.split()) for line in diff if re.match(r"[+-]\s*[^+\-\s#]", line)]
    more = f" (lines changed: {len(lines)})" if len(lines) > 1 else ""
    return " ".join(args.set) or min(lines, default="") + more  # "+" is before "-"


def check_knobs(names: list[str], known: list[str]) -> None:
    """Raise ValueError for a name that is not a knob of the candidate."""
    for name in set(names) - set(known):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        advice = f"did you mean {near[0]}?" if near else "see `train_gpt.py --help`"
        if RECORD.is_file() and not unknown_knobs(load_script(RECORD), {name: ""}):
            path = RECORD.relative_to(SCRIPT.parent)
            advice = f"it is a knob of {path}: add --script {path}"
        raise ValueError(f"{name} is not a knob of the candidate: {advice}")


def prepare_side(name: str, path: Path, own: dict[str, str], args: Namespace) -> Side:
    """Check the knobs (own: this side's alone), build the demo's data and name the folder."""
    source = importlib.util.decode_source(path.read_bytes())
    script, environ = load_script(path), {**args.environ, **own}
    try:
        hp = script.Hyperparameters.from_env(environ)
        script.prepare_demo(hp, Namespace(log=str))
    except script.InputError as error:
        raise ValueError(f"{name}: {error}") from None
    knobs = {knob: value for knob, value in asdict(hp).items() if knob not in (*OWN, "seed")}
    # Variables that an edit reads by itself are knobs, too.
    read = {k: environ[k] for k in sorted(environ) if f'"{k}"' in source and k.isupper()}
    check_knobs([*own], [*map(str.upper, knobs), *read])
    files = [*sorted(Path(hp.data_path).glob("*.bin")), Path(hp.tokenizer_path)]
    sizes = [(file.name, file.stat().st_size) for file in files if file.is_file()]
    facts = repr([source, knobs, read, sizes, args.launch, torch.__version__])
    folder = args.out / hashlib.sha256(facts.encode()).hexdigest()[:12]
    return Side(name, script, environ, hp, folder)


# ---- the verdict ---------------------------------------------------------------------------------
def read_ledger(path: Path) -> list[dict[str, str]]:
    header, *lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else [""]
    return [dict(zip(header.split("\t"), line.split("\t"), strict=True)) for line in lines]


@dataclass
class Experiment:
    """Pairs of runs, baseline and candidate. row: the experiment's line in the ledger."""

    args: Namespace
    pairs: list[tuple[Run, Run]]
    row: dict[str, str]
    unit: str = "nats"
    gains: list[float] = field(default_factory=list)  # one for each of the first pairs

    def is_over(self) -> bool:
        """Judge the pairs that have finished since the last call."""
        for pair in self.pairs[len(self.gains) :]:
            baseline, candidate = results = [run.result() for run in pair]
            if None in results:
                return time.monotonic() > self.args.deadline
            if baseline["val_loss"] == candidate["val_loss"]:
                raise ValueError("the change does nothing: both sides end with the same loss")
            for first, run in zip(self.pairs[0], pair, strict=True):
                if first is not run and first.result()["val_loss"] == run.result()["val_loss"]:
                    same = f"seeds {first.seed} and {run.seed} end with the same loss"
                    advice = "let the script use hp.seed, or all pairs are one"
                    raise ValueError(f"{run.side.name}: {same}: {advice}")
            per_nat = [result["val_bpb"] / result["val_loss"] for result in results]
            # Nats per token cannot be compared between tokenizers.
            self.unit = "nats" if math.isclose(*per_nat, rel_tol=1e-6) else "bits per byte"
            figure = anytime.SCORES[self.unit]
            self.gains.append(baseline[figure] - candidate[figure])
            self.judge()
            show(f"pair {len(self.gains)}: gain {self.gains[-1]:.5f}; all: {self}\n")
            if len(self.gains) == 1:
                self.show_forecast()
            if self.row["verdict"] != "not yet" and not self.args.seeds:
                break
        return True

    def show_forecast(self) -> None:
        """Say after the first pair whether three pairs fit into --minutes."""
        runs = [run for pair in self.pairs for run in pair]
        done = sum(run.process is not None and run.result() is not None for run in runs)
        missing = sum(run.result() is None for run in runs[:6])
        if math.isinf(self.args.deadline) or done == 0:
            return
        rounds = [math.ceil(n / self.args.machine.jobs) for n in (done, done + missing)]
        needed = (time.monotonic() - self.args.started) / 60 * rounds[1] / rounds[0]
        limit = f"--minutes {self.args.minutes:g}"
        advice = f"MORE THAN {limit}: stop, and use --minutes {2 * needed:.0f} or fewer ITERATIONS"
        fits = f"within {limit}" if needed <= self.args.minutes else advice
        show(f"three pairs, the fewest for a verdict: about {needed:.1f} minutes, {fits}\n")

    def judge(self) -> None:
        """Write the verdict to the ledger, once there is a pair."""
        low, high = anytime.interval(self.gains)
        numbers = {"gain": fmean(self.gains or [math.nan]), "low": low, "high": high}
        self.row |= {name: f"{number:.5f}" for name, number in numbers.items()}
        self.row["evidence"] = f"{anytime.evidence(self.gains, self.args.by):.3g}"
        self.row["verdict"] = anytime.verdict(self.gains, self.args.by)
        self.row |= {"unit": self.unit, "pairs": str(len(self.gains))}
        if not self.gains:
            return
        times = [pair[1].result()["ms_per_step"] for pair in self.pairs[: len(self.gains)]]
        self.row["ms_per_step"] = f"{fmean(times):.2f}"
        key, path = ("baseline", "candidate", "first_seed"), self.args.ledger
        rows = [row for row in read_ledger(path) if any(row[k] != self.row[k] for k in key)]
        lines = [self.row, *(row.values() for row in [*rows, self.row])]
        text = "".join("\t".join(line) + "\n" for line in lines)
        files.write_file(path, text.encode())

    def __str__(self) -> str:
        return anytime.describe(self.gains, self.unit, self.args.by)

    def compare_times(self) -> str:
        """Ratio of the step times, from pairs that were trained side by side."""
        pairs = [(a, b) for a, b in self.pairs[: len(self.gains)] if a.is_whole and b.is_whole]
        if not pairs:
            return "time of a step: not measured, as no pair was trained whole by this command"
        ratios = [b.result()["ms_per_step"] / a.result()["ms_per_step"] for a, b in pairs]
        limits = f" ({min(ratios):.3f} to {max(ratios):.3f})" if len(ratios) > 1 else ""
        return f"time of a step: {fmean(ratios):.3f} times the baseline's{limits}"

    def report(self) -> int:
        """Print the result. Returns the exit code."""
        self.judge()
        if self.row["verdict"] == "not yet" and time.monotonic() > self.args.deadline:
            show("--minutes are over: the same command continues from here\n")
        show(f"\ngain: {self}\n{anytime.describe_evidence(self.gains, self.args.by)}\n")
        runs = [run for pair in self.pairs[: len(self.gains)] for run in pair]
        is_capped = any(run.result()["steps"] < run.side.hp.iterations for run in runs)
        show(f"{self.compare_times()}\n")
        if is_capped and self.args.machine.jobs > 1 and not self.args.machine.gpus:
            show("WARNING: the time limit ended runs that shared the CPU: use --jobs 1\n")
        changes: dict[tuple[str, str], list[dict[str, str]]] = {}
        for row in read_ledger(self.args.ledger):  # a change has a row for each first seed
            changes.setdefault((row["baseline"], row["candidate"]), []).append(row)
        better = [any(row["verdict"] == "better" for row in rows) for rows in changes.values()]
        # Evidence of independent seeds multiplies.
        evidence = [math.prod(float(row["evidence"]) for row in rows) for rows in changes.values()]
        stand = sum(map(all, zip(better, anytime.claims_that_stand(evidence), strict=True)))
        counts = f"changes tried: {len(changes)}, better: {sum(better)}, stand together: {stand}"
        show(f"{self.args.ledger}: {counts}\n")
        last = ("unit", "pairs", "gain", "low", "high", "evidence", "verdict")
        words = [f"{name}:{self.row[name].replace(' ', '_')}" for name in last]
        show(f"experiment {' '.join(words)}\n")
        return int(self.row["verdict"] != "better")


# ---- command line --------------------------------------------------------------------------------
def lock_folder(args: Namespace) -> Machine:
    """Keep other experiments out of the folder. Returns the machine for its runs."""
    args.out.mkdir(parents=True, exist_ok=True)
    lock = open(args.out / "lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(f"an experiment is running in {args.out}: wait, or set --out") from None
    if not (args.out / "data").is_symlink():  # where the script looks for the demo's builder
        (args.out / "data").symlink_to(SCRIPT.with_name("data"))
    num_gpus = 0 if os.environ.get("DEVICE") == "cpu" else torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
    gpus = [] if args.launch else visible.split(",")[:num_gpus]
    if num_gpus == 0:
        args.environ.setdefault("OMP_NUM_THREADS", "1")
    cores = 1 if args.launch else max(1, files.cores() - 1)
    command = shlex.split(args.launch) or [sys.executable]
    return Machine(args.jobs or len(gpus) or cores, gpus, command, lock)


def prepare(args: Namespace) -> Experiment:
    """Check everything that can be checked before training, and choose the seeds."""
    own = dict(word.partition("=")[::2] for word in args.set)
    if taken := [name for name in SET_PER_RUN if name in (*os.environ, *own)]:
        raise ValueError(f"{taken[0]} is set for each run: unset it, and use --seeds and --out")
    args.started = time.monotonic()
    args.deadline = args.started + 60 * args.minutes
    args.environ = {**(QUICK if args.quick else {}), **os.environ}
    args.machine, args.ledger = lock_folder(args), args.out / "ledger.tsv"
    change = write_scripts(args)
    baseline = prepare_side("baseline", args.out / "baseline.py", {}, args)
    candidate = prepare_side("candidate", args.out / "candidate.py", own, args)
    if baseline.folder == candidate.folder:
        raise ValueError(f"nothing to compare: edit {args.script}, or --set another value")
    knobs = [name for name in map(str.upper, asdict(baseline.hp)) if name in args.environ]
    commit = git(args.script, "rev-parse", "--short", "HEAD").decode().strip()
    row = {"date": time.strftime("%Y-%m-%d"), "commit": commit}
    row |= {"change": change, "knobs": " ".join(f"{name}={args.environ[name]}" for name in knobs)}
    sides = {"baseline": baseline.folder.name, "candidate": candidate.folder.name}
    row |= sides
    # A baseline that was chosen for its losses with some seeds looks too good with them.
    rows = read_ledger(args.ledger)
    used = [old for old in rows if old["candidate"] == row["baseline"]]
    first = max((int(old["first_seed"]) + int(old["pairs"]) for old in used), default=1)
    begun = [int(old["first_seed"]) for old in rows if old.items() >= sides.items()]
    first = min(begun, default=first)
    seeds = list(dict.fromkeys(args.seeds or range(first, first + max(args.until_sure, 1))))
    row["first_seed"] = str(seeds[0])
    show(f"baseline: {baseline.folder}\ncandidate: {candidate.folder}: {change}\n")
    note = "" if args.seeds or first == 1 else "; earlier ones chose this baseline"
    show(f"seeds: {seeds[0]} to {seeds[-1]}{note}. Runs at a time: {args.machine.jobs}\n")
    return Experiment(args, [(Run(baseline, seed), Run(candidate, seed)) for seed in seeds], row)


def main(arguments: list[str] | None = None) -> int:
    parser = start_program(__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="150 steps, as in README.md")
    add("--set", nargs="+", action="extend", default=[], metavar="KNOB=VALUE")
    add("--script", type=Path, default=SCRIPT, metavar="FILE", help="of both sides (train_gpt.py)")
    add("--base", type=Path, metavar="FILE", help="the baseline's script")
    add("--launch", default="", metavar="COMMAND", help='for example "torchrun --standalone"')
    add("--seeds", type=int, nargs="+", metavar="N", help="train exactly these pairs")
    number, jobs_help = files.number, "runs at a time (default: one per GPU, or cores - 1)"
    add("--until-sure", type=number(int, 1), default=8, metavar="N", help="at most N pairs (8)")
    add("--by", type=number(float), default=0.005, metavar="N", help="gain that counts (0.005)")
    add("--jobs", type=number(int, 1), metavar="N", help=jobs_help)
    add("--out", type=Path, default=Path("out/experiments"), metavar="FOLDER")
    add("--minutes", type=number(float, 0), default=math.inf, metavar="N", help="then stop")
    args = parser.parse_args(arguments)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup sets that
            signal.signal(signum, signal.default_int_handler)
    try:
        experiment = prepare(args)
        runs = [run for i, pair in enumerate(experiment.pairs) for run in pair[:: (-1) ** i]]
        train(runs, args.machine, experiment.is_over)
        return experiment.report()
    except KeyboardInterrupt:
        print("stopped: the same command continues from here", file=sys.stderr)
        return 130
    except SyntaxError as error:  # it names the copy of the script, and the line
        print(f"experiment.py: {error}: name a train_gpt.py without errors", file=sys.stderr)
    except (ValueError, OSError, SystemExit) as error:
        print(f"experiment.py: {error}", file=sys.stderr)
    except Exception:
        sys.excepthook(*sys.exc_info())
    return 2


if __name__ == "__main__":
    sys.exit(main())
