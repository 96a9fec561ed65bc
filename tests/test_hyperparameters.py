"""Hyperparameters: defaults, conversion, presets, and every problem named at once."""

import ast
import dataclasses
import os
import re
import time
import tokenize
from typing import get_type_hints

import pytest
import torch
from conftest import SCRIPT, run_here, run_script

from train_gpt import (
    ABOVE_0,
    BELOW_1,
    FREE,
    MINUS_1_IS_0,
    PRESETS,
    Hyperparameters,
    InputError,
    near_knobs,
    open_runtime,
    read_topology,
)

PATTERNS = (
    "attn_scale,attn_scales,mlp_scale,mlp_scales,resid_mix,resid_mixes,q_gain,"
    "skip_weight,skip_weights"
)
# The contract's table of knobs, as it stands there.
CONTRACT = {
    "OUTPUT_DIR": ".",
    "DATA_PATH": "./data/datasets/fineweb10B_sp1024",
    "TOKENIZER_PATH": "./data/tokenizers/fineweb_1024_bpe.model",
    "SEED": 1337,
    "VAL_BATCH_SIZE": 524288,
    "VAL_LOSS_EVERY": 1000,
    "TRAIN_LOG_EVERY": 200,
    "ITERATIONS": 20000,
    "WARMDOWN_ITERS": 1200,
    "WARMUP_STEPS": 20,
    "TRAIN_BATCH_TOKENS": 524288,
    "TRAIN_SEQ_LEN": 1024,
    "MAX_WALLCLOCK_SECONDS": 600.0,
    "VOCAB_SIZE": 1024,
    "NUM_LAYERS": 9,
    "MODEL_DIM": 512,
    "NUM_HEADS": 8,
    "NUM_KV_HEADS": 4,
    "MLP_MULT": 2,
    "TIE_EMBEDDINGS": True,
    "ROPE_BASE": 10000.0,
    "LOGIT_SOFTCAP": 30.0,
    "QK_GAIN_INIT": 1.5,
    "EMBED_LR": 0.6,
    "HEAD_LR": 0.008,
    "TIED_EMBED_LR": 0.05,
    "TIED_EMBED_INIT_STD": 0.005,
    "MATRIX_LR": 0.04,
    "SCALAR_LR": 0.04,
    "MUON_MOMENTUM": 0.95,
    "MUON_BACKEND_STEPS": 5,
    "MUON_MOMENTUM_WARMUP_START": 0.85,
    "MUON_MOMENTUM_WARMUP_STEPS": 500,
    "BETA1": 0.9,
    "BETA2": 0.95,
    "ADAM_EPS": 1e-8,
    "GRAD_CLIP_NORM": 0.0,
    "CONTROL_TENSOR_NAME_PATTERNS": tuple(PATTERNS.split(",")),
    "INT8_KEEP_FLOAT_FP32_NAME_PATTERNS": tuple(PATTERNS.split(",")),
    "DEVICE": "auto",
    "DTYPE": "auto",
    "COMPILE": "auto",
    "PRESET": "",
}
OURS = {  # all off, or as the contract has it
    "BATCH_SLOTS": 8,
    "CHECKPOINT_EVERY": 0,
    "KEEP_CHECKPOINTS": 2,
    "RESUME": "",
    "EVAL_ONLY": "",
    "ACTIVATION_CHECKPOINT": False,
    "MAX_VAL_TOKENS": 0,
    "EVAL_STRIDE": 0,
    "WARMDOWN_FRAC": 0.0,
    "INT8_SCALE_FLOOR": 1 / 127,
}


def problems_of(**environ) -> list[str]:
    with pytest.raises(ValueError) as caught:
        Hyperparameters.from_env(environ)
    assert isinstance(caught.value, InputError)
    return str(caught.value).splitlines()


def test_defaults_are_the_contracts():
    fields = {k.upper(): v for k, v in dataclasses.asdict(Hyperparameters.from_env({})).items()}
    run_id = fields.pop("RUN_ID")
    expected = {**CONTRACT, **OURS}
    assert fields == expected
    assert {name: type(value) for name, value in fields.items()} == {
        name: type(value) for name, value in expected.items()
    }
    assert len(run_id) == 36 and run_id != Hyperparameters().run_id


def test_every_type_is_converted():
    hp = Hyperparameters.from_env(
        {
            "NUM_LAYERS": "3",
            "MATRIX_LR": "2e-2",
            "TIE_EMBEDDINGS": "0",
            "RUN_ID": "x",
            "CONTROL_TENSOR_NAME_PATTERNS": "a, b,,c",
        }
    )
    assert (hp.num_layers, hp.matrix_lr, hp.tie_embeddings, hp.run_id) == (3, 0.02, False, "x")
    assert hp.control_tensor_name_patterns == ("a", "b", "c")
    assert hp.int8_keep_float_fp32_name_patterns == ("a", "b", "c")  # follows unless set
    environ = {"CONTROL_TENSOR_NAME_PATTERNS": "a", "INT8_KEEP_FLOAT_FP32_NAME_PATTERNS": "b"}
    assert Hyperparameters.from_env(environ).int8_keep_float_fp32_name_patterns == ("b",)


@pytest.mark.parametrize("text", ["yes", "true", "False", "", "2"])
def test_booleans_are_0_or_1(text):
    assert problems_of(TIE_EMBEDDINGS=text) == [f"TIE_EMBEDDINGS={text!r} must be 0 or 1"]


@pytest.mark.parametrize(
    "name, text",
    [
        ("NUM_LAYERS", "three"), ("NUM_LAYERS", "3.0"), ("NUM_LAYERS", ""), ("SEED", "-1"),
        ("MATRIX_LR", "nan"), ("MAX_WALLCLOCK_SECONDS", "inf"), ("MAX_WALLCLOCK_SECONDS", "-2"),
        ("SEED", "9" * 400), ("RUN_ID", "x" * 201),
        ("NUM_LAYERS", "0"), ("NUM_KV_HEADS", "0"), ("TRAIN_SEQ_LEN", "-8"), ("SEED", "4294967296"),
        ("VOCAB_SIZE", "65537"), ("BETA1", "1"), ("BETA2", "-0.1"), ("LOGIT_SOFTCAP", "0"),
        ("PRESET", "demmo"), ("DEVICE", "gpu"), ("DTYPE", "fp16"), ("COMPILE", "yes"),
        ("RUN_ID", "../x"), ("RUN_ID", ""), ("RUN_ID", ".."), ("WARMUP_STEPS", "-2"),
        ("CHECKPOINT_EVERY", "-1"), ("ITERATIONS", "-1"), ("WARMDOWN_FRAC", "1.5"),
    ],
)  # fmt: skip
def test_one_bad_value_is_one_line_with_its_variable_and_value(name, text):
    (line,) = problems_of(**{name: text})
    assert line.startswith(f"{name}=") and text in line and " must be " in line


def test_a_run_id_counts_in_bytes():
    """An euro sign has three."""
    (line,) = problems_of(RUN_ID="\u20ac" * 67)
    assert line.startswith("RUN_ID=") and line.endswith(
        " must be a printable file name of 1 to 200 bytes"
    )
    assert Hyperparameters.from_env({"RUN_ID": "\u20ac" * 66}).run_id == "\u20ac" * 66


def test_a_run_id_of_undecodable_bytes(tmp_path):
    """Python shows a byte that is no UTF-8 as half of a surrogate pair."""
    result = run_script(tmp_path, {"RUN_ID": "\udcff", "DEVICE": "cpu"})
    line = r"RUN_ID='\udcff' must be a printable file name of 1 to 200 bytes"
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"ValueError: {line}\n"
    assert not list(tmp_path.iterdir())


def test_resume_and_eval_only_exclude_each_other():
    lines = problems_of(RESUME="a.pt", EVAL_ONLY="b.pt")
    assert lines == ["RESUME='a.pt' must be unset, or EVAL_ONLY unset"]


@pytest.mark.parametrize("name", MINUS_1_IS_0)
def test_minus_1_switches_off_what_0_switches_off(name):
    texts = ("0", "-1", "0.0", "-1.0") if "seconds" in name or "norm" in name else ("0", "-1")
    for text in texts:
        value = getattr(Hyperparameters.from_env({name.upper(): text}), name)
        assert (value, type(value)) == (0, get_type_hints(Hyperparameters)[name])


def test_these_five_are_what_minus_1_switches_off():
    assert sorted(name.upper() for name in MINUS_1_IS_0) == [
        "GRAD_CLIP_NORM", "MAX_WALLCLOCK_SECONDS", "TRAIN_LOG_EVERY", "VAL_LOSS_EVERY",
        "WARMUP_STEPS",
    ]  # fmt: skip


def test_every_number_has_a_range_or_is_free():
    kinds = get_type_hints(Hyperparameters)
    numbers = {name for name, kind in kinds.items() if kind in (int, float)}
    assert {*ABOVE_0, *BELOW_1, *FREE, *MINUS_1_IS_0} <= numbers
    assert set(FREE) == {"warmdown_iters", "qk_gain_init"}
    for name in FREE:
        Hyperparameters.from_env({name.upper(): "-5"})
    for name in numbers:
        for value, refused in ((0, name in ABOVE_0), (-5, name not in FREE)):
            lines = dataclasses.replace(Hyperparameters(), **{name: value}).problems()
            assert any(line.startswith(f"{name.upper()}={value} ") for line in lines) == refused


def test_every_knob_has_its_comment():
    """On its own line in the source: that is the list of knobs which the README links to."""
    with open(SCRIPT, "rb") as file:
        tokens = [t for t in tokenize.tokenize(file.readline) if t.type == tokenize.COMMENT]
    comments = {token.start[0]: token.string for token in tokens}
    (knobs,) = [
        node
        for node in ast.parse(SCRIPT.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "Hyperparameters"
    ]
    lines = {n.target.id: n.end_lineno for n in knobs.body if isinstance(n, ast.AnnAssign)}
    assert lines.keys() == get_type_hints(Hyperparameters).keys()
    for name, line in lines.items():
        assert re.match(r"# \S", comments.get(line, "")), name


@pytest.mark.parametrize(
    "environ, names",
    [
        (dict(NUM_HEADS="7", NUM_KV_HEADS="7"), ["MODEL_DIM=512", "NUM_HEADS=7"]),
        (dict(MODEL_DIM="24"), ["MODEL_DIM=24", "NUM_HEADS=8", "even"]),
        (dict(NUM_KV_HEADS="3"), ["NUM_HEADS=8", "NUM_KV_HEADS=3"]),
        (
            dict(TRAIN_BATCH_TOKENS="524289"),
            ["TRAIN_BATCH_TOKENS=524289", "TRAIN_SEQ_LEN=1024", "8"],
        ),
        (dict(TRAIN_BATCH_TOKENS="4096"), ["TRAIN_BATCH_TOKENS=4096", "8192"]),
        (
            dict(BATCH_SLOTS="64", TRAIN_BATCH_TOKENS="32768"),
            ["TRAIN_BATCH_TOKENS=32768", "65536: BATCH_SLOTS=64 times TRAIN_SEQ_LEN=1024"],
        ),
        (dict(BATCH_SLOTS="0"), ["BATCH_SLOTS=0 must be above 0"]),
        (dict(VAL_BATCH_SIZE="8191"), ["VAL_BATCH_SIZE=8191", "8192", "TRAIN_SEQ_LEN=1024"]),
    ],
)
def test_knobs_that_do_not_fit_each_other(environ, names):
    (line,) = problems_of(**environ)
    assert all(name in line for name in names)


def test_all_problems_come_at_once():
    lines = problems_of(
        SEED="x", TIE_EMBEDDINGS="no", DEVICE="tpu", NUM_HEADS="7", NUM_KV_HEADS="7"
    )
    assert [line.split("=")[0] for line in lines] == [
        "SEED",
        "TIE_EMBEDDINGS",
        "DEVICE",
        "MODEL_DIM",
    ]


def test_the_environment_wins_over_the_preset():
    demo = Hyperparameters.from_env({"PRESET": "demo"})
    preset = PRESETS["demo"]
    knobs = {name: getattr(demo, name.lower()) for name in preset}
    assert knobs == {name: type(knobs[name])(text) for name, text in preset.items()}
    assert all(isinstance(text, str) for text in preset.values())
    other = Hyperparameters.from_env({"PRESET": "demo", "MODEL_DIM": "64"})
    assert other.model_dim == 64 and other.data_path == demo.data_path


@pytest.mark.parametrize(
    "variable, knob",
    [
        ("TRAIN_BATCH_TOKEN", "TRAIN_BATCH_TOKENS"),
        ("ITERATION", "ITERATIONS"),
        ("VOCABSIZE", "VOCAB_SIZE"),
        ("iterations", "ITERATIONS"),
        ("MATRIX_LEARNING_RATE", "MATRIX_LR"),
    ],
)
def test_a_variable_that_nearly_is_a_knob_names_the_knob(variable, knob):
    line = f"unknown_knob:{variable!r} is ignored: did you mean {knob}?"
    assert near_knobs({variable: "1", "PATH": "/bin"}) == [line]


def test_a_slip_is_told_on_the_console_and_in_the_log_before_anything_else(tmp_path, knobs):
    environ = {**knobs, "ITERATION": "5", "DATA_PATH": str(tmp_path / "nowhere")}
    result = run_here(tmp_path, environ)
    line = "unknown_knob:'ITERATION' is ignored: did you mean ITERATIONS?"
    assert result.stdout.splitlines() == ["logs/test.txt", line]
    assert (tmp_path / "logs" / "test.txt").read_text().splitlines()[-2:] == ["logs/test.txt", line]


def test_the_variables_of_a_usual_machine_are_no_slips():
    usual = """
        PATH HOME USER LOGNAME SHELL TERM LANG LC_ALL PWD OLDPWD SHLVL TMPDIR DISPLAY EDITOR PAGER
        HOSTNAME MAIL TZ VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV PYTHONPATH PYTHONUNBUFFERED
        PYTHONIOENCODING LD_LIBRARY_PATH LD_PRELOAD CUDA_HOME CUDA_PATH CUDA_VISIBLE_DEVICES
        CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES
        NCCL_DEBUG NCCL_IB_DISABLE NCCL_SOCKET_IFNAME NCCL_NVLS_ENABLE GLOO_SOCKET_IFNAME
        OMP_NUM_THREADS MKL_NUM_THREADS KMP_AFFINITY TORCH_LOGS TORCHINDUCTOR_CACHE_DIR
        TRITON_CACHE_DIR PYTORCH_CUDA_ALLOC_CONF HF_HOME HF_TOKEN WANDB_API_KEY WANDB_MODE
        SSH_CONNECTION SSH_TTY XDG_RUNTIME_DIR SLURM_JOB_ID SLURM_NTASKS SLURM_PROCID GPU_COUNT
        CC CXX CFLAGS http_proxy https_proxy no_proxy _
        RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME
        ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_RUN_ID
        TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_ERROR_FILE
        TORCH_NCCL_ASYNC_ERROR_HANDLING
    """.split()
    knobs = [name.upper() for name in get_type_hints(Hyperparameters)]
    assert near_knobs(dict.fromkeys([*usual, *knobs], "1")) == []


RENDEZVOUS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_topology():
    assert read_topology({}, 8) == (0, 1, 0, False)
    assert read_topology({"WORLD_SIZE": "2"}, 8) == (0, 1, 0, False)  # torchrun sets both
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **RENDEZVOUS}
    assert read_topology(environ, 8) == read_topology(environ, 4) == (3, 4, 1, True)
    assert read_topology({**environ, "WORLD_SIZE": "16"}, 64) == (3, 16, 1, True)


@pytest.mark.parametrize("world_size", ["0", "-1", "3", "16", "two", ""])
def test_a_world_size_that_does_not_divide_the_slots(world_size):
    for environ in ({"WORLD_SIZE": world_size, "RANK": "0"}, {"WORLD_SIZE": world_size}):
        with pytest.raises(ValueError, match="WORLD_SIZE='?" + world_size):
            read_topology(environ, 8)


@pytest.mark.parametrize("rank", ["4", "-1"])
def test_a_rank_outside_the_world_is_told_at_once(rank):
    """Not after half an hour of waiting for the other ranks."""
    environ = {"RANK": rank, "WORLD_SIZE": "4", **RENDEZVOUS}
    started = time.monotonic()
    with pytest.raises(InputError, match=f"RANK={rank} must be from 0 to WORLD_SIZE-1=3"):
        open_runtime(Hyperparameters(device="cpu"), environ)
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    "rendezvous",
    [
        {},
        {"MASTER_ADDR": "127.0.0.1"},
        {"MASTER_PORT": "29500"},
        {**RENDEZVOUS, "MASTER_PORT": "0"},
    ],
)
def test_a_rank_without_a_meeting_place(rendezvous):
    with pytest.raises(InputError, match="RANK needs MASTER_ADDR and MASTER_PORT: use torchrun"):
        read_topology({"RANK": "0", "WORLD_SIZE": "2", **rendezvous}, 8)


def test_a_rank_by_hand_ends_in_one_line(tmp_path, knobs):
    result = run_script(tmp_path, {**knobs, "RANK": "0", "WORLD_SIZE": "1"})
    problem = "RANK needs MASTER_ADDR and MASTER_PORT: use torchrun, or unset RANK"
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"ValueError: {problem}\n"


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "MASTER_PORT"])
def test_a_place_that_is_no_number(name):
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **RENDEZVOUS, name: "abc"}
    with pytest.raises(InputError, match=f"{name}='abc' must be a whole number"):
        read_topology(environ, 8)


def test_a_world_size_error_names_the_ways_out():
    with pytest.raises(ValueError, match="BATCH_SLOTS=6: launch 1, 2, 3, 6 processes, or set"):
        read_topology({"RANK": "0", "WORLD_SIZE": "4"}, 6)


@pytest.mark.parametrize(
    "processes, omp, shared",
    [("1", None, False), ("2", None, True), ("2", "1", True), ("2", "3", False), ("99", "1", True)],
)
def test_processes_of_one_cpu_share_its_cores(tmp_path, processes, omp, shared):
    """torchrun itself sets OMP_NUM_THREADS=1 where it is not set."""
    before, environ = torch.get_num_threads(), {"LOCAL_WORLD_SIZE": processes}
    try:
        torch.set_num_threads(5)
        environ |= {} if omp is None else {"OMP_NUM_THREADS": omp}
        open_runtime(Hyperparameters(device="cpu", output_dir=str(tmp_path)), environ)
        share = max(len(os.sched_getaffinity(0)) // int(processes), 1)
        assert torch.get_num_threads() == (share if shared else 5)
    finally:
        torch.set_num_threads(before)
