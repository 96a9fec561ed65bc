"""Train with lightning's Trainer and accumulate_grad_batches."""

# pip install torch==2.13.0 lightning==2.6.6
import os

import lightning as L
import tiny
import torch
from torch.utils.data import DataLoader


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = tiny.model()

    def training_step(self, batch):
        inputs, targets = batch
        return tiny.loss(self.model(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


trainer = L.Trainer(
    accelerator="cpu",
    devices=int(os.environ.get("WORLD_SIZE", 1)),
    accumulate_grad_batches=tiny.MICRO_STEPS,
    max_steps=3,
    logger=False,
    enable_checkpointing=False,
)
loader = DataLoader(tiny.sequences(), tiny.SEQUENCES_PER_BATCH, collate_fn=tiny.inputs_and_targets)
trainer.fit(Model(), loader)
