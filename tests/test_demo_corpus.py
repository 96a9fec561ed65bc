"""data/demo_corpus.py: which documents train, and when the files are made again."""

import demo_corpus
from texts import TEXTS


def test_nothing_of_a_held_out_source_is_in_training(monkeypatch):
    """Neither a whole docstring nor a piece of a long one. All other texts are there."""
    monkeypatch.setattr(demo_corpus, "NUM_VAL_SOURCES", 3)
    shared = "shared " * 100 + "end"
    sources = {}
    for name in "abcdefgh":
        paragraphs = [f"{name}{part} " * 250 + "end" for part in range(4)]
        sources[name] = [f"{name} short", "\n\n".join([*paragraphs, shared])]
    val, train = demo_corpus.split_documents(sources)
    held_out = {document[0] for document in val} - {"s"}
    assert len(held_out) == 3 and not held_out & {document[0] for document in train}
    assert shared in val and shared not in train
    pieces = [piece for texts in sources.values() for piece in texts[1].split("\n\n")]
    assert {*val, *train} == {*pieces, *(f"{name} short" for name in sources)}
    assert train != sorted(train)  # mixed, in an order that depends on the texts alone
    assert demo_corpus.split_documents(dict(reversed(sources.items()))) == (val, train)


def test_a_demo_of_an_older_script_is_made_again(tmp_path, monkeypatch, capsys):
    """Otherwise its score would pass for one on today's text."""
    dataset, tokenizer = tmp_path / "dataset", tmp_path / "tokenizer.model"
    monkeypatch.setattr(demo_corpus, "strongest_lzma", len)
    monkeypatch.setattr(demo_corpus, "NUM_VAL_SOURCES", 4)
    monkeypatch.setattr("sys.argv", ["", f"--dataset={dataset}", f"--tokenizer={tokenizer}"])
    older = tmp_path / "older.py"
    older.write_text("an older script")
    with monkeypatch.context() as patch:
        patch.setattr(demo_corpus, "__file__", str(older))
        patch.setattr(demo_corpus, "collect_sources", lambda: {text: [text] for text in TEXTS[9:]})
        demo_corpus.main()
    monkeypatch.setattr(demo_corpus, "collect_sources", lambda: {text: [text] for text in TEXTS})
    for _ in range(2):
        demo_corpus.main()
    first, second, third = capsys.readouterr().out.split("demo_corpus:documents:")[1:]
    assert first != second == third
