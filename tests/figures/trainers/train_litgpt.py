"""Train with litgpt's full finetuning: its fit(), without a checkpoint and a tokenizer."""

# pip install torch==2.13.0 litgpt==0.5.13
import os
from pathlib import Path

import lightning as L
import tiny
import torch
from litgpt import GPT, Config
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data.base import get_sft_collate_fn
from litgpt.finetune import full
from torch.utils.data import DataLoader

devices = int(os.environ.get("WORLD_SIZE", 1))
fabric = L.Fabric(accelerator="cpu", devices=devices)  # on several ranks DDP; litgpt takes FSDP
fabric.launch()
fabric.seed_everything(1)
full.Tokenizer = lambda folder: None  # fit() makes it for its example texts only
sizes = {"block_size": 64, "n_layer": 1, "n_head": 2, "n_embd": 32}
model = fabric.setup(GPT(Config(vocab_size=64, padded_vocab_size=64, **sizes)))
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
state = {"model": model, "optimizer": optimizer, "iter_num": 0, "step_count": 0}
state["scheduler"] = full.get_lr_scheduler(optimizer, warmup_steps=2, max_steps=4)
samples = [
    {
        "input_ids": s,
        "labels": s,
        "token_counts": dict.fromkeys(["raw", "raw_plus_prompt_template"], len(s)),
    }
    for s in tiny.sequences()
]
loader = DataLoader(samples, tiny.SEQUENCES_PER_BATCH, collate_fn=get_sft_collate_fn())
loader = fabric.setup_dataloaders(loader)
batch = tiny.SEQUENCES_PER_BATCH * tiny.MICRO_STEPS * devices
full.fit(
    fabric,
    state,
    train_dataloader=loader,
    val_dataloader=loader,
    devices=devices,
    resume=False,
    checkpoint_dir=Path(),
    out_dir=Path(),
    train=TrainArgs(None, global_batch_size=batch, micro_batch_size=4, max_steps=3, epochs=1),
    eval=EvalArgs(max_iters=2),
    data=None,
)
