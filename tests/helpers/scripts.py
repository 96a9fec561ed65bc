"""Knobs as text, the records made small, and a model whose every weight matters."""

from types import ModuleType

import torch
import train_record
from torch import nn

RECORDS = ("record1394", "record1855", "record2014", "record2135")
# Small values in place of the records' large ones. All act within six steps.
SMALL_RECORD = (
    "NUM_LAYERS=4 LOOP_FIRST=1 LOOP_LAYERS=1 PARALLEL_LAYERS=2 CONTEXT_GROWTH=0.25:0.25,0.5:0.7 "
    "WARMUP_STEPS=3 GPTQ_BATCHES=2 AWQ_COLUMNS=8 EVAL_STRIDE=16 LORA_RANK=4 LORA_CHUNK=16 "
    "LORA_DOCUMENTS=2 LORA_PHASE_DOCUMENTS=2 LORA_CONTEXT=40 TILT_TOKENS=2"
)


def read(knobs: str) -> dict[str, str]:
    """NAME=value pairs as environment variables."""
    return dict(knob.split("=") for knob in knobs.split())


def record_knobs(preset: str, knobs: dict[str, str]) -> dict[str, str]:
    """Return the environment of a small run of a record. knobs: those of any small run. A technique
    that the record lacks stays off."""
    preset_knobs = train_record.PRESETS[preset]
    small = read(SMALL_RECORD).items()
    small = {knob: value for knob, value in small if preset_knobs.get(knob, "0") != "0"}
    return {**knobs, **small, "PRESET": preset}


@torch.no_grad()
def randomize(gpt: nn.Module) -> nn.Module:
    """Draw all weights anew, the same for any dtype: the initial ones have zeros."""
    torch.manual_seed(0)
    for name, param in gpt.named_parameters():
        std = 0.5 if "tok_emb" in name or param.ndim < 2 else 0.2
        param.copy_(std * torch.randn(param.shape))  # drawn in fp32, then cast
    return gpt


def random_model(script: ModuleType, environ: dict[str, str]) -> nn.Module:
    """A model with these knobs and random weights."""
    return randomize(script.GPT(script.Hyperparameters.from_env(environ), torch.float32))
