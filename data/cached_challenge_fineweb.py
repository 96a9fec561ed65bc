"""Download the challenge's tokenized FineWeb: shards, tokenizer, manifest.

    python3 data/cached_challenge_fineweb.py --variant sp1024 [--train-shards N]

All validation shards and the first N train shards (100,000,000 tokens, 200 MB each). What is there
and whole is kept, so an interrupted download goes on with the files that are missing. A file is
loaded in a folder beside its place, checked, and only then renamed into it.
"""

import argparse
import fcntl
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shards import count_tokens

HERE = Path(__file__).resolve().parent
PREFIX = "fineweb10B_"
DEFAULT_TRAIN_SHARDS = 80
MANIFEST = "manifest.json"
DOCS = ("docs_selected.jsonl", "docs_selected.source_manifest.json")
FILES_AT_ONCE = 8
RETRY_SECONDS = (1, 2, 4)  # after a passing failure; the hub's client has retries of its own
AGAIN = "run the same command again, it goes on from what is there"
MAKE_ROOM = f"make room or see to the permissions, then {AGAIN}"


class DownloadError(Exception):
    """What failed and the way out, in one line."""


def is_disk_error(error: BaseException) -> bool:
    """Whether the system, not the network, refused."""
    network = (ConnectionError, TimeoutError)
    return isinstance(error, OSError) and error.errno is not None and not isinstance(error, network)


@dataclass(frozen=True)
class Hub:
    """A dataset repository, and the folder in it that is laid out as this one here."""

    repo_id: str
    folder: str

    def name(self, path: str) -> str:
        """The path in the repository."""
        return f"{self.folder}/{path}" if self.folder else path

    def size(self, path: str) -> int:
        """The bytes of a file. Raises DownloadError."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        url = hf_hub_url(self.repo_id, self.name(path), repo_type="dataset")
        metadata = self.call(get_hf_file_metadata, self.name(path), url=url, timeout=10)
        if metadata.size is None:
            raise DownloadError(f"{url} does not tell its size: check HF_ENDPOINT and the proxy")
        return metadata.size

    def sizes(self, paths: list[str]) -> dict[str, int]:
        """The bytes of each file. Raises DownloadError."""
        pool = ThreadPoolExecutor(FILES_AT_ONCE)
        try:
            return dict(zip(paths, pool.map(self.size, paths), strict=True))
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
        for seconds in (*RETRY_SECONDS, None):
            try:
                return function(**arguments)
            except Exception as error:  # each version of the client lets through other classes
                status = getattr(getattr(error, "response", None), "status_code", 0)
                refused = 400 <= status < 500 and status not in (408, 429)
                if seconds is None or refused or is_disk_error(error):
                    raise DownloadError(self.explain(name, error)) from error
            time.sleep(seconds)

    def explain(self, name: str, error: BaseException) -> str:
        """One line for what the hub's client raised."""
        from huggingface_hub import constants
        from huggingface_hub.utils import (
            EntryNotFoundError,
            GatedRepoError,
            LocalEntryNotFoundError,  # its cause is another
            RepositoryNotFoundError,
        )

        missing = isinstance(error, EntryNotFoundError)
        if missing and not isinstance(error, LocalEntryNotFoundError):
            return (
                f"{name} is not in the dataset repository {self.repo_id}: check "
                "MATCHED_FINEWEB_REPO_ID and MATCHED_FINEWEB_REMOTE_ROOT_PREFIX"
            )
        if isinstance(error, GatedRepoError | RepositoryNotFoundError):
            return (
                f"there is no dataset repository {self.repo_id} at {constants.ENDPOINT}, or it is "
                "not public: check MATCHED_FINEWEB_REPO_ID and HF_ENDPOINT"
            )
        if is_disk_error(error):
            return f"cannot write {name}: {error.strerror}: {MAKE_ROOM}"
        while error.__cause__ is not None:
            error = error.__cause__
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return (
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
        if self.path.endswith(".bin"):
            count_tokens(path)
        elif self.path.endswith(".json"):
            json.loads(path.read_bytes())

    def is_whole(self, size: int | None = None) -> bool:
        """Whether it is here and as its header says; without a header, by the hub's size."""
        try:
            self.check(self.place)
            by_header = self.path.endswith(".bin")
            return by_header or size in (None, self.place.stat().st_size)
        except (OSError, ValueError):
            return False

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

    def fetch(self, hub: Hub, size: int) -> None:
        """Bring it whole into its place. Raises DownloadError, or OSError if the disk refuses."""
        shutil.rmtree(self.beside, ignore_errors=True)
        self.beside.mkdir(parents=True)
        loaded = hub.download(self.path, self.beside)
        try:
            self.check(loaded)
            if loaded.stat().st_size != size:
                raise ValueError(f"{loaded.stat().st_size} bytes, but the hub promised {size}")
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


def fetch_all(hub: Hub, files: dict[File, int]) -> None:
    """Bring all files, given with their sizes, into their places under one progress bar.

    Raises DownloadError or OSError for the first that fails; the others are then given up.
    """
    from tqdm import tqdm

    total = sum(files.values())
    free = shutil.disk_usage(next(iter(files)).root).free
    if total > free:
        raise DownloadError(
            f"the download needs {total / 1e9:.1f} GB, but {next(iter(files)).root} has "
            f"{free / 1e9:.1f} GB free: make room, or ask for fewer --train-shards"
        )
    seconds = 0.2 if sys.stderr.isatty() else 15
    bar = tqdm(total=total, unit="B", unit_scale=True, mininterval=seconds, maxinterval=seconds)
    pool = ThreadPoolExecutor(FILES_AT_ONCE)
    jobs = {pool.submit(file.fetch, hub, size): file for file, size in files.items()}
    running, seen = set(jobs), 0
    try:
        while running:
            done, running = wait(running, timeout=0.2, return_when=FIRST_EXCEPTION)
            for job in done:
                job.result()
                seen += files[jobs[job]]
            halves = [min(jobs[job].bytes_beside(), files[jobs[job]]) for job in running]
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
    try:
        if not skip:
            file.fetch(hub, hub.size(MANIFEST))
        return json.loads(file.place.read_bytes())
    except (FileNotFoundError, ValueError) as error:
        raise DownloadError(
            f"cannot use {file.place} ({error}): run without --skip-manifest to load it"
        ) from None
    finally:
        shutil.rmtree(file.beside, ignore_errors=True)


def list_files(manifest: dict, variant: str, train_shards: int | None) -> list[str]:
    """The tokenizer's files, all validation shards and the first train shards (None: the default).

    Raises DownloadError for what the manifest does not have.
    """
    try:
        datasets = {entry["name"]: entry for entry in manifest["datasets"]}
        if PREFIX + variant not in datasets:
            names = ", ".join(name.removeprefix(PREFIX) for name in datasets)
            raise DownloadError(f"--variant {variant}: the manifest has {names or 'no dataset'}")
        dataset = datasets[PREFIX + variant]
        tokenizers = {entry["name"]: entry for entry in manifest["tokenizers"]}
        tokenizer = tokenizers[dataset["tokenizer_name"]]
        num_train, num_val = (int(dataset["stats"][f"files_{split}"]) for split in ("train", "val"))
    except (KeyError, TypeError, ValueError) as error:
        raise DownloadError(f"{MANIFEST} of the hub lacks {error}: tell its owner") from None
    if not 0 <= (train_shards or 0) <= num_train:
        raise DownloadError(
            f"--train-shards {train_shards}: {variant} has {num_train} train shards: ask for "
            f"0 to {num_train}"
        )
    if train_shards is None:
        train_shards = min(DEFAULT_TRAIN_SHARDS, num_train)
    paths = [tokenizer[key] for key in ("model_path", "vocab_path", "path") if tokenizer.get(key)]
    if any(path.startswith("/") or ".." in path.split("/") for path in paths):
        raise DownloadError(f"{MANIFEST} of the hub has a path outside its folder: {paths}")
    for split, count in (("val", num_val), ("train", train_shards)):
        folder = f"datasets/{PREFIX}{variant}"
        paths += [f"{folder}/fineweb_{split}_{index:06d}.bin" for index in range(count)]
    return paths


def download(args: argparse.Namespace) -> str:
    """Bring what the arguments ask for; a line of what was done. Raises DownloadError, OSError."""
    try:
        import tqdm  # noqa: F401
        from huggingface_hub.utils import disable_progress_bars, logging
    except ImportError as error:
        raise DownloadError(f"{error}: pip install -r data/requirements.txt") from None
    disable_progress_bars()  # one bar for all, and no word about retries that succeed
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", module="huggingface_hub")
    args.root.mkdir(parents=True, exist_ok=True)
    lock = os.open(args.root, os.O_RDONLY)  # held until the process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DownloadError(f"another download into {args.root} is running: wait for it") from None
    except OSError:
        pass  # a file system without locks
    hub = default_hub()
    manifest = read_manifest(hub, args.root, args.skip_manifest)
    paths = list_files(manifest, args.variant, args.train_shards)
    files = [File(path, args.root) for path in [*paths, *(DOCS if args.with_docs else ())]]
    for folder in {file.place.parent for file in files}:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("*.part/"):  # of a run that was killed
            shutil.rmtree(leftover, ignore_errors=True)
    # A shard tells by itself whether it is whole, the other files are compared with the hub's.
    asked = [
        file
        for file in files
        if not (file.is_whole() and (args.skip_manifest or file.path.endswith(".bin")))
    ]
    sizes = hub.sizes([file.path for file in asked]) if asked else {}
    wanted = {file: sizes[file.path] for file in asked if not file.is_whole(sizes[file.path])}
    if wanted:
        fetch_all(hub, wanted)
    return (
        f"{len(files)} files whole in {args.root}: {len(wanted)} downloaded "
        f"({sum(wanted.values()) / 1e6:.1f} MB), {len(files) - len(wanted)} kept"
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
    parser.add_argument("--root", type=Path, default=HERE, help="the folder to fill")
    args = parser.parse_args()
    if args.train_shards is None:
        args.train_shards = args.bare
    code = 1
    try:
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
