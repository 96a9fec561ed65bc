"""A run that is stopped or killed goes on from its checkpoint and ends as if it had not been."""

import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from conftest import (
    failed,
    finished,
    launch_command,
    make_state,
    read_until,
    run_here,
    run_ranks,
    same_models,
    start,
    write_worker,
)

from train_gpt import Hyperparameters, train_step

CHECKPOINT = Path("checkpoints", "test.pt")


@pytest.fixture(scope="module")
def long_knobs(knobs):
    """Steps enough to be stopped among them. Without a warm-up: what it changes in a process, going
    on must change, too."""
    more = {"ITERATIONS": "20", "WARMDOWN_ITERS": "15", "WARMUP_STEPS": "0", "VAL_LOSS_EVERY": "0"}
    return {**knobs, **more}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, long_knobs):
    """The folder of a run with a checkpoint at every seven steps, and its log."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, finished(run_here(folder, {**long_knobs, "CHECKPOINT_EVERY": "7"}))


@pytest.fixture
def copied(undisturbed, tmp_path):
    """A folder with the checkpoint of step 14."""
    shutil.copytree(undisturbed[0] / "checkpoints", tmp_path / "checkpoints")
    return tmp_path


def resume_line(lines: list[str]) -> str:
    (line,) = [line for line in lines if line.startswith("resume:")]
    return line


# ---- one process ---------------------------------------------------------------------------------


def test_a_checkpoint_takes_the_place_of_the_one_before(undisturbed):
    folder, lines = undisturbed
    said = [line for line in lines if line.startswith("checkpoint:")]
    assert said == [f"checkpoint:{CHECKPOINT} step:{step}" for step in (7, 14)]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["test.pt"]
    assert torch.load(folder / CHECKPOINT, weights_only=True)["step"] == 14


@pytest.mark.parametrize("resume", ["auto", str(CHECKPOINT)])
def test_a_run_goes_on_to_the_same_bits_and_names_the_knobs_that_changed(
    undisturbed, copied, long_knobs, resume
):
    """The training time goes on, too."""
    environ = {**long_knobs, "RESUME": resume, "CHECKPOINT_EVERY": "0", "TRAIN_LOG_EVERY": "1"}
    lines = finished(run_here(copied, environ))
    begin, _, changes = resume_line(lines).partition(" changed:")
    assert begin == f"resume:{CHECKPOINT} step:14"
    assert {"TRAIN_LOG_EVERY:200->1", "CHECKPOINT_EVERY:7->0"} == {
        change for change in changes.split() if not change.startswith("RESUME:")
    }
    steps = [line.split()[0] for line in lines if "train_loss" in line]
    assert steps == [f"step:{step}/20" for step in range(15, 21)]
    assert same_models(copied, undisturbed[0])
    saved = torch.load(copied / CHECKPOINT, weights_only=True)
    (end,) = [line for line in lines if line.startswith("step:20/20 val_loss")]
    assert float(re.search(r"train_time:(\d+)ms", end)[1]) > saved["train_ms"] > 0


def test_rates_are_those_of_now_and_what_else_is_in_a_group_is_restored(long_knobs):
    state = make_state(Hyperparameters.from_env(long_knobs))
    train_step(state)
    state.optimizers[1].param_groups[0]["custom"] = 5
    new = {"SCALAR_LR": "0.5", "MATRIX_LR": "0.25", "BETA1": "0.75", "ADAM_EPS": "0.125"}
    other = make_state(Hyperparameters.from_env({**long_knobs, **new, "MUON_BACKEND_STEPS": "3"}))
    other.load_state_dict(state.state_dict())
    (_, scalar), (matrix,) = (optimizer.param_groups for optimizer in other.optimizers)
    assert (scalar["base_lr"], scalar["betas"][0], scalar["eps"]) == (0.5, 0.75, 0.125)
    assert (matrix["base_lr"], matrix["backend_steps"], matrix["custom"]) == (0.25, 3, 5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, f"{CHECKPOINT} exists: set RESUME=auto or another RUN_ID"),
        ({"RESUME": "auto", "NUM_LAYERS": "2"}, f"RESUME='auto': {CHECKPOINT} "),
    ],
)
def test_what_cannot_be_gone_on_from_is_refused_before_the_warm_up(
    copied, long_knobs, changes, words
):
    """The checkpoint stays as it was."""
    before = (copied / CHECKPOINT).read_bytes()
    result = run_here(
        copied, {**long_knobs, "WARMUP_STEPS": "1", "CHECKPOINT_EVERY": "1", **changes}
    )
    failed(result, words)
    assert "warmup_step:" not in result.stdout
    assert (copied / CHECKPOINT).read_bytes() == before


def test_weights_that_are_not_finite_do_not_replace_a_checkpoint(copied, long_knobs):
    before = (copied / CHECKPOINT).read_bytes()
    environ = {**long_knobs, "MATRIX_LR": "1e30", "RESUME": "auto", "TRAIN_LOG_EVERY": "0"}
    result = run_here(copied, {**environ, "CHECKPOINT_EVERY": "6"})
    assert "\nWARNING: no checkpoint: the sum of the weights is " in result.stdout
    assert (result.returncode, result.stderr) == (1, "")  # a finished run is scored all the same
    assert (copied / CHECKPOINT).read_bytes() == before


# ---- several ranks -------------------------------------------------------------------------------


def test_four_ranks_go_on_to_the_same_bits(tmp_path, long_knobs):
    """The order in which DDP adds gradients up changes after the first step of a process."""
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    whole.mkdir()
    environ = {**long_knobs, "ITERATIONS": "5"}
    finished(run_ranks(whole, {**environ, "CHECKPOINT_EVERY": "3"}, 4)[0])
    shutil.copytree(whole / "checkpoints", rest / "checkpoints")
    lines = finished(run_ranks(rest, {**environ, "RESUME": "auto"}, 4)[0])
    assert resume_line(lines).startswith(f"resume:{CHECKPOINT} step:3 ")
    assert same_models(rest, whole)


# Rank 1 of the first start kills itself in step 12. It is late at the second, where rank 0 must not
# find its old address; there all wait in step 18 for their end.
KILL = """
first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
is_last = os.environ["RANK"] == "1"
if is_last and not first_start:
    time.sleep(2)

def train_step(state, train_step=train_gpt.train_step):
    if is_last and first_start and state.step == 11:
        os.kill(os.getpid(), 9)
    if state.step == 17:
        state.runtime.log("waiting")
        while not state.runtime.stop.signum:
            time.sleep(0.05)
    return train_step(state)

train_gpt.train_step = train_step"""


def test_kill_9_and_sigterm_under_torchrun_change_no_bit(tmp_path, long_knobs):
    """torchrun starts all ranks again when one is killed; when it is stopped itself, all save and
    leave. Going on then, two ranks end with the same bits as undisturbed ones, one rank nearly."""
    environ = {**long_knobs, "CHECKPOINT_EVERY": "5", "RESUME": "auto"}
    worker = write_worker(tmp_path, KILL)
    agent = start(tmp_path, environ, [*launch_command(2, restarts=1), worker])
    read_until(agent, f"resume:{CHECKPOINT} step:10 ")
    read_until(agent, "waiting")
    agent.send_signal(signal.SIGTERM)
    stopped = agent.communicate(timeout=240)[0].splitlines()[-1]
    way_on = "to go on, set RESUME=auto and RUN_ID=test"
    assert stopped == f"stopped: signal:15 step:18/20: {way_on}"
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "one" / "checkpoints")
    lines = finished(run_ranks(tmp_path, environ, 2)[0])
    assert resume_line(lines).startswith(f"resume:{CHECKPOINT} step:18 ")
    two = tmp_path / "two"
    two.mkdir()
    finished(run_ranks(two, long_knobs, 2)[0])
    assert same_models(tmp_path, two)
    finished(run_here(tmp_path / "one", environ))
    found, expected = (
        torch.load(folder / "final_model.pt", weights_only=True)
        for folder in (tmp_path / "one", two)
    )
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=2e-3, msg=name)
