"""Build the demo's tokenizer and shards from the documentation that comes with Python.

    python data/demo_corpus.py [--caseops] [--dataset FOLDER] [--tokenizer FILE]

About 2 MB of English: the help topics (pydoc_data.topics) and the docstrings of the standard
library, long ones in pieces. Validation has whole topics and modules; training has none of these.
The same Python version always gives the same bytes. Complete files stay until the code changes.
"""

import ast
import hashlib
import re
import sys
import sysconfig
from pathlib import Path

import sentencepiece

try:
    from pydoc_data.topics import topics
except ImportError:  # some distributions do not install it
    topics = {}

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for python -P

import caseops
import files
import tokenizer_tools

HERE = Path(__file__).resolve().parent
NUM_VAL_SOURCES = 40  # modules and topics
# A text of up to 1,500 characters, or a piece of a longer one, up to the first blank line after 600
# characters or the end.
DOCUMENT = re.compile(r"(?s)\A.{1,1500}\Z|\S.{599,}?(?=\n\s*\n|\Z)|\S.*")
TRAIN, VAL = "fineweb_train_000000.bin", "fineweb_val_000000.bin"
MANIFEST = "demo_corpus.json"  # written last
MODULES = {*sys.stdlib_module_names, "__hello__"}  # a distribution adds others to their folder
# Not in every installation, or not text of the library.
SKIPPED_FOLDERS = {
    "test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "pydoc_data",
}  # fmt: skip


def collect_sources() -> tuple[dict[str, list[str]], list[str]]:
    """Return the texts of each topic and module (docstrings), and a line for each bad file."""
    with_docstring = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    left_out = [] if topics else ["pydoc_data/topics.py: cannot be imported"]
    sources = {f"topic {name}": [text] for name, text in topics.items()}
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if name.parts[0].removesuffix(".py") not in MODULES or SKIPPED_FOLDERS & {*name.parts}:
            continue
        try:
            nodes = ast.walk(ast.parse(path.read_bytes()))
            texts = (ast.get_docstring(node) for node in nodes if isinstance(node, with_docstring))
            sources[f"module {name.as_posix()}"] = [text for text in texts if text]
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            left_out.append(f"{name.as_posix()}: {error}")
    return {name: texts for name, texts in sources.items() if texts}, left_out


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def split_documents(sources: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    """Return the documents for validation, source by source, and those for training, shuffled.
    Hashes choose the sources for validation and the order. No document occurs twice."""
    val: dict[str, None] = {}  # a set in order
    train: set[str] = set()
    for index, name in enumerate(sorted(sources, key=digest)):
        documents = [part for text in sources[name] for part in DOCUMENT.findall(text)]
        if index < NUM_VAL_SOURCES:
            val |= dict.fromkeys(documents)
        else:
            train |= {*documents}
    return [*val], sorted(train - val.keys(), key=digest)


def sha256_sums(dataset: Path, tokenizer: Path) -> dict[str, str]:
    """Hash the demo's files and the code that makes them. Raises OSError if a file is missing."""
    made = {"tokenizer": tokenizer, "train": dataset / TRAIN, "val": dataset / VAL}
    contents = {name: path.read_bytes() for name, path in made.items()}
    modules = (caseops.__file__, files.__file__, tokenizer_tools.__file__)
    contents["script"] = b"".join(Path(name).read_bytes() for name in (__file__, *modules))
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def find_demo(dataset: Path, tokenizer: Path, with_caseops: bool) -> dict:
    """Return the manifest if all files are there and match it and the flag, else {}."""
    try:
        facts = files.read_json(dataset / MANIFEST)
        same = facts.get("sha256") == sha256_sums(dataset, tokenizer)
        return facts if same and facts["caseops"] == with_caseops else {}
    except (OSError, ValueError):
        return {}


def build(dataset: Path, tokenizer: Path, with_caseops: bool) -> dict:
    """Write the files and, last, the manifest. Several processes may do so: the bytes are equal."""
    files.write_json(dataset / MANIFEST, {})  # so that a demo's folder is known as one
    sources, left_out = collect_sources()
    val, train = split_documents(sources)
    documents = val + train
    lzma_score = tokenizer_tools.lzma_score(val)
    # SentencePiece skips long sentences, so it gets the lines of the documents.
    lines = (line for text in train for line in text.splitlines() if line)
    settings = {}
    if with_caseops:
        lines, settings = map(caseops.encode, lines), caseops.TRAINER_SETTINGS
        val, train = [[caseops.encode(text) for text in split] for split in (val, train)]
    model = tokenizer_tools.train_sentencepiece(lines, vocab_size=1024, **settings)
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    files.write_file(tokenizer, model)
    files.write_shard(dataset / VAL, tokenizer_tools.encode_texts(sp, 1, val))
    files.write_shard(dataset / TRAIN, tokenizer_tools.encode_texts(sp, 1, train))
    facts = {
        "python": sys.version.split()[0],
        "documents": len(documents),
        "text_bytes": sum(len(text.encode()) for text in documents),
        "lzma": lzma_score,
        "left_out": left_out,
        "sha256": sha256_sums(dataset, tokenizer),
        "caseops": with_caseops,
    }
    files.write_json(dataset / MANIFEST, facts)
    return facts


def main() -> None:
    parser = files.start_program(__doc__)
    parser.add_argument("--dataset", type=files.path, help="default: data/datasets/demo_sp1024")
    parser.add_argument("--tokenizer", type=files.path, help="default: in data/tokenizers")
    parser.add_argument("--caseops", action="store_true", help="mark capitals, see data/README.md")
    args = parser.parse_args()
    suffix = "_caseops" if args.caseops else ""
    dataset = args.dataset or HERE / f"datasets/demo_sp1024{suffix}"
    tokenizer = args.tokenizer or HERE / f"tokenizers/demo_1024_bpe{suffix}.model"
    if any(dataset.glob("fineweb_*")) and not (dataset / MANIFEST).exists():
        parser.error(f"{dataset} has another dataset: delete it, or set another --dataset")
    facts = find_demo(dataset, tokenizer, args.caseops)
    if not facts and tokenizer.exists() and not tokenizer.name.startswith("demo_"):
        parser.error(f"{tokenizer} is another tokenizer: delete it, or set another --tokenizer")
    try:
        facts = facts or build(dataset, tokenizer, args.caseops)
    except OSError as error:
        sys.exit(f"{error}: make the folder writable, or start in a copy of the repository")
    counts = f"documents:{facts['documents']} bytes:{facts['text_bytes']}"
    print(f"demo_corpus:{counts} python:{facts['python']}")
    print("demo_corpus:sha256", *(f"{name}:{sum}" for name, sum in facts["sha256"].items()))
    print(f"demo_corpus:{facts['lzma']}")
    for file in facts["left_out"]:
        print(f"demo_corpus:left_out {' '.join(file.splitlines())}: this text is not the usual one")


if __name__ == "__main__":
    main()
