"""Predict the size of a submission before its training.

    python tests/tools/forecast.py train_gpt.py
    PRESET=record2135 python tests/tools/forecast.py tests/records/train_record.py

Builds the model of the script and the knobs, fills it with Gaussian values, exports it, and packs
the script as `pack.py --minify` does. Exit code 0: it fits. 1: it does not."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for python -P

import pack
import torch
from trained import existing_file, files, load_script, start_program


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    parser = start_program(__doc__)
    parser.add_argument("script", type=existing_file, nargs="?", default="train_gpt.py")
    parser.add_argument("--std", type=files.number(float, 0, 1000), default=0.3, help="of weights")
    args = parser.parse_args(arguments)
    script = load_script(args.script)
    try:
        code = pack.pack(args.script).encode()
        hp = script.Hyperparameters.from_env({**os.environ, "DATA_PATH": "none"})
    except ValueError as error:
        parser.error(str(error))
    torch.manual_seed(hp.seed)
    gpt = script.GPT(hp, torch.bfloat16)
    for param in gpt.parameters():
        param.normal_(std=args.std)
    runtime = script.Runtime(0, 1, torch.device("cpu"), torch.bfloat16, False, code)
    artifact = len(script.export(gpt, hp, runtime)[0])
    num_params = sum(param.numel() for param in gpt.parameters())
    left = script.SIZE_LIMIT - artifact - len(code)
    print(f"parameters {num_params:>12,}")
    print(f"artifact   {artifact:>12,} bytes, {8 * artifact / num_params:.2f} bits per parameter")
    print(f"code       {len(code):>12,} bytes, packed with --minify")
    print(f"left       {left:>12,} bytes of {script.SIZE_LIMIT:,}")
    return int(left < 0)


if __name__ == "__main__":
    sys.exit(main())
