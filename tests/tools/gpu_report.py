"""Measure the trainer on an idle GPU within ten minutes, offline. Writes gpu_report.md.

python tests/tools/gpu_report.py
python tests/tools/gpu_report.py --reference FILE     the challenge's train_gpt.py beside ours
DEVICE=cpu python tests/tools/gpu_report.py --tiny    a trial without a GPU, in a minute
"""

import os
import runpy
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from subprocess import CalledProcessError, TimeoutExpired, getoutput, run

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for python -P

import bench_step
from logs import read_run
from trained import SCRIPT, existing_file, start_program

import train_gpt
from train_gpt import Hyperparameters

BENCH = [bench_step.__file__, "--alone", "--rounds=10"]
TESTS = ["-m", "pytest", "-q", f"{SCRIPT.parent}/tests/test_gpu.py", "-k", "not record"]
DEMO = "PRESET=demo BATCH_SLOTS=8 MAX_WALLCLOCK_SECONDS=0 VAL_LOSS_EVERY=0 TRAIN_LOG_EVERY=1"
TINY = "PRESET=demo NUM_LAYERS=2 TRAIN_BATCH_TOKENS=1024 WARMUP_STEPS=1 ITERATIONS=5"
HUNDRED = "ITERATIONS=100 WARMUP_STEPS=3 MAX_WALLCLOCK_SECONDS=0 VAL_LOSS_EVERY=0"
HOW = "not measured: --reference FILE, train_gpt.py of https://github.com/openai/parameter-golf"
# Name; deadline in seconds from the start; Python's arguments; knobs; output lines to show.
PARTS = [
    ("a large product, a large copy", 65, [__file__, "rates"], "", 2),
    ("as trained", 185, [bench_step.__file__, "--kernels"], "", 20),
    ("4 slots", 240, BENCH, "BATCH_SLOTS=4", 4),
    ("2 slots", 295, BENCH, "BATCH_SLOTS=2", 4),
    ("without cuDNN's attention", 340, [*BENCH, "--without-cudnn"], "", 4),
    ("without torch.compile", 365, BENCH, "COMPILE=0", 4),
    ("demo", 420, [SCRIPT], f"{DEMO} RUN_ID=here", 1),
    ("demo on the CPU", 480, [SCRIPT], f"{DEMO} RUN_ID=cpu DEVICE=cpu", 1),
    ("the demo's two runs", 490, [__file__, "compare", "logs/here.txt", "logs/cpu.txt"], "", 1),
    ("one seed twice", 520, [__file__, "repeat"], "", 1),
    ("tests marked gpu", 590, TESTS, "", 1),
]
# With --reference FILE, in place of the tests.
REFERENCE_PARTS = [
    ("100 steps", 545, [__file__, "train", SCRIPT], f"{HUNDRED} RUN_ID=ours", 1),
    ("100 steps of FILE", 585, [__file__, "train", "FILE"], f"{HUNDRED} RUN_ID=theirs", 1),
    ("100 steps and FILE's", 590, [__file__, "compare", "logs/ours.txt", "logs/theirs.txt"], "", 1),
]


def text_knobs() -> dict[str, str]:
    """Return the paths of the demo's data, which the demo builds, unless others are exported."""
    names = ("DATA_PATH", "TOKENIZER_PATH")
    return {name: os.path.abspath(os.environ.get(name, train_gpt.DEMO[name])) for name in names}


def rates() -> None:
    """Time a product of matrices and a copy. A rented GPU may be slower than others of its kind."""
    runtime = train_gpt.open_runtime(Hyperparameters.from_env(os.environ))
    device = runtime.device
    print(f"{bench_step.product_rate(runtime):.4g} TFLOP/s, in {runtime.dtype}")
    size = min(2**32, torch.cuda.mem_get_info()[0] // 4) if device.type == "cuda" else 2**24
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ms = bench_step.measure({"copy": lambda: target.copy_(source)}, 20, device)["copy"]
    print(f"{2e-9 * size / ms:.4g} TB/s read and written, {size >> 20} MiB")


def compare(*names: str) -> None:
    """Compare the training losses and the speed of two runs. names: of their logs."""
    first, second = (read_run(Path(os.environ["OUTPUT_DIR"], name)) for name in names)
    steps = first.train.keys() & second.train.keys()
    difference = max(abs(first.train[step] - second.train[step]) for step in steps)
    times = [run.figures["ms_per_step"] for run in (first, second)]
    speeds = f"{times[0]} and {times[1]} ms a step, ratio {times[1] / times[0]:.2f}"
    print(f"{speeds}; {len(steps)} losses, largest difference {difference:.4f} nats")


def repeat() -> None:
    """Train 20 steps twice from one start. What differs is what a seed does not fix."""
    hp = Hyperparameters.from_env({**os.environ, **text_knobs()})
    state = train_gpt.TrainingState(hp, train_gpt.open_runtime(hp))
    start, losses = state.state_dict(), []
    for _ in range(2):
        state.load_state_dict(start)
        losses.append(torch.stack([train_gpt.train_step(state) for _ in range(20)]))
    difference = (losses[0] - losses[1]).abs().max()
    print(f"20 steps, largest difference of train_loss {difference:.6f} nats")


def train(script: str) -> None:
    """Run a script in OUTPUT_DIR: the challenge's writes into the folder it starts in."""
    os.environ |= text_knobs()
    os.chdir(os.environ["OUTPUT_DIR"])
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


def run_part(command: list[str | Path], knobs: dict[str, str], seconds: float) -> tuple[int, str]:
    """Run Python with these arguments and knobs. Returns 0 and the output, or 1 and the reason."""
    settings = {"env": os.environ | knobs, "timeout": seconds, "check": True}
    try:
        done = run([sys.executable, *command], capture_output=True, text=True, **settings)
        return 0, done.stdout
    except CalledProcessError as error:
        text = f"exit code {error.returncode}\n{error.stdout}{error.stderr}"
        return 1, f"FAILED: {text.splitlines()[-1]}"
    except TimeoutExpired:
        return 1, "FAILED: it took too long"


def main() -> int:
    """Write the report. Returns the exit code."""
    parser = start_program(__doc__)
    parser.add_argument("--tiny", action="store_true", help="measure nothing, try everything")
    parser.add_argument("--reference", type=existing_file, metavar="FILE", help="in place of tests")
    args = parser.parse_args()
    hp = Hyperparameters.from_env(os.environ)
    device = train_gpt.open_device(hp, 0).type  # for all parts
    if device == "cpu" and not args.tiny:
        parser.error("no GPU here, or DEVICE=cpu: --tiny tries everything on a CPU, in a minute")
    defaults = asdict(Hyperparameters(run_id=hp.run_id))
    differ = [f"{k.upper()}={v}" for k, v in asdict(hp).items() if v != defaults[k]]
    gpu = getoutput("nvidia-smi --query-gpu=name,driver_version --format=csv,noheader")
    facts = f"{gpu}, torch {torch.__version__}, commit {getoutput('git describe --always --dirty')}"
    report = f"{facts}\n\nknobs: {' '.join(differ) or 'the defaults'}\n\n"
    report += "| part | result | seconds |\n|---|---|---|\n"
    if not args.reference:
        report += f"| the challenge's script | {HOW} | 0 |\n"
    parts = [*PARTS[:-1], *REFERENCE_PARTS] if args.reference else PARTS
    more, begin, worst = TINY if args.tiny else "", time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        for name, end, command, texts, num_lines in parts:
            knobs = dict(k.split("=") for k in f"DEVICE={device} {texts} {more}".split())
            knobs["OUTPUT_DIR"] = folder
            command = [args.reference.resolve() if word == "FILE" else word for word in command]
            started = time.monotonic()
            seconds = begin + end - started
            print(f"{name}: at most {max(0, seconds):.0f} s", flush=True)
            code, output = run_part(command, knobs, seconds)
            worst = max(worst, code)
            result = "<br>".join(output.splitlines()[-num_lines:])
            report += f"| {name} | {result} | {time.monotonic() - started:.0f} |\n"
            print(f"{name}: {result}", flush=True)
            Path("gpu_report.md").write_text(report, encoding="utf-8")
    return worst


if __name__ == "__main__":
    functions = {part.__name__: part for part in (rates, compare, repeat, train)}
    name, *arguments = sys.argv[1:] or [""]
    train_gpt.leave(lambda: functions[name](*arguments) if name in functions else main())
