"""gpu_report.py: each part gets a row, even if it fails."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import bench_step
import gpu_report
import pytest
import torch
from runs import run_here

import train_gpt


def read_report(folder: Path) -> dict[str, str]:
    report = (folder / "gpu_report.md").read_text()
    return dict(re.findall(r"^\| (.+) \| (.+) \| \d+ \|$", report, re.M))


def test_after_a_part_that_fails_the_others_go_on(tmp_path, monkeypatch, capsys):
    """A line before each part says that it begins."""
    program = "import os; print('not shown'); print(os.environ['SEED']); print(2)"
    parts = [
        ("fails", 60, ["-c", "print('begun'); raise ValueError('broken')"], "", 1),
        ("hangs", 0, ["-c", "import time; time.sleep(60)"], "", 1),
        ("works", 60, ["-c", program], "SEED=7", 2),
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--tiny"])
    monkeypatch.setattr(gpu_report, "PARTS", parts)
    assert gpu_report.main() == 1
    assert read_report(tmp_path) == {
        "fails": "FAILED: ValueError: broken",
        "hangs": "FAILED: it took too long",
        "works": "7<br>2",
    }
    begun = re.findall(r"^(\w+): at most \d+ s\n\1: ", capsys.readouterr().out, re.M)
    assert begun == ["fails", "hangs", "works"]


def test_no_gpu_and_no_timed_step_are_errors_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "DEVICE", torch.device("cpu"))
    result = run_here(tmp_path, {}, gpu_report)
    assert result.returncode == 2 and "no GPU here: --tiny" in result.stderr
    result = run_here(tmp_path, {}, bench_step, ["--rounds=0"])
    assert result.returncode == 2 and "'0' is not a whole number >= 1" in result.stderr
    assert not [*tmp_path.iterdir()]


@pytest.mark.baseline
def test_all_parts_on_a_cpu(tmp_path, knobs, monkeypatch):
    """Parts that use torch run in this process, since a new process takes seconds to start."""

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
    rows = read_report(tmp_path).values()
    product, copied, first, second, third, export, *demos, losses, tests = rows
    assert re.fullmatch(r"[\d.]+ TFLOP/s, 128 x 128 in bf16", product)
    assert re.fullmatch(r"[\d.]+ TB/s read and written, 16 MiB", copied)
    assert len(re.findall(r"\d ms +\d+ x `[^`]+`<br>", first)) == 10
    for times in (first, second, third):
        assert re.search(r"^cpu .*<br>trainer .*<br>model .* TFLOP/s, .*<br>ratio .*\dx$", times)
    assert re.fullmatch(r"quantize_state_dict_int8 .*<br>serialize .*<br>compress .* s", export)
    assert all(re.match(r"final_int8_zlib_roundtrip_exact val_loss:\d", demo) for demo in demos)
    assert losses == "5 steps, largest difference 0.0000 nats"
    assert " skipped in " in tests


@pytest.mark.baseline
@pytest.mark.parametrize("tied", ["1", "0"])
def test_flops_are_those_of_the_matrices(tied):
    """Each weight costs 2 FLOPs per token forward, 4 backward. Attention sees T/2 tokens."""
    environ = {"NUM_LAYERS": "1", "MODEL_DIM": "8", "NUM_HEADS": "2", "NUM_KV_HEADS": "1"}
    environ |= {"TRAIN_SEQ_LEN": "4", "VOCAB_SIZE": "10", "TIE_EMBEDDINGS": tied}
    gpt = train_gpt.GPT(train_gpt.Hyperparameters.from_env(environ))
    matrices = 8 * 8 + 2 * 4 * 8 + 8 * 8 + 2 * 16 * 8 + 10 * 8
    vectors = sum(param.numel() for param in gpt.parameters() if param.ndim == 1) + 16
    assert bench_step.model_flops(gpt) == 6 * (matrices + vectors) + 6 * 4 * 8
