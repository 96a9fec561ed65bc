"""Measure the trainer on an idle GPU within ten minutes, offline. Writes gpu_report.md.

python tests/tools/gpu_report.py
DEVICE=cpu python tests/tools/gpu_report.py --tiny    a trial without a GPU, in a minute
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from subprocess import CalledProcessError, TimeoutExpired, getoutput, run

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for python -P

import bench_step
from logs import read_run
from trained import SCRIPT, load_script, start_program

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DEMO = "PRESET=demo BATCH_SLOTS=8 MAX_WALLCLOCK_SECONDS=0 VAL_LOSS_EVERY=0 TRAIN_LOG_EVERY=1"
TINY = "PRESET=demo NUM_LAYERS=2 TRAIN_BATCH_TOKENS=1024 WARMUP_STEPS=1 ITERATIONS=5"
HEAD = "Send this file in an issue or a pull request.\n\n| part | result | seconds |\n|---|---|---|"
# Name; deadline in seconds from the start; Python's arguments; knobs; output lines to show.
PARTS = [
    ("a large product", 60, [__file__, "product"], "", 1),
    ("a large copy", 80, [__file__, "copy"], "", 1),
    ("as trained", 190, [bench_step.__file__, "--kernels"], "", 16),
    ("without cuDNN's attention", 260, [bench_step.__file__, "--without-cudnn"], "", 6),
    ("without torch.compile", 290, [bench_step.__file__], "COMPILE=0", 6),
    ("export of the default model", 300, [__file__, "export"], "", 3),
    ("demo", 360, [SCRIPT], f"{DEMO} RUN_ID=here", 1),
    ("demo on the CPU", 460, [SCRIPT], f"{DEMO} RUN_ID=cpu DEVICE=cpu", 1),
    ("training losses of the two", 480, [__file__, "compare"], "", 1),
    ("tests marked gpu", 590, ["-m", "pytest", "-q", f"{SCRIPT.parent}/tests/test_gpu.py"], "", 1),
]


def product() -> None:
    """Time a product of matrices. A rented GPU may be slower than others of its kind."""
    size = 8192 if DEVICE.type == "cuda" else 128
    a, b = torch.randn(2, size, size, device=DEVICE, dtype=torch.bfloat16)
    ms = bench_step.measure({"product": lambda: a @ b}, 20, DEVICE)["product"]
    print(f"{2e-9 * size**3 / ms:.4g} TFLOP/s, {size} x {size} in bf16")


def copy() -> None:
    """Time a copy in the GPU's memory."""
    size = 2**30 if DEVICE.type == "cuda" else 2**24
    source = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    ms = bench_step.measure({"copy": lambda: target.copy_(source)}, 20, DEVICE)["copy"]
    print(f"{2e-9 * size / ms:.4g} TB/s read and written, {size >> 20} MiB")


def export() -> None:
    """Time the parts of an export of random weights."""
    script = load_script(SCRIPT)
    value = script.GPT(script.Hyperparameters.from_env(os.environ)).state_dict()
    value = {name: torch.randn_like(tensor) for name, tensor in value.items()}
    for part in (script.quantize_state_dict_int8, script.serialize, script.compress):
        started = time.perf_counter()
        value = part(value)
        print(f"{part.__name__} {time.perf_counter() - started:.2f} s")


def compare() -> None:
    """Compare the training losses of the demo and of the demo on the CPU."""
    paths = Path(os.environ["OUTPUT_DIR"], "logs").glob("*.txt")
    losses = [read_run(path).train.values() for path in paths]
    differences = [abs(a - b) for a, b in zip(*losses, strict=False)]
    print(f"{len(differences)} steps, largest difference {max(differences):.4f} nats")


def main() -> int:
    """Write the report. Returns the exit code."""
    parser = start_program(__doc__)
    parser.add_argument("--tiny", action="store_true", help="measure nothing, try everything")
    is_tiny = parser.parse_args().tiny
    if DEVICE.type == "cpu" and not is_tiny:
        parser.error("torch sees no GPU here: --tiny tries everything on a CPU, in a minute")
    gpu = getoutput("nvidia-smi --query-gpu=name,driver_version --format=csv,noheader")
    facts = f"{gpu}, torch {torch.__version__}, commit {getoutput('git describe --always --dirty')}"
    report = f"{facts}\n\n{HEAD}\n"
    more, begin, code = TINY if is_tiny else "", time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        for name, end, command, texts, num_lines in PARTS:
            knobs = dict(k.split("=") for k in f"{more} {texts} OUTPUT_DIR={folder}".split())
            started = time.monotonic()
            print(f"{name}: at most {max(0, begin + end - started):.0f} s", flush=True)
            settings = {"env": os.environ | knobs, "timeout": begin + end - started, "check": True}
            try:
                done = run([sys.executable, *command], capture_output=True, text=True, **settings)
                result = "<br>".join(done.stdout.splitlines()[-num_lines:])
            except CalledProcessError as error:
                text = f"exit code {error.returncode}\n{error.stdout}{error.stderr}"
                code, result = 1, f"FAILED: {text.splitlines()[-1]}"
            except TimeoutExpired:
                code, result = 1, "FAILED: it took too long"
            report += f"| {name} | {result} | {time.monotonic() - started:.0f} |\n"
            print(f"{name}: {result}", flush=True)
            Path("gpu_report.md").write_text(report, encoding="utf-8")
    return code


if __name__ == "__main__":
    parts = {part.__name__: part for part in (product, copy, export, compare)}
    sys.exit(parts.get(sys.argv[-1], main)())
