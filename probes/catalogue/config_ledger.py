"""P2: what the config asks for, what is really in effect, and what nothing reads. See config_ledger.md."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dsv4.errors import ConfigError
from dsv4.model.config import ModelConfig
from dsv4.probes.joint import ranks_of
from dsv4.probes.oracle import kinds
from dsv4.probes.oracle.config import OracleConfig
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, Status, compare
from dsv4.probes.scenes.config_keys import (
    FIXED,
    IN_MODULES,
    NO_EFFECT,
    SCALES,
    SPECIFIED,
    STATED,
    UNREAD,
    WIDTHS,
    other_values,
    shown,
)
from dsv4.probes.scenes.config_readings import read_checks, written_checks
from dsv4.probes.subject import Subject

OBEYED = (
    "specification 1 and 3 say what it does: a model that never reads it is another model (Automodel 2103, Primus 949)"
)
SHARED = ("num_attention_heads", "o_groups")  # of which each rank has an equal part


@dataclass(frozen=True)
class ConfigLedger(Probe):
    """Key by key, then layer by layer."""

    name: ClassVar[str] = "config_ledger"
    title: ClassVar[str] = "every config key is read, and in effect as asked"
    needs: ClassVar[frozenset[str]] = frozenset({"files"})

    def run(self, subject: Subject) -> list[Check]:
        raw, config = subject.files.config, effective_config(subject)
        own = OracleConfig.read(subject.files.path)
        checks = [check for key in flat(raw) for check in self._key(subject, raw, key, config)]
        return [
            self._as_written(subject, raw),
            *read_checks(subject, own, config),
            *written_checks(subject, own),
            *checks,
            *self._layers(subject, raw, own, config),
            *self._modules(subject, own),
            *self._theirs(subject, config),
            self._widths(config),
        ]

    def _key(self, subject: Subject, raw: dict, key: str, config: ModelConfig) -> Iterator[Check]:
        """A key is read if its change changes the ModelConfig or is refused."""
        about = dict(where=key, part="config", samples=1, note=subject.files.config_notes.get(key, ""))
        requested = value_at(raw, key)
        if not read_keys(raw, key):
            why = reason(raw, key)
            status = Status.PASS if why else Status.FAIL if key in SPECIFIED else Status.WARN
            note = f"requested {requested!r:.60}; never read: {why or 'nothing says why'}"
            source = "on the list of keys without effect" if why else OBEYED if key in SPECIFIED else UNREAD
            yield Check(
                "key is read",
                status,
                measured="never read",
                relation="==",
                threshold="never read" if why else "read",
                source=source,
                **about | {"note": note},
            )
            return
        found = effective(config, key, requested)
        yield compare("effective value is the requested one", shown(found), "==", shown(requested), STATED, **about)

    def _as_written(self, subject: Subject, raw: dict) -> Check:
        """config.json itself against the dictionary that the loader made from it: a value may have been changed in
        between."""
        file = json.loads((subject.files.path / "config.json").read_text())
        whole = (
            "compress_ratios" in file and "hidden_size" in file and not {"layer_types", "rope_parameters"} & set(file)
        )
        kept = [key for key in file if (whole or key in raw) and key not in subject.files.config_notes]
        wrong = [key for key in kept if key not in raw or not _holds(raw[key], file[key])]
        note = "; ".join(f"{key}: {file[key]!r:.40} in the file, {raw.get(key)!r:.40} as read" for key in wrong[:3])
        return compare(
            "keys that differ from config.json as it lies there",
            len(wrong),
            "==",
            0,
            STATED,
            len(kept),
            unit="keys",
            where="config.json",
            found=wrong[0] if wrong else "",
            part="config",
            note=note,
        )

    def _layers(self, subject: Subject, raw: dict, own: OracleConfig, config: ModelConfig) -> Iterator[Check]:
        """Kind, ratio, base and k of each layer; by the config, by the tensors of the file, and by the model if it is
        ours."""
        layers, ratios = own.num_hidden_layers, list(raw["compress_ratios"])
        mtp = raw.get("num_nextn_predict_layers") or 0
        # transformers' form has no entries for MTP
        extra = "from" in subject.files.config_notes.get("compress_ratios", "")
        yield compare(
            "entries of compress_ratios",
            len(ratios),
            ">=",
            layers + (0 if extra else mtp),
            "one a layer and one an MTP block (specification 1); DSpark releases have more",
            1,
            where="compress_ratios",
            part="config",
        )
        yield compare(
            "layers of the effective config",
            len(config.compress_ratios),
            "==",
            layers,
            STATED,
            1,
            where="compress_ratios",
            part="config",
        )
        for i, ratio in enumerate(own.compress_ratios):
            wanted, where = row_of(own, ratio), f"layer {i}"
            have = [("config", row_of_config(config, i))] + (
                [("model", row_of_model(subject, i))] if modules(subject) else []
            )
            for who, found in have:
                yield compare(
                    f"kind, ratio, θ and k of the layer, by the {who}",
                    found,
                    "==",
                    wanted,
                    STATED,
                    1,
                    where=where,
                    part="layer kind",
                    note=f"hash-routed: {own.hashed[i]}",
                )
            yield compare(
                "compression ratio by the layer's tensors",
                ratio_in_file(subject, f"layers.{i}"),
                "==",
                ratio,
                "an indexer means CSA, rows of ape are the ratio (specification 2.1)",
                1,
                where=where,
                part="layer kind",
            )
            routed = {"layer's tensors": f"layers.{i}.ffn.gate.tid2eid" in subject.files.sources}
            if modules(subject):
                routed["model"] = subject.model.layers[i].ffn.gate.tid2eid is not None
            for who, found in routed.items():
                yield compare(
                    f"routing by token id, by the {who}",
                    found,
                    "==",
                    own.hashed[i],
                    "tid2eid stands in hash layers only (specification 2.1)",
                    1,
                    where=where,
                    part="router",
                )
        for i in range(subject.files.mtp_blocks):
            yield compare(
                "compression ratio by the block's tensors",
                ratio_in_file(subject, f"mtp.{i}"),
                "==",
                0,
                "MTP blocks are window layers (transformers 46127)",
                1,
                where=f"mtp {i}",
                part="MTP",
            )

    def _modules(self, subject: Subject, own: OracleConfig) -> Iterator[Check]:
        """Values that modules of our model took from the config, and the rotary frequencies by layer kind."""
        if not modules(subject):
            return
        wrong, seen, raw = {}, 0, vars(own)
        for name, module in subject.model.named_modules():
            for attribute, key in IN_MODULES.get(type(module).__name__, {}).items():
                seen += 1
                size = ranks_of(subject).size if key in SHARED else 1
                if getattr(module, attribute) * size != raw[key]:
                    of = f" of one of {size} ranks" if size > 1 else ""
                    wrong[f"{name}.{attribute} ({key})"] = (
                        f"{key} is {raw[key]}, the module{of} has {getattr(module, attribute)}"
                    )
            if type(module).__name__ in SCALES:
                seen, (said, scale) = seen + 1, SCALES[type(module).__name__]
                if abs(module.scale / scale(raw) - 1) > 1e-9:
                    wrong[f"{name}.scale ({said})"] = f"{said} is {scale(raw):.6g}, the module has {module.scale:.6g}"
        yield compare(
            "values that modules took from the config: differences",
            len(wrong),
            "==",
            0,
            STATED,
            seen,
            where="modules",
            found=next(iter(wrong), ""),
            part="config",
            note="; ".join(list(wrong.values())[:3]),
        )
        for base in ("main", "compress"):
            wanted = getattr(own, base).frequencies(own.qk_rope_head_dim)
            found = subject.model.frequencies[base].double().cpu()
            error = ((found - wanted).abs() / wanted).max().item() if found.shape == wanted.shape else float("inf")
            yield compare(
                "rotary frequencies of the base",
                error,
                "<=",
                1e-6,
                "fp32 of θ^(−2i/R) as scaled, against fp64",
                wanted.numel(),
                where=f"base {base}",
                part="RoPE",
            )

    def _theirs(self, subject: Subject, config: ModelConfig) -> Iterator[Check]:
        """The effective config that another implementation gives in its provenance."""
        for key, found in sorted((subject.provenance.get("effective") or {}).items()):
            if hasattr(config, key):
                yield compare(
                    "effective value of the implementation",
                    shown(found),
                    "==",
                    shown(getattr(config, key)),
                    STATED,
                    1,
                    where=key,
                    part="config",
                )

    def _widths(self, config: ModelConfig) -> Check:
        """Sizes that coincide hide a transposition or a wrong axis."""
        groups: dict[int, list[str]] = {}
        for key in WIDTHS:
            groups.setdefault(getattr(config, key), []).append(key)
        same = [f"{' = '.join(keys)} = {size}" for size, keys in groups.items() if len(keys) > 1]
        return Check(
            "sizes that coincide",
            Status.PASS,
            "config.json",
            "config",
            len(same),
            "groups",
            source="reported, not judged: equal sizes let one pass for another (known bugs, 3)",
            samples=len(WIDTHS),
            note="; ".join(same) or "all differ",
        )


def _holds(read, stated) -> bool:
    """Equal; an object may have gained keys, since transformers writes its defaults into the one that it is given."""
    if isinstance(stated, dict) and isinstance(read, dict):
        return all(key in read and read[key] == value for key, value in stated.items())
    return read == stated


def effective_config(subject: Subject) -> ModelConfig:
    """The config that the subject's model runs with, else the meaning of the files."""
    held = getattr(getattr(subject, "model", None), "config", None)
    return held if isinstance(held, ModelConfig) else subject.config


def modules(subject: Subject) -> bool:
    """Whether the subject is this project's model, whose modules can be inspected."""
    return bool({"kernels", "training"} & subject.can) and hasattr(subject, "model")


def flat(raw: dict) -> list[str]:
    """Keys, those of the two nested objects by 'object.key'."""
    keys = []
    for key, value in raw.items():
        nested = key in ("rope_scaling", "quantization_config") and isinstance(value, dict)
        keys += [f"{key}.{inner}" for inner in value] if nested else [key]
    return keys


def reason(raw: dict, key: str) -> str | None:
    """Why nothing reads a key. What transformers repeats within rope_scaling must agree with what is read."""
    value = value_at(raw, key)
    if key == "rope_scaling.rope_type" and value == raw["rope_scaling"].get("type"):
        return "repeats type"
    if key == "rope_scaling.rope_theta" and value in (raw["rope_theta"], raw["compress_rope_theta"]):
        return "repeats a θ that is read"
    return NO_EFFECT.get(key)


def value_at(raw: dict, key: str):
    outer, _, inner = key.partition(".")
    return raw[outer][inner] if inner and isinstance(raw.get(outer), dict) else raw[key]


def read_keys(raw: dict, key: str) -> bool:
    """Whether a change of this key changes anything: another ModelConfig, or a refusal."""
    if key in FIXED or key == "expert_dtype" or (value_at(raw, key) is None and hasattr(ModelConfig, key)):
        return True
    try:
        before = ModelConfig.from_official(raw)
        return any(ModelConfig.from_official(_with(raw, key, v)) != before for v in other_values(value_at(raw, key)))
    except (ConfigError, TypeError, ValueError, KeyError):
        return True


def _with(raw: dict, key: str, value) -> dict:
    copy = json.loads(json.dumps(raw))
    outer, _, inner = key.partition(".")
    if inner and isinstance(copy.get(outer), dict):
        copy[outer][inner] = value
    else:
        copy[key] = value
    return copy


def effective(config: ModelConfig, key: str, requested):
    """The ModelConfig's value for an official key, in the form of config.json."""
    layers = config.num_hidden_layers
    match key:
        case "compress_ratios":
            mine = list(config.compress_ratios + config.mtp_compress_ratios)
            rest = requested[len(mine) :] if isinstance(requested, list) else []
            return (mine + rest)[: max(layers, len(requested))]  # DSpark's surplus entries are its own
        case "num_nextn_predict_layers":
            return config.num_mtp_layers
        case "eos_token_id":
            return list(config.eos_token_id) if isinstance(requested, list) else (config.eos_token_id or (None,))[0]
        case "quantization_config.weight_block_size":
            return list(config.weight_block_size)
    scaling = config.yarn or config.stretch
    if key == "rope_scaling":
        return requested if scaling is None else scaling
    if key.startswith("rope_scaling."):
        return getattr(scaling, key.partition(".")[2], requested if scaling else "none")  # `type` has no field
    return FIXED[key] if key in FIXED else getattr(config, key, requested)


def row_of(own: OracleConfig, ratio: int) -> str:
    """A line of the layer table from config.json: θ is that of layers that compress or do not (specification 3)."""
    theta = (own.compress if ratio else own.main).theta
    return _row(kinds.NAMES[ratio], ratio, theta, own.index_topk if ratio == kinds.CSA else 0)


def row_of_config(config: ModelConfig, layer: int) -> str:
    ratio = config.compress_ratios[layer]
    theta = config.compress_rope_theta if ratio else config.rope_theta
    return _row(config.layers[layer].kind.value, ratio, theta, config.index_topk if ratio == kinds.CSA else 0)


def row_of_model(subject: Subject, layer: int) -> str:
    """Of the modules: which attention, its ratio, the base that it rotates by, the k of its indexer."""
    attn, config = subject.model.layers[layer].attn, effective_config(subject)
    ratio = getattr(attn, "compressor", attn).ratio
    theta = config.compress_rope_theta if attn.base == "compress" else config.rope_theta
    return _row(attn.kind.value, ratio, theta, attn.indexer.topk if hasattr(attn, "indexer") else 0)


def _row(kind: str, ratio: int, theta: float, k: int) -> str:
    return f"{kind}, ratio {ratio}, θ {theta:.12g}" + (f", k {k}" if k else "")


def ratio_in_file(subject: Subject, prefix: str) -> int:
    """The compression ratio that a layer's tensors mean."""
    ape = subject.files.sources.get(f"{prefix}.attn.compressor.ape")
    indexer = f"{prefix}.attn.indexer.wq_b.weight" in subject.files.sources
    if ape is None:
        return -1 if indexer else 0
    return ape.shape[0] if indexer == (ape.shape[0] == kinds.CSA) else -1


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(ConfigLedger)
