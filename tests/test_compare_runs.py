"""compare_runs.py: what it reads in logs, what it concludes, what it draws."""

import re
import subprocess
import sys
from pathlib import Path

import compare_runs
import numpy as np
import pytest
from conftest import ROOT, finished, run_here, scores
from scipy import stats

# A script that has lines like those of a log.
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


def write_sides(folder: Path, baseline=BASELINE, candidate=CANDIDATE) -> list[str | Path]:
    """Write logs with these scores and the seeds 0, 1, 2 ...: arguments for the tool."""
    arguments: list[str | Path] = []
    for side, losses in (("baseline", baseline), ("candidate", candidate)):
        arguments.append(f"--{side}")
        for seed, loss in enumerate(losses):
            text = LOG.replace("seed:42", f"seed:{seed}").replace("3.52821744", f"{loss:.8f}")
            arguments.append(folder / f"{side}-{seed}.txt")
            arguments[-1].write_text(text.replace("1.98197144", f"{loss / 2:.8f}"))
    return arguments


def compare(capsys, *arguments: str | Path) -> tuple[int, str]:
    """Run the tool: exit code and output."""
    with pytest.raises(SystemExit) as ended:
        compare_runs.main(list(map(str, arguments)))
    return ended.value.code, "".join(capsys.readouterr())


def test_the_last_start_in_a_file_counts(tmp_path):
    """In a log file, in the printed output of a run, and in the reference's log, without a path."""
    first = LOG.replace("step:18", "step:17")
    for text in (LOG[:-1], first + START + END, HEAD + (START + END)[11:]):
        (tmp_path / "log").write_text(text)
        run = compare_runs.read_run(tmp_path / "log")
        figures = [42, 18, 344.44, 3.52821744, 1.98197144, 485, 984749, 1072710]
        assert not run.unfinished and list(run.figures.values()) == figures
        assert run.train == {1: 6.9301, 10: 5.639} and run.val == {0: 6.9316, 18: 3.7829}


def test_a_log_that_the_script_wrote(tmp_path, knobs):
    lines = finished(run_here(tmp_path, {**knobs, "SEED": "5"}))
    run = compare_runs.read_run(tmp_path / "logs" / "test.txt")
    assert [run.figures[f] for f in ("seed", "val_loss", "val_bpb")] == [5, *scores(lines[-1])]
    assert run.figures.keys() | {"memory_mib"} == compare_runs.COLUMNS.keys()  # memory: on a GPU
    assert list(run.train) == [1, 2, 3, 4, 5, 6] and list(run.val) == [0, 3, 6]


def test_runs_without_the_final_line_are_named(tmp_path, capsys):
    sides = write_sides(tmp_path)
    path = tmp_path / "bad.txt"
    for text, end in (("", ""), (LOG[:-2], "eval_time:692ms"), (LOG + HEAD + START, "323.98ms")):
        path.write_text(text)
        code, out = compare(capsys, *sides, path)
        assert code == 0 and "n = 3, mean" in out
        assert re.search(f"no final line: {re.escape(str(path))}: .*{end}'", out)


def test_the_test_is_welchs():
    """By hand: standard error 0.00185345, t at 0.005 is 3.65984 with 4.74476 degrees of freedom."""
    sides = [[{"val_loss": x, "val_bpb": x / 2} for x in side] for side in (BASELINE, CANDIDATE)]
    welch = compare_runs.run_test(sides, paired=False, unit="nats", by=0.005, alpha=0.01)
    nats = {"mean": 0.0117833, "low": 0.0069408, "high": 0.0166259}
    assert welch.nats == pytest.approx(nats, abs=1e-6)
    assert welch.bits_per_byte == pytest.approx({k: v / 2 for k, v in nats.items()}, abs=1e-6)
    assert welch.p == pytest.approx(0.0080044, rel=1e-4)


def test_runs_of_one_seed_are_paired(tmp_path, capsys):
    """By hand: differences 0.010, 0.012, 0.014, standard error 0.0011547, t at 0.005 is 6.0622."""
    sides = write_sides(tmp_path, [3.50, 3.54, 3.62], [3.490, 3.528, 3.606, 3.3])
    out = compare(capsys, *sides[:5], *reversed(sides[5:]))[1]
    assert "pairs of one seed: 0.0120 nats (0.0070 to 0.0170)" in out
    assert "not shown (p = 0.013); at this spread, 4 pairs show it with 80% probability" in out


def test_the_number_of_runs_shows_it_with_80_percent_probability():
    """In 20,000 comparisons of random runs, but not with one run less."""
    needed = compare_runs.count_runs_needed(0.002, [0.002**2, 0.002**2], 0.01)
    random = np.random.default_rng(0)
    for runs in (needed - 1, needed):
        worse, better = random.normal([[[0.002]], [[0]]], 0.002, (2, runs, 20_000))
        test = stats.ttest_ind(worse, better, equal_var=False, alternative="greater")
        assert (np.mean(test.pvalue < 0.01) > 0.795) == (runs == needed)


def test_the_verdict(tmp_path, capsys):
    for baseline, candidate, more, code, words in [
        (BASELINE, CANDIDATE, "", 0, "better by more than 0.005 nats? shown (p = 0.008)"),
        (BASELINE, CANDIDATE, "--alpha=0.005", 1, "not shown (p = 0.008); at this spread, "),
        (BASELINE, CANDIDATE, "--by=0.0117", 1, "even 1000 runs per side would not show it"),
        (CANDIDATE, BASELINE, "--by=0", 1, "no, it is worse (p = 1); more runs per side like"),
        (BASELINE, [3.4], "", 2, "not tested: candidate: 1 finished"),
        ([3.5, 3.5], [3.4, 3.4], "", 2, "not tested: no score differs"),
    ]:
        ended, out = compare(capsys, *write_sides(tmp_path, baseline, candidate), *more.split())
        assert ended == code and words in out


def test_runs_on_other_tokens_are_compared_in_bits_per_byte(tmp_path, capsys):
    sides = write_sides(tmp_path)
    for path in sides[6:]:  # the candidate: a higher loss per token, on larger tokens
        loss = scores(path.read_text().splitlines()[-1])[0]
        path.write_text(path.read_text().replace(f"{loss:.8f}", f"{1.1 * loss:.8f}"))
    code, out = compare(capsys, *sides, "--by=0.001")
    assert code == 0 and "better by more than 0.001 bits per byte? shown" in out


def test_the_table(tmp_path, capsys):
    code, out = compare(capsys, *write_sides(tmp_path)[1:5])  # without a side
    rows = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    numbers = ["344.44", "3.514100", "1.757050", "485", "984,749", "1,072,710"]
    assert code == 0 and ["baseline-1", "1", "18", *numbers] in rows
    assert ["n = 4, mean", "344.44", "3.511150", "1.755575", "984,749", "1,072,710"] in rows


def test_what_makes_a_comparison_worthless(tmp_path, capsys):
    sides = write_sides(tmp_path)
    assert "warning" not in compare(capsys, *sides)[1]
    path = tmp_path / "odd.txt"
    path.write_text(LOG.replace("tokens:52608", "tokens:100").replace("seed:42", "seed:2"))
    out = compare(capsys, *sides, path)[1]
    assert "warning: the runs differ in val_tokens: 100, 52608" in out
    assert "warning: candidate: 2 runs have seed 2" in out
    path.write_text(LOG.replace("692ms", "692ms stride:64"))
    code, out = compare(capsys, *sides, path)
    assert code == 2 and "not tested: SCORES OF DIFFERENT STRIDES (64, none)" in out


def test_a_picture_has_a_line_for_each_run(tmp_path, capsys):
    """Also for a run that is still going. EVAL_ONLY has no curve."""
    write_sides(tmp_path)
    (tmp_path / "half.txt").write_text(HEAD + START + "step:18/20 tr")
    (tmp_path / "score.txt").write_text(START.partition("step:")[0] + END.partition("bytes\n")[2])
    thin = r"stroke: #(.*); stroke-width: 0.7"
    for logs, colors in (
        ("--baseline baseline-* --candidate candidate-*", 4 * ["e08a2e"] + 3 * ["1f2a6b"]),
        ("half.txt $PWD/half.txt score.txt", ["1f77b4", "ff7f0e"]),
    ):
        command = f"{sys.executable} {ROOT}/tests/tools/compare_runs.py {logs} --picture a.svg"
        subprocess.run(command, shell=True, cwd=tmp_path, check=True)
        assert re.findall(thin, (tmp_path / "a.svg").read_text()) == colors
    for log in (ROOT / "LICENSE", tmp_path / "score.txt"):
        code, out = compare(capsys, log, "--picture", tmp_path / "b.svg")
        assert code == 1 and "nothing to draw" in out


@pytest.mark.parametrize(
    "paths, names",
    [
        (["logs/night.txt"], ["night"]),
        ([f"logs/{'0123456789' * 3}.txt"], ["01234567"]),
        (["logs/base-1.txt", "logs/base-2.txt"], ["1", "2"]),
        (["a/logs/x.txt", "b/logs/x.txt"], ["a", "b"]),
        (["logs/aa.txt", "logs/aaa.txt"], ["aa", "aaa"]),
    ],
)
def test_the_legend_has_what_differs_between_names(paths, names):
    assert compare_runs.short_names([Path(path) for path in paths]) == names
