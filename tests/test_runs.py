"""Whole runs, as processes: python and torchrun, the log line by line, the files, every error."""

import io
import os
import re
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SCRIPT, run_ranks, run_script, write_shard

from train_gpt import (
    GPT,
    DistributedTokenLoader,
    Hyperparameters,
    Runtime,
    Validation,
    build_optimizers,
    evaluate,
    load_tokenizer,
    load_weights,
)

ALONE = Runtime(0, 1, 0, False, torch.device("cpu"), torch.float32)

NUMBER = r"\d+"
LOSS = r"\d+\.\d{4}"
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
        r"speed: tokens_per_s:\d+ share_of_peak:0\.\d{3} data_wait:0\.\d{3} optimizer:0\.\d{3} "
        r"gradient_exchange:0\.000",
        rf"Serialized model: {NUMBER} bytes",
        rf"Code size: {SCRIPT.stat().st_size} bytes",
        rf"Total submission size: {NUMBER} bytes",
        rf"Serialized model int8\+zlib: {NUMBER} bytes \(payload:{NUMBER} raw_torch:{NUMBER} "
        r"payload_ratio:\d+\.\d{2}x\)",
        rf"Total submission size int8\+zlib: {NUMBER} bytes",
        rf"size_check:fits limit:16000000 bytes_left:{NUMBER}",
        r"int8_worst:(\S+=0\.\d{4} ?){5}",
        rf"final_int8_zlib_roundtrip val_loss:{LOSS} val_bpb:{LOSS} eval_time:{NUMBER}ms",
        r"final_int8_zlib_roundtrip_exact val_loss:\d+\.\d{8} val_bpb:\d+\.\d{8}",
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


def test_the_log_file_has_source_versions_and_every_line(single):
    folder, output = single
    text = (folder / "logs" / "test.txt").read_text()
    source = SCRIPT.read_text()
    assert text.startswith(source) and text.endswith("\n" + output)
    assert f"PyTorch {torch.__version__}" in text and "nvidia-smi" in text


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
    adam, muon = build_optimizers(gpt, hp, torch.float32)
    loader = DistributedTokenLoader(hp.train_files, 0, 1, "cpu")
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
    result = run_script(tmp_path, environ)
    assert result.returncode == 0, result.stderr
    hp = Hyperparameters.from_env(environ)
    validation = Validation.load(hp, load_tokenizer(hp))
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


def test_a_run_repeats_bit_for_bit(single, tmp_path, knobs):
    folder, output = single
    again = run_script(tmp_path, knobs)
    assert without_times(again.stdout) == without_times(output)
    for name in ("final_model.pt", "final_model.int8.ptz"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_warm_up_leaves_no_trace_and_may_be_left_out(single, tmp_path, knobs):
    """Without warm-up the first thing that the model does is the validation at step 0."""
    folder, _ = single
    result = run_script(tmp_path, {**knobs, "WARMUP_STEPS": "0"})
    assert result.returncode == 0, result.stderr
    assert "warmup_step:" not in result.stdout
    name = "final_model.int8.ptz"
    assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_two_ranks_end_where_one_does(single, tmp_path, knobs):
    """In bf16. (Gradients and weights in fp32: test_accumulation.py.)"""
    _, output = single
    environ = {**knobs, "DTYPE": "bf16", "OUTPUT_DIR": "out"}
    result = run_script(tmp_path, environ, ranks=2)
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
    result = run_script(tmp_path, environ, ranks=2)
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
    result = run_script(tmp_path, {**environ, "NUM_LAYERS": "1"})
    assert result.returncode == 0, result.stderr
    assert "step:1/2 train_loss:5.9506 " in result.stdout  # ln 384 = 5.95064
    assert "tie_embeddings:False embed_lr:0.6 head_lr:0.008 " in result.stdout


def test_no_iterations_still_validate_and_export(tmp_path, knobs):
    result = run_script(tmp_path, {**knobs, "ITERATIONS": "0"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(" val_loss:") == 3 and "train_loss" not in result.stdout


def test_compiled_equals_eager(tmp_path, knobs):
    """One layer, and matrices of one shape: more would only be compiled once more each."""
    small = {"NUM_LAYERS": "1", "NUM_KV_HEADS": "4", "MLP_MULT": "1"}
    environ = {**knobs, **small, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    eager, compiled = (run_script(tmp_path, {**environ, "COMPILE": flag}) for flag in "01")
    assert compiled.returncode == 0, compiled.stderr
    assert "compile:False" in eager.stdout and "compile:True" in compiled.stdout
    assert last_numbers(compiled.stdout) == pytest.approx(last_numbers(eager.stdout), abs=2e-3)


def test_without_a_compiler_the_run_is_eager_and_says_so(single, tmp_path, knobs):
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OUTPUT_DIR": "out"}
    environ = {**knobs, **cache, "COMPILE": "1", "CXX": "/nonexistent/c++", "ITERATIONS": "1"}
    result = run_script(tmp_path, environ)
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr
    (line,) = [s for s in result.stdout.splitlines() if s.startswith("compile:failed")]
    assert "/nonexistent/c++" in line and "compile:False" in result.stdout


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


def test_no_preset_and_no_data_names_both_ways_out(tmp_path):
    error = error_of(run_script(tmp_path, {"DEVICE": "cpu"}))
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


def test_a_world_of_three(tmp_path, knobs):
    environ = {**knobs, "WORLD_SIZE": "3", "RANK": "0"}
    assert "WORLD_SIZE=3" in error_of(run_script(tmp_path, environ))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_where_there_is_none(tmp_path, knobs):
    assert "DEVICE='cuda'" in error_of(run_script(tmp_path, {**knobs, "DEVICE": "cuda"}))


def test_an_output_folder_that_cannot_be_written(tmp_path, knobs):
    """Only rank 0 writes, so only rank 0 fails: the other one must not wait for it."""
    (tmp_path / "file").write_text("in the way")
    environ = {**knobs, "OUTPUT_DIR": "file/out"}
    assert "OUTPUT_DIR='file/out'" in error_of(run_script(tmp_path, environ, ranks=2))


def test_a_folder_where_the_model_goes(tmp_path, knobs):
    (tmp_path / "final_model.pt").mkdir()
    result = run_script(tmp_path, {**knobs, "ITERATIONS": "1", "VAL_LOSS_EVERY": "0"})
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert result.stderr.startswith("ValueError: final_model.pt cannot be written: ")


def test_what_only_one_rank_lacks_is_an_error_on_rank_0(tmp_path, knobs):
    """As on a node without the data: the others must not go on, nor wait."""
    environs = [knobs, {**knobs, "DATA_PATH": "nowhere"}]
    first, second = run_ranks(tmp_path, environs, [str(SCRIPT)])
    assert first.returncode == second.returncode == 1
    assert "DATA_PATH has no nowhere/fineweb_train_*.bin" in error_of(first)
    assert second.stderr == ""


@pytest.mark.parametrize(
    "change",
    [
        "gpt.blocks[0].resid_mix.data[1, 3] += 1e-7",
        "optimizers[0].state[gpt.skip_weights]['step'] += 1",
    ],
)
def test_replicas_that_differ_fail_the_run(tmp_path, knobs, change):
    program = f"""
import os, torch, train_gpt
hp = train_gpt.Hyperparameters.from_env(os.environ)
try:
    runtime = train_gpt.open_runtime(hp, os.environ)
    torch.manual_seed(1)
    gpt = train_gpt.GPT(hp, runtime.dtype)
    model, _ = train_gpt.compile_and_wrap(gpt, hp, runtime, print)
    optimizers = train_gpt.build_optimizers(gpt, hp, runtime.dtype)
    loader = train_gpt.build_loader(hp, runtime)
    train_gpt.train_step(model, loader, optimizers, hp, runtime)
    train_gpt.check_replicas(gpt, optimizers, runtime, print)
    if runtime.rank == 1:
        {change}
    train_gpt.check_replicas(gpt, optimizers, runtime, print)
except Exception as error:
    train_gpt.leave_after_error(error, os.environ, train_gpt.StopRequest())
"""
    for process in run_ranks(tmp_path, [{**knobs, "PYTHONPATH": str(ROOT)}] * 2, ["-c", program]):
        assert process.returncode == 1 and process.stdout.count("replicas:identical") == 1
        assert "step counts of ranks [1] differ from rank 0's" in process.stderr


def damaged(dataset: Path, folder: Path) -> Path:
    shutil.copytree(dataset, folder, dirs_exist_ok=True)
    return folder


def test_a_shard_cut_short(tmp_path, dataset, knobs):
    data = damaged(dataset, tmp_path / "data")
    shard = data / "fineweb_train_000001.bin"
    os.truncate(shard, shard.stat().st_size - 1)
    error = error_of(run_script(tmp_path, {**knobs, "DATA_PATH": str(data)}))
    assert str(shard) in error and "get the file again" in error


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
    environ = {"PRESET": "demo", "DEVICE": "cpu", "MAX_WALLCLOCK_SECONDS": "1", "RUN_ID": "x"}
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
    second = run_script(clone, {**environ, "ITERATIONS": "0"}, script=script)
    assert second.stdout.splitlines()[1:4] == lines[1:4]
    assert {p: p.stat().st_mtime_ns for p in shards.iterdir()} == times
    broken = shards / "fineweb_val_000000.bin"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:-2])
    third = run_script(clone, {**environ, "ITERATIONS": "0"}, script=script)
    assert third.returncode == 0 and broken.read_bytes() == whole  # built again, to the same bytes
    assert third.stdout.splitlines()[1:4] == lines[1:4]


def test_a_demo_without_its_builder(tmp_path):
    shutil.copy(SCRIPT, tmp_path)
    environ = {"PRESET": "demo", "DEVICE": "cpu"}
    error = error_of(run_script(tmp_path, environ, script=tmp_path / "train_gpt.py"))
    assert "PRESET=demo" in error and "demo_corpus.py" in error
