"""Make tokenizers and shards from documents, as the challenge's own were made.

    python3 data/download_hf_docs_and_tokenize.py --output-root DIR                 the hub's
    python3 data/download_hf_docs_and_tokenize.py --output-root DIR --docs FILE     yours, or -

Documents are lines of JSON, {"text": ...}. Each tokenizer of --tokenizer-config gets a folder
DIR/datasets/fineweb10B_SUFFIX with the first --num-val-docs documents as the validation split and
the rest as train shards; DIR/manifest.json, written last, lists it all.

    Recipe      the tokenizer that everybody gets
    Specs       which tokenizers are asked for
    Documents   their texts, and what is known of them
    Tokenizers  from a spec to its files
    Encoders    from a text to the bytes of its tokens
    Export      from documents to shards
    main        the command line
"""

import argparse
import collections
import functools
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from cached_challenge_fineweb import (
    DOCS,
    PREFIX,
    SIDECAR,
    DownloadError,
    File,
    Hub,
    default_hub,
    fetch_all,
)
from shards import (
    MANIFEST,
    MAX_TOKENS,
    UNFINISHED_MANIFEST,
    header,
    locked,
    require_regular,
    write_file,
)

HERE = Path(__file__).resolve().parent
MAX_VOCAB_SIZE = 2**16  # a token has 16 bits
# The byte tokenizer: byte b is token b + 4.
BYTE_IDS = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
BYTE_OFFSET, BYTE_COUNT = 4, 256
BYTE_VOCAB_SIZE = BYTE_OFFSET + BYTE_COUNT
DEFAULT_NUM_VAL_DOCS = 50_000
PIPED_DOCS = "docs_piped.jsonl"  # what came through a pipe

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
    "bos_id": 1,
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
    if "kind" in fields:
        if fields["kind"] not in KINDS:
            raise ValueError(
                f"kind {fields['kind']!r} is not known: it is one of {', '.join(KINDS)}"
            )
        return KINDS[fields["kind"]]
    if "builder" in fields:
        name = fields["builder"].rpartition(":")[2]
        if name not in BUILDERS:
            known = ", ".join(BUILDERS)
            raise ValueError(f"builder {fields['builder']!r} is not known: it is one of {known}")
        return BUILDERS[name]
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
    require_regular(place)
    model = place.read_bytes()
    try:
        sp = sentencepiece.SentencePieceProcessor(model_proto=model)
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


# ---- Documents -----------------------------------------------------------------------------------


def read_documents(path: Path, progress: Callable[[int], Any] = lambda size: None) -> Iterator[str]:
    """The texts of a file of JSON lines. progress is told the bytes of each line. Raises ValueError
    naming the file and the line that is no {"text": string}."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = json.loads(line)["text"]
                if not isinstance(text, str):
                    raise TypeError
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ValueError(f'{path}: line {number} must be {{"text": "..."}}') from None
            progress(len(line))
            yield text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates are no text


def documents_from_hub(repo_id: str, remote_root: str, output_root: Path) -> Path:
    """Download docs_selected.jsonl and its sidecar, unless they are there; the former's path.
    Raises DownloadError."""
    hub = Hub(repo_id, remote_root.strip("/"))
    remotes = hub.ask_all(list(DOCS))
    files = {File(path, output_root): remote for path, remote in remotes.items()}
    wanted = {file: remote for file, remote in files.items() if not file.is_whole(remote)}
    if wanted:
        fetch_all(hub, wanted)
    return output_root / DOCS[0]


def find_documents(args: argparse.Namespace) -> Path:
    """The file of --docs, or the hub's. What comes through a pipe is kept, to be read again."""
    if args.docs is None:
        return documents_from_hub(args.repo_id, args.remote_root, args.output_root)
    if args.docs != "-" and not Path(args.docs).is_fifo():
        return Path(args.docs)
    docs = args.output_root / PIPED_DOCS
    with open(sys.stdin.fileno() if args.docs == "-" else args.docs, "rb") as pipe:
        with open(docs, "wb") as file:
            shutil.copyfileobj(pipe, file)
    return docs


@dataclass(frozen=True)
class Documents:
    """A file of documents, and what is known of it."""

    path: Path
    num_docs: int
    sha256: str
    sidecar: dict[str, Any]  # what the file beside it says; empty if there is none

    @property
    def sidecar_path(self) -> Path:
        return self.path.with_name(SIDECAR)

    def num_val_docs(self, asked: int | None) -> int:
        """`asked`, or docs_val of the sidecar, or the challenge's. Raises ValueError if no document
        is left to train on."""
        number = self.sidecar.get("docs_val", DEFAULT_NUM_VAL_DOCS) if asked is None else asked
        if type(number) is not int or number < 0:
            raise ValueError(
                f"{self.sidecar_path}: docs_val {number!r} must be a number from 0 on: set "
                "--num-val-docs"
            )
        if number >= self.num_docs:
            raise ValueError(
                f"{self.path} has {self.num_docs} documents, and the first {number} are for "
                "validation: set --num-val-docs below their number"
            )
        return number


def look_at_documents(path: Path) -> Documents:
    """Count and hash the documents, and read their sidecar. Raises ValueError, OSError."""
    require_regular(path)
    num_docs, digest = 0, hashlib.sha256()
    with open(path, "rb") as file:
        for line in file:
            digest.update(line)
            num_docs += 1
    sidecar = path.with_name(SIDECAR)
    facts: Any = {}
    if path.name != PIPED_DOCS and sidecar.exists():
        try:
            facts = json.loads(sidecar.read_text(encoding="utf-8"))
        except ValueError:
            facts = None
        if not isinstance(facts, dict):
            raise ValueError(f"{sidecar} is no JSON object: get it again, or remove it")
    documents = Documents(path, num_docs, digest.hexdigest(), facts)
    for key, found in (("num_docs", num_docs), ("docs_sha256", documents.sha256)):
        if facts.get(key, found) != found:
            print(f"{sidecar}: {key} is {facts[key]}, but {path} has {found}", file=sys.stderr)
    return documents


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


def train_tokenizer(spec: Spec, docs: Path) -> bytes:
    """Train a SentencePiece model on the documents, from the first on. Raises ValueError."""
    texts = itertools.islice(read_documents(docs), spec.source.get("tokenizer_train_docs"))
    settings, counts = spec.settings, collections.Counter()
    longest = int(settings.get("max_sentence_length", MAX_SENTENCE_LENGTH))
    long = f"SentencePiece takes those of up to max_sentence_length={longest} bytes"
    try:
        model = train_sentencepiece(training_sentences(texts, longest, counts), **settings)
    except RuntimeError as error:
        reason = str(error).strip()
        raise ValueError(
            f"{docs}: no tokenizer {spec.name} from {counts['documents']} documents ({reason}): "
            f"check vocab_size and trainer_overrides ({long})"
        ) from None
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    check_model(spec.name, sp)
    print(
        f"{spec.name}: {sp.vocab_size()} pieces, trained on {counts['taken']} of "
        f"{counts['documents']} documents ({long})"
    )
    return model


def bigram_vocab_size(vocab_size: int) -> int:
    """Rows of a table of hashed bigrams that suits the vocabulary."""
    return 5 * 128 * -(-vocab_size // 128)


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


# ---- Encoders ------------------------------------------------------------------------------------


class WordEncoder:
    """A SentencePiece model that remembers words.

    Text is spaces between words, pieces do not reach over a space, and most words have been seen
    before: looking them up is faster than encoding them again. What comes out equals encoding the
    whole text; where a model does not behave like that, the whole text is encoded.
    """

    MAX_WORDS = 300_000  # some 60 MB
    SPACES = bytes.maketrans(b"\t\n\r\f", b"    ")  # SentencePiece makes these a space
    PROBE = (
        "The cat\tsat \u00a0on\x0b 12 mats.\nNo\u00ebl  e\u0301t\u00e9 \x01 x\u2581y \U0001f600!\n"
    )

    def __init__(self, model: bytes) -> None:
        self.sp = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.words: dict[bytes, bytes] = {}
        size = range(self.sp.vocab_size())
        self.begins_word = np.array([self.sp.id_to_piece(i).startswith("\u2581") for i in size])
        self.by_words = len(self.sp.encode(".")) == 1
        self.by_words = self.by_words and self([self.PROBE]) == [self.whole(self.PROBE)]

    def __call__(self, texts: list[str]) -> list[bytes]:
        """The tokens of each text, without BOS, as little-endian uint16."""
        if not self.by_words:
            return [self.whole(text) for text in texts]
        split = [
            text.encode("utf-8", "replace").translate(self.SPACES).split(b" ") for text in texts
        ]
        if len(self.words) > self.MAX_WORDS:
            self.words.clear()
        self.learn(set().union(*split).difference(self.words))
        return [self.first(words) + b"".join(map(self.words.__getitem__, words)) for words in split]

    def first(self, words: list[bytes]) -> bytes:
        """Take the first word that is not empty, with what is before it, out of a list, and encode
        it: it has no space before it."""
        for i, word in enumerate(words):
            if tokens := self.whole(word.decode()):
                del words[: i + 1]
                return tokens
        words.clear()
        return b""

    def whole(self, text: str) -> bytes:
        return np.array(self.sp.encode(text), dtype="<u2").tobytes()

    def learn(self, words: set[bytes]) -> None:
        """Encode words as they are behind a space: behind one token, which is cut off again."""
        plain = [word for word in words if word.isascii() and word.decode().isprintable() and word]
        tokens = np.array(self.sp.encode(". " + b" ".join(plain).decode())[1:], dtype="<u2")
        starts = 2 * np.flatnonzero(self.begins_word[tokens])
        if len(starts) == len(plain):  # all at once
            data = tokens.tobytes()
            bounds = itertools.pairwise([*starts.tolist(), len(data)])
            for word, (start, end) in zip(plain, bounds, strict=True):
                self.words[word] = data[start:end]
            words = words.difference(plain)
        for word in words:  # other alphabets, spaces of other kinds, nothing
            self.words[word] = self.whole(f". {word.decode()}")[2:]


def encode_bytes(texts: list[str]) -> list[bytes]:
    """Each UTF-8 byte of each text as a token, without BOS, as little-endian uint16."""
    arrays = (np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8) for text in texts)
    return [(data.astype("<u2") + BYTE_OFFSET).tobytes() for data in arrays]


@functools.lru_cache(maxsize=1)
def load_encoder(model_path: Path | None) -> tuple[Callable[[list[str]], list[bytes]], int]:
    """The encoder of a SentencePiece model, or of bytes if there is none, and the id of its BOS:
    one for each process."""
    if model_path is None:
        return encode_bytes, BYTE_IDS["bos_id"]
    encoder = WordEncoder(model_path.read_bytes())
    return encoder, encoder.sp.bos_id()


def encode_documents(model_path: Path | None, texts: list[str]) -> bytes:
    """BOS and the tokens of each document, end to end."""
    encode, bos_id = load_encoder(model_path)
    bos = bos_id.to_bytes(2, "little")
    return b"".join(bos + tokens for tokens in encode(texts))


# ---- Export --------------------------------------------------------------------------------------


class ShardWriter:
    """Writes a stream of tokens as shards PREFIX_%06d.bin of chunk_tokens each, the last one
    shorter. A shard gets its name when it is whole; until the stream is closed a file PREFIX.part
    lies beside, so that whoever finds one knows that shards are missing."""

    def __init__(self, folder: Path, prefix: str, chunk_tokens: int) -> None:
        self.folder, self.prefix, self.chunk_tokens = folder, prefix, chunk_tokens
        self.part = folder / f"{prefix}.part"
        self.num_files = self.num_tokens = 0
        self.begin_shard()

    def begin_shard(self) -> None:
        self.file = open(self.part, "wb")
        self.file.write(header(0))
        self.in_file = 0

    def add(self, data: bytes) -> None:
        """data: tokens as little-endian uint16."""
        while data:
            part = data[: 2 * (self.chunk_tokens - self.in_file)]
            self.file.write(part)
            self.in_file += len(part) // 2
            data = data[len(part) :]
            if self.in_file == self.chunk_tokens:
                self.finish_shard()
                self.begin_shard()

    def finish_shard(self) -> None:
        """Write the header of the shard in hand and give it its name."""
        self.file.seek(0)
        self.file.write(header(self.in_file))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.part, self.folder / f"{self.prefix}_{self.num_files:06d}.bin")
        self.num_files += 1
        self.num_tokens += self.in_file

    def close(self) -> None:
        """Finish the stream."""
        if self.in_file:
            self.finish_shard()
        else:
            self.file.close()
            self.part.unlink()


def split_batches(
    texts: Iterable[str], num_val_docs: int, batch_size: int
) -> Iterator[tuple[str, list[str]]]:
    """("val", batch), then ("train", batch): lists of at most batch_size texts."""
    texts = iter(texts)
    for split, limit in (("val", num_val_docs), ("train", None)):
        part = itertools.islice(texts, limit)
        while batch := list(itertools.islice(part, batch_size)):
            yield split, batch


def end_with_parent() -> None:
    """Wait until the parent has ended, in whatever way, then end this process."""
    multiprocessing.parent_process().join()
    os._exit(1)


def depend_on_parent() -> None:
    """In a worker: leave Ctrl-C to the parent, and do not outlive it: its locks would be held."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()


def encoded_batches(
    batches: Iterable[tuple[str, list[str]]], model_path: Path | None, workers: int
) -> Iterator[tuple[str, int, bytes]]:
    """(split, number of documents, tokens) of each batch, in order, encoded by `workers` processes
    (by this one if there is only one). Few batches are in memory at a time."""
    if workers == 1:
        for split, texts in batches:
            yield split, len(texts), encode_documents(model_path, texts)
        return
    # Forked workers are there at once; elsewhere than on Linux forking is not safe.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=depend_on_parent) as pool:
        waiting: collections.deque = collections.deque()
        for split, texts in batches:
            future = pool.submit(encode_documents, model_path, texts)
            waiting.append((split, len(texts), future))
            if len(waiting) > 2 * workers:
                split, count, future = waiting.popleft()
                yield split, count, future.result()
        for split, count, future in waiting:
            yield split, count, future.result()


@dataclass(frozen=True)
class Settings:
    """How documents become shards."""

    num_val_docs: int = DEFAULT_NUM_VAL_DOCS  # the first documents are the validation split
    chunk_tokens: int = 100_000_000  # in a shard
    batch_size: int = 512  # documents that a worker takes at a time
    workers: int = 1  # processes


def export_dataset(
    texts: Iterable[str],
    model_path: Path | None,
    folder: Path,
    settings: Settings,
    report: Callable[[int, int], None] = lambda documents, tokens: None,
) -> dict[str, int]:
    """Write the shards of a dataset, in place of any that are there; return their statistics.

    model_path: of a SentencePiece model, or None for bytes. report is told of every batch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chunk = settings.chunk_tokens
    # From here to the end there is a .part: what is killed or fails in between is seen as such.
    writers = {split: ShardWriter(folder, f"fineweb_{split}", chunk) for split in ("val", "train")}
    remove_old_shards(folder, {writer.part for writer in writers.values()})
    documents = {"val": 0, "train": 0}
    batches = split_batches(texts, settings.num_val_docs, settings.batch_size)
    for split, count, tokens in encoded_batches(batches, model_path, settings.workers):
        writers[split].add(tokens)
        documents[split] += count
        report(count, len(tokens) // 2)
    for writer in writers.values():
        writer.close()
    counts = {
        "docs": documents,
        "files": {split: writer.num_files for split, writer in writers.items()},
        "tokens": {split: writer.num_tokens for split, writer in writers.items()},
    }
    stats = {}
    for what, of in counts.items():
        stats[f"{what}_total"] = of["val"] + of["train"]
        stats[f"{what}_val"] = of["val"]
        stats[f"{what}_train"] = of["train"]
    return stats


def remove_old_shards(folder: Path, kept: set[Path]) -> None:
    """Make room for new shards; half of a download goes, too."""
    for old in [*folder.glob("fineweb_*.bin"), *folder.glob("fineweb_*.part")]:
        if old.is_dir():
            shutil.rmtree(old)
        elif old not in kept:
            old.unlink()


# ---- main ----------------------------------------------------------------------------------------


def relative(path: Path, output: Path) -> str:
    return Path(os.path.relpath(path, output)).as_posix()


def begin_manifest(
    documents: Documents, settings: Settings, specs: list[Spec], args: argparse.Namespace
) -> dict[str, Any]:
    """The manifest without its tokenizers and datasets."""
    from_hub = args.docs is None
    sidecar = relative(documents.sidecar_path, args.output_root) if documents.sidecar else None
    return {
        "version": "10B",
        "num_docs": documents.num_docs,
        "num_val_docs": settings.num_val_docs,
        "shuffle_seed": documents.sidecar.get("shuffle_seed"),
        "shard_size": settings.chunk_tokens,
        "append_eos": False,
        "docs_jsonl": relative(documents.path, args.output_root),
        "docs_meta": {
            "remote_repo_id": args.repo_id if from_hub else None,
            "remote_root": args.remote_root if from_hub else None,
            "num_docs": documents.num_docs,
            "docs_sha256": documents.sha256,
            "source_manifest": sidecar,
            "source_sidecar": documents.sidecar or None,
        },
        "tokenizer_specs": [spec.source for spec in specs],
        "tokenizers": [],
        "datasets": [],
    }


def dataset_entry(spec: Spec, tokenizer: dict[str, Any], stats: dict[str, int]) -> dict[str, Any]:
    """A dataset's entry in the manifest."""
    path = f"datasets/{spec.dataset}"
    facts = ("vocab_size", "bos_id", "eos_id", "recommended_bigram_vocab_size")
    return {
        "name": spec.dataset,
        "tokenizer_name": tokenizer["name"],
        "tokenizer_kind": tokenizer["kind"],
        "path": path,
        "train_glob": f"{path}/fineweb_train_*.bin",
        "val_glob": f"{path}/fineweb_val_*.bin",
        **{fact: tokenizer[fact] for fact in facts},
        "stats": stats,
    }


def write_dataset(
    spec: Spec, tokenizer: dict[str, Any], docs: Path, output: Path, settings: Settings
) -> dict[str, Any]:
    """Export the documents with a tokenizer that is in the output folder; the dataset's entry in
    the manifest."""
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread: workers are forked
    model_path = output / tokenizer["model_path"] if "model_path" in tokenizer else None
    with tqdm(total=docs.stat().st_size, unit="B", unit_scale=True, desc=spec.dataset) as bar:
        counter = Counter(bar)
        texts = read_documents(docs, bar.update)
        folder = output / "datasets" / spec.dataset
        stats = export_dataset(texts, model_path, folder, settings, counter)
    print(f"{spec.dataset}: {stats}")
    return dataset_entry(spec, tokenizer, stats)


def run(args: argparse.Namespace) -> None:
    """Specs, documents, tokenizers, datasets, manifest: nothing that is there is touched before all
    tokenizers are trained."""
    specs = read_specs(args)
    batch_size = read_knob("MATCHED_FINEWEB_SP_BATCH_SIZE", Settings.batch_size)
    workers = read_knob("MATCHED_FINEWEB_TOKENIZER_THREADS", os.cpu_count() or 1)
    documents = look_at_documents(find_documents(args))
    num_val_docs = documents.num_val_docs(args.num_val_docs)
    settings = Settings(num_val_docs, args.chunk_tokens, batch_size, workers)
    models = []
    for spec in specs:
        train = spec.kind == SENTENCEPIECE and spec.model is None
        models.append(train_tokenizer(spec, documents.path) if train else spec.model)

    # From here on the manifest is unfinished, and has another name.
    output, manifest = args.output_root, begin_manifest(documents, settings, specs, args)
    unfinished = output / UNFINISHED_MANIFEST
    write_json(unfinished, manifest)
    (output / MANIFEST).unlink(missing_ok=True)
    for spec, model in zip(specs, models, strict=True):
        tokenizer = write_tokenizer(spec, model, output)
        dataset = write_dataset(spec, tokenizer, documents.path, output, settings)
        manifest["tokenizers"].append(tokenizer)
        manifest["datasets"].append(dataset)
        write_json(unfinished, manifest)
    write_json(output / "tokenizer_config.export.json", {"tokenizers": manifest["tokenizer_specs"]})
    os.replace(unfinished, output / MANIFEST)


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_file(path, json.dumps(content, indent=2).encode())


def read_knob(name: str, default: int) -> int:
    """A number above 0 from the environment. Raises ValueError naming the variable."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name}={text!r} must be a whole number above 0")
    return int(text)


def vocab_and_model(text: str) -> tuple[str, str]:
    """(VOCAB, MODEL) of VOCAB=MODEL."""
    vocab, _, model = text.partition("=")
    if not vocab.isdecimal() or not model:
        raise argparse.ArgumentTypeError(f"{text!r} must be VOCAB=MODEL, as 1024=my.model")
    return vocab, model


def number(text: str, least: int = 1, most: int = sys.maxsize) -> int:
    """A whole number from an argument."""
    if not text.isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, {least} to {most}")
    return int(text)


class Counter:
    """Shows documents and tokens beside a progress bar."""

    def __init__(self, bar: Any) -> None:
        self.bar, self.documents, self.tokens = bar, 0, 0

    def __call__(self, documents: int, tokens: int) -> None:
        self.documents += documents
        self.tokens += tokens
        self.bar.set_postfix_str(f"{self.documents} docs, {self.tokens / 1e6:.1f}M tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-root", type=Path, required=True)
    parser.add_argument("--docs", help="a file of JSON lines, or -; the hub's if left out")
    parser.add_argument("--repo-id", default=default_hub().repo_id)
    parser.add_argument("--remote-root", default=default_hub().folder)
    parser.add_argument("--tokenizer-config", type=Path, default=HERE / "tokenizer_specs.json")
    from_zero = functools.partial(number, least=0)
    val = "documents of the validation split: docs_val of the sidecar, else 50000"
    parser.add_argument("--num-val-docs", type=from_zero, metavar="N", help=val)
    shard = functools.partial(number, most=MAX_TOKENS)
    chunk = {"default": Settings.chunk_tokens, "metavar": "N", "help": "tokens in a shard"}
    parser.add_argument("--chunk-tokens", type=shard, **chunk)
    first = "train tokenizers on the first N documents, not on all"
    parser.add_argument("--tokenizer-train-docs", type=number, metavar="N", help=first)
    parser.add_argument("--skip-byte", action="store_true", help="make no byte dataset")
    reuse = "use this model instead of training one; may stand several times"
    parser.add_argument(
        "--reuse-sp-model",
        action="append",
        default=[],
        type=vocab_and_model,
        metavar="VOCAB=MODEL",
        help=reuse,
    )
    try:
        args = parser.parse_args()
        with locked(args.output_root):
            run(args)
    except KeyboardInterrupt:
        print("interrupted: run the same command again", file=sys.stderr)
        sys.exit(130)
    except ImportError as error:
        sys.exit(f"{error}: pip install -r data/requirements.txt")
    except (DownloadError, OSError, ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
