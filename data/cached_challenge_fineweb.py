"""Download the challenge's tokenized FineWeb: shards, tokenizer, manifest.

    python3 data/cached_challenge_fineweb.py --variant sp1024 [--train-shards N]

Downloads all validation shards and the first N train shards (200 MB each) into the hub client's
cache and links them into data/. After an interruption, the same command downloads the rest.
"""

import hashlib
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for python -P

import files

try:
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"{error}: pip install -r data/requirements.txt")

HERE = Path(__file__).resolve().parent
DEFAULT_TRAIN_SHARDS = 80


def is_whole(file: Path, in_cache: bool = False) -> bool:
    """Return whether a file is complete: a shard is as long as its header says, and a file in the
    client's cache has the hash that is its name (SHA-256, or git's for small files)."""
    try:
        size = file.stat().st_size
        if file.suffix == ".bin":
            files.count_tokens(file)
    except (OSError, ValueError):
        return False
    name = os.path.basename(os.readlink(file)) if in_cache and file.is_symlink() else ""
    digest = {64: hashlib.sha256(), 40: hashlib.sha1(b"blob %d\0" % size)}.get(len(name))
    return size > 0 and (digest is None or files.hash_file(file, digest) == name)


def link_or_copy(source: Path, place: Path) -> None:
    """Make `place` a hard link to a file in the cache, or a copy if that is on another disk."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    try:
        os.link(source, place)
    except OSError:
        with open(source, "rb") as content:
            files.write_file(place, content)


def download_file(path: str, root: Path, repo_id: str, remote_root: str) -> None:
    """Download remote_root/path of a dataset repository to root/path. Raises RuntimeError."""
    name = f"{remote_root.strip('/')}/{path}".lstrip("/")
    try:
        cached = Path(hf_hub_download(repo_id, name, repo_type="dataset"))
        if not is_whole(cached, in_cache=True):  # damaged in the cache or on the hub
            cached = Path(hf_hub_download(repo_id, name, repo_type="dataset", force_download=True))
        if path.endswith(".bin"):
            files.count_tokens(cached)
        link_or_copy(cached.resolve(), root / path)  # the cache has symbolic links
    except Exception as error:  # the classes depend on the client's version
        no_network = isinstance(error, LocalEntryNotFoundError)
        if path == files.SIDECAR and isinstance(error, EntryNotFoundError) and not no_network:
            return
        problem = f"cannot download {path} of {repo_id} from {constants.ENDPOINT}: {error}"
        advice = "try again, or set MATCHED_FINEWEB_REPO_ID and MATCHED_FINEWEB_REMOTE_ROOT_PREFIX"
        raise RuntimeError(" ".join(f"{problem}: {advice}".split())) from error


def list_files(path: Path, variant: str, train_shards: int | None) -> dict[str, int]:
    """Return what a manifest lists: bytes of each shard, 0 for a tokenizer's. Raises ValueError."""
    manifest = files.read_manifest(path)
    datasets = manifest["datasets"]
    name = files.DATASET_PREFIX + variant
    if name not in datasets:
        raise ValueError(f"{path} has only {', '.join(datasets)}: rename it to get the hub's")
    stats = datasets[name]["stats"]
    num_train = stats["files_train"]
    if train_shards is None:
        train_shards = min(DEFAULT_TRAIN_SHARDS, num_train)
    if not 0 <= train_shards <= num_train:
        raise ValueError(f"--train-shards {train_shards}: {path} has only {num_train}")
    tokenizer = manifest["tokenizers"][datasets[name]["tokenizer_name"]]
    names = ("model_path", "vocab_path", "path")
    paths = {tokenizer[key]: 0 for key in names if tokenizer.get(key)}
    for split, count in (("val", stats["files_val"]), ("train", train_shards)):
        most = stats.get("shard_size", manifest.get("shard_size", 0))
        left = stats.get(f"tokens_{split}", 0)
        for index in range(count):
            size = files.HEADER_BYTES + 2 * min(most, left - index * most)
            paths[f"datasets/{name}/fineweb_{split}_{index:06d}.bin"] = size
    return paths


def download(
    root: Path, variant: str, train_shards: int | None, skip_manifest: bool, with_docs: bool
) -> str:
    """Download what is missing; return a summary. Raises OSError, ValueError or RuntimeError."""
    manifest = root / files.MANIFEST
    if not manifest.exists():
        if skip_manifest:
            raise ValueError(f"{manifest} is missing: run without --skip-manifest")
        download_file(files.MANIFEST, root, files.REPO_ID, files.REMOTE_ROOT)
    try:
        listed = list_files(manifest, variant, train_shards)
    except KeyError as error:
        raise ValueError(f"{manifest} is not a manifest (it has no {error}): delete it") from None
    paths = [*listed, *([files.DOCS, files.SIDECAR] if with_docs else [])]
    missing = [path for path in paths if not is_whole(root / path)]
    kept = {root / path: size for path, size in sorted(listed.items()) if path not in missing}
    for place, size in kept.items():
        if place.stat().st_size != size and (size or place.stat().st_nlink == 1):  # not a link
            print(f"{place} was there and is kept: if not the hub's, delete it", file=sys.stderr)
    disable_progress_bars()  # one line for all files
    pool = ThreadPoolExecutor(max_workers=8)
    place = (root, files.REPO_ID, files.REMOTE_ROOT)
    jobs = [pool.submit(download_file, path, *place) for path in missing]
    for job in tqdm(as_completed(jobs), total=len(jobs), unit="file", disable=not jobs):
        job.result()  # raises the first failure at once
    return f"{root}: {len(missing)} files downloaded, {len(paths) - len(missing)} were there"


def stop(*_: object) -> None:
    """End all threads at once, without raising an exception in the middle of a lock."""
    os.write(2, b"\ninterrupted: run the same command again to continue\n")
    os._exit(130)


def main() -> None:
    parser = files.start_program(__doc__)
    parser.add_argument("--variant", default="sp1024", help="sp1024, ..., byte260")
    either = parser.add_mutually_exclusive_group()
    shards = {"metavar": "N", "help": f"train shards (default {DEFAULT_TRAIN_SHARDS})"}
    either.add_argument("--train-shards", type=files.number(int, 0), **shards)
    either.add_argument("bare", type=files.number(int, 0), nargs="?", **shards)
    parser.add_argument("--skip-manifest", action="store_true", help="never download the manifest")
    parser.add_argument("--with-docs", action="store_true", help="download the documents, too")
    parser.add_argument("--root", type=files.path, default=HERE, help="the folder to fill")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a hub that hangs up is an error
    num_train = args.bare if args.train_shards is None else args.train_shards
    try:
        print(download(args.root, args.variant, num_train, args.skip_manifest, args.with_docs))
    except (OSError, ValueError, RuntimeError) as error:
        print(f"cached_challenge_fineweb.py: {error}", file=sys.stderr)
        os._exit(1)  # at once, without waiting for threads that still download


if __name__ == "__main__":
    main()
