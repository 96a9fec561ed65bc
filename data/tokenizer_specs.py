"""Which tokenizers a --tokenizer-config asks for, and how they are made (fields: README.md)."""

import io
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from shards import DATASET_PREFIX, read_json, write_file, write_json

BYTE_IDS = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
BYTE_OFFSET = 4  # byte b is token b + 4

# The challenge's settings of SentencePiece's trainer.
TRAINER_SETTINGS: dict[str, Any] = {
    "model_type": "bpe",
    "character_coverage": 0.999,
    "byte_fallback": True,
    "split_digits": True,
    "normalization_rule_name": "nmt_nfkc",
    "add_dummy_prefix": False,
    "pad_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "unk_id": 3,
    "minloglevel": 2,
}

SENTENCEPIECE, BYTE = "sentencepiece_bpe", "byte"
VOCAB_SIZES = {SENTENCEPIECE: range(1, 2**16 + 1), BYTE: [260]}  # a token has 16 bits
SENTENCEPIECE_NAMES = ("sentencepiece_bpe", "sentencepiece", "build_sentencepiece_tokenizer")
BYTE_NAMES = ("byte", "pure_byte", "bytes", "build_pure_byte_tokenizer")
KINDS = dict.fromkeys(SENTENCEPIECE_NAMES, SENTENCEPIECE) | dict.fromkeys(BYTE_NAMES, BYTE)
COMMON_FIELDS = {"kind", "builder", "name", "dataset_suffix", "vocab_size"}
TRAINING_FIELDS = {"reuse_model_path", "tokenizer_train_docs", "trainer_overrides"}
FIELDS = {
    SENTENCEPIECE: {*COMMON_FIELDS, *TRAINING_FIELDS, "model_prefix"},
    BYTE: {*COMMON_FIELDS, "filename"},
}
TYPES = {"vocab_size": int, "tokenizer_train_docs": int, "trainer_overrides": dict}  # others: str


def train_sentencepiece(sentences: Iterable[str], **settings: Any) -> bytes:
    """A SentencePiece model of these sentences; `settings` come before the challenge's. The same
    sentences in the same order give the same bytes. Raises RuntimeError or ValueError."""
    model = io.BytesIO()
    settings = {**TRAINER_SETTINGS, **settings}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, **settings
    )
    return model.getvalue()


def open_model(model: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece model whose tokens can make a dataset. Raises ValueError naming it if not."""
    sp = sentencepiece.SentencePieceProcessor()
    try:
        sp.LoadFromSerializedProto(model)
    except RuntimeError:
        raise ValueError(f"{name} is not a SentencePiece model") from None
    if sp.bos_id() < 0:
        raise ValueError(f"{name} has no BOS, which begins each document: set its bos_id")
    if sp.vocab_size() not in VOCAB_SIZES[SENTENCEPIECE]:
        raise ValueError(f"{name} has {sp.vocab_size()} pieces: a token has room for 65536")
    return sp


@dataclass(frozen=True)
class Spec:
    """A tokenizer to make, and its dataset."""

    fields: dict[str, Any]  # as given in the file and on the command line
    kind: str
    name: str
    dataset: str
    file: str  # in the folder tokenizers/
    model: bytes | None = None  # the SentencePiece model that is reused


def kind_of(fields: dict[str, Any]) -> str:
    """SENTENCEPIECE or BYTE. Raises ValueError."""
    name = str(fields.get("kind", fields.get("builder", ""))).rpartition(":")[2]
    if name in KINDS:
        return KINDS[name]
    if name:
        raise ValueError(f"kind or builder {name!r} is not one of {', '.join(KINDS)}")
    if fields.get("dataset_suffix") == "byte260":
        return BYTE
    if "vocab_size" in fields:
        return SENTENCEPIECE
    raise ValueError(f"it needs a kind or a vocab_size, and has {', '.join(fields) or 'nothing'}")


def check_fields(fields: dict[str, Any], kind: str) -> None:
    """Raises ValueError naming a field that is not known or has no such value."""
    for field, value in fields.items():
        if field not in FIELDS[kind]:
            known = ", ".join(sorted(FIELDS[kind]))
            raise ValueError(f"{field!r} is not a field of a {kind} tokenizer: {known}")
        field_type = TYPES.get(field, str)
        if type(value) is not field_type:
            raise ValueError(f"{field} {value!r} must be of type {field_type.__name__}")
    sizes = VOCAB_SIZES[kind]
    if fields.get("vocab_size", sizes[0]) not in sizes:
        raise ValueError(f"vocab_size {fields['vocab_size']} must be {sizes[0]} to {sizes[-1]}")


def make_spec(fields: dict[str, Any], kind: str) -> Spec:
    """What the fields ask for, with the defaults. Raises ValueError or OSError."""
    if kind == BYTE:
        dataset = DATASET_PREFIX + fields.get("dataset_suffix", "byte260")
        file = fields.get("filename", "fineweb_pure_byte_260.json")
        return Spec(fields, kind, fields.get("name", "pure_byte_260"), dataset, file)
    size = fields.get("vocab_size")
    model = None
    if "reuse_model_path" in fields:
        path = Path(fields["reuse_model_path"]).expanduser()
        model = path.read_bytes()
        pieces = open_model(model, str(path)).vocab_size()
        size = size or pieces
        if pieces > size:
            raise ValueError(f"{path} has {pieces} pieces, more than vocab_size {size}")
    if size is None:
        raise ValueError("it needs a vocab_size")
    dataset = DATASET_PREFIX + fields.get("dataset_suffix", f"sp{size}")
    file = fields.get("model_prefix", f"fineweb_{size}_bpe") + ".model"
    return Spec(fields, kind, fields.get("name", f"sp_bpe_{size}"), dataset, file, model)


def read_specs(
    path: Path, reused_models: dict[int, str], train_docs: int | None, skip_byte: bool
) -> list[Spec]:
    """The tokenizers of a --tokenizer-config, changed by the command line: models to reuse by their
    vocab_size, documents to train on. Raises ValueError naming the file and the entry, OSError."""
    entries = read_json(path)
    if isinstance(entries, dict):
        entries = entries.get("tokenizer_specs", entries.get("tokenizers"))
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path} must be a list of objects, or have one in tokenizer_specs")
    unused = set(reused_models)
    taken: set[str] = set()  # names, datasets and files
    specs = []
    for number, entry in enumerate(entries, start=1):
        try:
            fields = {field: value for field, value in entry.items() if value is not None}
            kind = kind_of(fields)
            check_fields(fields, kind)
            if kind == BYTE and skip_byte:
                continue
            if kind == SENTENCEPIECE and fields.get("vocab_size") in reused_models:
                fields["reuse_model_path"] = reused_models[fields["vocab_size"]]
                unused.discard(fields["vocab_size"])
            if kind == SENTENCEPIECE and train_docs is not None:
                fields["tokenizer_train_docs"] = train_docs
            spec = make_spec(fields, kind)
            for value in (spec.name, spec.dataset, spec.file):
                if value in taken:
                    raise ValueError(f"{value} is another tokenizer's, too: give it one of its own")
                taken.add(value)
            specs.append(spec)
        except ValueError as error:
            raise ValueError(f"{path}: tokenizer {number}: {error}") from None
    if unused:
        raise ValueError(f"--reuse-sp-model {min(unused)}: {path} has no such vocab_size")
    if not specs:
        raise ValueError(f"{path} has no tokenizer to make")
    return specs


def make_model(spec: Spec, texts: Iterable[str]) -> bytes | None:
    """A SentencePiece model, reused or trained on the texts from the first on; None for bytes.
    Raises ValueError."""
    if spec.kind == BYTE or spec.model is not None:
        return spec.model
    texts = itertools.islice(texts, spec.fields.get("tokenizer_train_docs"))
    sentences = (text.replace("\0", " ").strip() for text in texts)
    settings = {"vocab_size": spec.fields["vocab_size"], "hard_vocab_limit": False}
    settings |= spec.fields.get("trainer_overrides", {})
    try:
        model = train_sentencepiece(filter(None, sentences), **settings)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"tokenizer {spec.name}: SentencePiece says: {error}") from None
    print(f"{spec.name}: {open_model(model, spec.name).vocab_size()} pieces", flush=True)
    return model


def write_tokenizer(spec: Spec, model: bytes | None, output: Path) -> dict[str, Any]:
    """Write the tokenizer's files; return its entry in the manifest. Paths are from `output`."""
    path = f"tokenizers/{spec.file}"
    entry: dict[str, Any] = {"name": spec.name, "kind": spec.kind}
    if model is None:
        size = 260
        config = {**BYTE_IDS, "byte_offset": BYTE_OFFSET, "byte_count": 256}
        content = {"tokenizer_type": "pure_byte", "config": config, "vocab_size": size}
        write_json(output / path, content)
        entry |= {"vocab_size": size, **BYTE_IDS, "path": path}
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
    """The tokens of all texts, each text's after a BOS, uint16 (n,). Without a model: its bytes."""
    if sp is not None:
        documents = sp.encode(texts, add_bos=True, num_threads=num_threads)
        return np.fromiter(itertools.chain.from_iterable(documents), dtype="<u2")
    data = b"".join(b"\xff" + text.encode() for text in texts)  # UTF-8 has no byte 255
    tokens = np.frombuffer(data, dtype=np.uint8).astype("<u2") + BYTE_OFFSET
    tokens[tokens == 255 + BYTE_OFFSET] = BYTE_IDS["bos_id"]
    return tokens
