"""sample.py: text from each file that a run writes, with its own script; clear errors."""

import io
import shutil
import sys

import caseops
import pytest
import referee
import sample
import score
import sentencepiece
import torch
from runs import SCRIPT
from texts import TEXTS, train_tokenizer

# A model that continues with the id of the last token plus the length of the context.
EDITED = f"""{SCRIPT.read_text()}
class GPT(GPT):
    def logits(self, ids): return torch.eye(384)[(ids.flatten() + ids.shape[1]) % 384]
def load_weights(gpt, data, name): pass
"""


def test_each_file_of_a_run_writes_text(trained, capsys):
    texts = []
    seeds = {"final_model.int8.ptz": 0, "final_model.pt": 1, "checkpoints/test.pt": 1}
    for name, seed in seeds.items():
        sample.main([str(trained[0] / name), "The", "--tokens=9", f"--seed={seed}"])
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1] == texts[2] and all(text.startswith("The") for text in texts)


def sample_edited(folder, tokenizer: bytes, prompt: str, capsys, script: str = EDITED) -> str:
    """Return what sample.py writes with this script and tokenizer: five tokens."""
    (folder / "edited.py").write_text(script)
    (folder / "a.model").write_bytes(tokenizer)
    knobs = {"vocab_size": 384, "train_seq_len": 32, "tokenizer_path": str(folder / "a.model")}
    knobs |= {"num_layers": 1, "model_dim": 16, "num_heads": 1, "num_kv_heads": 1}
    torch.save({"knobs": knobs}, folder / "model.pt")
    options = f"--script {folder}/edited.py --tokens 5 --temperature 0"
    sample.main([str(folder / "model.pt"), prompt, *options.split()])
    return capsys.readouterr().out


def continuation(ids: list[int]) -> list[int]:
    """Return BOS, these ids and the five that EDITED adds."""
    ids = [1, *ids]
    for _ in range(5):
        ids.append((ids[-1] + min(len(ids), 32)) % 384)
    return ids


@pytest.mark.parametrize("prompt", ["", 40 * "7"])
def test_a_prompt_follows_bos_and_keeps_its_end(tmp_path, tokenizer, capsys, prompt):
    sp = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    ids = continuation(sp.encode(prompt))
    text = sample_edited(tmp_path, tokenizer.read_bytes(), prompt, capsys)
    assert text == f"{sp.decode(ids)}\n"


def test_caseops_marks_the_prompt_and_removes_the_marks(tmp_path, capsys):
    lines = (caseops.encode(line) for text in TEXTS for line in text.splitlines())
    model = train_tokenizer(sentence_iterator=lines, **caseops.TRAINER_SETTINGS)
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = continuation(sp.encode(caseops.encode("The NASA")))
    text = sample_edited(tmp_path, model, "The NASA", capsys)
    assert text == f"{caseops.decode(sp.decode(ids))}\n" and text.startswith("The NASA")


def test_a_lone_space_that_the_tokenizer_writes_in_bytes_is_a_space(tmp_path, capsys):
    model = train_tokenizer().replace(b"\n\3\xe2\x96\x81\x15", b"\n\3\xe9\xbf\xbf\x15")
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert [sp.id_to_piece(i) for i in sp.encode("7 é")[1:4]] == ["<0xE2>", "<0x96>", "<0x81>"]
    assert sample_edited(tmp_path, model, "7 é", capsys).startswith("7 é")


def test_what_the_encoding_of_stdout_lacks_is_printed_as_an_escape(
    tmp_path, tokenizer, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "latin-1"))
    sample_edited(tmp_path, tokenizer.read_bytes(), "é 行", capsys)
    sys.stdout.flush()
    assert sys.stdout.buffer.getvalue().startswith(b"\xe9 \\u884c")


@pytest.mark.parametrize("program", [referee, sample, score])
def test_help_needs_no_docstrings(program, capsys, monkeypatch):
    """Python's option -OO removes them."""
    monkeypatch.setattr(program, "__doc__", None)
    with pytest.raises(SystemExit, match="^0$"):
        program.main(["--help"])
    assert "--script" in capsys.readouterr().out


def test_an_error_says_what_is_missing(tmp_path, trained):
    copied = shutil.copy(trained[0] / "final_model.pt", tmp_path)
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"PK")
    for arguments, words in (
        ([copied], "does not fit: .*final_result.json next to it.*--script names"),
        ([trained[0] / "final_model.pt", "--tokenizer=none"], "none.* set --tokenizer"),
        ([damaged], "damaged or not a model"),
        ([copied, "--temperature=-1"], "--temperature -1.0 must be finite, 0 or more"),
        ([copied, "--temperature=nan"], "--temperature nan must be finite, 0 or more"),
        ([copied, "\udcff"], "the prompt is not UTF-8"),
        ([copied, f"--seed={2**64}"], "--seed 18446744073709551616 must be from 0 to"),
        ([copied, f"--script={copied}"], "final_model.pt is not a train_gpt.py"),
        ([copied, f"--script={caseops.__file__}"], "caseops.py is not a train_gpt.py"),
    ):
        with pytest.raises(SystemExit, match=words):
            sample.main(list(map(str, arguments)))


def test_a_bug_in_an_edited_script_keeps_its_traceback(tmp_path, tokenizer, capsys):
    script = EDITED.replace("name): pass", "name): data.decode(8)")
    with pytest.raises(TypeError):
        sample_edited(tmp_path, tokenizer.read_bytes(), "", capsys, script)
