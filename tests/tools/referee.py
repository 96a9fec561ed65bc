"""Is a score fair? It is if a decoder that has only the artifact could restore the text from a file
that is as long as the score says. Exit code 0: no rule is broken, 1: one is, 2: it could not run.

    python tests/tools/referee.py final_model.int8.ptz
    EVAL_STRIDE=64 python tests/tools/referee.py final_model.int8.ptz --tokens 1024 --minutes 60

Knobs come from the environment, else from the run that wrote the file, as in score.py."""

import argparse
import copy
import glob
import json
import math
import os
import random
import re
import sys
import textwrap
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from sentencepiece import SentencePieceProcessor
from trained import SCRIPT, load_script, saved_knobs, unknown_knobs

sys.path.append(str(Path(__file__).resolve().parents[2] / "data"))

import caseops  # noqa: E402
import check_dataset  # noqa: E402

Finding = tuple[bool, str]  # whether the rule holds, and what was measured
WEIGHTS = (1, 6, 2, 4, 3, 5)  # lengths of documents: short ones before and after long ones
PASSAGE = 24  # tokens that three documents share, so that hints from one to another act
MAX_NOISE = 0.01  # nats between two equal scorings
# The loss itself is fp32, whatever the dtype of the logits. In a script that computes it in bf16,
# rounding changes a loss by up to 1/512 of itself, and the sum by 1/512 of their mean: 5 nats.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}


class NotTested(Exception):
    """The reason why a rule could not be tested."""


@dataclass
class Case:
    """The model, and all that scoring it needs."""

    script: ModuleType
    gpt: torch.nn.Module
    validation: Any  # the script's Validation
    runtime: Any  # its Runtime
    path: Path  # of the model
    tokens: int = 0  # of the short text; 0: as many as the knobs need
    places: int = 32
    deadline: float = math.inf  # of time.perf_counter()

    def __post_init__(self) -> None:
        self.hp = self.validation.hp
        self.tokenizer = SentencePieceProcessor(model_file=self.hp.tokenizer_path)
        self.model = self.script.wrap(self.gpt, self.runtime)
        self.weights = copy.deepcopy(self.gpt.state_dict())

    def score(self, tokens: np.ndarray, hp: Any = None) -> torch.Tensor:
        """Losses of tokens[1:], computed as after training. hp: other knobs."""
        self.gpt.load_state_dict(self.weights)  # scoring may train the model itself
        torch.manual_seed(0)
        validation = copy.copy(self.validation)
        validation.tokens, validation.hp = torch.from_numpy(tokens), hp or self.hp
        return self.script.final_losses(self.model, validation, self.runtime).float().cpu()

    def seconds_left(self) -> float:
        return self.deadline - time.perf_counter()

    def text(self, ids: np.ndarray) -> str:
        text = self.tokenizer.decode(ids.tolist())
        return caseops.decode(text) if caseops.is_caseops(self.tokenizer) else text


def score_all(
    case: Case, name: str, texts: list[np.ndarray], hp: Any = None
) -> Iterator[torch.Tensor]:
    """Score texts of one length. Raises NotTested if the time does not suffice."""
    size = f"{len(texts)} scorings of {len(texts[0]) - 1:,} tokens"
    for i, text in enumerate(texts):
        started = time.perf_counter()
        losses = case.score(text, hp)
        if len(losses) != len(text) - 1:
            raise NotTested(f"{len(losses)} losses for {len(text) - 1} targets")
        yield losses
        needed = (time.perf_counter() - started) * (len(texts) - 2) if i == 1 else 0.0
        if i == 1:  # the first one may have compiled or allocated something
            print(f"{name}: {size}, about {needed / 60:.1f} min", flush=True)
        if i + 1 < len(texts) and needed >= case.seconds_left():
            time_needed = f"about {needed / 60:.1f} min" if i == 1 else f"{i + 1} were in time"
            raise NotTested(f"{size}: {time_needed}; use --minutes, or fewer --tokens or --places")
        if sys.stderr.isatty():
            print(f"\r{i + 1} of {len(texts)} ", end="\r", file=sys.stderr, flush=True)


def read_split(case: Case) -> np.ndarray:
    """All tokens of the validation shards, read without the script."""
    paths = sorted(glob.glob(case.hp.files("val")))
    return np.concatenate([np.fromfile(path, "<u2", offset=1024) for path in paths])


def other_token(token: int, tokens: np.ndarray, bos: int) -> int:
    """The first token that differs from this one and from BOS."""
    return int(tokens[(tokens != token) & (tokens != bos)][0])


# ---- A decoding order exists -----------------------------------------------------------------
def knobs_with(case: Case, word: str) -> list[int]:
    """The values of the knobs in use with this word in their name."""
    knobs = {k: v for k, v in asdict(case.hp).items() if word in k and type(v) is int and v > 0}
    has_phases = getattr(case.hp, "lora_phases", 0) > 0
    return [value for name, value in knobs.items() if has_phases or "phase" not in name]


def cut_text(case: Case) -> tuple[np.ndarray, list[int]]:
    """Cut a part of the split into documents of different lengths. Returns the tokens and the place
    of each BOS. It has several windows, and several of the chunks and phases that the knobs ask
    for. Three documents begin with the same passage."""
    T, unit = case.hp.train_seq_len, case.hp.batch_slots * case.hp.train_seq_len
    num_documents = max(len(WEIGHTS), 3 * max(knobs_with(case, "documents"), default=0))
    chunks = knobs_with(case, "chunk")
    num_tokens = max(3 * max([unit, *chunks]), 2 * num_documents * min(chunks, default=1))
    num_tokens = math.ceil((case.tokens or num_tokens) / T) * T
    num_documents = min(num_documents, max(num_tokens // 16, 3))
    bos = case.tokenizer.bos_id()
    split = read_split(case)
    text = np.resize(split[split != bos], num_tokens + 1)  # repeats a split that is shorter
    ends = np.cumsum(np.resize(WEIGHTS, num_documents))
    starts = [0, *(ends[:-1] * num_tokens // ends[-1]).tolist()]
    shared = min(PASSAGE, starts[1] - 2)
    for start in starts[:3]:
        text[start + 1 : start + 1 + shared] = text[1 : 1 + shared]
    text[starts] = bos
    return text, starts


def choose_places(case: Case, text: np.ndarray, starts: list[int]) -> list[int]:
    """Choose targets: in the shared passage, and on both sides of bounds of documents, windows and
    chunks."""
    T, unit, last = (
        case.hp.train_seq_len,
        case.hp.batch_slots * case.hp.train_seq_len,
        len(text) - 1,
    )
    chunks = knobs_with(case, "chunk")
    steps = [max(chunk // unit, 1) * unit for chunk in chunks]
    kinds = [
        starts[1:],
        [*range(T, last, T)],
        [bound for step in steps for bound in range(step, last, step)],
        [start + chunk for start in starts for chunk in chunks if start + chunk < last],
    ]
    order = random.Random(0)
    for bounds in kinds:
        order.shuffle(bounds)
    passages = [start + min(PASSAGE, starts[1] - 2) - 1 for start in starts[:3]]
    rounds = [bounds[i] for i in range(last) for bounds in kinds if i < len(bounds)]
    near = (bound + i for bound in [*passages, *rounds] for i in (-2, -1, 0, 1))
    is_bos = text == case.tokenizer.bos_id()
    places = dict.fromkeys(i for i in near if 0 < i <= last and not is_bos[i])
    return sorted([*places][: case.places])


def find_circle(needs: dict[int, set[int]]) -> list[int]:
    """Find places that each need the one before, from one back to itself. needs: the places that
    must be decoded before each. Empty if an order exists."""
    for place, earlier in needs.items():
        for other in earlier:
            if place in needs[other]:
                return [place, other, place]
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def check_order(case: Case) -> Finding:
    """Change one token at a time: losses that change with it must be decoded after it."""
    text, starts = cut_text(case)
    places = choose_places(case, text, starts)
    texts = [text, text, *(text.copy() for _ in places)]
    for place, changed in zip(places, texts[2:], strict=True):
        changed[place] = other_token(text[place], np.roll(text, -place), text[0])
    columns = torch.tensor(places) - 1
    base, again, *rows = (losses for losses in score_all(case, "order", texts))
    noise = (base - again).abs().max().item()
    if not noise <= MAX_NOISE:  # also if it is not a number
        raise NotTested(
            f"two equal scorings differ by {noise:.2g} nats: try DEVICE=cpu, DTYPE=fp32"
        )
    changes = torch.stack([(row - base)[columns].abs() > 4 * noise for row in rows])
    changes.fill_diagonal_(False)
    needs = {
        place: {places[i] for i in changes[:, j].nonzero()[:, 0].tolist()}
        for j, place in enumerate(places)
    }
    measured = (
        f"{len(places)} places in {len(starts)} documents of {len(text) - 1:,} tokens: "
        f"{int(changes.sum())} losses depend on another place's token "
        f"(by more than {4 * noise:.2g} nats; bounds of documents count as known)"
    )
    if not (circle := find_circle(needs)):
        return True, measured
    words = [f"{place} {case.text(text[max(place - 3, 0) : place + 1])!r}" for place in circle]
    more = [f"... ({len(circle) - 1} places)"] if len(words) > 7 else []
    return (
        False,
        f"{measured}; in a circle, each needs the one before: {', '.join(words[:7] + more)}",
    )


# ---- The other rules -------------------------------------------------------------------------
def check_sums(case: Case) -> Finding:
    """Put each token of the vocabulary at one place of a single, short window that repeats itself,
    so that hints act there."""
    size = min(case.hp.train_seq_len, 64)
    hp = replace(case.hp, train_seq_len=size, eval_stride=0)
    bos = case.tokenizer.bos_id()
    split = read_split(case)
    words = split[split != bos][: size // 2]
    text = np.concatenate([np.array([bos], "<u2"), np.resize(words, size)])
    place = size * 3 // 4
    texts = [text.copy() for _ in range(hp.vocab_size)]
    for token, changed in enumerate(texts):
        changed[place] = token
    losses = [row[place - 1].item() for row in score_all(case, "sums", texts, hp)]
    total, tolerance = sum(map(math.exp, (-loss for loss in losses))), TOLERANCE[case.runtime.dtype]
    measured = f"{total:.6f} over all {len(losses):,} tokens at place {place} of {size}"
    return abs(total - 1) <= tolerance, f"{measured} (tolerance {tolerance:g})"


def find_gaps(case: Case, tokens: np.ndarray) -> Finding:
    """Count the losses. Each 0 that remains if its target changes is a target without a score."""
    losses, bos = case.score(tokens), case.tokenizer.bos_id()
    if len(losses) != len(tokens) - 1:
        return False, f"{len(losses):,} losses for {len(tokens) - 1:,} targets"
    zeros = losses == 0
    changed = tokens.copy()
    for place in (zeros.nonzero()[:, 0] + 1).tolist():
        if tokens[place] != bos:
            changed[place] = other_token(tokens[place], np.roll(tokens[:999], -place), bos)
    gaps = int((zeros & (case.score(changed) == 0)).sum()) if zeros.any() else 0
    mean, own = losses.mean(dtype=torch.float64).item(), case.script.mean_loss(losses, case.runtime)
    measured = f"{len(losses):,} losses, {gaps} of them missing (always 0), mean {mean:.4f}"
    if abs(own - mean) > 1e-6 * mean:
        return False, f"{measured}, but {own:.4f} by the script's mean_loss"
    return gaps == 0, measured


def check_targets(case: Case) -> Finding:
    """Check the losses of the short text and, if there is time, of the whole split."""
    split, tokens = read_split(case), case.validation.tokens.numpy()
    scored, whole = len(tokens) - 1, (len(split) - 1) // case.hp.train_seq_len
    whole *= case.hp.train_seq_len  # targets, without the tail
    if not np.array_equal(tokens, split[: len(tokens)]):
        return False, "the scored tokens are not those of the shards"
    if scored < whole and case.hp.max_val_tokens <= 0:
        return False, f"{scored:,} of {whole:,} targets are scored"
    text, _ = cut_text(case)
    started = time.perf_counter()
    holds, measured = find_gaps(case, text)
    needed = (time.perf_counter() - started) * scored / (len(text) - 1)
    print(f"targets: a scoring of the whole split, about {needed / 60:.1f} min", flush=True)
    if not holds:
        return False, f"short text: {measured}"
    if needed >= case.seconds_left():
        raise NotTested(f"scoring the split takes about {needed / 60:.1f} min; use --minutes")
    holds, measured = find_gaps(case, tokens)
    if holds and scored < whole:
        raise NotTested(f"MAX_VAL_TOKENS={case.hp.max_val_tokens} of {whole:,}: {measured}")
    return holds, f"{measured}; the split has {whole:,} and a tail of {len(split) - 1 - whole:,}"


def check_bytes(case: Case) -> Finding:
    """Decode the scored tokens, document by document, and compare the bytes with the score's."""
    tokens, sp = case.validation.tokens.numpy(), case.tokenizer
    kinds = (sp.is_control, sp.is_unknown, sp.is_unused)
    has_no_text = np.array([any(kind(i) for kind in kinds) for i in range(sp.vocab_size())])
    is_byte = np.array([sp.is_byte(i) for i in range(sp.vocab_size())])
    num_bytes = -len(case.text(tokens[:1]).encode())  # is not a target
    for document in np.split(tokens, np.flatnonzero(has_no_text[tokens])):
        document = document[has_no_text[document[:1]].sum() :]
        others = np.flatnonzero(~is_byte[document])
        end = int(others[-1]) + 1 if len(others) else 0  # a cut may have parted a character
        num_bytes += len(case.text(document[:end]).encode()) + len(document) - end
        if case.seconds_left() < 0:
            raise NotTested("decoding the split takes longer; use --minutes")
    own = round((len(tokens) - 1) / math.log(2) / case.validation.bits_per_byte(1.0))
    measured = f"{num_bytes:,} in the decoded text, {own:,} in the score"
    return own == num_bytes, measured


def check_leaks(case: Case) -> Finding:
    """Look for validation documents in the train shards."""
    val, train = (sorted(map(Path, glob.glob(case.hp.files(s)))) for s in ("val", "train"))
    if not train:
        raise NotTested(f"{case.hp.data_path} has no train shards")

    def in_time() -> Iterator[Path]:
        for i, path in enumerate(train):
            if case.seconds_left() < 0:
                raise NotTested(f"{i} of {len(train)} train shards were in time; use --minutes")
            yield path

    all, repeated, in_a_row = check_dataset.find_leaks(val, in_time(), case.tokenizer.bos_id())
    measured = (
        f"{repeated} of {all} documents ({repeated / all:.2%}) are in {len(train)} train shards"
    )
    return in_a_row == 0, f"{measured}, {in_a_row} of them in a row"


def check_limits(case: Case) -> Finding:
    """Compare the run's size with the challenge's limit and, on eight GPUs, its times."""
    path = case.path.with_name("final_result.json")
    result = json.loads(path.read_bytes()) if path.is_file() else {}
    if "bytes_total" not in result:
        raise NotTested(f"{path} is missing, or of a run without a score")
    log = path.parent / "logs" / f"{result['knobs']['run_id']}.txt"
    text = log.read_text(errors="replace") if log.is_file() else ""
    calibration = sum(map(int, re.findall(r"^gptq_time:(\d+)ms", text, re.M)[-1:]))
    trained = result["train_ms"] + calibration
    last_step = result["train_ms"] / max(result["steps"], 1)  # begins before the limit
    in_time = trained <= 600_000 + last_step and result["eval_ms"] <= 600_000
    is_judged = torch.cuda.is_available() and torch.cuda.device_count() >= 8
    measured = (
        f"{result['bytes_total']:,} of 16,000,000 bytes; training and calibration "
        f"{trained / 1000:.0f} s, scoring {result['eval_ms'] / 1000:.0f} s, each of 600"
    )
    fits = result["bytes_total"] <= 16_000_000
    note = "" if is_judged else " (times are not judged without eight GPUs)"
    return fits and (in_time or not is_judged), measured + note


RULES = {
    "a decoding order exists": check_order,
    "probabilities sum to 1": check_sums,
    "every target counts once": check_targets,
    "bytes are those of the text": check_bytes,
    "nothing leaked": check_leaks,
    "limits": check_limits,
}


def judge(case: Case) -> dict[str, tuple[str, str]]:
    """For each rule, holds, broken or not tested, and what was measured."""
    findings = {}
    for rule, check in RULES.items():
        try:
            holds, measured = check(case)
            findings[rule] = ("holds" if holds else "broken", measured)
        except NotTested as reason:
            findings[rule] = ("not tested", str(reason))
    return findings


def open_case(args: argparse.Namespace) -> Case:
    """Load the script, its validation split and the model."""
    script, deadline = load_script(args.script), time.perf_counter() + 60 * args.minutes
    knobs = saved_knobs(args.model)
    environ = {k: v for k, v in os.environ.items() if k not in ("RESUME", "EVAL_ONLY")}
    hp = script.Hyperparameters.from_env({**knobs, "COMPILE": "0", **environ})
    if unknown := unknown_knobs(script, knobs):
        print(f"WARNING: the script lacks the run's knobs {unknown}: apply its recipes")
    runtime = script.open_runtime(hp)
    validation = script.Validation(hp)
    gpt = script.GPT(hp, runtime.dtype).to(runtime.device)
    script.load_weights(gpt, args.model.read_bytes(), str(args.model))
    sizes = {"tokens": args.tokens, "places": args.places, "deadline": deadline}
    return Case(script, gpt, validation, runtime, args.model, **sizes)


def show(findings: dict[str, tuple[str, str]]) -> int:
    """Print the table. Returns the exit code."""
    print()
    for rule, (verdict, measured) in findings.items():
        first, *rest = textwrap.wrap(measured, 70)
        print(f"{rule:28} {verdict:11} {first}", *(f"{'':40} {line}" for line in rest), sep="\n")
    verdicts = [verdict for verdict, _ in findings.values()]
    counts = ", ".join(
        f"{verdicts.count(name)} {name}" for name in ("holds", "broken", "not tested")
    )
    print(f"\n{counts}")
    return int("broken" in verdicts)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("model", type=Path, help="artifact, final_model.pt or checkpoint")
    parser.add_argument("--script", type=Path, default=SCRIPT, help="trained the model")
    parser.add_argument("--tokens", type=int, default=0, help="of the short text")
    parser.add_argument("--places", type=int, default=32, help="places to change: 32")
    parser.add_argument("--minutes", type=float, default=10, help="time for all: 10")
    args = parser.parse_args(arguments)
    for path in (args.model, args.script):
        if not path.is_file():
            parser.error(f"{str(path)!r} is not a file")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("start one process, without torchrun")
    try:
        return show(judge(open_case(args)))
    except SystemExit as error:
        print(error, file=sys.stderr)
    except Exception as error:
        if type(error).__name__ != "InputError":
            traceback.print_exc()
        else:
            print(f"referee.py: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
