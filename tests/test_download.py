"""The download as a process: the real client of the hub against a small server on this machine."""

import contextlib
import hashlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from conftest import ROOT, process_environ, write_shard

pytest.importorskip("huggingface_hub")
pytest.importorskip("tqdm")

SCRIPT = ROOT / "data/cached_challenge_fineweb.py"
REPO = "someone/tokens"
SP = "datasets/fineweb10B_sp1024"
TRAIN = [f"{SP}/fineweb_train_{index:06d}.bin" for index in range(3)]
VAL = [f"{SP}/fineweb_val_{index:06d}.bin" for index in range(2)]
TOKENIZER = ["tokenizers/fineweb_1024_bpe.model", "tokenizers/fineweb_1024_bpe.vocab"]
MANIFEST = {
    "datasets": [
        {
            "name": "fineweb10B_sp1024",
            "tokenizer_name": "sp_bpe_1024",
            "stats": {"files_train": 3, "files_val": 2},
        },
        {
            "name": "fineweb10B_byte260",
            "tokenizer_name": "pure_byte_260",
            "stats": {"files_train": 1, "files_val": 1},
        },
    ],
    "tokenizers": [
        {"name": "sp_bpe_1024", "model_path": TOKENIZER[0], "vocab_path": TOKENIZER[1]},
        {"name": "pure_byte_260", "path": "tokenizers/fineweb_pure_byte_260.json"},
    ],
}


class Handler(BaseHTTPRequestHandler):
    """The requests of the client: HEAD and GET of a file, or of the rest of it."""

    protocol_version = "HTTP/1.1"
    server: "Hub"

    def log_message(self, *_) -> None:
        pass

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):  # the client has given up
                self.wfile.write(body)

    def do_GET(self) -> None:
        path = unquote(self.path).removeprefix(f"/datasets/{REPO}/resolve/main/")
        self.server.requests.append((self.command, path.removeprefix("datasets/")))
        fault = self.server.faults.pop((self.command, path.removeprefix("datasets/")), None)
        if fault == 500:
            return self.reply(500)
        if not self.path.startswith(f"/datasets/{REPO}/"):
            return self.reply(401, X_Error_Code="RepoNotFound")
        if path not in self.server.files:
            return self.reply(404, X_Error_Code="EntryNotFound")
        body = self.server.files[path]
        etag = self.server.etags.get(path, hashlib.sha256(body).hexdigest())
        headers = {"ETag": f'"{etag}"', "X_Repo_Commit": "c" * 40}
        headers["X_Linked_Size"] = str(self.server.sizes.get(path, len(body)))
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if fault:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2])
            if fault == "slow":
                self.server.stalled.set()
                self.server.released.wait(30)
            self.close_connection = True
        elif asked:
            start = int(asked[1])
            headers["Content_Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            self.server.resumed.append(start)
            self.reply(206, body[start:], **headers)
        else:
            self.reply(200, body, **headers)

    do_HEAD = do_GET


class Hub(ThreadingHTTPServer):
    """A repository of `files`; `faults` happen once each, `requests` are what was asked."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.sizes, self.etags, self.faults = dict(files), {}, {}, {}
        self.requests, self.resumed = [], []
        self.stalled, self.released = threading.Event(), threading.Event()

    def loaded(self) -> list[str]:
        """The files whose content was asked for, as often as it was."""
        return sorted(path for method, path in self.requests if method == "GET")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    """The repository: small real shards, but for the second train shard: the client writes 10 MiB
    at a time, and half of it is more."""
    path = tmp_path_factory.mktemp("remote") / "shard.bin"
    content = {path: f"content of {path}\n".encode() for path in TOKENIZER}
    content["tokenizers/fineweb_pure_byte_260.json"] = b'{"vocab_size": 260}'
    content["docs_selected.jsonl"] = b'{"text": "a document"}\n'
    content["docs_selected.source_manifest.json"] = b'{"docs_val": 1}'
    content["manifest.json"] = json.dumps(MANIFEST).encode()
    byte = [f"datasets/fineweb10B_byte260/fineweb_{s}_000000.bin" for s in ("train", "val")]
    for index, name in enumerate([*TRAIN, *VAL, *byte]):
        tokens = np.arange(11_000_000 if name == TRAIN[1] else 500) % 1000 + index
        content[name] = write_shard(path, tokens).read_bytes()
    return {f"datasets/{name}": data for name, data in content.items()}


@pytest.fixture
def hub(files) -> Iterator[Hub]:
    server = Hub(files)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


def start(hub: Hub, root: Path, *args: str, script: Path = SCRIPT, **more) -> subprocess.Popen:
    """The script with `args`, to fill `root` from the hub."""
    environ = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(root.parent / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "MATCHED_FINEWEB_REPO_ID": REPO,
        **more.pop("environ", {}),
    }
    option = "--root" if script == SCRIPT else "--output-root"
    command = [sys.executable, str(script), option, str(root), *args]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=process_environ(environ, 1), **pipes, **more)


def finish(process: subprocess.Popen) -> subprocess.CompletedProcess:
    output = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, *output)


def download(hub: Hub, root: Path, *args: str, **more) -> subprocess.CompletedProcess:
    """A run that must succeed."""
    result = finish(start(hub, root, *args, **more))
    assert result.returncode == 0, result.stderr
    return result


def present(root: Path) -> dict[str, bytes]:
    """All files under `root`, and empty folders whose names betray something half-done."""
    paths = sorted(root.rglob("*"))
    assert not [path for path in paths if path.is_dir() and path.suffix == ".part"]
    return {str(p.relative_to(root)): p.read_bytes() for p in paths if p.is_file()}


def expected(files: dict[str, bytes], *names: str) -> dict[str, bytes]:
    return {name: files[f"datasets/{name}"] for name in ("manifest.json", *names)}


def assert_fails(result: subprocess.CompletedProcess, *words: str) -> None:
    """Exit 1 and one line, after the bar if there is one, that has all the words."""
    assert result.returncode == 1 and result.stdout == ""
    lines = [line for line in re.split(r"[\r\n]+", result.stderr) if line.strip()]
    lines = [line for line in lines if not re.match(r"\s*\d+%\|", line)]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("cached_challenge_fineweb.py: ")
    for word in words:
        assert word in lines[0], result.stderr


def test_first_run_then_more_then_repairs(hub, files, tmp_path):
    """Each run loads what is missing, cut short or out of date, and nothing else."""
    root = tmp_path / "data"
    names = [*VAL, *TOKENIZER, TRAIN[0]]
    result = download(hub, root, "--variant", "sp1024", "1")
    assert present(root) == expected(files, *names)
    assert hub.loaded() == sorted(["manifest.json", *names])
    assert re.search(r"100%\|.*[0-9.]+k/[0-9.]+k \[\d\d:\d\d<\d\d:\d\d, .*B/s\]", result.stderr)

    hub.requests.clear()
    (root / "manifest.json").write_text('{"datasets": [], "tokenizers": []}')  # an old one
    (root / VAL[0]).write_bytes(files[f"datasets/{VAL[0]}"][:-2])
    (root / TRAIN[0]).write_bytes(files[f"datasets/{TRAIN[0]}"][:100])
    (root / TOKENIZER[0]).unlink()
    (root / VAL[1]).unlink()
    os.mkfifo(root / VAL[1])  # it would be waited for
    download(hub, root, "--variant", "sp1024", "--train-shards", "2")
    assert present(root) == expected(files, *names, TRAIN[1])
    again = ["manifest.json", *VAL, TRAIN[0], TRAIN[1], TOKENIZER[0]]
    assert hub.loaded() == sorted(again)

    hub.requests.clear()
    download(hub, root, "--skip-manifest")  # the default, 80, takes all that there are
    assert hub.loaded() == [TRAIN[2]]
    hub.requests.clear()
    download(hub, root, "--skip-manifest")
    assert hub.requests == []
    assert present(root) == expected(files, *names, *TRAIN[1:])


@pytest.mark.parametrize("sidecar", [["docs_selected.source_manifest.json"], []])
def test_bytes_and_documents(hub, files, tmp_path, sidecar):
    """byte260 has a tokenizer of one file; the documents lie beside the manifest, with their
    sidecar if the hub has one."""
    root = tmp_path / "data"
    if not sidecar:
        del hub.files["datasets/docs_selected.source_manifest.json"]
    result = download(hub, root, "--variant", "byte260", "--with-docs", "--train-shards", "0")
    names = ["docs_selected.jsonl", *sidecar, "tokenizers/fineweb_pure_byte_260.json"]
    names += ["datasets/fineweb10B_byte260/fineweb_val_000000.bin"]
    assert present(root) == expected(files, *names)
    assert result.stdout.startswith(f"{len(names)} files whole in {root}: {len(names)} downloaded")


@pytest.mark.parametrize("same_size", [False, True])
def test_a_tokenizer_that_is_there_is_kept(hub, files, tmp_path, same_size):
    """Whatever its size is; the one line about it says how to get the hub's."""
    root = tmp_path / "data"
    place = root / TOKENIZER[0]
    place.parent.mkdir(parents=True)
    own = files[f"datasets/{TOKENIZER[0]}"].upper() if same_size else b"a model of one's own"
    place.write_bytes(own)
    for _ in range(2):
        result = download(hub, root, "0")
        lines = [line for line in result.stderr.splitlines() if str(place) in line]
        assert len(lines) == 1 and "is kept, but is not the hub's" in lines[0]
        assert "--replace-tokenizer" in lines[0] and place.read_bytes() == own
    assert (root / TOKENIZER[1]).read_bytes() == files[f"datasets/{TOKENIZER[1]}"]
    result = download(hub, root, "0", "--replace-tokenizer")
    assert str(place) not in result.stderr
    assert present(root) == expected(files, *VAL, *TOKENIZER)
    assert "not the hub's" not in download(hub, root, "0").stderr


def test_passing_failures_are_survived(hub, files, tmp_path):
    """Errors of the server and connections cut in mid-file end in whole files."""
    hub.faults = {
        ("HEAD", "manifest.json"): 500,
        ("HEAD", VAL[0]): 500,
        ("GET", VAL[1]): 500,
        ("GET", TRAIN[0]): "cut",
        ("GET", TRAIN[1]): "cut",
    }
    root = tmp_path / "data"
    result = download(hub, root, "--train-shards", "2")
    assert all(re.match(r" *\d+%\||$", line) for line in re.split(r"[\r\n]+", result.stderr))
    assert hub.faults == {} and hub.resumed == [10 * 2**20]  # not from its start
    assert present(root) == expected(files, *VAL, *TOKENIZER, *TRAIN[:2])


def is_in_mid_file(root: Path, rest: list[str]) -> bool:
    """Whether a part of the second train shard is written, and the rest is there."""
    halves = (root / f"{TRAIN[1]}.part").rglob("*.incomplete")
    sizes = [path.stat().st_size for path in halves]
    return sizes == [10 * 2**20] and all((root / name).exists() for name in rest)


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_ended_in_mid_file(hub, files, tmp_path, kind):
    """Only whole files are in place; the next run goes on with the others."""
    hub.faults = {("GET", TRAIN[1]): "slow"}
    root = tmp_path / "data"
    process = start(hub, root, "--train-shards", "3")
    assert hub.stalled.wait(20) and process.poll() is None
    rest = [*VAL, *TOKENIZER, TRAIN[0], TRAIN[2]]
    deadline = time.monotonic() + 20
    while not is_in_mid_file(root, rest) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert is_in_mid_file(root, rest)
    second = start(hub, root)
    line = second.stderr.readline()
    assert line == f"waiting for process {process.pid}, which is at work in {root}\n"
    second.kill()
    second.communicate()
    sent = time.monotonic()
    process.send_signal(kind)
    result = finish(process)
    if kind == signal.SIGINT:
        assert time.monotonic() - sent < 5  # without waiting for the server
        assert result.returncode == 130 and "Traceback" not in result.stderr
        assert result.stderr.rstrip().endswith("it goes on from what is there")
        assert present(root) == expected(files, *rest)
    for name in rest:
        assert (root / name).read_bytes() == files[f"datasets/{name}"]
    assert not (root / TRAIN[1]).exists()

    (root / f"{SP}/fineweb_train_000009.bin.part").mkdir()  # of a run that asked for more
    hub.requests.clear()
    download(hub, root, "--train-shards", "3")
    assert hub.loaded() == sorted(["manifest.json", TRAIN[1]])
    assert present(root) == expected(files, *rest, TRAIN[1])


@pytest.mark.parametrize(
    "args, words",
    [
        (["--variant", "sp999"], ["sp999", "sp1024, byte260"]),
        (["--train-shards", "4"], ["--train-shards 4", "3 train shards"]),
        (["--train-shards=-1"], ["--train-shards -1", "3 train shards"]),
        (["--skip-manifest"], ["manifest.json", "without --skip-manifest"]),
    ],
)
def test_arguments_that_cannot_be_met(hub, tmp_path, args, words):
    root = tmp_path / "data"
    assert_fails(finish(start(hub, root, *args)), *words)
    assert not list(root.rglob("*.bin")) and not list(root.rglob("*.part"))


def test_a_damaged_shard_and_a_missing_one(hub, files, tmp_path):
    root = tmp_path / "data"
    shard = files[f"datasets/{TRAIN[0]}"]
    for damaged, reason in [(shard[:-2], "promises 500 tokens"), (b"<htm" + shard[4:], "magic")]:
        hub.files[f"datasets/{TRAIN[0]}"] = damaged
        result = finish(start(hub, root, "--train-shards", "1"))
        assert_fails(result, TRAIN[0], "damaged", reason)
        assert TRAIN[0] not in present(root)
    del hub.files[f"datasets/{TRAIN[0]}"]
    result = finish(start(hub, root, "--train-shards", "1"))
    assert_fails(result, TRAIN[0], REPO, "is not in the dataset repository")
    before = present(root)
    hub.files["datasets/manifest.json"] = b'{"datasets"'
    assert_fails(finish(start(hub, root, "1")), "manifest.json", "damaged")
    assert present(root) == before
    text = files["datasets/manifest.json"].decode()
    paths = ['"../my.model"', '"/my.model"', "5", '["x"]', "true"]
    for path in paths:
        wrong = text.replace(f'"{TOKENIZER[0]}"', path)
        hub.files["datasets/manifest.json"] = wrong.encode()
        assert_fails(finish(start(hub, root, "1")), "manifest.json of the hub", "no path inside")


def test_a_checksum_of_the_hub(hub, files, tmp_path):
    """A file that came with other bytes than the hub's is refused, in the size that it should have.
    What is no SHA-256 is not compared."""
    root, name = tmp_path / "data", f"datasets/{VAL[1]}"
    hub.etags = {f"datasets/{TOKENIZER[1]}": "5" * 40, name: "ab" * 32}
    result = finish(start(hub, root, "0"))
    assert_fails(result, VAL[1], "is damaged", f"the SHA-256 is not {'ab' * 32}")
    assert VAL[1] not in present(root)
    del hub.etags[name]
    download(hub, root, "0")
    assert present(root) == expected(files, *VAL, *TOKENIZER)


def test_nothing_but_the_own_requirements(hub, files, tmp_path):
    """Without numpy and SentencePiece, which data/requirements.txt does not name."""
    for package in ("numpy", "sentencepiece"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('No module')")
    root = tmp_path / "data"
    download(hub, root, "1", environ={"PYTHONPATH": str(tmp_path)})
    assert present(root) == expected(files, *VAL, *TOKENIZER, TRAIN[0])


@pytest.mark.parametrize("repo", ["a/b/c", "with space/x", ""])
def test_a_malformed_repository(hub, tmp_path, repo):
    """It is named, and no flag is spoken of that was not given."""
    root = tmp_path / "data"
    result = finish(start(hub, root, environ={"MATCHED_FINEWEB_REPO_ID": repo}))
    assert_fails(result, f"{repo!r} is no name", "OWNER/NAME", "MATCHED_FINEWEB_REPO_ID")
    assert "--skip-manifest" not in result.stderr and hub.requests == []
    assert present(root) == {}


def test_no_repository_no_network_no_packages(hub, tmp_path):
    root = tmp_path / "data"
    result = finish(start(hub, root, environ={"MATCHED_FINEWEB_REPO_ID": "no/body"}))
    assert_fails(result, "no dataset repository no/body", "MATCHED_FINEWEB_REPO_ID")
    with socket.socket() as closed:  # bound, but nobody listens
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        result = finish(start(hub, root, environ={"HF_ENDPOINT": endpoint}))
    assert_fails(result, endpoint, "refused", "check the network")
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError('No module')")
    result = finish(start(hub, root, environ={"PYTHONPATH": str(tmp_path)}))
    assert_fails(result, "pip install -r data/requirements.txt")
    assert present(root) == {}


def test_rebuilding_from_the_hubs_documents(hub, tmp_path):
    """data/download_hf_docs_and_tokenize.py loads the documents and the sidecar, once."""
    root, specs = tmp_path / "out", tmp_path / "specs.json"
    specs.write_text('{"tokenizers": [{"kind": "bytes"}]}')
    hub.files["datasets/docs_selected.jsonl"] = b'{"text": "one"}\n{"text": "two"}\n{"text": "3"}\n'
    hub.files["datasets/docs_selected.source_manifest.json"] = b'{"docs_val": 2}'
    script = SCRIPT.with_name("download_hf_docs_and_tokenize.py")
    for _ in range(2):
        result = finish(start(hub, root, "--tokenizer-config", str(specs), script=script))
        assert result.returncode == 0, result.stderr
    stats = json.loads((root / "manifest.json").read_text())["datasets"][0]["stats"]
    assert (stats["docs_val"], stats["docs_train"], stats["tokens_val"]) == (2, 1, 8)
    assert hub.loaded() == ["docs_selected.jsonl", "docs_selected.source_manifest.json"]
    hub.files.clear()
    result = finish(start(hub, root, "--tokenizer-config", str(specs), script=script))
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1, result.stderr


def limit_files() -> None:
    """Files of this process end at 1 MB, as on a full disk: with an OSError."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))


def test_a_full_disk(hub, files, tmp_path):
    """It is told before the first byte when that can be known, and survived when it cannot."""
    root = tmp_path / "data"
    result = finish(start(hub, root, "--train-shards", "2", preexec_fn=limit_files))
    assert_fails(result, f"cannot write datasets/{TRAIN[1]}", "File too large", "make room")
    found = present(root)
    assert found == {name: files[f"datasets/{name}"] for name in found} and TRAIN[1] not in found
    hub.sizes = {f"datasets/{TRAIN[2]}": 10**18}
    hub.requests.clear()
    result = finish(start(hub, root, "--train-shards", "3"))
    assert_fails(result, "1000000000.0 GB", "GB free", "fewer --train-shards")
    assert hub.loaded() == ["manifest.json"] and present(root) == found
