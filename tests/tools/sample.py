"""Write text with a trained model: an artifact, a final_model.pt or a checkpoint.

    python tests/tools/sample.py final_model.int8.ptz "The"

All but a checkpoint need the final_result.json of their run in the same folder, for its knobs."""

import math
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from sentencepiece import SentencePieceProcessor
from trained import load_script, model_parser, saved_knobs, unknown_knobs

sys.path.append(str(Path(__file__).resolve().parents[2] / "data"))

import caseops  # noqa: E402


def load_model(script: ModuleType, path: Path) -> tuple[Any, torch.nn.Module]:
    """Return the knobs and the model in fp32, both as the run's script defines them."""
    knobs = saved_knobs(path)
    if unknown := unknown_knobs(script, knobs):
        print(f"warning: {path} has knobs that the script lacks: {unknown}", file=sys.stderr)
    try:
        hp = script.Hyperparameters.from_env(knobs)
        gpt = script.GPT(hp, torch.float32)
        script.load_weights(gpt, path.read_bytes(), str(path))
    except script.InputError as error:
        is_damaged = "is damaged" in str(error)
        advice = "copy the file again" if is_damaged else "--script names another script"
        sys.exit(f"{error} ({advice})")
    return hp, gpt.eval().to("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def generate(gpt: torch.nn.Module, ids: list[int], seq_len: int, args: Namespace) -> None:
    """Append to ids, until the document ends. The model sees the last seq_len of them."""
    device = next(gpt.parameters()).device
    random = torch.Generator().manual_seed(args.seed)
    for _ in range(args.tokens):
        logits = gpt.logits(torch.tensor([ids[-seq_len:]], device=device))[-1].cpu()
        probabilities = (logits / max(args.temperature, 1e-6)).softmax(dim=0)
        ids.append(int(torch.multinomial(probabilities, 1, generator=random)))
        if ids[-1] == ids[0]:  # BOS: the next document
            break


def main(arguments: list[str] | None = None) -> None:
    parser = model_parser(__doc__.split(":")[0])
    parser.add_argument("prompt", nargs="?", default="", help="default: a new document")
    parser.add_argument("--tokens", type=int, default=100, help="default: 100")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the most likely token")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives another text")
    parser.add_argument("--tokenizer", help="default: TOKENIZER_PATH of the run")
    args = parser.parse_args(arguments)
    try:
        args.prompt.encode()
    except UnicodeEncodeError:
        sys.exit("the prompt is not UTF-8: write it in a terminal that uses UTF-8")
    if not 0 <= args.temperature < math.inf:
        sys.exit(f"--temperature {args.temperature} must be finite, 0 or more")
    if not 0 <= args.seed < 2**63:
        sys.exit(f"--seed {args.seed} must be from 0 to 2**63 - 1")
    hp, gpt = load_model(load_script(args.script), args.model)
    try:
        tokenizer = SentencePieceProcessor(model_file=args.tokenizer or hp.tokenizer_path)
    except (OSError, RuntimeError) as error:
        sys.exit(f"tokenizer: {error}: start in the folder of the run, or set --tokenizer")
    if tokenizer.vocab_size() != hp.vocab_size:
        sys.exit(f"the tokenizer does not have VOCAB_SIZE={hp.vocab_size} pieces: set --tokenizer")
    has_marks = caseops.is_caseops(tokenizer)
    prompt = caseops.encode(args.prompt) if has_marks else args.prompt
    ids = [tokenizer.bos_id(), *tokenizer.encode(prompt)]  # a document begins with BOS
    generate(gpt, ids, hp.train_seq_len, args)
    text = tokenizer.decode(ids)
    print(caseops.decode(text) if has_marks else text)


if __name__ == "__main__":
    main()
