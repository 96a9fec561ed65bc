"""Train several runs at a time, stop and resume them. For experiment.py."""

import json
import math
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

SCORE = "val_loss {val_loss:.4f}, val_bpb {val_bpb:.4f}, {steps} steps of {ms_per_step:.1f} ms"


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
    facts: Sequence[Any] = ()  # what decides a run's loss, apart from the data


@dataclass(eq=False)
class Run:
    """One side with one seed: trained now, trained earlier, or not yet."""

    side: Side
    seed: int
    process: subprocess.Popen | None = None  # if trained now
    gpu: str = ""

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


def start(run: Run, running: list[Run], machine: Machine) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    # With a checkpoint of its last step, a run that is stopped while it is scored resumes there.
    environ = {"CHECKPOINT_EVERY": "1000000", **run.side.environ, "RESUME": "auto"}
    environ |= {"SEED": str(run.seed), "RUN_ID": f"seed-{run.seed}", "OUTPUT_DIR": str(run.folder)}
    if machine.gpus:
        run.gpu = min(machine.gpus, key=[other.gpu for other in running].count)
        environ["CUDA_VISIBLE_DEVICES"] = run.gpu
    output, is_old = run.folder / "output.txt", (run.folder / "checkpoints").is_dir()
    print(f"{run}: {'resumed from its checkpoint' if is_old else 'started'}, see {output}")
    command = [*machine.command, run.side.script.__file__]
    settings = {"env": environ, "stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    settings["start_new_session"] = True  # Ctrl-C reaches this program alone
    settings["pass_fds"] = [machine.lock.fileno()]  # runs that outlive this program keep the lock
    with open(output, "w") as file:
        run.process = subprocess.Popen(command, stdout=file, **settings)
    running.append(run)


def train(runs: list[Run], machine: Machine, is_enough: Callable[[], bool] = lambda: False) -> None:
    """Train the runs that are not finished, in this order, until is_enough() is true. Raises
    ValueError if a run fails."""
    waiting = [run for run in runs if run.result() is None]
    running: list[Run] = []
    try:
        while not is_enough() and (waiting or running):
            while waiting and len(running) < machine.jobs:
                start(waiting.pop(0), running, machine)
            time.sleep(0.2)
            for run in [run for run in running if run.process.poll() is not None]:
                running.remove(run)
                result, output = run.result(), run.folder / "output.txt"
                if result is None:
                    end = "\n".join(output.read_text(errors="replace").splitlines()[-25:])
                    code = run.process.returncode
                    raise ValueError(f"{run} failed with exit code {code}. {output}:\n{end}")
                shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
                print(f"{run}: {SCORE.format(**result)}")
    finally:  # each run ends its step and writes a checkpoint
        for run in running:
            print(f"{run}: stopping")
            run.process.terminate()
        for run in running:
            run.process.wait()
