"""train_gpt.py with an edit to its MLP, as a process: python edited_script.py bias|dead.

bias: mlp.fc gets one, zero at the start. dead: a parameter that no loss depends on."""

import os
import sys

import torch
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import train_gpt


class BiasedMLP(train_gpt.MLP):
    def __init__(self, hp: train_gpt.Hyperparameters) -> None:
        super().__init__(hp)
        weight = self.fc.weight  # so that the seed gives the same weights as without a bias
        self.fc = train_gpt.CastedLinear(*weight.T.shape, bias=True, device="meta")
        self.fc.weight, self.fc.bias = weight, nn.Parameter(torch.zeros(len(weight)))


class DeadMLP(train_gpt.MLP):
    def __init__(self, hp: train_gpt.Hyperparameters) -> None:
        super().__init__(hp)
        self.dead = nn.Parameter(torch.zeros(3))


EDITS = {"bias": BiasedMLP, "dead": DeadMLP}

if __name__ == "__main__":
    train_gpt.MLP = EDITS[sys.argv[1]]
    train_gpt.main()
