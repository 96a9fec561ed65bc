"""Draw the score of a demo against its steps, with two general compressors as lines.

    VAL_LOSS_EVERY=20 RUN_ID=curve PRESET=demo python train_gpt.py
    python tests/tools/demo_curve.py logs/curve.txt tests/tools/demo.svg

Start it where the demo ran. Needs matplotlib."""

import argparse
import json
import lzma
import re
from pathlib import Path

import matplotlib
import numpy as np
from sentencepiece import SentencePieceProcessor

matplotlib.use("Agg")
from matplotlib import pyplot

SCORE = re.compile(r"step:(\d+)/\d+ val_loss:\S+ val_bpb:(\S+)")
DATASET, TOKENIZER = "data/datasets/demo_sp1024", "data/tokenizers/demo_1024_bpe.model"


def read_curve(log: str) -> tuple[list[int], list[float]]:
    """Return the steps and the bits per byte of all validations."""
    scores = [(int(step), float(bpb)) for step, bpb in SCORE.findall(log)]
    if not scores:
        raise SystemExit("the log has no val_bpb: give the log of a demo")
    return [step for step, _ in scores], [bpb for _, bpb in scores]


def xz_bits_per_byte(dataset: Path, tokenizer: Path) -> float:
    """Return the size of the demo's validation text under xz -9e."""
    tokens = np.fromfile(dataset / "fineweb_val_000000.bin", "<u2")[512:].tolist()  # after a header
    text = SentencePieceProcessor(model_file=str(tokenizer)).decode(tokens).encode()
    return 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)


def draw(log: Path, picture: Path) -> None:
    """Draw the picture. Its background is white, so that it can be read on a dark page."""
    steps, bpb = read_curve(log.read_text())
    best = json.loads(Path(DATASET, "demo_corpus.json").read_text())["lzma_bpb"]
    xz = xz_bits_per_byte(Path(DATASET), Path(TOKENIZER))
    pyplot.rc("svg", fonttype="none", hashsalt="")  # text stays text; the same file each time
    pyplot.rc("font", **{"sans-serif": "DejaVu Sans"})  # one name: a small file
    figure, axes = pyplot.subplots(figsize=(7.2, 3.2), layout="constrained", facecolor="white")
    axes.plot(steps, bpb, color="tab:blue", linewidth=2, marker="o", markersize=4)
    ends = {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
    axes.annotate(f"{bpb[-1]:.2f}", (steps[-1], bpb[-1]), color="tab:blue", weight="bold", **ends)
    # The lines are close to each other, so one label is above them and one is below.
    lines = sorted([(best, f"best lzma: {best:.2f}"), (xz, f"xz -9e: {xz:.2f}")])
    for (value, name), side, y in zip(lines, ("top", "bottom"), (-4, 4), strict=True):
        axes.axhline(value, color="dimgray", linewidth=0.8, linestyle="--", zorder=0)
        style = {"xytext": (0, y), "textcoords": "offset points", "va": side}
        axes.annotate(name, (steps[0], value), color="dimgray", **style)
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.set(xlim=(-3, 1.06 * steps[-1]), ylim=(min(bpb[-1], best) - 0.3, max(bpb) + 0.1))
    axes.set_title("The demo's score on text that it has not seen", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("picture", type=Path, help=".svg or .png")
    arguments = parser.parse_args()
    draw(arguments.log, arguments.picture)
