"""Hyperparameters: defaults, conversion, presets, errors."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
from runs import failed, finished, run_here, same_models

from train_gpt import Hyperparameters, InputError

PATTERNS = (
    "attn_scale", "attn_scales", "mlp_scale", "mlp_scales", "resid_mix", "resid_mixes", "q_gain",
    "skip_weight", "skip_weights",
)  # fmt: skip
# The contract's knobs, then ours, all disabled.
DEFAULTS = dict(
    OUTPUT_DIR=".", DATA_PATH="./data/datasets/fineweb10B_sp1024",
    TOKENIZER_PATH="./data/tokenizers/fineweb_1024_bpe.model", SEED=1337, VAL_BATCH_SIZE=524288,
    VAL_LOSS_EVERY=1000, TRAIN_LOG_EVERY=200, ITERATIONS=20000, WARMDOWN_ITERS=1200,
    WARMUP_STEPS=20, TRAIN_BATCH_TOKENS=524288, TRAIN_SEQ_LEN=1024, MAX_WALLCLOCK_SECONDS=600.0,
    VOCAB_SIZE=1024, NUM_LAYERS=9, MODEL_DIM=512, NUM_HEADS=8, NUM_KV_HEADS=4, MLP_MULT=2,
    TIE_EMBEDDINGS=True, ROPE_BASE=10000.0, LOGIT_SOFTCAP=30.0, QK_GAIN_INIT=1.5, EMBED_LR=0.6,
    HEAD_LR=0.008, TIED_EMBED_LR=0.05, TIED_EMBED_INIT_STD=0.005, MATRIX_LR=0.04, SCALAR_LR=0.04,
    MUON_MOMENTUM=0.95, MUON_BACKEND_STEPS=5, MUON_MOMENTUM_WARMUP_START=0.85,
    MUON_MOMENTUM_WARMUP_STEPS=500, BETA1=0.9, BETA2=0.95, ADAM_EPS=1e-8, GRAD_CLIP_NORM=0.0,
    CONTROL_TENSOR_NAME_PATTERNS=PATTERNS, INT8_KEEP_FLOAT_FP32_NAME_PATTERNS=PATTERNS,
    DEVICE="auto", DTYPE="auto", COMPILE="auto", PRESET="", BATCH_SLOTS=8, CHECKPOINT_EVERY=0,
    RESUME="", MAX_VAL_TOKENS=0, EVAL_STRIDE=0, WARMDOWN_FRAC=0.0,
)  # fmt: skip
# All knobs that 0 disables, according to their comments, which --help shows.
LINES = inspect.getsource(Hyperparameters).splitlines()
SWITCHES = [line.split(":")[0].strip().upper() for line in LINES if "0: " in line]


@pytest.mark.baseline
def test_defaults_are_the_contracts():
    found = {k.upper(): v for k, v in dataclasses.asdict(Hyperparameters.from_env({})).items()}
    run_id = found.pop("RUN_ID")
    assert found == DEFAULTS
    assert all(type(value) is type(DEFAULTS[name]) for name, value in found.items())
    assert re.fullmatch(r"\d{6}-\d{6}-[0-9a-f]{4}", run_id)  # year to second, and at random
    assert run_id != Hyperparameters().run_id


def test_every_type_is_converted():
    environ = {"NUM_LAYERS": "3", "MATRIX_LR": "2e-2", "TIE_EMBEDDINGS": "0", "RUN_ID": "x"}
    environ |= {"CONTROL_TENSOR_NAME_PATTERNS": "a, b,,c", "OUTPUT_DIR": "~/x"}
    hp = Hyperparameters.from_env(environ)
    assert (hp.num_layers, hp.matrix_lr, hp.tie_embeddings, hp.run_id) == (3, 0.02, False, "x")
    assert hp.control_tensor_name_patterns == ("a", "b", "c")
    assert hp.output_dir == str(Path.home() / "x")
    assert hp.int8_keep_float_fp32_name_patterns == ("a", "b", "c")  # follows unless set
    both = {**environ, "INT8_KEEP_FLOAT_FP32_NAME_PATTERNS": "b"}
    assert Hyperparameters.from_env(both).int8_keep_float_fp32_name_patterns == ("b",)


@pytest.mark.parametrize(
    "name, text",
    [
        ("TIE_EMBEDDINGS", ""), ("TIE_EMBEDDINGS", "2"), ("NUM_LAYERS", "3.0"), ("NUM_LAYERS", ""),
        ("NUM_KV_HEADS", "0"), ("BATCH_SLOTS", "0"), ("LOGIT_SOFTCAP", "0.0"), ("ADAM_EPS", "0.0"),
        ("EVAL_STRIDE", "33"), ("PRESET", "demmo"), ("DEVICE", "gpu"), ("DTYPE", "fp8"),
        ("COMPILE", "yes"), ("MAX_WALLCLOCK_SECONDS", "nan"), ("MATRIX_LR", "inf"),
        ("WARMDOWN_FRAC", "20.0"), ("RUN_ID", ""), ("RUN_ID", "../x"), ("RUN_ID", ".x"),
        ("BETA2", "1.0"), ("MUON_MOMENTUM", "1.0"), ("SEED", "4294967296"),
    ],
)  # fmt: skip
def test_a_bad_value_is_one_line_with_its_variable_and_value(knobs, name, text):
    with pytest.raises(InputError, match=f"^{name}='?{text}'? .+$"):
        Hyperparameters.from_env({**knobs, name: text})


def test_knobs_that_do_not_go_together(knobs):
    environ = {name: text for name, text in knobs.items() if name != "RUN_ID"}
    Hyperparameters.from_env({**environ, "VAL_BATCH_SIZE": "256"})  # the smallest
    for name, text, words in [
        ("MODEL_DIM", "12", "MODEL_DIM=12 .*even.* NUM_HEADS=4"),
        ("NUM_KV_HEADS", "3", "NUM_KV_HEADS=3 .*NUM_HEADS=4"),
        ("TRAIN_BATCH_TOKENS", "128", "TRAIN_BATCH_TOKENS=128 .*256: .*=8 .*TRAIN_SEQ_LEN=32"),
        ("BATCH_SLOTS", "64", "TRAIN_BATCH_TOKENS=512 .*2048: BATCH_SLOTS=64"),
        ("VAL_BATCH_SIZE", "255", "VAL_BATCH_SIZE=255 .*256: .*TRAIN_SEQ_LEN=32"),
        ("RESUME", "auto", "RESUME='auto' .*RUN_ID"),
        ("PRESET", "record2135", "PRESET='record2135' .*tests/records/train_record.py"),
    ]:
        with pytest.raises(InputError, match=words):
            Hyperparameters.from_env({**environ, name: text})


def test_a_number_is_0_or_more_unless_its_comment_says_what_0_disables(knobs):
    for name in DEFAULTS.keys() - SWITCHES:
        if type(DEFAULTS[name]) in (int, float):
            with pytest.raises(InputError, match=f"^{name}=-1"):
                Hyperparameters.from_env({**knobs, name: "-1"})


def test_a_negative_value_disables_what_0_disables(tmp_path, knobs):
    for value in ("0", "-1"):
        off = {**dict.fromkeys(SWITCHES, value), "ITERATIONS": "2", "NUM_LAYERS": "1"}
        log = "\n".join(finished(run_here(tmp_path / value, {**knobs, **off})))
        assert not re.search("warmup_step:|train_loss|step:0/|stride:|checkpoint:", log)
        assert "step:2/2 val_loss" in log
    assert same_models(tmp_path / "0", tmp_path / "-1")


def test_the_environment_overrides_the_preset():
    demo = Hyperparameters.from_env({"PRESET": "demo"})
    assert demo.data_path == "./data/datasets/demo_sp1024"
    other = Hyperparameters.from_env({"PRESET": "demo", "MODEL_DIM": "64"})
    assert other == dataclasses.replace(demo, model_dim=64, run_id=other.run_id)


def test_a_misspelled_knob_is_named_and_the_variables_of_a_usual_machine_are_not(tmp_path, knobs):
    usual = ("OMP_NUM_THREADS", "TORCH_LOGS", "TMPDIR", "LOCAL_WORLD_SIZE")  # the most similar ones
    environ = {**knobs, **dict.fromkeys((*usual, "NUM_LAYER", "iterations", "LR", "STEPS"), "")}
    environ |= {"GRAD_ACCUM_STEPS": "8", "GRADIENT_ACCUMULATION_STEPS": "8"}
    log = finished(run_here(tmp_path, {**environ, "ITERATIONS": "0"}))
    named = [line for line in log if line.startswith("unknown_knob:")]
    assert len(named) == 12 and log[-8:-2] == named[:6] == named[6:]  # again at the end
    for name in ("GRADIENT_ACCUMULATION_STEPS", "GRAD_ACCUM_STEPS"):
        assert f"{name} is ignored: set BATCH_SLOTS to accumulation steps x GPUs" in named.pop(0)
    meant = ("MATRIX_LR", "NUM_LAYERS", "ITERATIONS", "ITERATIONS")
    for line, knob in zip(named, meant, strict=False):
        assert line.endswith(f"did you mean {knob}?")


def test_a_misspelled_knob_is_named_before_the_error_about_missing_data(tmp_path, knobs):
    error = failed(run_here(tmp_path, {"preset": "demo", "DEVICE": "cpu"}), "DATA_PATH")
    assert error.index("preset is ignored: did you mean PRESET?") < error.index("DATA_PATH")
    wrong = {**knobs, "TOKENIZER_PATH": "x", "TOKENISER_PATH": "y"}
    failed(run_here(tmp_path, wrong), "did you mean TOKENIZER_PATH?", "TOKENIZER_PATH='x'")


def test_a_pattern_that_matches_no_parameter_is_an_error_that_names_the_nearest(tmp_path, knobs):
    """The defaults have names that match none."""
    patterns = "attn_scale,mlp_scale,mlp_scales,resid_mx,q_gain,skip_weight"
    result = run_here(tmp_path, {**knobs, "CONTROL_TENSOR_NAME_PATTERNS": patterns})
    failed(result, "CONTROL_TENSOR_NAME_PATTERNS", "resid_mx ", "did you mean resid_mix?")
