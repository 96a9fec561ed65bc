"""Build the demo's tokenizer and shards out of the Python documentation that every Python carries.

    python data/demo_corpus.py [--dataset FOLDER] [--tokenizer FILE]

About 2 MB of English: the help topics (pydoc_data.topics) and the docstrings of the standard
library. The same Python version always gives the same bytes. What is there and whole is kept.

Prints what was built, its sha256 sums and, for scale, how small lzma makes the validation text.
"""

import argparse
import ast
import hashlib
import json
import lzma
import platform
import sys
import sysconfig
import warnings
from pathlib import Path

import numpy as np
import sentencepiece
from download_hf_docs_and_tokenize import Settings, export_dataset
from shards import HEADER_BYTES, locked, write_file
from tokenizer_specs import train_sentencepiece

HERE = Path(__file__).resolve().parent
VOCAB_SIZE = 1024
NUM_VAL_DOCS = 40
# Not in every installation, or not library text.
SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "tkinter",
    "turtledemo", "ensurepip", "pydoc_data", "__phello__",
}  # fmt: skip


def module_docstrings(path: Path) -> list[str]:
    """The docstrings in a source file, in the order of ast.walk."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of code that is not ours
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []  # a template, or a file for another Python
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [text for text in texts if text]


def collect_documents() -> list[str]:
    """All documents in a fixed, well mixed order; a text that stands twice is taken once.

    Raises FileNotFoundError if this Python comes without its documentation.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise FileNotFoundError(
            "this Python lacks pydoc_data.topics: use a complete Python, as from python.org"
        ) from None
    sources = [(f"topic {name}", [text]) for name, text in sorted(topics.items())]
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if not SKIPPED_FOLDERS & set(name.parts):
            sources.append((f"module {name.as_posix()}", module_docstrings(path)))
    documents, seen = {}, set()
    for name, texts in sources:
        new = [text for text in dict.fromkeys(texts) if text not in seen]
        seen.update(new)
        if new:
            documents[name] = "\n\n".join(new)
    mixed = sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest())
    return [documents[name] for name in mixed]


def strongest_lzma(data: bytes) -> int:
    """The size in bytes that the best of lzma's settings for text reaches, without a container."""
    preset = 9 | lzma.PRESET_EXTREME
    filters = (
        {"id": lzma.FILTER_LZMA2, "preset": preset, "lc": lc, "lp": 0, "pb": pb}
        for lc in range(5)
        for pb in range(3)
    )
    return min(len(lzma.compress(data, lzma.FORMAT_RAW, filters=[f])) for f in filters)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_whole(files: dict[str, Path], manifest: Path) -> bool:
    """Whether all files are there and as the manifest says."""
    try:
        sums = json.loads(manifest.read_text())["sha256"]
        return all(sha256(path) == sums[name] for name, path in files.items())
    except (OSError, ValueError, KeyError):
        return False


def build(files: dict[str, Path], manifest: Path) -> None:
    """Write the tokenizer, both shards and, last, the manifest that says they are whole."""
    documents = collect_documents()
    # Many documents are longer than a sentence of SentencePiece's may be, so it gets their lines.
    lines = (line for text in documents[NUM_VAL_DOCS:] for line in text.splitlines() if line)
    model = train_sentencepiece(lines, vocab_size=VOCAB_SIZE)
    write_file(files["tokenizer"], model)
    export_dataset(documents, files["tokenizer"], files["val"].parent, Settings(NUM_VAL_DOCS))
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokens = np.fromfile(files["val"], dtype="<u2", offset=HEADER_BYTES)
    validation_text = sp.decode(tokens.tolist()).encode()
    facts = {
        "python": platform.python_version(),
        "documents": len(documents),
        "text_bytes": sum(len(text.encode()) for text in documents),
        "validation_bytes": len(validation_text),
        "lzma_bytes": strongest_lzma(validation_text),
        "sha256": {name: sha256(path) for name, path in files.items()},
    }
    write_file(manifest, json.dumps(facts, indent=2).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", type=Path, default=HERE / "datasets/demo_sp1024")
    parser.add_argument("--tokenizer", type=Path, default=HERE / "tokenizers/demo_1024_bpe.model")
    args = parser.parse_args()
    files = {
        "tokenizer": args.tokenizer,
        "train": args.dataset / "fineweb_train_000000.bin",
        "val": args.dataset / "fineweb_val_000000.bin",
    }
    manifest = args.dataset / "demo_corpus.json"
    try:
        with locked(args.dataset):
            if not is_whole(files, manifest):
                build(files, manifest)
    except OSError as error:  # FileNotFoundError is one, too
        sys.exit(f"cannot build the demo corpus: {error}")
    facts = json.loads(manifest.read_text())
    print(
        f"demo_corpus:documents:{facts['documents']} bytes:{facts['text_bytes']} "
        f"python:{facts['python']}"
    )
    print("demo_corpus:sha256", *(f"{name}:{sum}" for name, sum in facts["sha256"].items()))
    bits = 8 * facts["lzma_bytes"] / facts["validation_bytes"]
    print(
        f"demo_corpus:lzma_bpb:{bits:.4f} (lzma at its strongest on the same validation text, "
        f"{facts['validation_bytes']} bytes)"
    )


if __name__ == "__main__":
    main()
