"""data/cached_challenge_fineweb.py: the hub's real client, and a small local server as the hub."""

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

huggingface_hub = pytest.importorskip("huggingface_hub")
import cached_challenge_fineweb  # noqa: E402
import download_hf_docs_and_tokenize as rebuild  # noqa: E402
from runs import run_here  # noqa: E402
from texts import write_documents, write_shard  # noqa: E402

PREFIX = "/datasets/willdepueoai/parameter-golf/resolve/main/datasets/"
TRAIN = [f"datasets/fineweb10B_sp1024/fineweb_train_{index:06d}.bin" for index in range(3)]
VAL = [f"datasets/fineweb10B_sp1024/fineweb_val_{index:06d}.bin" for index in range(2)]
MODEL, VOCAB = "tokenizers/fineweb_1024_bpe.model", "tokenizers/fineweb_1024_bpe.vocab"
DOCS, SIDECAR = "docs_selected.jsonl", "docs_selected.source_manifest.json"
DEFAULTS = {"variant": "sp1024", "train_shards": None, "skip_manifest": False, "with_docs": False}
download = functools.partial(cached_challenge_fineweb.download, **DEFAULTS)


@pytest.fixture(scope="module")
def repository(tmp_path_factory, tokenizer) -> Path:
    """The output of the rebuild: documents of 301 tokens, four of them for validation."""
    folder = tmp_path_factory.mktemp("repository")
    write_documents(folder / DOCS, [chr(0x4E00 + number) * 100 for number in range(13)])
    (folder / SIDECAR).write_text('{"docs_val": 4}')
    (folder / "specs.json").write_text('[{"vocab_size": 1024}, {"kind": "byte"}]')
    arguments = f"--output-root {folder} --tokenizer-config {folder}/specs.json --chunk-tokens 1000"
    arguments += f" --docs {folder / DOCS} --reuse-sp-model 1024={tokenizer}"
    rebuild.main(arguments.split())
    return folder


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder as a repository of the hub."""

    def end_headers(self) -> None:
        path = Path(self.translate_path(self.path))
        content = path.read_bytes() if path.exists() else b""
        digest = hashlib.sha256(content)
        if path.suffix in (".json", ".vocab"):  # small files are in git
            digest = hashlib.sha1(b"blob %d\0" % len(content) + content)
        self.send_header("ETag", f'"{digest.hexdigest()}"')
        self.send_header("X-Repo-Commit", "c" * 40)
        self.send_header("X-Error-Code", "EntryNotFound")  # read after a 404
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
def hub(repository, tmp_path, monkeypatch):
    """A server for this process's client, with an empty cache. It hangs at the file `stalls`."""
    folder = shutil.copytree(repository, f"{tmp_path}/hub{PREFIX}")
    handler = functools.partial(Handler, directory=tmp_path / "hub")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.url = f"http://127.0.0.1:{server.server_port}"
        server.folder, server.loaded, server.root = Path(folder), [], tmp_path / "data"
        server.stalls, server.stalled = "", threading.Event()
        place = {"endpoint": server.url, "cache_dir": tmp_path / "cache"}
        client = functools.partial(huggingface_hub.hf_hub_download, **place)
        monkeypatch.setattr(cached_challenge_fineweb, "hf_hub_download", client)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def start(hub, *args, **environ) -> subprocess.Popen:
    """Start the script in its own process, with a long timeout."""
    environ |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(hub.root.parent / "home")}
    environ |= {"HF_HUB_DOWNLOAD_TIMEOUT": "600", "PATH": os.environ["PATH"]}
    command = [sys.executable, cached_challenge_fineweb.__file__, "--root", hub.root, *args]
    return subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)


def errors_of(process, code: int) -> str:
    """Wait for the script, which must exit with this code, and return its stderr."""
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors
    return errors


def assert_present(hub, *names) -> None:
    """Assert that hub.root has these files and the manifest, and no others."""
    names = ["manifest.json", *names]
    found = [path for path in hub.root.rglob("*") if path.is_file()]
    assert sorted(found) == sorted(hub.root / name for name in names)
    assert all((hub.root / name).read_bytes() == (hub.folder / name).read_bytes() for name in names)


def test_a_run_downloads_what_is_missing(hub):
    """Each run downloads what is missing or truncated. If nothing is, it needs no network."""
    names = [*VAL, MODEL, VOCAB, TRAIN[0]]
    assert download(hub.root, train_shards=1) == f"{hub.root}: 5 files downloaded, 0 were there"
    assert_present(hub, *names)
    with open(hub.root / VAL[0], "r+b") as file:
        file.truncate(1500)  # in the cache, too
    hub.loaded.clear()
    assert download(hub.root) == f"{hub.root}: 3 files downloaded, 4 were there"  # 80 or all
    assert_present(hub, *names, *TRAIN[1:])
    assert all((hub.root / name).stat().st_nlink == 2 for name in names)  # one is in the cache
    assert sorted(hub.loaded) == [*TRAIN[1:], VAL[0]]
    hub.shutdown()
    hub.server_close()
    download(hub.root, skip_manifest=True)


@pytest.mark.parametrize("name", [VAL[0], MODEL, VOCAB, "manifest.json"])
def test_a_file_that_is_damaged_in_the_cache_is_downloaded_again(hub, name):
    download(hub.root, train_shards=0)
    with open(hub.root / name, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")  # in the cache, too
    shutil.rmtree(hub.root)
    hub.loaded.clear()
    download(hub.root, train_shards=0)
    assert_present(hub, *VAL, MODEL, VOCAB)
    assert hub.loaded == [name]


def test_byte_shards_and_documents(hub, monkeypatch):
    """os.link (to the file itself) fails, as with a cache on another disk. No sidecar exists."""
    link = os.link
    monkeypatch.setattr(os, "link", lambda source, _: link(source, source))
    (hub.folder / SIDECAR).unlink()
    download(hub.root, train_shards=0, variant="byte260", with_docs=True)
    val = [name.replace("sp1024", "byte260") for name in VAL]
    assert_present(hub, DOCS, "tokenizers/fineweb_pure_byte_260.json", *val)


def test_the_hubs_documents_give_its_shards(hub, tokenizer):
    arguments = f"--output-root {hub.root} --remote-root /datasets/ --chunk-tokens 1000 "
    arguments += f"--vocab-size 1024 --reuse-sp-model 1024={tokenizer}"
    rebuild.main(arguments.split())
    for name in TRAIN + VAL:
        assert (hub.root / name).read_bytes() == (hub.folder / name).read_bytes()
    source = json.loads((hub.root / "manifest.json").read_text())["docs_meta"]
    assert source["remote_repo_id"] == "willdepueoai/parameter-golf"
    assert (source["remote_root"], source["source_manifest"]) == ("/datasets/", SIDECAR)


def test_an_existing_tokenizer_is_kept(hub, capsys):
    """A shard of another size is kept, too. A line says so, but not of the hub's own files."""
    own, shard = hub.root / MODEL, hub.root / VAL[0]
    own.parent.mkdir(parents=True)
    shard.parent.mkdir(parents=True)
    own.write_bytes(b"a model of one's own")
    write_shard(shard, [1] * 999)
    for _ in range(2):
        download(hub.root, train_shards=1)
        assert own.read_bytes() == b"a model of one's own"
        kept = re.findall("^(.*) was there and is kept", capsys.readouterr().err, re.M)
        assert kept == [str(shard), str(own)]


def test_damaged_and_missing_files_on_the_hub(hub):
    os.truncate(hub.folder / TRAIN[0], 1900)
    with pytest.raises(RuntimeError, match=f"{TRAIN[0]}.*header says 1000 tokens"):
        download(hub.root, train_shards=1)
    assert not (hub.root / TRAIN[0]).exists()
    with pytest.raises(ValueError, match="--variant sp999.*sp1024, .*byte260: .*rename it"):
        download(hub.root, variant="sp999")


def test_an_interrupted_download_can_be_continued(hub):
    """Ctrl-C stops it at once, in the middle of a file; the same command downloads the rest."""
    hub.stalls = TRAIN[0]
    process = start(hub, "1")
    assert hub.stalled.wait(120)
    process.send_signal(signal.SIGINT)
    errors = errors_of(process, 130)  # the hub still hangs
    assert errors.endswith("\ninterrupted: run the same command again to continue\n")
    assert "Traceback" not in errors and "Exception" not in errors
    assert not (hub.root / TRAIN[0]).exists()
    hub.stalls = ""
    errors_of(start(hub, "--train-shards", "1"), 0)
    assert_present(hub, *VAL, MODEL, VOCAB, TRAIN[0])


def test_an_error_is_one_line(hub, tmp_path):
    """The error for a wrong repository names it and the hub. The download needs no numpy."""
    (tmp_path / "numpy.py").write_text("raise ImportError('No module')")
    environ = {"MATCHED_FINEWEB_REPO_ID": "no/body", "PYTHONPATH": str(tmp_path)}
    (line,) = errors_of(start(hub, **environ), 1).splitlines()
    assert "no/body" in line and hub.url in line and "MATCHED_FINEWEB_REPO_ID" in line
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError('No module named x')")
    errors = errors_of(start(hub, **environ), 1)
    assert errors == "No module named x: pip install -r data/requirements.txt\n"
    result = run_here(tmp_path, {}, cached_challenge_fineweb, ["--train-shards=-1"])
    assert result.returncode == 2 and "is not a whole number >= 0\n" in result.stderr
