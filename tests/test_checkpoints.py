"""Runs that end early and go on: checkpoints, signals, kill -9, full disks, bad losses."""

import contextlib
import dataclasses
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import SCRIPT, process_environ, run_script

from train_gpt import (
    GPT,
    Hyperparameters,
    InputError,
    Muon,
    Runtime,
    Stopwatch,
    TokenStream,
    TrainingState,
    build_loader,
    build_optimizers,
    train_step,
)

ALONE = Runtime(0, 1, 0, False, torch.device("cpu"), torch.float32)
NAMES = ("final_model.pt", "final_model.int8.ptz")
STOPPED = r"stopped: signal:{} step:(\d+)/{}: to go on, set RESUME=auto and RUN_ID=test"


def start(folder, environ, ranks: int = 0, restarts: int = 0, script=SCRIPT) -> subprocess.Popen:
    """The script as run_script starts it, with its errors in a file beside; it is left running."""
    threads = max(1, (os.cpu_count() or 2) // max(ranks, 1))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    launcher.append(f"--max-restarts={restarts}")
    with open(folder / "stderr.txt", "w") as errors:
        return subprocess.Popen(
            [sys.executable, *(launcher if ranks else []), str(script)],
            cwd=folder,
            env=process_environ(environ, threads),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )


def read_until(process, beginning: str) -> None:
    """Read the log of a started run up to a line that begins so."""
    while not (line := process.stdout.readline()).startswith(beginning):
        assert line, "the run ended by itself"


def rest_of(process, seconds: int) -> str:
    """The rest of a started run's log. It is ended, and the test with it, if that takes longer."""
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun takes its ranks along
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=35)
        process.kill()
        raise


def ranks_of(agent) -> list[int]:
    """The processes that torchrun has at this moment: none while it starts them again."""
    return [
        int(pid) for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    ]


def saved_in(folder) -> list[str]:
    """The checkpoints of RUN_ID=test, and whatever else lies there."""
    return sorted(path.name for path in (folder / "checkpoints" / "test").iterdir())


def same_models(first, second) -> bool:
    return all((first / name).read_bytes() == (second / name).read_bytes() for name in NAMES)


def finished(result) -> list[str]:
    """The log of a run that ended well."""
    assert result.returncode == 0, (result.stdout, result.stderr)
    assert result.stdout.splitlines()[-1].startswith("final_int8_zlib_roundtrip_exact ")
    return result.stdout.splitlines()


# ---- one process ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_knobs(knobs):
    """Steps enough to be stopped among them. One thread in each process: among others two would
    wait for each other more than they work."""
    steps = {"ITERATIONS": "100", "WARMDOWN_ITERS": "80", "VAL_LOSS_EVERY": "0"}
    return {**knobs, **steps, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, long_knobs):
    """The folder of a run with a checkpoint at every 30 steps, and its log."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, finished(run_script(folder, {**long_knobs, "CHECKPOINT_EVERY": "30"}))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, long_knobs):
    """The folder of a run that SIGTERM stopped, its exit code and the rest of its log."""
    folder = tmp_path_factory.mktemp("stopped")
    process = start(folder, {**long_knobs, "CHECKPOINT_EVERY": "3"})
    read_until(process, "step:10/")
    process.send_signal(signal.SIGTERM)
    rest = rest_of(process, seconds=60)
    assert (folder / "stderr.txt").read_text() == ""
    return folder, process.returncode, rest.splitlines()


def test_checkpoints_come_at_their_steps_and_the_newest_two_stay(undisturbed):
    """The last step's is one of them: an export that fails can be made up for."""
    folder, lines = undisturbed
    said = [line for line in lines if line.startswith("checkpoint:")]
    steps = (30, 60, 90, 100)
    assert said == [f"checkpoint:checkpoints/test/step_{step:08d}.pt" for step in steps]
    assert saved_in(folder) == ["step_00000090.pt", "step_00000100.pt"]


def test_a_checkpoint_is_complete(undisturbed, long_knobs):
    folder, lines = undisturbed
    hp = Hyperparameters.from_env({**long_knobs, "CHECKPOINT_EVERY": "30"})
    path = folder / "checkpoints" / "test" / "step_00000100.pt"
    saved = torch.load(path, weights_only=True)
    final = torch.load(folder / "final_model.pt", weights_only=True)
    assert saved["checkpoint_format"] == 1 and saved["step"] == 100
    assert saved["knobs"] == dataclasses.asdict(hp)
    assert saved["model"].keys() == final.keys()
    assert all(torch.equal(saved["model"][name], final[name]) for name in final)
    gpt = GPT(hp, torch.float32)
    for name, held in saved["optimizers"].items():
        matrix = "momentum_buffer" in held
        assert held.keys() == ({"momentum_buffer"} if matrix else {"step", "exp_avg", "exp_avg_sq"})
        assert matrix or held["step"] == 100
    assert saved["optimizers"].keys() == dict(gpt.named_parameters()).keys()
    assert sum("momentum_buffer" in held for held in saved["optimizers"].values()) == 18
    clock = [
        int(ms) for ms in re.findall(r"step:(?:10|100)/100 .* train_time:(\d+)ms", "\n".join(lines))
    ]
    assert clock[0] < saved["train_ms"] <= clock[-1] + 1
    stream = TokenStream(hp.train_files)
    stream.take(100 * 8 * 65)  # eight spans a step, each of 64 inputs and the last target
    assert tuple(saved["stream"]) == (stream.shard, stream.position)
    assert saved["random"].keys() == {"python", "numpy", "torch"}


def test_sigterm_ends_the_step_writes_a_checkpoint_and_says_how_to_go_on(stopped):
    folder, code, lines = stopped
    assert code == 143
    step = int(re.fullmatch(STOPPED.format(15, 100), lines[-1])[1])
    assert 10 <= step < 100
    assert f"step_{step:08d}.pt" in saved_in(folder) and len(saved_in(folder)) == 2
    assert not (folder / "final_model.pt").exists()


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_is_as_good_as_no_stop(
    stopped, undisturbed, tmp_path, long_knobs
):
    """Beside the damaged one lies half of one that a kill has left. Knobs that change neither the
    model nor the data are this run's own."""
    shutil.copytree(stopped[0] / "checkpoints", tmp_path / "checkpoints")
    older, newest = saved_in(tmp_path)
    os.truncate(tmp_path / "checkpoints" / "test" / newest, 100_000)
    (tmp_path / "checkpoints" / "test" / "step_00000099.pt.part").write_bytes(b"PK\3\4")
    changed = {"CHECKPOINT_EVERY": "0", "TRAIN_LOG_EVERY": "50"}
    lines = finished(run_script(tmp_path, {**long_knobs, **changed, "RESUME": "auto"}))
    said = [line for line in lines if line.startswith("resume:")]
    assert said[0].startswith(
        f"resume:damaged, trying the one before it: checkpoints/test/{newest} is no model file"
    )
    assert said[1:] == [
        f"resume:checkpoints/test/{older} step:{int(older[5:13])} "
        "changed:CHECKPOINT_EVERY:3->0 TRAIN_LOG_EVERY:200->50"
    ]
    assert same_models(tmp_path, undisturbed[0])


def test_a_second_signal_ends_at_once(tmp_path, knobs):
    """In the middle of a step that takes far longer than the test waits."""
    environ = {**knobs, "TRAIN_BATCH_TOKENS": str(2**22), "WARMUP_STEPS": "0"}
    process = start(tmp_path, {**environ, "VAL_LOSS_EVERY": "0", "MODEL_DIM": "128"})
    while not catches(process.pid, signal.SIGTERM):
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert process.poll() is None  # it finishes the step
    process.send_signal(signal.SIGTERM)
    rest_of(process, seconds=5)
    assert process.returncode == 143 and not (tmp_path / "checkpoints").exists()


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal, as a run has while it trains."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_a_full_disk_costs_a_checkpoint_or_the_export_and_no_file(tmp_path, knobs):
    """What is written beside goes to /dev/full: at step 4 and, later, the model at the end."""
    folder = tmp_path / "checkpoints" / "test"
    folder.mkdir(parents=True)
    (folder / "step_00000004.pt").write_bytes(b"the old file")
    (folder / "step_00000004.pt.part").symlink_to("/dev/full")
    (tmp_path / "final_model.pt").write_bytes(b"the old model")
    (tmp_path / "final_model.pt.part").symlink_to("/dev/full")
    environ = {**knobs, "OMP_NUM_THREADS": "1", "CHECKPOINT_EVERY": "2"}
    result = run_script(tmp_path, {**environ, "KEEP_CHECKPOINTS": "3"})
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("checkpoint:")] == [
        "checkpoint:checkpoints/test/step_00000002.pt",
        "checkpoint:failed, the older ones stay: checkpoints/test/step_00000004.pt cannot be "
        "written: No space left on device",
        "checkpoint:checkpoints/test/step_00000006.pt",
    ]
    assert [line[:8] for line in lines if "train_loss" in line] == [
        f"step:{i}/6" for i in range(1, 7)
    ]
    assert result.returncode == 1
    assert (
        result.stderr == "ValueError: final_model.pt cannot be written: No space left on device\n"
    )
    assert saved_in(tmp_path) == [f"step_0000000{i}.pt" for i in (2, 4, 6)]
    assert (folder / "step_00000004.pt").read_bytes() == b"the old file"
    assert (tmp_path / "final_model.pt").read_bytes() == b"the old model"
    assert torch.load(folder / "step_00000006.pt", weights_only=True)["step"] == 6


def test_fewer_iterations_than_the_checkpoint_has_end_the_run(undisturbed, tmp_path, long_knobs):
    """They are taken from the environment like any other knob: nothing is left to train."""
    path = undisturbed[0] / "checkpoints" / "test" / "step_00000090.pt"
    environ = {**long_knobs, "ITERATIONS": "50", "RESUME": str(path)}
    process = start(tmp_path, environ)
    output = rest_of(process, seconds=30)
    lines = finished(subprocess.CompletedProcess([], process.returncode, output))
    (line,) = [line for line in lines if line.startswith("step:90/50 val_loss:")]
    clock = torch.load(path, weights_only=True)["train_ms"]  # it goes on, too
    assert clock - 1 < int(re.search(r"train_time:(\d+)ms", line)[1]) < clock + 1000
    assert "train_loss" not in output and "ITERATIONS:100->50" in output


# ---- knobs that do not fit -----------------------------------------------------------------------


def state_of(environ: dict[str, str], log) -> TrainingState:
    """The state of a run of one process before its first step."""
    hp = Hyperparameters.from_env(environ)
    gpt = GPT(hp, torch.float32)
    optimizers, loader = build_optimizers(gpt, hp, torch.float32), build_loader(hp, ALONE)
    return TrainingState(hp, ALONE, log, gpt, gpt, optimizers, loader, Stopwatch(ALONE))


def find(path, environ: dict[str, str]) -> list[str]:
    """Look for the checkpoint that RESUME=path means; the log."""
    log = []
    state_of({**environ, "RESUME": str(path)}, log.append).find()
    return log


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NUM_LAYERS", "2"),
        ("MODEL_DIM", "64"),
        ("NUM_HEADS", "8"),
        ("NUM_KV_HEADS", "1"),
        ("MLP_MULT", "3"),
        ("TIE_EMBEDDINGS", "0"),
        ("ROPE_BASE", "500"),
        ("LOGIT_SOFTCAP", "15"),
        ("TRAIN_SEQ_LEN", "16"),
        ("CONTROL_TENSOR_NAME_PATTERNS", "scale"),
    ],
)
def test_a_knob_that_changes_the_model_is_refused_by_name(undisturbed, long_knobs, name, value):
    path = undisturbed[0] / "checkpoints" / "test" / "step_00000090.pt"
    with pytest.raises(InputError, match=f"another model or other data: {name}:") as caught:
        find(path, {**long_knobs, name: value, "SEED": "7"})
    assert str(path) in str(caught.value) and "SEED" not in str(caught.value)


def test_a_vocabulary_or_data_that_changed_are_refused_by_name(
    undisturbed, long_knobs, dataset, tmp_path
):
    """The same files in another place are the same data."""
    path = undisturbed[0] / "checkpoints" / "test" / "step_00000090.pt"
    with pytest.raises(InputError, match="VOCAB_SIZE:384->400"):
        find(path, {**long_knobs, "VOCAB_SIZE": "400"})
    data = shutil.copytree(dataset, tmp_path / "data")
    environ = {**long_knobs, "DATA_PATH": str(data), "SEED": "7"}
    (line,) = find(path, environ)
    assert f"DATA_PATH:{dataset}->{data}" in line and "SEED:1337->7" in line
    with open(data / "fineweb_train_000001.bin", "r+b") as shard:
        shard.seek(2000)
        shard.write(b"\0\0")
    with pytest.raises(InputError, match="other data: DATA_PATH:.*TOKENIZER_PATH:"):
        find(path, environ)


@pytest.fixture(scope="module")
def larger(tmp_path_factory, long_knobs):
    """A checkpoint of a model some ten times as large, saved after a step by hand."""
    environ = {**long_knobs, "MODEL_DIM": "256", "NUM_LAYERS": "7"}
    state = state_of({**environ, "OUTPUT_DIR": str(tmp_path_factory.mktemp("larger"))}, print)
    train_step(state.gpt, state.loader, state.optimizers, state.hp, ALONE)
    state.step = 1
    state.save()
    state.wait()
    return state.hp, state.folder / "step_00000001.pt"


@pytest.mark.parametrize("resume", ["auto", "path"])
def test_a_model_far_smaller_than_the_checkpoints_is_refused(larger, long_knobs, resume):
    """It is no damaged file, from which auto would turn to an older one or to the start."""
    hp, path = larger
    environ = {**long_knobs, "OUTPUT_DIR": hp.output_dir}
    with pytest.raises(InputError, match="too large for this model: set the knobs"):
        find(path if resume == "path" else "auto", environ)


def test_resume_of_what_is_no_checkpoint(undisturbed, tmp_path, long_knobs):
    """auto needs none. A path that the user named is not passed over."""
    assert find("auto", {**long_knobs, "OUTPUT_DIR": str(tmp_path)}) == []
    with pytest.raises(FileNotFoundError, match="nowhere.pt"):
        find(tmp_path / "nowhere.pt", long_knobs)
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        find(tmp_path, long_knobs)
    with pytest.raises(InputError, match="final_model.pt is no checkpoint of this program"):
        find(undisturbed[0] / "final_model.pt", long_knobs)


def test_auto_needs_a_run_id(knobs):
    environ = {name: value for name, value in knobs.items() if name != "RUN_ID"}
    with pytest.raises(InputError, match="RESUME='auto' needs the RUN_ID"):
        Hyperparameters.from_env({**environ, "RESUME": "auto"})


# ---- several processes ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four(tmp_path_factory, knobs):
    """The knobs and the folder of a run of four ranks, whose warm-up is left out: what it changes
    in a process, going on must change, too."""
    folder = tmp_path_factory.mktemp("four")
    environ = {**knobs, "ITERATIONS": "8", "WARMUP_STEPS": "0", "VAL_LOSS_EVERY": "0"}
    environ["OMP_NUM_THREADS"] = "1"
    result = run_script(folder, {**environ, "CHECKPOINT_EVERY": "4"}, ranks=4)
    finished(result)
    return environ, folder


def test_all_optimizer_state_is_gathered_from_the_ranks(four, knobs):
    environ, folder = four
    hp = Hyperparameters.from_env(environ)
    gpt = GPT(hp, torch.float32)
    muon = build_optimizers(gpt, hp, torch.float32)[1]
    assert isinstance(muon, Muon)
    saved = torch.load(folder / "checkpoints" / "test" / "step_00000004.pt", weights_only=True)
    names = {param: name for name, param in gpt.named_parameters()}
    for param in muon.param_groups[0]["params"]:
        assert saved["optimizers"][names[param]]["momentum_buffer"].shape == param.shape
    assert saved["optimizers"].keys() == set(names.values())


@pytest.mark.parametrize("ranks", [4, 1, 2, 8])
def test_a_checkpoint_of_four_ranks_goes_on_with(four, tmp_path, ranks):
    """As many: as if it had never stopped, bit by bit. Fewer or more: to rounding."""
    environ, folder = four
    path = folder / "checkpoints" / "test" / "step_00000004.pt"
    result = run_script(tmp_path, {**environ, "RESUME": str(path)}, ranks=ranks if ranks > 1 else 0)
    lines = finished(result)
    assert f"resume:{path} step:4 changed:CHECKPOINT_EVERY:4->0" in lines
    assert [s[:8] for s in lines if "train_loss" in s] == [f"step:{i}/8" for i in (5, 6, 7, 8)]
    if ranks == 4:
        assert same_models(tmp_path, folder)
    found, expected = (
        torch.load(place / "final_model.pt", weights_only=True) for place in (tmp_path, folder)
    )
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=2e-3, msg=name)


@pytest.fixture(scope="module")
def two(tmp_path_factory, long_knobs):
    """The folder of an undisturbed run of two ranks."""
    folder = tmp_path_factory.mktemp("two")
    finished(run_script(folder, long_knobs, ranks=2))
    return folder


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory, long_knobs):
    """The folder of a run of two ranks, after SIGINT on the second of them, and its log. It has no
    CHECKPOINT_EVERY: a stop needs none."""
    folder = tmp_path_factory.mktemp("interrupted")
    agent = start(folder, long_knobs, ranks=2)
    read_until(agent, "step:5/")
    ranks = ranks_of(agent)
    os.kill(ranks[1], signal.SIGINT)
    rest = rest_of(agent, seconds=60)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks)
    return folder, rest.splitlines()


def test_sigint_on_one_rank_stops_all_after_the_same_step(interrupted):
    folder, lines = interrupted
    step = int(re.fullmatch(STOPPED.format(2, 100), lines[-1])[1])
    assert 5 <= step < 100
    assert saved_in(folder) == [f"step_{step:08d}.pt"]
    errors = (folder / "stderr.txt").read_text()
    codes = re.findall(r"exitcode\s*: (-?\d+)", errors)
    assert codes and set(codes) == {"130"}, errors  # none was ended by torchrun
    assert 'train_gpt.py", line' not in errors


def test_kill_9_at_random_moments_changes_no_bit(interrupted, two, tmp_path, long_knobs):
    """torchrun starts the ranks again, which go on from the newest checkpoint. The first kill falls
    into the training; the second anywhere from then on, the start included."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    moments = random.Random(seed)
    shutil.copytree(interrupted[0] / "checkpoints", tmp_path / "checkpoints")
    environ = {**long_knobs, "CHECKPOINT_EVERY": "5", "RESUME": "auto"}
    agent = start(tmp_path, environ, ranks=2, restarts=3)
    read_until(agent, "checkpoint:")
    for longest in (1.5, 5.0):
        time.sleep(moments.uniform(0, longest))
        while len(ranks := ranks_of(agent)) < 2:
            assert agent.poll() is None, "the run ended by itself"
        os.kill(moments.choice(ranks), signal.SIGKILL)
    output = rest_of(agent, seconds=60)
    errors = (tmp_path / "stderr.txt").read_text()
    lines = finished(subprocess.CompletedProcess([], agent.returncode, output, errors))
    assert any(line.startswith("resume:checkpoints/test/step_") for line in lines)
    assert same_models(tmp_path, two)
    assert len(saved_in(tmp_path)) >= 2


def test_ranks_that_start_again_do_not_meet_the_ones_before(tmp_path, knobs):
    """torchrun keeps what the ranks told each other over a restart. A copy of the script in which
    rank 1 is killed as soon as all have met, and in which they start again one after another."""
    anchor = "        runtime = open_runtime(hp, os.environ)\n"
    source = SCRIPT.read_text()
    assert source.count(anchor) == 1
    count = "int(os.environ['TORCHELASTIC_RESTART_COUNT'])"
    late = f"        time.sleep({count} * 0.5 * int(os.environ['RANK']))\n"
    killed = f"        if {count} == 0 and runtime.rank == 1:\n"
    killed += "            os.kill(os.getpid(), signal.SIGKILL)\n"
    (tmp_path / "edited.py").write_text(source.replace(anchor, late + anchor + killed))
    environ = {**knobs, "ITERATIONS": "1", "VAL_LOSS_EVERY": "0"}
    agent = start(tmp_path, environ, ranks=2, restarts=1, script="edited.py")
    output = rest_of(agent, seconds=40)
    errors = (tmp_path / "stderr.txt").read_text()
    finished(subprocess.CompletedProcess([], agent.returncode, output, errors))


# ---- losses that are not finite ------------------------------------------------------------------

STEEP = {name: "1e30" for name in ("MATRIX_LR", "SCALAR_LR", "TIED_EMBED_LR")}


def test_a_loss_that_is_not_finite_stops_the_run_at_the_next_logged_step(
    undisturbed, tmp_path, long_knobs
):
    shutil.copytree(undisturbed[0] / "checkpoints", tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "test" / "step_00000100.pt").unlink()
    environ = {**long_knobs, **STEEP, "RESUME": "auto", "CHECKPOINT_EVERY": "5"}
    result = run_script(tmp_path, {**environ, "TRAIN_LOG_EVERY": "4"})
    assert result.returncode == 1
    error = r"ValueError: step:92 the train_loss is (nan|inf): go back to the last checkpoint.*\n"
    assert re.fullmatch(error, result.stderr)
    assert result.stdout.splitlines()[-1].startswith("step:92/100 train_loss:")
    assert saved_in(tmp_path) == ["step_00000090.pt"]
    path = Path("checkpoints", "test", "step_00000090.pt")
    assert (tmp_path / path).read_bytes() == (undisturbed[0] / path).read_bytes()


def test_weights_that_are_not_finite_replace_no_checkpoint_and_stop_all_ranks(tmp_path, knobs):
    environ = {**knobs, **STEEP, "CHECKPOINT_EVERY": "1", "VAL_LOSS_EVERY": "0"}
    result = run_script(tmp_path, {**environ, "TRAIN_LOG_EVERY": "0"}, ranks=2)
    assert result.returncode == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("ValueError: ")]
    assert len(errors) == 1, result.stderr
    step = int(re.search(r"step:(\d) the sum of the weights is (nan|inf)", errors[0])[1])
    kept = saved_in(tmp_path)
    assert kept == [f"step_{i:08d}.pt" for i in range(max(1, step - 2), step)]
    saved = torch.load(tmp_path / "checkpoints" / "test" / kept[-1], weights_only=True)
    assert all(tensor.isfinite().all() for tensor in saved["model"].values())
