"""sample.py: text from each file that a run writes, with its own script; clear errors."""

import re
import shutil
import sys

import caseops
import pytest
import sample
import sentencepiece
from runs import SCRIPT, run_here
from texts import TEXTS, train_tokenizer

# A model that continues with the id of the last token plus the length of the context.
EDITED = f"""{SCRIPT.read_text()}
class GPT(GPT):
    def logits(self, ids): return torch.eye(384)[(ids.flatten() + ids.shape[1]) % 384]
"""


def write(capsys, model, prompt: str, *options) -> str:
    sample.main([str(model), prompt, *map(str, options)])
    return capsys.readouterr().out


def test_each_file_of_a_run_writes_text(trained, capsys):
    """Characters that the encoding of stdout lacks are printed as escapes. The prompt ends with a
    byte that is not UTF-8."""
    sys.stdout.reconfigure(encoding="ascii")
    seeds = {"final_model.int8.ptz": 0, "final_model.pt": 1, "checkpoints/test.pt": 1}
    texts, prompt = [], "The 行\udcff"
    for name, seed in seeds.items():
        texts.append(write(capsys, trained[0] / name, prompt, "--tokens=9", f"--seed={seed}"))
    assert texts[0] != texts[1] == texts[2]
    assert all(text.startswith("The \\u884c") for text in texts)


@pytest.mark.parametrize("prompt", ["", 40 * "7", "The NASA"])
def test_a_prompt_in_caseops_follows_bos_and_keeps_its_end(trained, tmp_path, capsys, prompt):
    """The printed text has capitals in place of CaseOps marks."""
    script, tokenizer = tmp_path / "edited.py", tmp_path / "caseops.model"
    script.write_text(EDITED)
    lines = (caseops.encode(line) for text in TEXTS for line in text.splitlines())
    tokenizer.write_bytes(train_tokenizer(sentence_iterator=lines, **caseops.TRAINER_SETTINGS))
    sp = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    ids = [1, *sp.encode(caseops.encode(prompt))]
    options = ("--script", script, "--tokenizer", tokenizer, "--tokens=5", "--temperature=0")
    text = write(capsys, trained[0] / "final_model.pt", prompt, *options)
    for _ in range(5):
        ids.append((ids[-1] + min(len(ids), 32)) % 384)
    assert text == f"{caseops.decode(sp.decode(ids))}\n" and text.startswith(prompt)


def test_an_error_says_what_is_missing(tmp_path, trained):
    copied = str(shutil.copy(trained[0] / "final_model.pt", tmp_path))
    model = str(trained[0] / "final_model.pt")
    for arguments, words in [
        ([copied], r"does not fit: .*; --script logs/RUN_ID.txt takes"),
        ([model, "--tokenizer=none"], "none.* set --tokenizer"),
        ([model, "--tokens=-1"], "argument --tokens: '-1' is not a whole number >= 0$"),
        (["The function"], "'The function' is not a file; first the model, then the prompt"),
    ]:
        result = run_here(tmp_path, {}, sample, arguments)
        assert result.returncode and re.search(words, result.stderr.strip()), result.stderr


def test_the_end_of_the_document_and_a_misspelled_knob_are_named(trained, tmp_path):
    """The document ends with the token that begins the next one. The script is in a log."""
    log = tmp_path / "log.txt"
    edited = EDITED.replace("(ids.flatten() + ids.shape[1]) % 384", "[1] * ids.shape[1]")
    log.write_text(f"{edited}\n{'=' * 100}\nRunning Python 3")
    arguments = [f"{trained[0]}/final_model.pt", "The", f"--script={log}", "--temperature=0"]
    result = run_here(tmp_path, {"ITERATION": "5"}, sample, arguments)
    assert result.stdout == "The\n" and "(the document ended after 0 tokens)" in result.stderr
    assert "unknown_knob:ITERATION is ignored: did you mean ITERATIONS?" in result.stderr
