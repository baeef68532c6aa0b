"""`config_ledger` on GQA models: every key of config.json is read and in effect as asked, or is known to change
nothing."""

from collections.abc import Iterator

from dsv4.errors import ConfigError
from dsv4.model.gqa.config import FIXED, GQAConfig
from dsv4.model.gqa.rope import frequencies
from dsv4.probes.catalogue.config_ledger import ConfigLedger
from dsv4.probes.joint import ranks_of
from dsv4.probes.oracle.gqa import Shape, config_at, rotary, shape_of, tensor_shapes
from dsv4.probes.result import Check, Status, compare
from dsv4.probes.scenes.config_keys import STATED, UNREAD, other_values, shown
from dsv4.probes.subject import Subject

NO_EFFECT = {  # keys that change nothing of what is computed, and why
    "architectures": "names the class, which model_type does too",
    "torch_dtype": "the tensors say it themselves",
    "dtype": "the tensors say it themselves",
    "transformers_version": "who wrote the file",
    "use_cache": "caches are always used",
    "attention_dropout": "training",
    "initializer_range": "training",
    "pretraining_tp": "training",
    "pad_token_id": "padding is never run",
    "_name_or_path": "where the file came from",
    "output_attentions": "of transformers' interface",
    "output_hidden_states": "of transformers' interface",
    "return_dict": "of transformers' interface",
}
# which change nothing where no layer has one
OF_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers")
NESTED = ("rope_scaling", "rope_parameters")
ROPE = {
    "rope_type": "kind",
    "type": "kind",
    "rope_theta": "theta",
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    # key → field of dsv4.model.gqa.rope.Rope
    "original_max_position_embeddings": "original",
    "attention_factor": "attention",
}
SPECIFIED = "transformers' config of this model_type says what it does: a model that never reads it is another model"
MODULES = "config.json, read anew by dsv4.probes.oracle.gqa"


class GQAConfigLedger(ConfigLedger):
    """Key by key; layer by layer; tensors of the file; what modules of our model took."""

    def run(self, subject: Subject) -> list[Check]:
        raw, config = config_at(subject.files.path), subject.config
        nested = lambda key, value: key in NESTED and isinstance(value, dict)
        keys = [(key, inner) for key, value in raw.items() for inner in (value if nested(key, value) else (None,))]
        return [
            *(check for key, inner in keys for check in _key(raw, key, inner, config)),
            *_values(subject, shape_of(raw)),
            *_layers(subject, shape_of(raw)),
            *_files(subject, raw),
            *(_modules(subject, shape_of(raw)) if "kernels" in subject.can else ()),
        ]


def _key(raw: dict, key: str, inner: str | None, config: GQAConfig) -> Iterator[Check]:
    name = key if inner is None else f"{key}.{inner}"
    about, requested = dict(where=name, part="config", samples=1), raw[key] if inner is None else raw[key][inner]
    if not _read(raw, key, inner):
        why = NO_EFFECT.get(key)
        if key in OF_WINDOWS and set(shape_of(raw).windows) == {None}:
            why = "no layer has a sliding window"
        known = key in OF_WINDOWS or key in NESTED or hasattr(config, key)
        yield Check(
            "key is read",
            Status.PASS if why else Status.FAIL if known else Status.WARN,
            measured="never read",
            relation="==",
            threshold="never read" if why else "read",
            source="on the list of keys without effect" if why else SPECIFIED if known else UNREAD,
            note=f"requested {requested!r:.60}; never read: {why or 'nothing says why'}",
            **about,
        )
        return
    found = effective(config, key, inner, requested)
    note = ""
    if key == "max_position_embeddings" and config.rope.kind == "yarn" and found != requested:
        note, requested = "YaRN: original context × factor", int(config.rope.original * config.rope.factor)
    yield compare(
        "effective value is the requested one", shown(found), "==", shown(requested), STATED, **about, note=note
    )


def _read(raw: dict, key: str, inner: str | None) -> bool:
    """Whether a change of this key changes anything: another GQAConfig, or a refusal."""
    if key in FIXED or key == "model_type":
        return True
    before, value = GQAConfig.from_dict(raw), raw[key] if inner is None else raw[key][inner]
    if key in before.never_read:
        return False
    for other in other_values(value):
        try:
            if GQAConfig.from_dict(raw | {key: other if inner is None else raw[key] | {inner: other}}) != before:
                return True
        except (ConfigError, TypeError, ValueError, KeyError):
            return True
    return False


def effective(config: GQAConfig, key: str, inner: str | None, requested):
    """What the config has for a key, in the form in which config.json states it."""
    match key:
        case "eos_token_id":
            return list(config.eos_token_id) if isinstance(requested, list) else (config.eos_token_id or (None,))[0]
        case "rope_theta":
            return config.rope.theta
        case "original_max_position_embeddings":
            return config.rope.original
        case "sliding_window":
            return next((w for w in config.windows if w is not None), None)
        case "use_sliding_window":
            # windows may be asked for and begin beyond the last layer
            return True if set(config.windows) != {None} else requested
        case "max_window_layers":
            return next((i for i, w in enumerate(config.windows) if w is not None), requested)
        case "layer_types":
            return ["full_attention" if w is None else "sliding_attention" for w in config.windows]
        case "attention_bias":
            return config.qkv_bias
        case _ if inner is not None:
            return getattr(config.rope, ROPE[inner]) if inner in ROPE else requested
    return FIXED[key] if key in FIXED else getattr(config, key, requested)


def _values(subject: Subject, shape: Shape) -> Iterator[Check]:
    """What the reader made of config.json, stated or not, against the oracle's own reading; whatever model runs."""
    c = subject.config
    pairs = {
        "num_attention_heads": (c.num_attention_heads, shape.heads),
        "num_key_value_heads": (c.num_key_value_heads, shape.kv_heads),
        "head_dim": (c.head_dim, shape.head_dim),
        "rms_norm_eps": (c.rms_norm_eps, shape.eps),
        "rope attention_factor": (round(c.rope.attention, 9), round(shape.factor, 9)),
    }
    for key, (found, wanted) in pairs.items():
        yield compare(
            "value read is the stated one, or its default",
            shown(found),
            "==",
            shown(wanted),
            MODULES,
            1,
            where=key,
            part="config",
        )
    found, wanted = frequencies(c.rope, c.head_dim).double(), shape.frequencies
    error = ((found - wanted).abs() / wanted).max().item() if found.shape == wanted.shape else float("inf")
    yield compare(
        "rotary frequencies of the config",
        error,
        "<=",
        1e-6,
        f"{MODULES}; fp32 against fp64",
        wanted.numel(),
        where="rope_theta and its scaling",
        part="RoPE",
        unit="relative",
    )


def _layers(subject: Subject, shape: Shape) -> Iterator[Check]:
    for i, wanted in enumerate(shape.windows):
        have = {"config": subject.config.windows[i]}
        if "kernels" in subject.can:
            have["model"] = subject.model.layers[i].self_attn.window
        for who, found in have.items():
            yield compare(
                f"window of the layer, by the {who}",
                str(found),
                "==",
                str(wanted),
                MODULES,
                1,
                where=f"layer {i}",
                part="window",
            )


def _files(subject: Subject, raw: dict) -> Iterator[Check]:
    """Biases and the output head are where the config says, and nowhere else."""
    wanted, found = tensor_shapes(raw), subject.files.sources
    biases = lambda names: sorted(n for n in names if n.endswith(".bias"))
    yield compare(
        "biases in the file: another set than the config's",
        len(set(biases(wanted)) ^ set(biases(found))),
        "==",
        0,
        SPECIFIED,
        len(wanted),
        where="biases",
        part="QKV bias",
        unit="tensors",
    )
    tied = raw.get("tie_word_embeddings", False)
    yield compare(
        "the head is tied as config.json says",
        str(subject.config.tie_word_embeddings),
        "==",
        str(tied),
        STATED,
        1,
        where="tie_word_embeddings",
        part="tied head",
    )


def _modules(subject: Subject, shape: Shape) -> Iterator[Check]:
    """What modules of our model took from the config, and the rotary frequencies."""
    wrong: dict[str, list[str]] = {}
    seen, ranks, dims = 0, ranks_of(subject).size, (shape.heads, shape.kv_heads, shape.head_dim)

    def hold(part: str, where: str, found, wanted, near: float = 0.0) -> None:
        nonlocal seen
        seen += 1
        if found != wanted and not (near and abs(found / wanted - 1) <= near):
            wrong.setdefault(part, []).append(f"{where} is {found}, expected {wanted}")

    for i, layer in enumerate(subject.model.layers):
        a, at = layer.self_attn, f"layer {i}"
        hold("heads", f"{at}: heads, KV heads, dims", (a.H * ranks, a.KV * ranks, a.D), dims)
        hold("scale of scores", f"{at}: scale", a.scale, shape.scale, 1e-9)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            hold("norms, eps", f"{at}: eps", norm.eps, shape.eps)
    hold("final norm, eps", "the final norm's eps", subject.model.model.norm.eps, shape.eps)
    for part in ("heads", "scale of scores", "norms, eps", "final norm, eps"):
        said = wrong.get(part, [])
        yield compare(
            f"{part}: values that modules took from the config otherwise",
            len(said),
            "==",
            0,
            MODULES,
            seen,
            part=part,
            where="modules",
            note="; ".join(said[:3]),
            unit="values",
        )
    found, wanted = subject.model.frequencies["main"].double().cpu(), shape.frequencies
    error = ((found - wanted).abs() / wanted).max().item() if found.shape == wanted.shape else float("inf")
    kind = rotary(config_at(subject.files.path))["rope_type"]
    yield compare(
        "rotary frequencies",
        error,
        "<=",
        1e-6,
        f"fp32 of the variant {kind!r}, against fp64",
        wanted.numel(),
        where="base main",
        part="RoPE",
    )
