"""Several nodes, and ranks that end: torchrun as its users start it."""

import os
import shutil
import signal
import subprocess
import sys
import time

from conftest import SCRIPT, free_port, process_environ, run_script


def test_two_nodes_that_share_no_files(tmp_path, dataset, tokenizer, knobs):
    """Two agents in two folders, each with its own copy of the data and a rank. The first node
    has the log and the models; the other one ends well without a file."""
    port, agents = free_port(), []
    local = {"DATA_PATH": "data", "TOKENIZER_PATH": "small.model", "GLOO_SOCKET_IFNAME": "lo"}
    for node in ("a", "b"):
        folder = tmp_path / node
        shutil.copytree(dataset, folder / "data")
        shutil.copy(tokenizer, folder)
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        command += ["--nproc_per_node=1", "--rdzv_backend=c10d"]
        command += [f"--rdzv_endpoint=127.0.0.1:{port}", str(SCRIPT)]
        environ = process_environ({**knobs, **local, "BATCH_SLOTS": "16"}, 1)
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        agents.append(subprocess.Popen(command, cwd=folder, env=environ, **pipes))
    outputs = [agent.communicate(timeout=120) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    # Which agent becomes the first node is torchrun's choice.
    (first,) = [node for node in "ab" if (tmp_path / node / "logs").exists()]
    (lines,) = [output.splitlines() for output, _ in outputs if output]
    assert "world_size:2 grad_accum_steps:8" in lines and "replicas:identical" in lines
    assert lines[-1].startswith("final_int8_zlib_roundtrip_exact ")
    files = {
        node: sorted(p.name for p in (tmp_path / node).iterdir() if p.is_file()) for node in "ab"
    }
    other = files.pop("b" if first == "a" else "a")
    assert other == ["small.model"]
    assert files[first] == [
        "final_model.int8.ptz",
        "final_model.pt",
        "final_result.json",
        "small.model",
    ]
    alone = run_script(tmp_path / first, {**knobs, "BATCH_SLOTS": "16", "OUTPUT_DIR": "alone"})
    losses = [
        [float(s.split("val_loss:")[1].split()[0]) for s in text if "val_loss:" in s]
        for text in (lines, alone.stdout.splitlines())
    ]
    assert len(losses[0]) == 5
    for found, expected in zip(*losses, strict=True):
        assert abs(found - expected) < 2e-3


def test_a_rank_that_raises_takes_the_run_down_with_its_own_error_last(tmp_path, knobs):
    """A copy of the script whose rank 2 breaks in step 4, as one that a reader has edited may."""
    anchor = "        rank_loss, norm = train_step("
    source = SCRIPT.read_text()
    assert source.count(anchor) == 1
    fault = "        assert runtime.rank != 2 or step < 3, 'the fault of rank 2'\n"
    (tmp_path / "edited.py").write_text(source.replace(anchor, fault + anchor))
    started = time.monotonic()
    result = run_script(tmp_path, knobs, ranks=4, script=tmp_path / "edited.py")
    assert time.monotonic() - started < 30
    assert result.returncode == 1
    assert "step:3/6 train_loss" in result.stdout and "step:4/6" not in result.stdout
    errors = [s for s in result.stderr.splitlines() if "Error: " in s]
    assert errors[0] == errors[-1].strip() == "AssertionError: the fault of rank 2", errors
    root = result.stderr.split("Root Cause")[-1].splitlines()
    assert "AssertionError: the fault of rank 2" in root[-2] and "rank      : 2 " in result.stderr


def test_a_killed_rank_ends_the_run(tmp_path, knobs):
    """Nothing is left behind: no process waits for the one that is gone."""
    environ = {**knobs, "ITERATIONS": "1000000", "VAL_LOSS_EVERY": "0"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    agent = subprocess.Popen(
        [*command, str(SCRIPT)],
        cwd=tmp_path,
        env=process_environ(environ, 1),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    while not (line := agent.stdout.readline()).startswith("step:10/"):
        assert line, "the run ended by itself"
    children = f"/proc/{agent.pid}/task/{agent.pid}/children"
    ranks = [int(pid) for pid in open(children).read().split()]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    agent.communicate(timeout=30)
    assert agent.returncode == 1
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks)
