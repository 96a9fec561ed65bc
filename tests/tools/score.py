"""Score a trained model: an artifact, a final_model.pt or a checkpoint.

    python tests/tools/score.py final_model.int8.ptz
    EVAL_STRIDE=64 torchrun --standalone --nproc_per_node=8 tests/tools/score.py final_model.pt

Knobs come from the environment, else from the run that wrote the file: from the checkpoint, or from
final_result.json in the same folder, which every node needs. With RUN_ID, the printed lines also go
to logs/RUN_ID.score.txt, never into the log of a run."""

import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for python -P

from trained import compare_with_manifest, load_script, model_parser, open_model


def open_split(script: ModuleType, gpt: Any, runtime: Any) -> Any:
    """Load the validation split. Log the settings, and warnings about the split."""
    hp = gpt.hp
    if not Path(hp.tokenizer_path).is_file():
        advice = "start in the folder where the run started, or set it and DATA_PATH"
        raise script.InputError(f"TOKENIZER_PATH={hp.tokenizer_path!r} is not a file: {advice}")
    validation = script.Validation(hp)
    script.log_settings(gpt, validation, runtime)
    if problem := compare_with_manifest(hp):
        runtime.log(f"WARNING: {problem}")
    return validation


def open_log(runtime: Any, hp: Any) -> None:
    """Print the lines that wait. With RUN_ID, a file of its own gets all lines, too."""
    if "RUN_ID" in os.environ:
        runtime.log.open(replace(hp, run_id=f"{hp.run_id}.score"), runtime.source)
    else:
        runtime.log.file = open(os.devnull, "w")
        runtime.log.is_terminal = sys.stdout is not None and sys.stdout.isatty()
        for line in runtime.log.waiting:
            runtime.log(line)


def score(script: ModuleType, path: Path) -> int:
    """Score the model of this file as the script does after training. Returns the exit code."""
    gpt, runtime = open_model(script, path, {})
    warnings = [line for line in runtime.log.waiting if line.startswith("WARNING")]
    validation = open_split(script, gpt, runtime)
    is_artifact = runtime.rank == 0 and path.read_bytes()[:2] != b"PK"  # torch.save writes a zip
    runtime.log(f"score:{path}")
    runtime.from_rank_0(lambda: open_log(runtime, validation.hp))
    started = time.perf_counter()
    losses = script.final_losses(script.wrap(gpt, runtime.compiled), validation, runtime)
    loss = script.mean_loss(losses, runtime)
    eval_ms = 1000 * (time.perf_counter() - started)
    for line in warnings:  # again, since a reader may see only the end
        runtime.log(line)
    name = "final_int8_zlib_roundtrip" if is_artifact else "score"
    script.log_score(name, loss, eval_ms, validation, runtime)
    return int(not math.isfinite(loss))


def main(arguments: list[str] | None = None) -> None:
    args = model_parser(__doc__).parse_args(arguments)
    script = load_script(args.script)
    script.leave(lambda: score(script, args.model))


if __name__ == "__main__":
    main()
