"""CaseOps: lower-case the text before tokenization, so that "The" and "the" share a token.

A mark keeps what is lost: U+0001 makes the next letter a capital, U+0002 the whole word. It comes
before the space, so that the space stays with its word: " The" becomes "\\1 the". Only A to Z
change, which have one byte in either case. The normalization of the challenge's tokenizer deletes
both characters and never makes one, so no text needs escapes, and a mark counts as no bytes.
"""

import itertools
import os
import re
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

from sentencepiece import SentencePieceNormalizer, SentencePieceProcessor

CAPITAL, CAPITALS = MARKS = "\1\2"
TO_MARK = re.compile(r" ?(?<![A-Za-z])[A-Z]{2,}(?![A-Za-z])| ?[A-Z]")
MARKED = re.compile(f"{CAPITAL} ?[a-z]?|{CAPITALS} ?[a-z]*")  # or a stray mark in generated text
BATCH_SIZE = 512  # texts

# Normalizing again would not be lossless: T + U+0308 stays two characters, t + U+0308 becomes one.
# Both marks must be pieces: in bytes they would count, as user_defined_symbols they never merge.
TRAINER_SETTINGS = {
    "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
    "required_chars": MARKS,
}  # fmt: skip
# Returns the text that the challenge's tokenizer scores. Its spaces are single.
normalize = SentencePieceNormalizer(
    rule_name="nmt_nfkc",
    add_dummy_prefix=False,
    escape_whitespaces=False,
    remove_extra_whitespaces=True,
).normalize


def encode(text: str) -> str:
    """Normalize a text and replace its capitals with marks and lower-case letters."""

    def mark(match: re.Match[str]) -> str:
        letters = match[0].lstrip()
        return (CAPITAL if len(letters) == 1 else CAPITALS) + match[0].lower()

    return TO_MARK.sub(mark, normalize(text))


def encode_many(texts: Iterable[str], num_processes: int) -> Iterator[str]:
    """Encode texts in several processes and yield them in order."""
    if os.path.isdir("/dev/shm") and not os.access("/dev/shm", os.W_OK):
        yield from map(encode, texts)  # there a pool cannot have its semaphores
        return
    texts = iter(texts)
    # Ctrl-C stops the main process, which stops the others.
    ignore = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
    with ProcessPoolExecutor(num_processes, **ignore) as pool:
        while batch := list(itertools.islice(texts, BATCH_SIZE)):
            yield from pool.map(encode, batch, chunksize=16)


def decode(text: str) -> str:
    """Return the normalized text that encode() marked."""
    return MARKED.sub(lambda match: match[0][1:].upper(), text)


def is_caseops(sp: SentencePieceProcessor) -> bool:
    """Return whether a tokenizer needs marked text, that is, has a piece for the capital mark."""
    return sp.piece_to_id(CAPITAL) != sp.unk_id()


def check_tokenizer(sp: SentencePieceProcessor, path: str) -> None:
    """Raise ValueError if a tokenizer cannot tokenize marked text without loss."""
    text = f"{CAPITAL}t\u0308{CAPITALS}"
    are_pieces = all(sp.piece_to_id(mark) != sp.unk_id() for mark in MARKS)
    if not are_pieces or text not in sp.normalize(text):
        raise ValueError(f"{path} is not a CaseOps tokenizer: train one, or leave out caseops")
