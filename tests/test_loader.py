"""Shards, the token stream and how it is dealt out to the ranks."""

import os

import numpy as np
import pytest
import torch
from conftest import write_shard
from hypothesis import given, settings
from hypothesis import strategies as st

from train_gpt import DistributedTokenLoader, InputError, TokenStream, load_data_shard


@pytest.fixture
def shards(tmp_path):
    """Shards of 100, 0, 7 and 250 tokens that count up from 0; and their pattern."""
    bounds = [0, 100, 100, 107, 357]
    for i in range(4):
        write_shard(tmp_path / f"fineweb_train_{i:06d}.bin", range(bounds[i], bounds[i + 1]))
    return str(tmp_path / "fineweb_train_*.bin")


def test_a_shard_is_its_tokens(tmp_path):
    path = write_shard(tmp_path / "a.bin", [5, 65535, 0])
    tokens = load_data_shard(path)
    assert tokens.dtype == torch.uint16 and tokens.tolist() == [5, 65535, 0]
    assert load_data_shard(str(path)).tolist() == tokens.tolist()
    tokens.zero_()  # the mapping is private: the file stays
    assert load_data_shard(path).tolist() == [5, 65535, 0]


def test_a_shard_is_mapped_not_read(tmp_path):
    path = tmp_path / "sparse.bin"
    write_shard(path, [], count=2**30)
    with open(path, "r+b") as file:
        file.truncate(1024 + 2 * 2**30)  # 2 GiB of nothing
    assert load_data_shard(path)[-1].item() == 0


@pytest.mark.parametrize(
    "damage, words",
    [
        (dict(magic=20240521), ["no token shard", "[20240521, 1]"]),
        (dict(version=2), ["no token shard", "[20240520, 2]"]),
        (dict(count=4), ["4 tokens", "1030 bytes"]),  # cut short
        (dict(count=2), ["2 tokens", "1030 bytes"]),  # too long
        (dict(count=-1), ["-1 tokens"]),
    ],
)
def test_a_wrong_header_or_size_names_the_file(tmp_path, damage, words):
    path = write_shard(tmp_path / "bad.bin", [1, 2, 3], **damage)
    with pytest.raises(ValueError) as caught:
        load_data_shard(path)
    assert all(word in str(caught.value) for word in [str(path), *words])


@pytest.mark.parametrize("content", [b"", b"x" * 1023, b"x" * 5000])
def test_a_foreign_or_empty_file_names_itself(tmp_path, content):
    path = tmp_path / "foreign.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="foreign.bin"):
        load_data_shard(path)


def test_what_is_no_regular_file_names_itself(tmp_path):
    """A pipe would hang, /dev/zero would never end."""
    pipe, zeros, nothing = (tmp_path / f"{name}.bin" for name in ("pipe", "zeros", "nothing"))
    os.mkfifo(pipe)
    zeros.symlink_to("/dev/zero")
    nothing.symlink_to(tmp_path / "gone")
    for path in (zeros, nothing, tmp_path, pipe):
        with pytest.raises(InputError, match=f"DATA_PATH: {path} is not a file that can be read"):
            load_data_shard(path)


def test_a_missing_file_or_folder():
    with pytest.raises(InputError, match="DATA_PATH: /nowhere/x.bin is not a file"):
        load_data_shard("/nowhere/x.bin")
    with pytest.raises(FileNotFoundError, match="cached_challenge_fineweb.py(.|\n)*PRESET=demo"):
        TokenStream("/nowhere/fineweb_train_*.bin")


def test_the_stream_runs_through_all_shards_in_order_and_wraps(shards):
    stream = TokenStream(shards)
    taken = [stream.take(n) for n in (1, 99, 3, 200, 54, 400, 0)]
    assert [len(part) for part in taken] == [1, 99, 3, 200, 54, 400, 0]
    assert torch.cat(taken).tolist() == [i % 357 for i in range(757)]


def test_shards_without_any_token_are_an_error_not_a_loop(tmp_path):
    write_shard(tmp_path / "fineweb_train_0.bin", [])
    with pytest.raises(ValueError, match="no tokens"):
        TokenStream(str(tmp_path / "fineweb_train_*.bin"))


def test_a_token_outside_the_vocabulary_names_shard_position_and_id(tmp_path):
    write_shard(tmp_path / "fineweb_train_0.bin", [1] * 10)
    write_shard(tmp_path / "fineweb_train_1.bin", [1] * 5 + [384] + [1] * 4)
    stream = TokenStream(str(tmp_path / "fineweb_train_*.bin"), vocab_size=384)
    stream.take(13)
    with pytest.raises(ValueError, match=r"fineweb_train_1.bin: token id 384 at position 5"):
        stream.take(4)


def test_targets_are_inputs_shifted_by_one_across_shard_joins(shards):
    loader = DistributedTokenLoader(shards, 0, 1, torch.device("cpu"))
    for _ in range(5):
        x, y = loader.next_batch(8 * 24, 12, 8)
        assert x.shape == y.shape == (2, 12) and x.dtype == y.dtype == torch.int64
        assert torch.equal((x + 1) % 357, y)


@pytest.mark.parametrize("tokens", [0, 8 * 24 - 1, 8 * 24 + 12, 96])
def test_a_batch_of_broken_sequences_is_refused(shards, tokens):
    loader = DistributedTokenLoader(shards, 0, 1, "cpu")
    with pytest.raises(ValueError, match=f"TRAIN_BATCH_TOKENS={tokens} must be a multiple of 192"):
        loader.next_batch(tokens, 24, 8)


def test_the_share_of_a_micro_step_is_rounded_down(shards):
    x, y = DistributedTokenLoader(shards, 0, 1, "cpu").next_batch(199, 24, 8)
    assert x.tolist() == [list(range(24))] and y.tolist() == [list(range(1, 25))]


def test_a_position_that_is_sought_is_where_the_next_batch_begins(shards):
    loader = DistributedTokenLoader(shards, 0, 1, "cpu")
    loader.next_batch(8, 1, 8)
    kept = loader.position
    following = [loader.next_batch(8, 1, 8)[0].tolist() for _ in range(30)]
    loader.seek(kept)
    assert [loader.next_batch(8, 1, 8)[0].tolist() for _ in range(30)] == following
    for position in ((4, 0), (-1, 0), (0, -1), (2, 8)):
        with pytest.raises(IndexError):
            loader.seek(position)


def step_spans(pattern: str, world_size: int, slot_tokens: int, steps: int) -> list[list[int]]:
    """The spans of tokens (inputs and the last target) of `steps` optimizer steps, in the order of
    micro-steps, then ranks."""
    accum = 8 // world_size
    loaders = [DistributedTokenLoader(pattern, r, world_size, "cpu") for r in range(world_size)]
    spans = []
    for _ in range(steps * accum):
        for loader in loaders:
            x, y = loader.next_batch(8 * slot_tokens, slot_tokens, accum)
            spans.append([*x.flatten().tolist(), y.flatten()[-1].item()])
    return spans


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_a_step_is_the_same_eight_disjoint_spans_for_every_world_size(shards, world_size):
    spans = step_spans(shards, world_size, 10, 4)
    expected = [[(11 * i + j) % 357 for j in range(11)] for i in range(32)]
    assert spans == expected  # disjoint, complete, in the stream's order


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
    world_size=st.sampled_from([1, 2, 4, 8]),
    seq_len=st.integers(1, 9),
    sequences=st.integers(1, 3),
    steps=st.integers(1, 3),
)
def test_spans_for_any_shards(tmp_path_factory, sizes, world_size, seq_len, sequences, steps):
    folder = tmp_path_factory.mktemp("shards")
    bounds = np.cumsum([0, *sizes])
    for i in range(len(sizes)):
        write_shard(folder / f"fineweb_train_{i:06d}.bin", range(bounds[i], bounds[i + 1]))
    local, total = seq_len * sequences, int(bounds[-1])
    spans = step_spans(str(folder / "fineweb_train_*.bin"), world_size, local, steps)
    flat = [token for span in spans for token in span]
    assert flat == [i % total for i in range(8 * steps * (local + 1))]
