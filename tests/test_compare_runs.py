"""compare_runs.py: what it reads in logs, what it concludes, what it draws."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, run_here
from scipy import stats

from tests.tools import compare_runs

# A script whose text has lines that look like a log's.
HEAD = f"""\
step:7/9 val_loss:0.1111 val_bpb:0.1111 train_time:7ms step_avg:1.00ms
final_int8_zlib_roundtrip_exact val_loss:0.11111111 val_bpb:0.11111111
{"=" * 100}
"""
START = """\
logs/a.txt
train_loader:dataset:demo_sp1024 train_shards:3
val_loader:shards pattern=./data/demo/fineweb_val_*.bin tokens:52608
train_batch_tokens:6144 train_seq_len:128 iterations:20 warmup_steps:1 max_wallclock_seconds:100.000
seed:42
step:0/20 val_loss:6.9316 val_bpb:3.8938 train_time:0ms step_avg:0.11ms
step:1/20 train_loss:6.9301 train_time:293ms step_avg:293.45ms
step:10/20 train_loss:5.6390 train_time:3240ms step_avg:323.98ms
"""
END = """\
step:18/20 val_loss:3.7829 val_bpb:2.1251 train_time:6200ms step_avg:344.44ms
peak memory allocated: 485 MiB reserved: 500 MiB
Serialized model int8+zlib: 984749 bytes (payload:1059872 raw_torch:1073378 payload_ratio:1.99x)
Total submission size int8+zlib: 1072710 bytes
final_int8_zlib_roundtrip val_loss:3.5282 val_bpb:1.9820 eval_time:692ms
final_int8_zlib_roundtrip_exact val_loss:3.52821744 val_bpb:1.98197144
"""
LOG = HEAD + START + END
BASELINE = [3.5100, 3.5141, 3.5082, 3.5123]
CANDIDATE = [3.4993, 3.4971, 3.5017]


def write_group(folder: Path, name: str, losses: list[float]) -> list[Path]:
    """Logs with these scores, and with seeds of their own."""
    paths = []
    for seed, loss in enumerate(losses):
        text = LOG.replace("seed:42", f"seed:{seed}").replace("3.52821744", f"{loss:.8f}")
        paths.append(folder / f"{name}-{seed}.txt")
        paths[-1].write_text(text.replace("1.98197144", f"{loss / 2:.8f}"))
    return paths


@pytest.fixture
def compare(capsys):
    """Calls the tool. Returns its exit code, stdout and stderr."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            compare_runs.main(list(map(str, arguments)))
        return (ended.value.code, *capsys.readouterr())

    return call


@pytest.fixture
def sides(tmp_path) -> list[str | Path]:
    """Arguments for two groups, of which the second is better."""
    baseline = write_group(tmp_path, "base", BASELINE)
    return ["--baseline", *baseline, "--candidate", *write_group(tmp_path, "new", CANDIDATE)]


FIRST = LOG.replace("step:18", "step:17")


@pytest.mark.parametrize("text", [LOG, FIRST + START + END, HEAD + (START + END)[11:]])
def test_the_last_start_in_a_file_counts(tmp_path, text):
    """As a log file, as what a run printed, and as the reference's log, which lacks its path."""
    (tmp_path / "log").write_text(text)
    run = compare_runs.read_run(tmp_path / "log")
    figures = [42, 18, 344.44, 3.52821744, 1.98197144, 485, 984749, 1072710]
    assert run.problem == "" and list(run.figures.values()) == figures
    assert run.train == {1: 6.9301, 10: 5.639} and run.val == {0: 6.9316, 18: 3.7829}


def test_a_log_that_the_script_wrote(tmp_path, knobs):
    result = run_here(tmp_path, {**knobs, "SEED": "5"})
    assert result.returncode == 0, result.stderr
    run = compare_runs.read_run(tmp_path / "logs" / "test.txt")
    loss, bits_per_byte = re.findall(r"_exact val_loss:(\S+) val_bpb:(\S+)", result.stdout)[-1]
    assert run.figures["val_loss"] == float(loss) and run.figures["val_bpb"] == float(bits_per_byte)
    assert run.figures["seed"] == 5 and set(run.figures) == set(compare_runs.COLUMNS)
    assert list(run.train) == [1, 2, 3, 4, 5, 6] and list(run.val) == [0, 3, 6]


@pytest.mark.parametrize(
    "text, end",
    [
        ("", "''"),
        (LOG[:-2], "val_bpb:1.9819714'"),
        (LOG + HEAD + START, "step:10/20 train_loss"),
    ],
)
def test_runs_without_the_final_line_are_named(tmp_path, compare, sides, text, end):
    path = tmp_path / "bad.txt"
    path.write_text(text)
    code, out, _ = compare(*sides, path)
    assert re.search(f"left out: {re.escape(str(path))}: .*{re.escape(end)}", out)
    assert code == 0 and "n = 3, mean" in out


def test_the_test_is_welchs(compare, sides):
    """By hand: variances 6.6833e-6 and 5.2933e-6, standard error 0.00185345, 4.74476 degrees of
    freedom, t at 0.005 is 3.65984; the interval ends 2.61274 standard errors from the mean."""
    verdict = json.loads(compare(*sides, "--json")[1])["verdict"]
    assert verdict["shown"] and verdict["p"] == pytest.approx(0.0080044, rel=1e-4)
    for unit, factor in (("nats", 1), ("bits_per_byte", 0.5)):
        expected = [factor * nats for nats in (0.0117833, 0.0069408, 0.0166259)]
        assert list(verdict[unit].values()) == pytest.approx(expected, abs=1e-6)


def test_the_number_of_runs_shows_it_four_times_in_five():
    """In 20,000 comparisons of drawn runs, of as many as it says, but not of one less."""
    needed = compare_runs.count_runs_needed([3.505, 3.507, 3.509], [3.498, 3.5, 3.502], 0.005, 0.01)
    random = np.random.default_rng(0)
    shares = []
    for runs in (needed - 1, needed):
        worse, better = random.normal([[[0.002]], [[0]]], 0.002, (2, runs, 20_000))
        test = stats.ttest_ind(worse, better, equal_var=False, alternative="greater")
        shares.append(np.mean(test.pvalue < 0.01))
    assert needed > 3 and shares[0] < 0.805 and shares[1] > 0.795


@pytest.mark.parametrize(
    "baseline, candidate, more, code, words",
    [
        (BASELINE, CANDIDATE, [], 0, "more than 0.005 nats? shown (p = 0.008)"),
        (BASELINE, CANDIDATE, ["--alpha", "0.005"], 1, "not shown; at this spread some"),
        (BASELINE, CANDIDATE, ["--by", "0.0117"], 1, "1000 runs a side would not show it"),
        (CANDIDATE, BASELINE, ["--by", "0"], 1, "no number of runs"),
        (BASELINE, [3.4], [], 2, "not tested: candidate: 1 finished"),
        ([3.5, 3.5], [3.4, 3.4], [], 2, "not tested: no score differs"),
    ],
)
def test_the_verdict(tmp_path, compare, baseline, candidate, more, code, words):
    sides = ["--baseline", *write_group(tmp_path, "base", baseline)]
    ended, out, _ = compare(*sides, "--candidate", *write_group(tmp_path, "new", candidate), *more)
    assert ended == code and words in out, out


def test_the_table(compare, sides):
    code, out, _ = compare(*sides[:5])  # a baseline alone
    rows = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    numbers = ["344.44", "3.514100", "1.757050", "485", "984,749", "1,072,710"]
    assert code == 0 and ["base-1", "1", "18", *numbers] in rows
    assert ["n = 4, mean", "344.44", "3.511150", "1.755575", "984,749", "1,072,710"] in rows


def test_what_makes_a_comparison_worthless(tmp_path, compare, sides):
    assert "warning" not in compare(*sides)[1]
    path = tmp_path / "odd.txt"
    path.write_text(LOG.replace("tokens:52608", "tokens:100").replace("seed:42", "seed:2"))
    out = compare(*sides, path)[1]
    assert "warning: the runs differ in val_tokens: 100, 52608" in out
    assert "warning: candidate: 2 runs have seed 2" in out


def test_the_command_in_the_readme_draws_a_line_for_each_run(tmp_path, sides):
    tool = f"{sys.executable} {ROOT}/tests/tools/compare_runs.py"
    arguments = "--baseline base-*.txt --candidate new-*.txt --picture compare.svg"
    subprocess.run(f"{tool} {arguments}", shell=True, cwd=tmp_path, check=True)
    picture = (tmp_path / "compare.svg").read_text()
    for color, runs in (("e08a2e", 4), ("1f2a6b", 3)):
        assert picture.count(f"stroke: #{color}; stroke-opacity: 0.5; stroke-width: 0.5") == runs
