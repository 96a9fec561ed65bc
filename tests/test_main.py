"""Whole runs: the command line, the log line by line, the files, how a run ends."""

import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from runs import ARTIFACT, MODEL, RESULT, SCRIPT, failed, finished, run_here, scores
from texts import TEXTS, read_shard, train_tokenizer
from trained import load_script

import train_gpt
from train_gpt import GPT, Hyperparameters

LOSS = r"\d+\.\d{4}"
SCORE = rf"val_loss:{LOSS} val_bpb:{LOSS}"
TIMES = r"train_time:\d+ms step_avg:\d+\.\d{2}ms"


def log_file(folder: Path) -> tuple[str, str]:
    """Split a run's log file into its head (source and versions) and its lines."""
    head, rule, lines = (folder / "logs" / "test.txt").read_text().rpartition("=" * 100 + "\n")
    return head + rule, lines


@pytest.fixture(scope="module")
def single(tmp_path_factory, knobs) -> tuple[Path, str]:
    """Folder and log of a run in its own process."""
    folder = tmp_path_factory.mktemp("single")
    environ = runs.process_environ(knobs)
    subprocess.run([sys.executable, SCRIPT], cwd=folder, env=environ, check=True)
    return folder, log_file(folder)[1]


# ---- the command line ----------------------------------------------------------------------------
def test_help_shows_all_knobs_and_another_argument_is_an_error(tmp_path):
    result = run_here(tmp_path, {}, arguments=["--help"])
    assert (result.returncode, result.stderr) == (0, "")
    for knob in fields(Hyperparameters):
        assert re.search(rf"^    {knob.name}: .* = ", result.stdout, re.M), knob.name
    failed(run_here(tmp_path, {}, arguments=["ITERATIONS=5"]), "'ITERATIONS=5'", "--help")
    assert list(tmp_path.iterdir()) == []


def test_without_numpy_one_line_names_the_environment(tmp_path):
    command = [sys.executable, "-S", SCRIPT]  # without the installed packages
    environ = runs.process_environ({})
    result = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    [line] = failed(result, "numpy", ". .venv/bin/activate").splitlines()


def test_a_run_goes_on_after_the_end_of_its_pipe(tmp_path, knobs):
    line = f"{shlex.join([sys.executable, str(SCRIPT)])} | true; exit ${{PIPESTATUS[0]}}"
    environ = runs.process_environ({**knobs, "ITERATIONS": "0"})
    result = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environ, capture_output=True)
    assert (result.returncode, result.stderr) == (0, b"")
    assert "\nfinal_int8_zlib_roundtrip_exact " in log_file(tmp_path)[1]


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_warnings_of_srun_a_wrong_tokenizer_and_an_unused_gpu(tmp_path, knobs, monkeypatch, cuda):
    """They come at the start and next to the score. A CPU build of torch never warns of a GPU."""
    path = tmp_path / "other.model"
    path.write_bytes(train_tokenizer(sentence_iterator=iter(TEXTS[0].splitlines())))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    environ = {**knobs, "TOKENIZER_PATH": str(path), "DEVICE": "auto", "ITERATIONS": "0"}
    lines = finished(run_here(tmp_path, {**environ, "SLURM_NTASKS": "2"}))
    warned = [line for line in lines if line.startswith("WARNING")]
    words = ["torchrun", "TOKENIZER_PATH", *(["GPU"] if cuda else [])]
    assert all(word in line for word, line in zip(2 * words, warned, strict=True))


# ---- the log and the files -----------------------------------------------------------------------
def test_the_log_line_by_line(single, dataset, tokenizer):
    patterns = [
        r"logs/test\.txt",
        rf"val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path={re.escape(str(tokenizer))}",
        rf"train_loader:dataset:{re.escape(dataset.name)} train_shards:2",
        rf"val_loader:shards pattern={re.escape(str(dataset))}/fineweb_val_\*\.bin tokens:1472",
        r"input_crc32 val_tokens:\d+ tokenizer:\d+",
        r"model_params:\d+",
        r"world_size:1 grad_accum_steps:8",
        r"sdp_backends:cudnn=False flash=True mem_efficient=True math=True",
        r"attention_mode:gqa num_heads:4 num_kv_heads:2",
        r"tie_embeddings:(True embed_lr:0\.05 head_lr:0\.0|False embed_lr:0\.6 head_lr:0\.008) "
        r"matrix_lr:0\.04 scalar_lr:0\.04",
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
        r"Serialized model: \d+ bytes",
        rf"Code size: {SCRIPT.stat().st_size} bytes",
        r"Total submission size: \d+ bytes",
        r"Serialized model int8\+zlib: \d+ bytes \(payload:\d+ raw_torch:\d+ "
        r"payload_ratio:\d+\.\d{2}x\)",
        r"Total submission size int8\+zlib: \d+ bytes",
        r"size_check:fits limit:16000000 bytes_left:\d+",
        r"files: final_model\.pt final_model\.int8\.ptz final_result\.json",
        rf"final_int8_zlib_roundtrip {SCORE} eval_time:\d+ms",
        r"final_int8_zlib_roundtrip_exact val_loss:\d+\.\d{8} val_bpb:\d+\.\d{8}",
    ]
    lines = single[1].splitlines()
    for line, pattern in zip(lines, patterns, strict=False):
        assert re.fullmatch(pattern, line), (line, pattern)
    assert len(lines) == len(patterns)


def test_the_steps_that_are_logged(tmp_path, knobs):
    """Steps 1 to 10, then every TRAIN_LOG_EVERY; of a long warm-up, every tenth and the last."""
    few = {"NUM_LAYERS": "1", "WARMUP_STEPS": "23", "ITERATIONS": "12", "TRAIN_LOG_EVERY": "4"}
    log = "\n".join(finished(run_here(tmp_path, {**knobs, **few})))
    assert re.findall(r"warmup_step:(\S+)", log) == ["10/23", "20/23", "23/23"]
    steps = [int(step) for step in re.findall(r"step:(\d+)/12 train_loss", log)]
    assert steps == [*range(1, 11), 12]


def test_the_log_file_begins_with_source_versions_and_gpus(single):
    head, _ = log_file(single[0])
    rule = "=" * 100
    versions = f"Running Python {sys.version}\nRunning PyTorch {torch.__version__}\n"
    begin = f"{SCRIPT.read_text()}\n{rule}\n{versions}script_bytes:{SCRIPT.stat().st_size}\n"
    assert head.startswith(begin) and "nvidia-smi" in head[len(begin) :].lower()
    assert head.endswith(f"\n{rule}\n")


def test_an_edit_during_the_start_is_not_taken_for_the_source(tmp_path, knobs):
    """It takes seconds to import torch."""
    script = tmp_path / "edited.py"
    source = SCRIPT.read_text().replace("import numpy as np\n", 'open(__file__, "w").close()\n')
    script.write_text(source.replace("# ---- Hyper", "import numpy as np\n# ---- Hyper"))
    source = script.read_text()
    finished(runs.run_ranks(tmp_path, {**knobs, "ITERATIONS": "0"}, 1, [script])[0])
    assert script.read_text() == ""
    assert (tmp_path / "logs" / "test.txt").read_text().startswith(source)


def test_the_console_shows_the_log_and_a_warm_up_changes_no_bit(single, tmp_path, knobs):
    """Without a warm-up a run begins with a validation."""
    result = run_here(tmp_path, {**knobs, "WARMUP_STEPS": "0"})
    lines = finished(result)
    assert result.stdout == log_file(tmp_path)[1]
    assert not any(line.startswith("warmup_step:") for line in lines)
    assert runs.same_models(tmp_path, single[0])


def test_the_sizes_are_those_of_the_files(single):
    folder, output = single
    found = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert found == {MODEL, ARTIFACT, RESULT, "logs/test.txt"}
    plain, code = (folder / MODEL).stat().st_size, SCRIPT.stat().st_size
    artifact = (folder / ARTIFACT).read_bytes()
    assert f"\nSerialized model: {plain} bytes\n" in output
    assert f"\nTotal submission size: {plain + code} bytes\n" in output
    assert f" raw_torch:{len(train_gpt.decompress(artifact))} " in output
    result = json.loads((folder / RESULT).read_text())
    assert (result["bytes_total"], result["bytes_code"]) == (len(artifact) + code, code)


def test_the_result_names_its_files_inputs_speed_and_where_it_ran(single, dataset):
    folder, output = single
    result = json.loads((folder / RESULT).read_text())
    files = {name: zlib.crc32((folder / name).read_bytes()) for name in (MODEL, ARTIFACT)}
    assert result["crc32"] == files
    assert f"\nmodel_params:{result['model_params']}\n" in output
    place = {"torch": torch.__version__, "device": "cpu", "world_size": 1, "peak_memory_mib": None}
    assert {name: result[name] for name in place} == place
    assert 1000 * result["run_seconds"] > result["train_ms"] + result["eval_ms"]
    tokens = result["knobs"]["train_batch_tokens"] * result["steps"]
    assert result["tokens_per_second"] == pytest.approx(1000 * tokens / result["train_ms"])
    val_tokens = np.concatenate([read_shard(p) for p in sorted(dataset.glob("fineweb_val_*"))])
    inputs = {"script": SCRIPT.read_bytes(), "val_tokens": val_tokens}
    inputs["tokenizer"] = Path(result["knobs"]["tokenizer_path"]).read_bytes()
    assert result["input_crc32"] == {name: zlib.crc32(data) for name, data in inputs.items()}
    line = "\ninput_crc32 val_tokens:{val_tokens} tokenizer:{tokenizer}\n"
    assert line.format(**result["input_crc32"]) in output


def test_the_result_has_scores_and_knobs(trained, quantized_knobs):
    folder, lines = trained
    result = json.loads((folder / RESULT).read_text())
    after = [result["val_loss"], result["val_bpb"]]
    assert after == pytest.approx(scores(lines[-1]), abs=6e-9)
    (end,) = [line for line in lines if line.startswith("step:6/6 val_loss:")]
    before = [result["pre_quant_val_loss"], result["pre_quant_val_bpb"]]
    assert before == pytest.approx(scores(end), abs=6e-5)
    assert result["train_ms"] == pytest.approx(int(re.search(r"(\d+)ms", end)[1]), abs=1)
    assert result["steps"] == 6
    hp = Hyperparameters.from_env({**quantized_knobs, "CHECKPOINT_EVERY": "100"})
    assert result["knobs"] == json.loads(json.dumps(asdict(hp)))


def test_compiled_equals_eager(tmp_path, knobs, monkeypatch):
    """Only the traced graphs are compared. Inductor, which compiles them, is tested by PyTorch, and
    needs a C++ compiler and a minute."""
    compile = functools.partial(torch.compile, backend="aot_eager")
    environ = {**knobs, "NUM_LAYERS": "2", "ITERATIONS": "2", "MAX_VAL_TOKENS": "64"}
    eager = finished(run_here(tmp_path, environ))
    monkeypatch.setattr(torch, "compile", compile)
    compiled = finished(run_here(tmp_path, {**environ, "COMPILE": "1"}))
    assert any(" compile:True " in line for line in compiled)
    assert scores(compiled[-1]) == pytest.approx(scores(eager[-1]), abs=2e-3)


# ---- how a run ends ------------------------------------------------------------------------------
@pytest.mark.parametrize("place, broken", [(GPT, "eval"), (train_gpt, "quantize_state_dict_int8")])
def test_weights_and_knobs_are_on_the_disk_before_anything_can_fail(
    tmp_path, knobs, monkeypatch, place, broken
):
    """The files replace those of an older run, and the last step has a checkpoint. An error in a
    player's code keeps its traceback."""

    def fail(*arguments):
        Path("my_table.bin").read_bytes()

    short = {**knobs, "ITERATIONS": "1", "VAL_LOSS_EVERY": "0"}
    finished(run_here(tmp_path, {**short, "MODEL_DIM": "64"}))
    monkeypatch.setattr(place, broken, fail)
    result = run_here(tmp_path, {**short, "CHECKPOINT_EVERY": "9"})
    assert result.returncode == 1 and ", in fail\n" in result.stderr
    assert json.loads((tmp_path / RESULT).read_text())["knobs"]["model_dim"] == 32
    assert (tmp_path / ARTIFACT).exists() == (broken == "eval")  # never the older one
    assert (tmp_path / "checkpoints" / "test.pt").is_file()
    gpt = GPT(Hyperparameters.from_env(knobs), torch.float32)
    gpt.load_state_dict(torch.load(tmp_path / MODEL, weights_only=True))


@pytest.mark.parametrize("step, knob", [(1, "QK_GAIN_INIT"), (2, "SCALAR_LR")])
def test_a_loss_that_is_not_finite_ends_the_training(tmp_path, knobs, step, knob):
    """The first loss is that of the initial weights, so the error blames no learning rate."""
    result = run_here(tmp_path, {**knobs, knob: "3e38", "VAL_LOSS_EVERY": "0"})
    assert ("DTYPE" in failed(result, "train_loss")) == (step == 1)
    assert result.stdout.splitlines()[-1].startswith(f"step:{step}/6 train_loss:nan ")


def test_a_score_that_is_not_finite_fails_a_run_that_has_exported(tmp_path, knobs):
    huge = {"SCALAR_LR": "3e38", "ITERATIONS": "1", "WARMDOWN_ITERS": "0"}
    result = run_here(tmp_path, {**knobs, **huge})
    assert (result.returncode, result.stderr) == (1, "")
    assert result.stdout.splitlines()[-1].startswith("final_int8_zlib_roundtrip_exact val_loss:nan")
    assert (tmp_path / ARTIFACT).is_file()
    text = (tmp_path / RESULT).read_text()
    assert "NaN" not in text  # NaN is not JSON
    result = json.loads(text)
    assert (result["val_loss"], result["pre_quant_val_bpb"], result["steps"]) == (None, None, 1)


def write_models(folder: Path, knobs: dict, number: int, barrier: object) -> None:
    """Write ten models, each as a run does that ends."""
    hp = Hyperparameters.from_env({**knobs, "OUTPUT_DIR": str(folder)})
    state = train_gpt.TrainingState(hp, replace(runs.ALONE, log=runs.Lines()))
    for i in range(10):
        barrier.wait()
        train_gpt.write_final(state, MODEL, f"{number} {i}".encode(), *train_gpt.FINAL_FILES)


def test_runs_that_end_in_one_folder_at_the_same_moment_lose_no_model(tmp_path, knobs):
    barrier = runs.FORKS.Barrier(3)
    arguments = [(tmp_path, knobs, number, barrier) for number in range(3)]
    processes = [runs.FORKS.Process(target=write_models, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    models = {path.read_text() for path in tmp_path.rglob(MODEL)}
    assert models == {f"{number} {i}" for number in range(3) for i in range(10)}


# ---- how a run ends before it begins -------------------------------------------------------------
@pytest.mark.parametrize(
    "changes",
    [
        {"TOKENIZER_PATH": "."},
        # The demo builds nothing next to a player's own file, which it might overwrite.
        {"PRESET": "demo", "DATA_PATH": "./data/datasets/demo_sp1024"},
        {"PRESET": "demo", "TOKENIZER_PATH": "./data/tokenizers/demo_1024_bpe.model"},
    ],
)
def test_a_user_error_is_one_error_and_leaves_no_log(tmp_path, knobs, changes):
    result = run_here(tmp_path, {**knobs, **changes})
    failed(result, *changes, *changes.values())
    assert result.stdout == "" and list(tmp_path.iterdir()) == []


# ---- the demo ------------------------------------------------------------------------------------
def test_the_demo_builds_its_data_once_and_runs(tmp_path):
    """A copy of the script, without the program that builds the data, can use them."""
    environ = {"PRESET": "demo", "DEVICE": "cpu", "ITERATIONS": "1", "WARMUP_STEPS": "0"}
    environ |= {"MAX_VAL_TOKENS": "1024", "VAL_LOSS_EVERY": "0", "OUTPUT_DIR": "out"}
    first = finished(run_here(tmp_path, environ))
    shards = list((tmp_path / "data" / "datasets" / "demo_sp1024").glob("*.bin"))
    times = [path.stat().st_mtime_ns for path in shards]
    second = finished(run_here(tmp_path, environ))
    assert [path.stat().st_mtime_ns for path in shards] == times and len(times) == 2
    assert re.search(r"ms tokens:1024 of \d+$", first[-2])  # a part of the split
    shutil.copy(SCRIPT, tmp_path / "copy.py")
    finished(run_here(tmp_path, environ, load_script(tmp_path / "copy.py")))
    built, found = ([s for s in log if s.startswith("demo_corpus:")] for log in (first, second))
    assert built == found and len(built) > 0
