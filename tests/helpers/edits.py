"""Edits of train_gpt.py, by the page that shows or measures them. An edit replaces texts, each of
which the script has once: {old text: new text}."""

# Texts that several edits replace, or put lines above or below.
RELU_SQUARED = "        hidden = F.relu(self.fc(x)).square()\n"
ADD_SKIP = "        return x + self.skip_weights[row].to(x.dtype) * skip\n"
UPDATE = '            torch._foreach_add_(params, combined, alpha=-group["lr"])\n'


def edit_script(source: str, *edits: dict[str, str]) -> str:
    """Apply edits to the text of the script."""
    for edit in edits:
        for old, new in edit.items():
            if source.count(old) != 1:
                raise ValueError(f"{old!r} occurs {source.count(old)} times")
            source = source.replace(old, new)
    return source


# ---- README.md: First edits ----------------------------------------------------------------------
WARMDOWN = "return min((1 - progress(hp, step, elapsed_ms)) / hp.warmdown_frac, 1.0)\n"
KEYS = "        self.c_k = CastedLinear(D, kv_dim, bias=False)\n"
ROTATED_KEYS = "        k = apply_rotary(rms_norm(k), cos, sin)\n"
README = {
    "half_skips": {
        "skip_weights = torch.ones(self.num_encoder_layers, D)": (
            "skip_weights = torch.full((self.num_encoder_layers, D), 0.5)"
        )
    },
    "schedule": {WARMDOWN: WARMDOWN.replace("\n", " ** 2\n")},
    "key_gain": {
        KEYS: f"{KEYS}        self.k_gain = nn.Parameter(torch.ones(D // hp.num_heads))\n",
        ROTATED_KEYS: f"{ROTATED_KEYS}        k = k * self.k_gain.to(x.dtype)\n",
    },
}

# ---- README.md: The model, part by part ----------------------------------------------------------
PARTS = {  # edits that leave out a part
    "U-Net skips": {
        "requires_grad=self.num_encoder_layers > 0": "requires_grad=False",
        ADD_SKIP: "        return x\n",
    },
    "mix with x0": {" + resid_mix[1] * x0": ""},
    "zero projections": {
        "block.attn.proj.weight.zero_()": "pass",
        "block.mlp.proj.weight.zero_()": "pass",
    },
    "norm of q and k": {"rms_norm(q)": "q", "rms_norm(k)": "k"},
    "square of ReLU": {"F.relu(self.fc(x)).square()": "F.relu(self.fc(x))"},
    "softcap": {
        "(self.hp.logit_softcap * torch.tanh(logits / self.hp.logit_softcap)).float()": (
            "logits.float()"
        )
    },
    "rotation": {
        "apply_rotary(rms_norm(q), cos, sin)": "rms_norm(q)",
        "apply_rotary(rms_norm(k), cos, sin)": "rms_norm(k)",
    },
    "attn_scale and mlp_scale": {
        "        self.attn_scale = nn.Parameter(torch.ones(hp.model_dim))\n": "",
        "        self.mlp_scale = nn.Parameter(torch.ones(hp.model_dim))\n": "",
        "self.attn_scale.to(x.dtype) * ": "",
        "self.mlp_scale.to(x.dtype) * ": "",
    },
}
# ---- records/README.md: Five to copy into train_gpt.py -------------------------------------------
BLOCKS = "        self.blocks = nn.ModuleList("
ATTEND = "        y = attend(q, k, v)\n"
FACTOR = '            group["lr"] = factor * group["base_lr"]\n'
RECORDS = {
    "leaky_relu": {RELU_SQUARED: "        hidden = F.leaky_relu(self.fc(x), 0.5).square()\n"},
    "skip_gates": {
        BLOCKS: (
            "        gates = torch.zeros_like(skip_weights)  # logits: they start half open\n"
            "        self.skip_weights_gate = "
            f"nn.Parameter(gates, self.skip_weights.requires_grad)\n{BLOCKS}"
        ),
        ADD_SKIP: (
            "        gate = torch.sigmoid(self.skip_weights_gate[row]).to(x.dtype)\n"
            "        return gate * x + (1 - gate) * self.skip_weights[row].to(x.dtype) * skip\n"
        ),
    },
    "xsa": {
        ATTEND: (
            f"{ATTEND}        groups = y.unflatten(2, (self.num_kv_heads, -1))  # by KV head\n"
            "        direction = F.normalize(v, dim=-1).unsqueeze(3)\n"
            "        along = (groups * direction).sum(dim=-1, keepdim=True)\n"
            "        y = (groups - along * direction).flatten(2, 3)\n"
        ),
    },
    "muon_weight_decay": {
        UPDATE: f'            torch._foreach_mul_(params, 1 - 0.095 * group["lr"])\n{UPDATE}',
    },
    "min_lr": {FACTOR: FACTOR.replace("factor", "max(factor, 0.1)")},
}
RECORD_KNOBS = {  # of train_record.py, which do the same
    "RELU_SLOPE": "0.5", "SKIP_GATES": "1", "XSA_LAYERS": "99", "MUON_WEIGHT_DECAY": "0.095",
    "MIN_LR": "0.1",
}  # fmt: skip

# ---- EXERCISES.md, by the number of the exercise -------------------------------------------------
FLAG = "            state.model.require_backward_grad_sync = micro_step == grad_accum_steps - 1\n"
LOSS = "        loss = state.model(*batch) * (1 / grad_accum_steps)\n"
LOOP = "    for micro_step in range(grad_accum_steps):\n"
EXERCISES = {
    "2": {LOSS: "        loss = state.model(*batch)\n"},
    "2b": {f"    state.gpt.zero_grad()\n{LOOP}": f"{LOOP}        state.gpt.zero_grad()\n"},
    "3": {FLAG: "            state.model.require_backward_grad_sync = True\n"},
    "3b": {FLAG: "            pass\n", LOSS: f"{LOSS}{FLAG[4:]}"},
    "4": {"is_causal=True": "is_causal=False"},
    "5": {RELU_SQUARED: "        hidden = F.relu(self.fc(x))\n"},
    "6": RECORDS["skip_gates"],
    "7": {
        "INT8_KEEP_FLOAT_MAX_NUMEL = 65_536": "INT8_KEEP_FLOAT_MAX_NUMEL = 4096",
        "INT8_LEVELS = 127": "INT8_LEVELS = 31",
        "INT8_SCALE_FLOOR = 1 / 127": "INT8_SCALE_FLOOR = 0.0001",
    },
}

# ---- On no page ----------------------------------------------------------------------------------
BEFORE_INIT = "        self.init_weights()\n\n"
NORM = "        x = x0 = rms_norm(x)\n"
LAST_NORM = "        logits = self.output(rms_norm(x).flatten(0, 1))\n"
GROUPS = 'OPTIMIZER_GROUPS = {"tok_emb.": "embed", "lm_head.": "head", "skip_weights": "scalar"}\n'
OTHERS = {
    "untied": {"tie_embeddings: bool = True": "tie_embeddings: bool = False"},
    "bigram": {
        BEFORE_INIT: f"        self.bigram = nn.Parameter(torch.zeros(512, D))\n{BEFORE_INIT}",
        NORM: (
            "        previous = F.pad(input_ids[:, :-1], (1, 0))\n"
            "        pairs = F.embedding((31 * previous + input_ids) % 512, self.bigram)\n"
            f"        x = x + pairs.to(x.dtype)\n{NORM}"
        ),
        GROUPS: f'{GROUPS}OPTIMIZER_GROUPS |= {{"bigram": "embed"}}\n',
    },
    "codec": {
        "zlib.compress(data, 9)": "lzma.compress(data)",
        "zlib.decompress(data)": "lzma.decompress(data)",
        "import zlib\n": "import lzma\n",
    },
    "dropout": {LAST_NORM: f"        x = F.dropout(x, 0.1, self.training)\n{LAST_NORM}"},
    "ten_layers": {"num_layers: int = 9": "num_layers: int = 10"},
}
