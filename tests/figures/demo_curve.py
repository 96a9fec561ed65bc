"""Draw the score of a demo against its steps, with those of xz as lines.

    VAL_LOSS_EVERY=5 RUN_ID=curve PRESET=demo python train_gpt.py
    python tests/figures/demo_curve.py logs/curve.txt tests/figures/demo.svg

Start it where the demo ran. Needs matplotlib."""

import lzma
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import begin  # noqa: F401  (first: it says what to install)
import numpy as np
from logs import read_run
from matplotlib import rcParams
from matplotlib.figure import Figure
from sentencepiece import SentencePieceProcessor
from trained import check_picture, existing_file, files, start_program

TOKENIZER = Path("data/tokenizers/demo_1024_bpe.model")
SHARDS = [Path(f"data/datasets/demo_sp1024/fineweb_{s}_000000.bin") for s in ("train", "val")]

# Text stays text, with one font name; the file is the same each time.
rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "", "font.sans-serif": "DejaVu Sans"})
rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": "medium"})
rcParams.update({"figure.figsize": (7.2, 3.2), "figure.constrained_layout.use": True})


def scores(log: Path) -> dict[int, float]:
    """Return bits per byte by step. Ends the program if the log is not that of a demo here."""
    if missing := [path for path in (TOKENIZER, *SHARDS) if not path.is_file()]:
        sys.exit(f"there is no {missing[0]} here: start this where the demo ran")
    try:
        run = read_run(log)
    except OSError as error:
        sys.exit(f"{error}: name the logs/RUN_ID.txt of a demo")
    if len(run.val) < 2 or not math.isfinite(run.bpb_per_nat):
        sys.exit(f"{log} has no two validations: name the log of a demo with VAL_LOSS_EVERY=5")
    sequence, tokens = run.figures.get("seq_len", 0), files.count_tokens(SHARDS[1])
    if not 0 <= tokens - run.figures.get("val_tokens", 0) <= sequence:
        sys.exit(f"{log} is not a run on the demo's text: name the log of a run with PRESET=demo")
    return {step: run.bpb_per_nat * loss for step, loss in run.val.items()}


def main() -> None:
    parser = start_program(__doc__)
    parser.add_argument("log", type=existing_file)
    parser.add_argument("picture", type=files.path, help="the .svg to write")
    args = parser.parse_args()
    check_picture(parser, args.picture, [args.log])
    steps, bpb = zip(*scores(args.log).items(), strict=True)
    sp = SentencePieceProcessor(model_file=str(TOKENIZER))
    shards = [np.fromfile(path, "<u2", offset=files.HEADER_BYTES) for path in SHARDS]
    train, val = [sp.decode(tokens.tolist()).encode() for tokens in shards]
    texts = (val, train, train + val)
    sizes = [len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) for text in texts]
    alone, after = (8 * size / len(val) for size in (sizes[0], sizes[2] - sizes[1]))
    figure = Figure()
    axes = figure.add_subplot(title="The demo's score on text that it has not seen")
    axes.plot(steps, bpb, linewidth=2, marker="o", markersize=3)
    above = {"xytext": (0, 5), "textcoords": "offset points", "va": "bottom", "ha": "right"}
    below = above | {"xytext": (0, -5), "va": "top"}
    axes.annotate(f"{bpb[-1]:.2f}", (steps[-1], bpb[-1]), color="C0", weight="bold", **above)
    lines = ((alone, "this text alone", above), (after, "given the training text, too", below))
    for value, name, style in lines:
        axes.axhline(value, color="dimgray", linewidth=0.8, linestyle="--", zorder=0)
        label = f"xz -9e, {name}: {value:.2f}"
        axes.annotate(label, (steps[-1], value), color="dimgray", **style)
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.set(xlim=(-3, 1.06 * steps[-1]), ylim=(1.5, max(bpb) + 0.1))
    figure.savefig(args.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
