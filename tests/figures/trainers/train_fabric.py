"""Train with lightning Fabric's loop for gradient accumulation, as its documentation shows it."""

# pip install torch==2.13.0 lightning==2.6.6
import lightning as L
import tiny
import torch

fabric = L.Fabric(accelerator="cpu", devices=tiny.RANKS)
fabric.launch()
model = tiny.model()
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
# Counted from 1, so that the first window is full.
for iteration, (inputs, targets) in enumerate(fabric.setup_dataloaders(tiny.loader()), 1):
    is_accumulating = iteration % tiny.MICRO_STEPS != 0
    with fabric.no_backward_sync(model, enabled=is_accumulating):
        loss = tiny.loss(model(inputs), targets)
        fabric.backward(loss)
    if not is_accumulating:
        optimizer.step()
        optimizer.zero_grad()
