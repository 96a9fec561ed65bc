"""Train tokenizers and write shards from documents, as the challenge did.

    python3 data/download_hf_docs_and_tokenize.py --output-root DIR                    the hub's
    python3 data/download_hf_docs_and_tokenize.py --output-root DIR --docs FILE...     your own

A FILE is plain text, JSON lines ({"text": ...}), a folder of both, or - for stdin. Each tokenizer
gets a folder of shards, DIR/datasets/fineweb10B_SUFFIX: its validation split has the first
--num-val-docs documents, its training split the rest. DIR/manifest.json, written last, lists all.
"""

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import math
import mmap
import os
import random
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for python -P

import caseops
import check_dataset
import files
import tokenizer_tools
from files import number
from tokenizer_tools import Spec, read_specs

HERE = Path(__file__).resolve().parent
MIXED_DOCS = "docs_mixed"  # a copy of documents from several files, or shuffled
DEFAULT_NUM_VAL_DOCS = 50_000
DEMO_STEP, DEFAULT_STEP = 6_144, 524_288  # TRAIN_BATCH_TOKENS
# A document of plain text ends at the first blank line after 2,000 bytes (CR do not count).
TEXT_DOCUMENT = re.compile(rb"(?s)\S(?:\r*[^\r]){1999}.*?(?=\n\s*\n|\Z)|\S.*")
JSON_LINE = re.compile(rb'(\xef\xbb\xbf)?\s*{[^\n]*"text"\s*:')


def number_in(variable: str, default: int, most: int) -> int:
    try:
        return number(int, 1, most)(os.environ.get(variable, str(min(default, most))))
    except argparse.ArgumentTypeError as error:
        files.start_program(None).error(f"{variable}: {error}")


BATCH_SIZE = number_in("MATCHED_FINEWEB_SP_BATCH_SIZE", 512, most=2**20)  # documents
NUM_THREADS = number_in("MATCHED_FINEWEB_TOKENIZER_THREADS", files.cores(), most=1024)
Counts = dict[str, int]
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
            texts = sorted([*path.glob("[!.]*.txt"), *path.glob("[!.]*.jsonl")])
        if not texts:
            raise ValueError(f"{path} has no .txt or .jsonl files: name its files after --docs")
        found += texts
    return found


def mix_documents(paths: list[Path], seed: int | None, output: Path) -> Path:
    """Copy the documents of all files to one file of JSON lines, shuffled if there is a seed."""
    starts: list[int] = []
    with tempfile.TemporaryFile(dir=output) as copy:
        for text in itertools.chain.from_iterable(map(read_documents, paths)):
            starts.append(copy.tell())
            copy.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
        if seed is not None:
            random.Random(seed).shuffle(starts)
        with open(output / MIXED_DOCS, "wb") as mixed:
            for start in starts:
                copy.seek(start)
                mixed.write(copy.readline())
    return output / MIXED_DOCS


def read_documents(path: Path) -> Iterator[str]:
    """Yield the texts of JSON lines or the documents of plain text. Raises ValueError."""
    with open(path, "rb") as file:
        start = file.read(2**16)
        file.seek(0)
        if start.startswith((b"%PDF", b"\x1f\x8b", b"BZh", b"(\xb5/\xfd")) or b"\0" in start:
            advice = "decompress it, extract its text, or convert it"
            raise ValueError(f"{path} is compressed or not UTF-8 text: {advice}")
        is_json = path.suffix in (".jsonl", ".json") or JSON_LINE.match(start)
        unit, documents = "line", file
        if start and not is_json:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            unit, documents = "document", (match[0] for match in TEXT_DOCUMENT.finditer(content))
        for index, document in enumerate(documents, start=1):
            try:
                if not is_json:
                    yield document.decode("utf-8-sig").replace("\r\n", "\n").strip()
                elif document.strip():
                    # Half a surrogate pair has no UTF-8: it becomes a question mark.
                    yield json.loads(document)["text"].encode("utf-8", "replace").decode("utf-8")
            except UnicodeDecodeError as error:
                before = document[: error.start].decode(errors="replace")[-40:]
                place = f"{path}: {unit} {index}, after {before!r} is not UTF-8"
                iconv = f"iconv -c -f utf-8 -t utf-8 {shlex.quote(str(path))} > fixed.txt"
                advice = "removes such bytes; for Latin-1, use -f latin1"
                raise ValueError(f"{place}: {iconv} {advice}") from None
            except (ValueError, LookupError, TypeError, AttributeError):
                raise ValueError(f'{path}: line {index} must be {{"text": "..."}}') from None


def read_texts(docs: Path, spec: Spec) -> Iterator[str]:
    """Yield the texts to tokenize: with CaseOps marks if the spec asks for them."""
    texts = read_documents(docs)
    return caseops.encode_many(texts, NUM_THREADS) if spec.fields.get("caseops") else texts


def count_splits(docs: Path, num_val_docs: int | None, sidecar: dict | None) -> Counts:
    """Return the number of documents in each split. Raises ValueError."""
    most = num_docs = sum(1 for _ in read_documents(docs))
    if num_val_docs is None and sidecar is None:
        num_val_docs = min(max(num_docs // 20, 1), DEFAULT_NUM_VAL_DOCS)
        most = num_docs - 1
    elif num_val_docs is None:
        docs_val = sidecar.get("docs_val")
        num_val_docs = DEFAULT_NUM_VAL_DOCS if docs_val is None else docs_val
    if num_docs == 0:
        raise ValueError(f"{docs} has no text: name another file after --docs")
    if not isinstance(num_val_docs, int) or not 0 <= num_val_docs <= most:
        problem = f"{docs} has {num_docs} documents, and validation cannot get {num_val_docs!r}"
        advice = "add text (a document ends at the first blank line after 2,000 bytes)"
        raise ValueError(f"{problem}: {advice if num_docs < 2 else 'set --num-val-docs'}")
    return {"val": num_val_docs, "train": num_docs - num_val_docs}


def describe_documents(
    args: argparse.Namespace, docs: Path, num_docs: Counts, sidecar: dict | None
) -> dict[str, Any]:
    """Return the manifest's entries about the documents."""
    with open(docs, "rb") as file:
        digest = hashlib.sha256(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
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
            "docs_sha256": digest.hexdigest(),
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
    """Write both splits, replacing older shards. Returns docs_val, files_val, tokens_val, ..."""
    for old in folder.glob("fineweb_*"):
        old.unlink()
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


def print_training_command(spec: Spec, dataset: dict[str, Any], output: Path) -> None:
    stats, size = dataset["stats"], dataset["vocab_size"]
    wanted = spec.fields.get("vocab_size", 0)
    if size < wanted:
        print(f"WARNING: {spec.dataset} has {size} pieces, not {wanted}: use VOCAB_SIZE={size}")
    val, train = stats["tokens_val"], stats["tokens_train"]
    if spec.kind == tokenizer_tools.BYTE or min(val, train) < 2:
        return  # train_gpt.py does not take bytes, and needs both splits
    data, model = output / dataset["path"], output / "tokenizers" / spec.file
    knobs = f"DATA_PATH={shlex.quote(str(data))} TOKENIZER_PATH={shlex.quote(str(model))}"
    knobs += f" VOCAB_SIZE={size}"
    few = f"{train} training tokens are less than one step"
    if train < DEMO_STEP:
        print(f"WARNING: {few} of the demo ({DEMO_STEP}), so each step repeats them: add text")
    elif train < DEFAULT_STEP:
        print(f"Note: {few} ({DEFAULT_STEP}), except with PRESET=demo ({DEMO_STEP})")
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


def read_older_manifest(output: Path) -> dict[str, Any]:
    """Read the manifest of earlier commands, or of an interrupted one. Raises ValueError."""
    for path in (output / files.MANIFEST, output / files.UNFINISHED_MANIFEST):
        if path.exists():
            return files.read_manifest(path)
    return {"tokenizers": {}, "datasets": {}}


def check_replaced(args: argparse.Namespace, specs: list[Spec], docs_sha256: str = "") -> None:
    """Raise ValueError before shards or a tokenizer of other, or without docs_sha256 of unknown,
    documents are replaced."""
    older = read_older_manifest(args.output_root)
    entries = [*older["tokenizers"].values(), *older["datasets"].values()]
    made_from = {e.get("model_path", e.get("path")): e.get("docs_sha256") for e in entries}
    made_from |= older.get("unfinished", {})
    for path, model in ((path, spec.model) for spec in specs for path in spec.paths):
        place, known = args.output_root / path, made_from.get(path)
        is_other = place.read_bytes() != model if place.is_file() else any(place.glob("fineweb_*"))
        if is_other and not args.replace and (known is None or docs_sha256 not in (known, "")):
            command = ["python3", os.path.relpath(__file__), *args.arguments, "--replace"]
            problem = f"{place} is of other documents, or no manifest says of which: set another"
            raise ValueError(f"{problem} --output-root, or replace it: {shlex.join(command)}")


def write_datasets(
    specs: list[Spec], docs: Path, sha256: str, num_docs: Counts, cut: bool, size: int, output: Path
) -> dict[str, Any]:
    """Write tokenizers and datasets (`size` tokens a shard). Returns their manifest entries."""
    older = read_older_manifest(output)
    replaced = {name for spec in specs for name in (spec.name, spec.dataset)}

    def stays(entry: dict[str, Any]) -> bool:
        place = output / entry.get("model_path", entry.get("path", ""))
        return place.exists() and entry["name"] not in replaced

    entries = {kind: [*filter(stays, older[kind].values())] for kind in ("tokenizers", "datasets")}
    models = [tokenizer_tools.make_model(spec, read_texts(docs, spec), cut) for spec in specs]
    # Until the end there is no manifest, so that check_dataset.py refuses an unfinished rebuild.
    unfinished = {path: sha256 for spec in specs for path in spec.paths}
    files.write_json(output / files.UNFINISHED_MANIFEST, {**entries, "unfinished": unfinished})
    (output / files.MANIFEST).unlink(missing_ok=True)
    for spec, model in zip(specs, models, strict=True):
        tokenizer = tokenizer_tools.write_tokenizer(spec, model, output) | {"docs_sha256": sha256}
        sp = None if model is None else tokenizer_tools.open_model(model, spec.name)
        encode = functools.partial(tokenizer_tools.encode_texts, sp, NUM_THREADS)
        texts = read_texts(docs, spec)
        with contextlib.suppress(ImportError):  # only the download needs its package
            from tqdm import tqdm

            texts = iter(tqdm(texts, spec.dataset, sum(num_docs.values()), unit="doc"))
        path, _ = spec.paths
        stats = export_dataset(texts, num_docs, encode, output / path, size)
        counts = " ".join(f"{name}:{count}" for name, count in stats.items())
        print(f"{spec.dataset}: {counts}", flush=True)
        if stats["tokens_val"] and stats["tokens_train"]:
            for problem in check_dataset.check_leaks(output / path, tokenizer["bos_id"]):
                print(f"WARNING: {problem}", flush=True)
        facts = ("vocab_size", "bos_id", "eos_id", "recommended_bigram_vocab_size", "docs_sha256")
        dataset = {
            "name": spec.dataset,
            "tokenizer_name": spec.name,
            "tokenizer_kind": spec.kind,
            "path": path,
            "train_glob": f"{path}/fineweb_train_*.bin",
            "val_glob": f"{path}/fineweb_val_*.bin",
            **{fact: tokenizer[fact] for fact in facts},
            "stats": stats,
        }
        entries["tokenizers"].append(tokenizer)
        entries["datasets"].append(dataset)
    used = [spec.fields for spec in specs]
    files.write_json(output / "tokenizer_config.export.json", {"tokenizers": used})
    return {"tokenizer_specs": used, **entries}


def get_documents(args: argparse.Namespace, specs: list[Spec]) -> Path:
    """Return the file of documents: downloaded, or copied from pipes or several files. Raises
    OSError, ValueError or RuntimeError."""
    output = args.output_root
    sources = find_files(args.docs or [])
    pipes = [source for source in sources if source == 0 or source.is_fifo()]
    copies = {pipe: output / f"docs_piped{i or ''}" for i, pipe in enumerate(pipes)}
    mixed = [MIXED_DOCS] if len(sources) > 1 or args.shuffle is not None else []
    names = (files.MANIFEST, files.UNFINISHED_MANIFEST, "tokenizer_config.export.json", *mixed)
    outputs = [*copies.values(), *(output / name for name in names)]
    inputs = [args.tokenizer_config, *sources]
    for spec in specs:
        folder, tokenizer = (output / path for path in spec.paths)
        outputs += [tokenizer, tokenizer.with_suffix(".vocab"), *folder.glob("fineweb_*")]
        inputs += [files.path(spec.fields["reuse_model_path"])] if spec.model else []
    files.check_outputs(inputs, outputs)
    output.mkdir(parents=True, exist_ok=True)
    for pipe, copy in copies.items():  # to read it again
        with open(pipe, "rb") as content:
            files.write_file(copy, content)
        name = "-" if pipe == 0 else str(pipe)
        args.arguments = [str(copy) if word == name else word for word in args.arguments]
    paths = [copies.get(source, source) for source in sources]
    if mixed:
        return mix_documents(paths, args.shuffle, output)
    if paths:
        return paths[0]
    check_replaced(args, specs)  # before a long download
    from cached_challenge_fineweb import download_file  # needs the hub's client

    for name in (files.DOCS, files.SIDECAR):
        if not (output / name).exists():
            download_file(name, output, args.repo_id, args.remote_root)
    return output / files.DOCS


def rebuild(args: argparse.Namespace) -> None:
    """Write tokenizers, datasets and manifest. Raises OSError, ValueError or RuntimeError."""
    if args.docs is None and args.shuffle is not None:
        raise ValueError("--shuffle needs --docs: the hub's documents are shuffled already")
    overrides = {"caseops": args.caseops, "tokenizer_train_docs": args.tokenizer_train_docs}
    source = args.vocab_size or args.tokenizer_config
    specs = read_specs(source, overrides, dict(args.reuse_sp_model), args.skip_byte)
    output, docs = args.output_root, get_documents(args, specs)
    sidecar = None if args.docs else {}  # facts about the hub's documents; None for your own
    if docs.name == files.DOCS and docs.with_name(files.SIDECAR).exists():
        sidecar = files.read_json(docs.with_name(files.SIDECAR))
    num_docs = count_splits(docs, args.num_val_docs, sidecar)
    about = describe_documents(args, docs, num_docs, sidecar)
    sha256 = about["docs_meta"]["docs_sha256"]
    check_replaced(args, specs, sha256)
    if sidecar is None and args.shuffle is None and num_docs["val"] > 1:
        note = f"Note: validation is the first {num_docs['val']} documents. If yours are sorted, or"
        print(f"{note} from several sources, add --shuffle 1 to mix them.")
    val_texts = itertools.islice(read_documents(docs), num_docs["val"])
    print(f"val: {tokenizer_tools.lzma_score(val_texts)}")
    cut = sidecar is None  # the hub's documents must give the challenge's pieces
    entries = write_datasets(specs, docs, sha256, num_docs, cut, args.chunk_tokens, output)
    settings = {"version": "10B", "shard_size": args.chunk_tokens, "append_eos": False}
    files.write_json(output / files.MANIFEST, {**settings, **about, **entries})
    (output / files.UNFINISHED_MANIFEST).unlink()
    for spec, dataset in zip(specs, entries["datasets"][-len(specs) :], strict=True):
        print_training_command(spec, dataset, output)


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
    add("--shuffle", type=number(int, 0), metavar="SEED", help="shuffle your own documents")
    add("--repo-id", default=files.REPO_ID)
    add("--remote-root", default=files.REMOTE_ROOT)
    which, size = parser.add_mutually_exclusive_group(), number(int, 1, 2**16)
    which.add_argument("--vocab-size", type=size, metavar="N", help="make one tokenizer")
    which.add_argument("--tokenizer-config", type=files.path, default=HERE / "tokenizer_specs.json")
    add("--num-val-docs", type=number(int, 0), metavar="N", help="default: 5 %% of your own")
    shard_size = number(int, 1, 2**31 - 1)  # a shard counts tokens in an int32
    add("--chunk-tokens", type=shard_size, default=100_000_000, metavar="N", help="of a shard")
    add("--tokenizer-train-docs", type=number(int, 1), metavar="N", help="train on the first N")
    add("--caseops", action="store_true", help="mark capitals (see README.md)")
    add("--skip-byte", action="store_true", help="make no byte dataset")
    reuse = {"type": size_and_model, "metavar": "VOCAB_SIZE=MODEL", "action": "append"}
    add("--reuse-sp-model", help="use a model you have", default=[], **reuse)
    add("--replace", action="store_true", help="replace datasets of other documents")
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        rebuild(parser.parse_args(arguments, argparse.Namespace(arguments=arguments)))
    except (OSError, ValueError, RuntimeError) as error:
        parser.error(" ".join(str(error).splitlines()))
    except KeyboardInterrupt:
        sys.exit("interrupted: run the same command again to start over")


if __name__ == "__main__":
    main()
