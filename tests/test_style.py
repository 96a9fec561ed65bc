"""What readers and forks rely on besides behaviour."""

import ast
import dataclasses
import os
import re
import subprocess
import sys

from conftest import ROOT, SCRIPT

import train_gpt
from train_gpt import Hyperparameters

PUBLIC = {
    "Hyperparameters", "load_data_shard", "TokenStream", "DistributedTokenLoader", "GPT", "Muon",
    "quantize_state_dict_int8", "dequantize_state_dict_int8", "main",
}  # fmt: skip
FUNCTIONS = [
    node
    for node in ast.walk(ast.parse(SCRIPT.read_text()))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
]


def test_public_names():
    assert all(hasattr(train_gpt, name) for name in PUBLIC)


def test_importing_has_no_effects(tmp_path):
    """Neither the environment nor files nor devices are touched."""
    program = (
        "import os, sys; before = dict(os.environ); import train_gpt, torch; "
        "assert os.environ == before; assert not torch.cuda.is_initialized(); "
        "assert not torch.distributed.is_initialized(); assert torch.initial_seed() != 1337"
    )
    environ = {"PYTHONPATH": str(ROOT), "SEED": "x", "WORLD_SIZE": "3", "PATH": os.environ["PATH"]}
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_the_script_stays_short_and_narrow():
    lines = SCRIPT.read_text().splitlines()
    assert len(lines) < 1500
    assert max(map(len, lines)) <= 100


def test_functions_stay_small_and_flat():
    for function in FUNCTIONS:
        assert function.end_lineno - function.lineno < 60, function.name
        arguments = [a for a in function.args.args + function.args.kwonlyargs if a.arg != "self"]
        assert len(arguments) <= 6, function.name
        inner = [n for n in ast.walk(function) if isinstance(n, ast.FunctionDef | ast.Global)]
        assert inner == [function], function.name


def test_every_signature_is_typed():
    for function in FUNCTIONS:
        assert function.returns is not None, function.name
        for argument in function.args.args:
            assert argument.annotation or argument.arg in ("self", "cls"), function.name


def as_environment(value) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return str(int(value)) if isinstance(value, bool) else str(value)


def test_the_readmes_table_has_every_knob_with_its_default():
    rows = re.findall(
        r"^\| `([A-Z0-9_]+)` \| `?([^|]*?)`? \|", (ROOT / "README.md").read_text(), re.M
    )
    expected = {
        field.name.upper(): as_environment(getattr(Hyperparameters(), field.name))
        for field in dataclasses.fields(Hyperparameters)
    }
    expected["RUN_ID"] = "a random uuid4"
    expected |= dict.fromkeys(("PRESET", "RESUME", "EVAL_ONLY", "SAMPLE_PROMPT"), "none")
    expected["INT8_KEEP_FLOAT_FP32_NAME_PATTERNS"] = "as above"
    assert dict(rows) == expected and len(rows) == len(expected)


def test_ci_runs_the_readmes_command():
    readme = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"^.*pytest tests$", readme, re.M)
    assert "-r tests/requirements.txt" in command and " -m venv .venv " in command
