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

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for python -P

import bench_step
import torch
from logs import read_run
from trained import SCRIPT, existing_file, start_program

import train_gpt
from train_gpt import Hyperparameters

SECONDS = "20"  # for each measurement, since a card slows down as it gets hot
BENCH = [bench_step.__file__, "--seconds", SECONDS]
TESTS = ["-m", "pytest", "-q", f"{SCRIPT.parent}/tests/test_gpu.py", "-k", "not record"]
DEMO = "PRESET=demo BATCH_SLOTS=8 VAL_LOSS_EVERY=0 TRAIN_LOG_EVERY=1"
TINY = "PRESET=demo NUM_LAYERS=2 TRAIN_BATCH_TOKENS=1024 WARMUP_STEPS=1 ITERATIONS=5"
HUNDRED = "ITERATIONS=100 WARMUP_STEPS=3 MAX_WALLCLOCK_SECONDS=0 VAL_LOSS_EVERY=0"
HOW = "not measured: --reference FILE, train_gpt.py of https://github.com/openai/parameter-golf"
# Name; deadline in seconds from the start; Python's arguments; knobs; output lines to show.
PARTS = [
    ("a large product, a large copy", 60, [__file__, "rates", SECONDS], "", 4),
    ("as trained", 205, [*BENCH, "--kernels"], "", 21),
    ("4 slots", 270, BENCH, "BATCH_SLOTS=4", 6),
    ("2 slots", 335, BENCH, "BATCH_SLOTS=2", 6),
    ("without cuDNN's attention", 395, [*BENCH, "--without-cudnn"], "", 6),
    ("without torch.compile", 435, BENCH, "COMPILE=0", 6),
    ("one seed twice", 465, [__file__, "repeat"], "", 1),
]
DEMO_PARTS = [
    ("100 steps of the demo", 510, [SCRIPT], f"{HUNDRED} {DEMO} RUN_ID=here", 1),
    ("100 steps on the CPU", 550, [SCRIPT], f"{HUNDRED} {DEMO} RUN_ID=cpu DEVICE=cpu", 1),
    ("these two runs", 555, [__file__, "compare", "logs/here.txt", "logs/cpu.txt"], "", 1),
    ("tests marked gpu", 595, TESTS, "", 1),
]
REFERENCE_PARTS = [  # with --reference FILE, in place of the demo
    ("100 steps", 510, [__file__, "train", SCRIPT], f"{HUNDRED} RUN_ID=ours", 1),
    ("100 steps of FILE", 570, [__file__, "train", "FILE"], f"{HUNDRED} RUN_ID=theirs", 1),
    ("100 steps and FILE's", 580, [__file__, "compare", "logs/ours.txt", "logs/theirs.txt"], "", 1),
]


def text_knobs() -> dict[str, str]:
    """Return the paths of the demo's data, which the demo builds, unless others are exported."""
    names = ("DATA_PATH", "TOKENIZER_PATH")
    return {name: os.path.abspath(os.environ.get(name, train_gpt.DEMO[name])) for name in names}


def rates(seconds: str) -> None:
    """Time a product of matrices and a copy. A rented GPU may be slower than others of its kind."""
    runtime = train_gpt.open_runtime(Hyperparameters.from_env(os.environ))
    device = runtime.device
    product, flops = bench_step.make_product(runtime)
    size = min(2**32, torch.cuda.mem_get_info()[0] // 4) if device.type == "cuda" else 2**24
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    steps = {"product": product, "copy": lambda: target.copy_(source)}
    print(f"before: {bench_step.ask_nvidia_smi(bench_step.CARD, product)}")
    times = bench_step.measure(steps, float(seconds), runtime)
    print(f"after: {bench_step.ask_nvidia_smi(bench_step.CARD, product)}")
    flops_per_s = bench_step.format_spread([1e-9 * flops / ms for ms in times["product"]])
    print(f"{flops_per_s} TFLOP/s, in {runtime.dtype}")
    bytes_per_s = bench_step.format_spread([2e-9 * size / ms for ms in times["copy"]])
    print(f"{bytes_per_s} TB/s read and written, {size >> 20} MiB")


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
    reference = {"type": existing_file, "metavar": "FILE", "help": "in place of the demo"}
    parser.add_argument("--reference", **reference)
    args = parser.parse_args()
    hp = Hyperparameters.from_env(os.environ)
    device = train_gpt.open_device(hp, 0).type  # for all parts
    if device == "cpu" and not args.tiny:
        parser.error("no GPU here, or DEVICE=cpu: --tiny tries everything on a CPU, in a minute")
    path = Path("gpu_report.md")
    if os.path.lexists(path):  # perhaps of another card
        parser.error(f"{path.absolute()} exists: move it away, or start in another folder")
    defaults = asdict(Hyperparameters(run_id=hp.run_id))
    differ = [f"{k.upper()}={v}" for k, v in asdict(hp).items() if v != defaults[k]]
    gpu = bench_step.ask_nvidia_smi("name,driver_version")
    facts = f"{gpu}, torch {torch.__version__}, commit {getoutput('git describe --always --dirty')}"
    report = f"{facts}\n\nknobs: {' '.join(differ) or 'the defaults'}\n\n"
    report += "| part | result | seconds |\n|---|---|---|\n"
    if not args.reference:
        report += f"| the challenge's script | {HOW} | 0 |\n"
    parts = PARTS + (REFERENCE_PARTS if args.reference else DEMO_PARTS)
    more, begin, worst = TINY if args.tiny else "", time.monotonic(), 0
    words = {
        "FILE": os.path.abspath(args.reference or ""),
        SECONDS: "0.1" if args.tiny else SECONDS,
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, end, command, texts, num_lines in parts:
            knobs = dict(k.split("=") for k in f"DEVICE={device} {texts} {more}".split())
            knobs["OUTPUT_DIR"] = folder
            command = [words.get(word, word) for word in command]
            started = time.monotonic()
            seconds = begin + end - started
            print(f"{name}: at most {max(0, seconds):.0f} s", flush=True)
            code, output = run_part(command, knobs, seconds)
            worst = max(worst, code)
            result = "<br>".join(output.splitlines()[-num_lines:])
            report += f"| {name} | {result} | {time.monotonic() - started:.0f} |\n"
            print(f"{name}: {result}", flush=True)
            path.write_text(report, encoding="utf-8")
    return worst


if __name__ == "__main__":
    functions = {part.__name__: part for part in (rates, compare, repeat, train)}
    name, *arguments = sys.argv[1:] or [""]
    train_gpt.leave(lambda: functions[name](*arguments) if name in functions else main())
