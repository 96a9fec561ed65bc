"""Kill ranks of a long run at random moments; it must end with the weights of an undisturbed run.

    python tests/soak/soak_kills.py [--kills 20] [--seed 0] [--ranks 2] [--steps 3000]

torchrun restarts the ranks after each kill -9, and RESUME=auto continues from the checkpoint. A
kill may hit anything: the start, a step, a write, the export. Exits with 1 unless the run finishes
after all kills and its model files are equal to the last bit.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import SCRIPT, launch_command, process_environ, same_models, write_small_run


def start(folder: Path, knobs: dict[str, str], ranks: int, restarts: int) -> subprocess.Popen:
    """Start a run under torchrun in a new folder, with stderr in a file there."""
    folder.mkdir()
    command = [*launch_command(ranks, restarts), str(SCRIPT)]
    settings = {"cwd": folder, "env": process_environ(knobs, 1), "stdout": subprocess.DEVNULL}
    with open(folder / "stderr.txt", "w") as errors:
        return subprocess.Popen(command, stderr=errors, **settings)


def kill_one(agent: subprocess.Popen, ranks: int, chance: random.Random) -> bool:
    """Kill a rank as soon as all have started. Return False if the run has ended."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    while agent.poll() is None:
        pids = [int(pid) for pid in children.read_text().split()]
        if len(pids) == ranks:
            os.kill(chance.choice(pids), signal.SIGKILL)
            return True
        time.sleep(0.01)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--longest", type=float, default=8.0, help="seconds between two kills")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak_"))
    knobs = write_small_run(folder) | {"VAL_LOSS_EVERY": "0", "WARMDOWN_ITERS": "1200"}
    knobs |= {"ITERATIONS": str(args.steps), "CHECKPOINT_EVERY": "10", "RESUME": "auto"}
    if start(folder / "calm", knobs, args.ranks, 0).wait() != 0:
        sys.exit(f"the undisturbed run failed: see {folder / 'calm'}")
    agent = start(folder / "killed", knobs, args.ranks, args.kills + 5)
    chance = random.Random(args.seed)
    for kill in range(1, args.kills + 1):
        time.sleep(chance.uniform(0, args.longest))
        if not kill_one(agent, args.ranks, chance):
            sys.exit(f"{folder}: the run ended before kill {kill}: set more --steps")
        print(f"kill {kill}/{args.kills}", flush=True)
        time.sleep(0.3)  # until torchrun has noticed
    code = agent.wait()
    equal = code == 0 and same_models(folder / "calm", folder / "killed")
    resumes = (folder / "killed" / "logs" / "test.txt").read_text().count("\nresume:checkpoints")
    print(f"exit code {code}, resumed {resumes} times, same weights: {equal}: see {folder}")
    sys.exit(not equal)


if __name__ == "__main__":
    main()
