"""Build the demo's tokenizer and shards out of the Python documentation that every Python carries.

    python data/demo_corpus.py [--dataset FOLDER] [--tokenizer FILE]

About 2 MB of English: the help topics (pydoc_data.topics) and the docstrings of the standard
library. The same Python version always gives the same bytes. What is there and whole is kept.

Prints what was built, its sha256 sums and, for scale, how small lzma makes the validation text.
"""

import argparse
import ast
import hashlib
import io
import json
import lzma
import os
import platform
import sys
import sysconfig
import warnings
from pathlib import Path

import numpy as np
import sentencepiece

HERE = Path(__file__).resolve().parent
VOCAB_SIZE = 1024
NUM_VAL_DOCS = 40
BOS = 1
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
    """All documents in a fixed, well mixed order; a docstring that stands twice is taken once.

    Raises FileNotFoundError if this Python comes without its documentation.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise FileNotFoundError(
            "this Python lacks pydoc_data.topics: use a complete Python, as from python.org"
        ) from None
    documents = {f"topic {name}": text for name, text in topics.items()}
    library = Path(sysconfig.get_paths()["stdlib"])
    seen = set()
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if SKIPPED_FOLDERS & set(name.parts):
            continue
        texts = [text for text in module_docstrings(path) if text not in seen]
        seen.update(texts)
        if texts:
            documents[f"module {name.as_posix()}"] = "\n\n".join(texts)
    mixed = sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest())
    return [documents[name] for name in mixed]


def train_tokenizer(documents: list[str]) -> bytes:
    """A SentencePiece BPE model of VOCAB_SIZE pieces, with the settings of the challenge's own."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in documents for line in text.splitlines() if line),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        character_coverage=0.999,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="nmt_nfkc",
        add_dummy_prefix=False,
        pad_id=0,
        bos_id=BOS,
        eos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    return model.getvalue()


def shard(token_lists: list[list[int]]) -> bytes:
    """A shard file: header, then BOS and the tokens of each document."""
    tokens = np.array([token for tokens in token_lists for token in (BOS, *tokens)], dtype="<u2")
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, tokens.size
    return header.tobytes() + tokens.tobytes()


def strongest_lzma(data: bytes) -> int:
    """The size in bytes that the best of lzma's settings for text reaches, without a container."""
    preset = 9 | lzma.PRESET_EXTREME
    filters = (
        {"id": lzma.FILTER_LZMA2, "preset": preset, "lc": lc, "lp": 0, "pb": pb}
        for lc in range(5)
        for pb in range(3)
    )
    return min(len(lzma.compress(data, lzma.FORMAT_RAW, filters=[f])) for f in filters)


def write_file(path: Path, data: bytes) -> None:
    """Write beside, flush to the disk, rename: path is never half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    with open(beside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def is_whole(files: dict[str, Path], manifest: Path) -> bool:
    """Whether all files are there and as the manifest says."""
    try:
        sums = json.loads(manifest.read_text())["sha256"]
        return all(hashlib.sha256(files[k].read_bytes()).hexdigest() == sums[k] for k in files)
    except (OSError, ValueError, KeyError):
        return False


def build(files: dict[str, Path], manifest: Path) -> None:
    """Write the tokenizer, both shards and, last, the manifest that says they are whole."""
    documents = collect_documents()
    model = train_tokenizer(documents[NUM_VAL_DOCS:])
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    token_lists = sp.encode(documents, num_threads=os.cpu_count() or 1)
    validation_text = "".join(sp.decode(token_lists[:NUM_VAL_DOCS])).encode()
    contents = {
        "tokenizer": model,
        "train": shard(token_lists[NUM_VAL_DOCS:]),
        "val": shard(token_lists[:NUM_VAL_DOCS]),
    }
    for name, data in contents.items():
        write_file(files[name], data)
    facts = {
        "python": platform.python_version(),
        "documents": len(documents),
        "text_bytes": sum(len(text.encode()) for text in documents),
        "validation_bytes": len(validation_text),
        "lzma_bytes": strongest_lzma(validation_text),
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()},
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
    if not is_whole(files, manifest):
        try:
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
