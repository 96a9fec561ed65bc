"""Read the logs of runs: those of train_gpt.py, of the challenge's baseline and of records."""

import ast
import math
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

# A log file begins with the script's source, which ends with these two lines. The first line that a
# run prints is the path of its log. The log of the last start follows the last of these lines.
START_LINE = r"^(?:={100}\nRunning Python .*|(?:\S.*/)?logs/[^/\n]+\.txt)$"
NUMBER = r"-?(?:\d+(?:\.\d+)?|nan|inf)"
STEP_LINE = (  # two processes that write into one log may mangle it: then it does not match
    r"^step:(?!.*step:)(?P<steps>\d+)/\d+ (?P<kind>train|val)_loss:(?P<loss>" + NUMBER + ") "
    r"(?:val_bpb:(?P<bpb>" + NUMBER + r") |(?!val_bpb))"
    r".*train_time:\d+ms step_avg:(?P<ms_per_step>" + NUMBER + ")ms"
)
FACT_LINES = (
    STEP_LINE,
    r"^val_bpb:enabled .*tokenizer_path=(?:.*/)?(?P<tokenizer>.+)",
    r"^train_loader:(?P<data>.*)",
    r"^val_loader:.* (?P<validation>tokens:(?P<val_tokens>\d+))",
    r"^(?P<batch>train_batch_tokens:\d+ train_seq_len:(?P<seq_len>\d+)) "
    r"(?P<length>iterations:\d+) .*max_wallclock_seconds:(?P<time_limit>\S+)",
    r"^seed:(?P<seed>\d+)$",
    r"^peak memory allocated: (?P<memory_mib>\d+) MiB",
    r"^Serialized model \S+: (?P<artifact_bytes>\d+) bytes",
    r"^Total submission size \S+: (?P<total_bytes>\d+) bytes",
    r"^(?:\S+ val_loss:.* stride:(?P<stride>\d+).*\n)?"  # a line with four digits comes first
    r"(?P<score>\S+) val_loss:(?P<val_loss>\d+\.\d{8}) val_bpb:(?P<val_bpb>\d+\.\d{8})( .*)?$",
)
HEADER = b"\n" + 100 * b"=" + b"\nRunning Python "  # follows a script in a log
# The size of that script. A header of an older version lacks it; a run that ended has the second.
SCRIPT_BYTES = re.compile(rb"(?m)^(?:script_bytes:|Code size: )(\d+)")
# A script's first line, which few log lines can be: a comment, import, docstring, byte order mark.
FIRST = rb"(?:\xef\xbb\xbf|#|(?:import|from)\s|[rRuU]?[\"'])"
SCRIPT_START = re.compile(rb"(?m)^" + FIRST)
AFTER_LOG_LINE = re.compile(rb"(?m)^(?:\w+:\S|\w+ val_loss:|stopped: ).*\n(?=" + FIRST + rb")")
OWN_SCORES = ("final_int8_zlib_roundtrip_exact", "score_exact")  # this project's


@dataclass
class Run:
    """A run, as far as its log shows it."""

    path: Path
    facts: dict[str, str | None] = field(default_factory=dict)
    train: dict[int, float] = field(default_factory=dict)  # loss in nats per token, by step
    val: dict[int, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)  # facts that are numbers
    unfinished: str = ""  # the last line of a log without a final line
    bpb_per_nat: float = math.nan  # bits per byte of a loss of 1 nat per token; nan: unknown


def read_run(path: Path) -> Run:
    """Read the last start in a log. Raises OSError if the file is not a log."""
    run = Run(path)
    text = path.read_text(encoding="utf-8", errors="replace")
    *earlier, log = re.split(START_LINE, text, flags=re.M)
    # Scripts of the challenge list their knobs, perhaps before their source.
    for seed in re.findall(r"^  seed: (\d+)$", text, re.M):
        run.facts["seed"] = seed
    for pattern in FACT_LINES:
        for match in re.finditer(pattern, log, re.M):
            run.facts |= match.groupdict()
            if pattern == STEP_LINE:
                losses = run.train if match["kind"] == "train" else run.val
                losses[int(match["steps"])] = float(match["loss"])
                if match["bpb"] and float(match["loss"]) > 0:
                    run.bpb_per_nat = float(match["bpb"]) / float(match["loss"])
    if text.strip() and not earlier and not run.facts:
        raise OSError(f"{path} is not the log of a run")
    if run.facts.get("score") in OWN_SCORES:  # without a stride, windows are side by side
        run.facts["stride"] = run.facts["stride"] or "none"
    for name, text in run.facts.items():
        with suppress(TypeError, ValueError):
            run.figures[name] = float(text)
    if "val_loss" not in run.figures:
        run.unfinished = repr(log.rstrip().split("\n")[-1][:500])
    elif run.figures["val_loss"] > 0:  # with more digits than in a step's line
        run.bpb_per_nat = run.figures["val_bpb"] / run.figures["val_loss"]
    return run


def list_texts(runs: list[Run]) -> str:
    """Return the smallest and the largest size of the runs' validation texts, or "" if they may be
    one text."""
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
    if path.suffix == ".py":
        return path.read_bytes()
    data = path.read_bytes()
    if HEADER not in data:  # another program may have changed the line ends
        data = data.replace(b"\r\n", b"\n")
    # The last header ends the script.
    before, _, log = data.rpartition(HEADER)
    if not before.strip():
        raise ValueError(f"{path} has no script: name a script, or the logs/RUN_ID.txt of a run")
    begins = [max(len(before) - int(found[1]), 0) for found in [SCRIPT_BYTES.search(log)] if found]
    begins = [begin for begin in begins if before[:begin][-1:] in (b"", b"\n")]
    # Without the size nothing marks the beginning: the file's first script begins the file, and a
    # later one follows the log lines after the header before it. But that header may be text in the
    # script: then what follows it does not parse. A log line may look like a script's first line.
    for header in reversed([*re.finditer(re.escape(HEADER), before)]):
        if match := SCRIPT_START.search(before, header.end()):
            begins.append(match.start())
        begins += [match.end() for match in AFTER_LOG_LINE.finditer(before, header.end())]
    errors = []
    for begin in [*begins, 0]:
        script = before[begin:]
        try:
            ast.parse(script, "script")
            return script
        except (SyntaxError, ValueError) as error:
            errors.append(error)
    raise ValueError(f"{path} has a script with a syntax error: {errors[0]}: use its run's Python")
