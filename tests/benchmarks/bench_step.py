"""Time optimizer steps of the trainer against the plain reading of the contract in plain.py.

    PRESET=demo python tests/benchmarks/bench_step.py [--rounds 15]

Takes the trainer's own knobs from the environment. Both start from the same weights and see the
same random tokens; they take turns, so that what else the machine does meets both. Prints the
median time of a step of each, tokens per second, and their ratio, the result.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train_gpt
from tests.benchmarks import plain


class RandomTokens:
    """Stands where the trainer has its loader: random tokens instead of shards."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens, self.position = tokens, 0

    def next_batch(self, global_tokens: int, seq_len: int, grad_accum_steps: int):
        span = global_tokens // grad_accum_steps
        part = self.tokens[self.position : self.position + span + 1]
        self.position = (self.position + span) % global_tokens
        return part[:-1].view(-1, seq_len), part[1:].view(-1, seq_len)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="steps of each that are timed")
    rounds = parser.parse_args().rounds
    hp = train_gpt.Hyperparameters.from_env(os.environ)
    with train_gpt.open_runtime(hp, {}) as runtime:
        train_gpt.choose_attention(hp, runtime)
        train_gpt.seed_everything(hp.seed)
        gpt = train_gpt.GPT(hp, runtime.dtype).to(runtime.device)
        plain_gpt = plain.PlainGPT.like(train_gpt.GPT(hp), hp).to(runtime.device)
        plain_optimizers = plain.PlainOptimizers(plain_gpt, hp)
        model, chain = train_gpt.compile_and_wrap(gpt, hp, runtime, print)
        optimizers = train_gpt.build_optimizers(gpt, hp, runtime.dtype, chain)
        tokens = torch.randint(hp.vocab_size, (hp.train_batch_tokens + 1,), device=runtime.device)
        loader = RandomTokens(tokens)
        times: dict[str, list[float]] = {"trainer": [], "plain": []}
        for _ in range(rounds + 2):  # two to warm up
            for name in times:
                runtime.synchronize()
                started = time.perf_counter()
                if name == "trainer":
                    train_gpt.train_step(model, loader, optimizers, hp, runtime)
                else:
                    plain.train_step(plain_gpt, plain_optimizers, tokens)
                runtime.synchronize()
                times[name].append(1000 * (time.perf_counter() - started))
    medians = {name: statistics.median(values[2:]) for name, values in times.items()}
    for name, ms in medians.items():
        print(f"{name:8} {ms:9.1f} ms/step {1000 * hp.train_batch_tokens / ms:9.0f} tokens/s")
    print(f"ratio    {medians['plain'] / medians['trainer']:9.2f}x")


if __name__ == "__main__":
    main()
