"""The commands of EXERCISES.md, on small models and small shards; the code of all pages."""

import dataclasses
import inspect
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import edits
import pytest
import torch
import train_record
from edits import EXERCISES, edit_script
from runs import ALONE, ROOT, SCRIPT, process_environ, run_ranks
from scripts import RECORDS

import train_gpt
from train_gpt import Hyperparameters, TrainingState

PAGE = (ROOT / "tests/EXERCISES.md").read_text(encoding="utf-8")
COMMAND = r"(for|git|python|torchrun|[A-Z_]+=\S+) "
FINDS_A_FAULT = ("pytest", "referee.py", "check_accumulation.py")  # in exercises 2 to 4
RIGHT = ("3", "python tests/tools/check_accumulation.py --ranks 2 train_gpt.py")
MAY_SAY_NO = "experiment.py"


def read_code(title: str) -> list[str]:
    """The lines of code below a title of a page, without indentation and comments."""
    paths = (ROOT / "README.md", ROOT / "tests/records/README.md")
    pages = PAGE + "".join(path.read_text(encoding="utf-8") for path in paths)
    [section] = re.findall(rf"(?ms)^## {title}.*?(?=^## )", pages)
    lines = [line.split("  #")[0] for line in section.splitlines() if line.startswith("    ")]
    return [line.strip() for line in lines]


SHOWN = {"First edits": edits.README, "Five to copy": edits.RECORDS}
SHOWN |= {f"{n}. ": {n: edit} for n, edit in EXERCISES.items() if n != "6"}  # 6 is one of the five


@pytest.mark.baseline
@pytest.mark.parametrize("title", SHOWN)
def test_a_page_shows_its_edits(title):
    """Its code is the lines that the edits change, in their order."""
    script = SCRIPT.read_text(encoding="utf-8")
    old = script.splitlines()
    shown = "\n".join(line for line in read_code(title) if not re.match(COMMAND, line))
    for edit in SHOWN[title].values():
        edited = edit_script(script, edit).splitlines()
        new = [line.split("  #")[0].strip() for line in edited if line not in old]
        changed = "\n".join(new)
        assert changed in shown
        shown = shown.replace(changed, "")
    assert shown.strip() == ""


def test_the_page_unsets_its_knobs_and_names_tests():
    exported, unset = re.findall(r"(?m)^    (?:export|unset) (.*)$", PAGE)
    assert re.findall(r"(\w+)=", exported) == unset.split()
    tests = (ROOT / "tests/test_training.py").read_text(encoding="utf-8")
    mistakes = (ROOT / "tests/ACCUMULATION.md").read_text(encoding="utf-8")
    for name in re.findall(r"(?m) \| `(\w+)` \|$", mistakes):
        assert re.search(rf"\ndef test_\w*{name}", tests), name


@pytest.mark.baseline
@pytest.mark.records
@pytest.mark.parametrize("number", ["1", *EXERCISES])
def test_the_commands_run(tmp_path, knobs, number):
    """In a copy of the project. A command that finds the fault exits with 1."""
    keep = shutil.ignore_patterns(".*", "datasets", "tokenizers", "logs", "*.pt", "*.ptz", "out")
    copy = shutil.copytree(ROOT, tmp_path / "copy", ignore=keep)
    taken = ("RUN_ID", "OUTPUT_DIR", "SEED")
    environ = process_environ({k: v for k, v in knobs.items() if k not in taken})
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        environ |= {f"{name}_NAME": "player", f"{name}_EMAIL": "player@example.com"}

    def run(command: str) -> subprocess.CompletedProcess:
        settings = {"cwd": copy, "env": environ, "capture_output": True, "text": True}
        return subprocess.run(["bash", "-c", command], **settings)

    assert run("git init -q && git add train_gpt.py && git commit -qm start").returncode == 0
    is_edited = False
    for line in read_code(f"{number}. "):
        if not re.match(COMMAND, line) or (number == "6" and not is_edited):
            if not is_edited:
                script = copy / "train_gpt.py"
                script.write_text(edit_script(script.read_text(), EXERCISES[number]))
            is_edited = True
        if re.match(COMMAND, line):
            result = run(line)
            is_fault = is_edited and any(word in line for word in FINDS_A_FAULT)
            is_fault &= (number, line) != RIGHT
            expected = {0, 1} if MAY_SAY_NO in line else {int(is_fault)}
            assert result.returncode in expected, (line, result.stdout, result.stderr)
            assert "Traceback" not in result.stderr


# ---- other pages ---------------------------------------------------------------------------------
def take_the_steps_of_readme() -> None:
    """Take two steps with the lines of train_step that README.md shows; write the gradients."""
    hp = Hyperparameters.from_env(os.environ)
    state = TrainingState(hp, train_gpt.open_runtime(hp))
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"(?m)^    state\.gpt\.zero_grad\(\)\n(?:    .*\n)+", page)
    source = [line.strip() for line in inspect.getsource(train_gpt.train_step).splitlines()]
    assert {line.strip() for line in code.splitlines()} <= {*source}
    names = {
        "state": state,
        "hp": hp,
        "grad_accum_steps": hp.batch_slots // state.runtime.world_size,
    }
    for _ in range(2):
        exec(textwrap.dedent(code), names)
    gradients = {name: p.grad for name, p in state.gpt.named_parameters()}
    torch.save(gradients, f"{state.runtime.rank}.pt")
    train_gpt.leave(lambda: 0)


@pytest.mark.baseline
def test_readmes_loop_is_a_step(tmp_path, knobs):
    """On two ranks, against train_step on one."""
    for result in run_ranks(tmp_path, knobs, 2, edit=take_the_steps_of_readme):
        assert result.returncode == 0, result.stderr
    state = TrainingState(Hyperparameters.from_env(knobs), ALONE)
    for _ in range(2):
        train_gpt.train_step(state)
    found = torch.load(tmp_path / "1.pt", weights_only=True)
    for name, p in state.gpt.named_parameters():
        assert (found[name] - p.grad).norm() <= 1e-3 * p.grad.norm(), name


@pytest.mark.baseline
@pytest.mark.parametrize("preset", RECORDS)
def test_a_record_made_small_keeps_its_techniques(preset):
    """small.sh sets knobs of the script, and switches no technique off."""
    command = ["env", "-i", "bash", "-c", ". tests/records/small.sh && env"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    small = dict(line.split("=", 1) for line in output.splitlines())
    knobs = {field.name.upper() for field in dataclasses.fields(train_record.Hyperparameters)}
    assert {*small} - knobs <= {"PWD", "SHLVL", "_"}
    hp = train_record.Hyperparameters.from_env({**small, "PRESET": preset})
    plain = {field.name.upper() for field in dataclasses.fields(Hyperparameters)}
    for name in {*train_record.PRESETS[preset]} - plain:
        is_on = train_record.PRESETS[preset][name] != "0"
        assert bool(getattr(hp, name.lower())) == is_on, name
