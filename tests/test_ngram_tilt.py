"""The recipe ngram_tilt: hints against a count in a dictionary, the tilted losses, and the order in
which a decoder needs them."""

import random
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import referee
import torch
from runs import ALONE
from scripts import load, patch_script, random_model
from torch import Tensor, nn

pytestmark = pytest.mark.baseline
T, BOOST = 16, 1.5
SMALL = (
    f"TRAIN_SEQ_LEN={T} NUM_LAYERS=2 TILT_BOOST={BOOST} TILT_TOKENS=2 TILT_SHARE=0.6 LORA_RANK=4 "
    "LORA_LR=5e-4 LORA_CHUNK=4 LORA_DOCUMENTS=2 LORA_KEEP=1 LORA_PHASES=9 LORA_PHASE_DOCUMENTS=2 "
    "LORA_PHASE_LR=0.1 BATCH_SLOTS=1"
)


@pytest.fixture(scope="module")
def patched(tmp_path_factory) -> ModuleType:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield load(patch_script(tmp_path_factory.mktemp("tilt"), ["ngram_tilt"]), monkeypatch)


@pytest.fixture(scope="module")
def with_lora(tmp_path_factory) -> ModuleType:
    with pytest.MonkeyPatch.context() as monkeypatch:
        names = ["ngram_tilt", "lora_ttt"]
        yield load(patch_script(tmp_path_factory.mktemp("tilt"), names), monkeypatch)


def random_tokens(lengths: list[int]) -> Tensor:
    """Documents with these numbers of targets, and a last BOS. Most tokens follow from the last."""
    numbers = random.Random(1)
    tokens = []
    for length in lengths:
        tokens.append(1)
        for _ in range(length - 1):
            tokens.append(4 + (5 * tokens[-1] + numbers.choice([0, 0, 0, 0, 1])) % 8)
    return torch.tensor([*tokens, 1]).to(torch.uint16)


def make_model(module: ModuleType, knobs: dict[str, str], **changes: str) -> nn.Module:
    return random_model(
        module, {**knobs, **dict(pair.split("=") for pair in SMALL.split()), **changes}
    )


def count_hints(inputs: list[int], targets: list[int], n: int, share: float) -> list[int]:
    """One target after the other: count it after its hint is given."""
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
def test_hints_are_those_of_a_dictionary(patched, n, vocab_size):
    """In streams that repeat parts of themselves. Two tokens give many ties."""
    numbers = random.Random(n)
    stream = [numbers.randrange(vocab_size) for _ in range(300)]
    stream += stream[50:200] + [numbers.randrange(vocab_size) for _ in range(50)] + stream[:100]
    inputs, targets = stream[:-1], stream[1:]
    for share in (0, 0.5, 0.75, 0.8, 1):
        hints = patched.find_hints(torch.tensor(inputs), torch.tensor(targets), n, share)
        assert hints.tolist() == count_hints(inputs, targets, n, share)


def with_hint(targets: Tensor, hint: int) -> Tensor:
    return targets + 2**16 * (hint + 1)


def test_a_hint_adds_to_its_logit(patched, knobs):
    """So the probabilities of all tokens still sum to 1. The gradient is that without hints."""
    gpt = make_model(patched, knobs)
    V, hint = gpt.hp.vocab_size, 7
    inputs = torch.tensor([[1, 5, 9]])
    every = torch.arange(V)
    logits = gpt.logits(inputs)
    losses = torch.stack([gpt(inputs, with_hint(i.expand(1, 3), hint), "none")[0] for i in every])
    assert losses.neg().exp().sum(dim=0).tolist() == pytest.approx([1, 1, 1], abs=1e-5)
    boosts = BOOST * (every == hint)
    torch.testing.assert_close(losses.T, -(logits + boosts).log_softmax(dim=1))
    plain = gpt(inputs, inputs, "none").sum()
    assert plain.item() == pytest.approx(-logits.log_softmax(1)[range(3), inputs[0]].sum().item())
    found = [gpt(inputs, with_hint(inputs, hint), "none").sum(), plain]
    assert abs(found[0] - found[1]) > 0.001
    gradients = [torch.autograd.grad(loss, gpt.tok_emb.weight)[0] for loss in found]
    assert torch.equal(*gradients)
    assert torch.equal(gpt(inputs, with_hint(inputs, hint)), gpt(inputs, inputs))  # training


@pytest.mark.parametrize("stride", ["0", "4"])
def test_the_score_is_that_of_a_plain_version(patched, knobs, stride):
    gpt = make_model(patched, knobs, EVAL_STRIDE=stride)
    tokens = random_tokens([50, 78])
    validation = SimpleNamespace(hp=gpt.hp, tokens=tokens)
    losses = patched.final_losses(gpt, validation, ALONE)
    ids = tokens.tolist()
    hints = count_hints(ids[:-1], ids[1:], 2, 0.6)
    assert 20 < sum(hint >= 0 for hint in hints) < len(hints) and torch.equal(
        validation.tokens, tokens
    )
    expected, step = [], int(stride) or T
    for start in range(0, len(ids) - T, step):
        logits = gpt.logits(tokens[None, start : start + T].long())
        for i in range(len(expected) - start, T):
            if hints[start + i] >= 0:
                logits[i, hints[start + i]] += BOOST
            expected.append(-logits[i].log_softmax(0)[ids[start + i + 1]].item())
    assert losses.tolist() == pytest.approx(expected, abs=1e-4)


def test_adapters_learn_from_losses_without_hints(with_lora, knobs):
    """And hints count what is decoded before, one document after the other."""
    lengths, decoded = [30, 20, 40, 25, 10], [2, 0, 3, 1, 4]  # 2, 0 | 3, 1 | 4: longest first
    tokens = random_tokens(lengths)
    models = [make_model(with_lora, knobs, TILT_BOOST=boost) for boost in ("0", "1.5")]
    plain, tilted = (
        with_lora.final_losses(gpt, SimpleNamespace(hp=gpt.hp, tokens=tokens), ALONE)
        for gpt in models
    )
    bounds = [sum(lengths[:i]) for i in range(6)]
    places = [place for i in decoded for place in range(bounds[i], bounds[i + 1])]
    inputs, targets = tokens[places].tolist(), tokens[[place + 1 for place in places]].tolist()
    changes = (tilted - plain)[places].tolist()
    rows = [*zip(count_hints(inputs, targets, 2, 0.6), targets, changes, strict=True)]
    assert all(change == 0 for hint, _, change in rows if hint < 0)
    hits = [change < 0 for hint, target, change in rows if hint == target]
    misses = [change > 0 for hint, target, change in rows if 0 <= hint != target]
    assert all(hits) and all(misses) and len(hits) > 5 and len(misses) > 5


@pytest.mark.parametrize("order", ["decoding", "stream"])
def test_a_decoder_can_follow_the_order_of_decoding(with_lora, knobs, order):
    """Even with kept adapters and phases. In stream order, a document's hints need one that is
    decoded after training on it."""
    gpt = make_model(with_lora, knobs, TILT_ORDER=order)
    case = referee.Case(with_lora, gpt, with_lora.Validation(gpt.hp), ALONE, Path(), 128, 8)
    assert referee.check_order(case)[0] == (order == "decoding")


def test_an_unknown_order_is_refused(patched):
    with pytest.raises(patched.InputError, match="TILT_ORDER='random' must be decoding or stream"):
        patched.Hyperparameters.from_env({"TILT_ORDER": "random"})
