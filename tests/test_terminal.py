"""What a run can show besides its lines: curves, text of its own, a status on a terminal."""

import dataclasses
import json
import os
import pty
import re
import subprocess
import sys

import pytest
import sentencepiece
import torch
from conftest import SCRIPT, process_environ, run_script
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from train_gpt import GPT, Hyperparameters, Log, Runtime, progress, sample

LAST = ("final_int8_zlib_roundtrip ", "final_int8_zlib_roundtrip_exact ")


def start_on_a_terminal(folder, environ) -> tuple[subprocess.Popen, int]:
    """The script, and our end of the terminal of 80 columns that it writes to."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT)],
        cwd=folder,
        env=process_environ(environ, 1),
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(theirs)
    return process, ours


def on_a_terminal(folder, environ) -> tuple[int, str]:
    """Exit code of the script and what it sends to its terminal."""
    process, ours = start_on_a_terminal(folder, environ)
    parts = []
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # so Linux says that the other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    errors = process.communicate(timeout=60)[1]
    assert errors == ""
    return process.returncode, b"".join(parts).decode()


@pytest.fixture(scope="module")
def shown(tmp_path_factory, knobs):
    """Folder and terminal of a run with everything on, long enough for the status to show."""
    folder = tmp_path_factory.mktemp("shown")
    environ = {
        **knobs,
        "TENSORBOARD": "1",
        "SAMPLE_PROMPT": "The import statement",
        "SAMPLE_TOKENS": "12",
        "ITERATIONS": "200",
        "TRAIN_LOG_EVERY": "100",
        "VAL_LOSS_EVERY": "100",
        "GRAD_CLIP_NORM": "0.5",
    }
    code, terminal = on_a_terminal(folder, environ)
    assert code == 0, terminal
    return folder, terminal


def test_a_terminal_that_goes_away_ends_no_run(tmp_path, knobs):
    """Nor does one that cannot show what the model writes."""
    environ = {**knobs, "SAMPLE_PROMPT": "naïve \u2192", "PYTHONIOENCODING": "ascii"}
    process, ours = start_on_a_terminal(tmp_path, {**environ, "ITERATIONS": "60"})
    seen = ""
    while "step:3/60" not in seen:
        seen += os.read(ours, 1000).decode()
    os.close(ours)
    errors = process.communicate(timeout=60)[1]
    # 120 is Python's own, for a stdout that takes no more.
    assert process.returncode in (0, 120) and "Traceback" not in errors, errors
    assert (tmp_path / "final_result.json").exists()
    lines = (tmp_path / "logs" / "test.txt").read_text().splitlines()
    assert lines[-1].startswith(LAST[1]) and "sample:'naïve \u2192" in "\n".join(lines)


def test_the_status_comes_and_goes_between_the_lines(shown):
    folder, terminal = shown
    status = r"\x1b\[K([^\r\n]*) [|/\\-]\r(?!\n)"
    texts = re.findall(status, terminal)
    form = r"step:\d+/200 loss:\d\.\d{4} tokens_per_s:\d+ left:\d+s"
    assert any(re.fullmatch(form, text) for text in texts)
    others = r"warmup_step:[01]/2|step:\d+/200|validation: \d+%"
    assert all(re.fullmatch(f"{form}|{others}", text) for text in texts)
    assert len(set(texts)) > 2
    rest = re.sub(status, "", terminal)
    lines = [line.removeprefix("\x1b[K") for line in rest.splitlines()]
    assert rest.startswith("logs/test.txt")  # nothing is cleared where nothing stood
    assert "\x1b" not in "".join(lines)
    log = (folder / "logs" / "test.txt").read_text()
    assert log.endswith("\n" + "\n".join(lines) + "\n")
    assert terminal.endswith("\r\n") and lines[-1].startswith(LAST[1])


def test_the_curves(shown):
    folder, _ = shown
    log = (folder / "logs" / "test.txt").read_text()
    events = EventAccumulator(str(folder / "tensorboard" / "test")).Reload()
    assert set(events.Tags()["scalars"]) == {
        "train_loss",
        "grad_norm",
        "tokens_per_s",
        "val_loss",
        "val_bpb",
        *(f"lr_{name}" for name in ("embed", "scalar", "matrix")),
    }
    for name in ("train_loss", "val_loss", "val_bpb"):
        logged = re.findall(rf"step:(\d+)/200 .*{name}:(\S+)", log)
        points = [(str(event.step), f"{event.value:.4f}") for event in events.Scalars(name)]
        assert points == logged and len(points) >= 3
    rates = {event.step: event.value for event in events.Scalars("lr_matrix")}
    assert rates[10] == pytest.approx(0.04) and rates[200] == pytest.approx(0.04 / 4)
    averages = re.findall(r"train_loss:.* step_avg:(\S+)ms", log)
    for event, average in zip(events.Scalars("tokens_per_s"), averages, strict=True):
        assert event.value == pytest.approx(512 * 1000 / float(average), rel=0.01)
    # The norm before it is cut down to 0.5.
    assert max(event.value for event in events.Scalars("grad_norm")) > 0.5


def test_the_text_comes_from_the_artifact_and_from_the_seed(shown, knobs, tmp_path):
    folder, terminal = shown
    lines = [line.removeprefix("\x1b[K") for line in terminal.splitlines()]
    (index,) = [i for i, line in enumerate(lines) if line.startswith("sample:")]
    assert lines[index].startswith("sample:'The import statement")
    assert lines[-2].rsplit("\x1b[K", 1)[-1].startswith(LAST[0]) and index < len(lines) - 2
    environ = {
        **knobs,
        "SAMPLE_PROMPT": "The import statement",
        "SAMPLE_TOKENS": "12",
        "EVAL_ONLY": str(folder / "final_model.int8.ptz"),
    }
    again = run_script(tmp_path, environ)
    assert again.returncode == 0, again.stderr
    assert lines[index] in again.stdout.splitlines()
    assert [s for s in again.stdout.splitlines() if s.startswith(LAST[1])] == lines[-1:]


def test_sampling_follows_the_model_to_the_end_of_the_document(knobs, tokenizer):
    """A real model made to know one chain: from the prompt's last token to 300, 301 and BOS."""
    sp = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    V, prompt = sp.vocab_size(), sp.encode("with")
    wide = {"MODEL_DIM": str(V), "NUM_LAYERS": "1", "TIE_EMBEDDINGS": "0"}
    hp = Hyperparameters.from_env({**knobs, **wide, "SAMPLE_PROMPT": "with"})
    gpt = GPT(hp, torch.float32)
    gpt.tok_emb.weight.data = torch.eye(V)
    for before, after in ((prompt[-1], 300), (300, 301), (301, sp.bos_id())):
        gpt.lm_head.weight.data[after, before] = 30
    assert sample(gpt, hp) == sp.decode([*prompt, 300, 301])
    gpt.lm_head.weight.data[301, 300], gpt.lm_head.weight.data[300, 300] = 0, 30
    assert sample(gpt, hp) == sp.decode([*prompt] + [300] * 64)
    # Of two tokens that are as likely, a temperature of 0 takes always the same.
    gpt.lm_head.weight.data[302, 300] = 30
    cold = dataclasses.replace(hp, sample_temperature=0.0)
    texts = {sample(gpt, dataclasses.replace(cold, seed=seed)) for seed in range(4)}
    assert texts == {sp.decode([*prompt] + [300] * 64)}
    assert "".join(texts) != sample(gpt, hp)


def test_a_line_ends_the_status(tmp_path, knobs, capsys):
    hp = Hyperparameters.from_env({**knobs, "OUTPUT_DIR": str(tmp_path)})
    log = Log(hp, Runtime(0, 1, 0, False, torch.device("cpu"), torch.float32))
    log.status = "validation: 50%"
    log("a line")
    assert log.status == "" and capsys.readouterr().out.endswith("a line\n")


def test_the_status_says_speed_and_time_left():
    hp = Hyperparameters(train_batch_tokens=65536, iterations=100, max_wallclock_seconds=0)
    status = progress(hp, 25, 50_000.0, torch.tensor(3.0))
    assert status == "step:25/100 loss:3.0000 tokens_per_s:32768 left:150s"
    capped = dataclasses.replace(hp, max_wallclock_seconds=60.0)
    assert progress(capped, 25, 50_000.0, torch.tensor(3.0)).endswith(" left:10s")


def test_sampling_by_seed_temperature_and_length(knobs):
    hp = Hyperparameters.from_env({**knobs, "SAMPLE_PROMPT": "with", "SAMPLE_TOKENS": "40"})
    torch.manual_seed(0)
    gpt = GPT(hp, torch.bfloat16)  # in which logits are often equal
    gpt.tok_emb.weight.data.normal_(std=0.05)
    texts = {
        name: [sample(gpt, dataclasses.replace(hp, seed=seed, **other)) for seed in (1, 1, 2)]
        for name, other in {
            "warm": {},
            "cold": {"sample_temperature": 0.0},
            "long": {"sample_tokens": 80},  # the window is TRAIN_SEQ_LEN=32
            "none": {"sample_tokens": 0},
        }.items()
    }
    assert texts["warm"][0] == texts["warm"][1] != texts["warm"][2]
    assert len(set(texts["cold"])) == 1 and texts["none"] == ["with"] * 3
    assert texts["long"][0].startswith(texts["warm"][0][:40])


def test_without_the_package_one_line_says_what_to_install(tmp_path, knobs):
    (tmp_path / "tensorboard.py").write_text("raise ImportError('broken')")
    environ = {**knobs, "TENSORBOARD": "1", "PYTHONPATH": str(tmp_path)}
    result = run_script(tmp_path, environ)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr == ("ValueError: TENSORBOARD=1 needs a package: pip install tensorboard\n")


def test_a_run_without_these_knobs_leaves_no_trace_of_them(tmp_path, knobs):
    result = run_script(tmp_path, {**knobs, "ITERATIONS": "1", "WARMUP_STEPS": "0"})
    assert result.returncode == 0 and "sample:" not in result.stdout
    assert "\x1b" not in result.stdout and not (tmp_path / "tensorboard").exists()
    used = json.loads((tmp_path / "final_result.json").read_text())["knobs"]
    assert used["sample_prompt"] == "" and used["tensorboard"] is False
