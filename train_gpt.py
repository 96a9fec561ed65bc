"""Train the best small language model that fits, with this file, into 16,000,000 bytes.

    PRESET=demo python train_gpt.py                           a laptop: 2.02 bits per byte in 100 s
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

import contextlib
import difflib
import fcntl
import glob
import hashlib
import io
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import time
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.nn.attention import SDPBackend, sdpa_kernel


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
    "MAX_WALLCLOCK_SECONDS=100 TRAIN_BATCH_TOKENS=6144 TRAIN_SEQ_LEN=128 WARMUP_STEPS=3 "
    "WARMDOWN_FRAC=0.8 MUON_MOMENTUM_WARMUP_STEPS=100 VAL_BATCH_SIZE=32768 VAL_LOSS_EVERY=100 "
    "TRAIN_LOG_EVERY=20 NUM_LAYERS=4 MODEL_DIM=128 NUM_HEADS=2 NUM_KV_HEADS=1"
)
PRESETS = {"": {}, "demo": dict(knob.split("=") for knob in DEMO.split())}
ABOVE_0 = tuple(
    "val_batch_size train_batch_tokens batch_slots train_seq_len vocab_size num_layers model_dim "
    "num_heads num_kv_heads mlp_mult rope_base logit_softcap adam_eps".split()
)


@dataclass(frozen=True)
class Hyperparameters:
    """All knobs: num_layers is the environment variable NUM_LAYERS, and so on. Where 0 switches
    something off, so does any number below 0."""

    # run
    preset: str = ""  # "" or "demo": other defaults
    run_id: str = field(default_factory=lambda: str(uuid.uuid4()))  # names log and checkpoint
    seed: int = 1337  # of Python, NumPy and torch
    output_dir: str = "."  # of everything that a run writes
    checkpoint_every: int = 0  # steps; 0: only when a signal stops the run
    resume: str = ""  # checkpoint to go on from; auto: that of this RUN_ID, if there is one
    eval_only: str = ""  # checkpoint or final_model file: score it, train nothing
    # machine
    device: str = "auto"  # cuda, cpu; auto: cuda if there is one
    dtype: str = "auto"  # of activations, embedding, Muon: bf16, fp32; auto: bf16 if a GPU has it
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
    control_tensor_name_patterns: tuple[str, ...] = CONTROL_TENSOR_NAME_PATTERNS  # Adam, fp32
    int8_keep_float_fp32_name_patterns: tuple[str, ...] = CONTROL_TENSOR_NAME_PATTERNS  # if small

    def files(self, split: str) -> str:
        """The glob pattern of the "train" or "val" shards."""
        return f"{glob.escape(self.data_path)}/fineweb_{split}_*.bin"

    def checkpoint_path(self) -> Path:
        return Path(self.output_dir, "checkpoints", f"{self.run_id}.pt")

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "Hyperparameters":
        """Defaults, then the preset, then the environment. Raises InputError."""
        texts = {**PRESETS.get(environ.get("PRESET", ""), {}), **environ}
        if "CONTROL_TENSOR_NAME_PATTERNS" in texts:
            patterns = texts["CONTROL_TENSOR_NAME_PATTERNS"]
            texts.setdefault("INT8_KEEP_FLOAT_FP32_NAME_PATTERNS", patterns)
        values = {}
        for knob in fields(cls):
            name = knob.name.upper()
            if name in texts:
                values[knob.name] = parse_knob(name, texts[name], knob.type)
        hp = cls(**values)
        hp.check()
        named = hp.resume != "auto" or "RUN_ID" in environ
        require(named, "RESUME='auto' needs the RUN_ID of the run to go on with: set it")
        return hp

    def check(self) -> None:
        """Raise InputError for the first knob that cannot work."""
        values = asdict(self)
        for name in ABOVE_0:
            require(values[name] > 0, f"{name.upper()}={values[name]} must be above 0")
        H, T = self.num_heads, self.train_seq_len
        unit = self.batch_slots * T
        units = f"{unit}: BATCH_SLOTS={self.batch_slots} times TRAIN_SEQ_LEN={T}"
        rules = [
            ("preset", self.preset in PRESETS, "unset or demo"),
            ("device", self.device in ("auto", "cuda", "cpu"), "auto, cuda or cpu"),
            ("dtype", self.dtype in ("auto", "bf16", "fp32"), "auto, bf16 or fp32"),
            ("compile", self.compile in ("auto", "1", "0"), "auto, 1 or 0"),
            ("model_dim", self.model_dim % (2 * H) == 0, f"an even multiple of NUM_HEADS={H}"),
            ("num_kv_heads", H % self.num_kv_heads == 0, f"a divisor of NUM_HEADS={H}"),
            ("train_batch_tokens", self.train_batch_tokens % unit == 0, f"a multiple of {units}"),
            ("val_batch_size", self.val_batch_size >= unit, f"at least {units}"),
            ("eval_stride", self.eval_stride <= T, f"at most TRAIN_SEQ_LEN={T}"),
        ]
        for name, is_right, rule in rules:
            require(is_right, f"{name.upper()}={values[name]!r} must be {rule}")

    def changed(self) -> str:
        """Each knob that differs from its default, as NAME=value. (RUN_ID has no default.)"""
        knobs = [knob for knob in fields(self) if knob.name != "run_id"]
        values = [(knob, getattr(self, knob.name)) for knob in knobs]
        return " ".join(f"{k.name.upper()}={value}" for k, value in values if value != k.default)


def parse_knob(name: str, text: str, kind: Any) -> Any:
    """Raises InputError if the text of variable `name` is not a value of type `kind`."""
    if kind == tuple[str, ...]:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        return {"0": False, "1": True}[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        wanted = {bool: "0 or 1", int: "a whole number", float: "a number"}[kind]
        raise InputError(f"{name}={text!r} must be {wanted}") from None


def near_knobs(environ: Mapping[str, str]) -> list[str]:
    """A line for each variable that is not a knob but looks like one."""
    knobs = [knob.name.upper() for knob in fields(Hyperparameters)]
    lines = []
    for name in sorted(environ.keys() - knobs):
        for knob in difflib.get_close_matches(name.upper(), knobs, n=1, cutoff=0.85):
            lines.append(f"unknown_knob:{name!r} is ignored: did you mean {knob}?")
    return lines


def prepare_demo(hp: Hyperparameters) -> str:
    """Build the demo's data, if it is not there yet. Returns what the builder says."""
    script = Path(__file__).with_name("data") / "demo_corpus.py"
    command = [sys.executable, script, "--dataset", hp.data_path, "--tokenizer", hp.tokenizer_path]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    require(result.returncode == 0, f"PRESET=demo: {script} failed")
    return result.stdout.rstrip()


def is_control_tensor(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether the full name of a parameter holds one of the patterns."""
    return any(pattern in name for pattern in patterns)


# ---- Model ---------------------------------------------------------------------------------------
def rms_norm(x: Tensor) -> Tensor:
    """RMSNorm over the last dimension, without a weight."""
    return F.rms_norm(x, (x.size(-1),))


class CastedLinear(nn.Linear):
    """A linear layer with its weight in fp32, cast to the input's dtype. The model calls each, so
    that what you add here acts. (A tied output layer is not one: it uses the embedding.)"""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


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


def attention_backends(device: torch.device) -> list[SDPBackend]:
    """What PyTorch may compute attention with, best first."""
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    # cuDNN is the fastest on Hopper (sm_90). On Blackwell it has returned wrong numbers.
    if device.type == "cuda" and torch.cuda.get_device_properties(device).major == 9:
        backends.insert(0, SDPBackend.CUDNN_ATTENTION)
    return backends


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q (B, T, H, h) to k and v (B, T, K, h): (B, T, H, h)."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, T, h)
    # Not a global setting: torch's cache would reuse graphs that were compiled for another one.
    with sdpa_kernel(attention_backends(q.device), set_priority=True):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2)


class CausalSelfAttention(nn.Module):
    """Grouped-query attention of normed and rotated queries and keys. layer: 0 to L - 1."""

    def __init__(self, hp: Hyperparameters, layer: int) -> None:
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
        """(B, T, D) -> (B, T, D)."""
        B, T, D = x.shape
        q = self.c_q(x).view(B, T, self.num_heads, -1)
        k = self.c_k(x).view(B, T, self.num_kv_heads, -1)
        v = self.c_v(x).view(B, T, self.num_kv_heads, -1)
        q = apply_rotary(rms_norm(q), cos, sin)
        k = apply_rotary(rms_norm(k), cos, sin)
        q = q * self.q_gain.to(x.dtype)[:, None]
        y = attend(q, k, v)
        y = y.reshape(B, T, D)
        return self.proj(y)


class MLP(nn.Module):
    """Two linear layers around a squared ReLU (Primer, So et al., 2021)."""

    def __init__(self, hp: Hyperparameters) -> None:
        super().__init__()
        self.fc = CastedLinear(hp.model_dim, hp.mlp_mult * hp.model_dim, bias=False)
        self.proj = CastedLinear(hp.mlp_mult * hp.model_dim, hp.model_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        x = F.relu(x).square()
        return self.proj(x)


class Block(nn.Module):
    """Mixes the embedding back in, then adds attention, then the MLP."""

    def __init__(self, hp: Hyperparameters, layer: int) -> None:
        super().__init__()
        self.attn = CausalSelfAttention(hp, layer)
        self.mlp = MLP(hp)
        self.attn_scale = nn.Parameter(torch.ones(hp.model_dim))
        self.mlp_scale = nn.Parameter(torch.ones(hp.model_dim))
        self.resid_mix = nn.Parameter(torch.tensor([[1.0], [0.0]]).repeat(1, hp.model_dim))

    def forward(self, x: Tensor, x0: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x, and x0, the normed embedding: (B, T, D)."""
        resid_mix = self.resid_mix.to(x.dtype)
        x = resid_mix[0] * x + resid_mix[1] * x0
        x = x + self.attn_scale.to(x.dtype) * self.attn(rms_norm(x), cos, sin)
        x = x + self.mlp_scale.to(x.dtype) * self.mlp(rms_norm(x))
        return x


class GPT(nn.Module):
    """A decoder whose later layers add what the earlier ones left on a stack (as in a U-Net). dtype
    is that of activations and embedding. Built on the CPU, its weights follow from torch's seed:

        tok_emb                                 N(0, TIED_EMBED_INIT_STD); untied: N(0, 1)
        c_q, c_k, c_v, mlp.fc                   uniform, as torch has it for nn.Linear
        attn.proj, mlp.proj, lm_head            zero
        attn_scale, mlp_scale, skip_weights     one
        resid_mix, q_gain                       (one, zero), QK_GAIN_INIT
    """

    def __init__(self, hp: Hyperparameters, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        D = hp.model_dim
        self.hp = hp
        self.dtype = dtype
        self.num_encoder_layers = hp.num_layers // 2  # they push; as many later layers pop
        self.tok_emb = nn.Embedding(hp.vocab_size, D)
        # Without encoder layers it is empty and gets no gradient, for which DDP would wait.
        skip_weights = torch.ones(self.num_encoder_layers, D)
        self.skip_weights = nn.Parameter(skip_weights, requires_grad=self.num_encoder_layers > 0)
        self.blocks = nn.ModuleList(Block(hp, layer) for layer in range(hp.num_layers))
        self.lm_head = None if hp.tie_embeddings else CastedLinear(D, hp.vocab_size, bias=False)
        tables = rotary_tables(hp.train_seq_len, D // hp.num_heads, hp.rope_base)
        self.register_buffer("rotary", tables, persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """After torch's own. Matrices are rounded to bf16, so that all dtypes start alike."""
        for block in self.blocks:
            block.attn.proj.weight.zero_()
            block.mlp.proj.weight.zero_()
        if self.lm_head is None:
            self.tok_emb.weight.normal_(std=self.hp.tied_embed_init_std)
        else:
            self.lm_head.weight.zero_()
        patterns = self.hp.control_tensor_name_patterns
        for name, param in self.named_parameters():
            if param.ndim >= 2 and not is_control_tensor(name, patterns):
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
        cos, sin = self.rotary[:, : input_ids.size(1), None].to(self.dtype)
        x = rms_norm(self.tok_emb(input_ids).to(self.dtype))  # (B, T, D)
        x0 = x
        skips = []
        for i, block in enumerate(self.blocks):
            if i >= self.num_encoder_layers and skips:
                x = x + self.skip_weights[i - self.num_encoder_layers].to(x.dtype) * skips.pop()
            if self.hp.activation_checkpoint and self.training:
                x = torch.utils.checkpoint.checkpoint(block, x, x0, cos, sin, use_reentrant=False)
            else:
                x = block(x, x0, cos, sin)
            if i < self.num_encoder_layers:
                skips.append(x)
        x = rms_norm(x).flatten(0, 1)
        if self.lm_head is None:
            logits = F.linear(x, self.tok_emb.weight.to(x.dtype))
        else:
            logits = self.lm_head(x)
        softcap = self.hp.logit_softcap
        return (softcap * torch.tanh(logits / softcap)).float()


# ---- Optimizers ----------------------------------------------------------------------------------
# Which group a parameter outside the blocks belongs to, by the beginning of its name.
OPTIMIZER_GROUPS = {"tok_emb.": "embed", "lm_head.": "head", "skip_weights": "scalar"}


def newton_schulz(stack: Tensor, steps: int) -> Tensor:
    """Bring the singular values of each wide matrix in stack (n, rows, columns) near 1, in its
    dtype, by the quintic iteration of Muon (Keller Jordan, 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = stack / (torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + (c * gram) @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Orthogonalized Nesterov momentum for matrices (Keller Jordan, 2024). Every rank holds all
    momentum and orthogonalizes its share of the updates, which are then exchanged, in `dtype`."""

    def __init__(
        self,
        params: list[nn.Parameter],
        lr: float,
        momentum: float,
        backend_steps: int,
        dtype: torch.dtype = torch.bfloat16,
        compiled: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "backend_steps": backend_steps})
        self.dtype = dtype
        self.newton_schulz = newton_schulz
        if compiled:
            self.newton_schulz = torch.compile(newton_schulz, dynamic=False, fullgraph=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        for group in self.param_groups:
            params = group["params"]
            updates = self.nesterov(params, group["momentum"])
            # Rank r orthogonalizes numbers r, r + W, r + 2W, ... and leaves the rest at zero: the
            # sum over the ranks is then the whole.
            sizes = [p.numel() for p in params]
            flat = updates[0].new_zeros(sum(sizes))
            pieces = [u.view_as(p) for u, p in zip(flat.split(sizes), params, strict=True)]
            own = slice(rank, None, world_size)
            results = self.orthogonalize(updates[own], group["backend_steps"])
            for piece, result in zip(pieces[own], results, strict=True):
                piece.copy_(result)
            if world_size > 1:
                dist.all_reduce(flat)
            torch._foreach_add_(params, pieces, alpha=-group["lr"])

    def nesterov(self, params: list[nn.Parameter], momentum: float) -> list[Tensor]:
        """Advance the momentum of params; their updates, in `dtype`."""
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        grads = [p.grad for p in params]
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, grads)
        updates = torch._foreach_add(grads, buffers, alpha=momentum)
        return [update.to(self.dtype) for update in updates]

    def orthogonalize(self, matrices: list[Tensor], steps: int) -> list[Tensor]:
        """Newton-Schulz of each matrix, one call a shape, times sqrt(max(1, rows / columns))."""
        wide = [matrix.mT if matrix.size(0) > matrix.size(1) else matrix for matrix in matrices]
        results = list(matrices)
        for shape in sorted({matrix.shape for matrix in wide}):
            members = [i for i, matrix in enumerate(wide) if matrix.shape == shape]
            stack = self.newton_schulz(torch.stack([wide[i] for i in members]), steps)
            for i, result in zip(members, stack, strict=True):
                rows, columns = matrices[i].shape
                results[i] = result.mT * math.sqrt(rows / columns) if rows > columns else result
        return results


def parameter_groups(model: nn.Module, hp: Hyperparameters) -> dict[str, list[nn.Parameter]]:
    """Sends each parameter of a GPT to one group: "matrix" is Muon's, the others are Adam's."""
    groups: dict[str, list[nn.Parameter]] = {"embed": [], "head": [], "matrix": [], "scalar": []}
    unknown = []
    for name, param in model.named_parameters():
        outside = [group for prefix, group in OPTIMIZER_GROUPS.items() if name.startswith(prefix)]
        control = is_control_tensor(name, hp.control_tensor_name_patterns)
        if outside:
            groups[outside[0]].append(param)
        elif not name.startswith("blocks."):
            unknown.append(name)
        elif param.ndim == 2 and param.requires_grad and not control:
            groups["matrix"].append(param)
        else:
            groups["scalar"].append(param)  # Adam passes over what is frozen
    require(not unknown, f"in no optimizer: {', '.join(unknown)}: add them to OPTIMIZER_GROUPS")
    return groups


def build_optimizers(gpt: GPT, compiled: bool = False) -> list[torch.optim.Optimizer]:
    """Adam and Muon. Each group knows its full learning rate, "base_lr"; set_schedule scales it."""
    hp = gpt.hp
    groups = parameter_groups(gpt, hp)
    embed_lr = hp.tied_embed_lr if hp.tie_embeddings else hp.embed_lr
    rates = {"embed": embed_lr, "head": hp.head_lr, "scalar": hp.scalar_lr}
    adam_groups = [{"params": groups[name], "lr": lr} for name, lr in rates.items() if groups[name]]
    betas = (hp.beta1, hp.beta2)
    optimizers = [torch.optim.Adam(adam_groups, betas=betas, eps=hp.adam_eps, fused=True)]
    if groups["matrix"]:
        settings = (hp.matrix_lr, hp.muon_momentum, hp.muon_backend_steps, gpt.dtype, compiled)
        optimizers.append(Muon(groups["matrix"], *settings))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return optimizers


# ---- Schedules -----------------------------------------------------------------------------------
def progress(hp: Hyperparameters, step: int, elapsed_ms: float) -> float:
    """How much of the run is done, 0 to 1, in steps or in training time, whichever is further."""
    in_steps = step / max(hp.iterations, 1)
    in_time = 0.0
    if hp.max_wallclock_seconds > 0:
        in_time = elapsed_ms / (1000 * hp.max_wallclock_seconds)
    return min(max(in_steps, in_time), 1.0)


def lr_factor(hp: Hyperparameters, step: int, elapsed_ms: float) -> float:
    """What scales all learning rates at step (from 0), elapsed_ms into the training time: 1, then a
    straight line down to 0

        WARMDOWN_FRAC > 0      over that part of the run, in steps or time, whichever ends first
        no wallclock cap       over the last WARMDOWN_ITERS steps
        under a cap            over the time of so many steps before it; ITERATIONS does not count
    """
    if hp.warmdown_frac > 0:
        return min((1 - progress(hp, step, elapsed_ms)) / hp.warmdown_frac, 1.0)
    if hp.warmdown_iters <= 0:
        return 1.0
    if hp.max_wallclock_seconds <= 0:
        return min(max(hp.iterations - step, 0) / hp.warmdown_iters, 1.0)
    remaining_ms = max(1000 * hp.max_wallclock_seconds - elapsed_ms, 0.0)
    warmdown_ms = hp.warmdown_iters * elapsed_ms / max(step, 1)
    return remaining_ms / warmdown_ms if remaining_ms < warmdown_ms else 1.0


def muon_momentum(hp: Hyperparameters, step: int) -> float:
    if hp.muon_momentum_warmup_steps <= 0:
        return hp.muon_momentum
    done = min(step / hp.muon_momentum_warmup_steps, 1.0)
    return (1 - done) * hp.muon_momentum_warmup_start + done * hp.muon_momentum


def set_schedule(optimizers: list[torch.optim.Optimizer], factor: float, momentum: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group["base_lr"]
            if isinstance(optimizer, Muon):
                group["momentum"] = momentum


# ---- Data ----------------------------------------------------------------------------------------
SHARD_HEADER_BYTES = 1024  # 256 little-endian int32: magic, version, token count, zeros
SHARD_MAGIC_AND_VERSION = [20240520, 1]
WAYS_TO_DATA = """\
  download FineWeb:    python3 data/cached_challenge_fineweb.py --variant sp1024
  or run the demo:     PRESET=demo python train_gpt.py"""


def load_data_shard(path: str | Path) -> Tensor:
    """The tokens of a shard, uint16 (n,), mapped into memory. Raises InputError naming the file."""
    header = np.fromfile(path, "<i4", 3).tolist()
    is_shard = header[:2] == SHARD_MAGIC_AND_VERSION and len(header) == 3
    require(is_shard, f"{path}: not a token shard, it begins with {header}: get the file again")
    size = os.path.getsize(path)
    fits = header[2] >= 0 and size == SHARD_HEADER_BYTES + 2 * header[2]
    require(fits, f"{path}: {size} bytes are not {header[2]} tokens: get the file again")
    words = torch.from_file(str(path), shared=False, size=size // 2, dtype=torch.uint16)
    return words[SHARD_HEADER_BYTES // 2 :]


class TokenStream:
    """The tokens of all shards that match a pattern, in the order of their names, for ever."""

    def __init__(self, pattern: str, vocab_size: int = 2**16) -> None:
        self.paths = sorted(glob.glob(pattern))
        require(len(self.paths) > 0, f"DATA_PATH has no {pattern}\n{WAYS_TO_DATA}")
        self.vocab_size = vocab_size
        self.shards = [load_data_shard(path) for path in self.paths]
        self.shard = 0  # the next token is number `position` of number `shard`
        self.position = 0
        require(any(map(len, self.shards)), f"{pattern}: the shards hold no tokens: get them again")

    def take(self, n: int) -> Tensor:
        """The next n tokens, uint16 (n,)."""
        parts = []
        while n > 0:
            part = self.shards[self.shard][self.position : self.position + n]
            largest = part.numpy().max(initial=0)
            problem = f"{self.paths[self.shard]}: token id {largest} is not in the vocabulary"
            require(largest < self.vocab_size, f"{problem}, VOCAB_SIZE={self.vocab_size}")
            parts.append(part)
            n -= len(part)
            self.position += len(part)
            if self.position >= len(self.shards[self.shard]):
                self.shard = (self.shard + 1) % len(self.shards)
                self.position = 0
        return torch.cat(parts)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Start a copy to the device. From pinned memory the host need not wait for it."""
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


class DistributedTokenLoader:
    """Deals one token stream out to the ranks in disjoint spans, the same for every world size. A
    span's last token is a target only."""

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
        """Inputs and targets, int64 (B, T), of a micro-step; global_tokens are a whole step's."""
        span = global_tokens // (self.world_size * grad_accum_steps) + 1  # with the last target
        tokens = self.stream.take(self.world_size * span)  # of W spans rank r keeps number r
        tokens = upload(tokens.view(-1, span)[self.rank], self.device).to(torch.int64)
        return tokens[:-1].view(-1, seq_len), tokens[1:].view(-1, seq_len)


# ---- Evaluation ----------------------------------------------------------------------------------
def count_bytes(tokenizer: sentencepiece.SentencePieceProcessor, tokens: np.ndarray) -> int:
    """The UTF-8 bytes of the text that tokens[1:] stand for. A piece's leading space counts, but
    not behind a token without text (control, unknown, unused), where no space is written."""
    size = tokenizer.vocab_size()
    num_bytes = np.zeros(size, dtype=np.int64)  # of each piece, without a leading space
    has_text = np.zeros(size, dtype=bool)
    leading_space = np.zeros(size, dtype=bool)
    for i in range(size):
        if tokenizer.IsControl(i) or tokenizer.IsUnknown(i) or tokenizer.IsUnused(i):
            continue
        piece = tokenizer.IdToPiece(i)
        has_text[i] = True
        leading_space[i] = piece.startswith("\u2581")  # a space, as SentencePiece writes it
        num_bytes[i] = 1 if tokenizer.IsByte(i) else len(piece.removeprefix("\u2581").encode())
    spaces = leading_space[tokens[1:]] & has_text[tokens[:-1]]
    return int(num_bytes[tokens[1:]].sum() + spaces.sum())


class Validation:
    """The validation split, cut to whole sequences and the last target."""

    def __init__(self, hp: Hyperparameters) -> None:
        knob = f"TOKENIZER_PATH={hp.tokenizer_path!r}"
        require(os.path.isfile(hp.tokenizer_path), f"{knob} is not a file\n{WAYS_TO_DATA}")
        tokenizer = sentencepiece.SentencePieceProcessor(model_file=hp.tokenizer_path)
        size = tokenizer.vocab_size()
        require(size == hp.vocab_size, f"{knob} has {size} pieces: set VOCAB_SIZE={size}")
        T = hp.train_seq_len
        stream = TokenStream(hp.files("val"), hp.vocab_size)
        tokens = stream.take(sum(len(shard) for shard in stream.shards))
        whole = (len(tokens) - 1) // T  # sequences
        problem = f"DATA_PATH={hp.data_path!r}: {len(tokens)} validation tokens are no sequence"
        require(whole > 0, f"{problem} of TRAIN_SEQ_LEN={T} and its last target")
        kept = min(max(hp.max_val_tokens // T, 1), whole) if hp.max_val_tokens > 0 else whole
        self.partial = f" partial:{kept}/{whole}" if kept < whole else ""  # behind every figure
        self.tokens = tokens[: kept * T + 1]  # uint16
        self.num_bytes = count_bytes(tokenizer, self.tokens.numpy())

    def bits_per_byte(self, loss: float) -> float:
        """loss: mean nats per target token."""
        return loss / math.log(2) * (len(self.tokens) - 1) / self.num_bytes

    def scores(self, loss: float, digits: int = 4) -> str:
        return f"val_loss:{loss:.{digits}f} val_bpb:{self.bits_per_byte(loss):.{digits}f}"


@torch.no_grad()
def evaluate(state: "TrainingState", tokens: Tensor, stride: int) -> float | None:
    """The metric: mean cross-entropy in nats of tokens[1:], uint16 (n,), in windows of T tokens
    that begin `stride` apart. The first window that holds a target scores it, so that a stride of T
    scores windows side by side. The same on every rank; None if a signal interrupts it."""
    hp, runtime = state.hp, state.runtime
    T = hp.train_seq_len
    num_targets = len(tokens) - 1
    starts = torch.tensor([*range(0, num_targets - T, stride), num_targets - T])
    fresh = starts.diff(prepend=torch.tensor([-T]))  # targets that no window before has
    first = len(starts) * runtime.rank // runtime.world_size  # of this rank's windows
    last = len(starts) * (runtime.rank + 1) // runtime.world_size
    batch_size = hp.val_batch_size // hp.batch_slots // T
    total = torch.zeros((), dtype=torch.float64, device=runtime.device)
    state.model.eval()
    for i in range(first, last, batch_size):
        if runtime.stop.signum:
            break
        batch = slice(i, min(i + batch_size, last))
        windows = torch.stack([tokens[start : start + T + 1] for start in starts[batch]])
        windows = upload(windows, runtime.device).to(torch.int64)
        losses = state.model(windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), "none")
        scored = torch.arange(T) >= T - fresh[batch, None]
        total += (losses * upload(scored, runtime.device)).sum(dtype=torch.float64)
    state.model.train()
    parts = runtime.gather((total.item(), runtime.stop.signum))
    if any(signum for _, signum in parts):
        return None
    return sum(part for part, _ in parts) / num_targets


def score(state: "TrainingState", validation: Validation, name: str) -> dict[str, Any]:
    """Log the last lines, under this name: the score of the weights that gpt has now."""
    hp, log = state.hp, state.runtime.log
    partial = validation.partial
    figures: dict[str, Any] = {"partial": partial}
    if hp.eval_stride > 0:
        loss = evaluate(state, validation.tokens, hp.eval_stride)
        log(f"{name}_sliding stride:{hp.eval_stride} {validation.scores(loss, 8)}{partial}")
        figures["sliding_val_bpb"] = validation.bits_per_byte(loss)
    started = time.perf_counter()
    loss = evaluate(state, validation.tokens, hp.train_seq_len)
    eval_ms = 1000 * (time.perf_counter() - started)
    if not math.isfinite(loss):
        log(f"WARNING: the score is {loss}: train at lower learning rates")
    if name == ARTIFACT_SCORE:
        log(f"{name} {validation.scores(loss)} eval_time:{eval_ms:.0f}ms{partial}")
        name = f"{name}_exact"
    log(f"{name} {validation.scores(loss, 8)}{partial}")
    return {**figures, "val_loss": loss, "val_bpb": validation.bits_per_byte(loss)}


# ---- Export --------------------------------------------------------------------------------------
SIZE_LIMIT = 16_000_000  # bytes of artifact and code together
ARTIFACT_SCORE = "final_int8_zlib_roundtrip"  # what the last lines of the log call it
INT8_KEEP_FLOAT_MAX_NUMEL = 65_536  # quantizing smaller tensors gains nothing
INT8_CLIP_QUANTILE = 0.9999984
INT8_SCALE_FLOOR = 1 / 127  # of a matrix: a row of values up to 0.1 gets 12 steps a side


def quantization_levels(name: str, weight: Tensor) -> int:
    """How many steps a side a weight may use, if INT8_SCALE_FLOOR lets it: 31 would be int6."""
    return 127


def quantize_tensor(weight: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """weight as int8, and the scale: of each row of a matrix in fp16, else of the whole in fp32."""
    is_matrix = weight.ndim == 2
    rows = weight.float().reshape(len(weight) if is_matrix else 1, -1)
    clip = rows.abs().amax(dim=1, keepdim=True)
    if rows.size(1) <= 2**24:  # torch.quantile takes no longer rows
        clip = rows.abs().quantile(INT8_CLIP_QUANTILE, dim=1, keepdim=True)
    scale = clip / levels
    if is_matrix:
        scale = scale.clamp_min(INT8_SCALE_FLOOR)
    scale = torch.where(scale == 0, 1.0, scale)
    values = (rows.clamp(-clip, clip) / scale).round().clamp(-levels, levels).to(torch.int8)
    return values.view(weight.shape), scale[:, 0].half() if is_matrix else scale[0, 0]


def quantize_state_dict_int8(
    state_dict: Mapping[str, Tensor],
    keep_patterns: tuple[str, ...] = CONTROL_TENSOR_NAME_PATTERNS,
) -> tuple[dict[str, Any], dict[str, int]]:
    """The object that an artifact holds, and counts. Large floating-point tensors become int8;
    small ones fp16, or fp32 if their name holds one of keep_patterns."""
    parts = ("quantized", "scales", "dtypes", "passthrough")
    obj: dict[str, Any] = {"__quant_format__": "int8_clean_per_row_v1", **{p: {} for p in parts}}
    for name, tensor in state_dict.items():
        tensor = tensor.detach().cpu().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.is_floating_point() and tensor.numel() > INT8_KEEP_FLOAT_MAX_NUMEL:
            levels = quantization_levels(name, tensor)
            obj["quantized"][name], obj["scales"][name] = quantize_tensor(tensor, levels)
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
    stored = ("quantized", "scales", "passthrough")
    return obj, {
        "param_count": sum(tensor.numel() for tensor in state_dict.values()),
        "num_tensors": len(state_dict),
        "num_float_tensors": len(obj["quantized"]),
        "num_nonfloat_tensors": sum(not t.is_floating_point() for t in state_dict.values()),
        "baseline_tensor_bytes": sum(tensor.nbytes for tensor in state_dict.values()),
        "int8_payload_bytes": sum(t.nbytes for part in stored for t in obj[part].values()),
    }


def dequantize_state_dict_int8(obj: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state_dict from an object of quantize_state_dict_int8, in the dtypes it remembers."""
    tensors = {name: tensor.clone() for name, tensor in obj["passthrough"].items()}
    for name, values in obj["quantized"].items():
        scale = obj["scales"][name].float()  # one, or one a row
        tensors[name] = values.float() * scale.view(-1, *[1] * (values.ndim - 1))
    for name, dtype in (obj["dtypes"] | obj.get("passthrough_orig_dtypes", {})).items():
        tensors[name] = tensors[name].to(getattr(torch, dtype))
    return tensors


def compress(data: bytes) -> bytes:
    return zlib.compress(data, 9)


def decompress(data: bytes) -> bytes:
    return zlib.decompress(data)


def serialize(obj: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


def deserialize(data: bytes) -> dict[str, Any]:
    """What serialize wrote, perhaps compressed. No code in it is run. Damage raises some error."""
    if not data.startswith(b"PK"):  # as the zip archives of torch.save do
        data = decompress(data)
    damaged = zipfile.ZipFile(io.BytesIO(data)).testzip()  # torch.load does not compare checksums
    require(damaged is None, f"the checksum of {damaged} is wrong")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Whatever fails inside becomes an InputError that names the file."""
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{name} cannot be loaded: {reason}") from None


def load_weights(gpt: nn.Module, data: bytes, name: str) -> bool:
    """Give gpt the weights of an artifact, checkpoint or state_dict. Returns if it is quantized."""
    with naming(name):
        obj = deserialize(data)
        quantized = "__quant_format__" in obj
        if quantized:
            obj = dequantize_state_dict_int8(obj)
        elif "optimizers" in obj:
            obj = obj["model"]
        gpt.load_state_dict(obj)
    return quantized


def write_file(path: Path, data: bytes) -> None:
    """Write atomically: a temporary file, then rename."""
    temporary = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # of a failed write: what follows needs the room


def write_or_warn(path: Path, data: bytes, log: Callable[[str], None]) -> bool:
    """write_file for what a run can do without. Returns whether it could be written."""
    try:
        write_file(path, data)
        return True
    except OSError as error:
        log(f"WARNING: {path} cannot be written: {error.strerror}")
        return False


def export(state: "TrainingState") -> tuple[bytes, dict[str, int]]:
    """Write the artifact, on rank 0. Returns its bytes, as the disk has them, and the sizes."""
    hp, state_dict = state.hp, copy_tensors(state.gpt.state_dict(), "cpu")
    obj, stats = quantize_state_dict_int8(state_dict, hp.int8_keep_float_fp32_name_patterns)
    raw = serialize(obj)
    path = Path(hp.output_dir, "final_model.int8.ptz")
    write_file(path, compress(raw))
    artifact = path.read_bytes()
    plain = len(serialize(state_dict))
    code = len(state.runtime.source)
    payload = stats["int8_payload_bytes"]
    total = len(artifact) + code
    left = SIZE_LIMIT - total
    state.runtime.log(
        f"Serialized model: {plain} bytes\n"
        f"Code size: {code} bytes\n"
        f"Total submission size: {plain + code} bytes\n"
        f"Serialized model int8+zlib: {len(artifact)} bytes (payload:{payload} "
        f"raw_torch:{len(raw)} payload_ratio:{stats['baseline_tensor_bytes'] / payload:.2f}x)\n"
        f"Total submission size int8+zlib: {total} bytes\n"
        f"size_check:{'fits' if left >= 0 else 'too_large'} limit:{SIZE_LIMIT} bytes_left:{left}"
    )
    return artifact, {"bytes_total": total, "bytes_code": code}


# ==== Machinery: rarely edited ====================================================================


# ---- Runtime -------------------------------------------------------------------------------------
def open_log(hp: Hyperparameters, source: bytes) -> Callable[[str], None]:
    """Begin OUTPUT_DIR/logs/RUN_ID.txt. Returns what writes a line there and on the console."""
    path = Path(hp.output_dir, "logs", f"{hp.run_id}.txt")
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a", encoding="utf-8", errors="backslashreplace", buffering=1)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"RUN_ID={hp.run_id!r} is running already: set another") from None
    print(source.decode(), "=" * 100, sep="\n", file=file)
    print(f"Running Python {sys.version}\nRunning PyTorch {torch.__version__}", file=file)
    print(subprocess.getoutput("nvidia-smi"), "=" * 100, sep="\n", file=file)

    def log(line: str) -> None:
        with contextlib.suppress(OSError):
            print(line, file=file)
        try:
            print(line, flush=True)
        except OSError:  # a lost terminal or pipe costs lines, not the run
            sys.stdout = None

    log(str(path))
    return log


class StopSignal:
    """A wish to end after the step in hand. Another signal, a second later, ends at once."""

    def __init__(self) -> None:
        self.signum = 0  # 0: none has come
        self.time = 0.0

    def set_action(self, action: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup does with SIGHUP
                signal.signal(number, action)
        self.signum = 0

    def handle(self, signum: int, frame: Any) -> None:
        if not self.signum:
            self.signum = signum
            self.time = time.monotonic()
        elif time.monotonic() > self.time + 1:  # before, it is torchrun's copy of the first
            os._exit(128 + signum)


@dataclass(frozen=True)
class Runtime:
    """Where this process stands."""

    rank: int
    world_size: int  # W
    device: torch.device
    dtype: torch.dtype  # of activations and of Muon's updates
    compiled: bool
    source: bytes = b""  # this file, as it was when the run began
    log: Callable[[str], None] = lambda line: None  # rank 0's, on the console and in a file
    stop: StopSignal = field(default_factory=StopSignal)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank. Every rank must call it."""
        values = [value] * self.world_size
        if dist.is_initialized():
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank. Every rank must call it."""
        box = [value]
        if dist.is_initialized():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def sync_clock_and_signal(self, elapsed_ms: float) -> tuple[float, int]:
        """Rank 0's clock, so that all ranks have one learning rate; any rank's signal or 0."""
        clock = elapsed_ms if self.rank == 0 else 0.0
        box = torch.tensor([clock, self.stop.signum], dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(box, dist.ReduceOp.MAX)
        return box[0].item(), int(box[1])


def open_device(hp: Hyperparameters, local_rank: int) -> torch.device:
    """This rank's GPU, or the CPU. Raises InputError."""
    num_gpus = torch.cuda.device_count()
    if hp.device == "cpu" or (hp.device == "auto" and num_gpus == 0):
        return torch.device("cpu")
    problem = f"DEVICE={hp.device!r} LOCAL_RANK={local_rank}, but torch sees {num_gpus} GPUs"
    require(local_rank < num_gpus, f"{problem}: start fewer processes, or set DEVICE=cpu")
    torch.cuda.set_device(local_rank)
    torch.backends.cuda.matmul.allow_tf32 = True
    return torch.device("cuda", local_rank)


def open_runtime(hp: Hyperparameters) -> Runtime:
    """Device, process group, log. Raises InputError."""
    distributed = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    rank = int(os.environ["RANK"]) if distributed else 0
    world_size = int(os.environ["WORLD_SIZE"]) if distributed else 1
    problem = f"WORLD_SIZE={world_size} must divide BATCH_SLOTS={hp.batch_slots}"
    divides = world_size > 0 and hp.batch_slots % world_size == 0
    require(divides, f"{problem}: launch another number of processes, or set BATCH_SLOTS")
    device = open_device(hp, int(os.environ.get("LOCAL_RANK", "0")))
    on_gpu = device.type == "cuda"
    if distributed:
        # torchrun keeps its store over restarts: what earlier ranks wrote there is not for these.
        store, _, _ = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        # gloo carries what lies on the CPU, so that the clock never waits for a GPU.
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        dist.barrier()
    has_bf16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    bf16 = hp.dtype == "bf16" or (hp.dtype == "auto" and has_bf16)
    dtype = torch.bfloat16 if bf16 else torch.float32
    compiled = hp.compile == "1" or (hp.compile == "auto" and on_gpu)
    source = Path(__file__).read_bytes()
    log = open_log(hp, source) if rank == 0 else Runtime.log
    return Runtime(rank, world_size, device, dtype, compiled, source, log)


def compare_ranks(hp: Hyperparameters, runtime: Runtime) -> None:
    """Ranks that differ in knobs, machine or data would wait for ever, or train on other tokens."""
    own = {name.upper(): value for name, value in asdict(hp).items()}
    for name in ("RUN_ID", "OUTPUT_DIR", "DATA_PATH", "TOKENIZER_PATH", "RESUME"):
        del own[name]  # where a rank keeps its files is its own affair
    own |= {"device": runtime.device.type, "dtype": str(runtime.dtype)}
    own |= {"compilation": runtime.compiled, "torch": torch.__version__}
    for path in glob.glob(hp.files("train")) + glob.glob(hp.files("val")):
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read(2**16)).hexdigest()
        own[os.path.basename(path)] = f"{os.path.getsize(path)} bytes, sha256 {digest[:16]}"
    if os.path.isfile(hp.tokenizer_path):
        own["tokenizer"] = hashlib.sha256(Path(hp.tokenizer_path).read_bytes()).hexdigest()[:16]
    every = runtime.gather(own)
    for rank, other in enumerate(every):
        for name in sorted(other.keys() | every[0].keys()):
            values = f"{every[0].get(name)} on rank 0, but {other.get(name)} on rank {rank}"
            require(other.get(name) == every[0].get(name), f"{name} is {values}: make them equal")


def wrap(gpt: GPT, runtime: Runtime) -> nn.Module:
    """The model to call."""
    model: nn.Module = gpt
    if runtime.compiled:  # a hook or a print that torch cannot trace needs COMPILE=0
        # Each switch in a model doubles its graphs, and under fullgraph the limit is fatal.
        torch._dynamo.config.recompile_limit = 256
        model = torch.compile(gpt, dynamic=False, fullgraph=True)
    if dist.is_initialized():
        ddp = nn.parallel.DistributedDataParallel
        model = ddp(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    return model


def report_error(error: Exception) -> None:
    """Say why the run fails, also in the file that torchrun repeats as its last words. Rank 0
    speaks first of what all ranks meet; whoever has lost another rank (a RuntimeError) waits."""
    if os.environ.get("RANK", "0") != "0" or isinstance(error, RuntimeError):
        time.sleep(1)
    if isinstance(error, InputError | OSError):  # what users can put right needs no traceback
        error.__traceback__ = error.__cause__ = error.__context__ = None
    get_error_handler().record_exception(error)
    sys.excepthook(type(error), error, error.__traceback__)


# ---- Checkpoints ---------------------------------------------------------------------------------
def copy_tensors(value: Any, device: torch.device | str) -> Any:
    """value, with copies of all tensors in it on the device."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {key: copy_tensors(part, device) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copy_tensors(part, device) for part in value)
    return value


@dataclass
class TrainingState:
    """All that a step changes, and what it needs. Under EVAL_ONLY without optimizers and loader."""

    hp: Hyperparameters
    runtime: Runtime
    gpt: GPT
    model: nn.Module  # gpt, compiled and wrapped
    optimizers: list[torch.optim.Optimizer]
    loader: DistributedTokenLoader | None
    stopwatch: "Stopwatch"
    step: int = 0  # steps done

    def state_dict(self) -> dict[str, Any]:
        """Copies on the CPU of all that a run needs to go on."""
        state = {
            "step": self.step,
            "train_ms": self.stopwatch.elapsed_ms(),
            "stream": (self.loader.stream.shard, self.loader.stream.position),
            "model": self.gpt.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        return copy_tensors(state, "cpu")

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.gpt.load_state_dict(saved["model"])
        for optimizer, saved_optimizer in zip(self.optimizers, saved["optimizers"], strict=True):
            load_optimizer(optimizer, saved_optimizer)
        self.loader.stream.shard, self.loader.stream.position = saved["stream"]
        self.step = saved["step"]
        self.stopwatch.reset(saved["train_ms"])


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """PyTorch's load_state_dict, but the knobs of now count, and state keeps its types: PyTorch
    rounds fp32 state of a bf16 parameter to bf16, and takes a string apart."""
    knobs = ("lr", "base_lr", "betas", "eps", "backend_steps")
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        saved_group.update({key: group[key] for key in knobs if key in group})
    optimizer.load_state_dict(saved)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for i, param in enumerate(params):
        for key, value in saved["state"].get(i, {}).items():
            if key != "step":  # PyTorch knows on which device its step counts belong
                optimizer.state[param][key] = copy_tensors(value, param.device)


def save_checkpoint(state: TrainingState) -> bool:
    """Write it on rank 0, while the clock stands still. Returns whether that was possible."""
    state.stopwatch.pause()
    total = sum(param.detach().float().sum() for param in state.gpt.parameters())
    if not math.isfinite(total.item()):
        state.runtime.log(f"WARNING: no checkpoint: the sum of the weights is {total.item()}")
        return False
    if state.runtime.rank != 0:
        return True
    path = state.hp.checkpoint_path()
    data = serialize({**state.state_dict(), "knobs": asdict(state.hp)})
    written = write_or_warn(path, data, state.runtime.log)
    if written:
        state.runtime.log(f"checkpoint:{path} step:{state.step}")
    return written


def load_checkpoint(state: TrainingState) -> None:
    """Go on from what RESUME means, if anything. Raises InputError."""
    hp, runtime = state.hp, state.runtime
    path = Path(hp.resume) if hp.resume not in ("", "auto") else hp.checkpoint_path()
    name = f"RESUME={hp.resume!r}: {path}"
    saved = None
    if runtime.rank == 0 and (path.exists() or hp.resume not in ("", "auto")):
        require(hp.resume != "", f"{path} exists: set RESUME=auto or another RUN_ID")
        with naming(name):
            saved = deserialize(path.read_bytes())
    saved = runtime.broadcast(saved)
    if saved is None:
        return
    with naming(name):
        state.load_state_dict(saved)
        old = {**saved["knobs"], "resume": hp.resume}
        new = [(key, value) for key, value in asdict(hp).items() if old.get(key) != value]
        changes = [f"{key.upper()}:{old.get(key)}->{value}" for key, value in new]
    runtime.log(f"resume:{path} step:{state.step} changed:{' '.join(changes)}")


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
        """After each step. Wait for the previous step, not this one: the GPU stays busy."""
        previous = self.last_step
        self.last_step = self.device.Event()
        self.last_step.record()
        if previous is not None:
            previous.synchronize()

    def elapsed_ms(self) -> float:
        if self.started is None:
            return self.before_ms
        return self.before_ms + 1000 * (time.perf_counter() - self.started)

    def report(self, step: int) -> str:
        elapsed_ms = self.elapsed_ms()
        return f"train_time:{elapsed_ms:.0f}ms step_avg:{elapsed_ms / max(step, 1):.2f}ms"


def train_step(state: TrainingState) -> Tensor:
    """One optimizer step. Returns the mean loss of this rank's tokens."""
    hp = state.hp
    # A batch has 8 slots (BATCH_SLOTS), so that 1, 2, 4 or 8 ranks take the same optimizer step.
    grad_accum_steps = hp.batch_slots // state.runtime.world_size
    total_loss = torch.zeros((), device=state.runtime.device)
    for micro_step in range(grad_accum_steps):
        if dist.is_initialized():
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
        require(
            param.grad is not None or not param.requires_grad, f"{name} got no gradient: use it"
        )
    if hp.grad_clip_norm > 0:
        nn.utils.clip_grad_norm_(state.gpt.parameters(), hp.grad_clip_norm)
    for optimizer in state.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return total_loss


def warm_up(state: TrainingState) -> None:
    """Take WARMUP_STEPS steps, which compile every graph, and undo them."""
    wanted = state.hp.warmup_steps
    start = state.state_dict()
    set_schedule(state.optimizers, 1.0, muon_momentum(state.hp, 0))
    # With several ranks at least one: DDP regroups its buckets after it, which rounds sums anew.
    for step in range(1, max(wanted, int(dist.is_initialized())) + 1):
        train_step(state)
        if step <= wanted and (wanted <= 20 or step % 10 == 0 or step == wanted):
            state.runtime.log(f"warmup_step:{step}/{wanted}")
    groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    rates = {param: group["lr"] for group in groups for param in group["params"]}
    for name, param in state.gpt.named_parameters():
        trained = param.requires_grad and param.numel() > 0 and rates.get(param, 1.0) > 0
        # Behind two layers that start at zero, a parameter moves in the third step.
        if wanted >= 3 and trained and torch.equal(param.cpu(), start["model"][name]):
            state.runtime.log(f"WARNING: {name} does not train: the warm-up has not changed it")
    state.load_state_dict(start)


def validate(state: TrainingState, validation: Validation) -> float | None:
    """The loss, logged; None if a signal has come in between."""
    state.stopwatch.pause()
    loss = evaluate(state, validation.tokens, state.hp.train_seq_len)
    if loss is not None:
        times = state.stopwatch.report(state.step) + validation.partial
        step_name = f"step:{state.step}/{state.hp.iterations}"
        state.runtime.log(f"{step_name} {validation.scores(loss)} {times}")
    return loss


def train(state: TrainingState, validation: Validation) -> int:
    """Steps until ITERATIONS, the wallclock cap or a signal. Returns the signal or 0."""
    hp, runtime, stopwatch = state.hp, state.runtime, state.stopwatch
    cap_ms = 1000 * hp.max_wallclock_seconds
    stopwatch.start()
    while True:
        elapsed_ms, signum = runtime.sync_clock_and_signal(stopwatch.elapsed_ms())
        step_name = f"step:{state.step}/{hp.iterations}"
        if signum:
            saved = save_checkpoint(state)
            way = f"to go on, set RESUME=auto and RUN_ID={hp.run_id}" if saved else "not saved"
            runtime.log(f"stopped: signal:{signum} {step_name}: {way}")
            return signum
        if state.step > 0 and hp.checkpoint_every > 0 and state.step % hp.checkpoint_every == 0:
            save_checkpoint(state)
            stopwatch.start()
        if state.step >= hp.iterations or (cap_ms > 0 and elapsed_ms >= cap_ms):
            return 0
        if hp.val_loss_every > 0 and state.step % hp.val_loss_every == 0:
            if validate(state, validation) is None:
                continue
            stopwatch.start()

        factor = lr_factor(hp, state.step, elapsed_ms)
        set_schedule(state.optimizers, factor, muon_momentum(hp, state.step))
        rank_loss = train_step(state)
        stopwatch.lap()
        state.step += 1

        step_name = f"step:{state.step}/{hp.iterations}"
        if hp.train_log_every > 0 and (state.step <= 10 or state.step % hp.train_log_every == 0):
            loss = sum(runtime.gather(rank_loss.item())) / runtime.world_size
            runtime.log(f"{step_name} train_loss:{loss:.4f} {stopwatch.report(state.step)}")
            if state.step < hp.iterations:  # a finished run is exported and scored
                advice = "go back to the last checkpoint with lower rates, or with GRAD_CLIP_NORM"
                require(math.isfinite(loss), f"step:{state.step} train_loss is {loss}: {advice}")
        # Under a cap, ten steps tell how long WARMDOWN_ITERS of them will take.
        if hp.warmdown_frac <= 0 and factor < 1 and state.step == (10 if cap_ms > 0 else 1):
            problem = f"WARMDOWN_ITERS={hp.warmdown_iters} steps take longer than the whole run"
            runtime.log(f"WARNING: warmdown: {problem}: try WARMDOWN_FRAC=0.2, its last fifth")


# ---- main ----------------------------------------------------------------------------------------
def log_run(hp: Hyperparameters, runtime: Runtime, validation: Validation, gpt: GPT) -> None:
    cudnn = SDPBackend.CUDNN_ATTENTION in attention_backends(runtime.device)
    tied = hp.tie_embeddings
    runtime.log(
        f"val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path={hp.tokenizer_path}\n"
        f"train_loader:dataset:{Path(hp.data_path).resolve().name} "
        f"train_shards:{len(glob.glob(hp.files('train')))}\n"
        f"val_loader:shards pattern={os.path.join(hp.data_path, 'fineweb_val_*.bin')} "
        f"tokens:{len(validation.tokens) - 1}{validation.partial}\n"
        f"model_params:{sum(p.numel() for p in gpt.parameters())}\n"
        f"world_size:{runtime.world_size} grad_accum_steps:{hp.batch_slots // runtime.world_size}\n"
        f"sdp_backends:cudnn={cudnn} flash=True mem_efficient=True math=True\n"
        f"attention_mode:gqa num_heads:{hp.num_heads} num_kv_heads:{hp.num_kv_heads}\n"
        f"tie_embeddings:{tied} embed_lr:{hp.tied_embed_lr if tied else hp.embed_lr} "
        f"head_lr:{0.0 if tied else hp.head_lr} matrix_lr:{hp.matrix_lr} scalar_lr:{hp.scalar_lr}\n"
        f"train_batch_tokens:{hp.train_batch_tokens} train_seq_len:{hp.train_seq_len} "
        f"iterations:{hp.iterations} warmup_steps:{hp.warmup_steps} "
        f"max_wallclock_seconds:{hp.max_wallclock_seconds:.3f}\n"
        f"seed:{hp.seed}\n"
        f"knobs:{hp.changed()}\n"
        f"device:{runtime.device} dtype:{runtime.dtype} compile:{runtime.compiled} "
        f"cpu_threads:{torch.get_num_threads()}"
    )


def check_replicas(runtime: Runtime, weights: bytes) -> None:
    """The weights of all ranks should have the same bits."""
    digests = runtime.gather(hashlib.sha256(weights).hexdigest())
    strays = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if strays:
        runtime.log(f"WARNING: replicas: the weights of ranks {strays} differ from rank 0's")
    elif len(digests) > 1:
        runtime.log("replicas:identical")


def log_memory(runtime: Runtime) -> None:
    """Peak memory of the GPU, else of the process."""
    unit = 1 if sys.platform == "darwin" else 1024
    allocated = reserved = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if runtime.device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated()
        reserved = torch.cuda.max_memory_reserved()
    runtime.log(f"peak memory allocated: {allocated >> 20} MiB reserved: {reserved >> 20} MiB")


def write_result(state: TrainingState, figures: Mapping[str, Any]) -> None:
    """What came of the run, and where, and with which knobs."""
    result = {
        **figures,
        "steps": state.step,
        "train_ms": state.stopwatch.elapsed_ms(),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
        "device": str(state.runtime.device),
        "world_size": state.runtime.world_size,
        "knobs": asdict(state.hp),
    }
    path = Path(state.hp.output_dir, "final_result.json")
    write_or_warn(path, json.dumps(result, indent=1).encode(), state.runtime.log)


def train_and_export(state: TrainingState, validation: Validation) -> int:
    """Returns the exit code."""
    hp, runtime = state.hp, state.runtime
    load_checkpoint(state)
    warm_up(state)
    runtime.stop.set_action(runtime.stop.handle)
    signum = train(state, validation)
    if signum:
        return 128 + signum
    state.stopwatch.pause()
    weights = serialize(copy_tensors(state.gpt.state_dict(), "cpu"))
    if runtime.rank == 0:  # they are on the disk before anything else can fail
        write_or_warn(Path(hp.output_dir, "final_model.pt"), weights, runtime.log)
    runtime.stop.set_action(signal.SIG_DFL)

    val_loss = validate(state, validation)
    if state.step < hp.iterations:
        time_and_step = f"train_time:{state.stopwatch.elapsed_ms():.0f}ms step:{state.step}"
        runtime.log(f"stopping_early: wallclock_cap {time_and_step}/{hp.iterations}")
    check_replicas(runtime, weights)
    log_memory(runtime)

    # Rank 0 writes the artifact. All ranks score its bytes.
    artifact, sizes = export(state) if runtime.rank == 0 else (b"", {})
    load_weights(state.gpt, runtime.broadcast(artifact), "final_model.int8.ptz")
    figures = score(state, validation, ARTIFACT_SCORE)
    figures["pre_quant_val_loss"] = val_loss
    figures["pre_quant_val_bpb"] = validation.bits_per_byte(val_loss)
    if runtime.rank == 0:
        write_result(state, {**figures, **sizes})
    return int(not math.isfinite(figures["val_loss"]))


def score_file(state: TrainingState, validation: Validation) -> int:
    """EVAL_ONLY. Returns the exit code."""
    path, runtime = state.hp.eval_only, state.runtime
    name = f"EVAL_ONLY={path!r}"
    with naming(name):
        data = Path(path).read_bytes() if runtime.rank == 0 else b""
    quantized = load_weights(state.gpt, runtime.broadcast(data), name)
    runtime.log(f"eval_only:{path}")
    figures = score(state, validation, ARTIFACT_SCORE if quantized else "eval_only")
    return int(not math.isfinite(figures["val_loss"]))


def run() -> int:
    """One whole run, as the environment wants it. Returns the exit code."""
    # Knobs, device, process group, log.
    hp = Hyperparameters.from_env(os.environ)
    runtime = open_runtime(hp)
    for line in near_knobs(os.environ):
        runtime.log(line)
    if hp.preset == "demo" and not os.environ.keys() & {"DATA_PATH", "TOKENIZER_PATH"}:
        runtime.log(prepare_demo(hp))
    compare_ranks(hp, runtime)

    # Tokens: all are found and checked before anything is compiled.
    place = (runtime.rank, runtime.world_size, runtime.device, hp.vocab_size)
    loader = None if hp.eval_only else DistributedTokenLoader(hp.files("train"), *place)
    validation = Validation(hp)

    # The model and its optimizers.
    random.seed(hp.seed)
    np.random.seed(hp.seed)
    torch.manual_seed(hp.seed)  # CPU and CUDA
    gpt = GPT(hp, runtime.dtype).to(runtime.device)
    optimizers = [] if hp.eval_only else build_optimizers(gpt, runtime.compiled)
    log_run(hp, runtime, validation, gpt)
    model = wrap(gpt, runtime)
    state = TrainingState(hp, runtime, gpt, model, optimizers, loader, Stopwatch(runtime))

    # Score a file, or train, export and score.
    code = score_file(state, validation) if hp.eval_only else train_and_export(state, validation)
    if dist.is_initialized():
        # All ranks leave together. The process group ends with the process: to destroy it can hang,
        # when gloo's thread wants the GIL to free what it holds.
        dist.barrier()
    return code


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no KeyboardInterrupt, which prints a traceback
    try:
        code = run()
    except Exception as error:
        report_error(error)
        code = 1
    if "RANK" in os.environ:
        # Not through the interpreter's own exit, which may hang, or abort, in gloo's threads.
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
