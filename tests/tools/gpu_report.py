"""Measure the trainer on an idle GPU within ten minutes, offline. Writes gpu_report.md.

    python tests/tools/gpu_report.py
    python tests/tools/gpu_report.py --reference FILE     the challenge's train_gpt.py beside ours
    DEVICE=cpu python tests/tools/gpu_report.py --tiny    a trial without a GPU, in a minute

With --reference, both train on the demo's data, which must exist, unless others are exported."""

import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from subprocess import CalledProcessError, TimeoutExpired, getoutput, run
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for python -P

import bench_step
import torch
from logs import read_run
from trained import SCRIPT, existing_file, start_program

import train_gpt
from train_gpt import Hyperparameters

SECONDS = "20"  # for each measurement, since a card slows down as it gets hot
BENCH = [bench_step.__file__, "--seconds", SECONDS]
TINY = "PRESET=demo NUM_LAYERS=2 TRAIN_BATCH_TOKENS=1024 WARMUP_STEPS=1 ITERATIONS=5"
HUNDRED = "ITERATIONS=100 WARMUP_STEPS=3 MAX_WALLCLOCK_SECONDS=0 VAL_LOSS_EVERY=0"
HOW = "not measured: --reference FILE, train_gpt.py of https://github.com/openai/parameter-golf"
# Name; deadline in seconds from the start; Python's arguments; knobs; output lines to show.
PARTS = [
    ("as trained", 170, [*BENCH, "--kernels"], "", 20),
    ("4 slots", 235, BENCH, "BATCH_SLOTS=4", 5),
    ("2 slots", 300, BENCH, "BATCH_SLOTS=2", 5),
    ("without cuDNN's attention", 360, [*BENCH, "--without-cudnn"], "", 5),
    ("without torch.compile", 400, BENCH, "COMPILE=0", 5),
]
REFERENCE_PARTS = [  # with --reference FILE
    ("100 steps", 480, [SCRIPT], f"{HUNDRED} RUN_ID=ours", 1),
    ("100 steps of FILE", 570, ["FILE"], f"{HUNDRED} RUN_ID=theirs", 1),
    ("100 steps and FILE's", 580, [__file__, "compare", "ours", "theirs"], "", 1),
]


def compare(names: list[str]) -> int:
    """Compare the training losses and the speed of two runs. names: their RUN_IDs."""
    logs = [Path(os.environ["OUTPUT_DIR"], "logs", f"{name}.txt") for name in names]
    first, second = map(read_run, logs)
    steps = first.train.keys() & second.train.keys()
    difference = max(abs(first.train[step] - second.train[step]) for step in steps)
    times = [run.figures["ms_per_step"] for run in (first, second)]
    speeds = f"{times[0]} and {times[1]} ms a step, ratio {times[1] / times[0]:.2f}"
    print(f"{speeds}; {len(steps)} losses, largest difference {difference:.4f} nats")
    return 0


def run_part(command: list[str | Path], **settings: Any) -> tuple[int, str]:
    """Run Python with these arguments. Returns 0 and the output, or 1 and the reason."""
    command = [sys.executable, *command]
    try:
        return 0, run(command, check=True, capture_output=True, text=True, **settings).stdout
    except CalledProcessError as error:
        text = f"exit code {error.returncode}\n{error.stdout}{error.stderr}"
        return 1, f"FAILED: {text.splitlines()[-1]}"
    except TimeoutExpired:
        return 1, "FAILED: it took too long"


def main() -> int:
    """Write the report. Returns the exit code."""
    parser = start_program(__doc__)
    parser.add_argument("--tiny", action="store_true", help="measure nothing, try everything")
    parser.add_argument("--reference", type=existing_file, metavar="FILE", help="train it, too")
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
    parts, words, environ, cwd = PARTS, {}, dict(os.environ), None
    if args.tiny:
        words[SECONDS] = "0.1"
    with tempfile.TemporaryDirectory() as folder:
        environ |= {"DEVICE": device, "OUTPUT_DIR": folder}
        if args.reference:
            # The challenge's script writes into the folder that it starts in.
            parts, cwd, words["FILE"] = PARTS + REFERENCE_PARTS, folder, args.reference.absolute()
            for name in ("DATA_PATH", "TOKENIZER_PATH"):
                environ[name] = os.path.abspath(os.environ.get(name, train_gpt.DEMO[name]))
        else:
            report += f"| the challenge's script | {HOW} | 0 |\n"
        begin, worst = time.monotonic(), 0
        for name, end, command, texts, num_lines in parts:
            knobs = dict(k.split("=") for k in f"{texts} {TINY if args.tiny else ''}".split())
            command = [words.get(word, word) for word in command]
            started = time.monotonic()
            seconds = begin + end - started
            print(f"{name}: at most {max(0, seconds):.0f} s", flush=True)
            code, output = run_part(command, env=environ | knobs, timeout=seconds, cwd=cwd)
            worst = max(worst, code)
            result = "<br>".join(output.splitlines()[-num_lines:])
            report += f"| {name} | {result} | {time.monotonic() - started:.0f} |\n"
            print(f"{name}: {result}", flush=True)
            path.write_text(report, encoding="utf-8")
    return worst


if __name__ == "__main__":
    is_part = sys.argv[1:2] == ["compare"]
    train_gpt.leave(lambda: compare(sys.argv[2:]) if is_part else main())
