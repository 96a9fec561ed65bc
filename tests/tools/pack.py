"""Write a small, self-extracting copy of a script: its bytes count against the 16,000,000.

    python tests/tools/pack.py [--minify] train_gpt.py packed.py

packed.py runs, also under torchrun, and can be imported. The "Code size" in its log is its own."""

import ast
import base64
import importlib.util
import lzma
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for python -P

from logs import read_script
from trained import existing_file, files, start_program

# Tracebacks, inspect and torch.compile read source lines from linecache. The empty lines keep the
# line numbers of the text apart from those of this template. Before Python 3.13 the default
# excepthook reads the file instead of linecache. The text runs in the module's own namespace, so
# that its classes and functions can be pickled.
TEMPLATE = """\
# A packed script. To read it, replace the last line with print(source).
import base64, io, linecache, lzma, sys, traceback
source = 6 * "\\n" + lzma.decompress(base64.b85decode("{packed}")).decode()
linecache.cache[__file__] = len(source), None, io.StringIO(source).readlines(), __file__
if __name__ == "__main__": sys.excepthook = traceback.print_exception
exec(compile(source, __file__, "exec"))
"""


def minify(source: str) -> str:
    """Remove comments and docstrings. A script that uses `__doc__` keeps the module's. Raises
    ValueError if Python cannot write it again: a number may be too long, for example."""
    tree = ast.parse(source)
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    for node in ast.walk(tree):
        kept = isinstance(node, ast.Module) and "__doc__" in source
        if isinstance(node, kinds) and ast.get_docstring(node) is not None and not kept:
            node.body = node.body[1:] or [ast.Pass()]
    try:
        return ast.unparse(tree) + "\n"
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{error}: pack it without --minify") from None


def pack(path: Path, is_minified: bool = True) -> str:
    """Return a script, in ASCII, that does what this one does."""
    source = importlib.util.decode_source(read_script(path))  # as its mark or coding line says
    compile(source, path, "exec")  # a broken script is not packed
    source = minify(source) if is_minified else source
    best_for_text = {"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "pb": 0}
    data = lzma.compress(source.encode(), format=lzma.FORMAT_ALONE, filters=[best_for_text])
    return TEMPLATE.format(packed=base64.b85encode(data).decode())


def main() -> None:
    parser = start_program(__doc__)
    parser.add_argument("script", type=existing_file)
    parser.add_argument("packed", type=files.path, nargs="?", help="the file to write")
    parser.add_argument("--minify", action="store_true", help="remove comments and docstrings")
    args = parser.parse_args()
    if args.packed is None or (args.packed.exists() and not args.packed.is_file()):
        parser.error(f"name the file to write: pack.py {args.script} packed.py")
    if args.packed.exists() and args.packed.samefile(args.script):
        parser.error(f"{args.packed} would overwrite its own source: name another file")
    try:
        if args.packed.exists() and not args.packed.read_bytes().startswith(b"# A packed script."):
            parser.error(f"{args.packed} exists, and is no packed script: name another file")
        packed = pack(args.script, args.minify)
        files.write_file(args.packed.resolve(), packed.encode())
    except OSError as error:
        parser.error(f"{error}: name another file")
    except (RecursionError, SyntaxError, ValueError) as error:
        parser.error(f"{args.script}: {error}")
    size = len(read_script(args.script))
    print(f"{args.script}: {size} bytes, {args.packed}: {len(packed)} bytes")


if __name__ == "__main__":
    main()
