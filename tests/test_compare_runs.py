"""compare_runs.py: reading logs, verdicts, warnings and pictures."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import compare_runs
import pytest
from logs import HEADER, read_run, read_script
from runs import ROOT, scores

# A script that has lines like those of a log.
HEAD = f"""\
step:7/9 val_loss:0.1111 val_bpb:0.1111 train_time:7ms step_avg:1.00ms
final_int8_zlib_roundtrip_exact val_loss:0.11111111 val_bpb:0.11111111
{"=" * 100}
Running Python 3
"""
START = """\
logs/a.txt
val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path=./data/tokenizers/a.model
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


def write_sides(folder, baseline=BASELINE, candidate=CANDIDATE, first=0) -> list:
    """Write logs with these scores and return the tool's arguments. Seeds are 0, 1, 2, ...; those
    of the candidate begin at `first`."""
    arguments = []
    for side, losses, start in (("baseline", baseline, 0), ("candidate", candidate, first)):
        arguments.append(f"--{side}")
        for seed, loss in enumerate(losses, start):
            text = LOG.replace("seed:42", f"seed:{seed}").replace("3.52821744", f"{loss:.8f}")
            text = text.replace("3.5282 ", f"{loss:.4f} ")
            arguments.append(folder / f"{side[:4]}-{seed}.txt")
            arguments[-1].write_text(text.replace("1.98197144", f"{loss / 2:.8f}"))
    return arguments


def compare(capsys, *arguments) -> tuple[int, str]:
    """Run the tool. Returns its exit code and output."""
    with pytest.raises(SystemExit) as ended:
        compare_runs.main(list(map(str, arguments)))
    return ended.value.code, "".join(capsys.readouterr())


def test_the_last_start_in_a_file_counts(tmp_path):
    """The text is a log file, a run's printed output, or the reference's log, which has no path."""
    first = LOG.replace("step:18", "step:17")
    for text in (LOG[:-1], first + START + END, HEAD + (START + END)[11:]):
        (tmp_path / "log").write_text(text)
        run = read_run(tmp_path / "log")
        figures = [42, 18, 344.44, 3.52821744, 1.98197144, 485, 984749, 1072710]
        assert not run.unfinished and [run.figures[f] for f in compare_runs.COLUMNS] == figures
        assert run.train == {1: 6.9301, 10: 5.639} and run.val == {0: 6.9316, 18: 3.7829}


# Ends of published logs, the score that counts and its stride. L: val_loss, B: val_bpb.
ENDS = [
    ("a L:2.0 B:1.5\nfinal_ttt_lora L:2.0264 B:1.2046 eval_time:1ms", "1.2046", None),
    ("a_exact L:2.03 B:1.21\nfinal_eval stride:64 L:1.9 B:1.17", "1.17", "64"),
    ("a L:1.9809 B:1.1777 stride:64\na_exact L:1.98086839 B:1.17770881", "1.17770881", "64"),
    ("a L:1.9809 B:1.1777 stride:64\nttt L:1.98076839 B:1.17760881", "1.17760881", None),
    ("final_sliding L:2.9988 B:1.1679 (stride=16, T=0.90) eval_time:4ms", "1.1679", "16"),
    ("quantized L:2.3 B:1.4 eval_time:5ms\nDIAGNOSTIC post_ema L:1.9 B:1.1", "1.4", None),
    ("a L:2.3 B:1.4\npre-quantization post-ema L:2.2 B:1.3", "1.4", None),
    ("a L:2.3 B:1.4\nttt_sliding:done L=1.900868 B=1.130330 elapsed=4.8s", "1.130330", None),
    ("1776144156.999 ttt L:2.7 B:1.0832\n1776144157.001 49/99 L: 2.6 B: 1.07", "1.0832", None),
    ("final_exact L:2.3 B:1.4\nfinal_exact sliding L:2.0 sliding B:1.2081", "1.2081", None),
    (
        "score L:2.0 B:1.0 eval_time:9ms\nscore_exact L:2.00000000 B:1.00000000",
        "1.00000000",
        "none",
    ),
    ('{"L": 2.25, "B": 1.25}', "1.25", None),
]


@pytest.mark.parametrize("lines, bpb, stride", ENDS)
def test_the_last_score_counts(tmp_path, lines, bpb, stride):
    """Without a stride, this project's windows are side by side; those of others are unknown."""
    lines = lines.replace("L", "val_loss").replace("B", "val_bpb")
    (tmp_path / "log").write_text(f"{START}{lines}\ntotal_eval_time:455.1s\n")
    run = read_run(tmp_path / "log")
    assert (run.facts["val_bpb"], run.facts.get("stride")) == (bpb, stride) and not run.unfinished
    digits = len(bpb) - 2
    assert run.rounding("val_bpb") == pytest.approx(0.5 / 10**digits)


def test_a_log_of_the_challenge(tmp_path, capsys):
    """It may list the seed before the source, and its scores have names of their own."""
    size = "Total submission size quantized+pergroup: 15907550 bytes\n"
    score = "quantized_ttt_phased val_loss:2.31944212 val_bpb:1.05989454 eval_time:455126ms\n"
    (tmp_path / "log").write_text(f"Knobs:\n  seed: 7\n{LOG.replace('seed:42', '')}{size}{score}")
    (tmp_path / "ours").write_text(LOG)
    expected = {"seed": 7, "bytes_total": 15907550, "val_loss": 2.31944212, "val_bpb": 1.05989454}
    assert read_run(tmp_path / "log").figures.items() >= expected.items()
    code, out = compare(capsys, tmp_path / "log", tmp_path / "ours")
    assert code == 0 and f"scores: quantized_ttt_phased in {tmp_path}/log" in out
    assert f"scores: final_int8_zlib_roundtrip_exact in {tmp_path}/ours" in out


def test_a_resumed_run_is_one_run(tmp_path, capsys):
    """All starts have the script in the file. The last value of a step counts."""
    script = "x = 1\n"
    header = f"\n{'=' * 100}\nRunning Python 3\nscript_bytes:{len(script)}\n{'=' * 100}\n"
    resumed = START.replace("step:0/20", "skip").replace("step:1/20", "skip")
    resumed = resumed.replace("seed:42", "seed:42\nresume:checkpoints/a.pt step:8 changed:nothing")
    starts = START, resumed.replace("5.6390", "5.7") + END
    log = tmp_path / "a.txt"
    log.write_text("".join(script + header + start for start in starts))
    run = read_run(log)
    assert run.train == {1: 6.9301, 10: 5.7} and run.val == {0: 6.9316, 18: 3.7829}
    assert run.figures["val_bpb"] == 1.98197144 and "before it" not in compare(capsys, log)[1]
    # Without RESUME, the run began anew.
    anew = starts[1].replace("resume:", "")
    log.write_text("".join(script + header + start for start in (START, START, anew)))
    assert read_run(log).train == {10: 5.7} and read_run(log).val == {18: 3.7829}
    assert "the last start counts, not the 2 before it" in compare(capsys, log)[1]


@pytest.mark.parametrize(
    "prefix", ["[default0]:", "[rank0]: ", "0: ", "2026-11-28 19:56:36 ", "\x1b[K"]
)
def test_what_stands_before_each_line_does_not_count(tmp_path, prefix):
    """torchrun --tee and srun --label name the rank; a terminal clears the line."""
    (tmp_path / "a.txt").write_text(
        "".join(prefix + line for line in (START + END).splitlines(True))
    )
    run = read_run(tmp_path / "a.txt")
    assert run.facts["seed"] == "42" and run.figures["val_loss"] == 3.52821744
    assert run.train == {1: 6.9301, 10: 5.639} and run.val == {0: 6.9316, 18: 3.7829}


def test_lines_of_an_edit_do_not_begin_a_run(tmp_path):
    lines = f"{'=' * 100}\nlosses written to out/logs/losses.txt\nlogs/a.txt\n"
    (tmp_path / "a.txt").write_text(LOG.replace("peak", f"{lines}peak"))
    run = read_run(tmp_path / "a.txt")
    assert run.train == {1: 6.9301, 10: 5.639} and run.facts["seed"] == "42" and not run.earlier


def test_a_score_in_the_log_of_a_run_does_not_hide_it(tmp_path):
    """Older versions of score.py appended to the log, if RUN_ID was that of the run."""
    scored = START.partition("step:")[0] + "score:final_model.pt\n" + END.replace("3.52", "3.42")
    (tmp_path / "a.txt").write_text(LOG + HEAD + scored.replace("step:", "skip:"))
    run = read_run(tmp_path / "a.txt")
    assert run.figures["val_loss"] == 3.52821744 and run.figures["steps"] == 18


def test_the_script_of_the_last_start_comes_back_byte_for_byte(tmp_path):
    """A script may have the lines that follow it in a log, lines of a log, and any line ends. The
    log says its size, so any line may be its first. Line ends of the log may have changed."""
    end = f"Running PyTorch 2\n{'=' * 100}\n"
    header = f"\n{'=' * 100}\nRunning Python 3.1 (a) [b]\nscript_bytes:{{}}\n{end}"
    script = f'x = 2\n"""Doc.{header.format(7)}{START}"""\nclass InputError(ValueError): ...'
    log = tmp_path / "log.txt"
    earlier = f"y = 1\n{header.format(6)}logs/a.txt\n# a line of text\nwarmup_step:1/3\n"
    for text in (script, script + "\n\n", script.replace("\n", "\r\n"), f"\ufeff{script}"):
        for first in ("", earlier):
            data = text.encode()
            log.write_bytes(first.encode() + data + (header.format(len(data)) + START).encode())
            assert read_script(log) == data, (text, first)
    log.write_text((earlier + script + header.format(len(script)) + START).replace("\n", "\r\n"))
    assert read_script(log) == script.encode()
    log.write_text(START)
    with pytest.raises(ValueError, match="has no script"):
        read_script(log)


def test_a_log_without_the_size_of_its_script(tmp_path):
    """The script of the first start begins the file. A later one is known if it is the same."""
    header = f"\n{'=' * 100}\nRunning Python 3\n{'=' * 100}\n"
    starts = "x: int = 1\n" + header + START, "x: int = 1\n" + header + START + END
    log = tmp_path / "log.txt"
    log.write_text(starts[0] + starts[1])
    assert read_script(log) == b"x: int = 1\n" and read_run(log).earlier == 1
    log.write_text(starts[0] + starts[1].replace("1", "2", 1))
    with pytest.raises(ValueError, match="syntax error: .*name a script"):
        read_script(log)


def test_runs_without_the_final_line_are_named(tmp_path, capsys):
    sides = write_sides(tmp_path, first=9)
    path = tmp_path / "bad.txt"
    stopped = f"{START}stopped: signal:15 step:1/20: rerun with RUN_ID={99 * 'x'}y\n"
    ends = ("", ""), (LOG[:-2], "1.9819714"), (LOG + HEAD + START, "323.98ms"), (stopped, "xy")
    for text, end in ends:
        path.write_text(text)
        code, out = compare(capsys, *sides, path)
        assert code == 0 and "n = 3, mean" in out
        assert re.search(f"no final line: {re.escape(str(path))}: .*{end}'", out)


def test_a_line_without_its_numbers_is_no_line(tmp_path):
    """Two processes write into one log. nan is a number."""
    good = "step:10/20 train_loss:5.6390 train_time:3240ms step_avg:323.98ms\n"
    bad = f"step:10/20 train_loss:5.6 {good}" + good.replace("90", "90,") + good.replace(".98", "x")
    bad += "step:19/20 val_loss:3.7 val_bpb:2.1.2 train_time:9ms step_avg:1.00ms\n"
    (tmp_path / "a.txt").write_text(LOG.replace(good, bad + good.replace("5.6390", "nan")))
    run = read_run(tmp_path / "a.txt")
    assert str(run.train) == "{1: 6.9301, 10: nan}" and run.val == {0: 6.9316, 18: 3.7829}


def test_runs_of_one_seed_are_judged_as_in_an_experiment(tmp_path, capsys):
    """By hand, the differences are 0.010, 0.012, 0.014, their standard error 0.0011547, the
    quantile 20.2. A seed that only the larger side has does not count."""
    sides = write_sides(tmp_path, [3.50, 3.54, 3.62], [3.490, 3.528, 3.606, 3.3])
    code, out = compare(capsys, *sides[:5], *reversed(sides[5:]))
    rule = "\nrule: evidence of pairs, level 0.01; baseline minus candidate:\n"
    assert code == 1 and f"{rule}3 pairs of one seed: 0.01200 nats (-0.011" in out
    assert "to 0.03535), not yet\n  better by more than 0.005? evidence " in out
    code, out = compare(capsys, *sides, "--by=0.001", "--alpha=0.1")
    assert code == 0 and re.search(r"\), better\n .* 0\.001\? evidence \S+; 10 or more", out)


def test_without_pairs_the_verdict_is_that_of_welchs_test(tmp_path, capsys):
    """By hand, the standard error is 0.00185345, and t at 0.005 is 3.65984 with df = 4.74476. The
    name of the score tells scripts apart."""
    shown = "0.00694 to 0.01663\n  better by more than 0.005? better (p = 0.008)\n"
    for baseline, candidate, more, code, words in [
        (BASELINE, CANDIDATE, "", 0, f": 0.01178 nats, 95 % confidence interval {shown}"),
        (BASELINE, CANDIDATE, "--alpha=0.005", 1, "not better (p = 0.008)"),
        (CANDIDATE, BASELINE, "--by=0", 1, "? worse (p = 1)"),
        (CANDIDATE, BASELINE, "--by=-0.03", 0, "? better (p = "),
        (CANDIDATE, BASELINE, "--by=-0.01", 1, "? not better (p = "),
        (BASELINE, [3.4], "", 2, "not tested: candidate: 1 finished"),
    ]:
        sides = write_sides(tmp_path, baseline, candidate, first=3)
        ended, out = compare(capsys, *sides, *more.split())
        assert ended == code and words in out and "of pairs" not in out
    for i, old, new in [
        (1, "seed:0", "seed:7"),  # a seed is missing
        (4, "seed:3", "seed:2"),  # a seed is repeated
        (8, "int8_zlib", "legal_ttt"),
    ]:
        sides = write_sides(tmp_path)
        sides[i].write_text(sides[i].read_text().replace(old, new).replace("5.63", "5.64"))
        out = compare(capsys, *sides)[1]
        assert "\nrule: Welch's t-test, level 0.01; " in out and "p = 0.008" in out


def test_the_table(tmp_path, capsys):
    out = compare(capsys, *write_sides(tmp_path)[:5])[1]
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert f"{tmp_path}/base-1.txt 1 18 344.44 3.514100 1.757050 485 984,749 1,072,710" in rows
    assert "n = 4, mean 344.44 3.511150 1.755575 984,749 1,072,710" in rows
    assert "standard deviation 0.00 0.002585 0.001293 0 0" in rows


def test_what_makes_a_comparison_worthless(tmp_path, capsys):
    sides, path = write_sides(tmp_path), tmp_path / "odd.txt"
    text = LOG.replace("tokens:52608", "tokens:100").replace("5.6", "5.7")
    path.write_text(text.replace("seed:42", "seed:2"))
    out = compare(capsys, *sides, path)[1]
    assert "warning: the runs differ in validation: tokens:100, tokens:52608" in out
    assert "warning: candidate: runs have the same seed" in out
    assert "warning" not in compare(capsys, *sides[1:3], sides[6])[1]  # any runs
    path.write_text(LOG.replace("692ms", "692ms stride:64"))
    code, out = compare(capsys, *sides, path)
    assert code == 2 and "not tested: SCORES OF DIFFERENT STRIDES (64, none)" in out


def test_a_model_counts_once(tmp_path, capsys):
    """A copied log has the same training losses and seed, a score (score.py) the same seed."""
    sides = write_sides(tmp_path)
    path, twin = tmp_path / "again.txt", tmp_path / "cand-1.txt"
    score = LOG.replace("step:", "skip:").replace("seed:42", "seed:1")
    for text in (twin.read_text(), score):
        path.write_text(text)
        code, out = compare(capsys, *sides, path)
        words = f"not tested: candidate: {twin} and {path} are one run, or scores of one model"
        assert code == 2 and words in out
        assert "n = 4, mean" in out and out.count("mean") == 1  # for the baseline alone
    path.write_text(score.replace("seed:1", "seed:7"))
    assert "warning" not in compare(capsys, *sides, path)[1]
    # Other people's scores may have neither seeds nor training losses.
    for number, side in enumerate(sides):
        loss = 3.6 - 0.1 * (number > 5) + number**2 / 9e4
        if side not in ("--baseline", "--candidate"):
            side.write_text(f"final val_loss:{loss:.8f} val_bpb:{loss / 2:.8f}\n")
    assert "? better" in compare(capsys, *sides)[1]


def test_one_run_on_both_sides_or_twice_is_named(tmp_path, capsys):
    """Under another name, or with another line at its end, it is the same run."""
    sides = write_sides(tmp_path, first=9)
    other = tmp_path / "other.txt"
    for text in (sides[1].read_text(), f"{sides[1].read_text()}more\n"):
        other.write_text(text)
        code, out = compare(capsys, *sides, other)
        words = f"not tested: {sides[1]} and {other} are one run, or the change does nothing"
        assert code == 2 and words in out
    code, out = compare(capsys, sides[1], sides[2], sides[1])
    assert code == 0 and f"warning: {sides[1]} and {sides[1]} are one log" in out


def test_a_side_with_a_run_that_diverged_is_not_judged(tmp_path, capsys):
    """Nor is one whose runs all end with the same loss: its script does not use the seed."""
    sides = write_sides(tmp_path, BASELINE, [*CANDIDATE, math.nan])
    code, out = compare(capsys, *sides)
    words = f"not tested: candidate: {sides[-1]} diverged: its score is not finite: 'final_"
    assert code == 2 and words in out
    code, out = compare(capsys, *write_sides(tmp_path, BASELINE, [3.4, 3.4], first=7))
    assert code == 2 and "candidate: all runs end with the same loss: let the script use" in out


def test_scores_of_other_texts_are_refused(tmp_path, capsys):
    """The folders of both datasets have one name. Two tokenizers have two checksums."""
    sides = write_sides(tmp_path)
    paths = [path for path in sides if path not in ("--baseline", "--candidate")]
    assert "no checksum, so the validation text was not checked: " in compare(capsys, *sides)[1]
    for tokenizer, last, code in ((7, 8, 2), (9, 6, 0), (7, 7, 0)):
        for path in paths:
            is_last = path == paths[-1]
            crc = f"val_tokens:{last if is_last else 7} tokenizer:{tokenizer * is_last or 7}"
            text = re.sub("(input_crc32.*\n)?seed:", f"input_crc32 {crc}\nseed:", path.read_text())
            path.write_text(text)
        ended, out = compare(capsys, *sides, "--by=-1")
        refused = "not tested: SCORES OF DIFFERENT VALIDATION TEXTS (checksums 7, 8)" in out
        assert ended == code and "not checked" not in out and refused == (code == 2)
    paths[-1].write_text(paths[-1].read_text().replace("692ms", "692ms tokens:64 of 128"))
    code, out = compare(capsys, *sides, "--by=-1")
    assert code == 2 and "not tested: SCORES OF DIFFERENT PARTS OF THE TEXT (64 of 128, all)" in out


@pytest.mark.parametrize("first", [0, 9])
def test_digits_that_a_log_lacks_make_nobody_better(tmp_path, capsys, first):
    """The same losses with four and with eight digits, of pairs and of other seeds. The candidate
    may be half a unit higher, and the baseline half a unit lower."""
    sides = write_sides(tmp_path, [3.51, 3.515, 3.512], [3.5, 3.5051, 3.502], first)
    near, far = (0.0045, 0.0044) if first else (0.00953, 0.00943)
    for is_short, by, code in ((False, near, 0), (True, near, 1), (True, far, 0)):
        for path in sides:
            if is_short and path not in ("--baseline", "--candidate"):
                digits = re.sub(r"(val_\w+:\d\.\d{4})\d{4}", r"\1", path.read_text())
                path.write_text(digits)
        ended, out = compare(capsys, *sides, f"--by={by}", "--alpha=0.03")
        assert ended == code, (is_short, by, out)
        assert ("few digits: a gain counts 0.0001 less" in out) == is_short


def test_two_tokenizers_are_compared_in_bits_per_byte(tmp_path, capsys):
    """The candidate has more nats per token, but fewer bits per byte."""
    sides = write_sides(tmp_path, [3.4, 3.5], [3.3, 3.2], first=2)
    for path in sides[4:]:
        text = path.read_text().replace("3.7829", "3.9")
        loss, bpb = scores(text.splitlines()[-1])
        text = text.replace(f"{loss:.8f}", f"{1.2 * loss:.8f}")
        text = text.replace("tokens:52608", "tokens:43840")
        path.write_text(text.replace("a.model", "b.model"))
    code, out = compare(capsys, *sides, "--alpha=0.1")
    assert code == 0 and re.search("differ: 0.1.* bits per byte, .*\n.*better \\(p", out)
    assert "nats" not in out and "warning" not in out
    other = sides[4].read_text().replace("tokens:43840", "tokens:42000")
    (tmp_path / "other.txt").write_text(other)
    out = compare(capsys, *sides, tmp_path / "other.txt")[1]
    assert "warning: the runs differ in validation text: 145,424 to 151,795 bytes" in out
    groups = [compare_runs.Group("a", [*map(read_run, sides[1:3] + sides[4:])])]
    lines = [line.get_ydata() for line in compare_runs.draw(groups).axes[0].lines]
    ends = [y[-1] for y in lines if len(y) > 0]  # training, validation, ...
    assert ends[1::2] == pytest.approx([1.89145] * 2 + [1.625] * 2)


def test_without_arguments_the_newest_log_is_drawn(tmp_path, capsys, monkeypatch):
    """The run may still be training, and its name may have letters that the terminal lacks. Logs of
    score.py, folders, dangling links and other texts are ignored; a script may have a line that
    looks like one of score.py's log."""
    sys.stdout.reconfigure(encoding="ascii")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    script = f"x = 0\nscore: int = 0{HEADER.decode()}3.1\n"
    new, scored = f"{script}{HEAD}{START}", f"{script}{LOG}score:x.pt\n"
    logs = ("n\xe9w", 2e9, new), ("old", 1e9, LOG), ("scored", 3e9, scored), ("no log", 4e9, "a\n")
    (tmp_path / "logs" / "latest.txt").symlink_to("gone.txt")
    (tmp_path / "logs" / "folder.txt").mkdir()
    for name, time, text in logs:
        (tmp_path / "logs" / f"{name}.txt").write_text(text)
        os.utime(tmp_path / "logs" / f"{name}.txt", (time, time))
    code, out = compare(capsys)
    assert code == 0 and "old" not in out and out.endswith("picture: logs/n\\xe9w.png\n")
    assert (tmp_path / "logs" / "n\xe9w.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_logs(tmp_path, capsys, monkeypatch):
    """In the order of seeds. matplotlib takes text between dollars for TeX, and a user's
    matplotlibrc may ask for TeX. The losses of a long run's first steps are above the picture."""
    monkeypatch.chdir(tmp_path)
    names = "$x^{_$.txt", "_b.txt", f"{99 * 'y'}.txt"
    for seed, name in zip((10, 9, 8), names, strict=True):
        text = LOG.replace("step:18/20", "step:300/300").replace("seed:42", f"seed:{seed}")
        Path(name).write_text(text.replace("3.52821744", f"3.5{seed:02}00000"))
    compare_runs.rcParams["text.usetex"] = True
    assert compare(capsys, *names, "--picture=a.svg")[0] == 0
    runs = [read_run(Path(name)) for name in names]
    figure = compare_runs.draw([compare_runs.Group("runs", runs)])
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    ends = "seed 8, val_bpb 1.9820", "seed 9, val_bpb 1.9820", "seed 10, val_bpb 1.9820"
    names = 60 * "y", "_b", "$x^{_$"
    assert shown == [f"{name}: {end}" for name, end in zip(names, ends, strict=True)]
    losses, finals = figure.axes
    assert losses.get_ylim()[1] < 6.9
    assert [[*line.get_ydata()] for line in finals.lines] == [[3.508], [3.509], [3.51]]


def test_the_picture_of_two_sides(tmp_path):
    """Lines join the pairs."""
    paths = [path for path in write_sides(tmp_path) if path not in ("--baseline", "--candidate")]
    runs = [*map(read_run, paths)]
    groups = [compare_runs.Group("baseline", runs[:4]), compare_runs.Group("candidate", runs[4:])]
    curves, finals = compare_runs.draw(groups).axes
    low, high = curves.get_ylim()
    assert low < 3.7829 and high > 6.9316
    pairs = [[*pair] for pair in zip(BASELINE, CANDIDATE, strict=False)]
    assert [[*line.get_ydata()] for line in finals.lines] == [BASELINE, CANDIDATE, *pairs]


def test_exit_codes_without_a_verdict(tmp_path, capsys, monkeypatch):
    """2 is an error. 3 means that there is nothing to draw, but the 1 of a verdict overrides it."""
    monkeypatch.chdir(tmp_path)
    sides = write_sides(tmp_path, first=9)
    log, link = sides[1], tmp_path / "link.png"
    link.symlink_to(sides[2])
    for arguments, words in [
        ([], "there is no log in logs/"),
        ([ROOT / "README.md"], "README.md is not the log of a run"),
        ([log, f"--picture={log}/a.png"], "name another file"),
        ([link, log, f"--picture={link}"], "link.png is an input, and would be overwritten"),
        ([log, "--alpha=5"], "--alpha: '5' is not a number > 0 and < 1"),
    ]:
        code, out = compare(capsys, *arguments)
        assert code == 2 and words in out, arguments
    for path in sides[1:5] + sides[6:]:
        path.write_text(path.read_text().replace("step:", "skip:"))
    for by, code in ("--by=0", 3), ("--by=1", 1):
        ended, out = compare(capsys, *sides, "--picture=b.svg", by)
        assert ended == code and "nothing to draw" in out


def test_neither_a_backend_nor_a_traceback(tmp_path):
    """A notebook's MPLBACKEND may be missing in this environment, and so may any package."""
    backend = "module://matplotlib_inline.backend_inline"
    environ = {"MPLBACKEND": backend, "PATH": os.environ["PATH"]}
    folder = Path(compare_runs.__file__).parent
    for tool, package, code, words in [
        ("compare_runs", "none", 0, ""),
        ("compare_runs", "matplotlib", 2, "pip install scipy matplotlib"),
        ("experiment", "scipy", 2, "pip install scipy"),
        ("sample", "torch", 2, "-r requirements.txt"),
    ]:
        program = f"import sys; sys.modules[{package!r}] = None; import {tool}"
        command = [sys.executable, "-c", program]
        result = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
        assert result.returncode == code and words in result.stderr
        assert "Traceback" not in result.stderr
