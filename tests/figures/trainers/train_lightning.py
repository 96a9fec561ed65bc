"""Train with lightning's Trainer and accumulate_grad_batches."""

# pip install torch==2.13.0 lightning==2.6.6
import lightning as L
import tiny
import torch


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = tiny.model()

    def training_step(self, batch):
        inputs, targets = batch
        return tiny.loss(self.model(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


options = {"logger": False, "enable_checkpointing": False, "max_steps": 3, "accelerator": "cpu"}
options |= {"devices": tiny.RANKS, "accumulate_grad_batches": tiny.MICRO_STEPS}
L.Trainer(**options).fit(Model(), tiny.loader())
