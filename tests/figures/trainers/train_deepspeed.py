"""Train with DeepSpeed's engine; the argument is the ZeRO stage."""

# pip install torch==2.13.0 deepspeed==0.19.8 ninja==1.13.2, and set DS_ACCELERATOR=cpu
# Its first start compiles an extension: this needs ninja on the PATH and a C++ compiler.
import os
import sys

import deepspeed
import tiny

if "RANK" not in os.environ:  # started without torchrun; port 0 is any free port
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
model = tiny.model()
config = {
    "train_micro_batch_size_per_gpu": tiny.BATCH,
    "gradient_accumulation_steps": tiny.MICRO_STEPS,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "zero_optimization": {"stage": int(sys.argv[1])},
}
data = {"training_data": tiny.sequences(), "collate_fn": tiny.inputs_and_targets}
params = {"model": model, "model_parameters": model.parameters()}
engine, _, loader, _ = deepspeed.initialize(config=config, **params, **data)
for inputs, targets in loader:
    loss = tiny.loss(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
