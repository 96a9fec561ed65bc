"""Time the export of documents to shards against encoding them one at a time in one thread.

    python tests/benchmarks/bench_export.py DOCS.jsonl MODEL [--rounds 3]

Both read the same lines of JSON and write the same shards, which are compared. They take turns;
medians. Peak memory is the largest resident size of the exporting process and of a worker.
"""

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import sentencepiece

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "data"))
from download_hf_docs_and_tokenize import BOS, Settings, export_dataset, read_documents
from shards import HEADER_BYTES, header


def export_plainly(docs: Path, model: Path, folder: Path) -> None:
    """One document after another, all into one shard."""
    sp = sentencepiece.SentencePieceProcessor(model_file=str(model))
    num_tokens = 0
    with open(folder / "fineweb_train_000000.bin", "wb") as file:
        file.write(header(0))
        for text in read_documents(docs):
            tokens = np.array([BOS, *sp.encode(text)], dtype="<u2")
            file.write(tokens.tobytes())
            num_tokens += len(tokens)
        file.seek(0)
        file.write(header(num_tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("docs", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    workers = os.cpu_count() or 1
    seconds: dict[str, list[float]] = {"exporter": [], "one by one": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for _ in range(args.rounds):
            started = time.perf_counter()
            settings = Settings(num_val_docs=0, workers=workers)
            stats = export_dataset(read_documents(args.docs), args.model, folder, settings)
            seconds["exporter"].append(time.perf_counter() - started)
            exported = (folder / "fineweb_train_000000.bin").read_bytes()[HEADER_BYTES:]
            started = time.perf_counter()
            export_plainly(args.docs, args.model, folder)
            seconds["one by one"].append(time.perf_counter() - started)
            plain = (folder / "fineweb_train_000000.bin").read_bytes()[HEADER_BYTES:]
            assert exported == plain, "the two shards differ"
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        tokens, megabytes = stats["tokens_train"] / value, args.docs.stat().st_size / value / 1e6
        print(f"{name:10} {value:6.2f} s {tokens:10.0f} tokens/s {megabytes:5.1f} MB/s")
    print(
        f"ratio      {medians['one by one'] / medians['exporter']:6.2f}x with {workers} processes"
    )
    for name, who in (("self", resource.RUSAGE_SELF), ("worker", resource.RUSAGE_CHILDREN)):
        print(f"peak memory {name}: {resource.getrusage(who).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()
