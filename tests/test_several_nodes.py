"""Two nodes under torchrun, and the error of one rank."""

import json
import shutil
import subprocess
import sys

from conftest import (
    SCRIPT,
    free_port,
    process_environ,
    run_here,
    run_ranks,
    scores,
    without_gloo,
    write_worker,
)


def test_two_nodes_that_share_no_files(tmp_path, dataset, knobs):
    """Two agents in two folders, each with its own copy of the data and a rank. The first node
    has the log and the models; the other one ends well without a file. They end where one process
    does."""
    local = {"DATA_PATH": "data", "TOKENIZER_PATH": "data/small.model"}
    environ = process_environ({**knobs, **local, "GLOO_SOCKET_IFNAME": "lo"}, 1)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    command += ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}", str(SCRIPT)]
    settings = {"env": environ, "stdout": -1, "stderr": -1, "text": True}
    agents = []
    for node in ("a", "b"):
        shutil.copytree(dataset, tmp_path / node / "data")
        agents.append(subprocess.Popen(command, cwd=tmp_path / node, **settings))
    outputs = [agent.communicate(timeout=240) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    # Which agent becomes the first node is torchrun's choice.
    (log,) = [output for output, _ in outputs if without_gloo(output)]
    other, first = sorted((tmp_path / node for node in "ab"), key=lambda f: len(list(f.iterdir())))
    files = {"logs", "final_model.pt", "final_model.int8.ptz", "final_result.json"}
    assert {path.name for path in first.iterdir()} == {"data", *files}
    assert [path.name for path in other.iterdir()] == ["data"]
    lines = without_gloo(log).splitlines()
    assert "world_size:2 grad_accum_steps:4" in lines and "replicas:identical" in lines
    alone = run_here(tmp_path, knobs).stdout.splitlines()
    assert abs(scores(lines[-1])[0] - scores(alone[-1])[0]) < 2e-3


def test_a_rank_that_raises_takes_all_down_and_tells_torchrun_why(tmp_path, knobs):
    """Rank 2 breaks in step 4, as one with an edited script may. The others say so later."""
    change = """
def train_step(state, train_step=train_gpt.train_step):
    assert state.runtime.rank != 2 or state.step < 3, "the fault of rank 2"
    return train_step(state)

train_gpt.train_step = train_step"""
    own = {rank: {"TORCHELASTIC_ERROR_FILE": f"{tmp_path}/{rank}.json"} for rank in range(4)}
    results = run_ranks(tmp_path, knobs, 4, [write_worker(tmp_path, change)], own)
    assert [result.returncode for result in results] == [1, 1, 1, 1]
    assert results[2].stderr.endswith("AssertionError: the fault of rank 2\n")
    said = [json.loads((tmp_path / f"{rank}.json").read_text())["message"] for rank in range(4)]
    assert "the fault of rank 2" in said[2]["message"]
    times = [int(message["extraInfo"]["timestamp"]) for message in said]
    assert times.pop(2) < min(times)  # torchrun repeats the first, in whole seconds
