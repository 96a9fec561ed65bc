"""Train the best small language model that fits, with this file, into 16,000,000 bytes:

    PRESET=demo python train_gpt.py                             a laptop, real text, no download
    python train_gpt.py                                         one GPU, FineWeb
    torchrun --standalone --nproc_per_node=8 train_gpt.py       one node of eight GPUs

Every knob is an environment variable: the fields of Hyperparameters, in capitals. A run logs its
progress, then scores the compressed model that it left on the disk: the last line of the log is
the result, in bits per byte of the validation text.

No section reaches down into a later one: Hyperparameters (the knobs), Runtime (this process, its
device, log and end), Data (shards, loader), Model (GPT), Optimizers (Muon and Adam), Schedules,
Evaluation (bits per byte), Export (int8 + zlib), Checkpoints, Training, main (all of it, in order).

Letters in shapes: B sequences in a micro-batch, T sequence length, D model width, H query heads,
K key/value heads, h = D/H head width, V vocabulary, L layers, W world size (processes),
A gradient accumulation steps (micro-steps of one process in one optimizer step).
"""

import contextlib, functools, glob, hashlib, io, json, math, os, platform, random, resource, select
import signal, subprocess, sys, tempfile, threading, time, traceback, uuid, warnings, zipfile, zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import numpy as np
import sentencepiece
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

class InputError(ValueError):
    """What a user can put right: the message names it, its value and the way out."""

def require(condition: bool, problem: str) -> None:
    """Raise InputError(problem) unless the condition holds."""
    if not condition:
        raise InputError(problem)

# ---- Hyperparameters -----------------------------------------------------------------------------
CONTROL_TENSOR_NAME_PATTERNS = ("attn_scale", "attn_scales", "mlp_scale", "mlp_scales", "resid_mix",
                                "resid_mixes", "q_gain", "skip_weight", "skip_weights")
PRESETS: dict[str, dict[str, Any]] = {"": {}, "demo": dict(  # two minutes on two CPU cores
    data_path="./data/datasets/demo_sp1024", tokenizer_path="./data/tokenizers/demo_1024_bpe.model",
    max_wallclock_seconds=100.0, train_batch_tokens=6144, train_seq_len=128, warmup_steps=1,
    warmdown_frac=0.8, muon_momentum_warmup_steps=100, val_batch_size=32_768, val_loss_every=100,
    train_log_every=20, num_layers=4, model_dim=128, num_heads=2, num_kv_heads=1,
)}

def parse_knob(name: str, text: str, kind: Any) -> Any:
    """The text of variable `name` as a value of type `kind`. Raises InputError if it is none."""
    if kind == tuple[str, ...]:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    with contextlib.suppress(KeyError, ValueError, OverflowError):
        value = {"0": False, "1": True}[text] if kind is bool else kind(text)
        if kind is str or math.isfinite(value):
            return value
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
    checkpoint_every: int = 0  # steps; 0: only when a signal stops the run
    keep_checkpoints: int = 2  # the newest ones of this RUN_ID
    resume: str = ""  # a checkpoint to go on from; auto: the newest good one of this RUN_ID, if any
    eval_only: str = ""  # a checkpoint or a final_model file: score it, train nothing
    tensorboard: bool = False  # curves for it in OUTPUT_DIR/tensorboard/RUN_ID
    # machine
    device: str = "auto"  # cuda, cpu; auto: cuda if there is one
    dtype: str = "auto"  # of activations, embedding, Muon: bf16, fp32; auto: bf16 if fast here
    compile: str = "auto"  # torch.compile: 1, 0; auto: 1 on cuda and, on the CPU, where it pays
    activation_checkpoint: bool = False  # less memory: the backward pass computes each block again
    # data
    data_path: str = "./data/datasets/fineweb10B_sp1024"  # folder of fineweb_{train,val}_*.bin
    tokenizer_path: str = "./data/tokenizers/fineweb_1024_bpe.model"  # SentencePiece model
    # validation and logging
    val_batch_size: int = 524_288  # tokens, over all ranks and slots
    val_loss_every: int = 1000  # steps, step 0 included; 0: only at the end
    max_val_tokens: int = 0  # a shorter, "partial" validation; 0: the whole split
    eval_stride: int = 0  # tokens; at the end also score in windows that overlap but for so many
    train_log_every: int = 200  # steps, after the first ten; 0: none
    sample_prompt: str = ""  # at the end, log how the compressed model goes on from here
    sample_tokens: int = 64  # at most
    sample_temperature: float = 0.8  # 0: always the likeliest token
    # length of the run
    iterations: int = 20_000  # optimizer steps at most
    warmdown_iters: int = 1200  # steps in which the learning rate falls to zero; 0: it never falls
    warmdown_frac: float = 0.0  # instead: the last fraction of the run, in steps and in time
    warmup_steps: int = 20  # steps that prime compilation and are undone
    train_batch_tokens: int = 524_288  # tokens in an optimizer step
    batch_slots: int = 8  # equal parts of a batch, so that 1, 2, 4, 8 processes take the same step
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
    # export
    int8_scale_floor: float = 1 / 127  # least int8 step; 0 spares rows of small weights coarse ones
    control_tensor_name_patterns: tuple[str, ...] = CONTROL_TENSOR_NAME_PATTERNS  # Adam, fp32
    int8_keep_float_fp32_name_patterns: tuple[str, ...] = CONTROL_TENSOR_NAME_PATTERNS  # fp32 there

    train_files = property(lambda hp: f"{glob.escape(hp.data_path)}/fineweb_train_*.bin")
    val_files = property(lambda hp: f"{glob.escape(hp.data_path)}/fineweb_val_*.bin")

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "Hyperparameters":
        """Defaults, then the preset, then the environment. Raises InputError: a line a problem."""
        values, problems = dict(PRESETS.get(environ.get("PRESET", ""), {})), []
        if (patterns := environ.get("CONTROL_TENSOR_NAME_PATTERNS")) is not None:
            environ = {"INT8_KEEP_FLOAT_FP32_NAME_PATTERNS": patterns, **environ}
        for name, kind in get_type_hints(cls).items():
            try:
                if name.upper() in environ:
                    values[name] = parse_knob(name.upper(), environ[name.upper()], kind)
            except InputError as error:
                problems.append(str(error))
        hp = cls(**values)
        if hp.resume == "auto" and "RUN_ID" not in environ:
            problems.append("RESUME='auto' needs the RUN_ID of the run to go on with: set it")
        problems += hp.problems()
        require(not problems, "\n".join(problems))
        return hp

    def problems(self) -> list[str]:
        """A line for each knob that is wrong."""
        above_zero = ("val_batch_size", "train_batch_tokens", "batch_slots", "train_seq_len",
                      "vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads",
                      "mlp_mult", "rope_base", "logit_softcap", "muon_backend_steps", "adam_eps",
                      "keep_checkpoints")
        others = [name for name, kind in get_type_hints(type(self)).items() if kind in (int, float)
                  and name not in (*above_zero, "warmdown_iters", "qk_gain_init")]
        below_one = ("muon_momentum", "muon_momentum_warmup_start", "beta1", "beta2")
        rules = [(name, getattr(self, name) > 0, "above 0") for name in above_zero]
        rules += [(name, getattr(self, name) >= 0, "0 or more") for name in others]
        rules += [(name, getattr(self, name) < 1, "below 1") for name in below_one]
        heads, kv_heads = max(self.num_heads, 1), max(self.num_kv_heads, 1)
        slots, T = max(self.batch_slots, 1), max(self.train_seq_len, 1)
        least, units = slots * T, f"{slots * T}, BATCH_SLOTS={slots} times TRAIN_SEQ_LEN={T}"
        rules += [  # knob, whether it is right, what it must be
            ("preset", self.preset in PRESETS, f"one of {list(PRESETS)}"),
            ("device", self.device in ("auto", "cuda", "cpu"), "auto, cuda or cpu"),
            ("dtype", self.dtype in ("auto", "bf16", "fp32"), "auto, bf16 or fp32"),
            ("compile", self.compile in ("auto", "1", "0"), "auto, 1 or 0"),
            ("run_id", "" != Path(self.run_id).name[:200] == self.run_id != "..",
             "a plain file name of at most 200 characters"),
            ("sample_prompt", not any("\ud7ff" < c < "\ue000" for c in self.sample_prompt), "text"),
            ("seed", self.seed < 2**32, "below 2**32"),
            ("vocab_size", self.vocab_size <= 2**16, "at most 65536: tokens are uint16"),
            ("warmdown_frac", self.warmdown_frac <= 1, "at most 1"),
            ("model_dim", self.model_dim % (2 * heads) == 0,
             f"an even multiple of NUM_HEADS={heads}: rotary turns pairs"),
            ("num_heads", heads % kv_heads == 0, f"a multiple of NUM_KV_HEADS={kv_heads}"),
            ("train_batch_tokens", self.train_batch_tokens % least == 0, f"a multiple of {units}"),
            ("val_batch_size", self.val_batch_size >= least, f"at least {units}"),
            ("eval_stride", self.eval_stride <= T, f"at most TRAIN_SEQ_LEN={T}"),
            ("max_val_tokens", not 0 < self.max_val_tokens < T, f"0 or at least TRAIN_SEQ_LEN={T}"),
        ]
        return [f"{name.upper()}={getattr(self, name)!r} must be {what}"
                for name, right, what in rules if not right]

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

    def gather(self, value: Any) -> list[Any]:
        """The Python values of all ranks, in their order, on every rank."""
        if not self.distributed:
            return [value]
        values = [value] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def agree(self, elapsed_ms: float, signum: int) -> tuple[float, int]:
        """Rank 0's clock and any rank's signal or 0, by way of the CPU: no device is waited for."""
        box = torch.tensor([elapsed_ms if self.rank == 0 else 0, signum], dtype=torch.float64)
        if self.distributed:
            dist.all_reduce(box, dist.ReduceOp.MAX)
        return box[0].item(), int(box[1])

    def together(self, action: Callable[..., Any], *args: Any) -> Any:
        """action(*args) on every rank. A user's error on one of them is raised on all, "shared"."""
        result = error = None
        try:
            result = action(*args)
        except (InputError, OSError) as caught:
            error = caught
        if errors := [e for e in self.gather(error) if e is not None]:
            errors[0].shared = self.distributed
            raise errors[0]
        return result

    def on_rank_0(self, action: Callable[..., Any], *args: Any) -> Any:
        """action(*args) on rank 0; its value, or its error, on every rank."""
        box = [self.together(action, *args) if self.rank == 0 else self.together(bool)]
        if self.distributed:
            dist.broadcast_object_list(box, src=0)
        return box[0]

def read_topology(environ: Mapping[str, str], slots: int) -> tuple[int, int, int, bool]:
    """(rank, world size, local rank, distributed) as torchrun sets them. Raises InputError."""
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    rank, world_size, local_rank = (parse_knob(name, environ.get(name, default), int)
                                    for name, default in defaults.items())
    fitting = ", ".join(str(n) for n in range(1, slots + 1) if slots % n == 0)
    require(world_size > 0 and slots % world_size == 0,
            f"WORLD_SIZE={world_size} must divide BATCH_SLOTS={slots}: launch {fitting} processes, "
            "or set BATCH_SLOTS to a multiple of WORLD_SIZE")
    if not ("RANK" in environ and "WORLD_SIZE" in environ):
        return 0, 1, 0, False
    require(0 <= rank < world_size, f"RANK={rank} must be from 0 to WORLD_SIZE-1={world_size - 1}")
    return rank, world_size, local_rank, True

def open_runtime(hp: Hyperparameters, environ: Mapping[str, str]) -> Runtime:
    """Open the device and, under torchrun, the process group. Raises InputError if it cannot."""
    rank, world_size, local_rank, distributed = read_topology(environ, hp.batch_slots)
    num_gpus = torch.cuda.device_count()
    if hp.device == "cpu" or (hp.device == "auto" and num_gpus == 0):
        device, backend = torch.device("cpu"), "gloo"
        # Share out the cores. torchrun sets 1 thread where none is set: 1 counts as unset.
        processes = parse_knob("LOCAL_WORLD_SIZE", environ.get("LOCAL_WORLD_SIZE", "1"), int)
        if processes > 1 and environ.get("OMP_NUM_THREADS", "1") == "1":
            cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
            torch.set_num_threads(max(cores // processes, 1))
        # Without these, bf16 is several times slower than fp32.
        fast_bf16 = any(map(torch.cpu.get_capabilities().get, ("amx_bf16", "avx512_bf16")))
    else:
        require(num_gpus > 0, "DEVICE='cuda', but torch sees no GPU here: set DEVICE=cpu, or "
                "install a driver and a CUDA build of torch")
        require(local_rank < num_gpus, f"LOCAL_RANK={local_rank}, but torch sees {num_gpus} GPUs "
                f"here: set --nproc_per_node={num_gpus} at most")
        # gloo carries what lies on the CPU, so that the clock never waits for a GPU.
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
        fast_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has other names for what 2.11 has
    torch.backends.cuda.matmul.allow_tf32 = True
    if distributed:
        # torchrun may keep its store over restarts: what earlier ranks wrote is not for these.
        store, _, _ = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        dist.barrier()
    bf16 = fast_bf16 if hp.dtype == "auto" else hp.dtype == "bf16"
    dtype = torch.bfloat16 if bf16 else torch.float32
    return Runtime(rank, world_size, local_rank, distributed, device, dtype)

class StopRequest(threading.Event):
    """Set by the first SIGTERM or SIGINT, granted after the step in hand; the second one kills."""
    signal = 0  # the number of the first one

    def listen(self, distributed: bool) -> None:
        """From now on, signals come here. Call it in the main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)  # gets the number, even while the main thread is in C++
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self.watch, args=(reader, distributed), daemon=True).start()

    def watch(self, pipe: int, distributed: bool) -> None:
        """Wait for the first signal, and then for the second. As one of several ranks not for
        long: the others may be gone, so that no step ends, and torchrun kills after 30 seconds."""
        self.signal, first = os.read(pipe, 1)[0], time.monotonic()
        self.set()
        while select.select([pipe], [], [], 25 if distributed else None)[0]:
            os.read(pipe, 1)
            if time.monotonic() - first > 1:  # sooner it is torchrun's copy of a Ctrl-C
                break
        os._exit(128 + self.signal)

def leave(code: int, runtime: Runtime | None = None) -> NoReturn:
    """End the process; with a runtime, when all ranks have come here. One of several ranks does not
    leave through the interpreter's own exit, which may hang, or abort, in gloo's threads."""
    if runtime is not None and runtime.distributed:
        dist.barrier()
        dist.destroy_process_group()
    print(end="", flush=True)
    if "RANK" in os.environ:
        os._exit(code)
    sys.exit(code)

def leave_after_error(error: Exception, environ: Mapping[str, str], stop: StopRequest) -> NoReturn:
    """Report an error and leave with exit code 1, without waiting for a rank that may not come.
    A user's error is its message alone, from rank 0; anything else is a traceback from its rank."""
    shared, is_rank_0 = getattr(error, "shared", False), environ.get("RANK", "0") == "0"
    text = "".join(traceback.format_exception(error)).rstrip()
    # What a rank without a peer says is an echo of the peer's error.
    waits = isinstance(error, dist.DistError) or "gloo" in str(error)
    if isinstance(error, InputError | OSError):
        kind = "ValueError" if isinstance(error, InputError) else type(error).__name__
        text, waits = f"{kind}: {error}", not is_rank_0
    if is_rank_0 or not shared:
        # torchrun ends all ranks when one leaves: the cause of it all is reported first.
        if waits and stop.wait(10):
            leave(128 + stop.signal)
        print("\x1b[K" * os.isatty(2) + text, file=sys.stderr)  # over the status
        if file := environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun repeats it as its last words
            extra = {"timestamp": str(int(time.time()))}
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
    if shared:
        dist.barrier()
    leave(1)

ATTENTION_BACKENDS = ("cudnn", "flash", "mem_efficient", "math")  # in the order they are tried

def choose_attention(gpt: nn.Module, hp: Hyperparameters, runtime: Runtime) -> None:
    """Leave one attention backend enabled, the fastest that runs gpt's attention here, and tell gpt
    whether it takes grouped queries: otherwise keys and values must be repeated for them.
    cuDNN leads on Hopper (sm_90); on Blackwell it has returned wrong numbers without an error."""
    H, K, width = hp.num_heads, hp.num_kv_heads, hp.model_dim // hp.num_heads
    hopper = runtime.device.type == "cuda" and torch.cuda.get_device_capability()[0] == 9
    for chosen in ATTENTION_BACKENDS if hopper else ATTENTION_BACKENDS[1:]:
        for name in ATTENTION_BACKENDS:
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(name == chosen)
        takes_groups = chosen != "mem_efficient"
        qkv = torch.ones(1, hp.train_seq_len, H + 2 * K, width, device=runtime.device,
                         dtype=runtime.dtype, requires_grad=True)
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells why each backend cannot
            attend(*qkv.split((H, K, K), dim=2), takes_groups).sum().backward()
            break
    for block in gpt.blocks:
        block.attn.takes_groups = takes_groups

def attend(q: Tensor, k: Tensor, v: Tensor, takes_groups: bool) -> Tensor:
    """Causal attention of q (B, T, H, h) to k and v (B, T, K, h): (B, T, H, h)."""
    group = q.size(2) // k.size(2)
    if not takes_groups:
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) > k.size(1))
    return y.transpose(1, 2)

class Log:
    """Rank 0's lines, on the console and in OUTPUT_DIR/logs/RUN_ID.txt, and its curves; other ranks
    are silent. Raises InputError, on rank 0, if the file cannot be written."""
    file = curves = None
    status = ""  # what a terminal shows below the last line, until the next one

    def __init__(self, hp: Hyperparameters, runtime: Runtime) -> None:
        self.on_terminal, self.lock = os.isatty(1), threading.Lock()
        if runtime.rank != 0:
            return
        path = Path(hp.output_dir) / "logs" / f"{hp.run_id}.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=hp.output_dir).close()  # the model's files come much later
            if hp.tensorboard and not hp.eval_only:
                from torch.utils.tensorboard import SummaryWriter
                self.curves = SummaryWriter(Path(hp.output_dir) / "tensorboard" / hp.run_id)
            self.file = open(path, "a", encoding="utf-8", buffering=1)
            self.file.write(f"{Path(__file__).read_text(encoding='utf-8')}\nPython {sys.version}\n"
                            f"PyTorch {torch.__version__}\n{subprocess.getoutput('nvidia-smi')}\n")
        except OSError as error:
            raise InputError(f"OUTPUT_DIR={hp.output_dir!r} must be writable: {error}") from None
        except ImportError:
            raise InputError("TENSORBOARD=1 needs a package: pip install tensorboard") from None
        self(str(path))
        if self.on_terminal:
            threading.Thread(target=self.show_status, daemon=True).start()

    def __call__(self, line: str, step: int = 0, **curves: float) -> None:
        if self.file is not None:
            # A lost terminal or a full disk costs lines and curves, not the run.
            with self.lock, contextlib.suppress(OSError, UnicodeError):
                clear, self.status = "\x1b[K" * bool(self.on_terminal and self.status), ""
                print(clear + line, flush=True)
            with contextlib.suppress(OSError):
                self.file.write(line + "\n")
                for name, value in curves.items() if self.curves is not None else ():
                    self.curves.add_scalar(name, value, step)
                    self.curves.flush()

    def show_status(self) -> None:
        """For ever. A sign turns beside it, which is all that moves during a long step."""
        while True:
            time.sleep(0.25)
            with self.lock, contextlib.suppress(OSError):
                if self.status:
                    text = self.status[: (os.get_terminal_size().columns or 80) - 3]
                    sign = "|/-\\"[int(4 * time.monotonic()) % 4]
                    print(f"\x1b[K{text} {sign}", end="\r", flush=True)

def require_finite(what: str, value: float, step: int) -> None:
    """Raise InputError unless value, which all ranks know, is a finite number."""
    require(math.isfinite(value), f"step:{step} the {what} is {value}: go back to the last "
            "checkpoint, if there is one, with lower learning rates or with GRAD_CLIP_NORM")

# ---- Data ----------------------------------------------------------------------------------------
SHARD_MAGIC, SHARD_VERSION = 20240520, 1
SHARD_HEADER_BYTES = 1024  # 256 little-endian int32: magic, version, token count, zeros
WAYS_TO_DATA = """\
  download FineWeb:    python3 data/cached_challenge_fineweb.py --variant sp1024
  or run the demo:     PRESET=demo python train_gpt.py"""

def find_shards(pattern: str) -> list[Path]:
    """The files that match a glob pattern, by name. Raises FileNotFoundError if there are none."""
    if paths := sorted(glob.glob(pattern)):
        return [Path(path) for path in paths]
    raise FileNotFoundError(f"DATA_PATH has no {pattern}\n{WAYS_TO_DATA}")

def load_data_shard(path: str | Path) -> Tensor:
    """The tokens of a shard, a uint16 tensor (n,), mapped into memory rather than read; writing to
    it leaves the file alone. Raises InputError naming the file for a wrong header or size."""
    header, size = np.fromfile(path, "<i4", SHARD_HEADER_BYTES // 4), os.path.getsize(path)
    magic, version, num_tokens, *_ = [*header.tolist(), 0, 0, 0]
    expected = SHARD_HEADER_BYTES + 2 * num_tokens
    require((magic, version) == (SHARD_MAGIC, SHARD_VERSION), f"{path}: no token shard (magic "
            f"{magic}, version {version}, not {SHARD_MAGIC}, {SHARD_VERSION}): get the file again")
    require(size == expected >= SHARD_HEADER_BYTES, f"{path}: {size} bytes, but its header "
            f"promises {num_tokens} tokens in {expected} bytes: get the file again")
    words = torch.from_file(str(path), shared=False, size=size // 2, dtype=torch.uint16)
    return words[SHARD_HEADER_BYTES // 2 :]

class TokenStream:
    """The tokens of all shards that match a pattern, in the order of their names, for ever. Raises
    FileNotFoundError without shards, InputError for bad ones and, in take, for bad token ids."""
    def __init__(self, pattern: str, vocab_size: int = 2**16) -> None:
        self.paths, self.vocab_size = find_shards(pattern), vocab_size
        self.shards = [load_data_shard(path) for path in self.paths]
        self.shard = self.position = 0  # the next token is number `position` of number `shard`
        require(any(map(len, self.shards)), f"{pattern}: the shards hold no tokens: get them again")

    def take(self, n: int) -> Tensor:
        """The next n tokens, a uint16 tensor (n,)."""
        parts = [torch.empty(0, dtype=torch.uint16)]
        while n > 0:
            part = self.shards[self.shard][self.position : self.position + n]
            wrong = part.numpy() >= self.vocab_size
            if wrong.any():
                bad = wrong.argmax()
                raise InputError(f"{self.paths[self.shard]}: token id {part[bad]} at position "
                                 f"{self.position + bad} is not below VOCAB_SIZE="
                                 f"{self.vocab_size}: set that of the tokenizer of this data")
            parts.append(part)
            n -= len(part)
            self.position += len(part)
            if self.position == len(self.shards[self.shard]):
                self.shard, self.position = (self.shard + 1) % len(self.shards), 0
        return torch.cat(parts)

class DistributedTokenLoader:
    """Deals one token stream out to the ranks in disjoint spans, the same for every world size.
    Each walks all of it and keeps its own. The next batch is already on its way to the device."""
    def __init__(self, pattern: str, rank: int, world_size: int, device: torch.device | str,
                 vocab_size: int = 2**16) -> None:
        self.stream = TokenStream(pattern, vocab_size)
        self.rank, self.world_size, self.device = rank, world_size, torch.device(device)
        self.position = (0, 0)  # shard, and token in it, at which the next batch begins
        self.ahead: Tensor | None = None  # the next batch, if it is as long as the last one
        self.waited = 0.0  # seconds spent in next_batch

    def next_batch(self, global_tokens: int, seq_len: int,
                   grad_accum_steps: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 (B, T) each, of this rank's next micro-step. global_tokens: of
        the optimizer step. Raises InputError if a micro-step's share is not whole sequences."""
        started = time.perf_counter()
        slots = self.world_size * grad_accum_steps
        local = global_tokens // slots
        require(local > 0 and local % seq_len == 0, f"TRAIN_BATCH_TOKENS={global_tokens} must be "
                f"a multiple of {slots} slots * TRAIN_SEQ_LEN={seq_len}")
        if self.ahead is None or len(self.ahead) != local + 1:
            self.stream.shard, self.stream.position = self.position
            self.ahead = self.upload(local + 1)
        tokens = self.ahead.to(torch.int64)
        self.position = self.stream.shard, self.stream.position
        self.ahead = self.upload(local + 1)
        self.waited += time.perf_counter() - started
        return tokens[:-1].view(-1, seq_len), tokens[1:].view(-1, seq_len)

    def upload(self, span: int) -> Tensor:
        """This rank's next span tokens, uint16, perhaps still on their way to the device."""
        tokens = self.stream.take(self.world_size * span).view(-1, span)[self.rank]
        if self.device.type == "cuda":
            tokens = tokens.pin_memory()  # so that the copy does not wait for the GPU
        return tokens.to(self.device, non_blocking=True)

def dataset_fingerprint(hp: Hyperparameters) -> dict[str, Any]:
    """Each shard's size and sha256 of its header, first and last MiB; the tokenizer's sha256."""
    prints = {"tokenizer": hashlib.sha256(Path(hp.tokenizer_path).read_bytes()).hexdigest()}
    for path in find_shards(hp.train_files) + find_shards(hp.val_files):
        data = np.memmap(path, mode="r")
        ends = bytes(data[: SHARD_HEADER_BYTES + 2**20]) + bytes(data[-(2**20) :])
        prints[path.name] = [len(data), hashlib.sha256(ends).hexdigest()]
    return prints

# ---- Model ---------------------------------------------------------------------------------------
def is_control_tensor(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a parameter's full name holds one of the patterns."""
    return any(pattern in name for pattern in patterns)

def rms_norm(x: Tensor) -> Tensor:
    """RMSNorm of the last dimension, without a weight, in x's dtype."""
    return F.rms_norm(x, (x.size(-1),))

def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., in) times the transpose of weight (out, in), which is cast to x's dtype."""
    return F.linear(x, weight.to(x.dtype))

def rotary_tables(seq_len: int, head_width: int, base: float) -> Tensor:
    """cos and sin of the angles t * base**(-2j/h): RoPE (Su et al., 2021), (2, T, h/2). The angles
    need fp32: in bf16 most positions beyond 256 equal a neighbour."""
    frequencies = base ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()))

def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[j], x[j + h/2]) of x (B, T, heads, h) by cos and sin (T, 1, h/2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)

class CausalSelfAttention(nn.Module):
    """Grouped-query attention; queries and keys are normed and rotated, queries scaled per head."""
    def __init__(self, hp: Hyperparameters) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = hp.num_heads, hp.num_kv_heads
        self.takes_groups = True  # see choose_attention
        D, kv_dim = hp.model_dim, hp.model_dim // hp.num_heads * hp.num_kv_heads
        self.c_q = nn.Linear(D, D, bias=False)
        self.c_k = nn.Linear(D, kv_dim, bias=False)
        self.c_v = nn.Linear(D, kv_dim, bias=False)
        self.proj = nn.Linear(D, D, bias=False)
        self.q_gain = nn.Parameter(torch.full((hp.num_heads,), hp.qk_gain_init))

    def forward(self, x: Tensor, scale: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D), times scale (D,): folded into the weight, which is smaller."""
        B, T, D = x.shape
        H, K = self.num_heads, self.num_kv_heads
        # One product instead of three. The parameters stay three: Muon takes them one by one.
        weight = torch.cat((self.c_q.weight, self.c_k.weight, self.c_v.weight))
        qk, v = linear(x, weight).view(B, T, H + 2 * K, D // H).split((H + K, K), dim=2)
        q, k = apply_rotary(rms_norm(qk), cos, sin).split((H, K), dim=2)
        q = q * self.q_gain.to(x.dtype)[:, None]
        y = attend(q, k, v, self.takes_groups).reshape(B, T, D)
        return linear(y, scale[:, None] * self.proj.weight)

class MLP(nn.Module):
    """Two linear layers around a squared ReLU (Primer, So et al., 2021)."""
    def __init__(self, hp: Hyperparameters) -> None:
        super().__init__()
        self.fc = nn.Linear(hp.model_dim, hp.mlp_mult * hp.model_dim, bias=False)
        self.proj = nn.Linear(hp.mlp_mult * hp.model_dim, hp.model_dim, bias=False)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D), times scale (D,), as in CausalSelfAttention."""
        hidden = F.relu(linear(x, self.fc.weight)).square()
        return linear(hidden, scale[:, None] * self.proj.weight)

class Block(nn.Module):
    """One layer: mixes the embedding back in, then adds attention, then the MLP."""
    def __init__(self, hp: Hyperparameters) -> None:
        super().__init__()
        self.attn, self.mlp = CausalSelfAttention(hp), MLP(hp)
        self.attn_scale = nn.Parameter(torch.ones(hp.model_dim))
        self.mlp_scale = nn.Parameter(torch.ones(hp.model_dim))
        self.resid_mix = nn.Parameter(torch.tensor([[1.0], [0.0]]).repeat(1, hp.model_dim))

    def forward(self, x: Tensor, x0: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x, and x0, the normed embedding: (B, T, D) -> (B, T, D)."""
        keep, renew = self.resid_mix.to(x.dtype)
        x = keep * x + renew * x0
        x = x + self.attn(rms_norm(x), self.attn_scale, cos, sin)
        return x + self.mlp(rms_norm(x), self.mlp_scale)

class GPT(nn.Module):
    """A decoder whose later layers add what the earlier ones left on a stack (as in a U-Net).
    dtype: of the activations and of the embedding. Construct on the CPU: the weights then follow
    from torch's seed alone, the layers being constructed in the order of their random draws."""
    def __init__(self, hp: Hyperparameters, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.hp, self.dtype = hp, dtype
        D, V, early = hp.model_dim, hp.vocab_size, hp.num_layers // 2
        self.num_early = early  # layers that push; as many later ones pop
        self.tok_emb = nn.Embedding(V, D)
        # A gradient of nothing, without early layers, is one that DDP would wait for.
        self.skip_weights = nn.Parameter(torch.ones(early, D), requires_grad=early > 0)
        self.blocks = nn.ModuleList(Block(hp) for _ in range(hp.num_layers))
        self.lm_head = None if hp.tie_embeddings else nn.Linear(D, V, bias=False)
        tables = rotary_tables(hp.train_seq_len, D // hp.num_heads, hp.rope_base)
        self.register_buffer("rotary", tables, persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """What comes after torch's own initialization: zeros at every way out, matrices on bf16
        values, so that the first step does not depend on who rounds them later."""
        if self.lm_head is None:
            self.tok_emb.weight.normal_(std=self.hp.tied_embed_init_std)
        patterns = self.hp.control_tensor_name_patterns
        for name, param in self.named_parameters():
            if name.endswith(("proj.weight", "lm_head.weight")):
                param.zero_()
            elif param.ndim >= 2 and not is_control_tensor(name, patterns):
                param.copy_(param.bfloat16())
        if not is_control_tensor("tok_emb.weight", patterns):
            self.tok_emb.to(self.dtype)

    def forward(self, input_ids: Tensor, target_ids: Tensor, reduction: str = "mean") -> Tensor:
        """Cross-entropy in nats (fp32) of target_ids given input_ids, both (B, T): the mean or,
        with reduction "none", each target's (B, T)."""
        losses = F.cross_entropy(self.logits(input_ids), target_ids.flatten(), reduction=reduction)
        return losses.view_as(target_ids) if reduction == "none" else losses

    def logits(self, input_ids: Tensor) -> Tensor:
        """What comes after each of input_ids (B, T): fp32 (B*T, V). Raises InputError if T is above
        TRAIN_SEQ_LEN, where the rotary tables end."""
        T, longest = input_ids.size(1), self.rotary.size(1)
        require(T <= longest, f"{T} tokens in a sequence, but TRAIN_SEQ_LEN={longest}")
        cos, sin = self.rotary[:, :T, None].to(self.dtype)
        x = x0 = rms_norm(self.tok_emb(input_ids).to(self.dtype))  # (B, T, D)
        skips = []
        for i, block in enumerate(self.blocks):
            if i >= self.num_early and skips:
                x = x + self.skip_weights[i - self.num_early].to(x.dtype) * skips.pop()
            if self.hp.activation_checkpoint and torch.is_grad_enabled():
                x = torch.utils.checkpoint.checkpoint(block, x, x0, cos, sin, use_reentrant=False)
            else:
                x = block(x, x0, cos, sin)
            if i < self.num_early:
                skips.append(x)
        head = self.tok_emb if self.lm_head is None else self.lm_head
        logits = linear(rms_norm(x).flatten(0, 1), head.weight)  # (B*T, V)
        return (self.hp.logit_softcap * torch.tanh(logits / self.hp.logit_softcap)).float()

# ---- Optimizers ----------------------------------------------------------------------------------
def newton_schulz(stack: Tensor, steps: int) -> Tensor:
    """Bring all singular values of each wide matrix in stack (n, rows, columns) near 1, by the
    quintic iteration of Muon (Keller Jordan, 2024), in stack's dtype."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = stack / (torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x

def orthogonalize(matrices: list[Tensor], steps: int,
                  chain: Callable = newton_schulz) -> list[Tensor]:
    """Newton-Schulz of each matrix, one chain for a shape, times sqrt(max(1, rows / columns))."""
    wide = [m.mT if m.size(0) > m.size(1) else m for m in matrices]
    results = list(matrices)
    for shape in {matrix.shape for matrix in wide}:
        members = [i for i, matrix in enumerate(wide) if matrix.shape == shape]
        for i, update in zip(members, chain(torch.stack([wide[i] for i in members]), steps)):
            rows, columns = matrices[i].shape
            results[i] = update.mT * math.sqrt(rows / columns) if rows > columns else update
    return results

class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalized (Keller Jordan, 2024), for matrices. Each rank holds the
    momentum of its share of them; one collective exchanges all updates, in `dtype`."""
    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float, backend_steps: int,
                 dtype: torch.dtype = torch.bfloat16, chain: Callable = newton_schulz) -> None:
        super().__init__(params, dict(lr=lr, base_lr=lr, name="matrix", momentum=momentum,
                                      backend_steps=backend_steps))
        self.dtype, self.chain = dtype, chain
        ready = dist.is_initialized()
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter from its gradient."""
        for group in self.param_groups:
            shares = self.shares(group["params"])
            sizes = [sum(p.numel() for p in share) for share in shares]
            flat = self.updates(shares[self.rank], group)
            if self.world_size > 1:  # the parts of all ranks, padded to one length
                parts = flat.new_empty(self.world_size * max(sizes))
                dist.all_gather_into_tensor(parts, F.pad(flat, (0, max(sizes) - len(flat))))
                rows = parts.view(self.world_size, -1)
                flat = torch.cat([row[:size] for row, size in zip(rows, sizes)])
            params = [p for share in shares for p in share]
            parts = flat.float().split([p.numel() for p in params])
            updates = [part.view_as(p) for part, p in zip(parts, params)]
            torch._foreach_add_(params, updates, alpha=-group["lr"])

    def shares(self, params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """The parameters that each rank orthogonalizes: number i is for rank i mod W."""
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
        updates = orthogonalize(matrices, group["backend_steps"], self.chain)
        return torch.cat([update.flatten() for update in updates])

def parameter_groups(model: nn.Module, hp: Hyperparameters) -> dict[str, list[nn.Parameter]]:
    """The table that sends each parameter of a GPT to exactly one group of one optimizer."""
    groups: dict[str, list[nn.Parameter]] = {"embed": [], "head": [], "matrix": [], "scalar": []}
    outside = {"tok_emb.weight": "embed", "lm_head.weight": "head", "skip_weights": "scalar"}
    for name, param in model.named_parameters():
        group = outside.get(name)
        if name.startswith("blocks."):
            control = is_control_tensor(name, hp.control_tensor_name_patterns)
            group = "matrix" if param.ndim == 2 and not control else "scalar"
        assert group, f"{name} is in no optimizer: send it to a group here"
        groups[group].append(param)
    return groups

def build_optimizers(model: nn.Module, hp: Hyperparameters, dtype: torch.dtype,
                     chain: Callable = newton_schulz) -> list[torch.optim.Optimizer]:
    """Adam and Muon for all parameters of a GPT. Each group remembers its full rate, "base_lr"."""
    groups = parameter_groups(model, hp)
    rates = {"embed": hp.tied_embed_lr if hp.tie_embeddings else hp.embed_lr,
             "head": hp.head_lr, "scalar": hp.scalar_lr}
    adam_groups = [dict(params=groups[name], lr=lr, base_lr=lr, name=name)
                   for name, lr in rates.items() if groups[name]]
    adam = torch.optim.Adam(adam_groups, betas=(hp.beta1, hp.beta2), eps=hp.adam_eps, fused=True)
    if not groups["matrix"]:
        return [adam]
    return [adam, Muon(groups["matrix"], hp.matrix_lr, hp.muon_momentum, hp.muon_backend_steps,
                       dtype, chain)]

# ---- Schedules -----------------------------------------------------------------------------------
def lr_factor(hp: Hyperparameters, step: int, elapsed_ms: float) -> float:
    """What scales all learning rates at step (from 0), elapsed_ms into the training time: 1, then
    straight down to 0. With WARMDOWN_FRAC over that part of the run, in steps or in time, whatever
    ends first; else over WARMDOWN_ITERS steps, under a cap over their time at the average speed."""
    cap_ms = 1000 * hp.max_wallclock_seconds
    remaining_ms, remaining_steps = max(cap_ms - elapsed_ms, 0.0), max(hp.iterations - step, 0)
    if hp.warmdown_frac > 0:
        in_time = remaining_ms / cap_ms if cap_ms > 0 else 1.0
        in_steps = remaining_steps / max(hp.iterations, 1)
        return min(in_time / hp.warmdown_frac, in_steps / hp.warmdown_frac, 1.0)
    if hp.warmdown_iters > 0 and cap_ms == 0:
        return min(remaining_steps / hp.warmdown_iters, 1.0)
    warmdown_ms = max(hp.warmdown_iters, 0) * elapsed_ms / max(step, 1)
    return 1.0 if remaining_ms >= warmdown_ms else remaining_ms / warmdown_ms

def muon_momentum(hp: Hyperparameters, step: int) -> float:
    """Muon's momentum at step (from 0): a straight line, then MUON_MOMENTUM."""
    warmup = hp.muon_momentum_warmup_steps
    done = min(step, warmup) / warmup if warmup > 0 else 1.0
    return (1 - done) * hp.muon_momentum_warmup_start + done * hp.muon_momentum

def set_schedule(optimizers: list[torch.optim.Optimizer], factor: float, momentum: float) -> None:
    """Set every learning rate to `factor` times its full value, and Muon's momentum."""
    for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
        group["lr"] = factor * group["base_lr"]
        group["momentum"] = momentum  # Adam has no use for it

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
    """The byte counts of the SentencePiece model at TOKENIZER_PATH. Raises FileNotFoundError, or
    InputError if it is no such model, not of VOCAB_SIZE, or miscounts spaces."""
    knob = f"TOKENIZER_PATH={hp.tokenizer_path!r}"
    if not os.path.isfile(hp.tokenizer_path):
        raise FileNotFoundError(f"{knob} does not exist\n{WAYS_TO_DATA}")
    try:
        sp = sentencepiece.SentencePieceProcessor(model_file=hp.tokenizer_path)
    except (OSError, RuntimeError) as error:
        raise InputError(f"{knob} must be a SentencePiece .model file: {error}") from None
    size, space = sp.vocab_size(), "\u2581"  # as SentencePiece writes it
    require(size == hp.vocab_size, f"{knob} has {size} pieces: set VOCAB_SIZE={size}, not "
            f"{hp.vocab_size}, or name another tokenizer")
    require(not sp.IsUnknown(sp.PieceToId(space)), f"{knob} has no piece for a lone space "
            "(U+2581), so that bytes would be counted wrongly: train it with that piece")
    no_text = [sp.IsControl(i) or sp.IsUnknown(i) or sp.IsUnused(i) for i in range(size)]
    pieces = ["" if no_text[i] else sp.IdToPiece(i) for i in range(size)]
    length = [1 if sp.IsByte(i) else len(piece.removeprefix(space).encode())
              for i, piece in enumerate(pieces)]
    leading_space = [piece.startswith(space) for piece in pieces]
    return TokenBytes(np.array(length), np.array(leading_space), np.array(no_text))

@dataclass(frozen=True)
class Validation:
    """The validation split, cut to whole sequences and the last target."""
    tokens: Tensor  # uint16 (n * T + 1,)
    num_bytes: int  # of text in tokens[1:]
    partial: str = ""  # behind every figure, if MAX_VAL_TOKENS has cut it further

    @classmethod
    def load(cls, hp: Hyperparameters, token_bytes: TokenBytes) -> "Validation":
        """All validation shards. Raises InputError if they hold less than one sequence."""
        T, stream = hp.train_seq_len, TokenStream(hp.val_files, hp.vocab_size)
        tokens = stream.take(sum(map(len, stream.shards)))
        whole = (len(tokens) - 1) // T  # sequences
        require(whole > 0, f"DATA_PATH={hp.data_path!r}: {len(tokens)} validation tokens make no "
                f"sequence of TRAIN_SEQ_LEN={T} and its last target")
        kept = min(hp.max_val_tokens // T, whole) if hp.max_val_tokens > 0 else whole
        tokens = tokens[: kept * T + 1]
        partial = f" partial:{kept}/{whole}" if kept < whole else ""
        return cls(tokens, token_bytes.count(tokens.numpy()), partial)

    def bits_per_byte(self, loss: float) -> float:
        """loss: mean nats per target token."""
        return loss / math.log(2) * (len(self.tokens) - 1) / self.num_bytes

@torch.no_grad()
def evaluate(model: nn.Module, tokens: Tensor, hp: Hyperparameters, runtime: Runtime,
             stride: int = 0, log: Log | None = None) -> float:
    """Mean cross-entropy in nats of tokens[1:], uint16 (n * T + 1,), on every rank, each of which
    scores a part of the windows. They stand side by side or, with a stride, begin so many tokens
    apart: the first window that holds a target scores it, behind at least T - stride tokens."""
    T, num_targets, W = hp.train_seq_len, len(tokens) - 1, runtime.world_size
    begins = torch.tensor([*range(0, num_targets - T, stride or T), num_targets - T])
    fresh = begins.diff(prepend=torch.tensor([-T]))  # targets not scored before
    first, last = len(begins) * runtime.rank // W, len(begins) * (runtime.rank + 1) // W
    batch = hp.val_batch_size // hp.batch_slots // T  # windows in a forward pass
    total = torch.zeros((), dtype=torch.float64, device=runtime.device)
    for i in range(first, last, batch):
        if log is not None:
            log.status = f"validation: {(i - first) / (last - first):.0%}"
        part = slice(i, min(i + batch, last))
        windows = tokens.unfold(0, T + 1, 1)[begins[part]].to(runtime.device, torch.int64)
        inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        scored = torch.arange(T) >= T - fresh[part, None]
        total += (model(inputs, targets, "none") * scored.to(runtime.device)).sum(dtype=total.dtype)
    return sum(runtime.gather(total.item())) / num_targets

@torch.no_grad()
def sample(gpt: GPT, hp: Hyperparameters) -> str:
    """SAMPLE_PROMPT and what the model writes behind it, up to the end of a document."""
    sp = sentencepiece.SentencePieceProcessor(model_file=hp.tokenizer_path)
    generator, ends = torch.Generator().manual_seed(hp.seed), (sp.bos_id(), sp.eos_id())
    ids = [i for i in (sp.bos_id(), *sp.encode(hp.sample_prompt)) if i >= 0]  # -1: there is none
    for _ in range(hp.sample_tokens):
        window = torch.tensor([ids[-hp.train_seq_len :]], device=gpt.rotary.device)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # of any length
            logits = gpt.logits(window)[-1].cpu()
        odds = F.softmax(logits / max(hp.sample_temperature, 1e-6), dim=0)
        drawn = torch.multinomial(odds, 1, generator=generator)
        ids.append(int(drawn if hp.sample_temperature > 0 else logits.argmax()))
        if ids[-1] in ends:
            break
    return sp.decode(ids)

# ---- Export --------------------------------------------------------------------------------------
SIZE_LIMIT = 16_000_000  # bytes of artifact and code together
INT8_KEEP_FLOAT_MAX_NUMEL = 65_536  # quantizing smaller tensors gains nothing
INT8_CLIP_QUANTILE = 0.9999984

def abs_quantile(rows: Tensor, q: float) -> Tensor:
    """The q quantile of |row|, linearly interpolated, of each row of rows (n, m): fp32 (n,). Equals
    torch.quantile, but selects the few largest values instead of sorting all of them."""
    m = rows.size(1)
    weight, below = math.modf(np.float32(q) * np.float32(m - 1))  # in fp32, as in torch.quantile
    largest = rows.abs().topk(m - int(below), dim=1).values
    return torch.lerp(largest[:, -1], largest[:, -2:][:, 0], weight)

def quantize_tensor(weight: Tensor, scale_floor: float) -> tuple[Tensor, Tensor]:
    """weight as int8, and the scale: of each row of a matrix in fp16, else of the whole in fp32."""
    is_matrix = weight.ndim == 2
    rows = (weight if is_matrix else weight.reshape(1, -1)).float()
    clip = abs_quantile(rows, INT8_CLIP_QUANTILE)[:, None]
    scale = (clip / 127).clamp_min(scale_floor if is_matrix else 0.0)
    scale = torch.where(scale > 0, scale, 1.0)
    values = (rows.clamp(-clip, clip) / scale).round().clamp(-127, 127).to(torch.int8)
    return values.view(weight.shape), scale[:, 0].half() if is_matrix else scale[0, 0]

def quantize_state_dict_int8(state_dict: Mapping[str, Tensor],
                             keep_patterns: tuple[str, ...] = CONTROL_TENSOR_NAME_PATTERNS,
                             scale_floor: float = 1 / 127) -> tuple[dict[str, Any], dict[str, int]]:
    """The object that an artifact holds, and the bytes of its tensors ("payload") and of the
    state_dict's ("baseline"). Large floating-point tensors become int8, small ones fp16, or fp32 if
    their name holds one of keep_patterns. Everything else stays as it is."""
    quantized, scales, dtypes, passthrough, qmeta, original_dtypes = {}, {}, {}, {}, {}, {}
    for name, tensor in state_dict.items():
        tensor = tensor.detach().cpu().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.is_floating_point() and tensor.numel() > INT8_KEEP_FLOAT_MAX_NUMEL:
            quantized[name], scales[name] = quantize_tensor(tensor, scale_floor)
            dtypes[name] = dtype
            if tensor.ndim == 2:
                qmeta[name] = {"scheme": "per_row", "axis": 0}
        elif tensor.is_floating_point() and is_control_tensor(name, keep_patterns):
            passthrough[name] = tensor.float()
        elif tensor.dtype in (torch.float32, torch.bfloat16):
            passthrough[name], original_dtypes[name] = tensor.half(), dtype
        else:
            passthrough[name] = tensor
    obj = {"__quant_format__": "int8_clean_per_row_v1", "quantized": quantized, "scales": scales,
           "dtypes": dtypes, "passthrough": passthrough}
    optional = {"qmeta": qmeta, "passthrough_orig_dtypes": original_dtypes}
    obj |= {key: value for key, value in optional.items() if value}
    payload = [*quantized.values(), *scales.values(), *passthrough.values()]
    return obj, {"payload": sum(tensor.nbytes for tensor in payload),
                 "baseline": sum(tensor.nbytes for tensor in state_dict.values())}

def dequantize_state_dict_int8(obj: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state_dict from an object of quantize_state_dict_int8, in the dtypes it remembers."""
    per_row, dtypes = obj.get("qmeta", {}), obj["dtypes"] | obj.get("passthrough_orig_dtypes", {})
    tensors = {name: tensor.clone() for name, tensor in obj["passthrough"].items()}
    for name, values in obj["quantized"].items():
        scale = obj["scales"][name].float()
        tensors[name] = values.float() * (scale[:, None] if name in per_row else scale)
    return {name: tensor.to(getattr(torch, dtypes[name])) if name in dtypes else tensor
            for name, tensor in tensors.items()}

def serialize(obj: Any) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()

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

def export(gpt: nn.Module, hp: Hyperparameters, log: Log) -> tuple[bytes, dict[str, int]]:
    """Write final_model.pt and final_model.int8.ptz. Returns the latter, read back, and sizes."""
    folder, code = Path(hp.output_dir), os.path.getsize(__file__)
    state_dict = {name: tensor.cpu() for name, tensor in gpt.state_dict().items()}
    plain = serialize(state_dict)
    write_file(folder / "final_model.pt", plain)
    log(f"Serialized model: {len(plain)} bytes")
    log(f"Code size: {code} bytes")
    log(f"Total submission size: {len(plain) + code} bytes")
    patterns = hp.int8_keep_float_fp32_name_patterns
    obj, stats = quantize_state_dict_int8(state_dict, patterns, hp.int8_scale_floor)
    raw, path = serialize(obj), folder / "final_model.int8.ptz"
    write_file(path, zlib.compress(raw, 9))
    artifact = path.read_bytes()
    total, ratio = len(artifact) + code, stats["baseline"] / stats["payload"]
    log(f"Serialized model int8+zlib: {len(artifact)} bytes "
        f"(payload:{stats['payload']} raw_torch:{len(raw)} payload_ratio:{ratio:.2f}x)")
    log(f"Total submission size int8+zlib: {total} bytes")
    left = SIZE_LIMIT - total
    log(f"size_check:{'fits' if left >= 0 else 'too_large'} limit:{SIZE_LIMIT} bytes_left:{left}")
    errors = {name: ((tensor.float() - state_dict[name].float()).norm()
                     / state_dict[name].float().norm().clamp_min(1e-30)).item()
              for name, tensor in dequantize_state_dict_int8(obj).items()}
    worst = sorted(errors, key=errors.get, reverse=True)[:5]
    log("int8_worst:" + " ".join(f"{name}={errors[name]:.4f}" for name in worst))
    return artifact, dict(model_bytes=len(plain), code_bytes=code, artifact_bytes=len(artifact),
                          total_bytes=total, bytes_left=left, fits=left >= 0)

def size_limit(gpt: nn.Module) -> int:
    """Bytes that no file of gpt's exceeds, unpacked: a checkpoint has three fp32 for a weight."""
    return 16 * sum(p.numel() for p in gpt.parameters()) + 2**24

def read_file(path: str | Path, gpt: nn.Module) -> bytes:
    """A model's file. Raises OSError, or InputError if it is too large to be gpt's."""
    require(os.path.getsize(path) <= size_limit(gpt),
            f"{path} is too large for this model: set the knobs of the model in the file")
    return Path(path).read_bytes()

def unpack(data: bytes, path: str | Path, limit: int) -> dict[str, Any]:
    """The dictionary that torch.save wrote, perhaps compressed by zlib, into the file at path.
    Nothing in it is run. Raises InputError if it is damaged or unpacks to more than limit bytes."""
    try:
        if not data.startswith(b"PK"):  # as the zip files of torch.save do
            inflate = zlib.decompressobj()
            data = inflate.decompress(data, limit)
            require(inflate.eof, "it is cut short, or too large when unpacked")
        unpacked = sum(entry.file_size for entry in zipfile.ZipFile(io.BytesIO(data)).infolist())
        require(unpacked <= limit, f"it is too large when unpacked: {unpacked} bytes")
        obj = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        require(isinstance(obj, dict), "it holds no dictionary")
        return obj
    except Exception as error:  # zlib, zipfile, pickle and torch each have their own
        reason = (str(error) or repr(error)).splitlines()[0]
        raise InputError(f"{path} is no model file, or is damaged: {reason}") from None

def load_weights(gpt: nn.Module, data: bytes, path: str | Path) -> None:
    """Give gpt the weights in the bytes of an artifact, a checkpoint or a plain state_dict. Raises
    InputError naming the first tensor of another shape."""
    obj = unpack(data, path, size_limit(gpt))
    try:
        obj = obj["model"] if "checkpoint_format" in obj else obj
        packed = "__quant_format__" in obj
        found, own = {**obj["quantized"], **obj["passthrough"]} if packed else obj, gpt.state_dict()
        for key in [*own, *found]:
            there, here = (tuple(d[key].shape) if key in d else "absent" for d in (found, own))
            require(there == here, f"{path}: {key} is {there} in the file and {here} in the model: "
                    "set the knobs of the model in the file")
        gpt.load_state_dict(dequantize_state_dict_int8(obj) if packed else obj)
    except Exception as error:  # of whatever else a foreign file may hold
        told = isinstance(error, InputError)
        raise InputError(str(error) if told else f"{path} is no model file: {error!r}") from None

# ---- Checkpoints ---------------------------------------------------------------------------------
CHECKPOINT_KEYS = {"checkpoint_format", "step", "random", "train_ms", "stream", "model",
                   "optimizers", "knobs", "dataset"}
# A run cannot go on with another model, or with other knobs than these were.
MODEL_KNOBS = ("vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads", "mlp_mult",
               "tie_embeddings", "rope_base", "logit_softcap", "train_seq_len",
               "control_tensor_name_patterns")

@dataclass
class Stopwatch:
    """Training time, without the pauses: the device's, not the host's, which runs ahead of it."""
    runtime: Runtime
    before_ms: float = 0.0  # until the last pause
    started: float | None = None  # in seconds; None while it stands still
    mark: Any = None  # behind the last step's work

    def start(self) -> None:
        self.started = time.perf_counter()

    def pause(self) -> None:
        self.runtime.synchronize()
        self.before_ms, self.started, self.mark = self.elapsed_ms(), None, None

    def lap(self) -> None:
        """Call after each step. Waits for the one before it: the host stays one step ahead, so that
        its clock follows the device and the device always has work."""
        previous, self.mark = self.mark, torch.get_device_module(self.runtime.device).Event()
        self.mark.record()
        if previous is not None:
            previous.synchronize()

    def elapsed_ms(self) -> float:
        since = 0.0 if self.started is None else time.perf_counter() - self.started
        return self.before_ms + 1000 * since

    def report(self, step: int) -> str:
        """The end of a log line: the time, and its average over the steps."""
        elapsed_ms = self.elapsed_ms()
        return f"train_time:{elapsed_ms:.0f}ms step_avg:{elapsed_ms / max(step, 1):.2f}ms"

@dataclass
class TrainingState:
    """All that a step changes, and its files, OUTPUT_DIR/checkpoints/RUN_ID, which are rank 0's."""
    hp: Hyperparameters
    runtime: Runtime
    log: Log
    gpt: GPT
    model: nn.Module  # gpt, compiled and wrapped
    optimizers: list[torch.optim.Optimizer]
    loader: DistributedTokenLoader
    stopwatch: Stopwatch
    step: int = 0  # steps done
    writer: threading.Thread | None = None  # of the last checkpoint
    folder = property(lambda self: Path(self.hp.output_dir) / "checkpoints" / self.hp.run_id)
    dataset = functools.cached_property(lambda self: dataset_fingerprint(self.hp))  # read once

    def snapshot(self) -> dict[str, Any]:
        """Copies on the CPU of all that a run needs to go on, with what the optimizers of all ranks
        hold by the names of the parameters, in types that torch.load takes without code."""
        names = {param: name for name, param in self.gpt.named_parameters()}
        held = {names[param]: {key: value.to("cpu", copy=True) for key, value in state.items()}
                for optimizer in self.optimizers for param, state in optimizer.state.items()}
        held = {name: state for part in self.runtime.gather(held) for name, state in part.items()}
        kind, keys, *rest = np.random.get_state()
        rng = {"python": random.getstate(), "numpy": (kind, keys.tolist(), *rest),
               "torch": torch.get_rng_state()}
        if self.runtime.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state()
        model = {name: value.to("cpu", copy=True) for name, value in self.gpt.state_dict().items()}
        return {"checkpoint_format": 1, "step": self.step, "random": rng,
                "train_ms": self.stopwatch.elapsed_ms(), "stream": self.loader.position,
                "model": model, "optimizers": held}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go back to a snapshot. Momentum comes only to the rank that uses it."""
        self.gpt.load_state_dict(saved["model"])
        names = {param: name for name, param in self.gpt.named_parameters()}
        for optimizer in self.optimizers:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            is_muon = isinstance(optimizer, Muon)
            own = set(optimizer.shares(params)[optimizer.rank] if is_muon else params)
            held = {i: saved["optimizers"].get(names[param], {})
                    for i, param in enumerate(params) if param in own}
            optimizer.load_state_dict({**optimizer.state_dict(), "state": held})
        self.step, self.stopwatch.before_ms = saved["step"], saved["train_ms"]
        self.loader.position, self.loader.ahead, self.loader.waited = saved["stream"], None, 0.0
        rng = saved["random"]
        random.setstate(rng["python"])
        np.random.set_state(rng["numpy"])
        torch.set_rng_state(rng["torch"])
        if "cuda" in rng and self.runtime.device.type == "cuda":
            torch.cuda.set_rng_state(rng["cuda"])

    def checkpoints(self) -> list[Path]:
        """The newest first, by the time of writing: after going back, earlier steps are newer."""
        return sorted(self.folder.glob("step_*.pt"), reverse=True,
                      key=lambda path: (path.stat().st_mtime_ns, path.name))

    def save(self) -> None:
        """Copy everything now, and write it in the background. Raises InputError if the weights are
        not finite: the checkpoints that there are are worth more."""
        total = sum(param.detach().float().sum() for param in self.gpt.parameters())
        require_finite("sum of the weights", total.item(), self.step)
        self.wait()
        saved = self.snapshot()
        if self.runtime.rank == 0:
            self.writer = threading.Thread(target=self.write, args=(saved,))
            self.writer.start()

    def write(self, saved: dict[str, Any]) -> None:
        """Write a checkpoint; failing is logged, and no reason to end the run."""
        path = self.folder / f"step_{saved['step']:08d}.pt"
        try:
            saved |= {"knobs": asdict(self.hp), "dataset": self.dataset}
            write_file(path, serialize(saved))
            self.log(f"checkpoint:{path}")
            for old in self.checkpoints()[self.hp.keep_checkpoints :]:
                old.unlink()
        except (InputError, OSError) as error:
            self.log(f"checkpoint:failed, the older ones stay: {error}")

    def wait(self) -> None:
        """Until the last checkpoint has reached the disk."""
        if self.writer is not None:
            self.writer.join()

    def find(self) -> dict[str, Any] | None:
        """The checkpoint that RESUME means, and that fits this run, or None. For rank 0."""
        auto = self.hp.resume == "auto"
        for path in self.checkpoints() if auto else [Path(self.hp.resume)]:
            data = read_file(path, self.gpt)
            try:
                saved = unpack(data, path, size_limit(self.gpt))
                complete = saved.keys() >= CHECKPOINT_KEYS and saved["checkpoint_format"] == 1
                require(complete, f"{path} is no checkpoint of this program")
            except InputError as error:
                if not auto:
                    raise
                self.log(f"resume:damaged, trying the one before it: {error}")
            else:
                self.check(saved, path)
                return saved
        return None

    def check(self, saved: Mapping[str, Any], path: Path) -> None:
        """Raise InputError for knobs with which the run cannot go on; log the other changes."""
        old, new = saved["knobs"], asdict(self.hp)
        changed = [key for key in new if key in old and new[key] != old[key] and key != "resume"]
        refused = [key for key in changed if key in MODEL_KNOBS]
        if saved["dataset"] != self.dataset:
            refused += ["data_path", "tokenizer_path"]
        changes = [f"{key.upper()}:{old[key]}->{new[key]}" for key in refused or changed]
        require(not refused, f"RESUME={self.hp.resume!r}: {path} was made with another model or "
                f"other data: {' '.join(changes)}: set what it was, or start anew")
        self.log(f"resume:{path} step:{saved['step']} changed:{' '.join(changes) or 'nothing'}")

# ---- Training ------------------------------------------------------------------------------------
def compiler_problem(device: torch.device) -> str:
    """Why torch.compile does not work on this machine, in one line; "" if it does."""
    try:
        torch.compile(torch.sin)(torch.zeros(2, device=device))
    except Exception as error:  # torch, Triton and the C++ compiler each have their own
        return " ".join(str(error).split())[:200] or repr(error)
    finally:
        torch.compiler.reset()
    return ""

def compile_and_wrap(gpt: GPT, hp: Hyperparameters, runtime: Runtime,
                     log: Log) -> tuple[nn.Module, Callable]:
    """The model to call, compiled if COMPILE says so, wrapped if distributed; and Newton-Schulz."""
    # On a CPU auto asks for AMX, without which little is gained, and for a run of some length.
    is_long = hp.iterations >= 200 and not 0 < hp.max_wallclock_seconds < 600
    fast_bf16 = torch.cpu.get_capabilities().get("amx_bf16") and runtime.dtype == torch.bfloat16
    pays = runtime.device.type == "cuda" or bool(is_long and fast_bf16)
    model, chain, compiled = gpt, newton_schulz, pays if hp.compile == "auto" else hp.compile == "1"
    if compiled and (problem := compiler_problem(runtime.device)):
        log(f"compile:failed, the run goes on without it: {problem}")
        compiled = False
    log(f"device:{runtime.device} dtype:{runtime.dtype} compile:{compiled} "
        f"cpu_threads:{torch.get_num_threads()}")
    if compiled:
        model = torch.compile(gpt, dynamic=False, fullgraph=True)
        chain = torch.compile(newton_schulz, dynamic=False, fullgraph=True)
    if runtime.distributed:
        model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False,
                                                    gradient_as_bucket_view=True)
    return model, chain

def build_loader(hp: Hyperparameters, runtime: Runtime) -> DistributedTokenLoader:
    """A loader at the beginning of the training shards."""
    return DistributedTokenLoader(hp.train_files, runtime.rank, runtime.world_size, runtime.device,
                                  hp.vocab_size)

def train_step(model: nn.Module, loader: DistributedTokenLoader,
               optimizers: list[torch.optim.Optimizer], hp: Hyperparameters,
               runtime: Runtime) -> tuple[Tensor, Tensor | float]:
    """One optimizer step of A micro-steps. Returns the mean loss of this rank's tokens, and the
    norm of all gradients, where a knob asks for it."""
    A = hp.batch_slots // runtime.world_size  # grad_accum_steps
    total = torch.zeros((), device=runtime.device)
    for micro_step in range(A):
        if runtime.distributed:  # gradients travel once, with the last micro-step
            model.require_backward_grad_sync = micro_step == A - 1
        inputs, targets = loader.next_batch(hp.train_batch_tokens, hp.train_seq_len, A)
        loss = model(inputs, targets) * (1 / A)
        loss.backward()
        total += loss.detach()
    norm = 0.0
    if hp.grad_clip_norm > 0 or hp.tensorboard:
        norm = nn.utils.clip_grad_norm_(model.parameters(), hp.grad_clip_norm or math.inf)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return total, norm

def warm_up(state: TrainingState) -> None:
    """WARMUP_STEPS whole steps that compile every graph and fill every cache, and are undone."""
    hp, start, steps = state.hp, state.snapshot(), state.hp.warmup_steps
    set_schedule(state.optimizers, 1.0, muon_momentum(hp, 0))
    # One at least with several ranks: DDP orders its sums anew after the first step of a process.
    for step in range(1, max(steps, int(state.runtime.distributed)) + 1):
        state.log.status = f"warmup_step:{step - 1}/{steps}"
        train_step(state.model, state.loader, state.optimizers, hp, state.runtime)
        if step <= steps <= 20 or step % 10 == 0 or step == steps:
            state.log(f"warmup_step:{step}/{steps}")
    state.restore(start)

def progress(hp: Hyperparameters, step: int, elapsed_ms: float, loss: Tensor) -> str:
    """What a terminal shows of a run between two lines of its log."""
    cap_ms, speed = 1000 * hp.max_wallclock_seconds, hp.train_batch_tokens * step / elapsed_ms
    done = max(step / hp.iterations, elapsed_ms / cap_ms if cap_ms > 0 else 0.0)
    return (f"step:{step}/{hp.iterations} loss:{loss:.4f} tokens_per_s:{1000 * speed:.0f} "
            f"left:{elapsed_ms / 1000 * (1 / done - 1):.0f}s")

def train(state: TrainingState, validation: Validation, stop: StopRequest) -> float:
    """Train until ITERATIONS, the cap, or a signal (which ends the process). Returns val_loss."""
    hp, runtime, log, stopwatch = state.hp, state.runtime, state.log, state.stopwatch
    begun_at, of = state.step, f"/{hp.iterations}"
    arrived = coming = torch.zeros(())  # losses on their way to the CPU, for the status
    stop.listen(runtime.distributed)
    runtime.synchronize()
    stopwatch.start()
    while True:
        step = state.step
        elapsed_ms, wanted = runtime.agree(stopwatch.elapsed_ms(), stop.signal)
        capped = 0 < hp.max_wallclock_seconds <= elapsed_ms / 1000 and step < hp.iterations
        last = capped or step >= hp.iterations
        due = hp.checkpoint_every > 0 and (last or step % hp.checkpoint_every == 0)
        if wanted or (due and step > begun_at):
            state.save()
        if wanted:
            state.wait()
            log(f"stopped: signal:{wanted} step:{step}{of}: to go on, set RESUME=auto and "
                f"RUN_ID={hp.run_id}")
            leave(128 + wanted, runtime)
        if last or (hp.val_loss_every > 0 and step % hp.val_loss_every == 0):
            stopwatch.pause()
            loss = evaluate(state.model, validation.tokens, hp, runtime, log=log)
            bpb = validation.bits_per_byte(loss)
            log(f"step:{step}{of} val_loss:{loss:.4f} val_bpb:{bpb:.4f} {stopwatch.report(step)}"
                f"{validation.partial}", step, val_loss=loss, val_bpb=bpb)
            if capped:
                log(f"stopping_early: wallclock_cap train_time:{stopwatch.elapsed_ms():.0f}ms "
                    f"step:{step}{of}")
            require_finite("val_loss", loss, step)
            if last:
                return loss
            stopwatch.start()
        factor = lr_factor(hp, step, elapsed_ms)
        if step == 10 and factor < 1 and hp.warmdown_frac == 0 < hp.max_wallclock_seconds:
            log(f"warmdown:begun already, since WARMDOWN_ITERS={hp.warmdown_iters} such steps take "
                "longer than the run: WARMDOWN_FRAC=0.2 would leave 80 % of it at the full rate")
        set_schedule(state.optimizers, factor, muon_momentum(hp, step))
        known = log.on_terminal and step > begun_at + 1  # the loss of the step before the last
        log.status = progress(hp, step, elapsed_ms, arrived) if known else f"step:{step}{of}"
        rank_loss, norm = train_step(state.model, state.loader, state.optimizers, hp, runtime)
        arrived, coming = coming, rank_loss.to("cpu", non_blocking=True)
        stopwatch.lap()
        state.step = done = step + 1
        if hp.train_log_every > 0 and (done <= 10 or done % hp.train_log_every == 0):
            loss = sum(runtime.gather(rank_loss.item())) / runtime.world_size
            groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
            log(f"step:{done}{of} train_loss:{loss:.4f} {stopwatch.report(done)}", done,
                train_loss=loss, grad_norm=norm,
                tokens_per_s=1000 * done * hp.train_batch_tokens / stopwatch.elapsed_ms(),
                **{f"lr_{group['name']}": group["lr"] for group in groups})
            require_finite("train_loss", loss, done)

def check_replicas(gpt: GPT, optimizers: list[Any], runtime: Runtime, log: Log) -> None:
    """Raise RuntimeError unless all ranks have the same bits of weights and Adam's step counts."""
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    steps = [int(state["step"]) for state in states if "step" in state]  # Adam's
    digest = hashlib.sha256(str(steps).encode())
    for tensor in gpt.state_dict().values():
        digest.update(tensor.cpu().flatten().view(torch.uint8).numpy())
    digests = runtime.gather(digest.digest())
    if strays := [rank for rank, value in enumerate(digests) if value != digests[0]]:
        raise RuntimeError(f"the weights or step counts of ranks {strays} differ from rank 0's")
    if runtime.distributed:
        log("replicas:identical")

def flops_per_token(hp: Hyperparameters) -> float:
    """Forward and backward: 6 for each weight of a matrix, and causal attention."""
    weights = hp.model_dim**2 * (2 + 2 * hp.num_kv_heads / hp.num_heads + 2 * hp.mlp_mult)
    block = weights + hp.train_seq_len * hp.model_dim
    return 6 * (hp.num_layers * block + hp.vocab_size * hp.model_dim)

def seconds(action: Callable[[], Any]) -> float:
    """How long action keeps the device busy, on average."""
    from torch.utils.benchmark import Timer  # slow to import
    names, threads = {"action": action}, torch.get_num_threads()
    return Timer("action()", globals=names, num_threads=threads).timeit(3).mean

def log_figures(state: TrainingState) -> None:
    """Memory and speed. Updates and gradient exchange are timed here, each alone, with zeros."""
    hp, runtime, log, params = state.hp, state.runtime, state.log, [*state.gpt.parameters()]
    if runtime.device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB, on macOS in bytes
        allocated = reserved = peak * (1 if sys.platform == "darwin" else 1024)
    log(f"peak memory allocated: {allocated >> 20} MiB reserved: {reserved >> 20} MiB")
    step_s = max(state.stopwatch.elapsed_ms() / 1000 / max(state.step, 1), 1e-9)
    side = 4096 if runtime.device.type == "cuda" else 1024
    square = torch.ones(side, side, device=runtime.device, dtype=runtime.dtype)
    peak = runtime.world_size * 2 * side**3 / seconds(lambda: square @ square)
    for param in params:
        param.grad = torch.zeros_like(param)
    set_schedule(state.optimizers, 0.0, 0.0)
    updates = seconds(lambda: [optimizer.step() for optimizer in state.optimizers])
    flat = torch.cat([param.grad.float().flatten() for param in params])
    exchange_s = seconds(lambda: dist.all_reduce(flat)) if runtime.distributed else 0.0
    speed, waited = hp.train_batch_tokens / step_s, state.loader.waited / max(state.step, 1)
    log(f"speed: tokens_per_s:{speed:.0f} share_of_peak:{speed * flops_per_token(hp) / peak:.3f} "
        f"data_wait:{waited / step_s:.3f} optimizer:{updates / step_s:.3f} "
        f"gradient_exchange:{exchange_s / step_s:.3f}")

# ---- main ----------------------------------------------------------------------------------------
def prepare_demo(hp: Hyperparameters, runtime: Runtime, log: Log) -> None:
    """For the demo's own data: build it, once on each node, and log what its builder says."""
    demo, paths = PRESETS["demo"], (hp.data_path, hp.tokenizer_path)
    own = hp.preset == "demo" and paths == (demo["data_path"], demo["tokenizer_path"])
    if not own or runtime.local_rank != 0:
        return
    script = Path(__file__).with_name("data") / "demo_corpus.py"
    command = [sys.executable, script, "--dataset", hp.data_path, "--tokenizer", hp.tokenizer_path]
    result = subprocess.run(command, capture_output=True, text=True)
    reason = (result.stderr.strip() or "no message").splitlines()[-1]
    require(result.returncode == 0, f"PRESET=demo: {script} failed: {reason}")
    log(result.stdout.rstrip())

def log_run(hp: Hyperparameters, runtime: Runtime, validation: Validation, gpt: GPT,
            log: Log) -> None:
    """The lines that describe a run before it starts."""
    backends = [f"{name}={getattr(torch.backends.cuda, f'{name}_sdp_enabled')()}"
                for name in ATTENTION_BACKENDS]
    tied = hp.tie_embeddings
    log(f"val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path={hp.tokenizer_path}")
    log(f"train_loader:dataset:{Path(hp.data_path).resolve().name} "
        f"train_shards:{len(glob.glob(hp.train_files))}")
    log(f"val_loader:shards pattern={os.path.join(hp.data_path, 'fineweb_val_*.bin')} "
        f"tokens:{len(validation.tokens) - 1}{validation.partial}")
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

def score(gpt: GPT, model: nn.Module, validation: Validation, hp: Hyperparameters,
          runtime: Runtime, log: Log) -> dict[str, float]:
    """The last two lines: the score of the model that came back from the artifact."""
    figures, name, partial = {}, "final_int8_zlib_roundtrip", validation.partial
    if stride := hp.eval_stride:
        loss = evaluate(model, validation.tokens, hp, runtime, stride, log)
        bpb = validation.bits_per_byte(loss)
        log(f"{name}_sliding stride:{stride} val_loss:{loss:.8f} val_bpb:{bpb:.8f}{partial}")
        figures = dict(sliding_val_loss=loss, sliding_val_bpb=bpb)
    if hp.sample_prompt and runtime.rank == 0:
        log(f"sample:{sample(gpt, hp)!r}")
    started = time.perf_counter()
    loss = evaluate(model, validation.tokens, hp, runtime, log=log)
    eval_ms, bpb = 1000 * (time.perf_counter() - started), validation.bits_per_byte(loss)
    log(f"{name} val_loss:{loss:.4f} val_bpb:{bpb:.4f} eval_time:{eval_ms:.0f}ms{partial}")
    log(f"{name}_exact val_loss:{loss:.8f} val_bpb:{bpb:.8f}{partial}")
    return dict(**figures, int8_val_loss=loss, int8_val_bpb=bpb, eval_ms=eval_ms)

def write_result(state: TrainingState, figures: Mapping[str, Any]) -> None:
    """OUTPUT_DIR/final_result.json: what was run, where, on which data, and what came of it."""
    hp, runtime = state.hp, state.runtime
    gpu = torch.cuda.get_device_name() if runtime.device.type == "cuda" else None
    machine = dict(platform=platform.platform(), cpus=os.cpu_count(), device=str(runtime.device),
                   gpu=gpu, dtype=str(runtime.dtype), world_size=runtime.world_size)
    versions = dict(python=platform.python_version(), torch=torch.__version__,
                    numpy=np.__version__, sentencepiece=sentencepiece.__version__)
    result = dict(**figures, versions=versions, machine=machine, knobs=asdict(hp),
                  dataset=state.dataset)
    write_file(Path(hp.output_dir) / "final_result.json", json.dumps(result, indent=1).encode())

def run(hp: Hyperparameters, runtime: Runtime, stop: StopRequest) -> None:
    """One whole run, from the data to the last line of the log."""
    log = runtime.together(Log, hp, runtime)
    runtime.together(prepare_demo, hp, runtime, log)
    loader = None if hp.eval_only else runtime.together(build_loader, hp, runtime)
    token_bytes = runtime.together(load_tokenizer, hp)
    validation = runtime.together(Validation.load, hp, token_bytes)
    for seed in (random.seed, np.random.seed, torch.manual_seed):  # the last one: CPU and CUDA
        seed(hp.seed)
    gpt = GPT(hp, runtime.dtype).to(runtime.device)
    choose_attention(gpt, hp, runtime)
    log_run(hp, runtime, validation, gpt, log)
    if hp.eval_only:
        data = runtime.on_rank_0(read_file, hp.eval_only, gpt)
        runtime.together(load_weights, gpt, data, hp.eval_only)
        score(gpt, compile_and_wrap(gpt, hp, runtime, log)[0], validation, hp, runtime, log)
        return
    model, chain = compile_and_wrap(gpt, hp, runtime, log)
    optimizers = build_optimizers(gpt, hp, runtime.dtype, chain)
    state = TrainingState(hp, runtime, log, gpt, model, optimizers, loader, Stopwatch(runtime))
    warm_up(state)
    if hp.resume and (saved := runtime.on_rank_0(state.find)):
        state.restore(saved)
    try:
        loss = train(state, validation, stop)
    finally:
        state.wait()
    check_replicas(gpt, optimizers, runtime, log)
    log_figures(state)
    artifact, sizes = runtime.on_rank_0(export, gpt, hp, log)
    load_weights(gpt, artifact, "final_model.int8.ptz")
    train_ms, bpb = state.stopwatch.elapsed_ms(), validation.bits_per_byte(loss)
    figures = dict(steps=state.step, train_ms=train_ms, step_avg_ms=train_ms / max(state.step, 1),
                   val_loss=loss, val_bpb=bpb, partial=validation.partial, **sizes)
    figures |= score(gpt, model, validation, hp, runtime, log)
    runtime.on_rank_0(write_result, state, figures)

def main() -> None:
    """Run as the environment says, or leave with exit code 1 and the reason."""
    stop = StopRequest()
    try:
        hp = Hyperparameters.from_env(os.environ)
        runtime = open_runtime(hp, os.environ)
        run(hp, runtime, stop)
    except Exception as error:
        leave_after_error(error, os.environ, stop)
    if runtime.distributed:
        leave(0, runtime)

if __name__ == "__main__":
    main()
