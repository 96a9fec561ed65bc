"""Fixtures: a small real tokenizer, small real shards, a finished run. See helpers/runs.py."""

import signal
import sys
from pathlib import Path

import pytest
import sentencepiece
import torch

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("", "data", "tests/figures", "tests/helpers", "tests/records", "tests/tools")
sys.path[:0] = [str(ROOT / name) for name in FOLDERS]

import files  # noqa: E402
from runs import finished, run_here  # noqa: E402
from texts import TEXTS, VOCAB_SIZE, train_tokenizer, write_shard  # noqa: E402

# A run of some seconds.
SMALL = (
    f"VOCAB_SIZE={VOCAB_SIZE} RUN_ID=test DEVICE=cpu DTYPE=fp32 COMPILE=0 ITERATIONS=6 "
    "WARMUP_STEPS=2 WARMDOWN_ITERS=4 MAX_WALLCLOCK_SECONDS=0 TRAIN_BATCH_TOKENS=512 "
    "TRAIN_SEQ_LEN=32 VAL_BATCH_SIZE=512 VAL_LOSS_EVERY=3 NUM_LAYERS=3 MODEL_DIM=32 NUM_HEADS=4 "
    "NUM_KV_HEADS=2"
)


def pytest_configure(config) -> None:
    # The script would inherit the signals that nohup and a shell's & ignore.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(max(1, files.cores() // 2))  # several files share the cores


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "records" not in config.option.markexpr:
        slow = [item for item in items if item.get_closest_marker("records")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Use three processes for a whole folder; for a file or a test this one, where pdb works."""
    by_name = config.option.keyword or not all(Path(name).is_dir() for name in config.args)
    return 0 if by_name else 3


@pytest.fixture(scope="session")
def knobs(tmp_path_factory) -> dict[str, str]:
    """Knobs of a small run on two train shards and one validation shard of real text."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer = folder / "small.model"
    tokenizer.write_bytes(train_tokenizer())
    sp = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    documents = [[1, *sp.encode(text)] for text in TEXTS]
    write_shard(folder / "fineweb_val_000000.bin", sum(documents[:5], [])[:1500])
    write_shard(folder / "fineweb_train_000000.bin", sum(documents[5:20], []))
    write_shard(folder / "fineweb_train_000001.bin", sum(documents[20:], []))
    small = dict(knob.split("=") for knob in SMALL.split())
    return {"DATA_PATH": str(folder), "TOKENIZER_PATH": str(tokenizer), **small}


@pytest.fixture(scope="session")
def dataset(knobs) -> Path:
    return Path(knobs["DATA_PATH"])


@pytest.fixture(scope="session")
def tokenizer(knobs) -> Path:
    return Path(knobs["TOKENIZER_PATH"])


@pytest.fixture(scope="session")
def quantized_knobs(knobs) -> dict[str, str]:
    """A model whose embedding is large enough to be quantized."""
    return {**knobs, "MODEL_DIM": "192", "NUM_LAYERS": "2", "VAL_LOSS_EVERY": "0"}


@pytest.fixture
def all_matrices(monkeypatch) -> None:
    """Quantize all matrices, in small models, too."""
    for script in ("train_gpt", "train_record"):
        monkeypatch.setattr(f"{script}.INT8_KEEP_FLOAT_MAX_NUMEL", 500)


@pytest.fixture(scope="session")
def trained(tmp_path_factory, quantized_knobs) -> tuple[Path, list[str]]:
    """Folder and log of a finished run with a checkpoint of its last step. Tests only read it."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, finished(run_here(folder, {**quantized_knobs, "CHECKPOINT_EVERY": "100"}))
