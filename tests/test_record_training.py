"""train_record.py's runs: techniques act, none does by default; optimizers, schedules, data and the
average; resumed runs, two ranks and stages of whole records."""

import functools
import json
import re
import signal

import pytest
import score
import torch
import train_record
from runs import ALONE, finished, run_here, run_ranks, same_models, scores, send_signals
from scripts import RECORDS, random_model, read, record_knobs
from texts import write_shard
from torch import nn
from torch._dynamo.utils import counters
from train_record import ShuffledTokenLoader, TrainingState

import train_gpt

pytestmark = pytest.mark.baseline
from_env = train_record.Hyperparameters.from_env
TINY = (
    "ITERATIONS=4 WARMUP_STEPS=0 BATCH_SLOTS=2 TRAIN_BATCH_TOKENS=256 VAL_BATCH_SIZE=320 "
    "MAX_VAL_TOKENS=320 VAL_LOSS_EVERY=0"
)


# ---- Techniques ----------------------------------------------------------------------------------
def test_a_technique_acts(tmp_path, knobs, all_matrices):
    """A technique that does nothing gives the score of the run without it. (The knobs of schedules
    and optimizers: below. Of the model, the quantizer and the score: test_record_*.py.)"""
    ends = {}
    for knob in ("SHUFFLE=0", "SHUFFLE=1", "MUON_EQUAL_ROWS=1", "EMA_DECAY=0.5", "RANS=1"):
        log = finished(run_here(tmp_path / knob, {**knobs, **read(f"{TINY} {knob}")}, train_record))
        ends[knob] = scores(log[-1])[0]
    plain = ends.pop("SHUFFLE=0")
    assert ends.pop("RANS=1") == plain  # it loses nothing
    assert not same_models(tmp_path / "RANS=1", tmp_path / "SHUFFLE=0")
    assert all(abs(end - plain) > 1e-5 for end in ends.values()), ends  # more than rounding


EDGES = "TIE_EMBEDDINGS=0 GRAD_CLIP_NORM=0.1 WARMDOWN_FRAC=0.5 EVAL_STRIDE=16 DTYPE=bf16 SEED=3"


@pytest.mark.parametrize("words", ["", EDGES])
def test_without_techniques_a_run_has_the_bits_of_train_gpt(tmp_path, knobs, words, all_matrices):
    environ = {**knobs, **read(f"{TINY} WARMUP_STEPS=2 VAL_LOSS_EVERY=2 {words}")}
    lines = []
    for script in (train_gpt, train_record):
        log = finished(run_here(tmp_path / script.__name__, environ, script))
        lines.append([re.sub(r"\S*_(time|avg):\S+", "", line) for line in log if "_loss:" in line])
    assert lines[0] == lines[1] and len(lines[0]) == 9
    assert same_models(tmp_path / "train_gpt", tmp_path / "train_record")


# ---- Optimizers, schedules, data, averages -------------------------------------------------------
def test_weight_decay_shrinks_each_group_by_its_own_rate():
    decays = "EMBED_WEIGHT_DECAY=0.2 MUON_WEIGHT_DECAY=0.1 ADAM_WEIGHT_DECAY=0.5 MODEL_DIM=32"
    rates = "TIED_EMBED_LR=0.3 MATRIX_LR=0.4 SCALAR_LR=0.5"
    gpt = random_model(train_record, read(f"{decays} {rates}"))
    before = {param: param.detach().clone() for param in gpt.parameters()}
    for param in before:
        param.grad = torch.zeros_like(param)
    for optimizer in train_record.build_optimizers(gpt):
        optimizer.step()
    factors = {"embed": 1 - 0.3 * 0.2, "matrix": 1 - 0.4 * 0.1, "scalar": 1 - 0.5 * 0.5}
    for name, params in train_record.parameter_groups(gpt, gpt.hp).items():
        for param in params:
            torch.testing.assert_close(param.detach(), factors[name] * before[param])


def test_muon_gives_all_rows_one_length():
    """Muon scales rows before the cast to bf16, so values are rounded once, and Newton-Schulz."""
    param = nn.Parameter(torch.zeros(4, 64))
    param.grad = torch.randn(4, 64) * torch.logspace(-3, 3, 4)[:, None]
    muon = train_record.Muon([param], lr=1.0, momentum=0.9, backend_steps=5, equal_rows=True)
    muon.step()
    rows = param.grad / param.grad.norm(dim=1, keepdim=True)
    expected = train_gpt.newton_schulz(rows.bfloat16()[None], 5)[0]
    assert torch.equal(param.detach(), -expected.float())


def test_the_shuffled_loader_reads_each_sequence_once_per_epoch(tmp_path):
    write_shard(tmp_path / "0.bin", range(50))  # six sequences of eight and a target
    write_shard(tmp_path / "1.bin", range(100, 105))  # too short for one
    write_shard(tmp_path / "2.bin", range(200, 281))  # ten

    def steps(world_size: int, seed: int = 1) -> list[list[int]]:
        """The first tokens of each step's sequences: two epochs of two steps of four slots."""
        loaders = [
            ShuffledTokenLoader(f"{tmp_path}/*", rank, world_size, "cpu", seed=seed)
            for rank in range(world_size)
        ]
        result = []
        for _ in range(4):
            result.append([])
            for loader in 4 // world_size * loaders:
                inputs, targets = loader.next_batch(64, 8, 4 // world_size)
                assert torch.equal(targets, inputs + 1)
                assert torch.equal(inputs, inputs[:, :1] + torch.arange(8))
                result[-1] += inputs[:, 0].tolist()
        return result

    first, second, third, fourth = steps(1)
    starts = [*range(0, 48, 8), *range(200, 280, 8)]
    assert sorted(first + second) == sorted(third + fourth) == starts
    assert starts != first + second != third + fourth
    assert steps(2) == steps(4) == [first, second, third, fourth]
    assert steps(1, seed=2)[0] != first


def test_the_average_counts_each_step_by_its_age(knobs):
    state = TrainingState(from_env({**knobs, "EMA_DECAY": "0.5"}), ALONE)
    for state.step, value in enumerate((7.0, 3.0, 1.0), start=1):
        nn.init.constant_(state.gpt.tok_emb.weight, value)
        state.update_ema()
    average = state.ema["tok_emb.weight"].unique().tolist()
    assert average == pytest.approx([(7 / 4 + 3 / 2 + 1) / (1 / 4 + 1 / 2 + 1)])


@pytest.mark.parametrize("whole, wanted", [("0", 6), ("1", 1)])
def test_stages_and_learning_rates_change_at_their_parts_of_a_run(
    tmp_path, knobs, whole, wanted, monkeypatch
):
    """The warm-up visits all stages, at the full rates, also if it has fewer steps. Validation and
    calibration see whole sequences."""
    steps, others = [], []

    def train_step(state, train_step=train_record.train_step):
        group = state.optimizers[0].param_groups[0]
        steps.append([len(state.gpt.order), round(group["lr"] / group["base_lr"], 6)])
        return train_step(state)

    def find_documents(ids, longest, is_flash, find_documents=train_record.find_documents):
        (steps[-1] if torch.is_grad_enabled() else others).append((ids.size(1), longest))
        return find_documents(ids, longest, is_flash)

    monkeypatch.setattr(train_record, "train_step", train_step)
    monkeypatch.setattr(train_record, "find_documents", find_documents)
    settings = f"{TINY} DOCUMENT_MASK=1 WHOLE_DOCUMENTS={whole} WARMUP_STEPS={wanted} ITERATIONS=6"
    settings += " LOOP_LAYERS=2 LOOP_FROM=0.5 LOOP_TIMES=2 WARMDOWN_ITERS=4 MIN_LR=0.6"
    settings += " VAL_LOSS_EVERY=6 GPTQ_BATCHES=1 CONTEXT_GROWTH=0.25:0.3,0.5:0.6"
    finished(run_here(tmp_path, {**knobs, **read(settings)}, train_record))
    # Layers run, context, learning rate. The warm-up takes six steps, or one for each stage.
    warm_up = [(3, 8), (3, 16), (7, 16), (7, 32)]
    if wanted == 6:
        warm_up = [(3, 8), *warm_up[:3], (7, 16), (7, 32)]
    stages = [*warm_up, (3, 8), (3, 8), (3, 16), (7, 16), (7, 32), (7, 32)]
    factors = [1] * len(warm_up) + [1, 1, 1, 0.75, 0.6, 0.6]
    expected = []
    for (layers, context), factor in zip(stages, factors, strict=True):
        row = (128 if whole == "1" else context, context)
        expected.append([layers, factor, row, row])
    assert steps == expected
    assert {*others} == {(32, 32)}


# ---- Whole records -------------------------------------------------------------------------------
@pytest.mark.records
def test_each_stage_of_a_run_is_compiled_in_the_warm_up(tmp_path, knobs, monkeypatch):
    graphs = []

    def train_step(state, train_step=train_record.train_step):
        loss = train_step(state)
        graphs.append(counters["stats"]["unique_graphs"])
        return loss

    monkeypatch.setattr(train_record, "train_step", train_step)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    settings = f"{TINY} COMPILE=1 WARMUP_STEPS=20 ITERATIONS=20 LOOP_LAYERS=2 DOCUMENT_MASK=1"
    settings += " WHOLE_DOCUMENTS=1 CONTEXT_GROWTH=0.25:0.2,0.5:0.7 OPTIMIZE_DDP=0"
    with torch._dynamo.config.patch(optimize_ddp=True, recompile_limit=8):
        finished(run_here(tmp_path, {**knobs, **read(settings)}, train_record))
        assert not torch._dynamo.config.optimize_ddp
    assert 0 < graphs[0] < graphs[19] and graphs[19:] == 21 * [graphs[19]]


def be_a_record() -> None:
    """Run train_record.py, and quantize all matrices."""
    train_record.INT8_KEEP_FLOAT_MAX_NUMEL = 500
    train_gpt.main = train_record.main


# record2135, with what it lacks of record2014.
ALL = "CONTEXT_GROWTH=0.25:0.25,0.5:0.7 AWQ_COLUMNS=8"
LARGER = "ITERATIONS=6 BATCH_SLOTS=8 TRAIN_BATCH_TOKENS=512 MODEL_DIM=144 MAX_VAL_TOKENS=640"
CASES = [("record2135", f"{TINY} {ALL}")]
CASES += [pytest.param(preset, LARGER, marks=pytest.mark.records) for preset in RECORDS]


@pytest.mark.parametrize("preset, changes", CASES)
def test_a_record_resumes_and_runs_on_two_ranks(
    tmp_path, knobs, preset, changes, all_matrices, monkeypatch
):
    """The warm-up restores the initial state, and score.py reproduces the score."""
    environ = {**record_knobs(preset, knobs), **read(changes), "WARMUP_STEPS": "3"}
    whole, rest, ranks = (tmp_path / name for name in ("whole", "rest", "ranks"))

    def warm_up(state, warm_up=train_record.warm_up) -> None:
        before = train_record.serialize(state.state_dict())
        warm_up(state)
        assert train_record.serialize(state.state_dict()) == before

    monkeypatch.setattr(train_record, "warm_up", warm_up)
    lines = finished(run_here(whole, environ, train_record))
    assert not [line for line in lines if line.startswith("WARNING")]
    with monkeypatch.context() as stopping:
        send_signals(stopping, 3, signal.SIGTERM, script=train_record)
        assert run_here(rest, environ, train_record).returncode == 143
    finished(run_here(rest, {**environ, "RESUME": "auto"}, train_record))
    assert same_models(whole, rest)
    arguments = [str(whole / "final_model.int8.ptz"), "--script", train_record.__file__]
    assert json.loads((whole / "final_result.json").read_text())["gptq_ms"] > 0
    scored = finished(run_here(whole, environ, score, arguments))
    assert scores(scored[-1]) == scores(lines[-1])
    first, second = run_ranks(ranks, environ, 2, edit=be_a_record)
    two, one = (re.findall(r"_loss:(\S+)", "\n".join(log)) for log in (finished(first), lines))
    assert [*map(float, two)] == pytest.approx([*map(float, one)], abs=2e-3)
    assert "replicas:identical" in first.stdout and second.returncode == 0
