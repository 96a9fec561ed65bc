"""Pack a script, since its bytes count against the 16,000,000:

    python tests/tools/pack.py train_gpt.py packed.py

packed.py does what train_gpt.py does: it runs, under torchrun, too, and can be imported. It looks
for data/ beside itself, and its "Code size" is its own."""

import base64
import lzma
import sys
from pathlib import Path

# The cache of lines is for tracebacks and inspect.getsource. The text runs in the module's own
# namespace, so that its classes and functions belong to this file.
TEMPLATE = """\
# A packed script. To read it, put print(source) in the last line's place.
import base64, linecache, lzma
source = lzma.decompress(base64.b85decode("{packed}")).decode()
linecache.cache[__file__] = len(source), None, source.splitlines(True), __file__
exec(compile(source, __file__, "exec"))
"""


def pack(source: str) -> str:
    """A script that does what `source` does, in ASCII."""
    data = lzma.compress(source.encode(), format=lzma.FORMAT_ALONE, preset=9 | lzma.PRESET_EXTREME)
    return TEMPLATE.format(packed=base64.b85encode(data).decode())


def main(source: Path, packed: Path) -> None:
    if source.resolve() == packed.resolve():
        sys.exit(f"{packed} would replace its own source: name another file")
    packed.write_text(pack(source.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{source}: {source.stat().st_size} bytes, {packed}: {packed.stat().st_size} bytes")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
