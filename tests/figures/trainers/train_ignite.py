"""Train with pytorch-ignite's create_supervised_trainer and gradient_accumulation_steps."""

# pip install torch==2.13.0 pytorch-ignite==0.5.5
import ignite.distributed as idist
import tiny
import torch
from ignite.engine import create_supervised_trainer


def train(rank):
    model = idist.auto_model(tiny.model())
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters()))
    batch = tiny.BATCH * tiny.RANKS  # auto_dataloader divides it by the ranks
    options = {"batch_size": batch, "collate_fn": tiny.inputs_and_targets}
    steps = {"gradient_accumulation_steps": tiny.MICRO_STEPS}
    trainer = create_supervised_trainer(model, optimizer, tiny.loss, **steps)
    trainer.run(idist.auto_dataloader(tiny.sequences(), **options))


with idist.Parallel(backend="gloo" if tiny.RANKS > 1 else None) as parallel:
    parallel.run(train)
