"""data/demo_corpus.py: the split, and a new build after a change of the code."""

import caseops
import demo_corpus
import files
import pytest
import tokenizer_tools
from texts import TEXTS


def test_nothing_of_a_held_out_source_is_in_training(monkeypatch):
    """Training has no docstring of it, and no piece of one. It has all other texts, shuffled."""
    monkeypatch.setattr(demo_corpus, "NUM_VAL_SOURCES", 3)
    shared = "shared " * 100 + "end"
    pieces = {name: [f"{name}{part} " * 250 + "end" for part in range(4)] for name in "abcdefgh"}
    sources = {name: [name, "\n\n".join([*pieces[name], shared])] for name in pieces}
    val, train = demo_corpus.split_documents(sources)
    held_out = {document[0] for document in val} - {"s"}
    assert len(held_out) == 3 and not held_out & {document[0] for document in train}
    assert shared in val and shared not in train
    assert {*val, *train} == {shared, *sources, *sum(pieces.values(), [])}
    assert train != sorted(train)
    assert demo_corpus.split_documents(dict(reversed(sources.items()))) == (val, train)


@pytest.mark.parametrize("module", [caseops, demo_corpus, files, tokenizer_tools])
def test_a_demo_of_an_older_script_is_made_again(tmp_path, monkeypatch, capsys, module):
    """Otherwise a score on its text would pass for one on today's text. Another tokenizer stays."""
    older, dataset = tmp_path / "older.py", tmp_path / "dataset"
    tokenizer = tmp_path / "demo_a.model"
    older.write_text("an older script")
    monkeypatch.setattr(demo_corpus, "NUM_VAL_SOURCES", 4)
    monkeypatch.setattr("sys.argv", ["", f"--dataset={dataset}", f"--tokenizer={tokenizer}"])
    for script, texts in ((older, TEXTS[9:]), (module.__file__, TEXTS)):
        monkeypatch.setattr(module, "__file__", str(script))
        sources = {text: [text] for text in texts}, []
        monkeypatch.setattr(demo_corpus, "collect_sources", lambda found=sources: found)
        demo_corpus.main()
        demo_corpus.main()
    other = tokenizer.rename(tmp_path / "mine.model")
    monkeypatch.setattr("sys.argv", ["", f"--dataset={dataset}", f"--tokenizer={other}"])
    other.write_bytes(b"mine")
    with pytest.raises(SystemExit):
        demo_corpus.main()
    assert other.read_bytes() == b"mine"
    printed = capsys.readouterr().out.split("demo_corpus:documents:")[1:]
    assert printed[0] == printed[1] != printed[2] == printed[3]
