"""Ranks of a script: python forked_ranks.py OUTPUTS RANKS SCRIPT ARGUMENTS...

They are forked from this process, which has imported torch for all of them: that saves each the
seconds of a start. What rank r says goes to OUTPUTS/r.out and r.err, its exit code to r.code."""

import os
import runpy
import sys

import torch._dynamo  # noqa: F401 (every optimizer imports it)
from conftest import SCRIPT  # noqa: F401 (and with it the script, and all that it imports)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: F401

outputs, ranks = sys.argv[1], int(sys.argv[2])
children = []
for rank in range(ranks):
    child = os.fork()
    if child == 0:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{outputs}/{rank}.{name}", os.O_WRONLY | os.O_CREAT), number)
        sys.argv = sys.argv[3:]
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    children.append(child)
for rank, child in enumerate(children):
    with open(f"{outputs}/{rank}.code", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
