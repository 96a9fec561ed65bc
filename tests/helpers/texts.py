"""Real text, small: documents, a tokenizer and shards."""

import io
import json
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import sentencepiece

TEXTS = [topics[name] for name in sorted(topics)][:40]

VOCAB_SIZE = 384


def train_tokenizer(**changes) -> bytes:
    """Train a SentencePiece BPE model like the demo's. changes: other settings."""
    model = io.BytesIO()
    lines = (line for text in TEXTS for line in text.splitlines() if line)
    settings = {"sentence_iterator": lines, "model_writer": model, "model_type": "bpe"}
    settings |= {"vocab_size": VOCAB_SIZE, "byte_fallback": True, "split_digits": True}
    settings |= {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "minloglevel": 2}
    settings |= {"add_dummy_prefix": False, **changes}
    sentencepiece.SentencePieceTrainer.train(**settings)
    return model.getvalue()


def write_documents(path: Path, texts=TEXTS) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_shard(path: Path, tokens, magic=20240520, version=1, count=None) -> Path:
    """Write a shard. magic, version and count can make its header wrong."""
    tokens = np.asarray(tokens, dtype="<u2")
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + tokens.tobytes())
    return path


def write_counting_shards(folder: Path, sizes: list[int]) -> str:
    """Write shards of these sizes, whose tokens count up from 0. Returns their pattern."""
    first = 0
    for i, size in enumerate(sizes):
        write_shard(folder / f"fineweb_train_{i:06d}.bin", range(first, first + size))
        first += size
    return str(folder / "fineweb_train_*.bin")


def read_shard(path: Path) -> np.ndarray:
    return np.fromfile(path, "<u2", offset=1024)
