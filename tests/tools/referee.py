"""Check whether a score is fair: a decoder that has only the artifact could restore the text from a
file of the size the score implies. Exit code 0: no rule is broken; 1: one is; 2: it could not run;
3: no rule is broken, but the first two, without which a score means nothing, were not both tested.

    python tests/tools/referee.py final_model.int8.ptz
    python tests/tools/referee.py final_model.int8.ptz --script edited.py --tokens 4096 --minutes 60

Knobs come from the environment, else from the run that wrote the file, as in score.py."""

import copy
import glob
import itertools
import math
import os
import random
import sys
import textwrap
import time
import zlib
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for python -P

import begin  # noqa: F401  (first: it says what to install)
import numpy as np
import torch
import trained
from score import open_split
from sentencepiece import SentencePieceProcessor

Finding = tuple[bool, str]  # whether the rule holds, and what was measured
LENGTHS = (1, 6, 2, 4, 3, 5)  # relative lengths of documents
PASSAGE = 24  # first tokens that three documents share, so that hints from one to another act
NO_BOS = "the split has no BOS, with which documents begin: build the shards again"
MAX_NOISE = 0.01  # nats between equal scorings
SIZE_LIMIT = 16_000_000  # bytes of artifact and script, the challenge's


class NotTested(Exception):
    """The reason why a rule was not tested."""


@dataclass
class Case:
    """A model, what scoring it needs, and the limits of the tests."""

    script: ModuleType
    gpt: torch.nn.Module
    validation: Any  # the script's own class
    runtime: Any
    path: Path  # the model file
    num_tokens: int = 0  # tokens of the short text; 0: as many as the knobs need
    num_places: int = 32
    deadline: float = math.inf  # on the clock of time.perf_counter()
    seconds_per_token: float = 0.0  # of the last scoring

    def __post_init__(self) -> None:
        self.hp = self.validation.hp
        self.model = self.script.wrap(self.gpt, self.runtime.compiled)
        self.weights = copy.deepcopy(self.gpt.state_dict())
        self.tokenizer = SentencePieceProcessor(model_file=self.hp.tokenizer_path)
        self.bos = self.tokenizer.bos_id()
        self.paths = {s: sorted(map(Path, glob.glob(self.hp.files(s)))) for s in ("val", "train")}
        self.split = np.concatenate([np.fromfile(p, "<u2", offset=1024) for p in self.paths["val"]])
        self.words = self.split[self.split != self.bos]

    def score(self, tokens: np.ndarray, hp: Any = None) -> torch.Tensor:
        """Losses of tokens[1:], computed as after training. hp: other knobs."""
        self.gpt.load_state_dict(self.weights)  # scoring may train the model itself
        torch.manual_seed(0)
        validation = copy.copy(self.validation)
        validation.tokens, validation.hp = torch.from_numpy(tokens), hp or self.hp
        started = time.perf_counter()
        losses = self.script.final_losses(self.model, validation, self.runtime).float().cpu()
        self.seconds_per_token = (time.perf_counter() - started) / len(tokens)
        return losses

    def score_all(self, texts: list[np.ndarray], hp: Any = None) -> Iterator[torch.Tensor]:
        """Score texts of one length. Raises NotTested if the time does not suffice."""
        name = f"{len(texts)} scorings of {len(texts[0]) - 1:,} tokens"
        for i, text in enumerate(texts):
            self.check_time(name, (len(texts) - 1) * len(text) if i == 1 else 0)
            losses = self.score(text, hp)
            if len(losses) != len(text) - 1:
                raise NotTested(f"{len(losses)} losses for {len(text) - 1} targets")
            yield losses

    def check_time(self, work: str, num_tokens: int = 0) -> None:
        """Print how long it takes to score so many tokens. Raises NotTested if that is too long."""
        seconds = num_tokens * self.seconds_per_token
        if seconds > 0:
            work += f": about {seconds:.0f} s"
            print(work, flush=True)
        if time.perf_counter() + seconds >= self.deadline:
            raise NotTested(f"no time for {work}: raise --minutes, or lower --tokens")

    def change(self, tokens: np.ndarray, places: Any) -> np.ndarray:
        """Copy tokens, with different ones at these places. Each BOS stays, and none is added."""
        changed = tokens.copy()
        changed[places] = (tokens[places] + 1) % self.hp.vocab_size
        return changed + (changed == self.bos) * (tokens != self.bos)

    def name_place(self, tokens: np.ndarray, place: int) -> str:
        words = trained.decode(self.tokenizer, tokens[max(place - 3, 0) : place + 1].tolist())
        return f"place {place} ({words!r})"

    def knobs_with(self, word: str) -> list[int]:
        """The values of the knobs in use that have this word in their name."""
        knobs = asdict(self.hp)
        switches = {"lora": "lora_rank", "lora_phase": "lora_phases"}
        off = tuple(prefix for prefix, knob in switches.items() if not knobs.get(knob, 0) > 0)
        used = [v for name, v in knobs.items() if word in name and not name.startswith(off)]
        return [v for v in used if type(v) is int and v > 0]


# ---- No look-ahead -------------------------------------------------------------------------------
def short_text(case: Case) -> tuple[np.ndarray, list[int], str]:
    """Cut the split's text into new documents, short and long ones, with several windows, chunks
    and phases. Returns the tokens, the places of BOS, and a note if --tokens is too small."""
    T, chunks = case.hp.train_seq_len, case.knobs_with("chunk")
    count = 3 * max([2, *case.knobs_with("documents")])
    wanted = max(3 * max([case.hp.batch_slots * T, *chunks]), 2 * count * min([T, *chunks]))
    size = math.ceil(max(case.num_tokens or wanted, 16) / T) * T
    note = f" (less than {wanted:,}, which its knobs need)" if size < wanted else ""
    count = max(min(count, size // 16), 3)
    text = np.resize(case.words, size + 1)  # repeats what is too short
    ends = np.cumsum(np.resize(LENGTHS, count))
    starts = [0, *(ends[:-1] * size // ends[-1]).tolist()]
    for start in starts[:3]:
        length = min(PASSAGE, starts[1] - 2)
        text[start + 1 : start + 1 + length] = text[1 : 1 + length]
    text[starts] = case.bos
    return text, starts, note


def choose_places(case: Case, text: np.ndarray, starts: list[int], count: int) -> list[int]:
    """Choose neighbors in the common passage and around bounds of documents, windows and chunks."""
    lengths = (0, case.hp.train_seq_len, *case.knobs_with("chunk"))
    bounds = [start + n for start in starts for n in lengths]
    random.Random(0).shuffle(bounds)
    last = min(PASSAGE, starts[1] - 2)  # token of the passage
    near = [start + last - i for start in starts[:3] for i in (1, 0)]
    near += [bound + i for bound in bounds for i in (-2, -1, 0, 1)]
    places = dict.fromkeys(i for i in near if 0 < i < len(text) and text[i] != case.bos)
    return sorted([*places][:count])


def replace_rests(case: Case, text: np.ndarray, count: int) -> tuple[list[slice], list[np.ndarray]]:
    """Replace all tokens between a place and the end of its document: by other text, by a copy of
    the document up to the place, and by copies of the place's token, which a look ahead finds at
    any distance. Returns the losses that must stay, those of the document up to the place."""
    inner = np.flatnonzero((text[:-1] != case.bos) & (text[1:] != case.bos)).tolist()
    bounds = [*np.flatnonzero(text == case.bos), len(text)]
    other, spans, texts = np.resize(case.words[::-1], len(text)), [], []
    for place in random.Random(0).sample(inner, min(count, len(inner))):
        document = np.searchsorted(bounds, place)
        start, rest = bounds[document - 1], slice(place + 1, bounds[document])
        for source in (other[rest], text[start + 1 : rest.start], text[place : rest.start]):
            spans.append(slice(start, place))
            texts.append(text.copy())
            texts[-1][rest] = np.resize(source, rest.stop - rest.start)
    return spans, texts


def check_order(case: Case) -> Finding:
    """Replace what follows in a document: its losses must stay, others may be decoded later. Then
    change one token at a time: a loss elsewhere that changes with it must be decoded later."""
    text, starts, note = short_text(case)
    scorings = torch.stack([*case.score_all(3 * [text])])
    losses, noise = scorings[0], (scorings.amax(0) - scorings.amin(0)).max().item()
    if not noise <= MAX_NOISE:  # also true for nan
        raise NotTested(f"equal scorings differ by {noise:.2g} nats: set DEVICE=cpu or DTYPE=fp32")
    tolerance = max(4 * noise, 1e-5)
    # A place takes four scorings. Half of the time is for the other rules.
    fitting = (case.deadline - time.perf_counter()) / (8 * len(text) * case.seconds_per_token)
    num_places = max(int(min(case.num_places, fitting)), 8)
    spans, texts = replace_rests(case, text, num_places)
    for span, others in zip(spans, case.score_all(texts), strict=True):
        changes = (others - losses)[span].abs()
        if not (changes <= tolerance).all():
            target = case.name_place(text, span.start + 1 + int(changes.argmax()))
            needs = f"to decode {target} you need what follows place {span.stop} in its document"
            return False, f"{needs}: the loss changes by {changes.max():.2g} nats"
    places = choose_places(case, text, starts, num_places)
    columns = torch.tensor(places) - 1
    scorings = case.score_all([case.change(text, [place]) for place in places])
    changes = torch.stack([(others - losses)[columns].abs() > 4 * noise for others in scorings])
    changes.fill_diagonal_(False)
    measured = (
        f"{len(text) - 1:,} tokens{note}: what follows {len(spans) // 3} places in "
        f"{len({span.start for span in spans})} documents, replaced, changes no loss up to them "
        f"(by more than {tolerance:.2g} nats); {len(places)} tokens changed one at a time: "
        f"{int(changes.sum())} losses depend on another one (by more than {4 * noise:.2g} nats)"
    )
    # Maps each place to those that must be decoded before it.
    rows = zip(places, changes.T.tolist(), strict=True)
    order = TopologicalSorter({place: [*itertools.compress(places, row)] for place, row in rows})
    try:
        order.prepare()
    except CycleError as error:
        last, *others = reversed(error.args[1])  # each place is needed by the one after it
        needs = "".join(f", and for {i} you need {j}" for i, j in itertools.pairwise(others))
        cycle = f"to decode {case.name_place(text, last)} you need place {others[0]}{needs}"
        return False, f"{measured}, in a cycle: {cycle}"
    few = "a look into the next document is seen at few distances only"
    return True, f"{measured}, none in a cycle; {few}; the bounds of documents count as known"


# ---- The other rules -----------------------------------------------------------------------------
def check_sums(case: Case) -> Finding:
    """Sum all tokens' probabilities at one place of a text that repeats, so that hints act."""
    size = min(case.hp.train_seq_len, 64)  # one short window
    hp = replace(case.hp, train_seq_len=size, eval_stride=0)
    text = np.resize(case.words[: size // 2], size + 1)
    text[1:], text[0] = text[:-1].copy(), case.bos
    place = size * 3 // 4
    texts = np.tile(text, (hp.vocab_size, 1))
    texts[:, place] = range(hp.vocab_size)
    total = sum(math.exp(-losses[place - 1]) for losses in case.score_all([*texts], hp))
    # In bf16 the sum may be off by 1/512 of the losses' mean, which may be 5 nats.
    tolerance = 1e-4 if case.runtime.dtype == torch.float32 else 1e-2
    measured = f"{total:.6f} over {len(texts):,} tokens at place {place} of {size}"
    return abs(total - 1) <= tolerance, f"{measured} (tolerance {tolerance:g})"


def check_targets(case: Case) -> Finding:
    """Count the losses of the short text and, if there is time, of the whole split. One that is 0,
    and stays so for another target, is missing."""
    tokens, T = case.validation.tokens.numpy(), case.hp.train_seq_len
    num_targets, whole = len(tokens) - 1, (len(case.split) - 1) // T * T  # without the tail
    if problem := trained.compare_with_manifest(case.hp):
        return False, problem
    if not np.array_equal(tokens, case.split[: len(tokens)]):
        return False, "the scored tokens are not those of the shards"
    if num_targets < whole and case.hp.max_val_tokens <= 0:
        return False, f"only {num_targets:,} of {whole:,} targets are scored"
    for text, size in ((short_text(case)[0], 0), (tokens, len(tokens))):
        case.check_time(f"{len(text) - 1:,} targets", size)
        losses = case.score(text)
        if len(losses) != len(text) - 1:
            return False, f"{len(losses):,} losses for {len(text) - 1:,} targets"
        gaps = (losses == 0).numpy()
        if gaps.any():
            places = np.flatnonzero(gaps & (text[1:] != case.bos)) + 1
            gaps &= (case.score(case.change(text, places)) == 0).numpy()
        mean = losses.mean(dtype=torch.float64).item()
        own = case.script.mean_loss(losses, case.runtime)
        measured = f"{len(losses):,} losses, {gaps.sum()} of them missing, mean {mean:.4f}"
        if gaps.any() or abs(own - mean) > 1e-6 * abs(mean):
            return False, f"{measured}, by mean_loss {own:.4f}"
    if num_targets < whole:
        raise NotTested(f"MAX_VAL_TOKENS leaves out some of {whole:,} targets: {measured}")
    tail = len(case.split) - 1 - whole
    return True, f"{measured}; the split has {whole:,} targets and a tail of {tail}"


def check_bytes(case: Case) -> Finding:
    """Decode the scored tokens, one document at a time, and compare the bytes with the score's. As
    in the challenge, a space at the start of a document does not count."""
    if case.bos not in case.split:
        raise NotTested(NO_BOS)
    if not case.validation.is_tokenizer_right:
        return False, "documents do not survive decoding and encoding: set TOKENIZER_PATH to theirs"
    tokens, sp = case.validation.tokens.numpy(), case.tokenizer
    ids = range(sp.vocab_size())
    is_special = np.array([sp.is_control(i) or sp.is_unknown(i) or sp.is_unused(i) for i in ids])
    is_byte = np.array([sp.is_byte(i) for i in ids])
    # After a piece SentencePiece keeps a space that it may drop at the start.
    piece = int(np.flatnonzero(~is_special & ~is_byte)[0])
    size = len(trained.decode(sp, [piece]).encode())
    count = -len(trained.decode(sp, tokens[:1].tolist()).removeprefix(" ").encode())  # not scored
    for document in np.split(tokens, np.flatnonzero(is_special[tokens])):
        case.check_time("the bytes of all documents")
        document = document[~is_special[document]]
        last = np.flatnonzero(~is_byte[document])[-1:]
        end = int(last.sum()) + len(last)  # the split may end within a character
        tail = bytes(int(sp.id_to_piece(i)[1:-1], 16) for i in document[end:].tolist())  # <0x0A>
        text = trained.decode(sp, [piece, *document[:end].tolist()]).encode()[size:]
        count += len((text + tail.replace("\u2581".encode(), b" ")).removeprefix(b" "))
    own = round((len(tokens) - 1) / math.log(2) / case.validation.bits_per_byte(1.0))
    # To know where documents end, a decoder needs their lengths, none above the longest.
    starts = np.flatnonzero(tokens == case.bos)
    longest = np.diff(starts, prepend=0, append=len(tokens)).max()
    most = len(starts) * math.log2(longest) / own
    bounds = f"the bounds of {len(starts):,} documents, taken as known, cost at most {most:.4f} BPB"
    return own == count, f"{count:,} in the decoded text, {own:,} in the score; {bounds}"


def check_leaks(case: Case) -> Finding:
    """Look for validation documents in the train shards."""
    import check_dataset  # trained adds its folder to sys.path

    if case.bos not in case.split:
        raise NotTested(NO_BOS)
    val, train = case.paths["val"], case.paths["train"]
    if not train:
        raise NotTested(f"{case.hp.data_path} has no train shards")

    def in_time(path: Path) -> Path:
        case.check_time(f"{len(train)} train shards")
        return path

    try:
        all, repeated, leaked = check_dataset.find_leaks(val, map(in_time, train), case.bos)
    except OSError as error:  # a link to a file that is gone
        raise NotTested(f"{error.filename} cannot be read: {error.strerror}") from None
    found = f"{repeated} of {all} documents ({repeated / all:.2%})"
    return leaked == 0, f"{found} are in {len(train)} train shards, {leaked} of them are a leak"


def check_limits(case: Case) -> Finding:
    """Add up the bytes of artifact and script. With eight GPUs, judge the run's times, too."""
    if case.path.read_bytes()[:2] == b"PK":  # as files of torch.save begin
        raise NotTested("only an artifact has a limit: name final_model.int8.ptz")
    result, code = trained.saved_facts(case.path), trained.read_script(Path(case.script.__file__))
    total, crc = case.path.stat().st_size + len(code), zlib.crc32(code)
    measured = f"{total:,} of {SIZE_LIMIT:,} bytes, {len(code):,} of them the script"
    if result.get("input_crc32", {}).get("script", crc) != crc:
        measured += ", which is not the run's"
    if "eval_ms" not in result:
        return total <= SIZE_LIMIT, f"{measured}; final_result.json is missing or has no times"
    train_ms = result["train_ms"] + result.get("gptq_ms", 0)  # calibration is training
    last_step = result["train_ms"] / max(result["steps"], 1)  # begins before the limit
    in_time = train_ms <= 600_000 + last_step and result["eval_ms"] <= 600_000
    is_judged = torch.cuda.device_count() >= 8
    times = f"trained {train_ms / 1000:.0f} s, scored {result['eval_ms'] / 1000:.0f} s"
    note = "of 600 each" if is_judged else "not judged without eight GPUs"
    measured += f"; {times}, as the run wrote them ({note})"
    return total <= SIZE_LIMIT and (in_time or not is_judged), measured


RULES = {
    "no look-ahead": check_order,
    "probabilities sum to 1": check_sums,
    "every target counts once": check_targets,
    "bytes are those of the text": check_bytes,
    "nothing leaked": check_leaks,
    "limits": check_limits,
}
DECIDING_RULES = [*RULES][:2]  # they forbid to look ahead


def judge(case: Case) -> dict[str, tuple[str, str]]:
    """Check each rule. Returns the verdicts and the measurements."""
    findings = {}
    for rule, check in RULES.items():
        try:
            holds, measured = check(case)
            findings[rule] = ("holds" if holds else "broken", measured)
        except NotTested as reason:
            findings[rule] = ("not tested", str(reason))
    return findings


def run(args: Namespace) -> int:
    """Judge a model and print the table. Returns the exit code."""
    deadline, script = time.perf_counter() + 60 * args.minutes, trained.load_script(args.script)
    gpt, runtime = trained.open_model(script, args.model, {"COMPILE": "0"})
    split = open_split(script, gpt, runtime)
    warnings = [line for line in runtime.log.waiting if "WARNING" in line]
    print("\n".join(warnings), end="\n" * bool(warnings))
    case = Case(script, gpt, split, runtime, args.model, args.tokens, args.places, deadline)
    case.score(case.split[: case.hp.train_seq_len + 1])  # the first scoring is slower
    findings = judge(case)
    print("", *warnings, sep="\n")  # again, since a reader may see only the end
    for rule, (verdict, measured) in findings.items():
        line = f"{rule:28} {verdict:11} {measured}"
        print(textwrap.fill(line, 111, subsequent_indent=41 * " "))
    untested = [rule for rule, (verdict, _) in findings.items() if verdict == "not tested"]
    if untested:
        print(f"\nnot tested: {', '.join(untested)}")
    if any(verdict == "broken" for verdict, _ in findings.values()):
        return 1
    return 3 if {*untested} & {*DECIDING_RULES} else 0


def main(arguments: list[str] | None = None) -> int:
    parser = trained.model_parser(__doc__)
    add, number = parser.add_argument, trained.files.number
    add("--tokens", type=number(int, 0, 10**9), default=0, help="of the short text")
    add("--places", type=number(int, 1), default=32, help="in it that change, 8 or more (32)")
    add("--minutes", type=number(float, 0), default=10, help="for all rules together (10)")
    args = parser.parse_args(arguments)
    if "RANK" in os.environ:
        parser.error("start it without torchrun: it is one process")
    try:
        return run(args)
    except SystemExit as error:
        print(error, file=sys.stderr)
    except Exception as error:
        if type(error).__name__ == "InputError":
            error.__traceback__ = None  # the message is enough
        sys.excepthook(type(error), error, error.__traceback__)
    return 2


if __name__ == "__main__":
    sys.exit(main())
