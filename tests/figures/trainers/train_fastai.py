"""Train with fastai's Learner and GradientAccumulation, which counts samples."""

# pip install torch==2.13.0 fastai==2.8.12 (two ranks need GPUs: DistributedDL calls .cuda())
from functools import partial

import tiny
import torch
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper

loader = DataLoader(tiny.sequences(), bs=tiny.BATCH, create_batch=tiny.inputs_and_targets)
options = {"loss_func": tiny.loss, "opt_func": partial(OptimWrapper, opt=torch.optim.AdamW)}
options["cbs"] = GradientAccumulation(n_acc=tiny.MICRO_STEPS * tiny.BATCH)
Learner(DataLoaders(loader, loader), tiny.model(), **options).fit(1)
