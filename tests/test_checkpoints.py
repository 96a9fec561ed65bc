"""A stopped or killed run resumes from its checkpoint and ends with the same bits."""

import json
import os
import re
import shutil
import signal
from functools import partial
from pathlib import Path

import kill_worker
import pytest
import runs
import torch
from runs import TORCHRUN, failed, finished, run_here, run_ranks, same_models, scores, send_signals
from scripts import read
from texts import read_shard, write_shard

import train_gpt

CHECKPOINT = Path("checkpoints", "test.pt")


@pytest.fixture(scope="module")
def long_knobs(knobs):
    """Knobs with enough steps to stop between two of them. Without a warm-up, any state of the
    process that the first step changes must be changed in a resumed run, too."""
    return {**knobs, **read("ITERATIONS=20 WARMDOWN_ITERS=15 WARMUP_STEPS=0 VAL_LOSS_EVERY=0")}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, long_knobs):
    """The folder of a run that a signal stopped in step 14."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as monkeypatch:
        send_signals(monkeypatch, 14, signal.SIGTERM)
        assert run_here(folder, {**long_knobs, "CHECKPOINT_EVERY": "7"}).returncode == 143
    return folder


@pytest.fixture
def copied(stopped, tmp_path):
    """A folder with the checkpoint of step 14."""
    shutil.copytree(stopped / "checkpoints", tmp_path / "checkpoints")
    return tmp_path


def resume_line(lines: list[str]) -> str:
    (line,) = [line for line in lines if line.startswith("resume:")]
    return line


# ---- one process ---------------------------------------------------------------------------------
def test_a_run_resumes_to_the_same_bits_and_names_the_knobs_that_changed(copied, long_knobs):
    """The training time continues, too."""
    finished(run_here(copied / "whole", {**long_knobs, "CHECKPOINT_EVERY": "7"}))
    environ = {**long_knobs, "RESUME": "auto", "CHECKPOINT_EVERY": "0", "TRAIN_LOG_EVERY": "1"}
    # Other patterns for Adam's parameters, which select the same.
    environ["CONTROL_TENSOR_NAME_PATTERNS"] = "_scale,resid_mix,q_gain,skip_w"
    lines = finished(run_here(copied, environ))
    begin, _, changes = resume_line(lines).partition(" changed:")
    assert begin == f"resume:{CHECKPOINT} step:14"
    assert {"TRAIN_LOG_EVERY:200->1", "CHECKPOINT_EVERY:7->0"} < set(changes.split())
    steps = [line.split()[0] for line in lines if "train_loss" in line]
    assert steps == [f"step:{step}/20" for step in range(15, 21)]
    assert same_models(copied, copied / "whole")
    saved = torch.load(copied / CHECKPOINT, weights_only=True)
    (end,) = [line for line in lines if line.startswith("step:20/20 val_loss")]
    assert float(re.search(r"train_time:(\d+)ms", end)[1]) > saved["train_ms"] > 0


class Reordered(train_gpt.CausalSelfAttention):
    def __init__(self, hp: train_gpt.Hyperparameters) -> None:
        super().__init__(hp)
        self.c_k = self._modules.pop("c_k")  # after c_v, which has its shape


@pytest.mark.parametrize("edit", ["order", "group"])
def test_the_state_of_a_parameter_is_never_given_to_another(copied, long_knobs, monkeypatch, edit):
    """An edit may change the order of the model's parameters, or their optimizer's groups."""
    if edit == "order":
        monkeypatch.setattr(train_gpt, "CausalSelfAttention", Reordered)
    else:
        monkeypatch.setitem(train_gpt.OPTIMIZER_GROUPS, "skip_weights", "embed")
    result = run_here(copied, {**long_knobs, "RESUME": "auto"})
    failed(result, "Muon" if edit == "order" else "Adam", "CONTROL_TENSOR_NAME_PATTERNS")
    if edit == "group":  # older checkpoints have no names
        saved = torch.load(copied / CHECKPOINT, weights_only=True)
        for group in saved["optimizers"][0]["param_groups"]:
            del group["names"]
        torch.save(saved, copied / CHECKPOINT)
        failed(run_here(copied, {**long_knobs, "RESUME": "auto"}), "Adam has parameters")


def test_what_a_checkpoint_has_or_lacks_is_named(copied, long_knobs):
    """State that this script lacks is dropped. Old checkpoints lack knobs, script and names."""
    path = copied / CHECKPOINT
    saved = torch.load(path, weights_only=True)
    environ = {**long_knobs, "RESUME": "auto", "ITERATIONS": "14"}
    knobs = {**saved["knobs"], "ema_decay": 0.9}
    torch.save({**saved, "ema": {}, "knobs": knobs, "script": 1}, path)
    lines = finished(run_here(copied, environ))
    assert [line for line in lines if line.startswith("WARNING: ema ")]
    changes = rf" ITERATIONS:20->14 SCRIPT:1->{saved['script']} EMA_DECAY:0.9->None"
    assert resume_line(lines).endswith(changes)
    for optimizer in saved["optimizers"]:
        for group in optimizer["param_groups"]:
            del group["names"]
    torch.save({key: saved[key] for key in saved.keys() - {"knobs", "shards", "script"}}, path)
    line = resume_line(finished(run_here(copied, environ)))
    assert " NUM_LAYERS:None->3 " in line and "SCRIPT" not in line
    torch.save({key: saved[key] for key in saved.keys() - {"stream"}}, path)
    failed(run_here(copied, environ), str(CHECKPOINT), "stream")


def test_other_train_shards_are_named(copied, long_knobs, dataset):
    """Too few shards are an error, also in a run with another RUN_ID."""
    other = shutil.copytree(dataset, copied / "other")
    tokens = read_shard(other / "fineweb_train_000001.bin")
    write_shard(other / "fineweb_train_000001.bin", tokens[:-1])
    environ = {**long_knobs, "RESUME": str(CHECKPOINT), "ITERATIONS": "14"}
    environ |= {"DATA_PATH": str(other)}
    line = resume_line(finished(run_here(copied, environ)))
    assert re.search(rf" TRAIN_SHARDS:\[\d+, {len(tokens)}\]->\[\d+, {len(tokens) - 1}\]$", line)
    saved = torch.load(copied / CHECKPOINT, weights_only=True)
    torch.save({**saved, "stream": (2, 7)}, copied / CHECKPOINT)
    result = run_here(copied, {**environ, "RUN_ID": "other"})
    failed(result, str(CHECKPOINT), "DATA_PATH")


def test_a_checkpoint_of_other_shards_or_optimizers_changes_nothing(copied, long_knobs):
    """An optimizer of another kind is found, too: SGD has no betas."""
    state = train_gpt.TrainingState(train_gpt.Hyperparameters.from_env(long_knobs), runs.ALONE)
    before = state.state_dict()["model"]
    saved = torch.load(copied / CHECKPOINT, weights_only=True)
    for part, value in [("stream", (2, 7)), ("optimizers", saved["optimizers"][:1])]:
        with pytest.raises(train_gpt.InputError, match="shards" if part == "stream" else part):
            state.load_state_dict({**saved, part: value})
        torch.testing.assert_close(state.state_dict()["model"], before, rtol=0, atol=0)
    for group in saved["optimizers"][0]["param_groups"]:
        del group["betas"]
    with pytest.raises(train_gpt.InputError, match="Adam .*: use its script"):
        state.load_state_dict(saved)


def test_the_speed_counts_the_tokens_that_were_trained(copied, long_knobs):
    """Also after a resume with another batch. Older checkpoints do not count them."""
    environ = {**long_knobs, "RESUME": "auto", "ITERATIONS": "16"}
    saved = torch.load(copied / CHECKPOINT, weights_only=True)
    finished(run_here(copied, {**environ, "TRAIN_BATCH_TOKENS": "1024"}))
    del saved["tokens"]
    torch.save(saved, copied / CHECKPOINT)
    finished(run_here(copied, {**environ, "OUTPUT_DIR": "old", "RESUME": str(CHECKPOINT)}))
    for folder, tokens in ((copied, 14 * 512 + 2 * 1024), (copied / "old", 16 * 512)):
        facts = json.loads((folder / "final_result.json").read_text())
        assert facts["tokens_per_second"] * facts["train_ms"] == pytest.approx(1000 * tokens)


@pytest.mark.parametrize("stopped_in", [None, 5])
def test_without_its_newest_checkpoint_a_run_fails(tmp_path, long_knobs, monkeypatch, stopped_in):
    """After its score, or stopped by a signal."""
    send_signals(monkeypatch, stopped_in, signal.SIGTERM)
    (tmp_path / "checkpoints").write_bytes(b"")
    environ = {**long_knobs, "ITERATIONS": "6", "CHECKPOINT_EVERY": "3"}
    result = run_here(tmp_path, environ)
    last = result.stdout.splitlines()[-1]
    assert (result.returncode, result.stderr) == (1, "")
    assert last.endswith(": not saved") if stopped_in else last.startswith("final_int8")


def test_the_current_dtype_and_rates_apply_the_rest_of_a_group_resumes(tmp_path, long_knobs):
    """A GPU's checkpoint, for example, can be exported again on a CPU."""
    environ = {**long_knobs, "ITERATIONS": "1", "CHECKPOINT_EVERY": "1"}
    finished(run_here(tmp_path, {**environ, "DTYPE": "bf16"}))
    saved = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    saved["optimizers"][0]["param_groups"][-1]["custom"] = 5
    torch.save(saved, tmp_path / CHECKPOINT)
    new = {"SCALAR_LR": "0.5", "BETA1": "0.75", "ADAM_EPS": "0.125", "RESUME": "auto"}
    lines = finished(run_here(tmp_path, {**environ, **new, "ITERATIONS": "2"}))
    assert "DTYPE:bf16->fp32" in resume_line(lines)
    saved = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    scalar = saved["optimizers"][0]["param_groups"][-1]
    assert (scalar["base_lr"], scalar["betas"][0], scalar["eps"]) == (0.5, 0.75, 0.125)
    assert scalar["custom"] == 5


def test_weights_that_are_not_finite_replace_no_checkpoint(copied, long_knobs):
    environ = {**long_knobs, "RESUME": "auto", "SCALAR_LR": "3e38", "TRAIN_LOG_EVERY": "0"}
    result = run_here(copied, {**environ, "CHECKPOINT_EVERY": "4"})
    # One warning in each of steps 16 and 20. The last step, 20, does not try to save twice.
    assert result.stdout.count(f"\nWARNING: {CHECKPOINT}") == 2
    assert torch.load(copied / CHECKPOINT, weights_only=True)["step"] == 14
    assert result.returncode == 1


def test_a_checkpoint_that_does_not_fit_is_an_error_before_the_warm_up(copied, long_knobs):
    """The checkpoint is not overwritten. A run that was killed after a start from base.pt must not
    start from there again."""
    shutil.copy(copied / CHECKPOINT, copied / "base.pt")
    before = (copied / CHECKPOINT).read_bytes()
    for changes, word in [
        ("", "RESUME=auto"),
        ("RESUME=base.pt", "RESUME=auto"),
        ("RESUME=none.pt RUN_ID=other", "RESUME='none.pt'"),
        ("RESUME=auto SEED=2", "SEED=1337"),
        ("RESUME=auto CONTROL_TENSOR_NAME_PATTERNS=c_q", "CONTROL_TENSOR_NAME_PATTERNS"),
    ]:
        environ = {**long_knobs, **read(f"WARMUP_STEPS=1 CHECKPOINT_EVERY=1 {changes}")}
        result = run_here(copied, environ)
        failed(result, word)
        assert result.stdout == "" and not (copied / "logs").exists()
        assert (copied / CHECKPOINT).read_bytes() == before


# ---- several ranks -------------------------------------------------------------------------------
def signal_one_rank(step: int) -> None:
    """Rank 1 gets SIGINT in this step."""
    if os.environ["RANK"] == "1":
        send_signals(pytest.MonkeyPatch(), step, signal.SIGINT)


def test_a_signal_to_one_rank_stops_all_and_they_resume_to_the_same_bits(tmp_path, long_knobs):
    """The order in which DDP adds gradients changes after the first step of a process."""
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    environ = {**long_knobs, "ITERATIONS": "5"}
    finished(run_ranks(whole, environ, 4)[0])
    stopped = run_ranks(rest, environ, 4, edit=partial(signal_one_rank, 3))
    assert [rank.returncode for rank in stopped] == [130, 130, 130, 130]
    lines = finished(run_ranks(rest, {**environ, "RESUME": "auto"}, 4)[0])
    assert resume_line(lines).startswith(f"resume:{CHECKPOINT} step:3 ")
    assert same_models(rest, whole)


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, long_knobs):
    """On 4, then 2, then 1, it ends as on one rank, up to rounding."""
    environ = {**long_knobs, "ITERATIONS": "6"}
    (whole,) = run_ranks(tmp_path / "whole", environ, 1)
    rest = tmp_path / "rest"
    for ranks in (4, 2):
        stop = partial(signal_one_rank, 6 - ranks)
        results = run_ranks(rest, {**environ, "RESUME": "auto"}, ranks, edit=stop)
        assert [rank.returncode for rank in results] == [130] * ranks
    (last,) = run_ranks(rest, {**environ, "RESUME": "auto"}, 1)
    assert resume_line(finished(last)).endswith(" step:4 changed:nothing")
    whole_score, score = (scores(finished(run)[-1])[0] for run in (whole, last))
    assert score == pytest.approx(whole_score, abs=1e-4)


def test_torchrun_resumes_after_kill_9_and_its_sigterm_stops_all_ranks(tmp_path, long_knobs):
    """torchrun restarts all ranks when one is killed. When it gets SIGTERM, they save and exit."""
    environ = {**long_knobs, "CHECKPOINT_EVERY": "5", "RESUME": "auto"}
    options = ["--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    command = [TORCHRUN, *options, kill_worker.__file__]
    (agent,) = run_ranks(tmp_path, environ, 1, command)
    lines = agent.stdout.splitlines()
    assert [line for line in lines if line.startswith(f"resume:{CHECKPOINT} step:10 ")], agent
    assert lines[-1].startswith("stopped: signal:15 step:18/20: ")
    assert torch.load(tmp_path / CHECKPOINT, weights_only=True)["step"] == 18
