"""What a checkpoint holds, which one a run goes on from, and that it then ends as if it had never
stopped. One process; several ranks: test_checkpoints_of_ranks.py."""

import dataclasses
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from conftest import (
    ALONE,
    finished,
    make_state,
    read_until,
    rest_of,
    run_here,
    run_script,
    same_models,
    saved_in,
    start_script,
    write_worker,
)

from train_gpt import GPT, Hyperparameters, InputError, TokenStream, train_step

STOPPED = r"stopped: signal:15 step:(\d+)/100: to go on, set RESUME=auto and RUN_ID=test"


@pytest.fixture(scope="module")
def long_knobs(knobs):
    """Steps enough to be stopped among them."""
    return {**knobs, "ITERATIONS": "100", "WARMDOWN_ITERS": "80", "VAL_LOSS_EVERY": "0"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, long_knobs):
    """The folder of a run with a checkpoint at every 30 steps, and its log."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, finished(run_here(folder, {**long_knobs, "CHECKPOINT_EVERY": "30"}))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, long_knobs):
    """The folder of a run that SIGTERM stopped, its exit code and the rest of its log."""
    folder = tmp_path_factory.mktemp("stopped")
    process = start_script(folder, {**long_knobs, "CHECKPOINT_EVERY": "3"})
    read_until(process, "step:10/")
    process.send_signal(signal.SIGTERM)
    rest = rest_of(process, seconds=60)
    assert (folder / "stderr.txt").read_text() == ""
    return folder, process.returncode, rest.splitlines()


# ---- what is saved, and going on from it ---------------------------------------------------------


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
    for held in saved["optimizers"].values():
        matrix = "momentum_buffer" in held
        assert held.keys() == ({"momentum_buffer"} if matrix else {"step", "exp_avg", "exp_avg_sq"})
        assert matrix or held["step"] == 100
    assert saved["optimizers"].keys() == dict(gpt.named_parameters()).keys()
    assert sum("momentum_buffer" in held for held in saved["optimizers"].values()) == 18
    clock = [
        int(ms) for ms in re.findall(r"step:(?:10|100)/100 .* train_time:(\d+)ms", "\n".join(lines))
    ]
    assert clock[0] < saved["train_ms"] <= clock[-1] + 1
    stream = TokenStream(hp.files("train"))
    stream.take(100 * 8 * 65)  # eight spans a step, each of 64 inputs and the last target
    assert tuple(saved["stream"]) == (stream.shard, stream.position)
    assert saved["random"].keys() == {"python", "numpy", "torch"}


def test_sigterm_ends_the_step_writes_a_checkpoint_and_says_how_to_go_on(stopped):
    folder, code, lines = stopped
    assert code == 143
    step = int(re.fullmatch(STOPPED, lines[-1])[1])
    assert 10 <= step < 100
    assert f"step_{step:08d}.pt" in saved_in(folder) and len(saved_in(folder)) == 2
    assert not (folder / "final_model.pt").exists()


def test_a_stopped_run_goes_on_as_if_it_had_not_from_the_newest_good_checkpoint(
    stopped, undisturbed, tmp_path, long_knobs
):
    """The newest has one wrong byte. Half of one that a kill has left beside goes at the next save.
    Knobs that change neither the model nor the data are this run's own."""
    shutil.copytree(stopped[0] / "checkpoints", tmp_path / "checkpoints")
    folder = tmp_path / "checkpoints" / "test"
    older, newest = saved_in(tmp_path)
    flip_a_byte(folder / newest)
    (folder / "step_00000099.pt.part").write_bytes(b"PK\3\4")
    changed = {"CHECKPOINT_EVERY": "50", "KEEP_CHECKPOINTS": "9"}
    lines = finished(run_here(tmp_path, {**long_knobs, **changed, "RESUME": "auto"}))
    said = [line for line in lines if line.startswith("resume:")]
    assert said == [
        f"resume:damaged, trying the one before it: checkpoints/test/{newest} is no model file, "
        "or is damaged: a checksum is wrong",
        f"resume:checkpoints/test/{older} step:{int(older[5:13])} "
        "changed:CHECKPOINT_EVERY:3->50 KEEP_CHECKPOINTS:2->9",
    ]
    assert same_models(tmp_path, undisturbed[0])
    steps = {older, newest, "step_00000050.pt", "step_00000100.pt"}
    assert saved_in(tmp_path) == sorted(steps)


def flip_a_byte(path: Path) -> None:
    """In the middle, where the weights and the optimizers' state are."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_fewer_iterations_than_the_checkpoint_has_end_the_run(undisturbed, tmp_path, long_knobs):
    """They are taken from the environment like any other knob: nothing is left to train."""
    path = undisturbed[0] / "checkpoints" / "test" / "step_00000090.pt"
    result = run_here(tmp_path, {**long_knobs, "ITERATIONS": "50", "RESUME": str(path)})
    lines = finished(result)
    (line,) = [line for line in lines if line.startswith("step:90/50 val_loss:")]
    clock = torch.load(path, weights_only=True)["train_ms"]  # it goes on, too
    assert clock - 1 < int(re.search(r"train_time:(\d+)ms", line)[1]) < clock + 1000
    assert "train_loss" not in result.stdout and "ITERATIONS:100->50" in result.stdout


# ---- which checkpoint, and which is refused ------------------------------------------------------


def find(path, environ: dict[str, str]) -> tuple[dict | None, list[str]]:
    """The checkpoint that RESUME=path means, and the log of looking for it."""
    log = []
    state = make_state(Hyperparameters.from_env({**environ, "RESUME": str(path)}))
    state.runtime = dataclasses.replace(ALONE, log=log.append)
    return state.find(), log


@pytest.fixture
def copied(undisturbed, long_knobs, tmp_path):
    """The newest of a run's two checkpoints, and knobs to look for one among them."""
    shutil.copytree(undisturbed[0] / "checkpoints", tmp_path / "checkpoints")
    path = tmp_path / "checkpoints" / "test" / "step_00000100.pt"
    return path, {**long_knobs, "OUTPUT_DIR": str(tmp_path)}


def put_in_place_of(path: Path, what: str) -> None:
    """Something else under a checkpoint's name, made later than it."""
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "unreadable file":
        path.symlink_to("/proc/self/mem")  # its first bytes are an input/output error for anybody
    elif what == "link to nothing":
        path.symlink_to("nothing")
    elif what == "endless device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 2**38 if what == "too large" else 0)


@pytest.mark.parametrize(
    "what",
    [
        "folder",
        "pipe",
        "unreadable file",
        "link to nothing",
        "endless device",
        "too large",
        "empty",
    ],
)
def test_auto_goes_past_what_cannot_be_a_checkpoint(copied, what):
    path, environ = copied
    put_in_place_of(path, what)
    saved, log = find("auto", environ)
    assert saved["step"] == 90
    assert log[0].startswith(f"resume:damaged, trying the one before it: {path} ")
    assert log[1].startswith(f"resume:{path.with_name('step_00000090.pt')} step:90 ")
    assert len(log) == 2


def negative_step(saved: dict) -> None:
    saved["step"] = -1


def negative_time(saved: dict) -> None:
    saved["train_ms"] = -1.0


def stream_beyond_the_shards(saved: dict) -> None:
    saved["stream"] = (2, 0)


def stream_beyond_its_shard(saved: dict) -> None:
    saved["stream"] = (0, 2**40)


def stream_before_the_shards(saved: dict) -> None:
    saved["stream"] = (-1, 0)


def no_random_states(saved: dict) -> None:
    saved["random"] = {}


def no_state_of_torch(saved: dict) -> None:
    del saved["random"]["torch"]


def a_weight_missing(saved: dict) -> None:
    del saved["model"]["blocks.1.mlp.fc.weight"]


def a_weight_of_another_shape(saved: dict) -> None:
    saved["model"]["skip_weights"] = torch.ones(7, 32)


def empty_optimizers(saved: dict) -> None:
    saved["optimizers"] = {}


def a_momentum_missing(saved: dict) -> None:
    saved["optimizers"]["blocks.1.mlp.fc.weight"] = {}


def a_momentum_of_another_shape(saved: dict) -> None:
    saved["optimizers"]["blocks.1.mlp.fc.weight"]["momentum_buffer"] = torch.zeros(3, 3)


def another_format(saved: dict) -> None:
    saved["checkpoint_format"] = 2


def a_list_of_knobs(saved: dict) -> None:
    saved["knobs"] = list(saved["knobs"])


@pytest.mark.parametrize(
    "change",
    [
        negative_step,
        negative_time,
        stream_beyond_the_shards,
        stream_beyond_its_shard,
        stream_before_the_shards,
        no_random_states,
        no_state_of_torch,
        a_weight_missing,
        a_weight_of_another_shape,
        empty_optimizers,
        a_momentum_missing,
        a_momentum_of_another_shape,
        another_format,
        a_list_of_knobs,
    ],
)
def test_a_checkpoint_with_other_things_inside_is_damaged(copied, change):
    """It is refused by name; auto goes past it, and nothing of it stays."""
    path, environ = copied
    saved = torch.load(path, weights_only=True)
    change(saved)
    torch.save(saved, path)
    problem = f"RESUME='{path}' (is no checkpoint of this program|cannot be resumed): "
    with pytest.raises(InputError, match=problem):
        find(path, environ)
    found, log = find("auto", environ)
    assert found["step"] == 90 and len(log) == 2
    assert log[0].startswith(f"resume:damaged, trying the one before it: {path} ")


def test_a_checkpoint_that_lacks_a_part_is_no_start(copied):
    """Whatever its format version says."""
    path, environ = copied
    whole = torch.load(path, weights_only=True)
    for key in whole:
        torch.save({name: part for name, part in whole.items() if name != key}, path)
        with pytest.raises(InputError, match=f"RESUME='{path}' is no checkpoint of this program"):
            find(path, environ)


def test_what_auto_went_past_leaves_no_trace(copied):
    """It fails at the last part that is restored: before that, all others have been."""
    path, environ = copied
    saved = torch.load(path, weights_only=True)
    no_state_of_torch(saved)
    torch.save(saved, path)
    states = []
    for resume in ("auto", path.with_name("step_00000090.pt")):
        state = make_state(Hyperparameters.from_env({**environ, "RESUME": str(resume)}))
        state.find()
        train_step(state)
        states.append(state.snapshot())
    first, second = states
    assert first["stream"] == second["stream"] and first["step"] == second["step"] == 90
    for name, tensor in first["model"].items():
        assert torch.equal(tensor, second["model"][name]), name
    for name, held in first["optimizers"].items():
        assert all(torch.equal(value, second["optimizers"][name][k]) for k, value in held.items())


def test_checkpoints_of_which_none_is_good_end_the_run(undisturbed, tmp_path, long_knobs):
    """To start anew would in the end delete what may still be of use."""
    shutil.copytree(undisturbed[0] / "checkpoints", tmp_path / "checkpoints")
    folder = tmp_path / "checkpoints" / "test"
    for name in saved_in(tmp_path):
        flip_a_byte(folder / name)
    result = run_here(tmp_path, {**long_knobs, "RESUME": "auto"})
    assert result.returncode == 1
    assert result.stderr.startswith("ValueError: RESUME='auto' finds no good checkpoint: ")
    assert result.stderr.count("\n") == 1
    assert "checkpoints/test/step_00000100.pt is no model file" in result.stderr
    assert result.stdout.count("resume:damaged, trying the one before it: ") == 2
    assert "warmup_step:" not in result.stdout and "train_loss" not in result.stdout
    assert saved_in(tmp_path) == ["step_00000090.pt", "step_00000100.pt"]


def test_a_run_id_that_has_checkpoints_is_not_used_again_by_accident(
    undisturbed, tmp_path, long_knobs
):
    """Nothing is warmed up or written before that is said, with both ways out."""
    shutil.copytree(undisturbed[0] / "checkpoints", tmp_path / "checkpoints")
    result = run_here(tmp_path, {**long_knobs, "CHECKPOINT_EVERY": "1"})
    assert result.returncode == 1
    problem = "RUN_ID='test' has checkpoints: set RESUME=auto or another RUN_ID"
    assert result.stderr == f"ValueError: {problem}\n"
    assert "warmup_step:" not in result.stdout
    for name in ("step_00000090.pt", "step_00000100.pt"):
        path = Path("checkpoints", "test", name)
        assert (tmp_path / path).read_bytes() == (undisturbed[0] / path).read_bytes()
    assert len(saved_in(tmp_path)) == 2


def test_two_runs_at_once_do_not_share_a_run_id(tmp_path, knobs):
    """Of the second one nothing comes into the first one's log."""
    endless = {**knobs, "ITERATIONS": "1000000", "VAL_LOSS_EVERY": "0"}
    first = start_script(tmp_path, endless)
    try:
        read_until(first, "step:1/")
        second = run_here(tmp_path, knobs)
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
    assert second.returncode == 1 and second.stdout == ""
    assert second.stderr == "ValueError: RUN_ID='test' is running already: set another\n"
    assert (tmp_path / "logs" / "test.txt").read_text().count("\nmodel_params:") == 1


def test_a_missing_checkpoint_is_named_before_the_warm_up(tmp_path, knobs):
    """With the knob and the way out, as is a missing model to score."""
    for knob in ("RESUME", "EVAL_ONLY"):
        result = run_here(tmp_path, {**knobs, knob: "nowhere.pt", "COMPILE": "1"})
        assert result.returncode == 1
        problem = f"{knob}='nowhere.pt' is not a file that can be read: check the path"
        assert result.stderr == f"ValueError: {problem}\n"
        assert "warmup_step:" not in result.stdout


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
    with pytest.raises(InputError, match=f"cannot be resumed: another model: {name}:") as caught:
        find(path, {**long_knobs, name: value, "SEED": "7"})
    assert str(path) in str(caught.value) and "SEED" not in str(caught.value)


def test_a_vocabulary_or_data_that_changed_are_refused_by_name(
    undisturbed, long_knobs, dataset, tmp_path
):
    """The same files in another place are the same data. Other data are named by their files: the
    knobs that lead to them may not have changed."""
    path = undisturbed[0] / "checkpoints" / "test" / "step_00000090.pt"
    with pytest.raises(InputError, match="VOCAB_SIZE:384->400"):
        find(path, {**long_knobs, "VOCAB_SIZE": "400"})
    data = shutil.copytree(dataset, tmp_path / "data")
    environ = {**long_knobs, "DATA_PATH": str(data), "SEED": "7"}
    _, (line,) = find(path, environ)
    assert f"DATA_PATH:{dataset}->{data}" in line and "SEED:1337->7" in line
    with open(data / "fineweb_train_000001.bin", "r+b") as shard:
        shard.seek(2000)
        shard.write(b"\0\0")
    with pytest.raises(InputError) as caught:
        find(path, environ)
    assert str(caught.value) == (
        f"RESUME='{path}' cannot be resumed: other data: fineweb_train_000001.bin: "
        "set DATA_PATH and TOKENIZER_PATH"
    )


@pytest.fixture(scope="module")
def larger(tmp_path_factory, long_knobs):
    """A checkpoint of a model some ten times as large, saved after a step by hand."""
    environ = {**long_knobs, "MODEL_DIM": "256", "NUM_LAYERS": "7"}
    folder = tmp_path_factory.mktemp("larger")
    state = make_state(Hyperparameters.from_env({**environ, "OUTPUT_DIR": str(folder)}))
    train_step(state)
    state.step = 1
    state.save()
    state.wait()
    return folder, folder / "checkpoints" / "test" / "step_00000001.pt"


@pytest.mark.parametrize("resume", ["auto", "path"])
def test_a_model_far_smaller_than_the_checkpoints_is_refused(larger, long_knobs, resume):
    """auto does not turn to the start."""
    folder, path = larger
    environ = {**long_knobs, "OUTPUT_DIR": str(folder)}
    with pytest.raises(InputError, match="too large for this model: set the knobs") as caught:
        find(path if resume == "path" else "auto", environ)
    assert str(path) in str(caught.value)


def test_resume_of_what_is_no_checkpoint(undisturbed, tmp_path, long_knobs):
    """auto needs none. A path that the user named is not passed over."""
    assert find("auto", {**long_knobs, "OUTPUT_DIR": str(tmp_path)}) == (None, [])
    assert make_state(Hyperparameters.from_env(long_knobs)).find() is None
    with pytest.raises(InputError, match="final_model.pt' is no checkpoint of this program"):
        find(undisturbed[0] / "final_model.pt", long_knobs)


def test_auto_needs_a_run_id(knobs):
    environ = {name: value for name, value in knobs.items() if name != "RUN_ID"}
    with pytest.raises(InputError, match="RESUME='auto' needs the RUN_ID"):
        Hyperparameters.from_env({**environ, "RESUME": "auto"})


# ---- disks that are full -------------------------------------------------------------------------

# The disk has no room for files whose names end like these.
FULL_DISK = """
import errno

def fsync(fd, sync=os.fsync):
    if os.readlink(f"/proc/self/fd/{{fd}}").endswith({}):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    sync(fd)

os.fsync = fsync"""


@pytest.fixture(scope="module")
def crowded(tmp_path_factory, knobs):
    """The folder of a run that found no room at step 4 and, later, for final_model.pt; the run."""
    folder = tmp_path_factory.mktemp("crowded")
    worker = write_worker(folder, FULL_DISK.format(("4.pt.part", "final_model.pt.part")))
    (folder / "final_model.pt").write_bytes(b"the old model")
    environ = {**knobs, "CHECKPOINT_EVERY": "2", "KEEP_CHECKPOINTS": "3"}
    return folder, run_script(folder, environ, script=worker)


def test_a_full_disk_costs_a_checkpoint_and_no_step(crowded):
    folder, result = crowded
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
    assert saved_in(folder) == [f"step_0000000{i}.pt" for i in (2, 6)]
    saved = torch.load(folder / "checkpoints" / "test" / "step_00000006.pt", weights_only=True)
    assert saved["step"] == 6


def test_a_full_disk_costs_the_model_but_neither_the_artifact_nor_the_score(
    crowded, knobs, tmp_path
):
    """A file of the same name stays whole."""
    folder, result = crowded
    assert result.returncode == 1
    problem = "final_model.pt cannot be written: No space left on device"
    assert result.stderr == f"ValueError: {problem}\n"
    assert (folder / "final_model.pt").read_bytes() == b"the old model"
    assert not list(folder.rglob("*.part"))
    last = result.stdout.splitlines()[-1]
    assert last.startswith("final_int8_zlib_roundtrip_exact ")
    environ = {**knobs, "EVAL_ONLY": str(folder / "final_model.int8.ptz")}
    assert finished(run_here(tmp_path, environ))[-1] == last


def test_a_disk_with_no_room_for_any_result_does_not_cost_the_score(crowded, knobs, tmp_path):
    worker = write_worker(tmp_path, FULL_DISK.format((".pt.part", ".ptz.part", ".json.part")))
    result = run_script(tmp_path, knobs, script=worker)
    assert result.returncode == 1
    assert result.stderr == "ValueError: " + "".join(
        f"{name} cannot be written: No space left on device\n"
        for name in ("final_model.pt", "final_model.int8.ptz")
    )
    assert result.stdout.splitlines()[-1] == crowded[1].stdout.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "worker.py"]


def test_a_folder_in_place_of_a_result_is_found_before_training(tmp_path, knobs):
    (tmp_path / "final_model.pt").mkdir()
    result = run_here(tmp_path, knobs)
    assert result.returncode == 1
    problem = "final_model.pt cannot be written: a folder is in its place: move it"
    assert result.stderr == f"ValueError: {problem}\n"
    assert "model_params:" not in result.stdout


# ---- losses that are not finite ------------------------------------------------------------------

STEEP = {name: "1e30" for name in ("MATRIX_LR", "SCALAR_LR", "TIED_EMBED_LR")}


def test_a_loss_that_is_not_finite_stops_the_run_at_the_next_logged_step(
    undisturbed, tmp_path, long_knobs
):
    shutil.copytree(undisturbed[0] / "checkpoints", tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "test" / "step_00000100.pt").unlink()
    environ = {**long_knobs, **STEEP, "RESUME": "auto", "CHECKPOINT_EVERY": "5"}
    result = run_here(tmp_path, {**environ, "TRAIN_LOG_EVERY": "4"})
    assert result.returncode == 1
    error = r"ValueError: step:92 the train_loss is (nan|inf): go back to the last checkpoint.*\n"
    assert re.fullmatch(error, result.stderr)
    assert result.stdout.splitlines()[-1].startswith("step:92/100 train_loss:")
    assert saved_in(tmp_path) == ["step_00000090.pt"]
    path = Path("checkpoints", "test", "step_00000090.pt")
    assert (tmp_path / path).read_bytes() == (undisturbed[0] / path).read_bytes()
