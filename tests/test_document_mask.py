"""The recipe document_mask against the unpatched model, which scores each document by itself."""

import shutil
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from test_lora_ttt import random_model
from test_recipes import load, patch_script
from torch import Tensor

import train_gpt

pytestmark = [
    pytest.mark.baseline,
    pytest.mark.skipif(shutil.which("git") is None, reason="needs git apply"),
]

T = 96  # so that a row has three documents at most
SMALL = (
    f"TRAIN_SEQ_LEN={T} TRAIN_BATCH_TOKENS={8 * T} "
    "NUM_LAYERS=2 MODEL_DIM=32 NUM_HEADS=4 NUM_KV_HEADS=2"
)
KNOBS = dict(knob.split("=") for knob in SMALL.split())


@pytest.fixture(scope="module")
def patched(tmp_path_factory) -> ModuleType:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield load(patch_script(tmp_path_factory.mktemp("mask"), ["document_mask"]), monkeypatch)


def random_row(*starts: int) -> Tensor:
    """Random tokens with BOS at these positions."""
    row = torch.randint(4, 1000, (T,), generator=torch.Generator().manual_seed(len(starts)))
    row[list(starts)] = 1
    return row


# Rows and the lengths of their documents. The third document includes those after it.
ROWS = {
    "begins_with_bos": (random_row(0, 40), [40, 56]),
    "begins_inside_a_document": (random_row(10, 60), [10, 50, 36]),
    "one_token": (random_row(1, 95), [1, 94, 1]),
    "no_bos": (random_row(), [96]),
    "surplus_documents": (random_row(0, 8, 30, 31, 70), [8, 22, 66]),
}


def score_alone(row: Tensor, lengths: list[int]) -> Tensor:
    """The unpatched model's logits, document by document."""
    gpt = random_model(train_gpt, KNOBS)
    return torch.cat([gpt.logits(document[None]) for document in row.split(lengths)])


@pytest.mark.parametrize("name", ROWS)
def test_a_document_does_not_depend_on_the_others_in_its_row(patched, name):
    row, lengths = ROWS[name]
    batch = torch.stack([random_row(20), row])
    gpt = random_model(patched, KNOBS)
    logits = gpt.logits(batch)[T:]
    torch.testing.assert_close(logits, score_alone(row, lengths), rtol=1e-4, atol=1e-4)
    assert all(block.attn.documents is None for block in gpt.blocks)


def test_bounds_of_documents(patched):
    """A row of fewer than 64 tokens has two documents at most."""
    rows = [[1, 5, 6, 1, 7, 8], [5, 6, 7, 8, 9, 5], [5, 1, 6, 1, 1, 7]]
    bounds = patched.find_documents(torch.tensor(rows), is_flash=True)
    assert bounds.dtype == torch.int32 and bounds.tolist() == [0, 3, 6, 12, 12, 13, 18]
    bounds = patched.find_documents(torch.stack([row for row, _ in ROWS.values()]), is_flash=True)
    ends = [0, 40, 96, 96, 106, 156, 192, 193, 287, 288, 384, 384, 384, 392, 414, 480]
    assert bounds.tolist() == ends


def test_flash_attention_agrees_with_the_mask(patched, monkeypatch):
    """FlashAttention, which needs a GPU, is replaced by a loop over the documents."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    leading = "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"
    assert [arg.name for arg in schema.arguments[:9]] == leading.split()

    def flash(q, k, v, bounds, bounds_k, max_q, max_k, dropout, is_causal, return_debug_mask):
        assert (bounds is bounds_k, max_q, max_k) == (True, T, T)
        assert (dropout, is_causal, return_debug_mask) == (0, True, False)
        ys = []
        for start, end in zip(bounds[:-1], bounds[1:], strict=True):
            heads = [x[start:end].transpose(0, 1) for x in (q, k, v)]
            y = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            ys.append(y.transpose(0, 1))
        return torch.cat(ys), None

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    rows = torch.stack([row for row, _ in ROWS.values()])
    heads = torch.randn(len(rows), T, 8, 16, generator=torch.Generator().manual_seed(0))
    q, k, v = heads.split((4, 2, 2), dim=2)
    expected, y = (
        patched.attend_within(patched.find_documents(rows, is_flash), q, k, v)
        for is_flash in (False, True)
    )
    torch.testing.assert_close(y, expected)
