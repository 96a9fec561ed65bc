"""train_record.py's quantizer knobs, GPTQ, AWQ and the entropy coder."""

from dataclasses import replace

import pytest
import torch
import train_record
from runs import ALONE, Lines
from scripts import random_model, read
from torch import Tensor, nn
from train_record import decode_values, dequantize_state_dict_int8, encode_values, gptq_values

pytestmark = pytest.mark.baseline


# ---- Quantizer -----------------------------------------------------------------------------------
def test_the_quantizers_knobs_reach_the_artifact(all_matrices):
    torch.manual_seed(0)
    names = ("tok_emb.weight", "blocks.0.attn.c_q.weight", "blocks.0.mlp.fc.weight")
    weights = {name: 0.01 * torch.randn(40, 60) for name in names}

    def measure(knobs: str) -> tuple[list[int], list[float]]:
        """Largest value, and quantization step in standard deviations, of three matrices."""
        hp = train_record.Hyperparameters.from_env(read(knobs))
        obj, _ = train_record.quantize_state_dict_int8(weights, hp)
        steps = [obj["scales"][name] / weights[name].std(dim=1, correction=0) for name in names]
        largest = [int(obj["quantized"][name].abs().max()) for name in names]
        return largest, [step.mean().item() for step in steps]

    levels = "EMBED_LEVELS=63 MATRIX_LEVELS=7"
    clips = "SD_CLIP_EMBEDDING=3 SD_CLIP_ATTENTION=2 SD_CLIP_MLP=1.5"
    largest, steps = measure(f"{levels} {clips}")
    assert largest == [63, 7, 7] and steps == pytest.approx([3 / 63, 2 / 7, 1.5 / 7], rel=1e-3)
    # Without them, a row's largest value gets the last level, unless the floor of a step is larger.
    assert measure(levels)[0] == [5, 5, 5] and measure(f"{levels} SCALE_FLOOR=0")[0] == [63, 7, 7]


# ---- GPTQ and AWQ --------------------------------------------------------------------------------
def plain_gptq(weight: Tensor, scale: Tensor, limit: int, hessian: Tensor) -> Tensor:
    """Round one column after another, the one with the largest input first. The columns that are
    left make up for its error, by the inverse of their own part of the Hessian."""
    weight, values = weight.double(), torch.empty_like(weight)
    hessian = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(len(hessian))
    left = hessian.diagonal().argsort(descending=True)
    while len(left) > 0:
        inverse = torch.linalg.inv(hessian[left][:, left])
        column = left[0]
        values[:, column] = (weight[:, column] / scale).round().clamp(-limit, limit)
        error = weight[:, column] - values[:, column] * scale
        weight[:, left] -= error[:, None] * inverse[0] / inverse[0, 0]
        left = left[1:]
    return values


def test_gptq_rounds_as_a_plain_version():
    """The matrix has two blocks of columns."""
    torch.manual_seed(0)
    weight, x = torch.randn(50, 200), torch.randn(1000, 200) @ torch.randn(200, 200)
    scale = weight.abs().amax(dim=1) / 7
    plain = (weight / scale[:, None]).round()
    diagonal = torch.arange(200.0).diag()  # the first input is always 0
    scales, levels = scale[:, None].expand_as(weight), torch.full_like(weight, 7)
    assert torch.equal(gptq_values(weight, scales, levels, diagonal), plain.to(torch.int8))
    gptq = gptq_values(weight, scales, levels, x.T @ x)
    assert (gptq == plain_gptq(weight, scale, 7, x.T @ x)).float().mean() > 0.99


def inputs_of_layers(gpt: nn.Module) -> dict[str, Tensor]:
    """Return the inputs (n, columns) of each linear layer in GPTQ's batches."""
    inputs = {"tok_emb.weight": []}
    gpt.output = lambda x: inputs["tok_emb.weight"].append(x) or x
    for name, layer in gpt.named_modules():
        if isinstance(layer, nn.Linear):
            found = inputs[f"{name}.weight"] = []
            layer.register_forward_hook(lambda _, args, y, found=found: found.append(args[0]))
    loader = train_record.DistributedTokenLoader(gpt.hp.files("train"), 0, 1, "cpu")
    with torch.no_grad():
        for _ in range(gpt.hp.gptq_batches):
            gpt.logits(loader.next_batch(gpt.hp.train_batch_tokens, gpt.hp.train_seq_len, 8)[0])
    return {name: torch.cat(parts).flatten(0, -2) for name, parts in inputs.items()}


def error_of(values: dict[str, Tensor], gpt: nn.Module, name: str, x: Tensor) -> Tensor:
    return ((values[name] - gpt.state_dict()[name]) @ x.T).norm()


def test_gptq_lowers_the_error_of_each_layer(knobs, all_matrices):
    """The error is measured on GPTQ's inputs. Any number of ranks writes the same artifact."""
    runtime, files = replace(ALONE, log=Lines()), []
    for world_size, batches in ((1, "0"), (1, "2"), (2, "2")):
        levels = {"MATRIX_LEVELS": "7", "EMBED_LEVELS": "7", "GPTQ_BATCHES": batches}
        gpt = random_model(train_record, {**knobs, **levels})
        files.append(train_record.export(gpt, gpt.hp, replace(runtime, world_size=world_size))[0])
    assert files[1] == files[2] and "WARNING" not in runtime.log.text
    plain, gptq = (
        dequantize_state_dict_int8(train_record.deserialize(file, "")) for file in files[:2]
    )
    for name, x in inputs_of_layers(gpt).items():
        assert error_of(gptq, gpt, name, x) < 0.9 * error_of(plain, gpt, name, x), name
    nn.init.constant_(gpt.tok_emb.weight, torch.inf)
    with pytest.raises(train_record.InputError, match="^GPTQ failed: .*: set GPTQ_BATCHES=0"):
        train_record.export(gpt, gpt.hp, runtime)


def test_awq_rounds_the_most_salient_columns_finer(knobs, all_matrices):
    """The most salient eight adjacent columns of all blocks' matrices are found by brute force.
    Layer 1 loops, so it reads more inputs, which must not count."""
    settings = "MATRIX_LEVELS=31 GPTQ_BATCHES=2 LOOP_FIRST=1 LOOP_LAYERS=1 LOOP_TIMES=3"
    objs = []
    for columns in ("0", "8"):
        gpt = random_model(train_record, {**knobs, **read(settings), "AWQ_COLUMNS": columns})
        gpt.blocks[1].mlp.proj.weight.data *= 0.9  # or its number of inputs lets it win
        gpt.blocks[0].attn.proj.weight.data[:, 16:24] *= 4  # the largest weights, but small inputs
        gpt.blocks[2].attn.c_v.weight.data[:, 16:24] *= 3
        artifact = train_record.export(gpt, gpt.hp, replace(ALONE, log=Lines()))[0]
        objs.append(train_record.deserialize(artifact, ""))
    inputs, saliency = inputs_of_layers(gpt), {}
    for name in [name for name in inputs if name.startswith("blocks.")]:
        sizes = inputs[name].square().mean(0) ** 0.5 * gpt.state_dict()[name].abs().mean(0)
        saliency |= {(name, 8 * i): sum(part) for i, part in enumerate(sizes.split(8))}
    name, start = max(saliency, key=saliency.get)
    assert objs[1]["awq"] == [(name, start, start + 8, 4)] and "awq" not in objs[0]
    plain, finer = map(dequantize_state_dict_int8, objs)
    errors = [error_of(found, gpt, name, inputs[name]) for found in (plain, finer)]
    assert errors[1] < 0.95 * errors[0]
    assert all(torch.equal(plain[other], finer[other]) for other in plain if name[:13] not in other)


# ---- Entropy coder -------------------------------------------------------------------------------
def entropy(values: Tensor) -> float:
    """Bytes of these values if each is coded by its frequency alone."""
    shares = values.unique(return_counts=True)[1] / values.numel()
    return values.numel() / 8 * float((shares * -shares.log2()).sum())


def unpack(encoded: dict) -> dict[str, Tensor]:
    data = train_record.compress(train_record.serialize(encoded))
    return train_record.deserialize(data, "a file")["quantized"]


@pytest.mark.parametrize("n", [1, 511, 512, 10_001, 10**6])
def test_rans_restores_values_and_refuses_damage(n):
    torch.manual_seed(n)
    uniform, normal = torch.randint(-128, 128, (n,)), (3 * torch.randn(n)).round()
    tensors = [uniform, normal, torch.rand(n) < 1e-4, torch.full((n, 1), -7)]
    values = {str(i): tensor.to(torch.int8) for i, tensor in enumerate(tensors)}
    encoded = encode_values({"quantized": values})
    tables, lanes, stream, _, _, levels, _ = encoded["rans"]
    wanted = sum(entropy(part) for part in values.values())
    assert stream.nbytes + lanes.nbytes <= 1.001 * wanted + 8 * train_record.RANS_LANES
    decoded = unpack(encoded)
    assert all(torch.equal(decoded[name], values[name]) for name in values)
    for part in (tables, lanes, stream, levels) if n == 10_001 else ():
        index = part.argmax()
        part.flatten()[index] ^= 1
        with pytest.raises(train_record.InputError, match="a file is damaged"):
            unpack(encoded)
        part.flatten()[index] ^= 1


@pytest.mark.parametrize("alike", ["columns", "rows"])
def test_rans_takes_less_than_the_entropy_of_matrices(alike):
    """Either the columns differ in spread, or rows resemble earlier rows."""
    torch.manual_seed(0)
    values = 3 * torch.randn(700, 600)  # wider than RANS_LANES
    if alike == "columns":
        values *= torch.linspace(0.2, 1.8, 600)
    else:
        values[350:] = values[:350].flip(0) + torch.randn(350, 600)
    values = values.round().to(torch.int8)
    encoded = encode_values({"quantized": {"0": values}})
    assert sum(part.nbytes for part in encoded["rans"][1:-1]) < 0.98 * entropy(values)
    assert torch.equal(decode_values(encoded)["quantized"]["0"], values)
