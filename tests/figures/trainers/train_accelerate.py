"""Train with accelerate's loop for gradient accumulation, as its documentation shows it."""

# pip install torch==2.13.0 accelerate==1.15.0
import tiny
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=tiny.MICRO_STEPS)
model = tiny.model()
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, tiny.loader())
for inputs, targets in loader:
    with accelerator.accumulate(model):
        loss = tiny.loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
