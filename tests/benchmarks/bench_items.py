"""Time the trainer's own training step against the same step with one speed item undone.

    PRESET=demo python tests/benchmarks/bench_items.py [--rounds 10] [--only scales qkv] [--compile]
    torchrun --standalone --nproc_per_node=2 tests/benchmarks/bench_items.py

Takes the trainer's own knobs from the environment, COMPILE among them. Where an item is undone, its
plain form stands in train_gpt under the name of the fast one, from the making of the model to the
end of each step. All ways to take a step start from the same weights, read the same random tokens
and take turns. Prints, for each item, the median milliseconds of a step with it and without it and
their ratio: above 1 the item gains. "nothing" is the trainer against itself: how far it is from 1
is the noise of the run.
"""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt
from tests import plain
from tests.benchmarks import bench_step
from tests.conftest import make_state
from train_gpt import (
    GPT,
    CastedLinear,
    CausalSelfAttention,
    Hyperparameters,
    Runtime,
    TrainingState,
)

# The fast forms, while plain ones stand under these names.
attend, orthogonalize, train_step = train_gpt.attend, train_gpt.orthogonalize, train_gpt.train_step


class AutocastLinear(CastedLinear):
    """Leaves the dtype of its weight to autocast."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return F.linear(x, self.weight if scale is None else scale[:, None] * self.weight)


class AutocastGPT(GPT):
    """Autocast chooses the dtypes, as in plain.py."""

    def forward(self, *args: Any) -> Tensor:
        with torch.autocast(args[0].device.type, torch.bfloat16):
            return super().forward(*args)


class RotaryGPT(GPT):
    """Computes its rotary tables, on the device, in each forward pass."""

    def logits(self, input_ids: Tensor) -> Tensor:
        h, device = self.hp.model_dim // self.hp.num_heads, input_ids.device
        frequencies = self.hp.rope_base ** (-torch.arange(0.0, h, 2, device=device) / h)
        angles = torch.outer(torch.arange(1.0 * input_ids.size(1), device=device), frequencies)
        self.rotary = torch.stack((angles.cos(), angles.sin()))
        return super().logits(input_ids)


class ScalingLinear(CastedLinear):
    """Applies the scale to its output."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if scale is None else scale.to(x.dtype) * y


class ThreeProductAttention(CausalSelfAttention):
    """A product, and for q and k a norm and a rotation, for each of q, k and v."""

    def forward(self, x: Tensor, scale: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = x.size(-1) // self.num_heads
        q, k, v = (layer(x).unflatten(-1, (-1, h)) for layer in (self.c_q, self.c_k, self.c_v))
        q, k = (train_gpt.apply_rotary(train_gpt.rms_norm(y), cos, sin) for y in (q, k))
        q = q * self.q_gain.to(x.dtype)[:, None]
        y = attend(q, k, v).reshape(x.shape)
        return self.proj(y, scale)


def orthogonalize_singly(matrices: list[Tensor], *settings: Any) -> list[Tensor]:
    """A Newton-Schulz chain for each matrix."""
    return [orthogonalize([matrix], *settings)[0] for matrix in matrices]


def attend_repeating(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to keys and values that are repeated for their query heads."""
    group = q.size(2) // k.size(2)
    return attend(q, k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2))


class ReadingLoader(plain.PlainLoader):
    """Reads each shard whole and copies int64 from pageable memory while the device waits."""

    def __init__(self, pattern: str, rank: int, world_size: int, device: torch.device, _: int):
        self.waited = 0.0
        super().__init__(train_gpt.find_shards(pattern), torch.device("cpu"))
        self.rank, self.world_size, self.goal = rank, world_size, device

    def next_batch(self, global_tokens: int, seq_len: int, A: int) -> tuple[Tensor, Tensor]:
        local = global_tokens // (self.world_size * A)
        ranks = range(self.world_size)
        batches = [plain.PlainLoader.next_batch(self, local, seq_len) for _ in ranks]
        inputs, targets = batches[self.rank]
        return inputs.to(self.goal), targets.to(self.goal)


def fetching_step(state: TrainingState) -> None:
    """A step that waits for its loss."""
    train_step(state).item()


@dataclass(eq=False)
class Way:
    """A way to take a step, the trainer's own but for what stands here."""

    replaced: dict[str, Any] = field(default_factory=dict)  # what stands in train_gpt under a name
    knobs: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, bool] = field(default_factory=dict)  # arguments of DistributedDataParallel
    steps: int = 1  # in a turn: the device is waited for after each turn

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Plain forms under the names of fast ones, for a while."""
        with contextlib.ExitStack() as stack:
            for name, value in self.replaced.items():
                stack.enter_context(mock.patch.object(train_gpt, name, value))
            yield

    def build(self, hp: Hyperparameters, runtime: Runtime) -> TrainingState:
        """What its steps are taken from."""
        hp = replace(hp, **self.knobs)
        wrapped = replace(runtime, distributed=runtime.distributed and not self.ddp)
        with self.in_place():
            state = make_state(hp, wrapped)
        if self.ddp:
            state.runtime, A = runtime, hp.batch_slots // runtime.world_size
            model = DistributedDataParallel(state.model, broadcast_buffers=False, **self.ddp)
            # static_graph learns from the first backward pass, which must send its gradients.
            model(*state.loader.next_batch(hp.train_batch_tokens, hp.train_seq_len, A)).backward()
            model.zero_grad(set_to_none=True)
            state.loader.seek((0, 0))
            state.model = model
        return state

    def take_turn(self, state: TrainingState) -> None:
        """What is timed."""
        with self.in_place():
            for _ in range(self.steps):
                train_gpt.train_step(state)


TRAINER = Way()
WRAPPED = Way(ddp=dict(static_graph=False, gradient_as_bucket_view=True))
ITEMS = {  # with the item, without it
    "nothing": (TRAINER, Way()),
    "casts": (TRAINER, Way(dict(GPT=AutocastGPT, CastedLinear=AutocastLinear))),
    "scales": (TRAINER, Way(dict(CastedLinear=ScalingLinear))),
    "qkv": (TRAINER, Way(dict(CausalSelfAttention=ThreeProductAttention))),
    "newton_schulz": (TRAINER, Way(dict(orthogonalize=orthogonalize_singly))),
    "groups": (TRAINER, Way(dict(attend=attend_repeating))),
    "loader": (TRAINER, Way(dict(DistributedTokenLoader=ReadingLoader))),
    "item": (Way(steps=4), Way(dict(train_step=fetching_step), steps=4)),
    "rotary": (TRAINER, Way(dict(GPT=RotaryGPT))),
    "slots=2": (Way(knobs=dict(batch_slots=2)), TRAINER),
    "slots=1": (Way(knobs=dict(batch_slots=1)), TRAINER),
    "compile": (Way(knobs=dict(compile="1")), Way(knobs=dict(compile="0"))),
    "static_graph": (Way(ddp=dict(static_graph=True, gradient_as_bucket_view=True)), WRAPPED),
    "bucket_view": (WRAPPED, Way(ddp=dict(static_graph=False, gradient_as_bucket_view=False))),
}


def obstacles(hp: Hyperparameters, runtime: Runtime, compiles: bool) -> dict[str, str]:
    """Why items have no meaning here."""
    train_gpt.choose_attention(hp, runtime.device, runtime.dtype)
    repeats = runtime.device.type == "cuda" and runtime.dtype == torch.float32
    W, slots = runtime.world_size, hp.batch_slots
    rules = [
        ("casts", runtime.dtype != torch.bfloat16, "the dtype is fp32"),
        ("groups", hp.num_heads == hp.num_kv_heads, "there are as many keys as queries"),
        ("groups", repeats, "the trainer too repeats in fp32 on a GPU"),
        ("item", runtime.device.type == "cpu", "a CPU's work is done when Python goes on"),
        ("compile", not compiles, "it takes long: ask for it with --compile"),
        ("static_graph", not runtime.distributed, "it needs torchrun"),
        ("bucket_view", not runtime.distributed, "it needs torchrun"),
    ]
    rules += [(f"slots={n}", slots <= n, f"BATCH_SLOTS={slots} is no more") for n in (1, 2)]
    rules += [(f"slots={n}", n % W > 0, f"WORLD_SIZE={W} does not divide it") for n in (1, 2)]
    return {name: reason for name, applies, reason in rules if applies}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="turns of each that are timed")
    parser.add_argument("--only", nargs="+", choices=ITEMS, default=list(ITEMS), metavar="ITEM")
    parser.add_argument("--compile", action="store_true", help="measure the item compile too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        data.mkdir()
        knobs = {"DATA_PATH": str(data), "OUTPUT_DIR": folder}
        hp = Hyperparameters.from_env({**os.environ, **knobs})
        bench_step.write_random_shards(data, hp.vocab_size)
        runtime = train_gpt.open_runtime(hp, os.environ)
        torch._dynamo.config.recompile_limit = 100  # all models share the code of one forward
        reasons = obstacles(hp, runtime, args.compile)
        here = [name for name in args.only if name not in reasons]
        steps = {}
        silent = replace(runtime, log=train_gpt.Log())
        for way in dict.fromkeys(way for name in here for way in ITEMS[name]):
            state = way.build(hp, runtime if way is TRAINER else silent)
            steps[way] = partial(way.take_turn, state)
        results = bench_step.measure(steps, args.rounds, runtime)
        runtime.log(f"{'item':13} {'ms with':>9} {'without':>9} {'ratio':>6}")
        for name in args.only:
            if name in reasons:
                runtime.log(f"{name:13} not here: {reasons[name]}")
            else:
                ms, undone = (results[way][0] / way.steps for way in ITEMS[name])
                runtime.log(f"{name:13} {ms:9.1f} {undone:9.1f} {undone / ms:6.3f}")
        bench_step.leave(runtime)


if __name__ == "__main__":
    main()
