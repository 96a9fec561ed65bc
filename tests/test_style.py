"""Format, length, and an import without effects."""

import os
import subprocess
import sys

import pytest
import torch
from runs import ROOT, SCRIPT
from trained import load_script


@pytest.mark.baseline
@pytest.mark.parametrize("command", [["format", "--check"], ["check"]], ids=" ".join)
def test_ruff_finds_nothing_in_the_whole_tree(command):
    """Format (line length 100) and rules as .ruff.toml has them."""
    ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "."]
    result = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.baseline
def test_the_script_stays_short():
    assert len(SCRIPT.read_text().splitlines()) <= 1500


def test_importing_has_no_effects(tmp_path, monkeypatch, capfd):
    """Neither the environment nor files nor devices are touched."""

    def look() -> tuple:
        is_open = torch.cuda.is_initialized(), torch.distributed.is_initialized()
        return dict(os.environ), torch.initial_seed(), *is_open, [*tmp_path.iterdir()]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEED", "x")
    monkeypatch.setenv("WORLD_SIZE", "3")
    torch.manual_seed(5)
    before = look()
    load_script(SCRIPT)
    assert look() == before and capfd.readouterr() == ("", "")
