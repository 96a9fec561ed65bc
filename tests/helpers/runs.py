"""Run the script: run_here in this process, run_ranks as forked gloo processes, each in a second;
start_in_terminal as a process of its own. finished and failed check the result."""

import contextlib
import fcntl
import io
import multiprocessing
import os
import pty
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import torch

import train_gpt
from train_gpt import Log, Runtime

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "train_gpt.py"
MODEL, ARTIFACT, RESULT = "final_model.pt", "final_model.int8.ptz", "final_result.json"
TORCHRUN = Path(torch.distributed.__file__).with_name("run.py")
ALONE = Runtime(0, 1, torch.device("cpu"), torch.float32, False)  # one process, without a log


class Lines(Log):
    """A log that keeps its lines."""

    text = ""

    def __call__(self, line: str) -> None:
        self.text += f"{line}\n"


# Ranks are forked from a server that has imported torch for all of them.
FORKS = multiprocessing.get_context("forkserver")
HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
FORKS.set_forkserver_preload(["torch._dynamo", HOOKS, "sentencepiece", "pytest"])
if len(tempfile.gettempdir()) > 60:  # the path of the server's socket has at most 107 bytes
    with patch.object(tempfile, "tempdir", "/tmp"):
        multiprocessing.util.get_temp_dir()  # makes a folder, and keeps its name


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def process_environ(environ: dict[str, str]) -> dict[str, str]:
    """`environ`, and the few variables that a process needs to start."""
    kept = {"PATH", "HOME", "LD_LIBRARY_PATH", "LD_PRELOAD"}
    base = {name: value for name, value in os.environ.items() if name in kept}
    return {**base, "OMP_NUM_THREADS": "1", **environ}


def be_a_rank(folder: Path, environ: dict, command: list, output: str, edit: Callable | None):
    """Turn this process into one that runs a script, or train_gpt.py after an edit of it."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT), number)
    torch.set_num_threads(1)
    sys.argv = [str(word) for word in command]
    if edit is None:
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        edit()
        train_gpt.main()


def run_ranks(
    folder: Path,
    environ: dict[str, str],
    ranks: int,
    command: list[str | Path] = (SCRIPT,),
    own: dict[int, dict[str, str]] | None = None,
    edit: Callable[[], None] | None = None,
) -> list[subprocess.CompletedProcess]:
    """Run a script, and its arguments, as gloo processes with the variables that torchrun sets.
    own: other variables of some ranks. edit: a function of a test module that each process calls
    first, to change train_gpt."""
    folder.mkdir(exist_ok=True)
    place = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes, results = [], []
    with tempfile.TemporaryDirectory() as outputs:
        for rank in range(ranks):
            place |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            rank_environ = process_environ({**environ, **place, **(own or {}).get(rank, {})})
            arguments = (folder, rank_environ, command, f"{outputs}/{rank}", edit)
            processes.append(FORKS.Process(target=be_a_rank, args=arguments))
            processes[rank].start()
        for rank, process in enumerate(processes):
            process.join(timeout=240)
            process.kill()
            process.join()
            out, err = (Path(outputs, f"{rank}.{name}").read_text() for name in ("out", "err"))
            out = re.sub(r"(?m)^\[Gloo\] .*\n", "", out)  # gloo itself prints it in torch 2.9
            results.append(subprocess.CompletedProcess("run", process.exitcode, out, err))
    return results


def run_here(
    folder: Path,
    environ: dict[str, str],
    script: ModuleType = train_gpt,
    arguments: Sequence[str] = (),
) -> subprocess.CompletedProcess:
    """Run the script's main in this process, three seconds faster than in a new one."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    output, errors, code = io.StringIO(), io.StringIO(), 0
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in numbers}
    home, threads = os.getcwd(), torch.get_num_threads()
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    torch.set_num_threads(1)
    with (
        patch.dict(os.environ, process_environ(environ), clear=True),
        patch.object(sys, "argv", ["train_gpt.py", *arguments]),
        patch.object(os, "_exit", leave),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            script.main()
        except SystemExit as end:
            code = end.code
            if isinstance(code, str):  # as Python does
                print(code, file=errors)
                code = 1
    torch.set_num_threads(threads)
    os.chdir(home)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return subprocess.CompletedProcess("run", code, output.getvalue(), errors.getvalue())


def call_before(patch: pytest.MonkeyPatch, place: object, name: str, action: Callable) -> None:
    """Let a function of a class or module first call action with the same arguments."""
    function = getattr(place, name)

    def changed(*arguments):
        action(*arguments)
        return function(*arguments)

    patch.setattr(place, name, changed)


def send_signals(
    monkeypatch: pytest.MonkeyPatch, step: int, *numbers: int, script: ModuleType = train_gpt
) -> None:
    """Let this process receive these signals during a step."""

    def send(state):
        if state.step + 1 == step:
            for number in numbers:
                signal.raise_signal(number)

    call_before(monkeypatch, script, "train_step", send)


def start_in_terminal(folder: Path, environ: dict, command: list) -> tuple[subprocess.Popen, int]:
    """Start a command in a new terminal. Also returns the other end of the terminal, to read the
    output from; closing this end closes the terminal."""
    master, slave = pty.openpty()
    settings = {"cwd": folder, "env": process_environ(environ), "start_new_session": True}
    settings |= dict.fromkeys(("stdin", "stdout", "stderr"), slave)
    settings["preexec_fn"] = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # as in a shell
    process = subprocess.Popen(command, **settings)
    os.close(slave)
    return process, master


def finished(result: subprocess.CompletedProcess) -> list[str]:
    """Return the log of a run, which must have succeeded."""
    assert result.returncode == 0, (result.stdout, result.stderr)
    assert result.stdout.splitlines()[-1].startswith("final_int8_zlib_roundtrip_exact ")
    return result.stdout.splitlines()


def failed(result: subprocess.CompletedProcess, *words: str) -> str:
    """Return the error of a run, which must have exit code 1, these words and no traceback."""
    assert result.returncode == 1, (result.stdout, result.stderr)
    assert "Traceback" not in result.stderr
    error = result.stderr.strip()
    assert all(word in error for word in words), error
    return error


def same_models(first: Path, second: Path) -> bool:
    """Return whether two runs ended with the same bits."""
    names = (MODEL, ARTIFACT)
    return all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def scores(line: str) -> list[float]:
    """val_loss and val_bpb of a line of the log."""
    return [float(value) for value in re.findall(r"val_(?:loss|bpb):(\S+)", line)]
