"""Single recipes: what each promises beyond training. (All recipes alike: test_recipes.py.)"""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import Lines, finished, run_here, run_ranks
from scripts import (
    ALL_RECORDS,
    RECIPES,
    RECORD,
    RECORD_1493,
    RECORD_1855,
    knobs_of,
    load,
    patch_script,
)
from texts import train_tokenizer, write_shard

pytestmark = [
    pytest.mark.baseline,
    pytest.mark.skipif(shutil.which("git") is None, reason="needs git apply"),
]


def test_adam_weight_decay_shrinks_only_its_groups(tmp_path, monkeypatch):
    module = load(patch_script(tmp_path, ["adam_weight_decay"]), monkeypatch)
    gpt = module.GPT(module.Hyperparameters(model_dim=32, num_layers=2), torch.float32)
    before = {name: param.detach().clone() for name, param in gpt.named_parameters()}
    for param in gpt.parameters():
        param.grad = torch.zeros_like(param)
    module.build_optimizers(gpt)[0].step()
    hp = gpt.hp
    decayed = before["tok_emb.weight"] * (1 - hp.tied_embed_lr * hp.embed_weight_decay)
    assert gpt.tok_emb.weight.detach().numpy() == pytest.approx(decayed.numpy())
    assert torch.equal(gpt.blocks[0].attn.q_gain, before["blocks.0.attn.q_gain"])


def test_shuffled_loader_reads_each_sequence_once_per_epoch(tmp_path, monkeypatch):
    module = load(patch_script(tmp_path, ["shuffled_loader"]), monkeypatch)
    write_shard(tmp_path / "0.bin", range(50))  # six sequences of eight tokens and a target
    write_shard(tmp_path / "1.bin", range(100, 105))  # too short for one
    write_shard(tmp_path / "2.bin", range(200, 281))  # ten

    def steps(world_size: int, seed: int) -> list[list[int]]:
        """The first tokens of each step's sequences: two epochs of two steps of four slots."""
        settings = (world_size, "cpu", 2**16, seed)
        loaders = [
            module.DistributedTokenLoader(f"{tmp_path}/*.bin", rank, *settings)
            for rank in range(world_size)
        ]
        result = []
        for _ in range(4):
            turns = 4 // world_size * loaders
            batches = [loader.next_batch(64, 8, 4 // world_size) for loader in turns]
            for inputs, targets in batches:
                assert torch.equal(targets, inputs + 1)
                assert torch.equal(inputs, inputs[:, :1] + torch.arange(8))
            result.append([int(row[0]) for inputs, _ in batches for row in inputs])
        return result

    first, second, third, fourth = steps(1, seed=1)
    starts = [*range(0, 48, 8), *range(200, 280, 8)]
    assert sorted(first + second) == sorted(third + fourth) == starts
    assert starts != first + second != third + fourth
    assert steps(2, seed=1) == steps(4, seed=1) == [first, second, third, fourth]
    assert steps(1, seed=2)[0] != first


def test_fp16_skips_an_overflow_on_all_ranks(tmp_path, knobs):
    """The ranks run the script as a file, and loss and gradients are local to train_step. So the
    test edits its text."""
    script = patch_script(tmp_path, ["fp16"])
    text = script.read_text()
    infinite = "(math.inf if state.step == 3 and state.runtime.rank == 1 else 1)"
    norm = "nn.utils.get_total_norm([p.grad for p in state.gpt.parameters()])"
    report = f"print('scale', state.step, state.scaler.get_scale(), {norm}.item())"
    for old, new in (("scale(loss)", f"scale(loss * {infinite})"), ("return total_loss", report)):
        assert text.count(old) == 1
        text = text.replace(old, new if "print" not in new else f"{new}; {old}")
    script.write_text(text)
    settings = {"DTYPE": "fp16", "WARMUP_STEPS": "3", "CHECKPOINT_EVERY": "6"}
    ranks = run_ranks(tmp_path, {**knobs, **settings, "GRAD_CLIP_NORM": "0.01"}, 2, [script])
    assert "replicas:identical" in finished(ranks[0])
    for rank in ranks:
        lines = [line.split()[2:] for line in rank.stdout.splitlines() if "scale " in line][-6:]
        assert [float(scale) for scale, _ in lines] == 3 * [65536] + 3 * [32768]
        norms = [float(norm) for _, norm in lines]
        assert norms[:3] + norms[4:] == pytest.approx(5 * [0.01], rel=1e-3)
    saved = torch.load(tmp_path / "checkpoints" / "test.pt")
    assert saved["step"] == 6 and saved["scaler"]["scale"] == 32768
    assert {state["step"].item() for state in saved["optimizers"][0]["state"].values()} == {5}


@pytest.mark.parametrize(
    "preset, num_params, encoder, decoder",
    [
        ("record", 35_943_512, [0, 1, 2, 3, 4, 5, 4], [5, 4, 5, 6, 7, 8, 9, 10]),
        ("record1493", 35_944_536, [0, 1, 2, 3, 4, 5, 3, 4], [5, 3, 4, 5, 6, 7, 8, 9, 10]),
        ("record1855", 35_945_623, [0, 1, 2, 3, 4, 5, 3, 4], [5, 3, 4, 5, 6, 7, 8, 9, 10]),
    ],
)
def test_a_record_is_the_published_model(
    tmp_path, preset, num_params, encoder, decoder, monkeypatch
):
    """With its own recipes. record1855 has 48 parameters less than published, which do nothing."""
    names = (RECIPES / f"{preset}.txt").read_text().split()
    module = load(patch_script(tmp_path, [Path(name).stem for name in names]), monkeypatch)
    with torch.device("meta"):
        gpt = module.GPT(module.Hyperparameters.from_env({"PRESET": preset}))
    assert sum(param.numel() for param in gpt.parameters()) == num_params
    assert gpt.order[: gpt.num_encoder_layers] == encoder
    assert gpt.order[gpt.num_encoder_layers :] == decoder
    assert {knob.lower() for knob in module.PRESETS[preset]} <= {*vars(gpt.hp)}
    with pytest.raises(module.InputError, match="LOOP_FIRST=11 must be below NUM_LAYERS"):
        module.Hyperparameters.from_env({"PRESET": preset, "LOOP_FIRST": "11"})


@pytest.mark.parametrize("first", [1, 2])
def test_a_record_names_the_missing_recipes(tmp_path, first, monkeypatch):
    missing = ALL_RECORDS[first::2]
    names = [name for name in ALL_RECORDS if name not in missing]
    module = load(patch_script(tmp_path, names), monkeypatch)
    records = {"record": RECORD, "record1493": RECORD_1493, "record1855": RECORD_1855}
    for preset, recipes in records.items():
        with pytest.raises(module.InputError) as error:
            module.Hyperparameters.from_env({"PRESET": preset})
        needed = [name for name in recipes if name in missing]
        assert re.findall(r"(\w+)\.patch", str(error.value)) == needed


def test_the_record_trains(tmp_path, knobs, monkeypatch):
    module = load(patch_script(tmp_path, RECORD), monkeypatch)
    monkeypatch.setattr(module, "INT8_KEEP_FLOAT_MAX_NUMEL", 1000)
    log = "\n".join(finished(run_here(tmp_path, knobs_of(knobs, RECORD), module)))
    assert "step:6/6 train_loss:" in log and "gptq_time:" in log and "WARNING" not in log


def entropy(values: torch.Tensor) -> float:
    """Bytes of these values if each is coded by its frequency alone."""
    shares = values.unique(return_counts=True)[1] / values.numel()
    return values.numel() / 8 * float((shares * -shares.log2()).sum())


@pytest.mark.parametrize("n", [1, 511, 512, 10_001, 10**6])
def test_rans_restores_values_and_refuses_damage(tmp_path, n, monkeypatch):
    module = load(patch_script(tmp_path, ["rans"]), monkeypatch)
    torch.manual_seed(n)
    uniform, normal = torch.randint(-128, 128, (n,)), (3 * torch.randn(n)).round()
    tensors = [uniform, normal, torch.rand(n) < 1e-4, torch.full((n, 1), -7)]
    values = {str(i): tensor.to(torch.int8) for i, tensor in enumerate(tensors)}
    encoded = module.encode_values({"quantized": values})
    _, lanes, stream, *_ = encoded["rans"]
    wanted = sum(entropy(part) for part in values.values())
    assert stream.nbytes + lanes.nbytes <= 1.001 * wanted + 8 * module.RANS_LANES
    decoded = module.deserialize(module.compress(module.serialize(encoded)), "")["quantized"]
    assert all(torch.equal(decoded[name], values[name]) for name in values)
    tables, lanes, stream, _, _, levels, _ = encoded["rans"]
    for part in (tables, lanes, stream, levels) if n == 10_001 else ():
        index = part.argmax()
        part.flatten()[index] ^= 1
        with pytest.raises(module.InputError, match="a file is damaged"):
            module.deserialize(module.compress(module.serialize(encoded)), "a file")
        part.flatten()[index] ^= 1


@pytest.mark.parametrize("alike", ["columns", "rows"])
def test_rans_takes_less_than_the_entropy_of_matrices(tmp_path, alike, monkeypatch):
    """If columns differ in spread, or if rows resemble earlier rows."""
    module = load(patch_script(tmp_path, ["rans"]), monkeypatch)
    torch.manual_seed(0)
    values = 3 * torch.randn(700, 600)  # wider than RANS_LANES
    if alike == "columns":
        values *= torch.linspace(0.2, 1.8, 600)
    else:
        values[350:] = values[:350].flip(0) + torch.randn(350, 600)
    values = values.round().to(torch.int8)
    encoded = module.encode_values({"quantized": {"0": values}})
    assert sum(part.nbytes for part in encoded["rans"][1:-1]) < 0.98 * entropy(values)
    assert torch.equal(module.decode_values(encoded)["quantized"]["0"], values)


def test_gptq_lowers_the_error_of_the_outputs(tmp_path, monkeypatch):
    module = load(patch_script(tmp_path, ["gptq"]), monkeypatch)
    torch.manual_seed(0)
    weight, x = torch.randn(50, 200), torch.randn(1000, 200) @ torch.randn(200, 200)
    scale = weight.abs().amax(dim=1) / 7
    plain = (weight / scale[:, None]).round()
    diagonal = torch.arange(200.0).diag()  # the first input is always 0
    assert torch.equal(module.gptq_values(weight, scale, 7, diagonal), plain.to(torch.int8))
    gptq = module.gptq_values(weight, scale, 7, x.T @ x)
    errors = [((values * scale[:, None] - weight) @ x.T).norm() for values in (plain, gptq)]
    assert errors[1] < 0.8 * errors[0] and gptq.abs().max() <= 7


def test_gptq_rounds_q_k_and_v_in_one_call(tmp_path, monkeypatch):
    """With the values that a call for each of them gives."""
    module = load(patch_script(tmp_path, ["gptq"]), monkeypatch)
    torch.manual_seed(0)
    x = torch.randn(500, 64) @ torch.randn(64, 64)
    names = [f"blocks.0.attn.{part}.weight" for part in ("c_q", "c_k", "c_v", "proj")]
    sizes = (64, 32, 32, 64)
    weights = {name: torch.randn(n, 64) for name, n in zip(names, sizes, strict=True)}
    scales = {name: weight.abs().amax(dim=1) / 127 for name, weight in weights.items()}
    hessians = {names[0]: x.T @ x, names[3]: torch.eye(64)}
    wanted = {
        name: module.gptq_values(weights[name], scales[name], 127, hessians[key].clone())
        for name, key in zip(names, [names[0]] * 3 + [names[3]], strict=True)
    }
    shapes = []

    def gptq_values(weight, *args, gptq_values=module.gptq_values):
        shapes.append(tuple(weight.shape))
        return gptq_values(weight, *args)

    monkeypatch.setattr(module, "gptq_values", gptq_values)
    monkeypatch.setattr(module, "gather_hessians", lambda *args: hessians)
    obj = {"quantized": dict.fromkeys(names), "scales": scales}
    runtime = module.Runtime(0, 1, torch.device("cpu"), torch.float32, False, log=Lines())
    gpt = SimpleNamespace(hp=module.Hyperparameters())
    module.round_by_gptq(gpt, weights, obj, runtime)
    assert shapes == [(128, 64), (64, 64)]
    assert all(torch.equal(obj["quantized"][name], wanted[name]) for name in names)
    assert "WARNING" not in runtime.log.text


def test_gptq_calibrates_alike_on_any_number_of_ranks(tmp_path, knobs, monkeypatch):
    module = load(patch_script(tmp_path, ["gptq"]), monkeypatch)
    monkeypatch.setattr(module, "INT8_KEEP_FLOAT_MAX_NUMEL", 500)  # all matrices are quantized
    files = []
    for world_size, num_slots in ((1, "0"), (1, "2"), (2, "2")):
        hp = module.Hyperparameters.from_env({**knobs, "GPTQ_BATCHES": num_slots})
        place = (0, world_size, torch.device("cpu"), torch.float32, False)
        state = module.new_state(hp, module.Runtime(*place, log=Lines()))
        files.append(module.export(state.gpt, hp, state.runtime)[0])
    assert files[1] == files[2]
    plain, gptq = (module.deserialize(file, "")["quantized"] for file in files[:2])
    same = {name.split(".", 2)[-1] for name in gptq if torch.equal(gptq[name], plain[name])}
    assert same == {"attn.proj.weight", "mlp.proj.weight"}  # they are 0 at first
    torch.nn.init.constant_(state.gpt.tok_emb.weight, torch.inf)
    assert module.export(state.gpt, hp, state.runtime)
    assert "WARNING: GPTQ failed" in state.runtime.log.text


def test_muoneq_r_divides_the_rows_in_fp32(tmp_path, monkeypatch):
    module = load(patch_script(tmp_path, ["muoneq_r"]), monkeypatch)
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.zeros(8, 64))
    param.grad = torch.randn(8, 64) * torch.logspace(-3, 3, 8)[:, None]
    muon = module.Muon([param], lr=1.0, momentum=0.9, backend_steps=5)
    inputs = []
    muon.newton_schulz = lambda stack, steps: inputs.append(stack) or stack
    muon.step()
    rows = param.grad / param.grad.norm(dim=1, keepdim=True)
    assert inputs[0].dtype == torch.bfloat16
    assert torch.equal(inputs[0][0], rows.bfloat16())
    late = param.grad.bfloat16()  # dividing after the cast rounds twice
    assert not torch.equal(inputs[0][0], late / late.norm(dim=1, keepdim=True))
    assert torch.equal(param.detach(), -rows.bfloat16().float())


def test_the_quantizers_knobs_reach_the_artifact(tmp_path, monkeypatch):
    module = load(patch_script(tmp_path, ["int6", "sd_clip"]), monkeypatch)
    monkeypatch.setattr(module, "INT8_KEEP_FLOAT_MAX_NUMEL", 1000)
    small = {"MODEL_DIM": "32", "NUM_LAYERS": "1", "NUM_HEADS": "2", "NUM_KV_HEADS": "1"}
    knobs = {"EMBED_LEVELS": "63", "MATRIX_LEVELS": "7", "SD_CLIP_EMBEDDING": "3"}
    knobs |= {"SD_CLIP_ATTENTION": "2", "SD_CLIP_MLP": "1.5"}
    runtime = module.Runtime(0, 1, torch.device("cpu"), torch.float32, False, log=Lines())

    def measure(environ: dict[str, str]) -> tuple[list[int], list[float]]:
        """Largest value, and quantization step in standard deviations, of three matrices."""
        torch.manual_seed(0)
        hp = module.Hyperparameters.from_env(small | environ)
        gpt = module.GPT(hp, torch.float32)
        for param in gpt.parameters():
            torch.nn.init.normal_(param)
        obj = module.deserialize(module.export(gpt, hp, runtime)[0], "")
        names = ("tok_emb.weight", "blocks.0.attn.c_q.weight", "blocks.0.mlp.fc.weight")
        deviations = (gpt.state_dict()[name].std(dim=1, correction=0) for name in names)
        steps = [
            (obj["scales"][name] / deviation).mean().item()
            for name, deviation in zip(names, deviations, strict=True)
        ]
        return [int(obj["quantized"][name].abs().max()) for name in names], steps

    largest, steps = measure(knobs)
    assert largest == [63, 7, 7] and steps == pytest.approx([3 / 63, 2 / 7, 1.5 / 7], rel=1e-3)
    assert measure({})[1] == pytest.approx([20 / 127, 12.85 / 31, 12.85 / 31], rel=1e-3)
    for bad in ({"EMBED_LEVELS": "128"}, {"MATRIX_LEVELS": "0"}, {"SD_CLIP_MLP": "0"}):
        with pytest.raises(module.InputError, match=next(iter(bad))):
            module.Hyperparameters.from_env(bad)


@pytest.mark.parametrize("gates", [{}, {"ATTENTION_GATE_MAX": "1", "ATTENTION_GATE_SCALE": ".5"}])
def test_attention_gate_starts_at_half_its_maximum(tmp_path, gates, monkeypatch):
    module = load(patch_script(tmp_path, ["attention_gate"]), monkeypatch)
    hp = module.Hyperparameters.from_env({"MODEL_DIM": "64", "NUM_LAYERS": "1", **gates})
    attn, start = module.CausalSelfAttention(hp, 0), hp.attention_gate_max / 2
    attn.proj = torch.nn.Identity()
    x = torch.randn(2, 8, 64)
    x[..., 0] = 1
    cos, sin = module.rotary_tables(8, 8, 1e4)[:, :, None]
    before = attn(x, cos, sin)
    attn.gate.data[0, 0] = 2  # of the first head, by the first channel
    after = attn(x, cos, sin)
    factor = torch.full((64,), 1.0)
    factor[:8] = 2 * torch.sigmoid(torch.tensor(2 * hp.attention_gate_scale))
    assert torch.allclose(after, factor * before, atol=1e-5)
    plain = module.attend  # the output of attention, without a gate
    monkeypatch.setattr(module, "attend", lambda q, k, v: torch.ones_like(plain(q, k, v)))
    assert attn(x, cos, sin)[..., 8:].unique().item() == start


@pytest.mark.parametrize("name", ["smear_gate", "document_mask"])
def test_a_recipe_that_needs_bos_1_says_so(tmp_path, knobs, name, monkeypatch):
    module = load(patch_script(tmp_path, [name]), monkeypatch)
    tokenizer = tmp_path / "other.model"
    tokenizer.write_bytes(train_tokenizer(bos_id=2, eos_id=1))
    hp = module.Hyperparameters.from_env({**knobs, "TOKENIZER_PATH": str(tokenizer)})
    with pytest.raises(module.InputError, match=f"BOS is not 1.*{name}"):
        module.Validation(hp)


def test_the_gated_smear_starts_without_effect(tmp_path, monkeypatch):
    """And adds to the embedding before its norm."""
    module = load(patch_script(tmp_path, ["smear_gate"]), monkeypatch)
    knobs = {"MODEL_DIM": "64", "NUM_LAYERS": "1", "SMEAR_CHANNELS": "12"}
    gpt = module.GPT(module.Hyperparameters.from_env(knobs), torch.float32)
    gpt.blocks = torch.nn.ModuleList()
    gpt.tok_emb.weight.data.normal_()
    normed = []
    monkeypatch.setattr(module, "rms_norm", lambda x: normed.append(x[0]) or x)
    ids = torch.tensor([[1, 5, 6, 1, 7]])
    x = gpt.tok_emb(ids)[0]
    gpt.logits(ids)
    assert torch.equal(normed[0], x)
    weights = torch.randn(13)
    gpt.smear_gate.data = weights
    gpt.logits(ids)
    wanted = x.clone()
    for t in (1, 2, 4):  # not into a BOS
        wanted[t] += weights[12] * torch.sigmoid(weights[:12] @ x[t, :12]) * x[t - 1]
    assert torch.allclose(normed[2], wanted, atol=1e-5)
    assert torch.equal(normed[3], normed[2])  # the model's output: nothing is added after the norm


def test_two_lanes_read_and_add_as_documented(tmp_path, monkeypatch):
    module = load(patch_script(tmp_path, ["parallel_residuals"]), monkeypatch)
    knobs = {"MODEL_DIM": "16", "NUM_HEADS": "2", "NUM_KV_HEADS": "1", "TWO_LANES": "1"}
    knobs |= {"NUM_LAYERS": "3", "PARALLEL_LAYERS": "1"}
    torch.manual_seed(0)
    gpt = module.GPT(module.Hyperparameters.from_env(knobs), torch.float32)
    for param in gpt.parameters():
        torch.nn.init.normal_(param)
    assert [hasattr(block, "lane_scales") for block in gpt.blocks] == [False, False, True]
    block, lanes, x0 = gpt.blocks[2], torch.randn(2, 1, 8, 16), torch.randn(1, 8, 16)
    cos, sin = gpt.rotary[:, :8, None]
    mixed = block.resid_mix[0] * lanes[0] + block.resid_mix[1] * x0
    attn = block.attn_scale * block.attn(module.rms_norm(mixed), cos, sin)
    mlp = block.mlp_scale * block.mlp(module.rms_norm(lanes[1]))
    wanted = [
        k * lane + a * attn + m * mlp
        for lane, (k, a, m) in zip(lanes, block.lane_scales.T, strict=True)
    ]
    assert torch.allclose(block(lanes, x0, cos, sin), torch.stack(wanted), atol=1e-4)
    single = block(lanes[0], x0, cos, sin)
    assert torch.allclose(single, block(lanes[[0, 0]], x0, cos, sin), atol=1e-4)
    groups = module.parameter_groups(gpt, gpt.hp)
    assert any(param is block.lane_scales for param in groups["scalar"])
    outputs, inputs = [], []
    block.register_forward_hook(lambda *args: outputs.append(args[2]))
    monkeypatch.setattr(gpt, "output", lambda x: inputs.append(x) or x)
    gpt.logits(torch.randint(1024, (2, 8)))
    assert outputs[0].shape == (2, 2, 8, 16)
    assert torch.equal(inputs[0], module.rms_norm(outputs[0].mean(dim=0)).flatten(0, 1))


def test_only_the_lane_of_attention_gets_skips(tmp_path, monkeypatch):
    """From the layers before the lanes: lanes begin in the second half of the layers."""
    module = load(patch_script(tmp_path, ["skip_gates", "parallel_residuals"]), monkeypatch)
    knobs = {"MODEL_DIM": "16", "NUM_HEADS": "2", "NUM_KV_HEADS": "1", "TWO_LANES": "1"}
    gpt = module.GPT(module.Hyperparameters.from_env({**knobs, "NUM_LAYERS": "4"}), torch.float32)
    assert [hasattr(block, "lane_scales") for block in gpt.blocks] == [False, False, True, True]
    assert torch.equal(gpt.blocks[2].lane_scales[0], torch.tensor([1.1, 1.1]))
    seen = []  # inputs and outputs of the layers
    for param in gpt.parameters():
        torch.nn.init.normal_(param)
    for block in gpt.blocks:
        block.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    gpt.logits(torch.randint(1024, (2, 8)))
    skip, before, after = seen[0][1], seen[2][1], seen[3][0]
    gate = torch.sigmoid(gpt.skip_weights_gate[1])
    wanted = gate * before[0] + (1 - gate) * gpt.skip_weights[1] * skip
    assert torch.allclose(after[0], wanted, rtol=1e-4) and torch.equal(after[1], before[1])
