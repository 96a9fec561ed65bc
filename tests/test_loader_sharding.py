"""Which rank gets which tokens: all shards are one stream, and a step reads its next eight spans,
one per slot, on any number of ranks. A span is the inputs of a micro-batch and its last target."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import write_counting_shards

from train_gpt import DistributedTokenLoader

Span = list[int]


def read_step(loaders: list[DistributedTokenLoader], sequences: int, seq_len: int) -> list[Span]:
    """The spans of a step by micro-step and rank. loaders: of all ranks."""
    accum, spans = 8 // len(loaders), []
    for _ in range(accum):
        for loader in loaders:
            x, y = loader.next_batch(8 * sequences * seq_len, seq_len, accum)
            assert x.shape == y.shape == (sequences, seq_len)
            assert x.dtype == y.dtype == torch.int64
            assert torch.equal(x.flatten()[1:], y.flatten()[:-1])
            spans.append([*x.flatten().tolist(), y.flatten()[-1].item()])
    return spans


def open_ranks(pattern: str, world_size: int) -> list[DistributedTokenLoader]:
    return [DistributedTokenLoader(pattern, rank, world_size, "cpu") for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
    seq_len=st.integers(1, 9),
    sequences=st.integers(1, 3),
    steps=st.integers(1, 3),
)
def test_a_step_is_the_same_eight_spans_for_every_world_size(
    tmp_path_factory, world_size, sizes, seq_len, sequences, steps
):
    """Shards may be ragged or empty. Their tokens are one stream, which repeats."""
    loaders = open_ranks(write_counting_shards(tmp_path_factory.mktemp("s"), sizes), world_size)
    spans = sum((read_step(loaders, sequences, seq_len) for _ in range(steps)), [])
    length, total = sequences * seq_len + 1, sum(sizes)
    assert spans == [[(i * length + j) % total for j in range(length)] for i in range(8 * steps)]


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_ranks_and_micro_steps_share_no_token(tmp_path, world_size):
    """The extra token of a span, its last target, is not the next span's first input."""
    loaders = open_ranks(write_counting_shards(tmp_path, [150, 1, 0, 249]), world_size)
    tokens = sum(read_step(loaders, 2, 12) + read_step(loaders, 2, 12), [])
    assert sorted(tokens) == list(range(16 * (2 * 12 + 1)))


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_a_resumed_stream_continues_with_the_next_spans(tmp_path, world_size):
    """A step of two ranks came before. The place in the stream is all that a checkpoint has."""
    pattern = write_counting_shards(tmp_path, [70, 130, 300])
    before, alone = open_ranks(pattern, 2), open_ranks(pattern, 1)
    read_step(before, 1, 12)
    resumed = open_ranks(pattern, world_size)
    for loader in resumed:
        loader.stream.shard, loader.stream.position = (
            before[0].stream.shard,
            before[0].stream.position,
        )
    read_step(alone, 1, 12)
    assert read_step(resumed, 1, 12) == read_step(alone, 1, 12)
