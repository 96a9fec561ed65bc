"""Whole runs, as processes: python and torchrun, the log line by line, the files, every error."""

import io
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from conftest import (
    ALONE,
    ROOT,
    SCRIPT,
    process_environ,
    run_here,
    run_ranks,
    run_script,
    start_script,
    write_shard,
    write_worker,
)

from train_gpt import (
    GPT,
    DistributedTokenLoader,
    Hyperparameters,
    InputError,
    Validation,
    build_optimizers,
    evaluate,
    evaluate_sliding,
    load_weights,
    run,
)

NUMBER = r"\d+"
LOSS = r"\d+\.\d{4}"
EXACT = r"\d+\.\d{8}"
LAST_LINES = [
    rf"final_int8_zlib_roundtrip val_loss:{LOSS} val_bpb:{LOSS} eval_time:{NUMBER}ms",
    rf"final_int8_zlib_roundtrip_exact val_loss:{EXACT} val_bpb:{EXACT}",
]
TIMES = r"train_time:\d+ms step_avg:\d+\.\d{2}ms"


def contract_lines(dataset, tokenizer) -> list[str]:
    """A pattern for each line of a run with the test's knobs, in order."""
    return [
        r"logs/test\.txt",
        rf"val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path={re.escape(str(tokenizer))}",
        rf"train_loader:dataset:{re.escape(dataset.name)} train_shards:2",
        rf"val_loader:shards pattern={re.escape(str(dataset))}/fineweb_val_\*\.bin tokens:1472",
        r"model_params:34220",
        r"world_size:1 grad_accum_steps:8",
        r"sdp_backends:cudnn=False flash=True mem_efficient=False math=False",
        r"attention_mode:gqa num_heads:4 num_kv_heads:2",
        r"tie_embeddings:True embed_lr:0\.05 head_lr:0\.0 matrix_lr:0\.04 scalar_lr:0\.04",
        r"train_batch_tokens:512 train_seq_len:32 iterations:6 warmup_steps:2 "
        r"max_wallclock_seconds:0\.000",
        r"seed:1337",
        r"device:cpu dtype:torch.float32 compile:False cpu_threads:\d+",
        r"warmup_step:1/2",
        r"warmup_step:2/2",
        rf"step:0/6 val_loss:{LOSS} val_bpb:{LOSS} {TIMES}",
        *[rf"step:{i}/6 train_loss:{LOSS} {TIMES}" for i in (1, 2, 3)],
        rf"step:3/6 val_loss:{LOSS} val_bpb:{LOSS} {TIMES}",
        *[rf"step:{i}/6 train_loss:{LOSS} {TIMES}" for i in (4, 5, 6)],
        rf"step:6/6 val_loss:{LOSS} val_bpb:{LOSS} {TIMES}",
        rf"peak memory allocated: {NUMBER} MiB reserved: {NUMBER} MiB",
        r"speed: tokens_per_s:\d+ data_wait:0\.\d{3}",
        rf"Serialized model: {NUMBER} bytes",
        rf"Code size: {SCRIPT.stat().st_size} bytes",
        rf"Total submission size: {NUMBER} bytes",
        rf"Serialized model int8\+zlib: {NUMBER} bytes \(payload:{NUMBER} raw_torch:{NUMBER} "
        r"payload_ratio:\d+\.\d{2}x\)",
        rf"Total submission size int8\+zlib: {NUMBER} bytes",
        rf"size_check:fits limit:16000000 bytes_left:{NUMBER}",
        *LAST_LINES,
    ]


def last_numbers(output: str) -> tuple[float, float]:
    """val_loss and val_bpb of a run's last line."""
    match = re.fullmatch(
        r"final_int8_zlib_roundtrip_exact val_loss:(\S+) val_bpb:(\S+)", output.splitlines()[-1]
    )
    return float(match[1]), float(match[2])


def without_times(output: str) -> list[str]:
    return [
        re.sub(r"(train_time|step_avg|eval_time):\S+|peak memory.*|speed:.*", "", s)
        for s in output.splitlines()
    ]


@pytest.fixture(scope="module")
def single(tmp_path_factory, knobs):
    """One run of the script with python: its folder and its output."""
    folder = tmp_path_factory.mktemp("single")
    result = run_script(folder, knobs)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return folder, result.stdout


def test_the_log_line_by_line(single, dataset, tokenizer):
    _, output = single
    lines, patterns = output.splitlines(), contract_lines(dataset, tokenizer)
    for line, pattern in zip(lines, patterns, strict=False):
        assert re.fullmatch(pattern, line), (line, pattern)
    assert len(lines) == len(patterns)


def test_the_speed_is_that_of_the_steps(single):
    """Tokens over the time of the last step's line; both are rounded."""
    _, output = single
    speed = int(re.search(r"^speed: tokens_per_s:(\d+)", output, re.M)[1])
    train_ms = int(re.findall(r"train_time:(\d+)ms", output)[-1])
    assert 6 * 512 * 1000 / (train_ms + 1) - 1 <= speed <= 6 * 512 * 1000 / (train_ms - 1) + 1


def test_the_log_file_has_source_versions_gpus_and_every_line(single):
    folder, output = single
    text = (folder / "logs" / "test.txt").read_text()
    rule = "=" * 100
    versions = f"Running Python {sys.version}\nRunning PyTorch {torch.__version__}\n"
    head = f"{SCRIPT.read_text()}\n{rule}\n{versions}"
    assert text.startswith(head)
    gpus, end, lines = text[len(head) :].partition(f"\n{rule}\n")
    assert "nvidia-smi" in gpus.lower() and end
    assert lines == output


def test_the_files(single, knobs):
    folder, output = single
    found = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    assert found == ["final_model.int8.ptz", "final_model.pt", "final_result.json", "logs/test.txt"]
    sizes = {k: int(v) for k, v in re.findall(r"^(.+?): (\d+) bytes", output, re.MULTILINE)}
    plain, packed = folder / "final_model.pt", folder / "final_model.int8.ptz"
    assert sizes["Serialized model"] == plain.stat().st_size
    assert sizes["Serialized model int8+zlib"] == packed.stat().st_size
    assert sizes["Total submission size"] == plain.stat().st_size + SCRIPT.stat().st_size
    assert sizes["Total submission size int8+zlib"] == packed.stat().st_size + SCRIPT.stat().st_size
    raw_torch = int(re.search(r"raw_torch:(\d+)", output)[1])
    assert raw_torch == len(zlib.decompress(packed.read_bytes()))
    hp = Hyperparameters.from_env(knobs)
    gpt = GPT(hp, torch.float32)
    gpt.load_state_dict(torch.load(plain, weights_only=True))
    load_weights(gpt, packed.read_bytes(), packed)


def test_training_helps_and_the_round_trip_costs_little(single):
    _, output = single
    losses = [float(x) for x in re.findall(r"val_loss:(\d+\.\d{4}) ", output)]
    assert losses[2] < losses[1] < losses[0] - 0.05  # steps 0, 3 and 6
    assert last_numbers(output)[0] == pytest.approx(losses[2], abs=0.02)


def test_the_run_is_the_schedule_and_the_steps_by_hand(single, knobs):
    """Learning rate and momentum at step s, counted from 0, in a loop written out here."""
    folder, _ = single
    hp = Hyperparameters.from_env(knobs)
    torch.manual_seed(hp.seed)
    gpt = GPT(hp, torch.float32)
    adam, muon = build_optimizers(gpt, torch.float32)
    loader = DistributedTokenLoader(hp.files("train"), 0, 1, "cpu")
    for s, factor in enumerate([1, 1, 1, 0.75, 0.5, 0.25]):  # 6 iterations, 4 of warmdown
        adam.param_groups[0]["lr"], adam.param_groups[1]["lr"] = 0.05 * factor, 0.04 * factor
        muon.param_groups[0]["lr"] = 0.04 * factor
        muon.param_groups[0]["momentum"] = 0.85 + 0.10 * s / 500
        for _ in range(8):
            x, y = loader.next_batch(512, 32, 8)
            (gpt(x, y) / 8).backward()
        for optimizer in (adam, muon):
            optimizer.step()
            optimizer.zero_grad()
    trained = torch.load(folder / "final_model.pt", weights_only=True)
    for name, tensor in gpt.state_dict().items():
        torch.testing.assert_close(tensor, trained[name], rtol=1e-3, atol=1e-4, msg=name)


def test_the_last_line_scores_the_bytes_on_the_disk(tmp_path, knobs, tokenizer):
    """With a model large enough that its matrices are quantized."""
    environ = {**knobs, "MODEL_DIM": "256", "NUM_LAYERS": "2", "ITERATIONS": "3"}
    result = run_here(tmp_path, environ)
    assert result.returncode == 0, result.stderr
    hp = Hyperparameters.from_env(environ)
    validation = Validation(hp)
    data = (tmp_path / "final_model.int8.ptz").read_bytes()
    assert torch.load(io.BytesIO(zlib.decompress(data)), weights_only=True)["quantized"]
    scores = []
    for state in (data, (tmp_path / "final_model.pt").read_bytes()):
        gpt = GPT(hp, torch.float32)
        load_weights(gpt, state, "a file")
        scores.append(evaluate(gpt, validation.tokens, hp, ALONE))
    loss, bpb = last_numbers(result.stdout)
    assert loss == pytest.approx(scores[0], abs=2e-6)
    assert abs(scores[0] - scores[1]) > 1e-4  # not the unquantized model
    assert bpb == pytest.approx(validation.bits_per_byte(loss), abs=1e-7)


def test_warm_up_leaves_no_trace_and_may_be_left_out(single, tmp_path, knobs):
    """Without warm-up the first thing that the model does is the validation at step 0."""
    folder, _ = single
    result = run_here(tmp_path, {**knobs, "WARMUP_STEPS": "0"})
    assert result.returncode == 0, result.stderr
    assert "warmup_step:" not in result.stdout
    name = "final_model.int8.ptz"
    assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_two_ranks_end_where_one_does(single, tmp_path, knobs):
    """In bf16. (Gradients and weights in fp32: test_accumulation.py.)"""
    _, output = single
    environ = {**knobs, "DTYPE": "bf16", "OUTPUT_DIR": "out"}
    result, other = run_ranks(tmp_path, environ, 2)
    assert (other.stdout, other.stderr) == ("", "")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "out/logs/test.txt" and "replicas:identical" in lines
    assert "world_size:2 grad_accum_steps:4" in lines
    assert len(lines) == len(output.splitlines()) + 1  # one rank prints
    assert last_numbers(result.stdout) == pytest.approx(last_numbers(output), abs=0.02)
    losses, expected = (re.findall(r"train_loss:(\S+)", text) for text in (result.stdout, output))
    assert list(map(float, losses)) == pytest.approx(list(map(float, expected)), abs=0.02)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_the_wallclock_cap_stops_all_ranks_after_the_same_step(tmp_path, knobs):
    environ = {
        **knobs,
        "ITERATIONS": "100000",
        "MAX_WALLCLOCK_SECONDS": "1.5",
        "VAL_LOSS_EVERY": "0",
        "WARMDOWN_ITERS": "100000",
    }
    result, _ = run_ranks(tmp_path, environ, 2)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    (begun,) = [i for i, line in enumerate(lines) if line.startswith("warmdown:begun already")]
    assert lines[begun - 1].startswith("step:10/") and "WARMDOWN_ITERS=100000" in lines[begun]
    (stop,) = [i for i, line in enumerate(lines) if line.startswith("stopping_early")]
    match = re.fullmatch(
        r"stopping_early: wallclock_cap train_time:(\d+)ms step:(\d+)/100000", lines[stop]
    )
    assert 1500 <= int(match[1]) < 2500 and int(match[2]) > 10
    assert lines[stop - 1].startswith(f"step:{match[2]}/100000 val_loss:")
    assert "replicas:identical" in lines


def test_untied_first_loss_is_ln_v(tmp_path, knobs):
    environ = {**knobs, "TIE_EMBEDDINGS": "0", "ITERATIONS": "2"}
    result = run_here(tmp_path, {**environ, "NUM_LAYERS": "1"})
    assert result.returncode == 0, result.stderr
    assert "step:1/2 train_loss:5.9506 " in result.stdout  # ln 384 = 5.95064
    assert "tie_embeddings:False embed_lr:0.6 head_lr:0.008 " in result.stdout


@pytest.fixture(scope="module")
def untrained(tmp_path_factory, knobs):
    """The output of a run without a step, in which a torch for CUDA sees no GPU. (Where torch is
    made for the CPU, the version that it says is made up.)"""
    auto = {"DEVICE": "auto", "COMPILE": "auto", "ITERATIONS": "0"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "cuda", torch.version.cuda or "13.0")
        result = run_here(tmp_path_factory.mktemp("untrained"), {**knobs, **auto})
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_no_iterations_still_validate_and_export(untrained):
    assert untrained.count(" val_loss:") == 3 and "train_loss" not in untrained


def test_compiled_equals_eager(tmp_path, knobs):
    """One layer, matrices of one shape and no vector instructions: more would take longer to
    compile and show nothing else."""
    small = {"NUM_LAYERS": "1", "NUM_KV_HEADS": "4", "MLP_MULT": "1"}
    small |= {"ATEN_CPU_CAPABILITY": "default", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    environ = {**knobs, **small}
    eager = run_here(tmp_path, {**environ, "COMPILE": "0"})
    compiled = run_script(tmp_path, {**environ, "COMPILE": "1"})
    assert compiled.returncode == 0, compiled.stderr
    assert "compile:False" in eager.stdout and "compile:True" in compiled.stdout
    assert last_numbers(compiled.stdout) == pytest.approx(last_numbers(eager.stdout), abs=2e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_torch_for_cuda_that_sees_no_gpu_says_so_and_takes_the_cpu_uncompiled(untrained):
    lines = untrained.splitlines()
    (place,) = [i for i, line in enumerate(lines) if line.startswith("device:cpu")]
    assert " compile:False " in lines[place]
    expected = "device:torch is built for CUDA but sees no GPU, so the CPU it is: nvidia-smi?"
    assert lines[place + 1] == expected


def test_a_run_that_asked_for_the_cpu_misses_no_gpu(single):
    _, output = single
    assert "built for CUDA" not in output


# ---- the last lines ------------------------------------------------------------------------------


def ends_with_the_score(output: str) -> bool:
    """Whether the last two lines are those of the contract; the score may be no number."""
    number = rf"({LOSS}|nan|inf)".replace("4", "4,8")
    patterns = [line.replace(LOSS, number).replace(EXACT, number) for line in LAST_LINES]
    lines = output.splitlines()[-2:]
    return all(re.fullmatch(*pair) for pair in zip(patterns, lines, strict=True))


def test_the_sliding_score_is_a_line_of_its_own_before_the_last_two(tmp_path, knobs):
    """With all else on that writes or logs late."""
    stride = {"EVAL_STRIDE": "8", "CHECKPOINT_EVERY": "1", "TRAIN_LOG_EVERY": "1"}
    result = run_here(tmp_path, {**knobs, **stride, "ITERATIONS": "2"})
    assert result.returncode == 0, result.stderr
    sliding = rf"final_int8_zlib_roundtrip_sliding stride:8 val_loss:({EXACT}) val_bpb:({EXACT})"
    lines = result.stdout.splitlines()
    for line, pattern in zip(lines[-3:], [sliding, *LAST_LINES], strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)
    assert lines[-4].startswith("size_check:")
    hp = Hyperparameters.from_env({**knobs, **stride})
    gpt = GPT(hp, torch.float32)
    load_weights(gpt, (tmp_path / "final_model.int8.ptz").read_bytes(), "the artifact")
    validation = Validation(hp)
    loss = evaluate_sliding(gpt, validation.tokens, hp, ALONE)
    match = re.fullmatch(sliding, lines[-3])
    assert float(match[1]) == pytest.approx(loss, abs=2e-6)
    assert float(match[2]) == pytest.approx(validation.bits_per_byte(loss), abs=2e-6)
    assert float(match[1]) != last_numbers(result.stdout)[0]


def test_scoring_a_file_ends_with_the_same_lines(single, tmp_path, knobs):
    folder, output = single
    file = folder / "final_model.int8.ptz"
    environ = {**knobs, "EVAL_ONLY": str(file), "EVAL_STRIDE": "32"}
    result = run_here(tmp_path, environ)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[-3].startswith("final_int8_zlib_roundtrip_sliding stride:32 ")
    assert without_times(result.stdout)[-2:] == without_times(output)[-2:]
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


MODELS = ["final_model.int8.ptz", "final_model.pt"]


@pytest.mark.parametrize(
    "change",
    [
        {"MATRIX_LR": "1e8", "ITERATIONS": "3", "VAL_LOSS_EVERY": "0"},
        {"INT8_SCALE_FLOOR": "1e6", "MODEL_DIM": "256", "NUM_LAYERS": "1", "ITERATIONS": "1"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_score_that_is_not_finite_fails_the_run_and_leaves_its_files(tmp_path, knobs, change):
    result = run_here(tmp_path, {**knobs, "WARMUP_STEPS": "0", **change})
    assert result.returncode == 1 and ends_with_the_score(result.stdout), result.stdout
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("ValueError: the score is nan"), result.stderr
    assert sorted(path.name for path in tmp_path.glob("final_model*")) == MODELS


def test_a_file_whose_score_is_not_finite_fails_the_run(single, tmp_path, knobs):
    folder, _ = single
    weights = torch.load(folder / "final_model.pt", weights_only=True)
    weights["blocks.0.mlp.fc.weight"][3, 5] = float("nan")
    torch.save(weights, tmp_path / "nan.pt")
    result = run_here(tmp_path, {**knobs, "EVAL_ONLY": "nan.pt"})
    assert result.returncode == 1 and ends_with_the_score(result.stdout), result.stdout
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("ValueError: the score is nan"), result.stderr
    assert (tmp_path / "nan.pt").exists()


@pytest.fixture(scope="module")
def unheard(tmp_path_factory, knobs):
    """The run of `single` again, of whose stdout only the first line is read: its folder, its exit
    code, its errors and the lines of its log file."""
    folder = tmp_path_factory.mktemp("unheard")
    process = start_script(folder, knobs)
    assert process.stdout.readline() == "logs/test.txt\n"
    process.stdout.close()
    code = process.wait(timeout=120)
    return folder, code, (folder / "stderr.txt").read_text(), lines_of_the_log(folder)


def lines_of_the_log(folder: Path) -> str:
    """What the log file has behind its head."""
    text = (folder / "logs" / "test.txt").read_text()
    rule = "\n" + "=" * 100 + "\n"
    return text[text.rindex(rule) + len(rule) :]


def test_a_closed_stdout_loses_lines_not_the_run(single, unheard):
    """As with `python train_gpt.py | head -1`."""
    folder, code, errors, lines = unheard
    assert (code, errors) == (0, "")
    assert without_times(lines) == without_times(single[1])
    assert (folder / "final_result.json").exists()


def test_a_full_stdout_loses_lines_not_the_run(single, tmp_path, knobs):
    with open("/dev/full", "w") as full:
        settings = {"cwd": tmp_path, "env": process_environ(knobs, 1), "timeout": 120}
        command = [sys.executable, str(SCRIPT)]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, **settings)
    assert (result.returncode, result.stderr) == (0, b"")
    assert without_times(lines_of_the_log(tmp_path)) == without_times(single[1])
    assert (tmp_path / "final_result.json").exists()


def test_a_run_repeats_bit_for_bit(single, unheard):
    folder, output = single
    again, _, _, lines = unheard
    assert without_times(lines) == without_times(output)
    for name in MODELS:
        assert (again / name).read_bytes() == (folder / name).read_bytes()


# ---- errors --------------------------------------------------------------------------------------


def error_of(result) -> str:
    """What a failed run says: one error, no traceback of ours, exit code 1."""
    assert result.returncode == 1, (result.stdout, result.stderr)
    assert "val_loss" not in result.stdout
    lines = result.stderr.splitlines()
    begins = [
        i for i, s in enumerate(lines) if s.startswith(("ValueError: ", "FileNotFoundError: "))
    ]
    assert len(begins) == 1, result.stderr
    assert 'train_gpt.py", line' not in result.stderr
    return "\n".join(lines[begins[0] : begins[0] + 3])


def error_before_training(capsys, knobs, folder: Path, **changes: str) -> str:
    """What a run raises here before it builds its model; a process would report it as above."""
    environ = {**knobs, "OUTPUT_DIR": str(folder), **changes}
    with pytest.raises((InputError, FileNotFoundError)) as caught:
        run(environ, None)  # errors come before there is a signal to heed
    assert capsys.readouterr().out in ("", f"{folder}/logs/test.txt\n")
    return str(caught.value)


def test_no_preset_and_no_data_names_both_ways_out(tmp_path):
    error = error_of(run_here(tmp_path, {"DEVICE": "cpu"}))
    assert "./data/datasets/fineweb10B_sp1024" in error
    assert "python3 data/cached_challenge_fineweb.py --variant sp1024" in error
    assert "PRESET=demo python train_gpt.py" in error


def test_bad_knobs_are_told_before_anything_happens(tmp_path):
    result = run_script(
        tmp_path, {"NUM_LAYERS": "x", "TIE_EMBEDDINGS": "maybe", "DEVICE": "abacus"}
    )
    error = error_of(result)
    for text in ("NUM_LAYERS='x'", "TIE_EMBEDDINGS='maybe'", "DEVICE='abacus'"):
        assert text in error
    assert result.stdout == "" and list(tmp_path.iterdir()) == []


def test_a_world_of_three(capsys, tmp_path, knobs):
    error = error_before_training(capsys, knobs, tmp_path, WORLD_SIZE="3", RANK="0")
    assert error.startswith("WORLD_SIZE=3 must divide BATCH_SLOTS=8: launch 1, 2, 4, 8 processes")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_where_there_is_none(tmp_path, knobs):
    assert "DEVICE='cuda'" in error_of(run_here(tmp_path, {**knobs, "DEVICE": "cuda"}))


def test_an_output_folder_that_cannot_be_written(tmp_path, knobs):
    """Only rank 0 writes, so only rank 0 fails: the other one must not wait for it."""
    (tmp_path / "file").write_text("in the way")
    environ = {**knobs, "OUTPUT_DIR": "file/out"}
    assert "OUTPUT_DIR='file/out'" in error_of(run_script(tmp_path, environ, ranks=2))


@pytest.mark.parametrize("name", [*MODELS, "final_result.json"])
def test_a_folder_where_a_file_goes_is_found_before_anything_else(capsys, tmp_path, knobs, name):
    (tmp_path / name).mkdir()
    error = error_before_training(capsys, knobs, tmp_path, DATA_PATH="nowhere")
    problem = f"{tmp_path / name} cannot be written: a folder is in its place: move it"
    assert error == problem


def test_models_that_cannot_be_written_are_scored_all_the_same(single, tmp_path, knobs):
    """From memory. Each is written beside its place first, where a folder is in the way here."""
    for name in MODELS:
        (tmp_path / f"{name}.part").mkdir()
    result = run_here(tmp_path, knobs)
    assert result.returncode == 1
    assert result.stderr == (
        "ValueError: final_model.pt cannot be written: Is a directory\n"
        "final_model.int8.ptz cannot be written: Is a directory\n"
    )
    assert without_times(result.stdout)[-2:] == without_times(single[1])[-2:]


def test_what_only_one_rank_lacks_is_one_error(tmp_path, knobs):
    """As on a node without the data: the others neither go on nor wait."""
    (tmp_path / "worker.py").write_text(
        "import os, train_gpt\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.environ['DATA_PATH'] = 'nowhere'\n"
        "train_gpt.main()\n"
    )
    environ = {**knobs, "PYTHONPATH": str(ROOT)}
    result = run_script(tmp_path, environ, ranks=2, script=tmp_path / "worker.py")
    assert "DATA_PATH has no nowhere/fineweb_train_*.bin" in error_of(result)


def test_replicas_that_differ_fail_the_run(tmp_path, knobs):
    """In one bit of a weight; and, tried before it and undone, in one step count of Adam."""
    program = """
train = train_gpt.train
def train_and_stray(state, *others):
    ended, rank = train(state, *others), state.runtime.rank
    train_gpt.check_replicas(state)
    count = state.optimizers[0].state[state.gpt.skip_weights]["step"]
    count += rank
    try:
        train_gpt.check_replicas(state)
    except RuntimeError as error:
        print("count:", error, flush=True)
    count -= rank
    state.gpt.blocks[0].resid_mix.data[1, 3] += 1e-7 * rank
    return ended
train_gpt.train = train_and_stray
"""
    worker = write_worker(tmp_path, program)
    environ = {**knobs, "ITERATIONS": "1"}
    problem = "the weights or step counts of ranks [1] differ from rank 0's\n"
    for rank, process in enumerate(run_ranks(tmp_path, environ, 2, [worker])):
        assert process.returncode == 1 and f"count: {problem}" in process.stdout
        assert process.stdout.count("replicas:identical") == (1 if rank == 0 else 0)
        assert process.stderr.endswith(f"RuntimeError: {problem}")
    assert not list(tmp_path.glob("final_*"))


def damaged(dataset: Path, folder: Path) -> Path:
    shutil.copytree(dataset, folder, dirs_exist_ok=True)
    return folder


def test_a_shard_cut_short(capsys, tmp_path, dataset, knobs):
    data = damaged(dataset, tmp_path / "data")
    shard = data / "fineweb_train_000001.bin"
    os.truncate(shard, shard.stat().st_size - 1)
    error = error_before_training(capsys, knobs, tmp_path, DATA_PATH=str(data))
    assert error.startswith(f"{shard}: ") and error.endswith(": get the file again")


def test_a_token_outside_the_vocabulary_met_in_training(tmp_path, dataset, knobs):
    """Rank 1 alone trains on the span with the token, but every rank says so and stops."""
    data = damaged(dataset, tmp_path / "data")
    tokens = [7] * 2000
    tokens[65 * 9 + 3] = 60000  # second micro-step of four, rank 1
    write_shard(data / "fineweb_train_000000.bin", tokens)
    environ = {**knobs, "DATA_PATH": str(data), "WARMUP_STEPS": "0", "VAL_LOSS_EVERY": "0"}
    error = error_of(run_script(tmp_path, environ, ranks=2))
    assert "fineweb_train_000000.bin: token id 60000 at position 588" in error
    assert f"VOCAB_SIZE={knobs['VOCAB_SIZE']}" in error


def test_a_validation_split_of_bos_alone_is_found_before_training(tmp_path, dataset, knobs):
    data = damaged(dataset, tmp_path / "data")
    write_shard(data / "fineweb_val_000000.bin", [1] * 500)
    result = run_here(tmp_path, {**knobs, "DATA_PATH": str(data)})
    assert f"DATA_PATH='{data}': 500 validation tokens stand for no text" in error_of(result)
    assert result.stdout == "logs/test.txt\n"


@pytest.mark.parametrize(
    "change",
    [
        {"MODEL_DIM": str(2**24)},
        {"TRAIN_BATCH_TOKENS": str(2**32 - 32), "BATCH_SLOTS": "1"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_cannot_fit_in_memory_is_told_before_it_is_tried(capsys, tmp_path, knobs, change):
    error = error_before_training(capsys, knobs, tmp_path, **change)
    name, value = next(iter(change.items()))
    assert re.match(rf"{name}={value} needs \d+ GB, and this machine has \d+: choose less", error)


def test_a_tokenizer_path_that_is_a_folder(capsys, tmp_path, knobs):
    error = error_before_training(capsys, knobs, tmp_path, TOKENIZER_PATH=str(tmp_path))
    assert error.startswith(f"TOKENIZER_PATH='{tmp_path}' is not a file\n")
    assert "PRESET=demo python train_gpt.py" in error


# ---- the demo ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The files that the demo needs, and nothing that an earlier run left."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copy(SCRIPT, folder)
    (folder / "data").mkdir()
    for path in (ROOT / "data").glob("*.py"):
        shutil.copy(path, folder / "data")
    return folder


def test_the_demo_builds_its_data_once_and_runs(clone):
    environ = {"PRESET": "demo", "DEVICE": "cpu", "ITERATIONS": "1", "RUN_ID": "x"}
    environ |= {"MAX_VAL_TOKENS": "1024"}
    script = clone / "train_gpt.py"
    first = run_script(clone, environ, script=script)
    assert first.returncode == 0, first.stderr
    lines = first.stdout.splitlines()
    assert lines[0] == "logs/x.txt" and lines[1].startswith("demo_corpus:documents:")
    assert re.search(r"demo_corpus:sha256 tokenizer:\w{64} train:\w{64} val:\w{64}", first.stdout)
    lzma_bpb = float(re.search(r"demo_corpus:lzma_bpb:(\d\.\d{4}) ", first.stdout)[1])
    assert 1.5 < lzma_bpb < 3.5
    shards = clone / "data" / "datasets" / "demo_sp1024"
    times = {p: p.stat().st_mtime_ns for p in shards.iterdir()}
    brief = {**environ, "ITERATIONS": "0", "WARMUP_STEPS": "0"}
    second = run_here(clone, brief)  # with the builder of this checkout
    assert second.stdout.splitlines()[1:4] == lines[1:4]
    assert {p: p.stat().st_mtime_ns for p in shards.iterdir()} == times
    broken = shards / "fineweb_val_000000.bin"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:-2])
    third = run_here(clone, brief)
    assert third.returncode == 0 and broken.read_bytes() == whole  # built again, to the same bytes
    assert third.stdout.splitlines()[1:4] == lines[1:4]


def test_a_demo_without_its_builder(tmp_path):
    shutil.copy(SCRIPT, tmp_path)
    environ = {"PRESET": "demo", "DEVICE": "cpu"}
    error = error_of(run_script(tmp_path, environ, script=tmp_path / "train_gpt.py"))
    assert "PRESET=demo" in error and "demo_corpus.py" in error
