"""The loop of ACCUMULATION.md, its test, and edits that put a mistake into the loop: the number of
ranks that shows it, {old text: new text}, the keys of check_accumulation.py's findings, and words
of their sentences."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "ACCUMULATION.md"
BLOCKS = re.findall(r"(?:^(?:    .*)?\n)+", PAGE.read_text(), re.MULTILINE)
LOOP, TEST = (
    re.sub("(?m)^    ", "", next(block for block in BLOCKS if name in block)).strip() + "\n"
    for name in ("def accumulate(", "def test_eight_micro_batches")
)

# Texts that edits replace.
CROSS_ENTROPY = 'loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")'
LOSS = "loss * ranks / count"
LAST = "micro_step < len(window) - 1"
WAITS = "waits = ranks > 1"
ZERO = "        optimizer.zero_grad()\n"
LOGITS = "            logits = model(tokens)\n"
NO_SYNC = "with model.no_sync() if waits else contextlib.nullcontext():  # forward pass, too"
BACKWARD = f"            scaler.scale({LOSS}).backward()  # DDP divides by ranks\n"
WRAP = "        model = DistributedDataParallel(model)\n"
ADAM = "torch.optim.AdamW(model.parameters(), lr=1e-3)"

MEANS = {CROSS_ENTROPY: CROSS_ENTROPY.replace(', reduction="sum"', "")}
ROWS = "(loss.view_as(targets).sum(1) / (targets >= 0).sum(1)).mean() / len(window)"
EARLY = {LOGITS: f"            model.zero_grad()\n{LOGITS}"}
ALONE = {WRAP: "", WAITS: "waits = False"}
AVERAGING = """class Averaging(torch.optim.SGD):
    def step(self):
        for param in self.param_groups[0]["params"]:
            dist.all_reduce(param.grad)
        super().step()


def accumulate("""
OWN_LOSS = {CROSS_ENTROPY: "loss = logits.flatten(0, 1)[targets.flatten() >= 0].square().sum()"}
CHUNKS = """chunks = zip(logits.flatten(0, 1).split(140), targets.flatten().split(140))
            loss = sum(F.cross_entropy(x, y, reduction="sum") for x, y in chunks)"""
EQUAL = "torch.randint(4, 32, (88, 1))"
HEAD = "F.cross_entropy(-logits.flatten(0, 1), targets.flatten(), reduction='sum')"

MISTAKES = {
    "right": (1, {}, "right short", ""),
    "right on 2 ranks": (2, {}, "right short", ""),
    "not divided by the micro-steps": (
        2,
        {LOSS: f"len(window) * {LOSS}"},
        "factor",
        "not divided by the 4",
    ),
    "added over the ranks": (2, {LOSS: f"ranks * {LOSS}"}, "factor short", "added over the 2"),
    "neither": (2, {LOSS: f"len(window) * ranks * {LOSS}"}, "factor", "neither divided by the 4"),
    "divided twice": (2, {LOSS: f"{LOSS} / len(window)"}, "factor", "twice by the 4 micro-steps"),
    "divided twice by the ranks": (2, {LOSS: f"{LOSS} / 2"}, "factor short", "by the 2 ranks"),
    "a sum over targets": (2, {LOSS: "loss"}, "factor short", "a sum over targets"),
    "another factor": (1, {LOSS: f"2.7 * {LOSS}"}, "common right short", "harmless for Adam"),
    "mean of means": (2, {**MEANS, LOSS: "loss / len(window)"}, "means short", "0.76 to 1.94"),
    "each rank alone": (2, {"dist.all_reduce(count)": "count *= ranks"}, "alone short", "alone"),
    "mean per sequence": (
        1,
        {'"sum"': '"none"', LOSS: ROWS},
        "inside means short",
        "a mean per sequence",
    ),
    "zeroed too early": (2, EARLY, "lost short", "micro-steps 1, 2, 3 are lost"),
    "not zeroed": (1, {ZERO: ""}, "before short", "1.00 times"),
    "flag set too late": (
        2,
        {
            NO_SYNC: "if True:",
            BACKWARD: f"            model.require_backward_grad_sync = not waits\n{BACKWARD}",
        },
        "stay short",
        "micro-steps 2, 3, 4 stay",
    ),
    "off by one": (2, {LAST: "micro_step == len(window) - 1"}, "often stay short", "4 stay"),
    "never exchanged": (2, ALONE, "apart short", "drift apart"),
    "exchanged by the optimizer": (
        2,
        {**ALONE, "def accumulate(": AVERAGING, ADAM: "Averaging(model.parameters(), lr=1e-3)"},
        "optimizer short",
        "the optimizer does it",
    ),
    "exchanged in each": (2, {WAITS: "waits = False"}, "often right short", "in 4 of 4"),
    "short last window": (
        1,
        {LOSS: f"len(window) / 4 * {LOSS}"},
        "factor short",
        "3 micro-steps are still divided by the usual 4",
    ),
    "the same targets": (2, {"[rank::ranks]": "[::ranks]"}, "data short", "its own part"),
    "another loss": (1, {LOSS: f"({LOSS} + 0.1 * logits.square().mean())"}, "rest right short", ""),
    "in two chunks": (1, {EQUAL: "32", CROSS_ENTROPY: CHUNKS}, "right short", "not seen"),
    "a second head": (1, {LOSS: f"({LOSS} + 0.3 * {HEAD} / count)"}, "rest right short", ""),
    "equal numbers": (1, {EQUAL: "32"}, "right short", "not seen"),
    "a loss of its own": (1, OWN_LOSS, "loss short", "F.cross_entropy"),
    "its own, and lost": (1, {**OWN_LOSS, **EARLY}, "loss lost short", "are lost"),
}


def wrong_loop(name: str) -> str:
    source = LOOP
    for old, new in MISTAKES[name][1].items():
        if old not in source:
            raise ValueError(f"{old!r} is not in the loop")
        source = source.replace(old, new)
    return source
