"""referee.py: fair scores pass, and each unfair edit breaks the rule that forbids it."""

import itertools
import json
import math
import random
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import referee
import torch
import torch.nn.functional as F
import train_record
from edits import edit_script
from runs import ALONE, SCRIPT
from scripts import RECORDS, random_model, read, record_knobs
from sentencepiece import SentencePieceProcessor
from texts import TEXTS, read_shard, train_tokenizer, write_shard
from torch import Tensor, nn
from trained import RECORD, load_script

import train_gpt

pytestmark = pytest.mark.baseline
ORDER, SUMS, TARGETS, BYTES, LEAKS, LIMITS = referee.RULES
T = 16
SMALL = (
    f"VOCAB_SIZE=48 TRAIN_SEQ_LEN={T} BATCH_SLOTS=1 TRAIN_BATCH_TOKENS=64 VAL_BATCH_SIZE=128 "
    "NUM_LAYERS=2 MODEL_DIM=32 NUM_HEADS=4 NUM_KV_HEADS=2 DEVICE=cpu DTYPE=fp32 COMPILE=0"
)
LORA = "LORA_RANK=4 LORA_CHUNK=16 LORA_DOCUMENTS=2 LORA_LR=0.01"
PHASES = f"{LORA} LORA_PHASES=2 LORA_PHASE_DOCUMENTS=2 LORA_PHASE_LR=0.1"


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> dict[str, str]:
    """Knobs of a small model, and shards with a tiny vocabulary: letters and a few pairs."""
    folder = tmp_path_factory.mktemp("letters")
    texts = [re.sub("[^a-z]+", " ", text.lower()) for text in TEXTS]
    settings = {"sentence_iterator": iter(texts), "vocab_size": 48, "byte_fallback": False}
    tokenizer = folder / "letters.model"
    tokenizer.write_bytes(train_tokenizer(**settings))
    sp = SentencePieceProcessor(model_file=str(tokenizer))
    documents = [[1, *sp.encode(text[:100])] for text in texts]
    write_shard(folder / "fineweb_val_0.bin", sum(documents[:12], []))
    write_shard(folder / "fineweb_train_0.bin", sum(documents[12:], []))
    return {"DATA_PATH": str(folder), "TOKENIZER_PATH": str(tokenizer), **read(SMALL)}


def open_case(script: ModuleType, environ: dict[str, str], **limits) -> referee.Case:
    """A model with random weights. Limits count the bytes of any file."""
    gpt = random_model(script, environ)
    limits = {"num_tokens": 256, "num_places": 8} | limits
    return referee.Case(script, gpt, script.Validation(gpt.hp), ALONE, Path(__file__), **limits)


def judge(script: ModuleType, environ: dict[str, str]) -> dict[str, tuple[str, str]]:
    return referee.judge(open_case(script, environ))


def broken(findings: dict[str, tuple[str, str]]) -> list[str]:
    assert "not tested" not in [verdict for verdict, _ in findings.values()], findings
    return [rule for rule, (verdict, _) in findings.items() if verdict == "broken"]


FAIR = ["", "EVAL_STRIDE=5", "TILT_BOOST=2 TILT_TOKENS=2 TILT_SHARE=0.5", f"{PHASES} LORA_KEEP=1"]
SLOW = ["DOCUMENT_MASK=1", "SMEAR_CHANNELS=12", LORA, *RECORDS]
SLOW_FAIR = [pytest.param(name, marks=pytest.mark.records) for name in SLOW]


@pytest.mark.parametrize("knobs", [*FAIR, *SLOW_FAIR])
def test_a_fair_score_passes(small, knobs):
    script = train_gpt if knobs in FAIR[:2] else train_record
    environ = record_knobs(knobs, small) if knobs in RECORDS else {**small, **read(knobs)}
    assert broken(judge(script, environ)) == []


# ---- Unfair edits: losses of tokens[1:], from a model and its logits in windows side by side -----
def train_on_the_split(model: nn.Module, logits: Tensor, tokens: Tensor) -> Tensor:
    batch = tokens[:-1].view(-1, T), tokens[1:].view(-1, T)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(*batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model(*batch, "none").flatten().detach()


def hint_in_a_circle(model: nn.Module, logits: Tensor, tokens: Tensor) -> Tensor:
    """Raise the logits of what followed the last three tokens in another one of three documents."""
    starts = (tokens == 1).nonzero()[:3, 0].tolist()
    for start, other in zip(starts, starts[1:] + starts[:1], strict=True):
        for i in range(3, 10 if len(starts) == 3 else 0):
            if tokens[start + i - 2 : start + i + 1].equal(tokens[other + i - 2 : other + i + 1]):
                logits[start + i, tokens[other + i + 1]] += 2
    return F.cross_entropy(logits, tokens[1:], reduction="none")


def skip_hard_tokens(model: nn.Module, logits: Tensor, tokens: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, tokens[1:], reduction="none")
    return losses.where(losses < 12, 0)


def hash_the_target_into_the_key(model: nn.Module, logits: Tensor, tokens: Tensor) -> Tensor:
    """Count pairs in a small table, where many share an entry. Mix the share of the target's entry
    into the target's probability only, so that probabilities do not sum to 1."""
    losses, counts = F.cross_entropy(logits, tokens[1:], reduction="none"), Counter()
    for i, (token, target) in enumerate(itertools.pairwise(tokens.tolist())):
        key = (31 * token + target) % 16
        if counts[token, "all"]:
            share = min(counts[key] / counts[token, "all"], 1)
            losses[i] = -math.log(0.8 * math.exp(-losses[i]) + 0.2 * share)
        counts.update([key, (token, "all")])
    return losses


UNFAIR = {
    train_on_the_split: [ORDER, SUMS],
    hint_in_a_circle: [ORDER],
    skip_hard_tokens: [SUMS, TARGETS],
    hash_the_target_into_the_key: [SUMS],
}


@pytest.mark.parametrize("edit", UNFAIR, ids=lambda edit: edit.__name__)
def test_an_unfair_edit_breaks_its_rule(small, edit, monkeypatch):
    def final_losses(model, validation, runtime):
        tokens = validation.tokens.long()
        return edit(model, model.logits(tokens[:-1].view(-1, T)).detach(), tokens)

    monkeypatch.setattr(train_gpt, "final_losses", final_losses)
    findings = judge(train_gpt, small)
    assert broken(findings) == UNFAIR[edit], findings
    if edit is hint_in_a_circle:  # each document needs a later one, and the last one the first
        cycle = (
            r"to decode place (\d+) \('.+'\) you need place (\d+), and for \2 you need (\d+), and "
        )
        places = re.search(rf"{cycle}for \3 you need \1$", findings[ORDER][1])
        first, second, third = map(int, places.groups())
        assert first < second < third or second < third < first or third < first < second


def right_to_left(model: nn.Module, logits: Tensor, tokens: Tensor) -> Tensor:
    """A decoder could begin with the last token, but a document allows only one order."""
    after = tokens.flip(0)
    losses = F.cross_entropy(model.logits(after[:-1].view(-1, T)), after[1:], reduction="none")
    return torch.cat([losses.flip(0)[1:], torch.tensor([math.log(48)])]).detach()


def look_ahead(first: int, last: int, share: Callable = torch.mean) -> Callable:
    """Add 0.03 of the target's share among the tokens at these distances to its probability. A
    document's first token gets nothing: a copy of the document up to it is a copy of it alone."""

    def edit(model: nn.Module, logits: Tensor, tokens: Tensor) -> Tensor:
        p = F.cross_entropy(logits, tokens[1:], reduction="none").neg().exp()
        for i in range(len(p) - last):
            ahead = tokens[i + 1 + first : i + 2 + last] == tokens[i + 1]
            p[i] = 0.97 * p[i] + 0.03 * share(ahead.float()) * (tokens[i] != 1)
        return -p.log()

    return edit


def look_up(n: int) -> Callable:
    """Add 0.03 if the last n tokens, the target included, occur later in their document."""

    def edit(model: nn.Module, logits: Tensor, tokens: Tensor) -> Tensor:
        p = F.cross_entropy(logits, tokens[1:], reduction="none").neg().exp()
        text = "".join(map(chr, tokens.tolist()))
        for i in range(n, len(text)):
            later = text[i + 1 :].partition("\1")[0]
            p[i - 1] = 0.97 * p[i - 1] + 0.03 * (text[i + 1 - n : i + 1] in later)
        return -p.log()

    return edit


AHEAD = [look_ahead(d, d) for d in (1, 4, 7, 9, 14, 23, 37, 44)]
AHEAD += [look_ahead(4, 14), look_ahead(4, 14, torch.min), look_up(1), look_up(9)]


@pytest.mark.parametrize("edit", [*AHEAD, right_to_left])
def test_later_tokens_of_a_document_are_forbidden(small, edit, monkeypatch):
    def final_losses(model, validation, runtime):
        tokens = validation.tokens.long()
        return edit(model, model.logits(tokens[:-1].view(-1, T)).detach(), tokens)

    monkeypatch.setattr(train_gpt, "final_losses", final_losses)
    holds, measured = referee.check_order(open_case(train_gpt, small))
    assert not holds
    words = r"to decode place (\d+) \('.+'\) you need what follows place (\d+) in its document: "
    place, last = map(int, re.match(words, measured).groups())
    assert place <= last


def test_noise_is_no_look_ahead(small, monkeypatch):
    numbers, evaluate = random.Random(0), train_gpt.evaluate

    def add_noise(*arguments):
        return evaluate(*arguments) + numbers.uniform(0, 1e-3)

    monkeypatch.setattr(train_gpt, "evaluate", add_noise)
    holds, measured = referee.check_order(open_case(train_gpt, small))
    limits = [float(limit) for limit in re.findall(r"by more than (\S+) nats", measured)]
    assert holds and limits[0] == limits[1] and 1e-4 < limits[0] < 4e-3


def test_time_limits_the_places(small, monkeypatch):
    """On this clock only scoring takes time, a second for each text."""
    final_losses, seconds = train_gpt.final_losses, itertools.count(1)
    clock = SimpleNamespace(now=0, perf_counter=lambda: clock.now)

    def score(*arguments):
        clock.now = next(seconds)
        return final_losses(*arguments)

    monkeypatch.setattr(train_gpt, "final_losses", score)
    monkeypatch.setattr(referee, "time", clock)
    tried = []
    for minutes in (1, 2, 60):
        case = open_case(train_gpt, small, num_places=30, deadline=clock.now + 60 * minutes)
        holds, measured = referee.check_order(case)
        assert holds
        tried.append(int(re.search(r"what follows (\d+) places in \d documents, ", measured)[1]))
    assert tried == [8, 14, 30]
    case.deadline = clock.now + 20
    with pytest.raises(
        referee.NotTested, match="no time for 24 scorings of 256 tokens: about 23 s"
    ):
        referee.check_order(case)


EARLY = {
    "documents": {"places[: n * first]": "places[: n * end]"},
    "chunks": {
        "in range(0, longest, chunk)": "in [*range(0, longest, chunk)] * 2",
        "            break  # nothing is left": "            pass  # nothing is left",
        "cat(scored, dim=1)": "cat(scored[len(scored) // 2 :], dim=1)",
    },
}


@pytest.mark.parametrize("trained_on", EARLY)
def test_training_before_scoring_breaks_the_order(tmp_path, small, trained_on):
    path = tmp_path / "edited.py"
    path.write_text(edit_script(RECORD.read_text(), EARLY[trained_on]))
    assert ORDER in broken(judge(load_script(path), {**small, **read(PHASES)}))


def test_too_many_bytes_and_a_mean_of_easy_tokens_are_named(small, monkeypatch):
    count_bytes, mean_loss = train_gpt.count_bytes, train_gpt.mean_loss
    monkeypatch.setattr(train_gpt, "count_bytes", lambda *args: count_bytes(*args) + 1)
    monkeypatch.setattr(train_gpt, "mean_loss", lambda x, runtime: mean_loss(x[x < 12], runtime))
    findings = judge(train_gpt, small)
    assert broken(findings) == [TARGETS, BYTES]
    words = r"([\d,]+) in .* of 12 documents, taken as known, cost at most (0\.\d{4}) BPB"
    size, cost = re.fullmatch(words, findings[BYTES][1]).groups()
    starts = (read_shard(Path(small["DATA_PATH"], "fineweb_val_0.bin")) == 1).nonzero()[0]
    longest = max(end - start for start, end in itertools.pairwise(starts))
    bits = float(cost) * int(size.replace(",", "")) / 12
    assert 2**bits == pytest.approx(longest, rel=0.01)


def test_validation_documents_that_also_train_are_a_leak(small, tmp_path):
    for split in ("val", "train"):
        shutil.copy(f"{small['DATA_PATH']}/fineweb_val_0.bin", tmp_path / f"fineweb_{split}_0.bin")
    assert broken(judge(train_gpt, {**small, "DATA_PATH": str(tmp_path)})) == [LEAKS]


@pytest.mark.parametrize("gpus", [1, 8])
def test_limits_count_files_and_calibration(tmp_path, monkeypatch, gpus):
    """Without eight GPUs, times are shown, not judged. The last step need only begin in time."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(train_gpt, "SIZE_LIMIT", 99_000_000)
    case, script = SimpleNamespace(script=train_gpt, path=tmp_path / "model"), SCRIPT.read_bytes()
    size = 16_000_000 - len(script)
    fits = {"bytes_total": 1, "train_ms": 595_100, "steps": 5951, "gptq_ms": 5000}
    fits |= {"eval_ms": 600_000, "input_crc32": {"script": zlib.crc32(script)}}
    for change, extra, holds in [
        ({}, 0, True),
        ({}, 1, False),
        ({"train_ms": 595_102}, 0, gpus < 8),
        ({"eval_ms": 600_001}, 0, gpus < 8),
        ({"input_crc32": {"script": 1}}, 0, True),
    ]:
        case.path.write_bytes(bytes(size + extra))
        (tmp_path / "final_result.json").write_text(json.dumps({**fits, **change}))
        is_right, measured = referee.check_limits(case)
        assert is_right == holds and "as the run wrote them" in measured
        sizes = f"{16_000_000 + extra:,} of 16,000,000 bytes, {len(script):,} of them the script"
        other = ", which is not the run's" * ("input_crc32" in change)
        assert measured.startswith(f"{sizes}{other}; trained ")
    case.path.write_bytes(b"PK")
    with pytest.raises(referee.NotTested, match="only an artifact has a limit"):
        referee.check_limits(case)


KEEP = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}


@pytest.mark.parametrize("prefix", [False, True])
def test_white_space_at_the_start_of_a_document_may_stay(small, tmp_path, prefix):
    """The score leaves out one space, which SentencePiece drops only if it has added it."""
    settings = {**KEEP, "add_dummy_prefix": prefix, "vocab_size": 384}
    tokenizer = tmp_path / "keep.model"
    tokenizer.write_bytes(train_tokenizer(**settings))
    sp = SentencePieceProcessor(model_file=str(tokenizer))
    texts = [f"{' ' * i}{text[:200]}" for i, text in enumerate(TEXTS[:4])]
    assert [sp.decode(sp.encode(text)) for text in texts] == texts
    write_shard(tmp_path / "fineweb_val_0.bin", sum(([1, *sp.encode(t)] for t in texts), []))
    own = {"DATA_PATH": str(tmp_path), "TOKENIZER_PATH": str(tokenizer), "VOCAB_SIZE": "384"}
    assert referee.check_bytes(open_case(train_gpt, {**small, **own}))[0]


def test_the_program_prints_a_table_and_exits_with_the_verdict(
    trained, tmp_path, capsys, monkeypatch, quantized_knobs
):
    """Without a test of order and sums no score is fair. Other rules without one are named."""
    model = shutil.copy(trained[0] / "final_model.int8.ptz", tmp_path)
    shutil.copy(trained[0] / "final_result.json", tmp_path)
    five = [*referee.RULES][:5]
    large = tmp_path / "large.py"
    large.write_text(SCRIPT.read_text() + 16_000_000 * "#")
    small = ["--tokens=256", "--places=8"]
    for options, code, verdict, untested in [
        (small, 0, "holds", ""),
        (["--minutes=0"], 3, "not tested", f"not tested: {', '.join(five)}\n"),
        (["--minutes=0", f"--script={large}"], 1, "not tested", f"not tested: {', '.join(five)}\n"),
    ]:
        assert referee.main([model, *options]) == code
        out = capsys.readouterr().out
        assert re.findall(rf"^(\S.*\S) +{verdict}  ", out, re.M)[:5] == five
        assert out.endswith(untested) and (untested or "\nnot tested" not in out)
    shutil.copy(f"{quantized_knobs['DATA_PATH']}/fineweb_val_000000.bin", tmp_path)
    monkeypatch.setenv("DATA_PATH", str(tmp_path))  # has no train shards
    assert referee.main([model, *small]) == 0
    assert capsys.readouterr().out.endswith(f"\nnot tested: {LEAKS}\n")
    Path(model).write_bytes(b"no model")
    assert referee.main([model]) == 2
    error = capsys.readouterr().err.removeprefix("__main__.")  # Python 3.10 prints it
    assert error.startswith(f"InputError: {model} is damaged or not a model file")
