"""Read tokenizer specs (fields: README.md), make the tokenizers and encode texts with them."""

import argparse
import io
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import caseops
import numpy as np
import sentencepiece
from files import DATASET_PREFIX, read_json, write_file, write_json

SPECIAL_IDS = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
BYTE_OFFSET = 4  # byte b is token b + 4

# The challenge's settings for SentencePiece's trainer.
TRAINER_SETTINGS: dict[str, Any] = {
    "model_type": "bpe",
    "character_coverage": 0.999,
    "byte_fallback": True,
    "split_digits": True,
    "normalization_rule_name": "nmt_nfkc",
    "add_dummy_prefix": False,
    "minloglevel": 2,
    **SPECIAL_IDS,
}
MAX_SENTENCE_BYTES = 4192  # SentencePiece's default; training skips longer sentences

SENTENCEPIECE, BYTE = "sentencepiece_bpe", "byte"
VOCAB_SIZES = {SENTENCEPIECE: range(1, 2**16 + 1), BYTE: [260]}  # tokens are uint16
SENTENCEPIECE_NAMES = ("sentencepiece_bpe", "sentencepiece", "build_sentencepiece_tokenizer")
BYTE_NAMES = ("byte", "pure_byte", "bytes", "build_pure_byte_tokenizer")
KINDS = dict.fromkeys(SENTENCEPIECE_NAMES, SENTENCEPIECE) | dict.fromkeys(BYTE_NAMES, BYTE)
FIELDS = {BYTE: {"kind", "builder", "name", "dataset_suffix", "vocab_size", "filename"}}
FIELDS[SENTENCEPIECE] = FIELDS[BYTE] - {"filename"} | {"model_prefix", "reuse_model_path"}
FIELDS[SENTENCEPIECE] |= {"tokenizer_train_docs", "trainer_overrides", "caseops"}
TYPES = {"vocab_size": int, "tokenizer_train_docs": int, "trainer_overrides": dict, "caseops": bool}
CASEOPS_SUFFIX = "_caseops"  # of the name, the dataset and the files


def train_sentencepiece(sentences: Iterable[str], **settings: Any) -> bytes:
    """Train a SentencePiece model; `settings` override the challenge's. The same sentences in the
    same order give the same bytes. Raises RuntimeError or ValueError."""
    model = io.BytesIO()
    settings = {**TRAINER_SETTINGS, **settings, "sentence_iterator": iter(sentences)}
    sentencepiece.SentencePieceTrainer.train(model_writer=model, **settings)
    return model.getvalue()


def open_model(model: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    """Load a SentencePiece model. Raises ValueError if it cannot make a dataset."""
    sp = sentencepiece.SentencePieceProcessor()
    try:
        sp.LoadFromSerializedProto(model)
    except RuntimeError:
        raise ValueError(f"{name} is not a SentencePiece model") from None
    if sp.bos_id() < 0:
        raise ValueError(f"{name} has no BOS token: train it with a bos_id of 0 or more")
    if sp.vocab_size() not in VOCAB_SIZES[SENTENCEPIECE]:
        raise ValueError(f"{name} has {sp.vocab_size()} pieces: use one of at most 65536")
    return sp


@dataclass(frozen=True)
class Spec:
    """A tokenizer to make, and the name of its dataset."""

    fields: dict[str, Any]  # from the file and the command line
    kind: str
    name: str
    dataset: str
    file: str  # in tokenizers/
    model: bytes | None = None  # the SentencePiece model to reuse


def kind_of(fields: dict[str, Any]) -> str:
    """Return SENTENCEPIECE or BYTE. Raises ValueError."""
    name = str(fields.get("kind", fields.get("builder", ""))).rpartition(":")[2]
    if name in KINDS:
        return KINDS[name]
    if name:
        raise ValueError(f"kind or builder {name!r} is not one of {', '.join(KINDS)}")
    if fields.get("dataset_suffix") == "byte260":
        return BYTE
    if "vocab_size" in fields:
        return SENTENCEPIECE
    raise ValueError(
        f"it has only {', '.join(fields) or 'an empty object'}: set vocab_size or kind"
    )


def check_fields(fields: dict[str, Any], kind: str) -> None:
    """Raises ValueError if a field is unknown or has an invalid value."""
    for field, value in fields.items():
        if field not in FIELDS[kind]:
            known = ", ".join(sorted(FIELDS[kind]))
            raise ValueError(f"{field!r} is not a field of a {kind} tokenizer: use {known}")
        field_type = TYPES.get(field, str)
        if type(value) is not field_type:
            raise ValueError(f"{field} {value!r} must be of type {field_type.__name__}")
    sizes = VOCAB_SIZES[kind]
    if fields.get("vocab_size", sizes[0]) not in sizes:
        raise ValueError(f"vocab_size {fields['vocab_size']} must be {sizes[0]} to {sizes[-1]}")
    both = caseops.TRAINER_SETTINGS.keys() & fields.get("trainer_overrides", {})
    if fields.get("caseops") and both:
        raise ValueError(f"caseops sets {min(both)} itself: leave it out of trainer_overrides")


def make_spec(fields: dict[str, Any], kind: str) -> Spec:
    """Fill in the defaults and read a model to reuse. Raises ValueError or OSError."""
    if kind == BYTE:
        dataset = DATASET_PREFIX + fields.get("dataset_suffix", "byte260")
        file = fields.get("filename", "fineweb_pure_byte_260.json")
        return Spec(fields, kind, fields.get("name", "pure_byte_260"), dataset, file)
    size = fields.get("vocab_size")
    suffix = CASEOPS_SUFFIX if fields.get("caseops") else ""
    model = None
    if "reuse_model_path" in fields:
        path = Path(fields["reuse_model_path"]).expanduser()
        model = path.read_bytes()
        sp = open_model(model, str(path))
        if suffix:
            caseops.check_tokenizer(sp, str(path))
        elif caseops.is_caseops(sp):
            raise ValueError(f"{path} is a CaseOps tokenizer: use it with --caseops")
        pieces = sp.vocab_size()
        size = size or pieces
        if pieces > size:
            raise ValueError(f"{path} has {pieces} pieces, more than vocab_size {size}: raise it")
    if size is None:
        raise ValueError("it has no vocab_size and no reuse_model_path: set one")
    name = fields.get("name", f"sp_bpe_{size}") + suffix
    dataset = DATASET_PREFIX + fields.get("dataset_suffix", f"sp{size}") + suffix
    file = fields.get("model_prefix", f"fineweb_{size}_bpe") + suffix + ".model"
    return Spec(fields, kind, name, dataset, file, model)


def read_specs(args: argparse.Namespace) -> list[Spec]:
    """Make the specs that the command line asks for. Raises ValueError or OSError."""
    source, entries = f"--vocab-size {args.vocab_size}", [{"vocab_size": args.vocab_size}]
    if args.vocab_size is None:
        source, entries = args.tokenizer_config, read_json(args.tokenizer_config)
    if isinstance(entries, dict):
        entries = entries.get("tokenizer_specs", entries.get("tokenizers"))
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{source} must be a list of objects, or have one under tokenizer_specs")
    reused = dict(args.reuse_sp_model)
    unused = set(reused)
    taken: set[str] = set()  # names, datasets and files
    specs = []
    for number, entry in enumerate(entries, start=1):
        place = f"{source}: tokenizer {number}"
        try:
            fields = {field: value for field, value in entry.items() if value is not None}
            size = fields.get("vocab_size")
            if isinstance(size, str) and size.isdecimal():
                size = fields["vocab_size"] = int(size)
            kind = kind_of(fields)
            if kind == SENTENCEPIECE and args.caseops:
                fields["caseops"] = True
            check_fields(fields, kind)
            if kind == BYTE and args.skip_byte:
                continue
            if kind == SENTENCEPIECE and size in reused:
                place = "--reuse-sp-model"
                fields["reuse_model_path"] = reused[size]
                unused.discard(size)
            if kind == SENTENCEPIECE and args.tokenizer_train_docs is not None:
                fields["tokenizer_train_docs"] = args.tokenizer_train_docs
            spec = make_spec(fields, kind)
            for value in (spec.name, spec.dataset, spec.file):
                if value in taken:
                    raise ValueError(f"{value} is another tokenizer's already: choose another")
                taken.add(value)
            specs.append(spec)
        except (OSError, ValueError) as error:
            raise ValueError(f"{place}: {error}") from None
    if unused:
        raise ValueError(f"--reuse-sp-model {min(unused)}: {source} has no such vocab_size, add it")
    if not specs:
        raise ValueError(f"{source} has no tokenizer to make: use --vocab-size instead")
    return specs


def sentences_of(texts: Iterable[str], limit: int, cut: bool, counts: Counter) -> Iterator[str]:
    """Yield what SentencePiece trains on, and count it. The trainer skips texts of more bytes than
    `limit`; `cut` divides these into lines, and long lines at spaces."""
    length = max(limit // 4, 1)  # in characters of at most 4 bytes
    for text in filter(None, (text.replace("\0", " ").strip() for text in texts)):
        size = len(text.encode())
        counts.update(docs=1, bytes=size)
        if size <= limit or cut:
            counts.update(used_docs=1, used_bytes=size)
        if size > limit and cut:
            yield from re.findall(rf"\S.{{0,{length - 1}}}(?!\S)|\S{{1,{length}}}", text)
        else:
            yield text


def make_model(spec: Spec, texts: Iterable[str], cut: bool) -> bytes | None:
    """Reuse a SentencePiece model or train one on the texts; None for bytes. Raises ValueError."""
    if spec.kind == BYTE or spec.model is not None:
        return spec.model
    texts = itertools.islice(texts, spec.fields.get("tokenizer_train_docs"))
    settings = {"vocab_size": spec.fields["vocab_size"], "hard_vocab_limit": False}
    settings |= spec.fields.get("trainer_overrides", {})
    settings |= caseops.TRAINER_SETTINGS if spec.fields.get("caseops") else {}
    counts: Counter[str] = Counter()
    try:
        limit = int(settings.get("max_sentence_length", MAX_SENTENCE_BYTES))
        model = train_sentencepiece(sentences_of(texts, limit, cut, counts), **settings)
    except (RuntimeError, ValueError) as error:
        used = f"{counts['used_docs']} of {counts['docs']} documents"
        raise ValueError(f"{spec.name}: SentencePiece cannot train on {used}: {error}") from None
    used = f"{counts['used_docs']} of {counts['docs']} documents"
    percent = 100 * counts["used_bytes"] / counts["bytes"]
    pieces = open_model(model, spec.name).vocab_size()
    print(f"{spec.name}: {pieces} pieces, trained on {used} ({percent:.1f} % of the text)")
    return model


def write_tokenizer(spec: Spec, model: bytes | None, output: Path) -> dict[str, Any]:
    """Write a tokenizer's files to `output` and return its entry in the manifest."""
    path = f"tokenizers/{spec.file}"
    entry: dict[str, Any] = {"name": spec.name, "kind": spec.kind}
    if model is None:
        size = 260
        config = {**SPECIAL_IDS, "byte_offset": BYTE_OFFSET, "byte_count": 256}
        content = {"tokenizer_type": "pure_byte", "config": config, "vocab_size": size}
        write_json(output / path, content)
        entry |= {"vocab_size": size, **SPECIAL_IDS, "path": path}
    else:
        sp = open_model(model, spec.name)
        size = sp.vocab_size()
        vocab = "".join(f"{sp.id_to_piece(i)}\t{sp.get_score(i):g}\n" for i in range(size))
        vocab_path = path.removesuffix(".model") + ".vocab"
        write_file(output / path, model)
        write_file(output / vocab_path, vocab.encode())
        entry |= {"vocab_size": size, "bos_id": sp.bos_id(), "eos_id": sp.eos_id()}
        entry |= {"model_path": path, "vocab_path": vocab_path}
    entry["recommended_bigram_vocab_size"] = 5 * 128 * math.ceil(size / 128)
    entry["source_spec"] = spec.fields
    return entry


def encode_texts(
    sp: sentencepiece.SentencePieceProcessor | None, num_threads: int, texts: list[str]
) -> np.ndarray:
    """Encode texts, each as BOS and its tokens, uint16 (n,). Without a model, tokens are bytes."""
    if sp is not None:
        documents = sp.encode(texts, add_bos=True, num_threads=num_threads)
        return np.fromiter(itertools.chain.from_iterable(documents), dtype="<u2")
    data = b"".join(b"\xff" + text.encode() for text in texts)  # byte 255 never occurs in UTF-8
    tokens = np.frombuffer(data, dtype=np.uint8).astype("<u2") + BYTE_OFFSET
    tokens[tokens == 255 + BYTE_OFFSET] = SPECIAL_IDS["bos_id"]
    return tokens
