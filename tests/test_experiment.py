"""tests/tools/experiment.py with real runs of a small model, two at a time."""

import fcntl
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import compare_runs
import experiment
import pack
import pytest
import torch
from runs import SCRIPT, process_environ, run_here, start_in_terminal

import train_gpt


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """The folder of all experiments here."""
    folder = tmp_path_factory.mktemp("experiments")
    (folder / "lock").touch()
    return folder


@pytest.fixture
def small(knobs) -> dict[str, str]:
    """Knobs of runs that take hardly longer than their start."""
    base = {name: value for name, value in knobs.items() if name != "RUN_ID"}
    return {**base, "VAL_LOSS_EVERY": "0", "BATCH_SLOTS": "1"}


@pytest.fixture
def run(small, out) -> Callable[..., tuple[int, str, str]]:
    """Run experiment.py in this process. Returns its exit code, output and errors."""

    def run(*arguments: str, **environ: str) -> tuple[int, str, str]:
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
    return experiment.ledger.read(out / "ledger.tsv")


@pytest.mark.baseline
def test_an_edit_is_compared_with_the_last_commit_until_the_verdict_is_sure(
    tmp_path, run, out, monkeypatch, capsys
):
    """The script is named by a link. A hook of git sets GIT_DIR, here to a folder without commits.
    A filter, set by other variables of git, changes what it stores. compare_runs.py draws the
    pairs and, by the command that is printed, says the same."""
    script, line = tmp_path / "train_gpt.py", "tied_embed_lr: float = 0.05"
    old = SCRIPT.read_text().replace(line, f"{line[:-1]}05")
    script.write_text(old)
    (tmp_path / "current.py").symlink_to(script)
    (tmp_path / ".gitattributes").write_text("*.py filter=up")
    environ = {"GIT_CONFIG_COUNT": "2"}
    for i, filters in enumerate([("clean", "tr a-z b-za"), ("smudge", "tr b-za a-z")]):
        environ[f"GIT_CONFIG_KEY_{i}"] = f"filter.up.{filters[0]}"
        environ[f"GIT_CONFIG_VALUE_{i}"] = filters[1]
    for words in ("init", "add .", "-c user.name=a -c user.email=a@b commit -m one"):
        command = ["git", *words.split()]
        subprocess.run(command, cwd=tmp_path, env=process_environ(environ), check=True)
    script.write_text(SCRIPT.read_text())
    monkeypatch.setattr(experiment, "SCRIPT", tmp_path / "current.py")
    code, output, errors = run(GIT_DIR=str(tmp_path), **environ)
    last, row = last_line(output), ledger(out)[-1]
    assert (out / "baseline.py").read_text() == old
    gains = [loss(out, row, "baseline", n) - loss(out, row, "candidate", n) for n in (1, 2, 3)]
    assert float(last["gain"]) == pytest.approx(sum(gains) / 3, abs=1e-5)
    assert 0 < float(last["low"]) < float(last["gain"]) < float(last["high"])
    assert float(last["evidence"]) >= 20
    assert (last["pairs"], last["unit"], last["verdict"], code) == ("3", "nats", "better", 0)
    assert row["change"].startswith(f"+ {line} #")
    assert re.search(r"^time of a step: \d\.\d+ times", output, re.M) and errors == ""
    assert "WARNING: 6 steps say little" in output
    command = r".* NUM_LAYERS=3 .* python .*experiment.py'? --out .* --seeds 4 5 6 7$"
    assert re.search(rf"fresh seeds\n    {command}", output, re.M)
    again = run("--seeds", "1", "2", "3", **environ)[1]
    assert again.count(" --seeds ") == 1 and "--seeds 4 5 6 7\n" in again
    [command] = re.findall(r"^    python .*runs.py'? (.*)--picture pairs.png$", again, re.M)
    picture = tmp_path / "new" / "pairs.png"
    with pytest.raises(SystemExit, match="0"):
        compare_runs.main([*shlex.split(command), "--picture", str(picture)])
    gain, rule = re.search(r"gain: (.*)\nrule: (evidence of pairs, level 0.05):", again).groups()
    compared = capsys.readouterr().out
    assert f"rule: {rule}; " in compared and f"seed: {gain}\n" in compared
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "luck helped" not in run("--seeds", "2", "3", "1", **environ)[1]  # a row of its own


@pytest.mark.baseline
def test_a_change_is_tried_once_and_as_a_baseline_gets_fresh_seeds(tmp_path, run):
    """Luck with the first seed may have made it the baseline. The script is outside any repository,
    and has a byte order mark and a knob of its own. The log of its run gives it back."""
    script, out, line = tmp_path / "mine.py", tmp_path / "out", "    seed: int = 1337"
    text = SCRIPT.read_text().replace(line, f"    gain_power: float = 1.0\n{line}")
    text = text.replace("hp.qk_gain_init)", "hp.qk_gain_init**hp.gain_power)")
    script.write_text(text, encoding="utf-8-sig")
    folder = ["--out", str(out)]
    command = [*folder, "--script", str(script), "--set", "GAIN_POWER=0.5", "--seeds"]
    code, output, _ = run(*command, "1")
    (row,) = ledger(out)
    gain = loss(out, row, "baseline", 1) - loss(out, row, "candidate", 1)
    assert (row["change"], row["pairs"], code) == ("GAIN_POWER=0.5", "1", 1)
    assert float(row["gain"]) == pytest.approx(gain, abs=1e-5)
    again = run(*command, "1")[1]
    assert "started" in output and "started" not in again and len(ledger(out)) == 1
    on_top = [*command[:4], "--set", "SCALAR_LR=0.1", "--until-sure", "1"]
    output = run(*on_top, GAIN_POWER="0.5")[1]
    top = ledger(out)[-1]
    assert (top["change"], top["first_seed"], top["pairs"]) == ("SCALAR_LR=0.1", "2", "1")
    assert "GAIN_POWER=0.5" in top["knobs"] and "changes tried: 2" in output
    output = run(*command, "5")[1]  # to confirm it changes nothing for what builds on it
    assert "changes tried: 2" in output and ledger(out)[-1]["first_seed"] == "5"
    again = run(*on_top, GAIN_POWER="0.5")[1]
    assert "started" not in again and ledger(out)[-1]["first_seed"] == "2"
    code, _, errors = run(*command[:4])
    assert code == 2 and "no committed mine.py" in errors and "fatal: not a git rep" in errors
    log = out / row["candidate"] / "1/logs/seed-1.txt"
    assert run(*folder, "--base", str(log), "--minutes", "0")[0] == 1
    assert (out / "baseline.py").read_bytes() == script.read_bytes()


def test_a_failed_run_ends_the_experiment_with_its_last_lines(tmp_path, run, out):
    base = tmp_path / "base.py"
    line = 'if __name__ == "__main__":\n'
    base.write_text(SCRIPT.read_text().replace(line, f'{line}    raise OSError("boom")\n'))
    count = len(ledger(out))
    code, _, errors = run("--base", str(base), "--seeds", "1")
    assert code == 2 and "failed with exit code 1" in errors and "OSError: boom" in errors
    assert len(ledger(out)) == count


def test_a_change_that_diverges_is_worse_and_is_not_trained_again(tmp_path, run):
    command = ["--set", "SCALAR_LR=1e20", "--seeds", "1", "2", "--out", str(tmp_path)]
    for word in ("started, see", "worse: diverged at seed 1"):
        code, output, errors = run(*command)
        last, (row,) = last_line(output), ledger(tmp_path)
        assert (code, last["verdict"], last["evidence"], errors) == (1, "worse", "0", "")
        assert (row["verdict"], row["evidence"], row["diverged"]) == ("worse", "0", "1")
        assert word in output and "changes tried: 1, better: 0" in output
    assert "started" not in output and "steps say little" not in output


def test_ctrl_c_stops_with_checkpoints_and_the_same_command_resumes(tmp_path, small, run):
    environ = {"ITERATIONS": "400", "TRAIN_LOG_EVERY": "5", "NUM_LAYERS": "1"}
    out = tmp_path / "out"
    arguments = ["--set", "ITERATIONS=6", "--seeds", "1", "--out", str(out)]
    command = [sys.executable, experiment.__file__, *arguments, "--jobs", "2"]
    process, terminal = start_in_terminal(tmp_path, {**small, **environ}, command)
    seen = b""
    while not any("step:5/400 " in path.read_text() for path in out.glob("*/1/output.txt")):
        assert process.poll() is None
        time.sleep(0.1)
    os.write(terminal, b"\3")
    with pytest.raises(OSError):  # the other end of the terminal is closed
        while part := os.read(terminal, 1000):
            seen += part
    assert process.wait() == 130 and b"the same command continues" in seen
    assert list(out.glob("*/1/checkpoints/seed-1.pt"))
    output = run(*arguments, **environ)[1]
    assert "baseline, seed 1: resumed from its checkpoint" in output
    assert "WARNING: the sides differ in ITERATIONS: 400 and 6\n" in output
    logs = "\n".join(path.read_text() for path in out.glob("*/1/output.txt"))
    assert re.search(r"^resume:\S+ step:\d+ changed:nothing", logs, re.M)


def test_a_folder_with_other_files_or_another_experiment_is_refused(tmp_path, run):
    command, other = ("--out", str(tmp_path), "--set", "MATRIX_LR=0.2"), tmp_path / "candidate.py"
    other.write_text("mine")
    code, output, errors = run(*command)
    assert (code, output) == (2, "") and f"{other} is not a file of experiment.py" in errors
    assert [*tmp_path.iterdir()] == [other] and other.read_text() == "mine"
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, output, errors = run(*command)
    assert (code, output) == (2, "") and "is running" in errors


def test_user_errors_are_one_line_before_any_run(run):
    for option, value, words in [
        ("--set", "MATRX_LR=0.1", "did you mean MATRIX_LR?"),
        ("--set", "XSA_LAYERS=2", "a knob of --script tests/records/train_record.py"),
        ("--set", "SEED=5", "use --seeds"),
        ("--set", "MATRIX_LR=x", "MATRIX_LR='x'"),
        ("--base", str(SCRIPT), "git show HEAD~1:"),
        ("--jobs", "-1", "argument --jobs: '-1' is not a whole number >= 1"),
        ("--set", "MATRIX_LR=0.1 MATRIX_LR=0.1", "name each knob once"),
    ]:
        code, output, errors = run(option, *value.split())
        assert (code, output, errors.count("\n")) == (2, "", 1) and words in errors


@pytest.mark.parametrize(
    "place, line, words",
    [
        ("parts.py", "import parts", "No module named 'parts': install it, or put it into the"),
        ("src/own.py", "sys.path.insert(0, {folder!r})\n__import__('own')", "loads own from"),
        ("torch/own.py", "def", ": fix it"),  # its folder has the name of a package
    ],
)
def test_a_module_that_is_not_installed_is_refused(tmp_path, run, place, line, words):
    """Its edits would not count as a change."""
    path, script = tmp_path / place, tmp_path / "mine.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    script.write_text(f"{SCRIPT.read_text()}\n{line.format(folder=str(path.parent))}\n")
    code, _, errors = run("--script", str(script), "--set", "MATRIX_LR=0.2")
    assert (code, errors.count("\n")) == (2, 1) and words in errors


def test_variables_that_an_edit_reads_belong_to_its_runs(tmp_path):
    """Also if the script is packed."""
    script, packed = tmp_path / "mine.py", tmp_path / "packed.py"
    script.write_text(f"{SCRIPT.read_text()}\nSCALE = __import__('os').getenv('my_scale')\n")
    packed.write_text(pack.pack(script))
    args = experiment.Namespace(quick=False, out=tmp_path, launch="")
    for path in (script, packed):
        facts = []
        for value in "112":
            args.environ = {"my_scale": value, "other": str(len(facts))}
            facts.append(experiment.load_side("candidate", path, {}, args).facts)
        assert facts[0] == facts[1] != facts[2]


def test_the_change_is_the_first_changed_line_of_the_file(tmp_path):
    paths = [tmp_path / "old.py", tmp_path / "new.py"]
    for old, new, change in [
        ("x = 2\ny = 1\n", "# new\nx = 3\nb = 7\ny = 1\na = 5\n", "+x = 3 (lines changed: 4)"),
        ("x = 2\ny = 1\n", "y = 1\na  =  5\n", "-x = 2 (lines changed: 2)"),
        ("x = 2\n", "x = 2\na  =  5\n", "+a = 5"),
        ("x = 2\n", "x = 2\n# y\n", ""),
    ]:
        for path, text in zip(paths, (old, new), strict=True):
            path.write_text(text)
        args = experiment.parse(["--base", str(paths[0]), "--script", str(paths[1])])
        assert experiment.read_sources(args)[1] == change


def test_knobs_of_one_side_are_repeated_and_secrets_are_not(tmp_path, small):
    """A secret is a word of the name of a variable that is no knob."""
    script, found, line = tmp_path / "mine.py", [], "    seed: int = 1337"
    names = ["MY_TOKEN", "SECRET_PLACE", "MY_TOKENS", "monkey"]
    text = SCRIPT.read_text().replace(line, f"    the_key: float = 1.0\n{line}")
    script.write_text(f"{text}\nOWN = [os.environ.get(name) for name in {names}]\n")
    words = ["--base", str(SCRIPT), "--script", str(script), "--out", str(tmp_path / "out")]
    prepare = lambda: found.append(experiment.prepare(experiment.parse(words)))  # noqa: E731
    environ = {**small, **dict.fromkeys(names, "it's 5"), "THE_KEY": "0.5", "OTHER_KEY": "6"}
    run_here(tmp_path, environ, SimpleNamespace(main=prepare))
    shown = "MY_TOKEN=... SECRET_PLACE=... MY_TOKENS={0} monkey={0} THE_KEY=0.5"
    assert shown.format("it's 5") in found[0].row["knobs"]
    assert shown.format(shlex.quote("it's 5")) in found[0].args.command
    assert "OTHER_KEY" not in found[0].args.command and "ITERATIONS=6" in found[0].args.command
    words += ["--set", "MY_TOKEN=7"]
    result = run_here(tmp_path, environ, SimpleNamespace(main=lambda: experiment.main(words)))
    assert "--set MY_TOKEN would be in the ledger: set it in" in result.stderr


def test_a_large_file_is_read_once_and_counts_as_a_whole(tmp_path, knobs, run):
    """An older version had checksums of pieces of it."""
    data, out = shutil.copytree(knobs["DATA_PATH"], tmp_path / "data"), tmp_path / "out"
    (shard, store), folders = (data / "fineweb_train_000009.bin", out / "data.json"), []
    out.mkdir()
    for name in ("lock", "ledger.tsv"):
        (out / name).touch()

    def find() -> str:
        words = ["--out", str(out), "--set", "MATRIX_LR=0.1", "--minutes", "0"]
        output = run(*words, DATA_PATH=str(data))[1]
        folders.append(re.search(r"^baseline: (\S+)", output, re.M)[1])
        return output

    shard.write_bytes(bytes(100 * 2**20))
    message = "runs of older versions are trained again"
    assert message in find() and message not in find()
    with open(shard, "r+b") as file:
        file.seek(3 * 2**20)
        file.write(b"1")
    find()
    # A checksum is not computed anew unless the file has changed.
    text = store.read_text()
    state = json.loads(text)
    state[str(shard)][3] += 1
    store.write_text(json.dumps(state))
    find()
    os.utime(shard)
    find()
    assert folders[0] == folders[1] and folders[2] == folders[4]
    assert len(set(folders)) == 3


def test_other_texts_are_not_compared_and_other_data_get_other_folders(
    tmp_path, dataset, run, monkeypatch
):
    """So do runs on a GPU. There is no time for a pair, so the ledger stays empty."""
    words, home = ["--minutes", "0", "--out=~/out", "--set"], str(tmp_path)
    for split in ("val", "train"):
        shard = shutil.copytree(dataset, tmp_path / split) / f"fineweb_{split}_000000.bin"
        content = shard.read_bytes()
        shard.write_bytes(content[:-2] + b"\1\0")
    for setting, problem in [
        ("EVAL_STRIDE=16", "scores with different EVAL_STRIDE cannot be compared"),
        ("MAX_VAL_TOKENS=640", "different MAX_VAL_TOKENS"),
        (f"DATA_PATH={tmp_path}/val", "different validation shards"),
    ]:
        code, _, errors = run(*words, setting, HOME=home)
        assert code == 2 and problem in errors
    for setting in (f"DATA_PATH={tmp_path}/train", "TRAIN_SEQ_LEN=64"):
        code, output, errors = run(*words, setting, HOME=home)
        assert "the same command continues" in output
        verdict = last_line(output)["verdict"]
        assert (code, verdict, errors, ledger(tmp_path / "out")) == (1, "not_yet", "", [])
    folders = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "a GPU")
    for data, gpus in ((content, 0), (content[:-2] + b"\1\0", 0), (content, 1), (content, 0)):
        shard.write_bytes(data)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)  # noqa: B023
        environ = {"DATA_PATH": f"{home}/train", "DEVICE": "auto"}
        output = run(*words, "MATRIX_LR=0.1", HOME=home, **environ)[1]
        folders.append({*re.findall(r"^(?:baseline|candidate): (\S+)", output, re.M)})
    assert folders[0] == folders[3] and len(set.union(*folders)) == 6


def finished_pairs(folder: Path, *results: tuple, bpb=(0.5, 0.5)) -> experiment.Experiment:
    """An experiment whose runs have these losses; those that lack one have not finished. nan: the
    run diverged. bpb: bits per byte of a loss of 1, by side."""
    hp = train_gpt.Hyperparameters(iterations=1)
    sides = [experiment.Side(name, train_gpt, [], {}, hp, folder / name) for name in ("old", "new")]
    pairs = []
    for seed, losses in enumerate(results, start=1):
        pairs.append(tuple(experiment.Job(side, seed) for side in sides))
        for run, loss, ratio in zip(pairs[-1], losses, bpb, strict=False):
            facts = {"val_loss": loss, "val_bpb": loss and loss * ratio, "train_ms": 1, "steps": 1}
            (run.folder / "logs").mkdir(parents=True)
            if loss is not math.nan:
                (run.folder / "final_result.json").write_text(json.dumps(facts))
                continue
            (run.folder / "logs" / f"seed-{seed}.txt").write_text(
                "train_batch_tokens:8 train_seq_len:8 iterations:9 max_wallclock_seconds:0\n"
                "step:1/9 train_loss:3.0 train_time:5ms step_avg:5ms\n"
                "step:2/9 train_loss:nan train_time:9ms step_avg:4ms\n"
            )
    args = experiment.Namespace(by=0.0, alpha=0.05, seeds=None, ledger=folder / "ledger.tsv")
    args.deadline, args.command = math.inf, "python x.py --seeds 1"
    row = {"baseline": "old", "candidate": "new", "by": "0", "first_seed": "1"}
    return experiment.Experiment(args, pairs, row)


def test_pairs_count_in_seed_order_up_to_the_first_that_is_not_finished(tmp_path):
    """If the tokenizers differ, the unit is bits per byte. A loss that is not finite does not
    count. Equal losses of both sides in all pairs, or of two seeds (an edit may ignore SEED), are
    an error, and so is a result that is damaged or of another device."""
    for name, second in (("unfinished", (3.0,)), ("not finite", (3.0, None))):
        found = finished_pairs(tmp_path / name, (3.0, 2.8), second, (3.0, 2.8))
        assert not found.is_over()
        assert found.gains == [pytest.approx(0.2)] and found.row["unit"] == "nats"
    found = finished_pairs(tmp_path / "b", (3.2, 3.5), bpb=(0.5, 0.4))
    assert found.is_over()
    assert found.gains == [pytest.approx(0.2)] and found.row["unit"] == "bits per byte"
    found = finished_pairs(tmp_path / "tie", (3.0, 3.0), (3.2, 3.1), (3.3, 3.3))
    assert found.is_over() and found.gains == [0, pytest.approx(0.1), 0]
    with pytest.raises(ValueError, match="the change does nothing"):
        finished_pairs(tmp_path / "c", (3.0, 3.0), (3.1, 3.1), ()).is_over()
    assert ledger(tmp_path / "c") == []
    same_loss = "old: seeds 1 and 2 end with the same loss"
    for new, words in ((980, same_loss), (700, "different texts, of 2,020 to 2,885 bytes")):
        found = finished_pairs(tmp_path / f"{new}", (3.0, 2.8), (3.0, 2.9))
        for run, tokens in zip(found.pairs[0], (1000, new), strict=True):
            log = run.folder / "logs" / "a.txt"
            log.write_text(
                f"{log}\nval_loader:x tokens:{tokens}\ntrain_batch_tokens:8 train_seq_len:16 "
                "iterations:1 max_wallclock_seconds:0\nx val_loss:3.00000000 val_bpb:1.50000000\n"
            )
        with pytest.raises(ValueError, match=words):
            found.is_over()
    run.side.device, facts = "cpu", {**run.result(), "device": "cuda:0"}
    damages = {"{": "is not JSON", "[]": "is damaged", '{"val_loss": 3}': "is damaged"}
    for text, problem in {**damages, json.dumps(facts): "is of a run on cuda"}.items():
        (run.folder / "final_result.json").write_text(text)
        with pytest.raises(ValueError, match=f"new/1/final_result.json {problem}.*delete it"):
            run.result()


def test_a_candidate_that_diverges_ends_the_experiment_with_evidence_0(tmp_path, capsys):
    """In all rows of the change and margin, also after fresh seeds."""
    good = [(3.0, 2.8), (3.1, 2.89), (3.2, 3.01)]
    found = finished_pairs(tmp_path, *good, (3.3, 3.1), (3.4, math.nan), *good)
    for seeds, verdict in (([1, 2, 3], "better"), ([5, 6], "worse"), ([6, 7, 8], "worse")):
        found.args.seeds = seeds
        pairs = [found.pairs[seed - 1] for seed in seeds]
        each = experiment.Experiment(found.args, pairs, {**found.row})
        assert each.is_over()
        code, output = each.report(), capsys.readouterr().out
        last = last_line(output)
        assert (last["verdict"], code) == (verdict, int(verdict == "worse"))
        assert ("worse: diverged at seed 5\n" in output) == (verdict == "worse")
        assert last["evidence"] == "0" or verdict == "better"
    rows = ledger(tmp_path)
    assert [row["seeds"] for row in rows] == ["1 2 3", "5", "6 7 8"]
    assert {(row["evidence"], row["verdict"]) for row in rows} == {("0", "worse")}
    diverged = found.pairs[4][1]
    assert diverged.result()["val_loss"] == math.inf
    (diverged.folder / "checkpoints").mkdir()  # it was stopped after a step that fp16 skipped
    assert diverged.result() is None


def test_a_pair_whose_baseline_diverges_does_not_count(tmp_path, capsys):
    """Whatever its candidate did."""
    nan = math.nan
    found = finished_pairs(tmp_path, (nan, nan), (3.0, 2.8), (nan, 2.8), (nan,), (3.1, 2.89))
    found.args.seeds = [1, 2, 3, 4, 5]
    assert found.is_over() and found.gains == [pytest.approx(0.2), pytest.approx(0.21)]
    warnings = re.findall(r"WARNING: old, seed (\d) diverged: its pair", capsys.readouterr().out)
    (row,) = ledger(tmp_path)
    assert warnings == ["1", "3", "4"]
    assert (row["seeds"], row["first_seed"], row["pairs"]) == ("2 5", "2", "2")
    assert row["evidence"] == f"{experiment.anytime.evidence(found.gains):.3g}"
    found = finished_pairs(tmp_path / "b", (nan, nan), (nan, 3.0))
    with pytest.raises(ValueError, match="the baseline diverged with all seeds: set lower"):
        found.is_over()


def test_training_ends_with_a_mean_below_zero_but_not_with_seeds(tmp_path):
    found = finished_pairs(tmp_path, (3.0, 3.2), (3.1, 3.25), (3.3, 2.9))
    assert found.is_over() and len(found.gains) == 2 and found.row["verdict"] == "not better"
    found.args.seeds = [1, 2, 3]
    found = experiment.Experiment(found.args, found.pairs, found.row)
    assert found.is_over() and len(found.gains) == 3


def test_a_run_counts_once_in_the_ledger_and_evidence_is_that_of_all_seeds(tmp_path, capsys):
    """The first command has the pairs 1 to 3, then they come in another order, with a pair less;
    then come the others. Margins have rows of their own."""
    results = [(3 + i / 100, 2.83 + i**2 / 1000) for i in range(6)]
    found = finished_pairs(tmp_path, *results)
    for by, order, expected in (
        (0.0, [1, 2, 3], [1, 2, 3]),
        (0.0, [2, 1], [1, 2, 3]),
        (0.0, [1], [1, 2, 3]),
        (0.0, [5, 4, 6], [1, 2, 3, 4, 5, 6]),
        (-0.1, [4, 5, 6], [4, 5, 6]),
    ):
        found.args.by = by
        row = {**found.row, "by": f"{by:g}", "first_seed": str(order[0])}
        pairs = [found.pairs[seed - 1] for seed in order]
        assert experiment.Experiment(found.args, pairs, row).is_over()
        rows = [row for row in ledger(tmp_path) if float(row["by"]) == by]
        gains = [results[seed - 1][0] - results[seed - 1][1] for seed in expected]
        evidence = experiment.anytime.evidence(gains, by)
        assert {row["evidence"] for row in rows} == {f"{evidence:.3g}"}
    rows = ledger(tmp_path)
    assert [row["seeds"] for row in rows] == ["2 1", "1 2 3", "5 4 6", "4 5 6"]
    assert [row["pairs"] for row in rows] == ["2", "1", "3", "3"]
    assert [row["evidence_seeds"] for row in rows] == [*3 * ["2 1 3 5 4 6"], "4 5 6"]
    other = {**rows[0], "evidence": "1", "verdict": "better"}
    others = [{**other, "candidate": str(i)} for i in range(9)]
    others.append({**other, "candidate": "simpler", "by": "-0.005"})
    experiment.ledger.write(found.args.ledger, rows + others)
    found.args.by = 0.0
    found.row |= {"verdict": "better", "evidence": rows[0]["evidence"]}
    found.show_claims()
    out = capsys.readouterr().out
    assert "changes tried: 10, better: 10, stand together: 1\n" in out
    assert "to stand among the changes tried, it needs 100\n" in out
    assert out.endswith("    python x.py --seeds 7 8 9 10\n")


def test_a_damaged_line_of_the_ledger_is_named(tmp_path):
    path = tmp_path / "ledger.tsv"
    names = "change baseline candidate first_seed pairs evidence verdict by seeds"
    head, line = ("\t".join(words.split()) for words in (names, "A=1 a b 7 1 120 better 0 7"))
    for damage in ("\t\t3", "xxxxx", line.replace("120", "nan")):
        path.write_text(f"{head}\n{line}\n{damage}\n")
        with pytest.raises(ValueError, match="ledger.tsv, line 3 is damaged: correct"):
            ledger(tmp_path)
