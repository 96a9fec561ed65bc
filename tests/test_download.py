"""data/cached_challenge_fineweb.py: the hub's real client and a small server on this machine."""

import argparse
import contextlib
import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import ROOT

huggingface_hub = pytest.importorskip("huggingface_hub")
sys.path.insert(0, str(ROOT / "data"))
import cached_challenge_fineweb  # noqa: E402
import download_hf_docs_and_tokenize  # noqa: E402

PREFIX = "/datasets/willdepueoai/parameter-golf/resolve/main/datasets/"
TRAIN = [f"datasets/fineweb10B_sp1024/fineweb_train_{index:06d}.bin" for index in range(3)]
VAL = [f"datasets/fineweb10B_sp1024/fineweb_val_{index:06d}.bin" for index in range(2)]
BYTE_VAL = [name.replace("sp1024", "byte260") for name in VAL]
MODEL, VOCAB = "tokenizers/fineweb_1024_bpe.model", "tokenizers/fineweb_1024_bpe.vocab"
BYTE_TOKENIZER = "tokenizers/fineweb_pure_byte_260.json"
DOCS, SIDECAR = "docs_selected.jsonl", "docs_selected.source_manifest.json"


@pytest.fixture(scope="module")
def repository(tmp_path_factory, tokenizer) -> Path:
    """What the other tool writes: documents of 301 tokens, of which four are for validation."""
    folder = tmp_path_factory.mktemp("repository")
    lines = [json.dumps({"text": chr(0x4E00 + number) * 100}) for number in range(13)]
    (folder / DOCS).write_text("\n".join(lines))
    (folder / SIDECAR).write_text('{"docs_val": 4}')
    specs = [{"vocab_size": 1024, "reuse_model_path": str(tokenizer)}, {"kind": "byte"}]
    (folder / "specs.json").write_text(json.dumps(specs))
    rebuild(folder, folder / "specs.json", "--docs", folder / DOCS, "--chunk-tokens", "1000")
    return folder


def rebuild(root, specs, *more) -> None:
    arguments = ["--output-root", root, "--tokenizer-config", specs, *more]
    download_hf_docs_and_tokenize.main([str(argument) for argument in arguments])


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_) -> None:
        pass

    def translate_path(self, path: str) -> str:
        return str(self.server.folder / path.removeprefix(PREFIX))

    def end_headers(self) -> None:
        path = Path(self.translate_path(self.path))
        content = path.read_bytes() if path.exists() else b""
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "c" * 40)
        self.send_header("X-Error-Code", "EntryNotFound")  # looked at after a 404
        super().end_headers()

    def copyfile(self, source, outputfile) -> None:
        name = self.path.removeprefix(PREFIX)
        self.server.loaded.append(name)
        if name == self.server.stalls:
            self.server.stalled.set()
            self.server.released.wait(600)
        content = source.read()
        if name in self.server.cuts:
            self.server.cuts.remove(name)
            content = content[: len(content) // 2]
        with contextlib.suppress(ConnectionError):  # the client has given up
            outputfile.write(content)


class Hub(ThreadingHTTPServer):
    """A repository in `folder`. A file in `cuts` breaks off once, that of `stalls` hangs."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.folder, self.cuts, self.stalls, self.loaded = folder, set(), "", []
        self.stalled, self.released = threading.Event(), threading.Event()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def hub(repository, tmp_path, monkeypatch):
    """A server that the client in this process asks, with an empty cache."""
    server = Hub(shutil.copytree(repository, tmp_path / "hub"))
    place = {"endpoint": server.url, "cache_dir": tmp_path / "cache"}
    client = functools.partial(huggingface_hub.hf_hub_download, **place)
    monkeypatch.setattr(cached_challenge_fineweb, "hf_hub_download", client)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


def download(root, **options) -> None:
    defaults = {"variant": "sp1024", "train_shards": None, "with_docs": False}
    defaults |= {"root": root, "skip_manifest": False}
    cached_challenge_fineweb.download(argparse.Namespace(**{**defaults, **options}))


def start(hub, root, *args, **environ) -> subprocess.Popen:
    """The script as a process that waits for the hub as long as it takes."""
    environ |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(root.parent / "home")}
    environ |= {"HF_HUB_DOWNLOAD_TIMEOUT": "600", "PATH": os.environ["PATH"]}
    command = [sys.executable, cached_challenge_fineweb.__file__, "--root", root, *args]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # SIGINT is ignored in a shell's background jobs, and that would be inherited.
    hear = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    return subprocess.Popen(command, env=environ, **pipes, **hear)


def assert_present(hub, root, *names) -> None:
    """These files and the manifest, and no other."""
    names = ["manifest.json", *names]
    found = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    assert sorted(found) == sorted(names)
    assert all(found[name].read_bytes() == (hub.folder / name).read_bytes() for name in names)


def test_a_first_run_then_more_then_none(hub, root):
    """Each run brings what is missing or cut short; if that is nothing, it needs no hub."""
    names = [*VAL, MODEL, VOCAB, TRAIN[0]]
    hub.cuts = {VAL[1], TRAIN[0]}  # the connections break off
    download(root, train_shards=1)
    assert_present(hub, root, *names)
    assert hub.cuts == set()
    assert all((root / name).stat().st_nlink == 2 for name in names)  # the other is in the cache
    with open(root / VAL[0], "r+b") as file:
        file.truncate(1500)  # in the cache, too
    hub.loaded.clear()
    download(root)  # the default, 80, takes all that there are
    assert_present(hub, root, *names, *TRAIN[1:])
    assert sorted(hub.loaded) == [*TRAIN[1:], VAL[0]]
    hub.shutdown()
    hub.server_close()
    download(root, skip_manifest=True)
    assert_present(hub, root, *names, *TRAIN[1:])


def refuse(*_) -> None:
    raise OSError(18, "Invalid cross-device link")


@pytest.mark.parametrize("sidecar", [[SIDECAR], []])
def test_bytes_and_documents(hub, root, monkeypatch, sidecar):
    """With a cache on another disk; a hub may lack the sidecar."""
    monkeypatch.setattr(os, "link", refuse)
    if not sidecar:
        (hub.folder / SIDECAR).unlink()
    download(root, train_shards=0, variant="byte260", with_docs=True)
    assert_present(hub, root, DOCS, *sidecar, BYTE_TOKENIZER, *BYTE_VAL)


def test_a_tokenizer_that_is_there_is_kept(hub, root, capsys):
    """A line says so, also when nothing is missing; deleting it is the way to get the hub's."""
    own = root / MODEL
    own.parent.mkdir(parents=True)
    own.write_bytes(b"a model of one's own")
    for _ in range(2):
        download(root, train_shards=0)
        assert own.read_bytes() == b"a model of one's own"
        assert capsys.readouterr().err.count(f"{own} is kept") == 1
    own.unlink()
    download(root, train_shards=0)
    assert_present(hub, root, *VAL, MODEL, VOCAB)
    assert "is kept" not in capsys.readouterr().err


@pytest.mark.parametrize("size, words", [(1900, "promises 1000 tokens"), (900, "few"), (0, "404")])
def test_a_shard_that_the_hub_has_damaged_or_lacks(hub, root, size, words):
    download(root, train_shards=0)
    os.truncate(hub.folder / TRAIN[0], size)
    if size == 0:
        (hub.folder / TRAIN[0]).unlink()
    with pytest.raises(RuntimeError, match=f"{TRAIN[0]}.*{words}"):
        download(root, train_shards=1)
    assert_present(hub, root, *VAL, MODEL, VOCAB)


def test_arguments_that_cannot_be_met(hub, root):
    with pytest.raises(ValueError, match="manifest.json is missing"):
        download(root, skip_manifest=True)
    with pytest.raises(ValueError, match="--variant sp999.*sp1024, .*byte260"):
        download(root, variant="sp999")
    with pytest.raises(ValueError, match="--train-shards 4.*has only 3"):
        download(root, train_shards=4)
    assert_present(hub, root)


def test_an_interrupted_download(hub, root):
    """Ctrl-C ends it at once, in mid-file; the same command brings the rest."""
    hub.stalls = TRAIN[0]
    process = start(hub, root, "1")
    assert hub.stalled.wait(120)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)  # the hub is still silent
    assert process.returncode == 130 and "interrupted" in errors and "Traceback" not in errors
    assert not (root / TRAIN[0]).exists()
    hub.stalls = ""
    process = start(hub, root, "--train-shards", "1")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert_present(hub, root, *VAL, MODEL, VOCAB, TRAIN[0])


def test_a_wrong_repository_without_numpy(hub, root, tmp_path):
    """data/requirements.txt is enough; the error is one line that names repository and hub."""
    for package in ("numpy", "sentencepiece"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('No module')")
    environ = {"MATCHED_FINEWEB_REPO_ID": "no/body", "PYTHONPATH": str(tmp_path)}
    process = start(hub, root, **environ)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output, len(errors.splitlines())) == (1, "", 1), errors
    assert "no/body" in errors and hub.url in errors and "MATCHED_FINEWEB_REPO_ID" in errors


def test_rebuilding_from_the_hubs_documents(hub, root):
    """The other tool loads the documents and the sidecar, once."""
    for _ in range(2):
        rebuild(root, hub.folder / "specs.json", "--skip-byte")
    assert sorted(hub.loaded) == [DOCS, SIDECAR]
    stats = json.loads((root / "manifest.json").read_text())["datasets"][0]["stats"]
    assert (stats["docs_val"], stats["docs_train"], stats["tokens_val"]) == (4, 9, 4 * 301)
