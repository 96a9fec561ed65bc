"""What test_cuda_path.py runs in a process of its own, on a torch without CUDA: the trainer's own
functions as rank 3 of 8, on a GPU that is not there. CPU tensors are real; CUDA tensors are fake:
they have a shape, a dtype and a device, but no values. So it is seen where a tensor is left on the
wrong device, and where the host waits for the GPU.

    python fake_cuda_worker.py FOLDER        knobs from the environment; writes FOLDER/result.json
"""

import ctypes
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.cpp_extension import include_paths

import train_gpt

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
extern "C" void install() {
    c10::impl::device_guard_impl_registry[static_cast<int>(c10::DeviceType::CUDA)].store(&guard);
}
"""
GPU, RANK, WORLD_SIZE = torch.device("cuda", 0), 3, 8
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)


def install_guard(folder: Path) -> None:
    """torch asks for a device's guard before it takes a tensor there. This one does nothing."""
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(GUARD)
    command = [os.environ.get("CXX", "c++"), "-w", "-std=c++20", "-shared", "-fPIC", str(source)]
    command += [*(f"-I{path}" for path in include_paths()), "-o", str(library)]
    subprocess.run([*command, str(Path(torch.__file__).parent / "lib/libc10.so")], check=True)
    ctypes.CDLL(str(library)).install()


class FakeGPU(TorchDispatchMode):
    """Sees every operator. What touches the GPU is faked, what copies from it gives zeros. An
    operator that takes tensors of both devices is an error: a real GPU refuses most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.pinned: list[torch.Tensor] = []
        self.waits: list[str] = []  # of the host for the device

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return any(tensor.data_ptr() == pinned.data_ptr() for pinned in self.pinned)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        if func is aten.is_pinned.default:
            return self.is_pinned(args[0])
        if func is aten._pin_memory.default:
            assert devices == {"cpu"}
            self.pinned.append(args[0].clone())
            return self.pinned[-1]
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
            elif way == ("cpu", "cuda") and not (asks and self.is_pinned(source)):
                self.waits.append("copied to the GPU")
        return tree_map_only(FakeTensor, real_if_on_cpu, result)


def real_if_on_cpu(tensor: FakeTensor) -> torch.Tensor:
    if tensor.device.type == "cuda":
        return tensor
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


class Event:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def replace_what_needs_a_gpu(gpu: FakeGPU, parameters: list[torch.nn.Parameter]) -> None:
    """Of torch, not of the trainer: events, clocks, random states, autograd's engine and the
    exchange of Python values."""

    def backward(loss: torch.Tensor) -> None:
        """Autograd's engine wants a real device: the gradients are only put in their places."""
        assert (loss.device, loss.ndim, loss.requires_grad) == (GPU, 0, True)
        for param in parameters:
            param.grad = torch.zeros_like(param)

    def all_gather_object(values: list, value: Any) -> None:
        values[:] = [value] * len(values)

    torch.Tensor.backward = backward
    dist.all_gather_object = all_gather_object
    torch.cuda._lazy_init = lambda: None
    torch.cuda.Event = Event
    torch.cuda.synchronize = lambda device=None: gpu.waits.append("synchronized")
    torch.cuda.get_rng_state = lambda: torch.zeros(16, dtype=torch.uint8)
    torch.cuda.set_rng_state = lambda state: None


def chosen_backends(hp: train_gpt.Hyperparameters, capability: tuple[int, int]) -> list[str]:
    """The attention that a GPU of this compute capability gets."""
    torch.cuda.get_device_capability = lambda device=None: capability
    train_gpt.choose_attention(hp, GPU, torch.bfloat16)
    names = train_gpt.ATTENTION_BACKENDS
    return [name for name in names if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()]


def places(value: Any) -> list[str]:
    """The devices of all tensors in value, each once."""
    return sorted({str(x.device) for x in tree_leaves(value) if isinstance(x, torch.Tensor)})


def held_by(state: train_gpt.TrainingState) -> list[dict]:
    """What the optimizers hold for each parameter."""
    return [held for optimizer in state.optimizers for held in optimizer.state.values()]


def main() -> None:
    folder, results = Path(sys.argv[1]), {}
    install_guard(folder)
    hp = train_gpt.Hyperparameters.from_env(os.environ)
    runtime = train_gpt.Runtime(RANK, WORLD_SIZE, True, GPU, torch.bfloat16)
    dist.init_process_group("fake", rank=RANK, world_size=WORLD_SIZE, store=FakeStore())
    gpu, parameters = FakeGPU(), []
    replace_what_needs_a_gpu(gpu, parameters)

    def check(name: str, action: Callable) -> Any:
        """Note what the action returns and how often it waits. After an error go on."""
        gpu.waits.clear()
        try:
            value = action()
            results[name] = {"value": value, "waits": list(gpu.waits)}
        except Exception:
            results[name] = {"value": traceback.format_exc(), "waits": []}

    with gpu:
        check("attention of sm_90", lambda: chosen_backends(hp, (9, 0)))
        check("attention of sm_80", lambda: chosen_backends(hp, (8, 0)))
        gpt = train_gpt.GPT(hp, runtime.dtype).to(GPU)
        parameters += [param for param in gpt.parameters() if param.requires_grad]
        loader = train_gpt.DistributedTokenLoader(hp.files("train"), RANK, WORLD_SIZE, GPU)
        optimizers = train_gpt.build_optimizers(gpt, runtime.dtype)
        stopwatch = train_gpt.Stopwatch(runtime)
        state = train_gpt.TrainingState(runtime, gpt, gpt, optimizers, loader, stopwatch)
        check("the batch read ahead", lambda: places(loader.read_span(hp.train_seq_len + 1)))
        check("a batch", lambda: places(loader.next_batch(hp.train_batch_tokens, 32, 1)))
        check("a step", lambda: places(train_gpt.train_step(state)))
        check("the optimizers after a step", lambda: places(held_by(state)))
        saved = state.snapshot()
        check("a snapshot", lambda: places(saved))
        check("restore", lambda: state.restore(saved))
        check("the optimizers after restore", lambda: places(held_by(state)))
        check("a step after restore", lambda: places(train_gpt.train_step(state)))
        state.stopwatch.lap()
        check("a lap of the stopwatch", state.stopwatch.lap)
        tokens = torch.zeros(8 * hp.train_seq_len + 1, dtype=torch.uint16)
        check("evaluate", lambda: train_gpt.evaluate(gpt, tokens, hp, runtime))
        check("evaluate_sliding", lambda: train_gpt.evaluate_sliding(gpt, tokens, hp, runtime))
    (folder / "result.json").write_text(json.dumps(results))
    os._exit(0)  # autograd's and the fake group's threads have nothing to clean up


if __name__ == "__main__":
    main()
