"""The recipe lora_ttt against a plain version of it, and what the loss must not depend on."""

import copy
import functools
import re
import shutil
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import score
import torch
from runs import ALONE, Lines, finished, run_here, run_ranks, scores
from scripts import load, patch_script, random_model
from texts import write_shard
from torch import Tensor, nn
from torch._dynamo.utils import counters

import train_gpt
from train_gpt import GPT, Hyperparameters

pytestmark = [
    pytest.mark.baseline,
    pytest.mark.skipif(shutil.which("git") is None, reason="needs git apply"),
]

BOS = 1
T, CHUNK = 16, 4
# Targets of each document: one is shorter than a chunk, one is a whole chunk, one is longer than T.
LENGTHS = [3, 22, 4, 13, 6]
# At a higher learning rate rounding errors grow fast: AdamW without momentum divides each gradient
# by about its own size.
SMALL = (
    f"TRAIN_SEQ_LEN={T} NUM_LAYERS=2 LORA_RANK=4 LORA_LR=5e-4 LORA_CHUNK={CHUNK} LORA_DOCUMENTS=3"
)


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
    return patched.lora_ttt(gpt, tokens, replace(gpt.hp, **changes), runtime)


def plain_loss(
    patched: ModuleType, gpt: GPT, documents: list[Tensor], lr: float, keep: bool = False
) -> float:
    """What the recipe's loss should be: one document at a time, in the unpatched model with dense
    matrices W + B @ A, and AdamW by hand. Only the first A are the recipe's own. keep: a later
    document starts with the A of the one before."""
    hp = gpt.hp
    # A tied output is a copy of the embedding, which the adapters do not change.
    weights = {"lm_head.weight": gpt.tok_emb.weight, **gpt.state_dict()}
    weights = {name: weight.detach().clone() for name, weight in weights.items()}
    knobs = {"TIE_EMBEDDINGS": "0", "VOCAB_SIZE": str(hp.vocab_size), "TRAIN_SEQ_LEN": str(T)}
    knobs |= {name.upper(): str(getattr(hp, name)) for name in ("num_layers", "model_dim")}
    knobs |= {name.upper(): str(getattr(hp, name)) for name in ("num_heads", "num_kv_heads")}
    model = GPT(Hyperparameters.from_env(knobs), gpt.dtype)
    names = [f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    assert len(names) == 6 * hp.num_layers + 1
    adapted = copy.deepcopy(gpt)
    patched.add_lora(adapted, 1)
    layers = {name: adapted.get_submodule(name.removesuffix(".weight")) for name in names}
    first = {name: layer.A[0].detach() for name, layer in layers.items()}
    scale = 144 / hp.lora_rank if hp.lora_keep else 1
    total, count = 0.0, 0
    for document in documents:
        A = first if keep else {name: a.detach().clone() for name, a in first.items()}
        B = {name: torch.zeros(len(weights[name]), hp.lora_rank) for name in names}
        squares = {name: (torch.zeros_like(A[name]), torch.zeros_like(B[name])) for name in names}
        num_targets = len(document) - 1
        count += num_targets
        for step, start in enumerate(range(0, num_targets, CHUNK), start=1):
            end = min(start + CHUNK, num_targets)
            window = document[max(start + CHUNK - T, 0) : end + 1][None].long()
            dense = {
                name: (weights[name] + scale * B[name] @ A[name]).requires_grad_() for name in names
            }
            arguments = (window[:, :-1], window[:, 1:], "none")
            losses = torch.func.functional_call(model, {**weights, **dense}, arguments)
            loss = losses[0, start - end :].sum()
            total += loss.item()
            if end == num_targets:
                break
            grads = torch.autograd.grad(loss / CHUNK, list(dense.values()))
            for name, grad in zip(names, grads, strict=True):
                grad = scale * grad
                pairs = (A[name], B[name].T @ grad), (B[name], grad @ A[name].T)
                for (param, g), square in zip(pairs, squares[name], strict=True):
                    square.mul_(0.99).add_(0.01 * g * g)
                    param *= 1 - 0.5 * lr
                    param -= lr * g / ((square / (1 - 0.99**step)).sqrt() + 1e-10)
    return total / count


@pytest.mark.parametrize("tied", ["1", "0"])
def test_the_loss_is_that_of_a_plain_version(patched, lora_knobs, tied):
    """Which scores each chunk before it learns from it."""
    gpt = random_model(patched, {**lora_knobs, "TIE_EMBEDDINGS": tied})
    tokens = random_tokens(LENGTHS)
    documents = split(tokens)
    assert [len(document) - 1 for document in documents] == LENGTHS
    alone = plain_loss(patched, gpt, documents, 0.0)
    assert loss_of(patched, gpt, tokens, lora_lr=0.0) == pytest.approx(alone, abs=1e-6)
    learned = plain_loss(patched, gpt, documents, 5e-4)
    assert loss_of(patched, gpt, tokens) == pytest.approx(learned, abs=1e-5)
    assert learned < alone - 0.1


def plain_phase(gpt: GPT, documents: list[Tensor], lr: float) -> None:
    """Train all weights by SGD in steps of two rows of T tokens, without an optimizer."""
    tokens = torch.cat([*(document[:-1] for document in documents), documents[-1][-1:]]).long()
    rows = [tokens[i : i + T + 1] for i in range(0, len(tokens) - T, T)]
    steps = [torch.stack(rows[i : i + 2]) for i in range(0, len(rows), 2)]
    params = list(gpt.parameters())
    momenta = [torch.zeros_like(param) for param in params]
    for i, batch in enumerate(steps):
        grads = torch.autograd.grad(gpt(batch[:, :-1], batch[:, 1:]), params)
        norm = sum(grad.square().sum() for grad in grads).sqrt()
        factor = 0.5 + 0.5 * torch.cos(torch.tensor(torch.pi * i / (len(steps) - 1)))
        for param, momentum, grad in zip(params, momenta, grads, strict=True):
            momentum.mul_(0.9).add_(grad / norm.clamp(min=1))
            param.data -= lr * factor * momentum


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
    constant = loss_of(patched, gpt, tokens, **{**phases, "lora_phase_lr": 0.0})
    assert constant == loss_of(patched, gpt, tokens)
    plain, total = copy.deepcopy(gpt), 0.0
    for first, end in ((0, 2), (2, 4), (4, 5)):
        if first > 0:
            plain_phase(plain, documents[:first], 0.01)
        part = documents[first:end]
        total += plain_loss(patched, plain, part, 5e-4) * sum(len(d) - 1 for d in part)
    assert losses == pytest.approx([total / (len(tokens) - 1)] * 2, abs=1e-5)
    assert abs(losses[0] - constant) > 0.01


def test_a_phase_trains_only_on_scored_documents(patched, gpt, monkeypatch):
    """So what comes later changes no earlier score by a single bit."""
    calls, sums = [], []

    def score_documents(model, adapters, documents, hp, score=patched.score_documents):
        sums.append(score(model, adapters, documents, hp).item())
        calls.append(("score", [document.tolist() for document in documents]))
        return sums[-1]

    def train_on_documents(gpt, model, documents, *args, train=patched.train_on_documents):
        calls.append(("train", [document.tolist() for document in documents]))
        train(gpt, model, documents, *args)

    monkeypatch.setattr(patched, "score_documents", score_documents)
    monkeypatch.setattr(patched, "train_on_documents", train_on_documents)
    tokens = random_tokens([40, 30, 20, 10, 5])
    phases = {"lora_phases": 9, "lora_phase_documents": 1, "lora_documents": 1}
    loss_of(patched, gpt, tokens, **phases, lora_phase_lr=0.1)
    assert [name for name, _ in calls] == ["score", *4 * ["train", "score"]]
    scored = []
    for name, documents in calls:
        assert name == "score" or documents == scored
        scored += documents if name == "score" else []
    tokens[71:80] = 13  # in the third document
    first, sums[:] = sums[:], []
    loss_of(patched, gpt, tokens, **phases, lora_phase_lr=0.1)
    changed = [a != b for a, b in zip(first, sums, strict=True)]
    assert changed == [False, False, True, True, True]


def test_a_split_may_begin_and_end_within_a_document(patched, gpt):
    """Or have no BOS, and then it is one document."""
    tokens = random_tokens([10, 30])[4:27]
    documents = split(tokens)
    assert [len(document) for document in documents] == [7, 17]
    expected = plain_loss(patched, gpt, documents, 5e-4)
    assert loss_of(patched, gpt, tokens) == pytest.approx(expected, abs=1e-5)
    tokens[6] = 5
    expected = plain_loss(patched, gpt, [tokens], 5e-4)
    assert loss_of(patched, gpt, tokens) == pytest.approx(expected, abs=1e-5)


def test_adapters_begin_alike_and_small(patched, gpt):
    adapters = patched.add_lora(gpt, 2)
    for A, B in zip(adapters[::2], adapters[1::2], strict=True):
        assert not B.any() and torch.equal(A[0], A[1]) and A.dtype == torch.float32
        bound = 144 / 4 / A.size(2) ** 0.5
        assert 0.9 * bound < A.abs().max() <= bound and A.mean().abs() < 0.2 * bound


def test_neither_groups_nor_ranks_change_the_loss(patched, gpt):
    tokens = random_tokens(LENGTHS)
    expected = loss_of(patched, gpt, tokens, lora_documents=100)
    for size in (1, 3, 4):
        assert loss_of(patched, gpt, tokens, lora_documents=size) == pytest.approx(
            expected, abs=1e-5
        )
        # gather sees only this process here, so each rank counts its own sum twice.
        ranks = [replace(ALONE, rank=rank, world_size=2) for rank in range(2)]
        losses = [loss_of(patched, gpt, tokens, rank, lora_documents=size) for rank in ranks]
        assert sum(losses) / 2 == pytest.approx(expected, abs=1e-5)
        assert all(loss > 0 for loss in losses)


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


def test_the_model_stays_as_it_is(patched, gpt):
    before = copy.deepcopy(gpt.state_dict())
    loss_of(patched, gpt, random_tokens(LENGTHS))
    after = gpt.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(param.requires_grad and param.grad is None for param in gpt.parameters())
    assert gpt.training


def test_lora_ttt_learns_in_bf16(patched, gpt, lora_knobs):
    half = random_model(patched, lora_knobs, torch.bfloat16)
    tokens = random_tokens(LENGTHS)
    alone, learned = (loss_of(patched, half, tokens, lora_lr=lr) for lr in (0.0, 5e-4))
    assert learned < alone - 0.1
    assert learned == pytest.approx(loss_of(patched, gpt, tokens), abs=0.1)


def test_a_knob_chooses_between_the_two_recipes(tmp_path, patched, gpt, lora_knobs, monkeypatch):
    both = load(patch_script(tmp_path, ["score_first_ttt", "lora_ttt"]), monkeypatch)
    model = random_model(both, lora_knobs)
    tokens = random_tokens([50, 78])
    for rank, ttt_lr, name in [(4, 0.005, "lora_ttt"), (0, 0.005, "score_first_ttt"), (0, 0.0, "")]:
        runtime = replace(ALONE, log=Lines())
        hp = replace(model.hp, lora_rank=rank, ttt_lr=ttt_lr)
        loss = both.final_loss(model, SimpleNamespace(hp=hp, tokens=tokens), runtime)
        assert runtime.log.text.partition(":")[0] == name
        if name == "lora_ttt":
            assert loss == loss_of(patched, gpt, tokens)
        elif name == "":
            assert loss == train_gpt.evaluate(gpt, tokens, T, hp, ALONE)


@pytest.mark.recipes
def test_a_compiled_model_has_the_same_loss(patched, gpt, monkeypatch):
    """Few graphs are compiled, none for the second group, and one for all phases."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    runtime = replace(ALONE, compiled=True)
    model = patched.wrap(gpt, runtime)
    tokens = random_tokens([22] * 6)
    patched.evaluate(model, tokens[: 8 * T + 1], T, gpt.hp, runtime)  # a graph without adapters
    before = counters["stats"]["unique_graphs"]
    compiled = patched.lora_ttt(model, tokens, gpt.hp, runtime)
    assert compiled == pytest.approx(loss_of(patched, gpt, tokens), abs=1e-5)
    assert counters["stats"]["unique_graphs"] == before + 3
    phases = {"lora_phases": 2, "lora_phase_documents": 2, "lora_documents": 2}
    compiled = patched.lora_ttt(model, tokens, replace(gpt.hp, **phases), runtime)
    assert compiled == pytest.approx(loss_of(patched, gpt, tokens, **phases), abs=1e-5)
    assert counters["stats"]["unique_graphs"] == before + 3 + 4


@pytest.mark.recipes
def test_score_scores_whole_documents_on_one_rank_and_on_two(tmp_path, patched, gpt, lora_knobs):
    """And with MAX_VAL_TOKENS only the first of them."""
    lengths = [20, 7, 45, 100]
    write_shard(tmp_path / "fineweb_val_000000.bin", random_tokens(lengths).numpy())
    artifact = tmp_path / "artifact"
    artifact.write_bytes(patched.export(gpt, gpt.hp, ALONE)[0])
    patched.load_weights(gpt, artifact.read_bytes(), "")
    expected = plain_loss(patched, gpt, split(random_tokens(lengths)[: 4 * T + 1]), 5e-4)
    environ = {**lora_knobs, "DATA_PATH": str(tmp_path)}
    environ |= {"MAX_VAL_TOKENS": str(5 * T - 1), "LORA_DOCUMENTS": "2"}  # a group a rank
    arguments = [str(artifact), "--script", patched.__file__]
    lines = finished(run_here(tmp_path / "one", environ, score, arguments))
    assert scores(lines[-1])[0] == pytest.approx(expected, abs=1e-5)
    assert any(line.startswith("lora_ttt: LORA_RANK=4 LORA_LR=0.0005 ") for line in lines)
    first, second = run_ranks(tmp_path / "two", environ, 2, [score.__file__, *arguments])
    assert scores(finished(first)[-1])[0] == pytest.approx(expected, abs=1e-5)
    assert second.returncode == 0


def test_phases_are_equal_on_one_rank_and_on_two(tmp_path, patched, gpt, lora_knobs):
    """Which train on three rows each, and then on four and three."""
    write_shard(tmp_path / "fineweb_val_000000.bin", random_tokens([50, 49, 10, 3, 9]).numpy())
    weights = tmp_path / "final_model.pt"
    torch.save(gpt.state_dict(), weights)
    environ = {**lora_knobs, "DATA_PATH": str(tmp_path)}
    environ |= {"LORA_DOCUMENTS": "2", "LORA_PHASES": "2", "LORA_PHASE_DOCUMENTS": "2"}
    command = [score.__file__, weights, "--script", patched.__file__]
    losses = []
    for ranks, lr in ((1, "0.1"), (2, "0.1"), (1, "0")):
        results = run_ranks(tmp_path / "run", {**environ, "LORA_PHASE_LR": lr}, ranks, command)
        assert all(result.returncode == 0 for result in results), results
        losses += [float(re.findall(r"score_exact val_loss:(\S+)", results[0].stdout)[0])]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert abs(losses[0] - losses[2]) > 0.001
