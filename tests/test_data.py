"""Shards and bad shards; the helpers of data/files.py. (Ranks: test_loader_sharding.py.)"""

import contextlib
import errno
import os
import re
from argparse import ArgumentTypeError

import files
import pytest
import torch
from texts import write_counting_shards, write_shard

from train_gpt import DistributedTokenLoader, InputError, TokenStream, load_data_shard


def test_a_shard_loads_as_its_tokens(tmp_path):
    path = write_shard(tmp_path / "a.bin", [5, 65535, 0])
    tokens = load_data_shard(path)
    assert tokens.dtype == torch.uint16 and tokens.tolist() == [5, 65535, 0]
    with open(path, "r+b") as file:
        file.seek(1024)
        file.write(bytes([9, 0]))
    assert tokens.tolist() == [9, 65535, 0]  # mapped, not read
    tokens.zero_()  # the mapping is private: the file stays as it is
    assert load_data_shard(str(path)).tolist() == [9, 65535, 0]


@pytest.mark.parametrize(
    "size, header",
    [(1030, {"magic": 20240521}), (1030, {"version": 2}), (1030, {"count": 4})]
    + [(size, {}) for size in (0, 1028, 1031, 1032)],
)
def test_a_wrong_header_or_size_names_the_file(tmp_path, size, header):
    path = write_shard(tmp_path / "bad.bin", [1, 2, 3], **header)
    os.truncate(path, size)
    with pytest.raises(InputError, match=rf"^{path}: .*{size} bytes"):
        load_data_shard(path)


def test_a_shard_whose_link_leads_nowhere_is_named(tmp_path):
    (tmp_path / "fineweb_train_0.bin").symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match=r"fineweb_train_0.bin cannot be read: .*No such file"):
        TokenStream(str(tmp_path / "*.bin"))


@pytest.mark.parametrize("sizes", [[], [0]])
def test_without_any_token_the_error_says_how_to_get_shards(tmp_path, sizes):
    pattern = write_counting_shards(tmp_path, sizes)
    words = rf"(?s){re.escape(pattern)}.*cached_challenge.*PRESET=demo.*records/README"
    with pytest.raises(InputError, match=words):
        TokenStream(pattern)


def test_a_token_outside_the_vocabulary_names_its_shard(tmp_path):
    pattern = write_counting_shards(tmp_path, [385, 3])  # up to 387
    loader = DistributedTokenLoader(pattern, 0, 1, "cpu", vocab_size=385)
    loader.next_batch(384, 12, 1)
    with pytest.raises(InputError, match="000001.bin.* 387 .*another tokenizer.*385.*_PATH"):
        loader.next_batch(12, 12, 1)


def test_a_number_on_a_command_line_is_finite_and_in_range():
    """Limits belong to the range, unless they are excluded."""
    whole, share = files.number(int, 1, 9), files.number(float, 0, 1, exclusive=True)
    good = [whole("1"), whole("9"), share("1e-9"), files.number(float)("-2.5")]
    assert good == [1, 9, 1e-9, -2.5]
    bad = {whole: "0 10 1.5 nan", share: "0 1", files.number(float): "inf -inf nan"}
    for convert, words in bad.items():
        for word in words.split():
            noun = "a whole number" if convert is whole else "a number"
            with pytest.raises(ArgumentTypeError, match=f"'{word}' is not {noun}"):
                convert(word)


def test_a_containers_quota_limits_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(files, "Path", lambda name: tmp_path / os.path.basename(name))
    for quota, cores in (("150000 100000", 2), ("max 100000", 8), ("", 8)):
        (tmp_path / "cpu.max").write_text(quota)
        assert files.cores() == cores


@pytest.mark.parametrize("code, names", [(errno.EINVAL, ["a"]), (errno.EIO, [])])
def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch, code, names):
    """A file system may have no fsync(), but if a disk fails, no file is left."""

    def sync(descriptor: int) -> None:
        assert os.fstat(descriptor).st_size == 4 and not (tmp_path / "a").exists()
        raise OSError(code, "no")

    monkeypatch.setattr(os, "fsync", sync)
    with contextlib.suppress(OSError):
        files.write_file(tmp_path / "a", b"text")
    assert [path.name for path in tmp_path.iterdir()] == names


def test_writers_of_one_file_have_their_own_temporary_files(tmp_path):
    """Process ids are not enough: containers that share a disk have the same."""
    again = (files.write_file(tmp_path / "a", b"another") or b"mine" for _ in range(1))
    files.write_file(tmp_path / "a", again)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == {tmp_path / "a": b"mine"}
