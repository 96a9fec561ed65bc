"""Train several runs at a time, show how far they are, stop and resume them. For experiment.py."""

import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from logs import STEP_LINE


@dataclass
class Machine:
    jobs: int  # runs at a time
    gpus: list[str]  # for CUDA_VISIBLE_DEVICES, one per run; []: the CPU, or all GPUs for each run
    command: list[str]  # starts a script
    lock: TextIO  # keeps other experiments out of the folder


@dataclass
class Side:
    """A script with knobs. Its folder is named by a hash of all that decides a run's loss."""

    name: str
    script: ModuleType
    environ: dict[str, str]
    hp: Any  # Hyperparameters
    folder: Path
    variables: Sequence[str] = ()  # those of environ that decide a run


def show(text: str, rows: list[str] = ()) -> None:
    """Print an event. On a terminal, show the rows below it until the next one."""
    if sys.stdout.isatty():
        width = (shutil.get_terminal_size().columns or 80) - 1
        table = "\n".join(row[:width] for row in rows)
        text = f"\x1b[J{text}{table}\r" + "\x1b[A" * (len(rows) - 1)
    print(text, end="", flush=True)


@dataclass(eq=False)
class Run:
    """One side with one seed: trained now, trained earlier, or not yet."""

    side: Side
    seed: int
    process: subprocess.Popen | None = None  # if trained now
    gpu: str = ""
    is_whole: bool = False  # trained now, from its first step

    def __str__(self) -> str:
        return f"{self.side.name}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        return self.side.folder / str(self.seed)

    def result(self) -> dict[str, Any] | None:
        """Return final_result.json with ms_per_step, or None without a finite score so far."""
        path = self.folder / "final_result.json"
        facts = json.loads(path.read_bytes()) if path.is_file() else {}
        loss = facts.get("val_loss")  # null if it was not finite
        is_over = self.process is None or self.process.returncode == 0
        if not is_over or loss is None or not math.isfinite(loss):
            return None
        return {**facts, "ms_per_step": facts["train_ms"] / max(facts["steps"], 1)}

    def progress(self) -> str:
        """Step, loss and minutes left, from the end of the output."""
        path = self.folder / "output.txt"
        text = path.read_bytes()[-4000:].decode(errors="replace")
        lines = [line for line in re.finditer(STEP_LINE, text, re.M) if line["kind"] == "train"]
        if not lines:
            return f"{self}: starting"
        step, hp = int(lines[-1]["steps"]), self.side.hp
        ms = step * float(lines[-1]["ms_per_step"])
        done = self.side.script.progress(hp, step, ms)
        seconds = ms / 1000 * (1 / done - 1) - (time.time() - path.stat().st_mtime)
        left = f"{max(0, seconds) / 60:.1f} min left" if done < 1 else "scoring"
        return f"{self}: step {step}/{hp.iterations}, loss {lines[-1]['loss']}, {left}"


def start(run: Run, running: list[Run], machine: Machine) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    # With a checkpoint of its last step, a run that is stopped while it is scored resumes there.
    environ = {"CHECKPOINT_EVERY": "1000000", **run.side.environ, "RESUME": "auto"}
    environ |= {"SEED": str(run.seed), "RUN_ID": f"seed-{run.seed}", "OUTPUT_DIR": str(run.folder)}
    if machine.gpus:
        run.gpu = min(machine.gpus, key=[other.gpu for other in running].count)
        environ["CUDA_VISIBLE_DEVICES"] = run.gpu
    run.is_whole = not (run.folder / "checkpoints").is_dir()
    show(f"{run}: {'started' if run.is_whole else 'resumed from its checkpoint'}\n")
    command = [*machine.command, run.side.script.__file__]
    settings = {"env": environ, "stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    settings["start_new_session"] = True  # Ctrl-C reaches this program alone
    settings["pass_fds"] = [machine.lock.fileno()]  # runs that outlive this program keep the lock
    with open(run.folder / "output.txt", "w") as output:
        run.process = subprocess.Popen(command, stdout=output, **settings)
    running.append(run)


def finish(run: Run) -> None:
    """Show the result of a run that has ended, or raise ValueError if it failed."""
    result, output = run.result(), run.folder / "output.txt"
    if result is None:
        end = "\n".join(output.read_text(errors="replace").splitlines()[-25:])
        code = run.process.returncode
        raise ValueError(f"{run} failed with exit code {code}. {output} ends with\n{end}")
    shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
    score = "val_loss {val_loss:.4f}, val_bpb {val_bpb:.4f}, {steps} steps of {ms_per_step:.1f} ms"
    show(f"{run}: {score.format(**result)}\n")


def train(runs: list[Run], machine: Machine, is_enough: Callable[[], bool] = lambda: False) -> None:
    """Train the runs that are not finished, in this order, until is_enough() is true."""
    waiting = [run for run in runs if run.result() is None]
    running: list[Run] = []
    try:
        while not is_enough() and (waiting or running):
            while waiting and len(running) < machine.jobs:
                start(waiting.pop(0), running, machine)
            show("", [run.progress() for run in running])
            time.sleep(0.2)
            for run in [run for run in running if run.process.poll() is not None]:
                running.remove(run)
                finish(run)
    finally:  # each run ends its step and writes a checkpoint
        for run in running:
            run.process.terminate()
        show("".join(f"{run}: stopping\n" for run in running))
        for run in running:
            run.process.wait()
