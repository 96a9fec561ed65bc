"""Whole runs: the log line by line, the files, how a run ends, what ends it early."""

import functools
import json
import re
import shutil
import sys
import zlib
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import (
    SCRIPT,
    failed,
    finished,
    launch_command,
    make_state,
    run_here,
    run_ranks,
    same_models,
    scores,
    start,
    train_tokenizer,
    write_worker,
)

import train_gpt
from train_gpt import GPT, Hyperparameters, InputError

MODEL, ARTIFACT, RESULT = "final_model.pt", "final_model.int8.ptz", "final_result.json"
NUMBER = r"\d+"
LOSS = r"\d+\.\d{4}"
EXACT = r"\d+\.\d{8}"
SCORE = rf"val_loss:{LOSS} val_bpb:{LOSS}"
TIMES = r"train_time:\d+ms step_avg:\d+\.\d{2}ms"
LAST_LINES = [
    rf"final_int8_zlib_roundtrip {SCORE} eval_time:{NUMBER}ms",
    rf"final_int8_zlib_roundtrip_exact val_loss:{EXACT} val_bpb:{EXACT}",
]


def contract_lines(dataset: Path, tokenizer: Path) -> list[str]:
    """A pattern for each line of a run with the test's knobs, in order."""
    return [
        r"logs/test\.txt",
        r"unknown_knob:'ITERATION' is ignored: did you mean ITERATIONS\?",
        rf"val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path={re.escape(str(tokenizer))}",
        rf"train_loader:dataset:{re.escape(dataset.name)} train_shards:2",
        rf"val_loader:shards pattern={re.escape(str(dataset))}/fineweb_val_\*\.bin tokens:1472",
        rf"model_params:{NUMBER}",
        r"world_size:1 grad_accum_steps:8",
        r"sdp_backends:cudnn=False flash=True mem_efficient=True math=True",
        r"attention_mode:gqa num_heads:4 num_kv_heads:2",
        r"tie_embeddings:True embed_lr:0\.05 head_lr:0\.0 matrix_lr:0\.04 scalar_lr:0\.04",
        r"train_batch_tokens:512 train_seq_len:32 iterations:6 warmup_steps:2 "
        r"max_wallclock_seconds:0\.000",
        r"seed:1337",
        rf"knobs:DEVICE=cpu DTYPE=fp32 COMPILE=0 DATA_PATH={re.escape(str(dataset))} "
        rf"TOKENIZER_PATH={re.escape(str(tokenizer))} VAL_BATCH_SIZE=512 VAL_LOSS_EVERY=3 "
        r"ITERATIONS=6 WARMDOWN_ITERS=4 WARMUP_STEPS=2 TRAIN_BATCH_TOKENS=512 TRAIN_SEQ_LEN=32 "
        r"MAX_WALLCLOCK_SECONDS=0\.0 VOCAB_SIZE=384 NUM_LAYERS=3 MODEL_DIM=32 NUM_HEADS=4 "
        r"NUM_KV_HEADS=2",
        r"device:cpu dtype:torch.float32 compile:False cpu_threads:\d+",
        r"warmup_step:1/2",
        r"warmup_step:2/2",
        rf"step:0/6 {SCORE} {TIMES}",
        *[rf"step:{i}/6 train_loss:{LOSS} {TIMES}" for i in (1, 2, 3)],
        rf"step:3/6 {SCORE} {TIMES}",
        *[rf"step:{i}/6 train_loss:{LOSS} {TIMES}" for i in (4, 5, 6)],
        rf"step:6/6 {SCORE} {TIMES}",
        rf"peak memory allocated: {NUMBER} MiB reserved: {NUMBER} MiB",
        rf"Serialized model: {NUMBER} bytes",
        rf"Code size: {SCRIPT.stat().st_size} bytes",
        rf"Total submission size: {NUMBER} bytes",
        rf"Serialized model int8\+zlib: {NUMBER} bytes \(payload:{NUMBER} raw_torch:{NUMBER} "
        r"payload_ratio:\d+\.\d{2}x\)",
        rf"Total submission size int8\+zlib: {NUMBER} bytes",
        rf"size_check:fits limit:16000000 bytes_left:{NUMBER}",
        *LAST_LINES,
    ]


def log_file(folder: Path) -> tuple[str, str]:
    """The head of a run's log file, and its lines."""
    head, rule, lines = (folder / "logs" / "test.txt").read_text().rpartition("=" * 100 + "\n")
    return head + rule, lines


@pytest.fixture(scope="module")
def single(tmp_path_factory, knobs) -> tuple[Path, str, int]:
    """The folder, the log and the exit code of a run in a process of its own, whose stdout nobody
    reads behind the first line, as with `| head -1`."""
    folder = tmp_path_factory.mktemp("single")
    process = start(folder, {**knobs, "ITERATION": "7"}, [*launch_command(), SCRIPT])
    assert process.stdout.readline() == "logs/test.txt\n"
    process.stdout.close()
    code = process.wait(timeout=240)
    return folder, log_file(folder)[1], code


# ---- the log and the files -----------------------------------------------------------------------


def test_the_log_line_by_line(single, dataset, tokenizer):
    lines, patterns = single[1].splitlines(), contract_lines(dataset, tokenizer)
    for line, pattern in zip(lines, patterns, strict=False):
        assert re.fullmatch(pattern, line), (line, pattern)
    assert len(lines) == len(patterns)


def test_the_log_file_begins_with_source_versions_and_gpus(single):
    head, _ = log_file(single[0])
    rule = "=" * 100
    versions = f"Running Python {sys.version}\nRunning PyTorch {torch.__version__}\n"
    begin = f"{SCRIPT.read_text()}\n{rule}\n{versions}"
    assert head.startswith(begin) and "nvidia-smi" in head[len(begin) :].lower()


def test_the_console_has_the_lines_of_the_log_and_without_a_warm_up_all_is_the_same(
    single, tmp_path, knobs
):
    """A warm-up leaves no trace. Without one the first thing that a run does is a validation."""
    result = run_here(tmp_path, {**knobs, "WARMUP_STEPS": "0"})
    lines = finished(result)
    assert result.stdout == log_file(tmp_path)[1]
    assert not any(line.startswith("warmup_step:") for line in lines)
    assert same_models(tmp_path, single[0])


def test_the_sizes_are_those_of_the_files(single):
    folder, output, _ = single
    found = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert found == {"stderr.txt", MODEL, ARTIFACT, RESULT, "logs/test.txt"}
    sizes = {k: int(v) for k, v in re.findall(r"^(.+?): (\d+) bytes", output, re.MULTILINE)}
    plain, code = (folder / MODEL).stat().st_size, SCRIPT.stat().st_size
    artifact = (folder / ARTIFACT).read_bytes()
    assert (sizes["Serialized model"], sizes["Total submission size"]) == (plain, plain + code)
    assert sizes["Serialized model int8+zlib"] == len(artifact)
    assert sizes["Total submission size int8+zlib"] == len(artifact) + code
    assert f"bytes_left:{16_000_000 - len(artifact) - code}\n" in output
    assert f" raw_torch:{len(zlib.decompress(artifact))} " in output
    result = json.loads((folder / RESULT).read_text())
    assert (result["bytes_total"], result["bytes_code"]) == (len(artifact) + code, code)


def test_the_result_has_scores_knobs_and_versions(trained, quantized_knobs):
    folder, lines = trained
    result = json.loads((folder / RESULT).read_text())
    after = [result["val_loss"], result["val_bpb"]]
    assert after == pytest.approx(scores(lines[-1]), abs=6e-9)
    (end,) = [line for line in lines if line.startswith("step:6/6 val_loss:")]
    before = [result["pre_quant_val_loss"], result["pre_quant_val_bpb"]]
    assert before == pytest.approx(scores(end), abs=6e-5)
    assert result["train_ms"] == pytest.approx(int(re.search(r"(\d+)ms", end)[1]), abs=1)
    assert (result["steps"], result["partial"], result["world_size"]) == (6, "", 1)
    hp = Hyperparameters.from_env({**quantized_knobs, "CHECKPOINT_EVERY": "6"})
    assert result["knobs"] == json.loads(json.dumps(asdict(hp)))
    assert result["versions"]["torch"] == torch.__version__


@pytest.mark.baseline
def test_the_run_is_the_schedule_and_the_steps_by_hand(single, knobs):
    """Learning rate and momentum at step s, counted from 0, in a loop written out here."""
    state = make_state(Hyperparameters.from_env(knobs))
    adam, muon = state.optimizers
    for s, factor in enumerate([1, 1, 1, 0.75, 0.5, 0.25]):  # 6 iterations, 4 of warmdown
        adam.param_groups[0]["lr"], adam.param_groups[1]["lr"] = 0.05 * factor, 0.04 * factor
        muon.param_groups[0]["lr"] = 0.04 * factor
        muon.param_groups[0]["momentum"] = 0.85 + 0.10 * s / 500
        for _ in range(8):
            x, y = state.loader.next_batch(512, 32, 8)
            (state.gpt(x, y) / 8).backward()
        for optimizer in (adam, muon):
            optimizer.step()
            optimizer.zero_grad()
    trained = torch.load(single[0] / MODEL, weights_only=True)
    for name, tensor in state.gpt.state_dict().items():
        torch.testing.assert_close(tensor, trained[name], rtol=1e-3, atol=1e-4, msg=name)


def test_compiled_equals_eager(tmp_path, knobs, monkeypatch):
    """As far as graphs go: what inductor makes of them needs a C++ compiler and a minute, and is
    PyTorch's own affair."""
    compile = functools.partial(torch.compile, backend="aot_eager")
    environ = {**knobs, "NUM_LAYERS": "2", "ITERATIONS": "2", "MAX_VAL_TOKENS": "64"}
    eager = finished(run_here(tmp_path, environ))
    monkeypatch.setattr(torch, "compile", compile)
    compiled = finished(run_here(tmp_path, {**environ, "COMPILE": "1"}))
    assert any(" compile:True " in line for line in compiled)
    assert scores(compiled[-1]) == pytest.approx(scores(eager[-1]), abs=2e-3)


# ---- several ranks -------------------------------------------------------------------------------


def test_two_ranks_end_where_one_does_and_one_of_them_speaks(single, tmp_path, knobs):
    """The logged loss is the mean over both."""
    first, second = run_ranks(tmp_path, {**knobs, "OUTPUT_DIR": "out"}, 2)
    lines, alone = finished(first), single[1].splitlines()
    assert (second.returncode, second.stdout) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert "world_size:2 grad_accum_steps:4" in lines and "replicas:identical" in lines
    for two, one in zip(losses(lines), losses(alone), strict=True):
        assert two == pytest.approx(one, abs=2e-3)


def losses(lines: list[str]) -> list[float]:
    return [float(text) for text in re.findall(r"(?:train|val)_loss:(\S+)", "\n".join(lines))]


# Time passes in steps, twice as fast on rank 1, and while a checkpoint is written.
CLOCK = """
from types import SimpleNamespace
now = 1000.0
rank = int(os.environ["RANK"])

def let_pass(function, seconds):
    def wrapped(*arguments):
        global now
        now += seconds
        return function(*arguments)
    return wrapped

train_gpt.time = SimpleNamespace(perf_counter=lambda: now, sleep=time.sleep)
train_gpt.train_step = let_pass(train_gpt.train_step, (1 + rank) / 16)
train_gpt.write_file = let_pass(train_gpt.write_file, 100)
train_gpt.evaluate = let_pass(train_gpt.evaluate, 100)"""


def test_the_wallclock_cap_stops_all_ranks_after_the_same_step(tmp_path, knobs):
    """By rank 0's clock, which stands still while a checkpoint is written or the model validated.
    Learning rates follow it, too: the ranks' weights stay the same."""
    environ = {**knobs, "ITERATIONS": "100000", "MAX_WALLCLOCK_SECONDS": "1"}
    environ |= {"CHECKPOINT_EVERY": "6", "VAL_LOSS_EVERY": "8", "WARMDOWN_ITERS": "12"}
    result, _ = run_ranks(tmp_path, environ, 2, [write_worker(tmp_path, CLOCK)])
    lines = finished(result)
    (stop,) = [i for i, line in enumerate(lines) if line.startswith("stopping_early")]
    assert lines[stop] == "stopping_early: wallclock_cap train_time:1000ms step:16/100000"
    assert re.fullmatch(rf"step:16/100000 {SCORE} {TIMES}", lines[stop - 1])
    assert lines[stop - 1].endswith(" train_time:1000ms step_avg:62.50ms")
    assert "replicas:identical" in lines
    assert sum(line.startswith("checkpoint:") for line in lines) == 2


@pytest.mark.parametrize("what", ["knob", "shard", "tokenizer"])
def test_ranks_that_differ_end_with_an_error_that_names_it(tmp_path, dataset, knobs, what):
    """On a node with other files, say."""
    if what == "knob":
        own, words = {"TRAIN_LOG_EVERY": "15"}, "TRAIN_LOG_EVERY is 12 on rank 0, but 15 on rank 1"
    elif what == "tokenizer":
        (tmp_path / "other.model").write_bytes(train_tokenizer(split_digits=False))
        own, words = {"TOKENIZER_PATH": str(tmp_path / "other.model")}, "tokenizer is "
    else:
        data = shutil.copytree(dataset, tmp_path / "data")
        with open(data / "fineweb_train_000001.bin", "r+b") as shard:
            shard.seek(1024 + 2)
            shard.write(b"\xff")
        own, words = {"DATA_PATH": str(data)}, "fineweb_train_000001.bin is "
    for result in run_ranks(tmp_path, {**knobs, "TRAIN_LOG_EVERY": "12"}, 2, own={1: own}):
        failed(result, words)
        assert "warmup_step:" not in result.stdout


def test_replicas_that_differ_are_a_warning(tmp_path, knobs):
    change = """
def train(state, validation, train=train_gpt.train):
    signum = train(state, validation)
    state.gpt.skip_weights.data[0, 3] += 1e-7 * state.runtime.rank
    return signum

train_gpt.train = train"""
    worker = write_worker(tmp_path, change)
    lines = finished(run_ranks(tmp_path, {**knobs, "ITERATIONS": "1"}, 2, [worker])[0])
    assert sum("WARNING: replicas:" in line and "ranks [1]" in line for line in lines) == 1


# ---- how a run ends ------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["validate", "export", "check_replicas"])
def test_the_weights_are_on_the_disk_before_anything_can_fail(tmp_path, knobs, monkeypatch, broken):
    def fail(*arguments):
        raise RuntimeError("an edit that does not work")

    monkeypatch.setattr(train_gpt, broken, fail)
    monkeypatch.setattr(train_gpt.time, "sleep", lambda seconds: None)
    result = run_here(tmp_path, {**knobs, "ITERATIONS": "1", "VAL_LOSS_EVERY": "0"})
    assert result.returncode == 1 and "an edit that does not work" in result.stderr
    gpt = GPT(Hyperparameters.from_env(knobs), torch.float32)
    gpt.load_state_dict(torch.load(tmp_path / MODEL, weights_only=True))


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path, knobs):
    steep = {name: "1e30" for name in ("MATRIX_LR", "SCALAR_LR", "TIED_EMBED_LR")}
    result = run_here(tmp_path, {**knobs, **steep, "VAL_LOSS_EVERY": "0"})
    step = re.search(r"step:(\d) train_loss is (nan|inf)", failed(result))[1]
    assert result.stdout.splitlines()[-1].startswith(f"step:{step}/6 train_loss:")


def test_a_score_that_is_not_finite_fails_a_run_that_has_exported(tmp_path, knobs):
    """These weights are finite, but too large for fp16."""
    result = run_here(tmp_path, {**knobs, "MATRIX_LR": "1e30"})
    assert (result.returncode, result.stderr) == (1, "")
    assert "\nWARNING: the score is nan" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("final_int8_zlib_roundtrip_exact val_loss:nan")
    assert (tmp_path / ARTIFACT).is_file() and (tmp_path / RESULT).is_file()


def test_a_closed_pipe_costs_lines_only(single):
    folder, _, code = single
    assert (code, (folder / "stderr.txt").read_text()) == (0, "")


# ---- what ends it before it begins ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"TRAIN_BATCH_TOKENS": "1000"}, ["TRAIN_BATCH_TOKENS=1000", "TRAIN_SEQ_LEN=32"]),
        ({"RANK": "0", "WORLD_SIZE": "3"}, ["WORLD_SIZE=3", "BATCH_SLOTS=8"]),
        ({"DATA_PATH": "nowhere"}, ["DATA_PATH", "nowhere", "cached_challenge", "PRESET=demo"]),
        ({"TOKENIZER_PATH": "."}, ["TOKENIZER_PATH='.'", "cached_challenge", "PRESET=demo"]),
    ],
)
def test_what_users_get_wrong_is_told_before_a_model_is_built(tmp_path, knobs, changes, words):
    result = run_here(tmp_path, {**knobs, **changes})
    failed(result, *words)
    assert result.stdout in ("", "logs/test.txt\n")


def test_a_run_id_that_is_running_is_refused(tmp_path, knobs):
    """Of the second run nothing comes into the log of the first."""
    hp = Hyperparameters.from_env({**knobs, "OUTPUT_DIR": str(tmp_path)})
    log = train_gpt.open_log(hp, b"source")
    before = log_file(tmp_path)
    with pytest.raises(InputError, match="RUN_ID='test' is running already"):
        train_gpt.open_log(hp, b"source")
    assert log_file(tmp_path) == before
    del log
    train_gpt.open_log(hp, b"source")


# ---- the demo ------------------------------------------------------------------------------------


def test_the_demo_builds_its_data_once_and_runs(tmp_path, monkeypatch):
    environ = {"PRESET": "demo", "DEVICE": "cpu", "ITERATIONS": "1", "WARMUP_STEPS": "0"}
    environ |= {"MAX_VAL_TOKENS": "1024", "VAL_LOSS_EVERY": "0", "OUTPUT_DIR": "out"}
    lines = finished(run_here(tmp_path, environ))
    assert lines[1].startswith("demo_corpus:documents:")
    assert any(line.startswith("device:cpu dtype:torch.float32 compile:False") for line in lines)
    shards = list((tmp_path / "data" / "datasets" / "demo_sp1024").glob("*.bin"))
    times = [path.stat().st_mtime_ns for path in shards]
    monkeypatch.chdir(tmp_path)
    hp = Hyperparameters.from_env({"PRESET": "demo"})
    assert train_gpt.prepare_demo(hp).splitlines() == lines[1:4]
    assert [path.stat().st_mtime_ns for path in shards] == times and len(times) == 2


def test_the_demo_never_writes_over_a_players_own_tokenizer(tmp_path, tokenizer):
    """With a path of one's own, the data is one's own, too."""
    before = tokenizer.read_bytes()
    environ = {"PRESET": "demo", "DEVICE": "cpu", "TOKENIZER_PATH": str(tokenizer)}
    failed(run_here(tmp_path, environ), "DATA_PATH has no ./data/datasets/demo_sp1024")
    assert tokenizer.read_bytes() == before
