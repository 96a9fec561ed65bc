"""gpu_report.py: each part has a row, also one that fails."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gpu_report
import pytest
from runs import run_here

import train_gpt

ROW = re.compile(r"^\| (.+) \| (.+) \| \d+ \|$", re.M)


def read_report(folder: Path) -> dict[str, str]:
    return dict(ROW.findall((folder / "gpu_report.md").read_text()))


def test_after_a_part_that_fails_the_others_go_on(tmp_path, monkeypatch):
    program = "import os; print('not shown'); print(os.environ['SEED']); print(2)"
    parts = [
        ("fails", 60, ["-c", "print('begun'); raise ValueError('broken')"], "", 1),
        ("dies", 60, ["-c", "import os; os.kill(os.getpid(), 9)"], "", 1),
        ("hangs", 0, ["-c", "import time; time.sleep(60)"], "", 1),
        ("works", 60, ["-c", program], "SEED=7", 2),
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu_report.py"])
    monkeypatch.setattr(gpu_report, "PARTS", parts)
    assert gpu_report.main() == 1
    assert read_report(tmp_path) == {
        "fails": "FAILED: ValueError: broken",
        "dies": "FAILED: exit code -9",
        "hangs": "FAILED: it took too long",
        "works": "7; 2",
    }
    monkeypatch.setattr(gpu_report, "PARTS", parts[3:])
    assert gpu_report.main() == 0


@pytest.mark.baseline
def test_all_parts_on_a_cpu(tmp_path, knobs, monkeypatch):
    """Those with torch run in this process, since each new one starts for seconds."""

    def run(command: list[str | Path], env: dict[str, str], **options) -> object:
        _, program, *arguments = command
        if program == "-m":
            return subprocess.run(command, env=env, **options)
        part = SimpleNamespace(main=lambda: runpy.run_path(str(program), run_name="__main__"))
        result = run_here(tmp_path, {**knobs, **env}, part, arguments)
        result.check_returncode()
        return result

    monkeypatch.setattr(train_gpt, "attention_backends", train_gpt.attention_backends)
    monkeypatch.setattr(gpu_report, "run", run)
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--tiny"])
    for name, value in {**knobs, "MAX_VAL_TOKENS": "64", "BATCH_SLOTS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert gpu_report.main() == 0, read_report(tmp_path)
    times = r"trainer +\d.*; plain +\d.*; ratio +\d+\.\d\dx"
    score = r"final_int8_zlib_roundtrip_exact val_loss:\d.*"
    patterns = [
        *3 * [rf"cpu torch\.float32 slots:1 compile:False FLASH_ATTENTION; {times}"],
        r"quantize_state_dict_int8 .* s; serialize .* s; compress .* s",
        *2 * [score],
        r"5 steps, largest difference 0\.0000 nats",
        r"\d+ skipped in .*",
    ]
    for text, pattern in zip(read_report(tmp_path).values(), patterns, strict=True):
        assert re.fullmatch(pattern, text)
