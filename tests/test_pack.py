"""pack.py: a packed script does what the script does, and its errors show its source."""

import subprocess
import sys
from pathlib import Path

from runs import ROOT, SCRIPT, finished, run_ranks

PACK = ROOT / "tests" / "tools" / "pack.py"
MODULE = """\
'''A module.'''
class Knobs:
    '''Knobs.'''
    seed: 'int' = 1  # of NumPy
    def check(self):
        '''A docstring alone.'''
"""


def run(folder: Path, *command: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)


def test_a_minified_script_trains_on_two_ranks(tmp_path, knobs):
    packed = tmp_path / "packed.py"
    result = run(tmp_path, PACK, "--minify", SCRIPT, packed)
    assert result.stdout.endswith(f"packed.py: {packed.stat().st_size} bytes\n")
    lines = finished(run_ranks(tmp_path, knobs, 2, [packed])[0])
    assert f"Code size: {packed.stat().st_size} bytes" in lines
    assert packed.stat().st_size < 0.3 * SCRIPT.stat().st_size


def test_a_minified_module_can_be_inspected(tmp_path):
    """torch.compile reads source lines, pickle the module's name. A docstring in use is kept."""
    code = "import inspect, packed as p; print(p.__doc__, p.Knobs.__module__)"
    source = "class Knobs:\n    seed: 'int' = 1\n\n    def check(self):\n        pass\n\n"
    for more, doc in (("", None), ("__doc__", "A module.")):
        (tmp_path / "module.py").write_text(MODULE + more)
        run(tmp_path, PACK, "--minify", "module.py", "packed.py")
        result = run(tmp_path, "-c", f"{code}; print(inspect.getsource(p.Knobs))")
        assert result.stdout == f"{doc} packed\n{source}"


def test_a_traceback_shows_the_lines_of_the_packed_text(tmp_path):
    (tmp_path / "script.py").write_text("def divide():\n    return 1 / 0  # fails\n\ndivide()\n")
    run(tmp_path, PACK, "script.py", "packed.py")
    lines = [line.strip() for line in run(tmp_path, "packed.py").stderr.splitlines()]
    assert {"divide()", "return 1 / 0  # fails"} <= set(lines)


def test_an_error_writes_nothing(tmp_path):
    """A missing script, a broken one, and one that would be its own copy."""
    (tmp_path / "broken.py").write_text("(")
    for script, packed, words in [
        ("none.py", "packed.py", "'none.py' is not a file"),
        ("broken.py", "packed.py", "SyntaxError"),
        ("broken.py", "./broken.py", "would overwrite its own source"),
    ]:
        result = run(tmp_path, PACK, script, packed)
        assert result.returncode != 0 and words in result.stderr
    assert not (tmp_path / "packed.py").exists()
    assert (tmp_path / "broken.py").read_text() == "("
