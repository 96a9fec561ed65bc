"""train_record.py's model against plain versions; published sizes; knobs that need each other."""

from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
import train_record
from scripts import RECORDS, random_model, read
from torch import Tensor, nn

from train_gpt import apply_rotary, attend, rms_norm, rotary_tables

pytestmark = pytest.mark.baseline
from_env = train_record.Hyperparameters.from_env
T = 16
SMALL = f"NUM_LAYERS=6 MODEL_DIM=32 NUM_HEADS=4 NUM_KV_HEADS=2 TRAIN_SEQ_LEN={T}"
LANES = f"{SMALL} XSA_LAYERS=2 PARALLEL_LAYERS=4 TWO_LANES=1 LOOP_LAYERS=2 LOOP_FIRST=1"
STACK = (
    f"{LANES} RELU_SLOPE=0.5 ROPE_FRACTION=0.5 DEPTH_SCALE=1 SKIP_GATES=1 SMEAR_CHANNELS=12 "
    "ATTENTION_GATE_MAX=1.5 ATTENTION_GATE_SCALE=0.5"
)


# ---- Records and knobs ---------------------------------------------------------------------------
@pytest.mark.parametrize("preset", RECORDS)
def test_a_record_is_the_published_model(preset):
    """From record1855 on, the model lacks 48 of the published parameters, which do nothing."""
    num_params, loop = 35_945_623, [3, 4, 5]
    if preset == "record1394":
        num_params, loop = 35_943_512, [4, 5]
    with torch.device("meta"):
        gpt = train_record.GPT(from_env({"PRESET": preset}))
    assert sum(param.numel() for param in gpt.parameters()) == num_params
    assert gpt.order == [*range(6), *loop, *loop, *range(6, 11)]
    assert gpt.num_encoder_layers == len(gpt.order) // 2
    assert train_record.PRESETS[preset].keys() <= {knob.name.upper() for knob in fields(gpt.hp)}
    assert train_record.PRESETS["record"] == train_record.PRESETS["record1394"]  # its older name


SLOT = "TRAIN_BATCH_TOKENS=512 TRAIN_SEQ_LEN=32 CONTEXT_GROWTH"
TWO_LANES = "TWO_LANES=1 LOOP_LAYERS=2"


REFUSED = [
    ("WHOLE_DOCUMENTS=1", "WHOLE_DOCUMENTS=True must be 0 without DOCUMENT_MASK=1"),
    (f"{TWO_LANES} NUM_LAYERS=4 LOOP_FIRST=1 PARALLEL_LAYERS=2", "LOOP_LAYERS=2 must be lower"),
    (f"{TWO_LANES} NUM_LAYERS=6 LOOP_FIRST=4 PARALLEL_LAYERS=1", "LOOP_LAYERS=2 must be lower"),
    ("NUM_LAYERS=5 LOOP_FIRST=4 LOOP_LAYERS=2", "LOOP_FIRST=4 must be at most "),
    (f"{SLOT}=0.3:0.5", "CONTEXT_GROWTH=.* divide a slot of 64"),
    (f"{SLOT}=0.5:0.7,0.25:0.2", "CONTEXT_GROWTH=.* must be in order"),
    ("SMEAR_CHANNELS=40 MODEL_DIM=32", "SMEAR_CHANNELS=40 must be at most MODEL_DIM"),
    ("MATRIX_LEVELS=0", "MATRIX_LEVELS=0 must be 1 to 127"),
    ("LORA_SKIP=c_k,k", "LORA_SKIP=.* must be some of c_q, c_k, c_v, proj, fc, lm_head"),
]


@pytest.mark.parametrize("knobs, words", REFUSED)
def test_a_knob_that_does_not_fit_the_others_is_refused(knobs, words):
    with pytest.raises(train_record.InputError, match=words):
        from_env(read(knobs))


# ---- The model, by the formulas of the techniques ------------------------------------------------
def plain_embedding(gpt: nn.Module, ids: list[int]) -> Tensor:
    """The first layer's input."""
    x = gpt.tok_emb.weight[ids]
    if gpt.hp.smear_channels == 0:
        return rms_norm(x)
    assert len(gpt.smear_gate) == 13
    rows = [*x]
    for t in [t for t in range(1, len(ids)) if ids[t] != 1]:  # nothing goes into a BOS
        gate = torch.sigmoid(gpt.smear_gate[:12] @ x[t, :12])
        rows[t] = x[t] + gpt.smear_gate[12] * gate * x[t - 1]
    return rms_norm(torch.stack(rows))


def plain_attention(gpt: nn.Module, layer: int, x: Tensor) -> Tensor:
    attn, hp = gpt.blocks[layer].attn, gpt.hp
    q, k, v = (c(x).view(len(x), -1, 8) for c in (attn.c_q, attn.c_k, attn.c_v))
    n = int(8 * hp.rope_fraction)  # rotated channels
    cos, sin = rotary_tables(len(x), n, 10_000)[:, :, None]
    q, k = (
        torch.cat((apply_rotary(x[..., :n], cos, sin), x[..., n:]), dim=-1)
        for x in (rms_norm(q), rms_norm(k))
    )
    y = attend(*(x[None] for x in (q * attn.q_gain[:, None], k, v)))[0]
    if layer >= hp.num_layers - hp.xsa_layers:
        v = v.repeat_interleave(2, dim=1)
        y = y - (y * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True) * v
    if hp.attention_gate_max > 0:
        y = 1.5 * torch.sigmoid(0.5 * x[:, :12] @ attn.gate.T)[..., None] * y
    return attn.proj(y.flatten(1))


def plain_logits(gpt: nn.Module, ids: list[int], order: list[int]) -> Tensor:
    hp, x0 = gpt.hp, plain_embedding(gpt, ids)
    lanes, skips = [x0, x0], []  # one stream is two equal lanes
    for i, layer in enumerate(order):
        block, num_skips = gpt.blocks[layer], len(order) // 2
        is_parallel = layer >= hp.num_layers - hp.parallel_layers
        has_lanes = is_parallel and layer >= hp.num_layers // 2 and hp.two_lanes
        if i >= num_skips:
            row = len(gpt.skip_weights) - 2 * num_skips + i
            kept, added = lanes[0], gpt.skip_weights[row] * skips.pop()
            if hp.skip_gates:
                gate = torch.sigmoid(gpt.skip_weights_gate[row])
                kept, added = gate * kept, (1 - gate) * added
            lanes = [kept + added, lanes[1] if has_lanes else kept + added]
        scale = (layer + 1) ** -0.5 if hp.depth_scale else 1
        mixed = block.resid_mix[0] * lanes[0] + block.resid_mix[1] * x0
        y = block.attn_scale * plain_attention(gpt, layer, scale * rms_norm(mixed))
        x = lanes[1] if has_lanes else mixed if is_parallel else mixed + y
        hidden = block.mlp.fc(scale * rms_norm(x))
        squares = torch.where(hidden > 0, hidden, hp.relu_slope * hidden) ** 2
        z = block.mlp_scale * block.mlp.proj(squares)
        if has_lanes:
            factors = zip(lanes, block.lane_scales.T, strict=True)
            lanes = [keep * lane + attn * y + mlp * z for lane, (keep, attn, mlp) in factors]
        else:
            lanes = [mixed + y + z] * 2
        skips += [lanes[0]] if i < num_skips else []
    logits = rms_norm((lanes[0] + lanes[1]) / 2) @ gpt.tok_emb.weight.T
    return 30 * torch.tanh(logits / 30)


@pytest.mark.parametrize("knobs", [STACK, f"{STACK} TWO_LANES=0", LANES, SMALL])
def test_logits_are_those_of_a_plain_version(knobs):
    gpt = random_model(train_record, read(knobs))
    ids = [1, *range(5, 12), 1, *range(10, 17)]
    for is_looping in (True, False):
        gpt.set_looping(is_looping)
        loops = [1, 2] if is_looping and gpt.hp.loop_layers else []
        expected = plain_logits(gpt, ids, [0, 1, 2, *loops, 3, 4, 5])
        torch.testing.assert_close(gpt.logits(torch.tensor([ids])), expected, rtol=0, atol=1e-3)


def test_new_parameters_begin_as_documented():
    """Adam trains the new parameters, and they stay in fp32."""
    gpt = train_record.GPT(from_env(read(STACK)))
    zeros = (gpt.smear_gate, gpt.skip_weights_gate, gpt.blocks[5].attn.gate)
    assert not any(param.any() for param in zeros)
    assert gpt.blocks[5].lane_scales.tolist() == [[pytest.approx(1.1)] * 2, [1] * 2, [1] * 2]
    scalars = {id(param) for param in train_record.parameter_groups(gpt, gpt.hp)["scalar"]}
    for param in (*zeros, gpt.blocks[5].lane_scales):
        assert id(param) in scalars and param.dtype == torch.float32


# ---- Document masks ------------------------------------------------------------------------------
WIDTH = 96  # so that a row has three documents at most
DOCUMENTS = f"TRAIN_SEQ_LEN={WIDTH} TRAIN_BATCH_TOKENS={8 * WIDTH}"
ROWS = torch.randint(4, 1000, (5, WIDTH), generator=torch.Generator().manual_seed(0))
for row, starts in zip(ROWS, ([0, 40], [10, 60], [1, 95], [], [0, 8, 30, 31, 70]), strict=True):
    row[starts] = 1


def cut_plainly(rows: list[list[int]], longest: int) -> tuple[list[int], list[int]]:
    """Return each token's document, numbered over all rows, and its position in it."""
    documents, positions, number = [], [], -1
    for row in rows:
        in_row = 0
        for place, token in enumerate(row):
            is_first = place == 0 or (token == 1 and in_row < max(len(row) // 32, 2))
            in_row += is_first
            is_cut = is_first or positions[-1] == longest - 1
            number += is_cut
            documents.append(number)
            positions.append(0 if is_cut else positions[-1] + 1)
    return documents, positions


@pytest.mark.parametrize("knobs", [SMALL, f"{STACK} SMEAR_CHANNELS=0"], ids=["alone", "stack"])
@pytest.mark.parametrize("rows", [ROWS, ROWS.view(1, -1)], ids=["rows", "one row"])
def test_a_document_does_not_depend_on_the_others_in_its_row(knobs, rows):
    plain, gpt = (
        random_model(train_record, read(f"{knobs} {DOCUMENTS} DOCUMENT_MASK={mask}"))
        for mask in ("0", "1")
    )
    documents, _ = cut_plainly(rows.tolist(), WIDTH)
    lengths = torch.tensor(documents).bincount().tolist()
    expected = [plain.logits(document[None]) for document in rows.flatten().split(lengths)]
    torch.testing.assert_close(gpt.logits(rows), torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("longest", [30, WIDTH])
def test_flash_attention_agrees_with_the_mask(longest, monkeypatch):
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
    heads = torch.randn(len(ROWS), WIDTH, 8, 16, generator=torch.Generator().manual_seed(0))
    qkv = heads.split((4, 2, 2), dim=2)
    mask, bounds = (train_record.find_documents(ROWS, longest, f)[0] for f in (False, True))
    expected, y = (train_record.attend_within(documents, *qkv) for documents in (mask, bounds))
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("size", [40, 192])  # a row has at most two or six documents
@pytest.mark.parametrize("longest", [7, 32, 33, 96, 192])
def test_documents_are_cut_as_by_a_plain_loop(size, longest):
    rows = torch.randint(4, 1000, (4, 192), generator=torch.Generator().manual_seed(longest))
    rows[0, [0, 7, 14, 50, 150]] = 1
    rows[1, [1, 97]] = 1
    rows[2, ::8] = 1
    rows, most = rows[:, :size], max(size // 32, 2)
    plain = cut_plainly(rows.tolist(), longest)
    documents, positions = (torch.tensor(part).view(4, size) for part in plain)
    (bounds, _), found = train_record.find_documents(rows, longest, is_flash=True)
    starts = [i for i, position in enumerate(plain[1]) if position == 0]
    assert {*bounds.tolist()} == {*starts, rows.numel()} and bounds.dtype == torch.int32
    assert len(bounds) == 4 * (most + (size - 1) // longest) + 1
    (mask, _), found_too = train_record.find_documents(rows, longest, is_flash=False)
    assert torch.equal(mask[:, 0], (documents[:, :, None] == documents[:, None]).tril())
    assert torch.equal(found, positions) and torch.equal(found_too, positions)
