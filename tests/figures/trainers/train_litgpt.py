"""Train with fit() of litgpt's full finetuning; on several ranks with DDP in place of its FSDP."""

# pip install torch==2.13.0 litgpt==0.5.13
from pathlib import Path

import lightning as L
import tiny
import torch
from litgpt import GPT, Config
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data.base import get_sft_collate_fn
from litgpt.finetune import full
from torch.utils.data import DataLoader

full.Tokenizer = lambda folder: None  # for texts that fit() prints
fabric = L.Fabric(accelerator="cpu", devices=tiny.RANKS)
fabric.launch()
config = Config(block_size=64, padded_vocab_size=64, n_layer=1, n_head=2, n_embd=32)
model = fabric.setup(GPT(config))
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
scheduler = full.get_lr_scheduler(optimizer, warmup_steps=2, max_steps=4)
state = dict(model=model, optimizer=optimizer, scheduler=scheduler, iter_num=0, step_count=0)
counts = {"raw": 0, "raw_plus_prompt_template": 0}
samples = [{"input_ids": s, "labels": s, "token_counts": counts} for s in tiny.sequences()]
loader = fabric.setup_dataloaders(DataLoader(samples, tiny.BATCH, collate_fn=get_sft_collate_fn()))
batch = tiny.BATCH * tiny.MICRO_STEPS * tiny.RANKS
train = TrainArgs(global_batch_size=batch, micro_batch_size=tiny.BATCH, max_steps=3, epochs=1)
where = (tiny.RANKS, False, Path(), Path())  # nothing is read or written there
full.fit(fabric, state, loader, loader, *where, train, EvalArgs(), data=None)
