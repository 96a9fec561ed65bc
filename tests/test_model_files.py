"""Model files: scoring them (score.py), and damaged, foreign and hostile ones, which are one error
that names the file and never run code. (Shards: test_data.py. Resuming: test_checkpoints.py.)"""

import io
import json
import os
import pickle
import random
import re
import shutil
from pathlib import Path
from zlib import crc32

import pytest
import score
import torch
from runs import ARTIFACT, MODEL, RESULT, SCRIPT, failed, finished, run_here, run_ranks, scores

import train_gpt
from train_gpt import GPT, Hyperparameters, InputError, load_weights

CHECKPOINT = "checkpoints/test.pt"


# ---- damaged and foreign files -------------------------------------------------------------------
@pytest.mark.parametrize("name", [MODEL, CHECKPOINT, ARTIFACT])
def test_a_damaged_file_is_refused_or_loads_the_same_weights(trained, quantized_knobs, name):
    """Most changed bytes are near either end of the file, where its structure is."""
    data = (trained[0] / name).read_bytes()
    gpt = GPT(Hyperparameters.from_env(quantized_knobs), torch.float32)
    for length in (0, 1, 100, len(data) // 2, len(data) - 100, len(data) - 1):
        with pytest.raises(InputError, match=name):
            load_weights(gpt, data[:length], name)
    load_weights(gpt, data, name)
    wanted = train_gpt.serialize(gpt.state_dict())
    chance, refused = random.Random(0), 0
    for _ in range(80):
        changed = bytearray(data)
        i = chance.choice(chance.choice([range(len(data)), range(100), range(-100, 0)]))
        changed[i] ^= chance.randrange(1, 256)
        try:
            load_weights(gpt, bytes(changed), name)
        except InputError as error:
            assert name in str(error)
            refused += 1
        else:  # the byte has no meaning
            assert train_gpt.serialize(gpt.state_dict()) == wanted, i
    assert refused > 20, refused


class Hostile:
    """Unpickling it makes a folder."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("marker",)


@pytest.mark.parametrize("save", [torch.save, pickle.dump])
@pytest.mark.parametrize("wrap", [train_gpt.compress, bytes])
def test_no_code_is_run_from_a_file(tmp_path, quantized_knobs, save, wrap):
    """The file is saved by torch or by pickle, compressed or not. It is scored or resumed."""
    path, file = tmp_path / "hostile.pt", io.BytesIO()
    save({"model": Hostile()}, file)
    path.write_bytes(wrap(file.getvalue()))
    scored = run_here(tmp_path, quantized_knobs, score, [str(path)])
    for result in (scored, run_here(tmp_path, {**quantized_knobs, "RESUME": str(path)})):
        assert "weights_only" not in failed(result, "hostile.pt")  # torch advises to run the code
    assert not (tmp_path / "marker").exists()


# ---- score.py ------------------------------------------------------------------------------------
@pytest.fixture
def score_knobs(tmp_path, quantized_knobs) -> dict[str, str]:
    """Knobs with a validation split, but no training shards."""
    data = tmp_path / "datasets" / "name"
    data.mkdir(parents=True)
    shutil.copy(Path(quantized_knobs["DATA_PATH"]) / "fineweb_val_000000.bin", data)
    return {"DATA_PATH": str(data), "DEVICE": "cpu"}


def copy_result(run: Path, folder: Path, knobs: dict[str, object], **changes) -> None:
    """Copy the result of a run without checksums, with further knobs and other changes."""
    result = json.loads((run / RESULT).read_bytes()) | {"crc32": {}, "input_crc32": {}, **changes}
    result["knobs"] |= knobs
    (folder / RESULT).write_text(json.dumps(result))


def score_file(folder: Path, knobs: dict, path: Path) -> list[str]:
    """Run score.py, which must succeed. Returns its log."""
    result = run_here(folder, knobs, score, [str(path)])
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_an_artifact_has_the_same_score_as_after_its_training(trained, tmp_path, score_knobs):
    """The knobs come from the result of its run, in the same folder."""
    left_over = {"RESUME": "auto"}  # exported for a run: it changes nothing
    lines = score_file(tmp_path, {**score_knobs, **left_over}, trained[0] / ARTIFACT)
    assert lines[-1] == trained[1][-1]
    assert lines[-2].startswith("final_int8_zlib_roundtrip val_loss:")
    assert not [line for line in lines if line.startswith(("step:", "warmup_step:", "WARNING"))]
    assert [path.name for path in tmp_path.iterdir()] == ["datasets"]


def test_with_run_id_a_score_has_a_file_of_its_own(trained, tmp_path, score_knobs):
    """RUN_ID may be that of the run, whose log stays as it is."""
    log = tmp_path / "logs" / "test.txt"
    log.parent.mkdir()
    shutil.copy(trained[0] / "logs" / "test.txt", log)
    lines = score_file(tmp_path, {**score_knobs, "RUN_ID": "test"}, trained[0] / ARTIFACT)
    assert lines[0] == "logs/test.score.txt" and lines[-1] == trained[1][-1]
    assert (tmp_path / lines[0]).read_text().endswith("\n".join(["", *lines, ""]))
    assert log.read_bytes() == (trained[0] / "logs" / "test.txt").read_bytes()


def test_the_environment_overrides_the_knobs_of_the_run(trained, tmp_path, score_knobs):
    lines = score_file(tmp_path, {**score_knobs, "EVAL_STRIDE": "16"}, trained[0] / ARTIFACT)
    (knobs,) = (line.split(":", 1)[1] for line in lines if line.startswith("knobs:"))
    wanted = {"MODEL_DIM=192", "EVAL_STRIDE=16", f"DATA_PATH={score_knobs['DATA_PATH']}"}
    assert wanted < {*knobs.split()}
    assert lines[-2].endswith(" stride:16")
    assert scores(lines[-1]) != scores(trained[1][-1])


@pytest.mark.parametrize("name", [MODEL, CHECKPOINT])
def test_unquantized_weights_have_another_line(trained, tmp_path, score_knobs, name):
    lines = score_file(tmp_path, score_knobs, trained[0] / name)
    assert "final_int8" not in "".join(lines)
    assert re.fullmatch(r"score_exact val_loss:\d+\.\d{8} val_bpb:\d+\.\d{8}", lines[-1])
    (end,) = (line for line in trained[1] if line.startswith("step:6/6 val_loss:"))
    assert scores(lines[-1]) == pytest.approx(scores(end), abs=6e-5)
    assert scores(lines[-1]) != pytest.approx(scores(trained[1][-1]), abs=2e-6)


def test_two_ranks_score_as_one(trained, tmp_path, score_knobs):
    results = run_ranks(tmp_path, score_knobs, 2, [score.__file__, trained[0] / ARTIFACT])
    assert [result.returncode for result in results] == [0, 0], results[1].stderr
    found = scores(finished(results[0])[-1])
    assert found == pytest.approx(scores(trained[1][-1]), abs=2e-6)
    assert results[1].stdout == ""


def test_a_score_that_is_not_finite_is_printed_and_fails(trained, tmp_path, score_knobs):
    weights = torch.load(trained[0] / MODEL, weights_only=True)
    weights["tok_emb.weight"].fill_(torch.nan)
    torch.save(weights, tmp_path / "nan.pt")
    copy_result(trained[0], tmp_path, {})
    result = run_here(tmp_path, score_knobs, score, [str(tmp_path / "nan.pt")])
    assert result.returncode == 1 and "\nscore_exact val_loss:nan " in result.stdout


def test_another_script_or_split_is_a_warning(trained, tmp_path, score_knobs, tokenizer):
    """Only techniques that are on are named, again before the score, and so are other inputs. The
    split was cut."""
    manifest = {"datasets": [{"name": "name", "stats": {"tokens_val": 1501}}]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    copy_result(trained[0], tmp_path, {"ema_decay": 0.5, "xsa_layers": 0})
    lines = score_file(tmp_path, score_knobs, Path(shutil.copy(trained[0] / ARTIFACT, tmp_path)))
    first, split, again = (line for line in lines if line.startswith("WARNING"))
    assert "use --script tests/records/train_record.py, " in first
    assert first.endswith("lacks EMA_DECAY=0.5") and first == again == lines[-3]
    assert "1,501" in split and "manifest.json" in split
    paths = Path(score_knobs["DATA_PATH"], "fineweb_val_000000.bin"), tokenizer, SCRIPT
    names = dict(zip(("val_tokens", "tokenizer", "script"), paths, strict=True))
    inputs = {k: crc32(path.read_bytes()[1024 * (k[0] == "v") :]) for k, path in names.items()}
    for changed, words in (({}, []), (dict.fromkeys(inputs, 1), ["--script", "TOKEN", "DATA_"])):
        copy_result(trained[0], tmp_path, {}, input_crc32=inputs | changed)
        lines = score_file(tmp_path, score_knobs, tmp_path / ARTIFACT)
        found = [line for line in lines if line.startswith("WARNING") and line != split]
        assert all(word in line for word, line in zip(2 * words, found, strict=True))


def test_a_result_that_is_missing_or_of_another_run_is_named(trained, tmp_path, score_knobs):
    """Knobs of another run may fit but be wrong: another ROPE_BASE gives another score."""
    path = shutil.copy(trained[0] / ARTIFACT, tmp_path)
    failed(run_here(tmp_path, score_knobs, score, [path]), f"{RESULT} have no knobs")
    copy_result(trained[0], tmp_path, {}, crc32={ARTIFACT: 1, MODEL: 2})
    failed(run_here(tmp_path, score_knobs, score, [path]), ARTIFACT, RESULT, "crc32")
    (tmp_path / RESULT).write_text("[]")
    failed(run_here(tmp_path, score_knobs, score, [path]), f"{RESULT} is damaged")


def test_weights_that_do_not_fit_are_named(trained, tmp_path, score_knobs):
    environ = {**score_knobs, "NUM_LAYERS": "3"}
    error = failed(run_here(tmp_path, environ, score, [str(trained[0] / ARTIFACT)]), ARTIFACT)
    differ = r"knobs that differ: DATA_PATH=.*, NUM_LAYERS=3 \(its run: 2\); --script logs/test.txt"
    assert re.search(differ, error), error


def test_an_undone_edit_is_scored_with_the_script_of_the_log(trained, tmp_path, score_knobs):
    """The warning names the log. The edit sets the mean loss."""
    edited = SCRIPT.read_bytes() + b"\ndef mean_loss(losses, runtime): return 1.25"
    copy_result(trained[0], tmp_path, {}, bytes_code=len(edited))
    path, log = shutil.copy(trained[0] / ARTIFACT, tmp_path), tmp_path / "logs" / "test.txt"
    assert "--script logs/test.txt" in score_file(tmp_path, score_knobs, path)[-3]
    log.parent.mkdir()
    log.write_bytes(edited + b"\n" + 100 * b"=" + b"\nRunning Python 3")
    environ = {**score_knobs, "HOME": str(tmp_path)}
    result = run_here(tmp_path, environ, score, [path, "--script=~/logs/test.txt"])
    assert "val_loss:1.25000000" in finished(result)[-1] and "WARNING" not in result.stdout
    failed(run_here(tmp_path, score_knobs, score, [path, f"--script={path}"]), "has no script")
