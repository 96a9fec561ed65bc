"""A packed script is a script."""

import subprocess
import sys

from conftest import ROOT, SCRIPT, finished, run_script

PACK = [sys.executable, ROOT / "tests" / "tools" / "pack.py"]


def test_a_packed_script_trains_under_torchrun(tmp_path, knobs):
    packed = tmp_path / "packed.py"
    subprocess.run([*PACK, SCRIPT, packed], check=True)
    lines = finished(run_script(tmp_path, knobs, ranks=2, script=packed))
    size = packed.stat().st_size
    assert f"Code size: {size} bytes" in lines
    assert size < 0.45 * SCRIPT.stat().st_size


def test_a_packed_module_can_be_inspected(tmp_path):
    """torch.compile and tracebacks look for lines, dataclasses and pickle for the module."""
    (tmp_path / "module.py").write_text("class Knobs:\n    seed: 'int' = 1\n")
    subprocess.run([*PACK, "module.py", "packed.py"], cwd=tmp_path, check=True)
    code = (
        "import inspect, pickle, typing, packed; print(inspect.getsource(packed.Knobs), "
        "typing.get_type_hints(packed.Knobs), pickle.loads(pickle.dumps(packed.Knobs())).seed)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True)
    assert result.stdout == b"class Knobs:\n    seed: 'int' = 1\n {'seed': <class 'int'>} 1\n"


def test_a_script_is_not_packed_over_itself(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("print(1)\n")
    result = subprocess.run([*PACK, path, path], capture_output=True, text=True)
    assert result.returncode == 1 and str(path) in result.stderr
    assert path.read_text() == "print(1)\n"
