"""The recipe document_mask against the unpatched model, which scores each document by itself."""

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from scripts import load, patch_script, random_model
from torch import Tensor

import train_gpt

pytestmark = pytest.mark.baseline
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
BATCH = torch.stack([row for row, _ in ROWS.values()])
# Documents that the end of a row of T tokens would cut, and one longer than T.
WHOLE = {"whole_documents": (BATCH[[0, 1, 3]].flatten(), [40, 66, 50, 96, 36])}


@pytest.mark.parametrize("row, lengths", (ROWS | WHOLE).values(), ids=ROWS | WHOLE)
def test_a_document_does_not_depend_on_the_others_in_its_row(patched, row, lengths):
    plain, gpt = (random_model(script, KNOBS) for script in (train_gpt, patched))
    expected = torch.cat([plain.logits(document[None]) for document in row.split(lengths)])
    logits = gpt.logits(torch.stack([row.flip(0), row]))[len(row) :]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert all(block.attn.documents is None for block in gpt.blocks)


@pytest.mark.parametrize("longest", [30, T])
def test_flash_attention_agrees_with_the_mask(patched, longest, monkeypatch):
    """FlashAttention, which needs a GPU, is replaced by a loop over the documents."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    leading = "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"
    assert [arg.name for arg in schema.arguments[:9]] == leading.split()

    def flash(q, k, v, bounds, bounds_k, max_q, max_k, dropout, is_causal, return_debug_mask):
        assert (bounds is bounds_k, max_q, max_k) == (True, longest, longest)
        assert (dropout, is_causal, return_debug_mask) == (0, True, False)
        ys = []
        for start, end in zip(bounds[:-1], bounds[1:], strict=True):
            heads = [x[start:end].transpose(0, 1) for x in (q, k, v)]
            y = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            ys.append(y.transpose(0, 1))
        return torch.cat(ys), None

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    heads = torch.randn(len(BATCH), T, 8, 16, generator=torch.Generator().manual_seed(0))
    q, k, v = heads.split((4, 2, 2), dim=2)
    mask, bounds = (patched.find_documents(BATCH, longest, flash)[0] for flash in (False, True))
    expected, y = (patched.attend_within(found, longest, q, k, v) for found in (mask, bounds))
    torch.testing.assert_close(y, expected)


def cut_plainly(rows: list[list[int]], longest: int) -> tuple[list[int], list[list[int]]]:
    """First tokens of the documents in all rows, and positions, by a loop over the tokens."""
    starts, positions = [], []
    for row, tokens in enumerate(rows):
        positions.append([])
        num_documents, length = 0, 0
        for place, token in enumerate(tokens):
            may_start = num_documents < max(len(tokens) // 32, 2)
            is_first = place == 0 or (token == 1 and may_start)
            num_documents += is_first
            if is_first or length == longest:
                starts.append(row * len(tokens) + place)
                length = 0
            positions[-1].append(length)
            length += 1
    return starts, positions


@pytest.mark.parametrize("size", [40, 192])  # of a row, which has two or six documents at most
@pytest.mark.parametrize("longest", [7, 32, 33, 96, 192])
def test_documents_are_cut_as_by_a_plain_loop(patched, size, longest):
    rows = torch.randint(4, 1000, (4, 192), generator=torch.Generator().manual_seed(longest))
    rows[0, [0, 7, 14, 50, 150]] = 1
    rows[1, [1, 97]] = 1
    rows[2, ::8] = 1
    rows, most = rows[:, :size], max(size // 32, 2)
    starts, positions = cut_plainly(rows.tolist(), longest)
    bounds, found = patched.find_documents(rows, longest, is_flash=True)
    assert {*bounds.tolist()} == {*starts, rows.numel()} and bounds.dtype == torch.int32
    assert found.tolist() == positions and len(bounds) == 4 * (most + (size - 1) // longest) + 1
    documents = torch.tensor([sum(start <= i for start in starts) for i in range(rows.numel())])
    documents = documents.view(4, -1)
    mask, found = patched.find_documents(rows, longest, is_flash=False)
    assert torch.equal(mask[:, 0], (documents[:, :, None] == documents[:, None]).tril())
    assert found.tolist() == positions
