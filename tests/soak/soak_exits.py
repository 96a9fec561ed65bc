"""Start many small runs under torchrun and check that each one ends properly.

    python tests/soak/soak_exits.py [--runs 30] [--ranks 4]

Errors when several gloo ranks exit are rare, so one run proves little. A run is good if torchrun
exits with code 0 and the log has the final score. Exits with 1 if any run is not good.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import run_script, write_small_run


def problem_of(folder: Path, knobs: dict[str, str], ranks: int) -> str:
    """Return what went wrong in a run, or ""."""
    try:
        result = run_script(folder, knobs, ranks)
    except subprocess.TimeoutExpired:
        return "it hangs"
    if result.returncode == 0 and "\nfinal_int8_zlib_roundtrip_exact " in result.stdout:
        return ""
    return f"exit code {result.returncode}\n{result.stderr}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=4, help="1, 2, 4 or 8")
    args = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        knobs = write_small_run(Path(folder))
        for number in range(1, args.runs + 1):
            started = time.monotonic()
            problem = problem_of(Path(folder), knobs, args.ranks)
            failures += problem != ""
            seconds = time.monotonic() - started
            print(f"run {number}: {seconds:.1f} s, {problem or 'good'}", flush=True)
    print(f"runs:{args.runs} ranks:{args.ranks} failures:{failures}")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
