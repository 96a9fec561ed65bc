"""Checkpoints of several ranks: gathered from all, gone on from with as many or others, kill -9."""

import os
import random
import re
import shutil
import signal
import subprocess
import time

import pytest
import torch
from conftest import (
    finished,
    ranks_of,
    read_until,
    rest_of,
    run_here,
    run_ranks,
    run_script,
    same_models,
    saved_in,
    start_script,
    write_worker,
)

from train_gpt import GPT, Hyperparameters, Muon, build_optimizers


@pytest.fixture(scope="module")
def long_knobs(knobs):
    """Steps enough to be stopped among them."""
    return {**knobs, "ITERATIONS": "100", "WARMDOWN_ITERS": "80", "VAL_LOSS_EVERY": "0"}


@pytest.fixture(scope="module")
def four(tmp_path_factory, knobs):
    """The knobs and the folder of a run of four ranks, whose warm-up is left out: what it changes
    in a process, going on must change, too."""
    folder = tmp_path_factory.mktemp("four")
    environ = {**knobs, "ITERATIONS": "8", "WARMUP_STEPS": "0", "VAL_LOSS_EVERY": "0"}
    finished(run_ranks(folder, {**environ, "CHECKPOINT_EVERY": "4"}, 4)[0])
    return environ, folder


def test_all_optimizer_state_is_gathered_from_the_ranks(four):
    environ, folder = four
    gpt = GPT(Hyperparameters.from_env(environ), torch.float32)
    muon = build_optimizers(gpt, torch.float32)[1]
    assert isinstance(muon, Muon)
    saved = torch.load(folder / "checkpoints" / "test" / "step_00000004.pt", weights_only=True)
    names = {param: name for name, param in gpt.named_parameters()}
    for param in muon.param_groups[0]["params"]:
        assert saved["optimizers"][names[param]]["momentum_buffer"].shape == param.shape
    assert saved["optimizers"].keys() == set(names.values())


def go_on(folder, environ, path, ranks: int) -> list[str]:
    """Take the steps that are left, on so many ranks (0: in this process); the log."""
    environ = {**environ, "RESUME": str(path)}
    result = run_ranks(folder, environ, ranks)[0] if ranks else run_here(folder, environ)
    lines = finished(result)
    (line,) = [line for line in lines if line.startswith("resume:")]
    assert line.startswith(f"resume:{path} step:{int(path.stem[5:])} ")
    first = int(path.stem[5:]) + 1
    steps = [line[:8] for line in lines if "train_loss" in line]
    assert steps == [f"step:{i}/8" for i in range(first, 9)]
    return lines


def assert_close(first, second) -> None:
    """The models of two runs are equal to rounding."""
    found, expected = (
        torch.load(place / "final_model.pt", weights_only=True) for place in (first, second)
    )
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=2e-3, msg=name)


def test_as_many_ranks_go_on_as_if_they_had_never_stopped(four, tmp_path):
    environ, folder = four
    lines = go_on(tmp_path, environ, folder / "checkpoints" / "test" / "step_00000004.pt", 4)
    assert same_models(tmp_path, folder)
    assert "replicas:identical" in lines
    assert [line for line in lines if line.endswith(" changed:CHECKPOINT_EVERY:4->0")]


def test_fewer_ranks_go_on_to_the_same_end_and_so_do_more(four, tmp_path):
    """From a checkpoint of four ranks one goes on, and from one of its own then two."""
    environ, folder = four
    paths = []
    for name, before, ranks in (("one", folder, 0), ("two", tmp_path / "one", 2)):
        (tmp_path / name).mkdir()
        paths = sorted((before / "checkpoints" / "test").iterdir())
        go_on(tmp_path / name, {**environ, "CHECKPOINT_EVERY": "6"}, paths[0], ranks)
        assert_close(tmp_path / name, folder)
    assert paths[0].name == "step_00000006.pt"


@pytest.fixture(scope="module")
def two(tmp_path_factory, long_knobs):
    """The folder of an undisturbed run of two ranks."""
    folder = tmp_path_factory.mktemp("two")
    finished(run_ranks(folder, long_knobs, 2)[0])
    return folder


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory, long_knobs):
    """The folder of a run of two ranks, after SIGINT on the second of them, and its log. It has no
    CHECKPOINT_EVERY: a stop needs none."""
    folder = tmp_path_factory.mktemp("interrupted")
    agent = start_script(folder, long_knobs, ranks=2)
    read_until(agent, "step:5/")
    ranks = ranks_of(agent)
    os.kill(ranks[1], signal.SIGINT)
    rest = rest_of(agent, seconds=60)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks)
    return folder, rest.splitlines()


def test_sigint_on_one_rank_stops_all_after_the_same_step(interrupted):
    folder, lines = interrupted
    stopped = r"stopped: signal:2 step:(\d+)/100: to go on, set RESUME=auto and RUN_ID=test"
    step = int(re.fullmatch(stopped, lines[-1])[1])
    assert 5 <= step < 100
    assert saved_in(folder) == [f"step_{step:08d}.pt"]
    errors = (folder / "stderr.txt").read_text()
    codes = re.findall(r"exitcode\s*: (-?\d+)", errors)
    assert codes and set(codes) == {"130"}, errors  # none was ended by torchrun
    assert 'train_gpt.py", line' not in errors


def test_kill_9_at_random_moments_changes_no_bit(interrupted, two, tmp_path, long_knobs):
    """torchrun starts the ranks again, which go on from the newest checkpoint. The first kill falls
    into the training; the second anywhere from then on, the start included."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    moments = random.Random(seed)
    shutil.copytree(interrupted[0] / "checkpoints", tmp_path / "checkpoints")
    environ = {**long_knobs, "CHECKPOINT_EVERY": "5", "RESUME": "auto"}
    agent = start_script(tmp_path, environ, ranks=2, restarts=3)
    read_until(agent, "checkpoint:")
    for longest in (1.5, 5.0):
        time.sleep(moments.uniform(0, longest))
        while len(ranks := ranks_of(agent)) < 2:
            assert agent.poll() is None, "the run ended by itself"
        os.kill(moments.choice(ranks), signal.SIGKILL)
    output = rest_of(agent, seconds=60)
    errors = (tmp_path / "stderr.txt").read_text()
    lines = finished(subprocess.CompletedProcess([], agent.returncode, output, errors))
    assert any(line.startswith("resume:checkpoints/test/step_") for line in lines)
    assert same_models(tmp_path, two)
    assert len(saved_in(tmp_path)) >= 2


# As soon as all ranks of the first start have met, rank 1 is killed. Later they start one after
# another.
LATE_RESTART = """
import signal
restarts, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])

def open_late(hp, environ, open_runtime=train_gpt.open_runtime):
    time.sleep(0.5 * restarts * rank)
    runtime = open_runtime(hp, environ)
    if restarts == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return runtime

train_gpt.open_runtime = open_late"""


def test_ranks_that_start_again_do_not_meet_the_ones_before(tmp_path, knobs):
    """torchrun keeps what the ranks told each other over a restart."""
    environ = {**knobs, "ITERATIONS": "1", "VAL_LOSS_EVERY": "0"}
    worker = write_worker(tmp_path, LATE_RESTART)
    agent = start_script(tmp_path, environ, ranks=2, restarts=1, script=worker)
    output = rest_of(agent, seconds=40)
    errors = (tmp_path / "stderr.txt").read_text()
    lines = finished(subprocess.CompletedProcess([], agent.returncode, output, errors))
    assert "replicas:identical" in lines


def test_weights_that_are_not_finite_replace_no_checkpoint_and_stop_all_ranks(tmp_path, knobs):
    steep = {name: "1e30" for name in ("MATRIX_LR", "SCALAR_LR", "TIED_EMBED_LR")}
    environ = {**knobs, **steep, "CHECKPOINT_EVERY": "1", "VAL_LOSS_EVERY": "0"}
    result = run_script(tmp_path, {**environ, "TRAIN_LOG_EVERY": "0"}, ranks=2)
    assert result.returncode == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("ValueError: ")]
    assert len(errors) == 1, result.stderr
    step = int(re.search(r"step:(\d) the sum of the weights is (nan|inf)", errors[0])[1])
    kept = saved_in(tmp_path)
    assert kept == [f"step_{i:08d}.pt" for i in range(max(1, step - 2), step)]
    saved = torch.load(tmp_path / "checkpoints" / "test" / kept[-1], weights_only=True)
    assert all(tensor.isfinite().all() for tensor in saved["model"].values())
