"""Write text with a trained model: an artifact, a final_model.pt or a checkpoint.

    python tests/tools/sample.py final_model.int8.ptz "The"

Knobs come from the environment, else from the run that wrote the file, as in score.py."""

import math
import sys
from argparse import Namespace

import torch
from sentencepiece import SentencePieceProcessor
from trained import decode, encode, load_script, model_parser, open_model


@torch.no_grad()
def generate(gpt: torch.nn.Module, ids: list[int], seq_len: int, args: Namespace) -> None:
    """Append sampled tokens to ids until the document ends. The model sees the last seq_len ids."""
    device = next(gpt.parameters()).device
    random = torch.Generator().manual_seed(args.seed)
    for _ in range(args.tokens):
        logits = gpt.logits(torch.tensor([ids[-seq_len:]], device=device))[-1].cpu()
        probabilities = (logits / max(args.temperature, 1e-6)).softmax(dim=0)
        ids.append(int(torch.multinomial(probabilities, 1, generator=random)))
        if ids[-1] == ids[0]:  # BOS: the next document
            break


def main(arguments: list[str] | None = None) -> None:
    parser = model_parser(__doc__)
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
    script = load_script(args.script)
    try:
        gpt, runtime = open_model(script, args.model, {"DEVICE": "auto", "DTYPE": "fp32"})
    except script.InputError as error:
        sys.exit(f"{error} (--script names another script)")
    for warning in runtime.log.waiting:
        print(warning, file=sys.stderr)
    hp = gpt.eval().hp
    try:
        tokenizer = SentencePieceProcessor(model_file=args.tokenizer or hp.tokenizer_path)
    except (OSError, RuntimeError) as error:
        sys.exit(f"tokenizer: {error}: start in the folder of the run, or set --tokenizer")
    if tokenizer.vocab_size() != hp.vocab_size:
        sys.exit(f"the tokenizer does not have VOCAB_SIZE={hp.vocab_size} pieces: set --tokenizer")
    ids = [tokenizer.bos_id(), *encode(tokenizer, args.prompt)]  # a document begins with BOS
    generate(gpt, ids, hp.train_seq_len, args)
    print(decode(tokenizer, ids))


if __name__ == "__main__":
    main()
