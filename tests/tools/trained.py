"""Shared by the tools: arguments that name files, a script, a model with the knobs of its run."""

import contextlib
import glob
import json
import os
import sys
import tempfile
import zlib
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import begin
import caseops
import files
from files import start_program
from logs import read_script
from sentencepiece import SentencePieceProcessor

SCRIPT = begin.ROOT / "train_gpt.py"
RECORD = begin.ROOT / "tests" / "records" / "train_record.py"
OWN = ("run_id", "output_dir", "resume")  # knobs of a run, not of its model


def existing_file(name: str) -> Path:
    """Convert an argument of the command line to a Path. argparse shows the error."""
    path = files.path(name)
    if not path.is_file():
        problem = "is a folder: name a file in it" if path.is_dir() else "is not a file"
        raise ArgumentTypeError(f"{name!r} {problem}")
    return path


def check_picture(parser: ArgumentParser, picture: Path | None, inputs: Sequence[Path]) -> None:
    """End the program if a picture cannot be written, or would overwrite one of its inputs."""
    if picture is None:
        return
    if picture.suffix not in (".svg", ".png"):
        parser.error(f"--picture {picture} must end in .svg or .png")
    try:
        files.check_outputs(inputs, [picture])
        picture.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=picture.parent).close()  # can a file be written there?
    except (OSError, ValueError) as error:
        parser.error(f"--picture {picture}: name another file: {error}")


def model_parser(doc: str | None) -> ArgumentParser:
    """Return the command line of a tool that opens a model. doc: its docstring; None with -OO."""
    parser = start_program(doc)
    parser.add_argument("model", type=existing_file, help="artifact, final_model.pt or checkpoint")
    script_help = "trained the model: a script, or logs/RUN_ID.txt (default: train_gpt.py)"
    parser.add_argument("--script", type=existing_file, default=SCRIPT, help=script_help)
    return parser


def load_script(path: Path) -> ModuleType:
    """Load a train_gpt.py, edited or not, from any folder, or the one in the log of a run."""
    try:
        source = read_script(path)
    except ValueError as error:
        sys.exit(str(error))
    name = f"script_{zlib.crc32(bytes(path.resolve())):x}"  # several can be loaded
    script = sys.modules[name] = ModuleType(name)
    script.__file__ = os.path.abspath(path)
    exec(compile(source, script.__file__, "exec"), vars(script))
    if not hasattr(script, "InputError"):
        sys.exit(f"{path} is not a train_gpt.py: name the script that trained the model")
    script.InputError.__module__ = "__main__"  # an error then begins with "InputError:"
    return script


def as_text(value: Any) -> str:
    """The text of an environment variable that gives a knob this value."""
    if isinstance(value, list | tuple):
        return ",".join(value)
    return str(int(value) if isinstance(value, bool) else value)


def saved_facts(path: Path) -> dict[str, Any]:
    """Facts of the run that wrote this file: a checkpoint contains its knobs; other files need the
    final_result.json in the same folder. {} if there is none."""
    import torch  # slow, and not all tools need it

    with contextlib.suppress(Exception):  # of any type: an artifact, or a damaged file
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # reads little
        return {"knobs": dict(saved["knobs"])}
    result = path.with_name("final_result.json")
    try:
        facts = json.loads(result.read_bytes()) if result.is_file() else {}
        for name in ("knobs", "crc32", "input_crc32"):
            facts.get(name, {}).items()
    except (AttributeError, ValueError) as error:
        sys.exit(f"{result} is damaged: {error!r}: delete it, and set the knobs yourself")
    checksums = facts.get("crc32")  # of the run's files
    if checksums and zlib.crc32(path.read_bytes()) not in checksums.values():
        sys.exit(f"{path} is damaged, or not of {result} (crc32 differs): copy both from one run")
    if "knobs" not in facts:
        print(f"{path} and {result} have no knobs: copy the run's result there", file=sys.stderr)
    return facts


def defaults(script: ModuleType) -> dict[str, str]:
    """The environment variables of a script's knobs, with their defaults."""
    return {name.upper(): as_text(v) for name, v in asdict(script.Hyperparameters()).items()}


def encode(tokenizer: SentencePieceProcessor, text: str) -> list[int]:
    return tokenizer.encode(caseops.encode(text) if caseops.is_caseops(tokenizer) else text)


def decode(tokenizer: SentencePieceProcessor, ids: list[int]) -> str:
    """Return the text. A tokenizer without a piece for a lone space writes the three bytes of
    U+2581, which become a space. One at the start of the text is dropped, as in other pieces."""
    text = tokenizer.decode(ids).removeprefix("\u2581").replace("\u2581", " ")
    return caseops.decode(text) if caseops.is_caseops(tokenizer) else text


def compare_inputs(wanted: Mapping[str, int], hp: Any) -> Iterator[str]:
    """Yield a warning for each input that is not that of the run. wanted: the run's checksums."""
    if not wanted:  # an older run's result: do not read the whole split for nothing
        return
    shards = filter(os.path.isfile, sorted(glob.glob(hp.files("val"))))
    tokens = b"".join(Path(shard).read_bytes()[files.HEADER_BYTES :] for shard in shards)
    path = Path(hp.tokenizer_path)
    model = path.read_bytes() if path.is_file() else b""
    found = ("tokenizer", "TOKENIZER_PATH", model), ("val_tokens", "DATA_PATH", tokens)
    for name, knob, data in found:
        if data and wanted.get(name) not in (None, zlib.crc32(data)):
            noun = name.replace("val_", "validation ")
            yield f"WARNING: {knob}: another {noun} than in the run: set it to that of the run"


def open_model(script: ModuleType, path: Path, own: Mapping[str, str]) -> tuple[Any, Any]:
    """Load a model of this script, with knobs from the environment, else from its run. Returns it
    and a runtime whose log has the warnings. own: knobs that override those of the run."""
    script.deserialize(path.read_bytes(), str(path))  # first: other files need no other advice
    facts = saved_facts(path)
    saved = facts.get("knobs", {})
    knobs = {name.upper(): as_text(value) for name, value in saved.items() if name not in OWN}
    environ = {k: v for k, v in os.environ.items() if k != "RESUME"}
    hp = script.Hyperparameters.from_env({**knobs, **own, **environ})
    runtime = script.open_runtime(hp)
    if not script.__file__.endswith(".py"):  # out of a log
        runtime = replace(runtime, source=read_script(Path(script.__file__)))
    script.compare_ranks(hp, runtime)
    gpt = script.GPT(hp, runtime.dtype).to(runtime.device)
    log = Path(saved.get("output_dir", ""), "logs", f"{saved.get('run_id', 'RUN_ID')}.txt")
    data = runtime.from_rank_0(path.read_bytes)
    try:
        script.load_weights(gpt, data, str(path))
    except script.InputError as error:
        other = [k for k in knobs if environ.get(k, knobs[k]) != knobs[k]]
        differ = ", ".join(f"{k}={environ[k]} (its run: {knobs[k]})" for k in other) or "none"
        advice = f"--script {log} takes the script out of its log"
        raise script.InputError(f"{error}; knobs that differ: {differ}; {advice}") from None
    unknown, inputs = knobs.keys() - defaults(script), facts.get("input_crc32", {})
    size, crc = len(runtime.source), zlib.crc32(runtime.source)
    if unknown or size != facts.get("bytes_code", size) or crc != inputs.get("script", crc):
        off = defaults(load_script(RECORD))
        right = "tests/records/train_record.py" if unknown and unknown <= off.keys() else log
        lacks = [f"{k}={knobs[k]}" for k in sorted(unknown) if off.get(k) != knobs[k]]
        problem = " ".join(["lacks", *lacks]) if lacks else "is not that of the run"
        advice = f"use --script {right}, or the score may differ"
        runtime.log(f"WARNING: {advice}: this script {problem}")
    for warning in compare_inputs(inputs, hp):
        runtime.log(warning)
    return gpt, runtime


def compare_with_manifest(hp: Any) -> str:
    """Compare the size of the validation split with the manifest, if any. Returns the problem."""
    try:
        manifest, name = files.find_manifest(Path(hp.data_path))
        datasets = files.read_manifest(manifest)["datasets"] if manifest.is_file() else {}
    except ValueError as error:
        return str(error)
    entry = datasets.get(name, {})
    found = sum(files.count_tokens(Path(path)) for path in glob.glob(hp.files("val")))
    wanted = {**entry, **entry.get("stats", {})}.get("tokens_val", found)
    problem = f"the validation split has {found:,} of {wanted:,} tokens in {manifest}"
    return "" if found == wanted else f"{problem}: get its shards again"
