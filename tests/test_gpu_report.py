"""gpu_report.py: each part has a row, also one that fails."""

import re
import subprocess
import sys
from pathlib import Path

import gpu_report
from runs import ROOT, process_environ

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


def test_all_parts_on_a_cpu(tmp_path, knobs):
    command = [sys.executable, ROOT / "tests/tools/gpu_report.py", "--tiny"]
    environ = process_environ({**knobs, "MAX_VAL_TOKENS": "64"})
    result = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    report = read_report(tmp_path)
    assert result.returncode == 0, report
    times = r"trainer +\d.*; plain +\d.*; ratio +\d+\.\d\dx"
    score = r"final_int8_zlib_roundtrip_exact val_loss:\d.*"
    patterns = [
        *3 * [rf"cpu torch\.float32 slots:8 compile:False FLASH_ATTENTION; {times}"],
        r"quantize_state_dict_int8 .* s; serialize .* s; compress .* s",
        *2 * [score],
        r"5 steps, largest difference 0\.0000 nats",
        r"\d+ skipped, \d+ deselected in .*",
    ]
    for text, pattern in zip(report.values(), patterns, strict=True):
        assert re.fullmatch(pattern, text)
