"""Format, length, and an import without effects."""

import os
import subprocess
import sys

import pytest
from runs import ROOT, SCRIPT


@pytest.mark.baseline
@pytest.mark.parametrize("command", [["format", "--check"], ["check"]], ids=" ".join)
def test_ruff_finds_nothing_in_the_whole_tree(command):
    """Check format (line length 100) and lint with the rules of .ruff.toml."""
    ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "."]
    result = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.baseline
def test_the_script_stays_short():
    assert len(SCRIPT.read_text().splitlines()) <= 1665


def test_importing_has_no_effects(tmp_path):
    """Neither the environment nor files nor devices are touched."""
    program = (
        "import os, sys; before = dict(os.environ); import train_gpt, torch; "
        "assert os.environ == before; assert not torch.cuda.is_initialized(); "
        "assert not torch.distributed.is_initialized(); assert torch.initial_seed() != 1337"
    )
    environ = {"PYTHONPATH": str(ROOT), "SEED": "x", "WORLD_SIZE": "3", "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
