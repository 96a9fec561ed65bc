"""tests/tools/experiment.py with real runs of a small model, two at a time."""

import fcntl
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import experiment
import pytest
from runs import SCRIPT, launch_command, run_here, start_in_terminal

EXPERIMENT = SCRIPT.parent / "tests/tools/experiment.py"
Result = tuple[int, str, str]  # exit code, output, errors


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """The folder of all experiments here, so that they share the runs of a baseline."""
    return tmp_path_factory.mktemp("experiments")


@pytest.fixture
def small(knobs) -> dict[str, str]:
    """Knobs of runs that take hardly longer than their start."""
    base = {name: value for name, value in knobs.items() if name != "RUN_ID"}
    return {**base, "VAL_LOSS_EVERY": "0", "BATCH_SLOTS": "1"}


@pytest.fixture
def run(small, out) -> Callable[..., Result]:
    """Run experiment.py in this process."""

    def run(*arguments: str, **environ: str) -> Result:
        words = ["--out", str(out), "--jobs", "2", *arguments]
        program = SimpleNamespace(main=lambda: sys.exit(experiment.main(words)))
        result = run_here(out, {**small, **environ}, program)
        return result.returncode, result.stdout, result.stderr

    return run


def last_line(output: str) -> dict[str, str]:
    name, *words = output.splitlines()[-1].split()
    assert name == "experiment"
    return dict(word.split(":") for word in words)


def loss(out: Path, row: dict[str, str], side: str, seed: int) -> float:
    return json.loads((out / row[side] / str(seed) / "final_result.json").read_bytes())["val_loss"]


def ledger(out: Path) -> list[dict[str, str]]:
    return experiment.read_ledger(out / "ledger.tsv")


@pytest.mark.baseline
def test_an_edit_is_compared_with_the_last_commit_until_the_verdict_is_sure(
    tmp_path, run, out, monkeypatch
):
    script, line = tmp_path / "train_gpt.py", "tied_embed_lr: float = 0.05"
    script.write_text(SCRIPT.read_text().replace(line, f"{line[:-1]}05"))
    for words in ("init", "add .", "-c user.name=a -c user.email=a@b commit -m one"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True, capture_output=True)
    script.write_text(SCRIPT.read_text())
    monkeypatch.setattr(experiment, "SCRIPT", script)
    code, output, errors = run()
    last, row = last_line(output), ledger(out)[-1]
    gains = [loss(out, row, "baseline", n) - loss(out, row, "candidate", n) for n in (1, 2, 3)]
    assert float(last["gain"]) == pytest.approx(sum(gains) / 3, abs=1e-5)
    assert 0.005 < float(last["low"]) < float(last["gain"]) < float(last["high"])
    assert float(last["evidence"]) >= 100
    assert (last["pairs"], last["unit"], last["verdict"], code) == ("3", "nats", "better", 0)
    assert row["change"].startswith(f"+ {line} #")
    assert re.search(r"^time of a step: \d\.\d+ times", output, re.M) and errors == ""


@pytest.mark.baseline
def test_a_knob_and_what_its_gain_is_worth(run, out):
    """The second command trains nothing and replaces its row in the ledger."""
    command = ["--set", "MATRIX_LR=0.2", "--seeds", "1", "--worth"]
    code, output, _ = run(*command)
    row, count = ledger(out)[-1], len(ledger(out))
    gain = loss(out, row, "baseline", 1) - loss(out, row, "candidate", 1)
    assert (row["change"], row["pairs"], code) == ("MATRIX_LR=0.2", "1", 1)
    assert float(row["gain"]) == pytest.approx(gain, abs=1e-5)
    again = run(*command)[1]
    assert "started" in output and "started" not in again and len(ledger(out)) == count
    worth = re.search(r"^worth: .*", output, re.M)[0]
    assert worth in again
    losses = {}  # by length
    for path in out.glob("*/1/final_result.json"):
        facts = json.loads(path.read_bytes())
        losses[facts["steps"]] = facts["val_loss"]
    start = loss(out, row, "baseline", 1)
    slopes = [(start - losses[steps]) / math.log(steps / 6) for steps in (8, 9)]
    if min(slopes) >= max(slopes) / 2:
        assert f"as good as {math.exp(2 * gain / sum(slopes)):.3f} times" in worth
    else:
        assert "does not fall steadily" in worth


@pytest.mark.baseline
def test_recipes_on_a_baseline_that_was_chosen_get_fresh_seeds(run, out):
    """It was the candidate of seed 1, whose luck may have chosen it."""
    run("--set", "MATRIX_LR=0.2", "--seeds", "1")
    code, output, _ = run("--recipes", "leaky_relu", "--until-sure", "1", MATRIX_LR="0.2")
    row = ledger(out)[-1]
    assert (row["change"], row["first_seed"], row["pairs"], code) == ("leaky_relu", "2", "1", 1)
    assert "MATRIX_LR=0.2" in row["knobs"] and "earlier ones chose this baseline" in output


def test_a_failed_run_ends_the_experiment_with_its_last_lines(tmp_path, run, out):
    base = tmp_path / "base.py"
    line = "    hp = state.hp\n    grad_accum_steps"
    broken = SCRIPT.read_text().replace(line, line.replace("\n", '\n    raise OSError("boom")\n'))
    base.write_text(broken)
    count = len(ledger(out))
    code, _, errors = run("--base", str(base), "--seeds", "1")
    assert code == 2 and "failed with exit code 1" in errors and "OSError: boom" in errors
    assert len(ledger(out)) == count


def test_ctrl_c_stops_with_checkpoints_and_the_same_command_resumes(tmp_path, small, run):
    environ = {"ITERATIONS": "400", "TRAIN_LOG_EVERY": "5", "NUM_LAYERS": "1"}
    arguments = ["--set", "ITERATIONS=6", "--seeds", "1", "--out", str(tmp_path / "out")]
    command = [*launch_command(0), EXPERIMENT, *arguments, "--jobs", "2"]
    process, terminal = start_in_terminal(tmp_path, {**small, **environ}, command)
    seen = b""
    while not re.search(rb"baseline, seed 1: step \d+/400, loss.*min left", seen):
        seen += os.read(terminal, 1000)
    os.write(terminal, b"\3")
    with pytest.raises(OSError):  # the terminal has no other end any more
        while part := os.read(terminal, 1000):
            seen += part
    assert process.wait() == 130 and b"the same command goes on" in seen
    assert list(tmp_path.glob("out/*/1/checkpoints/seed-1.pt"))
    code, output, _ = run(*arguments, **environ)
    assert "baseline, seed 1: resumed from its checkpoint" in output
    assert code == 1  # 6 steps are worse
    logs = "\n".join(path.read_text() for path in tmp_path.glob("out/*/1/output.txt"))
    assert re.search(r"^resume:\S+ step:\d+ changed:nothing", logs, re.M)


def test_a_second_start_in_the_same_folder_is_refused(tmp_path, run):
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, output, errors = run("--out", str(tmp_path), "--set", "MATRIX_LR=0.2")
    assert (code, output) == (2, "") and "an experiment is running" in errors


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--set", "MATRX_LR=0.1"], "did you mean MATRIX_LR?"),
        (["--set", "XSA_LAYERS=2"], "recipe xsa: add --recipes xsa"),
        (["--set", "SD_CLIP_MLP=9"], "recipe sd_clip: add --recipes sd_clip"),
        (["--set", "MATRIX_LR=fast"], "candidate: MATRIX_LR='fast' must be a finite number"),
        (["--set", "SEED=5"], "use --seeds"),
        (["--recipes", "leaky"], "'leaky'"),
        (["--base", "none.py"], "none.py"),
        (["--base", str(SCRIPT.with_name("data") / "caseops.py")], "is not a train_gpt.py"),
        (["--base", str(SCRIPT)], "nothing to compare"),
    ],
)
def test_user_errors_are_one_line_before_any_run(run, arguments, words):
    code, output, errors = run(*arguments)
    assert (code, output, errors.count("\n")) == (2, "", 1) and words in errors


def test_local_rank_is_not_taken_for_lora_rank():
    """A knob of a recipe; the names are 0.84 alike."""
    with pytest.raises(ValueError) as error:
        experiment.check_knobs(["LOCAL_RANK"], [])
    assert "LORA_RANK" not in str(error.value)


def finished_pairs(folder: Path, *results: tuple) -> experiment.Experiment:
    """An experiment whose runs have these losses in nats and in bits per byte. None: unfinished."""
    sides = [experiment.Side(name, None, {}, None, folder / name) for name in ("old", "new")]
    pairs = []
    for seed, pair in enumerate(results, start=1):
        pairs.append(tuple(experiment.Run(side, seed) for side in sides))
        for run, losses in zip(pairs[-1], pair, strict=True):
            run.folder.mkdir(parents=True)
            if losses is not None:
                facts = {"val_loss": losses[0], "val_bpb": losses[1], "train_ms": 1, "steps": 1}
                (run.folder / "final_result.json").write_text(json.dumps(facts))
    args = experiment.Namespace(by=0.005, seeds=None, ledger=folder / "ledger.tsv")
    row = {"baseline": "old", "candidate": "new", "first_seed": "1"}
    return experiment.Experiment(args, pairs, row)


def test_pairs_count_in_seed_order_up_to_the_first_that_is_not_finished(tmp_path):
    """In bits per byte where the tokenizers differ. Equal losses are an error."""
    done = ((3.0, 1.5), (2.8, 1.4))
    found = finished_pairs(tmp_path / "a", done, (done[0], None), done)
    assert not found.is_over()
    assert found.gains == [pytest.approx(0.2)] and found.row["unit"] == "nats"
    found = finished_pairs(tmp_path / "b", ((3.0, 1.6), (3.2, 1.4)))
    assert found.is_over()
    assert found.gains == [pytest.approx(0.2)] and found.row["unit"] == "bits per byte"
    with pytest.raises(ValueError, match="the change does nothing"):
        finished_pairs(tmp_path / "c", (done[0], done[0])).is_over()
