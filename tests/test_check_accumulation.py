"""tools/check_accumulation.py: the loop of ACCUMULATION.md is right, and each mistake is found."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import check_accumulation
import pytest
from edits import edit_script
from runs import ROOT, process_environ, run_ranks

TOOL = ROOT / "tests/tools/check_accumulation.py"
BLOCKS = re.findall(r"(?:^(?:    .*)?\n)+", (ROOT / "tests/ACCUMULATION.md").read_text(), re.M)
LOOP, TEST = (
    re.sub("(?m)^    ", "", next(block for block in BLOCKS if name in block)).strip() + "\n"
    for name in ("def accumulate(", "def test_eight_micro_batches")
)

# What the edits replace in the page's loop.
LOSS, SUM, LAST = "loss * ranks / count", 'reduction="sum")', "micro_step < len(window) - 1"
ZERO = "        optimizer.zero_grad()\n"
LOGITS = "            logits = model(tokens)\n"
NO_SYNC = "with model.no_sync() if waits else contextlib.nullcontext():  # forward pass, too"
BACKWARD = f"            scaler.scale({LOSS}).backward()  # DDP divides by ranks\n"
WRAP = "        model = DistributedDataParallel(model)\n"
ADAM = "torch.optim.AdamW(model.parameters(), lr=1e-3)"
MEANS = {SUM: ")", LOSS: "loss / len(window)"}
OWN_LOSS = {
    f"loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), {SUM}": (
        "loss = logits.flatten(0, 1)[targets.flatten() != -100].square().sum()"
    )
}
AVERAGING = """type("Averaging", (torch.optim.SGD,), {"step": lambda self: (
            [dist.all_reduce(p.grad) for p in model.parameters()], torch.optim.SGD.step(self))})(
            model.parameters(), lr=1e-3)"""

# name: ranks, edits, findings and a part of the first one's sentence.
CASES = {
    "right": (1, {}, "short right", ""),
    "right on 2": (2, {}, "short right", ""),
    "not divided": (1, {LOSS: f"len(window) * {LOSS}"}, "factor short", "by the 4 micro-steps"),
    "added": (2, {LOSS: f"ranks * {LOSS}"}, "factor short", "added over the 2 ranks"),
    "neither": (2, {LOSS: f"len(window) * ranks * {LOSS}"}, "factor short", "neither divided"),
    "twice": (1, {LOSS: f"{LOSS} / len(window)"}, "factor short", "twice by the 4 micro-steps"),
    "twice by ranks": (2, {LOSS: f"{LOSS} / ranks"}, "factor short", "twice by the 2 ranks"),
    "a sum": (2, {LOSS: "loss"}, "factor short", "a sum over targets"),
    "another factor": (1, {LOSS: f"2.7 * {LOSS}"}, "common short right", "harmless for Adam"),
    "mean of means": (1, MEANS, "means short", "0.85 to 1.33"),
    "mean of means on 2": (2, MEANS, "means short", "divide by the number of targets"),
    "each rank alone": (2, {"dist.all_reduce(count)": "count *= ranks"}, "alone short", "alone"),
    "per sequence": (
        1,
        {SUM: 'reduction="none").view_as(targets)', LOSS: "(loss.sum(1) / (targets >= 0).sum(1)).sum() / 32"},
        "inside short",
        "mean per sequence",
    ),
    "zeroed too early": (1, {LOGITS: "            model.zero_grad()\n" + LOGITS}, "lost short", "1, 2, 3"),
    "not zeroed": (1, {ZERO: ""}, "before short", "1.00 times"),
    "flag too late": (
        2,
        {
            NO_SYNC: "if True:",
            BACKWARD: f"            model.require_backward_grad_sync = not waits\n{BACKWARD}",
        },
        "stay short",
        "2, 3, 4 stay",
    ),
    "off by one": (2, {LAST: "micro_step == len(window) - 1"}, "often stay short", "3 of 4"),
    "never exchanged": (2, {WRAP: "", "waits = ranks > 1": "waits = False"}, "apart short", "drift apart"),
    "in the optimizer": (
        2,
        {WRAP: "", "waits = ranks > 1": "waits = False", ADAM: AVERAGING},
        "optimizer short",
        "exchanges them itself",
    ),
    "exchanged each time": (2, {"waits = ranks > 1": "waits = False"}, "often short right", "4 of 4"),
    "short last window": (
        1,
        {LOSS: f"len(window) / 4 * {LOSS}"},
        "factor short",
        "3 micro-steps are divided by 4",
    ),
    "the same targets": (2, {"x[rank::ranks], y[rank::ranks]": "x[::ranks], y[::ranks]"}, "data short", ""),
    "another loss": (1, {LOSS: f"({LOSS} + 0.1 * logits.square().mean())"}, "rest right short", "% of"),
    "equal numbers": (1, {"(88, 1))": "(88, 1)).fill_(32)"}, "short right", ""),
    "own loss": (1, OWN_LOSS, "loss short", "F.cross_entropy"),
    "own loss, lost": (1, OWN_LOSS | {LOGITS: "            model.zero_grad()\n" + LOGITS}, "loss lost short", ""),
}


@pytest.mark.parametrize("name", CASES)
def test_each_mistake_is_found_in_the_loop_of_the_page(name, tmp_path):
    ranks, edits, keys, words = CASES[name]
    (tmp_path / "loop.py").write_text(edit_script(LOOP, edits))
    (tmp_path / "out").mkdir()
    environ = {"ACCUMULATION_FOLDER": str(tmp_path / "out"), "ACCUMULATION_STEPS": "3"}
    results = run_ranks(tmp_path, environ, ranks, [TOOL, "loop.py"])
    assert [result.returncode for result in results] == [0] * ranks, results[0].stderr
    args = SimpleNamespace(verbose=False, minutes=10)
    steps, found = check_accumulation.check(ranks, 0, args, tmp_path / "out")
    assert sorted(found) == sorted(keys.split()), found
    assert words in " ".join(found.values()), found
    assert len(steps) == 3
    assert ("unequal numbers were not seen" in str(found)) == (name == "equal numbers")


def check(folder: Path, *words: str, **settings) -> subprocess.CompletedProcess:
    command = [sys.executable, TOOL, *words]
    settings = {"capture_output": True, "text": True, "env": process_environ({})} | settings
    return subprocess.run(command, cwd=folder, **settings)
