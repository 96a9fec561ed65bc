"""Read tokenizer specs (fields: README.md), make the tokenizers and encode texts with them."""

import io
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import caseops
import files
import numpy as np
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

# The challenge's settings for SentencePiece's trainer.
TRAINER_SETTINGS: dict[str, Any] = {
    "model_type": "bpe", "character_coverage": 0.999, "byte_fallback": True, "split_digits": True,
    "normalization_rule_name": "nmt_nfkc", "add_dummy_prefix": False, "minloglevel": 2,
    "pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3,
}  # fmt: skip

MOST_PIECES = 2**16  # tokens are uint16
KIND = "sentencepiece_bpe"
KINDS = (KIND, "sentencepiece", "build_sentencepiece_tokenizer")
FIELDS = {
    "kind": str, "builder": str, "name": str, "dataset_suffix": str, "vocab_size": int,
    "model_prefix": str, "reuse_model_path": str, "tokenizer_train_docs": int,
    "trainer_overrides": dict, "caseops": bool
}  # fmt: skip


def train_sentencepiece(sentences: Iterable[str], **settings: Any) -> bytes:
    """Train a SentencePiece model. Raises RuntimeError or ValueError."""
    model = io.BytesIO()
    settings = {**TRAINER_SETTINGS, **settings, "sentence_iterator": iter(sentences)}
    SentencePieceTrainer.train(model_writer=model, **settings)
    return model.getvalue()


def open_model(model: bytes, name: str) -> SentencePieceProcessor:
    """Load a SentencePiece model. Raises ValueError if it cannot make a dataset."""
    sp = SentencePieceProcessor()
    try:
        sp.LoadFromSerializedProto(model)
    except RuntimeError:
        raise ValueError(f"{name} is not a SentencePiece model") from None
    if sp.bos_id() < 0:
        raise ValueError(f"{name} has no BOS token: train it with a bos_id of 0 or more")
    if sp.vocab_size() > MOST_PIECES:
        raise ValueError(f"{name} has {sp.vocab_size()} pieces: use one of at most {MOST_PIECES}")
    return sp


@dataclass(frozen=True)
class Spec:
    """A tokenizer to make, and the name of its dataset."""

    fields: dict[str, Any]  # from the file and the command line
    name: str
    dataset: str
    folder: str  # of the shards; both paths are relative to the output folder
    model_path: str
    reused: bytes | None  # the SentencePiece model to reuse


def check_fields(fields: dict[str, Any]) -> None:
    """Raise ValueError if a field is unknown or has an invalid value."""
    for field, value in fields.items():
        if field not in FIELDS:
            raise ValueError(f"{field!r} is not a field: use {', '.join(sorted(FIELDS))}")
        if type(value) is not FIELDS[field]:
            raise ValueError(f"{field} {value!r} must be of type {FIELDS[field].__name__}")
    for field, most in (("vocab_size", MOST_PIECES), ("tokenizer_train_docs", math.inf)):
        if not 1 <= fields.get(field, 1) <= most:
            raise ValueError(f"{field} {fields[field]} must be 1 to {most}")
    for field in ("dataset_suffix", "model_prefix"):
        name = fields.get(field, field)
        if "/" in name or not name or not name.isprintable():
            raise ValueError(f"{field} {name!r} must be a part of a file's name, without a slash")
    both = caseops.TRAINER_SETTINGS.keys() & fields.get("trainer_overrides", {})
    if fields.get("caseops") and both:
        raise ValueError(f"caseops sets {min(both)} itself: leave it out of trainer_overrides")


def read_spec(entry: dict[str, Any], overrides: dict[str, Any], reused: dict[int, str]) -> Spec:
    """Make a spec from an entry, and read a model to reuse. Raises ValueError or OSError."""
    fields = {field: value for field, value in entry.items() if value is not None}
    size = fields.get("vocab_size")
    default = "byte" if fields.get("dataset_suffix") == "byte260" else KIND
    kind = str(fields.get("kind", fields.get("builder", default))).rpartition(":")[2]
    if "byte" in kind:
        raise ValueError("train_gpt.py cannot train on bytes: delete this byte tokenizer")
    if kind not in KINDS:
        raise ValueError(f"kind or builder {kind!r} is not one of {', '.join(KINDS)}")
    fields |= {name: value for name, value in overrides.items() if value}
    if size in reused:
        fields["reuse_model_path"] = reused[size]
    check_fields(fields)
    suffix = "_caseops" if fields.get("caseops") else ""
    model = None
    if "reuse_model_path" in fields:
        path = files.path(fields["reuse_model_path"])
        model = path.read_bytes()
        sp = open_model(model, str(path))
        if suffix:
            caseops.check_tokenizer(sp, str(path))
        elif caseops.is_caseops(sp):
            raise ValueError(f"{path} is a CaseOps tokenizer: use it with --caseops")
        if sp.piece_to_id("\u2581") == sp.unk_id():
            lacks = f"{path} has no piece for a single space, which becomes three tokens"
            print(f"WARNING: {lacks} or <unk>: a tokenizer that you train here has one")
        size = size or sp.vocab_size()
        if sp.vocab_size() > size:
            raise ValueError(f"{path} has {sp.vocab_size()} pieces, not {size}: raise vocab_size")
    if size is None:
        raise ValueError("it has no vocab_size and no reuse_model_path: set one")
    name = fields.get("name", f"sp_bpe_{size}") + suffix
    dataset = files.DATASET_PREFIX + fields.get("dataset_suffix", f"sp{size}") + suffix
    prefix = fields.get("model_prefix", f"fineweb_{size}_bpe") + suffix
    return Spec(fields, name, dataset, f"datasets/{dataset}", f"tokenizers/{prefix}.model", model)


def read_specs(source: Path | int, overrides: dict[str, Any], reused: dict[int, str]) -> list[Spec]:
    """Make the specs in a file, or one for a vocabulary size. `overrides` are fields; `reused` has
    paths of models by vocabulary size. Raises ValueError or OSError."""
    place = f"--vocab-size {source}" if isinstance(source, int) else str(source)
    entries = [{"vocab_size": source}] if isinstance(source, int) else files.read_json(source)
    if isinstance(entries, dict):
        entries = entries.get("tokenizer_specs", entries.get("tokenizers"))
    if not (isinstance(entries, list) and entries and all(isinstance(e, dict) for e in entries)):
        raise ValueError(f"{place} must be a list of objects, or have one under tokenizer_specs")
    taken: set[str] = set()  # names, datasets and files
    specs = []
    for number, entry in enumerate(entries, start=1):
        try:
            spec = read_spec(entry, overrides, reused)
            for value in (spec.name, spec.dataset, spec.model_path):
                if value in taken:
                    raise ValueError(f"{value} is another tokenizer's already: choose another")
                taken.add(value)
            specs.append(spec)
        except (OSError, ValueError) as error:
            raise ValueError(f"{place}: tokenizer {number}: {error}") from None
    unused = reused.keys() - {spec.fields.get("vocab_size") for spec in specs if spec.reused}
    if unused:
        raise ValueError(f"--reuse-sp-model {min(unused)}: no tokenizer of {place} has this size")
    return specs


def sentences_of(texts: Iterable[str], limit: int, cut: bool) -> Iterator[str]:
    """Yield texts to train on. `cut` divides those above `limit` bytes, which the trainer skips."""
    length = max(limit // 4, 1)  # in characters of at most 4 bytes
    for text in filter(None, (text.replace("\0", " ").strip() for text in texts)):
        if cut and len(text.encode()) > limit:
            yield from re.findall(rf"\S.{{0,{length - 1}}}(?!\S)|\S{{1,{length}}}", text)
        else:
            yield text


def make_model(spec: Spec, texts: Iterable[str], cut: bool) -> bytes:
    """Reuse a SentencePiece model or train one on the texts. Raises ValueError."""
    if spec.reused is not None:
        return spec.reused
    texts = itertools.islice(texts, spec.fields.get("tokenizer_train_docs"))
    settings = {"vocab_size": spec.fields["vocab_size"], "hard_vocab_limit": False}
    settings |= spec.fields.get("trainer_overrides", {})
    settings |= caseops.TRAINER_SETTINGS if spec.fields.get("caseops") else {}
    # The piece for a single space, which a text with few spaces would not give.
    settings["required_chars"] = "".join([*settings.get("required_chars", ""), "\u2581"])
    try:
        limit = int(settings.get("max_sentence_length", 4192))  # SentencePiece's default
        model = train_sentencepiece(sentences_of(texts, limit, cut), **settings)
    except (RuntimeError, ValueError) as error:
        reason = re.sub(r".*\.cc\(\d+\) \[.*\] ", "", str(error))  # its file, line and condition
        if sizes := re.search(r"required_chars\. (\d+) vs (\d+)", reason):
            reason = f"vocab_size {sizes[1]} is too small for this text: {sizes[2]} is enough"
        raise ValueError(f"{spec.name}: SentencePiece cannot train: {reason}") from None
    print(f"{spec.name}: {open_model(model, spec.name).vocab_size()} pieces")
    return model


def write_tokenizer(model: bytes, path: Path) -> None:
    """Write the model and, next to it, a table of its pieces and their scores."""
    sp = open_model(model, str(path))
    lines = (f"{sp.id_to_piece(i)}\t{sp.get_score(i):g}\n" for i in range(sp.vocab_size()))
    files.write_file(path, model)
    files.write_file(path.with_suffix(".vocab"), "".join(lines).encode())


def encode_texts(sp: SentencePieceProcessor, threads: int, texts: list[str]) -> np.ndarray:
    """Encode texts, each as BOS and its tokens, uint16 (n,)."""
    documents = sp.encode(texts, add_bos=True, num_threads=threads)
    return np.fromiter(itertools.chain.from_iterable(documents), dtype="<u2")


def lzma_score(texts: Iterable[str]) -> str:
    """Return a line: xz's bits per byte of the validation texts, or of their first 10 MB."""
    try:
        import lzma
    except ImportError:
        return "lzma_bpb is not known: this Python was built without liblzma"
    data = "".join(map(caseops.normalize, texts)).encode()[: 10**7]  # the bytes that count
    bpb = 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / max(len(data), 1)
    return f"lzma_bpb:{bpb:.4f} (xz -9e on {len(data)} validation bytes)"
