"""data/cached_challenge_fineweb.py: the hub's real client, and a small local server as the hub."""

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

huggingface_hub = pytest.importorskip("huggingface_hub")
import cached_challenge_fineweb  # noqa: E402
import download_hf_docs_and_tokenize as rebuild  # noqa: E402
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
    for size, tokens in ((1024, 1000), (1000, 700)):  # the manifest's shard_size is the latter's
        arguments = f"--output-root {folder} --vocab-size {size} --chunk-tokens {tokens}"
        arguments += f" --docs {folder / DOCS} --reuse-sp-model {size}={tokenizer}"
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
        self.server.loaded.append(self.path.removeprefix(PREFIX))
        super().copyfile(source, outputfile)


@pytest.fixture
def hub(repository, tmp_path, monkeypatch):
    """A server for this process's client, with an empty cache."""
    folder = shutil.copytree(repository, f"{tmp_path}/hub{PREFIX}")
    handler = functools.partial(Handler, directory=tmp_path / "hub")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.url = f"http://127.0.0.1:{server.server_port}"
        server.folder, server.loaded, server.root = Path(folder), [], tmp_path / "data"
        place = {"endpoint": server.url, "cache_dir": tmp_path / "cache"}
        client = functools.partial(huggingface_hub.hf_hub_download, **place)
        monkeypatch.setattr(cached_challenge_fineweb, "hf_hub_download", client)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def assert_present(hub, *names) -> None:
    """Assert that hub.root has these files and the manifest, and no others."""
    names = ["manifest.json", *names]
    found = [path for path in hub.root.rglob("*") if path.is_file()]
    assert sorted(found) == sorted(hub.root / name for name in names)
    assert all((hub.root / name).read_bytes() == (hub.folder / name).read_bytes() for name in names)


def test_a_run_downloads_what_is_missing(hub):
    """Each run downloads what is missing or damaged. If nothing is, it needs no network."""
    names = [*VAL, MODEL, VOCAB, TRAIN[0]]
    assert download(hub.root, train_shards=1) == f"{hub.root}: 5 files downloaded, 0 were there"
    assert_present(hub, *names)
    for name in (VAL[0], MODEL, VOCAB):
        (hub.root / name).write_bytes(b"damaged")  # in the cache, too
    (hub.root / MODEL).unlink()
    (hub.root / VOCAB).unlink()
    hub.loaded.clear()
    assert download(hub.root) == f"{hub.root}: 5 files downloaded, 2 were there"  # 80 or all
    assert_present(hub, *names, *TRAIN[1:])
    assert all((hub.root / name).stat().st_nlink == 2 for name in names)  # one is in the cache
    assert sorted(hub.loaded) == [*TRAIN[1:], VAL[0], MODEL, VOCAB]
    hub.shutdown()
    hub.server_close()
    download(hub.root, skip_manifest=True)


def test_a_dataset_of_bytes_is_downloaded(hub):
    """The hub has one. Here, none is made."""
    stats = {"files_val": 0, "files_train": 0}
    dataset = {"name": "fineweb10B_byte260", "tokenizer_name": "bytes", "stats": stats}
    manifest = {"datasets": [dataset], "tokenizers": [{"name": "bytes", "path": SIDECAR}]}
    (hub.folder / "manifest.json").write_text(json.dumps(manifest))
    download(hub.root, variant="byte260")
    assert_present(hub, SIDECAR)


def test_the_hubs_documents_give_its_shards(hub, tokenizer, monkeypatch):
    """No file can be linked, as with a cache on another disk."""
    monkeypatch.setattr(os, "link", lambda *_: os.stat("nowhere"))
    arguments = f"--output-root {hub.root} --remote-root /datasets/ --chunk-tokens 1000 "
    arguments += f"--vocab-size 1024 --reuse-sp-model 1024={tokenizer}"
    rebuild.main(arguments.split())
    for name in TRAIN + VAL:
        assert (hub.root / name).read_bytes() == (hub.folder / name).read_bytes()
    source = json.loads((hub.root / "manifest.json").read_text())["docs_meta"]
    assert source["remote_repo_id"] == "willdepueoai/parameter-golf"
    assert (source["remote_root"], source["source_manifest"]) == ("/datasets/", SIDECAR)


def test_an_existing_tokenizer_is_kept(hub, capsys):
    """So is a shard of another size, or a link to one. A line says so, but not of the hub's."""
    own, shard, link = hub.root / MODEL, hub.root / VAL[0], hub.root / TRAIN[0]
    own.parent.mkdir(parents=True)
    shard.parent.mkdir(parents=True)
    own.write_bytes(b"a model of one's own")
    write_shard(shard, [1] * 999)
    link.symlink_to(write_shard(hub.root / ("a" * 64), [1] * 999))  # a name like a hash
    for _ in range(2):
        download(hub.root, train_shards=1)
        assert own.read_bytes() == b"a model of one's own"
        kept = re.findall("^(.*) was there and is kept", capsys.readouterr().err, re.M)
        assert kept == [str(link), str(shard), str(own)]


def test_an_error_is_one_line(hub, tmp_path):
    """The error for a wrong repository names it and the hub. The download needs no numpy."""
    (tmp_path / "numpy.py").write_text("1 / 0")
    environ = {"PYTHONPATH": str(tmp_path), "HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url}
    environ["MATCHED_FINEWEB_REPO_ID"] = "no/body"
    command = [sys.executable, cached_challenge_fineweb.__file__, "--root", hub.root]
    result = subprocess.run(command, stderr=subprocess.PIPE, env=environ, text=True)
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    words = "no/body", hub.url, "MATCHED_FINEWEB_REPO_ID"
    assert all(word in result.stderr for word in words)
