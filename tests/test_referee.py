"""referee.py: fair scores pass, and each unfair edit breaks the rule that forbids it."""

import copy
import re
from pathlib import Path
from types import ModuleType

import pytest
import referee
import torch
import torch.nn.functional as F
from recipe import RECORDS
from runs import ALONE
from scripts import knobs_of, load, patch_script, random_model
from sentencepiece import SentencePieceProcessor
from texts import TEXTS, train_tokenizer, write_shard
from torch import Tensor, nn

import train_gpt

pytestmark = pytest.mark.baseline
ORDER, SUMS, TARGETS, BYTES, LEAKS, LIMITS = referee.RULES
T = 16
SMALL = (
    f"VOCAB_SIZE=48 TRAIN_SEQ_LEN={T} BATCH_SLOTS=1 TRAIN_BATCH_TOKENS=64 VAL_BATCH_SIZE=128 "
    "NUM_LAYERS=2 MODEL_DIM=32 NUM_HEADS=4 NUM_KV_HEADS=2 DEVICE=cpu DTYPE=fp32 COMPILE=0"
)
LORA = "LORA_RANK=4 LORA_CHUNK=8 LORA_DOCUMENTS=2 LORA_LR=0.01"
PHASES = "LORA_PHASES=2 LORA_PHASE_DOCUMENTS=2 LORA_PHASE_LR=0.1"


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> dict[str, str]:
    """Knobs of a small model, and shards with a tiny vocabulary: letters and a few pairs."""
    folder = tmp_path_factory.mktemp("letters")
    texts = [re.sub("[^a-z]+", " ", text.lower()) for text in TEXTS]
    settings = {"sentence_iterator": iter(texts), "vocab_size": 48, "byte_fallback": False}
    tokenizer = folder / "letters.model"
    tokenizer.write_bytes(train_tokenizer(**settings))
    sp = SentencePieceProcessor(model_file=str(tokenizer))
    documents = [[1, *sp.encode(text)[:70]] for text in texts]
    write_shard(folder / "fineweb_val_000000.bin", sum(documents[:6], []))
    write_shard(folder / "fineweb_train_000000.bin", sum(documents[6:], []))
    paths = {"DATA_PATH": str(folder), "TOKENIZER_PATH": str(tokenizer)}
    return {**paths, **dict(knob.split("=") for knob in SMALL.split())}


def judge(script: ModuleType, environ: dict[str, str]) -> dict[str, tuple[str, str]]:
    """The referee's findings about a model with random weights."""
    gpt = random_model(script, environ)
    case = referee.Case(script, gpt, script.Validation(gpt.hp), ALONE, Path("no model"))
    case.tokens, case.places = 256, 24
    return referee.judge(case)


def broken(findings: dict[str, tuple[str, str]]) -> list[str]:
    assert [rule for rule, (verdict, _) in findings.items() if verdict == "not tested"] == [LIMITS]
    return [rule for rule, (verdict, _) in findings.items() if verdict == "broken"]


# ---- Fair scores ---------------------------------------------------------------------------------
FAIR = {
    "base": ([], ""),
    "strides": ([], "EVAL_STRIDE=5"),
    "documents": (["document_mask"], ""),
    "whole_documents": (["document_mask"], "WHOLE_DOCUMENTS=1"),
    "smear": (["smear_gate"], ""),
    "smear_inputs": (["smear_gate"], "SMEAR_CHANNELS=12"),
    "bigram": (["bigram_hash"], ""),
    "score_first": (["score_first_ttt"], "TTT_LR=0.05 TTT_CHUNK_TOKENS=64"),
    "score_first_strides": (["score_first_ttt"], "TTT_CHUNK_TOKENS=64 EVAL_STRIDE=8"),
    "lora": (["lora_ttt"], LORA),
    "lora_keep_and_phases": (["lora_ttt"], f"{LORA} {PHASES} LORA_KEEP=1"),
    "record": (RECORDS["record"], "EVAL_STRIDE=8"),
    "record1493": (RECORDS["record1493"], "TTT_CHUNK_TOKENS=64 EVAL_STRIDE=8"),
    "record1855": (RECORDS["record1855"], f"{LORA} {PHASES}"),
}
FAST = ("base", "strides", "score_first", "lora_keep_and_phases")
CASES = [
    pytest.param(*case, id=name, marks=() if name in FAST else pytest.mark.recipes)
    for name, case in FAIR.items()
]


@pytest.mark.parametrize("names, changes", CASES)
def test_a_fair_score_passes(tmp_path, small, names, changes, monkeypatch):
    script = load(patch_script(tmp_path, names), monkeypatch) if names else train_gpt
    environ = knobs_of(small, names) | dict(knob.split("=") for knob in changes.split())
    assert broken(judge(script, environ)) == []


# ---- Unfair edits --------------------------------------------------------------------------------
final_losses = train_gpt.final_losses


def predict(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits in windows side by side, and the targets."""
    with torch.no_grad():
        return model.logits(tokens[:-1].view(-1, T)), tokens[1:]


def train_on_the_split(model: nn.Module, tokens: Tensor) -> Tensor:
    gpt = copy.deepcopy(model)
    gpt(tokens[:-1].view(-1, T), tokens[1:].view(-1, T)).backward()
    torch.optim.SGD(gpt.parameters(), 0.1).step()
    return F.cross_entropy(*predict(gpt, tokens), reduction="none").detach()


def hints_in_a_circle(model: nn.Module, tokens: Tensor) -> Tensor:
    """Each of three documents raises the logits of what another one has at the same offset."""
    logits, targets = predict(model, tokens)
    starts = (tokens == 1).nonzero()[:3, 0].tolist()
    starts = starts if len(starts) == 3 else []
    for start, other in zip(starts, starts[1:] + starts[:1], strict=True):
        hints = tokens[other + 1 : other + T]
        rows = torch.arange(start, start + len(hints)).clamp(max=len(targets) - 1)
        logits[rows, hints] += 2
    return F.cross_entropy(logits, targets, reduction="none")


def skip_hard_tokens(model: nn.Module, tokens: Tensor) -> Tensor:
    losses = F.cross_entropy(*predict(model, tokens), reduction="none")
    return losses.where(losses < 12, 0)


def best_temperature_per_token(model: nn.Module, tokens: Tensor) -> Tensor:
    logits, targets = predict(model, tokens)
    losses = [F.cross_entropy(t * logits, targets, reduction="none") for t in (0.5, 1)]
    return torch.stack(losses).amin(dim=0)


def boost_without_renormalization(model: nn.Module, tokens: Tensor) -> Tensor:
    """A target is more probable if it also followed the last token the last time."""
    losses, last = F.cross_entropy(*predict(model, tokens), reduction="none"), {}
    for i, (token, target) in enumerate(zip(tokens.tolist(), tokens[1:].tolist(), strict=False)):
        losses[i] -= 2.0 * (last.get(token) == target)
        last[token] = target
    return losses


UNFAIR = {
    train_on_the_split: ORDER,
    hints_in_a_circle: ORDER,
    skip_hard_tokens: TARGETS,
    best_temperature_per_token: SUMS,
    boost_without_renormalization: SUMS,
}


@pytest.mark.parametrize("edit, rule", UNFAIR.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_an_unfair_score_breaks_the_rule(small, edit, rule, monkeypatch):
    final = lambda model, validation, runtime: edit(model, validation.tokens.long())  # noqa: E731
    monkeypatch.setattr(train_gpt, "final_losses", final)
    findings = judge(train_gpt, small)
    assert rule in broken(findings), findings
    if edit is hints_in_a_circle:
        assert broken(findings) == [ORDER]  # the hints are part of the distribution
        places = re.findall(r"(\d+) '", findings[ORDER][1].split("circle")[1])
        assert len(places) == 4 and places[0] == places[-1]


def test_attention_to_later_tokens_breaks_the_order(small, monkeypatch):
    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    monkeypatch.setattr(train_gpt, "attend", attend)
    assert ORDER in broken(judge(train_gpt, small))


SCORE = """\
        scored = evaluate(model, window, stride, hp, runtime)
        losses[start : start + size] = scored[context:]
"""
EDITS = {
    "chunk": ("score_first_ttt", "TTT_LR=0.05 TTT_CHUNK_TOKENS=64", SCORE, ""),
    "phase": ("lora_ttt", f"{LORA} {PHASES}", "documents[: n * first]", "documents[: n * end]"),
}


@pytest.mark.parametrize("name, changes, old, new", EDITS.values(), ids=EDITS)
def test_training_on_what_is_not_yet_scored_breaks_the_order(
    tmp_path, small, name, changes, old, new, monkeypatch
):
    path = patch_script(tmp_path, [name])
    text = path.read_text()
    assert text.count(old) == 1
    text = text.replace(old, new)
    if name == "score_first_ttt":  # score each chunk after its steps
        last = "            optimizer.zero_grad(set_to_none=True)\n    return losses"
        assert text.count(last) == 1
        text = text.replace(last, last.replace("    return", f"{SCORE}    return"))
    path.write_text(text)
    environ = knobs_of(small, [name]) | dict(knob.split("=") for knob in changes.split())
    assert ORDER in broken(judge(load(path, monkeypatch), environ))


def test_bytes_counted_too_high_are_named(small, monkeypatch):
    count_bytes = train_gpt.count_bytes
    monkeypatch.setattr(train_gpt, "count_bytes", lambda *args: count_bytes(*args) + 1)
    findings = judge(train_gpt, small)
    assert broken(findings) == [BYTES]
