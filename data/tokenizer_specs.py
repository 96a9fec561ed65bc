"""Which tokenizers are asked for, and how they are made: used by the rebuild and the demo.

Recipe      the tokenizer that everybody gets
Specs       a --tokenizer-config, such as tokenizer_specs.json, and what may stand in it
Tokenizers  from a spec to its files
"""

import argparse
import collections
import io
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece
from cached_challenge_fineweb import PREFIX
from shards import require_regular, write_file

MAX_VOCAB_SIZE = 2**16  # a token has 16 bits
BOS = 1  # pad, bos, eos, unk = 0, 1, 2, 3 in every tokenizer that is made here
# The byte tokenizer: byte b is token b + 4.
BYTE_IDS = {"pad_id": 0, "bos_id": BOS, "eos_id": 2, "unk_id": 3}
BYTE_OFFSET, BYTE_COUNT = 4, 256
BYTE_VOCAB_SIZE = BYTE_OFFSET + BYTE_COUNT

# ---- Recipe --------------------------------------------------------------------------------------


# The challenge's own; in this order they give its bytes, too.
SETTINGS: dict[str, Any] = {
    "model_type": "bpe",
    "character_coverage": 0.999,
    "byte_fallback": True,
    "split_digits": True,
    "normalization_rule_name": "nmt_nfkc",
    "add_dummy_prefix": False,
    "pad_id": 0,
    "bos_id": BOS,
    "eos_id": 2,
    "unk_id": 3,
    "minloglevel": 2,
}
MAX_SENTENCE_LENGTH = 4192  # bytes; what SentencePiece takes if max_sentence_length is not set


def train_sentencepiece(sentences: Iterable[str], **settings: Any) -> bytes:
    """A SentencePiece BPE model, with SETTINGS but for those given. The same sentences in the same
    order give the same bytes. SentencePiece leaves out those longer than its max_sentence_length.
    Raises RuntimeError or ValueError if it cannot use the sentences or a setting."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, **{**SETTINGS, **settings}
    )
    return model.getvalue()


# ---- Specs ---------------------------------------------------------------------------------------

SENTENCEPIECE, BYTE = "sentencepiece_bpe", "byte"
KINDS = {
    "sentencepiece_bpe": SENTENCEPIECE,
    "sentencepiece": SENTENCEPIECE,
    "byte": BYTE,
    "pure_byte": BYTE,
    "bytes": BYTE,
}
BUILDERS = {
    "build_sentencepiece_tokenizer": SENTENCEPIECE,
    "build_pure_byte_tokenizer": BYTE,
}
COMMON_FIELDS = {
    "kind": str,
    "builder": str,
    "name": str,
    "dataset_suffix": str,
    "vocab_size": int,
}
FIELDS = {
    SENTENCEPIECE: {
        **COMMON_FIELDS,
        "model_prefix": str,
        "reuse_model_path": str,
        "tokenizer_train_docs": int,
        "trainer_overrides": dict,
    },
    BYTE: {**COMMON_FIELDS, "filename": str},
}
TYPE_NAMES = {str: "a string", int: "a whole number", dict: "an object of settings"}
FILE_NAME_FIELDS = ("dataset_suffix", "filename", "model_prefix")
# The documents are the sentences, and the model goes where model_prefix of the spec says.
SETTINGS_OF_OURS = ("input", "model_prefix", "model_writer", "sentence_iterator")


@dataclass(frozen=True)
class Spec:
    """A tokenizer that is asked for, and its dataset."""

    source: dict[str, Any]  # the fields that were given, here or on the command line
    kind: str
    name: str
    dataset: str
    file: str  # of the tokenizer, in the folder tokenizers/
    model: bytes | None = None  # the SentencePiece model to be reused

    @property
    def settings(self) -> dict[str, Any]:
        """What the spec sets for SentencePiece's trainer."""
        own = {"vocab_size": self.source.get("vocab_size"), "hard_vocab_limit": False}
        return {**own, **self.source.get("trainer_overrides", {})}


def kind_of(fields: dict[str, Any]) -> str:
    """The kind of tokenizer that the fields of a spec make. Raises ValueError if they make none."""
    named = set()
    for field, known in (("kind", KINDS), ("builder", BUILDERS)):
        if field in fields:
            name = fields[field].rpartition(":")[2]
            if name not in known:
                names = ", ".join(known)
                raise ValueError(f"{field} {fields[field]!r} is not known: it is one of {names}")
            named.add(known[name])
    if len(named) == 2:
        raise ValueError("kind and builder name different tokenizers: leave one out")
    if named:
        return named.pop()
    if fields.get("dataset_suffix") == "byte260":
        return BYTE
    if "vocab_size" in fields:
        return SENTENCEPIECE
    raise ValueError(f"nothing says of which kind it is: set kind to one of {', '.join(KINDS)}")


def check_fields(fields: dict[str, Any], kind: str) -> None:
    """Raises ValueError naming a field that cannot be used."""
    for name in FILE_NAME_FIELDS:
        value = fields.get(name, "x")
        if Path(value).name != value or value in ("", ".."):
            raise ValueError(f"{name} {value!r} must be the name of a file, without a folder")
    if kind == BYTE and fields.get("vocab_size", BYTE_VOCAB_SIZE) != BYTE_VOCAB_SIZE:
        raise ValueError(f"vocab_size of a byte tokenizer is {BYTE_VOCAB_SIZE}")
    overrides = fields.get("trainer_overrides", {})
    sizes = (fields.get("vocab_size", 1), overrides.get("vocab_size", 1))
    for size in sizes:
        if type(size) is not int or not 1 <= size <= MAX_VOCAB_SIZE:
            raise ValueError(
                f"vocab_size {size} must be a whole number from 1 to {MAX_VOCAB_SIZE}: a token "
                "has 16 bits"
            )
    if fields.get("tokenizer_train_docs", 1) < 1:
        raise ValueError(f"tokenizer_train_docs {fields['tokenizer_train_docs']} must be above 0")
    for name in overrides:
        if name in SETTINGS_OF_OURS:
            raise ValueError(f"trainer_overrides cannot set {name}: leave it out")


def read_fields(entry: Any) -> tuple[str, dict[str, Any]]:
    """(kind, fields) of an entry of the list of specs; null means not given. Raises ValueError
    naming a field that is not known or cannot be used."""
    if not isinstance(entry, dict):
        raise ValueError(f"{json.dumps(entry)[:40]} is no object with the fields of a tokenizer")
    known = {**FIELDS[SENTENCEPIECE], **FIELDS[BYTE]}
    for name, value in entry.items():
        if name not in known:
            raise ValueError(f"field {name!r} is not known: the fields are {', '.join(known)}")
        if value is not None and type(value) is not known[name]:
            raise ValueError(f"{name} {value!r} must be {TYPE_NAMES[known[name]]}")
    fields = {name: value for name, value in entry.items() if value is not None}
    kind = kind_of(fields)
    for name in fields:
        if name not in FIELDS[kind]:
            raise ValueError(f"field {name!r} is not for a tokenizer of kind {kind}: leave it out")
    check_fields(fields, kind)
    return kind, fields


def open_model(path: str, vocab_size: int | None) -> bytes:
    """The SentencePiece model in a file, which must have vocab_size pieces if that is given. Raises
    ValueError naming the file if it is none or cannot be used."""
    place = Path(path).expanduser()
    try:
        require_regular(place)
        model = place.read_bytes()
        sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: name another model to reuse") from None
    except RuntimeError:
        raise ValueError(f"{path} is no SentencePiece model: name another to reuse") from None
    if vocab_size not in (None, sp.vocab_size()):
        raise ValueError(f"{path} has {sp.vocab_size()} pieces, not the {vocab_size} of the spec")
    check_model(path, sp)
    return model


def check_model(name: str, sp: Any) -> None:
    """Raises ValueError, beginning with `name`, for a model whose tokens do not make a dataset."""
    if sp.bos_id() < 0:
        raise ValueError(f"{name} has no BOS, which begins each document: set its bos_id")
    if sp.vocab_size() > MAX_VOCAB_SIZE:
        raise ValueError(f"{name} has {sp.vocab_size()} pieces, more than {MAX_VOCAB_SIZE}")


def make_spec(kind: str, fields: dict[str, Any]) -> Spec:
    """What the fields ask for, with the defaults. Raises ValueError if a model to be reused or a
    setting of the trainer cannot be used."""
    if kind == BYTE:
        dataset = PREFIX + fields.get("dataset_suffix", "byte260")
        file = fields.get("filename", "fineweb_pure_byte_260.json")
        return Spec(fields, kind, fields.get("name", "pure_byte_260"), dataset, file)
    size, model = fields.get("vocab_size"), None
    if "reuse_model_path" in fields:
        model = open_model(fields["reuse_model_path"], size)
        size = sentencepiece.SentencePieceProcessor(model_proto=model).vocab_size()
    if size is None:
        raise ValueError("a SentencePiece tokenizer needs a vocab_size")
    name = fields.get("name", f"sp_bpe_{size}")
    dataset = PREFIX + fields.get("dataset_suffix", f"sp{size}")
    file = fields.get("model_prefix", f"fineweb_{size}_bpe") + ".model"
    spec = Spec(fields, kind, name, dataset, file, model)
    if model is None:
        check_settings(spec.settings)
    return spec


def check_settings(settings: dict[str, Any]) -> None:
    """Raises ValueError for settings that SentencePiece's trainer refuses. It looks at them all
    before it finds that there is no sentence."""
    try:
        train_sentencepiece([], **settings)
    except (RuntimeError, ValueError) as error:
        if "sentences_.empty" not in str(error):
            raise ValueError(
                f"SentencePiece refuses the settings {json.dumps(settings)} ({str(error).strip()}):"
                " correct trainer_overrides"
            ) from None


def list_entries(path: Path) -> list:
    """The entries of a file of specs. Raises ValueError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}): correct it") from None
    if isinstance(content, dict):
        content = content.get("tokenizer_specs", content.get("tokenizers"))
    if not isinstance(content, list):
        raise ValueError(f"{path} must be a list of tokenizers, or have one in tokenizer_specs")
    return content


def read_specs(args: argparse.Namespace) -> list[Spec]:
    """The tokenizers of --tokenizer-config, with what else the command line says of them. Raises
    ValueError naming the file, the tokenizer and what is wrong with it."""
    path, reused, specs = args.tokenizer_config, dict(args.reuse_sp_model), []
    unused = set(reused)
    for number, entry in enumerate(list_entries(path), start=1):
        try:
            kind, fields = read_fields(entry)
            if kind == BYTE and args.skip_byte:
                continue
            size = str(fields.get("vocab_size"))
            if kind == SENTENCEPIECE and size in reused:
                fields["reuse_model_path"] = reused[size]
                unused.discard(size)
            if kind == SENTENCEPIECE and args.tokenizer_train_docs is not None:
                fields["tokenizer_train_docs"] = args.tokenizer_train_docs
            specs.append(make_spec(kind, fields))
        except ValueError as error:
            raise ValueError(f"{path}: tokenizer {number}: {error}") from None
    for size in unused:
        raise ValueError(f"--reuse-sp-model {size}=...: {path} has no such size")
    if not specs:
        raise ValueError(f"{path} has no tokenizer, or none but those that --skip-byte leaves out")
    check_distinct(path, specs)
    return specs


def check_distinct(path: Path, specs: list[Spec]) -> None:
    """Raises ValueError if one tokenizer would be written over another."""
    for attribute, way_out in (
        ("name", "a name"),
        ("dataset", "a dataset_suffix"),
        ("file", "a model_prefix or filename"),
    ):
        values = [getattr(spec, attribute) for spec in specs]
        for value in values:
            if values.count(value) > 1:
                raise ValueError(
                    f"{path}: two tokenizers have the {attribute} {value}: give one {way_out} of "
                    "its own"
                )


# ---- Tokenizers ----------------------------------------------------------------------------------


def training_sentences(texts: Iterable[str], longest: int, counts: collections.Counter) -> Iterator:
    """The sentences to train on: each text is one. counts: how many there are, and how many of them
    SentencePiece takes."""
    for text in texts:
        counts["documents"] += 1
        sentence = text.replace("\0", " ").strip()
        if sentence:
            counts["taken"] += len(sentence.encode()) <= longest
            yield sentence


def train_tokenizer(spec: Spec, texts: Iterable[str]) -> bytes:
    """Train a SentencePiece model on the texts, from the first on. Raises ValueError."""
    texts = itertools.islice(texts, spec.source.get("tokenizer_train_docs"))
    settings, counts = spec.settings, collections.Counter()
    longest = int(settings.get("max_sentence_length", MAX_SENTENCE_LENGTH))
    long = f"SentencePiece takes those of up to max_sentence_length={longest} bytes"
    try:
        model = train_sentencepiece(training_sentences(texts, longest, counts), **settings)
    except RuntimeError as error:
        reason = str(error).strip()
        raise ValueError(
            f"no tokenizer {spec.name} from {counts['documents']} documents ({reason}): "
            f"check vocab_size and trainer_overrides ({long})"
        ) from None
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    check_model(spec.name, sp)
    print(
        f"{spec.name}: {sp.vocab_size()} pieces, trained on {counts['taken']} of "
        f"{counts['documents']} documents ({long})"
    )
    return model


def make_model(spec: Spec, texts: Iterable[str]) -> bytes | None:
    """The SentencePiece model of a spec, reused or trained on the texts; None for bytes."""
    if spec.kind == BYTE or spec.model is not None:
        return spec.model
    return train_tokenizer(spec, texts)


def bigram_vocab_size(vocab_size: int) -> int:
    """Rows of a table of hashed bigrams that suits the vocabulary."""
    return 5 * 128 * math.ceil(vocab_size / 128)


def write_tokenizer(spec: Spec, model: bytes | None, output: Path) -> dict[str, Any]:
    """Put a tokenizer into the output folder and return its entry in the manifest."""
    entry = {"name": spec.name, "kind": spec.kind}
    path = f"tokenizers/{spec.file}"
    if model is None:
        config = {**BYTE_IDS, "byte_offset": BYTE_OFFSET, "byte_count": BYTE_COUNT}
        facts = {"tokenizer_type": "pure_byte", "config": config, "vocab_size": BYTE_VOCAB_SIZE}
        write_file(output / path, json.dumps(facts, indent=2).encode())
        entry |= {"vocab_size": BYTE_VOCAB_SIZE, **BYTE_IDS, "path": path}
    else:
        sp = sentencepiece.SentencePieceProcessor(model_proto=model)
        size = sp.vocab_size()
        vocab = "".join(f"{sp.id_to_piece(i)}\t{sp.get_score(i):g}\n" for i in range(size))
        vocab_path = path.removesuffix(".model") + ".vocab"
        write_file(output / path, model)
        write_file(output / vocab_path, vocab.encode())
        entry |= {"vocab_size": size, "bos_id": sp.bos_id(), "eos_id": sp.eos_id()}
        entry |= {"model_path": path, "vocab_path": vocab_path}
    entry["recommended_bigram_vocab_size"] = bigram_vocab_size(entry["vocab_size"])
    entry["source_spec"] = spec.source
    return entry
