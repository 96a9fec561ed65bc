"""The trainer under torchrun. Rank 1 kills itself in step 12. After the restart it is late, and
rank 0 must find neither rank 1's old address nor what NCCL's watchdog writes when a rank fails. In
step 18 torchrun gets a signal, and all ranks wait for its effect."""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch.distributed as dist

import train_gpt


def main() -> None:
    first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    is_last = os.environ["RANK"] == "1"
    if is_last and not first_start:
        time.sleep(2)

    def train_step(state, train_step=train_gpt.train_step):
        if is_last and first_start and state.step == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.step == 17:
            if not is_last:
                os.kill(os.getppid(), signal.SIGTERM)
            while not state.signum:
                time.sleep(0.05)
        return train_step(state)

    def open_runtime(hp, open_runtime=train_gpt.open_runtime):
        runtime = open_runtime(hp)
        store, _, _ = next(dist.rendezvous("env://"))
        if first_start:
            store.set("exception_dump", "1")
        elif store.check(["exception_dump"]):
            raise RuntimeError("NCCL would end this start, too")
        return runtime

    train_gpt.open_runtime = open_runtime
    train_gpt.train_step = train_step
    train_gpt.main()


if __name__ == "__main__":
    main()
