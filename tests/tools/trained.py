"""Shared by the tools: arguments that name files, a script, the knobs of a model's run."""

import contextlib
import importlib.util
import json
import sys
import zlib
from argparse import ArgumentParser, ArgumentTypeError
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

SCRIPT = Path(__file__).resolve().parents[2] / "train_gpt.py"
OWN = ("run_id", "output_dir", "resume", "eval_only")  # of a run, not of its model


def printable() -> None:
    """Let stdout print what its encoding lacks as an escape."""
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="backslashreplace")


def existing_file(name: str) -> Path:
    """A type of arguments: argparse shows the error."""
    if not Path(name).is_file():
        raise ArgumentTypeError(f"{name!r} is not a file")
    return Path(name)


def model_parser(description: str) -> ArgumentParser:
    """Return the command line of a tool that opens a trained model."""
    parser = ArgumentParser(description=description)
    model_help = "artifact, final_model.pt or checkpoint"
    parser.add_argument("model", type=existing_file, help=model_help)
    script_help = "trained the model (default: train_gpt.py)"
    parser.add_argument("--script", type=existing_file, default=SCRIPT, help=script_help)
    return parser


def load_script(path: Path) -> ModuleType:
    """Import a train_gpt.py, edited or not, from any folder."""
    name = f"script_{zlib.crc32(bytes(path.resolve())):x}"  # several can be loaded
    spec = importlib.util.spec_from_file_location(name, path)  # None for what is not Python
    if spec is not None:
        script = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
    if spec is None or not hasattr(script, "InputError"):
        sys.exit(f"{path} is not a train_gpt.py: name the script that trained the model")
    script.InputError.__module__ = "__main__"  # so that its name is enough
    return script


def as_text(value: Any) -> str:
    """The text of an environment variable that gives a knob this value."""
    if isinstance(value, list | tuple):
        return ",".join(value)
    return str(int(value) if isinstance(value, bool) else value)


def saved_facts(path: Path) -> dict[str, Any]:
    """final_result.json in the folder of this file; {} if there is none."""
    result = path.with_name("final_result.json")
    try:
        return dict(json.loads(result.read_bytes())) if result.is_file() else {}
    except (ValueError, TypeError) as error:
        sys.exit(f"{result} is damaged: {error!r}: delete it, and set the knobs yourself")


def saved_knobs(path: Path) -> dict[str, str]:
    """Environment variables of the run that wrote this file. A checkpoint contains them; for other
    files, they are in final_result.json. {} if they are nowhere."""
    try:  # with mmap, the tensors stay on the disk
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        knobs = loaded.get("knobs")
    except Exception:  # of any type: an artifact, or a damaged file, which load_weights refuses
        knobs = None
    knobs = knobs or saved_facts(path).get("knobs")
    if knobs is None:
        result = path.with_name("final_result.json")
        advice = f"copy the run's {result.name} there"
        print(f"{path} and {result} have no knobs: {advice}", file=sys.stderr)
    return {name.upper(): as_text(v) for name, v in (knobs or {}).items() if name not in OWN}


def unknown_knobs(script: ModuleType, knobs: dict[str, str]) -> str:
    """Those that this script does not have, for a warning: the run had recipes or edits."""
    known = {knob.name.upper() for knob in fields(script.Hyperparameters)}
    return " ".join(f"{name}={value}" for name, value in knobs.items() if name not in known)
