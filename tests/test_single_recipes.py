"""Single recipes: what each promises beyond training. (All recipes alike: test_recipes.py.)"""

import contextlib
import functools
import itertools
import re
from dataclasses import replace
from typing import Any, get_type_hints

import pytest
import recipe
import torch
from recipe import PATCHES, RECORDS
from runs import ALONE, Lines, finished, run_here, run_ranks
from scripts import NAMES, knobs_of, load, patch_script, random_model, randomize
from texts import train_tokenizer, write_shard
from torch import Tensor, nn
from torch._dynamo.utils import counters
from trained import load_script

import train_gpt
from train_gpt import apply_rotary, attend, rms_norm, rotary_tables

pytestmark = pytest.mark.baseline


def test_weight_decay_shrinks_each_group_by_its_own_rate(tmp_path, monkeypatch):
    module = load(patch_script(tmp_path, ["adam_weight_decay", "muon_weight_decay"]), monkeypatch)
    rates = {"EMBED_WEIGHT_DECAY": "0.2", "MUON_WEIGHT_DECAY": "0.1", "ADAM_WEIGHT_DECAY": "0.5"}
    knobs = {"TIED_EMBED_LR": "0.3", "MATRIX_LR": "0.4", "SCALAR_LR": "0.5", "MODEL_DIM": "32"}
    gpt = random_model(module, {**rates, **knobs})
    before = {param: param.detach().clone() for param in gpt.parameters()}
    for param in before:
        param.grad = torch.zeros_like(param)
    for optimizer in module.build_optimizers(gpt):
        saved = optimizer.state_dict()
        saved["param_groups"][0]["weight_decay"] = 9.0  # a resumed run takes it from its knobs
        module.load_optimizer(optimizer, saved, cast=False)
        optimizer.step()
    factors = {"embed": 1 - 0.3 * 0.2, "matrix": 1 - 0.4 * 0.1, "scalar": 1 - 0.5 * 0.5}
    for name, params in module.parameter_groups(gpt, gpt.hp).items():
        for param in params:
            torch.testing.assert_close(param.detach(), factors[name] * before[param])


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
    with pytest.raises(module.InputError, match="no train shard has 99 tokens"):
        module.DistributedTokenLoader(f"{tmp_path}/*.bin", 0, 1, "cpu").next_batch(99, 99, 1)
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
        ("record2014", 35_945_623, [0, 1, 2, 3, 4, 5, 3, 4], [5, 3, 4, 5, 6, 7, 8, 9, 10]),
        ("record2135", 35_945_623, [0, 1, 2, 3, 4, 5, 3, 4], [5, 3, 4, 5, 6, 7, 8, 9, 10]),
    ],
)
def test_a_record_is_the_published_model(
    tmp_path, preset, num_params, encoder, decoder, monkeypatch
):
    """With its own recipes. record1855 has 48 parameters less than published, which do nothing."""
    module = load(patch_script(tmp_path, RECORDS[preset]), monkeypatch)
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
    every = list(dict.fromkeys(itertools.chain(*RECORDS.values())))
    missing = every[first::2]
    names = [name for name in every if name not in missing]
    module = load(patch_script(tmp_path, names), monkeypatch)
    for preset, recipes in RECORDS.items():
        with pytest.raises(module.InputError) as error:
            module.Hyperparameters.from_env({"PRESET": preset})
        needed = [name for name in recipes if name in missing]
        assert re.findall(r"(\w+)\.patch", str(error.value)) == needed


def test_the_record_trains(tmp_path, knobs, monkeypatch):
    names = RECORDS["record"]
    module = load(patch_script(tmp_path, names), monkeypatch)
    monkeypatch.setattr(module, "INT8_KEEP_FLOAT_MAX_NUMEL", 1000)
    log = "\n".join(finished(run_here(tmp_path, knobs_of(knobs, names), module)))
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
    scales, levels = scale[:, None].expand_as(weight), torch.full_like(weight, 7)
    assert torch.equal(module.gptq_values(weight, scales, levels, diagonal), plain.to(torch.int8))
    gptq = module.gptq_values(weight, scales, levels, x.T @ x)
    errors = [((values * scale[:, None] - weight) @ x.T).norm() for values in (plain, gptq)]
    assert errors[1] < 0.8 * errors[0] and gptq.abs().max() <= 7


def test_gptq_lowers_the_error_of_each_layer(tmp_path, knobs, monkeypatch):
    """On the inputs that it reads. Any number of ranks writes the same artifact."""
    module = load(patch_script(tmp_path, ["gptq", "int6"]), monkeypatch)
    monkeypatch.setattr(module, "INT8_KEEP_FLOAT_MAX_NUMEL", 500)  # all matrices are quantized
    levels = {"MATRIX_LEVELS": "7", "EMBED_LEVELS": "7"}
    shapes, files = [], []

    def gptq_values(weight, *args, gptq_values=module.gptq_values):
        shapes.append(tuple(weight.shape))
        return gptq_values(weight, *args)

    monkeypatch.setattr(module, "gptq_values", gptq_values)
    for world_size, num_slots in ((1, "0"), (1, "2"), (2, "2")):
        hp = module.Hyperparameters.from_env({**knobs, **levels, "GPTQ_BATCHES": num_slots})
        place = (0, world_size, torch.device("cpu"), torch.float32, False)
        runtime = module.Runtime(*place, log=Lines())
        gpt = randomize(module.GPT(hp, torch.float32))
        files.append(module.export(gpt, hp, runtime)[0])
    assert files[1] == files[2] and "WARNING" not in runtime.log.text
    # q, k and v read the same inputs, so one call rounds the rows of all three.
    assert shapes[:4] == [(hp.vocab_size, 32), (64, 32), (32, 32), (64, 32)]
    inputs = {"tok_emb.weight": []}
    monkeypatch.setattr(gpt, "output", lambda x: inputs["tok_emb.weight"].append(x) or x)
    for name, layer in gpt.named_modules():
        if isinstance(layer, module.CastedLinear):
            found = inputs[f"{name}.weight"] = []
            layer.register_forward_hook(lambda _, args, y, found=found: found.append(args[0]))
    loader = module.DistributedTokenLoader(hp.files("train"), 0, 1, "cpu")
    with torch.no_grad():
        for _ in range(2):
            gpt.logits(loader.next_batch(hp.train_batch_tokens, hp.train_seq_len, 8)[0])
    plain, gptq = (module.dequantize_state_dict_int8(module.deserialize(f, "")) for f in files[:2])
    for name, parts in inputs.items():
        x, weight = torch.cat([part.flatten(0, -2) for part in parts]), gpt.state_dict()[name]
        errors = [((values[name] - weight) @ x.T).norm() for values in (plain, gptq)]
        assert errors[1] < 0.9 * errors[0], name
    torch.nn.init.constant_(gpt.tok_emb.weight, torch.inf)
    assert module.export(gpt, hp, runtime)
    assert "WARNING: GPTQ failed" in runtime.log.text


def test_awq_rounds_the_most_salient_columns_finer(tmp_path, knobs, monkeypatch):
    """Of all matrices of the blocks: eight adjacent columns, found by brute force. Layer 1 runs
    twice, so it reads more inputs, which must not count."""
    module = load(patch_script(tmp_path, ["gptq", "int6", "depth_recurrence"]), monkeypatch)
    monkeypatch.setattr(module, "INT8_KEEP_FLOAT_MAX_NUMEL", 500)
    settings = {"GPTQ_BATCHES": "2", "LOOP_FIRST": "1", "LOOP_LAYERS": "1", "LOOP_TIMES": "3"}
    runtime = replace(ALONE, log=Lines())
    objs = []
    for columns in ("0", "8"):
        environ = {**knobs, **settings, "AWQ_COLUMNS": columns}
        gpt = random_model(module, environ)
        gpt.blocks[1].mlp.proj.weight.data *= 0.9  # else the most salient, by its inputs' number
        gpt.blocks[2].attn.c_v.weight.data[:, 16:24] *= 3
        objs.append(module.deserialize(module.export(gpt, gpt.hp, runtime)[0], ""))
    inputs = {}
    for name, layer in gpt.blocks.named_modules():
        if isinstance(layer, module.CastedLinear):
            found = inputs[f"blocks.{name}.weight"] = []
            layer.register_forward_hook(lambda _, args, y, found=found: found.append(args[0]))
    loader = module.DistributedTokenLoader(gpt.hp.files("train"), 0, 1, "cpu")
    with torch.no_grad():
        for _ in range(2):
            gpt.logits(loader.next_batch(512, 32, 8)[0])
    saliency = {}
    for name, parts in inputs.items():
        x, weight = torch.cat(parts).flatten(0, -2), gpt.state_dict()[name]
        for start in range(0, weight.size(1), 8):
            columns = range(start, start + 8)
            sizes = [x[:, c].square().mean() ** 0.5 * weight[:, c].abs().mean() for c in columns]
            saliency[name, start] = sum(sizes)
    name, start = max(saliency, key=saliency.get)
    assert objs[1]["awq"] == [(name, start, start + 8, 4)] and "awq" not in objs[0]
    plain, finer = map(module.dequantize_state_dict_int8, objs)
    values = objs[1]["quantized"][name].abs()
    part = values[:, start : start + 8].amax()
    values[:, start : start + 8] = 0
    assert values.amax() <= 31 < part <= 124
    x, weight = torch.cat(inputs[name]).flatten(0, -2), gpt.state_dict()[name]
    errors = [((found[name] - weight) @ x.T).norm() for found in (plain, finer)]
    assert errors[1] < 0.95 * errors[0]
    assert all(torch.equal(plain[other], finer[other]) for other in plain if name[:13] not in other)


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
    torch.manual_seed(0)
    names = ("tok_emb.weight", "blocks.0.attn.c_q.weight", "blocks.0.mlp.fc.weight")
    weights = {name: 0.01 * torch.randn(40, 60) for name in names}

    def measure(environ: dict[str, str]) -> tuple[list[int], list[float]]:
        """Largest value, and quantization step in standard deviations, of three matrices."""
        hp = module.Hyperparameters.from_env(environ)
        obj, _ = module.quantize_state_dict_int8(weights, hp)
        steps = [obj["scales"][name] / weights[name].std(dim=1, correction=0) for name in names]
        largest = [int(obj["quantized"][name].abs().max()) for name in names]
        return largest, [step.mean().item() for step in steps]

    knobs = {"EMBED_LEVELS": "63", "MATRIX_LEVELS": "7", "SD_CLIP_EMBEDDING": "3"}
    knobs |= {"SD_CLIP_ATTENTION": "2", "SD_CLIP_MLP": "1.5"}
    largest, steps = measure(knobs)
    assert largest == [63, 7, 7] and steps == pytest.approx([3 / 63, 2 / 7, 1.5 / 7], rel=1e-3)
    assert measure({})[1] == pytest.approx([20 / 127, 12.85 / 31, 12.85 / 31], rel=1e-3)
    for bad in ({"EMBED_LEVELS": "128"}, {"MATRIX_LEVELS": "0"}, {"SD_CLIP_MLP": "0"}):
        with pytest.raises(module.InputError, match=next(iter(bad))):
            module.Hyperparameters.from_env(bad)


@pytest.fixture(scope="module")
def defaults(tmp_path_factory) -> train_gpt.Hyperparameters:
    """Knobs of all recipes."""
    names = [name for name in NAMES if name != "value_residual"]  # has none, excludes others
    script = load_script(patch_script(tmp_path_factory.mktemp("every"), names))
    return script.Hyperparameters()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "record"])
def test_the_page_names_each_knob_and_its_default(defaults, name):
    """NAME=value is a default, unless "with" comes before it or an earlier one gave the default."""
    page = (recipe.RECIPES / "README.md").read_text(encoding="utf-8")
    section = re.search(rf"^### {name}\n(.*?)(?=^#|\Z)", page, re.M | re.S)
    text = " ".join(section[1].split())
    pair = r"\b([A-Z][A-Z\d_]+)=(\S*\w)"
    types = get_type_hints(type(defaults))
    stated: dict[str, Any] = {}
    for knob, value in re.findall(pair, re.sub(rf"\b[Ww]ith( {pair}\S*)+", "", text)):
        value = train_gpt.parse_knob(knob, types[knob.lower()], value)
        stated.setdefault(knob.lower(), value)
    assert stated == {knob: getattr(defaults, knob) for knob in stated}
    patch = PATCHES[name].read_text()
    new = {*types} - {*get_type_hints(train_gpt.Hyperparameters)}
    added = {knob.upper() for knob in new if f"\n+    {knob}: " in patch}
    assert added <= {*re.findall(r"\w+", text)}


@pytest.mark.parametrize("name", ["smear_gate", "document_mask"])
def test_a_recipe_that_needs_bos_1_says_so(tmp_path, knobs, name, monkeypatch):
    module = load(patch_script(tmp_path, [name]), monkeypatch)
    tokenizer = tmp_path / "other.model"
    tokenizer.write_bytes(train_tokenizer(bos_id=2, eos_id=1))
    hp = module.Hyperparameters.from_env({**knobs, "TOKENIZER_PATH": str(tokenizer)})
    with pytest.raises(module.InputError, match=f"BOS is not 1.*{name}"):
        module.Validation(hp)


def test_ema_counts_each_step_by_its_age(tmp_path, knobs, monkeypatch):
    module = load(patch_script(tmp_path, ["ema"]), monkeypatch)
    hp = module.Hyperparameters.from_env({**knobs, "EMA_DECAY": "0.5"})
    state = module.new_state(hp, ALONE)
    for state.step, value in enumerate((7.0, 3.0, 1.0), start=1):
        torch.nn.init.constant_(state.gpt.tok_emb.weight, value)
        state.update_ema()
    average = module.final_weights(state)["tok_emb.weight"]
    assert average.unique().tolist() == pytest.approx([(7 / 4 + 3 / 2 + 1) / (1 / 4 + 1 / 2 + 1)])


def test_loops_begin_during_the_run(tmp_path, knobs, monkeypatch):
    """The warm-up takes steps with them."""
    module = load(patch_script(tmp_path, ["depth_recurrence"]), monkeypatch)
    numbers = []  # of layers, after each step

    def train_step(state, train_step=module.train_step):
        loss = train_step(state)
        numbers.append(len(state.gpt.order))
        return loss

    monkeypatch.setattr(module, "train_step", train_step)
    settings = {"VAL_LOSS_EVERY": "0", "WARMUP_STEPS": "4", "LOOP_FROM": "0.5", "LOOP_TIMES": "2"}
    finished(run_here(tmp_path, {**knobs, **settings}, module))
    assert numbers == [3, 3, 7, 7, 3, 3, 3, 7, 7, 7]


@pytest.mark.recipes
def test_each_stage_of_a_run_is_compiled_in_the_warm_up(tmp_path, knobs, monkeypatch):
    names = ["document_mask", "depth_recurrence", "context_growth"]
    module = load(patch_script(tmp_path, names), monkeypatch)
    stages, graphs = [], []

    def train_step(state, train_step=module.train_step):
        stages.append((len(state.gpt.order), state.gpt.stage.train_seq_len))
        loss = train_step(state)
        graphs.append(counters["stats"]["unique_graphs"])
        return loss

    monkeypatch.setattr(module, "train_step", train_step)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    settings = {"COMPILE": "1", "VAL_LOSS_EVERY": "0", "WARMUP_STEPS": "20", "ITERATIONS": "20"}
    finished(run_here(tmp_path, {**knobs, **settings, "WHOLE_DOCUMENTS": "1"}, module))
    run = [stage for stage, _ in itertools.groupby(stages[20:])]
    assert run == [(3, 8), (3, 16), (5, 16), (5, 32)]
    assert run == [stage for stage, _ in itertools.groupby(stages[:20])]
    assert graphs[19:] == 21 * [graphs[19]]


@pytest.mark.parametrize("whole", ["0", "1"])
def test_the_context_grows_during_the_run(tmp_path, knobs, whole, monkeypatch):
    """Each step reads the same tokens: the first has the loss of a run with the first length.
    Validation and calibration see whole sequences."""
    names = ["document_mask", "context_growth", "gptq"]
    growing = load(patch_script(tmp_path / "growing", names), monkeypatch)
    constant = load(patch_script(tmp_path / "constant", names[:1]), monkeypatch)
    seen = {True: [], False: []}  # width of a row and longest document, by training

    def logits(gpt, input_ids, logits=growing.GPT.logits):
        seen[gpt.training].append((input_ids.size(1), gpt.hp.train_seq_len))
        return logits(gpt, input_ids)

    monkeypatch.setattr(growing.GPT, "logits", logits)
    settings = {**knobs, "WHOLE_DOCUMENTS": whole, "GPTQ_BATCHES": "1", "WARMUP_STEPS": "4"}
    settings |= {"CONTEXT_GROWTH": "0.25:0.3,0.5:0.6", "ITERATIONS": "5", "VAL_LOSS_EVERY": "1"}
    losses = [
        re.findall(r"step:1/.*train_loss:(\S+)", "\n".join(finished(run_here(tmp_path, *run))))
        for run in [(settings, growing), ({**settings, "TRAIN_SEQ_LEN": "8"}, constant)]
    ]
    assert losses[0] == losses[1]
    lengths = [8, 16, 32, 32, 8, 8, 16, 32, 32]  # the warm-up is at 0, 1/3, 2/3 and 1
    assert seen[True] == [(64 if whole == "1" else n, n) for n in lengths for _ in range(8)]
    assert {*seen[False]} == {(32, 32)}


def test_a_context_that_does_not_divide_a_slot_is_refused(tmp_path, knobs, monkeypatch):
    module = load(patch_script(tmp_path, ["context_growth"]), monkeypatch)
    for bad, words in {
        "0.3:0.5": "divide a slot of 64",
        "0:1": "divide",
        "0.5": "a finite number",
    }.items():
        with pytest.raises(module.InputError, match=f"CONTEXT_GROWTH=.*{words}"):
            module.Hyperparameters.from_env({**knobs, "CONTEXT_GROWTH": bad})


# ---- The model, by the formulas of the recipes ---------------------------------------------------
T = 16
SMALL = (
    f"NUM_LAYERS=6 MODEL_DIM=32 NUM_HEADS=4 NUM_KV_HEADS=2 TRAIN_SEQ_LEN={T} XSA_LAYERS=2 "
    "ROPE_FRACTION=0.5 LOOP_LAYERS=2 LOOP_FIRST=1 PARALLEL_LAYERS=4 BIGRAM_BUCKETS=50 BIGRAM_DIM=8 "
    "ATTENTION_GATE_MAX=1.5 ATTENTION_GATE_SCALE=0.5"
)
PUBLISHED = "SMEAR_CHANNELS=12 TWO_LANES=1"
STACK = (
    "attention_gate bigram_hash depth_recurrence leaky_relu parallel_residuals partial_rope "
    "skip_gates smear_gate xsa"
)


def plain_embedding(gpt: nn.Module, ids: list[int]) -> Tensor:
    """The first layer's input."""
    x = gpt.tok_emb.weight[ids]
    if hasattr(gpt, "bigram"):
        pairs = [((36313 * b) ^ (27191 * a)) % 49 for a, b in itertools.pairwise(ids)]
        x = x + gpt.bigram.scale * gpt.bigram.proj(gpt.bigram.table[[49, *pairs]])
    if not hasattr(gpt, "smear_gate"):
        return rms_norm(x)
    weights, has_inputs = gpt.smear_gate, gpt.hp.smear_channels > 0
    assert len(weights) == (13 if has_inputs else 32)
    x = x if has_inputs else rms_norm(x)
    rows = [*x]
    for t in [t for t in range(1, T) if ids[t] != 1]:  # nothing goes into a BOS
        if has_inputs:
            rows[t] = x[t] + weights[12] * torch.sigmoid(weights[:12] @ x[t, :12]) * x[t - 1]
        else:
            rows[t] = torch.lerp(x[t], x[t - 1], torch.sigmoid(weights))
    return rms_norm(torch.stack(rows)) if has_inputs else torch.stack(rows)


def plain_attention(gpt: nn.Module, names: str, layer: int, x: Tensor, first: list) -> Tensor:
    """first: the values of the first layer."""
    attn = gpt.blocks[layer].attn
    q, k, v = (c(x).view(T, -1, 8) for c in (attn.c_q, attn.c_k, attn.c_v))
    if "value_residual" in names and layer > 0:
        v = attn.value_resid_mix[0] * first[0] + attn.value_resid_mix[1] * v
    first.append(v)
    n = 4 if "partial_rope" in names else 8  # rotated channels
    cos, sin = rotary_tables(T, n, 10_000)[:, :, None]
    q, k = (
        torch.cat((apply_rotary(x[..., :n], cos, sin), x[..., n:]), dim=-1)
        for x in (rms_norm(q), rms_norm(k))
    )
    y = attend(*(x[None] for x in (q * attn.q_gain[:, None], k, v)))[0]
    if "xsa" in names and layer >= 4:
        v = v.repeat_interleave(2, dim=1)
        y = y - (y * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True) * v
    if "attention_gate" in names:
        y = 1.5 * torch.sigmoid(0.5 * x[:, :12] @ attn.gate.T)[..., None] * y
    return attn.proj(y.flatten(1))


def plain_logits(gpt: nn.Module, names: str, ids: list[int], order: list[int]) -> Tensor:
    x0 = plain_embedding(gpt, ids)
    lanes, skips, values = [x0, x0], [], []  # one stream is two equal lanes
    for i, layer in enumerate(order):
        block, num_skips = gpt.blocks[layer], len(order) // 2
        is_parallel = "parallel_residuals" in names and layer >= 2
        has_lanes = is_parallel and layer >= 3 and gpt.hp.two_lanes
        if i >= num_skips:
            row = len(gpt.skip_weights) - 2 * num_skips + i
            kept, added = lanes[0], gpt.skip_weights[row] * skips.pop()
            if "skip_gates" in names:
                gate = torch.sigmoid(gpt.skip_weights_gate[row])
                kept, added = gate * kept, (1 - gate) * added
            lanes = [kept + added, lanes[1] if has_lanes else kept + added]
        scale = (layer + 1) ** -0.5 if "partial_rope" in names else 1
        mixed = block.resid_mix[0] * lanes[0] + block.resid_mix[1] * x0
        y = plain_attention(gpt, names, layer, scale * rms_norm(mixed), values)
        y = block.attn_scale * y
        x = lanes[1] if has_lanes else mixed if is_parallel else mixed + y
        hidden = block.mlp.fc(scale * rms_norm(x))
        negative = 0.5 * hidden if "leaky_relu" in names else 0 * hidden
        z = block.mlp_scale * block.mlp.proj(torch.where(hidden > 0, hidden, negative) ** 2)
        if has_lanes:
            factors = zip(lanes, block.lane_scales.T, strict=True)
            lanes = [keep * lane + attn * y + mlp * z for lane, (keep, attn, mlp) in factors]
        else:
            lanes = [mixed + y + z] * 2
        skips += [lanes[0]] if i < num_skips else []
    logits = rms_norm((lanes[0] + lanes[1]) / 2) @ gpt.tok_emb.weight.T
    return 30 * torch.tanh(logits / 30)


@pytest.mark.parametrize(
    "names, knobs",
    [(STACK, PUBLISHED), (STACK, ""), ("value_residual xsa attention_gate smear_gate", "")],
)
def test_logits_are_those_of_a_plain_version(tmp_path, names, knobs, monkeypatch):
    module = load(patch_script(tmp_path, names.split()), monkeypatch)
    gpt = random_model(module, dict(knob.split("=") for knob in f"{SMALL} {knobs}".split()))
    ids = [1, *range(5, 12), 1, *range(10, 17)]
    orders = [[0, 1, 2, 1, 2, 3, 4, 5], [*range(6)]] if names == STACK else [[*range(6)]]
    for order in orders:
        expected = plain_logits(gpt, names, ids, order)
        torch.testing.assert_close(gpt.logits(torch.tensor([ids])), expected, rtol=0, atol=1e-3)
        if names == STACK:
            gpt.set_looping(False)


def test_loops_that_reach_the_lanes_are_refused(tmp_path, monkeypatch):
    module = load(patch_script(tmp_path, ["depth_recurrence", "parallel_residuals"]), monkeypatch)
    for layers, first, lanes, fits in [(4, 1, 1, True), (4, 1, 2, False), (6, 4, 1, False)]:
        knobs = {"NUM_LAYERS": layers, "LOOP_FIRST": first, "PARALLEL_LAYERS": lanes}
        environ = {name: str(value) for name, value in {**knobs, "TWO_LANES": 1}.items()}
        with contextlib.nullcontext() if fits else pytest.raises(module.InputError, match="LOOP_"):
            random_model(module, environ).logits(torch.tensor([[1, 2]]))


def test_positive_and_negative_logits_have_their_own_caps(tmp_path, monkeypatch):
    """Both are LOGIT_SOFTCAP at first. Adam trains their logarithms."""
    module = load(patch_script(tmp_path, ["asymmetric_cap"]), monkeypatch)
    plain, gpt = (
        random_model(script, {"NUM_LAYERS": "1", "MODEL_DIM": "32"})
        for script in (train_gpt, module)
    )
    ids = torch.tensor([[1, *range(5, 12)]])
    fresh = module.GPT(gpt.hp).log_caps
    assert fresh.exp().tolist() == pytest.approx([30, 30])
    assert any(
        fresh.shape == param.shape for param in module.parameter_groups(gpt, gpt.hp)["scalar"]
    )
    x = plain.logits(ids)
    raw = 30 * torch.atanh(x / 30)
    caps = {"log_caps": torch.tensor([40.0, 2.0]).log()}
    gpt.load_state_dict({**plain.state_dict(), **caps})
    expected = torch.where(x > 0, 40 * torch.tanh(raw / 40), 2 * torch.tanh(raw / 2))
    torch.testing.assert_close(gpt.logits(ids), expected, rtol=1e-3, atol=1e-3)


def test_new_parameters_begin_as_documented(tmp_path, monkeypatch):
    """Adam trains those that are not matrices, and they stay fp32."""
    module = load(patch_script(tmp_path, STACK.split()), monkeypatch)
    knobs = dict(knob.split("=") for knob in f"{SMALL} {PUBLISHED}".split())
    gpt = module.GPT(module.Hyperparameters.from_env(knobs))
    zeros = (gpt.smear_gate, gpt.skip_weights_gate, gpt.blocks[5].attn.gate)
    assert not any(param.any() for param in (*zeros, gpt.bigram.table))
    assert gpt.bigram.scale.item() == pytest.approx(0.05)
    assert module.Hyperparameters().attention_gate_max == 2  # a gate of 0 then has no effect
    assert gpt.blocks[5].lane_scales.tolist() == [[pytest.approx(1.1)] * 2, [1] * 2, [1] * 2]
    other = load(patch_script(tmp_path / "other", ["value_residual"]), monkeypatch)
    mix = other.CausalSelfAttention(other.Hyperparameters(), 1).value_resid_mix
    assert mix.tolist() == [0.5, 0.5]
    scalars = {id(param) for param in module.parameter_groups(gpt, gpt.hp)["scalar"]}
    for param in (*zeros, gpt.blocks[5].lane_scales, gpt.bigram.scale):
        assert id(param) in scalars and param.dtype == torch.float32
