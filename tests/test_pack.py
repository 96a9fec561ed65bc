"""pack.py: a packed script does what the script does, and its errors show its source."""

import subprocess
import sys
from pathlib import Path

from conftest import ROOT, SCRIPT, finished, run_script

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


def test_a_minified_script_trains_under_torchrun(tmp_path, knobs):
    packed = tmp_path / "packed.py"
    run(tmp_path, PACK, "--minify", SCRIPT, packed)
    lines = finished(run_script(tmp_path, knobs, ranks=2, script=packed))
    size = packed.stat().st_size
    assert f"Code size: {size} bytes" in lines
    assert size < 0.3 * SCRIPT.stat().st_size


def test_a_packed_module_can_be_inspected(tmp_path):
    """torch.compile reads source lines; dataclasses and pickle need the module's namespace."""
    (tmp_path / "module.py").write_text(MODULE)
    run(tmp_path, PACK, "module.py", "packed.py")
    code = (
        "import inspect, pickle, typing, packed; print(inspect.getsource(packed.Knobs.check), "
        "typing.get_type_hints(packed.Knobs), pickle.loads(pickle.dumps(packed.Knobs())).seed)"
    )
    source = "    def check(self):\n        '''A docstring alone.'''\n"
    assert run(tmp_path, "-c", code).stdout == f"{source} {{'seed': <class 'int'>}} 1\n"


def test_minify_removes_comments_and_docstrings_that_nobody_reads(tmp_path):
    code = "class Knobs:\n    seed: 'int' = 1\n\n    def check(self):\n        pass"
    cases = {MODULE: code, f"{MODULE}print(__doc__)": f'"""A module."""\n\n{code}\nprint(__doc__)'}
    for source, minified in cases.items():
        (tmp_path / "module.py").write_text(source)
        run(tmp_path, PACK, "--minify", "module.py", "packed.py")
        printed = run(tmp_path, "-c", "import packed; print(packed.source)").stdout
        assert printed.endswith(f"\n\n\n{minified}\n\n")


def test_a_traceback_shows_the_lines_of_the_packed_text(tmp_path):
    (tmp_path / "script.py").write_text("def divide():\n    return 1 / 0  # fails\n\ndivide()\n")
    run(tmp_path, PACK, "script.py", "packed.py")
    lines = [line.strip() for line in run(tmp_path, "packed.py").stderr.splitlines()]
    assert [lines[i] for i in (3, 5)] == ["divide()", "return 1 / 0  # fails"]


def test_a_script_is_not_packed_over_itself(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("print(1)\n")
    result = run(tmp_path, PACK, path, path)
    assert result.returncode == 2 and str(path) in result.stderr
    assert path.read_text() == "print(1)\n"
