"""Write text with a trained model: an artifact, a final_model.pt or a checkpoint.

    python tests/tools/sample.py final_model.int8.ptz "The"

Knobs come from the environment, else from the run that wrote the file, as in score.py."""

import re
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for python -P

import begin  # noqa: F401  (first: it says what to install)
import torch
from sentencepiece import SentencePieceProcessor
from trained import decode, encode, files, load_script, model_parser, open_model


@torch.no_grad()
def generate(gpt: torch.nn.Module, ids: list[int], seq_len: int, args: Namespace) -> None:
    """Append sampled tokens to ids until the document ends. The model sees the last seq_len ids."""
    device = next(gpt.parameters()).device
    random = torch.Generator().manual_seed(args.seed)
    for _ in range(args.tokens):
        logits = gpt.logits(torch.tensor([ids[-seq_len:]], device=device))[-1].cpu()
        probabilities = (logits / max(args.temperature, 1e-6)).softmax(dim=0)
        if probabilities.isnan().any():
            sys.exit(f"{args.model}: its predictions are not finite: its training diverged")
        ids.append(int(torch.multinomial(probabilities, 1, generator=random)))
        if ids[-1] == ids[0]:  # BOS: the next document
            break


def main(arguments: list[str] | None = None) -> None:
    parser = model_parser(__doc__)
    add, number = parser.add_argument, files.number
    add("prompt", nargs="?", default="", help="default: a new document")
    add("--tokens", type=number(int, 0), default=100, metavar="N", help="default: 100")
    add("--temperature", type=number(float, 0), default=0.8, help="0: the most likely token")
    add("--seed", type=number(int, 0, 2**63 - 1), default=0, help="another seed, another text")
    error, order = parser.error, "first the model, then the prompt in quotes: sample.py MODEL 'The'"
    parser.error = lambda text: error(text if "--" in text else f"{text}; {order}")
    args = parser.parse_args(arguments)
    script = load_script(args.script)
    try:
        gpt, runtime = open_model(script, args.model, {"DTYPE": "fp32"})
    except script.InputError as error:
        sys.exit(str(error))
    hp = gpt.eval().hp
    # Knobs that are misspelled, as in score.py, without a validation split.
    script.log_warnings(SimpleNamespace(hp=hp, is_tokenizer_right=True), runtime)
    for warning in runtime.log.waiting:
        print(warning, file=sys.stderr)
    try:
        tokenizer = SentencePieceProcessor(model_proto=Path(hp.tokenizer_path).read_bytes())
    except (OSError, RuntimeError) as error:
        sys.exit(f"tokenizer: {error}: start in the folder of the run, or set TOKENIZER_PATH")
    if (size := tokenizer.vocab_size()) != hp.vocab_size:
        sys.exit(f"the tokenizer has {size} pieces, the model {hp.vocab_size}: set TOKENIZER_PATH")
    if tokenizer.bos_id() < 0:
        sys.exit("the tokenizer has no BOS, with which a document begins: set TOKENIZER_PATH")
    prompt = args.prompt.encode(errors="surrogateescape").decode(errors="replace")  # of any bytes
    ids = [tokenizer.bos_id(), *encode(tokenizer, prompt)]  # a document begins with BOS
    prompt_size = len(ids)
    generate(gpt, ids, hp.train_seq_len, args)
    # A terminal obeys control characters. Line ends and tabs do no harm.
    text, control = decode(tokenizer, ids), r"[^\n\t -~\xa0-\U0010ffff]"
    print(re.sub(control, lambda c: f"\\x{ord(c[0]):02x}", text), flush=True)
    if ids[0] in ids[prompt_size:]:
        print(f"(the document ended after {len(ids) - prompt_size - 1} tokens)", file=sys.stderr)


if __name__ == "__main__":
    main()
