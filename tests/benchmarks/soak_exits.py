"""Start many small runs of the script in a row and see that each of them ends by itself, well.

    python tests/benchmarks/soak_exits.py [--runs 30] [--ranks 4]

What goes wrong when several gloo ranks leave goes wrong now and then, so one run proves little. A
run is good if torchrun ends with code 0 within 60 s, the last line of its output is the result and
no process of it is left. Prints a line for each run and a summary; exit code 1 if any was not good.
Linux only.
"""

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.conftest import SCRIPT, launch_command, process_environ, write_small_run

LIMIT_S = 60
LAST_LINE = "final_int8_zlib_roundtrip_exact "


def processes_of(run_id: str) -> list[int]:
    """The processes, whoever their parent is now, that have this RUN_ID in their environment."""
    wanted, found = f"RUN_ID={run_id}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # it has ended meanwhile, or is another user's
            continue
    return found


def run_once(folder: Path, knobs: dict[str, str], ranks: int) -> tuple[float, str]:
    """Seconds of one run, and what was wrong with it: "" if nothing."""
    run_id = f"soak-{uuid.uuid4()}"
    command = [*launch_command(ranks), str(SCRIPT)]
    environ = process_environ({**knobs, "RUN_ID": run_id}, 1)
    problems, started = [], time.monotonic()
    with open(folder / "stdout", "wb") as stdout, open(folder / "stderr", "wb") as stderr:
        agent = subprocess.Popen(command, cwd=folder, env=environ, stdout=stdout, stderr=stderr)
        try:
            if agent.wait(LIMIT_S) != 0:
                problems.append(f"exit code {agent.returncode}")
        except subprocess.TimeoutExpired:
            problems.append(f"still there after {LIMIT_S} s")
    seconds = time.monotonic() - started
    if left := processes_of(run_id):
        problems.append(f"{len(left)} processes left")
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.wait()
    lines = (folder / "stdout").read_text().splitlines()
    if not lines or not lines[-1].startswith(LAST_LINE):
        problems.append(f"the last line is {lines[-1:]}")
    if problems:
        problems += (folder / "stderr").read_text().splitlines()[-20:]
    return seconds, "\n    ".join(problems)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=4, help="1, 2, 4 or 8")
    args = parser.parse_args()
    times, failures = [], 0
    with tempfile.TemporaryDirectory() as folder:
        knobs = write_small_run(Path(folder))
        for number in range(1, args.runs + 1):
            seconds, problem = run_once(Path(folder), knobs, args.ranks)
            times.append(seconds)
            failures += bool(problem)
            print(f"run {number}: {seconds:.1f} s, {problem or 'good'}", flush=True)
    print(
        f"runs:{args.runs} ranks:{args.ranks} failures:{failures} slowest:{max(times):.1f}s "
        f"median:{statistics.median(times):.1f}s"
    )
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
