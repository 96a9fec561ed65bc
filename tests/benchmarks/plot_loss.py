"""Draw the loss curves of one or more runs from their logs:

    python tests/benchmarks/plot_loss.py logs/A.txt logs/B.txt --out loss.svg

A log is OUTPUT_DIR/logs/RUN_ID.txt, or what a run printed. Needs pip install matplotlib."""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

LINE = re.compile(r"step:(\d+)/\d+ (train_loss|val_loss):(\d+\.\d+) .*?train_time:(\d+)ms")
LAST = re.compile(r"final_int8_zlib_roundtrip_exact val_loss:(\d+\.\d+) val_bpb:(\d+\.\d+)")


@dataclass(frozen=True)
class Curves:
    """Of one run: (step, seconds of training, loss) for each logged loss, in order."""

    train: list[tuple[int, float, float]]
    val: list[tuple[int, float, float]]
    bits_per_byte: float | None  # of the compressed model, if the run has reached its end


def read_log(path: Path) -> Curves:
    """The last run in a log. Raises ValueError if it holds no loss."""
    points: dict[str, list[tuple[int, float, float]]] = {"train_loss": [], "val_loss": []}
    text, final = path.read_text(encoding="utf-8"), None
    for line in text.splitlines():
        if match := LINE.match(line):
            step, kind, loss, ms = match.groups()
            if kind == "val_loss" and step == "0":  # a new run in the same file
                points, final = {"train_loss": [], "val_loss": []}, None
            points[kind].append((int(step), int(ms) / 1000, float(loss)))
        elif match := LAST.match(line):
            final = float(match[2])
    if not any(points.values()):
        raise ValueError(f"{path} has no line with a loss: name the log of a run")
    return Curves(points["train_loss"], points["val_loss"], final)


def draw(runs: dict[str, Curves], out: Path, over: str) -> None:
    """Write a picture, of the kind that out's ending names, with the losses over steps or time."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("drawing needs a package: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "loss", "font.size": 10})
    figure, axes = plt.subplots(figsize=(7, 4))
    x = 0 if over == "step" else 1
    for i, (name, run) in enumerate(runs.items()):
        result = f", {run.bits_per_byte:.4f} bits per byte" if run.bits_per_byte else ""
        if run.train:
            points = [(point[x], point[2]) for point in run.train]
            axes.plot(*zip(*points, strict=True), color=f"C{i}", alpha=0.5, label=f"{name}, train")
        if run.val:
            points = [(point[x], point[2]) for point in run.val]
            label = f"{name}, validation{result}"
            axes.plot(*zip(*points, strict=True), "o-", color=f"C{i}", label=label)
    axes.set_xlabel("optimizer step" if over == "step" else "seconds of training")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("loss.svg"), help="an .svg or .png")
    parser.add_argument("--over", choices=["step", "seconds"], default="step")
    parser.add_argument("--names", nargs="*", help="of the runs; their files' names otherwise")
    args = parser.parse_args()
    names = args.names or [path.stem for path in args.logs]
    if len(set(names)) != len(args.logs):
        parser.error(f"--names must be {len(args.logs)} different names, one for each log")
    try:
        runs = {name: read_log(path) for name, path in zip(names, args.logs, strict=True)}
    except (OSError, ValueError) as error:
        parser.error(str(error))
    draw(runs, args.out, args.over)
    print(args.out)


if __name__ == "__main__":
    main()
