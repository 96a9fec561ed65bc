"""The recipes lora_ttt and score_first_ttt against plain versions, and what their losses must not
depend on."""

import copy
import functools
import math
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import score
import torch
from runs import ALONE, Lines, run_ranks
from scripts import load, patch_script, random_model
from texts import write_shard
from torch import Tensor, nn
from torch._dynamo.utils import counters

import train_gpt
from train_gpt import GPT

pytestmark = pytest.mark.baseline
BOS, T = 1, 16
# Targets of each document: one is shorter than a chunk, one is a whole chunk, one is longer than T.
LENGTHS = [3, 22, 4, 13, 6]
# At a higher learning rate rounding errors grow fast: AdamW without momentum divides each gradient
# by about its own size.
SMALL = f"TRAIN_SEQ_LEN={T} NUM_LAYERS=2 LORA_RANK=4 LORA_LR=5e-4 LORA_CHUNK=4 LORA_DOCUMENTS=3"


@pytest.fixture(scope="module")
def patched(tmp_path_factory) -> ModuleType:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield load(patch_script(tmp_path_factory.mktemp("lora"), ["lora_ttt"]), monkeypatch)


@pytest.fixture
def lora_knobs(knobs) -> dict[str, str]:
    return {**knobs, **dict(knob.split("=") for knob in SMALL.split())}


@pytest.fixture
def gpt(patched, lora_knobs) -> GPT:
    return random_model(patched, lora_knobs)


def random_tokens(lengths: list[int]) -> Tensor:
    """Documents with these numbers of targets, each of which ends with the next one's BOS."""
    generator = torch.Generator().manual_seed(1)
    parts = []
    for length in lengths:
        few = torch.randint(4, 12, (length - 1,), generator=generator)  # a model can learn these
        parts += [torch.tensor([BOS]), few]
    return torch.cat([*parts, torch.tensor([BOS])]).to(torch.uint16)


def split(tokens: Tensor) -> list[Tensor]:
    starts = [0, *(i for i in range(1, len(tokens) - 1) if tokens[i] == BOS), len(tokens) - 1]
    return [tokens[start : end + 1] for start, end in zip(starts[:-1], starts[1:], strict=True)]


def loss_of(patched: ModuleType, gpt: GPT, tokens: Tensor, runtime=ALONE, **changes) -> float:
    """The recipe's loss. changes: other knobs."""
    losses = patched.lora_ttt(gpt, tokens, replace(gpt.hp, **changes), runtime)
    return patched.mean_loss(losses, runtime)


def plain_loss(
    patched: ModuleType, gpt: GPT, documents: list[Tensor], lr: float, keep: bool = False
) -> float:
    """What the recipe's loss should be: one document at a time, in the unpatched model with dense
    matrices W + B @ A. Only the first A are the recipe's own. keep: a later document starts with
    the A of the one before."""
    hp, context = gpt.hp, gpt.hp.lora_context or T
    # A tied output is a copy of the embedding, which the adapters do not change.
    weights = {"lm_head.weight": gpt.tok_emb.weight, **gpt.state_dict()}
    weights = {name: weight.detach().clone() for name, weight in weights.items()}
    model = GPT(replace(hp, tie_embeddings=False, train_seq_len=context), gpt.dtype)
    names = [f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    assert len(names) == 6 * hp.num_layers + 1
    names = [name for name in names if name.split(".")[-2] not in hp.lora_skip]
    adapted = copy.deepcopy(gpt)
    patched.add_lora(adapted, 1)
    layers = [adapted.get_submodule(name.removesuffix(".weight")) for name in names]
    first = [layer.A[0].detach() for layer in layers]
    scale = 144 / hp.lora_rank if hp.lora_keep else 1
    total = 0.0
    for document in documents:
        As = [nn.Parameter(A.clone()) for A in first]
        Bs = [nn.Parameter(torch.zeros(len(weights[name]), hp.lora_rank)) for name in names]
        settings = {"betas": (0.0, 0.99), "eps": 1e-10, "weight_decay": hp.lora_weight_decay}
        optimizer = torch.optim.AdamW([*As, *Bs], lr, **settings)
        num_targets = len(document) - 1
        chunk = hp.lora_chunk
        if hp.lora_short_chunks:
            chunk = 2 if num_targets <= 6 else 3 if num_targets <= 13 else chunk
        for start in range(0, num_targets, chunk):
            end = min(start + chunk, num_targets)
            window = document[max(start + chunk - context, 0) : end + 1][None].long()
            dense = {n: weights[n] + scale * B @ A for n, A, B in zip(names, As, Bs, strict=True)}
            arguments = (window[:, :-1], window[:, 1:], "none")
            losses = torch.func.functional_call(model, {**weights, **dense}, arguments)
            loss = losses[0, start - end :].sum()
            total += loss.item()
            if end < num_targets:
                optimizer.zero_grad()
                (loss / chunk).backward()
                optimizer.step()
        first = [A.detach() for A in As] if keep else first
    return total / sum(len(document) - 1 for document in documents)


WHOLE = random_tokens(LENGTHS)
PART = random_tokens([10, 30])[4:27]  # begins and ends within a document


@pytest.mark.parametrize(
    "tied, chunk, tokens, lengths",
    [
        ("1", "4", WHOLE, LENGTHS),
        ("0", "4", WHOLE, LENGTHS),
        ("1", "16", random_tokens([17, 40]), [17, 40]),  # T
        ("1", "4", PART, [6, 16]),
        ("1", "4", PART[7:], [15]),  # has no BOS
    ],
)
def test_the_loss_is_that_of_a_plain_version(patched, lora_knobs, tied, chunk, tokens, lengths):
    """Which scores each chunk before it learns from it. Groups of any size give the same loss."""
    gpt = random_model(patched, {**lora_knobs, "TIE_EMBEDDINGS": tied, "LORA_CHUNK": chunk})
    documents = split(tokens)
    assert [len(document) - 1 for document in documents] == lengths
    alone = plain_loss(patched, gpt, documents, 0.0)
    assert loss_of(patched, gpt, tokens, lora_lr=0.0) == pytest.approx(alone, abs=1e-6)
    learned = plain_loss(patched, gpt, documents, 5e-4)
    for size in (0, 3, 100):
        loss = loss_of(patched, gpt, tokens, lora_documents=size)
        assert loss == pytest.approx(learned, abs=1e-5)
    assert learned < alone - 0.02


@pytest.mark.parametrize(
    "changes", ["CONTEXT=24", "SKIP=c_k,fc", "SKIP=lm_head", "WEIGHT_DECAY=200", "SHORT_CHUNKS=1"]
)
def test_a_knob_does_what_a_plain_version_does(patched, gpt, lora_knobs, changes, monkeypatch):
    monkeypatch.setattr(patched, "LORA_SHORT_CHUNKS", ((6, 2), (13, 3)))
    knob, value = f"LORA_{changes}".split("=")
    changed = random_model(patched, {**lora_knobs, knob: value})
    loss = loss_of(patched, changed, WHOLE, lora_documents=1)
    assert loss == pytest.approx(plain_loss(patched, changed, split(WHOLE), 5e-4), abs=1e-5)
    assert abs(loss - loss_of(patched, gpt, WHOLE, lora_documents=1)) > 1e-4


def test_an_unknown_layer_is_refused(patched):
    with pytest.raises(patched.InputError, match="LORA_SKIP.*must be some of c_q, c_k, c_v, proj"):
        patched.Hyperparameters.from_env({"LORA_SKIP": "c_k,k"})


def plain_step(
    gpt: GPT, inputs: Tensor, targets: Tensor, sgd: torch.optim.Optimizer, lr: float
) -> None:
    sgd.zero_grad()
    gpt(inputs, targets).backward()
    nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
    sgd.param_groups[0]["lr"] = lr
    sgd.step()


def plain_phase(gpt: GPT, documents: list[Tensor], lr: float) -> None:
    """Train all weights in steps of two rows of T tokens."""
    tokens = torch.cat([*(document[:-1] for document in documents), documents[-1][-1:]]).long()
    rows = [tokens[i : i + T + 1] for i in range(0, len(tokens) - T, T)]
    steps = [torch.stack(rows[i : i + 2]) for i in range(0, len(rows), 2)]
    sgd = torch.optim.SGD(gpt.parameters(), momentum=0.9)
    for i, batch in enumerate(steps):
        factor = (1 + math.cos(math.pi * i / (len(steps) - 1))) / 2
        plain_step(gpt, batch[:, :-1], batch[:, 1:], sgd, lr * factor)


@pytest.mark.parametrize("tied", ["1", "0"])
def test_phases_are_those_of_a_plain_version(patched, lora_knobs, tied, monkeypatch):
    """Two documents, three steps of all weights, a document, four steps, two documents."""
    monkeypatch.setattr(patched, "LORA_PHASE_TOKENS", 2 * T)
    gpt = random_model(patched, {**lora_knobs, "TIE_EMBEDDINGS": tied})
    tokens = random_tokens([40, 50, 30, 6, 9])
    documents = sorted(split(tokens), key=len, reverse=True)
    phases = {"lora_phases": 2, "lora_phase_documents": 2, "lora_phase_lr": 0.01}
    losses = []
    for size in (1, 2):  # a phase ends with a group
        losses.append(loss_of(patched, gpt, tokens, lora_documents=size, **phases))
    constant = loss_of(patched, gpt, tokens)
    for off in ("lora_phases", "lora_phase_documents", "lora_phase_lr"):
        assert loss_of(patched, gpt, tokens, **{**phases, off: 0}) == constant
    plain, total = copy.deepcopy(gpt), 0.0
    for first, end in ((0, 2), (2, 4), (4, 5)):
        if first > 0:
            plain_phase(plain, documents[:first], 0.01)
        part = documents[first:end]
        total += plain_loss(patched, plain, part, 5e-4) * sum(len(d) - 1 for d in part)
    assert losses == pytest.approx([total / (len(tokens) - 1)] * 2, abs=1e-5)
    assert abs(losses[0] - constant) > 0.01
    assert gpt.training  # and as it was: only a copy learns
    assert all(param.requires_grad and param.grad is None for param in gpt.parameters())


def test_adapters_begin_alike_and_small(patched, gpt):
    adapters = patched.add_lora(gpt, 2)
    for A, B in zip(adapters[::2], adapters[1::2], strict=True):
        assert not B.any() and torch.equal(A[0], A[1]) and A.dtype == torch.float32
        bound = 144 / 4 / A.size(2) ** 0.5
        assert 0.9 * bound < A.abs().max() <= bound and A.mean().abs() < 0.2 * bound


def test_kept_adapters_are_those_of_a_plain_version(patched, lora_knobs):
    """Each of two slots has its own, on one rank and on two."""
    gpt = random_model(patched, {**lora_knobs, "LORA_KEEP": "1"})
    tokens = random_tokens([40, 39, 38, 37, 36])
    documents = sorted(split(tokens), key=len, reverse=True)
    knobs = {"lora_documents": 1, "batch_slots": 2}
    whole = loss_of(patched, gpt, tokens, **knobs)
    # Phases of learning rate 0: a slot's groups must not depend on where a phase begins.
    knobs |= {"lora_phases": 4, "lora_phase_documents": 1, "lora_phase_lr": 0.0}
    assert loss_of(patched, gpt, tokens, **knobs) == whole
    for rank in (0, 1):
        part = documents[rank::2]
        share = sum(len(document) - 1 for document in part) / (len(tokens) - 1)
        kept, own = (share * plain_loss(patched, gpt, part, 5e-4, keep) for keep in (True, False))
        loss = loss_of(patched, gpt, tokens, replace(ALONE, rank=rank, world_size=2), **knobs)
        assert loss / 2 == pytest.approx(kept, abs=1e-5)
        assert abs(kept - own) > 1e-4
        whole -= kept
    assert abs(whole) < 1e-5


def test_lora_ttt_learns_in_bf16(patched, gpt, lora_knobs):
    half = random_model(patched, lora_knobs, torch.bfloat16)
    tokens = random_tokens(LENGTHS)
    alone, learned = (loss_of(patched, half, tokens, lora_lr=lr) for lr in (0.0, 5e-4))
    assert learned < alone - 0.1
    assert learned == pytest.approx(loss_of(patched, gpt, tokens), abs=0.1)


@pytest.mark.parametrize("stride", [T // 2, T])
def test_score_first_ttt_is_a_plain_version(tmp_path, lora_knobs, stride, monkeypatch):
    """Each chunk is scored in windows that begin in the chunk before it, and then learned."""
    module = load(patch_script(tmp_path, ["score_first_ttt"]), monkeypatch)
    chunk = 8 * T
    knobs = {"TTT_CHUNK_TOKENS": str(chunk + 5), "TTT_LR": "0.05", "EVAL_STRIDE": str(stride)}
    gpt = random_model(module, {**lora_knobs, **knobs})
    tokens = random_tokens([50] * 9)[: 3 * chunk + 3 * T + 1]
    found = module.final_losses(gpt, SimpleNamespace(hp=gpt.hp, tokens=tokens), ALONE).mean()
    alone = module.evaluate(gpt, tokens, stride, gpt.hp, ALONE).mean()
    sgd, total = torch.optim.SGD(gpt.parameters(), momentum=0.9), 0.0
    tokens = tokens.long()
    for i, start in enumerate(range(0, len(tokens) - 1, chunk)):
        part = tokens[start : start + chunk + 1]
        for first in range(max(start - T + stride, 0), start + len(part) - T, stride):
            window = tokens[None, first : first + T + 1]
            losses = gpt(window[:, :-1], window[:, 1:], "none")[0]
            total += losses[T - stride if first > 0 else 0 :].sum().item()
        for _ in range(3 if i < 3 else 0):
            lr = 0.05 * (1 + math.cos(math.pi * i / 4)) / 2
            plain_step(gpt, part[:-1].view(-1, T), part[1:].view(-1, T), sgd, lr)
    assert found.item() == pytest.approx(total / (len(tokens) - 1), abs=1e-4)
    assert abs(found - alone) > 0.01


def test_a_knob_chooses_between_the_two_recipes(tmp_path, patched, gpt, lora_knobs, monkeypatch):
    both = load(patch_script(tmp_path, ["score_first_ttt", "lora_ttt"]), monkeypatch)
    model = random_model(both, lora_knobs)
    tokens = random_tokens([50, 78])
    for rank, ttt_lr, name in [(1, 0.005, "lora_ttt"), (0, 0.005, "score_first_ttt"), (0, 0.0, "")]:
        runtime = replace(ALONE, log=Lines())
        hp = replace(model.hp, lora_rank=rank, ttt_lr=ttt_lr)
        losses = both.final_losses(model, SimpleNamespace(hp=hp, tokens=tokens), runtime)
        assert runtime.log.text.partition(":")[0] == name
        if name == "lora_ttt":
            assert losses.equal(patched.lora_ttt(gpt, tokens, replace(gpt.hp, lora_rank=1), ALONE))
        elif name == "":
            assert losses.equal(train_gpt.evaluate(gpt, tokens, T, hp, ALONE))


@pytest.mark.recipes
def test_a_compiled_model_has_the_same_loss(patched, gpt, monkeypatch):
    """Few graphs are compiled, none for the second group, and one for all phases."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    runtime = replace(ALONE, compiled=True)
    model = patched.wrap(gpt, runtime)
    tokens = random_tokens([22] * 6)
    patched.evaluate(model, tokens[: 8 * T + 1], T, gpt.hp, runtime)  # a graph without adapters
    before = counters["stats"]["unique_graphs"]
    compiled = patched.lora_ttt(model, tokens, gpt.hp, runtime).mean().item()
    assert compiled == pytest.approx(loss_of(patched, gpt, tokens), abs=1e-5)
    assert counters["stats"]["unique_graphs"] == before + 3
    phases = {"lora_phases": 2, "lora_phase_documents": 2, "lora_documents": 2}
    hp = replace(gpt.hp, **phases)
    compiled = patched.lora_ttt(model, tokens, hp, runtime).mean().item()
    assert compiled == pytest.approx(loss_of(patched, gpt, tokens, **phases), abs=1e-5)
    assert counters["stats"]["unique_graphs"] == before + 3 + 4


def test_score_gives_the_same_on_one_rank_and_on_two(tmp_path, patched, gpt, lora_knobs):
    """Phases take steps of five rows, one (the second rank has none), five and two. MAX_VAL_TOKENS
    cuts the last document."""
    text = Path(patched.__file__).read_text()
    assert text.count("PHASE_TOKENS = 32_768") == 1
    script = tmp_path / "train_gpt.py"
    script.write_text(text.replace("PHASE_TOKENS = 32_768", f"PHASE_TOKENS = {5 * T}"))
    tokens = random_tokens([50, 49, 10, 3, 9])
    write_shard(tmp_path / "fineweb_val_000000.bin", tokens.numpy())
    weights = tmp_path / "final_model.pt"
    torch.save(gpt.state_dict(), weights)
    environ = {**lora_knobs, "DATA_PATH": str(tmp_path), "MAX_VAL_TOKENS": str(8 * T - 1)}
    environ |= {"LORA_DOCUMENTS": "2", "LORA_PHASES": "2", "LORA_PHASE_DOCUMENTS": "2"}
    command = [score.__file__, weights, "--script", script]
    losses = []
    for ranks, lr in ((1, "0.1"), (2, "0.1"), (1, "0")):
        results = run_ranks(tmp_path / "run", {**environ, "LORA_PHASE_LR": lr}, ranks, command)
        assert all(result.returncode == 0 for result in results), results
        assert "lora_ttt: LORA_RANK=4 LORA_LR=0.0005 " in results[0].stdout
        losses += [float(re.findall(r"score_exact val_loss:(\S+)", results[0].stdout)[0])]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert abs(losses[0] - losses[2]) > 0.001
    expected = plain_loss(patched, gpt, split(tokens[: 7 * T + 1]), 5e-4)
    assert losses[2] == pytest.approx(expected, abs=1e-5)
