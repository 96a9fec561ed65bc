"""Figures of a train_gpt.py, the baseline's own or ours: the same inputs, almost the same figures.

    python tests/helpers/reference_figures.py ../parameter-golf/train_gpt.py

prints them, then says where they differ from tests/reference.json, which has those of the
challenge's file at commit 4908dc4 (torch 2.13.0, CPU), except "scales of values with tails": these
are of our file. Only the initial weights are random.
"""

import hashlib
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from texts import write_shard
from torch import Tensor, nn

V, L, D, H, K, T = 256, 5, 128, 4, 2, 64  # the letters of train_gpt.py
REFERENCE = Path(__file__).resolve().parents[1] / "reference.json"

Figures = dict[str, dict[str, str]]  # by section and name


def build_gpt(script: ModuleType, tied: bool, dtype: torch.dtype) -> nn.Module:
    """Build a GPT with the weights and dtypes with which training starts."""
    torch.manual_seed(1337)
    if not hasattr(script, "restore_low_dim_params_to_fp32"):  # it is ours
        sizes = dict(vocab_size=V, num_layers=L, model_dim=D, num_heads=H, num_kv_heads=K)
        hp = script.Hyperparameters(**sizes, train_seq_len=T, tie_embeddings=tied)
        return script.GPT(hp, dtype)
    # MLP_MULT, TIE_EMBEDDINGS, TIED_EMBED_INIT_STD, LOGIT_SOFTCAP, ROPE_BASE, QK_GAIN_INIT
    gpt = script.GPT(V, L, D, H, K, 2, tied, 0.005, 30.0, 10_000.0, 1.5)
    if dtype == torch.bfloat16:  # the baseline does this in its main
        gpt.bfloat16()
        for module in gpt.modules():
            if isinstance(module, script.CastedLinear):
                module.float()
        script.restore_low_dim_params_to_fp32(gpt)
    return gpt


def wave(shape: tuple[int, ...], phase: float, scale: float = 0.2, offset: float = 0.0) -> Tensor:
    """Return a sine that does not repeat itself, in fp32, as a stand-in for random values."""
    values = offset + scale * np.sin(0.7548776662 * np.arange(1, np.prod(shape) + 1) + phase)
    return torch.from_numpy(values).float().view(shape)


def tails(shape: tuple[int, ...], phase: float) -> Tensor:
    """Return values that are spread like those of a logistic distribution. A sine has so many
    values near its peak that another clip quantile hardly changes them."""
    share = (0.7548776662 * np.arange(1, np.prod(shape) + 1) + phase) % 1
    return torch.from_numpy(np.log(share / (1 - share))).float().view(shape)


def summary(tensor: Tensor) -> str:
    """Dtype, norm, sum and last entry."""
    values = tensor.detach().double().flatten()
    return f"{tensor.dtype} {values.norm():.9g} {values.sum():.9g} {values[-1]:.9g}"


def summaries(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: summary(tensor) for name, tensor in tensors.items()}


def sha256(values: np.ndarray) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()[:16]


def gradients(gpt: nn.Module) -> dict[str, Tensor]:
    """Loss and gradients of a model in which every weight is a sine."""
    for i, (name, param) in enumerate(gpt.named_parameters()):
        is_gain = param.ndim == 1 or "resid_mix" in name or "skip_weights" in name
        param.data = wave(param.shape, i, offset=float(is_gain))
    ids = (7919 * torch.arange(2 * T + 1) + 13) % V
    loss = gpt(ids[:-1].view(2, T), ids[1:].view(2, T))
    loss.backward()
    return {"loss": loss} | {name: param.grad for name, param in gpt.named_parameters()}


def muon_changes(script: ModuleType) -> dict[str, Tensor]:
    """Changes of matrices in five steps."""
    shapes = ((64, 64), (32, 64), (128, 64), (64, 128))
    start = [wave(shape, i) for i, shape in enumerate(shapes)]
    params = [nn.Parameter(values.clone()) for values in start]
    muon = script.Muon(params, lr=0.04, momentum=0.95, backend_steps=5)
    for step in range(5):
        for i, param in enumerate(params):
            param.grad = wave(param.shape, 10 * step + i, 1.0)
        muon.step()
    changes = [param - values for param, values in zip(params, start, strict=True)]
    return {"{} x {}".format(*change.shape): change for change in changes}


def quantization(script: ModuleType) -> Figures:
    weights = {
        "big": wave((96, 1024), 3, 0.3), "wide": wave((70, 1000), 4, 2.0),
        "vector": wave((70_000,), 5, 0.5), "q_gain": wave((8,), 6), "small": wave((16, 16), 7),
        "small_bf16": wave((16, 16), 8).bfloat16(), "step": torch.arange(3),
    }  # fmt: skip
    obj, statistics = script.quantize_state_dict_int8(weights)
    tailed, _ = script.quantize_state_dict_int8({"rows": tails((70, 1000), 0.1)})
    return {
        "quantizer's statistics": {name: str(count) for name, count in statistics.items()},
        "quantized": {name: sha256(t.numpy()) for name, t in obj["quantized"].items()},
        "scales": summaries(obj["scales"]),
        "kept": summaries(obj["passthrough"]),
        "restored": summaries(script.dequantize_state_dict_int8(obj)),
        "scales of values with tails": summaries(tailed["scales"]),
    }


def batches(script: ModuleType, folder: str) -> dict[str, str]:
    """Hashes of 40 batches of each rank, from three shards of uneven lengths."""
    for i, n in enumerate((5000, 3000, 7001)):
        tokens = (7919 * np.arange(n) + 31 * i) % 997 % V
        write_shard(Path(folder, f"fineweb_train_{i:06d}.bin"), tokens)
    hashes = {}
    for W in (1, 2, 4, 8):
        for rank in range(W):
            place = (rank, W, torch.device("cpu"))
            loader = script.DistributedTokenLoader(f"{folder}/fineweb_train_*.bin", *place)
            found = [torch.stack(loader.next_batch(8 * 2 * T, T, 8 // W)) for _ in range(40)]
            hashes[f"rank {rank} of {W}"] = sha256(torch.stack(found).numpy())
    return hashes


def compute(script: ModuleType) -> Figures:
    figures = {}
    for name, tied in (("tied", True), ("untied", False)):
        gpt = build_gpt(script, tied, torch.bfloat16)
        figures[f"initial weights, {name}"] = summaries(dict(gpt.named_parameters()))
        gpt = build_gpt(script, tied, torch.float32)
        figures[f"loss and gradients, {name}"] = summaries(gradients(gpt))
    figures["Muon, five steps"] = summaries(muon_changes(script))
    figures |= quantization(script)
    with tempfile.TemporaryDirectory() as folder:
        figures["40 batches"] = batches(script, folder)
    return figures


def is_close(new: str, old: str, tolerance: float) -> bool:
    """Compare two figures. tolerance: of a tensor's norm."""
    new_word, *new_numbers = new.split()
    old_word, *old_numbers = old.split()
    if new_word != old_word or not old_numbers:  # a dtype, a hash or a count
        return new == old
    gaps = np.abs(np.array(new_numbers, float) - np.array(old_numbers, float))
    limits = tolerance * float(old_numbers[0]) * np.array([1, 4, 1])  # a sum gathers all errors
    return bool((gaps <= limits).all())


def differences(found: Figures, wanted: Figures) -> Iterator[str]:
    """Yield the names of the figures that differ."""
    for section, figures in wanted.items():
        tolerance = 2e-2 if section.startswith("Muon") else 1e-4  # Muon computes in bf16
        for name in sorted(figures.keys() | found[section].keys()):
            new, old = found[section].get(name, "missing"), figures.get(name, "missing")
            if not is_close(new, old, tolerance):
                yield f"{section}: {name}: {new} instead of {old}"


if __name__ == "__main__":
    sys.path.append(str(REFERENCE.with_name("tools")))
    from trained import existing_file, start_program

    parser = start_program(__doc__)
    parser.add_argument("script", type=existing_file, help="a train_gpt.py")
    path = parser.parse_args().script
    sys.path.insert(0, str(path.parent))
    figures = compute(importlib.import_module(path.stem))
    print(json.dumps(figures, indent=1))
    places = list(differences(figures, json.loads(REFERENCE.read_text())))
    print("\n".join(places) or "equal to tests/reference.json", file=sys.stderr)
    sys.exit(len(places) > 0)
