"""Edits that players make: each must have an effect, or an error or a warning must name it. An edit
here replaces a class or a function of the script."""

import dataclasses
import shutil
import subprocess
import sys

import edits
import pytest
import torch
import train_record
from edits import edit_script
from runs import ALONE, ROOT, SCRIPT, failed, finished, process_environ, run_here, same_models
from torch import nn
from trained import load_script

import train_gpt
from train_gpt import CausalSelfAttention, Hyperparameters, train_step


class DeadMLP(train_gpt.MLP):
    def __init__(self, hp: Hyperparameters) -> None:
        super().__init__(hp)
        self.dead = nn.Parameter(torch.zeros(3, 4))


def test_a_parameter_without_a_gradient_is_named(tmp_path, knobs, monkeypatch):
    monkeypatch.setattr(train_gpt, "MLP", DeadMLP)
    result = run_here(tmp_path, {**knobs, "WARMUP_STEPS": "0"})
    failed(result, "blocks.0.mlp.dead got no gradient")


# ---- Optimizers ----------------------------------------------------------------------------------
class BiasedAttention(CausalSelfAttention):
    def __init__(self, hp: Hyperparameters) -> None:
        super().__init__(hp)
        self.c_q.bias = nn.Parameter(torch.zeros(hp.model_dim))


class Factored(torch.optim.Optimizer):
    """An optimizer with one mean square per row, in fp32 even for a bf16 embedding."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p in [p for group in self.param_groups for p in group["params"]]:
            squares = p.grad.float().square().mean(dim=-1, keepdim=True) + 1e-12
            rows = self.state[p].setdefault("rows", squares.clone()).lerp_(squares, 0.1)
            p.sub_(0.01 * p.grad / rows.sqrt())


def test_a_bias_trains_and_an_odd_optimizer_resumes(tmp_path, knobs, monkeypatch):
    def build_optimizers(gpt, compiled, build=train_gpt.build_optimizers):
        adam, muon = build(gpt, compiled)
        return [Factored(adam.param_groups, {}), muon]

    monkeypatch.setattr(train_gpt, "CausalSelfAttention", BiasedAttention)
    monkeypatch.setattr(train_gpt, "build_optimizers", build_optimizers)
    hp = Hyperparameters.from_env({**knobs, "OUTPUT_DIR": str(tmp_path)})
    bf16 = dataclasses.replace(ALONE, dtype=torch.bfloat16)
    whole = train_gpt.TrainingState(hp, bf16)
    resumed = train_gpt.TrainingState(dataclasses.replace(hp, resume="auto"), bf16)
    train_gpt.warm_up(whole)  # an error if the bias has no effect
    for step in range(4):
        train_step(whole)
        if step == 1:
            assert train_gpt.save_checkpoint(whole)
            train_gpt.load_checkpoint(resumed)
    for _ in range(2):
        train_step(resumed)
    found, expected = (
        [end["model"], end["stream"], *(part["state"] for part in end["optimizers"])]
        for end in (resumed.state_dict(), whole.state_dict())
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# ---- The edits of helpers/edits.py ---------------------------------------------------------------
CASES = {"README and others": edits.README | edits.OTHERS, "records": edits.RECORDS}
CASES |= {name: {name: edit} for case in [*CASES.values()] for name, edit in case.items()}


@pytest.mark.baseline
def test_the_edits_fit_the_script(tmp_path):
    """Each text to replace occurs once, and the result has no undefined names."""
    others = {name: {name: edit} for name, edit in (edits.PARTS | edits.EXERCISES).items()}
    for name, case in (CASES | others).items():
        text = edit_script(SCRIPT.read_text(), *case.values())
        (tmp_path / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select=F821", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.baseline
def test_copied_techniques_equal_their_knobs_bit_for_bit(tmp_path, knobs):
    knobs = {**knobs, "WARMDOWN_ITERS": "40"}  # the floor of the learning rate acts in six steps
    edited = tmp_path / "edited.py"
    edited.write_text(edit_script(SCRIPT.read_text(), *edits.RECORDS.values()))
    by_hand = finished(run_here(tmp_path / "a", knobs, load_script(edited)))
    by_knob = finished(run_here(tmp_path / "b", {**knobs, **edits.RECORD_KNOBS}, train_record))
    assert same_models(tmp_path / "a", tmp_path / "b")
    assert by_hand[-1] == by_knob[-1]


@pytest.mark.baseline
@pytest.mark.records
@pytest.mark.parametrize("case", CASES)
def test_tests_that_are_not_baseline_stay_green(tmp_path, case):
    """The tests run in a copy of the project, and take some minutes for each edit."""
    keep = shutil.ignore_patterns(".*", "datasets", "tokenizers", "logs", "*.pt", "*.ptz")
    copy = shutil.copytree(ROOT, tmp_path / "copy", ignore=keep)
    (copy / "train_gpt.py").write_text(edit_script(SCRIPT.read_text(), *CASES[case].values()))
    command = [sys.executable, "-m", "pytest", "tests", "-q", "-m", "not baseline and not records"]
    result = subprocess.run(command, cwd=copy, env=process_environ({}), capture_output=True)
    assert result.returncode == 0, result.stdout.decode()[-3000:]
