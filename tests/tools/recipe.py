"""Write a copy of train_gpt.py with recipes, or with those of a record:

    python tests/tools/recipe.py leaky_relu min_lr -o mine.py
    python tests/tools/recipe.py record1855      # writes record1855.py, next to train_gpt.py

--refresh: after an edit of train_gpt.py, rewrite the patches whose lines have moved."""

import argparse
import os
import re
import signal
import subprocess
import sys
from operator import eq
from pathlib import Path
from tempfile import TemporaryDirectory

SCRIPT = Path(__file__).resolve().parents[2] / "train_gpt.py"
RECIPES = SCRIPT.parent / "tests" / "recipes"
PATCHES = {path.stem: path for path in sorted(RECIPES.glob("*.patch"))}
LISTS = sorted(RECIPES.glob("*.txt"))
RECORDS = {path.stem: re.findall(r"(\w+)\.patch", path.read_text()) for path in LISTS}
EXCLUSIVE = [("value_residual", "depth_recurrence"), ("value_residual", "parallel_residuals")]
FILES = ("a/train_gpt.py", "b/train_gpt.py", "c/train_gpt.py")


def git(*arguments: str | Path, scripts: list[str]) -> tuple[bool, str]:
    """Run git on FILES with these texts, outside any repository and without the user's settings.
    Returns whether it succeeded, and its output or the first file."""
    with TemporaryDirectory() as folder:
        environ = os.environ | {"GIT_CEILING_DIRECTORIES": os.path.dirname(folder)}
        environ["GIT_CONFIG_GLOBAL"] = os.devnull
        for file, script in zip(FILES, scripts, strict=False):
            Path(folder, file).parent.mkdir()
            Path(folder, file).write_text(script, encoding="utf-8")
        options = {"cwd": folder, "env": environ, "encoding": "utf-8"}
        result = subprocess.run(["git", *arguments], capture_output=True, **options)
        return result.returncode == 0, result.stdout or Path(folder, FILES[0]).read_text("utf-8")


def read_hunks(name: str) -> list[tuple[int, list[str]]]:
    """For each hunk of a patch, the index of its first line and the lines that it needs there."""
    hunks = re.findall(r"^@@ -(\d+).*\n((?:[-+ ].*\n)+)", PATCHES[name].read_text("utf-8"), re.M)
    return [(int(i) - 1, re.findall(r"^[- ](.*)", hunk, re.M)) for i, hunk in hunks]


def find_misfit(name: str, lines: list[str]) -> str:
    """Name a line that the recipe needs, and the one in its place."""
    for start, needed in read_hunks(name):
        ranks = [(sum(map(eq, needed, lines[i:])), -abs(i - start)) for i in range(len(lines))]
        for line, found in zip(needed, lines[ranks.index(max(ranks)) :], strict=False):
            if line != found:
                return f"{found.strip()!r} is in place of {line.strip()!r}"
    return "its lines have another order"


def apply(name: str, script: str) -> str:
    """Return the script with this recipe, or raise ValueError with a line that says why not."""
    if not all("".join(needed).strip() for _, needed in read_hunks(name)):
        raise ValueError(f"{name} inserts between blank lines: git may misplace it, so move it")
    if git("apply", "--directory=a", "-R", "--check", PATCHES[name], scripts=[script])[0]:
        raise ValueError(f"{name} is already in the script")
    fits, patched = git("apply", "--directory=a", PATCHES[name], scripts=[script])
    if not fits:
        raise ValueError(f"{name} does not fit: {find_misfit(name, script.splitlines())}")
    return patched


def write_script(names: list[str], output: Path, source: Path = SCRIPT) -> Path:
    """Write the source with these recipes and those of these records, or raise ValueError."""
    names = [recipe for name in names for recipe in RECORDS.get(name, [name])]
    if unknown := [name for name in names if name not in PATCHES]:
        raise ValueError(f"{unknown[0]!r} is not a recipe: recipe.py --list shows all")
    for pair in EXCLUSIVE:
        if {*pair} <= {*names}:
            raise ValueError(f"{' and '.join(pair)} exclude each other: leave one out")
    script = source.read_text(encoding="utf-8")
    for name in names:
        script = apply(name, script)
    output.write_text(script, encoding="utf-8")
    return output


def fits_exactly(name: str, script: str) -> bool:
    lines = script.splitlines()
    return all(lines[i : i + len(needed)] == needed for i, needed in read_hunks(name))


def refresh(name: str, old: str, new: str) -> None:
    """Rewrite a patch whose lines have moved since the old script, or raise ValueError."""
    if fits_exactly(name, new) and not fits_exactly(name, old):
        return  # it has been rewritten
    merges, merged = git("merge-file", *FILES, scripts=[new, old, apply(name, old)])
    if not merges:
        line = re.search(r"(.*)\n?<<<<<<<", merged)[1].strip()
        raise ValueError(f"{name} conflicts with the edit after {line!r}")
    if merged == new:
        raise ValueError(f"{name} is already in the script")
    diff = git("diff", "--no-index", "--no-prefix", "-U1", *FILES[:2], scripts=[new, merged])[1]
    if diff.splitlines()[2:] != PATCHES[name].read_text("utf-8").splitlines()[2:]:  # but the hash
        PATCHES[name].write_text(diff, encoding="utf-8")
        print(f"{name}: rewritten")


def describe(name: str) -> str:
    """Name and purpose of a recipe or record, from the page's tables."""
    page = (RECIPES / "README.md").read_text(encoding="utf-8")
    purpose = re.findall(rf"^\|[^|]*\[{name}\]\(.*?\| (.*?) \|", page, re.M)[0]
    return f"{name:20}{'published score: ' if name in RECORDS else ''}{purpose}"


def main(arguments: list[str] | None = None) -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipe or record")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the script to write")
    parser.add_argument("--script", type=Path, default=SCRIPT, help="instead of train_gpt.py")
    parser.add_argument("--list", action="store_true", help="show all recipes and records")
    refresh_help = "rewrite the patches, which fit train_gpt.py of COMMIT (default: HEAD)"
    parser.add_argument("--refresh", nargs="?", const="HEAD", metavar="COMMIT", help=refresh_help)
    args = parser.parse_intermixed_args(arguments)
    record = next((name for name in args.names if name in RECORDS), None)
    code = 0
    if args.list:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for --list | head
        print("\n".join(map(describe, sorted(PATCHES | RECORDS))))
    elif args.refresh:
        show = ["git", "show", f"{args.refresh}:./train_gpt.py"]
        shown = subprocess.run(show, cwd=SCRIPT.parent, stdout=subprocess.PIPE, encoding="utf-8")
        code = shown.returncode  # git says why
        for name in [] if code else PATCHES:
            try:
                refresh(name, shown.stdout, SCRIPT.read_text(encoding="utf-8"))
            except ValueError as error:
                print(f"{error}; its patch stays as it is", file=sys.stderr)
                code = 1
    elif record or (args.names and args.output):
        output = args.output or args.script.with_name(f"{record}.py")
        if output.exists() and not args.output:
            parser.error(f"{output} exists: delete it, or name another with -o")
        print(write_script(args.names, output, args.script))
    else:
        parser.error("name recipes and -o FILE, or a record")
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"recipe.py: {error}")
