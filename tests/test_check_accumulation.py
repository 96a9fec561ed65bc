"""tools/check_accumulation.py: the loop of ACCUMULATION.md is right, and each mistake is found."""

import importlib.util
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import check_accumulation
import loops
import pytest
from runs import ROOT, SCRIPT, process_environ, run_ranks

TOOL = ROOT / "tests/tools/check_accumulation.py"


@pytest.mark.parametrize("name", loops.MISTAKES)
def test_each_mistake_is_found_in_the_loop_of_the_page(name, tmp_path):
    ranks, _, keys, words = loops.MISTAKES[name]
    (tmp_path / "loop.py").write_text(loops.wrong_loop(name))
    (tmp_path / "out").mkdir()
    environ = {"CHECKED_FOLDER": str(tmp_path / "out"), "CHECKED_STEPS": "3"}
    results = run_ranks(tmp_path, environ, ranks, [TOOL, "loop.py"])
    assert [result.returncode for result in results] == [0] * ranks, results[0].stderr
    args = SimpleNamespace(verbose=False, minutes=10)
    steps, found = check_accumulation.check(ranks, 0, args, tmp_path / "out")
    assert set(keys.split()) <= found.keys() <= {*keys.split(), "short"}, found
    assert words in " ".join(found.values())
    assert len(steps) == 3


def test_the_pages_own_test_passes(tmp_path, monkeypatch):
    (tmp_path / "loop.py").write_text(loops.LOOP)
    (tmp_path / "test_loop.py").write_text(loops.TEST)
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.spec_from_file_location("test_loop", tmp_path / "test_loop.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.test_eight_micro_batches_give_the_gradient_of_one_batch()
    sys.modules.pop("loop")


def check(folder: Path, *words: object, **environ: str) -> subprocess.CompletedProcess:
    """Run the program. It must leave no temporary file."""
    (folder / "temporary").mkdir()
    environ = process_environ({"TMPDIR": str(folder / "temporary"), **environ})
    command = [sys.executable, TOOL, *map(str, words)]
    result = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    assert not list((folder / "temporary").glob("check_accumulation*"))
    return result


def test_train_gpt_is_right_and_takes_the_same_step_on_two_ranks(tmp_path, knobs):
    environ = {**knobs, "WARMUP_STEPS": "0", "GRAD_CLIP_NORM": "0.1", "PYTHONPATH": str(ROOT)}
    picture = tmp_path / "weights.svg"
    words = ("--ranks", "1,2", "--steps", "1", "--picture", picture, SCRIPT)
    result = check(tmp_path, *words, **environ)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[-1] == (
        "check_accumulation ranks:1,2 steps:1 lowest:1.00 highest:1.00 verdict:right"
    )
    assert "2 ranks and 1 read the same targets" in lines[-2]
    assert float(lines[-2].split(" by ")[1].split()[0]) < 1e-5
    assert result.stdout.count("clipped to 0.") == 2
    assert "exchanged in micro-step 4\n" in result.stdout
    assert picture.read_text().count("rank 1") > 0


@pytest.mark.parametrize(
    ("source", "words", "code", "output"),
    [
        ("print('so far')\nraise ValueError('no data')", (), 2, "| ValueError: no data"),
        ("print('done')", (), 3, "0 backward passes"),
        ("while True: pass", ("--minutes", "0.1"), 3, "0 backward passes"),
    ],
)
def test_a_script_without_a_step_is_not_called_right(source, words, code, output, tmp_path):
    (tmp_path / "train.py").write_text(source)
    result = check(tmp_path, *words, "train.py")
    assert result.returncode == code
    assert output in result.stdout
    assert result.stdout.endswith(" lowest:nan highest:nan verdict:unknown\n")


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ((), "no script"),
        (("absent.py",), "absent.py: no such file"),
        (("--ranks", "0", "absent.py"), "--ranks 0: give numbers"),
        (("--steps", "0", "absent.py"), "must be above 0"),
    ],
)
def test_wrong_usage_is_one_line(words, advice, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check_accumulation.py", *words])
    with pytest.raises(SystemExit) as end:
        check_accumulation.main()
    assert end.value.code == 2
    assert advice in capsys.readouterr().err


def test_a_signal_ends_all_ranks_and_leaves_nothing(tmp_path):
    (tmp_path / "train.py").write_text(
        "import pathlib, time\npathlib.Path('on').touch()\ntime.sleep(600)"
    )
    environ = process_environ({"TMPDIR": str(tmp_path)})
    command = [sys.executable, TOOL, "--ranks", "2", "train.py"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environ, start_new_session=True)
    while not (tmp_path / "on").exists() and process.poll() is None:
        time.sleep(0.1)
    folder = next(tmp_path.glob("check_accumulation_*"))
    ranks = [int(file.read_text()) for file in folder.glob("pid*")]
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert not list(tmp_path.glob("check_accumulation_*"))
    states = [Path(f"/proc/{rank}/stat") for rank in ranks]
    states = [state.read_text().split()[2] for state in states if state.exists()]
    assert ranks and set(states) <= {"Z"}  # nobody may have collected them yet
