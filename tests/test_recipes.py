"""Each patch in tests/recipes applies and trains. Two ranks, a resume and EVAL_ONLY of the artifact
are tested for a stack of five and, with `-m recipes`, for each recipe and the best stack."""

import functools
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import ROOT, SCRIPT, finished, run_here, run_ranks, same_models, scores
from torch._dynamo.utils import counters

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git apply")

RECIPES = ROOT / "tests" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.patch"))
STACK = ["int6", "ema", "xsa", "leaky_relu", "muon_weight_decay"]
BEST = "bigram_hash smear_gate value_residual xsa ema muoneq_r leaky_relu muon_weight_decay".split()
# Pairs that change the same lines.
EXCLUSIVE = [
    ("ema", "swa"),
    ("value_residual", "depth_recurrence"),
    ("value_residual", "parallel_residuals"),
]
# Knobs with which a recipe acts within six steps.
KNOBS = {
    "qat": {"QAT_START": "0.5"},
    "score_first_ttt": {"TTT_CHUNK_TOKENS": "300", "TTT_LR": "0.05"},
    "swa": {"SWA_EVERY": "2", "SWA_START": "2"},
}


def patch_script(folder: Path, names: list[str]) -> Path:
    """Copy the script and apply these recipes."""
    script = folder / "patched" / "train_gpt.py"
    script.parent.mkdir(parents=True)
    shutil.copy(SCRIPT, script)
    patches = [str(RECIPES / f"{name}.patch") for name in names]
    subprocess.run(["git", "apply", *patches], cwd=script.parent, check=True)
    return script


def load(script: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a patched script. Its warm-up must leave the state as it was."""
    spec = importlib.util.spec_from_file_location(f"patched_{script.parents[1].name}", script)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)

    def warm_up(state, warm_up=module.warm_up) -> None:
        before = module.serialize(state.state_dict())
        warm_up(state)
        assert module.serialize(state.state_dict()) == before

    monkeypatch.setattr(module, "warm_up", warm_up)
    return module


def knobs_of(knobs: dict[str, str], names: list[str]) -> dict[str, str]:
    environ = {**knobs, "WARMUP_STEPS": "4"}
    for name in names:
        environ |= KNOBS.get(name, {})
    return environ


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_applies_and_trains(tmp_path, knobs, name, monkeypatch):
    script = patch_script(tmp_path, [name])
    config = f"--config={ROOT / '.ruff.toml'}"
    for command in (["format", "--check"], ["check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", config, str(script)]
        result = subprocess.run(ruff, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
    environ = knobs_of({**knobs, "VAL_LOSS_EVERY": "0"}, [name])
    lines = finished(run_here(tmp_path, environ, load(script, monkeypatch)))
    assert any(line.startswith("step:6/6 train_loss:") for line in lines)
    assert not [line for line in lines if line.startswith("WARNING")]


@pytest.mark.parametrize("choice", [0, 1])
def test_recipes_apply_together_in_any_order(tmp_path, choice):
    """All recipes but one of each exclusive pair."""
    left_out = {pair[choice] for pair in EXCLUSIVE}
    names = [name for name in NAMES if name not in left_out]
    forward = patch_script(tmp_path / "forward", names)
    backward = patch_script(tmp_path / "backward", names[::-1])
    assert forward.read_text() == backward.read_text()


@pytest.mark.recipes
@pytest.mark.parametrize("name", ["depth_recurrence", "qat"])
def test_a_switch_is_compiled_in_the_warm_up(tmp_path, quantized_knobs, name, monkeypatch):
    """No training step compiles a graph. (Dynamo is enough to see that.)"""
    module = load(patch_script(tmp_path, [name]), monkeypatch)
    num_graphs = []  # after each step

    def train_step(state, train_step=module.train_step):
        loss = train_step(state)
        num_graphs.append(counters["stats"]["unique_graphs"])
        return loss

    monkeypatch.setattr(module, "train_step", train_step)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    environ = {**knobs_of(quantized_knobs, [name]), "COMPILE": "1", "MAX_VAL_TOKENS": "32"}
    finished(run_here(tmp_path, environ, module))
    warmup, training = num_graphs[:-6], num_graphs[-6:]
    assert warmup[0] < warmup[-1] == training[0] == training[-1]


def train_losses(lines: list[str]) -> list[float]:
    return [float(loss) for loss in re.findall(r"train_loss:(\S+)", "\n".join(lines))]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(STACK, id="stack"),
        pytest.param(BEST, id="best", marks=pytest.mark.recipes),
        *(pytest.param([name], id=name, marks=pytest.mark.recipes) for name in NAMES),
    ],
)
def test_a_recipe_in_full(tmp_path, quantized_knobs, names, monkeypatch):
    script = patch_script(tmp_path, names)
    module = load(script, monkeypatch)
    environ = {**knobs_of(quantized_knobs, names), "CHECKPOINT_EVERY": "4"}
    whole, rest, ranks = (tmp_path / name for name in ("whole", "rest", "ranks"))
    whole.mkdir()
    ranks.mkdir()
    lines = finished(run_here(whole, environ, module))
    shutil.copytree(whole / "checkpoints", rest / "checkpoints")
    finished(run_here(rest, {**environ, "RESUME": "auto"}, module))
    assert same_models(whole, rest)
    artifact = str(whole / "final_model.int8.ptz")
    scored = finished(run_here(whole, {**environ, "EVAL_ONLY": artifact}, module))
    assert scores(scored[-1]) == scores(lines[-1])
    first, second = run_ranks(ranks, environ, 2, [script])
    assert train_losses(finished(first)) == pytest.approx(train_losses(lines), abs=2e-3)
    assert second.returncode == 0
