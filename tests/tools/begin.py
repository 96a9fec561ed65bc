"""Imported first by each tool: the data programs' folder, and a line for a package that is missing.

A notebook exports MPLBACKEND to the programs it starts. That backend may be missing here, and our
pictures need none."""

import os
import sys
from pathlib import Path
from types import TracebackType

PACKAGES = ("matplotlib", "numpy", "scipy", "sentencepiece", "torch")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "data"))  # before other modules of these names
os.environ.pop("MPLBACKEND", None)


def show_error(kind: type, error: BaseException, traceback: TracebackType | None) -> None:
    """Say what to install if one of our packages is missing. Other errors keep their traceback."""
    if kind is ModuleNotFoundError and str(error.name).split(".")[0] in PACKAGES:
        advice = "activate .venv, then pip install scipy matplotlib -r requirements.txt"
        print(f"{error}: {advice}", file=sys.stderr)
        sys.exit(2)
    sys.__excepthook__(kind, error, traceback)


sys.excepthook = show_error
