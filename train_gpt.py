"""Train the best small language model that fits, with this file, into 16,000,000 bytes.

    PRESET=demo python train_gpt.py                           a laptop: 1.91 bits per byte
    python train_gpt.py                                       one GPU, FineWeb: see README.md
    torchrun --standalone --nproc_per_node=8 train_gpt.py     eight GPUs: no results yet
    python train_gpt.py --help                                all knobs

Knobs are environment variables. The last line of the log is the score of the compressed model.
A run (see `run`): knobs, processes, data, model, optimizers, warm-up, training, export, scoring.
What people change: Hyperparameters, Model, Optimizers, Schedules, Data; then Evaluation, Export.
Defined late: Runtime (rank, device, log), Stopwatch.

Letters in shapes: B sequences in a micro-batch, T sequence length, D model width, H query heads,
K key/value heads, h = D/H head width, V vocabulary, L layers, W world size (processes).
"""

# Before the imports, which take seconds: later edits are not part of this run.
SOURCE = open(__file__, "rb").read() if __name__ == "__main__" else b""

import binascii
import ctypes
import difflib
import errno
import fcntl
import glob
import importlib.util
import inspect
import io
import json
import math
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, TextIO, get_type_hints
from uuid import uuid4

if not importlib.util.find_spec("numpy"):
    sys.exit("no numpy: activate its environment: . .venv/bin/activate")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sentencepiece import SentencePieceProcessor
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only


class InputError(ValueError):
    """A user error. The message says how to fix it."""


# ---- Hyperparameters ------------
# Control tensors scale or mix activations. They are trained and saved in fp32.
CONTROL_TENSOR_NAME_PATTERNS = (  # the plurals are the baseline's
    "attn_scale", "attn_scales", "mlp_scale", "mlp_scales", "resid_mix", "resid_mixes", "q_gain",
    "skip_weight", "skip_weights",
)  # fmt: skip


@dataclass(frozen=True)
class Hyperparameters:
    """All knobs; NUM_LAYERS sets num_layers. Where a comment has "0:", -1 does the same."""

    # run; RUN_ID names the log and the checkpoint, by default after the time of the start
    preset: str = ""  # "" or "demo": other defaults
    run_id: str = field(default_factory=lambda: time.strftime("%y%m%d-%H%M%S-") + uuid4().hex[:4])
    seed: int = 1337  # for Python, NumPy and torch
    output_dir: str = "."  # for all files of the run
    checkpoint_every: int = 0  # steps; 0: only when a signal stops the run
    resume: str = ""  # a checkpoint; auto: this RUN_ID's, if it exists
    device: str = "auto"  # cuda, cpu; auto: cuda if available
    dtype: str = "auto"  # bf16, fp16, fp32; auto: bf16 if the GPU has it, else fp32
    compile: str = "auto"  # torch.compile: 1, 0; auto: 1 on cuda
    data_path: str = "./data/datasets/fineweb10B_sp1024"  # folder of fineweb_{train,val}_*.bin
    tokenizer_path: str = "./data/tokenizers/fineweb_1024_bpe.model"  # SentencePiece model
    # validation and logging
    val_batch_size: int = 524_288  # tokens; a forward pass has this / BATCH_SLOTS on each rank
    val_loss_every: int = 1000  # steps, step 0 included; 0: only at the end
    max_val_tokens: int = 0  # for a shorter validation; 0: the whole split
    eval_stride: int = 0  # stride of the final score, in tokens; 0: TRAIN_SEQ_LEN
    train_log_every: int = 200  # steps 1 to 10, then its multiples; 0: none
    # length of the run
    iterations: int = 20_000  # optimizer steps at most
    warmdown_iters: int = 1200  # steps of linear decay to 0 (see lr_factor); 0: none
    warmdown_frac: float = 0.0  # of the run, in place of WARMDOWN_ITERS; 0: not used
    warmup_steps: int = 20  # to compile, then undone; 0: one, not logged
    train_batch_tokens: int = 524_288  # tokens per optimizer step
    batch_slots: int = 8  # micro-batches per optimizer step, over all ranks
    train_seq_len: int = 1024  # T
    max_wallclock_seconds: float = 600.0  # of training; 0: no cap
    # model
    vocab_size: int = 1024  # V, the tokenizer's size
    num_layers: int = 9  # L
    model_dim: int = 512  # D
    num_heads: int = 8  # H, query heads
    num_kv_heads: int = 4  # K, key/value heads
    mlp_mult: int = 2  # hidden width of the MLP / D
    tie_embeddings: bool = True  # the output layer is the embedding
    rope_base: float = 10_000.0  # longest wavelength: 2 pi * this**(1 - 2/h) tokens
    logit_softcap: float = 30.0  # cap * tanh(logits / cap)
    qk_gain_init: float = 1.5  # initial gain of each head's queries
    # optimizers
    embed_lr: float = 0.6  # Adam, untied embedding
    head_lr: float = 0.008  # Adam, untied lm_head
    tied_embed_lr: float = 0.05  # Adam, tied embedding
    tied_embed_init_std: float = 0.005  # of a tied embedding
    matrix_lr: float = 0.04  # Muon, matrices of the blocks
    scalar_lr: float = 0.04  # Adam, vectors and control tensors
    muon_momentum: float = 0.95  # after its warm-up
    muon_backend_steps: int = 5  # Newton-Schulz iterations
    muon_momentum_warmup_start: float = 0.85  # momentum at step 0
    muon_momentum_warmup_steps: int = 500  # 0: no warm-up
    beta1: float = 0.9  # Adam
    beta2: float = 0.95  # Adam
    adam_eps: float = 1e-8  # Adam
    grad_clip_norm: float = 0.0  # global norm; 0: no clipping
    # parts of names: parameters that Adam trains in fp32; small tensors that are saved in fp32
    control_tensor_name_patterns: tuple[str, ...] = CONTROL_TENSOR_NAME_PATTERNS
    int8_keep_float_fp32_name_patterns: tuple[str, ...] = CONTROL_TENSOR_NAME_PATTERNS

    def files(self, split: str) -> str:
        """Glob pattern of the "train" or "val" shards."""
        return f"{glob.escape(self.data_path)}/fineweb_{split}_*.bin"

    def checkpoint_path(self) -> Path:
        return Path(self.output_dir, "checkpoints", f"{self.run_id}.pt")

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "Hyperparameters":
        """Knobs of the environment, else of the preset, else the defaults."""
        texts = {**PRESETS.get(environ.get("PRESET", ""), {}), **environ}
        if "CONTROL_TENSOR_NAME_PATTERNS" in texts:
            patterns = texts["CONTROL_TENSOR_NAME_PATTERNS"]
            texts.setdefault("INT8_KEEP_FLOAT_FP32_NAME_PATTERNS", patterns)  # it follows the first
        values = {}
        for name, kind in get_type_hints(cls).items():
            if name.upper() in texts:
                values[name] = parse_knob(name, kind, texts[name.upper()])
        hp = cls(**values)
        check_knobs(hp)
        if hp.resume == "auto" and "RUN_ID" not in environ:
            raise InputError("RESUME='auto' needs a RUN_ID: set it")
        return hp


DEMO = dict(
    DATA_PATH="./data/datasets/demo_sp1024", TOKENIZER_PATH="./data/tokenizers/demo_1024_bpe.model",
    TRAIN_BATCH_TOKENS="6144", TRAIN_SEQ_LEN="128", ITERATIONS="200",
    WARMUP_STEPS="3", WARMDOWN_FRAC="0.8", MUON_MOMENTUM_WARMUP_STEPS="100", TRAIN_LOG_EVERY="20",
    VAL_BATCH_SIZE="32768", NUM_LAYERS="4", MODEL_DIM="128", NUM_HEADS="2", NUM_KV_HEADS="1",
)  # fmt: skip
PRESETS = {"": {}, "demo": DEMO}


# ---- Model ----------------------
# dtypes: activations, the embedding and Muon's updates are bf16 on a GPU that has it, else fp32.
# Other weights are fp32, which keeps small updates, and are cast for use. The loss is fp32. With
# DTYPE=fp16 only activations are fp16: Muon and GradScaler need a wider range of exponents.
def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


class CastedLinear(nn.Linear):
    """Casts its weight for use. All linear layers go through here, except a tied output."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


def rotary_tables(seq_len: int, head_dim: int, base: float) -> Tensor:
    """cos and sin of the angles t * base**(-2j/h), (2, T, h/2): RoPE (Su et al., 2021)."""
    # Computed in fp32: in bf16 most positions beyond 256 would equal a neighbor.
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (x[j], x[j + h/2]) of x (B, T, heads, h) by -angle; cos, sin: (T, 1, h/2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


def attention_backends(device: torch.device, seq_len: int) -> list[SDPBackend]:
    """The attention kernels that PyTorch may use, best first."""
    # cuDNN is wrong on Blackwell, and for lengths not divisible by 128.
    is_hopper = device.type == "cuda" and torch.cuda.get_device_properties(device).major == 9
    cudnn = [SDPBackend.CUDNN_ATTENTION] if is_hopper and seq_len % 128 == 0 else []
    return [*cudnn, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q (B, T, H, h) to k and v (B, T, K, h): (B, T, H, h)."""
    if q.device.type == "cpu" and q.dtype != torch.float32:  # bf16 is slow there, backward
        return attend(q.float(), k.float(), v.float()).to(q.dtype)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, T, h)
    if q.device.type == "cuda":
        if q.dtype == torch.float32 or torch.cuda.get_device_properties(q.device).major < 8:
            # Only MATH takes fewer key than query heads here, and it stores all scores.
            k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    # Set per call: torch's cache of compiled graphs ignores the global flags.
    with sdpa_kernel(attention_backends(q.device, q.size(2)), set_priority=True):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2)


class CausalSelfAttention(nn.Module):
    """Grouped-query attention with normed and rotated queries and keys."""

    def __init__(self, hp: Hyperparameters) -> None:
        super().__init__()
        D = hp.model_dim
        kv_dim = D // hp.num_heads * hp.num_kv_heads
        self.num_heads = hp.num_heads
        self.num_kv_heads = hp.num_kv_heads
        self.c_q = CastedLinear(D, D, bias=False)
        self.c_k = CastedLinear(D, kv_dim, bias=False)
        self.c_v = CastedLinear(D, kv_dim, bias=False)
        self.proj = CastedLinear(D, D, bias=False)
        self.q_gain = nn.Parameter(torch.full((hp.num_heads,), hp.qk_gain_init))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Let each position of x (B, T, D) read from itself and from earlier ones: (B, T, D)."""
        B, T, D = x.shape
        q = self.c_q(x).view(B, T, self.num_heads, -1)
        k = self.c_k(x).view(B, T, self.num_kv_heads, -1)
        v = self.c_v(x).view(B, T, self.num_kv_heads, -1)
        # A score of normed q and k is at most sqrt(h), for any weights. q_gain lets a head sharpen.
        q = apply_rotary(rms_norm(q), cos, sin)
        k = apply_rotary(rms_norm(k), cos, sin)
        q = q * self.q_gain.to(x.dtype)[:, None]
        y = attend(q, k, v)
        return self.proj(y.reshape(B, T, D))


class MLP(nn.Module):
    """Two linear layers around a squared ReLU (So et al., 2021)."""

    def __init__(self, hp: Hyperparameters) -> None:
        super().__init__()
        self.fc = CastedLinear(hp.model_dim, hp.mlp_mult * hp.model_dim, bias=False)
        self.proj = CastedLinear(hp.mlp_mult * hp.model_dim, hp.model_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.fc(x)).square()
        return self.proj(hidden)


class Block(nn.Module):
    """Mix the embedding back in, then add attention, then the MLP."""

    def __init__(self, hp: Hyperparameters) -> None:
        super().__init__()
        D = hp.model_dim
        self.attn = CausalSelfAttention(hp)
        self.mlp = MLP(hp)
        self.attn_scale = nn.Parameter(torch.ones(hp.model_dim))
        self.mlp_scale = nn.Parameter(torch.ones(hp.model_dim))
        # Starts as x alone. Each layer may learn, per channel, to fade x or to reread the token.
        self.resid_mix = nn.Parameter(torch.stack((torch.ones(D), torch.zeros(D))))

    def forward(self, x: Tensor, x0: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x, and x0, the normed embedding: (B, T, D)."""
        resid_mix = self.resid_mix.to(x.dtype)
        x = resid_mix[0] * x + resid_mix[1] * x0
        x = x + self.attn_scale.to(x.dtype) * self.attn(rms_norm(x), cos, sin)
        return x + self.mlp_scale.to(x.dtype) * self.mlp(rms_norm(x))


class GPT(nn.Module):
    """A decoder with U-Net skips: each layer of the second half adds its mirror's output."""

    def __init__(self, hp: Hyperparameters, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        D = hp.model_dim
        self.hp = hp
        self.dtype = dtype
        self.num_encoder_layers = hp.num_layers // 2
        self.tok_emb = nn.Embedding(hp.vocab_size, D)
        # With L = 1 no forward pass uses it: DDP would wait for its gradient, so freeze it.
        skip_weights = torch.ones(self.num_encoder_layers, D)
        self.skip_weights = nn.Parameter(skip_weights, requires_grad=self.num_encoder_layers > 0)
        self.blocks = nn.ModuleList(Block(hp) for _ in range(hp.num_layers))
        self.lm_head = None if hp.tie_embeddings else CastedLinear(D, hp.vocab_size, bias=False)
        tables = rotary_tables(hp.train_seq_len, D // hp.num_heads, hp.rope_base)
        self.register_buffer("rotary", tables, persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Set weights and dtypes. Matrices start as bf16 numbers, which are the baseline's."""
        # Each block starts as the identity. If tied, step 1 changes only these of Muon's matrices.
        for block in self.blocks:
            block.attn.proj.weight.zero_()
            block.mlp.proj.weight.zero_()
        if self.lm_head is None:
            # x is normed later, so this std sets only the first logits: the loss is near ln(V).
            self.tok_emb.weight.normal_(std=self.hp.tied_embed_init_std)
        else:
            self.lm_head.weight.zero_()
        patterns = self.hp.control_tensor_name_patterns
        for name, param in self.named_parameters():
            if param.ndim >= 2 and not is_control_tensor(name, patterns):
                param.copy_(param.bfloat16())
        if self.dtype == torch.bfloat16 and not is_control_tensor("tok_emb.weight", patterns):
            self.tok_emb.bfloat16()  # so its gradients add up in bf16, as the baseline's do

    def forward(self, input_ids: Tensor, target_ids: Tensor, reduction: str = "mean") -> Tensor:
        """Mean cross-entropy in nats (fp32) of target_ids (B, T), or with "none" that of each."""
        losses = F.cross_entropy(self.logits(input_ids), target_ids.flatten(), reduction=reduction)
        return losses.view_as(target_ids) if reduction == "none" else losses

    def logits(self, input_ids: Tensor) -> Tensor:
        """Next-token logits for input_ids (B, T): fp32 (B*T, V)."""
        x = self.tok_emb(input_ids).to(self.dtype)  # (B, T, D)
        cos, sin = self.rotary.to(self.dtype)  # (longest T, h/2) each
        cos, sin = cos[: x.size(1), None], sin[: x.size(1), None]  # (T, 1, h/2): for all heads
        x = x0 = rms_norm(x)
        skips = []
        for block in self.blocks[: self.num_encoder_layers]:
            x = block(x, x0, cos, sin)
            skips.append(x)
        # Late layers read early features. At first all blocks are the identity, so x doubles.
        for row, block in enumerate(self.blocks[self.num_encoder_layers :]):
            if skips:  # an odd L leaves the last layer alone
                x = self.add_skip(x, skips.pop(), row)
            x = block(x, x0, cos, sin)
        logits = self.output(rms_norm(x).flatten(0, 1))
        # The identity near 0, flat far from it: no logit exceeds the cap.
        return (self.hp.logit_softcap * torch.tanh(logits / self.hp.logit_softcap)).float()

    def add_skip(self, x: Tensor, skip: Tensor, row: int) -> Tensor:
        return x + self.skip_weights[row].to(x.dtype) * skip

    def output(self, x: Tensor) -> Tensor:
        """The output layer, tied or not: (n, D) -> (n, V)."""
        if self.lm_head is None:
            return F.linear(x, self.tok_emb.weight.to(x.dtype))
        return self.lm_head(x)


# ---- Optimizers -----------------
def newton_schulz(stack: Tensor, steps: int) -> Tensor:
    """Bring the singular values of each wide matrix in stack (n, rows, columns) close to 1."""
    # Steep at 0 instead of exact: five steps bring singular values of 0.003 to 1 into 0.68 to 1.20.
    a, b, c = 3.4445, -4.7750, 2.0315
    # The Frobenius norm bounds the singular values: above 1.26 they would diverge. 1e-7: 0 stays 0.
    x = stack / (torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT  # rows x rows: wide matrices have the smaller one
        x = a * x + (b * gram + (c * gram) @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Orthogonalized Nesterov momentum for matrices (Keller Jordan, 2024), split among ranks."""

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float, backend_steps: int,
        dtype: torch.dtype = torch.bfloat16, compiled: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "momentum": momentum, "backend_steps": backend_steps})
        self.dtype = dtype
        self.newton_schulz = newton_schulz
        if compiled:
            self.newton_schulz = torch.compile(newton_schulz, dynamic=False, fullgraph=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update momentum and weights. All ranks must call it. The gradients are averaged."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            updates = self.nesterov(params, group["momentum"])
            # `combined` views `exchange`. A rank fills in its share, else it is 0: the sum gathers.
            sizes = [p.numel() for p in params]
            exchange = updates[0].new_zeros(sum(sizes))
            combined = [u.view_as(p) for u, p in zip(exchange.split(sizes), params, strict=True)]
            own = range(rank, len(params), world_size)
            results = self.orthogonalize([updates[i] for i in own], group["backend_steps"])
            for i, result in zip(own, results, strict=True):
                combined[i].copy_(result)
            if world_size > 1:
                dist.all_reduce(exchange)
            torch._foreach_add_(params, combined, alpha=-group["lr"])

    def nesterov(self, params: list[nn.Parameter], momentum: float) -> list[Tensor]:
        """Update the momentum of params. Returns their updates, in `dtype`."""
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        grads = [p.grad for p in params]
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, grads)  # no factor 1 - momentum: Newton-Schulz ignores scale
        updates = torch._foreach_add(grads, buffers, alpha=momentum)
        return [update.to(self.dtype) for update in updates]

    def orthogonalize(self, matrices: list[Tensor], steps: int) -> list[Tensor]:
        """Apply Newton-Schulz, one call per shape, and multiply by sqrt(max(1, rows / columns))."""
        wide = [matrix.mT if matrix.size(0) > matrix.size(1) else matrix for matrix in matrices]
        results = list(matrices)
        # One batched product per shape: many small kernels would leave a GPU idle.
        for shape in sorted({matrix.shape for matrix in wide}):
            members = [i for i, matrix in enumerate(wide) if matrix.shape == shape]
            stack = self.newton_schulz(torch.stack([wide[i] for i in members]), steps)
            for i, result in zip(members, stack, strict=True):
                # At full rank, all entries now have RMS 1/sqrt(columns): one rate fits all shapes.
                rows, columns = matrices[i].shape
                results[i] = result.mT * math.sqrt(rows / columns) if rows > columns else result
        return results


def is_control_tensor(name: str, patterns: tuple[str, ...]) -> bool:
    return any(pattern in name for pattern in patterns)


# Optimizer group of each parameter outside the blocks, by name prefix.
OPTIMIZER_GROUPS = {"tok_emb.": "embed", "lm_head.": "head", "skip_weights": "scalar"}


def parameter_groups(model: nn.Module, hp: Hyperparameters) -> dict[str, list[nn.Parameter]]:
    """Put each parameter of a GPT into one group: "matrix" for Muon, the others for Adam."""
    groups: dict[str, list[nn.Parameter]] = {"embed": [], "head": [], "matrix": [], "scalar": []}
    if unknown := {*OPTIMIZER_GROUPS.values()} - {*groups}:
        raise InputError(f"OPTIMIZER_GROUPS has {', '.join(unknown)}: use {', '.join(groups)}")
    for name, param in model.named_parameters():
        own = [group for prefix, group in OPTIMIZER_GROUPS.items() if name.startswith(prefix)]
        control = is_control_tensor(name, hp.control_tensor_name_patterns)
        if own:
            groups[own[0]].append(param)
        elif not name.startswith("blocks."):
            raise InputError(f"{name} is in no optimizer: add it to OPTIMIZER_GROUPS")
        elif param.ndim == 2 and param.requires_grad and not control:
            groups["matrix"].append(param)
        else:
            groups["scalar"].append(param)  # Adam skips frozen parameters
    return groups


def build_optimizers(gpt: GPT, compiled: bool = False) -> list[torch.optim.Optimizer]:
    """Adam and Muon. set_schedule scales the full learning rate of each group, its "base_lr"."""
    hp = gpt.hp
    params = parameter_groups(gpt, hp)
    embed_lr = hp.tied_embed_lr if hp.tie_embeddings else hp.embed_lr
    rates = {"embed": embed_lr, "head": hp.head_lr, "scalar": hp.scalar_lr}
    adam_groups = [{"params": params[name], "lr": rates[name]} for name in rates if params[name]]
    adam = torch.optim.Adam(adam_groups, betas=(hp.beta1, hp.beta2), eps=hp.adam_eps, fused=True)
    settings = {"momentum": hp.muon_momentum, "backend_steps": hp.muon_backend_steps}
    dtype = torch.bfloat16 if gpt.dtype == torch.bfloat16 else torch.float32
    muon = Muon(params["matrix"], hp.matrix_lr, **settings, dtype=dtype, compiled=compiled)
    names = {param: name for name, param in gpt.named_parameters()}
    for group in adam.param_groups + muon.param_groups:
        group["base_lr"] = group["lr"]
        group["names"] = [names[param] for param in group["params"]]  # see load_optimizer
    return [adam, muon]


# ---- Schedules ------------------
def progress(hp: Hyperparameters, step: int, elapsed_ms: float) -> float:
    """Fraction of the run that is done, in steps or in training time, whichever is larger."""
    cap_ms = 1000 * hp.max_wallclock_seconds
    in_time = elapsed_ms / cap_ms if cap_ms > 0 else 0.0
    return min(max(step / max(hp.iterations, 1), in_time), 1.0)


def lr_factor(hp: Hyperparameters, step: int, elapsed_ms: float) -> float:
    """Learning-rate multiplier at this step (from 0) and training time: 1, then linear to 0 over
    WARMDOWN_FRAC of the run, else over WARMDOWN_ITERS steps (with a cap, the time they take)."""
    if hp.warmdown_frac > 0:
        return min((1 - progress(hp, step, elapsed_ms)) / hp.warmdown_frac, 1.0)
    if hp.warmdown_iters <= 0:
        return 1.0
    if hp.max_wallclock_seconds <= 0:
        return min(max(hp.iterations - step, 0) / hp.warmdown_iters, 1.0)
    # ITERATIONS does not count: a run that it ends may keep its full rate.
    remaining_ms = max(1000 * hp.max_wallclock_seconds - elapsed_ms, 0.0)
    warmdown_ms = hp.warmdown_iters * elapsed_ms / max(step, 1)  # 0 at step 0: then the full rate
    return remaining_ms / warmdown_ms if remaining_ms < warmdown_ms else 1.0


def muon_momentum(hp: Hyperparameters, step: int) -> float:
    """Momentum at this step. 0.85 averages about 7 gradients (1 / (1 - 0.85)), 0.95 about 20."""
    warmup_steps = hp.muon_momentum_warmup_steps
    done = min(step / warmup_steps, 1.0) if warmup_steps > 0 else 1.0
    return (1 - done) * hp.muon_momentum_warmup_start + done * hp.muon_momentum


def set_schedule(optimizers: list[torch.optim.Optimizer], factor: float, momentum: float) -> None:
    """Set all learning rates to factor times their base_lr, and Muon's momentum."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group["base_lr"]
            if isinstance(optimizer, Muon):
                group["momentum"] = momentum


# ---- Data -----------------------
SHARD_HEADER_BYTES = 1024  # 256 little-endian int32: magic 20240520, version 1, tokens, zeros


def load_data_shard(path: str | Path) -> Tensor:
    """The tokens of a shard, uint16 (n,), memory-mapped. Raises InputError naming the file."""
    try:
        size = os.path.getsize(path)
        header = np.fromfile(path, "<i4", 3).tolist()
        if header == [20240520, 1, (size - SHARD_HEADER_BYTES) / 2]:
            words = torch.from_file(str(path), size=size // 2, dtype=torch.uint16)
            return words[SHARD_HEADER_BYTES // 2 :]
    except (OSError, RuntimeError, UnicodeError) as error:
        raise InputError(f"{path} cannot be read: {error}: get it again (or see ulimit)") from None
    raise InputError(f"{path}: not a whole shard ({size} bytes, header {header}): get it again")


class TokenStream:
    """The tokens of all shards that match a pattern, in name order, forever."""

    def __init__(self, pattern: str, vocab_size: int = 2**16) -> None:
        self.vocab_size = vocab_size
        self.paths = sorted(glob.glob(pattern))
        self.shards = [load_data_shard(path) for path in self.paths]
        if not any(map(len, self.shards)):
            problem = f"DATA_PATH: no file or no token in {pattern}"
            raise InputError("\n".join([*unknown_knobs(), problem, WAYS_TO_DATA]))
        self.shard = 0  # index of the current shard
        self.position = 0  # of the next token in it

    def take(self, n: int) -> Tensor:
        """The next n tokens, uint16 (n,)."""
        parts = []
        while n > 0:
            part = self.shards[self.shard][self.position : self.position + n]
            largest = part.numpy().max(initial=0)
            if largest >= self.vocab_size:
                path, knob = self.paths[self.shard], f"VOCAB_SIZE={self.vocab_size}"
                problem = f"{path}: token id {largest} is of another tokenizer than {knob}"
                raise InputError(f"{problem}: set it and TOKENIZER_PATH")
            parts.append(part)
            n -= len(part)
            self.position += len(part)
            if self.position >= len(self.shards[self.shard]):
                self.shard = (self.shard + 1) % len(self.shards)
                self.position = 0
        return torch.cat(parts)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Start a copy to the device. Pinned memory lets the host continue without waiting."""
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


class DistributedTokenLoader:
    """Gives each rank its own part of one token stream. A step reads the same tokens for any W."""

    def __init__(
        self, pattern: str, rank: int, world_size: int, device: Any, vocab_size: int = 2**16
    ) -> None:
        self.stream = TokenStream(pattern, vocab_size)
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)

    def next_batch(
        self, global_tokens: int, seq_len: int, grad_accum_steps: int
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 (B, T), of one micro-step. global_tokens: of the whole step."""
        span = global_tokens // (self.world_size * grad_accum_steps) + 1  # with the last target
        tokens = self.stream.take(self.world_size * span)
        tokens = upload(tokens.view(-1, span)[self.rank], self.device).to(torch.int64)
        return tokens[:-1].view(-1, seq_len), tokens[1:].view(-1, seq_len)


# ---- Training -------------------
class TrainingState:
    """All that a step uses. An average of the weights goes into its first three methods."""

    def __init__(self, hp: Hyperparameters, runtime: "Runtime") -> None:
        random.seed(hp.seed)
        np.random.seed(hp.seed)
        torch.manual_seed(hp.seed)  # CPU and CUDA
        self.hp = hp
        self.runtime = runtime
        place = (runtime.rank, runtime.world_size, runtime.device)
        self.loader = DistributedTokenLoader(hp.files("train"), *place, hp.vocab_size)
        self.gpt = GPT(hp, runtime.dtype).to(runtime.device)
        self.optimizers = build_optimizers(self.gpt, runtime.compiled)
        self.model = wrap(self.gpt, runtime.compiled)
        is_fp16 = runtime.dtype == torch.float16  # small gradients need a scale, else they are 0
        self.scaler = torch.amp.GradScaler(runtime.device.type, enabled=is_fp16)
        self.stopwatch = Stopwatch(runtime.device)
        self.step = 0
        self.tokens = 0  # trained
        self.skipped_steps = 0  # with fp16: a gradient was not finite
        self.is_skipped = False  # the last step
        self.train_loss = 0.0  # of the last logged step, the mean of all ranks
        self.signum = 0  # of the first signal that this rank got; 0: none
        self.is_saved = True  # rank 0's last checkpoint and models
        self.inputs = {"script": binascii.crc32(runtime.source)}  # checksums; run() adds others
        self.outputs: dict[str, int] = {}  # checksums of the model files that this rank wrote

    def state_dict(self, device: str = "cpu") -> dict[str, Any]:
        """Copy everything that a resumed run needs and that warm_up restores."""
        stream = self.loader.stream
        state = {
            "step": self.step, "tokens": self.tokens, "train_ms": self.stopwatch.elapsed_ms(),
            "knobs": asdict(self.hp), "script": self.inputs["script"],
            "stream": (stream.shard, stream.position), "shards": [*map(len, stream.shards)],
            "model": self.gpt.state_dict(), "scaler": self.scaler.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }  # fmt: skip
        return copy_tensors(state, device)

    def load_state_dict(self, saved: Mapping[str, Any], name: str = "the checkpoint") -> None:
        stream = self.loader.stream
        if saved["stream"][0] >= len(stream.shards):
            raise InputError(f"{name} needs more train shards than DATA_PATH has: download them")
        if len(saved["optimizers"]) != len(self.optimizers):
            raise InputError(f"{name} is of other optimizers: use its script")
        load_model(self.gpt, saved["model"], name)
        same = all(saved["model"][key].dtype == p.dtype for key, p in self.gpt.named_parameters())
        for optimizer, saved_optimizer in zip(self.optimizers, saved["optimizers"], strict=True):
            load_optimizer(optimizer, saved_optimizer, keep_dtypes=same)
        if saved["scaler"]:  # else it is not of an fp16 run
            self.scaler.load_state_dict(saved["scaler"])
        stream.shard, stream.position = saved["stream"]
        self.step = saved["step"]
        self.tokens = saved["tokens"] or saved["step"] * self.hp.train_batch_tokens
        self.stopwatch.reset(saved["train_ms"])

    def request_stop(self, signum: int, frame: Any) -> None:
        """Signal handler: stop after the current step."""
        if self.signum == 0 and self.runtime.rank == 0 and sys.stdout is not None:
            with suppress(OSError):  # print is unsafe here
                os.write(1, f"\nsignal:{signum}: stopping after this step\n".encode())
        self.signum = self.signum or signum


def train_step(state: TrainingState) -> Tensor:
    """Take one optimizer step. Returns the mean loss of this rank's tokens."""
    hp = state.hp
    grad_accum_steps = hp.batch_slots // state.runtime.world_size
    total_loss = torch.zeros((), device=state.runtime.device)
    random.seed(1_000_003 * hp.seed + state.step)  # alike on all ranks, and if resumed
    np.random.seed([hp.seed, state.step])
    state.gpt.zero_grad()
    for micro_step in range(grad_accum_steps):
        seed_dropout(state, micro_step)
        if dist.is_initialized():
            # Read in DDP's forward pass: only the last backward pass averages over ranks.
            state.model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
        batch = state.loader.next_batch(hp.train_batch_tokens, hp.train_seq_len, grad_accum_steps)
        loss = state.model(*batch) * (1 / grad_accum_steps)
        state.scaler.scale(loss).backward()
        total_loss += loss.detach()
    state.is_skipped = state.scaler.is_enabled() and not unscale_gradients(state)
    if hp.grad_clip_norm > 0:
        nn.utils.clip_grad_norm_(state.gpt.parameters(), hp.grad_clip_norm)
    if not state.is_skipped:
        for optimizer in state.optimizers:
            optimizer.step()
    return total_loss


def seed_dropout(state: TrainingState, micro_step: int) -> None:
    """Give each slot its own seed, so that any number of ranks draws the same dropout."""
    slot = micro_step * state.runtime.world_size + state.runtime.rank
    seed = 1_000_003 * state.hp.seed + state.step * state.hp.batch_slots + slot
    torch.default_generator.manual_seed(seed)
    if state.runtime.device.type == "cuda":
        torch.cuda.manual_seed(seed)


def train(state: TrainingState, validation: "Validation") -> int:
    """Train up to a limit or a signal. Returns the signal's number; 0: none."""
    hp, gather = state.hp, state.runtime.gather
    cap_ms = 1000 * hp.max_wallclock_seconds
    set_signal_action(state.request_stop)
    while True:  # all exits are at the top, where all ranks agree
        clocks, signals = zip(*gather((state.stopwatch.elapsed_ms(), state.signum)), strict=True)
        elapsed_ms = clocks[0]  # one clock, so that all learning rates agree
        if state.step >= hp.iterations or (cap_ms > 0 and elapsed_ms >= cap_ms):
            state.stopwatch.pause()
            return 0  # the run is exported, whatever its loss
        if not math.isfinite(state.train_loss):
            advice = "check the model and DTYPE" if state.step == 1 else "set lower learning rates"
            raise InputError(f"train_loss is {state.train_loss}: {advice}")
        if max(signals) > 0:
            return max(signals)
        if hp.val_loss_every > 0 and state.step % hp.val_loss_every == 0:
            validate(state, validation)
        state.stopwatch.start()
        factor = lr_factor(hp, state.step, elapsed_ms)
        set_schedule(state.optimizers, factor, muon_momentum(hp, state.step))
        rank_loss = train_step(state)
        state.step += 1
        state.tokens += hp.train_batch_tokens
        state.skipped_steps += int(state.is_skipped)
        # Near the cap (four steps of the whole run's average), wait for this one: it ends on time.
        is_near_cap = state.step <= 3 or elapsed_ms * (1 + 4 / state.step) >= cap_ms
        state.stopwatch.lap(wait=cap_ms > 0 and is_near_cap)
        log_step(state, rank_loss)
        if hp.checkpoint_every > 0 and state.step % hp.checkpoint_every == 0:
            state.is_saved = save_checkpoint(state)


def warm_up(state: TrainingState) -> None:
    """Take WARMUP_STEPS steps to compile, off the clock. They train nothing."""
    wanted = state.hp.warmup_steps
    start = state.state_dict()
    # One step at least: DDP then adds in another order, and a resumed run must round alike.
    num_steps = max(wanted, 1)
    for step in range(1, num_steps + 1):
        state.runtime.log.status(f"warm-up: step {step} of {num_steps}")
        train_step(state)
        for name, param in state.gpt.named_parameters() if step == 1 else ():
            if param.requires_grad and param.grad is None:
                raise InputError(f"{name} got no gradient: use it, or set requires_grad=False")
        if step <= wanted and (wanted <= 20 or step % 10 == 0 or step == wanted):
            state.runtime.log(f"warmup_step:{step}/{wanted}")
    state.load_state_dict(start)


# ---- Evaluation -----------------
# Scores are in bits per byte (BPB): cross-entropy in bits over the bytes of the text. For more
# context, windows may begin EVAL_STRIDE tokens apart. Each target counts in its first window.
class Validation:
    """The validation split, cut to whole sequences plus one target."""

    def __init__(self, hp: Hyperparameters) -> None:
        self.hp = hp
        T = hp.train_seq_len
        knob = f"TOKENIZER_PATH={hp.tokenizer_path!r}"
        try:
            tokenizer = SentencePieceProcessor(model_file=hp.tokenizer_path)
        except (OSError, RuntimeError) as error:
            problem = f"{knob}: {error}"
            raise InputError("\n".join([*unknown_knobs(), problem, WAYS_TO_DATA])) from None
        size = tokenizer.vocab_size()
        if size != hp.vocab_size:
            advice = f"set TOKENIZER_PATH to the shards' tokenizer, or VOCAB_SIZE={size}"
            raise InputError(f"{knob} has {size} pieces, not VOCAB_SIZE={hp.vocab_size}: {advice}")
        stream = TokenStream(hp.files("val"), hp.vocab_size)
        tokens = stream.take(sum(len(shard) for shard in stream.shards))
        whole = (len(tokens) - 1) // T  # sequences
        if whole == 0:
            problem = f"{len(tokens)} validation tokens are too few for TRAIN_SEQ_LEN={T}"
            raise InputError(f"{problem}: lower it (PRESET=demo has 128), or use a longer text")
        kept = min(max(hp.max_val_tokens // T, 1), whole) if hp.max_val_tokens > 0 else whole
        self.tokens = tokens[: kept * T + 1]  # uint16
        self.part = f" tokens:{kept * T} of {whole * T}" if kept < whole else ""
        self.inputs = {"val_tokens": binascii.crc32(tokens.numpy())}  # checksums
        self.inputs["tokenizer"] = binascii.crc32(Path(hp.tokenizer_path).read_bytes())
        self.num_bytes = count_bytes(tokenizer, self.tokens.numpy())
        self.is_tokenizer_right = retokenizes(tokenizer, tokens.numpy())

    def bits_per_byte(self, loss: float) -> float:
        """Convert a mean loss in nats per token."""
        return loss / math.log(2) * (len(self.tokens) - 1) / self.num_bytes

    def format(self, loss: float, digits: int = 4) -> str:
        return f"val_loss:{loss:.{digits}f} val_bpb:{self.bits_per_byte(loss):.{digits}f}"


@torch.no_grad()
def evaluate(
    model: nn.Module, tokens: Tensor, stride: int, hp: Hyperparameters, runtime: "Runtime"
) -> Tensor:
    """Losses of tokens[1:] in nats, fp32 (n,), in windows `stride` apart; 0 if of other ranks."""
    T = hp.train_seq_len
    num_targets = len(tokens) - 1
    starts = [*range(0, num_targets - T, stride), num_targets - T]
    my_first = len(starts) * runtime.rank // runtime.world_size
    my_end = len(starts) * (runtime.rank + 1) // runtime.world_size
    batch_size = max(min(hp.val_batch_size // hp.batch_slots // T, my_end - my_first), 1)
    losses = torch.zeros(num_targets, device=runtime.device)
    model.eval()
    for first in range(my_first, my_end, batch_size):
        runtime.log.status(f"validation: window {first - my_first} of {my_end - my_first}")
        # Pad the last batch with its last window: a new shape would recompile.
        batch_starts = [starts[min(i, my_end - 1)] for i in range(first, first + batch_size)]
        windows = torch.stack([tokens[start : start + T + 1] for start in batch_starts])
        windows = upload(windows, runtime.device).long()  # (B, T + 1)
        batch_losses = model(windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), "none")
        for row, i in enumerate(range(first, min(first + batch_size, my_end))):
            first_new = starts[i - 1] + T if i > 0 else 0  # the first that window i - 1 lacks
            losses[first_new : starts[i] + T] = batch_losses[row, first_new - starts[i] :]
    model.train()
    return losses


def mean_loss(losses: Tensor, runtime: "Runtime") -> float:
    """Mean over all targets, on every rank. losses: as evaluate returns them."""
    return sum(runtime.gather(losses.sum(dtype=torch.float64).item())) / len(losses)


def validate(state: TrainingState, validation: Validation) -> float:
    """Pause the clock, log the validation loss and return it."""
    hp = state.hp
    state.stopwatch.pause()
    losses = evaluate(state.model, validation.tokens, hp.train_seq_len, hp, state.runtime)
    loss = mean_loss(losses, state.runtime)
    score, times = validation.format(loss), state.stopwatch.report(state.step)
    state.runtime.log(f"step:{state.step}/{hp.iterations} {score} {times}")
    return loss


def final_losses(model: nn.Module, validation: Validation, runtime: "Runtime") -> Tensor:
    """Losses of the final score, as evaluate returns them. Test-time training belongs here."""
    hp = validation.hp
    stride = hp.eval_stride if hp.eval_stride > 0 else hp.train_seq_len
    return evaluate(model, validation.tokens, stride, hp, runtime)


def count_bytes(tokenizer: SentencePieceProcessor, tokens: np.ndarray) -> int:
    """UTF-8 bytes of tokens[1:]. A leading space does not count after a token without text."""
    ids = [*range(tokenizer.vocab_size())]
    others = (tokenizer.IsControl(ids), tokenizer.IsUnknown(ids), tokenizer.IsUnused(ids))
    has_text = ~np.any(others, axis=0)
    # Without CaseOps's marks of capitals. "\u2581" is SentencePiece's mark of a space.
    pieces = [piece.translate({1: None, 2: None}) for piece in tokenizer.IdToPiece(ids)]
    leading_space = np.array([piece.startswith("\u2581") for piece in pieces]) & has_text
    lengths = [len(p.removeprefix("\u2581").replace("\u2581", " ").encode()) for p in pieces]
    num_bytes = np.where(tokenizer.IsByte(ids), 1, lengths) * has_text
    before, targets = tokens[:-1], tokens[1:]
    total = num_bytes[targets].sum() + (leading_space[targets] & has_text[before]).sum()
    first, second, third = tokenizer.PieceToId(["<0xE2>", "<0x96>", "<0x81>"])
    has_space_piece = tokenizer.PieceToId("\u2581") != tokenizer.unk_id()
    has_byte_pieces = first != tokenizer.unk_id()
    if has_byte_pieces and not has_space_piece:  # these three are a space: 1 byte, or 0
        is_space = (targets[:-2] == first) & (targets[1:-1] == second) & (targets[2:] == third)
        total -= (3 - has_text[before[:-2]][is_space]).sum()
    return int(total)


# ---- Export ---------------------
SIZE_LIMIT = 16_000_000  # bytes of artifact and code together
INT8_KEEP_FLOAT_MAX_NUMEL = 65_536  # up to this, a tensor stays in floating point
INT8_CLIP_QUANTILE = 0.9999984
INT8_LEVELS = 127  # on each side of zero; 31 is int6, but the floor limits what rows use
INT8_SCALE_FLOOR = 1 / 127  # matrices: a row of values up to 0.1 uses 13 levels a side


def quantize_rows(rows: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """int8 values of fp32 rows, clamped to a high quantile of |w|, and scales (n, 1)."""
    if rows.size(1) <= 2**24:  # the limit of torch.quantile
        clip = rows.abs().quantile(INT8_CLIP_QUANTILE, dim=1, keepdim=True)
        rows = rows.clamp(-clip, clip)
    scale = (rows.abs().amax(dim=1, keepdim=True) / INT8_LEVELS).clamp_min(floor)
    scale = torch.where(scale == 0, 1.0, scale)
    return (rows / scale).round().clamp(-INT8_LEVELS, INT8_LEVELS).to(torch.int8), scale


def quantize_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values and their scale: fp16, one per row of a matrix; fp32, one for other tensors."""
    if weight.ndim == 2:
        values, scale = quantize_rows(weight.float(), INT8_SCALE_FLOOR)
        return values, scale[:, 0].half()
    values, scale = quantize_rows(weight.float().reshape(1, -1), 0.0)
    return values.view(weight.shape), scale[0, 0]


def quantize_state_dict_int8(
    state_dict: Mapping[str, Tensor], hp: Hyperparameters = Hyperparameters()
) -> tuple[dict[str, Any], dict[str, int]]:
    """Round large tensors to int8. Returns an object to save, and statistics. hp: for patterns."""
    keep_patterns = hp.int8_keep_float_fp32_name_patterns
    parts = ("quantized", "scales", "dtypes", "passthrough")
    obj: dict[str, Any] = {"__quant_format__": "int8_clean_per_row_v1", **{p: {} for p in parts}}
    for name, tensor in state_dict.items():
        tensor = tensor.detach().cpu().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.is_floating_point() and tensor.numel() > INT8_KEEP_FLOAT_MAX_NUMEL:
            obj["quantized"][name], obj["scales"][name] = quantize_tensor(tensor)
            obj["dtypes"][name] = dtype
            if tensor.ndim == 2:
                obj.setdefault("qmeta", {})[name] = {"scheme": "per_row", "axis": 0}
        elif tensor.is_floating_point() and is_control_tensor(name, keep_patterns):
            obj["passthrough"][name] = tensor.float()
        elif tensor.dtype in (torch.float32, torch.bfloat16):
            obj["passthrough"][name] = tensor.half()
            obj.setdefault("passthrough_orig_dtypes", {})[name] = dtype
        else:
            obj["passthrough"][name] = tensor
    stored = [*obj["quantized"].values(), *obj["scales"].values(), *obj["passthrough"].values()]
    return obj, {
        "param_count": sum(tensor.numel() for tensor in state_dict.values()),
        "num_float_tensors": len(obj["quantized"]), "num_tensors": len(state_dict),
        "num_nonfloat_tensors": sum(not t.is_floating_point() for t in state_dict.values()),
        "baseline_tensor_bytes": sum(tensor.nbytes for tensor in state_dict.values()),
        "int8_payload_bytes": sum(tensor.nbytes for tensor in stored),
    }  # fmt: skip


def dequantize_state_dict_int8(obj: Mapping[str, Any]) -> dict[str, Tensor]:
    """Undo quantize_state_dict_int8: a state_dict in its dtypes, but control tensors in fp32."""
    tensors = {name: tensor.clone() for name, tensor in obj["passthrough"].items()}
    for name, values in obj["quantized"].items():
        scale = obj["scales"][name].float()  # one, or one per row
        tensors[name] = values.float() * scale.view(-1, *[1] * (values.ndim - 1))
    for name, dtype in (obj["dtypes"] | obj.get("passthrough_orig_dtypes", {})).items():
        tensors[name] = tensors[name].to(getattr(torch, dtype))
    return tensors


def compress(data: bytes) -> bytes:
    return zlib.compress(data, 9)


def decompress(data: bytes) -> bytes:
    return zlib.decompress(data)


def export(gpt: nn.Module, hp: Hyperparameters, runtime: "Runtime") -> tuple[bytes, str]:
    """Quantize and compress the weights. Returns the artifact, and the log's lines about sizes."""
    state_dict = gpt.state_dict()
    obj, stats = quantize_state_dict_int8(state_dict, hp)
    raw = serialize(obj)
    artifact = compress(raw)
    plain = len(serialize(state_dict))
    code = len(runtime.source)
    payload = stats["int8_payload_bytes"]
    total = len(artifact) + code
    return artifact, (
        f"Serialized model: {plain} bytes\n"
        f"Code size: {code} bytes\n"
        f"Total submission size: {plain + code} bytes\n"
        f"Serialized model int8+zlib: {len(artifact)} bytes (payload:{payload} "
        f"raw_torch:{len(raw)} payload_ratio:{stats['baseline_tensor_bytes'] / payload:.2f}x)\n"
        f"Total submission size int8+zlib: {total} bytes\n"
        f"size_check:{'fits' if total <= SIZE_LIMIT else 'too_large'} limit:{SIZE_LIMIT} "
        f"bytes_left:{SIZE_LIMIT - total}"
    )


# ---- The run --------------------
def finish(state: TrainingState, validation: Validation) -> int:
    """Write the model first: scoring may fail. Then score it. Returns the exit code."""
    hp, runtime = state.hp, state.runtime
    if hp.checkpoint_every > 0 and state.step % hp.checkpoint_every > 0:
        state.is_saved = save_checkpoint(state)
    artifact, report = runtime.from_rank_0(lambda: write_model(state))
    # The models are safe: from now on a signal ends the process. PID 1 ignores SIG_DFL.
    set_signal_action(signal.SIG_DFL if os.getpid() > 1 else lambda n, frame: os._exit(128 + n))
    signals, are_saved = zip(*runtime.gather((state.signum, state.is_saved)), strict=True)
    if max(signals) > 0:
        runtime.log(f"stopped: signal:{max(signals)}: not scored, use tests/tools/score.py")
        return 128 + max(signals) if all(are_saved) else 1
    pre_quant_loss = validate(state, validation)
    log_end(state, report)
    load_weights(state.gpt, artifact, "the exported artifact")  # state.model shares its weights
    started = time.perf_counter()
    loss = mean_loss(final_losses(state.model, validation, runtime), runtime)
    eval_ms = 1000 * (time.perf_counter() - started)
    scores = {
        "val_loss": loss, "val_bpb": validation.bits_per_byte(loss), "eval_ms": eval_ms,
        "bytes_total": len(artifact) + len(runtime.source), "pre_quant_val_loss": pre_quant_loss,
        "pre_quant_val_bpb": validation.bits_per_byte(pre_quant_loss),
    }  # fmt: skip
    written = runtime.from_rank_0(lambda: write_result(state, scores))
    runtime.log(f"files: {shlex.join(written)}")
    log_score("final_int8_zlib_roundtrip", loss, eval_ms, validation, runtime)
    return int(not all(are_saved) or len(written) < len(FINAL_FILES) or not math.isfinite(loss))


def run() -> int:
    """Train and score a model. Returns the exit code."""
    hp = Hyperparameters.from_env(os.environ)
    runtime = open_runtime(hp)
    prepare_demo(hp, runtime)
    compare_ranks(hp, runtime)
    state = TrainingState(hp, runtime)
    check_patterns(state.gpt)
    validation = Validation(hp)
    state.inputs |= validation.inputs
    log_settings(state.gpt, validation, runtime)
    load_checkpoint(state)
    with lock(hp.output_dir, runtime.rank):
        runtime.from_rank_0(lambda: move_older_files(hp, None, *FINAL_FILES))
    runtime.from_rank_0(lambda: runtime.log.open(hp, runtime.source))
    warm_up(state)
    signum = train(state, validation)
    if signum > 0:
        return stop(state, signum)
    return finish(state, validation)


# You can skip the rest at first: it reads knobs, starts processes, keeps files safe.
# ---- Knobs ----------------------
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def parse_knob(name: str, kind: type, text: str) -> Any:
    if kind == tuple[str, ...]:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if kind is str:
        return os.path.expanduser(text)  # `env RESUME=~/a.pt`
    try:
        value = {"0": False, "1": True}[text] if kind is bool else kind(text)
    except (KeyError, TypeError, ValueError):
        value = None
    if value is None or (kind is float and not math.isfinite(value)):
        kinds = {bool: "0 or 1", int: "a whole number", float: "a finite number"}
        wanted = kinds.get(kind, "of type bool, int, float or str")
        raise InputError(f"{name.upper()}={text!r} must be {wanted}")
    return value


def check_knobs(hp: Hyperparameters) -> None:
    H, T = hp.num_heads, hp.train_seq_len
    unit = hp.batch_slots * T
    units = f"{unit}: BATCH_SLOTS={hp.batch_slots} times TRAIN_SEQ_LEN={T}"
    rules = [  # Numbers whose comments have "0:" may be below 0.
        (["preset"], lambda x: x in PRESETS, "'' or demo; see tests/records/train_record.py"),
        (("val_batch_size", "train_batch_tokens", "batch_slots", "train_seq_len", "vocab_size",
          "num_layers", "model_dim", "num_heads", "num_kv_heads", "mlp_mult", "rope_base",
          "logit_softcap", "adam_eps"), lambda x: x > 0, "above 0"),
        (("iterations", "qk_gain_init", "tied_embed_init_std", "muon_backend_steps", "embed_lr",
          "head_lr", "tied_embed_lr", "matrix_lr", "scalar_lr"), lambda x: x >= 0, "0 or more"),
        (("muon_momentum", "muon_momentum_warmup_start", "beta1", "beta2"),
         lambda x: 0 <= x < 1, "at least 0 and below 1"),
        (["seed"], lambda x: 0 <= x < 2**32, "at least 0 and below 2**32"),
        (["warmdown_frac"], lambda x: x <= 1, "at most 1"),
        (["eval_stride"], lambda x: x <= T, f"at most TRAIN_SEQ_LEN={T}"),
        (["model_dim"], lambda x: x % (2 * H) == 0, f"an even multiple of NUM_HEADS={H}"),
        (["num_kv_heads"], lambda x: H % x == 0, f"a divisor of NUM_HEADS={H}"),
        (["train_batch_tokens"], lambda x: x % unit == 0, f"a multiple of {units}"),
        (["val_batch_size"], lambda x: x >= unit, f"at least {units}"),
        (["device"], lambda x: x in ("auto", "cuda", "cpu"), "auto, cuda or cpu"),
        (["dtype"], lambda x: x in ("auto", *DTYPES), "auto, bf16, fp16 or fp32"),
        (["compile"], lambda x: x in ("auto", "1", "0"), "auto, 1 or 0"),
        (["run_id"], lambda x: x[:1] not in ("", ".") and "/" not in x, "a file name"),
    ]  # fmt: skip
    for names, is_valid, rule in rules:
        for name in names:
            if not is_valid(value := getattr(hp, name)):
                raise InputError(f"{name.upper()}={value!r} must be {rule}")


def check_patterns(gpt: GPT) -> None:
    names = " ".join(name for name, _ in gpt.named_parameters())
    for pattern in {*gpt.hp.control_tensor_name_patterns} - {*CONTROL_TENSOR_NAME_PATTERNS}:
        if pattern not in names:
            [nearest] = difflib.get_close_matches(pattern, names.replace(".", " ").split(), 1, 0.0)
            problem = f"CONTROL_TENSOR_NAME_PATTERNS: {pattern} is in no parameter's name"
            raise InputError(f"{problem}: did you mean {nearest}?")


def unknown_knobs() -> Iterator[str]:
    """Lines about variables that look like knobs."""
    knobs = [knob.name.upper() for knob in fields(Hyperparameters)]
    usual_names = dict(LR="MATRIX_LR", LEARNING_RATE="MATRIX_LR", BATCH_SIZE="TRAIN_BATCH_TOKENS")
    usual_names |= dict(STEPS="ITERATIONS", MAX_STEPS="ITERATIONS", EPOCHS="ITERATIONS")
    for name in sorted(os.environ.keys() - {*knobs}):
        text = usual_names.get(name.upper(), name.upper())
        if "ACCUM" in text and "STEP" in text:
            yield f"unknown_knob:{name} is ignored: set BATCH_SLOTS to accumulation steps x GPUs"
        for knob in difflib.get_close_matches(text, knobs, n=1, cutoff=0.85):
            yield f"unknown_knob:{name} is ignored: did you mean {knob}?"


# ---- Runtime --------------------
def gpu_report() -> str:
    try:
        result = subprocess.run("nvidia-smi", capture_output=True, errors="replace", timeout=20)
        return result.stdout.rstrip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no answer from nvidia-smi: {error}"


@dataclass
class Log:
    """Buffers lines until open(), then writes them to console and file. Rank 0 opens it."""

    waiting: list[str] = field(default_factory=list)
    file: TextIO | None = None
    is_terminal: bool = False

    def open(self, hp: Hyperparameters, source: bytes) -> None:
        """Call this late: an input error leaves no file."""
        path = Path(hp.output_dir, "logs", f"{hp.run_id}.txt")
        versions = f"Running Python {sys.version}\nRunning PyTorch {torch.__version__}"
        text = source.decode(errors="backslashreplace")
        header = f"{versions}\nscript_bytes:{len(text.encode())}\n{gpu_report()}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(path, "a", encoding="utf-8", errors="backslashreplace", buffering=1)
            print(text, "=" * 100, header, "=" * 100, sep="\n", file=self.file)
        except OSError as error:
            raise InputError(f"OUTPUT_DIR={hp.output_dir!r} cannot be written: {error}") from None
        self.is_terminal = sys.stdout is not None and sys.stdout.isatty()
        for line in (str(path), *self.waiting):
            self(line)

    def __call__(self, line: str) -> None:
        if self.file is None:
            self.waiting.append(line)
            return
        with suppress(OSError):  # a full disk
            print(line, file=self.file)
        self.show(f"{line}\n")

    def status(self, text: str) -> None:
        if self.is_terminal:
            self.show(text[: (shutil.get_terminal_size().columns or 80) - 1])

    def show(self, text: str) -> None:
        clear_line = "\r\x1b[K" if self.is_terminal else ""
        try:
            print(clear_line + text, end="", flush=True)
        except OSError:  # the terminal or pipe is gone
            sys.stdout = None  # else Python would fail at its exit


@dataclass(frozen=True)
class Runtime:
    """This process's rank, device, log."""

    rank: int
    world_size: int  # W
    device: torch.device
    dtype: torch.dtype  # of activations
    compiled: bool
    source: bytes = b""  # of this file, when the run began
    log: Log = field(default_factory=Log)
    started: float = field(default_factory=time.perf_counter)  # in seconds

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        values = [value] * self.world_size
        if dist.is_initialized():
            dist.all_gather_object(values, value)
        return values

    def from_rank_0(self, job: Callable[[], Any]) -> Any:
        """Call job on rank 0 alone. Returns its result, or raises its user error, on all ranks."""
        shared: list[Any] = [None]  # broadcast_object_list fills it in
        if self.rank == 0:
            try:
                shared = [job()]
            except (InputError, OSError) as error:
                shared = [error]
        if dist.is_initialized():
            dist.broadcast_object_list(shared, src=0)
        if isinstance(shared[0], Exception):
            raise shared[0]
        return shared[0]


def open_device(hp: Hyperparameters, local_rank: int) -> torch.device:
    num_gpus = torch.cuda.device_count()
    if hp.device == "cpu" or (hp.device == "auto" and num_gpus == 0):
        return torch.device("cpu")
    if local_rank >= num_gpus:
        raise InputError(f"no GPU {local_rank}; torch sees {num_gpus} GPUs: set DEVICE=cpu")
    torch.cuda.set_device(local_rank)
    torch.backends.cuda.matmul.allow_tf32 = True
    return torch.device("cuda", local_rank)


def open_runtime(hp: Hyperparameters) -> Runtime:
    """Open the device and, under torchrun, the process group."""
    # Else torch 2.10 to 2.14 lose gradients of parameters used in chunks (pytorch 193061).
    os.environ.setdefault("TORCHINDUCTOR_MIX_ORDER_REDUCTION", "0")
    distributed = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    rank = parse_knob("rank", int, os.environ["RANK"]) if distributed else 0
    world_size = parse_knob("world_size", int, os.environ["WORLD_SIZE"]) if distributed else 1
    if world_size <= 0 or hp.batch_slots % world_size != 0:
        raise InputError(f"WORLD_SIZE={world_size} must divide BATCH_SLOTS={hp.batch_slots}")
    device = open_device(hp, parse_knob("local_rank", int, os.environ.get("LOCAL_RANK", "0")))
    on_gpu = device.type == "cuda"
    if not on_gpu and "OMP_NUM_THREADS" not in os.environ:
        # Waiting threads spin. If another program takes a core, one thread fewer is faster.
        torch.set_num_threads(max(torch.get_num_threads() - 1, 1))
    if not on_gpu:
        # glibc would return freed memory to the kernel in each step, and fault it in again.
        with suppress(AttributeError):  # other C libraries have no mallopt
            ctypes.CDLL(None).mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
            ctypes.CDLL(None).mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD, at most
    if distributed:
        try:
            store, _, _ = next(dist.rendezvous("env://"))
        except (ValueError, dist.DistError) as error:
            problem = str(error).partition("\n")[0]
            raise InputError(f"{problem}: use torchrun, or unset RANK and WORLD_SIZE") from None
        # After a restart, the old store may hold dead addresses and NCCL's error flag.
        store.delete_key("exception_dump")
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        # gloo syncs the clock on the CPU, so that the GPU queue never drains.
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        dist.barrier()
    auto = "bf16" if on_gpu and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    dtype = DTYPES[auto if hp.dtype == "auto" else hp.dtype]
    compiled = hp.compile == "1" or (hp.compile == "auto" and on_gpu)
    return Runtime(rank, world_size, device, dtype, compiled, SOURCE or Path(__file__).read_bytes())


def compare_ranks(hp: Hyperparameters, runtime: Runtime) -> None:
    """Raise InputError if ranks differ in script, knobs, dtype, torch or sizes of data files."""
    may_differ = ("run_id", "output_dir", "data_path", "tokenizer_path", "resume")
    facts = {knob.upper(): value for knob, value in asdict(hp).items() if knob not in may_differ}
    facts |= {"the script": runtime.source, "dtype": runtime.dtype, "torch": torch.__version__}
    paths = filter(os.path.isfile, [*glob.glob(hp.files("*")), hp.tokenizer_path])
    facts["data files"] = sorted((os.path.basename(path), os.path.getsize(path)) for path in paths)
    first, *others = runtime.gather(facts)
    for rank, other in enumerate(others, start=1):
        if differ := [name for name in first | other if first.get(name) != other.get(name)]:
            raise InputError(f"ranks 0 and {rank} differ in {', '.join(differ)}: make these equal")


def wrap(gpt: GPT, compiled: bool) -> nn.Module:
    """The model to call: compiled, and in DistributedDataParallel if there are several ranks."""
    model = torch.compile(gpt, dynamic=False, fullgraph=True) if compiled else gpt
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        model.broadcast_buffers = False  # torch 2.13 warns of it as an argument
    return model


def unscale_gradients(state: TrainingState) -> bool:
    """Divide fp16 gradients by the loss scale. Returns False if one is not finite."""
    scale = state.scaler.get_scale()
    for optimizer in state.optimizers:
        state.scaler.unscale_(optimizer)
    state.scaler.update()  # halves it if one is not finite, doubles it after 2,000 good steps
    if state.scaler.get_scale() < 1:
        raise InputError("fp16 gradients are not finite even at a loss scale of 1: set DTYPE=fp32")
    return state.scaler.get_scale() >= scale


class Stopwatch:
    """Wall-clock training time, without pauses."""

    def __init__(self, device: torch.device) -> None:
        self.device_module = torch.get_device_module(device)
        self.reset(0.0)

    def reset(self, elapsed_ms: float) -> None:
        self.before_ms = elapsed_ms
        self.started: float | None = None  # in seconds; None: paused
        self.last_step: Any = None  # event at its end

    def start(self) -> None:
        if self.started is None:
            self.device_module.synchronize()
            self.started = time.perf_counter()

    def pause(self) -> None:
        self.device_module.synchronize()
        self.reset(self.elapsed_ms())

    def lap(self, wait: bool = False) -> None:
        """Call after each step. Waits for the step before it, or, if wait is set, for this one."""
        previous = self.last_step
        self.last_step = self.device_module.Event()
        self.last_step.record()
        if previous is not None:
            previous.synchronize()
        if wait:
            self.last_step.synchronize()

    def elapsed_ms(self) -> float:
        running = 0.0 if self.started is None else time.perf_counter() - self.started
        return self.before_ms + 1000 * running

    def report(self, step: int) -> str:
        elapsed_ms = self.elapsed_ms()
        return f"train_time:{elapsed_ms:.0f}ms step_avg:{elapsed_ms / max(step, 1):.2f}ms"


def set_signal_action(action: Any) -> None:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # SLURM's
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup and a shell's & set that
            signal.signal(signum, action)


# ---- Files ----------------------
WEIGHTS, ARTIFACT, RESULT = "final_model.pt", "final_model.int8.ptz", "final_result.json"
FINAL_FILES = (WEIGHTS, ARTIFACT, RESULT)


def copy_tensors(value: Any, device: torch.device | str) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to(device, copy=True), value)


def serialize(obj: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(copy_tensors(obj, "cpu"), buffer)  # a view would be saved with its whole storage
    return buffer.getvalue()


def deserialize(data: bytes, name: str) -> dict[str, Any]:
    """Decompress if needed, then load. Runs no code from the file. Raises InputError on damage."""
    try:
        if not data.startswith(b"PK"):  # as files of torch.save do
            data = decompress(data)
        if damaged := zipfile.ZipFile(io.BytesIO(data)).testzip():
            raise ValueError(f"the checksum of {damaged} is wrong")
        return dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
    except Exception as error:  # of any type; torch's text gives unsafe advice
        problem = f"{type(error).__name__}: {str(error).partition('. ')[0]}"
        raise InputError(f"{name} is damaged or not a model file: {problem}") from None


def load_model(gpt: nn.Module, weights: Mapping[str, Any], name: str) -> None:
    """Load a state_dict. name: of its file, for errors."""
    try:
        gpt.load_state_dict(weights)
    except RuntimeError as error:
        problem = " ".join(str(error).split())[:300].rstrip(" ,")
        advice = "use its run's knobs (final_result.json) and script (in its log)"
        raise InputError(f"{name} does not fit: {advice}: {problem}") from None


def load_weights(gpt: nn.Module, data: bytes, name: str) -> None:
    """Load an artifact, a checkpoint or a state_dict. name: of the file."""
    weights = deserialize(data, name)
    if "__quant_format__" in weights:
        weights = dequantize_state_dict_int8(weights)
    elif "optimizers" in weights:
        weights = weights["model"]
    load_model(gpt, weights, name)


def write_file(path: Path, data: bytes, log: Log) -> bool:
    """Write a temporary file and rename it. If that fails, log a warning and return False."""
    temporary = path.with_name(f"{path.name}.{uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            try:
                os.fsync(file.fileno())  # else a power cut may empty it
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
                    raise  # the three mean: no fsync here
        os.replace(temporary, path)
        return True
    except OSError as error:
        log(f"WARNING: {path} cannot be written: {error.strerror}")
        with suppress(OSError):
            temporary.unlink()  # room for smaller files
        return False


@contextmanager
def lock(folder: str, rank: int = 0) -> Iterator[None]:
    """Let one run on this machine (rank 0) move and write files here."""
    with ExitStack() as stack:
        with suppress(OSError):  # no such folder yet, or a disk without locks
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)  # unlocks, as a process's end does
            fcntl.flock(descriptor, fcntl.LOCK_EX if rank == 0 else fcntl.LOCK_UN)
        yield


def move_older_files(hp: Hyperparameters, log: Log | None, *names: str) -> None:
    """Move files to previous/TIME, of the newest; replace none. Without a log, raise."""
    folder = Path(hp.output_dir, "previous")
    try:
        files = filter(Path.is_file, (Path(hp.output_dir, name) for name in names))
        files = sorted(files, key=os.path.getmtime)
        newest = time.localtime(max(map(os.path.getmtime, files), default=0))
        folder = folder / time.strftime("%y%m%d-%H%M%S", newest)
        while any((folder / file.name).exists() for file in files):
            folder = folder.with_name(f"{folder.name}+")
        for file in files:  # the newest last: a cut move goes on there
            folder.mkdir(parents=True, exist_ok=True)
            os.rename(file, folder / file.name)
    except OSError as error:
        problem = f"older files cannot be moved to {folder}: {error.strerror}"
        if log is None:
            raise InputError(problem) from None
        log(f"WARNING: {problem}")


def write_result(state: TrainingState, scores: dict[str, float]) -> list[str]:
    """Write scores, knobs and checksums. Returns the final files written so far."""
    hp, runtime, train_ms = state.hp, state.runtime, state.stopwatch.elapsed_ms()
    facts = {
        **scores, "steps": state.step, "train_ms": train_ms,
        "tokens_per_second": 1000 * state.tokens / max(train_ms, 1),
        "bytes_code": len(runtime.source), "crc32": state.outputs, "input_crc32": state.inputs,
        "model_params": sum(param.numel() for param in state.gpt.parameters()),
        "peak_memory_mib": torch.cuda.max_memory_allocated() >> 20 or None,
        "torch": torch.__version__, "device": str(runtime.device), "world_size": runtime.world_size,
        "run_seconds": time.perf_counter() - runtime.started, "knobs": asdict(hp),
    }  # fmt: skip
    data = json.dumps(json.loads(json.dumps(facts), parse_constant=lambda name: None), indent=1)
    is_written = write_file(Path(hp.output_dir, RESULT), data.encode(), runtime.log)
    names = [*state.outputs, RESULT] if is_written else [*state.outputs]
    return [str(Path(hp.output_dir, name)) for name in names]


def write_final(state: TrainingState, name: str, data: bytes, *older: str) -> None:
    """Move older files and write a model. No other run writes in between."""
    hp, log = state.hp, state.runtime.log
    state.outputs[name] = binascii.crc32(data)
    with lock(hp.output_dir):
        move_older_files(hp, log, *older)
        write_result(state, {})  # first: no model is without its knobs
        if not write_file(Path(hp.output_dir, name), data, log):
            del state.outputs[name]
            state.is_saved = False


def write_model(state: TrainingState) -> tuple[bytes, str]:
    """Write the weights, then the artifact. Returns what export returns."""
    write_final(state, WEIGHTS, serialize(state.gpt.state_dict()), *FINAL_FILES)
    artifact, report = export(state.gpt, state.hp, state.runtime)
    write_final(state, ARTIFACT, artifact, ARTIFACT)
    return artifact, report


# ---- Checkpoints ----------------
OPTIMIZER_KNOBS = "params names lr base_lr betas eps backend_steps weight_decay".split()


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Any, keep_dtypes: bool) -> None:
    """Restore a state_dict, but not its knobs. keep_dtypes: undo torch's cast to params' dtype."""
    groups, saved_groups = optimizer.state_dict()["param_groups"], saved["param_groups"]
    key = "names" if "names" in saved_groups[0] else "params"  # older ones: running numbers
    old, new = ([(g.get(key), "betas" in g) for g in part] for part in (saved_groups, groups))
    if old != new:
        problem = f"the checkpoint's {type(optimizer).__name__} has parameters in other places"
        raise InputError(f"{problem}: use its script and CONTROL_TENSOR_NAME_PATTERNS")
    for group, old in zip(groups, saved_groups, strict=True):
        group |= {key: value for key, value in old.items() if key not in OPTIMIZER_KNOBS}
    optimizer.load_state_dict({**saved, "param_groups": groups})
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for i, values in saved["state"].items() if keep_dtypes else ():
        state = optimizer.state[params[i]]
        state |= {k: x.to(state[k].device) for k, x in values.items() if isinstance(x, Tensor)}


def save_checkpoint(state: TrainingState) -> bool:
    """Pause the clock and write a checkpoint. Rank 0 writes it; False if it could not."""
    state.stopwatch.pause()
    if state.runtime.rank != 0:
        return True
    path, log = state.hp.checkpoint_path(), state.runtime.log
    saved = state.state_dict()
    if not all(weight.isfinite().all() for weight in saved["model"].values()):
        log(f"WARNING: {path} is not replaced: weights are not finite at step:{state.step}")
        return False
    if not write_file(path, serialize(saved), log):
        return False
    log(f"checkpoint:{path} step:{state.step}")
    return True


def read_checkpoint(hp: Hyperparameters) -> tuple[Path | None, dict[str, Any]]:
    """The checkpoint to resume from, if any. Older scripts saved less."""
    own = hp.checkpoint_path()
    path = own if hp.resume == "auto" else Path(hp.resume)
    if own.is_file() and (hp.resume == "" or path.resolve() != own.resolve()):
        raise InputError(f"{own} exists: set RESUME=auto to resume it, or another RUN_ID")
    if hp.resume == "" or (hp.resume == "auto" and not own.is_file()):
        return None, {}  # a new run
    if not path.is_file():
        raise InputError(f"RESUME={hp.resume!r} is not a file on the machine of rank 0")
    older = {"knobs": {}, "shards": None, "scaler": {}, "script": None, "tokens": 0}
    saved = older | deserialize(path.read_bytes(), str(path))
    if own.is_file() and (seed := saved["knobs"].get("seed", hp.seed)) != hp.seed:
        raise InputError(f"{path} is of SEED={seed}: set this SEED, or another RUN_ID")
    return path, saved


def load_checkpoint(state: TrainingState) -> None:
    """Resume from the checkpoint that RESUME names, if any. Rank 0 reads it for all."""
    hp, log = state.hp, state.runtime.log
    path, saved = state.runtime.from_rank_0(lambda: read_checkpoint(hp))
    if path is None:
        if hp.resume == "auto":
            log(f"resume:{hp.checkpoint_path()} does not exist, a new run begins")
        return
    own = state.state_dict("meta")  # without values
    if missing := sorted(own.keys() - saved.keys()):
        raise InputError(f"{path} has no {', '.join(missing)}: use its own script")
    if dropped := sorted(saved.keys() - own.keys()):
        log(f"WARNING: {', '.join(dropped)} of {path} is dropped: this script lacks it")
    script = saved["script"] or own["script"]
    old = saved["knobs"] | {"train_shards": saved["shards"], "resume": "", "script": script}
    new = own["knobs"] | {"train_shards": own["shards"], "resume": "", "script": own["script"]}
    changes = [f"{k.upper()}:{a}->{b}" for k in new | old if (a := old.get(k)) != (b := new.get(k))]
    state.load_state_dict(saved, str(path))
    log(f"resume:{path} step:{state.step} changed:{' '.join(changes) or 'nothing'}")


def stop(state: TrainingState, signum: int) -> int:
    """Save a checkpoint after a signal. Returns the exit code."""
    is_saved = all(state.runtime.gather(save_checkpoint(state)))
    command = f"rerun this command with RESUME=auto RUN_ID={shlex.quote(state.hp.run_id)}"
    advice = command if is_saved else "not saved"
    state.runtime.log(f"stopped: signal:{signum} step:{state.step}/{state.hp.iterations}: {advice}")
    return 128 + signum if is_saved else 1


# ---- Log lines ------------------
def log_settings(gpt: GPT, validation: Validation, runtime: Runtime) -> None:
    hp = gpt.hp
    cudnn = SDPBackend.CUDNN_ATTENTION in attention_backends(runtime.device, hp.train_seq_len)
    tied, inputs = hp.tie_embeddings, validation.inputs
    defaults = asdict(Hyperparameters(run_id=hp.run_id))
    knobs = [f"{k.upper()}={v}" for k, v in asdict(hp).items() if v != defaults[k]]
    runtime.log(
        f"val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path={hp.tokenizer_path}\n"
        f"train_loader:dataset:{Path(hp.data_path).resolve().name} "
        f"train_shards:{len(glob.glob(hp.files('train')))}\n"
        f"val_loader:shards pattern={os.path.join(hp.data_path, 'fineweb_val_*.bin')} "
        f"tokens:{len(validation.tokens) - 1}\n"
        f"input_crc32 val_tokens:{inputs['val_tokens']} tokenizer:{inputs['tokenizer']}\n"
        f"model_params:{sum(param.numel() for param in gpt.parameters())}\n"
        f"world_size:{runtime.world_size} grad_accum_steps:{hp.batch_slots // runtime.world_size}\n"
        f"sdp_backends:cudnn={cudnn} flash=True mem_efficient=True math=True\n"
        f"attention_mode:gqa num_heads:{hp.num_heads} num_kv_heads:{hp.num_kv_heads}\n"
        f"tie_embeddings:{tied} embed_lr:{hp.tied_embed_lr if tied else hp.embed_lr} "
        f"head_lr:{0.0 if tied else hp.head_lr} matrix_lr:{hp.matrix_lr} scalar_lr:{hp.scalar_lr}\n"
        f"train_batch_tokens:{hp.train_batch_tokens} train_seq_len:{hp.train_seq_len} "
        f"iterations:{hp.iterations} warmup_steps:{hp.warmup_steps} "
        f"max_wallclock_seconds:{hp.max_wallclock_seconds:.3f}\n"
        f"seed:{hp.seed}\nknobs:{' '.join(knobs)}\n"
        f"device:{runtime.device} dtype:{runtime.dtype} compile:{runtime.compiled} "
        f"cpu_threads:{torch.get_num_threads()}"
    )
    log_warnings(validation, runtime)


def log_warnings(validation: Validation, runtime: Runtime) -> None:
    for line in unknown_knobs():
        runtime.log(line)
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if not dist.is_initialized() and os.environ.get(name, "1") != "1":
            runtime.log(f"WARNING: {name}={os.environ[name]}, but this run is alone: use torchrun")
    if not validation.is_tokenizer_right:
        runtime.log("WARNING: val_bpb is wrong unless TOKENIZER_PATH is the shards' tokenizer")
    if validation.hp.device == "auto" and runtime.device.type == "cpu" and torch.version.cuda:
        runtime.log("WARNING: no usable GPU, so this runs on the CPU: see nvidia-smi")


def log_step(state: TrainingState, rank_loss: Tensor) -> None:
    """Log a step that is due. Show the step and the time left on a terminal."""
    hp, runtime, stopwatch = state.hp, state.runtime, state.stopwatch
    name = f"step:{state.step}/{hp.iterations}"
    if hp.train_log_every > 0 and (state.step <= 10 or state.step % hp.train_log_every == 0):
        loss = sum(runtime.gather(rank_loss.item())) / runtime.world_size
        runtime.log(f"{name} train_loss:{loss:.4f} {stopwatch.report(state.step)}")
        state.train_loss = state.train_loss if state.is_skipped else loss  # fp16 may overflow once
    elapsed_ms = stopwatch.elapsed_ms()
    minutes_left = elapsed_ms * (1 / progress(hp, state.step, elapsed_ms) - 1) / 60_000
    speed = f"{1000 * state.tokens / elapsed_ms:,.0f} tokens/s"
    runtime.log.status(f"{minutes_left:.1f} min left, {speed}, {name}")


def log_end(state: TrainingState, report: str) -> None:
    hp, runtime = state.hp, state.runtime
    if state.step < hp.iterations:
        end = f"train_time:{state.stopwatch.elapsed_ms():.0f}ms step:{state.step}/{hp.iterations}"
        runtime.log(f"stopping_early: wallclock_cap {end}")
    if runtime.world_size > 1:
        sums = {*runtime.gather(binascii.crc32(serialize(state.gpt.state_dict())))}
        runtime.log("WARNING: replicas: weights differ" if len(sums) > 1 else "replicas:identical")
    if state.skipped_steps > 0:
        runtime.log(f"WARNING: {state.skipped_steps} steps skipped: fp16 gradients not finite")
    if runtime.device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        runtime.log(f"peak memory allocated: {allocated >> 20} MiB reserved: {reserved >> 20} MiB")
    runtime.log(report)


def log_score(name: str, loss: float, ms: float, validation: Validation, runtime: Runtime) -> None:
    log_warnings(validation, runtime)
    stride = f" stride:{validation.hp.eval_stride}" if validation.hp.eval_stride > 0 else ""
    runtime.log(f"{name} {validation.format(loss)} eval_time:{ms:.0f}ms{stride}{validation.part}")
    runtime.log(f"{name}_exact {validation.format(loss, digits=8)}")


def retokenizes(tokenizer: SentencePieceProcessor, tokens: np.ndarray) -> bool:
    """Check that nine tenths of the first 100 documents survive decoding and re-encoding."""
    tokens = tokens[tokens != tokenizer.eos_id()]  # other tools end documents with it
    starts = np.flatnonzero(tokens == tokenizer.bos_id())[:101]
    same = []
    for document in np.split(tokens, starts)[1:101]:
        ids = document[1:2001].tolist()
        half = len(ids) // 2  # a cut may change the tokens before it
        if half > 0 and tokenizer.unk_id() not in ids:  # <unk> lost its text
            same.append(tokenizer.encode(tokenizer.decode(ids))[:half] == ids[:half])
    return len(starts) > 0 and 10 * sum(same) >= 9 * len(same)


# ---- main -----------------------
WAYS_TO_DATA = """\
  get FineWeb:     python3 data/cached_challenge_fineweb.py --variant sp1024
  or run the demo: PRESET=demo python train_gpt.py where data/ is, without a DATA_PATH
  or use a text:   python3 data/download_hf_docs_and_tokenize.py --docs FILE --output-root mydata
  for a record:    see tests/records/README.md"""


def prepare_demo(hp: Hyperparameters, runtime: Runtime) -> None:
    """Build the demo's data, unless they exist or other paths are set."""
    demo_paths = (DEMO["DATA_PATH"], DEMO["TOKENIZER_PATH"])
    if hp.preset != "demo" or (hp.data_path, hp.tokenizer_path) != demo_paths:
        return
    builders = [folder / "data/demo_corpus.py" for folder in Path(__file__).resolve().parents]
    builder = next(filter(Path.is_file, builders), None)
    if builder is None:
        return  # use existing data
    command = [sys.executable, builder, "--dataset", hp.data_path, "--tokenizer", hp.tokenizer_path]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise InputError(f"PRESET=demo: {result.stderr.strip()}")
    runtime.log(result.stdout.rstrip())


def leave(job: Callable[[], int]) -> NoReturn:
    """Run a job and exit with its code, or with 1 after an error. Also for tools."""
    with suppress(AttributeError):  # if stdout is closed
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may have any letters
    try:
        code = job()
        if dist.is_initialized():
            # All ranks leave together. Destroying the process group could hang in gloo's thread.
            dist.barrier()
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        code = 1
        if isinstance(error, InputError):
            error.__traceback__ = None  # the message is enough
        sys.excepthook(type(error), error, error.__traceback__)
    if dist.is_initialized():
        with suppress(AttributeError, OSError):
            sys.stdout.flush()  # os._exit does not flush
        os._exit(code)  # a normal exit may hang in gloo's threads
    sys.exit(code)


def main() -> None:
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__, inspect.getsource(Hyperparameters).split("    def ")[0], sep="\n")
        return
    if len(sys.argv) > 1:
        sys.exit(f"{sys.argv[1]!r}: knobs are environment variables, see --help")
    leave(run)


if __name__ == "__main__":
    main()
