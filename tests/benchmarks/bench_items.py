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
from collections.abc import Callable, Iterator
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
from tests.benchmarks import bench_step, plain
from train_gpt import GPT, MLP, CausalSelfAttention, Hyperparameters, Runtime

# The fast forms, while plain ones stand under these names.
attend, orthogonalize, train_step = train_gpt.attend, train_gpt.orthogonalize, train_gpt.train_step


class AutocastGPT(GPT):
    """Autocast chooses the dtypes, as in plain.py; F.linear stands for train_gpt.linear then."""

    def forward(self, input_ids: Tensor, target_ids: Tensor) -> Tensor:
        with torch.autocast(input_ids.device.type, torch.bfloat16):
            return super().forward(input_ids, target_ids)


class RotaryGPT(GPT):
    """Computes its rotary tables, on the device, in each forward pass."""

    def logits(self, input_ids: Tensor) -> Tensor:
        h, device = self.hp.model_dim // self.hp.num_heads, input_ids.device
        frequencies = self.hp.rope_base ** (-torch.arange(0.0, h, 2, device=device) / h)
        angles = torch.outer(torch.arange(1.0 * input_ids.size(1), device=device), frequencies)
        self.rotary = torch.stack((angles.cos(), angles.sin()))
        return super().logits(input_ids)


class ScaledAttention(CausalSelfAttention):
    """Applies scale to its output."""

    def forward(self, x: Tensor, scale: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        H, K = self.num_heads, self.num_kv_heads
        weight = torch.cat((self.c_q.weight, self.c_k.weight, self.c_v.weight))
        qkv = train_gpt.linear(x, weight).unflatten(-1, (H + 2 * K, -1))
        qk, v = qkv.split((H + K, K), dim=2)
        q, k = train_gpt.apply_rotary(train_gpt.rms_norm(qk), cos, sin).split((H, K), dim=2)
        q = q * self.q_gain.to(x.dtype)[:, None]
        y = attend(q, k, v, self.takes_groups).reshape(x.shape)
        return scale.to(x.dtype) * train_gpt.linear(y, self.proj.weight)


class ScaledMLP(MLP):
    """Applies scale to its output."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        hidden = F.relu(train_gpt.linear(x, self.fc.weight)).square()
        return scale.to(x.dtype) * train_gpt.linear(hidden, self.proj.weight)


class ThreeProductAttention(CausalSelfAttention):
    """A product, and for q and k a norm and a rotation, for each of q, k and v."""

    def forward(self, x: Tensor, scale: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = x.size(-1) // self.num_heads
        layers = self.c_q, self.c_k, self.c_v
        q, k, v = (train_gpt.linear(x, layer.weight).unflatten(-1, (-1, h)) for layer in layers)
        q, k = (train_gpt.apply_rotary(train_gpt.rms_norm(y), cos, sin) for y in (q, k))
        q = q * self.q_gain.to(x.dtype)[:, None]
        y = attend(q, k, v, self.takes_groups).reshape(x.shape)
        return train_gpt.linear(y, scale[:, None] * self.proj.weight)


def orthogonalize_singly(matrices: list[Tensor], *settings: Any) -> list[Tensor]:
    """A Newton-Schulz chain for each matrix."""
    return [orthogonalize([matrix], *settings)[0] for matrix in matrices]


def attend_repeating(q: Tensor, k: Tensor, v: Tensor, _: bool) -> Tensor:
    """Attention to keys and values that are repeated for their query heads."""
    return attend(q, k, v, False)


class ReadingLoader(plain.PlainLoader):
    """Reads each shard whole and copies int64 from pageable memory while the device waits."""

    def __init__(self, pattern: str, rank: int, world_size: int, device: torch.device, _: int):
        super().__init__(train_gpt.find_shards(pattern), torch.device("cpu"))
        self.rank, self.world_size, self.goal = rank, world_size, device

    def next_batch(self, global_tokens: int, seq_len: int, A: int) -> tuple[Tensor, Tensor]:
        local = global_tokens // (self.world_size * A)
        ranks = range(self.world_size)
        batches = [plain.PlainLoader.next_batch(self, local, seq_len) for _ in ranks]
        inputs, targets = batches[self.rank]
        return inputs.to(self.goal), targets.to(self.goal)


def fetching_step(*args: Any) -> None:
    """A step that waits for its loss."""
    train_step(*args)[0].item()


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

    def build(self, hp: Hyperparameters, runtime: Runtime, log: Callable = str) -> tuple:
        """The arguments of train_step."""
        hp = replace(hp, **self.knobs)
        with self.in_place():
            torch.manual_seed(hp.seed)
            gpt = train_gpt.GPT(hp, runtime.dtype).to(runtime.device)
            train_gpt.choose_attention(gpt, hp, runtime)
            loader = train_gpt.build_loader(hp, runtime)
        wrapper = replace(runtime, distributed=runtime.distributed and not self.ddp)
        model, chain = train_gpt.compile_and_wrap(gpt, hp, wrapper, log)
        if self.ddp:
            model = DistributedDataParallel(model, broadcast_buffers=False, **self.ddp)
            # static_graph learns from the first backward pass, which must send its gradients.
            other, A = train_gpt.build_loader(hp, runtime), hp.batch_slots // runtime.world_size
            model(*other.next_batch(hp.train_batch_tokens, hp.train_seq_len, A)).backward()
            model.zero_grad(set_to_none=True)
        return model, loader, train_gpt.build_optimizers(gpt, hp, runtime.dtype, chain), hp, runtime

    def take_turn(self, step: tuple) -> None:
        """What is timed."""
        with self.in_place():
            for _ in range(self.steps):
                train_gpt.train_step(*step)


TRAINER = Way()
WRAPPED = Way(ddp=dict(static_graph=False, gradient_as_bucket_view=True))
ITEMS = {  # with the item, without it
    "nothing": (TRAINER, Way()),
    "casts": (TRAINER, Way(dict(GPT=AutocastGPT, linear=F.linear))),
    "scales": (TRAINER, Way(dict(CausalSelfAttention=ScaledAttention, MLP=ScaledMLP))),
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
    gpt = GPT(hp, runtime.dtype)
    train_gpt.choose_attention(gpt, hp, runtime)
    W, slots = runtime.world_size, hp.batch_slots
    rules = [
        ("casts", runtime.dtype != torch.bfloat16, "the dtype is fp32"),
        ("groups", hp.num_heads == hp.num_kv_heads, "there are as many keys as queries"),
        ("groups", not gpt.blocks[0].attn.takes_groups, "the trainer too repeats for this device"),
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
        hp = Hyperparameters.from_env({**os.environ, "DATA_PATH": folder})
        bench_step.write_random_shards(Path(folder), hp.vocab_size)
        runtime = train_gpt.open_runtime(hp, os.environ)
        torch._dynamo.config.recompile_limit = 100  # all models share the code of one forward
        say = print if runtime.rank == 0 else str
        reasons = obstacles(hp, runtime, args.compile)
        here = [name for name in args.only if name not in reasons]
        steps = {}
        for way in dict.fromkeys(way for name in here for way in ITEMS[name]):
            step = way.build(hp, runtime, say if way is TRAINER else str)
            steps[way] = partial(way.take_turn, step)
        results = bench_step.measure(steps, args.rounds, runtime)
    say(f"{'item':13} {'ms with':>9} {'without':>9} {'ratio':>6}")
    for name in args.only:
        if name in reasons:
            say(f"{name:13} not here: {reasons[name]}")
        else:
            ms, undone = (results[way][0] / way.steps for way in ITEMS[name])
            say(f"{name:13} {ms:9.1f} {undone:9.1f} {undone / ms:6.3f}")
    train_gpt.leave(0, runtime)


if __name__ == "__main__":
    main()
