"""Show how much each micro-batch of a PyTorch training script counts in its optimizer's step.

    python check_accumulation.py [--ranks 1,2,4] [--steps 2] train.py ITS ARGUMENTS
    python check_accumulation.py [--ranks 1,2,4] [--steps 2] -m package.module ITS ARGUMENTS

The script runs unmodified for a few optimizer steps, without torch.compile. A step's gradient
should be the mean over all of its targets. Before each backward pass, the program takes the
gradient of this micro-batch alone. Least squares finds with which weights these add up to the
gradient that the optimizer gets: 1 is the micro-batch's share of the step's targets. This needs
memory for one more gradient, and twice as many backward passes, on a GPU as on a CPU.

Exit code 0: each target weighs the same. 1: it does not. 2: the script failed, or wrong usage.
3: cannot be judged. The file stands alone: torch and numpy, and matplotlib for --picture.
"""

import argparse
import atexit
import functools
import gc
import importlib.util
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.nn.parallel import distributed as ddp
from torch.optim import Optimizer
from torch.optim import optimizer as hooks

SAMPLES = 1024  # values of each tensor that are compared, about
MOST_OPEN = 512  # backward passes that are remembered, at most
RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
PID = os.getpid()
MIX = np.uint64(0x9E3779B97F4A7C15)  # odd: spreads targets over 64 bits
FOLDER, STEPS, RANK = map(os.environ.get, ("CHECKED_FOLDER", "CHECKED_STEPS", "RANK"))


# ==== First half: inside the script's processes ===================================================
watch = SimpleNamespace(  # what this rank has seen since the script began
    calls=[],  # of loss functions (see remember), whose backward pass has not come yet
    batches=[],  # of each backward pass, a dictionary of look_ahead's; None: forgotten
    starts={},  # by optimizer: its first micro-batch
    ends={},  # the same for its next step
    parts={},  # of the step in hand: by first micro-batch, gradients by parameter
    clipped={},  # by parameter: the gradient before and after clipping
    coefficients=[],  # of clipping
    notes={},  # keys of FINDINGS, in order
    synced=None,  # DDP's flag; None: no DDP
    step=0,
    is_busy=False,  # a backward pass of this program, or one that does not count
)
REAL: dict[str, Callable] = {}  # the functions that are replaced


def sketch(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    every = max(tensor.numel() // SAMPLES, 1) | 1  # odd: all columns of a matrix have some
    return tensor.reshape(-1)[::every].double().cpu().numpy()


def remember(output: Tensor, targets: Tensor, counts: Tensor, divisor: Any, **kind: bool) -> Tensor:
    """Keep a call of a loss function. counts: which of the flat targets do. divisor: a target's
    weight is the derivative by the output over this. kind: is_loss, False for gather."""
    is_live = output.requires_grad and torch.is_grad_enabled() and output.device.type != "meta"
    # Checkpointing repeats the forward pass inside the backward pass: that is no new call.
    if not is_live or torch._C._current_graph_task_id() != -1:
        return output
    before = [function for function, _ in output.grad_fn.next_functions]
    if watch.calls and watch.calls[-1].output.grad_fn in before:  # torch.set_default_device
        return output
    call = SimpleNamespace(output=output, targets=targets, counts=counts, divisor=divisor, **kind)
    call.step = watch.step
    watch.calls = [*watch.calls[-16 * MOST_OPEN :], call]
    return output.clone()  # the script may change what it gets


def loss_function(name: str, input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Call F.cross_entropy or F.nll_loss, and remember the call."""
    output = REAL[name](input, target, *args, **kwargs)
    names = ("weight", "size_average", "ignore_index", "reduce", "reduction")
    kwargs = dict(zip(names, args, strict=False)) | kwargs
    class_weights = kwargs.get("weight")
    if target.is_floating_point():  # probabilities of classes, the second dimension
        target = target.movedim(min(1, target.dim() - 1), -1).argmax(-1)
    targets = target.reshape(-1)
    unit = (targets != kwargs.get("ignore_index", -100)).double()
    if class_weights is not None:  # a class's weight is taken as wanted
        unit *= class_weights.detach()[targets.clamp(0, len(class_weights) - 1)]
    divisors = {"mean": unit.sum(), "sum": 1.0, "none": unit.where(unit != 0, 1)}
    divisor = divisors[kwargs.get("reduction", "mean")]
    return remember(output, targets, unit != 0, divisor, is_loss=True)


def gather(input: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Tensor:
    """Call gather, and remember the call if it takes one log-probability from each row."""
    output = REAL["gather"](input, dim, index, **kwargs)
    is_last = dim in (-1, input.dim() - 1) and index.shape[-1:] == (1,) and input.shape[-1] > 1
    if is_last and index.numel() and output.requires_grad and output.device.type != "meta":
        first_row = input.detach().reshape(-1, input.shape[-1])[0].float()
        if abs(float(first_row.logsumexp(0))) < 0.01:
            targets = index.reshape(-1)
            return remember(output, targets, targets == targets, -1.0, is_loss=False)
    return output


def gradients(roots: list[Tensor], seeds: list[Tensor], total: float) -> dict[int, np.ndarray]:
    """Sketches of the gradient of the roots over total, by parameter."""
    params, visited, todo = {}, set(), [root.grad_fn for root in roots]
    while todo:
        node = todo.pop()
        if node is not None and node not in visited:
            visited.add(node)
            todo += [after for after, _ in node.next_functions]
            if hasattr(node, "variable"):
                params[node.variable] = None
    grads = torch.autograd.grad(roots, list(params), seeds, retain_graph=True, allow_unused=True)
    # fully_shard computes with a whole copy of each parameter; the optimizer holds its own shard.
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
    shards = [part for part in gc.get_objects() if type(part) is fsdp.FSDPParam] if fsdp else []
    owners = {id(getattr(part, "_unsharded_param", None)): part.sharded_param for part in shards}
    pairs = zip(params, grads, strict=True)
    return {id(owners.get(id(p), p)): sketch(g) / total for p, g in pairs if g is not None}


def target_weights(call: SimpleNamespace, derivative: Tensor) -> Tensor:
    return derivative.detach().double().reshape(-1) / call.divisor * call.counts


def main_loss(losses: list[tuple]) -> list[tuple]:
    """Several heads with other weights: the heaviest one, to which the others are further terms."""
    weights = [w[w != 0] for w in (target_weights(*loss) for loss in losses)]
    totals, counts = [float(w.sum()) for w in weights], [len(w) for w in weights]
    if not losses or min(totals) <= 0 or max(counts) > 1.25 * min(counts):
        return losses
    means = [total / count for total, count in zip(totals, counts, strict=True)]
    # Chunks of one loss have equal weights, and means of chunks have equal totals.
    is_chosen = min(max(means) / min(means), max(totals) / min(totals)) > 1.02
    is_even = all(float(w.max() / w.min()) < 1.001 for w in weights)
    return [losses[totals.index(max(totals))]] if is_chosen and is_even else losses


def look_ahead(roots: list[Tensor], seeds: list[Tensor], retain: bool) -> dict[str, Any]:
    """Take the gradient of one micro-batch before its backward pass, as a mean over its targets."""
    outputs, keep = [call.output for call in watch.calls], {"retain_graph": True}
    derivatives = outputs and torch.autograd.grad(roots, outputs, seeds, allow_unused=True, **keep)
    pairs = list(zip(watch.calls, derivatives, strict=True))
    used = [(call, d) for call, d in pairs if d is not None and bool((d != 0).any())]
    if not retain:
        consumed = [id(call.output) for call, _ in used]
        watch.calls = [call for call in watch.calls if id(call.output) not in consumed]
    losses = [(call, d) for call, d in used if call.is_loss]
    used = main_loss(losses) or used  # a gather next to a loss is something else
    weights = [target_weights(*loss) for loss in used]
    flat = torch.cat([torch.zeros(1, device="cpu"), *(weight.cpu() for weight in weights)])
    total = float(flat.sum())
    if bool((flat > 0).any() and (flat < 0).any()):
        watch.notes["both_ways"] = None
        used = []
    is_empty = used or any(not bool(call.counts.any()) for call, _ in pairs)
    batch = {
        "synced": watch.synced,
        "count": 0,  # of targets; 0: none, or no loss function that is known
        "fingerprint": 0,  # of the targets in any order: those of micro-batches add up
        "key": 0,  # of the targets in their order
        "span": [1.0, 1.0],  # lowest and highest weight of a target, over their mean
        "sketch": {} if is_empty else gradients(roots, seeds, 1.0),
        "other": {},  # sketch's part that is not of a known loss function
    }
    if not used or total == 0:
        return batch
    flat = flat[flat != 0]
    batch["count"] = len(flat)
    batch["span"] = [float(flat.min() / flat.mean()), float(flat.max() / flat.mean())]
    for (call, _), weight in zip(used, weights, strict=True):
        mixed = (call.targets[weight != 0].cpu().numpy().astype(np.uint64) + 1) * MIX
        batch["fingerprint"] += int(((mixed ^ (mixed >> 29)) * MIX).sum(dtype=np.uint64))
        batch["key"] += int((mixed * np.arange(1, 2 * len(mixed), 2, dtype=np.uint64)).sum())
    batch["sketch"] = gradients(roots, seeds, total)
    whole = sum(float((r.detach() * seed).sum()) for r, seed in zip(roots, seeds, strict=True))
    known = sum(float((d * call.output.detach()).sum()) for call, d in used)
    rounding = max(torch.finfo(call.output.dtype).eps for call, _ in used)
    if losses and abs(whole - known) > max(1e-4, 4 * rounding) * abs(whole):
        # The script's loss has another term: which part of the gradient is of known losses?
        part = gradients([call.output for call, _ in used], [d for _, d in used], total)
        batch["other"] = {p: value - part.get(p, 0) for p, value in batch["sketch"].items()}
    return batch


def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    """torch.autograd.backward, to which Tensor.backward leads, too."""
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    seeds = [grad_tensors] if isinstance(grad_tensors, Tensor) else grad_tensors
    pairs = zip(roots, seeds or [None] * len(roots), strict=True)
    is_live = all(root.requires_grad and root.device.type != "meta" for root in roots)
    if is_live and not watch.is_busy and torch._C._current_graph_task_id() == -1:
        end_step()
        if watch.step == int(STEPS):
            finish(0)
        watch.clipped.clear()
        watch.is_busy = True
        try:
            retain = bool(kwargs.get("retain_graph") or (args and args[0]))
            seeds = [torch.ones_like(root) if seed is None else seed for root, seed in pairs]
            watch.batches.append(look_ahead(roots, seeds, retain))
        except Exception:  # a mistake here must not end the script
            traceback.print_exc()
            watch.notes["not_followed"] = None
        watch.is_busy = False
        forgotten = max(len(watch.batches) - MOST_OPEN, 0)
        watch.batches[:forgotten] = [None] * forgotten
    REAL["backward"](tensors, grad_tensors, *args, **kwargs)


def record(optimizer: Optimizer) -> None:
    """Keep the gradients that this optimizer is about to use."""
    if float(getattr(optimizer, "found_inf", None) or 0) > 0:  # a fused one leaves this step out
        return skip_step(optimizer)
    scale = float(getattr(optimizer, "grad_scale", None) or 1)  # and divides by the scale itself
    part = watch.parts.setdefault(watch.starts.get(id(optimizer), 0), {})
    for param in (p for group in optimizer.param_groups for p in group["params"] if p not in part):
        part[param] = grad = None if param.grad is None else sketch(param.grad) / scale
        before, after = watch.clipped.get(param, (grad, None))
        if after is not None and before.any() and np.array_equal(grad * scale, after):
            part[param] = before / scale
            watch.coefficients.append(float(np.linalg.norm(after) / np.linalg.norm(before)))
    watch.ends[id(optimizer)] = len(watch.batches)


def skip_step(optimizer: Optimizer) -> None:
    watch.starts[id(optimizer)] = len(watch.batches)
    watch.notes["skipped"] = None


def before_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Hook of all optimizers. With a closure, the gradients are there after its first call."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return record(optimizer)
    kwargs = {**kwargs, "closure": functools.partial(call_closure, optimizer, closure, [])}
    return (args[0], *args[2:]), kwargs


def call_closure(optimizer: Optimizer, closure: Callable, earlier: list) -> Any:
    watch.is_busy = bool(earlier)  # LBFGS calls its closure many times: the first one counts
    with torch.enable_grad():
        value = closure()
    watch.is_busy = False
    if not earlier:
        earlier.append(record(optimizer))
    return value


def end_step() -> None:
    """Write what the optimizers got, if any of them has stepped since the last backward pass."""
    written = 0
    for first, part in sorted(watch.parts.items()):
        ids = {id(param) for param in part}
        # With several optimizers, a micro-batch may be of other parameters.
        window = filter(None, watch.batches[first:])
        own = [b for b in window if ids & b["sketch"].keys() or not b["sketch"]]
        finite = [b for b in own if all(np.isfinite(v).all() for v in b["sketch"].values())]
        grads = [grad for grad in part.values() if grad is not None]
        is_finite = all(np.isfinite(grad).all() for grad in grads)
        if is_finite and any(batch["sketch"] for batch in finite):
            write_part(f"step{watch.step}.part{written}.rank{RANK or 0}", part, finite)
            written += 1
    if watch.batches and watch.parts and not written and not any(b["sketch"] for b in own):
        watch.notes["no_gradient"] = None
    if watch.ends:
        watch.calls = [call for call in watch.calls if call.step == watch.step]
        watch.starts |= watch.ends
    watch.ends, watch.parts, watch.coefficients = {}, {}, []
    watch.step += written > 0


def write_part(name: str, part: dict[Tensor, np.ndarray | None], window: list[dict]) -> None:
    own = {id(param): sketch(param) for param in part}
    empty = {param: np.zeros_like(values) for param, values in own.items()}
    rows = [{id(param): grad for param, grad in part.items() if grad is not None}]
    rows += [batch[kind] for kind in ("sketch", "other") for batch in window]
    facts = {
        "rows": [np.concatenate([row.get(p, zero) for p, zero in empty.items()]) for row in rows],
        "sizes": [len(zero) for zero in empty.values()],
        "batches": [batch | {"sketch": None, "other": None} for batch in window],
        "clipped": [min(watch.coefficients, default=1), max(watch.coefficients, default=1)],
        "weights": [float(values.sum()) for values in own.values()],  # differ if the ranks' do
    }
    Path(FOLDER, f"{name}.new").write_bytes(pickle.dumps(facts))
    Path(FOLDER, f"{name}.new").rename(Path(FOLDER, name))


def clip(name: str, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """Clip gradients, by norm or by value, and remember them before and after."""
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    before = {param: sketch(param.grad) for param in params if param.grad is not None}
    result = REAL[name](params, *args, **kwargs)
    for param, old in before.items():
        watch.clipped[param] = (watch.clipped.get(param, (old,))[0], sketch(param.grad))
    return result


def ddp_forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    watch.synced = bool(self.require_backward_grad_sync)  # DDP, too, reads it here
    return REAL["ddp_forward"](self, *args, **kwargs)


def ddp_sink(ctx: Any, *grads: Any) -> Any:
    """With static_graph, DDP waits for its first backward pass here: ours is not the one."""
    return (None, *grads) if watch.is_busy else REAL["ddp_sink"](ctx, *grads)


def checkpoint(function: Callable, *args: Any, use_reentrant: Any = None, **kwargs: Any) -> Any:
    if use_reentrant is not False:
        watch.notes["reentrant"] = None
    return REAL["checkpoint"](function, *args, use_reentrant=False, **kwargs)


def scaler_step(self: Any, optimizer: Optimizer, state: dict, *args: Any, **kwargs: Any) -> Any:
    if any(float(value) for value in state["found_inf_per_device"].values()):
        skip_step(optimizer)
    return REAL["scaler_step"](self, optimizer, state, *args, **kwargs)


def make_optimizer(self: Optimizer, *args: Any, **kwargs: Any) -> None:
    REAL["make_optimizer"](self, *args, **kwargs)
    watch.starts[id(self)] = len(watch.batches)


def install() -> None:
    """Put the functions above in place of torch's."""
    clips = ["clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"]
    replaced = [
        (F, "cross_entropy", "ce", functools.partial(loss_function, "ce")),
        (F, "nll_loss", "nll", functools.partial(loss_function, "nll")),
        *((torch.nn.utils, name, name, functools.partial(clip, name)) for name in clips),
        (torch, "gather", "gather", gather),
        (Tensor, "gather", "gather", gather),
        (torch.autograd, "backward", "backward", backward),
        (torch.utils.checkpoint, "checkpoint", "checkpoint", checkpoint),
        (torch.amp.GradScaler, "_maybe_opt_step", "scaler_step", scaler_step),
        (Optimizer, "__init__", "make_optimizer", make_optimizer),
        (ddp.DistributedDataParallel, "forward", "ddp_forward", ddp_forward),
        (ddp._DDPSink, "backward", "ddp_sink", staticmethod(ddp_sink)),
        (os, "_exit", "exit", finish),
    ]
    for owner, attribute, name, function in replaced:
        REAL[name] = getattr(owner, attribute)
        setattr(owner, attribute, function)
    for name in clips:
        setattr(torch.nn.utils.clip_grad, name, getattr(torch.nn.utils, name))
    hooks.register_optimizer_step_pre_hook(before_step)


def finish(code: int | None = None) -> None:
    """Leave together with the other ranks: one that ends early breaks their exchanges."""
    if os.getpid() != PID:  # a worker of a DataLoader
        REAL["exit"](code or 0)
    end_step()
    end = pickle.dumps({"notes": [*watch.notes], "batches": len(watch.batches)})
    Path(FOLDER, f"end{RANK or 0}").write_bytes(end)
    ranks, latest = int(os.environ.get("WORLD_SIZE", 1)), time.monotonic() + 30
    while len(list(Path(FOLDER).glob("end*"))) < ranks and time.monotonic() < latest:
        time.sleep(0.02)
    if code is not None:  # else the interpreter is about to leave
        REAL["exit"](code)


def run_script(words: list[str]) -> None:
    """Run the script as python would, watched."""
    Path(FOLDER, f"pid{RANK or 0}").write_text(str(os.getpid()))
    install()
    atexit.register(finish)
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


# ==== Second half: start the ranks, fit, judge ====================================================
FINDINGS = """
data wrong: two ranks have the same targets: give each rank its own part of the data (or is this
    script for one process?)
before wrong: the step before still counts, {0:.2f} times: it was not zeroed: call zero_grad()
apart wrong: no gradient reaches another rank, and the weights drift apart: wrap the model in DDP
stay wrong: the gradients of micro-steps {0} stay on their rank: set DDP's flag before the forward
    pass, True in the last micro-step, or put no_sync() around forward and backward pass
lost wrong: the gradients of micro-steps {0} are lost: zeroed too early: zero them once per step
differ wrong: the ranks' weights differ: begin with equal ones, and change none on one rank only
inside wrong: inside a micro-batch, a target weighs {0:.2f} to {1:.2f} times the mean: a mean per
    sequence or chunk, or losses that count differently: add up all losses, then divide once
means wrong: the mean of means: a target weighs {0:.2f} to {1:.2f} times its share, by the length of
    its micro-batch: divide by the number of targets of the whole step
alone wrong: each rank's targets are averaged alone: a target weighs {0:.2f} to {1:.2f} times its
    share: divide by the number of targets of all ranks, and multiply by the number of ranks
unequal wrong: a target weighs {0:.2f} to {1:.2f} times its share: divide by the step's targets
factor wrong: {2} weigh {0:.3g} times their share: {1}
common note: {2} weigh {0:.3g} times their share: a common factor is harmless for Adam and Muon, not
    for clipping, SGD and L2 penalties
equal note: micro-batches have the same gradient: only the sum of their weights is known
rest note: {0:.2g} % of the gradient is no sum of these losses' gradients: another loss term? noise?
often note: gradients are exchanged in {0} of {1} micro-steps: one is enough, the last
short note: steps have from {0} to {1} micro-steps
skipped note: the GradScaler left out a step
reentrant note: reentrant checkpointing ran with use_reentrant=False
optimizer unknown: no gradient is exchanged, but the weights stay equal: the optimizer does it
uncertain unknown: the weights are uncertain by {0:.2f}: micro-batches have nearly the same
    gradient, or most of it has another source: try other steps
loss unknown: no loss function that this program knows: compute the loss with F.cross_entropy
both_ways unknown: targets pull both ways, as in preference and reward losses
no_gradient unknown: an optimizer holds other tensors than these losses depend on: copies of the
    weights, or shards? Try it unsharded
tensors unknown: the optimizers of two ranks hold different tensors: try them unsharded
not_followed unknown: a backward pass could not be followed (--verbose shows why)
no_step unknown: {0} backward passes, and no step of a torch.optim.Optimizer
failed unknown: the script failed with exit code {0}
"""
TEXTS = dict(line.split(" ", 1) for line in FINDINGS.replace("\n    ", " ").strip().split("\n"))


def fit(gradient: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """Weights with which rows add up to the gradient, their standard errors, what is left, and
    whether rows depend on each other: then only the sum of some weights is known."""
    lengths = np.maximum(np.linalg.norm(rows, axis=1), 1e-300)
    scaled = (rows / lengths[:, None]).T
    weights, _, rank, _ = np.linalg.lstsq(scaled, gradient, rcond=1e-5)
    left = gradient - scaled @ weights
    variance = left @ left / max(len(gradient) - len(rows), 1)
    errors = np.sqrt(variance * np.diag(np.linalg.pinv(scaled.T @ scaled, rcond=1e-10)).clip(0))
    return weights / lengths, errors / lengths, left, rank < np.count_nonzero(lengths > 1e-300)


def read_step(name: str, facts: list[dict], before: list[Any]) -> SimpleNamespace | None:
    """Fit one step of all ranks. Returns None if their optimizers hold different tensors."""
    if any(fact["sizes"] != facts[0]["sizes"] for fact in facts):
        return None
    grads = [fact["rows"][0] for fact in facts]
    parts = [np.split(np.array(fact["rows"][1:]), 2) for fact in facts]
    columns, other = (np.concatenate(part) for part in zip(*parts, strict=True))
    ranks = range(len(facts))
    owner = np.repeat(ranks, [len(fact["batches"]) for fact in facts])
    batches = [batch for fact in facts for batch in fact["batches"]]
    counts = np.array([batch["count"] for batch in batches])
    is_known = bool(counts.any())
    counts = counts if is_known else columns.any(axis=1).astype(int)
    judged = counts > 0
    shares = np.where(judged, counts, 1) / (counts.sum() if is_known else 1)
    table, largest = [], np.zeros(4)  # of error, before, rest, is_unclear
    for gradient, old in zip(grads, before, strict=True):
        length = max(np.linalg.norm(gradient), 1e-300)
        (weights, errors, left, is_unclear), times = fit(gradient, columns), 0.0
        if old is not None and len(old) == len(gradient) and np.linalg.norm(left) > 0.01 * length:
            again = fit(gradient, np.vstack([columns, old]))
            # A constant part of the gradient (weight decay by hand) would leave a rest.
            if np.linalg.norm(again[2]) < max(0.01 * length, np.linalg.norm(left) / 20):
                (*weights, times), (*errors, _), left, is_unclear = again
        table.append(weights / shares)
        rest = np.linalg.norm(left + (table[-1] * shares) @ other) / length
        largest = np.maximum(
            largest, [max((errors / shares)[judged]), abs(times), rest, is_unclear]
        )
    return SimpleNamespace(
        name=name,
        owner=owner[judged],  # of each column: the rank that reads it
        micro=np.concatenate([np.cumsum(judged[owner == r])[judged[owner == r]] for r in ranks]),
        counts=counts[judged],  # its targets
        table=np.array(table)[:, judged],  # (ranks, columns): weight over the share of the targets
        error=largest[0],  # standard error of the table
        before=largest[1],  # weight of the gradient of the step before
        rest=largest[2],  # share of the gradient that is no sum of the losses' gradients
        is_unclear=largest[3] > 0,  # see fit
        gradient=np.mean(grads, axis=0),
        facts=facts,
        is_known=is_known,  # its loss function
        low=min(batch["span"][0] for batch in batches),  # of a target, over its micro-batch's mean
        high=max(batch["span"][1] for batch in batches),
    )


def judge(step: SimpleNamespace, usual: set[int], span: list[float]) -> dict[str, str]:
    """Sentences by key of FINDINGS. Of all steps, usual: numbers of micro-steps; span: weights."""
    found, ranks, micro_steps = {}, len(step.table), range(1, step.micro.max() + 1)
    weights = {tuple(fact["weights"]) for fact in step.facts}
    prints = [{batch["key"] for batch in fact["batches"]} - {0} for fact in step.facts]
    zero, others = np.abs(step.table) < 0.02, step.owner != np.arange(ranks)[:, None]
    if lost := [m for m in micro_steps if zero[:, step.micro == m].all()]:
        found["lost"] = TEXTS["lost"].format(str(lost)[1:-1])
    if len(set().union(*prints)) < sum(map(len, prints)):
        found["data"] = TEXTS["data"]
    elif step.error > 0.05:
        return {"uncertain": TEXTS["uncertain"].format(step.error)}
    elif ranks > 1 and zero[others].all():
        key = "optimizer" if len(weights) == 1 else "apart"
        found[key] = TEXTS[key]
    elif ranks > 1:
        local = [m for m in micro_steps if zero[others & (step.micro == m)].all()]
        if local := [m for m in local if m not in lost]:
            found["stay"] = TEXTS["stay"].format(str(local)[1:-1])
    if step.before > 0.01:
        found["before"] = TEXTS["before"].format(step.before)
    if not step.is_known:
        found["loss"] = TEXTS["loss"]
    elif not found:
        judge_weights(step, usual, span, found)
    if len(weights) > 1 and not {"data", "apart", "stay"} & found.keys():
        found["differ"] = TEXTS["differ"]
    if step.is_unclear and "data" not in found:
        found["equal"] = TEXTS["equal"]
    if step.rest > 0.01:
        found["rest"] = TEXTS["rest"].format(100 * step.rest)
    synced = [batch["synced"] for batch in step.facts[0]["batches"]]
    if ranks > 1 and synced.count(True) > 1:
        found["often"] = TEXTS["often"].format(synced.count(True), len(synced))
    return found


def judge_weights(step: SimpleNamespace, usual: set[int], span: list[float], found: dict) -> None:
    """Does each target weigh the same? If not, which mistake gives these weights?"""
    R, M, targets = len(step.table), step.micro.max(), int(step.counts.sum())
    tolerance = max(0.002, 4 * step.error, min(2 * step.rest, 0.03))
    if step.high > 1.01:
        found["inside"] = TEXTS["inside"].format(step.low, step.high)
    of_rank = np.bincount(step.owner, weights=step.counts)[step.owner] * R / targets
    of_batch = step.counts * len(step.counts) / targets
    for key, expected in (("", 1.0), ("means", 1 / of_batch), ("alone", 1 / of_rank)):
        factor = float((step.table / expected).mean())
        if np.abs(step.table / expected - factor).max() <= tolerance * max(1.0, abs(factor)):
            if key:
                found[key] = TEXTS[key].format(*span)
            break
    else:
        found["unequal"] = TEXTS["unequal"].format(*span)
        return
    if abs(factor - 1) <= max(tolerance, 0.005):
        return
    factors = [
        *((M / u, f"{M} micro-steps are still divided by the usual {u}") for u in usual),
        (M, f"not divided by the {M} micro-steps: multiply each loss by 1 / {M}"),
        (R, f"added over the {R} ranks, not averaged"),
        (M * R, f"neither divided by the {M} micro-steps nor averaged over the {R} ranks"),
        (1 / M, f"divided twice by the {M} micro-steps: divide once"),
        (1 / R, f"divided twice by the {R} ranks: divide once"),
        (1 / M / R, f"divided twice by the {M} micro-steps and the {R} ranks: divide once"),
        *((targets / n, "a sum over targets in place of a mean") for n in {1, R, M, M * R}),
    ]
    names = [text for n, text in factors if abs(factor / n - 1) < 0.01 and "the 1 " not in text]
    who = "on average, targets" if found else "all"
    key = "factor" if names else "common"
    found[key] = TEXTS[key].format(factor, "; or ".join(names[:2]), who)


def run_ranks(ranks: int, args: argparse.Namespace, folder: Path) -> int | None:
    """Run the script. Returns its exit code; None: its time was up."""
    environ = {name: value for name, value in os.environ.items() if name not in RANK_NAMES}
    environ |= {"TORCHDYNAMO_DISABLE": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": str(folder)}
    environ |= {"CHECKED_FOLDER": str(folder), "CHECKED_STEPS": str(args.steps)}
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [sys.executable, *launch * (ranks > 1), str(Path(__file__).resolve()), *args.words]
    with open(folder / "output", "wb") as out:
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, env=environ, start_new_session=True, **streams)
    try:
        return process.wait(timeout=60 * args.minutes)
    except subprocess.TimeoutExpired:
        return None
    finally:  # torchrun's ranks are groups of their own
        for group in [process.pid, *(int(f.read_text() or 0) for f in folder.glob("pid*"))]:
            try:
                os.killpg(group, signal.SIGKILL) if group else None
            except (ProcessLookupError, PermissionError):
                pass
        process.wait()


def check(ranks: int, code: int | None, args: Any, folder: Path) -> tuple[list, dict[str, str]]:
    """Fit, judge and print what the ranks wrote. Returns the steps and the findings."""
    told = [pickle.loads(file.read_bytes()) for file in folder.glob("end*")]
    fitted, found, before = [], {}, {}
    names = [file.name.split(".")[:2] for file in folder.glob("step*.rank0")]
    for number, part in sorted((int(step[4:]), part) for step, part in names):
        files = [folder / f"step{number}.{part}.rank{rank}" for rank in range(ranks)]
        if all(file.exists() for file in files):
            facts = [pickle.loads(file.read_bytes()) for file in files]
            old = before.get(part, [None] * ranks)
            fitted.append(read_step(f"step {number + 1}", facts, old))
            before[part] = [fact["rows"][0] for fact in facts]
    steps = [step for step in fitted if step is not None]
    micro_steps = [step.micro.max() for step in steps]
    span = [f([f(step.table) for step in steps] or [0]) for f in (np.min, np.max)]
    print(f"{ranks} rank{'s' * (ranks > 1)}")
    for step in steps:
        show(step)
        found = judge(step, {*micro_steps}, span) | found
    if len(set(micro_steps)) > 1:
        found["short"] = TEXTS["short"].format(min(micro_steps), max(micro_steps))
    for key in [key for rank in told for key in rank["notes"]] + ["tensors"] * (None in fitted):
        found[key] = TEXTS[key]
    if code:
        found["failed"] = TEXTS["failed"].format(code)
    elif not steps and not any(text.startswith("unknown") for text in found.values()):
        batches = max((rank["batches"] for rank in told), default=0)
        found["no_step"] = TEXTS["no_step"].format(batches)
    if code or args.verbose:
        output = (folder / "output").read_text(errors="replace").partition("] failed (exitcode")[0]
        lines = output.splitlines()[0 if args.verbose else -15 :]
        print("\n".join(f"  | {line}" for line in lines))
    if not any(text.startswith(("wrong", "unknown")) for text in found.values()):
        counts = np.concatenate([step.counts for step in steps])
        text = f"right: in {len(counts)} micro-batches of {len(steps)} step{'s' * (len(steps) > 1)}"
        same = f" All had {counts[0]:,} targets: unequal numbers were not seen."
        found["right"] = f"{text}, each target weighed the same." + same * (len({*counts}) == 1)
    print("\n".join(f"=> {text}" for text in found.values()))
    return steps, found


def show(step: SimpleNamespace) -> None:
    rows = {"targets": [f"{count:,}" if step.is_known else "?" for count in step.counts]}
    table = np.round(step.table, 2) + 0.0  # no -0
    rows |= {f"rank {r} counts": [f"{w:.2f}" for w in row] for r, row in enumerate(table)}
    print(f"  {step.name}")
    for name, words in rows.items():
        groups = [np.array(words)[step.owner == rank] for rank in range(len(step.table))]
        print(f"    {name} {' | '.join(map(' '.join, groups))}")
    line = f"    left over: {100 * step.rest:.2g} %"
    low, high = step.facts[0]["clipped"]
    if low < 0.9999:
        line += f"; clipped to {low:.3g}" + (f" to {high:.3g}" if high > 1.01 * low else "")
    synced = [batch["synced"] for batch in step.facts[0]["batches"]]
    if len(step.table) > 1 and None not in synced:
        exchanged = ", ".join(str(m) for m, flag in enumerate(synced, start=1) if flag)
        line += f"; exchanged in micro-step{'s' * (',' in exchanged)} {exchanged or '-'}"
    print(line)


def compare(runs: dict[int, list[SimpleNamespace]]) -> None:
    """Do different numbers of ranks read the same targets and take the same step?"""
    (ranks, first), *others = [(ranks, steps[0]) for ranks, steps in runs.items() if steps]
    for more, step in others:
        sums = [sum(b["fingerprint"] for f in s.facts for b in f["batches"]) for s in (first, step)]
        data = "the same" if sums[0] % 2**64 == sums[1] % 2**64 else "other"
        distance = np.linalg.norm(step.gradient - first.gradient) / np.linalg.norm(first.gradient)
        print(f"{more} ranks and {ranks} read {data} targets in the first step; their mean "
              f"gradients differ by {distance:.1e} of their length")  # fmt: skip


def draw(panels: list[tuple[str, SimpleNamespace]], path: Path) -> None:
    """Draw each step's weights as bars, one group for each rank, one color for each reader."""
    from matplotlib.figure import Figure

    columns = min(len(panels), 2)
    figure = Figure(figsize=(4.2 * columns, 0.9 * (len(panels) + 1)), layout="constrained")
    for number, (title, step) in enumerate(panels, start=1):
        axes = figure.add_subplot(-(-len(panels) // columns), columns, number, title=title)
        ranks, batches = step.table.shape
        places = np.arange(ranks)[:, None] * (batches + 1.5) + np.arange(batches)
        colors = [f"C{owner}" for owner in step.owner] * ranks
        axes.bar(places.ravel(), step.table.ravel(), color=colors)
        axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
        axes.set_xticks(places.mean(axis=1), [f"rank {rank}" for rank in range(ranks)], fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--ranks", default="1", metavar="N,N", help="numbers of processes (default: 1)")
    add("--steps", type=int, default=2, help="optimizer steps to look at (default: 2)")
    add("--minutes", type=float, default=10, help="end a run after these (default: 10)")
    add("--picture", type=Path, metavar="FILE", help="draw the weights (needs matplotlib)")
    add("--verbose", action="store_true", help="show the script's whole output")
    add("-m", dest="module", nargs=argparse.REMAINDER, help="a module and its arguments")
    add("script", nargs=argparse.REMAINDER, help="a script and its arguments")
    args = parser.parse_args()
    args.words = ["-m", *args.module] if args.module else args.script
    if not all(word.isdecimal() and int(word) > 0 for word in args.ranks.split(",")):
        parser.error(f"--ranks {args.ranks}: give numbers with commas, as 1,2")
    if args.steps < 1 or args.minutes <= 0:
        parser.error("--steps and --minutes must be above 0")
    if not args.module and not (args.words and Path(args.words[0]).is_file()):
        parser.error(
            f"{args.words[0] if args.words else 'no script'}: no such file: name a training script"
        )
    if args.picture and not args.picture.absolute().parent.is_dir():
        parser.error(f"--picture {args.picture}: its folder does not exist")
    if args.picture and not importlib.util.find_spec("matplotlib"):
        parser.error("--picture needs matplotlib: pip install matplotlib")
    return args


def main() -> int:
    args = read_arguments()
    for number in (signal.SIGINT, signal.SIGTERM):  # which ends the ranks, too
        signal.signal(number, lambda signum, frame: sys.exit(128 + signum))
    runs, everything = {}, {}
    for ranks in map(int, args.ranks.split(",")):
        with tempfile.TemporaryDirectory(prefix="check_accumulation_") as folder:
            code = run_ranks(ranks, args, Path(folder))
            runs[ranks], found = check(ranks, code, args, Path(folder))
        everything |= found
    panels = [(f"{n} ranks, {step.name}", step) for n, run in runs.items() for step in run]
    if panels:
        compare(runs)
    kinds = {text.partition(":")[0] for text in everything.values()}
    verdict = next(kind for kind in ("wrong", "unknown", "right") if kind in kinds)
    lowest = min((step.table.min() * step.low for _, step in panels), default=float("nan"))
    highest = max((step.table.max() * step.high for _, step in panels), default=float("nan"))
    lowest, highest = (round(weight, 2) + 0.0 for weight in (lowest, highest))  # no -0
    print(f"check_accumulation ranks:{args.ranks} steps:{args.steps} lowest:{lowest:.2f} "
          f"highest:{highest:.2f} verdict:{verdict}")  # fmt: skip
    if args.picture and panels:
        draw(panels, args.picture)
    return {"right": 0, "wrong": 1, "unknown": 2 if "failed" in everything else 3}[verdict]


if __name__ == "__main__":
    sys.exit(run_script(sys.argv[1:]) if FOLDER else main())
