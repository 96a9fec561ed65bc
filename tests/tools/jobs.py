"""Train several runs at a time, stop and resume them. For experiment.py."""

import math
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from logs import read_run
from trained import files


@dataclass
class Side:
    """A script with knobs. Its folder is named by a hash of all that decides a run's loss."""

    name: str
    script: ModuleType
    command: list[str]  # trains it
    environ: dict[str, str]
    hp: Any  # Hyperparameters
    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)  # decide a run; secrets as "..."
    facts: Sequence[Any] = ()  # what decides a run's loss, apart from the data
    scored: dict[str, Any] = field(default_factory=dict)  # what decides which tokens are scored
    device: str = ""  # "cpu" or "cuda"; "": unknown


@dataclass(eq=False)
class Job:
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
        """Return final_result.json with ms_per_step; losses of inf if the run diverged; None if it
        has not finished. Raises ValueError if the file is damaged, or its run had another device.
        """
        if self.process and self.process.returncode is None:
            return None
        path = self.folder / "final_result.json"
        facts = files.read_json(path) if path.is_file() else {}
        try:
            loss = facts.get("val_loss")  # null if it was not finite
            if loss is None or not math.isfinite(min(loss, facts["val_bpb"])):
                return self.divergence()
            if self.process and self.process.returncode != 0:
                return None
            facts["ms_per_step"] = facts["train_ms"] / max(facts["steps"], 1)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error!r}): delete it") from None
        device = str(facts.get("device"))[:4]  # "cuda:0"
        if {device, self.side.device} == {"cpu", "cuda"}:
            raise ValueError(f"{path} is of a run on {device}: delete it, or set another --out")
        return facts

    def divergence(self) -> dict[str, Any] | None:
        """Return a result with losses of inf if the last loss in the log is not finite. A run with
        a checkpoint is resumed: with fp16, the loss of a skipped step says nothing."""
        is_resumed = self.process is None and (self.folder / "checkpoints").is_dir()
        log = self.folder / "logs" / f"seed-{self.seed}.txt"
        if is_resumed or not log.is_file():
            return None
        run = read_run(log)
        last = max([*run.train, *run.val], default=0)
        losses = [run.train.get(last, 0), run.val.get(last, 0), run.figures.get("val_loss", 0)]
        if math.isfinite(sum(losses)):
            return None
        facts = {"ms_per_step": math.nan} | run.figures
        return facts | {"steps": last, "val_loss": math.inf, "val_bpb": math.inf}


def start(job: Job, running: list[Job], gpus: list[str]) -> None:
    job.folder.mkdir(parents=True, exist_ok=True)
    # With a checkpoint of its last step, a run that is stopped while it is scored resumes there.
    environ = {"CHECKPOINT_EVERY": "1000000", **job.side.environ, "RESUME": "auto"}
    environ |= {"SEED": str(job.seed), "RUN_ID": f"seed-{job.seed}", "OUTPUT_DIR": str(job.folder)}
    if gpus:
        job.gpu = min(gpus, key=[other.gpu for other in running].count)
        environ["CUDA_VISIBLE_DEVICES"] = job.gpu
    output, is_old = job.folder / "output.txt", (job.folder / "checkpoints").is_dir()
    print(f"{job}: {'resumed from its checkpoint' if is_old else 'started'}, see {output}")
    settings = {"env": environ, "stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    settings["start_new_session"] = True  # Ctrl-C reaches this program alone
    settings["close_fds"] = False  # runs that outlive this program keep its lock
    with open(output, "w") as file:
        job.process = subprocess.Popen(job.side.command, stdout=file, **settings)
    running.append(job)


def train(jobs: list[Job], at_a_time: int, gpus: list[str], is_enough: Callable[[], bool]) -> None:
    """Run the jobs that are not finished, in this order, `at_a_time` at a time, until is_enough()
    is true. gpus: for CUDA_VISIBLE_DEVICES, one per job; []: the CPU, or all GPUs for each job.
    Raises ValueError if a job fails."""
    waiting = [job for job in jobs if job.result() is None]
    running: list[Job] = []
    try:
        while not is_enough() and (waiting or running):
            while waiting and len(running) < at_a_time:
                start(waiting.pop(0), running, gpus)
            time.sleep(0.2)
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                result, output = job.result(), job.folder / "output.txt"
                if result is None:
                    end = "\n".join(output.read_text(errors="replace").splitlines()[-25:])
                    code = job.process.returncode
                    raise ValueError(f"{job} failed with exit code {code}. {output}:\n{end}")
                shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)
                score = f"val_loss {result['val_loss']:.4f}, val_bpb {result['val_bpb']:.4f}"
                if result["val_loss"] == math.inf:
                    score = "diverged, so its loss is inf"
                print(f"{job}: {score}, {result['steps']} steps of {result['ms_per_step']:.1f} ms")
    finally:  # each run ends its step and writes a checkpoint
        for job in running:
            job.process.terminate()
        for job in running:
            print(f"{job}: stopping")
            job.process.wait()
