"""Test a change: train pairs of runs, without it and with it, until the verdict is sure.

    PRESET=demo python tests/tools/experiment.py --quick                       your edits
    PRESET=demo python tests/tools/experiment.py --quick --set MATRIX_LR=0.06
    python tests/tools/experiment.py --script tests/records/train_record.py --set XSA_LAYERS=4

The baseline is the script of the last commit; with --set, the script as it is. Both sides have the
knobs of the environment. After Ctrl-C or --minutes, the same command continues.

Exit code 0: better. 1: not, or not yet. 2: an error. 130: stopped. Needs pip install scipy."""

import ast
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
from importlib.machinery import PathFinder
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for python -P

import anytime
import ledger
from jobs import Machine, Run, Side, show, train
from logs import script_of_log
from trained import OWN, RECORD, SCRIPT, existing_file, files, load_script, unknown_knobs

QUICK = {"ITERATIONS": "150", "MAX_WALLCLOCK_SECONDS": "0", "WARMDOWN_FRAC": "0.3"}
QUICK |= {"VAL_LOSS_EVERY": "0", "TRAIN_LOG_EVERY": "10"}
SET_PER_RUN = ("SEED", "RUN_ID", "OUTPUT_DIR", "RESUME")


# ---- the two sides -------------------------------------------------------------------------------
def git(script: Path, *words: str) -> bytes:
    """The output of git in the script's folder; b"" without git or a commit."""
    command = shlex.join(["git", "-C", str(script.resolve().parent), *words])
    # A hook of git has GIT_DIR, which names another folder or repository.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(command, shell=True, capture_output=True, env=environ).stdout


def read_script(path: Path) -> bytes:
    """Read a script, or take it out of the log of a run."""
    return path.read_bytes() if path.suffix == ".py" else script_of_log(path)


def read_sources(args: Namespace) -> list[bytes]:
    """Return the scripts of the baseline and of the candidate."""
    sources = [read_script(args.script)] * 2
    if args.base:
        sources[0] = read_script(args.base)
    elif not args.set:
        sources[0] = git(args.script, "show", f"HEAD:./{args.script.resolve().name}")
    if not sources[0]:
        raise ValueError(f"the last commit has no {args.script.name}: name a baseline with --base")
    return sources


def describe_change(sources: list[bytes], args: Namespace) -> str:
    """The knobs, or the first line of an edit."""
    texts = [importlib.util.decode_source(source).splitlines() for source in sources]
    diff = difflib.unified_diff(*texts, n=0)
    lines = [" ".join(line.split()) for line in diff if re.match(r"[+-]\s*[^+\-\s#]", line)]
    more = f" (lines changed: {len(lines)})" if len(lines) > 1 else ""
    return " ".join(args.set) or min(lines, default="") + more  # "+" is before "-"


def check_knobs(names: list[str], known: list[str]) -> None:
    """Raise ValueError for a name that is not a knob of the candidate."""
    for name in set(names) - set(known):
        near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.85)
        advice = f"did you mean {near[0]}?" if near else "see `train_gpt.py --help`"
        if RECORD.is_file() and not unknown_knobs(load_script(RECORD), {name: ""}):
            path = RECORD.relative_to(SCRIPT.parent)
            advice = f"it is a knob of {path}: add --script {path}"
        raise ValueError(f"{name} is not a knob of the candidate: {advice}")


def check_imports(source: bytes, path: Path) -> None:
    """Raise ValueError if a script imports a module from its folder, which the copy would lack."""
    nodes = [*ast.walk(ast.parse(source, str(path)))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    for name in sorted({name.split(".")[0] for name in names} - {""}):
        spec = PathFinder.find_spec(name, [str(path.resolve().parent)])
        if spec and spec.origin:
            advice = "put it into the script, as experiment.py compares scripts alone"
            raise ValueError(f"{path} imports {name}, a module next to it: {advice}")


def load_side(
    name: str, path: Path, source: bytes, own: dict[str, str], args: Namespace
) -> tuple[Side, list[Any]]:
    """Load a script and read its knobs (own: this side's alone). Also returns what decides the
    losses of its runs, apart from the data."""
    script = load_script(path)
    preset = script.PRESETS.get(args.environ.get("PRESET"), {})
    # --quick keeps the shape of the preset's schedule.
    quick = {k: v for k, v in QUICK.items() if k != "WARMDOWN_FRAC" or k not in preset}
    environ = {**(quick if args.quick else {}), **args.environ, **own}
    try:
        hp = script.Hyperparameters.from_env(environ)
    except script.InputError as error:
        raise ValueError(f"{name}: {error}") from None
    knobs = {knob: value for knob, value in asdict(hp).items() if knob not in (*OWN, "seed")}
    # Variables that an edit reads by itself are knobs, too.
    nodes = ast.walk(ast.parse(source))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
    read = {k: environ[k] for k in sorted(environ) if k in texts and k != "_"}
    check_knobs([*own], [*map(str.upper, knobs), *filter(str.isupper, read)])
    names = dict.fromkeys([*map(str.upper, asdict(hp)), *read])
    side = Side(name, script, environ, hp, args.out, [k for k in names if k in environ])
    return side, [importlib.util.decode_source(source), knobs, read]


def prepare_side(name: str, source: bytes, own: dict[str, str], args: Namespace) -> Side:
    """Copy the script, build the demo's data and name the side's folder."""
    path = args.out / f"{name}.py"
    path.write_bytes(source)
    side, facts = load_side(name, path, source, own, args)
    side.script.prepare_demo(side.hp, Namespace(log=str))
    paths = [*sorted(Path(side.hp.data_path).glob("*.bin")), Path(side.hp.tokenizer_path)]
    sizes = [(path.name, path.stat().st_size) for path in paths if path.is_file()]
    facts += [sizes, args.launch, torch.__version__]
    side.folder = args.out / hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    return side


# ---- the verdict ---------------------------------------------------------------------------------
@dataclass
class Experiment:
    """Pairs of runs, baseline and candidate. row: the experiment's row in the ledger."""

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
        show(f"three pairs, the fewest for a gain: about {needed:.1f} minutes, {fits}\n")

    def judge(self) -> None:
        """Write the verdict to the ledger, once there is a pair."""
        args, row = self.args, self.row
        low, high = anytime.interval(self.gains, args.alpha)
        numbers = {"gain": fmean(self.gains or [math.nan]), "low": low, "high": high}
        row |= {name: f"{number:.5f}" for name, number in numbers.items()}
        row["verdict"] = anytime.verdict(self.gains, args.by, args.alpha)
        row |= {"unit": self.unit, "pairs": str(len(self.gains))}
        if not self.gains:
            return
        judged = self.pairs[: len(self.gains)]
        row["ms_per_step"] = f"{fmean(b.result()['ms_per_step'] for _, b in judged):.2f}"
        row["seeds"] = " ".join(str(pair[0].seed) for pair in judged)
        ledger.update(args.ledger, row, self.evidence)

    def evidence(self, seeds: list[int]) -> float:
        """Evidence of all finished pairs with these seeds, each counted once."""
        figure = anytime.SCORES[self.unit]
        gains = []
        for seed in dict.fromkeys(seeds):
            baseline, candidate = (Run(run.side, seed).result() for run in self.pairs[0])
            if baseline and candidate:  # the folder of an old run may be gone
                gains.append(baseline[figure] - candidate[figure])
        return anytime.evidence(gains, self.args.by)

    def __str__(self) -> str:
        return anytime.describe(self.gains, self.unit, self.args.by, self.args.alpha)

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
        args, row = self.args, self.row
        self.judge()
        if row["verdict"] == "not yet" and time.monotonic() > args.deadline:
            show("--minutes are over: the same command continues from here\n")
        show(f"\ngain: {self}\n{anytime.describe_evidence(self.gains, args.by, args.alpha)}\n")
        runs = [run for pair in self.pairs[: len(self.gains)] for run in pair]
        is_capped = any(run.result()["steps"] < run.side.hp.iterations for run in runs)
        show(f"{self.compare_times()}\n")
        if is_capped and args.machine.jobs > 1 and not args.machine.gpus:
            show("WARNING: the time limit ended runs that shared the CPU: use --jobs 1\n")
        self.show_claims()
        if runs:
            self.draw()
        last = {name: row[name] for name in ("unit", "pairs", "gain", "low", "high")}
        last["evidence"] = f"{anytime.evidence(self.gains, args.by):.3g}"
        last["verdict"] = row["verdict"]
        words = [f"{name}:{value.replace(' ', '_')}" for name, value in last.items()]
        show(f"experiment {' '.join(words)}\n")
        return int(row["verdict"] != "better")

    def show_claims(self) -> None:
        """Count the changes in the ledger. Say what evidence a winner needs, and how to get it."""
        rows, sides = ledger.read(self.args.ledger), (self.row["baseline"], self.row["candidate"])
        claims = ledger.claims(rows)
        better = [row["verdict"] == "better" for row in claims]
        evidences = [float(row["evidence"]) for row in claims]
        stand = [*map(all, zip(better, anytime.claims_that_stand(evidences), strict=True))]
        counts = f"better: {sum(better)}, stand together: {sum(stand)}"
        show(f"{self.args.ledger}: changes tried: {len(claims)}, {counts}\n")
        if self.row["verdict"] != "better" or self.args.by < 0:
            return
        own = [(row["baseline"], row["candidate"]) == sides for row in claims]
        k = 1 + sum(a and not b for a, b in zip(stand, own, strict=True))
        needed = f"to stand among the changes tried, it needs {len(claims) / (0.1 * k):.3g}"
        show(f"evidence of all its seeds: {self.row['evidence']}; {needed}\n")
        stored = ledger.seeds_of(row for row in rows if row["candidate"] in sides)
        seeds = ledger.fresh_seeds(max(4, len(self.gains)), stored)
        command = f"{self.args.command} --seeds {' '.join(map(str, seeds))}"
        show(f"luck helped to find this gain: measure it with fresh seeds\n    {command}\n")

    def draw(self) -> None:
        """Draw the pairs into --picture, or print the command that does."""
        words = [os.path.relpath(Path(__file__).with_name("compare_runs.py"))]
        for i, side in enumerate(("--baseline", "--candidate")):
            runs = [pair[i] for pair in self.pairs[: len(self.gains)]]
            words += [side, *(str(run.folder / f"logs/seed-{run.seed}.txt") for run in runs)]
        picture = self.args.picture or Path("pairs.png")
        words += ["--picture", str(picture)]
        if self.args.picture:
            picture.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL)
            if picture.is_file():
                show(f"picture: {picture}\n")
        else:
            show(f"to draw the pairs:\n    {shlex.join(['python', *words])}\n")


# ---- command line --------------------------------------------------------------------------------
def check_words(args: Namespace) -> dict[str, str]:
    """Check arguments that need no script. Returns the knobs of --set."""
    for word in args.set:
        if word.find("=") < 1:
            raise ValueError(f"--set {word}: write KNOB=VALUE")
    own = dict(word.split("=", 1) for word in args.set)
    if taken := [name for name in SET_PER_RUN if name in (*os.environ, *own)]:
        raise ValueError(f"{taken[0]} is set for each run: unset it, and use --seeds and --out")
    if args.picture and args.picture.suffix not in (".svg", ".png"):
        raise ValueError(f"--picture {args.picture} must end in .svg or .png")
    return own


def lock_folder(args: Namespace) -> Machine:
    """Keep other experiments out of the folder. Returns the machine for its runs."""
    args.out.mkdir(parents=True, exist_ok=True)
    lock = open(args.out / "lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(f"an experiment is running in {args.out}: wait, or set --out") from None
    data = args.out / "data"  # where the script looks for the demo's builder
    if data.is_symlink():  # perhaps of another checkout
        data.unlink()
    if not data.exists():
        data.symlink_to(SCRIPT.with_name("data"))
    num_gpus = 0 if os.environ.get("DEVICE") == "cpu" else torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
    gpus = [] if args.launch else visible.split(",")[:num_gpus]
    if num_gpus == 0:
        args.environ.setdefault("OMP_NUM_THREADS", "1")
    cores = 1 if args.launch else max(1, files.cores() - 1)
    command = shlex.split(args.launch) or [sys.executable]
    return Machine(args.jobs or len(gpus) or cores, gpus, command, lock)


def choose_seeds(args: Namespace, sides: dict[str, str]) -> list[int]:
    """Return --seeds; else those of the same change, then the smallest that did not choose the
    baseline: it looks too good with the seeds with which it won."""
    rows = ledger.read(args.ledger)  # before any training: it could be damaged
    if args.seeds:
        return list(dict.fromkeys(args.seeds))
    begun = [row for row in rows if row.items() >= sides.items()]
    own = ledger.seeds_of(sorted(begun, key=lambda row: int(row["first_seed"]))[:1])
    stored = ledger.seeds_of(row for row in rows if row["candidate"] == sides["baseline"])
    fresh = ledger.fresh_seeds(args.until_sure, stored)
    if stored:
        show(f"the seeds {' '.join(map(str, sorted({*stored})))} chose this baseline\n")
    return list(dict.fromkeys([*own, *fresh]))[: args.until_sure]


def prepare(args: Namespace) -> Experiment:
    """Check everything that can be checked before training, and choose the seeds."""
    args.started = time.monotonic()
    args.deadline = args.started + 60 * args.minutes
    args.environ, args.ledger = {**os.environ}, args.out / "ledger.tsv"
    own, sources = check_words(args), read_sources(args)
    check_imports(sources[0], args.base or args.script)
    check_imports(sources[1], args.script)
    # An error in a knob is shown even if another experiment runs.
    load_side("candidate", args.script, sources[1], own, args)
    args.machine = lock_folder(args)
    baseline = prepare_side("baseline", sources[0], {}, args)
    candidate = prepare_side("candidate", sources[1], own, args)
    if baseline.folder == candidate.folder:
        raise ValueError(f"nothing to compare: edit {args.script}, or --set another value")
    change = describe_change(sources, args)
    given = [f"{k}={shlex.quote(os.environ[k])}" for k in baseline.variables if k in os.environ]
    args.command = " ".join([*given, args.command])
    commit = git(args.script, "rev-parse", "--short", "HEAD").decode().strip()
    row = {"date": time.strftime("%Y-%m-%d"), "commit": commit, "change": change}
    row["knobs"] = " ".join(f"{name}={baseline.environ[name]}" for name in baseline.variables)
    sides = {"baseline": baseline.folder.name, "candidate": candidate.folder.name}
    show(f"baseline: {baseline.folder}\ncandidate: {candidate.folder}: {change}\n")
    seeds = choose_seeds(args, sides)
    row |= {**sides, "by": f"{args.by:.10g}", "first_seed": str(seeds[0])}
    show(f"seeds: {' '.join(map(str, seeds))}. Runs at a time: {args.machine.jobs}\n")
    return Experiment(args, [(Run(baseline, seed), Run(candidate, seed)) for seed in seeds], row)


def parse(arguments: list[str]) -> Namespace:
    parser = files.start_program(__doc__)
    add, number = parser.add_argument, files.number
    add("--quick", action="store_true", help="150 steps, as in README.md")
    add("--set", nargs="+", action="extend", default=[], metavar="KNOB=VALUE")
    script_help = "of both sides (default: train_gpt.py); or a run's logs/RUN_ID.txt"
    add("--script", type=existing_file, default=SCRIPT, metavar="FILE", help=script_help)
    add("--base", type=existing_file, metavar="FILE", help="the baseline's script, or a log")
    add("--launch", default="", metavar="COMMAND", help='for example "torchrun --standalone"')
    seed = number(int, 0, 2**32 - 1)
    add("--seeds", type=seed, nargs="+", metavar="N", help="train exactly these pairs")
    add("--until-sure", type=number(int, 1), default=16, metavar="N", help="at most N pairs (16)")
    add("--by", type=number(float), default=0.0, metavar="N", help="gain that counts (0)")
    alpha_help = "probability that a limit is ever wrong (0.05)"
    alpha = number(float, 0, 1, exclusive=True)
    add("--alpha", type=alpha, default=anytime.ALPHA, metavar="P", help=alpha_help)
    jobs_help = "runs at a time (default: one per GPU, or cores - 1)"
    add("--jobs", type=number(int, 1), metavar="N", help=jobs_help)
    add("--out", type=Path, default=Path("out/experiments"), metavar="FOLDER")
    add("--minutes", type=number(float, 0), default=math.inf, metavar="N", help="then stop")
    add("--picture", type=Path, metavar="FILE", help="draw the pairs into an .svg or .png")
    args = parser.parse_args(arguments)
    args.command = shlex.join(["python", os.path.relpath(__file__), *arguments])
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if arguments is None else arguments)
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
    except SyntaxError as error:  # it names the script and the line
        print(f"experiment.py: {error}: name a train_gpt.py without errors", file=sys.stderr)
    except (ValueError, OSError, SystemExit) as error:
        print(f"experiment.py: {error}", file=sys.stderr)
    except Exception:
        sys.excepthook(*sys.exc_info())
    return 2


if __name__ == "__main__":
    sys.exit(main())
