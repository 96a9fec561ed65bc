"""EVAL_ONLY: a file is scored as the run that made it did, and nothing is trained."""

import io
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import run_here, run_ranks, scores

from train_gpt import GPT, Hyperparameters, InputError, load_weights

ARTIFACT = "final_model.int8.ptz"
CHECKPOINT = "checkpoints/test/step_00000006.pt"


@pytest.mark.parametrize(
    ("name", "ranks"), [(ARTIFACT, 0), ("final_model.pt", 0), (CHECKPOINT, 0), (CHECKPOINT, 2)]
)
def test_eval_only_scores_a_file(trained, tmp_path, quantized_knobs, name, ranks):
    """As the run that made it did: the artifact to the last digit. Nothing is trained or written,
    and training shards are not needed."""
    folder, lines = trained
    data = tmp_path / "data"
    data.mkdir()
    shard = "fineweb_val_000000.bin"
    shutil.copy(Path(quantized_knobs["DATA_PATH"]) / shard, data)
    environ = {**quantized_knobs, "EVAL_ONLY": str(folder / name), "DATA_PATH": str(data)}
    result = run_ranks(tmp_path, environ, ranks)[0] if ranks else run_here(tmp_path, environ)
    assert result.returncode == 0, result.stderr
    rounded, exact = result.stdout.splitlines()[-2:]
    assert re.fullmatch(
        r"final_int8_zlib_roundtrip val_loss:\d+\.\d{4} val_bpb:\d+\.\d{4} eval_time:\d+ms", rounded
    )
    assert re.fullmatch(
        r"final_int8_zlib_roundtrip_exact val_loss:\d+\.\d{8} val_bpb:\d+\.\d{8}", exact
    )
    assert scores(rounded) == pytest.approx(scores(exact), abs=6e-5)
    if name == ARTIFACT:
        assert exact == lines[-1]
    else:
        (end,) = [line for line in lines if line.startswith("step:6/6 val_loss:")]
        assert scores(exact) == pytest.approx(scores(end), abs=6e-5)
        assert scores(exact) != pytest.approx(scores(lines[-1]), abs=2e-6)  # not quantized
    assert "step:" not in result.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "logs"]


def test_a_damaged_file_is_one_line(trained, tmp_path, quantized_knobs):
    path = tmp_path / "cut.ptz"
    path.write_bytes((trained[0] / ARTIFACT).read_bytes()[:-9])
    result = run_here(tmp_path, {**quantized_knobs, "EVAL_ONLY": str(path)})
    assert result.returncode == 1 and "final_int8" not in result.stdout
    name = re.escape(f"EVAL_ONLY='{path}'")
    problem = "is no model file, or is damaged: it is cut short, or too large when unpacked"
    assert re.fullmatch(rf"ValueError: {name} {problem}\n", result.stderr)


@pytest.mark.parametrize("name", [ARTIFACT, "final_model.pt", CHECKPOINT])
@pytest.mark.parametrize(
    ("knob", "value", "problem"),
    [
        (
            "VOCAB_SIZE",
            "400",
            r"size mismatch for tok_emb.weight: copying a param with shape torch.Size\(\[384, 192\]"
            r"\) from checkpoint, the shape in current model is torch.Size\(\[400, 192\]\)",
        ),
        ("NUM_LAYERS", "3", 'Missing key.* "blocks.2.attn_scale"'),
        (
            "NUM_LAYERS",
            "1",
            r"size mismatch for skip_weights: copying a param with shape torch.Size\(\[1, 192\]\) "
            r"from checkpoint, the shape in current model is torch.Size\(\[0, 192\]\)",
        ),
        ("TIE_EMBEDDINGS", "0", 'Missing key.* "lm_head.weight"'),
    ],
)
def test_a_model_of_another_shape_names_the_tensor(
    trained, quantized_knobs, name, knob, value, problem
):
    """On one line, with the way out."""
    gpt = GPT(Hyperparameters.from_env({**quantized_knobs, knob: value}), torch.float32)
    with pytest.raises(InputError) as caught:
        load_weights(gpt, (trained[0] / name).read_bytes(), name)
    line = str(caught.value)
    assert re.fullmatch(rf"{name} does not fit: .*{problem}.*: set the model's knobs", line)


def test_a_tensor_too_many_is_named(trained, quantized_knobs):
    state = torch.load(trained[0] / "final_model.pt", weights_only=True)
    buffer = io.BytesIO()
    torch.save({**state, "blocks.7.extra": torch.zeros(2)}, buffer)
    gpt = GPT(Hyperparameters.from_env(quantized_knobs), torch.float32)
    with pytest.raises(InputError, match='a file does not fit: .*Unexpected.* "blocks.7.extra"'):
        load_weights(gpt, buffer.getvalue(), "a file")
