"""train_record.py is train_gpt.py with more knobs: an edit of one belongs in both."""

import ast
import re
import zlib
from pathlib import Path

import pytest
from runs import SCRIPT

RECORD_SCRIPT = SCRIPT.with_name("tests") / "records" / "train_record.py"
# Parts of train_gpt.py that differ in train_record.py: functions, methods, and statements outside
# them by their first words. A comment belongs to the part below it.
DIFFER = """
docstring, CONTROL_TENSOR_NAME_PATTERNS, Hyperparameters.preset, PRESETS, apply_rotary,
attention_backends, CausalSelfAttention.docstring, CausalSelfAttention.__init__,
CausalSelfAttention.forward, MLP.docstring, MLP.__init__, MLP.forward, Block.__init__,
Block.forward, GPT.__init__, GPT.forward, GPT.logits, GPT.add_skip, Muon.__init__, Muon.step,
Muon.nesterov, Muon.orthogonalize, build_optimizers, TrainingState.__init__,
TrainingState.state_dict, TrainingState.load_state_dict, train_step, train, warm_up,
Validation.__init__, evaluate, final_losses, INT8_LEVELS, INT8_SCALE_FLOOR, quantize_rows,
quantize_tensor, quantize_state_dict_int8, dequantize_state_dict_int8, decompress, export, finish,
check_knobs, open_runtime, wrap, deserialize, write_result, write_model, read_checkpoint
"""
PINNED = 2168704971  # checksum of these parts' text in train_gpt.py
ADVICE = """
train_gpt.py and tests/records/train_record.py are out of step. To port an uncommitted edit of
train_gpt.py:
    git show HEAD:train_gpt.py > old.py
    git merge-file tests/records/train_record.py old.py train_gpt.py
If this test still fails then, the edit is in a part in which the scripts differ on purpose. Read
both, then in tests/test_in_step.py {}.
A fork that does not use train_record.py may ignore this: pytest -m "not baseline"."""

pytestmark = pytest.mark.baseline


def split(lines: list[str], body: list[ast.stmt], first: int, prefix: str = "") -> dict[str, str]:
    """The text of each part by its name. Each line, from line `first` on, belongs to a part."""
    parts = {}
    for node in body:
        words = re.match(r"[\w. |]*", lines[node.lineno - 1].strip())[0].strip()
        name = prefix + getattr(node, "name", words or "docstring")
        end = node.end_lineno
        if isinstance(node, ast.ClassDef):
            end = node.body[0].lineno - 1
            parts |= split(lines, node.body, end, f"{node.name}.")
        assert name not in parts, f"two parts are called {name}: tell them apart"
        parts[name] = "\n".join(lines[first:end]).strip()
        first = node.end_lineno
    return parts


def read_parts(path: Path) -> dict[str, str]:
    text = path.read_text(encoding="utf-8")
    return split(text.splitlines(), ast.parse(text).body, 0)


def test_the_scripts_differ_only_where_they_are_known_to():
    script, record = read_parts(SCRIPT), read_parts(RECORD_SCRIPT)
    differ = [name for name in script if record.get(name) != script[name]]
    known = " ".join(DIFFER.split()).split(", ")
    only = [name for name in record if name not in script]  # a removal of one adds to them
    checksum = zlib.crc32("\n".join([*(script[name] for name in differ), *only]).encode())
    pins = [f"add {name} to DIFFER" for name in differ if name not in known]
    pins += [f"remove {name} from DIFFER" for name in known if name not in differ]
    pins += [f"set PINNED to {checksum}"] if checksum != PINNED else []
    assert not pins, ADVICE.format(", ".join(pins))
    order = [name for name in script if name in record]
    assert order == [name for name in record if name in script]
