"""Tests that need a GPU: python -m pytest tests -m gpu"""

import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import train_record
from runs import SCRIPT, TORCHRUN, process_environ
from scripts import read
from texts import write_shard
from torch import Tensor
from torch._inductor import config as inductor_config

import train_gpt
from train_gpt import Hyperparameters, Runtime

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("DEVICE") == "cpu", reason="DEVICE=cpu"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
GPU = torch.device("cuda", 0)
ON_GPU = {"DEVICE": "cuda", "DTYPE": "fp32", "COMPILE": "1"}
REFERENCE_PEAK_MIB = 10_184  # the reference's published run, 8xH100, the same slot


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """Disable TF32, which a run of the script allows."""
    torch.backends.cuda.matmul.allow_tf32 = False


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest distance of a pair of tensors, relative to the norm of the wanted one."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, wanted, strict=True)]
    distances = torch.stack([(a - b).norm() / b.norm().clamp_min(1e-30) for a, b in pairs])
    return distances.max().item()  # NaN if any is


def loss_and_gradients(dtype: torch.dtype, compiled: bool, script=train_gpt, knobs="") -> list:
    """Loss and gradients of a wide model without the zeros of the initial weights, on documents of
    50 tokens. With fewer rows than 48 x 256 Inductor makes no kernel with a mix-order reduction."""
    hp = script.Hyperparameters.from_env(read(f"NUM_LAYERS=2 TRAIN_SEQ_LEN=256 {knobs}"))
    torch.manual_seed(0)
    gpt = script.GPT(hp, dtype)
    with torch.no_grad():
        for param in gpt.parameters():
            param.add_(0.02 * torch.randn(param.shape))
    ids = torch.randint(hp.vocab_size, (48, hp.train_seq_len + 1))
    ids[:, ::50] = 1  # BOS
    ids = ids.to(GPU)
    model = script.wrap(gpt.to(GPU), compiled)
    loss = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    loss.backward()
    return [loss.detach(), *(param.grad for param in gpt.parameters())]


@pytest.mark.parametrize("mix_order_reduction", [False, True])
def test_compiled_against_eager(mix_order_reduction):
    """In fp32 both agree. In bf16 the compiled model is about as close to fp32 as the eager one,
    even if the user sets TORCHINDUCTOR_MIX_ORDER_REDUCTION=1."""
    # Eager gradients stay alive, or a lost gradient could reuse their memory and look right.
    exact = loss_and_gradients(torch.float32, False)
    eager = loss_and_gradients(torch.bfloat16, False)
    torch._dynamo.reset()
    options = {"force_disable_caches": True}
    if hasattr(inductor_config.triton, "mix_order_reduction"):  # from torch 2.10 on
        options["triton.mix_order_reduction"] = mix_order_reduction
    with inductor_config.patch(options):
        compiled_fp32 = distance(loss_and_gradients(torch.float32, True), exact)
        compiled_bf16 = distance(loss_and_gradients(torch.bfloat16, True), exact)
    eager_bf16 = distance(eager, exact)
    assert compiled_fp32 < 1e-3
    assert eager_bf16 < 0.1
    assert compiled_bf16 < 1.5 * eager_bf16


def run_script(script: Path, folder: Path, environ: dict[str, str], ranks: int = 0) -> list[float]:
    """Run a script. Returns the losses and scores that it logs."""
    kept = ("CUDA_", "NCCL_", "TORCHINDUCTOR_", "TRITON_")
    own = {name: value for name, value in os.environ.items() if name.startswith(kept)}
    folder.mkdir(exist_ok=True)
    settings = {"cwd": folder, "env": process_environ({**own, **environ}), "capture_output": True}
    launcher = [TORCHRUN, "--standalone", f"--nproc_per_node={ranks}"] if ranks > 0 else []
    command = [sys.executable, *launcher, script]
    process = subprocess.run(command, text=True, timeout=500, **settings)
    assert process.returncode == 0, process.stderr
    assert "WARNING" not in process.stdout
    assert ("replicas:identical" in process.stdout) == (ranks > 1)
    values = re.findall(r"(?:train|val)_(?:loss|bpb):(\d+\.\d+)", process.stdout)
    return [float(value) for value in values]


def test_ranks_of_nccl_against_the_script_alone(knobs, tmp_path):
    """The ranks are 1, 2, 4 and 8, up to the number of GPUs."""
    environ = {**knobs, **ON_GPU}
    alone = run_script(SCRIPT, tmp_path, environ)
    assert len(alone) == 6 + 2 * 3 + 2 * 2  # steps, validations, the score twice
    for ranks in (1, 2, 4, 8):
        if ranks <= torch.cuda.device_count():
            assert run_script(SCRIPT, tmp_path, environ, ranks) == pytest.approx(alone, abs=5e-3)


RECORD = Path(train_record.__file__)
# Heads of 64 channels, and matrices that are large enough to be quantized.
SMALL = "PRESET=record2135 MODEL_DIM=192 NUM_HEADS=3 NUM_KV_HEADS=1 LOOP_FIRST=1 LOOP_LAYERS=1"
RUN = "ITERATIONS=10 WARMUP_STEPS=2 LORA_DOCUMENTS=1 LORA_PHASE_DOCUMENTS=1 LORA_PHASE_LR=0.1"


def test_a_small_record_against_the_cpu(knobs, tmp_path):
    """Training through all stages, GPTQ, the artifact, test-time training with a phase, hints."""
    small = dict(re.findall(r"([A-Z_]+)=(\S+)", RECORD.with_name("small.sh").read_text()))
    own = {name: knobs[name] for name in ("DATA_PATH", "TOKENIZER_PATH", "VOCAB_SIZE")}
    environ = {**small, **own, **read(f"{SMALL} {RUN}")}
    cpu = run_script(RECORD, tmp_path / "cpu", {**environ, "DEVICE": "cpu"})
    assert len(cpu) == 10 + 2 + 2 * 2
    exact = {**environ, **ON_GPU, "NVIDIA_TF32_OVERRIDE": "0"}
    assert run_script(RECORD, tmp_path / "fp32", exact) == pytest.approx(cpu, abs=5e-3)
    half = {**environ, **ON_GPU, "DTYPE": "bf16"}  # in FlashAttention's packed documents
    assert run_script(RECORD, tmp_path / "bf16", half) == pytest.approx(cpu, abs=0.1)


def test_packed_documents_of_a_record_against_a_mask():
    """In bf16 FlashAttention gets the documents' bounds; in fp32 a mask keeps them apart."""
    knobs = f"{SMALL} NUM_LAYERS=5 WHOLE_DOCUMENTS=0 DOCUMENT_MASK"
    masked = loss_and_gradients(torch.float32, False, train_record, f"{knobs}=1")
    packed = loss_and_gradients(torch.bfloat16, True, train_record, f"{knobs}=1")
    unmasked = loss_and_gradients(torch.float32, False, train_record, f"{knobs}=0")
    assert distance(packed, masked) < 0.4  # a mask in bf16: 0.1
    assert distance(unmasked, masked) > 1


def new_state(folder: Path, **knobs) -> train_gpt.TrainingState:
    """The state of a compiled bf16 run after two steps, which make the optimizers' state."""
    tokens = np.random.default_rng(0).integers(1024, size=600_000)
    write_shard(folder / "fineweb_train_000000.bin", tokens)
    torch._dynamo.reset()
    hp = Hyperparameters(data_path=str(folder), **knobs)
    state = train_gpt.TrainingState(hp, Runtime(0, 1, GPU, torch.bfloat16, True))
    for _ in range(2):
        train_gpt.train_step(state)
    return state


def test_a_step_never_waits_for_the_gpu(tmp_path):
    """In this mode, PyTorch raises an error where the host would wait."""
    state = new_state(tmp_path, num_layers=2, grad_clip_norm=1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_gpt.train_step(state)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_of_the_default_model_takes_less_memory_than_the_references(tmp_path):
    """Eight slots of 65,536 tokens, compiled, with both optimizers."""
    gc.collect()
    before = torch.cuda.memory_allocated()  # by other tests
    torch.cuda.reset_peak_memory_stats()
    new_state(tmp_path)
    assert (torch.cuda.max_memory_allocated() - before) >> 20 < REFERENCE_PEAK_MIB
