"""Hyperparameters: defaults, conversion, presets, and every problem named at once."""

import dataclasses
import os

import pytest
import torch

from train_gpt import PRESETS, Hyperparameters, InputError, open_runtime, read_topology

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
    "TENSORBOARD": False,
    "SAMPLE_PROMPT": "",
    "SAMPLE_TOKENS": 64,
    "SAMPLE_TEMPERATURE": 0.8,
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
        ("MATRIX_LR", "nan"), ("MAX_WALLCLOCK_SECONDS", "inf"), ("MAX_WALLCLOCK_SECONDS", "-1"),
        ("SEED", "9" * 400), ("RUN_ID", "x" * 201),
        ("NUM_LAYERS", "0"), ("NUM_KV_HEADS", "0"), ("TRAIN_SEQ_LEN", "-8"), ("SEED", "4294967296"),
        ("VOCAB_SIZE", "65537"), ("BETA1", "1"), ("BETA2", "-0.1"), ("LOGIT_SOFTCAP", "0"),
        ("PRESET", "demmo"), ("DEVICE", "gpu"), ("DTYPE", "fp16"), ("COMPILE", "yes"),
        ("RUN_ID", "../x"), ("RUN_ID", ""), ("RUN_ID", ".."), ("WARMUP_STEPS", "-1"),
        ("SAMPLE_TOKENS", "-1"), ("SAMPLE_TEMPERATURE", "-0.5"),
    ],
)  # fmt: skip
def test_one_bad_value_is_one_line_with_its_variable_and_value(name, text):
    (line,) = problems_of(**{name: text})
    assert line.startswith(f"{name}=") and text in line and " must be " in line


def test_a_prompt_that_is_no_text():
    """So os.environ shows a byte that is no UTF-8."""
    assert problems_of(SAMPLE_PROMPT="\udcff") == ["SAMPLE_PROMPT='\\udcff' must be text"]
    assert Hyperparameters.from_env({"SAMPLE_PROMPT": "→ 🙂\n"}).sample_prompt == "→ 🙂\n"


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
            ["TRAIN_BATCH_TOKENS=32768", "65536, BATCH_SLOTS=64 times TRAIN_SEQ_LEN=1024"],
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
    assert {name: getattr(demo, name) for name in PRESETS["demo"]} == PRESETS["demo"]
    other = Hyperparameters.from_env({"PRESET": "demo", "MODEL_DIM": "64"})
    assert other.model_dim == 64 and other.data_path == demo.data_path


def test_topology():
    assert read_topology({}, 8) == (0, 1, 0, False)
    assert read_topology({"WORLD_SIZE": "2"}, 8) == (0, 1, 0, False)  # torchrun sets both
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert read_topology(environ, 8) == read_topology(environ, 4) == (3, 4, 1, True)
    assert read_topology({**environ, "WORLD_SIZE": "16"}, 64) == (3, 16, 1, True)


@pytest.mark.parametrize("world_size", ["0", "-1", "3", "16", "two", ""])
def test_a_world_size_that_does_not_divide_the_slots(world_size):
    for environ in ({"WORLD_SIZE": world_size, "RANK": "0"}, {"WORLD_SIZE": world_size}):
        with pytest.raises(ValueError, match="WORLD_SIZE='?" + world_size):
            read_topology(environ, 8)


def test_a_rank_outside_the_world():
    with pytest.raises(ValueError, match="RANK=4"):
        read_topology({"RANK": "4", "WORLD_SIZE": "4"}, 8)


def test_a_world_size_error_names_the_ways_out():
    with pytest.raises(ValueError, match="BATCH_SLOTS=6: launch 1, 2, 3, 6 processes, or set"):
        read_topology({"RANK": "0", "WORLD_SIZE": "4"}, 6)


@pytest.mark.parametrize(
    "processes, omp, shared",
    [("1", None, False), ("2", None, True), ("2", "1", True), ("2", "3", False), ("99", "1", True)],
)
def test_processes_of_one_cpu_share_its_cores(processes, omp, shared):
    """torchrun itself sets OMP_NUM_THREADS=1 where it is not set."""
    before, environ = torch.get_num_threads(), {"LOCAL_WORLD_SIZE": processes}
    try:
        torch.set_num_threads(5)
        environ |= {} if omp is None else {"OMP_NUM_THREADS": omp}
        open_runtime(Hyperparameters(device="cpu"), environ)
        share = max(len(os.sched_getaffinity(0)) // int(processes), 1)
        assert torch.get_num_threads() == (share if shared else 5)
    finally:
        torch.set_num_threads(before)
