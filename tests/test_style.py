"""What readers and forks rely on besides behaviour: format, size, order, names."""

import ast
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, SCRIPT

import train_gpt

MAX_LINES = 1770
MAX_BYTES = 88_200
MAX_FUNCTION_LINES = 50
MAX_PARAMETERS = 6
MAX_TUPLE_ASSIGNMENTS = 15
MAX_LAMBDAS = 2
SECTIONS = [
    "Hyperparameters", "Model", "Optimizers", "Schedules", "Data", "Evaluation", "Export",
    "Machinery: rarely edited.", "Runtime", "Checkpoints", "Training", "main",
]  # fmt: skip
PUBLIC = {
    "Hyperparameters", "load_data_shard", "TokenStream", "DistributedTokenLoader", "GPT", "Muon",
    "quantize_state_dict_int8", "dequantize_state_dict_int8", "main",
}  # fmt: skip
NODES = list(ast.walk(ast.parse(SCRIPT.read_text())))
FUNCTIONS = [node for node in NODES if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def arguments(function: ast.FunctionDef) -> list[ast.arg]:
    args = function.args
    return [*args.posonlyargs, *args.args, *args.kwonlyargs]


@pytest.mark.parametrize("command", [["format", "--check"], ["check"]], ids=" ".join)
def test_ruff_finds_nothing_in_the_whole_tree(command):
    """Format (line length 100) and rules as .ruff.toml has them."""
    ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "."]
    result = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_script_stays_short():
    assert len(SCRIPT.read_text().splitlines()) <= MAX_LINES
    assert SCRIPT.stat().st_size <= MAX_BYTES


def test_the_sections_are_in_order():
    """What people change comes first, then a banner, then the machinery."""
    text = SCRIPT.read_text()
    found = re.findall(r"^# ---- (\w+) -+$|^# (Machinery: rarely edited\.)$", text, re.M)
    assert ["".join(names) for names in found] == SECTIONS
    rule = "# " + "=" * 98
    assert f"\n{rule}\n# Machinery: rarely edited.\n{rule}\n" in text


def test_functions_stay_small_and_flat():
    for function in FUNCTIONS:
        assert function.end_lineno - function.lineno < MAX_FUNCTION_LINES, function.name
        taken = [argument for argument in arguments(function) if argument.arg != "self"]
        assert len(taken) <= MAX_PARAMETERS, function.name
        inner = [n for n in ast.walk(function) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        assert inner == [function], function.name


def test_every_signature_is_typed():
    for function in FUNCTIONS:
        assert function.returns is not None, function.name
        for argument in arguments(function):
            assert argument.annotation or argument.arg in ("self", "cls"), function.name
        assert not function.args.vararg and not function.args.kwarg, function.name


def test_one_statement_does_one_thing():
    """Lines are not saved by cramming."""
    assert not [node for node in NODES if isinstance(node, ast.NamedExpr)]
    assert not [node for node in NODES if isinstance(node, ast.Global | ast.Nonlocal)]
    assert sum(isinstance(node, ast.Lambda) for node in NODES) <= MAX_LAMBDAS
    several = [
        node.lineno
        for node in NODES
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(target, ast.Tuple) for target in node.targets)
    ]
    assert len(several) <= MAX_TUPLE_ASSIGNMENTS, several


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


def test_ci_runs_the_readmes_command():
    readme = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"^.*pytest tests$", readme, re.M)
    assert "-r tests/requirements.txt" in command and " -m venv .venv " in command
    ci = (ROOT / ".ci" / "run").read_text()
    assert "command=$(grep -m 1 'pytest tests$' README.md)\n" in ci
    assert ci.rstrip().endswith('-c "$command"')
