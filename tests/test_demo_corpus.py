"""data/demo_corpus.py: the text, the split, and a new build after a change of the code."""

import hashlib
import runpy
import sys

import caseops
import demo_corpus
import files
import pytest
import tokenizer_tools
from texts import TEXTS


@pytest.mark.skipif(sys.version_info[:3] != (3, 11, 7), reason="other Pythons have other texts")
def test_the_text_is_that_of_the_pages():
    splits = demo_corpus.split_documents(demo_corpus.collect_sources()[0])
    sums = [hashlib.sha256("\0".join(split).encode()).hexdigest()[:16] for split in splits]
    assert sums == ["5f1dca7a531b0293", "c9cc2a2d10317a8b"]


def test_only_pythons_own_modules_are_read(tmp_path, monkeypatch):
    """What cannot be read, and a module that this Python lacks, costs a line."""
    for name in ("abc", "__hello__", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f'"""{name}"""')
    (tmp_path / "cmd.py").write_text("print 'Python 2'")
    (tmp_path / "this.py").symlink_to("nowhere")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)  # its import fails
    monkeypatch.setitem(sys.modules, "lzma", None)
    sources, left_out = runpy.run_path(demo_corpus.__file__)["collect_sources"]()
    assert sources == {"module abc.py": ["abc"], "module __hello__.py": ["__hello__"]}
    assert [line.split(":")[0] for line in left_out] == [
        "pydoc_data/topics.py",
        "cmd.py",
        "this.py",
    ]
    assert "without liblzma" in tokenizer_tools.lzma_score(["text"])


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
