"""compare_runs.py: what it reads in logs, what it concludes, what it draws and writes."""

import ast
import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPT, process_environ, run_here
from hypothesis import given, settings
from hypothesis import strategies as some
from scipy import integrate, stats
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.benchmarks import compare_runs

TOOL = ROOT / "tests" / "benchmarks" / "compare_runs.py"
# A script whose text is full of what looks like a log.
SOURCE = '''"""A trainer. It needs
Python 3.10 or newer, and prints

step:7/9 val_loss:0.1111 val_bpb:0.1111 train_time:7ms step_avg:1.00ms
seed:777
final_int8_zlib_roundtrip_exact val_loss:0.11111111 val_bpb:0.11111111
"""
import os
log(f"step:{step}{of} val_loss:{loss:.4f} val_bpb:{bpb:.4f} {stopwatch.report(step)}")
log(f"final_int8_zlib_roundtrip_exact val_loss:{loss:.8f} val_bpb:{bpb:.8f}{partial}")
'''
OLD_SOURCE = SOURCE.replace("_exact", "")  # of a script that prints no exact score
RULE = "=" * 100
GPUS = "+------+\n| NVIDIA H100 80GB HBM3   On  | 00000000:0F:00.0 Off |\n+------+\n"
NEW_HEAD = f"{RULE}\nRunning Python 3.12.3 (main) [GCC 13]\nRunning PyTorch 2.9.1\n{GPUS}{RULE}\n"
OLD_HEAD = f"\nPython 3.9.7 (default) \n[GCC 12.2.0]\nPyTorch 2.13.0+cpu\n{GPUS}"
START = """\
logs/a.txt
demo_corpus:built documents:10 tokens:100
val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path=./data/tokenizers/demo.model
train_loader:dataset:demo_sp1024 train_shards:3
val_loader:shards pattern=./data/demo/fineweb_val_*.bin tokens:52608
model_params:592136
world_size:1 grad_accum_steps:8
sdp_backends:cudnn=False flash=True mem_efficient=False math=False
attention_mode:gqa num_heads:2 num_kv_heads:1
tie_embeddings:True embed_lr:0.05 head_lr:0.0 matrix_lr:0.04 scalar_lr:0.04
train_batch_tokens:6144 train_seq_len:128 iterations:20 warmup_steps:1 max_wallclock_seconds:100.000
seed:42
compile:failed, the run goes on without it: no compiler
device:cpu dtype:torch.bfloat16 compile:False cpu_threads:2
warmup_step:1/1
"""
STEPS = """\
step:0/20 val_loss:6.9316 val_bpb:3.8938 train_time:0ms step_avg:0.11ms
step:1/20 train_loss:6.9301 train_time:293ms step_avg:293.45ms
step:10/20 train_loss:5.6390 train_time:3240ms step_avg:323.98ms
warmdown:begun already, since WARMDOWN_ITERS=1200 such steps take longer than the run
checkpoint:./checkpoints/a/step_00000010.pt
step:10/20 val_loss:4.2463 val_bpb:2.3853 train_time:3241ms step_avg:324.10ms
"""
END = """\
step:18/20 val_loss:3.7829 val_bpb:2.1251 train_time:6200ms step_avg:344.44ms
stopping_early: wallclock_cap train_time:6200ms step:18/20
replicas:identical
peak memory allocated: 485 MiB reserved: 500 MiB
speed: tokens_per_s:17033 share_of_peak:0.156 data_wait:0.006 optimizer:0.023
Serialized model: 2118885 bytes
Code size: 87961 bytes
Total submission size: 2206846 bytes
Serialized model int8+zlib: 984749 bytes (payload:1059872 raw_torch:1073378 payload_ratio:1.99x)
Total submission size int8+zlib: 1072710 bytes
size_check:fits limit:16000000 bytes_left:14927290
int8_worst:tok_emb.weight=0.0068 blocks.2.mlp.proj.weight=0.0002
final_int8_zlib_roundtrip_sliding stride:64 val_loss:3.40000000 val_bpb:1.90000000
sample:' and val_loss:1.0 val_bpb:1.0'
final_int8_zlib_roundtrip val_loss:3.5282 val_bpb:1.9820 eval_time:692ms
final_int8_zlib_roundtrip_exact val_loss:3.52821744 val_bpb:1.98197144
"""
LINES = START + STEPS + END
LOG = SOURCE + NEW_HEAD + LINES
WORSE = LINES.replace("3.52821744", "3.60000000")


def make_log(folder: Path, name: str, text: str = LOG) -> Path:
    path = folder / f"{name}.txt"
    path.write_text(text)
    return path


def score_line(loss: float) -> str:
    return f"final_int8_zlib_roundtrip_exact val_loss:{loss:.8f} val_bpb:{loss / 2:.8f}\n"


def make_group(folder: Path, name: str, losses: list[float], **replaced: str) -> list[str]:
    """Names of logs with these scores, and with seeds of their own."""
    paths = []
    for i, loss in enumerate(losses):
        text = re.sub(r"final_\w+_exact .*\n$", score_line(loss), LOG)
        text = text.replace("seed:42", f"seed:{i}")
        for old, new in replaced.items():
            text = re.sub(old, new, text)
        paths.append(str(make_log(folder, f"{name}-{i}", text)))
    return paths


def read(folder: Path, text: str) -> compare_runs.Run:
    return compare_runs.read_run(make_log(folder, "read", text))


def score(folder: Path, text: str) -> tuple[float | None, float | None] | str:
    """The score, or the reason why there is none."""
    run = read(folder, text)
    return run.problem or (run.val_loss, run.val_bpb)


@pytest.fixture
def compare(capsys):
    """Calls the tool; gives its exit code, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            compare_runs.main(list(map(str, arguments)))
        return (ended.value.code, *capsys.readouterr())

    return call


BASELINE = [3.5100, 3.5141, 3.5082, 3.5123]
CANDIDATE = [3.4993, 3.4971, 3.5017]


@pytest.fixture
def sides(tmp_path) -> list[str]:
    """Arguments for two groups of made-up runs, of which the second is better."""
    baseline = make_group(tmp_path, "base", BASELINE)
    return ["--baseline", *baseline, "--candidate", *make_group(tmp_path, "new", CANDIDATE)]


# ---- reading -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "head",
    [
        SOURCE + NEW_HEAD,
        "_ = 1\n" + SOURCE + OLD_HEAD,
        SCRIPT.read_text() + OLD_HEAD,
        NEW_HEAD,
        "",
        "noise\n",
    ],
)
def test_a_log_with_every_line(tmp_path, head):
    """And with a script's text before, or without, as in what a run has printed."""
    run = read(tmp_path, head + LINES)
    assert run.problem == "" and run.figures() == {
        "seed": 42,
        "steps": 18,
        "ms_per_step": 344.44,
        "val_loss": 3.52821744,
        "val_bpb": 1.98197144,
        "memory_mib": 485,
        "artifact_bytes": 984749,
        "total_bytes": 1072710,
    }
    assert [(p.step, p.seconds, p.loss) for p in run.train.values()] == [
        (1, 0.293, 6.9301),
        (10, 3.24, 5.639),
    ]
    assert [(p.step, p.loss, p.bits_per_byte) for p in run.val.values()] == [
        (0, 6.9316, 3.8938),
        (10, 4.2463, 2.3853),
        (18, 3.7829, 2.1251),
    ]
    assert {name: run.facts.get(name) for name in compare_runs.TRAITS} == {
        "dataset": "demo_sp1024",
        "train_shards": "3",
        "val_tokens": "52608",
        "partial_validation": "no",
        "tokenizer": "demo.model",
        "model_params": "592136",
        "train_batch_tokens": "6144",
        "train_seq_len": "128",
        "iterations": "20",
        "max_wallclock_seconds": "100.000",
        "score_line": "final_int8_zlib_roundtrip_exact",
    }


def test_a_log_that_the_script_wrote(tmp_path, knobs):
    environ = {**knobs, "EVAL_STRIDE": "16", "MAX_VAL_TOKENS": "320", "SEED": "5"}
    result = run_here(tmp_path, environ)
    assert result.returncode == 0, result.stderr
    run = compare_runs.read_run(tmp_path / "logs" / "test.txt")
    loss, bpb = re.findall(r"_exact val_loss:(\S+) val_bpb:(\S+)", result.stdout)[-1]
    assert (run.problem, run.val_loss, run.val_bpb) == ("", float(loss), float(bpb))
    assert list(run.train) == [1, 2, 3, 4, 5, 6] and list(run.val) == [0, 3, 6]
    assert None not in run.figures().values() and run.figures()["seed"] == 5
    assert set(run.facts) >= set(compare_runs.TRAITS)
    (tmp_path / "printed.txt").write_text(result.stdout)
    printed = compare_runs.read_run(tmp_path / "printed.txt")
    assert printed.figures() == run.figures() and printed.facts == run.facts


SLIDING = "final_int8_zlib_roundtrip_sliding stride:64 val_loss:3.40000000 val_bpb:1.90000000\n"
OLD_END = "final_int8_zlib_roundtrip val_loss:3.5000 val_bpb:1.9500 eval_time:9ms\n"


def test_which_line_is_the_score(tmp_path):
    old = OLD_SOURCE + OLD_HEAD + STEPS
    whole = (3.52821744, 1.98197144)
    assert score(tmp_path, LOG + SLIDING) == whole  # the exact one, though it is not the last
    assert score(tmp_path, LOG + "other_exact val_loss:3.3 val_bpb:1.8\n") == (3.3, 1.8)
    assert score(tmp_path, old + OLD_END + SLIDING) == (3.4, 1.9)
    assert score(tmp_path, old + SLIDING + OLD_END) == (3.5, 1.95)
    sample = "sample:' val_loss:1.0 val_bpb:1.0'\n"
    assert score(tmp_path, old + OLD_END + sample) == (3.5, 1.95)
    no_time = "step:20/20 val_loss:3.1 val_bpb:1.1\n"
    assert score(tmp_path, old + no_time).startswith("no score: cut short")
    assert score(tmp_path, old + "better val_loss:1e300 val_bpb:1.0\n").startswith(
        "its score is no"
    )
    assert score(tmp_path, old + "better val_loss:nan val_bpb:1.0\n").startswith("its score is no")
    assert score(tmp_path, LOG + "other_exact val_loss:3.3 val_bpb:inf\n").startswith("its score")
    assert score(tmp_path, LOG.rstrip("\n")) == whole
    assert score(tmp_path, LOG[:-2]).startswith("cut short before its last score")
    assert score(tmp_path, LOG.replace("\n", "\r\n")) == whole


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "no score, nor any step"),
        (SOURCE, "no score, nor any step"),
        (LOG + SOURCE, "no score, nor any step"),  # a second start that came to nothing
        (SOURCE + NEW_HEAD + START, "no score, nor any step"),
        (SOURCE + NEW_HEAD + START + STEPS, "cut short, or still running, at step 10 of 20"),
        (START + STEPS + "stopped: signal:15 step:10/20: to go on", "still running, at step 10"),
        (START + STEPS + "stopped: signal:15 step:10/20: to go on\n", "a signal stopped it at st"),
        (LOG + SOURCE + OLD_HEAD + START + STEPS, "still running, at step 10 of 20"),
        (LOG[: LOG.rindex("final_")], "cut short before its last score"),
        (START + SLIDING, "cut short before its last score"),  # this trainer's, without its end
    ],
)
def test_why_a_log_is_left_out(tmp_path, compare, sides, text, reason):
    path = make_log(tmp_path, "bad", text)
    code, out, _ = compare(*sides, path)
    assert f"left out: {path}: " in out and reason in out
    assert "n = 3, mean" in out and code == 0


def test_several_runs_in_a_file(tmp_path):
    """The last one counts; what is resumed goes on."""
    again = SOURCE + NEW_HEAD + WORSE
    assert score(tmp_path, LOG + again)[0] == 3.6
    assert score(tmp_path, LOG + again.replace('"""A', '"""Edited, a', 1))[0] == 3.6
    assert score(tmp_path, LINES + WORSE)[0] == 3.6  # what two runs printed
    assert list(read(tmp_path, LOG + SOURCE + NEW_HEAD + START + END).val) == [18]
    resumed = START + "resume:./checkpoints/a/step_00000010.pt step:10 changed:nothing\n" + END
    killed = STEPS + "step:12/20 train_loss:9.9 train_time:4000ms step_avg:333.33ms\n"
    for head in (SOURCE + OLD_HEAD, SOURCE + NEW_HEAD, ""):
        run = read(tmp_path, head + START + killed + head + resumed)
        assert list(run.train) == [1, 10] and list(run.val) == [0, 10, 18]
        assert run.val_loss == 3.52821744 and run.steps == 18
    assert list(read(tmp_path, resumed).val) == [18]  # the file with the start is elsewhere


SEVERAL = [LOG, LOG + SOURCE + OLD_HEAD + WORSE, LINES + WORSE]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(some.sampled_from(SEVERAL), some.integers(0, 10**6), some.booleans())
def test_a_log_cut_anywhere_gives_its_figures_or_none(tmp_path_factory, text, place, from_the_end):
    """Of the one run in it, or of one of the two."""
    folder = tmp_path_factory.getbasetemp()
    # Most of what can go wrong lies near the end.
    end = len(text) - place % 400 if from_the_end else place % len(text)
    run = read(folder, text[:end])
    whole = read(folder, LOG).figures()
    known = [whole, {**whole, "val_loss": 3.6}]
    assert bool(run.problem) == (run.figures() not in known)
    assert run.problem == "" or run.problem.startswith(("no score", "cut short"))
    read(folder, text[place % len(text) :])  # and the other half raises nothing


# ---- statistics ----------------------------------------------------------------------------------
def power_by_integration(n: int, gain: float, spreads: tuple[float, float], alpha: float) -> float:
    """Without the noncentral t distribution: over all values that the spread may show."""
    first, second = (spread**2 for spread in spreads)
    df = (n - 1) * (first + second) ** 2 / (first**2 + second**2)
    shift = gain / math.sqrt((first + second) / n)
    limit = stats.t.isf(alpha, df)

    def chance(x: float) -> float:
        return stats.chi2.pdf(x, df) * stats.norm.sf(limit * math.sqrt(x / df) - shift)

    return integrate.quad(chance, 0, df + 40 * math.sqrt(2 * df) + 40, limit=200)[0]


def test_the_test_is_scipys(tmp_path, compare, sides):
    code, out, _ = compare(*sides, "--json")
    verdict = json.loads(out)["verdict"]
    assert code == 0 and verdict["asked"]["shown"] and verdict["asked"]["by"] == 0.005
    for claim, by in (("asked", 0.005), ("at_all", 0.0)):
        shifted = [loss + by for loss in CANDIDATE]
        expected = stats.ttest_ind(BASELINE, shifted, equal_var=False, alternative="greater")
        assert verdict[claim]["p"] == pytest.approx(expected.pvalue, rel=1e-9)
    for unit, factor in (("nats", 1), ("bits_per_byte", 0.5)):
        pair = [[factor * loss for loss in losses] for losses in (BASELINE, CANDIDATE)]
        expected = stats.ttest_ind(*pair, equal_var=False)
        assert verdict[unit]["df"] == pytest.approx(expected.df, rel=1e-6)
        assert verdict[unit]["interval_95"] == pytest.approx(
            list(expected.confidence_interval(0.95)), rel=1e-6
        )
    assert verdict["nats"]["difference"] == pytest.approx(3.51115 - 3.49936667, abs=1e-7)


@pytest.mark.parametrize(
    "by, alpha, distance", [(0.005, 0.01, 0.004), (0.0, 0.05, 0.001), (0.002, 0.001, 0.0)]
)
def test_the_number_of_runs_follows_from_the_power(by, alpha, distance):
    baseline = [3.5 + by + distance + 0.0005 + x for x in (-0.004, 0.001, 0.003)]
    candidate = [3.5 + x for x in (-0.001, 0.0, 0.001)]
    needed = compare_runs.count_runs_needed(baseline, candidate, by, alpha)
    spreads = (math.sqrt(13e-6), 0.001)  # by hand: (16 + 1 + 9) / 2 and (1 + 0 + 1) / 2
    powers = [
        power_by_integration(n, distance + 0.0005, spreads, alpha) for n in (needed - 1, needed)
    ]
    assert powers[0] < 0.8 <= powers[1] and needed > 3
    power = compare_runs.power_of_test(3, 0.009, tuple(x * x for x in spreads), alpha)
    assert power == pytest.approx(power_by_integration(3, 0.009, spreads, alpha), rel=1e-4)


def test_a_side_that_is_too_small_needs_more_than_it_has():
    """Even where as many as it has would do if the sides were equal."""
    many = [3.48, 3.482] * 50
    assert stats.ttest_ind([3.5, 3.502], many, equal_var=False, alternative="greater").pvalue > 0.01
    assert compare_runs.power_of_test(2, 0.02, (2e-6, 1e-6), 0.01) > 0.8
    assert compare_runs.count_runs_needed([3.5, 3.502], many, 0.0, 0.01) == 3


def test_what_no_number_of_runs_would_show():
    assert compare_runs.count_runs_needed([3.5, 3.51], [3.502, 3.503], 0.005, 0.01) is None
    assert compare_runs.count_runs_needed([3.5, 3.51], [3.6, 3.61], 0.0, 0.01) is None
    far_off = compare_runs.count_runs_needed([3.0, 4.0], [3.0, 3.9999], 0.0, 0.01)
    assert far_off == compare_runs.MOST_RUNS


@pytest.mark.parametrize(
    "candidate, code, words",
    [
        (
            CANDIDATE,
            0,
            r"than 0.005 nats\? better, by 0\.0118 nats \(p = 0\.008\)\nbetter at all\? b",
        ),
        ([3.5031, 3.4971, 3.5002], 1, r"not shown: p = 0\.025; at this spread some 6 runs a side "),
        (
            [3.5071, 3.5099, 3.5081],
            1,
            r"not shown: p = 0\.89; 0\.0028 nats are not above 0\.005: no",
        ),
        (
            [3.52, 3.53, 3.525],
            1,
            r"not shown: p = 0\.99; worse, by 0\.0139 nats: no number of runs",
        ),
    ],
)
def test_the_verdict_in_words(tmp_path, compare, candidate, code, words):
    sides = ["--baseline", *make_group(tmp_path, "base", BASELINE)]
    sides += ["--candidate", *make_group(tmp_path, "new", candidate)]
    ended, out, _ = compare(*sides)
    assert ended == code and re.search(words, out), out
    assert json.loads(compare(*sides, "--json")[1])["verdict"]["asked"]["shown"] == (code == 0)


def test_by_and_alpha_are_heard(compare, sides):
    assert compare(*sides, "--by", "0.01")[0] == 1
    assert compare(*sides, "--alpha", "0.001")[0] == 1
    code, out, _ = compare(*sides, "--by", "0")
    assert code == 0 and "more than 0 nats? better" in out and "better at all" not in out


@pytest.mark.parametrize(
    "baseline, candidate, reason",
    [
        ([3.5, 3.5], [3.4, 3.4, 3.4], "no score differs within a group: give every run another SE"),
        ([3.5], [3.4, 3.41], "the baseline has 1 run with a score"),
        ([3.5, 3.51], [], "the candidate has 0 runs with a score"),
    ],
)
def test_what_cannot_be_tested(tmp_path, compare, baseline, candidate, reason):
    names = make_group(tmp_path, "new", candidate) or [make_log(tmp_path, "empty", "")]
    sides = ["--baseline", *make_group(tmp_path, "base", baseline), "--candidate", *names]
    code, out, _ = compare(*sides)
    assert code == 2 and f"not tested: {reason}" in out
    report = json.loads(compare(*sides, "--json")[1])
    assert report["verdict"] is None and not report["tested"] and reason in report["reason"]


def test_a_group_without_spread_against_one_with(tmp_path, compare):
    sides = ["--baseline", *make_group(tmp_path, "base", [3.5] * 3)]
    code, out, _ = compare(*sides, "--candidate", *make_group(tmp_path, "new", CANDIDATE))
    assert code in (0, 1) and "baseline: all runs have the same score: are they copies?" in out


# ---- the report ----------------------------------------------------------------------------------
def test_the_table(tmp_path, compare, sides):
    rows = [re.split(r"  +", line.strip()) for line in compare(*sides)[1].splitlines()]
    assert rows[0][:3] == ["seed", "steps", "ms/step"]
    numbers = ["344.44", "3.514100", "1.757050", "485", "984,749", "1,072,710"]
    assert ["base-1", "1", "18", *numbers] in rows
    mean = ["n = 4, mean", "344.44", "3.511150", "1.755575", "984,749", "1,072,710"]
    assert mean in rows  # (3.5100 + 3.5141 + 3.5082 + 3.5123) / 4
    assert ["0.0118 nats (0.0069 to 0.0166)"] in rows
    spread = f"{stats.tstd(CANDIDATE):.6f}"
    assert spread in [row[2] for row in rows if row[0] == "standard deviation"]


@pytest.mark.parametrize(
    "old, new, named",
    [
        ("dataset:demo_sp1024", "dataset:other", "dataset: demo_sp1024"),
        ("train_shards:3", "train_shards:4", "train_shards: 3"),
        ("demo.model", "big.model", "tokenizer: demo.model"),
        ("model_params:592136", "model_params:7", "model_params: 592136"),
        ("tokens:52608", "tokens:100", "val_tokens: 52608"),
        ("tokens:52608", "tokens:52608 partial:1/2", "partial_validation: no"),
        ("iterations:20", "iterations:30", "iterations: 20"),
        ("_exact val", "_sliding_exact val", "score_line: final_int8_zlib_roundtrip_exact"),
    ],
)
def test_runs_that_should_not_be_compared(tmp_path, compare, sides, old, new, named):
    """Among the candidate's runs, then between the groups; the same runs alone get no warning."""
    assert "warning" not in compare(*sides)[1]
    odd = make_group(tmp_path, "odd", [3.49, 3.491], **{old: new})
    out = compare(*sides, *odd)[1]
    assert "warning: candidate: the runs differ in " + named in out and "odd-1)" in out
    out = compare(*sides[:6], *odd)[1]
    assert "the runs differ" not in out and f"warning: the groups differ in {named}" in out


def test_copies_are_noticed(tmp_path, compare, sides):
    assert "warning: base-1 stands on both sides" in compare(*sides, sides[2])[1]
    out = compare("--baseline", sides[1], *sides[1:3])[1]
    assert "warning: baseline: base-0.txt is named 2 times" in out and "n = 2, mean" in out
    twin = make_log(tmp_path, "twin", LOG.replace("seed:42", "seed:2"))
    assert "warning: candidate: seed 2 was used by new-2, twin" in compare(*sides, twin)[1]


def test_files_of_one_name_are_told_apart(tmp_path, compare):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        make_log(tmp_path / folder, "log")
    out = compare("--baseline", str(tmp_path / "*" / "log.txt"))[1]
    assert str(tmp_path / "one" / "log.txt") in out and str(tmp_path / "two" / "log.txt") in out


def test_json_is_one_object(tmp_path, compare, sides):
    bad = make_log(tmp_path, "bad", "")
    code, out, err = compare(*sides, bad, "--json", "--picture", tmp_path / "a.png")
    report = json.loads(out)
    assert code == 0 and err == "" and report["tested"] and report["reason"] is None
    assert set(report) == {"groups", "left_out", "warnings", "tested", "reason", "verdict"}
    assert [group["n"] for group in report["groups"].values()] == [4, 3]
    assert report["groups"]["candidate"]["runs"][2]["val_loss"] == 3.5017
    assert report["groups"]["baseline"]["mean"]["val_bpb"] == pytest.approx(1.755575)
    assert report["left_out"][0]["file"] == str(bad) and report["left_out"][0]["reason"]
    assert report["verdict"]["words"].startswith("better, by 0.0118 nats")


# ---- files ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("x, label", [("steps", "optimizer step"), ("seconds", "training time")])
def test_the_picture(tmp_path, compare, sides, x, label):
    picture = tmp_path / "runs.svg"
    assert compare(*sides, "--picture", picture, "--x", x)[0] == 0
    assert xml.etree.ElementTree.parse(picture).getroot().tag.endswith("svg")
    text = picture.read_text()
    for words in (label, "loss (nats per token)", "baseline, validation", "candidate, training"):
        assert words in text
    assert [tick in text for tick in (">17.5<", ">6<")] == [x == "steps", x == "seconds"]
    assert "n = 4" in text and ">mean 3.4994<" in text and len(text) < 60_000
    compare(*sides, "--picture", tmp_path / "again.svg", "--x", x)
    assert (tmp_path / "again.svg").read_text() == text


def test_the_picture_of_one_group_in_png(tmp_path, compare, sides):
    picture = tmp_path / "runs.PNG"
    code, out, _ = compare(*sides[:5], "--picture", picture)
    assert code == 0 and "tested" not in out and "better" not in out
    assert picture.read_bytes().startswith(b"\x89PNG\r\n") and picture.stat().st_size > 10_000


def test_runs_that_end_at_different_steps_share_their_last_point():
    point = compare_runs.Point
    first = {s: point(s, 2.0 * s, 9.0 - s, None) for s in (0, 5, 7)}
    second = {s: point(s, 4.0 * s, 8.0 - s, None) for s in (0, 3, 5, 6)}
    rows = compare_runs.align([first, second])
    assert [[p.step for p in row] for row in rows] == [[0, 0], [5, 5], [7, 6]]
    assert compare_runs.align([first, {}]) == [] == compare_runs.align([])
    long = {s: point(s, s, 1.0, None) for s in range(10_000)}
    thinned = compare_runs.align([long, long])
    assert len(thinned) <= compare_runs.DRAWN_POINTS and thinned[-1][0].step == 9999


def test_event_files(tmp_path, compare, sides):
    """Written again, they replace the old ones. A run without a score has its curves, too."""
    folder = tmp_path / "curves"
    cut = make_log(tmp_path, "cut", SOURCE + NEW_HEAD + START + STEPS)
    for _ in range(2):
        assert compare(*sides, cut, "--tensorboard", folder)[0] == 0
    runs = sorted(str(path.parent.relative_to(folder)) for path in folder.rglob("events*"))
    bases = [f"baseline/base-{i}" for i in range(4)]
    assert runs == [*bases, "candidate/cut", *(f"candidate/new-{i}" for i in range(3))]
    events = EventAccumulator(str(folder / "candidate" / "new-1")).Reload()
    train = [(e.step, round(e.value, 4), e.wall_time) for e in events.Scalars("train_loss")]
    assert train == [(1, 6.9301, 0.293), (10, 5.639, 3.24)]
    assert [e.wall_time for e in events.Scalars("val_loss")] == [0.0, 3.241, 6.2]
    last = events.Scalars("val_bpb")[-1]
    assert (last.step, round(last.value, 4), last.wall_time) == (18, 2.1251, 6.2)


# ---- the command line ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "more, named",
    [
        (["--by", "x"], "--by"),
        (["--by", "-1"], "--by -1 must be 0 or more"),
        (["--alpha", "0"], "--alpha 0 must lie between"),
        (["--picture", "a.pdf"], "--picture a.pdf must end in .svg or .png"),
        (["--picture", "nowhere/a.svg"], "there is no folder nowhere"),
        (["--candidate", "no-such-*.txt"], "--candidate: no file matches no-such-*.txt"),
        (["--candidate", "tests"], "tests cannot be read (Is a directory)"),
        (["--unknown"], "--unknown"),
        (["--tensorboard", __file__], "--tensorboard"),
    ],
)
def test_wrong_arguments_get_one_line(compare, sides, monkeypatch, more, named):
    monkeypatch.chdir(ROOT)
    code, _, err = compare(*sides, *more)
    assert code == 2 and named in err and err.count("\n") == 1


def test_exit_codes_of_the_process(tmp_path, sides):
    """Also: patterns in quotes, and packages that are only needed for what they draw or write."""
    for package in ("matplotlib", "tensorboard"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('broken')")
    environ = process_environ({"PYTHONPATH": str(tmp_path)}, 1)
    groups = ["--baseline", f"{tmp_path}/base-*.txt", "--candidate", f"{tmp_path}/new-*.txt"]
    needs = "this needs a package: pip install "
    picture = f"compare_runs.py: {needs}matplotlib\n"
    for more, code, err in (
        ([], 0, ""),
        (["--by", "0.01"], 1, ""),
        (["--candidate", f"{tmp_path}/none-*"], 2, "no file matches"),
        (["--picture", f"{tmp_path}/a.svg"], 2, picture),
    ):
        result = subprocess.run(
            [sys.executable, str(TOOL), *groups, *more], env=environ, capture_output=True, text=True
        )
        assert result.returncode == code and err in result.stderr, result.stderr
        assert bool(err) == bool(result.stderr)


def test_without_tensorboard_one_line_says_what_to_install(tmp_path, compare, sides, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    code, _, err = compare(*sides, "--tensorboard", tmp_path / "curves")
    assert code == 2 and err.endswith("this needs a package: pip install torch tensorboard\n")


def test_functions_stay_small():
    for node in ast.walk(ast.parse(TOOL.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 50, node.name
            assert len(node.args.args) <= 6 and node.returns is not None, node.name
