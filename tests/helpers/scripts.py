"""The script with recipes, as a file or a module, and a model whose every weight matters."""

import shutil
from pathlib import Path
from types import ModuleType

import pytest
import recipe
import torch
from recipe import RECORDS
from runs import SCRIPT
from torch import nn
from trained import load_script

NAMES = [*recipe.PATCHES]
RECORD, RECORD_1493, RECORD_1855 = (RECORDS[f"record{pr}"] for pr in ("", "1493", "1855"))
RECORD_2014, RECORD_2135 = RECORDS["record2014"], RECORDS["record2135"]
# Knobs with which a recipe acts within six steps.
KNOBS = {
    "document_mask": {"WHOLE_DOCUMENTS": "1"},
    "fp16": {"DTYPE": "fp16"},
    "gptq": {"GPTQ_BATCHES": "2"},
    "lora_ttt": {"LORA_CHUNK": "8", "LORA_DOCUMENTS": "2"},
    "min_lr": {"MIN_LR": "0.5"},
    "ngram_tilt": {"TILT_TOKENS": "2", "TILT_SHARE": "0.5"},
    "score_first_ttt": {"TTT_CHUNK_TOKENS": "300", "TTT_LR": "0.05"},
}


def knobs_of(knobs: dict[str, str], names: list[str]) -> dict[str, str]:
    environ = {**knobs, "WARMUP_STEPS": "4"}
    for name in names:
        environ |= KNOBS.get(name, {})
    if set(names) >= set(RECORD):  # the preset refuses to run without the others
        environ |= {"PRESET": "record", "EVAL_STRIDE": "16"}
    if set(names) >= set(RECORD_1493):
        environ |= {"PRESET": "record1493", "LOOP_FIRST": "1", "LOOP_LAYERS": "1"}
    if set(names) >= set(RECORD_1855):
        environ |= {"PRESET": "record1855", "PARALLEL_LAYERS": "1", "EVAL_STRIDE": "0"}
        environ |= {"LOOP_FIRST": "0", "LOOP_LAYERS": "1", "LORA_PHASE_DOCUMENTS": "2"}
    if set(names) >= set(RECORD_2014):
        environ |= {"PRESET": "record2014", "CONTEXT_GROWTH": "0.25:0.3,0.5:0.7"}
    if set(names) >= set(RECORD_2135):
        environ |= {"PRESET": "record2135", "LORA_CONTEXT": "40", "TILT_TOKENS": "2"}
    return environ


def patch_script(folder: Path, names: list[str]) -> Path:
    """Copy the script and apply these recipes."""
    if shutil.which("git") is None:
        pytest.skip("needs git apply")
    text = SCRIPT.read_text(encoding="utf-8")
    for name in names:
        text = recipe.apply(name, text)
    script = folder / "patched" / "train_gpt.py"
    script.parent.mkdir(parents=True)
    script.write_text(text, encoding="utf-8")
    return script


def load(script: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a patched script. Its warm-up must leave the state as it was."""
    module = load_script(script)

    def warm_up(state, warm_up=module.warm_up) -> None:
        before = module.serialize(state.state_dict())
        warm_up(state)
        assert module.serialize(state.state_dict()) == before

    monkeypatch.setattr(module, "warm_up", warm_up)
    return module


def randomize(gpt: nn.Module) -> nn.Module:
    """Draw all weights anew, the same each time: the initial ones have zeros."""
    torch.manual_seed(0)
    for name, param in gpt.named_parameters():
        nn.init.normal_(param, std=0.5 if "tok_emb" in name or param.ndim < 2 else 0.2)
    return gpt


def random_model(
    script: ModuleType, environ: dict[str, str], dtype: torch.dtype = torch.float32
) -> nn.Module:
    """A model with these knobs and random weights."""
    return randomize(script.GPT(script.Hyperparameters.from_env(environ), dtype))
