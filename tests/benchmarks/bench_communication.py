"""Count what one optimizer step of the default model sends between W processes of one machine.

    python tests/benchmarks/bench_communication.py [W ...] [--steps 3]

Starts torchrun with W gloo ranks for each W (2 4 8 16 if none is given) on few random tokens: what
travels does not depend on their number. Prints a row for each W, sizes in millions of bytes (MB):
the gradients, what ring algorithms would send per rank, the collectives that the profiler saw on
rank 0 in one step (calls, bytes of the tensors given to them), the bytes that the loopback
interface carried per rank and step, and their ratio to the prediction, the result. It counts all
that the machine sends to itself, so let nothing else do so. Linux only.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt
from tests.benchmarks.bench_step import leave
from tests.conftest import launch_command, make_state, process_environ, write_shard

SEQ_LEN = 64
ITEM_BYTES = {"float": 4, "c10::BFloat16": 2}  # as the profiler names them
HEADER = (
    "| W | gradients G | ring: gradients + updates | all-reduce: calls, tensors "
    "| all-gather: calls, own part | loopback per rank | measured / ring |"
)


def loopback_bytes() -> int:
    """What this machine has sent to itself since it started."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])  # eight numbers of reception come first
    raise RuntimeError("/proc/net/dev has no lo")


def largest_share(muon: train_gpt.Muon) -> int:
    """The bytes of the largest rank's updates in bf16: every rank sends as many."""
    shares = muon.shares(muon.param_groups[0]["params"])
    return max(sum(2 * p.numel() for p in share) for share in shares)


def collectives(trace: Path) -> dict[str, tuple[int, int]]:
    """Calls and tensor bytes of each kind of gloo collective in a profiler's trace."""
    totals: dict[str, tuple[int, int]] = {}
    for event in json.loads(trace.read_text())["traceEvents"]:
        name = event.get("name", "")
        if name.startswith("gloo:"):
            shapes, kinds = event["args"]["Input Dims"], event["args"]["Input type"]
            size = sum(
                ITEM_BYTES[kind] * int(np.prod(shape))
                for shape, kind in zip(shapes, kinds, strict=True)
            )
            calls, total = totals.get(name, (0, 0))
            totals[name] = calls + 1, total + size
    return totals


def count_steps(folder: Path, num_steps: int) -> None:
    """One rank, under torchrun. Rank 0 leaves its counts in FOLDER/counts.json."""
    hp = train_gpt.Hyperparameters.from_env(os.environ)
    runtime = train_gpt.open_runtime(hp, os.environ)
    state = make_state(hp, runtime)
    for _ in range(2):  # in the second one DDP sorts its buckets anew and tells the others
        train_gpt.train_step(state)
    dist.barrier()
    before = loopback_bytes()
    dist.barrier()
    for _ in range(num_steps):
        train_gpt.train_step(state)
    dist.barrier()
    sent = loopback_bytes() - before
    with torch.profiler.profile(record_shapes=True) as profile:
        train_gpt.train_step(state)
    if runtime.rank == 0:
        profile.export_chrome_trace(str(folder / "trace.json"))
        counts = {
            "gradients": sum(p.numel() * p.element_size() for p in state.gpt.parameters()),
            "largest_share": largest_share(state.optimizers[-1]),
            "collectives": collectives(folder / "trace.json"),
            "sent": sent / num_steps / runtime.world_size,
        }
        (folder / "counts.json").write_text(json.dumps(counts))
    leave(runtime)


def measure(W: int, num_steps: int) -> str:
    """The table's row for W ranks."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(0).integers(1024, size=20 * W * (SEQ_LEN + 1))
        write_shard(Path(folder) / "fineweb_train_000000.bin", tokens)
        environ = {
            "DATA_PATH": folder,
            "OUTPUT_DIR": folder,
            "DEVICE": "cpu",
            "DTYPE": "bf16",
            "COMPILE": "0",
            "TRAIN_SEQ_LEN": str(SEQ_LEN),
            "BATCH_SLOTS": str(W),
            "TRAIN_BATCH_TOKENS": str(SEQ_LEN * W),
        }
        options = ["--rank-folder", folder, "--steps", str(num_steps)]
        command = [*launch_command(W), __file__, *options]
        result = subprocess.run(
            command, env=process_environ(environ, 1), capture_output=True, text=True
        )
        if result.returncode != 0:
            raise RuntimeError(f"{W} ranks ended with {result.returncode}:\n{result.stderr}")
        counts = json.loads((Path(folder) / "counts.json").read_text())
    G = counts["gradients"]
    gradients, updates = 2 * (W - 1) / W * G, (W - 1) * counts["largest_share"]
    cells = [str(W), f"{G / 1e6:.2f}", f"{gradients / 1e6:.2f} + {updates / 1e6:.2f}"]
    for kind in ("gloo:all_reduce", "gloo:all_gather"):
        calls, size = counts["collectives"].pop(kind)
        cells.append(f"{calls}, {size / 1e6:.2f}")
    if counts["collectives"]:
        raise RuntimeError(f"collectives that this table leaves out: {counts['collectives']}")
    sent = counts["sent"]
    cells += [f"{sent / 1e6:.2f}", f"{sent / (gradients + updates):.3f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ranks", type=int, nargs="*", default=[2, 4, 8, 16], metavar="W")
    parser.add_argument("--steps", type=int, default=3, help="steps that are measured")
    parser.add_argument("--rank-folder", type=Path, help=argparse.SUPPRESS)  # for torchrun
    args = parser.parse_args()
    if args.rank_folder:
        return count_steps(args.rank_folder, args.steps)
    print(HEADER)
    print("|---" * 7 + "|")
    for W in args.ranks:
        print(measure(W, args.steps), flush=True)


if __name__ == "__main__":
    main()
