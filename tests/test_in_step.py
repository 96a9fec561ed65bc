"""train_record.py is train_gpt.py with more knobs: an edit of one belongs in both."""

import ast
import zlib

import pytest
from runs import SCRIPT

RECORD_SCRIPT = SCRIPT.with_name("tests") / "records" / "train_record.py"
# Number and checksum of the lines of train_gpt.py that train_record.py lacks.
LACKING = (67, 3762674332)
ADVICE = """
An edit of train_gpt.py is missing in tests/records/train_record.py. To port an uncommitted one:
    git show HEAD:train_gpt.py > old.py
    git merge-file tests/records/train_record.py old.py train_gpt.py
If the scripts differ on purpose, set LACKING in tests/test_in_step.py to {}.
A fork that does not use train_record.py may ignore this: pytest -m "not baseline"."""

pytestmark = pytest.mark.baseline


def names(tree: ast.AST) -> set[str]:
    """All names that this code defines or uses, also as keys of dictionaries."""
    kinds = {"id", "attr", "arg", "name", "value"}
    values = (getattr(node, kind, None) for node in ast.walk(tree) for kind in kinds)
    return {value for value in values if isinstance(value, str) and value.isidentifier()}


def functions(tree: ast.AST, prefix: str = "") -> dict[str, ast.AST]:
    """Functions and methods by their qualified names."""
    found = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            found |= functions(node, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            found[prefix + node.name] = node
    return found


def test_the_record_script_has_every_line_of_train_gpt():
    texts = [path.read_text(encoding="utf-8") for path in (SCRIPT, RECORD_SCRIPT)]
    has = set(texts[1].splitlines())
    lines = [line for line in texts[0].splitlines() if line not in has]
    lacking = (len(lines), zlib.crc32("\n".join(lines).encode()))
    assert lacking == LACKING, ADVICE.format(lacking)


def test_functions_differ_only_where_the_record_script_has_a_name_of_its_own():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (SCRIPT, RECORD_SCRIPT)]
    script, record = map(functions, trees)
    own = names(trees[1]) - names(trees[0])
    differ = []
    for name, function in script.items():
        is_same = name in record and ast.dump(function) == ast.dump(record[name])
        if not is_same and not (name in record and names(record[name]) & own):
            differ.append(name)
    assert not differ, ADVICE.format("what the other test says")
