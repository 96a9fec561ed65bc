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
    config = folder / "specs.json"
    config.write_text(json.dumps(specs))
    arguments = f"--output-root {folder} --tokenizer-config {config} --docs {folder / DOCS}"
    download_hf_docs_and_tokenize.main([*arguments.split(), "--chunk-tokens", "1000"])
    return folder


class Handler(SimpleHTTPRequestHandler):
    """A repository of the hub, as files in a folder."""

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
        with contextlib.suppress(ConnectionError):  # the client is gone
            if name == self.server.stalls:
                self.server.stalled.set()
                self.rfile.read(1)  # ends when the client is gone
            outputfile.write(source.read())


@pytest.fixture
def root(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def hub(repository, tmp_path, monkeypatch):
    """A server that the client in this process asks, with an empty cache. `stalls` hangs."""
    folder = shutil.copytree(repository, f"{tmp_path}/hub{PREFIX}")
    handler = functools.partial(Handler, directory=tmp_path / "hub")
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.folder, server.loaded = Path(folder), []
    server.stalls, server.stalled = "", threading.Event()
    place = {"endpoint": server.url, "cache_dir": tmp_path / "cache"}
    client = functools.partial(huggingface_hub.hf_hub_download, **place)
    monkeypatch.setattr(cached_challenge_fineweb, "hf_hub_download", client)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
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
    # SIGINT is ignored in a shell's background jobs, and that would be inherited.
    hear = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    return subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True, **hear)


def assert_present(hub, root, *names) -> None:
    """These files and the manifest, and no other."""
    names = ["manifest.json", *names]
    found = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    assert sorted(found) == sorted(names)
    assert all(found[name].read_bytes() == (hub.folder / name).read_bytes() for name in names)


def test_a_first_run_then_more_then_none(hub, root):
    """Each run brings what is missing or cut short; if that is nothing, it needs no hub."""
    names = [*VAL, MODEL, VOCAB, TRAIN[0]]
    download(root, train_shards=1)
    assert_present(hub, root, *names)
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


def test_bytes_and_documents(hub, root, monkeypatch):
    """With a cache on another disk, from a hub that lacks the sidecar."""

    def refuse(*_) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    (hub.folder / SIDECAR).unlink()
    download(root, train_shards=0, variant="byte260", with_docs=True)
    val = [name.replace("sp1024", "byte260") for name in VAL]
    assert_present(hub, root, DOCS, BYTE_TOKENIZER, *val)


def test_a_tokenizer_that_is_there_is_kept(hub, root, capsys):
    """A line says so, also when nothing is missing."""
    own = root / MODEL
    own.parent.mkdir(parents=True)
    own.write_bytes(b"a model of one's own")
    for _ in range(2):
        download(root, train_shards=0)
        assert own.read_bytes() == b"a model of one's own"
        assert capsys.readouterr().err.count(f"{own} is kept") == 1


def test_what_the_hub_has_damaged_or_lacks(hub, root):
    os.truncate(hub.folder / TRAIN[0], 1900)
    with pytest.raises(RuntimeError, match=f"{TRAIN[0]}.*header says 1000 tokens"):
        download(root, train_shards=1)
    assert not (root / TRAIN[0]).exists()
    with pytest.raises(ValueError, match="--variant sp999.*sp1024, .*byte260"):
        download(root, variant="sp999")
    with pytest.raises(ValueError, match="--train-shards 4.*has only 3"):
        download(root, train_shards=4)


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
    (tmp_path / "numpy.py").write_text("raise ImportError('No module')")
    process = start(hub, root, MATCHED_FINEWEB_REPO_ID="no/body", PYTHONPATH=str(tmp_path))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and len(errors.splitlines()) == 1, errors
    assert "no/body" in errors and hub.url in errors and "MATCHED_FINEWEB_REPO_ID" in errors
