"""Train the best small language model that fits, with this file, into 16,000,000 bytes.

    PRESET=demo python train_gpt.py                             a laptop, real text, no download
    python train_gpt.py                                         one GPU, FineWeb
    torchrun --standalone --nproc_per_node=8 train_gpt.py       one node of eight GPUs

Every knob is an environment variable: the fields of Hyperparameters, in capitals. A run logs its
progress, then scores the compressed model that it left on the disk: the last line of the log is
the result, in bits per byte of the validation text.

Read from top to bottom; no section reaches down into a later one:

    Hyperparameters   the knobs, their presets, and what is wrong with a set of them
    Runtime           this process's place among the others, its device, its log
    Data              shards, TokenStream, DistributedTokenLoader
    Model             GPT
    Optimizers        Newton-Schulz, Muon, which parameter goes to which optimizer
    Schedules         learning rate and momentum as functions of step and time
    Evaluation        the bytes of a token, loss, bits per byte
    Export            int8 + zlib
    Training          the stopwatch, one optimizer step, warm-up, the loop
    main              all of it, in order

Letters in shapes: B sequences in a micro-batch, T sequence length, D model width, H query heads,
K key/value heads, h = D/H head width, V vocabulary, L layers, W world size (processes),
A gradient accumulation steps (micro-steps of one process in one optimizer step).
"""

import contextlib
import copy
import glob
import hashlib
import io
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
import warnings
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import numpy as np
import sentencepiece
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class InputError(ValueError):
    """What a user can put right: the message names it, its value and the way out."""


# ---- Hyperparameters -----------------------------------------------------------------------------

CONTROL_TENSOR_NAME_PATTERNS = (
    "attn_scale", "attn_scales", "mlp_scale", "mlp_scales", "resid_mix", "resid_mixes",
    "q_gain", "skip_weight", "skip_weights",
)

# Other defaults under a name. A knob that is set in the environment wins over them.
PRESETS: dict[str, dict[str, Any]] = {
    "": {},
    "demo": dict(  # two minutes on two CPU cores
        data_path="./data/datasets/demo_sp1024",
        tokenizer_path="./data/tokenizers/demo_1024_bpe.model",
        max_wallclock_seconds=100.0, train_batch_tokens=6144, train_seq_len=128,
        warmup_steps=1, warmdown_iters=300, muon_momentum_warmup_steps=100,
        val_batch_size=32_768, val_loss_every=100, train_log_every=20,
        num_layers=4, model_dim=128, num_heads=2, num_kv_heads=1,
    ),
}


def parse_knob(name: str, text: str, kind: Any) -> Any:
    """The text of variable `name` as a value of type `kind`. Raises InputError if it is none."""
    if kind == tuple[str, ...]:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if kind is bool and text in ("0", "1"):
        return text == "1"
    try:
        if kind is not bool and (kind is str or math.isfinite(kind(text))):
            return kind(text)
    except (ValueError, OverflowError):
        pass
    wanted = {bool: "0 or 1", int: "a whole number", float: "a finite number"}[kind]
    raise InputError(f"{name}={text!r} must be {wanted}")


@dataclass(frozen=True)
class Hyperparameters:
    """All knobs. The environment variable of num_layers is NUM_LAYERS, and so on."""

    # run
    preset: str = ""  # "" or "demo": other defaults
    run_id: str = field(default_factory=lambda: str(uuid.uuid4()))  # names the log file
    seed: int = 1337  # of Python, NumPy and torch, on every rank
    output_dir: str = "."  # everything that a run writes goes under it
    # machine
    device: str = "auto"  # cuda, cpu; auto: cuda if there is one
    dtype: str = "auto"  # of activations, embedding, Muon: bf16, fp32; auto: bf16 if fast here
    compile: str = "auto"  # torch.compile: 1, 0; auto: 1 on cuda and, on the CPU, where it pays
    # data
    data_path: str = "./data/datasets/fineweb10B_sp1024"  # folder of fineweb_{train,val}_*.bin
    tokenizer_path: str = "./data/tokenizers/fineweb_1024_bpe.model"  # SentencePiece model
    # validation and logging
    val_batch_size: int = 524_288  # tokens, over all ranks and slots
    val_loss_every: int = 1000  # steps, step 0 included; 0: only at the end
    train_log_every: int = 200  # steps, after the first ten; 0: none
    # length of the run
    iterations: int = 20_000  # optimizer steps at most
    warmdown_iters: int = 1200  # steps in which the learning rate falls to zero; 0: it never falls
    warmup_steps: int = 20  # steps that prime compilation and are undone
    train_batch_tokens: int = 524_288  # tokens in an optimizer step
    # An optimizer step is always this many equal parts of its batch, shared out among the
    # processes: that is why 1, 2, 4 and 8 of them take the same step.
    batch_slots: int = 8
    train_seq_len: int = 1024  # T, tokens
    max_wallclock_seconds: float = 600.0  # of training time; 0: no cap
    # model
    vocab_size: int = 1024  # V
    num_layers: int = 9  # L
    model_dim: int = 512  # D
    num_heads: int = 8  # H
    num_kv_heads: int = 4  # K
    mlp_mult: int = 2  # hidden width of the MLP, in D
    tie_embeddings: bool = True  # the output layer is the embedding
    rope_base: float = 10_000.0  # the longest rotary wavelength is near 2 pi times this, in tokens
    logit_softcap: float = 30.0  # logits stay between minus and plus this
    qk_gain_init: float = 1.5  # factor of each head's queries at the start
    # optimizers
    embed_lr: float = 0.6  # Adam, untied embedding
    head_lr: float = 0.008  # Adam, untied lm_head
    tied_embed_lr: float = 0.05  # Adam, tied embedding
    tied_embed_init_std: float = 0.005  # standard deviation of a tied embedding at the start
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
    # export: substrings of parameter names
    control_tensor_name_patterns: tuple[str, ...] = CONTROL_TENSOR_NAME_PATTERNS  # Adam, in fp32
    int8_keep_float_fp32_name_patterns: tuple[str, ...] = CONTROL_TENSOR_NAME_PATTERNS  # fp32 there

    @property
    def train_files(self) -> str:
        return os.path.join(glob.escape(self.data_path), "fineweb_train_*.bin")

    @property
    def val_files(self) -> str:
        return os.path.join(glob.escape(self.data_path), "fineweb_val_*.bin")

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "Hyperparameters":
        """Defaults, then the preset, then the environment.

        Raises InputError with a line for each variable that is wrong, all of them at once.
        """
        environ = dict(environ)
        if "CONTROL_TENSOR_NAME_PATTERNS" in environ:
            environ.setdefault(
                "INT8_KEEP_FLOAT_FP32_NAME_PATTERNS", environ["CONTROL_TENSOR_NAME_PATTERNS"]
            )
        values = dict(PRESETS.get(environ.get("PRESET", ""), {}))
        problems = []
        for name, kind in get_type_hints(cls).items():
            try:
                if name.upper() in environ:
                    values[name] = parse_knob(name.upper(), environ[name.upper()], kind)
            except InputError as error:
                problems.append(str(error))
        hp = cls(**values)
        hp.validate(problems)
        return hp

    def validate(self, problems: Iterable[str] = ()) -> None:
        """Raise InputError with a line for each of `problems` and each knob out of range."""
        above_zero = {
            "val_batch_size", "train_batch_tokens", "batch_slots", "train_seq_len", "vocab_size",
            "num_layers", "model_dim", "num_heads", "num_kv_heads", "mlp_mult", "rope_base",
            "logit_softcap", "muon_backend_steps", "adam_eps",
        }
        below_one = {"muon_momentum", "muon_momentum_warmup_start", "beta1", "beta2"}
        rules = [  # knob, whether it is right, what it must be
            ("preset", self.preset in PRESETS, f"one of {list(PRESETS)}"),
            ("device", self.device in ("auto", "cuda", "cpu"), "auto, cuda or cpu"),
            ("dtype", self.dtype in ("auto", "bf16", "fp32"), "auto, bf16 or fp32"),
            ("compile", self.compile in ("auto", "1", "0"), "auto, 1 or 0"),
            ("run_id", "" != Path(self.run_id).name == self.run_id != "..", "a plain file name"),
            ("run_id", len(self.run_id) <= 200, "at most 200 characters long"),
            ("seed", self.seed < 2**32, "below 2**32"),
            ("vocab_size", self.vocab_size <= 2**16, "at most 65536: tokens are uint16"),
        ]
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if name in above_zero:
                rules.append((name, value > 0, "above 0"))
            elif kind in (int, float) and name not in ("warmdown_iters", "qk_gain_init"):
                rules.append((name, value >= 0, "0 or more"))
            if name in below_one:
                rules.append((name, value < 1, "below 1"))
        problems = [*problems]
        for name, right, rule in rules:
            if not right:
                problems.append(f"{name.upper()}={getattr(self, name)!r} must be {rule}")
        if all(getattr(self, name) > 0 for name in above_zero):
            problems += self.misfits()
        if problems:
            raise InputError("\n".join(problems))

    def misfits(self) -> list[str]:
        """What does not fit together though each knob alone is right, a line each."""
        slots, T = self.batch_slots, self.train_seq_len
        least_is = f"{slots * T}, BATCH_SLOTS={slots} times TRAIN_SEQ_LEN={T}"
        dim, heads, kv_heads = self.model_dim, self.num_heads, self.num_kv_heads
        rules = [
            (dim % heads == 0, f"MODEL_DIM={dim} must be a multiple of NUM_HEADS={heads}"),
            (dim % heads or dim // heads % 2 == 0,
             f"MODEL_DIM={dim} / NUM_HEADS={heads} must be even: rotary turns pairs"),
            (heads % kv_heads == 0,
             f"NUM_HEADS={heads} must be a multiple of NUM_KV_HEADS={kv_heads}"),
            (self.train_batch_tokens % (slots * T) == 0,
             f"TRAIN_BATCH_TOKENS={self.train_batch_tokens} must be a multiple of {least_is}"),
            (self.val_batch_size >= slots * T,
             f"VAL_BATCH_SIZE={self.val_batch_size} must be at least {least_is}"),
        ]
        return [problem for right, problem in rules if not right]


# ---- Runtime -------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Runtime:
    """Where this process stands: its place among the others, its device and its precision."""

    rank: int
    world_size: int  # W
    local_rank: int  # this process's number on its node
    distributed: bool  # there is a process group
    device: torch.device
    dtype: torch.dtype  # of activations and of Muon's updates

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        torch.get_device_module(self.device).synchronize()

    def record_event(self) -> Any:
        """A mark behind the work given to the device so far; its synchronize() waits for that."""
        event = torch.get_device_module(self.device).Event()
        event.record()
        return event

    def sum(self, value: Tensor) -> float:
        """The sum over all ranks of a scalar on the device, on every rank."""
        value = value.clone()
        if self.distributed:
            dist.all_reduce(value)
        return value.item()

    def from_rank_0(self, value: float) -> float:
        """Rank 0's number, on every rank. It travels between CPUs: no device is waited for."""
        box = torch.tensor([value], dtype=torch.float64)
        if self.distributed:
            dist.broadcast(box, src=0)
        return box.item()

    def bytes_from_rank_0(self, data: bytes) -> bytes:
        """Rank 0's bytes, on every rank."""
        size = int(self.from_rank_0(len(data)))
        if not self.distributed:
            return data
        box = torch.frombuffer(bytearray(data if self.rank == 0 else size), dtype=torch.uint8)
        dist.broadcast(box, src=0)
        return box.numpy().tobytes()

    def gather(self, value: Any) -> list[Any]:
        """The small Python values of all ranks, in their order, on every rank."""
        values = [value] * self.world_size
        if self.distributed:
            dist.all_gather_object(values, value)
        return values

    def together(self, action: Callable[..., Any], *args: Any) -> Any:
        """action(*args) on every rank. A user's error on one of them is raised on all, "shared"."""
        result = error = None
        try:
            result = action(*args)
        except (InputError, FileNotFoundError) as caught:
            error = caught
        errors = [e for e in self.gather(error) if e is not None]
        if errors:
            errors[0].shared = self.distributed
            raise errors[0]
        return result


def read_topology(environ: Mapping[str, str], slots: int) -> tuple[int, int, int, bool]:
    """(rank, world size, local rank, distributed) as torchrun sets them. Raises InputError."""
    rank, world_size, local_rank = (
        parse_knob(name, environ.get(name, default), int)
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    )
    if world_size < 1 or slots % world_size:
        fitting = ", ".join(str(n) for n in range(1, slots + 1) if slots % n == 0)
        raise InputError(f"WORLD_SIZE={world_size} must divide BATCH_SLOTS={slots}: launch "
                         f"{fitting} processes, or set BATCH_SLOTS to a multiple of WORLD_SIZE")
    if not ("RANK" in environ and "WORLD_SIZE" in environ):
        return 0, 1, 0, False
    if not 0 <= rank < world_size:
        raise InputError(f"RANK={rank} must be from 0 to WORLD_SIZE-1={world_size - 1}")
    return rank, world_size, local_rank, True


def choose_device(name: str, local_rank: int) -> torch.device:
    """What DEVICE means on this machine. Raises InputError if it has no such device."""
    num_gpus = torch.cuda.device_count()
    if name == "cpu" or (name == "auto" and num_gpus == 0):
        return torch.device("cpu")
    if num_gpus == 0:
        raise InputError("DEVICE='cuda', but torch sees no GPU here: set DEVICE=cpu, or install "
                         "a driver and a CUDA build of torch")
    if local_rank >= num_gpus:
        raise InputError(f"LOCAL_RANK={local_rank}, but torch sees {num_gpus} GPUs here: launch "
                         f"with --nproc_per_node={num_gpus} at most")
    return torch.device("cuda", local_rank)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """What DTYPE means on this device. auto asks for hardware that multiplies bf16: a CPU without
    AMX or AVX512-BF16 is several times slower in bf16 than in fp32."""
    if name == "auto" and device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif name == "auto":
        cpu = torch.cpu.get_capabilities()
        fast = cpu.get("amx_bf16", False) or cpu.get("avx512_bf16", False)
    else:
        fast = name == "bf16"
    return torch.bfloat16 if fast else torch.float32


def share_threads(environ: Mapping[str, str]) -> None:
    """Give each process of a CPU its share of the cores, unless OMP_NUM_THREADS is set. (torchrun
    sets it to 1 when it is not, so that 1 counts as unset.)"""
    processes = parse_knob("LOCAL_WORLD_SIZE", environ.get("LOCAL_WORLD_SIZE", "1"), int)
    if processes > 1 and environ.get("OMP_NUM_THREADS", "1") == "1":
        has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
        cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        torch.set_num_threads(max(cores // processes, 1))


@contextlib.contextmanager
def open_runtime(hp: Hyperparameters, environ: Mapping[str, str]) -> Iterator[Runtime]:
    """Open the device and, under torchrun, the process group; on success all ranks close it
    together. Raises InputError when the topology or the device is impossible."""
    rank, world_size, local_rank, distributed = read_topology(environ, hp.batch_slots)
    device = choose_device(hp.device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        share_threads(environ)
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has other names for what 2.11 has
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    if distributed:
        # gloo carries what lies on the CPU, so that the clock never waits for a GPU.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        dist.barrier()
    dtype = choose_dtype(hp.dtype, device)
    yield Runtime(rank, world_size, local_rank, distributed, device, dtype)
    if distributed:
        dist.barrier()
        dist.destroy_process_group()


def leave_after_error(error: Exception, environ: Mapping[str, str]) -> NoReturn:
    """Report an error and leave with exit code 1, without waiting for a rank that may not come.
    A user's error is its message alone, from rank 0; anything else is a traceback from its rank."""
    shared, is_rank_0 = getattr(error, "shared", False), environ.get("RANK", "0") == "0"
    text = "".join(traceback.format_exception(error)).rstrip()
    # What a rank without a peer says is an echo of the peer's error.
    waits = isinstance(error, dist.DistError) or "gloo" in str(error)
    if isinstance(error, InputError | FileNotFoundError):
        kind = "ValueError" if isinstance(error, InputError) else "FileNotFoundError"
        text, waits = f"{kind}: {error}", not is_rank_0
    if is_rank_0 or not shared:
        if waits:
            time.sleep(10)  # torchrun ends all ranks when one leaves: the cause comes first
        print(text, file=sys.stderr)
        if file := environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun repeats it as its last words
            report = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
            Path(file).write_text(json.dumps({"message": report}))
    if shared:
        dist.barrier()
    leave(1)


def leave(code: int) -> NoReturn:
    """End the process. As one of several ranks not through the interpreter's own exit, which may
    hang, or abort, in gloo's threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    if "RANK" in os.environ:
        os._exit(code)
    sys.exit(code)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (CPU and CUDA)."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


ATTENTION_BACKENDS = ("cudnn", "flash", "mem_efficient", "math")


def choose_attention(hp: Hyperparameters, runtime: Runtime) -> bool:
    """Leave one attention backend enabled, the fastest that runs the model's attention here, and
    return whether it takes grouped queries: otherwise keys and values must be repeated for them.
    cuDNN leads on Hopper (sm_90); on Blackwell it has returned wrong numbers without an error."""
    H, K, width = hp.num_heads, hp.num_kv_heads, hp.model_dim // hp.num_heads
    order = ["flash", "mem_efficient", "math"]
    if runtime.device.type == "cuda" and torch.cuda.get_device_capability()[0] == 9:
        order.insert(0, "cudnn")
    for chosen in order:
        for name in ATTENTION_BACKENDS:
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(name == chosen)
        takes_groups = chosen != "mem_efficient"
        qkv = torch.ones(1, hp.train_seq_len, H + 2 * K, width, device=runtime.device,
                         dtype=runtime.dtype, requires_grad=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch tells why each backend cannot
                attend(*qkv.split((H, K, K), dim=2), takes_groups).sum().backward()
            break
        except RuntimeError:
            continue
    return takes_groups


def attend(q: Tensor, k: Tensor, v: Tensor, takes_groups: bool) -> Tensor:
    """Causal attention of q (B, T, H, h) to k and v (B, T, K, h): (B, T, H, h)."""
    group = q.size(2) // k.size(2)
    if not takes_groups:
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = takes_groups and group > 1
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return y.transpose(1, 2)


class Log:
    """Rank 0's lines, on the console and in OUTPUT_DIR/logs/RUN_ID.txt; other ranks are silent.
    Raises InputError, on rank 0, if the file cannot be written."""

    def __init__(self, hp: Hyperparameters, runtime: Runtime) -> None:
        self.file = None
        if runtime.rank != 0:
            return
        path = Path(hp.output_dir) / "logs" / f"{hp.run_id}.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=hp.output_dir).close()  # the model's files come much later
            self.file = open(path, "a", encoding="utf-8")
        except OSError as error:
            raise InputError(f"OUTPUT_DIR={hp.output_dir!r} cannot be written, set another one: "
                             f"{error}") from None
        self(Path(__file__).read_text(encoding="utf-8"), console=False)
        self(f"Python {sys.version}\nPyTorch {torch.__version__}\n{gpu_report()}", console=False)
        self(str(path))

    def __call__(self, line: str, console: bool = True) -> None:
        if self.file is not None:
            self.file.write(line + "\n")
            self.file.flush()
            if console:
                print(line, flush=True)


def gpu_report() -> str:
    """What nvidia-smi prints, or a line that says why it prints nothing."""
    try:
        return subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout
    except OSError as error:
        return f"nvidia-smi: {error.strerror}"


# ---- Data ----------------------------------------------------------------------------------------

SHARD_MAGIC, SHARD_VERSION = 20240520, 1
SHARD_HEADER_BYTES = 1024  # 256 little-endian int32: magic, version, token count, zeros
WAYS_TO_DATA = """\
  download FineWeb:    python3 data/cached_challenge_fineweb.py --variant sp1024
  or run the demo:     PRESET=demo python train_gpt.py"""


def find_shards(pattern: str) -> list[Path]:
    """The files that match a glob pattern, by name. Raises FileNotFoundError if there are none."""
    paths = [Path(path) for path in sorted(glob.glob(pattern))]
    if not paths:
        raise FileNotFoundError(f"DATA_PATH has no {pattern}\n{WAYS_TO_DATA}")
    return paths


def load_data_shard(path: str | Path) -> Tensor:
    """The tokens of a shard, a uint16 tensor (n,), mapped into memory rather than read. Raises
    InputError naming the file if its header or its size is wrong."""
    try:
        with open(path, "rb") as file:
            header = file.read(SHARD_HEADER_BYTES)
            size = file.seek(0, os.SEEK_END)
    except OSError as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else InputError
        raise kind(f"{path} cannot be read: {error.strerror}") from None
    if len(header) < SHARD_HEADER_BYTES:
        raise InputError(f"{path}: {size} bytes are too few for a shard: get the file again")
    magic, version, num_tokens = (int(word) for word in np.frombuffer(header, "<i4", count=3))
    if (magic, version) != (SHARD_MAGIC, SHARD_VERSION):
        raise InputError(f"{path}: no token shard (magic {magic}, version {version}, expected "
                         f"{SHARD_MAGIC}, {SHARD_VERSION}): get the file again")
    expected = SHARD_HEADER_BYTES + 2 * num_tokens
    if num_tokens < 0 or size != expected:
        raise InputError(f"{path}: {size} bytes, but its header promises {num_tokens} tokens in "
                         f"{expected} bytes: get the file again")
    if num_tokens == 0:
        return torch.empty(0, dtype=torch.uint16)
    # Copy-on-write: torch asks for writable memory, the file stays as it is.
    return torch.from_numpy(np.memmap(path, "<u2", mode="c", offset=SHARD_HEADER_BYTES))


def check_token_ids(tokens: Tensor, vocab_size: int, path: Path, position: int) -> None:
    """Raise InputError naming shard, position and id if a token is outside the vocabulary.
    tokens: uint16, the part of the shard at `path` that begins at `position`."""
    ids = tokens.numpy()
    if ids.size and ids.max() >= vocab_size:
        first = int(np.argmax(ids >= vocab_size))
        raise InputError(f"{path}: token id {ids[first]} at position {position + first} is not "
                         f"below VOCAB_SIZE={vocab_size}: set the VOCAB_SIZE and TOKENIZER_PATH "
                         "that belong to the data")


class TokenStream:
    """The tokens of all shards that match a pattern, in the order of their names, for ever.

    Raises FileNotFoundError without shards; InputError if one is damaged, if all are empty and,
    in take, for a token id that is not below vocab_size.
    """

    def __init__(self, pattern: str, vocab_size: int = 2**16) -> None:
        self.paths = find_shards(pattern)
        self.shards = [load_data_shard(path) for path in self.paths]
        self.vocab_size = vocab_size
        self.shard = self.position = 0  # the next token is number `position` of number `shard`
        if not any(len(shard) for shard in self.shards):
            raise InputError(f"{pattern}: the shards hold no tokens: get the files again")

    def take(self, n: int) -> Tensor:
        """The next n tokens, a uint16 tensor (n,)."""
        parts = [torch.empty(0, dtype=torch.uint16)]
        while n > 0:
            part = self.shards[self.shard][self.position : self.position + n]
            check_token_ids(part, self.vocab_size, self.paths[self.shard], self.position)
            parts.append(part)
            n -= len(part)
            self.position += len(part)
            if self.position == len(self.shards[self.shard]):
                self.shard, self.position = (self.shard + 1) % len(self.shards), 0
        return torch.cat(parts)


class DistributedTokenLoader:
    """Deals one token stream out to the ranks in disjoint spans.

    Every rank walks the whole stream and keeps its own span, so none has to ask another, and the
    spans of an optimizer step are the same for every world size.
    """

    def __init__(self, pattern: str, rank: int, world_size: int, device: torch.device | str,
                 vocab_size: int = 2**16) -> None:
        self.stream = TokenStream(pattern, vocab_size)
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)

    def next_batch(self, global_tokens: int, seq_len: int,
                   grad_accum_steps: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of this rank's next micro-step, int64 (B, T) each, on the device.

        global_tokens: of the whole optimizer step. Raises InputError if a micro-step's share of
        them is not a number of whole sequences.
        """
        slots = self.world_size * grad_accum_steps
        local = global_tokens // slots
        if local < 1 or local % seq_len:
            raise InputError(f"TRAIN_BATCH_TOKENS={global_tokens} must be a multiple of "
                             f"{slots} slots * TRAIN_SEQ_LEN={seq_len}")
        span = local + 1  # the first token is no target, the last one no input
        tokens = self.stream.take(self.world_size * span)[self.rank * span :][:span]
        tokens = tokens.to(torch.int64)
        if self.device.type == "cuda":
            tokens = tokens.pin_memory()  # so that the copy does not wait for the GPU
        tokens = tokens.to(self.device, non_blocking=True)
        return tokens[:-1].view(-1, seq_len), tokens[1:].view(-1, seq_len)


# ---- Model ---------------------------------------------------------------------------------------

def is_control_tensor(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a parameter's full name holds one of the patterns."""
    return any(pattern in name for pattern in patterns)


def rms_norm(x: Tensor) -> Tensor:
    """RMSNorm of the last dimension, without a weight, in x's dtype."""
    return F.rms_norm(x, (x.size(-1),))


class CastedLinear(nn.Linear):
    """A linear layer without bias whose fp32 weight (out, in) is cast to its input's dtype."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """The output, times scale (out,) if given: folded into the weight, which is smaller."""
        weight = self.weight if scale is None else scale[:, None] * self.weight
        return F.linear(x, weight.to(x.dtype))


def rotary_tables(seq_len: int, head_width: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin (T, h/2) of the angles t * base**(-2j/h). RoPE (Su et al., 2021).

    The angles need fp32: in bf16 most positions beyond 256 equal a neighbour.
    """
    frequencies = base ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[j], x[j + h/2]) of x (B, T, heads, h) by the angles of their positions.

    cos, sin: (T, 1, h/2), in x's dtype.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


class CausalSelfAttention(nn.Module):
    """Grouped-query attention; queries and keys are normed and rotated, queries scaled per head."""

    def __init__(self, hp: Hyperparameters) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = hp.num_heads, hp.num_kv_heads
        self.takes_groups = True  # see choose_attention
        kv_dim = hp.model_dim // hp.num_heads * hp.num_kv_heads
        self.c_q = CastedLinear(hp.model_dim, hp.model_dim)
        self.c_k = CastedLinear(hp.model_dim, kv_dim)
        self.c_v = CastedLinear(hp.model_dim, kv_dim)
        self.proj = CastedLinear(hp.model_dim, hp.model_dim)
        self.q_gain = nn.Parameter(torch.full((hp.num_heads,), hp.qk_gain_init))

    def forward(self, x: Tensor, scale: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D), times scale (D,)."""
        B, T, D = x.shape
        H, K = self.num_heads, self.num_kv_heads
        # One product instead of three. The parameters stay three: Muon takes them one by one.
        weight = torch.cat((self.c_q.weight, self.c_k.weight, self.c_v.weight))
        qkv = F.linear(x, weight.to(x.dtype)).view(B, T, H + 2 * K, D // H)
        qk, v = qkv.split((H + K, K), dim=2)
        q, k = apply_rotary(rms_norm(qk), cos, sin).split((H, K), dim=2)
        q = q * self.q_gain.to(x.dtype)[:, None]
        return self.proj(attend(q, k, v, self.takes_groups).reshape(B, T, D), scale)


class MLP(nn.Module):
    """Two linear layers around a squared ReLU (Primer, So et al., 2021)."""

    def __init__(self, hp: Hyperparameters) -> None:
        super().__init__()
        self.fc = CastedLinear(hp.model_dim, hp.mlp_mult * hp.model_dim)
        self.proj = CastedLinear(hp.mlp_mult * hp.model_dim, hp.model_dim)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D), times scale (D,)."""
        return self.proj(F.relu(self.fc(x)).square(), scale)


class Block(nn.Module):
    """One layer: mixes the embedding back in, then adds attention, then the MLP."""

    def __init__(self, hp: Hyperparameters) -> None:
        super().__init__()
        self.attn = CausalSelfAttention(hp)
        self.mlp = MLP(hp)
        ones = torch.ones(hp.model_dim)
        self.attn_scale = nn.Parameter(ones.clone())
        self.mlp_scale = nn.Parameter(ones.clone())
        self.resid_mix = nn.Parameter(torch.stack((ones, 0 * ones)))

    def forward(self, x: Tensor, x0: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x, and x0, the normed embedding: (B, T, D) -> (B, T, D)."""
        keep, renew = self.resid_mix.to(x.dtype)
        x = keep * x + renew * x0
        x = x + self.attn(rms_norm(x), self.attn_scale, cos, sin)
        return x + self.mlp(rms_norm(x), self.mlp_scale)


class GPT(nn.Module):
    """A decoder whose later layers add what the earlier ones left on a stack (as in a U-Net).

    dtype: of the activations and of the embedding. Construct on the CPU: the weights then follow
    from torch's seed alone, the layers being constructed in the order of their random draws.
    """

    def __init__(self, hp: Hyperparameters, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.dtype = dtype
        self.logit_softcap = hp.logit_softcap
        self.num_early = hp.num_layers // 2  # layers that push; as many later ones pop
        self.tok_emb = nn.Embedding(hp.vocab_size, hp.model_dim)
        self.skip_weights = nn.Parameter(torch.ones(self.num_early, hp.model_dim))
        if self.num_early == 0:  # DDP would wait for the gradient of nothing
            self.skip_weights.requires_grad_(False)
        self.blocks = nn.ModuleList(Block(hp) for _ in range(hp.num_layers))
        self.lm_head = None if hp.tie_embeddings else CastedLinear(hp.model_dim, hp.vocab_size)
        cos, sin = rotary_tables(hp.train_seq_len, hp.model_dim // hp.num_heads, hp.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.init_weights(hp)

    @torch.no_grad()
    def init_weights(self, hp: Hyperparameters) -> None:
        """What comes after torch's own initialization: zeros at every way out, matrices on bf16
        values, so that the first step does not depend on who rounds them later."""
        if self.lm_head is None:
            self.tok_emb.weight.normal_(std=hp.tied_embed_init_std)
        else:
            self.lm_head.weight.zero_()
        for block in self.blocks:
            block.attn.proj.weight.zero_()
            block.mlp.proj.weight.zero_()
        patterns = hp.control_tensor_name_patterns
        for name, param in self.named_parameters():
            if param.ndim >= 2 and not is_control_tensor(name, patterns):
                param.copy_(param.bfloat16())
        if not is_control_tensor("tok_emb.weight", patterns):
            self.tok_emb.to(self.dtype)

    def forward(self, input_ids: Tensor, target_ids: Tensor) -> Tensor:
        """Mean cross-entropy in nats (fp32 scalar) of target_ids given input_ids, both (B, T).
        Raises ValueError if T is above TRAIN_SEQ_LEN, where the rotary tables end."""
        T = input_ids.size(1)
        if T > len(self.cos):
            raise ValueError(f"{T} tokens in a sequence, but TRAIN_SEQ_LEN={len(self.cos)}")
        cos, sin = (table[:T, None].to(self.dtype) for table in (self.cos, self.sin))
        x = x0 = rms_norm(self.tok_emb(input_ids).to(self.dtype))  # (B, T, D)
        skips = []
        for i, block in enumerate(self.blocks):
            if i >= self.num_early and skips:
                x = x + self.skip_weights[i - self.num_early].to(x.dtype) * skips.pop()
            x = block(x, x0, cos, sin)
            if i < self.num_early:
                skips.append(x)
        head = self.tok_emb if self.lm_head is None else self.lm_head
        logits = F.linear(rms_norm(x).flatten(0, 1), head.weight.to(x.dtype))  # (B*T, V)
        logits = self.logit_softcap * torch.tanh(logits / self.logit_softcap)
        return F.cross_entropy(logits.float(), target_ids.flatten())


# ---- Optimizers ----------------------------------------------------------------------------------

Chain = Callable[[Tensor, int], Tensor]  # newton_schulz, as it is or compiled


def newton_schulz(stack: Tensor, steps: int) -> Tensor:
    """Bring all singular values of each wide matrix in stack (n, rows, columns) near 1, by the
    quintic iteration of Muon (Keller Jordan, 2024), in stack's dtype."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = stack / (torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


def orthogonalize(matrices: list[Tensor], steps: int, chain: Chain = newton_schulz) -> list[Tensor]:
    """Newton-Schulz of each matrix, times sqrt(max(1, rows / columns)). Matrices of one shape, the
    tall ones laid on their side, go through one chain together."""
    alike = defaultdict(list)
    for i, matrix in enumerate(matrices):
        alike[min(matrix.shape), max(matrix.shape)].append(i)
    results = list(matrices)
    for members in alike.values():
        tall = [matrices[i].size(0) > matrices[i].size(1) for i in members]
        stack = torch.stack([matrices[i].mT if t else matrices[i] for i, t in zip(members, tall)])
        for i, t, update in zip(members, tall, chain(stack, steps)):
            rows, columns = matrices[i].shape
            results[i] = update.mT * math.sqrt(rows / columns) if t else update
    return results


def share_by_cost(shapes: list[torch.Size], world_size: int) -> list[list[int]]:
    """The numbers of the matrices that each rank orthogonalizes: the most expensive one left goes
    to the rank with the least work so far."""
    costs = [min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes]
    shares, loads = [[] for _ in range(world_size)], [0] * world_size
    for i in sorted(range(len(shapes)), key=lambda i: -costs[i]):
        rank = loads.index(min(loads))
        shares[rank].append(i)
        loads[rank] += costs[i]
    return shares


def exchange(part: Tensor, sizes: list[int]) -> Tensor:
    """The flat parts of all ranks, sizes[r] elements from rank r, end to end, on every rank."""
    if len(sizes) == 1:
        return part
    padded = F.pad(part, (0, max(sizes) - len(part)))
    parts = part.new_empty(len(sizes) * max(sizes))
    dist.all_gather_into_tensor(parts, padded)
    return torch.cat([row[:size] for row, size in zip(parts.view(len(sizes), -1), sizes)])


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalized (Keller Jordan, 2024), for matrices.

    They are shared out among the ranks: each holds the momentum of its own, and one collective
    exchanges all updates, in `dtype`.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float, backend_steps: int,
                 dtype: torch.dtype = torch.bfloat16, chain: Chain = newton_schulz) -> None:
        super().__init__(params, dict(lr=lr, momentum=momentum, backend_steps=backend_steps))
        self.dtype = dtype
        self.chain = chain

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter from its gradient."""
        rank, world_size = 0, 1
        if dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            params = group["params"]
            shares = share_by_cost([p.shape for p in params], world_size)
            updates = self.updates([params[i] for i in shares[rank]], group)
            flat = torch.cat([u.flatten() for u in updates]) if updates else params[0].new_empty(0)
            sizes = [sum(params[i].numel() for i in share) for share in shares]
            flat = exchange(flat.to(self.dtype), sizes).float()
            dealt = [params[i] for share in shares for i in share]
            parts = flat.split([p.numel() for p in dealt])
            views = [part.view_as(p) for part, p in zip(parts, dealt)]
            torch._foreach_add_(dealt, views, alpha=-group["lr"])

    def updates(self, params: list[nn.Parameter], group: dict[str, Any]) -> list[Tensor]:
        """Advance the momentum of these parameters and orthogonalize it."""
        if not params:
            return []
        grads = [p.grad for p in params]
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momenta = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, grads)
        nesterov = torch._foreach_add(grads, momenta, alpha=group["momentum"])
        matrices = [update.to(self.dtype) for update in nesterov]
        return orthogonalize(matrices, group["backend_steps"], self.chain)


def parameter_groups(model: nn.Module, hp: Hyperparameters) -> dict[str, list[nn.Parameter]]:
    """The table that sends each parameter of a GPT to exactly one group of one optimizer."""
    groups: dict[str, list[nn.Parameter]] = {"embed": [], "head": [], "matrix": [], "scalar": []}
    for name, param in model.named_parameters():
        control = is_control_tensor(name, hp.control_tensor_name_patterns)
        if name == "tok_emb.weight":
            groups["embed"].append(param)
        elif name == "lm_head.weight":
            groups["head"].append(param)
        elif name.startswith("blocks.") and param.ndim == 2 and not control:
            groups["matrix"].append(param)
        elif name.startswith("blocks.") or name == "skip_weights":
            groups["scalar"].append(param)
        else:
            raise AssertionError(f"{name} is in no optimizer: send it to a group here")
    return groups


def build_optimizers(model: nn.Module, hp: Hyperparameters, dtype: torch.dtype,
                     chain: Chain = newton_schulz) -> list[torch.optim.Optimizer]:
    """Adam and Muon for all parameters of a GPT. Each group remembers its full rate, "base_lr"."""
    groups = parameter_groups(model, hp)
    rates = {"embed": hp.tied_embed_lr if hp.tie_embeddings else hp.embed_lr,
             "head": hp.head_lr, "scalar": hp.scalar_lr}
    adam = torch.optim.Adam(
        [dict(params=groups[name], lr=lr) for name, lr in rates.items() if groups[name]],
        betas=(hp.beta1, hp.beta2), eps=hp.adam_eps, fused=True,
    )
    optimizers = [adam]
    if groups["matrix"]:
        optimizers.append(Muon(groups["matrix"], hp.matrix_lr, hp.muon_momentum,
                               hp.muon_backend_steps, dtype, chain))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return optimizers


# ---- Schedules -----------------------------------------------------------------------------------

def lr_factor(hp: Hyperparameters, step: int, elapsed_ms: float) -> float:
    """What scales all learning rates at step (from 0), elapsed_ms into the training time: 1, then
    straight down to 0, over the last WARMDOWN_ITERS steps or, under a cap on the time, over the
    time that as many steps take at the average speed so far."""
    if hp.warmdown_iters <= 0:
        return 1.0
    if hp.max_wallclock_seconds == 0:
        return min(max(hp.iterations - step, 0) / hp.warmdown_iters, 1.0)
    warmdown_ms = hp.warmdown_iters * elapsed_ms / max(step, 1)
    remaining_ms = max(1000 * hp.max_wallclock_seconds - elapsed_ms, 0.0)
    return 1.0 if remaining_ms > warmdown_ms else remaining_ms / warmdown_ms


def muon_momentum(hp: Hyperparameters, step: int) -> float:
    """Muon's momentum at step (from 0): a straight line, then MUON_MOMENTUM."""
    if step >= hp.muon_momentum_warmup_steps:
        return hp.muon_momentum
    done = step / hp.muon_momentum_warmup_steps
    return (1 - done) * hp.muon_momentum_warmup_start + done * hp.muon_momentum


def set_schedule(optimizers: list[torch.optim.Optimizer], factor: float, momentum: float) -> None:
    """Set every learning rate to `factor` times its full value, and Muon's momentum."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group["base_lr"]
            if "momentum" in group:
                group["momentum"] = momentum


# ---- Evaluation ----------------------------------------------------------------------------------

SPACE_MARK = "\u2581"  # how SentencePiece writes a space


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
    """The byte counts of the SentencePiece model at TOKENIZER_PATH. Raises FileNotFoundError, or
    InputError if it is no such model, not of VOCAB_SIZE, or miscounts spaces."""
    knob = f"TOKENIZER_PATH={hp.tokenizer_path!r}"
    if not os.path.isfile(hp.tokenizer_path):
        raise FileNotFoundError(f"{knob} does not exist\n{WAYS_TO_DATA}")
    sp = sentencepiece.SentencePieceProcessor()
    try:
        sp.LoadFromSerializedProto(Path(hp.tokenizer_path).read_bytes())
    except (OSError, RuntimeError) as error:
        raise InputError(f"{knob} must be a SentencePiece .model file: {error}") from None
    size = sp.vocab_size()
    if size != hp.vocab_size:
        raise InputError(f"{knob} has {size} pieces: set VOCAB_SIZE={size}, not {hp.vocab_size}, "
                         "or name another tokenizer")
    if sp.IsUnknown(sp.PieceToId(SPACE_MARK)):
        raise InputError(f"{knob} has no piece for a lone space (U+2581), so that bytes would be "
                         "counted wrongly: train it with that piece")
    length = np.zeros(size, dtype=np.int64)
    leading_space, no_text = np.zeros((2, size), dtype=bool)
    for i in range(size):
        piece = sp.IdToPiece(i)
        no_text[i] = sp.IsControl(i) or sp.IsUnknown(i) or sp.IsUnused(i)
        if sp.IsByte(i):
            length[i] = 1
        elif not no_text[i]:
            leading_space[i] = piece.startswith(SPACE_MARK)
            length[i] = len(piece.removeprefix(SPACE_MARK).encode("utf-8"))
    return TokenBytes(length, leading_space, no_text)


@dataclass(frozen=True)
class Validation:
    """The validation split, cut to whole sequences and the last target."""

    tokens: Tensor  # uint16 (n * T + 1,)
    num_bytes: int  # of text in tokens[1:]

    @classmethod
    def load(cls, hp: Hyperparameters, token_bytes: TokenBytes) -> "Validation":
        """All validation shards. Raises InputError if they hold less than one sequence."""
        paths = find_shards(hp.val_files)
        shards = [load_data_shard(path) for path in paths]
        for path, shard in zip(paths, shards):
            check_token_ids(shard, hp.vocab_size, path, 0)
        tokens = torch.cat(shards)
        num_sequences = (len(tokens) - 1) // hp.train_seq_len
        if num_sequences < 1:
            raise InputError(f"DATA_PATH={hp.data_path!r}: {len(tokens)} validation tokens make no "
                             f"sequence of TRAIN_SEQ_LEN={hp.train_seq_len} and its last target")
        tokens = tokens[: num_sequences * hp.train_seq_len + 1]
        return cls(tokens, token_bytes.count(tokens.numpy()))

    def bits_per_byte(self, loss: float) -> float:
        """loss: mean nats per target token."""
        return loss / math.log(2) * (len(self.tokens) - 1) / self.num_bytes


@torch.no_grad()
def evaluate(model: nn.Module, tokens: Tensor, hp: Hyperparameters, runtime: Runtime) -> float:
    """Mean cross-entropy in nats of tokens[1:], each seen from within its own window of T tokens.
    tokens: uint16 (n * T + 1,). Each rank scores its part of the windows and gets the mean."""
    T = hp.train_seq_len
    num_windows = (len(tokens) - 1) // T
    first = num_windows * runtime.rank // runtime.world_size
    last = num_windows * (runtime.rank + 1) // runtime.world_size
    batch = hp.val_batch_size // hp.batch_slots // T  # windows in a forward pass
    total = torch.zeros((), dtype=torch.float64, device=runtime.device)
    for begin in range(first, last, batch):
        end = min(begin + batch, last)
        part = tokens[begin * T : end * T + 1].to(torch.int64).to(runtime.device)
        total += (end - begin) * model(part[:-1].view(-1, T), part[1:].view(-1, T)).double()
    return runtime.sum(total) / num_windows


# ---- Export --------------------------------------------------------------------------------------

QUANT_FORMAT = "int8_clean_per_row_v1"
INT8_KEEP_FLOAT_MAX_NUMEL = 65_536  # quantizing smaller tensors gains nothing
INT8_CLIP_QUANTILE = 0.9999984
INT8_SCALE_FLOOR = 1 / 127


def abs_quantile(rows: Tensor, q: float) -> Tensor:
    """The q quantile of |row|, linearly interpolated, of each row of rows (n, m): fp32 (n,). Equals
    torch.quantile, but selects the few largest values instead of sorting all of them."""
    m = rows.size(1)
    position = np.float32(q) * np.float32(m - 1)  # in fp32, as torch.quantile has it
    weight, below = math.modf(position)
    largest = rows.abs().topk(m - int(below), dim=1).values
    return torch.lerp(largest[:, -1], largest[:, max(largest.size(1) - 2, 0)], weight)


def quantize_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight as int8, and the scale: of each row of a matrix in fp16, else of the whole in fp32."""
    is_matrix = weight.ndim == 2
    rows = (weight if is_matrix else weight.reshape(1, -1)).float()
    clip = abs_quantile(rows, INT8_CLIP_QUANTILE)[:, None]
    scale = clip / 127
    scale = scale.clamp_min(INT8_SCALE_FLOOR) if is_matrix else torch.where(clip > 0, scale, 1.0)
    values = (rows.clamp(-clip, clip) / scale).round().clamp(-127, 127).to(torch.int8)
    return values.view(weight.shape), scale[:, 0].half() if is_matrix else scale[0, 0]


def quantize_state_dict_int8(
    state_dict: Mapping[str, Tensor], keep_patterns: tuple[str, ...] = CONTROL_TENSOR_NAME_PATTERNS
) -> tuple[dict[str, Any], dict[str, int]]:
    """The object that an artifact holds, and its statistics: the bytes of its tensors ("payload")
    and of the state_dict's ("baseline").

    Large floating-point tensors become int8, small ones fp16, or fp32 if their name holds one of
    keep_patterns. Everything else stays as it is.
    """
    quantized, scales, dtypes, passthrough, qmeta, original_dtypes = {}, {}, {}, {}, {}, {}
    for name, tensor in state_dict.items():
        tensor = tensor.detach().cpu().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.is_floating_point() and tensor.numel() > INT8_KEEP_FLOAT_MAX_NUMEL:
            quantized[name], scales[name] = quantize_tensor(tensor)
            dtypes[name] = dtype
            if tensor.ndim == 2:
                qmeta[name] = {"scheme": "per_row", "axis": 0}
        elif tensor.is_floating_point() and is_control_tensor(name, keep_patterns):
            passthrough[name] = tensor.float()
        elif tensor.dtype in (torch.float32, torch.bfloat16):
            passthrough[name] = tensor.half()
            original_dtypes[name] = dtype
        else:
            passthrough[name] = tensor
    obj = {"__quant_format__": QUANT_FORMAT, "quantized": quantized, "scales": scales,
           "dtypes": dtypes, "passthrough": passthrough}
    if qmeta:
        obj["qmeta"] = qmeta
    if original_dtypes:
        obj["passthrough_orig_dtypes"] = original_dtypes
    payload = [*quantized.values(), *scales.values(), *passthrough.values()]
    stats = {"payload": sum(tensor.nbytes for tensor in payload),
             "baseline": sum(tensor.nbytes for tensor in state_dict.values())}
    return obj, stats


def dequantize_state_dict_int8(obj: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state_dict from an object of quantize_state_dict_int8, in the dtypes it remembers."""
    state_dict = {}
    for name, values in obj["quantized"].items():
        scale = obj["scales"][name].float()
        if name in obj.get("qmeta", {}):
            scale = scale[:, None]
        state_dict[name] = (values.float() * scale).to(getattr(torch, obj["dtypes"][name]))
    for name, tensor in obj["passthrough"].items():
        dtype = obj.get("passthrough_orig_dtypes", {}).get(name)
        state_dict[name] = tensor.to(getattr(torch, dtype)) if dtype else tensor.clone()
    return state_dict


def serialize(obj: Any) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


def write_file(path: Path, data: bytes) -> None:
    """Write beside, flush to the disk, rename: path is always the whole old or new file."""
    beside = path.with_name(path.name + ".part")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def export(model: nn.Module, hp: Hyperparameters, runtime: Runtime, log: Log) -> bytes:
    """Write final_model.pt and final_model.int8.ptz; return the latter, read back from the disk.
    Rank 0 does it all; its bytes reach the other ranks, which may not see its disk."""
    if runtime.rank != 0:
        return runtime.bytes_from_rank_0(b"")
    folder = Path(hp.output_dir)
    state_dict = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    plain = serialize(state_dict)
    write_file(folder / "final_model.pt", plain)
    code_size = len(Path(__file__).read_bytes())
    log(f"Serialized model: {len(plain)} bytes")
    log(f"Code size: {code_size} bytes")
    log(f"Total submission size: {len(plain) + code_size} bytes")
    obj, stats = quantize_state_dict_int8(state_dict, hp.int8_keep_float_fp32_name_patterns)
    raw = serialize(obj)
    write_file(folder / "final_model.int8.ptz", zlib.compress(raw, 9))
    artifact = (folder / "final_model.int8.ptz").read_bytes()
    ratio = stats["baseline"] / stats["payload"]
    log(f"Serialized model int8+zlib: {len(artifact)} bytes "
        f"(payload:{stats['payload']} raw_torch:{len(raw)} payload_ratio:{ratio:.2f}x)")
    log(f"Total submission size int8+zlib: {len(artifact) + code_size} bytes")
    return runtime.bytes_from_rank_0(artifact)


def read_artifact(data: bytes) -> dict[str, Tensor]:
    """The state_dict in the bytes of a final_model.int8.ptz."""
    obj = torch.load(io.BytesIO(zlib.decompress(data)), map_location="cpu", weights_only=True)
    return dequantize_state_dict_int8(obj)


# ---- Training ------------------------------------------------------------------------------------

class Stopwatch:
    """Training time: stands still from pause to start; follows the device, not the host, which
    hands out work ahead of it."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.before = 0.0  # seconds until the last pause
        self.started: float | None = None
        self.laps: deque[Any] = deque()

    def start(self) -> None:
        self.started = time.perf_counter()

    def pause(self) -> None:
        self.runtime.synchronize()
        self.before += time.perf_counter() - self.started
        self.started = None
        self.laps.clear()

    def lap(self) -> None:
        """Call after each step. Waits for the step before it: the host stays one step ahead, so
        that its clock follows the device and the device always has work."""
        self.laps.append(self.runtime.record_event())
        if len(self.laps) > 1:
            self.laps.popleft().synchronize()

    def elapsed_ms(self) -> float:
        since = 0.0 if self.started is None else time.perf_counter() - self.started
        return 1000 * (self.before + since)

    def report(self, step: int) -> str:
        """The end of a log line: the time, and its average over the steps."""
        elapsed_ms = self.elapsed_ms()
        return f"train_time:{elapsed_ms:.0f}ms step_avg:{elapsed_ms / max(step, 1):.2f}ms"


def wants_compile(hp: Hyperparameters, runtime: Runtime) -> bool:
    """What COMPILE means here. On the CPU, where compiling takes a minute, auto asks for a run that
    is long enough and for AMX: without it the matrix products take the time, not what is fused."""
    if hp.compile != "auto" or runtime.device.type == "cuda":
        return hp.compile != "0"
    is_long = hp.iterations >= 200 and not 0 < hp.max_wallclock_seconds < 600
    has_amx = torch.cpu.get_capabilities().get("amx_bf16", False)
    return is_long and has_amx and runtime.dtype == torch.bfloat16


def compiler_problem(device: torch.device) -> str:
    """Why torch.compile does not work on this machine, in one line; "" if it does."""
    try:
        torch.compile(torch.sin)(torch.zeros(2, device=device))
    except Exception as error:  # torch, Triton and the C++ compiler each have their own
        return " ".join(str(error).split())[:200] or repr(error)
    finally:
        torch.compiler.reset()
    return ""


def compile_and_wrap(
    gpt: GPT, hp: Hyperparameters, runtime: Runtime, log: Log
) -> tuple[nn.Module, Chain]:
    """The model to call: compiled if COMPILE says so, wrapped in DistributedDataParallel if there
    is a process group. And Newton-Schulz, compiled likewise."""
    compiled = wants_compile(hp, runtime)
    if compiled and (problem := compiler_problem(runtime.device)):
        log(f"compile:failed, the run goes on without it: {problem}")
        compiled = False
    log(f"device:{runtime.device} dtype:{runtime.dtype} compile:{compiled} "
        f"cpu_threads:{torch.get_num_threads()}")
    model, chain = gpt, newton_schulz
    if compiled:
        model = torch.compile(gpt, dynamic=False, fullgraph=True)
        chain = torch.compile(newton_schulz, dynamic=False, fullgraph=True)
    if runtime.distributed:
        device_ids = [runtime.device] if runtime.device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=device_ids, broadcast_buffers=False)
    return model, chain


def build_loader(hp: Hyperparameters, runtime: Runtime) -> DistributedTokenLoader:
    """A loader at the beginning of the training shards."""
    place = runtime.rank, runtime.world_size, runtime.device
    return DistributedTokenLoader(hp.train_files, *place, hp.vocab_size)


def train_step(model: nn.Module, loader: DistributedTokenLoader,
               optimizers: list[torch.optim.Optimizer], hp: Hyperparameters,
               runtime: Runtime) -> Tensor:
    """One optimizer step of A micro-steps. Returns the mean loss of this rank's tokens."""
    A = hp.batch_slots // runtime.world_size  # grad_accum_steps
    total = torch.zeros((), device=runtime.device)
    for micro_step in range(A):
        if runtime.distributed:  # gradients travel once, with the last micro-step
            model.require_backward_grad_sync = micro_step == A - 1
        inputs, targets = loader.next_batch(hp.train_batch_tokens, hp.train_seq_len, A)
        loss = model(inputs, targets) * (1 / A)
        loss.backward()
        total += loss.detach()
    if hp.grad_clip_norm > 0:
        nn.utils.clip_grad_norm_(model.parameters(), hp.grad_clip_norm)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return total


def warm_up(model: nn.Module, optimizers: list[torch.optim.Optimizer], hp: Hyperparameters,
            runtime: Runtime, log: Log) -> None:
    """WARMUP_STEPS whole steps that compile every graph and fill every cache, and are undone."""
    if hp.warmup_steps == 0:
        return
    weights = copy.deepcopy(model.state_dict())
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    loader = build_loader(hp, runtime)
    set_schedule(optimizers, 1.0, muon_momentum(hp, 0))
    for step in range(1, hp.warmup_steps + 1):
        train_step(model, loader, optimizers, hp, runtime)
        if hp.warmup_steps <= 20 or step % 10 == 0 or step == hp.warmup_steps:
            log(f"warmup_step:{step}/{hp.warmup_steps}")
    model.load_state_dict(weights)
    for optimizer, state in zip(optimizers, states):
        optimizer.load_state_dict(state)


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], validation: Validation,
          hp: Hyperparameters, runtime: Runtime, log: Log) -> None:
    """Train until ITERATIONS or the cap, with validation on the way and at the end."""
    loader = build_loader(hp, runtime)
    stopwatch = Stopwatch(runtime)
    runtime.synchronize()
    stopwatch.start()
    for step in range(hp.iterations + 1):
        # Rank 0's clock is everybody's: one learning rate, and one decision to stop.
        elapsed_ms = runtime.from_rank_0(stopwatch.elapsed_ms())
        capped = 0 < hp.max_wallclock_seconds <= elapsed_ms / 1000 and step < hp.iterations
        last = capped or step == hp.iterations
        if last or (hp.val_loss_every > 0 and step % hp.val_loss_every == 0):
            stopwatch.pause()
            loss = evaluate(model, validation.tokens, hp, runtime)
            log(f"step:{step}/{hp.iterations} val_loss:{loss:.4f} "
                f"val_bpb:{validation.bits_per_byte(loss):.4f} {stopwatch.report(step)}")
            if capped:
                log(f"stopping_early: wallclock_cap train_time:{stopwatch.elapsed_ms():.0f}ms "
                    f"step:{step}/{hp.iterations}")
            if last:
                return
            stopwatch.start()
        set_schedule(optimizers, lr_factor(hp, step, elapsed_ms), muon_momentum(hp, step))
        rank_loss = train_step(model, loader, optimizers, hp, runtime)
        stopwatch.lap()
        done = step + 1
        if hp.train_log_every > 0 and (done <= 10 or done % hp.train_log_every == 0):
            loss = runtime.sum(rank_loss) / runtime.world_size
            log(f"step:{done}/{hp.iterations} train_loss:{loss:.4f} {stopwatch.report(done)}")


def check_replicas(model: nn.Module, optimizers: list[torch.optim.Optimizer], runtime: Runtime,
                   log: Log) -> None:
    """Compare, bit by bit, the weights of all ranks and how often Adam has changed each. Raises
    RuntimeError if any differ."""
    if not runtime.distributed:
        return
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    steps = [int(state["step"]) for state in states if "step" in state]
    digest = hashlib.sha256(str(steps).encode())
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().flatten().view(torch.uint8).numpy())
    digests = runtime.gather(digest.hexdigest())
    strays = [rank for rank, value in enumerate(digests) if value != digests[0]]
    if strays:
        raise RuntimeError(f"the weights or step counts of ranks {strays} differ from rank 0's")
    log("replicas:identical")


def log_peak_memory(runtime: Runtime, log: Log) -> None:
    """The GPU's peak or, on the CPU, the peak resident size of this process."""
    if runtime.device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    else:
        import resource  # not on Windows

        unit = 1 if sys.platform == "darwin" else 1024  # bytes
        allocated = reserved = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    log(f"peak memory allocated: {allocated >> 20} MiB reserved: {reserved >> 20} MiB")


# ---- main ----------------------------------------------------------------------------------------

def prepare_demo(hp: Hyperparameters, runtime: Runtime, log: Log) -> None:
    """For the demo's own data: build it, once on each node, and log what its builder says."""
    demo = PRESETS["demo"]
    own = (hp.data_path, hp.tokenizer_path) == (demo["data_path"], demo["tokenizer_path"])
    if hp.preset != "demo" or not own or runtime.local_rank != 0:
        return
    script = Path(__file__).with_name("data") / "demo_corpus.py"
    command = [sys.executable, script, "--dataset", hp.data_path, "--tokenizer", hp.tokenizer_path]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        reason = (result.stderr.strip() or "no message").splitlines()[-1]
        raise InputError(f"PRESET=demo: {script} failed: {reason}")
    log(result.stdout.rstrip())


def log_run(hp: Hyperparameters, runtime: Runtime, loader: DistributedTokenLoader,
            validation: Validation, gpt: GPT, log: Log) -> None:
    """The lines that describe a run before it starts."""
    backends = [f"{name}={getattr(torch.backends.cuda, f'{name}_sdp_enabled')()}"
                for name in ATTENTION_BACKENDS]
    tied = hp.tie_embeddings
    log(f"val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path={hp.tokenizer_path}")
    log(f"train_loader:dataset:{Path(hp.data_path).resolve().name} "
        f"train_shards:{len(loader.stream.shards)}")
    log(f"val_loader:shards pattern={os.path.join(hp.data_path, 'fineweb_val_*.bin')} "
        f"tokens:{len(validation.tokens) - 1}")
    log(f"model_params:{sum(p.numel() for p in gpt.parameters())}")
    log(f"world_size:{runtime.world_size} grad_accum_steps:{hp.batch_slots // runtime.world_size}")
    log(f"sdp_backends:{' '.join(backends)}")
    log(f"attention_mode:gqa num_heads:{hp.num_heads} num_kv_heads:{hp.num_kv_heads}")
    log(f"tie_embeddings:{tied} embed_lr:{hp.tied_embed_lr if tied else hp.embed_lr} "
        f"head_lr:{0.0 if tied else hp.head_lr} matrix_lr:{hp.matrix_lr} scalar_lr:{hp.scalar_lr}")
    log(f"train_batch_tokens:{hp.train_batch_tokens} train_seq_len:{hp.train_seq_len} "
        f"iterations:{hp.iterations} warmup_steps:{hp.warmup_steps} "
        f"max_wallclock_seconds:{hp.max_wallclock_seconds:.3f}")
    log(f"seed:{hp.seed}")


def score_artifact(model: nn.Module, validation: Validation, hp: Hyperparameters,
                   runtime: Runtime, log: Log) -> None:
    """The last two lines: the score of the model that came back from the artifact."""
    started = time.perf_counter()
    loss = evaluate(model, validation.tokens, hp, runtime)
    eval_ms = 1000 * (time.perf_counter() - started)
    bpb = validation.bits_per_byte(loss)
    name = "final_int8_zlib_roundtrip"
    log(f"{name} val_loss:{loss:.4f} val_bpb:{bpb:.4f} eval_time:{eval_ms:.0f}ms")
    log(f"{name}_exact val_loss:{loss:.8f} val_bpb:{bpb:.8f}")


def run(hp: Hyperparameters, runtime: Runtime) -> None:
    """One whole run, from the data to the last line of the log."""
    log = runtime.together(Log, hp, runtime)
    runtime.together(prepare_demo, hp, runtime, log)
    loader = runtime.together(build_loader, hp, runtime)
    token_bytes = runtime.together(load_tokenizer, hp)
    validation = runtime.together(Validation.load, hp, token_bytes)

    takes_groups = choose_attention(hp, runtime)
    seed_everything(hp.seed)
    gpt = GPT(hp, runtime.dtype).to(runtime.device)
    for block in gpt.blocks:
        block.attn.takes_groups = takes_groups
    log_run(hp, runtime, loader, validation, gpt, log)
    model, chain = compile_and_wrap(gpt, hp, runtime, log)
    optimizers = build_optimizers(gpt, hp, runtime.dtype, chain)

    warm_up(model, optimizers, hp, runtime, log)
    train(model, optimizers, validation, hp, runtime, log)
    log_peak_memory(runtime, log)
    check_replicas(gpt, optimizers, runtime, log)

    artifact = export(gpt, hp, runtime, log)
    gpt.load_state_dict(read_artifact(artifact))
    score_artifact(model, validation, hp, runtime, log)


def main() -> None:
    """Run as the environment says, or leave with exit code 1 and the reason."""
    try:
        hp = Hyperparameters.from_env(os.environ)
        with open_runtime(hp, os.environ) as runtime:
            run(hp, runtime)
    except Exception as error:
        leave_after_error(error, os.environ)


if __name__ == "__main__":
    main()
    leave(0)
