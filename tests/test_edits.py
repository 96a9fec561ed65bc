"""What people change first, changed. An edit is a subclass or a function that takes another's
place, as in a copy of the script. Each must act, or be named."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import ALONE, ROOT, finished, make_state, run_here, run_ranks
from edited_script import BiasedAttention, odd_optimizers, resume
from torch import Tensor, nn

import train_gpt
from train_gpt import GPT, CastedLinear, CausalSelfAttention, Hyperparameters, train_step


@pytest.fixture
def hp(knobs, tmp_path) -> Hyperparameters:
    return Hyperparameters.from_env({**knobs, "OUTPUT_DIR": str(tmp_path)})


def shaken_loss(gpt: GPT) -> Tensor:
    """The loss of some tokens with nothing left at zero, so that every parameter matters."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, param in gpt.named_parameters():
            if "bias" not in name and "up" not in name:
                param.add_(0.1 * torch.randn_like(param))
    tokens = torch.randint(gpt.hp.vocab_size, (2, gpt.hp.train_seq_len + 1))
    return gpt(tokens[:, :-1], tokens[:, 1:])


# ---- Model ---------------------------------------------------------------------------------------
def test_attention_knows_its_layer(hp, monkeypatch):
    layers = []

    class Attention(CausalSelfAttention):
        def __init__(self, hp: Hyperparameters, layer: int) -> None:
            super().__init__(hp, layer)
            layers.append(layer)

    monkeypatch.setattr(train_gpt, "CausalSelfAttention", Attention)
    GPT(hp)
    assert layers == list(range(hp.num_layers))


@pytest.mark.baseline
def test_a_bias_of_c_q_acts(hp, monkeypatch):
    """It starts at zero, so that the first loss is that of a model without it."""
    plain = make_state(hp).gpt
    monkeypatch.setattr(train_gpt, "CausalSelfAttention", BiasedAttention)
    gpt = make_state(hp).gpt
    loss = shaken_loss(gpt)
    assert loss == shaken_loss(plain)
    loss.backward()
    assert all(block.attn.c_q.bias.grad.any() for block in gpt.blocks)


@pytest.mark.baseline
def test_fake_quantization_in_one_place_acts_on_every_linear_layer(hp, monkeypatch):
    layers = []

    def forward(self: CastedLinear, x: Tensor) -> Tensor:
        layers.append(self)
        step = self.weight.abs().amax() / 7
        rounding = step * (self.weight / step).round() - self.weight
        return F.linear(x, self.weight + rounding.detach())

    loss = shaken_loss(make_state(hp).gpt)
    monkeypatch.setattr(CastedLinear, "forward", forward)
    gpt = make_state(dataclasses.replace(hp, tie_embeddings=False)).gpt
    shaken_loss(gpt).backward()
    assert layers == [m for m in gpt.modules() if isinstance(m, nn.Linear)]
    assert len(layers) == 6 * hp.num_layers + 1 and all(m.weight.grad.any() for m in layers)
    assert abs(shaken_loss(make_state(hp).gpt) - loss) > 1e-3


def test_zeros_are_for_the_models_own_projections(hp):
    """Not for whatever is called proj."""

    class BigramGPT(GPT):
        def init_weights(self) -> None:
            self.bigram = nn.ModuleDict({"proj": CastedLinear(8, 8)})
            super().init_weights()

    gpt = BigramGPT(hp, torch.float32)
    assert gpt.bigram["proj"].weight.all()
    assert not any(b.attn.proj.weight.any() or b.mlp.proj.weight.any() for b in gpt.blocks)


class Lora(nn.Module):
    """A frozen linear layer and what is learned beside it, of rank 2 (Hu et al., 2021)."""

    def __init__(self, base: CastedLinear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype))


class LoraAttention(CausalSelfAttention):
    def __init__(self, hp: Hyperparameters, layer: int) -> None:
        super().__init__(hp, layer)
        self.c_q = Lora(self.c_q)


def test_lora_on_c_q_trains(hp, monkeypatch):
    monkeypatch.setattr(train_gpt, "CausalSelfAttention", LoraAttention)
    state = make_state(hp)
    before = {name: param.clone() for name, param in state.gpt.named_parameters()}
    for _ in range(3):
        train_step(state)
    for name, param in state.gpt.named_parameters():
        assert torch.equal(param, before[name]) == name.endswith("c_q.base.weight"), name
    state.load_state_dict(state.state_dict())  # what is frozen has no state
    # The half that starts at zero moves what is behind it in the third step only.
    assert warnings(dataclasses.replace(hp, warmup_steps=3)) == ""


class ZLossGPT(GPT):
    """Keeps the logits small in training; what is reported stays the cross-entropy."""

    def forward(self, input_ids: Tensor, target_ids: Tensor, reduction: str = "mean") -> Tensor:
        loss = super().forward(input_ids, target_ids, reduction)
        if self.training:
            loss = loss + 0.1 * self.logits(input_ids).logsumexp(dim=1).square().mean()
        return loss


def test_a_z_loss_counts_in_training_and_not_in_validation(hp, monkeypatch):
    hp = dataclasses.replace(hp, num_layers=1)
    plain = make_state(hp)
    monkeypatch.setattr(train_gpt, "GPT", ZLossGPT)
    state = make_state(hp)
    state.model = torch.compile(state.gpt, backend="eager", fullgraph=True, dynamic=False)
    tokens = torch.randint(hp.vocab_size, (5 * hp.train_seq_len + 1,)).to(torch.uint16)
    for stride in (hp.train_seq_len, 16):
        loss = train_gpt.evaluate(state, tokens, stride)
        assert loss == train_gpt.evaluate(plain, tokens, stride)
        assert all(module.training for module in state.gpt.modules())
    z_loss = 0.1 * torch.tensor(hp.vocab_size).log() ** 2  # at the start all logits are near zero
    expected = train_step(plain) + z_loss
    torch.testing.assert_close(train_step(state), expected, rtol=0.02, atol=0)


def test_a_switch_with_many_positions_does_not_end_a_compiled_run(hp):
    """Each is a graph of its own. Under fullgraph torch's limit of them would be fatal."""

    class Switched(nn.Module):
        position = 0

        def forward(self, x: Tensor) -> Tensor:
            return x + self.position

    with torch._dynamo.config.patch(recompile_limit=8):
        train_gpt.wrap(make_state(hp).gpt, dataclasses.replace(ALONE, compiled=True))
        model = Switched()
        compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
        for model.position in range(20):
            assert compiled(torch.zeros(1)) == model.position


# ---- Parameters that do not train ----------------------------------------------------------------
class Bigram(nn.Module):
    """Adds to the embedding of a token what follows from the one before it."""

    table_std = 1.0

    def __init__(self, hp: Hyperparameters) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 8)
        self.proj = CastedLinear(8, hp.model_dim, bias=False)
        nn.init.normal_(self.table.weight, std=self.table_std)
        nn.init.zeros_(self.proj.weight)

    def forward(self, embedding: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        previous = F.pad(args[0], (1, 0))[:, :-1] % 64
        return output + self.proj(self.table(previous)).to(output.dtype)


class BigramGPT(GPT):
    def init_weights(self) -> None:
        self.bigram = Bigram(self.hp)
        self.tok_emb.register_forward_hook(self.bigram)
        super().init_weights()


def warnings(hp: Hyperparameters) -> str:
    """What warming up says."""
    lines = []
    train_gpt.warm_up(make_state(hp, dataclasses.replace(ALONE, log=lines.append)))
    return " ".join(line for line in lines if "WARNING" in line)


def test_what_does_not_move_in_three_warm_up_steps_is_named(hp, monkeypatch):
    monkeypatch.setattr(train_gpt, "GPT", BigramGPT)
    monkeypatch.setitem(train_gpt.OPTIMIZER_GROUPS, "bigram.", "scalar")
    hp = dataclasses.replace(hp, warmup_steps=3)
    assert warnings(hp) == ""  # the table moves once the projection is no longer zero
    monkeypatch.setattr(Bigram, "table_std", 0.0)
    words = warnings(hp).split()
    assert [word for word in words if word.endswith("weight")] == [
        "bigram.table.weight",
        "bigram.proj.weight",
    ]
    assert warnings(dataclasses.replace(hp, scalar_lr=0.0, num_layers=1)) == ""  # not meant to move
    assert warnings(dataclasses.replace(hp, warmup_steps=2)) == ""  # too early to say


class DeadMLP(train_gpt.MLP):
    """Has a parameter that no loss depends on."""

    def __init__(self, hp: Hyperparameters) -> None:
        super().__init__(hp)
        self.dead = nn.Parameter(torch.zeros(3))


def test_a_parameter_without_a_gradient_is_named(hp, monkeypatch):
    monkeypatch.setattr(train_gpt, "MLP", DeadMLP)
    with pytest.raises(train_gpt.InputError, match="blocks.0.mlp.dead got no gradient"):
        train_step(make_state(hp))


# ---- Optimizers and schedules --------------------------------------------------------------------
def test_optimizers_with_odd_states_resume_to_the_same_bits(hp, knobs, tmp_path, monkeypatch):
    """Factored moments, an average of the weights, a number, nothing; fp32 beside bf16.
    On one process and on two ranks, whose losses are the same."""
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    environ = {**knobs, "DTYPE": "bf16", "OUTPUT_DIR": str(ranks), "PYTHONPATH": str(ROOT)}
    results = run_ranks(ranks, environ, 2, [ROOT / "tests" / "edited_script.py"])
    monkeypatch.setattr(train_gpt, "CausalSelfAttention", BiasedAttention)
    monkeypatch.setattr(train_gpt, "build_optimizers", odd_optimizers)
    alone = resume(hp, dataclasses.replace(ALONE, dtype=torch.bfloat16))
    for result in results:
        assert result.returncode == 0, result.stderr
        losses = result.stdout.splitlines()[-1].split()[1:]
        assert [float(loss) for loss in losses] == pytest.approx(alone, abs=0.02)


@pytest.mark.parametrize("warmdown, told", [(3500, True), (2, False)])
def test_a_warmdown_longer_than_the_run_is_told_without_a_cap(hp, warmdown, told):
    lines = []
    hp = dataclasses.replace(hp, iterations=3, warmdown_iters=warmdown, val_loss_every=0)
    state = make_state(hp, dataclasses.replace(ALONE, log=lines.append))
    assert train_gpt.train(state, validation=None) == 0
    assert any(f"WARNING: warmdown: WARMDOWN_ITERS={warmdown} " in line for line in lines) == told


# ---- Export --------------------------------------------------------------------------------------
def test_a_weights_number_of_levels_follows_from_its_name(monkeypatch):
    """int6 for some matrices."""
    levels = {"blocks.0.mlp.fc.weight": 31, "tok_emb.weight": 127}
    monkeypatch.setattr(train_gpt, "quantization_levels", lambda name, weight: levels[name])
    weights = {name: torch.randn(300, 300) for name in levels}
    obj, _ = train_gpt.quantize_state_dict_int8(weights)
    for name, largest in levels.items():
        assert (obj["quantized"][name].abs().amax(dim=1) == largest).all()


def test_export_and_score_get_the_state(tmp_path, knobs, monkeypatch):
    """GPTQ needs the loader, test-time training the bare model."""
    states = []

    def keep(function, state, *args):
        states.append(state)
        return function(state, *args)

    for name in ("export", "score"):
        monkeypatch.setattr(train_gpt, name, partial(keep, getattr(train_gpt, name)))
    finished(run_here(tmp_path, knobs))
    again = {**knobs, "EVAL_ONLY": "final_model.int8.ptz", "RUN_ID": "again"}
    finished(run_here(tmp_path, again))
    export, score, alone = states
    assert export is score and export.loader is not None and len(export.optimizers) == 2
    assert alone.loader is None and alone.optimizers == []
