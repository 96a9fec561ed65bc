"""The programs of figures/ refuse input that would make a false figure, and their edits apply."""

import os
import random
import re
import shutil
import subprocess
import sys

import pytest
from runs import ROOT, SCRIPT
from texts import write_shard

FIGURES = ROOT / "tests/figures"
EDITS = sorted(FIGURES.glob("edits/*.patch"))


def start(program: str, *arguments: str, folder) -> tuple[int, str]:
    """Start a program in a folder. Returns its exit code and what it printed."""
    command = [sys.executable, FIGURES / program, *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


def rows(loss, arm: str = "equal", ks=(-2, -1, 0, 1, 2), seeds=(1, 2, 3)) -> str:
    """Lines of runs with two batches, and noise that a seed and an arm share."""
    noise = random.Random(0)
    return "".join(
        f"9000 {size} {k} {seed} {arm} {loss(k) + seed / 10 + noise.gauss(0, 0.001)}\n"
        for size in (30, 60) for k in ks for seed in seeds
    )  # fmt: skip


BAD_RUNS = {
    "": "has no runs",
    "9000 30 0 1 equal\n": "line 1",
    "9000 30 0 1 equal FAILED\n": "line 1",
    "9000 30 0 1 equal nan\n": "line 1",
    "9000 30 0 1 equal 4\n9000 30 0 1 equal 4\n": "line 2",
    "9000 30 0 1 equal 4\n": "has too few runs",
    "9000 30 0 1 none 4\n": "too few runs of the arm equal",
    rows(lambda k: 4 - k**2): "is a maximum",
    rows(lambda k: (k - 6) ** 2): "outside the runs",
}


@pytest.mark.parametrize("text", BAD_RUNS, ids=BAD_RUNS.values())
def test_batch_rates_refuses_runs_without_a_best_rate(tmp_path, text):
    (tmp_path / "runs.txt").write_text(text)
    code, output = start("batch_rates.py", "runs.txt", "a.svg", folder=tmp_path)
    assert code == 1 and BAD_RUNS[text] in output.splitlines()[-1]
    assert "Traceback" not in output and not (tmp_path / "a.svg").exists()


def test_batch_rates_finds_the_lowest_point_and_compares_arms(tmp_path):
    """The lowest points are at k = 0.5, so f = 1.189. Seeds differ by 0.1."""
    runs = rows(lambda k: 3 + 0.01 * (k - 0.5) ** 2)
    runs += rows(lambda k: 3.2, ks=[0.51], seeds=range(1, 7))
    runs += rows(lambda k: 3.25, "none", ks=[0.51], seeds=range(1, 7))
    # Without an offset for each seed, this run would move the lowest point to the left.
    runs += "9000 30 -2 4 equal 2\n"
    (tmp_path / "runs.txt").write_text(runs)
    code, output = start("batch_rates.py", "runs.txt", "a.svg", folder=tmp_path)
    assert code == 0, output
    assert output.count("best f 1.1") + output.count("best f 1.2") == 2
    assert output.count("none minus with equal: +0.0500 (+0.0500 to +0.0500), 6 pairs") == 2
    assert (tmp_path / "a.svg").stat().st_size > 10_000


def test_no_power_law_where_neighbours_contradict_it(tmp_path):
    text = ""
    for size, best in ((30, -2), (60, 2), (120, 2)):
        noise = random.Random(size)
        for k, seed in [(best + x, seed) for x in (-2, -1, 0, 1, 2) for seed in (1, 2)]:
            text += f"9000 {size} {k} {seed} equal {(k - best) ** 2 + noise.gauss(0, 0.01)}\n"
    (tmp_path / "runs.txt").write_text(text)
    _, output = start("batch_rates.py", "runs.txt", "a.svg", folder=tmp_path)
    assert "is contradicted from 30 to 60 and 60 to 120" in output


LINE = "step:{}/9 val_loss:3.0000 val_bpb:1.7000 train_time:9ms step_avg:9.00ms\n"
VALIDATION = "val_loader:shards pattern=x tokens:{}\n"
BAD_LOGS = {
    "logs/x.txt\nseed:1\n": "no two validations",
    "logs/x.txt\n" + LINE.format(0): "no two validations",
    f"logs/x.txt\n{VALIDATION.format(5)}{LINE.format(0)}{LINE.format(5)}": "not a run on the demo",
    "hello\n": "not the log of a run",
}


@pytest.mark.parametrize("log", BAD_LOGS, ids=BAD_LOGS.values())
def test_demo_curve_refuses_other_logs(tmp_path, tokenizer, log):
    (tmp_path / "log.txt").write_text(log)
    code, output = start("demo_curve.py", "log.txt", "a.svg", folder=tmp_path)
    assert code == 1 and output.startswith("there is no data/"), output
    shards = tmp_path / "data/datasets/demo_sp1024"
    shards.mkdir(parents=True)
    for split in ("train", "val"):
        write_shard(shards / f"fineweb_{split}_000000.bin", range(100))
    (tmp_path / "data/tokenizers").mkdir()
    shutil.copy(tokenizer, tmp_path / "data/tokenizers/demo_1024_bpe.model")
    code, output = start("demo_curve.py", "log.txt", "a.svg", folder=tmp_path)
    assert code == 1 and BAD_LOGS[log] in output and output.count("\n") == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_measure_step_measures_memory_and_time_or_bytes(tmp_path, knobs, ranks):
    """One layer has no skip weights, so a parameter without a gradient."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher = [sys.executable] if ranks == 1 else [*torchrun, f"--nproc_per_node={ranks}"]
    environ = {**os.environ, **knobs, "NUM_LAYERS": "1"}
    command = [*launcher, FIGURES / "measure_step.py", "--seconds", "0"]
    result = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    if ranks == 1:
        total, *parts = map(float, re.findall(r"(\S+) MiB", result.stdout))
        assert sum(parts) == pytest.approx(total, abs=0.05 * len(parts))
        names = re.findall(r" ms (.*)", result.stdout)
        assert names == ["a step", "Adam", "Muon", "two of half the batch"]
    else:
        once, often = re.findall(r"(\d+) all-reduces, ([\d,]+) bytes", result.stdout)
        micro_steps = 8 // ranks  # BATCH_SLOTS=8
        assert int(often[0]) == micro_steps * int(once[0]) > 0
        assert int(often[1].replace(",", "")) == micro_steps * int(once[1].replace(",", ""))


@pytest.mark.baseline
@pytest.mark.parametrize("patch", EDITS, ids=[patch.stem for patch in EDITS])
def test_the_edits_behind_figures_apply(tmp_path, patch):
    shutil.copy(SCRIPT, tmp_path)
    environ = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    result = subprocess.run(["git", "apply", patch], cwd=tmp_path, env=environ, capture_output=True)
    assert result.returncode == 0, result.stderr
    edited = (tmp_path / SCRIPT.name).read_text()
    assert edited != SCRIPT.read_text()
    compile(edited, patch.name, "exec")
