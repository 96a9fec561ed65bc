"""pack.py: a packed script does what the script does, and its errors show its source. forecast.py:
the bytes of a model and its script, without data."""

import os
import subprocess
import sys
from pathlib import Path

import forecast
import pack
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


def test_a_packed_script_shows_its_lines_in_a_traceback(tmp_path):
    """It has a byte order mark and a name that stdout lacks. Another files.py is on the path."""
    (tmp_path / "运行.py").write_text("print('é')\n1 / 0  # é\n", encoding="utf-8-sig")
    (tmp_path / "files.py").write_text("1 / 0")
    environ = {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(tmp_path)}
    run(tmp_path, PACK, "运行.py", "packed.py", **environ).check_returncode()
    result = run(tmp_path, "-X", "utf8", "packed.py")
    assert result.stdout == "é\n" and "1 / 0  # é" in result.stderr


def test_the_last_script_of_a_log_is_packed_whole_or_not_at_all(tmp_path):
    """The log says its size. A script with an error is not packed."""
    header = f"\n{'=' * 100}\nRunning Python 3\nscript_bytes:{{}}\nlogs/a.txt\nwarmup_step:1/3\n"
    script = "# A script.\nx = 1\n\nimport os\nprint(x)\n"
    for text in (script, script.replace("\n\n", "\nx = = 2\n")):
        starts = (source + header.format(len(source)) for source in (MODULE, text))
        (tmp_path / "log.txt").write_text("".join(starts))
        result = run(tmp_path, PACK, "log.txt", "packed.py")
        assert run(tmp_path, "packed.py").stdout == "1\n"  # also after the second one
        assert (f"log.txt: {len(script)} bytes, packed.py: " in result.stdout) == (text == script)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "log.txt has a script with a syntax error" in result.stderr and "line 3" in result.stderr


def test_an_error_writes_nothing(tmp_path):
    (tmp_path / "broken.py").write_text("(")
    (tmp_path / "link.py").symlink_to("broken.py")
    (tmp_path / "other.py").write_text("mine")
    (tmp_path / "long.py").write_text(f"x = 0x{9999 * 'a'}")
    (tmp_path / "deep.py").write_text("x = 1" + 600 * " + 1")
    (tmp_path / "null.py").write_text("x = 1\0")
    for script, packed, words in [
        ("long.py", "packed.py", "to increase the limit: pack it without --minify"),
        ("deep.py", "packed.py", ": pack it without --minify"),
        ("null.py", "packed.py", "null bytes"),
        ("broken.py", "packed.py", "'(' was never closed (broken.py, line 1)"),
        ("broken.py", "link.py", "would overwrite its own source: name another file"),
        ("broken.py", "other.py", "is no packed script: name another file"),
        ("broken.py", ".", "name the file to write: pack.py broken.py packed.py"),
        ("broken.py", "/dev/fd/1", "name the file to write: pack.py broken.py packed.py"),
    ]:
        result = run(tmp_path, PACK, "--minify", script, packed)
        error = result.stderr.splitlines()[-1]
        assert result.returncode == 2 and error.startswith("pack.py: ") and error.endswith(words)
        assert "Traceback" not in result.stderr
    assert [(tmp_path / name).read_text() for name in ("link.py", "other.py")] == ["(", "mine"]
    assert len([*tmp_path.iterdir()]) == 6


def test_a_forecast_adds_artifact_and_packed_code(tmp_path, quantized_knobs, monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", quantized_knobs | {"DATA_PATH": "none"})

    def sizes_of(script: Path, std: str, code: int = 0) -> list[int]:
        assert forecast.main([str(script), "--std", std]) == code
        lines = capsys.readouterr().out.splitlines()
        return [int(line.split()[1].replace(",", "")) for line in lines]

    num_params, artifact, packed, left = sizes_of(SCRIPT, "0.3")
    assert 0.5 * num_params < artifact == 16_000_000 - packed - left
    assert packed == len(pack.pack(SCRIPT))
    assert sizes_of(SCRIPT, "0.01")[1] < 0.97 * artifact  # small weights use fewer levels
    (tmp_path / "small.py").write_text(SCRIPT.read_text().replace("= 16_000_000", "= 1000"))
    assert sizes_of(tmp_path / "small.py", "0.3", code=1)[1] == artifact
