"""train_record.py's final scores: test-time training and hints against plain versions."""

import copy
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import score
import torch
import train_record
from runs import ALONE, run_ranks, scores
from scripts import random_model, read
from texts import train_tokenizer, write_shard
from torch import Tensor, nn
from train_record import GPT, find_hints, lora_ttt

import train_gpt

pytestmark = pytest.mark.baseline
BOS, T = 1, 16
# Targets of each document: one is shorter than a chunk, one is a whole chunk, one is longer than T.
LENGTHS = [3, 22, 4, 13, 6]
# At a higher learning rate rounding errors grow fast: AdamW without momentum divides each gradient
# by about its own size.
LORA = f"TRAIN_SEQ_LEN={T} NUM_LAYERS=2 LORA_RANK=4 LORA_LR=5e-4 LORA_CHUNK=4 LORA_DOCUMENTS=3"
PHASES = "LORA_DOCUMENTS=2 LORA_PHASES=2 LORA_PHASE_DOCUMENTS=2 LORA_PHASE_LR=0.1"


@pytest.fixture
def lora_knobs(knobs) -> dict[str, str]:
    return {**knobs, **read(LORA)}


def random_tokens(lengths: list[int]) -> Tensor:
    """Make documents with these numbers of targets, the last of which is the next document's BOS.
    Most tokens follow from the one before, so a model can learn them."""
    numbers = random.Random(1)
    tokens = []
    for length in lengths:
        tokens.append(BOS)
        for _ in range(length - 1):
            tokens.append(4 + (5 * tokens[-1] + numbers.choice([0, 0, 0, 0, 1])) % 8)
    return torch.tensor([*tokens, BOS]).to(torch.uint16)


def split(tokens: Tensor) -> list[Tensor]:
    starts = [0, *(i for i in range(1, len(tokens) - 1) if tokens[i] == BOS), len(tokens) - 1]
    return [tokens[start : end + 1] for start, end in zip(starts[:-1], starts[1:], strict=True)]


# ---- Adapters ------------------------------------------------------------------------------------
def loss_of(gpt: GPT, tokens: Tensor, runtime=ALONE, **changes) -> float:
    """train_record.py's loss. changes: other knobs."""
    validation = SimpleNamespace(hp=replace(gpt.hp, **changes), tokens=tokens, bos=BOS)
    losses = lora_ttt(gpt, validation, None, runtime)
    return train_record.mean_loss(losses, runtime)


def plain_loss(gpt: GPT, documents: list[Tensor], lr: float, keep: bool = False) -> float:
    """Return the expected loss, one document at a time, with dense matrices W + B @ A. Only the
    first A are the script's. keep: a later document starts with the A of the one before."""
    hp, context = gpt.hp, gpt.hp.lora_context or T
    # A tied output is a copy of the embedding, which the adapters do not change.
    weights = {"lm_head.weight": gpt.tok_emb.weight, **gpt.state_dict()}
    weights = {name: weight.detach().clone() for name, weight in weights.items()}
    model = GPT(replace(hp, tie_embeddings=False, train_seq_len=context), gpt.dtype)
    names = [f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    names = [name for name in names if name.split(".")[-2] not in hp.lora_skip]
    adapted = copy.deepcopy(gpt)
    train_record.add_lora(adapted, 1)
    layers = [adapted.get_submodule(name.removesuffix(".weight")) for name in names]
    first = [layer.A[0].detach() for layer in layers]
    scale = 144 / hp.lora_rank if hp.lora_keep else 1
    for A in first:
        bound = 144 / hp.lora_rank / scale / A.size(1) ** 0.5
        assert 0.9 * bound < A.abs().max() <= bound and A.mean().abs() < 0.2 * bound
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
    "changes, tokens",
    [
        ("TIE_EMBEDDINGS=1", WHOLE),
        ("TIE_EMBEDDINGS=0", WHOLE),
        ("LORA_CHUNK=16", random_tokens([17, 80])),  # T
        ("LORA_CHUNK=4", PART),
        ("LORA_CHUNK=4", PART[7:]),  # has no BOS
        ("LORA_CONTEXT=24", WHOLE),
        ("LORA_SKIP=c_k,fc", WHOLE),
        ("LORA_SKIP=lm_head", WHOLE),
        ("LORA_WEIGHT_DECAY=200", WHOLE),
        ("LORA_SHORT_CHUNKS=1", WHOLE),
    ],
)
def test_the_loss_is_that_of_a_plain_version(lora_knobs, changes, tokens, monkeypatch):
    """The plain version scores each chunk, then trains on it. Groups may have any size."""
    monkeypatch.setattr(train_record, "LORA_SHORT_CHUNKS", ((6, 2), (13, 3)))
    gpt = random_model(train_record, {**lora_knobs, **read(changes)})
    documents = split(tokens)
    alone, learned = (plain_loss(gpt, documents, lr) for lr in (0.0, 5e-4))
    assert loss_of(gpt, tokens, lora_lr=0.0) == pytest.approx(alone, abs=1e-6)
    for size in (0,) if gpt.hp.lora_short_chunks else (0, 3, 100):  # 0: one document
        assert loss_of(gpt, tokens, lora_documents=size) == pytest.approx(learned, abs=1e-5)
    assert learned < alone - 0.02


def plain_phase(gpt: GPT, documents: list[Tensor], lr: float) -> None:
    """Train all weights in steps of two rows of T tokens."""
    tokens = torch.cat([*(document[:-1] for document in documents), documents[-1][-1:]]).long()
    rows = [tokens[i : i + T + 1] for i in range(0, len(tokens) - T, T)]
    steps = [torch.stack(rows[i : i + 2]) for i in range(0, len(rows), 2)]
    sgd = torch.optim.SGD(gpt.parameters(), momentum=0.9)
    for i, batch in enumerate(steps):
        sgd.zero_grad()
        gpt(batch[:, :-1], batch[:, 1:]).backward()
        nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        sgd.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * i / (len(steps) - 1))) / 2
        sgd.step()


@pytest.mark.parametrize("tied", ["1", "0"])
def test_phases_are_those_of_a_plain_version(lora_knobs, tied, monkeypatch):
    """Two documents, three steps of all weights, two documents, four steps, the last document."""
    monkeypatch.setattr(train_record, "LORA_PHASE_TOKENS", 2 * T)
    environ = {**lora_knobs, "LORA_CHUNK": "8", "TIE_EMBEDDINGS": tied}
    gpt = random_model(train_record, environ)
    tokens = random_tokens([40, 50, 30, 6, 9])
    documents = sorted(split(tokens), key=len, reverse=True)
    phases = {"lora_phases": 2, "lora_phase_documents": 2, "lora_phase_lr": 0.01}
    sizes = (1, 2)  # documents in a group; a phase ends its last group
    losses = [loss_of(gpt, tokens, lora_documents=size, **phases) for size in sizes]
    constant = loss_of(gpt, tokens)
    plain, total = copy.deepcopy(gpt), 0.0
    for first, end in ((0, 2), (2, 4), (4, 5)):
        if first > 0:
            plain_phase(plain, documents[:first], 0.01)
        part = documents[first:end]
        total += plain_loss(plain, part, 5e-4) * sum(len(d) - 1 for d in part)
    assert losses == pytest.approx([total / (len(tokens) - 1)] * 2, abs=1e-5)
    assert abs(losses[0] - constant) > 0.01


def test_kept_adapters_are_those_of_a_plain_version(lora_knobs):
    """Each of two slots keeps its own adapters, on one rank and on two."""
    gpt = random_model(train_record, {**lora_knobs, **read("LORA_KEEP=1 LORA_CHUNK=8")})
    tokens = random_tokens([40, 39, 38, 37, 36])
    documents = sorted(split(tokens), key=len, reverse=True)
    knobs = {"lora_documents": 1, "batch_slots": 2}
    whole = loss_of(gpt, tokens, **knobs)
    # Phases of learning rate 0: a slot's groups must not depend on where a phase begins.
    knobs |= {"lora_phases": 4, "lora_phase_documents": 1, "lora_phase_lr": 0.0}
    assert loss_of(gpt, tokens, **knobs) == whole
    for rank in (0, 1):
        part = documents[rank::2]
        share = sum(len(document) - 1 for document in part) / (len(tokens) - 1)
        kept, own = (share * plain_loss(gpt, part, 5e-4, keep) for keep in (True, False))
        loss = loss_of(gpt, tokens, replace(ALONE, rank=rank, world_size=2), **knobs)
        assert loss / 2 == pytest.approx(kept, abs=1e-5)
        assert abs(kept - own) > 1e-4
        whole -= kept
    assert abs(whole) < 1e-5


def take_short_steps() -> None:
    """Score with train_record.py: steps of all weights have five rows."""
    train_record.LORA_PHASE_TOKENS = 5 * T
    score.load_script = lambda path: train_record
    train_gpt.main = score.main


def test_score_gives_on_two_ranks_the_loss_of_one(tmp_path, lora_knobs, monkeypatch):
    """The steps of the phases have five rows, one (so the second rank has none), five and two.
    MAX_VAL_TOKENS cuts the last document."""
    monkeypatch.setattr(train_record, "LORA_PHASE_TOKENS", 5 * T)
    tokens = random_tokens([50, 49, 10, 3, 9])
    write_shard(tmp_path / "fineweb_val_000000.bin", tokens.numpy())
    environ = {**lora_knobs, **read(f"{PHASES} MAX_VAL_TOKENS={8 * T - 1}")}
    environ["DATA_PATH"] = str(tmp_path)
    gpt = random_model(train_record, environ)
    torch.save(gpt.state_dict(), tmp_path / "final_model.pt")
    command = [score.__file__, "final_model.pt"]
    first, second = run_ranks(tmp_path, environ, 2, command, edit=take_short_steps)
    assert second.returncode == 0, second.stderr
    one = loss_of(gpt, tokens[: 7 * T + 1])
    assert scores(first.stdout.splitlines()[-1])[0] == pytest.approx(one, abs=1e-5)


# ---- Hints ---------------------------------------------------------------------------------------
BOOST = 1.5
TILT = f"TRAIN_SEQ_LEN={T} NUM_LAYERS=2 TILT_BOOST={BOOST} TILT_TOKENS=2 TILT_SHARE=0.6"


def count_hints(inputs: list[int], targets: list[int], n: int, share: float) -> list[int]:
    """Go through the targets one after another. Each is counted after its hint is given."""
    counts: dict[tuple, dict[int, int]] = {}
    leaders: dict[tuple, int] = {}
    hints = []
    for i, target in enumerate(targets):
        context = tuple([-1] * n + inputs[: i + 1])[-n:]
        followers = counts.setdefault(context, {})
        leader = leaders.get(context, -1)
        is_hint = leader >= 0 and followers[leader] / sum(followers.values()) >= share
        hints.append(leader if is_hint else -1)
        followers[target] = followers.get(target, 0) + 1
        if leader < 0 or followers[target] > followers[leader]:
            leaders[context] = target
    return hints


@pytest.mark.parametrize("n", [1, 2, 5, 15])
@pytest.mark.parametrize("vocab_size", [2, 3, 50, 2**16])
def test_hints_are_those_of_a_dictionary(n, vocab_size):
    """The streams repeat parts of themselves. A vocabulary of two gives many ties."""
    numbers = random.Random(n)
    stream = [numbers.randrange(vocab_size) for _ in range(300)]
    stream += stream[50:200] + [numbers.randrange(vocab_size) for _ in range(50)] + stream[:100]
    inputs, targets = stream[:-1], stream[1:]
    for share in (0, 0.5, 0.75, 0.8, 1):
        hints = find_hints(torch.tensor(inputs), torch.tensor(targets), n, share)
        assert hints.tolist() == count_hints(inputs, targets, n, share)


@pytest.mark.parametrize("stride", ["0", "4"])
def test_the_score_with_hints_is_that_of_a_plain_version(knobs, stride):
    gpt = random_model(train_record, {**knobs, **read(TILT), "EVAL_STRIDE": stride})
    tokens = random_tokens([50, 78])
    losses = train_record.final_losses(gpt, SimpleNamespace(hp=gpt.hp, tokens=tokens), ALONE)
    ids = tokens.tolist()
    hints = count_hints(ids[:-1], ids[1:], 2, 0.6)
    assert 20 < sum(hint >= 0 for hint in hints) < len(hints)
    expected, step = [], int(stride) or T
    for start in range(0, len(ids) - T, step):
        logits = gpt.logits(tokens[None, start : start + T].long())
        for i in range(len(expected) - start, T):
            if hints[start + i] >= 0:
                logits[i, hints[start + i]] += BOOST
            expected.append(-logits[i].log_softmax(0)[ids[start + i + 1]].item())
    assert losses.tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("order, counted", [("decoding", [2, 0, 3, 1, 4]), ("stream", range(5))])
def test_adapters_learn_from_losses_without_hints(knobs, order, counted):
    """Hints are counted one document after another. Decoding begins with the longest two."""
    lengths = [30, 20, 40, 25, 10]
    tokens = random_tokens(lengths)
    settings = f"{LORA} {PHASES} LORA_KEEP=1 BATCH_SLOTS=1 {TILT} TILT_ORDER={order}"
    both = {**knobs, **read(settings)}
    models = [random_model(train_record, {**both, "TILT_BOOST": boost}) for boost in ("0", "1.5")]
    plain, tilted = (
        train_record.final_losses(gpt, SimpleNamespace(hp=gpt.hp, tokens=tokens, bos=BOS), ALONE)
        for gpt in models
    )
    bounds = [sum(lengths[:i]) for i in range(6)]
    places = [place for i in counted for place in range(bounds[i], bounds[i + 1])]
    inputs, targets = (tokens.long()[torch.tensor(places) + i].tolist() for i in (0, 1))
    changes = (tilted - plain)[places].tolist()
    rows = [*zip(count_hints(inputs, targets, 2, 0.6), targets, changes, strict=True)]
    assert all(change == 0 for hint, _, change in rows if hint < 0)
    hits = [change < 0 for hint, target, change in rows if hint == target]
    misses = [change > 0 for hint, target, change in rows if 0 <= hint != target]
    assert all(hits) and all(misses) and len(hits) > 5 and len(misses) > 5


def test_documents_begin_at_the_tokenizers_bos(knobs, tmp_path):
    """The model itself knows only token 1, so a mask of documents needs a tokenizer that has it."""
    tokenizer = tmp_path / "other.model"
    tokenizer.write_bytes(train_tokenizer(bos_id=2, eos_id=1))
    environ = {**knobs, "TOKENIZER_PATH": str(tokenizer)}
    from_env = train_record.Hyperparameters.from_env
    validation = train_record.Validation(from_env(environ))
    assert (validation.bos, train_record.Validation(from_env(knobs)).bos) == (2, BOS)
    tokens = torch.tensor([BOS, 5, 2, 6, BOS, 2, 7, 8]).to(torch.uint16)
    places = train_record.split_documents(tokens, validation.bos)
    assert sorted(place.start for place in places) == [0, 2, 5]
    with pytest.raises(train_record.InputError, match="its BOS is not 1: set DOCUMENT_MASK=0"):
        train_record.Validation(from_env({**environ, "DOCUMENT_MASK": "1"}))
