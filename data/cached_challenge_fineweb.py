"""Download the challenge's tokenized FineWeb: shards, tokenizer, manifest.

    python3 data/cached_challenge_fineweb.py --variant sp1024 [--train-shards N]

All validation shards and the first N train shards (100,000,000 tokens, 200 MB each). What is there
and whole is kept, so an interrupted download goes on with the files that are missing. A file is
loaded in a folder beside its place, checked, and only then renamed into it. A tokenizer that is
there is yours: one that differs from the hub's is replaced only with --replace-tokenizer.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shards import MANIFEST, count_tokens, locked

HERE = Path(__file__).resolve().parent
PREFIX = "fineweb10B_"
DEFAULT_TRAIN_SHARDS = 80
SIDECAR = "docs_selected.source_manifest.json"  # a hub may lack it
DOCS = ("docs_selected.jsonl", SIDECAR)
FILES_AT_ONCE = 8
RETRY_SECONDS = (1, 2, 4)  # after a passing failure; the hub's client has retries of its own
AGAIN = "run the same command again, it goes on from what is there"
MAKE_ROOM = f"make room or see to the permissions, then {AGAIN}"


class DownloadError(Exception):
    """What failed and the way out, in one line."""


class NotOnHub(DownloadError):
    """A file that the repository does not have."""


def is_disk_error(error: BaseException) -> bool:
    """Whether the system, not the network, refused."""
    network = (ConnectionError, TimeoutError)
    return isinstance(error, OSError) and error.errno is not None and not isinstance(error, network)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(2**20):
            digest.update(data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Remote:
    """What the hub says of a file."""

    size: int
    etag: str  # of a large file its SHA-256, of others something else

    def check(self, path: Path) -> None:
        """Raises ValueError if what lies at `path` is another file."""
        size = path.stat().st_size
        if size != self.size:
            raise ValueError(f"{size} bytes, but the hub promised {self.size}")
        if re.fullmatch("[0-9a-f]{64}", self.etag) and sha256(path) != self.etag:
            raise ValueError(f"the SHA-256 is not {self.etag}, which the hub promised")


@dataclass(frozen=True)
class Hub:
    """A dataset repository, and the folder in it that is laid out as this one here."""

    repo_id: str
    folder: str

    def name(self, path: str) -> str:
        """The path in the repository."""
        return f"{self.folder}/{path}" if self.folder else path

    def ask(self, path: str) -> Remote:
        """What the hub says of a file. Raises DownloadError."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        where = {"repo_id": self.repo_id, "filename": self.name(path), "repo_type": "dataset"}
        url = self.call(hf_hub_url, self.name(path), **where)
        metadata = self.call(get_hf_file_metadata, self.name(path), url=url, timeout=10)
        if metadata.size is None:
            raise DownloadError(f"{url} does not tell its size: check HF_ENDPOINT and the proxy")
        return Remote(metadata.size, metadata.etag or "")

    def ask_if_there(self, path: str) -> Remote | None:
        """The same, or None for a sidecar that the hub lacks."""
        try:
            return self.ask(path)
        except NotOnHub:
            if path == SIDECAR:
                return None
            raise

    def ask_all(self, paths: list[str]) -> dict[str, Remote]:
        """What the hub says of each file. Raises DownloadError."""
        pool = ThreadPoolExecutor(FILES_AT_ONCE)
        try:
            answers = zip(paths, pool.map(self.ask_if_there, paths), strict=True)
            return {path: remote for path, remote in answers if remote is not None}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def download(self, path: str, folder: Path) -> Path:
        """Load a file into a folder of its own; where it lies there. Raises DownloadError."""
        from huggingface_hub import hf_hub_download

        name = self.name(path)
        where = {"repo_id": self.repo_id, "repo_type": "dataset", "filename": name}
        return Path(self.call(hf_hub_download, name, **where, local_dir=folder))

    def call(self, function: Callable, name: str, **arguments) -> Any:
        """What the hub's client returns; passing failures are tried again.

        Raises DownloadError that names the file.
        """
        from huggingface_hub.utils import HFValidationError

        for seconds in (*RETRY_SECONDS, None):
            try:
                return function(**arguments)
            except Exception as error:  # each version of the client lets through other classes
                status = getattr(getattr(error, "response", None), "status_code", 0)
                refused = 400 <= status < 500 and status not in (408, 429)
                refused = refused or isinstance(error, HFValidationError)
                if seconds is None or refused or is_disk_error(error):
                    raise self.explain(name, error) from error
            time.sleep(seconds)

    def explain(self, name: str, error: BaseException) -> DownloadError:
        """What the hub's client raised, as one line."""
        from huggingface_hub import constants
        from huggingface_hub.utils import (
            EntryNotFoundError,
            GatedRepoError,
            HFValidationError,
            LocalEntryNotFoundError,  # its cause is another
            RepositoryNotFoundError,
        )

        if isinstance(error, HFValidationError):
            return DownloadError(
                f"{self.repo_id!r} is no name of a dataset repository, which is OWNER/NAME: check "
                "MATCHED_FINEWEB_REPO_ID or --repo-id"
            )
        missing = isinstance(error, EntryNotFoundError)
        if missing and not isinstance(error, LocalEntryNotFoundError):
            return NotOnHub(
                f"{name} is not in the dataset repository {self.repo_id}: check "
                "MATCHED_FINEWEB_REPO_ID and MATCHED_FINEWEB_REMOTE_ROOT_PREFIX"
            )
        if isinstance(error, GatedRepoError | RepositoryNotFoundError):
            return DownloadError(
                f"there is no dataset repository {self.repo_id} at {constants.ENDPOINT}, or it is "
                "not public: check MATCHED_FINEWEB_REPO_ID and HF_ENDPOINT"
            )
        if is_disk_error(error):
            return DownloadError(f"cannot write {name}: {error.strerror}: {MAKE_ROOM}")
        while error.__cause__ is not None:
            error = error.__cause__
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return DownloadError(
            f"cannot load {name} of {self.repo_id} from {constants.ENDPOINT}: {reason}: "
            f"check the network, then {AGAIN}"
        )


def default_hub() -> Hub:
    """The challenge's repository, or the one that the environment names."""
    return Hub(
        os.environ.get("MATCHED_FINEWEB_REPO_ID", "willdepueoai/parameter-golf"),
        os.environ.get("MATCHED_FINEWEB_REMOTE_ROOT_PREFIX", "datasets").strip("/"),
    )


@dataclass(frozen=True)
class File:
    """A file of the download: its path on the hub and here, relative to the two roots."""

    path: str
    root: Path

    @property
    def place(self) -> Path:
        return self.root / self.path

    @property
    def beside(self) -> Path:
        """The folder it is loaded in: on the disk of its place, so that a rename is enough."""
        return self.place.with_name(f"{self.place.name}.part")

    def check(self, path: Path) -> None:
        """Raises ValueError if what lies at `path` is no shard, or no JSON, though it should."""
        if self.has_header:
            count_tokens(path)
        elif self.path.endswith(".json"):
            json.loads(path.read_bytes())

    @property
    def has_header(self) -> bool:
        """Whether it tells by itself if it is whole."""
        return self.path.endswith(".bin")

    def is_whole(self, remote: Remote | None = None) -> bool:
        """Whether it is here and as its header says; without a header, of the hub's size."""
        try:
            self.check(self.place)
            size = self.place.stat().st_size
        except (OSError, ValueError):
            return False
        return self.has_header or remote is None or size == remote.size

    def bytes_beside(self) -> int:
        """How much of it is loaded so far."""
        total = 0
        for folder, _, names in os.walk(self.beside):
            for name in names:
                try:
                    total += os.path.getsize(os.path.join(folder, name))
                except OSError:  # renamed in this moment
                    continue
        return total

    def fetch(self, hub: Hub, remote: Remote) -> None:
        """Bring it whole into its place. Raises DownloadError, or OSError if the disk refuses."""
        shutil.rmtree(self.beside, ignore_errors=True)
        self.beside.mkdir(parents=True)
        loaded = hub.download(self.path, self.beside)
        try:
            self.check(loaded)
            remote.check(loaded)
        except ValueError as error:
            reason = str(error).removeprefix(f"{loaded}: ")
            raise DownloadError(
                f"{hub.name(self.path)} of {hub.repo_id} is damaged: {reason}: try again later, "
                "or tell its owner"
            ) from None
        with open(loaded, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(loaded, self.place)
        shutil.rmtree(self.beside, ignore_errors=True)


def fetch_all(hub: Hub, files: dict[File, Remote]) -> None:
    """Bring all files into their places under one progress bar.

    Raises DownloadError or OSError for the first that fails; the others are then given up.
    """
    from tqdm import tqdm

    total = sum(remote.size for remote in files.values())
    free = shutil.disk_usage(next(iter(files)).root).free
    if total > free:
        raise DownloadError(
            f"the download needs {total / 1e9:.1f} GB, but {next(iter(files)).root} has "
            f"{free / 1e9:.1f} GB free: make room, or ask for fewer --train-shards"
        )
    seconds = 0.2 if sys.stderr.isatty() else 15
    bar = tqdm(total=total, unit="B", unit_scale=True, mininterval=seconds, maxinterval=seconds)
    pool = ThreadPoolExecutor(FILES_AT_ONCE)
    jobs = {pool.submit(file.fetch, hub, remote): file for file, remote in files.items()}
    running, seen = set(jobs), 0
    try:
        while running:
            done, running = wait(running, timeout=0.2, return_when=FIRST_EXCEPTION)
            for job in done:
                job.result()
                seen += files[jobs[job]].size
            halves = [min(jobs[job].bytes_beside(), files[jobs[job]].size) for job in running]
            bar.update(seen + sum(halves) - bar.n)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        # Who is about to end makes no more files after this; who waits for the network is left.
        wait([job for job in jobs if job.running()], timeout=1)
        for file in files:
            shutil.rmtree(file.beside, ignore_errors=True)
        bar.close()


def read_manifest(hub: Hub, root: Path, skip: bool) -> dict:
    """The hub's manifest, renewed here; with `skip` the one that is here. Raises DownloadError."""
    file = File(MANIFEST, root)
    if not skip:
        try:
            file.fetch(hub, hub.ask(MANIFEST))
        finally:
            shutil.rmtree(file.beside, ignore_errors=True)
    try:
        return json.loads(file.place.read_bytes())
    except (FileNotFoundError, ValueError) as error:
        raise DownloadError(
            f"cannot use {file.place} ({error}): run without --skip-manifest to load it"
        ) from None


def tokenizer_paths(entry: dict) -> list[str]:
    """The files of a tokenizer's entry in the manifest. Raises DownloadError."""
    paths = [entry[key] for key in ("model_path", "vocab_path", "path") if entry.get(key)]
    for path in paths:
        if not isinstance(path, str) or path.startswith("/") or ".." in path.split("/"):
            raise DownloadError(
                f"{MANIFEST} of the hub has {path!r} for a tokenizer's file, which is no path "
                "inside its folder: tell its owner"
            )
    return paths


def list_files(
    manifest: dict, variant: str, train_shards: int | None
) -> tuple[list[str], list[str]]:
    """The tokenizer's files, and all validation shards with the first train shards (None: the
    default). Raises DownloadError for what the manifest does not have."""
    try:
        datasets = {str(entry["name"]): entry for entry in manifest["datasets"]}
        if PREFIX + variant not in datasets:
            names = ", ".join(name.removeprefix(PREFIX) for name in datasets)
            raise DownloadError(f"--variant {variant}: the manifest has {names or 'no dataset'}")
        dataset = datasets[PREFIX + variant]
        tokenizers = {entry["name"]: entry for entry in manifest["tokenizers"]}
        tokenizer = tokenizer_paths(tokenizers[dataset["tokenizer_name"]])
        num_train, num_val = (int(dataset["stats"][f"files_{split}"]) for split in ("train", "val"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DownloadError(f"{MANIFEST} of the hub lacks {error}: tell its owner") from None
    if not 0 <= (train_shards or 0) <= num_train:
        raise DownloadError(
            f"--train-shards {train_shards}: {variant} has {num_train} train shards: ask for "
            f"0 to {num_train}"
        )
    if train_shards is None:
        train_shards = min(DEFAULT_TRAIN_SHARDS, num_train)
    shards = []
    for split, count in (("val", num_val), ("train", train_shards)):
        folder = f"datasets/{PREFIX}{variant}"
        shards += [f"{folder}/fineweb_{split}_{index:06d}.bin" for index in range(count)]
    return tokenizer, shards


def import_client() -> None:
    """Get the hub's client ready, and quiet. Raises DownloadError if it is not installed."""
    try:
        import tqdm  # noqa: F401
        from huggingface_hub.utils import disable_progress_bars, logging
    except ImportError as error:
        raise DownloadError(f"{error}: pip install -r data/requirements.txt") from None
    disable_progress_bars()  # one bar for all, and no word about retries that succeed
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", module="huggingface_hub")


def keep_tokenizers(files: list[File], remotes: dict[str, Remote]) -> list[File]:
    """Those of a tokenizer's files that are here already. Says which differ from the hub's."""
    here = [file for file in files if file.place.exists()]
    for file in here:
        try:
            if file.path in remotes:
                remotes[file.path].check(file.place)
        except (OSError, ValueError) as error:
            print(
                f"{file.place} is kept, but is not the hub's ({error}): --replace-tokenizer "
                "replaces it",
                file=sys.stderr,
            )
    return here


def make_folders(files: list[File]) -> None:
    """The folders of the files, without what a run that was killed left in them."""
    for folder in {file.place.parent for file in files}:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("*.part/"):
            shutil.rmtree(leftover, ignore_errors=True)


def download(args: argparse.Namespace) -> str:
    """Bring what the arguments ask for; a line of what was done. Raises DownloadError, OSError."""
    hub = default_hub()
    manifest = read_manifest(hub, args.root, args.skip_manifest)
    names, shards = list_files(manifest, args.variant, args.train_shards)
    tokenizer = [File(path, args.root) for path in names]
    others = [File(path, args.root) for path in [*shards, *(DOCS if args.with_docs else ())]]
    files = [*tokenizer, *others]
    make_folders(files)
    replaced = tokenizer if args.replace_tokenizer else []
    # A shard tells by itself whether it is whole, the other files are compared with the hub's.
    asked = [
        file.path
        for file in files
        if file in replaced or not (file.is_whole() and (args.skip_manifest or file.has_header))
    ]
    remotes = hub.ask_all(asked) if asked else {}
    kept = [] if replaced else keep_tokenizers(tokenizer, remotes)
    wanted = {
        file: remotes[file.path]
        for file in files
        if file.path in remotes and file not in kept
        if file in replaced or not file.is_whole(remotes[file.path])
    }
    if wanted:
        fetch_all(hub, wanted)
    loaded = sum(remote.size for remote in wanted.values())
    whole = sum(file.place.exists() for file in files)  # a hub may lack the sidecar
    return (
        f"{whole} files whole in {args.root}: {len(wanted)} downloaded "
        f"({loaded / 1e6:.1f} MB), {whole - len(wanted)} kept"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", default="sp1024", help="sp1024, ..., byte260")
    number = parser.add_mutually_exclusive_group()
    shards = f"the first N train shards (default {DEFAULT_TRAIN_SHARDS})"
    number.add_argument("--train-shards", type=int, metavar="N", help=shards)
    number.add_argument("bare", nargs="?", type=int, metavar="N", help="the same")
    parser.add_argument("--skip-manifest", action="store_true", help="trust the manifest here")
    parser.add_argument("--with-docs", action="store_true", help="the documents, too")
    replace = "take the hub's tokenizer in place of another one that is here"
    parser.add_argument("--replace-tokenizer", action="store_true", help=replace)
    parser.add_argument("--root", type=Path, default=HERE, help="the folder to fill")
    args = parser.parse_args()
    if args.train_shards is None:
        args.train_shards = args.bare
    code = 1
    try:
        import_client()
        with locked(args.root):
            print(download(args), flush=True)
        return
    except KeyboardInterrupt:
        message, code = f"interrupted: {AGAIN}", 130
    except DownloadError as error:
        message = str(error)
    except OSError as error:
        message = f"cannot write: {error}: {MAKE_ROOM}"
    print(f"cached_challenge_fineweb.py: {message}", file=sys.stderr, flush=True)
    os._exit(code)  # without waiting for the files that are still being loaded


if __name__ == "__main__":
    main()
