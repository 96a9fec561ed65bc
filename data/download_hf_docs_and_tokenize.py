"""Train tokenizers and write shards from documents, as the challenge did.

    python3 data/download_hf_docs_and_tokenize.py --output-root DIR                    the hub's
    python3 data/download_hf_docs_and_tokenize.py --output-root DIR --docs FILE...     your own

A FILE is plain text, JSON lines ({"text": ...}), a folder of both, or - for stdin. Each tokenizer
gets a folder of shards, DIR/datasets/fineweb10B_SUFFIX: its validation split has the first
--num-val-docs documents, its training split the rest. DIR/manifest.json lists all of them.
"""

import argparse
import contextlib
import fcntl
import functools
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from sentencepiece import SentencePieceProcessor

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for python -P

import caseops
import check_dataset
import files
import tokenizer_tools
from tokenizer_tools import Spec, make_model, read_specs

HERE = Path(__file__).resolve().parent
DEFAULT_NUM_VAL_DOCS = 50_000
DEMO_STEP, DEFAULT_STEP = 6_144, 524_288  # TRAIN_BATCH_TOKENS
# A document of plain text ends at the first blank line after 2,000 bytes (CR do not count).
TEXT_DOCUMENT = re.compile(rb"(?s)\S(?:\r*[^\r]){1999}.*?(?=\n\s*\n|\Z)|\S.*")
JSON_LINE = rb'(?m)^(?:\xef\xbb\xbf)?\s*\[?\s*{(?=\s*")'  # the beginning of an object


def number_in(variable: str, default: int, most: int) -> int:
    try:
        return files.number(int, 1, most)(os.environ.get(variable, str(min(default, most))))
    except argparse.ArgumentTypeError as error:
        files.start_program(None).error(f"{variable}: {error}")


BATCH_SIZE = number_in("MATCHED_FINEWEB_SP_BATCH_SIZE", 512, most=2**20)  # documents
NUM_THREADS = number_in("MATCHED_FINEWEB_TOKENIZER_THREADS", files.cores(), most=1024)
Counts = dict[str, int]
Facts = dict[str, Any]  # of the manifest
Models = dict[str, bytes]  # by path
Encoder = Callable[[list[str]], np.ndarray]  # texts -> tokens, uint16 (n,)


def find_files(names: list[str]) -> list[Path | int]:
    """Return the files of --docs; 0 is stdin. Raises ValueError."""
    found: list[Path | int] = []
    for name in names:
        path = files.path(name)
        if name != "-" and not path.exists():
            raise ValueError(f"{path} does not exist: correct --docs")
        texts = [0 if name == "-" else path]
        if path.is_dir():
            inside = sorted(path.glob("[!.]*"))
            texts = [file for file in inside if file.suffix.lower() in (".txt", ".jsonl")]
            print(f"{path}: {len(texts)} of {len(inside)} files are read (.txt and .jsonl)")
        if not texts:
            raise ValueError(f"{path} has no .txt or .jsonl files: name its files after --docs")
        found += texts
    return found


def mix_documents(paths: list[Path], seed: int | None, mixed_path: Path) -> None:
    """Copy the documents of all files to one file of JSON lines, shuffled if there is a seed."""
    starts: list[int] = []
    with tempfile.TemporaryFile(dir=mixed_path.parent) as copy:
        for text in itertools.chain.from_iterable(map(read_documents, paths)):
            starts.append(copy.tell())
            copy.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
        if seed is not None:
            random.Random(seed).shuffle(starts)
        lines = (copy.readline() for start in starts if copy.seek(start) is not None)
        files.write_file(mixed_path, lines)


def split_text(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the documents of plain text. A document is in memory, but not the file."""
    rest = b""
    while data := file.read(max(2**24, len(rest))):
        content = rest + data
        matches = list(TEXT_DOCUMENT.finditer(content))
        yield from (match[0] for match in matches[:-1])
        rest = content[matches[-1].start() :] if matches else b""  # more may follow
    yield from (match[0] for match in TEXT_DOCUMENT.finditer(rest))


def read_documents(path: Path) -> Iterator[str]:
    """Yield the texts of JSON lines or the documents of plain text. Raises ValueError."""
    with open(path, "rb") as file:
        opened = os.fstat(file.fileno())
        start = file.read(2**20)
        file.seek(0)
        if start.startswith((b"%PDF", b"\x1f\x8b", b"BZh", b"(\xb5/\xfd")) or b"\0" in start:
            raise ValueError(f"{path} is compressed or not UTF-8 text: extract or convert it")
        lines, objects = re.findall(rb"(?m)^.*\S", start), re.findall(JSON_LINE, start)
        has_text = re.search(JSON_LINE + rb'[^\n]*"text"\s*:', start)
        has_json_lines = has_text and 2 * len(objects) >= len(lines)
        is_json = path.suffix.lower() in (".jsonl", ".json") or has_json_lines
        unit, documents = ("line", file) if is_json else ("document", split_text(file))
        for index, document in enumerate(documents, start=1):
            try:
                if not is_json:
                    yield document.decode("utf-8-sig").replace("\r\n", "\n").strip()
                elif document.strip():
                    # Half a surrogate pair has no UTF-8: it becomes a question mark.
                    yield json.loads(document)["text"].encode("utf-8", "replace").decode("utf-8")
            except UnicodeDecodeError as error:
                before = document[: error.start].decode(errors="replace")[-40:]
                place = f"{path}: {unit} {index}, after {before!r}"
                iconv = f"iconv -c -f utf-8 -t utf-8 {shlex.quote(str(path))} > fixed.txt"
                raise ValueError(f"{place} is not UTF-8: {iconv} (or -f latin1) mends it") from None
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                why = f'must be {{"text": "..."}} ({error!r})'
                raise ValueError(f"{path}: line {index} {why}") from None
        read = os.fstat(file.fileno())
        if (opened.st_size, opened.st_mtime_ns) != (read.st_size, read.st_mtime_ns):
            raise ValueError(f"{path} changed while it was read: run the command again")


def read_texts(docs: Path, spec: Spec) -> Iterator[str]:
    """Yield the texts to tokenize: with CaseOps marks if the spec asks for them."""
    texts = read_documents(docs)
    return caseops.encode_many(texts, NUM_THREADS) if spec.fields.get("caseops") else texts


def count_splits(docs: Path, num_val_docs: int | None, sidecar: Facts | None) -> Counts:
    """Return the number of documents in each split. Raises ValueError."""
    has_text = bytearray(len(t) > 99 or caseops.normalize(t) != "" for t in read_documents(docs))
    num_docs = len(has_text)
    val = (sidecar or {}).get("docs_val") if num_val_docs is None else num_val_docs
    if val is None:
        most = DEFAULT_NUM_VAL_DOCS
        val = min(max(num_docs // 20, 1), most) if sidecar is None else most
    if not isinstance(val, int) or not 0 <= val <= num_docs:
        problem = f"{docs} has {num_docs} documents, and validation cannot get {val!r}"
        raise ValueError(f"{problem}: set --num-val-docs, or another file after --docs")
    for split, part in (("val", has_text[:val]), ("train", has_text[val:])):
        if not any(part) and (part or (split == "train" and num_val_docs is None)):
            problem = f"{docs}: {len(part)} documents for {split}, none of them with text"
            raise ValueError(f"{problem}: set --num-val-docs, or add text (2,000 bytes a document)")
    return {"val": val, "train": num_docs - val}


def describe_documents(
    args: argparse.Namespace, docs: Path, digest: str, num_docs: Counts, sidecar: Facts | None
) -> Facts:
    """Return the manifest's entries about the documents."""
    path = os.path.relpath(docs.with_name(files.SIDECAR), args.output_root)
    return {
        "num_docs": sum(num_docs.values()),
        "num_val_docs": num_docs["val"],
        "shuffle_seed": args.shuffle if sidecar is None else sidecar.get("shuffle_seed"),
        "docs_jsonl": os.path.relpath(docs, args.output_root),
        "docs_meta": {
            "remote_repo_id": None if args.docs else args.repo_id,
            "remote_root": None if args.docs else args.remote_root,
            "num_docs": sum(num_docs.values()),
            "docs_sha256": digest,
            "source_manifest": path if sidecar else None,
            "source_sidecar": sidecar or None,
        },
    }


def encode_into_shards(texts: Iterator[str], encode: Encoder, size: int) -> Iterator[np.ndarray]:
    """Yield the tokens of the texts, `size` at a time."""
    parts, filled = [], 0
    while batch := list(itertools.islice(texts, BATCH_SIZE)):
        parts.append(encode(batch))
        filled += parts[-1].size
        while filled >= size:
            tokens = np.concatenate(parts)
            yield tokens[:size]
            parts, filled = [tokens[size:]], filled - size
    if filled:
        yield np.concatenate(parts)


def export_dataset(
    texts: Iterator[str], num_docs: Counts, encode: Encoder, folder: Path, shard_size: int
) -> Counts:
    """Write both splits. Returns docs_val, files_val, tokens_val, ..."""
    stats: Counts = {}
    for split, part in {"val": itertools.islice(texts, num_docs["val"]), "train": texts}.items():
        sizes: list[int] = []
        for shard in encode_into_shards(part, encode, shard_size):
            files.write_shard(folder / f"fineweb_{split}_{len(sizes):06d}.bin", shard)
            sizes.append(shard.size)
        stats |= {f"docs_{split}": num_docs[split], f"files_{split}": len(sizes)}
        stats[f"tokens_{split}"] = sum(sizes)
    for what in ("docs", "files", "tokens"):
        stats[f"{what}_total"] = stats[f"{what}_val"] + stats[f"{what}_train"]
    return stats


def print_report(spec: Spec, dataset: Facts, output: Path) -> None:
    """Print what may be wrong with a dataset, and the command that trains on it."""
    stats, size = dataset["stats"], dataset["vocab_size"]
    wanted = spec.fields.get("vocab_size", 0)
    if size < wanted:
        print(f"WARNING: {spec.dataset} has {size} pieces, not {wanted}: use VOCAB_SIZE={size}")
    val, train = stats["tokens_val"], stats["tokens_train"]
    if min(val, train) < 2:
        return  # train_gpt.py needs both splits
    data, model = output / spec.folder, output / spec.model_path
    for problem in check_dataset.check_leaks(data, dataset["bos_id"]):
        print(f"WARNING: {problem}")
    knobs = f"DATA_PATH={shlex.quote(str(data))} TOKENIZER_PATH={shlex.quote(str(model))}"
    knobs += f" VOCAB_SIZE={size}"
    few = f"{train} training tokens are less than one step"
    if train < DEMO_STEP:
        print(f"WARNING: {few} of the demo ({DEMO_STEP}), so each step repeats them: add text")
    elif train < DEFAULT_STEP:
        print(f"Note: {few} ({DEFAULT_STEP}), but enough for PRESET=demo ({DEMO_STEP})")
    if 10 * val > val + train:
        print(f"WARNING: validation has {val} of {val + train} tokens, more than a tenth: add text")
    if val < 2000:
        docs = math.ceil(2000 * stats["docs_val"] / val)
        few = f"{val} validation tokens are so few that a score on them says little"
        print(f"WARNING: {few}: --num-val-docs {docs} is enough, of at least {10 * docs} documents")
    if val <= 1024:  # too few for the default
        knobs += f" TRAIN_SEQ_LEN={2 ** min((val - 1).bit_length() - 1, 7)}"
    print("Train with (on a CPU, put PRESET=demo in front):")
    print(f"{knobs} python {shlex.quote(os.path.relpath(HERE.parent / 'train_gpt.py'))}")


def lock_folder(folder: Path) -> IO[str]:
    """Keep other commands out of a folder until the returned file is closed. Raises ValueError."""
    lock = open(folder / "lock", "a+")
    try:
        # The lock ends with this process, however that ends. Its child processes do not have it.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        lock.seek(0)
        problem = f"{lock.read() or 'another process'} is writing datasets to {folder}"
        raise ValueError(f"{problem}: wait for it, or set another --output-root") from None
    except OSError as error:
        print(f"WARNING: {folder} cannot be locked ({error}): start no second command there")
    lock.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", end="", file=lock, flush=True)
    return lock


def read_older_entries(output: Path) -> dict[str, Facts]:
    """Return the tokenizers and datasets of earlier commands by name. Raises ValueError."""
    path = output / files.MANIFEST
    older = files.read_manifest(path) if path.exists() else {}
    for dataset in older.get("datasets", {}).values():  # a new manifest has the new ones' size
        dataset.setdefault("stats", {}).setdefault("shard_size", older.get("shard_size", 0))
    return {kind: older.get(kind, {}) for kind in ("tokenizers", "datasets")}


def check_replaced(
    args: argparse.Namespace, specs: list[Spec], docs_sha256: str = "", models: Models | None = None
) -> None:
    """Raise ValueError if a dataset or tokenizer of other documents (those in no manifest, without
    docs_sha256) or, given the models, one that another dataset needs would be replaced."""
    output, (tokenizers, datasets) = args.output_root, read_older_entries(args.output_root).values()
    entries = [*tokenizers.values(), *datasets.values()]
    made_from = {old.get("model_path", old.get("path")): old.get("docs_sha256") for old in entries}
    others = datasets.keys() - {spec.dataset for spec in specs}
    names = [datasets[other].get("tokenizer_name") for other in others] if models else []
    needed = [tokenizers.get(name, {}).get("model_path") for name in names]
    for spec in specs:
        model, shards = output / spec.model_path, (output / spec.folder).glob("fineweb_*.bin")
        content = models[spec.model_path] if models else spec.reused
        is_other_model = model.exists() and model.read_bytes() != content
        named = tokenizers.get(spec.name, {}).get("model_path", spec.model_path)
        lost = {named: named != spec.model_path, spec.model_path: is_other_model}
        for path, is_there in (lost | {spec.folder: any(shards)}).items():
            is_same = made_from.get(path) and docs_sha256 in ("", made_from[path])
            if is_there and (path in needed or not is_same) and not args.replace:
                problem = f"{output / path} is of other documents, or no manifest says of which, or"
                advice = "set another name, model_prefix or --output-root, or add --replace"
                raise ValueError(f"{problem} another dataset needs it: {advice}")


def copy_documents(sources: list[Path | int], seed: int | None, output: Path) -> list[Path]:
    """Copy pipes, which can be read only once, and documents that must be mixed: the last copy has
    what will be tokenized. Copies lose their suffix .part when the datasets are complete."""
    pipes = [source for source in sources if source == 0 or source.is_fifo()]
    copies = [output / f"docs_piped{number or ''}.part" for number in range(len(pipes))]
    files.check_outputs(sources, copies)
    for pipe, copy in zip(pipes, copies, strict=True):
        with open(pipe, "rb") as content:
            files.write_file(copy, content)
        sources = [copy if source == pipe else source for source in sources]
    if len(sources) > 1 or seed is not None:
        copies.append(output / "docs_mixed.part")
        mix_documents(sources, seed, copies[-1])
    return copies


def download_documents(args: argparse.Namespace) -> Path:
    """Download the hub's documents if they are not there. Raises what a download raises."""
    from cached_challenge_fineweb import download_file  # needs the hub's client

    for name in (files.DOCS, files.SIDECAR):
        if not (args.output_root / name).exists():
            download_file(name, args.output_root, args.repo_id, args.remote_root)
    return args.output_root / files.DOCS


def add_entries(manifest: Facts, spec: Spec, sp: SentencePieceProcessor, stats: Counts) -> None:
    """Add a tokenizer and its dataset to the manifest."""
    facts = {"vocab_size": sp.vocab_size(), "bos_id": sp.bos_id(), "eos_id": sp.eos_id()}
    facts["recommended_bigram_vocab_size"] = 5 * 128 * math.ceil(sp.vocab_size() / 128)
    facts["docs_sha256"] = manifest["docs_meta"]["docs_sha256"]
    manifest["tokenizers"][spec.name] = {
        "name": spec.name,
        "kind": tokenizer_tools.KIND,
        **facts,
        "model_path": spec.model_path,
        "vocab_path": spec.model_path.removesuffix(".model") + ".vocab",
        "source_spec": spec.fields,
    }
    manifest["datasets"][spec.dataset] = {
        "name": spec.dataset,
        "tokenizer_name": spec.name,
        "tokenizer_kind": tokenizer_tools.KIND,
        "path": spec.folder,
        "train_glob": f"{spec.folder}/fineweb_train_*.bin",
        "val_glob": f"{spec.folder}/fineweb_val_*.bin",
        **facts,
        "stats": stats,
    }


def build_datasets(
    specs: list[Spec], models: Models, docs: Path, num_docs: Counts, manifest: Facts, output: Path
) -> None:
    """Write each dataset's shards to its folder `unfinished`, and add them to the manifest."""
    for spec in specs:
        sp = tokenizer_tools.open_model(models[spec.model_path], spec.name)
        encode = functools.partial(tokenizer_tools.encode_texts, sp, NUM_THREADS)
        texts = read_texts(docs, spec)
        with contextlib.suppress(ImportError):  # only the download needs its package
            from tqdm import tqdm

            texts = iter(tqdm(texts, spec.dataset, sum(num_docs.values()), unit="doc"))
        folder = output / spec.folder / files.UNFINISHED
        if folder.exists():
            shutil.rmtree(folder)  # of an interrupted command
        stats = export_dataset(texts, num_docs, encode, folder, manifest["shard_size"])
        print(f"{spec.dataset}:", *(f"{name}:{count}" for name, count in stats.items()), flush=True)
        add_entries(manifest, spec, sp, stats)


def publish(manifest: Facts, models: Models, copies: list[Path], output: Path) -> None:
    """Put all in its place, the manifest first: the same command may replace what it lists."""
    older = read_older_entries(output)
    lists = {kind: [*(old | manifest[kind]).values()] for kind, old in older.items()}
    files.write_json(output / files.MANIFEST, manifest | lists)
    used = {"tokenizers": manifest["tokenizer_specs"]}
    files.write_json(output / "tokenizer_config.export.json", used)
    for copy in copies:
        copy.replace(copy.with_suffix(""))
    for path, model in models.items():
        tokenizer_tools.write_tokenizer(model, output / path)
    for dataset in manifest["datasets"].values():
        folder = output / dataset["path"]
        for old in folder.glob("fineweb_*.bin"):
            old.unlink()
        for shard in sorted((folder / files.UNFINISHED).iterdir()):  # train, then val
            shard.rename(folder / shard.name)
        (folder / files.UNFINISHED).rmdir()


def rebuild(args: argparse.Namespace, specs: list[Spec], sources: list[Path | int]) -> None:
    """Write tokenizers, datasets and manifest. Raises OSError, ValueError or RuntimeError."""
    output = args.output_root
    check_replaced(args, specs)  # before a long download
    copies = copy_documents(sources, args.shuffle, output)
    docs = [*sources, *copies][-1] if sources else download_documents(args)
    sidecar = None if sources else {}  # facts about the hub's documents; None for your own
    if docs.name == files.DOCS and docs.with_name(files.SIDECAR).exists():
        sidecar = files.read_json(docs.with_name(files.SIDECAR))
    digest = files.hash_file(docs)
    num_docs = count_splits(docs, args.num_val_docs, sidecar)
    final_docs = docs.with_suffix("") if copies else docs
    manifest = describe_documents(args, final_docs, digest, num_docs, sidecar)
    for key in ("num_docs", "docs_sha256"):
        if sidecar and sidecar.get(key) not in (None, manifest["docs_meta"][key]):
            raise ValueError(f"{docs} has another {key} than {files.SIDECAR}: download both again")
    check_replaced(args, specs, digest)
    if sidecar is None and args.shuffle is None and num_docs["val"] > 1:
        note = f"Note: validation is the first {num_docs['val']} documents. If yours are sorted, or"
        print(f"{note} from several sources, add --shuffle 1 to mix them.")
    val_texts = itertools.islice(read_documents(docs), num_docs["val"])
    print(f"val: {tokenizer_tools.lzma_score(val_texts)}")
    manifest |= {"version": "10B", "shard_size": args.chunk_tokens, "append_eos": False}
    manifest |= {"tokenizer_specs": [s.fields for s in specs], "tokenizers": {}, "datasets": {}}
    cut = sidecar is None  # the hub's documents must give the challenge's pieces
    models = {spec.model_path: make_model(spec, read_texts(docs, spec), cut) for spec in specs}
    check_replaced(args, specs, digest, models)
    build_datasets(specs, models, docs, num_docs, manifest, output)
    if files.hash_file(docs) != digest:
        raise ValueError(f"{docs} changed while it was read: run the command again")
    publish(manifest, models, copies, output)
    for spec in specs:
        print_report(spec, manifest["datasets"][spec.dataset], output)


def size_and_model(text: str) -> tuple[int, str]:
    size, _, model = text.partition("=")
    if not size.isdecimal() or not model:
        raise argparse.ArgumentTypeError(f"{text!r} must be VOCAB_SIZE=MODEL, as 1024=my.model")
    return int(size), model


def main(arguments: list[str] | None = None) -> None:
    parser = files.start_program(__doc__)
    add, docs_help = parser.add_argument, "text or JSON lines, folders, - for stdin (the hub's)"
    add("--output-root", type=files.path, required=True)
    add("--docs", nargs="+", action="extend", metavar="FILE", help=docs_help)
    add("--shuffle", type=files.number(int, 0), metavar="SEED", help="shuffle your own documents")
    add("--repo-id", default=files.REPO_ID)
    add("--remote-root", default=files.REMOTE_ROOT)
    which, size = parser.add_mutually_exclusive_group(), files.number(int, 1, 2**16)
    which.add_argument("--vocab-size", type=size, metavar="N", help="make one tokenizer")
    which.add_argument("--tokenizer-config", type=files.path, default=HERE / "tokenizer_specs.json")
    add("--num-val-docs", type=files.number(int, 0), metavar="N", help="default: 5 %% of your own")
    shard_size = files.number(int, 1, 2**31 - 1)  # a shard counts tokens in an int32
    add("--chunk-tokens", type=shard_size, default=100_000_000, metavar="N", help="of a shard")
    add("--tokenizer-train-docs", type=files.number(int, 1), metavar="N", help="use the first N")
    add("--caseops", action="store_true", help="mark capitals (see README.md)")
    add("--skip-byte", action="store_true", help=argparse.SUPPRESS)  # older commands have it
    reuse = {"type": size_and_model, "metavar": "VOCAB_SIZE=MODEL", "action": "append"}
    add("--reuse-sp-model", help="use a model you have", default=[], **reuse)
    add("--replace", action="store_true", help="replace datasets of other documents")
    args = parser.parse_args(arguments)
    if args.docs is None and args.shuffle is not None:
        parser.error("--shuffle needs --docs: the hub's documents are shuffled already")
    fields = {"caseops": args.caseops, "tokenizer_train_docs": args.tokenizer_train_docs}
    source = args.vocab_size or args.tokenizer_config
    try:
        specs = read_specs(source, fields, dict(args.reuse_sp_model))
        sources = find_files(args.docs or [])
        args.output_root.mkdir(parents=True, exist_ok=True)
        with lock_folder(args.output_root):
            rebuild(args, specs, sources)
    except (OSError, ValueError, RuntimeError) as error:
        parser.error(" ".join(str(error).splitlines()))
    except KeyboardInterrupt:
        sys.exit("interrupted: run the same command again to start over")


if __name__ == "__main__":
    main()
