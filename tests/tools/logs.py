"""Read the logs of runs: those of train_gpt.py, of the challenge's baseline and of records."""

import ast
import math
import re
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

HEADER = b"\n" + 100 * b"=" + b"\nRunning Python "  # follows a script in a log
SCRIPT_BYTES = re.compile(rb"(?m)^script_bytes:(\d+)$")  # in a header; older versions lack it
# What torchrun --tee, srun --label, a terminal or a clock puts before a line.
PREFIX = re.compile(
    r"(?m)^(?:\[[^]\n]*\](?:<\w+>)?:? ?|\d+: |\x1b\[[\d;?]*[A-Za-z]|\d{9,}\.\d+ "
    r"|\d{4}-\d\d-\d\d[T ]\d\S* )+"
)
NUMBER = r"-?(?:\d+(?:\.\d+)?|nan|inf)"
# Two processes that write into one log may mangle a line: then it does not match.
STEP = re.compile(
    r"(?:step:(?=.* train_time:\d+ms))?(?P<steps>\d+)/\d+ (?P<kind>train|val)_loss: ?"
    rf"(?P<loss>{NUMBER})(?: val_bpb: ?(?P<bpb>{NUMBER}))?(?= |$)(?!.*(?:step:|_loss:|val_bpb))"
    rf"(?:.*step_avg:(?P<ms_per_step>{NUMBER})ms)?"
)
FACTS = re.compile(
    r"val_bpb:enabled .*tokenizer_path=(?:.*/)?(?P<tokenizer>.+)"
    r"|train_loader:(?P<data>.*)"
    r"|val_loader:.* (?P<validation>tokens:(?P<val_tokens>\d+))"
    r"|(?P<batch>train_batch_tokens:\d+ train_seq_len:(?P<seq_len>\d+)) "
    r"(?P<length>iterations:\d+) .*max_wallclock_seconds:(?P<time_limit>\S+)"
    r"|seed:(?P<seed>\d+)$"
    r"|input_crc32 val_tokens:(?P<val_crc>\d+) tokenizer:(?P<tokenizer_crc>\d+)$"
    r"|resume:.* step:(?P<resumed>\d+) "
    r"|score:(?P<model>.*)"  # of score.py
    r"|peak memory allocated: (?P<peak_memory_mib>\d+) MiB"
    r"|Serialized model \S+: (?P<artifact_bytes>\d+) bytes"
    r"|Total submission size \S+: (?P<bytes_total>\d+) bytes"
)
NO_SCORE = re.compile(r"\s|step:|.*(?:\d/\d+ \w+_loss|step_avg:|diagnostic|pre-quant)", re.I)
VALUE = r"\b{}\b[\"']?\s*[:=]?\s*(" + NUMBER + r")(?!\w|\.\d)"
MARKS = {"stride": r"\bstride[:=](\d+)", "part": r"\btokens:(\d+ of \d+)"}  # of a score
OWN_SCORES = ("final_int8_zlib_roundtrip_exact", "score_exact")  # this project's


@dataclass
class Run:
    """A run, as far as its log shows it. Figures have the names of final_result.json."""

    path: Path
    facts: dict[str, str] = field(default_factory=dict)
    train: dict[int, float] = field(default_factory=dict)  # loss in nats per token, by step
    val: dict[int, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)  # facts that are numbers
    unfinished: str = ""  # why the run has no score
    bpb_per_nat: float = math.nan  # bits per byte of a loss of 1 nat per token; nan: unknown
    last_score: str = ""  # the line
    crc32: int = 0  # of the log
    earlier: int = 0  # starts before it in the log that it does not continue

    def rounding(self, figure: str) -> float:
        """Half a unit of the last digit that the log has of this figure."""
        return 0.5 * 10.0 ** -len(self.facts[figure].partition(".")[2])

    def add_step(self, step: re.Match) -> None:
        losses = self.train if step["kind"] == "train" else self.val
        loss = losses[int(step["steps"])] = float(step["loss"])
        self.facts |= {k: step[k] for k in ("steps", "ms_per_step") if step[k]}
        if step["bpb"] and loss > 0:
            self.bpb_per_nat = float(step["bpb"]) / loss

    def add_score(self, line: str) -> None:
        """Take the score of a line that has val_loss and val_bpb, in place of an earlier one."""
        found = {name: re.findall(VALUE.format(name), line) for name in ("val_loss", "val_bpb")}
        if not any(found.values()) or not all(re.search(rf"\b{name}\b", line) for name in found):
            return
        older, name = self.facts.get("val_loss"), re.split(r"\bval_(?:loss|bpb)\b", line)[0]
        self.facts |= {k: values[0] if len(values) == 1 else "" for k, values in found.items()}
        self.facts |= {"score": " ".join(re.sub(r"stride[:=]\d+", "", name).split())}
        # A line with four digits comes first, and it may be the only one with the marks.
        losses = [float(loss or "nan") for loss in (older, self.facts["val_loss"])]
        is_repeated = math.isclose(*losses, rel_tol=0, abs_tol=6e-5)
        for mark, pattern in MARKS.items():
            if match := re.search(pattern, line):
                self.facts[mark] = match[1]
            elif not is_repeated:
                self.facts.pop(mark, None)
        self.last_score = line

    def finish(self, last_line: str, is_cut: bool) -> None:
        """Read the figures. is_cut: the log may end in the middle of its last line."""
        for name, text in self.facts.items():
            with suppress(ValueError):  # a line may have several scores, or half of one
                self.figures[name] = float(text)
        loss, bpb = (self.figures.get(name) for name in ("val_loss", "val_bpb"))
        is_cut = is_cut and last_line == self.last_score and None not in (loss, bpb)
        if not self.last_score:
            self.unfinished = f"it ends with {last_line[:500]!r}"
        elif is_cut and self.rounding("val_bpb") != self.rounding("val_loss"):
            self.unfinished = f"its last line is cut: {last_line[:500]!r}"
        elif None in (loss, bpb):
            self.unfinished = f"its last score cannot be read: {self.last_score[:500]!r}"
        elif not math.isfinite(loss + bpb):
            self.unfinished = f"its score is not finite: {self.last_score[:500]!r}"
        elif loss > 0:  # with more digits than in a step's line
            self.bpb_per_nat = bpb / loss
        if self.facts.get("score") in OWN_SCORES:  # without a mark, windows are side by side
            self.facts = {"stride": "none", "part": "all"} | self.facts


def split_log(data: bytes) -> tuple[list[bytes], str]:
    """Return the script of each start in a log file, and the lines of all starts."""
    if HEADER not in data:  # another program may have changed the line ends
        data = data.replace(b"\r\n", b"\n")
    first, scripts, logs = data.partition(HEADER)[0], [], []
    while HEADER in data:
        data, _, log = data.rpartition(HEADER)
        # Without a size, all starts have one script, or only the last start is known.
        known = len(first) if data.endswith(first) else len(data)
        size = SCRIPT_BYTES.search(log)
        begin = max(len(data) - (int(size[1]) if size else known), 0)
        scripts.insert(0, data[begin:])
        logs.insert(0, log)
        data = data[:begin]
    lines = b"".join(logs) if logs else data
    return scripts, PREFIX.sub("", lines.decode(errors="replace"))


def read_run(path: Path) -> Run:
    """Read the last run in a log, with all starts that it was resumed in. Starts of score.py count
    if there are no others. Raises OSError if the file is not a log."""
    data = path.read_bytes()
    scripts, text = split_log(data)
    # Scripts of the challenge list their knobs, perhaps before their source.
    seeds = [("seed", seed.decode()) for seed in re.findall(rb"(?m)^  seed: (\d+)$", data)]
    starts, lines = [Run(path)], [line for line in text.splitlines() if line.strip()]
    for line in lines:
        run, found = starts[-1], FACTS.match(line)
        has_begun = run.train or run.val or run.last_score
        if has_begun and found and (found["tokenizer"] or found["seed"]):
            run = Run(path)
            starts.append(run)
        if found:
            run.facts |= {name: text for name, text in found.groupdict().items() if text}
        elif step := STEP.match(line):
            run.add_step(step)
        elif not NO_SCORE.match(line):
            run.add_score(line)
    if lines and not scripts and not (starts[0].facts or starts[0].train or starts[0].val):
        raise OSError(f"{path} is not the log of a run")
    runs: list[Run] = []
    for run in [start for start in starts if "model" not in start.facts] or starts:
        if runs and "resumed" in run.facts:
            older = runs.pop()
            run.train, run.val = older.train | run.train, older.val | run.val
        runs.append(run)
    run.facts, run.earlier, run.crc32 = dict(seeds) | run.facts, len(runs) - 1, zlib.crc32(data)
    run.finish((lines or [""])[-1], is_cut=not text.endswith("\n"))
    return run


def list_checksums(runs: list[Run]) -> str:
    """Return the checksums of the runs' validation tokens, or "" if they are equal for each
    tokenizer. Logs of older versions lack them."""
    known = [run.facts for run in runs if "val_crc" in run.facts]
    found = {(facts["tokenizer_crc"], facts["val_crc"]) for facts in known}
    is_one_text = len(found) == len({tokenizer for tokenizer, _ in found})
    return "" if is_one_text else ", ".join(sorted(crc for _, crc in found))


def list_texts(runs: list[Run]) -> str:
    """Return the checksums of the runs' validation tokens, if they differ with one tokenizer; else
    the smallest and the largest size of the texts; or "" if they may be one text."""
    if checksums := list_checksums(runs):
        return f"checksums {checksums}"
    known = [r for r in runs if "val_tokens" in r.figures and r.bpb_per_nat > 0]
    sizes = [r.figures["val_tokens"] / r.bpb_per_nat / math.log(2) for r in known] or [0.0]
    windows = [r.figures.get("seq_len", 0) / r.bpb_per_nat / math.log(2) for r in known] or [0]
    # A tokenizer leaves out less than a window at the end of the split; that text may be dense.
    if max(sizes) - min(sizes) <= 0.001 * max(sizes) + 2 * max(windows):
        return ""
    return f"{min(sizes):,.0f} to {max(sizes):,.0f} bytes"


def read_script(path: Path) -> bytes:
    """Return the bytes of a script (.py), or of that of the last start in a log. Raises ValueError
    if a log has none, or one that this Python cannot parse."""
    data = path.read_bytes()
    if path.suffix == ".py":
        return data
    script = (split_log(data)[0] or [b""])[-1]
    if not script.strip():
        raise ValueError(f"{path} has no script: name a script, or the logs/RUN_ID.txt of a run")
    try:
        ast.parse(script, "script")
    except (SyntaxError, ValueError) as error:
        problem = f"{path} has a script with a syntax error: {error}"
        raise ValueError(f"{problem}: use its run's Python, or name a script") from None
    return script
