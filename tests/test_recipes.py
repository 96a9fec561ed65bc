"""Each patch in tests/recipes applies and trains. Two ranks, a resume and score.py on the artifact
are tested for a stack of five and, with `-m recipes`, for each recipe and each record."""

import functools
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import score
from recipe import EXCLUSIVE, RECORDS, fits_exactly
from runs import ROOT, SCRIPT, finished, run_here, run_ranks, same_models, scores, send_signals
from scripts import NAMES, knobs_of, load, patch_script

pytestmark = pytest.mark.baseline

STACK = ["int6", "ema", "xsa", "leaky_relu", "muon_weight_decay"]
BEST = "bigram_hash smear_gate value_residual xsa ema muoneq_r leaky_relu muon_weight_decay".split()
# Recipes that change only the artifact, and those that change only the final score.
EXPORT = ["gptq", "int6", "rans", "sd_clip"]
TEST_TIME = ["lora_ttt", "ngram_tilt", "score_first_ttt"]
Result = tuple[float, bytes, bytes]


def score_and_bits(folder: Path, lines: list[str]) -> Result:
    """The score of the artifact, the bits of the weights and those of the artifact."""
    weights = (folder / "final_model.pt").read_bytes()
    return scores(lines[-1])[0], weights, (folder / "final_model.int8.ptz").read_bytes()


@pytest.fixture(scope="module")
def unpatched(tmp_path_factory) -> Callable[..., Result]:
    """The result of a run of train_gpt.py with these knobs; each once."""

    @functools.cache
    def run(**environ: str) -> Result:
        folder = tmp_path_factory.mktemp("unpatched")
        return score_and_bits(folder, finished(run_here(folder, environ)))

    return run


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_applies_and_acts(tmp_path, knobs, quantized_knobs, name, monkeypatch, unpatched):
    """A recipe that does nothing gives the score of the unpatched script."""
    assert fits_exactly(name, SCRIPT.read_text()), "run recipe.py --refresh"
    script = patch_script(tmp_path, [name])
    config = f"--config={ROOT / '.ruff.toml'}"
    for command in (["format", "--check"], ["check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", config, str(script)]
        result = subprocess.run(ruff, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
    base = {**(quantized_knobs if name in EXPORT else knobs), "VAL_LOSS_EVERY": "0"}
    environ = knobs_of(base, [name])
    lines = finished(run_here(tmp_path, environ, load(script, monkeypatch)))
    assert any(line.startswith("step:6/6 train_loss:") for line in lines)
    assert not [line for line in lines if line.startswith("WARNING")]
    score, weights, artifact = score_and_bits(tmp_path, lines)
    plain_score, plain_weights, plain_artifact = unpatched(**{**base, "WARMUP_STEPS": "4"})
    # Only training changes the weights; the codec and the preset change no score.
    assert (weights == plain_weights) == (name in (*EXPORT, *TEST_TIME, "record"))
    assert (artifact == plain_artifact) == (name in (*TEST_TIME, "record"))
    does_nothing = score == plain_score
    assert does_nothing == (name in ("rans", "record")), score


@pytest.mark.parametrize("choice", [0, 1])
def test_recipes_apply_together_in_any_order(tmp_path, choice):
    """All recipes but one of each exclusive pair."""
    left_out = {pair[choice] for pair in EXCLUSIVE}
    names = [name for name in NAMES if name not in left_out]
    forward = patch_script(tmp_path / "forward", names)
    backward = patch_script(tmp_path / "backward", names[::-1])
    assert forward.read_text() == backward.read_text()


def train_losses(lines: list[str]) -> list[float]:
    return [float(loss) for loss in re.findall(r"train_loss:(\S+)", "\n".join(lines))]


FULL = {"stack": STACK, "best": BEST, **{name: [name] for name in NAMES}}
FULL |= {f"all_of_{preset}": names for preset, names in RECORDS.items()}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(names, id=name, marks=() if name == "stack" else pytest.mark.recipes)
        for name, names in FULL.items()
    ],
)
def test_a_recipe_in_full(tmp_path, quantized_knobs, names, monkeypatch):
    script = patch_script(tmp_path, names)
    module = load(script, monkeypatch)
    environ = knobs_of(quantized_knobs, names)
    whole, rest, ranks = (tmp_path / name for name in ("whole", "rest", "ranks"))
    lines = finished(run_here(whole, environ, module))
    with monkeypatch.context() as stopping:
        send_signals(stopping, 4, signal.SIGTERM, script=module)
        assert run_here(rest, environ, module).returncode == 143
    finished(run_here(rest, {**environ, "RESUME": "auto"}, module))
    assert same_models(whole, rest)
    arguments = [str(whole / "final_model.int8.ptz"), "--script", str(script)]
    scored = finished(run_here(whole, environ, score, arguments))
    assert scores(scored[-1]) == scores(lines[-1])
    first, second = run_ranks(ranks, environ, 2, [script])
    two = finished(first)
    assert train_losses(two) == pytest.approx(train_losses(lines), abs=2e-3)
    assert "replicas:identical" in two and second.returncode == 0
