"""recipe.py: scripts with recipes, anywhere; why a recipe does not fit; patches after an edit."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import recipe
from runs import ROOT, SCRIPT
from scripts import NAMES

pytestmark = [
    pytest.mark.baseline,
    pytest.mark.skipif(shutil.which("git") is None, reason="needs git"),
]

# A script in which "again" and "twice" come twice.
SMALL = "".join(f"line_{i} = {i}\n" + "again\ntwice\n" * (i in (6, 9)) for i in range(15))
EDITS = {"early": ("line_2", "early"), "late": ("9\nagain\n", "9\nagain\nlate\n")}


def run(folder: Path, *command: str) -> str:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command, cwd=folder, **options).stdout


def commit(folder: Path) -> None:
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    run(folder, "git", "add", ".")
    run(folder, "git", *author, "commit", "-m", "edit")


@pytest.fixture
def golf(tmp_path) -> Path:
    """A subfolder of a repository, with recipe.py, a small script and two patches."""
    folder = tmp_path / "golf"
    (folder / "tests" / "tools").mkdir(parents=True)
    (folder / "tests" / "recipes").mkdir()
    shutil.copy(recipe.__file__, folder / "tests" / "tools")
    run(tmp_path, "git", "init")
    (folder / "train_gpt.py").write_text(SMALL)
    commit(folder)
    for name, (old, new) in EDITS.items():
        (folder / "train_gpt.py").write_text(SMALL.replace(old, new))
        diff = run(folder, "git", "diff", "--relative", "-U1", "train_gpt.py")
        (folder / "tests" / "recipes" / f"{name}.patch").write_text(diff)
    (folder / "train_gpt.py").write_text(SMALL)
    (folder / "tests" / "recipes" / "record.txt").write_text("early.patch\nlate.patch\n")
    return folder


def call(folder: Path, *arguments: str) -> str:
    return run(folder, sys.executable, "tests/tools/recipe.py", *arguments)


def test_a_record_is_what_git_apply_makes_of_its_list(tmp_path):
    shutil.copy(SCRIPT, tmp_path)
    patches = (ROOT / "tests/recipes/record1855.txt").read_text().split()
    run(tmp_path, "git", "apply", *(str(ROOT / patch) for patch in patches))
    written = recipe.write_script(["record1855"], tmp_path / "record.py")
    assert written.read_text() == (tmp_path / "train_gpt.py").read_text() != SCRIPT.read_text()


def test_a_record_is_next_to_the_script(golf, monkeypatch):
    """With all patches of its list. Also in a repository, with the temporary files in it, too."""
    monkeypatch.setenv("TMPDIR", str(golf))
    assert call(golf, "record") == f"{golf}/record.py\n"
    both = SMALL.replace(*EDITS["early"]).replace(*EDITS["late"])
    assert (golf / "record.py").read_text() == both
    assert "record.py exists: delete it, or name another with -o" in call(golf, "record")


@pytest.mark.parametrize(
    "names, edit, words",
    [
        ("int7", "", "'int7' is not a recipe: recipe.py --list shows all"),
        ("xsa value_residual depth_recurrence", "", "value_residual and depth_recurrence exclude"),
        ("record min_lr min_lr", "", "min_lr is already in the script"),
        ("leaky_relu", "F.silu(x)", "does not fit: 'x = F.silu(x)' is in place of 'x = F.relu(x)."),
    ],
)
def test_a_recipe_that_cannot_be_applied_is_named(tmp_path, names, edit, words):
    output = tmp_path / "output.py"
    (tmp_path / "edited.py").write_text(SCRIPT.read_text().replace("F.relu(x).square()", edit))
    with pytest.raises(ValueError, match="^[^\n]*$") as raised:
        recipe.write_script(names.split(), output, tmp_path / "edited.py" if edit else SCRIPT)
    assert words in str(raised.value) and not output.exists()


def test_a_patch_that_git_could_misplace_is_refused(tmp_path, monkeypatch):
    patch = tmp_path / "blank.patch"
    patch.write_text("--- a/train_gpt.py\n+++ b/train_gpt.py\n@@ -9,2 +9,3 @@\n \n+x = 1\n \n")
    monkeypatch.setitem(recipe.PATCHES, "blank", patch)
    with pytest.raises(ValueError, match="^blank inserts between blank lines"):
        recipe.write_script(["blank"], tmp_path / "output.py")


def test_the_list_describes_each_recipe_and_record(capsys):
    recipe.main(["--list"])
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in lines] == sorted({*NAMES, *recipe.RECORDS})


def test_a_list_that_nobody_reads_to_its_end_is_no_error():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, recipe.__file__, "--list"]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert result.stderr == b""


def test_patches_follow_the_script(golf):
    """Five new lines put a twin of its context where the second patch would insert."""
    patches = [golf / "tests" / "recipes" / f"{name}.patch" for name in EDITS]
    before = [patch.read_text() for patch in patches]
    edited = 5 * "new\n" + SMALL
    (golf / "train_gpt.py").write_text(edited)
    assert call(golf, "--refresh") == "early: rewritten\nlate: rewritten\n"
    assert call(golf, "--refresh") == ""
    call(golf, "record")
    expected = edited.replace(*EDITS["early"]).replace(*EDITS["late"])
    assert (golf / "record.py").read_text() == expected
    commit(golf)
    (golf / "train_gpt.py").write_text(SMALL)
    commit(golf)
    assert call(golf, "--refresh", "HEAD~1") == "early: rewritten\nlate: rewritten\n"
    assert [patch.read_text() for patch in patches] == before


def test_a_patch_in_conflict_is_named_and_stays(golf):
    """Until it is edited by hand. A patch whose lines have not moved stays, too."""
    late = golf / "tests" / "recipes" / "late.patch"
    before = late.read_text()
    (golf / "train_gpt.py").write_text(SMALL.replace("9\nagain", "9\nchanged"))
    words = "late conflicts with the edit after 'line_9 = 9'; its patch stays as it is\n"
    assert call(golf, "--refresh") == words and late.read_text() == before
    late.write_text(before.replace("again", "changed"))
    assert call(golf, "--refresh") == ""
