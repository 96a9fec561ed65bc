"""Call the trainer's functions as rank 3 of 8 on a GPU that does not exist, with a torch without
CUDA, for test_cuda_path.py. CPU tensors are real. CUDA tensors are fake: they have a shape, a dtype
and a device, but no values. Writes the devices of tensors and the host's waits for the GPU to
FOLDER/result.json: python fake_cuda_worker.py FOLDER"""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.cpp_extension import include_paths

import train_gpt

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
extern "C" void install() {
    c10::impl::device_guard_impl_registry[static_cast<int>(c10::DeviceType::CUDA)].store(&guard);
}
"""
GPU = torch.device("cuda", 0)
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)


def install_guard(folder: Path) -> None:
    """Install a device guard, which torch asks for before it uses a device, that does nothing."""
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(GUARD)
    command = [os.environ.get("CXX", "c++"), "-w", "-std=c++20", "-shared", "-fPIC", str(source)]
    command += [*(f"-I{path}" for path in include_paths()), "-o", str(library)]
    subprocess.run([*command, str(Path(torch.__file__).parent / "lib/libc10.so")], check=True)
    ctypes.CDLL(str(library)).install()


class FakeGPU(TorchDispatchMode):
    """Handle every operator. Results on the GPU are fake tensors; a copy to the CPU is zeros.
    Tensors of both devices in one operator are an error, as for most operators on a real GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.pinned: dict[int, torch.Tensor] = {}  # by address
        self.waits: list[str] = []  # reasons why the host waits for the device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        if func is aten._pin_memory.default:
            assert devices == {"cpu"}
            pinned = args[0].clone()
            return self.pinned.setdefault(pinned.data_ptr(), pinned)
        if func is aten._local_scalar_dense.default and devices == {"cuda"}:
            self.waits.append("a value is fetched")
            return 0.0
        assert len(devices) < 2 or func in COPIES, f"{func} takes tensors of both devices"
        target = torch.device(kwargs.get("device") or "cpu").type
        if "cuda" not in (*devices, target):
            return func(*args, **kwargs)
        with self.fake:
            result = func(*args, **kwargs)
        if func in COPIES:
            source, asks = tensors[-1], kwargs.get("non_blocking") or args[2:] == (True,)
            way = source.device.type, result.device.type
            if way == ("cuda", "cpu"):
                self.waits.append("copied from the GPU")
            elif way == ("cpu", "cuda") and not (asks and source.data_ptr() in self.pinned):
                self.waits.append("copied to the GPU")
        if target == "cpu" and func is aten._to_copy.default and "device" in kwargs:
            return torch.zeros(result.shape, dtype=result.dtype)
        return result


def main() -> None:
    folder, gpu, results = Path(sys.argv[1]), FakeGPU(), {}
    install_guard(folder)
    hp = train_gpt.Hyperparameters.from_env(os.environ)
    runtime = train_gpt.Runtime(3, 8, GPU, torch.bfloat16, False)
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())

    def backward(loss: torch.Tensor) -> None:
        """Set gradients to zeros. Autograd's engine needs a real device."""
        assert (loss.device, loss.ndim, loss.requires_grad) == (GPU, 0, True)
        for param in state.gpt.parameters():
            param.grad = torch.zeros_like(param)

    def all_gather_object(values: list, value: Any) -> None:
        values[:] = [value] * len(values)

    torch.Tensor.backward = backward
    dist.all_gather_object = all_gather_object
    torch.cuda._lazy_init = lambda: None
    torch.cuda.synchronize = lambda device=None: gpu.waits.append("synchronized")
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(major=9)
    train_gpt.wrap = lambda gpt, runtime: gpt  # DistributedDataParallel needs a real device

    def check(name: str, action: Callable, *args: Any) -> Any:
        """Record the devices of the action's result, and its waits."""
        gpu.waits.clear()
        value = action(*args)
        devices = {str(x.device) for x in tree_leaves(value) if isinstance(x, torch.Tensor)}
        results[name] = {"devices": sorted(devices), "waits": list(gpu.waits)}
        return value

    with gpu:
        state = train_gpt.TrainingState(hp, runtime)
        batch = (hp.train_batch_tokens, hp.train_seq_len, 1)
        check("batch", state.loader.next_batch, *batch)
        check("schedule", train_gpt.set_schedule, state.optimizers, 0.5, 0.9)
        check("step", train_gpt.train_step, state)
        state.load_state_dict(check("state_dict", state.state_dict))
        check("optimizer state", lambda: [[*one.state.values()] for one in state.optimizers])
        check("step after load_state_dict", train_gpt.train_step, state)
        tokens = torch.zeros(8 * hp.train_seq_len + 1, dtype=torch.uint16)
        evaluation = (state.model, tokens, hp.train_seq_len, hp, runtime)
        check("evaluate", train_gpt.evaluate, *evaluation)
        check("mean_loss", train_gpt.mean_loss, train_gpt.evaluate(*evaluation), runtime)
    (folder / "result.json").write_text(json.dumps(results))
    os._exit(0)  # autograd's and the fake group's threads have nothing to clean up


if __name__ == "__main__":
    main()
