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
import zlib
from argparse import Namespace
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for python -P

import anytime
import ledger
import torch
from jobs import Job, Side, train
from logs import list_texts, read_run, read_script
from trained import OWN, SCRIPT, existing_file, files, load_script

QUICK = {"ITERATIONS": "150", "MAX_WALLCLOCK_SECONDS": "0", "WARMDOWN_FRAC": "0.3"}
QUICK |= {"VAL_LOSS_EVERY": "0", "TRAIN_LOG_EVERY": "10"}
# A hook of git has these variables, and they may name another repository.
HOOK = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY")
SECRET = {"KEY", "TOKEN", "SECRET", "PASSWORD"}  # words in the names of variables


# ---- the two sides -------------------------------------------------------------------------------
def git(script: Path, *words: str) -> tuple[bytes, str]:
    """Run git in the script's folder. Returns its output and its error, or the shell's: no git."""
    command = shlex.join(["git", "-C", str(script.resolve().parent), *words])
    environ = {name: value for name, value in os.environ.items() if name not in HOOK}
    result = subprocess.run(command, shell=True, capture_output=True, env=environ)
    return result.stdout, " ".join(result.stderr.decode(errors="replace").split())


def read_sources(args: Namespace) -> tuple[list[bytes], str]:
    """Return the scripts of both sides, and the change: the knobs, or the first line of an edit."""
    candidate = baseline = read_script(args.script)
    if args.base:
        baseline = read_script(args.base)
    elif not args.set and args.script.suffix == ".py":  # a log has no older version
        name = args.script.resolve().name
        # As in a checkout: filters and line ends may change what git stores.
        baseline, problem = git(args.script, "cat-file", "--filters", f"HEAD:./{name}")
        if not baseline:
            advice = "name an unedited copy with --base FILE, or work in a clone"
            raise ValueError(f"no committed {name} to compare with: {problem}: {advice}")
    texts = [importlib.util.decode_source(source).splitlines() for source in (baseline, candidate)]
    diff = "\n".join(difflib.unified_diff(*texts, n=0, lineterm=""))
    places = [re.findall(r"(?m)^[+-][ \t]*[^+\-\s#].*", part) for part in re.split("(?m)^@@", diff)]
    number = sum(map(len, places))
    more = f" (lines changed: {number})" if number > 1 else ""
    # Of the first place that changed, the line that replaces others: "+" is before "-".
    first = min(next(filter(None, places), [""]), key=lambda line: line[:1])
    return [baseline, candidate], " ".join(args.set) or " ".join(first.split()) + more


def load_alone(path: Path) -> ModuleType:
    """Load a script. Raises ValueError if that loads a module that is not installed, or finds none:
    experiment.py copies and compares the script alone."""
    installed = {*sys.modules, *sys.stdlib_module_names}
    try:
        script = load_script(path)
    except ImportError as error:
        raise ValueError(f"{path}: {error}: install it, or put it into the script") from None
    for name in sorted({*sys.modules} - installed - {script.__name__}):
        file = getattr(sys.modules[name], "__file__", None) or ""
        if name.split(".")[0] not in installed and "-packages" not in file and file[-3:] == ".py":
            raise ValueError(f"{path} loads {name} from {file}: put it into the script")
    return script


def load_side(name: str, path: Path, own: dict[str, str], args: Namespace) -> Side:
    """Load a script and read its knobs. own: those of this side alone."""
    source, script = read_script(path), load_alone(path)
    preset = script.PRESETS.get(args.environ.get("PRESET"), {})
    # --quick keeps the shape of the preset's schedule.
    quick = {k: v for k, v in QUICK.items() if k != "WARMDOWN_FRAC" or k not in preset}
    environ = {**(quick if args.quick else {}), **args.environ, **own}
    try:
        hp = script.Hyperparameters.from_env(environ)
    except script.InputError as error:
        raise ValueError(f"{name}: {error}") from None
    knobs = {knob: value for knob, value in asdict(hp).items() if knob not in (*OWN, "seed")}
    # Variables that an edit reads by itself are knobs, too. pack.py's scripts have a text.
    is_packed = b"linecache.cache[__file__]" in source
    nodes = ast.walk(ast.parse(script.source if is_packed else source))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
    read = {k: environ[k] for k in sorted(environ) if k in texts - {"_", *map(str.upper, knobs)}}
    known = [*map(str.upper, knobs), *filter(str.isupper, read)]
    for knob in own.keys() - known:
        record = "a knob of --script tests/records/train_record.py"
        near = difflib.get_close_matches(knob.upper(), known, n=1, cutoff=0.85) or [record]
        raise ValueError(f"{knob} is not a knob of the candidate: did you mean {near[0]}?")
    secret = {k: "..." for k in read if SECRET & {*k.upper().split("_")}}
    for knob in own.keys() & secret.keys():
        raise ValueError(f"--set {knob} would be in the ledger: set it in the environment")
    variables = {k: environ[k] for k in environ if k in read or k in map(str.upper, asdict(hp))}
    facts = [importlib.util.decode_source(source), knobs, read]
    command = [*(shlex.split(args.launch) or [sys.executable]), str(path)]
    return Side(name, script, command, environ, hp, args.out, variables | secret, facts)


def checksum(path: Path, known: dict[str, list[int]]) -> tuple[int, int]:
    """Size and checksum of a file. known: those of files that did not change, by their path."""
    stat, name = path.stat(), str(path.resolve())
    state = [stat.st_size, stat.st_ino, stat.st_ctime_ns]
    if known.get(name, [])[:3] != state:
        known[name] = [*state, zlib.crc32(path.read_bytes())]
    return stat.st_size, known[name][3]


def prepare_side(name: str, source: bytes, own: dict[str, str], args: Namespace) -> Side:
    """Copy the script, build the demo's data and name the side's folder. The copy would not find
    the builder, which is in our folder data."""
    path = args.out / f"{name}.py"
    path.write_bytes(source)
    side = load_side(name, path, own, args)
    load_script(SCRIPT).prepare_demo(side.hp, Namespace(log=str))
    paths = [*sorted(Path(side.hp.data_path).glob("*.bin")), Path(side.hp.tokenizer_path)]
    store = args.out / "data.json"
    known = files.read_json(store) if store.exists() else {}
    data = {path.name: checksum(path, known) for path in paths if path.is_file()}
    if args.ledger.exists() and not store.exists() and max(data.values(), default=(0,))[0] > 2**22:
        print("runs of older versions are trained again: now all bytes of the data count")
    files.write_json(store, known)
    num_gpus = 0 if side.hp.device == "cpu" else torch.cuda.device_count()
    if not args.launch:  # that may start the run on another machine
        side.device = "cuda" if num_gpus else "cpu"
    gpus = sorted({torch.cuda.get_device_name(i) for i in range(num_gpus)})
    facts = [*side.facts, data, args.launch, torch.__version__, *gpus]
    side.folder = args.out / hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    side.scored = {k: getattr(side.hp, k.lower(), 0) for k in ("EVAL_STRIDE", "MAX_VAL_TOKENS")}
    side.scored["validation shards"] = [data[name] for name in data if "_val_" in name]
    side.scored["tokenizer"] = data.get(Path(side.hp.tokenizer_path).name)
    return side


def check_scores(old: Side, new: Side) -> None:
    """Raise ValueError if scores of these sides cannot be compared."""
    differ = [name for name in old.scored if old.scored[name] != new.scored[name]]
    if "tokenizer" in differ:  # sizes of the texts are compared after the first pair
        differ = [name for name in differ if name == "EVAL_STRIDE"]
    if differ:
        raise ValueError(f"scores with different {differ[0]} cannot be compared: use one for both")


# ---- the verdict ---------------------------------------------------------------------------------
@dataclass
class Experiment:
    """Pairs of runs, baseline and candidate. row: the experiment's row in the ledger."""

    args: Namespace
    pairs: list[tuple[Job, Job]]
    row: dict[str, str]
    unit: str = "nats"
    gains: list[float] = field(default_factory=list)  # one for each of the first pairs

    def is_over(self) -> bool:
        """Judge the pairs that have finished since the last call."""
        for pair in self.pairs[len(self.gains) :]:
            baseline, candidate = results = [run.result() for run in pair]
            if baseline and baseline["val_loss"] == math.inf:
                print(f"WARNING: {pair[0]} diverged: its pair does not count")
                self.pairs.remove(pair)
                continue
            if None in results:
                return time.monotonic() > self.args.deadline
            if candidate["val_loss"] < math.inf:
                self.check(pair)
            self.gains.append(self.gain(pair))
            self.judge()
            print(f"pair {len(self.gains)}: gain {self.gains[-1]:.5f}; all: {self}")
            word = anytime.verdict(self.gains, self.args.by, self.args.alpha)
            is_sure = word != "not yet" or self.gains == [0, 0]
            if (is_sure and not self.args.seeds) or self.gains[-1] == -math.inf:
                break
        if not self.pairs:
            raise ValueError("the baseline diverged with all seeds: set lower learning rates")
        if not any(self.gains):
            problem = "the change does nothing: both sides of all pairs end with the same loss"
            raise ValueError(f"{problem}. If it acts with other seeds, list them: --seeds")
        return True

    def check(self, pair: tuple[Job, Job]) -> None:
        """Choose the unit. Raises ValueError if the seed changes nothing, or the texts differ."""
        for first, run in zip(self.pairs[0], pair, strict=True):
            if first is not run and first.result()["val_loss"] == run.result()["val_loss"]:
                same = f"seeds {first.seed} and {run.seed} end with the same loss"
                raise ValueError(f"{run.side.name}: {same}: let the script use hp.seed")
        per_nat = [run.result()["val_bpb"] / run.result()["val_loss"] for run in pair]
        # Nats per token cannot be compared between tokenizers.
        self.unit = "nats" if math.isclose(*per_nat, rel_tol=1e-6) else "bits per byte"
        if not self.gains:
            logs = [read_run(path) for run in pair for path in run.folder.glob("logs/*.txt")]
            if texts := list_texts(logs):
                raise ValueError(f"the sides are scored on different texts, of {texts}")

    def gain(self, pair: tuple[Job, Job]) -> float:
        """Gain of a finished pair. -inf if the candidate diverged; inf or nan: the baseline did."""
        baseline, candidate = (run.result()[anytime.SCORES[self.unit]] for run in pair)
        return baseline - candidate

    def judge(self) -> None:
        """Write the verdict to the ledger, once a pair has a gain other than 0."""
        args, row = self.args, self.row
        mean = fmean(self.gains or [math.nan])
        low, high = anytime.interval(self.gains, args.alpha)
        row |= {"gain": f"{mean:.5f}", "low": f"{low:.5f}", "high": f"{high:.5f}"}
        row["verdict"] = anytime.verdict(self.gains, args.by, args.alpha)
        row |= {"unit": self.unit, "pairs": str(len(self.gains))}
        if any(self.gains):
            seeds = [str(run.seed) for run, _ in self.pairs[: len(self.gains)]]
            row |= {"seeds": " ".join(seeds), "first_seed": seeds[0]}
            ledger.update(args.ledger, row, self.gains_of)

    def gains_of(self, seeds: list[int]) -> dict[int, float]:
        """Gains of all finished pairs with these seeds, each counted once."""
        old, new = (run.side for run in self.pairs[0])
        pairs = [(Job(old, seed), Job(new, seed)) for seed in seeds]
        # The folder of an old run may be gone.
        gains = {a.seed: self.gain((a, b)) for a, b in pairs if a.result() and b.result()}
        return {seed: gain for seed, gain in gains.items() if gain < math.inf}

    def __str__(self) -> str:
        return anytime.describe(self.gains, self.unit, self.args.by, self.args.alpha)

    def report(self) -> int:
        """Print the result. Returns the exit code."""
        args, row = self.args, self.row
        self.judge()
        if row["verdict"] == "not yet" and time.monotonic() > args.deadline:
            print("--minutes are over: the same command continues from here")
        evidence = anytime.describe_evidence(self.gains, args.by, args.alpha)
        print(f"\ngain: {self}\nrule: evidence of pairs, level {args.alpha:g}: {evidence}")
        steps = [run.result()["steps"] for pair in self.pairs[: len(self.gains)] for run in pair]
        if row.get("diverged"):
            print(f"worse: diverged at seed {row['diverged']}")
        elif min(steps, default=20) < 20:
            print(f"WARNING: {min(steps)} steps say little about longer runs: train 20 or more")
        for knob in ("ITERATIONS", "TRAIN_BATCH_TOKENS", "MAX_WALLCLOCK_SECONDS"):
            old, new = (getattr(run.side.hp, knob.lower(), 0) for run in self.pairs[0])
            if old != new:
                print(f"WARNING: the sides differ in {knob}: {old:g} and {new:g}")
        # Times can be compared if both runs of a pair were trained now.
        pairs = [(a, b) for a, b in self.pairs[: len(self.gains)] if a.process and b.process]
        times = [[run.result()["ms_per_step"] for run in pair] for pair in pairs]
        ratios = [new / old for old, new in times if old > 0]  # ITERATIONS may be 0
        if ratios:
            limits = f"({min(ratios):.3f} to {max(ratios):.3f})"
            print(f"time of a step: {fmean(ratios):.3f} times the baseline's {limits}")
        self.show_claims()
        if self.gains:
            self.show_drawing()
        found = 0 if row.get("diverged") else anytime.evidence(self.gains, args.by)
        last = {**row, "evidence": f"{found:.3g}"}
        names = ("unit", "pairs", "gain", "low", "high", "evidence", "verdict")
        print("experiment", *(f"{name}:{last[name].replace(' ', '_')}" for name in names))
        return anytime.EXIT_CODES[row["verdict"]]

    def show_claims(self) -> None:
        """Count the changes in the ledger. Say what evidence a winner needs, and how to get it."""
        rows, sides = ledger.read(self.args.ledger), (self.row["baseline"], self.row["candidate"])
        claims = ledger.claims(rows)
        found = anytime.claims_that_stand([float(row["evidence"]) for row in claims.values()])
        better = {key for key, row in claims.items() if row["verdict"] == "better"}
        stand = better & {key for key, stands in zip(claims, found, strict=True) if stands}
        counts = f"better: {len(better)}, stand together: {len(stand)}"
        print(f"{self.args.ledger}: changes tried: {len(claims)}, {counts}")
        if self.row["verdict"] != "better" or self.args.by < 0:
            return
        k = 1 + len(stand - {sides})
        needed = f"to stand among the changes tried, it needs {len(claims) / (0.1 * k):.3g}"
        print(f"evidence of all its seeds: {self.row['evidence']}; {needed}")
        keys = {(row["baseline"], row["candidate"], row["first_seed"]) for row in rows}
        advice = "luck helped to find this gain: measure it with fresh seeds"
        if sum(key[:2] == sides for key in keys) > 1:
            advice = "more evidence, if you want it, with seeds that are fresh again"
        stored = ledger.seeds_of(row for row in rows if row["candidate"] in sides)
        seeds = ledger.fresh_seeds(max(4, len(self.gains)), stored)
        command = re.sub(r" --seeds( \d+)+", "", self.args.command)
        print(f"{advice}\n    {command} --seeds {' '.join(map(str, seeds))}")

    def show_drawing(self) -> None:
        """Print the command that draws the pairs."""
        words = ["python", os.path.relpath(Path(__file__).with_name("compare_runs.py"))]
        sides = zip(*self.pairs[: len(self.gains)], strict=True)
        for option, runs in zip(("--baseline", "--candidate"), sides, strict=True):
            words += [option, *(f"{run.folder}/logs/seed-{run.seed}.txt" for run in runs)]
        words += ["--by", f"{self.args.by:g}", "--alpha", f"{self.args.alpha:g}"]
        print(f"to draw the pairs:\n    {shlex.join([*words, '--picture', 'pairs.png'])}")


# ---- command line --------------------------------------------------------------------------------
def lock_folder(args: Namespace) -> None:
    """Keep other experiments out of the folder. Choose the number of runs at a time. Raises
    ValueError if the folder has a user's files of our names."""
    lock = args.out / "lock"
    if not (lock.is_file() and lock.stat().st_size == 0):  # it is not a folder of experiments
        for name in ("lock", "data.json", "ledger.tsv", "baseline.py", "candidate.py"):
            if os.path.lexists(path := args.out / name):
                raise ValueError(f"{path} is not a file of experiment.py: set another --out")
    args.out.mkdir(parents=True, exist_ok=True)
    args.lock = open(lock, "w")
    os.set_inheritable(args.lock.fileno(), True)
    try:
        fcntl.flock(args.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"an experiment is running in {args.out}: wait, or set --out") from None
    except OSError as error:
        print(f"WARNING: {args.out} cannot be locked ({error}): start no second experiment there")
    num_gpus = 0 if os.environ.get("DEVICE") == "cpu" else torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
    args.gpus = [] if args.launch else visible.split(",")[:num_gpus]
    if num_gpus == 0:
        args.environ.setdefault("OMP_NUM_THREADS", "1")
    cores = 1 if args.launch else max(1, files.cores() - 1)
    args.jobs = args.jobs or len(args.gpus) or cores


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
    return list(dict.fromkeys([*own, *fresh]))[: args.until_sure]


def prepare(args: Namespace) -> Experiment:
    """Check everything that can be checked before training, and choose the seeds."""
    sources, change = read_sources(args)
    # An error in a knob is shown even if another experiment runs.
    load_side("candidate", args.script, args.own, args)
    lock_folder(args)
    baseline = prepare_side("baseline", sources[0], {}, args)
    candidate = prepare_side("candidate", sources[1], args.own, args)
    if baseline.folder == candidate.folder:
        old = f"git show HEAD~1:./{os.path.relpath(args.script)} > old.py, and --base old.py"
        problem = f"nothing to compare: edit {args.script}, or --set another value"
        raise ValueError(f"{problem}. If you committed the edit: {old}")
    check_scores(baseline, candidate)
    shown = {**candidate.variables, **baseline.variables}
    given = [f"{k}={shlex.quote(v)}" for k, v in shown.items() if k in os.environ]
    args.command = " ".join([*given, args.command])
    print(f"baseline: {baseline.folder}\ncandidate: {candidate.folder}: {change}")
    sides = {"baseline": baseline.folder.name, "candidate": candidate.folder.name}
    seeds = choose_seeds(args, sides)
    print(f"seeds: {' '.join(map(str, seeds))}. Runs at a time: {args.jobs}")
    commit = git(args.script, "rev-parse", "--short", "HEAD")[0].decode().strip()
    row = {"date": time.strftime("%Y-%m-%d"), "commit": commit, "change": change}
    row["knobs"] = " ".join(f"{k}={v}" for k, v in shown.items() if k in baseline.environ)
    row |= {**sides, "by": f"{args.by:.10g}"}
    args.deadline = time.monotonic() + 60 * args.minutes
    return Experiment(args, [(Job(baseline, seed), Job(candidate, seed)) for seed in seeds], row)


def parse(arguments: list[str]) -> Namespace:
    parser = files.start_program(__doc__)
    add, number = parser.add_argument, files.number
    seed, level = number(int, 0, 2**32 - 1), number(float, 0, 1, exclusive=True)
    add("--quick", action="store_true", help="150 steps, as in README.md")
    add("--set", nargs="+", action="extend", default=[], metavar="KNOB=VALUE")
    add("--script", type=existing_file, default=SCRIPT, metavar="FILE", help="of both sides")
    add("--base", type=existing_file, metavar="FILE", help="the baseline's script, or a log")
    add("--launch", default="", metavar="COMMAND", help='for example "torchrun --standalone"')
    add("--seeds", type=seed, nargs="+", metavar="N", help="train exactly these pairs")
    add("--until-sure", type=number(int, 1), default=16, metavar="N", help="at most N pairs (16)")
    add("--by", type=number(float), default=0.0, metavar="N", help="gain that counts (0)")
    add("--alpha", type=level, default=anytime.ALPHA, metavar="P", help="risk per limit (0.05)")
    add("--jobs", type=number(int, 1), metavar="N", help="runs at a time (GPUs, or cores - 1)")
    add("--out", type=files.path, default=Path("out/experiments"), metavar="FOLDER")
    add("--minutes", type=number(float, 0), default=math.inf, metavar="N", help="then stop")
    args = parser.parse_args(arguments)
    for word in args.set:
        if word.find("=") < 1:
            parser.error(f"--set {word}: write KNOB=VALUE")
    args.own = dict(word.split("=", 1) for word in args.set)
    if len(args.own) < len(args.set):
        parser.error(f"--set {' '.join(args.set)}: name each knob once")
    for name in ("SEED", "RUN_ID", "OUTPUT_DIR", "RESUME"):
        if name in os.environ or name in args.own:
            parser.error(f"{name} is set for each run: unset it, and use --seeds and --out")
    args.command = shlex.join(["python", os.path.relpath(__file__), *arguments])
    args.environ, args.ledger = dict(os.environ), args.out / "ledger.tsv"
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # without a reader, a print is an OSError
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup sets that
            signal.signal(signum, signal.default_int_handler)
    try:
        experiment = prepare(args)
        runs = [run for i, pair in enumerate(experiment.pairs) for run in pair[:: (-1) ** i]]
        train(runs, args.jobs, args.gpus, experiment.is_over)
        return experiment.report()
    except KeyboardInterrupt:
        print("stopped: the same command continues from here", file=sys.stderr)
        return 130
    except (SyntaxError, ValueError, OSError, SystemExit) as error:
        advice = ": fix it" if isinstance(error, SyntaxError) else ""
        print(f"experiment.py: {error}{advice}", file=sys.stderr)
    except Exception:
        sys.excepthook(*sys.exc_info())
    return 2


if __name__ == "__main__":
    sys.exit(main())
