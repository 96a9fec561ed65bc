"""gpu_report.py: a row for each part, even if it fails."""

import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import bench_step
import gpu_report
import pytest
from runs import SCRIPT, failed, run_here

import train_gpt

PROGRAM = SimpleNamespace(main=lambda: sys.exit(gpu_report.main()))


def read_report(folder: Path) -> dict[str, str]:
    report = (folder / "gpu_report.md").read_text()
    return dict(re.findall(r"^\| (.+) \| (.+) \| \d+ \|$", report, re.M))


def test_after_a_part_that_fails_the_others_go_on(tmp_path, monkeypatch):
    program = "import os; print('not shown'); print(os.environ['SEED']); print(2)"
    parts = [
        ("fails", 60, ["-c", "print('begun'); raise ValueError('broken')"], "", 1),
        ("hangs", 0, ["-c", "import time; time.sleep(60)"], "", 1),
        ("works", 60, ["-c", program], "SEED=7", 2),
    ]
    ends = [end for _, end, *_ in gpu_report.PARTS + gpu_report.REFERENCE_PARTS]
    assert ends == sorted(ends) and ends[-1] < 600
    monkeypatch.setattr(gpu_report, "PARTS", parts)
    knobs = {"DEVICE": "cpu", "ITERATIONS": "30"}
    result = run_here(tmp_path, knobs, PROGRAM)
    assert result.returncode == 2 and "no GPU here, or DEVICE=cpu: --tiny" in result.stderr
    assert not [*tmp_path.iterdir()]
    assert run_here(tmp_path, knobs, PROGRAM, ["--tiny"]).returncode == 1
    rows = [gpu_report.HOW, "FAILED: ValueError: broken", "FAILED: it took too long", "7<br>2"]
    assert [*read_report(tmp_path).values()] == rows
    report = (tmp_path / "gpu_report.md").read_text()
    assert "knobs: DEVICE=cpu ITERATIONS=30\n" in report
    result = run_here(tmp_path, knobs, PROGRAM, ["--tiny"])
    assert result.returncode == 2 and "gpu_report.md exists: move it away" in result.stderr
    assert (tmp_path / "gpu_report.md").read_text() == report


@pytest.mark.baseline
def test_all_parts_on_a_cpu(tmp_path, knobs, monkeypatch):
    """Parts run in this process, to start faster. Ours is the challenge's script, too."""

    def run(command: list[str | Path], env: dict[str, str], **options) -> object:
        _, program, *arguments = map(str, command)
        part = SimpleNamespace(main=lambda: runpy.run_path(program, run_name="__main__"))
        result = run_here(tmp_path, {**knobs, **env}, part, arguments)
        result.check_returncode()
        return result

    monkeypatch.setattr(train_gpt, "attention_backends", train_gpt.attention_backends)
    monkeypatch.setattr(gpu_report, "run", run)
    folder = tmp_path / "with a space"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    environ = {**knobs, "MAX_VAL_TOKENS": "64", "BATCH_SLOTS": "1"}
    result = run_here(tmp_path, environ, PROGRAM, ["--tiny", f"--reference={SCRIPT}"])
    assert result.returncode == 0, result.stdout
    rows = read_report(tmp_path)
    assert not [row for row in rows.values() if row.startswith("FAILED")]
    first, *steps, _, _, both = rows.values()
    spread = r"[\d.e+-]+ \([\d.e+-]+ to [\d.e+-]+\) ms/step, \d+ tokens/s"
    assert re.search(rf"^cpu .*<br>card .*<br>trainer +{spread}<br>model .*", first)
    slots = [re.match(r"cpu torch.float32 slots:(\d) .*TFLOP/s, ", row)[1] for row in steps]
    assert slots == ["4", "2", "1", "1"]
    end = "5 losses, largest difference 0.0000 nats"
    assert re.fullmatch(rf"[\d.]+ and [\d.]+ ms a step, ratio [\d.]+; {end}", both)


def test_nvidia_smi_may_hang_and_say_anything(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for text, answer in [
        ("printf '1980 MHz, \\377 W\\n\\n2 MHz\\n'; sleep 0.3", "1980 MHz, \ufffd W; ; 2 MHz"),
        ("echo no >&2; exit 9", "no"),
        ("exec sleep 60", "nvidia-smi did not answer within five seconds"),
    ]:
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        assert bench_step.ask_nvidia_smi("name") == answer


def test_kernels_count_in_the_class_that_their_names_tell():
    """Templates of FlashAttention have CUTLASS's name, too, and sums of split products a sum's."""
    names = {
        "exchanges between GPUs": ["ncclDevKernel_AllReduce_Sum_f32_RING_LL"],
        "attention": ["cudnn_generated_native_sdpa_sm90_flash_bprop", "flash_bwd<cutlass>"],
        "matrix products": ["nvjet_tst_128x256", "cublasLt::splitKreduce_kernel", "sm80_xmma_gemm"],
        "elementwise": ["triton_red_fused_add_mul_0", "at::native::vectorized_elementwise_kernel"],
        "the rest": ["Memcpy DtoD (Device -> Device)"] * 5,
    }
    kernels = [(i + 1, 7, name) for i, group in enumerate(names.values()) for name in group]
    lines = bench_step.list_kernels(kernels, {"attention": 0.5, "matrix products": 3})
    assert lines[0] == f"     5.00 ms     7 x `{names['the rest'][0]}`"
    assert lines[10:] == [
        "     1.00 ms   2.1 % exchanges between GPUs",
        "     4.00 ms   8.5 % attention; at a large product's rate 0.50 ms",
        "     9.00 ms  19.1 % matrix products; at a large product's rate 3.00 ms",
        "     8.00 ms  17.0 % elementwise",
        "    25.00 ms  53.2 % the rest",
    ]


@pytest.mark.baseline
@pytest.mark.parametrize("tied", ["1", "0"])
def test_flops_are_those_of_the_matrices(tied):
    """Each weight costs 2 FLOPs per token forward, 4 backward. Attention sees T/2 tokens."""
    environ = {"NUM_LAYERS": "1", "MODEL_DIM": "8", "NUM_HEADS": "2", "NUM_KV_HEADS": "1"}
    environ |= {"TRAIN_SEQ_LEN": "4", "VOCAB_SIZE": "10", "TIE_EMBEDDINGS": tied}
    gpt = train_gpt.GPT(train_gpt.Hyperparameters.from_env(environ))
    matrices = 8 * 8 + 2 * 4 * 8 + 8 * 8 + 2 * 16 * 8 + 10 * 8
    vectors = sum(param.numel() for param in gpt.parameters() if param.ndim == 1) + 16
    flops = {"matrix products": 6 * (matrices + vectors), "attention": 6 * 4 * 8}
    assert bench_step.model_flops(gpt) == flops


def test_a_vocabulary_that_does_not_fit_into_uint16_is_one_line(tmp_path):
    bench = SimpleNamespace(main=lambda: train_gpt.leave(bench_step.main))
    result = run_here(tmp_path, {"VOCAB_SIZE": "70000", "DEVICE": "cpu"}, bench)
    assert "Traceback" not in failed(result, "VOCAB_SIZE=70000 is above 65536")
