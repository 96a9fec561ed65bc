"""sample.py: text from each file that a run writes, with its own script; clear errors."""

import re

import caseops
import sample
import sentencepiece
from runs import SCRIPT, failed, run_here
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
    """The prompt ends with a byte that is not UTF-8."""
    seeds = {"final_model.int8.ptz": 0, "final_model.pt": 1, "checkpoints/test.pt": 1}
    texts, options = [], ("The \udcff", "--tokens=9")
    for name, seed in seeds.items():
        texts.append(write(capsys, trained[0] / name, *options, f"--seed={seed}"))
    assert texts[0] != texts[1] == texts[2] and texts[0].startswith("The")


def test_a_prompt_in_caseops_follows_bos_and_keeps_its_end(trained, tmp_path, capsys, monkeypatch):
    """The printed text has capitals in place of CaseOps marks."""
    prompt = "The NASA" + 40 * "7"
    script, tokenizer = tmp_path / "edited.py", tmp_path / "caseops.model"
    script.write_text(EDITED)
    lines = (caseops.encode(line) for text in TEXTS for line in text.splitlines())
    tokenizer.write_bytes(train_tokenizer(sentence_iterator=lines, **caseops.TRAINER_SETTINGS))
    sp = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    ids = [1, *sp.encode(caseops.encode(prompt))]
    monkeypatch.setenv("TOKENIZER_PATH", str(tokenizer))
    options = ("--script", script, "--tokens=5", "--temperature=0")
    text = write(capsys, trained[0] / "final_model.pt", prompt, *options)
    for _ in range(5):
        ids.append((ids[-1] + min(len(ids), 32)) % 384)
    control = r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"  # which bytes are drawn depends on TEXTS
    shown = re.sub(control, lambda c: f"\\x{ord(c[0]):02x}", caseops.decode(sp.decode(ids)))
    assert text == f"{shown}\n" and text.startswith(prompt)


def test_control_characters_are_escaped(trained, tmp_path, tokenizer, capsys):
    """A terminal obeys them, and a model may draw any byte."""
    sp, script = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer)), tmp_path / "e.py"
    for piece, shown in (("<0x1B>", "\\x1b"), ("<0x0D>", "\\x0d"), ("<0x09>", "\t")):
        last = f"[{sp.piece_to_id(piece)}] * ids.shape[1]"
        script.write_text(EDITED.replace("(ids.flatten() + ids.shape[1]) % 384", last))
        options = (f"--script={script}", "--tokens=2", "--temperature=0")
        assert write(capsys, trained[0] / "final_model.pt", "\x9bé", *options) == (
            f"\\x9bé{shown}{shown}\n"
        )


def test_a_wrong_model_or_tokenizer_is_named(tmp_path, trained):
    result = run_here(tmp_path, {}, sample, ["The function"])
    assert result.returncode == 2 and "; first the model, then the prompt" in result.stderr
    (tmp_path / "no_bos.model").write_bytes(train_tokenizer(bos_id=-1))
    (tmp_path / "nan.py").write_text(EDITED.replace("torch.eye(384)", "torch.nan * torch.eye(384)"))
    for environ, words in [
        ({"TOKENIZER_PATH": "none"}, "'none': start in the folder of the run, or set TOKENIZER"),
        ({"TOKENIZER_PATH": "no_bos.model"}, "has no BOS"),
        ({}, "final_model.pt: its predictions are not finite"),
    ]:
        options = [f"{trained[0]}/final_model.pt", *(() if environ else ["--script=nan.py"])]
        failed(run_here(tmp_path, environ, sample, options), words)
    error = failed(run_here(tmp_path, {}, sample, [str(SCRIPT)]))
    assert error.startswith(f"{SCRIPT} is damaged or not a model file")


def test_the_end_of_the_document_is_named(trained, tmp_path):
    """The document ends with the token that begins the next one. The script is in a log."""
    log = tmp_path / "log.txt"
    edited = EDITED.replace("(ids.flatten() + ids.shape[1]) % 384", "[1] * ids.shape[1]")
    log.write_text(f"{edited}\n{'=' * 100}\nRunning Python 3")
    arguments = [f"{trained[0]}/final_model.pt", "The", f"--script={log}", "--temperature=0"]
    result = run_here(tmp_path, {}, sample, arguments)
    assert result.stdout == "The\n" and "(the document ended after 0 tokens)" in result.stderr
    assert "WARNING" in result.stderr  # an edited script
