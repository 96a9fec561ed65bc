"""A plain version of the contract's model and optimizers, with which a run is compared.

It repeats keys and values for their query heads, runs one Newton-Schulz at a time, and fetches the
loss in each step. Parameters have the trainer's names, so either model loads the other's
state_dict.
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train_gpt import GPT, Hyperparameters

Batches = Iterator[tuple[Tensor, Tensor]]  # inputs and targets, int64 (B, T) each


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


class Attention(nn.Module):
    def __init__(self, hp: Hyperparameters) -> None:
        super().__init__()
        self.hp = hp
        dim = hp.model_dim
        kv_dim = dim // hp.num_heads * hp.num_kv_heads
        self.c_q = nn.Linear(dim, dim, bias=False)
        self.c_k = nn.Linear(dim, kv_dim, bias=False)
        self.c_v = nn.Linear(dim, kv_dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.q_gain = nn.Parameter(torch.full((hp.num_heads,), hp.qk_gain_init))

    def rotate(self, x: Tensor) -> Tensor:
        T, h = x.shape[-2:]
        j = torch.arange(h // 2, dtype=torch.float32)
        angles = torch.arange(T, dtype=torch.float32)[:, None] * self.hp.rope_base ** (-2 * j / h)
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        x1, x2 = x[..., : h // 2], x[..., h // 2 :]
        return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        heads = (B, T, -1, D // self.hp.num_heads)
        q, k, v = (c(x).view(heads).transpose(1, 2) for c in (self.c_q, self.c_k, self.c_v))
        q = self.rotate(rms_norm(q)) * self.q_gain.to(q.dtype)[:, None, None]
        k = self.rotate(rms_norm(k))
        groups = self.hp.num_heads // self.hp.num_kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, hp: Hyperparameters) -> None:
        super().__init__()
        self.attn = Attention(hp)
        self.mlp = nn.Module()
        self.mlp.fc = nn.Linear(hp.model_dim, hp.mlp_mult * hp.model_dim, bias=False)
        self.mlp.proj = nn.Linear(hp.mlp_mult * hp.model_dim, hp.model_dim, bias=False)
        self.attn_scale = nn.Parameter(torch.ones(hp.model_dim))
        self.mlp_scale = nn.Parameter(torch.ones(hp.model_dim))
        self.resid_mix = nn.Parameter(torch.tensor([[1.0], [0.0]]).repeat(1, hp.model_dim))

    def forward(self, x: Tensor, x0: Tensor) -> Tensor:
        mix = self.resid_mix.to(x.dtype)
        x = mix[0] * x + mix[1] * x0
        x = x + self.attn_scale.to(x.dtype) * self.attn(rms_norm(x))
        hidden = torch.relu(self.mlp.fc(rms_norm(x))) ** 2
        return x + self.mlp_scale.to(x.dtype) * self.mlp.proj(hidden)


class PlainGPT(nn.Module):
    """The same function of the same parameters as train_gpt.GPT."""

    def __init__(self, hp: Hyperparameters) -> None:
        super().__init__()
        self.hp = hp
        self.early = hp.num_layers // 2
        self.tok_emb = nn.Embedding(hp.vocab_size, hp.model_dim)
        self.skip_weights = nn.Parameter(torch.ones(self.early, hp.model_dim))
        self.blocks = nn.ModuleList(Block(hp) for _ in range(hp.num_layers))
        if not hp.tie_embeddings:
            self.lm_head = nn.Linear(hp.model_dim, hp.vocab_size, bias=False)

    @classmethod
    def like(cls, gpt: GPT, hp: Hyperparameters) -> "PlainGPT":
        """A plain model with the weights, and the embedding's dtype, of gpt."""
        model = cls(hp)
        model.load_state_dict(gpt.state_dict())
        model.tok_emb.to(gpt.tok_emb.weight.dtype)
        return model

    def forward(self, input_ids: Tensor, target_ids: Tensor) -> Tensor:
        x = x0 = rms_norm(self.tok_emb(input_ids))
        outputs = []
        for i, block in enumerate(self.blocks):
            later = i - self.early
            if 0 <= later < self.early:
                x = x + self.skip_weights[later].to(x.dtype) * outputs[self.early - 1 - later]
            x = block(x, x0)
            outputs.append(x)
        x = rms_norm(x)
        logits = F.linear(x, self.tok_emb.weight) if self.hp.tie_embeddings else self.lm_head(x)
        logits = self.hp.logit_softcap * torch.tanh(logits / self.hp.logit_softcap)
        return F.cross_entropy(logits.float().view(-1, logits.size(-1)), target_ids.reshape(-1))


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """Orthogonalize wide matrices (..., rows, columns), in their dtype."""
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        A = x @ x.mT
        B = -4.7750 * A + (2.0315 * A) @ A
        x = 3.4445 * x + B @ x
    return x


class PlainOptimizers:
    """Adam, and Muon one matrix at a time, at the full rates."""

    def __init__(self, model: PlainGPT, hp: Hyperparameters) -> None:
        self.hp = hp
        self.matrices = []
        embed_lr = hp.tied_embed_lr if hp.tie_embeddings else hp.embed_lr
        rates = {"tok_emb.weight": embed_lr, "lm_head.weight": hp.head_lr}
        groups: dict[float, list[nn.Parameter]] = {}
        for name, p in model.named_parameters():
            if name.startswith("blocks.") and name.endswith(".weight"):
                self.matrices.append(p)
            else:
                groups.setdefault(rates.get(name, hp.scalar_lr), []).append(p)
        self.momenta = [torch.zeros_like(p) for p in self.matrices]
        adam_groups = [{"params": params, "lr": lr} for lr, params in groups.items()]
        self.adam = torch.optim.Adam(adam_groups, betas=(hp.beta1, hp.beta2), eps=hp.adam_eps)

    @torch.no_grad()
    def step(self) -> None:
        self.adam.step()
        momentum = self.hp.muon_momentum
        for p, buffer in zip(self.matrices, self.momenta, strict=True):
            buffer.mul_(momentum).add_(p.grad)
            update = p.grad + momentum * buffer
            rows, columns = update.shape
            wide = update.T if rows > columns else update
            wide = newton_schulz(wide, self.hp.muon_backend_steps)
            update = (wide.T if rows > columns else wide) * math.sqrt(max(1, rows / columns))
            p.sub_(self.hp.matrix_lr * update)


def batches(paths: list[str], device: torch.device, num_tokens: int, seq_len: int) -> Batches:
    """Yield batches of num_tokens targets from one shard after another, forever."""
    tokens = np.empty(0, np.uint16)
    for path in itertools.cycle(paths):
        tokens = np.concatenate([tokens, np.fromfile(path, dtype="<u2", offset=1024)])
        while len(tokens) > num_tokens:
            span = torch.from_numpy(tokens[: num_tokens + 1].astype(np.int64)).to(device)
            tokens = tokens[num_tokens + 1 :]
            yield span[:-1].view(-1, seq_len), span[1:].view(-1, seq_len)


def plain_step(model: nn.Module, optimizers: PlainOptimizers, slots: Batches, A: int) -> float:
    """Take an optimizer step of A micro-steps, at the full rates. Fetches and returns the loss."""
    total = 0.0
    for _ in range(A):
        loss = model(*next(slots))
        (loss / A).backward()
        total += loss.detach() / A
    optimizers.step()
    model.zero_grad()
    return total.item()
