"""What the tests share: a small real tokenizer, small real shards, and runs of the script."""

import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import sentencepiece
import torch

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "train_gpt.py"
sys.path.insert(0, str(ROOT))

import train_gpt  # noqa: E402
from train_gpt import Hyperparameters, Runtime, TrainingState  # noqa: E402

ALONE = Runtime(0, 1, False, torch.device("cpu"), torch.float32)  # one process, which logs nothing

VOCAB_SIZE = 384
TEXTS = [topics[name] for name in sorted(topics)][:40]


def pytest_configure(config) -> None:
    """Several files at a time share the cores. (Benchmarks import this file, too, and need all.)"""
    config.addinivalue_line("markers", "gpu: needs a GPU; skipped without one")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the script would inherit nohup's
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A whole folder: three files at a time. One file or test: this process, where pdb works."""
    by_name = config.option.keyword or not all(Path(name).is_dir() for name in config.args)
    return 0 if by_name else 3


def train_tokenizer(**settings) -> bytes:
    """A SentencePiece BPE model of the demo's kind, with other settings where given."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        **{
            "sentence_iterator": (line for text in TEXTS for line in text.splitlines() if line),
            "model_writer": model,
            "model_type": "bpe",
            "vocab_size": VOCAB_SIZE,
            "byte_fallback": True,
            "split_digits": True,
            "add_dummy_prefix": False,
            "normalization_rule_name": "nmt_nfkc",
            "pad_id": 0,
            "bos_id": 1,
            "eos_id": 2,
            "unk_id": 3,
            "minloglevel": 2,
            **settings,
        }
    )
    return model.getvalue()


def write_shard(path: Path, tokens, magic=20240520, version=1, count=None) -> Path:
    """A shard file, with a wrong header where told so."""
    tokens = np.asarray(tokens, dtype="<u2")
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + tokens.tobytes())
    return path


def write_tokenizer(folder: Path) -> Path:
    path = folder / "small.model"
    path.write_bytes(train_tokenizer())
    return path


def write_dataset(folder: Path, tokenizer: Path) -> None:
    """Two train shards and one validation shard of real text in real tokens."""
    sp = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    documents = [[1, *sp.encode(text)] for text in TEXTS]
    write_shard(folder / "fineweb_val_000000.bin", sum(documents[:5], [])[:1500])
    write_shard(folder / "fineweb_train_000000.bin", sum(documents[5:20], []))
    write_shard(folder / "fineweb_train_000001.bin", sum(documents[20:], []))


def small_knobs(dataset: Path, tokenizer: Path) -> dict[str, str]:
    """Environment variables of a run of some seconds."""
    return {
        "DATA_PATH": str(dataset),
        "TOKENIZER_PATH": str(tokenizer),
        "VOCAB_SIZE": str(VOCAB_SIZE),
        "RUN_ID": "test",
        "DEVICE": "cpu",
        "DTYPE": "fp32",
        "COMPILE": "0",
        "ITERATIONS": "6",
        "WARMUP_STEPS": "2",
        "WARMDOWN_ITERS": "4",
        "MAX_WALLCLOCK_SECONDS": "0",
        "TRAIN_BATCH_TOKENS": "512",
        "TRAIN_SEQ_LEN": "32",
        "VAL_BATCH_SIZE": "512",
        "VAL_LOSS_EVERY": "3",
        "NUM_LAYERS": "3",
        "MODEL_DIM": "32",
        "NUM_HEADS": "4",
        "NUM_KV_HEADS": "2",
    }


def write_small_run(folder: Path) -> dict[str, str]:
    """The small knobs, and in `folder` the tokenizer and the shards that they name."""
    tokenizer = write_tokenizer(folder)
    write_dataset(folder, tokenizer)
    return small_knobs(folder, tokenizer)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def dataset(tmp_path_factory, tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_dataset(folder, tokenizer)
    return folder


@pytest.fixture(scope="session")
def knobs(dataset, tokenizer) -> dict[str, str]:
    return small_knobs(dataset, tokenizer)


def make_state(hp: Hyperparameters, runtime: Runtime = ALONE) -> TrainingState:
    """What a run has before its first step: the weights of its seed, compiled and wrapped as the
    knobs say."""
    torch.manual_seed(hp.seed)
    train_gpt.choose_attention(hp, runtime.device, runtime.dtype)
    gpt = train_gpt.GPT(hp, runtime.dtype).to(runtime.device)
    model, newton_schulz_fn = train_gpt.compile_and_wrap(gpt, runtime)
    place = (runtime.rank, runtime.world_size, runtime.device, hp.vocab_size)
    loader = train_gpt.DistributedTokenLoader(hp.files("train"), *place)
    optimizers = train_gpt.build_optimizers(gpt, runtime.dtype, newton_schulz_fn)
    stopwatch = train_gpt.Stopwatch(runtime)
    return TrainingState(runtime, gpt, model, optimizers, loader, stopwatch)


@pytest.fixture(scope="session")
def quantized_knobs(knobs) -> dict[str, str]:
    """A model whose embedding is large enough to be quantized."""
    return {**knobs, "MODEL_DIM": "192", "NUM_LAYERS": "2", "VAL_LOSS_EVERY": "0"}


@pytest.fixture(scope="session")
def trained(tmp_path_factory, quantized_knobs) -> tuple[Path, list[str]]:
    """The folder of a finished run of quantized_knobs with a checkpoint of its last step, its log.
    Tests only read there."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, finished(run_here(folder, {**quantized_knobs, "CHECKPOINT_EVERY": "6"}))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def process_environ(environ: dict[str, str], threads: int) -> dict[str, str]:
    """`environ` and what a process needs to start, nothing else."""
    kept = ("PATH", "HOME", "LD_LIBRARY_PATH")
    base = {key: os.environ[key] for key in kept if key in os.environ}
    return {**base, "OMP_NUM_THREADS": str(threads), **environ}


def run_ranks(
    folder: Path, environ: dict[str, str], ranks: int, command: list[str | Path] = (SCRIPT,)
) -> list[subprocess.CompletedProcess]:
    """A script, and its arguments, as so many gloo processes, placed as torchrun would."""
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory() as outputs:
        launcher = [sys.executable, ROOT / "tests" / "forked_ranks.py", outputs, str(ranks)]
        environ = process_environ({**environ, **place}, 1)
        subprocess.run([*launcher, *command], cwd=folder, env=environ, check=True, timeout=120)
        results = []
        for rank in range(ranks):
            code, out, err = (
                Path(outputs, f"{rank}.{name}").read_text() for name in ("code", "out", "err")
            )
            results.append(subprocess.CompletedProcess(command, int(code), without_gloo(out), err))
    return results


def run_script(
    folder: Path,
    environ: dict[str, str],
    ranks: int = 0,
    script: Path = SCRIPT,
) -> subprocess.CompletedProcess:
    """The script as a process in `folder`; under torchrun if ranks > 0."""
    result = subprocess.run(
        [*launch_command(ranks), str(script)],
        cwd=folder,
        env=process_environ(environ, 1),  # more threads would only wait for each other
        capture_output=True,
        text=True,
        timeout=240,
    )
    result.stdout = without_gloo(result.stdout)
    return result


def run_here(folder: Path, environ: dict[str, str]) -> subprocess.CompletedProcess:
    """What run_script does, but in this process, which saves the three seconds of a start: for
    tests of what a run prints and leaves, not of how its process ends."""
    output, errors = io.StringIO(), io.StringIO()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    home, threads, code = os.getcwd(), torch.get_num_threads(), 1
    os.chdir(folder)
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            code = train_gpt.run(environ, train_gpt.StopRequest(environ))
        except Exception as error:
            train_gpt.report_error(error, environ)
    os.chdir(home)
    torch.set_num_threads(threads)
    for name in train_gpt.ATTENTION_BACKENDS:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(True)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return subprocess.CompletedProcess("run", code, output.getvalue(), errors.getvalue())


def without_gloo(output: str) -> str:
    """A log without what gloo itself says on stdout in torch 2.9."""
    lines = output.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("[Gloo] "))


def launch_command(ranks: int = 0, restarts: int = 0) -> list[str]:
    """Python; with torchrun in front if ranks > 0."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [sys.executable, *([*launcher, f"--max-restarts={restarts}"] if ranks else [])]


def start_script(
    folder: Path, environ: dict[str, str], ranks: int = 0, restarts: int = 0, script: Path = SCRIPT
) -> subprocess.Popen:
    """The script as run_script starts it, with its errors in a file beside; it is left running."""
    with open(folder / "stderr.txt", "w") as errors:
        return subprocess.Popen(
            [*launch_command(ranks, restarts), str(script)],
            cwd=folder,
            env=process_environ(environ, 1),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )


def write_worker(folder: Path, change: str) -> Path:
    """A script that replaces something of train_gpt, as the lines `change` say, and runs it."""
    head = f"import os, sys, time\nsys.path.insert(0, {str(ROOT)!r})\nimport train_gpt\n"
    path = folder / "worker.py"
    path.write_text(f"{head}{change}\ntrain_gpt.main()\n")
    return path


def read_until(process: subprocess.Popen, beginning: str) -> None:
    """Read the log of a started run up to a line that begins so."""
    while not (line := process.stdout.readline()).startswith(beginning):
        assert line, "the run ended by itself"


def rest_of(process: subprocess.Popen, seconds: int) -> str:
    """The rest of a started run's log. It is ended, and the test with it, if that takes longer."""
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun takes its ranks along
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=35)
        process.kill()
        raise


def ranks_of(agent: subprocess.Popen) -> list[int]:
    """The processes that torchrun has at this moment: none while it starts them again."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    return [int(pid) for pid in children.read_text().split()]


def finished(result: subprocess.CompletedProcess) -> list[str]:
    """The log of a run that ended well."""
    assert result.returncode == 0, (result.stdout, result.stderr)
    assert result.stdout.splitlines()[-1].startswith("final_int8_zlib_roundtrip_exact ")
    return result.stdout.splitlines()


def saved_in(folder: Path) -> list[str]:
    """The checkpoints of RUN_ID=test, and whatever else lies there."""
    return sorted(path.name for path in (folder / "checkpoints" / "test").iterdir())


def same_models(first: Path, second: Path) -> bool:
    """Whether two runs ended with the same bits."""
    names = ("final_model.pt", "final_model.int8.ptz")
    return all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def scores(line: str) -> list[float]:
    """val_loss and val_bpb of a line of the log."""
    return [float(value) for value in re.findall(r"val_(?:loss|bpb):(\S+)", line)]
