"""pack.py: a packed script does what the script does, and its errors show its source."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT, SCRIPT, finished, run_ranks
from trained import RECORD

PACK = ROOT / "tests" / "tools" / "pack.py"
MODULE = """\
'''A module.'''
class Knobs:
    '''Knobs.'''
    seed: 'int' = 1  # of NumPy
    def check(self):
        '''A docstring alone.'''
"""


def run(folder: Path, *command: str | Path, **environ: str) -> subprocess.CompletedProcess:
    settings = {"cwd": folder, "env": {**os.environ, **environ}, "capture_output": True}
    return subprocess.run([sys.executable, *command], text=True, **settings)


@pytest.mark.parametrize("script", [SCRIPT, pytest.param(RECORD, marks=pytest.mark.baseline)])
def test_a_minified_script_scores_on_two_ranks_as_the_script(tmp_path, knobs, script):
    packed = tmp_path / "made" / "packed.py"
    result = run(tmp_path, PACK, "--minify", script, packed)
    assert result.stdout.endswith(f"packed.py: {packed.stat().st_size} bytes\n")
    environ = {**knobs, "XSA_LAYERS": "1", "SKIP_GATES": "1"}  # knobs of the record script
    logs = [finished(run_ranks(tmp_path, environ, 2, [path])[0]) for path in (packed, script)]
    assert logs[0][-1] == logs[1][-1]
    assert f"Code size: {packed.stat().st_size} bytes" in logs[0]
    assert packed.stat().st_size < 0.3 * script.stat().st_size


def test_a_minified_module_can_be_inspected(tmp_path):
    """torch.compile reads source lines, pickle the module's name. A docstring in use is kept."""
    code = "import inspect, packed as p; print(p.__doc__, p.Knobs.__module__)"
    source = "class Knobs:\n    seed: 'int' = 1\n\n    def check(self):\n        pass\n\n"
    for more, doc in (("", None), ("__doc__", "A module.")):
        (tmp_path / "module.py").write_text(MODULE + more)
        run(tmp_path, PACK, "--minify", "module.py", "packed.py")
        result = run(tmp_path, "-c", f"{code}; print(inspect.getsource(p.Knobs))")
        assert result.stdout == f"{doc} packed\n{source}"


def test_a_script_of_any_encoding_shows_its_lines_in_a_traceback(tmp_path):
    """pack.py prints the script's name, too, even to a stdout that lacks its characters."""
    text = "# coding: {}\nprint('é')\n1 / 0  # é\n"
    (tmp_path / "bom 运行.py").write_text(text.format("utf-8"), encoding="utf-8-sig")
    (tmp_path / "latin.py").write_text(text.format("latin-1"), encoding="latin-1")
    for script in ("bom 运行.py", "latin.py"):
        run(tmp_path, PACK, script, "packed.py", PYTHONIOENCODING="latin-1").check_returncode()
        result = run(tmp_path, "-X", "utf8", "packed.py")
        assert result.stdout == "é\n" and "1 / 0  # é" in result.stderr


@pytest.mark.parametrize("option, folder", [("-OO", "data"), ("-B", "tests/tools")])
def test_help_needs_no_docstrings_and_no_folder_on_the_path(tmp_path, option, folder):
    """-OO drops docstrings. The programs of both folders show them by one function; those of
    tests/tools import torch, which -OO compiles anew, in half a minute. As with PYTHONSAFEPATH=1,
    which Python 3.10 lacks, a program's folder is not on the path."""
    files = [*ROOT.glob(f"{folder}/*.py")]
    programs = [str(path) for path in files if "\nif __name__" in path.read_text()]
    code = f"""
import contextlib, runpy, sys
before = [*sys.path]
for path in {programs}:
    sys.argv, sys.path[:] = [path, "--help"], before
    for name in {[path.stem for path in files]}:
        sys.modules.pop(name, None)
    with contextlib.suppress(SystemExit):
        runpy.run_path(path, run_name="__main__")
"""
    result = run(tmp_path, option, "-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("usage: ") == len(programs) > 3


def test_an_error_writes_nothing(tmp_path):
    (tmp_path / "broken.py").write_text("(")
    for script, packed, words in [
        ("broken.py", "packed.py", "SyntaxError"),
        ("broken.py", "./broken.py", "would overwrite its own source"),
        (PACK, "broken.py/packed.py", "name another file\n"),
    ]:
        result = run(tmp_path, PACK, script, packed)
        assert result.returncode != 0 and words in result.stderr
    assert not (tmp_path / "packed.py").exists()
    assert (tmp_path / "broken.py").read_text() == "("
