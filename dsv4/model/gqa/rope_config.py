"""The rotary variant of a GQA model's config.json, in the spelling of transformers 5 or the older one."""

from collections.abc import Mapping

from dsv4.errors import ConfigError
from dsv4.model.config import Reader, mapping, number
from dsv4.model.gqa.rope import VARIANTS, Rope, mscale

DEFAULT_THETA = 10000.0  # of transformers, where a config states none
ROPE_KEYS = {  # keys beside rope_type and rope_theta
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}


def read_rope(raw: Mapping, reader: Reader, longest: int) -> Rope:
    """The rotary variant, from either spelling. longest: max_position_embeddings. Raises ConfigError naming the key."""
    scaling, parameters = (mapping(key, reader.optional(key, None)) for key in ("rope_scaling", "rope_parameters"))
    if scaling and parameters and dict(scaling) != dict(parameters):
        raise ConfigError("config.json has both rope_scaling and rope_parameters, and they differ; remove one of them")
    found, where = (scaling, "rope_scaling") if scaling else (parameters, "rope_parameters")
    kind = found.get("rope_type", found.get("type", "default"))
    if found.get("type", kind) != kind:
        raise ConfigError(f"{where} has rope_type {kind!r} and type {found['type']!r}; correct one of them")
    if kind not in VARIANTS:
        follows = " (it follows the length of the text, so that cached keys would have to be rotated anew)"
        raise ConfigError(
            f"{where} has rope_type {kind!r:.60}{follows if kind in ('dynamic', 'longrope') else ''}; expected one of "
            f"{', '.join(VARIANTS)}"
        )
    strange = set(found) - ROPE_KEYS[kind] - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if strange:
        raise ConfigError(
            f"{where} of type {kind!r} has {', '.join(sorted(map(str, strange)))}, which it does not use; expected "
            f"only {', '.join(sorted(ROPE_KEYS[kind] | {'rope_type', 'rope_theta'}))}"
        )
    if found.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"{where} has partial_rotary_factor {found['partial_rotary_factor']!r:.60}; these models rotate whole "
            "heads (1.0)"
        )
    stated = [
        number("rope_theta", t, float)
        for t in (found.get("rope_theta"), reader.optional("rope_theta", None))
        if t is not None
    ]
    if len(set(stated)) > 1:
        raise ConfigError(f"{where} has rope_theta {stated[0]}, config.json itself {stated[1]}; remove one of them")
    theta = stated[0] if stated else DEFAULT_THETA
    if not theta > 1:
        raise ConfigError(f"rope_theta is {theta}; expected a number above 1")
    return Rope(kind, theta, **_scaled(kind, found, where, reader, longest))


def _scaled(kind: str, found: Mapping, where: str, reader: Reader, longest: int) -> dict:
    """Fields of the variants besides theta. `longest`: max_position_embeddings, the original context if none is
    stated."""

    def value(key: str, default: float | None = None, least: float = 0.0) -> float:
        got = found.get(key)
        got = default if got is None else got
        if got is None:
            raise ConfigError(f"{where} of type {kind!r} has no {key!r}, which it needs")
        got = number(f"{where}.{key}", got, float)
        if not got > least and not (key == "factor" and got == 1):
            raise ConfigError(f"{where} has {key} = {got}; expected a number above {least:g}")
        return got

    if kind == "default":
        return {}
    out = {"factor": value("factor", least=1.0)}
    if kind == "linear":
        return out
    own, outer = (
        found.get("original_max_position_embeddings"),
        reader.optional("original_max_position_embeddings", None),
    )
    if None not in (own, outer) and own != outer:
        raise ConfigError(
            f"{where} has original_max_position_embeddings {own!r:.20}, config.json itself {outer!r:.20}; "
            "remove one of them"
        )
    stated = next((v for v in (own, outer) if v is not None), longest)
    out["original"] = number("original_max_position_embeddings", stated, int)
    if out["original"] < 1:
        raise ConfigError(f"original_max_position_embeddings is {out['original']}; expected a positive number")
    if kind == "llama3":
        out |= {key: value(key) for key in ("low_freq_factor", "high_freq_factor")}
        if not out["high_freq_factor"] > out["low_freq_factor"]:
            raise ConfigError(
                f"{where} has high_freq_factor {out['high_freq_factor']} and low_freq_factor "
                f"{out['low_freq_factor']}; expected the first to be larger"
            )
        return out
    out |= {"beta_fast": value("beta_fast", 32.0), "beta_slow": value("beta_slow", 1.0)}
    truncate = found.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ConfigError(f"{where} has truncate = {truncate!r:.60}; expected true or false")
    weights = [found.get("mscale"), found.get("mscale_all_dim")]
    scaled = mscale(out["factor"])
    if all(weights):
        scaled = mscale(out["factor"], value("mscale")) / mscale(out["factor"], value("mscale_all_dim"))
    return out | {"truncate": truncate, "attention": value("attention_factor", scaled)}
