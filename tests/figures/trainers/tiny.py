"""Sequences of unequal length and a small model: what the trainers of this folder share."""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

RANKS = int(os.environ.get("WORLD_SIZE", 1))
MICRO_STEPS = 4  # per optimizer step and rank
BATCH = 4  # sequences of a micro-batch


def sequences():
    """Return 256 sequences of 9 to 64 random tokens: 8 to 63 targets each."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(9, 65, (256,), generator=generator).tolist()
    return [torch.randint(64, (length,), generator=generator) for length in lengths]


def inputs_and_targets(batch):
    """Return padded input tokens and next tokens, each (B, T); padding is no target (-100)."""
    inputs = pad_sequence([tokens[:-1] for tokens in batch], batch_first=True)
    targets = pad_sequence([tokens[1:] for tokens in batch], batch_first=True, padding_value=-100)
    return inputs, targets


def loader():
    """Return a loader of (inputs, targets) for one rank; the libraries shard it."""
    return DataLoader(sequences(), BATCH, collate_fn=inputs_and_targets)


def inputs_and_labels(batch):
    """Return the batch for a trainer that shifts the labels itself."""
    labels = pad_sequence(batch, batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp(min=0), "labels": labels}


def model():
    """Return a model that predicts the next of 64 tokens from the present one."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64))


def loss(logits, targets):
    """Return the mean over the micro-batch's targets, as the libraries' examples do."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
