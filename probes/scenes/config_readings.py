"""config.json read by the oracle's table, against what this project's reader makes of it and what its converter writes.

Used by `config_ledger`. The table (`dsv4.probes.oracle.config`) shares no code with either.
"""

from collections.abc import Iterator
from dataclasses import fields

from dsv4.kernels.errors import Dsv4Error
from dsv4.loaders.convert import TARGETS, written_config
from dsv4.model.config import ModelConfig
from dsv4.model.rope import frequencies
from dsv4.probes.oracle.config import OracleConfig, Rotation
from dsv4.probes.result import Check, Status, compare
from dsv4.probes.subject import Subject

TABLE = "config.json by the oracle's own table of the published forms, which shares no code with the reader"
ROUND = "fp32 against fp64"
BASES = {"main": "rope_theta", "compress": "compress_rope_theta"}
NAMES = {"hashed": "num_hash_layers", "tied": "tie_word_embeddings", "mtp_compress_ratios": "compress_ratios"}


def by_key(config: OracleConfig) -> dict[str, object]:
    """Official key → value; of a rotation θ by its own key, the rest by `rope_scaling.KEY`."""
    found = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if isinstance(value, Rotation):
            found[BASES[f.name]] = value.theta
            scaled = "rope_scaling" if f.name == "compress" else "rope_parameters.main"
            found |= {f"{scaled}.{k}": v for k, v in vars(value).items() if k != "theta"}
        else:
            found[f.name] = value
    return found


def read_checks(subject: Subject, own: OracleConfig, config: ModelConfig) -> Iterator[Check]:
    """Key by key: the dictionary that the loader made of config.json, and the effective config."""
    about = dict(part="config", samples=1)
    try:
        loaded = by_key(OracleConfig.of(dict(subject.files.config)))
    except (Dsv4Error, KeyError, TypeError) as error:
        said = (str(error).splitlines() or [""])[0]
        yield Check("the loader's dictionary is an official config", Status.FAIL, "config.json", "config", note=said)
        return
    for key, wanted in by_key(own).items():
        effective = getattr(config, key, loaded[key])
        if key == "hashed":  # the config says it of one layer at a time
            effective = tuple(config.hashed(i) for i in range(config.num_hidden_layers))
        found = loaded[key] if loaded[key] != wanted else effective
        note = subject.files.config_notes.get(key.partition(".")[0], "")
        yield compare(
            "value read is the stated one",
            _shown(found),
            "==",
            _shown(wanted),
            TABLE,
            **about,
            where=NAMES.get(key, key),
            note=note,
        )
    for base, found in frequencies(config).items():
        wanted = getattr(own, base).frequencies(own.qk_rope_head_dim)
        error = ((found.double() - wanted).abs() / wanted).max().item() if found.shape == wanted.shape else float("inf")
        yield compare(
            "rotary frequencies of the config",
            error,
            "<=",
            1e-6,
            f"{TABLE}; {ROUND}",
            wanted.numel(),
            where=f"{BASES[base]}, base {base}",
            part="RoPE",
            unit="relative",
        )


def written_checks(subject: Subject, own: OracleConfig) -> Iterator[Check]:
    """What `dsv4 convert` would write as config.json of this checkpoint, in each layout."""
    wanted = by_key(own)
    for layout in TARGETS:
        about = dict(part="converter", unit="keys")
        try:
            found = by_key(OracleConfig.of(written_config(subject.files.config, subject.config, layout)))
        except (Dsv4Error, KeyError, TypeError) as error:
            said = (str(error).splitlines() or [""])[0]
            yield Check("a converted config can be read", Status.FAIL, layout, "converter", note=said)
            continue
        wrong = [NAMES.get(key, key) for key in wanted if found[key] != wanted[key]]
        differs = [key for key in wanted if found[key] != wanted[key]]
        note = "; ".join(f"{k}: {found[k]!r:.40} written, {wanted[k]!r:.40} stated" for k in differs[:3])
        yield compare(
            "keys of a converted config that mean something else",
            len(wrong),
            "==",
            0,
            TABLE,
            len(wanted),
            where=", ".join([f"to {layout}", *wrong[:3]]),
            note=note,
            **about,
        )


def _shown(value) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_shown, value)) + "]"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:.12g}"
    return str(value)
