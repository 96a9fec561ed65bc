"""The status line that a run rewrites on a terminal, and the end of that terminal."""

import os
import pty
import re
import subprocess
import sys
import time

import pytest
from conftest import SCRIPT, process_environ, run_script

LAST = "final_int8_zlib_roundtrip_exact "
STATUS = r"\x1b\[K([^\r\n]+)\r(?!\n)"  # clear the line, write, go back to its first column


def start_on_a_terminal(folder, environ) -> tuple[subprocess.Popen, int]:
    """The script, and our end of the terminal that it writes to."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT)],
        cwd=folder,
        env=process_environ(environ, 1),
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(theirs)
    return process, ours


def on_a_terminal(folder, environ) -> tuple[str, float]:
    """What the script sends to its terminal, and the seconds between the first and last of it."""
    process, ours = start_on_a_terminal(folder, environ)
    parts, times = [], []
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # so Linux says that the other end is closed
            break
        if not part:
            break
        parts.append(part)
        times.append(time.monotonic())
    os.close(ours)
    errors = process.communicate(timeout=60)[1]
    assert (process.returncode, errors) == (0, "")
    return b"".join(parts).decode(), times[-1] - times[0]


@pytest.fixture(scope="module")
def shown(tmp_path_factory, knobs):
    """Folder, terminal and seconds of a run long enough for each status to show."""
    folder = tmp_path_factory.mktemp("shown")
    environ = {
        **knobs,
        "WARMUP_STEPS": "30",
        "ITERATIONS": "100",
        "TRAIN_LOG_EVERY": "60",
        "VAL_LOSS_EVERY": "50",
        "TRAIN_SEQ_LEN": "8",  # so that a validation takes longer
        "VAL_BATCH_SIZE": "64",
    }
    return folder, *on_a_terminal(folder, environ)


def test_the_status_says_step_last_logged_loss_and_times(shown):
    """Between two lines of the log it tells what the next one would, but for the loss."""
    _, terminal, _ = shown
    logged = "the first line"
    steps = 0
    for text in re.findall(r"[^\r\n]+", terminal.replace("\x1b[K", "")):
        match = re.fullmatch(r"step:(\d+)/100 train_loss:(\S+) (.*)", text)
        if match is None:
            continue
        if int(match[1]) <= 10 or int(match[1]) == 60:
            logged = match[2]
        steps += int(match[1]) > 10
        assert match[2] == logged
        assert re.fullmatch(r"train_time:\d+ms step_avg:\d+\.\d\dms", match[3])
    assert steps > 2


def test_the_status_names_the_phase(shown):
    _, terminal, _ = shown
    texts = re.findall(STATUS, terminal)
    phases = {re.sub(r"[\d.]+", "N", text) for text in texts}
    assert phases == {
        "warmup_step:N/N",
        "validation: N%",
        "step:N/N train_loss:N train_time:Nms step_avg:Nms",
    }
    warm = [text for text in texts if text.startswith("warmup_step:")]
    assert all(re.fullmatch(r"warmup_step:(\d|[12]\d)/30", text) for text in warm)
    shares = [int(text[12:-1]) for text in texts if text.startswith("validation: ")]
    assert all(0 <= share < 100 for share in shares)


def test_the_status_is_rewritten_at_most_four_times_a_second(shown):
    _, terminal, seconds = shown
    assert 3 < len(re.findall(STATUS, terminal)) <= 4 * seconds + 1


def test_no_status_stays_between_the_lines(shown):
    """What remains on the terminal is the log, to the letter."""
    folder, terminal, _ = shown
    assert not re.search(STATUS + r"(?!\x1b\[K)", terminal)  # what comes next wipes it off
    rest = re.sub(STATUS, "", terminal)
    assert rest.startswith("logs/test.txt")  # nothing is cleared where nothing stood
    lines = [line.removeprefix("\x1b[K") for line in rest.splitlines()]
    assert "\x1b" not in "".join(lines)
    log = (folder / "logs" / "test.txt").read_text()
    assert log.endswith("=\n" + "\n".join(lines) + "\n")
    assert terminal.endswith("\r\n") and lines[-1].startswith(LAST)


def test_a_terminal_that_goes_away_ends_no_run(tmp_path, knobs):
    """Nor does one that cannot show what a line holds. Where no loss is logged, none is shown."""
    odd = {"PYTHONIOENCODING": "ascii", "OUTPUT_DIR": "na\u00efve \u2192", "TRAIN_LOG_EVERY": "0"}
    odd |= {"ITERATIONS": "100", "VAL_LOSS_EVERY": "0"}
    process, ours = start_on_a_terminal(tmp_path, {**knobs, **odd})
    seen = ""
    while not re.search(r"\x1b\[Kstep:\d+/100 train_time:\d+ms step_avg:\d+\.\d\dms\r", seen):
        assert "train_loss" not in seen
        seen += os.read(ours, 1000).decode()
    os.close(ours)
    errors = process.communicate(timeout=60)[1]
    assert (process.returncode, errors) == (0, "")
    assert seen.startswith("na\\xefve \\u2192/logs/test.txt\r\n")
    folder = tmp_path / "na\u00efve \u2192"
    assert (folder / "final_result.json").exists()
    lines = (folder / "logs" / "test.txt").read_text().splitlines()
    assert lines[-1].startswith(LAST) and "na\u00efve \u2192/logs/test.txt" in lines


def test_a_pipe_gets_lines_and_nothing_else(tmp_path, knobs):
    result = run_script(tmp_path, {**knobs, "ITERATIONS": "12", "TRAIN_LOG_EVERY": "0"})
    assert result.returncode == 0, result.stderr
    log = (tmp_path / "logs" / "test.txt").read_text()
    for text in (result.stdout, log.removeprefix(SCRIPT.read_text())):
        assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)
        assert "validation: " not in text and "warmup_step:0" not in text
        assert "train_loss:" not in text
