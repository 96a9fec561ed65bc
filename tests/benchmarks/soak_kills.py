"""Kill ranks of one long run at random moments, and compare its weights with an undisturbed run's.

    python tests/benchmarks/soak_kills.py [--kills 20] [--seed 0] [--ranks 2] [--steps 3000]

torchrun starts the ranks again after each kill -9, and RESUME=auto goes on from the newest good
checkpoint. A moment may fall anywhere: into the start, a step, a write, the export. Exits with 1
unless the run ends well, after all kills, with the same files to the last bit.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import SCRIPT, launch_command, process_environ, write_small_run

NAMES = ("final_model.pt", "final_model.int8.ptz")


def start(folder: Path, knobs: dict[str, str], ranks: int, restarts: int) -> subprocess.Popen:
    """A run under torchrun in a new folder; its console goes into files there."""
    folder.mkdir()
    command = [*launch_command(ranks, restarts), str(SCRIPT)]
    with open(folder / "stdout.txt", "w") as out, open(folder / "stderr.txt", "w") as errors:
        return subprocess.Popen(
            command, cwd=folder, env=process_environ(knobs, 1), stdout=out, stderr=errors
        )


def last_line(folder: Path) -> str:
    lines = (folder / "stdout.txt").read_text().splitlines()
    return lines[-1] if lines else "nothing"


def kill_one(agent: subprocess.Popen, ranks: int, chance: random.Random) -> int | None:
    """Kill -9 a rank as soon as all are there. Returns which; None if the run has ended."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    while agent.poll() is None:
        pids = [int(pid) for pid in children.read_text().split()]
        if len(pids) == ranks:
            chosen = chance.randrange(ranks)
            os.kill(pids[chosen], signal.SIGKILL)
            return chosen
        time.sleep(0.01)
    return None


def soak(agent: subprocess.Popen, folder: Path, args: argparse.Namespace) -> int:
    """Kill at random moments until enough are killed or the run has ended. Returns how many."""
    chance = random.Random(args.seed)
    for kill in range(1, args.kills + 1):
        moment = chance.uniform(0, args.longest)
        time.sleep(moment)
        rank = kill_one(agent, args.ranks, chance)
        if rank is None:
            return kill - 1
        print(f"kill {kill}/{args.kills} rank {rank} {moment:.2f} s later: {last_line(folder)}")
        sys.stdout.flush()
        time.sleep(0.3)  # so that torchrun has seen it
    return args.kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--longest", type=float, default=8.0, help="seconds between two kills")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds after the last one")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak_"))
    knobs = write_small_run(folder) | {"VAL_LOSS_EVERY": "0", "WARMDOWN_ITERS": "1200"}
    knobs |= {"ITERATIONS": str(args.steps), "CHECKPOINT_EVERY": "10", "RESUME": "auto"}
    began = time.monotonic()
    calm = start(folder / "calm", knobs, args.ranks, 0)
    if calm.wait() != 0:
        sys.exit(f"the undisturbed run failed: see {folder / 'calm'}")
    print(f"undisturbed: {time.monotonic() - began:.0f} s for {args.steps} steps, seed {args.seed}")
    began = time.monotonic()
    agent = start(folder / "killed", knobs, args.ranks, args.kills + 5)
    kills = soak(agent, folder / "killed", args)
    try:
        code = agent.wait(args.patience)
    except subprocess.TimeoutExpired:
        agent.terminate()  # and torchrun its ranks
        code = f"none after {args.patience:.0f} s: {last_line(folder / 'killed')}"
    resumes = (folder / "killed" / "stdout.txt").read_text().count("resume:checkpoints")
    print(f"killed: {time.monotonic() - began:.0f} s, {kills} kills, {resumes} times resumed, "
          f"exit code {code}")  # fmt: skip
    equal = code == 0 and all(
        (folder / "calm" / name).read_bytes() == (folder / "killed" / name).read_bytes()
        for name in NAMES
    )
    print(f"final weights equal the undisturbed run's: {'yes' if equal else 'NO'}")
    if not equal or kills < args.kills:
        sys.exit(f"see {folder}" if not equal else "the run was too short: give it more --steps")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
