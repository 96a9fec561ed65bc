"""Train the best small language model that fits, with this file, into 16,000,000 bytes.

    PRESET=demo python train_gpt.py                           a laptop: 1.98 bits per byte in 100 s
    python train_gpt.py                                       one GPU, FineWeb: no results yet
    torchrun --standalone --nproc_per_node=8 train_gpt.py     eight GPUs: no results yet

Every knob is an environment variable: a field of Hyperparameters, in capitals. The last line of the
log is the result: the score of the compressed model on the disk.

What people change: Hyperparameters, Model, Optimizers, Schedules, Data, Evaluation, Export.
Machinery, rarely edited: Runtime, Checkpoints, Training (where micro-steps add up and gradients are
synchronized), main.

Letters in shapes: B sequences in a micro-batch, T sequence length, D model width, H query heads,
K key/value heads, h = D/H head width, V vocabulary, L layers, W world size (processes).
"""

import collections
import contextlib
import difflib
import fcntl
import functools
import glob
import hashlib
import io
import json
import math
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import sentencepiece
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler


class InputError(ValueError):
    """Something the user can put right. The message names it, its value and the way out."""


def require(condition: bool, problem: str) -> None:
    if not condition:
        raise InputError(problem)


# ---- Hyperparameters -----------------------------------------------------------------------------
CONTROL_TENSOR_NAME_PATTERNS = tuple(
    "attn_scale attn_scales mlp_scale mlp_scales resid_mix resid_mixes q_gain skip_weight "
    "skip_weights".split()
)
DEMO = (
    "DATA_PATH=./data/datasets/demo_sp1024 TOKENIZER_PATH=./data/tokenizers/demo_1024_bpe.model "
    "MAX_WALLCLOCK_SECONDS=100 TRAIN_BATCH_TOKENS=6144 TRAIN_SEQ_LEN=128 WARMUP_STEPS=1 "
    "WARMDOWN_FRAC=0.8 MUON_MOMENTUM_WARMUP_STEPS=100 VAL_BATCH_SIZE=32768 VAL_LOSS_EVERY=100 "
    "TRAIN_LOG_EVERY=20 NUM_LAYERS=4 MODEL_DIM=128 NUM_HEADS=2 NUM_KV_HEADS=1"
)
PRESETS = {"": {}, "demo": dict(knob.split("=") for knob in DEMO.split())}
# No number may be below 0, but for these ...
FREE = ("qk_gain_init", "warmdown_iters")
# ... and none of these may be 0.
ABOVE_0 = (
    "keep_checkpoints val_batch_size train_batch_tokens batch_slots train_seq_len vocab_size "
    "num_layers model_dim num_heads num_kv_heads mlp_mult rope_base logit_softcap "
    "muon_backend_steps adam_eps".split()
)
BELOW_1 = ("muon_momentum", "muon_momentum_warmup_start", "beta1", "beta2")
MINUS_1_IS_0 = (  # many write -1 to switch these off
    "max_wallclock_seconds val_loss_every train_log_every grad_clip_norm warmup_steps".split()
)


@dataclass(frozen=True)
class Hyperparameters:
    """All knobs: num_layers is the environment variable NUM_LAYERS, and so on."""

    # run
    preset: str = ""  # "" or "demo": other defaults
    run_id: str = field(default_factory=lambda: str(uuid.uuid4()))  # names log and checkpoints
    seed: int = 1337  # of Python, NumPy and torch
    output_dir: str = "."  # of everything that a run writes
    checkpoint_every: int = 0  # steps; 0: only when a signal stops the run
    keep_checkpoints: int = 2  # the newest ones of this RUN_ID
    resume: str = ""  # checkpoint to go on from; auto: the newest good one of this RUN_ID, if any
    eval_only: str = ""  # checkpoint or final_model file: score it, train nothing
    # machine
    device: str = "auto"  # cuda, cpu; auto: cuda if there is one
    dtype: str = "auto"  # of activations, embedding, Muon: bf16, fp32; auto: bf16 if fast here
    compile: str = "auto"  # torch.compile: 1, 0; auto: 1 on cuda
    activation_checkpoint: bool = False  # less memory: the backward pass computes each block again
    # data
    data_path: str = "./data/datasets/fineweb10B_sp1024"  # folder of fineweb_{train,val}_*.bin
    tokenizer_path: str = "./data/tokenizers/fineweb_1024_bpe.model"  # SentencePiece model
    # validation and logging
    val_batch_size: int = 524_288  # tokens, over all ranks and slots
    val_loss_every: int = 1000  # steps, step 0 included; 0: only at the end
    max_val_tokens: int = 0  # a shorter, "partial" validation; 0: the whole split
    eval_stride: int = 0  # a second score in windows that begin so many tokens apart; 0: none
    train_log_every: int = 200  # steps, after the first ten; 0: none
    # length of the run
    iterations: int = 20_000  # optimizer steps at most
    warmdown_iters: int = 1200  # steps in which the rate falls to 0 (see lr_factor); 0: none
    warmdown_frac: float = 0.0  # instead: the last fraction of the run, in steps or in time
    warmup_steps: int = 20  # steps that prime compilation and are undone
    train_batch_tokens: int = 524_288  # tokens in an optimizer step
    batch_slots: int = 8  # equal parts of a batch, so that 1, 2, 4, 8 processes take the same step
    train_seq_len: int = 1024  # T
    max_wallclock_seconds: float = 600.0  # of training time; 0: no cap
    # model
    vocab_size: int = 1024  # V, the size of the tokenizer
    num_layers: int = 9  # L
    model_dim: int = 512  # D
    num_heads: int = 8  # H, query heads
    num_kv_heads: int = 4  # K, key/value heads
    mlp_mult: int = 2  # hidden width of the MLP, in D
    tie_embeddings: bool = True  # the output layer is the embedding
    rope_base: float = 10_000.0  # the longest rotary wavelength is near 2 pi times this, in tokens
    logit_softcap: float = 30.0  # logits stay between minus and plus this
    qk_gain_init: float = 1.5  # factor of each head's queries at the start
    # optimizers
    embed_lr: float = 0.6  # Adam, untied embedding
    head_lr: float = 0.008  # Adam, untied lm_head
    tied_embed_lr: float = 0.05  # Adam, tied embedding
    tied_embed_init_std: float = 0.005  # of a tied embedding at the start
    matrix_lr: float = 0.04  # Muon, matrices of the blocks
    scalar_lr: float = 0.04  # Adam, vectors and control tensors
    muon_momentum: float = 0.95  # after its warm-up
    muon_backend_steps: int = 5  # Newton-Schulz iterations
    muon_momentum_warmup_start: float = 0.85  # momentum at step 0
    muon_momentum_warmup_steps: int = 500  # 0: muon_momentum at once
    beta1: float = 0.9  # Adam
    beta2: float = 0.95  # Adam
    adam_eps: float = 1e-8  # Adam
    grad_clip_norm: float = 0.0  # largest norm of all gradients together; 0: off
    # export
    int8_scale_floor: float = 1 / 127  # least int8 step of a row; 0: finer steps, more bytes
    control_tensor_name_patterns: tuple[str, ...] = CONTROL_TENSOR_NAME_PATTERNS  # Adam, fp32
    int8_keep_float_fp32_name_patterns: tuple[str, ...] = CONTROL_TENSOR_NAME_PATTERNS  # if small

    def files(self, split: str) -> str:
        """The glob pattern of the "train" or "val" shards."""
        return f"{glob.escape(self.data_path)}/fineweb_{split}_*.bin"

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "Hyperparameters":
        """Defaults, then the preset, then the environment. Raises InputError: a line a problem."""
        texts = {**PRESETS.get(environ.get("PRESET", ""), {}), **environ}
        if "CONTROL_TENSOR_NAME_PATTERNS" in texts:
            patterns = texts["CONTROL_TENSOR_NAME_PATTERNS"]
            texts.setdefault("INT8_KEEP_FLOAT_FP32_NAME_PATTERNS", patterns)
        values = {}
        problems = []
        for name, kind in get_type_hints(cls).items():
            try:
                if name.upper() in texts:
                    value = parse_knob(name.upper(), texts[name.upper()], kind)
                    values[name] = kind(0) if name in MINUS_1_IS_0 and value == -1 else value
            except InputError as error:
                problems.append(str(error))
        hp = cls(**values)
        problems += hp.problems()
        if hp.resume == "auto" and "RUN_ID" not in environ:
            problems.append("RESUME='auto' needs the RUN_ID of the run to go on with: set it")
        require(not problems, "\n".join(problems))
        return hp

    def problems(self) -> list[str]:
        """A line for each knob that is wrong."""
        H, K, T = max(self.num_heads, 1), max(self.num_kv_heads, 1), max(self.train_seq_len, 1)
        slots = max(self.batch_slots, 1)
        unit = slots * T
        units = f"{unit}: BATCH_SLOTS={slots} times TRAIN_SEQ_LEN={T}"
        is_name = self.run_id == Path(self.run_id).name != ".." and self.run_id.isprintable()
        has_length = 0 < len(os.fsencode(self.run_id)) <= 200
        checks = [
            ("preset", self.preset in PRESETS, f"one of {list(PRESETS)}"),
            ("device", self.device in ("auto", "cuda", "cpu"), "auto, cuda or cpu"),
            ("dtype", self.dtype in ("auto", "bf16", "fp32"), "auto, bf16 or fp32"),
            ("compile", self.compile in ("auto", "1", "0"), "auto, 1 or 0"),
            ("run_id", is_name and has_length, "a printable file name of 1 to 200 bytes"),
            ("resume", not (self.resume and self.eval_only), "unset, or EVAL_ONLY unset"),
            ("seed", self.seed < 2**32, "below 2**32"),
            ("vocab_size", self.vocab_size <= 2**16, "at most 65536: tokens are uint16"),
            ("warmdown_frac", self.warmdown_frac <= 1, "at most 1"),
            ("model_dim", self.model_dim % (2 * H) == 0, f"an even multiple of NUM_HEADS={H}"),
            ("num_heads", H % K == 0, f"a multiple of NUM_KV_HEADS={K}"),
            ("train_batch_tokens", self.train_batch_tokens % unit == 0, f"a multiple of {units}"),
            ("train_batch_tokens", self.train_batch_tokens < 2**32, "below 2**32"),
            ("val_batch_size", self.val_batch_size >= unit, f"at least {units}"),
            ("eval_stride", self.eval_stride <= T, f"at most TRAIN_SEQ_LEN={T}"),
            ("max_val_tokens", not 0 < self.max_val_tokens < T, f"0 or at least TRAIN_SEQ_LEN={T}"),
        ]
        for name, value in asdict(self).items():
            if name in ABOVE_0:
                checks.append((name, value > 0, "above 0"))
            elif type(value) in (int, float) and name not in FREE:
                checks.append((name, value >= 0, "0 or more"))
            if name in BELOW_1:
                checks.append((name, value < 1, "below 1"))
        wrong = [(name, rule) for name, is_right, rule in checks if not is_right]
        return [f"{name.upper()}={getattr(self, name)!r} must be {rule}" for name, rule in wrong]


def parse_knob(name: str, text: str, kind: Any) -> Any:
    """Raises InputError if the text of variable `name` is no value of type `kind`."""
    if kind == tuple[str, ...]:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    with contextlib.suppress(KeyError, ValueError, OverflowError):
        value = {"0": False, "1": True}[text] if kind is bool else kind(text)
        if kind is str or math.isfinite(value):
            return value
    wanted = {bool: "0 or 1", int: "a whole number", float: "a finite number"}[kind]
    raise InputError(f"{name}={text!r} must be {wanted}")


def near_knobs(environ: Mapping[str, str]) -> list[str]:
    """A line for each variable that is no knob but looks like one."""
    knobs = [name.upper() for name in get_type_hints(Hyperparameters)]
    lines = []
    for name in sorted(environ.keys() - knobs):
        guess = name.upper().replace("LEARNING_RATE", "LR")
        for knob in difflib.get_close_matches(guess, knobs, n=1, cutoff=0.85):
            lines.append(f"unknown_knob:{name!r} is ignored: did you mean {knob}?")
    return lines


def is_control_tensor(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether the full name of a parameter holds one of the patterns."""
    return any(pattern in name for pattern in patterns)


# ---- Model ---------------------------------------------------------------------------------------
ATTENTION_BACKENDS = ("cudnn", "flash", "mem_efficient", "math")  # in the order they are tried


def rms_norm(x: Tensor) -> Tensor:
    """RMSNorm over the last dimension, without a weight."""
    return F.rms_norm(x, (x.size(-1),))


class CastedLinear(nn.Linear):
    """A linear layer that keeps its weight in fp32 and casts it to the dtype of its input."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """(..., in) -> (..., out), times scale (out,)."""
        # Scaling the weight, not the larger output, saves 2 % of a GPU step (counted).
        weight, bias = self.weight, self.bias
        if scale is not None:
            weight = scale[:, None] * weight
            bias = None if bias is None else scale * bias
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def rotary_tables(seq_len: int, head_width: int, base: float) -> Tensor:
    """cos and sin of the angles t * base**(-2j/h), (2, T, h/2): RoPE (Su et al., 2021)."""
    # In bf16 most positions beyond 256 would equal a neighbour.
    frequencies = base ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[j], x[j + h/2]) of x (B, T, heads, h) by cos and sin (T, 1, h/2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q (B, T, H, h) to k and v (B, T, K, h): (B, T, H, h)."""
    group = q.size(2) // k.size(2)
    if q.is_cuda and q.dtype == torch.float32:
        # Only mem_efficient is fast in fp32 on a GPU, and it takes no grouped queries.
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
        group = 1
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, T, h)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1)
    return y.transpose(1, 2)


def choose_attention(hp: Hyperparameters, device: torch.device, dtype: torch.dtype) -> None:
    """Leave one attention backend enabled, the first that runs this model's attention here."""
    H, K = hp.num_heads, hp.num_kv_heads
    # cuDNN leads on Hopper (sm_90); on Blackwell it has returned wrong numbers without an error.
    hopper = device.type == "cuda" and torch.cuda.get_device_capability()[0] == 9
    for chosen in ATTENTION_BACKENDS if hopper else ATTENTION_BACKENDS[1:]:
        for name in ATTENTION_BACKENDS:
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(name == chosen)
        shape = (1, hp.train_seq_len, H + 2 * K, hp.model_dim // H)
        qkv = torch.ones(shape, device=device, dtype=dtype, requires_grad=True)
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells why a backend cannot
            attend(*qkv.split((H, K, K), dim=2)).sum().backward()
            return


class CausalSelfAttention(nn.Module):
    """Grouped-query attention of normed and rotated queries and keys."""

    def __init__(self, hp: Hyperparameters) -> None:
        super().__init__()
        D, H, K = hp.model_dim, hp.num_heads, hp.num_kv_heads
        self.num_heads = H
        self.num_kv_heads = K
        self.c_q = CastedLinear(D, D, bias=False)
        self.c_k = CastedLinear(D, D // H * K, bias=False)
        self.c_v = CastedLinear(D, D // H * K, bias=False)
        self.proj = CastedLinear(D, D, bias=False)
        self.q_gain = nn.Parameter(torch.full((H,), hp.qk_gain_init))

    def forward(self, x: Tensor, scale: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D), times scale (D,)."""
        B, T, D = x.shape
        H, K = self.num_heads, self.num_kv_heads
        # The one place where linear layers are not called: a single product saves 3 % of a GPU step
        # (counted). To give c_q, c_k or c_v a bias, a hook or LoRA, call all three.
        weight = torch.cat((self.c_q.weight, self.c_k.weight, self.c_v.weight))
        qkv = F.linear(x, weight.to(x.dtype)).view(B, T, H + 2 * K, D // H)
        qk, v = qkv.split((H + K, K), dim=2)
        q, k = apply_rotary(rms_norm(qk), cos, sin).split((H, K), dim=2)
        q = q * self.q_gain.to(x.dtype)[:, None]
        return self.proj(attend(q, k, v).reshape(B, T, D), scale)


class MLP(nn.Module):
    """Two linear layers around a squared ReLU (Primer, So et al., 2021)."""

    def __init__(self, hp: Hyperparameters) -> None:
        super().__init__()
        self.fc = CastedLinear(hp.model_dim, hp.mlp_mult * hp.model_dim, bias=False)
        self.proj = CastedLinear(hp.mlp_mult * hp.model_dim, hp.model_dim, bias=False)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        hidden = F.relu(self.fc(x)).square()
        return self.proj(hidden, scale)


class Block(nn.Module):
    """Mixes the embedding back in, then adds attention, then the MLP."""

    def __init__(self, hp: Hyperparameters) -> None:
        super().__init__()
        self.attn = CausalSelfAttention(hp)
        self.mlp = MLP(hp)
        self.attn_scale = nn.Parameter(torch.ones(hp.model_dim))
        self.mlp_scale = nn.Parameter(torch.ones(hp.model_dim))
        self.resid_mix = nn.Parameter(torch.tensor([[1.0], [0.0]]).repeat(1, hp.model_dim))

    def forward(self, x: Tensor, x0: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x, and x0, the normed embedding: (B, T, D)."""
        keep, renew = self.resid_mix.to(x.dtype)
        x = keep * x + renew * x0
        x = x + self.attn(rms_norm(x), self.attn_scale, cos, sin)
        x = x + self.mlp(rms_norm(x), self.mlp_scale)
        return x


class GPT(nn.Module):
    """A decoder whose later layers add what the earlier ones left on a stack (as in a U-Net).
    dtype is that of the activations and of the embedding. Built on the CPU, its weights follow from
    torch's seed alone:

        tok_emb                                 N(0, TIED_EMBED_INIT_STD); untied: N(0, 1)
        c_q, c_k, c_v, mlp.fc                   uniform, as torch has it for nn.Linear
        attn.proj, mlp.proj, lm_head            zero
        attn_scale, mlp_scale, skip_weights     one
        resid_mix, q_gain                       (one, zero), QK_GAIN_INIT
    """

    def __init__(self, hp: Hyperparameters, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        D, V = hp.model_dim, hp.vocab_size
        self.hp = hp
        self.dtype = dtype
        self.num_early = hp.num_layers // 2  # layers that push; as many later ones pop
        self.tok_emb = nn.Embedding(V, D)
        # Empty, and without a gradient for DDP to wait for, if there are no early layers.
        skip_weights = torch.ones(self.num_early, D)
        self.skip_weights = nn.Parameter(skip_weights, requires_grad=self.num_early > 0)
        self.blocks = nn.ModuleList(Block(hp) for _ in range(hp.num_layers))
        self.lm_head = None if hp.tie_embeddings else CastedLinear(D, V, bias=False)
        tables = rotary_tables(hp.train_seq_len, D // hp.num_heads, hp.rope_base)
        self.register_buffer("rotary", tables, persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """After torch's own. Matrices are rounded to bf16, so that all dtypes start alike."""
        if self.lm_head is None:
            self.tok_emb.weight.normal_(std=self.hp.tied_embed_init_std)
        patterns = self.hp.control_tensor_name_patterns
        for name, param in self.named_parameters():
            if name.endswith(("proj.weight", "lm_head.weight")):
                param.zero_()  # output projections start at zero
            elif param.ndim >= 2 and not is_control_tensor(name, patterns):
                param.copy_(param.bfloat16())
        if not is_control_tensor("tok_emb.weight", patterns):
            self.tok_emb.to(self.dtype)

    def forward(self, input_ids: Tensor, target_ids: Tensor, reduction: str = "mean") -> Tensor:
        """Cross-entropy in nats (fp32) of target_ids given input_ids, both (B, T): the mean or,
        with reduction "none", that of each target (B, T)."""
        logits = self.logits(input_ids)
        losses = F.cross_entropy(logits, target_ids.flatten(), reduction=reduction)
        return losses.view_as(target_ids) if reduction == "none" else losses

    def logits(self, input_ids: Tensor) -> Tensor:
        """What comes after each of input_ids (B, T): fp32 (B*T, V)."""
        T = input_ids.size(1)
        longest = self.rotary.size(1)
        require(T <= longest, f"{T} tokens in a sequence, but TRAIN_SEQ_LEN={longest}")
        cos, sin = self.rotary[:, :T, None].to(self.dtype)
        x = x0 = rms_norm(self.tok_emb(input_ids).to(self.dtype))  # (B, T, D)
        skips = []
        for i, block in enumerate(self.blocks):
            if i >= self.num_early and skips:
                x = x + self.skip_weights[i - self.num_early].to(x.dtype) * skips.pop()
            if self.hp.activation_checkpoint and self.training:
                x = torch.utils.checkpoint.checkpoint(block, x, x0, cos, sin, use_reentrant=False)
            else:
                x = block(x, x0, cos, sin)
            if i < self.num_early:
                skips.append(x)
        x = rms_norm(x).flatten(0, 1)
        tied = self.lm_head is None
        logits = F.linear(x, self.tok_emb.weight.to(x.dtype)) if tied else self.lm_head(x)
        softcap = self.hp.logit_softcap
        return (softcap * torch.tanh(logits / softcap)).float()


# ---- Optimizers ----------------------------------------------------------------------------------
def newton_schulz(stack: Tensor, steps: int) -> Tensor:
    """Bring the singular values of each wide matrix in stack (n, rows, columns) near 1, in its
    dtype, by the quintic iteration of Muon (Keller Jordan, 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = stack / (torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + (c * gram) @ gram) @ x
    return x


def orthogonalize(
    matrices: list[Tensor], steps: int, newton_schulz_fn: Callable = newton_schulz
) -> list[Tensor]:
    """Newton-Schulz of each matrix, one call a shape, times sqrt(max(1, rows / columns))."""
    wide = [matrix.mT if matrix.size(0) > matrix.size(1) else matrix for matrix in matrices]
    updates = list(matrices)
    for shape in {matrix.shape for matrix in wide}:
        members = [i for i, matrix in enumerate(wide) if matrix.shape == shape]
        results = newton_schulz_fn(torch.stack([wide[i] for i in members]), steps)
        for i, result in zip(members, results, strict=True):
            rows, columns = matrices[i].shape
            updates[i] = result.mT * math.sqrt(rows / columns) if rows > columns else result
    return updates


class Muon(torch.optim.Optimizer):
    """Orthogonalized Nesterov momentum for matrices (Keller Jordan, 2024). Each rank holds the
    momentum of its share of them; one collective exchanges the updates, in `dtype`."""

    def __init__(
        self,
        params: list[nn.Parameter],
        lr: float,
        momentum: float,
        backend_steps: int,
        dtype: torch.dtype = torch.bfloat16,
        newton_schulz_fn: Callable = newton_schulz,
    ) -> None:
        defaults = {"lr": lr, "base_lr": lr, "momentum": momentum, "backend_steps": backend_steps}
        super().__init__(params, defaults)
        self.dtype = dtype
        self.newton_schulz_fn = newton_schulz_fn
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            shares = self.shares(group["params"])
            sizes = [sum(p.numel() for p in share) for share in shares]
            flat = self.updates(shares[self.rank], group)
            if self.world_size > 1:  # the parts of all ranks, padded to one length
                parts = flat.new_empty(self.world_size * max(sizes))
                dist.all_gather_into_tensor(parts, F.pad(flat, (0, max(sizes) - len(flat))))
                rows = parts.split(max(sizes))
                flat = torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])
            params = [p for share in shares for p in share]
            pieces = flat.float().split([p.numel() for p in params])
            updates = [piece.view_as(p) for piece, p in zip(pieces, params, strict=True)]
            torch._foreach_add_(params, updates, alpha=-group["lr"])

    def shares(self, params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """What each rank orthogonalizes: number i is for rank i mod W."""
        return [params[rank :: self.world_size] for rank in range(self.world_size)]

    def updates(self, params: list[nn.Parameter], group: dict[str, Any]) -> Tensor:
        """Advance the momentum of these parameters and orthogonalize it: flat, end to end."""
        if not params:
            return group["params"][0].new_empty(0, dtype=self.dtype)
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        grads = [p.grad for p in params]
        momenta = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, grads)
        nesterov = torch._foreach_add(grads, momenta, alpha=group["momentum"])
        matrices = [update.to(self.dtype) for update in nesterov]
        updates = orthogonalize(matrices, group["backend_steps"], self.newton_schulz_fn)
        return torch.cat([update.flatten() for update in updates])


def parameter_groups(model: nn.Module, hp: Hyperparameters) -> dict[str, list[nn.Parameter]]:
    """Sends each parameter of a GPT to exactly one group of one optimizer."""
    groups: dict[str, list[nn.Parameter]] = {"embed": [], "head": [], "matrix": [], "scalar": []}
    outside = {"tok_emb.weight": "embed", "lm_head.weight": "head", "skip_weights": "scalar"}
    for name, param in model.named_parameters():
        group = outside.get(name)
        if name.startswith("blocks."):
            control = is_control_tensor(name, hp.control_tensor_name_patterns)
            matrix = param.ndim == 2 and param.requires_grad and not control
            group = "matrix" if matrix else "scalar"  # Adam passes over what is frozen
        assert group, f"{name} is in no optimizer: send it to a group here"
        groups[group].append(param)
    return groups


def build_optimizers(
    gpt: GPT, dtype: torch.dtype, newton_schulz_fn: Callable = newton_schulz
) -> list[torch.optim.Optimizer]:
    """Adam and Muon. Each group knows its full learning rate, "base_lr"."""
    hp = gpt.hp
    groups = parameter_groups(gpt, hp)
    embed_lr = hp.tied_embed_lr if hp.tie_embeddings else hp.embed_lr
    adam_groups = []
    for name, lr in (("embed", embed_lr), ("head", hp.head_lr), ("scalar", hp.scalar_lr)):
        if groups[name]:
            adam_groups.append({"params": groups[name], "lr": lr, "base_lr": lr})
    betas = (hp.beta1, hp.beta2)
    optimizers = [torch.optim.Adam(adam_groups, betas=betas, eps=hp.adam_eps, fused=True)]
    if groups["matrix"]:
        settings = (hp.matrix_lr, hp.muon_momentum, hp.muon_backend_steps)
        optimizers.append(Muon(groups["matrix"], *settings, dtype, newton_schulz_fn))
    return optimizers


# ---- Schedules -----------------------------------------------------------------------------------
def lr_factor(hp: Hyperparameters, step: int, elapsed_ms: float) -> float:
    """What scales all learning rates at step (from 0), elapsed_ms into the training time: 1, then a
    straight line down to 0

        WARMDOWN_FRAC > 0      over that part of the run, in steps or time, whichever ends first
        no wallclock cap       over the last WARMDOWN_ITERS steps
        under a cap            over the time of so many steps before it; ITERATIONS does not count
    """
    cap_ms = 1000 * hp.max_wallclock_seconds
    remaining_ms = max(cap_ms - elapsed_ms, 0.0)
    remaining_steps = max(hp.iterations - step, 0)
    if hp.warmdown_frac > 0:
        in_time = remaining_ms / cap_ms if cap_ms > 0 else 1.0
        in_steps = remaining_steps / max(hp.iterations, 1)
        return min(in_time / hp.warmdown_frac, in_steps / hp.warmdown_frac, 1.0)
    if hp.warmdown_iters > 0 and cap_ms == 0:
        return min(remaining_steps / hp.warmdown_iters, 1.0)
    warmdown_ms = max(hp.warmdown_iters, 0) * elapsed_ms / max(step, 1)
    return 1.0 if remaining_ms >= warmdown_ms else remaining_ms / warmdown_ms


def muon_momentum(hp: Hyperparameters, step: int) -> float:
    done = min(step / hp.muon_momentum_warmup_steps, 1.0) if hp.muon_momentum_warmup_steps else 1.0
    return (1 - done) * hp.muon_momentum_warmup_start + done * hp.muon_momentum


def set_schedule(optimizers: list[torch.optim.Optimizer], factor: float, momentum: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group["base_lr"]
            group["momentum"] = momentum  # Adam has no use for it


# ---- Data ----------------------------------------------------------------------------------------
SHARD_HEADER_BYTES = 1024  # 256 little-endian int32: magic, version, token count, zeros
SHARD_MAGIC_AND_VERSION = [20240520, 1]
WAYS_TO_DATA = """\
  download FineWeb:    python3 data/cached_challenge_fineweb.py --variant sp1024
  or run the demo:     PRESET=demo python train_gpt.py"""


def require_file(path: str | Path, name: str) -> None:
    """Raise InputError unless path is a regular file that can be read: a pipe may never end."""
    readable = os.path.isfile(path) and os.access(path, os.R_OK)
    require(readable, f"{name} is not a file that can be read: check the path")


def find_shards(pattern: str) -> list[Path]:
    paths = sorted(glob.glob(pattern))
    if not paths:
        raise FileNotFoundError(f"DATA_PATH has no {pattern}\n{WAYS_TO_DATA}")
    return [Path(path) for path in paths]


def load_data_shard(path: str | Path) -> Tensor:
    """The tokens of a shard, uint16 (n,), mapped into memory. Raises InputError naming the file."""
    require_file(path, f"DATA_PATH: {path}")
    size = os.path.getsize(path)
    magic, version, num_tokens = [*np.fromfile(path, "<i4", 3).tolist(), 0, 0, 0][:3]
    kind = [magic, version]
    again = "get the file again"
    problem = f"{path}: no token shard, it begins with {kind}: {again}"
    require(kind == SHARD_MAGIC_AND_VERSION, problem)
    fits = size == SHARD_HEADER_BYTES + 2 * num_tokens >= SHARD_HEADER_BYTES
    require(fits, f"{path}: {size} bytes are not {num_tokens} tokens: {again}")
    words = torch.from_file(str(path), shared=False, size=size // 2, dtype=torch.uint16)
    return words[SHARD_HEADER_BYTES // 2 :]


class TokenStream:
    """The tokens of all shards that match a pattern, in the order of their names, for ever. Raises
    FileNotFoundError without shards, InputError for bad shards and token ids."""

    def __init__(self, pattern: str, vocab_size: int = 2**16) -> None:
        self.paths = find_shards(pattern)
        self.vocab_size = vocab_size
        self.shards = [load_data_shard(path) for path in self.paths]
        self.shard = 0  # the next token is number `position` of number `shard`
        self.position = 0
        require(any(map(len, self.shards)), f"{pattern}: the shards hold no tokens: get them again")

    def take(self, n: int) -> Tensor:
        """The next n tokens, uint16 (n,)."""
        parts = [torch.empty(0, dtype=torch.uint16)]
        while n > 0:
            part = self.shards[self.shard][self.position : self.position + n]
            wrong = np.flatnonzero(part.numpy() >= self.vocab_size)
            if len(wrong):
                token = f"token id {part.numpy()[wrong[0]]} at position {self.position + wrong[0]}"
                limit = f"is not below VOCAB_SIZE={self.vocab_size}: set that of its tokenizer"
                raise InputError(f"{self.paths[self.shard]}: {token} {limit}")
            parts.append(part)
            n -= len(part)
            self.position += len(part)
            if self.position == len(self.shards[self.shard]):
                self.shard = (self.shard + 1) % len(self.shards)
                self.position = 0
        return torch.cat(parts)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Start a copy to the device. From pinned memory the host need not wait for it."""
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


class DistributedTokenLoader:
    """Deals one token stream out to the ranks in disjoint spans, the same for every world size,
    and reads one batch ahead. A span's last token is a target only."""

    def __init__(
        self, pattern: str, rank: int, world_size: int, device: Any, vocab_size: int = 2**16
    ) -> None:
        self.stream = TokenStream(pattern, vocab_size)
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)
        self.position = (0, 0)  # shard, and token in it, at which the next batch begins
        self.ahead: Tensor | None = None  # the next batch, if it is as long as the last one
        self.waited = 0.0  # seconds spent in next_batch

    def next_batch(
        self, global_tokens: int, seq_len: int, grad_accum_steps: int
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 (B, T), of this rank's next micro-step; global_tokens make an
        optimizer step. Raises InputError if its share is not whole sequences."""
        started = time.perf_counter()
        slots = self.world_size * grad_accum_steps
        local = global_tokens // slots
        problem = f"TRAIN_BATCH_TOKENS={global_tokens} must be a multiple of {slots * seq_len}"
        require(local > 0 and local % seq_len == 0, problem)
        if self.ahead is None or len(self.ahead) != local + 1:  # with the last target
            self.seek(self.position)
            self.ahead = self.read_span(local + 1)
        tokens = self.ahead.to(torch.int64)
        self.position = (self.stream.shard, self.stream.position)
        self.ahead = self.read_span(local + 1)
        self.waited += time.perf_counter() - started
        return tokens[:-1].view(-1, seq_len), tokens[1:].view(-1, seq_len)

    def read_span(self, span: int) -> Tensor:
        """Of the next W spans rank r keeps number r."""
        tokens = self.stream.take(self.world_size * span)
        return upload(tokens.view(-1, span)[self.rank], self.device)

    def seek(self, position: tuple[int, int]) -> None:
        """Let the next batch begin at (shard, token). Raises IndexError beyond the shards."""
        self.stream.shard, self.stream.position = position
        if min(position) < 0 or position[1] > len(self.stream.shards[position[0]]):
            raise IndexError(f"the shards have no position {position}")
        self.position = tuple(position)
        self.ahead = None


def dataset_fingerprint(hp: Hyperparameters) -> dict[str, Any]:
    """Each shard's size and sha256 of its header, first and last MiB; the tokenizer's sha256."""
    prints = {"tokenizer": hashlib.sha256(Path(hp.tokenizer_path).read_bytes()).hexdigest()}
    for path in find_shards(hp.files("train")) + find_shards(hp.files("val")):
        data = np.memmap(path, mode="r")
        ends = bytes(data[: SHARD_HEADER_BYTES + 2**20]) + bytes(data[-(2**20) :])
        prints[path.name] = [len(data), hashlib.sha256(ends).hexdigest()]
    return prints


# ---- Evaluation ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class TokenBytes:
    """How much text each token stands for, in three arrays (V,)."""

    length: np.ndarray  # bytes, without a leading space
    leading_space: np.ndarray  # whether the piece begins with a space
    no_text: np.ndarray  # control, unknown and unused pieces: behind them no space is written

    def count(self, tokens: np.ndarray) -> int:
        """The UTF-8 bytes of tokens[1:]; a leading space depends on the token before it."""
        spaces = self.leading_space[tokens[1:]] & ~self.no_text[tokens[:-1]]
        return int(self.length[tokens[1:]].sum() + spaces.sum())


def load_tokenizer(hp: Hyperparameters) -> TokenBytes:
    """The byte counts of the SentencePiece model at TOKENIZER_PATH."""
    knob = f"TOKENIZER_PATH={hp.tokenizer_path!r}"
    if not os.path.isfile(hp.tokenizer_path):
        raise FileNotFoundError(f"{knob} is not a file\n{WAYS_TO_DATA}")
    try:
        sp = sentencepiece.SentencePieceProcessor(model_file=hp.tokenizer_path)
    except (OSError, RuntimeError) as error:
        raise InputError(f"{knob} must be a SentencePiece .model file: {error}") from None
    size = sp.vocab_size()
    space = "\u2581"  # as SentencePiece writes it
    same = size == hp.vocab_size
    require(same, f"{knob} has {size} pieces: set VOCAB_SIZE={size}, not {hp.vocab_size}")
    has_space = not sp.IsUnknown(sp.PieceToId(space))
    require(has_space, f"{knob} has no piece for a lone space (U+2581): train it with that piece")
    no_text = [sp.IsControl(i) or sp.IsUnknown(i) or sp.IsUnused(i) for i in range(size)]
    pieces = ["" if no_text[i] else sp.IdToPiece(i) for i in range(size)]
    length = [len(piece.removeprefix(space).encode()) for piece in pieces]
    length = [1 if sp.IsByte(i) else length[i] for i in range(size)]
    leading_space = [piece.startswith(space) for piece in pieces]
    return TokenBytes(np.array(length), np.array(leading_space), np.array(no_text))


class Validation:
    """The validation split, cut to whole sequences and the last target."""

    def __init__(self, hp: Hyperparameters) -> None:
        token_bytes = load_tokenizer(hp)
        T = hp.train_seq_len
        stream = TokenStream(hp.files("val"), hp.vocab_size)
        tokens = stream.take(sum(len(shard) for shard in stream.shards))
        whole = (len(tokens) - 1) // T  # sequences
        source = f"DATA_PATH={hp.data_path!r}: {len(tokens)} validation tokens"
        require(whole > 0, f"{source} make no sequence of TRAIN_SEQ_LEN={T} and its last target")
        kept = min(hp.max_val_tokens // T, whole) if hp.max_val_tokens > 0 else whole
        self.partial = f" partial:{kept}/{whole}" if kept < whole else ""  # behind every figure
        self.tokens = tokens[: kept * T + 1]  # uint16
        self.num_bytes = token_bytes.count(self.tokens.numpy())
        require(self.num_bytes > 0, f"{source} stand for no text: get the files again")

    def bits_per_byte(self, loss: float) -> float:
        """loss: mean nats per target token."""
        return loss / math.log(2) * (len(self.tokens) - 1) / self.num_bytes

    def scores(self, loss: float, digits: int = 4) -> str:
        return f"val_loss:{loss:.{digits}f} val_bpb:{self.bits_per_byte(loss):.{digits}f}"


def rank_batches(num_windows: int, hp: Hyperparameters, runtime: "Runtime") -> list[slice]:
    """This rank's part of all windows, in batches of VAL_BATCH_SIZE / BATCH_SLOTS tokens."""
    first = num_windows * runtime.rank // runtime.world_size
    last = num_windows * (runtime.rank + 1) // runtime.world_size
    size = hp.val_batch_size // hp.batch_slots // hp.train_seq_len
    return [slice(i, min(i + size, last)) for i in range(first, last, size)]


@torch.no_grad()
def evaluate(model: nn.Module, tokens: Tensor, hp: Hyperparameters, runtime: "Runtime") -> float:
    """The metric: mean cross-entropy in nats of tokens[1:], uint16 (n * T + 1,), in n windows of T
    tokens side by side. The same on every rank."""
    T = hp.train_seq_len
    batches = rank_batches((len(tokens) - 1) // T, hp, runtime)
    total = torch.zeros((), dtype=torch.float64, device=runtime.device)
    model.eval()
    for i, batch in enumerate(batches):
        runtime.log.show(f"validation: {i / len(batches):.0%}")
        span = tokens[batch.start * T : batch.stop * T + 1]
        span = upload(span, runtime.device).to(torch.int64)
        losses = model(span[:-1].view(-1, T), span[1:].view(-1, T), "none")
        total += losses.sum(dtype=torch.float64)
    model.train()
    return sum(runtime.gather(total.item())) / (len(tokens) - 1)


@torch.no_grad()
def evaluate_sliding(
    model: nn.Module, tokens: Tensor, hp: Hyperparameters, runtime: "Runtime"
) -> float:
    """The same mean, from windows that begin EVAL_STRIDE tokens apart: the first window that holds
    a target scores it."""
    T = hp.train_seq_len
    num_targets = len(tokens) - 1
    starts = torch.tensor([*range(0, num_targets - T, hp.eval_stride), num_targets - T])
    fresh = starts.diff(prepend=torch.tensor([-T]))  # targets that no window before has
    total = torch.zeros((), dtype=torch.float64, device=runtime.device)
    model.eval()
    for batch in rank_batches(len(starts), hp, runtime):
        windows = torch.stack([tokens[start : start + T + 1] for start in starts[batch]])
        windows = upload(windows, runtime.device).to(torch.int64)
        losses = model(windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), "none")
        scored = torch.arange(T) >= T - fresh[batch, None]
        total += (losses * upload(scored, runtime.device)).sum(dtype=torch.float64)
    model.train()
    return sum(runtime.gather(total.item())) / num_targets


# ---- Export --------------------------------------------------------------------------------------
SIZE_LIMIT = 16_000_000  # bytes of artifact and code together
INT8_KEEP_FLOAT_MAX_NUMEL = 65_536  # quantizing smaller tensors gains nothing
INT8_CLIP_QUANTILE = 0.9999984


def abs_quantile(rows: Tensor, q: float) -> Tensor:
    """The q quantile of |row|, linearly interpolated, of each row of rows (n, m): fp32 (n,)."""
    # torch.quantile would sort every row; this selects the few largest values.
    m = rows.size(1)
    weight, below = math.modf(np.float32(q) * np.float32(m - 1))  # in fp32, as in torch.quantile
    largest = rows.abs().topk(m - int(below), dim=1).values
    return torch.lerp(largest[:, -1], largest[:, -2:][:, 0], weight)


def quantize_tensor(weight: Tensor, scale_floor: float) -> tuple[Tensor, Tensor]:
    """weight as int8, and the scale: of each row of a matrix in fp16, else of the whole in fp32. No
    row's scale is below scale_floor: at 1/127 a row of values up to 0.1 gets 12 steps a side."""
    is_matrix = weight.ndim == 2
    rows = weight.float() if is_matrix else weight.float().reshape(1, -1)
    clip = abs_quantile(rows, INT8_CLIP_QUANTILE)[:, None]
    scale = (clip / 127).clamp_min(scale_floor if is_matrix else 0.0)
    scale = torch.where(scale > 0, scale, 1.0)
    values = (rows.clamp(-clip, clip) / scale).round().clamp(-127, 127).to(torch.int8)
    return values.view(weight.shape), scale[:, 0].half() if is_matrix else scale[0, 0]


def quantize_state_dict_int8(
    state_dict: Mapping[str, Tensor],
    keep_patterns: tuple[str, ...] = CONTROL_TENSOR_NAME_PATTERNS,
    scale_floor: float = 1 / 127,
) -> tuple[dict[str, Any], dict[str, int]]:
    """The object that an artifact holds, and counts. Large floating-point tensors become int8;
    small ones fp16, or fp32 if their name holds one of keep_patterns."""
    parts = ("quantized", "scales", "dtypes", "passthrough", "qmeta", "passthrough_orig_dtypes")
    obj: dict[str, Any] = {"__quant_format__": "int8_clean_per_row_v1", **{p: {} for p in parts}}
    for name, tensor in state_dict.items():
        tensor = tensor.detach().cpu().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.is_floating_point() and tensor.numel() > INT8_KEEP_FLOAT_MAX_NUMEL:
            obj["quantized"][name], obj["scales"][name] = quantize_tensor(tensor, scale_floor)
            obj["dtypes"][name] = dtype
            if tensor.ndim == 2:
                obj["qmeta"][name] = {"scheme": "per_row", "axis": 0}
        elif tensor.is_floating_point() and is_control_tensor(name, keep_patterns):
            obj["passthrough"][name] = tensor.float()
        elif tensor.dtype in (torch.float32, torch.bfloat16):
            obj["passthrough"][name] = tensor.half()
            obj["passthrough_orig_dtypes"][name] = dtype
        else:
            obj["passthrough"][name] = tensor
    for optional in ("qmeta", "passthrough_orig_dtypes"):
        if not obj[optional]:
            del obj[optional]
    num_float = sum(tensor.is_floating_point() for tensor in state_dict.values())
    return obj, {
        "param_count": sum(tensor.numel() for tensor in state_dict.values()),
        "num_tensors": len(state_dict),
        "num_float_tensors": num_float,
        "num_nonfloat_tensors": len(state_dict) - num_float,
        "baseline_tensor_bytes": tensor_bytes(state_dict),
        "int8_payload_bytes": tensor_bytes(obj),
    }


def dequantize_state_dict_int8(obj: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state_dict from an object of quantize_state_dict_int8, in the dtypes it remembers. Raises
    ValueError if a tensor has neither one scale nor one for each row."""
    tensors = {name: tensor.clone() for name, tensor in obj["passthrough"].items()}
    for name, values in obj["quantized"].items():
        scale = obj["scales"][name]
        if scale.shape not in ((), values.shape[:1]):
            raise ValueError(f"{name} has {tuple(scale.shape)} scales, not one or one a row")
        tensors[name] = values.float() * scale.float().view(-1, *[1] * (values.ndim - 1))
    for name, dtype in (obj["dtypes"] | obj.get("passthrough_orig_dtypes", {})).items():
        tensors[name] = tensors[name].to(getattr(torch, dtype))
    return tensors


def tensor_bytes(obj: Any) -> int:
    """The bytes of all tensors in nested dictionaries, if none shares its memory."""
    if isinstance(obj, Mapping):
        return sum(tensor_bytes(value) for value in obj.values())
    return obj.numel() * obj.element_size() if isinstance(obj, Tensor) else 0


def serialize(obj: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


def size_limit(gpt: nn.Module) -> int:
    """More bytes than any file of gpt's has, unpacked: at most three fp32 values for a weight."""
    return 16 * sum(p.numel() for p in gpt.parameters()) + 2**24


def unpack(data: bytes, name: str, limit: int) -> dict[str, Any]:
    """What torch.save wrote into the file of this name, perhaps compressed by zlib. No code in it
    is run. Raises InputError if it is damaged, or unpacks to more than limit bytes."""
    try:
        if not data.startswith(b"PK"):  # as the zip files of torch.save do
            inflate = zlib.decompressobj()
            data = inflate.decompress(data, limit)
            require(inflate.eof, "it is cut short, or too large when unpacked")
        archive = zipfile.ZipFile(io.BytesIO(data))
        size = sum(entry.file_size for entry in archive.infolist())
        require(size <= limit, f"it is too large when unpacked: {size} bytes")
        require(archive.testzip() is None, "a checksum is wrong")  # torch does not look at them
        obj = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        require(isinstance(obj, dict), "it holds no dictionary")
        require(tensor_bytes(obj) <= limit, "its tensors are too large when unpacked")
        return obj
    except Exception as error:  # zlib, zipfile and torch each have their own
        reason = error if isinstance(error, InputError) else type(error).__name__
        raise InputError(f"{name} is no model file, or is damaged: {reason}") from None


def load_weights(gpt: nn.Module, data: bytes, name: str) -> None:
    """Give gpt the weights of an artifact, a checkpoint or a plain state_dict."""
    obj = unpack(data, name, size_limit(gpt))
    try:
        obj = obj["model"] if "checkpoint_format" in obj else obj
        if "__quant_format__" in obj:
            # Wrong shapes are refused before dequantizing makes them four times larger.
            gpt.load_state_dict(obj["quantized"] | obj["passthrough"])
            obj = dequantize_state_dict_int8(obj)
        gpt.load_state_dict(obj)
    except Exception as error:  # a foreign file may hold anything
        reason = " ".join(str(error).split()) or repr(error)
        raise InputError(f"{name} does not fit: {reason}: set the model's knobs") from None


# ==================================================================================================
# Machinery: rarely edited.
# ==================================================================================================


# ---- Runtime -------------------------------------------------------------------------------------
class Log:
    """Rank 0's lines, on the console and in OUTPUT_DIR/logs/RUN_ID.txt. Without hp it is silent."""

    def __init__(self, hp: Hyperparameters | None = None) -> None:
        self.file: io.TextIOWrapper | None = None
        self.clear = ""  # what wipes a status off the terminal
        self.status_time = 0.0
        if hp is None:
            return
        path = Path(hp.output_dir) / "logs" / f"{hp.run_id}.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(path, "a", encoding="utf-8", errors="backslashreplace", buffering=1)
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"RUN_ID={hp.run_id!r} is running already: set another") from None
        except OSError as error:  # if the file is open, its file system has no locks
            problem = f"OUTPUT_DIR={hp.output_dir!r} must be writable: {error}"
            require(self.file is not None, problem)
        versions = f"Running Python {sys.version}\nRunning PyTorch {torch.__version__}"
        gpus = subprocess.getoutput("nvidia-smi")
        source = Path(__file__).read_text(encoding="utf-8")
        rule = "=" * 100
        self.file.write(f"{source}\n{rule}\n{versions}\n{gpus}\n{rule}\n")
        self(str(path))

    def __call__(self, line: str) -> None:
        if self.file is None:
            return
        try:
            print(f"{self.clear}{line}\n", end="", flush=True)
        except OSError:  # a lost terminal or pipe costs lines, not the run
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        self.clear = ""
        with contextlib.suppress(OSError):
            self.file.write(f"{line}\n")

    def show(self, status: str) -> None:
        """On a terminal, show a status below the last line, at most four times a second."""
        if self.file and os.isatty(1) and time.monotonic() > self.status_time + 0.25:
            self.status_time = time.monotonic()
            self.clear = "\x1b[K"
            with contextlib.suppress(OSError):
                print(f"{self.clear}{status}", end="\r", flush=True)


@dataclass(frozen=True)
class Runtime:
    """Where this process stands."""

    rank: int
    world_size: int  # W
    distributed: bool  # there is a process group
    device: torch.device
    dtype: torch.dtype  # of activations and of Muon's updates
    log: Log = Log()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank. Every rank must call it."""
        values = [value] * self.world_size
        if self.distributed:
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank. Every rank must call it."""
        box = [value]
        if self.distributed:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def sync_clock_and_signal(self, elapsed_ms: float, signum: int) -> tuple[float, int]:
        """Rank 0's clock, so that all ranks have one learning rate, and any rank's signal or 0. On
        the CPU: no device is waited for."""
        box = torch.tensor([elapsed_ms if self.rank == 0 else 0, signum], dtype=torch.float64)
        if self.distributed:
            dist.all_reduce(box, dist.ReduceOp.MAX)
        return box[0].item(), int(box[1])


def read_topology(environ: Mapping[str, str], slots: int) -> tuple[int, int, int, bool]:
    """(rank, world size, local rank, distributed) as torchrun sets them. Raises InputError."""
    world_size = parse_knob("WORLD_SIZE", environ.get("WORLD_SIZE", "1"), int)
    ways = f"launch {', '.join(str(n) for n in range(1, slots + 1) if slots % n == 0)} processes"
    problem = f"WORLD_SIZE={world_size} must divide BATCH_SLOTS={slots}: {ways}, or set BATCH_SLOTS"
    require(world_size > 0 and slots % world_size == 0, problem)
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return 0, 1, 0, False
    rank = parse_knob("RANK", environ["RANK"], int)
    require(0 <= rank < world_size, f"RANK={rank} must be from 0 to WORLD_SIZE-1={world_size - 1}")
    port = parse_knob("MASTER_PORT", environ.get("MASTER_PORT", "0"), int)
    has_address = "MASTER_ADDR" in environ and 0 < port < 2**16
    require(has_address, "RANK needs MASTER_ADDR and MASTER_PORT: use torchrun, or unset RANK")
    return rank, world_size, parse_knob("LOCAL_RANK", environ.get("LOCAL_RANK", "0"), int), True


def open_device(hp: Hyperparameters, environ: Mapping[str, str], local_rank: int) -> torch.device:
    """This rank's GPU, or the CPU and this rank's share of its cores."""
    num_gpus = torch.cuda.device_count()
    if hp.device == "cuda" or (hp.device == "auto" and num_gpus > 0):
        problem = f"DEVICE={hp.device!r} LOCAL_RANK={local_rank}, but torch sees {num_gpus} GPUs"
        require(0 <= local_rank < num_gpus, f"{problem}: start fewer processes, or set DEVICE=cpu")
        torch.cuda.set_device(local_rank)
        torch.backends.cuda.matmul.allow_tf32 = True
        return torch.device("cuda", local_rank)
    # torchrun sets 1 thread where none is set: 1 counts as unset.
    processes = parse_knob("LOCAL_WORLD_SIZE", environ.get("LOCAL_WORLD_SIZE", "1"), int)
    if processes > 1 and environ.get("OMP_NUM_THREADS", "1") == "1":
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
        torch.set_num_threads(max(cores // processes, 1))
    return torch.device("cpu")


def has_fast_bf16(device: torch.device) -> bool:
    """Without hardware for its products, bf16 is slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    return "amx_bf16" in flags or "avx512_bf16" in flags


def open_runtime(hp: Hyperparameters, environ: Mapping[str, str]) -> Runtime:
    rank, world_size, local_rank, distributed = read_topology(environ, hp.batch_slots)
    device = open_device(hp, environ, local_rank)
    bf16 = hp.dtype == "bf16" or (hp.dtype == "auto" and has_fast_bf16(device))
    warnings.simplefilter("ignore", FutureWarning)  # newer torch deprecates names that 2.9 needs
    if distributed:
        # torchrun may keep its store over restarts: what earlier ranks wrote is not for these.
        store, _, _ = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        # gloo carries what lies on the CPU, so that the clock never waits for a GPU.
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        dist.barrier()
    dtype = torch.bfloat16 if bf16 else torch.float32
    return Runtime(rank, world_size, distributed, device, dtype, Log(None if rank else hp))


def compile_and_wrap(gpt: GPT, runtime: Runtime) -> tuple[nn.Module, Callable]:
    """The model to call, and Newton-Schulz."""
    hp = gpt.hp
    on_gpu = runtime.device.type == "cuda"
    model: nn.Module = gpt
    newton_schulz_fn = newton_schulz
    compiled = hp.compile == "1" or (hp.compile == "auto" and on_gpu)
    if compiled:  # a hook or a print that torch cannot trace needs COMPILE=0
        model = torch.compile(gpt, dynamic=False, fullgraph=True)
        newton_schulz_fn = torch.compile(newton_schulz, dynamic=False, fullgraph=True)
    if runtime.distributed:
        options = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
        model = nn.parallel.DistributedDataParallel(model, **options)
    machine = f"device:{runtime.device} dtype:{runtime.dtype} compile:{compiled}"
    runtime.log(f"{machine} cpu_threads:{torch.get_num_threads()}")
    if hp.device == "auto" and torch.version.cuda and not on_gpu:
        runtime.log("device:torch is built for CUDA but sees no GPU, so the CPU it is: nvidia-smi?")
    return model, newton_schulz_fn


class StopRequest:
    """A wish to end after the step in hand: SIGTERM, SIGINT, SIGHUP (unless ignored, as under
    nohup), or a torchrun that is gone. The exit code is 128 + signal. A second signal, and one
    outside of training, ends the process at once."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.signum = 0
        self.time = 0.0
        self.torchrun = os.getppid() if "TORCHELASTIC_RUN_ID" in environ else None

    def set_action(self, action: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, action)

    def handle(self, signum: int, frame: Any) -> None:
        if not self.signum:
            self.time = time.monotonic()
            self.signum = signum
        elif time.monotonic() > self.time + 1:  # before, it is torchrun's copy of the first
            os._exit(128 + signum)

    def wanted(self) -> int:
        """The signal to obey, or 0."""
        orphaned = self.torchrun is not None and os.getppid() != self.torchrun
        return signal.SIGTERM if orphaned else self.signum


def report_error(error: Exception, environ: Mapping[str, str]) -> None:
    """Say why the run fails, also in the file that torchrun repeats as its last words. Rank 0
    speaks first of what all ranks meet. A rank that has lost another (a RuntimeError) waits, so
    that the other is heard: torchrun ends those that wait."""
    is_users = isinstance(error, InputError | OSError)
    if isinstance(error, RuntimeError) or (is_users and environ.get("RANK", "0") != "0"):
        time.sleep(1)
    text = "".join(traceback.format_exception(error))
    if is_users:
        kind = "ValueError" if isinstance(error, InputError) else type(error).__name__
        text = f"{kind}: {error}\n"
        error.__traceback__ = error.__cause__ = error.__context__ = None
    get_error_handler().record_exception(error)
    print(text, end="", file=sys.stderr, flush=True)


# ---- Checkpoints ---------------------------------------------------------------------------------
# A resumed run needs the same model: these knobs must not change.
MODEL_KNOBS = (
    "vocab_size num_layers model_dim num_heads num_kv_heads mlp_mult tie_embeddings rope_base "
    "logit_softcap train_seq_len control_tensor_name_patterns".split()
)


def write_file(path: Path, data: bytes) -> None:
    """Write beside, flush, rename: path is always the whole old or new file. Raises InputError."""
    beside = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()  # a full disk has no room for half a file
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def read_file(path: str | Path, name: str, gpt: GPT) -> bytes:
    """A file of gpt's. Raises InputError if it cannot be read, or is too large to be one."""
    require_file(path, name)
    small = os.path.getsize(path) <= size_limit(gpt)
    require(small, f"{name} is too large for this model: set the knobs of the model in the file")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}") from None


@dataclass
class TrainingState:
    """All that a step changes, and its files OUTPUT_DIR/checkpoints/RUN_ID/step_*.pt, which are
    rank 0's. A checkpoint holds what `snapshot` returns, the knobs and the data's fingerprint."""

    runtime: Runtime
    gpt: GPT
    model: nn.Module  # gpt, compiled and wrapped
    optimizers: list[torch.optim.Optimizer]
    loader: DistributedTokenLoader
    stopwatch: "Stopwatch"
    step: int = 0  # steps done
    writer: threading.Thread | None = None  # of the last checkpoint

    @functools.cached_property
    def dataset(self) -> dict[str, Any]:
        """The fingerprint of this run's data, read once."""
        return dataset_fingerprint(self.gpt.hp)

    def snapshot(self) -> dict[str, Any]:
        """Copies on the CPU of all that a run needs to go on, in types that torch.load takes
        without code. Optimizer state, of all ranks, goes by the names of the parameters."""
        names = {param: name for name, param in self.gpt.named_parameters()}
        held = {}
        for optimizer in self.optimizers:
            for param, state in optimizer.state.items():
                copies = {key: value.to("cpu", copy=True) for key, value in state.items()}
                held[names[param]] = copies
        model = {name: value.to("cpu", copy=True) for name, value in self.gpt.state_dict().items()}
        kind, keys, *rest = np.random.get_state()
        rng = {"python": random.getstate(), "numpy": (kind, keys.tolist(), *rest)}
        rng["torch"] = torch.get_rng_state()
        if self.runtime.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state()
        return {
            "checkpoint_format": 1,
            "step": self.step,
            "train_ms": self.stopwatch.elapsed_ms(),
            "stream": self.loader.position,
            "random": rng,
            "model": model,
            "optimizers": dict(collections.ChainMap(*self.runtime.gather(held))),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go back to a snapshot. What has a wrong kind, shape or range raises some exception."""
        step = saved["step"]
        held = saved["optimizers"]
        require(min(step, saved["train_ms"]) >= 0, "a step or time below 0")
        self.gpt.load_state_dict(saved["model"])
        names = {}
        for name, param in self.gpt.named_parameters():
            names[param] = name
            complete = step == 0 or held.get(name) or not param.requires_grad
            shapes = {value.shape for value in held.get(name, {}).values()}
            require(complete and shapes <= {param.shape, ()}, f"no fitting optimizer state: {name}")
        for optimizer in self.optimizers:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            is_muon = isinstance(optimizer, Muon)  # of whose state each rank holds a share
            own = set(optimizer.shares(params)[optimizer.rank] if is_muon else params)
            state = {i: held.get(names[p], {}) for i, p in enumerate(params) if p in own}
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        self.loader.seek(saved["stream"])
        random.setstate(saved["random"]["python"])
        np.random.set_state(saved["random"]["numpy"])
        torch.set_rng_state(saved["random"]["torch"])
        if "cuda" in saved["random"] and self.runtime.device.type == "cuda":
            torch.cuda.set_rng_state(saved["random"]["cuda"])
        self.step = step
        self.stopwatch.reset(saved["train_ms"])

    @property
    def folder(self) -> Path:
        return Path(self.gpt.hp.output_dir, "checkpoints", self.gpt.hp.run_id)

    def paths(self) -> list[Path]:
        """The newest first, by the time of writing: after going back, earlier steps are newer."""
        paths = sorted(self.folder.glob("step_*.pt"))
        return sorted(paths, key=lambda path: path.lstat().st_mtime_ns)[::-1]

    def save(self) -> None:
        """Copy everything now, and write it in the background. Raises InputError if the weights are
        not finite: no good checkpoint shall make room for them."""
        total = sum(param.detach().float().sum() for param in self.gpt.parameters())
        require_finite("sum of the weights", total.item(), self.step)
        self.wait()
        saved = self.snapshot()
        if self.runtime.rank == 0:
            self.writer = threading.Thread(target=self.write, args=(saved,))
            self.writer.start()

    def write(self, saved: dict[str, Any]) -> None:
        """Write a checkpoint. If that fails, the run goes on without it."""
        path = self.folder / f"step_{saved['step']:08d}.pt"
        try:
            for stale in self.folder.glob("*.part"):  # of a run that was killed
                stale.unlink()
            saved |= {"knobs": asdict(self.gpt.hp), "dataset": self.dataset}
            write_file(path, serialize(saved))
            self.runtime.log(f"checkpoint:{path}")
        except (InputError, OSError) as error:
            self.runtime.log(f"checkpoint:failed, the older ones stay: {error}")
            return
        for old in self.paths()[self.gpt.hp.keep_checkpoints :]:
            with contextlib.suppress(OSError):
                old.unlink()

    def wait(self) -> None:
        """Until the last checkpoint has reached the disk."""
        if self.writer is not None:
            self.writer.join()

    def load(self) -> None:
        """Restore on every rank what RESUME means, if anything. Raises InputError on rank 0."""
        saved = self.runtime.broadcast(None if self.runtime.rank else self.find())
        if saved is not None and self.runtime.rank != 0:
            self.restore(saved)

    def find(self) -> dict[str, Any] | None:
        """The checkpoint that RESUME means, restored. auto goes past those that are damaged."""
        hp = self.gpt.hp
        paths = self.paths()
        problems = []
        if hp.resume not in ("", "auto"):
            return self.read(Path(hp.resume), f"RESUME={hp.resume!r}")
        free = hp.resume == "auto" or not paths
        require(free, f"RUN_ID={hp.run_id!r} has checkpoints: set RESUME=auto or another RUN_ID")
        for path in paths:
            try:
                return self.read(path, str(path))
            except InputError as error:
                problems.append(str(error))
                self.runtime.log(f"resume:damaged, trying the one before it: {error}")
        require(not paths, f"RESUME='auto' finds no good checkpoint: {problems[:1]}")
        return None

    def read(self, path: Path, name: str) -> dict[str, Any]:
        """Restore a checkpoint. Raises InputError if it is damaged, or of another model or data."""
        saved = unpack(read_file(path, name, self.gpt), name, size_limit(self.gpt))
        try:
            require(saved["checkpoint_format"] == 1, "another format")
            old, new = saved["knobs"], asdict(self.gpt.hp)
            changed = [key for key in new if old.get(key, new[key]) != new[key] and key != "resume"]
            refused = [key for key in changed if key in MODEL_KNOBS]
            changes = [f"{key.upper()}:{old[key]}->{new[key]}" for key in refused or changed]
            require(not refused, f"another model: {' '.join(changes)}: set what it was")
            files = self.dataset.keys() | saved["dataset"].keys()
            other = sorted(f for f in files if self.dataset.get(f) != saved["dataset"].get(f))
            require(not other, f"other data: {' '.join(other)}: set DATA_PATH and TOKENIZER_PATH")
            self.restore(saved)
        except InputError as error:
            raise InputError(f"{name} cannot be resumed: {error}") from None
        except Exception as error:  # a foreign file may hold anything
            raise InputError(f"{name} is no checkpoint of this program: {error!r}") from None
        told = " ".join(changes) or "nothing"
        self.runtime.log(f"resume:{path} step:{saved['step']} changed:{told}")
        return saved


# ---- Training ------------------------------------------------------------------------------------
class Stopwatch:
    """Training time without pauses, by the device's clock."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.device = torch.get_device_module(runtime.device)
        self.reset(0.0)

    def reset(self, elapsed_ms: float) -> None:
        self.before_ms = elapsed_ms
        self.started: float | None = None  # in seconds; None while it stands still
        self.last_step: Any = None  # the device's event behind its work

    def start(self) -> None:
        """Start, or go on, when the devices of all ranks have nothing left to do."""
        self.device.synchronize()
        self.runtime.gather(None)
        self.started = time.perf_counter()

    def pause(self) -> None:
        self.device.synchronize()
        self.reset(self.elapsed_ms())

    def lap(self) -> None:
        """After each step. The host stays one step ahead, so that its clock follows the device and
        the device has work."""
        previous = self.last_step
        self.last_step = self.device.Event()
        self.last_step.record()
        if previous is not None:
            previous.synchronize()

    def elapsed_ms(self) -> float:
        running = 0.0 if self.started is None else time.perf_counter() - self.started
        return self.before_ms + 1000 * running

    def report(self, step: int) -> str:
        elapsed_ms = self.elapsed_ms()
        return f"train_time:{elapsed_ms:.0f}ms step_avg:{elapsed_ms / max(step, 1):.2f}ms"


def require_finite(what: str, value: float, step: int) -> None:
    advice = "go back to the last checkpoint, with lower learning rates or with GRAD_CLIP_NORM"
    require(math.isfinite(value), f"step:{step} the {what} is {value}: {advice}")


def train_step(state: TrainingState) -> Tensor:
    """One optimizer step. Returns the mean loss of this rank's tokens."""
    hp, runtime = state.gpt.hp, state.runtime
    # A batch has 8 slots (BATCH_SLOTS), so that 1, 2, 4 or 8 ranks take the same optimizer step.
    grad_accum_steps = hp.batch_slots // runtime.world_size
    total_loss = torch.zeros((), device=runtime.device)
    for micro_step in range(grad_accum_steps):
        if runtime.distributed:
            # Gradients add up on each rank and are synchronized on the last micro-step only: one
            # exchange instead of many. DDP reads this flag in its forward pass.
            state.model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
        batch = state.loader.next_batch(hp.train_batch_tokens, hp.train_seq_len, grad_accum_steps)
        loss = state.model(*batch) * (1 / grad_accum_steps)
        # Adds to param.grad. On the last micro-step DDP's hooks also send the gradients, bucket by
        # bucket, to all ranks (all-reduce), and leave the mean over the ranks in param.grad.
        loss.backward()
        total_loss += loss.detach()
    for name, param in state.gpt.named_parameters():
        assert param.grad is not None or not param.requires_grad, f"{name} got no gradient"
    if hp.grad_clip_norm > 0:
        nn.utils.clip_grad_norm_(state.gpt.parameters(), hp.grad_clip_norm)
    for optimizer in state.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return total_loss


def warm_up(state: TrainingState) -> None:
    """Take WARMUP_STEPS steps, which compile every graph, and undo them."""
    wanted = state.gpt.hp.warmup_steps
    start = state.snapshot()
    set_schedule(state.optimizers, 1.0, muon_momentum(state.gpt.hp, 0))
    # At least one with several ranks: DDP regroups its buckets after the first step of a process,
    # which changes how sums are rounded.
    for step in range(1, max(wanted, int(state.runtime.distributed)) + 1):
        state.runtime.log.show(f"warmup_step:{step - 1}/{wanted}")
        train_step(state)
        if step <= wanted <= 20 or step % 10 == 0 or step == wanted:
            state.runtime.log(f"warmup_step:{step}/{wanted}")
    state.restore(start)
    state.loader.waited = 0.0


def validate(state: TrainingState, validation: Validation) -> float:
    hp, runtime = state.gpt.hp, state.runtime
    state.stopwatch.pause()
    loss = evaluate(state.model, validation.tokens, hp, runtime)
    times = state.stopwatch.report(state.step) + validation.partial
    runtime.log(f"step:{state.step}/{hp.iterations} {validation.scores(loss)} {times}")
    return loss


def train(state: TrainingState, validation: Validation, stop: StopRequest) -> tuple[bool, int]:
    """Steps until ITERATIONS, the wallclock cap or a signal. Returns whether the cap ended it, and
    the signal or 0."""
    hp, runtime, stopwatch = state.gpt.hp, state.runtime, state.stopwatch
    cap_ms = 1000 * hp.max_wallclock_seconds
    begun_at = state.step
    last_loss = ""  # as it was logged
    stopwatch.start()
    while True:
        elapsed_ms, signum = runtime.sync_clock_and_signal(stopwatch.elapsed_ms(), stop.wanted())
        capped = 0 < cap_ms <= elapsed_ms and state.step < hp.iterations
        finished = capped or state.step >= hp.iterations
        due = hp.checkpoint_every > 0 and (finished or state.step % hp.checkpoint_every == 0)
        if signum or (due and state.step > begun_at):
            state.save()
        if signum or finished:
            return capped, signum
        if hp.val_loss_every > 0 and state.step % hp.val_loss_every == 0:
            require_finite("val_loss", validate(state, validation), state.step)
            stopwatch.start()

        factor = lr_factor(hp, state.step, elapsed_ms)
        set_schedule(state.optimizers, factor, muon_momentum(hp, state.step))
        rank_loss = train_step(state)
        stopwatch.lap()
        state.step += 1

        due = hp.train_log_every > 0 and (state.step <= 10 or state.step % hp.train_log_every == 0)
        tell = runtime.log if due else runtime.log.show
        if due:
            loss = sum(runtime.gather(rank_loss.item())) / runtime.world_size
            last_loss = f"train_loss:{loss:.4f} "
        times = stopwatch.report(state.step)
        tell(f"step:{state.step}/{hp.iterations} {last_loss}{times}")
        if due:
            require_finite("train_loss", loss, state.step)
        if state.step == 10 and factor < 1 and hp.warmdown_frac == 0 < cap_ms:
            problem = f"WARMDOWN_ITERS={hp.warmdown_iters} such steps are longer than the run"
            runtime.log(f"warmdown:begun already: {problem}: try WARMDOWN_FRAC=0.2, its last fifth")


# ---- main ----------------------------------------------------------------------------------------
def prepare_demo(hp: Hyperparameters, log: Log) -> None:
    """Build the demo's data. Each rank calls the builder, which has a lock."""
    script = Path(__file__).with_name("data") / "demo_corpus.py"
    command = [sys.executable, script, "--dataset", hp.data_path, "--tokenizer", hp.tokenizer_path]
    result = subprocess.run(command, capture_output=True, text=True)
    reason = (result.stderr.strip() or "no message").splitlines()[-1]
    require(result.returncode == 0, f"PRESET=demo: {script} failed: {reason}")
    log(result.stdout.rstrip())


def log_run(hp: Hyperparameters, runtime: Runtime, validation: Validation, gpt: GPT) -> None:
    backends = []
    for name in ATTENTION_BACKENDS:
        backends.append(f"{name}={getattr(torch.backends.cuda, f'{name}_sdp_enabled')()}")
    tied = hp.tie_embeddings
    runtime.log(
        f"val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path={hp.tokenizer_path}\n"
        f"train_loader:dataset:{Path(hp.data_path).resolve().name} "
        f"train_shards:{len(glob.glob(hp.files('train')))}\n"
        f"val_loader:shards pattern={os.path.join(hp.data_path, 'fineweb_val_*.bin')} "
        f"tokens:{len(validation.tokens) - 1}{validation.partial}\n"
        f"model_params:{sum(p.numel() for p in gpt.parameters())}\n"
        f"world_size:{runtime.world_size} grad_accum_steps:{hp.batch_slots // runtime.world_size}\n"
        f"sdp_backends:{' '.join(backends)}\n"
        f"attention_mode:gqa num_heads:{hp.num_heads} num_kv_heads:{hp.num_kv_heads}\n"
        f"tie_embeddings:{tied} embed_lr:{hp.tied_embed_lr if tied else hp.embed_lr} "
        f"head_lr:{0.0 if tied else hp.head_lr} matrix_lr:{hp.matrix_lr} scalar_lr:{hp.scalar_lr}\n"
        f"train_batch_tokens:{hp.train_batch_tokens} train_seq_len:{hp.train_seq_len} "
        f"iterations:{hp.iterations} warmup_steps:{hp.warmup_steps} "
        f"max_wallclock_seconds:{hp.max_wallclock_seconds:.3f}\n"
        f"seed:{hp.seed}"
    )


def check_replicas(state: TrainingState) -> None:
    """The weights and Adam's step counts of all ranks must have the same bits."""
    if not state.runtime.distributed:
        return
    states = [held for optimizer in state.optimizers for held in optimizer.state.values()]
    steps = [int(held["step"]) for held in states if "step" in held]
    weights = {name: tensor.cpu() for name, tensor in state.gpt.state_dict().items()}
    digests = state.runtime.gather(hashlib.sha256(serialize((steps, weights))).digest())
    strays = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if strays:
        raise RuntimeError(f"the weights or step counts of ranks {strays} differ from rank 0's")
    state.runtime.log("replicas:identical")


def log_memory_and_speed(state: TrainingState) -> None:
    """Peak memory of the GPU, else of the process; speed; the share of the time that data took."""
    unit = 1 if sys.platform == "darwin" else 1024
    allocated = reserved = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if state.runtime.device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated()
        reserved = torch.cuda.max_memory_reserved()
    seconds = max(state.stopwatch.elapsed_ms() / 1000, 1e-9)
    speed = state.step * state.gpt.hp.train_batch_tokens / seconds
    state.runtime.log(
        f"peak memory allocated: {allocated >> 20} MiB reserved: {reserved >> 20} MiB\n"
        f"speed: tokens_per_s:{speed:.0f} data_wait:{state.loader.waited / seconds:.3f}"
    )


def export(gpt: GPT, log: Log) -> tuple[bytes, dict[str, int], list[str]]:
    """Write the models. Returns the artifact (read back if both could be written), sizes, and
    problems."""
    hp = gpt.hp
    state_dict = {name: tensor.cpu() for name, tensor in gpt.state_dict().items()}
    patterns = hp.int8_keep_float_fp32_name_patterns
    obj, stats = quantize_state_dict_int8(state_dict, patterns, hp.int8_scale_floor)
    plain = serialize(state_dict)
    raw = serialize(obj)
    artifact = zlib.compress(raw, 9)
    problems = []
    for name, data in (("final_model.pt", plain), ("final_model.int8.ptz", artifact)):
        try:
            write_file(Path(hp.output_dir, name), data)
        except InputError as error:
            problems.append(str(error))
    if not problems:
        artifact = Path(hp.output_dir, "final_model.int8.ptz").read_bytes()
    code = os.path.getsize(__file__)
    payload = stats["int8_payload_bytes"]
    total = len(artifact) + code
    left = SIZE_LIMIT - total
    log(
        f"Serialized model: {len(plain)} bytes\n"
        f"Code size: {code} bytes\n"
        f"Total submission size: {len(plain) + code} bytes\n"
        f"Serialized model int8+zlib: {len(artifact)} bytes (payload:{payload} "
        f"raw_torch:{len(raw)} payload_ratio:{stats['baseline_tensor_bytes'] / payload:.2f}x)\n"
        f"Total submission size int8+zlib: {total} bytes\n"
        f"size_check:{'fits' if left >= 0 else 'too_large'} limit:{SIZE_LIMIT} bytes_left:{left}"
    )
    sizes = {"bytes_total": total, "bytes_code": code, "bytes_left": left, "fits": left >= 0}
    return artifact, sizes, problems


def score(
    model: nn.Module, validation: Validation, hp: Hyperparameters, runtime: Runtime
) -> dict[str, float]:
    """The last lines: the score of the weights that gpt has now. Raises InputError if it is no
    finite number."""
    name = "final_int8_zlib_roundtrip"
    tokens = validation.tokens
    end = validation.partial
    figures = {}
    if hp.eval_stride:
        loss = evaluate_sliding(model, tokens, hp, runtime)
        figures["sliding_val_loss"] = loss
        figures["sliding_val_bpb"] = validation.bits_per_byte(loss)
        scores = f"stride:{hp.eval_stride} {validation.scores(loss, 8)}"
        runtime.log(f"{name}_sliding {scores}{end}")
    started = time.perf_counter()
    loss = evaluate(model, tokens, hp, runtime)
    ms = 1000 * (time.perf_counter() - started)
    runtime.log(f"{name} {validation.scores(loss)} eval_time:{ms:.0f}ms{end}")
    runtime.log(f"{name}_exact {validation.scores(loss, 8)}{end}")
    require(math.isfinite(loss), f"the score is {loss}: train at lower learning rates")
    return {"val_loss": loss, "val_bpb": validation.bits_per_byte(loss), "eval_ms": ms, **figures}


def write_result(state: TrainingState, figures: Mapping[str, Any]) -> None:
    """What came of the run, and where, on which data and with which knobs."""
    runtime = state.runtime
    versions = {"python": sys.version.split()[0]}
    for module in (torch, np, sentencepiece):
        versions[module.__name__] = str(module.__version__)
    gpu = torch.cuda.get_device_name() if runtime.device.type == "cuda" else None
    machine = {"platform": platform.platform(), "cpus": os.cpu_count(), "gpu": gpu}
    machine |= {"device": str(runtime.device), "dtype": str(runtime.dtype)}
    machine["world_size"] = runtime.world_size
    result = {**figures, "versions": versions, "machine": machine}
    result |= {"knobs": asdict(state.gpt.hp), "dataset": state.dataset}
    path = Path(state.gpt.hp.output_dir, "final_result.json")
    write_file(path, json.dumps(result, indent=1).encode())


def train_and_export(state: TrainingState, validation: Validation, stop: StopRequest) -> int:
    runtime, gpt, hp = state.runtime, state.gpt, state.gpt.hp
    state.load()
    warm_up(state)
    stop.set_action(stop.handle)
    try:
        capped, signum = train(state, validation, stop)
    finally:
        state.wait()
        if not stop.signum:  # else torchrun's copy of it may follow
            stop.set_action(signal.SIG_DFL)
    if stop.signum and not signum:  # it came behind the last step
        os._exit(128 + stop.signum)
    steps = f"step:{state.step}/{hp.iterations}"
    if signum:
        ways = f"to go on, set RESUME=auto and RUN_ID={hp.run_id}"
        runtime.log(f"stopped: signal:{signum} {steps}: {ways}")
        return 128 + signum
    val_loss = validate(state, validation)
    train_ms = state.stopwatch.elapsed_ms()
    if capped:
        runtime.log(f"stopping_early: wallclock_cap train_time:{train_ms:.0f}ms {steps}")
    require_finite("val_loss", val_loss, state.step)
    check_replicas(state)
    log_memory_and_speed(state)

    # Rank 0 writes the models. All ranks score the artifact's bytes.
    exported = export(gpt, runtime.log) if runtime.rank == 0 else None
    artifact, sizes, problems = runtime.broadcast(exported)
    load_weights(gpt, artifact, "final_model.int8.ptz")
    figures = score(state.model, validation, hp, runtime) | sizes
    require(not problems, "\n".join(problems))
    if runtime.rank == 0:
        figures["pre_quant_val_loss"] = val_loss
        figures["pre_quant_val_bpb"] = validation.bits_per_byte(val_loss)
        figures |= {"partial": validation.partial, "steps": state.step, "train_ms": train_ms}
        write_result(state, figures)
    return 0


def run(environ: Mapping[str, str], stop: StopRequest) -> int:
    """One whole run. Returns the exit code."""
    # Knobs, device, process group, log.
    hp = Hyperparameters.from_env(environ)
    runtime = open_runtime(hp, environ)
    for line in near_knobs(environ):
        runtime.log(line)
    for name in ("final_model.pt", "final_model.int8.ptz", "final_result.json"):
        path = Path(hp.output_dir, name)
        require(not path.is_dir(), f"{path} cannot be written: a folder is in its place: move it")

    # Tokens: all are found and checked before anything is compiled.
    if hp.preset == "demo" and hp.data_path == PRESETS["demo"]["DATA_PATH"]:
        prepare_demo(hp, runtime.log)
    place = (runtime.rank, runtime.world_size, runtime.device, hp.vocab_size)
    loader = None if hp.eval_only else DistributedTokenLoader(hp.files("train"), *place)
    validation = Validation(hp)

    # The model, if it fits: fp32 weights, gradients and optimizer state; the logits of a slot.
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    D, V, batch = hp.model_dim, hp.vocab_size, hp.train_batch_tokens
    weights = 12 * hp.num_layers * D * D * (2 + 2 * hp.mlp_mult) + 8 * V * D
    logits = 6 * V * batch // hp.batch_slots
    for knob, needed in ((f"MODEL_DIM={D}", weights), (f"TRAIN_BATCH_TOKENS={batch}", logits)):
        problem = f"{knob} needs {needed >> 30} GB, and this machine has {memory >> 30}"
        require(needed <= memory, f"{problem}: choose less")
    for seed in (random.seed, np.random.seed, torch.manual_seed):  # the last one: CPU and CUDA
        seed(hp.seed)
    choose_attention(hp, runtime.device, runtime.dtype)
    gpt = GPT(hp, runtime.dtype).to(runtime.device)
    log_run(hp, runtime, validation, gpt)
    model, newton_schulz_fn = compile_and_wrap(gpt, runtime)

    # Score a file, or train, export and score.
    code = 0
    if loader is None:
        name = f"EVAL_ONLY={hp.eval_only!r}"
        data = read_file(hp.eval_only, name, gpt) if runtime.rank == 0 else b""
        load_weights(gpt, runtime.broadcast(data), name)
        score(model, validation, hp, runtime)
    else:
        optimizers = build_optimizers(gpt, runtime.dtype, newton_schulz_fn)
        state = TrainingState(runtime, gpt, model, optimizers, loader, Stopwatch(runtime))
        code = train_and_export(state, validation, stop)
    if runtime.distributed:
        # All ranks leave together. The process group ends with the process: to destroy it can hang,
        # when gloo's thread wants the GIL to free what it holds.
        dist.barrier()
    return code


def main() -> None:
    if sys.stdout:  # None if it was closed
        sys.stdout.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no KeyboardInterrupt, which prints a traceback
    try:
        code = run(os.environ, StopRequest(os.environ))
    except Exception as error:
        report_error(error, os.environ)
        code = 1
    if "RANK" in os.environ:
        # Not through the interpreter's own exit, which may hang, or abort, in gloo's threads.
        os._exit(code)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
