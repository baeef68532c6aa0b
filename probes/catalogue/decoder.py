"""P21: every sublayer of a GQA model computes its definition, and all of them together its logits. See decoder.md."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from dsv4.probes.compare import agreeing, at_share, far, limit_of, steps_of_all_sizes, token_errors, tokens, window_of
from dsv4.probes.oracle import gqa
from dsv4.probes.oracle.gqa import GQAOracle
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.scenes.control import chance_of
from dsv4.probes.subject import GQA_POINTS, Subject

DEFINED = "as defined"
ALONE = "each sublayer on the subject's own input, in float64 from the definition"
# the output by a mistake, and the part at fault; 'as defined' first
Forms = dict[str, tuple[torch.Tensor, str]]


@dataclass(frozen=True)
class Decoder(Probe):
    """One run in steps of all sizes. Each sublayer gets the subject's own inputs, so that only its own fault shows. The
    output is compared with the definition and with mistakes that implementations really made; the nearest mistake names
    the fault."""

    name: ClassVar[str] = "decoder"
    title: ClassVar[str] = "every sublayer computes its definition"
    needs: ClassVar[frozenset[str]] = frozenset({"files", "run"})

    def run(self, subject: Subject) -> list[Check]:
        oracle, T = gqa.oracle_of(subject), length(subject)
        ids = tokens(subject, T, self.seed)
        capture = subject.run(ids, steps_of_all_sizes(T), tuple(GQA_POINTS))
        points, checks = capture.points, []
        for i in range(subject.config.num_hidden_layers):
            here = {name: points[i, name].double() for name in GQA_POINTS if (i, name) in points}
            if len(here) < len(GQA_POINTS):
                missing = ", ".join(sorted(set(GQA_POINTS) - set(here)))
                checks.append(
                    vacuous("sublayers", f"the subject gives no {missing}", where=f"layer {i}", part="attention core")
                )
                continue
            before = oracle.w("model.embed_tokens.weight")[ids] if i == 0 else points[i - 1, "streams"].double()
            for name, found, forms in sublayers(oracle, i, here, before):
                checks.append(nearest(subject, name, found, forms, f"layer {i}"))
        last = points[subject.config.num_hidden_layers - 1, "streams"].double()
        checks.append(nearest(subject, "head", capture.logits.double(), head(oracle, last), "head"))
        return [*checks, self._whole(subject, oracle, ids, capture.logits)]

    def _whole(self, subject: Subject, oracle: GQAOracle, ids: torch.Tensor, found: torch.Tensor) -> Check:
        wanted = oracle.logits(ids)
        value, source, limit = agreeing(token_errors(found, wanted), subject.numerics)
        return compare(
            "logits are the oracle's",
            value,
            "<=",
            limit,
            source,
            ids.numel(),
            where="all layers",
            part="whole model",
            chance=chance_of(wanted, token_errors),
        )


def length(subject: Subject) -> int:
    """Tokens: some windows, and a part of a second block of the cache."""
    return min(max(150, 3 * window_of(subject.config) + 10), subject.config.max_position_embeddings)


def sublayers(
    oracle: GQAOracle, i: int, p: dict[str, torch.Tensor], before: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor, Forms]]:
    """(name, the subject's output, right and mistaken outputs) of everything in layer i, in order."""
    yield "layer input", p["attn_in"], {DEFINED: (before, "embedding" if i == 0 else "residual stream")}
    for name, point, which in (("queries", "q_after_rope", "q"), ("keys", "keys", "k"), ("values", "values", "v")):
        yield name, p[point], projected(oracle, i, p["attn_in"], which, name)
    yield "attention", p["attn_out"], attention(oracle, i, p)
    yield "MLP", p["ffn_out"], mlp(oracle, i, p["attn_in"] + p["attn_out"])
    yield "layer output", p["streams"], {DEFINED: (p["attn_in"] + p["attn_out"] + p["ffn_out"], "residual stream")}


def projected(oracle: GQAOracle, i: int, x: torch.Tensor, which: str, part: str) -> Forms:
    """Queries, keys or values of x [B, T, d], rotated where they are."""
    at, kept = torch.arange(x.shape[1]), (lambda t: t) if which == "q" else oracle.kept

    def form(part: str = part, bias: bool = True, norm: str = "input", **normed) -> tuple[torch.Tensor, str]:
        h = oracle.heads(i, which, oracle.normed(i, norm, x, **normed), bias)
        return kept(h if which == "v" else gqa.turn(h, at, oracle.shape.frequencies)), part

    forms = {DEFINED: form()} | norms(form, "input", "post_attention")
    if oracle.w(f"model.layers.{i}.self_attn.{which}_proj.bias") is not None:
        forms["without its bias"] = form("QKV bias", bias=False)
    return forms


def norms(form, mine: str, other: str) -> Forms:
    """Mistaken forms of a norm."""
    return {
        "norm without its weight": form("norms", weight=False),
        "norm without eps": form("norms, eps", eps=0.0),
        "norm with eps 1e-6": form("norms, eps", eps=1e-6),
        "by the layer's other norm": form("norms", norm=other),
    }


def attention(oracle: GQAOracle, i: int, p: dict[str, torch.Tensor]) -> Forms:
    """attn_out of the subject's own queries, keys and values."""
    shape, T = oracle.shape, p["keys"].shape[1]
    group, scale, seen = shape.heads // shape.kv_heads, shape.scale, gqa.mask(T, shape.windows[i])
    q, k, v = p["q_after_rope"], oracle.kept(p["keys"]), oracle.kept(p["values"])

    def form(
        part: str, group_of=None, scale: float = scale, bias: bool = True, turned: bool = False
    ) -> tuple[torch.Tensor, str]:
        o = gqa.attend(q, k, v, seen, scale, group_of)
        o = o.unflatten(2, (-1, group)).transpose(2, 3).flatten(2, 3) if turned else o
        return oracle.output(i, o, bias), part

    forms = {DEFINED: form("attention core")}
    if 1 < shape.kv_heads < shape.heads:
        forms |= {
            "query head h reads KV head h mod KV": form("query groups", lambda h: h % shape.kv_heads),
            "query head h reads the next KV head": form("query groups", lambda h: (h // group + 1) % shape.kv_heads),
            "all heads read KV head 0": form("query groups", lambda h: 0),
            "output heads in another order": form("output projection", turned=True),
        }
    d = oracle.raw["hidden_size"]
    scales = {
        "1": 1.0,
        "1/D": 1 / shape.head_dim,
        "1/√d": d**-0.5,
        "1/√(d / H)": (d / shape.heads) ** -0.5,
        "without the rotation's factor": shape.head_dim**-0.5,
        "with the factor once": shape.head_dim**-0.5 * shape.factor,
    }
    forms |= {
        f"scale {name}": form("scale of scores", scale=s) for name, s in scales.items() if abs(s / scale - 1) > 1e-9
    }
    if oracle.w(f"model.layers.{i}.self_attn.o_proj.bias") is not None:
        forms["output projection without its bias"] = form("output bias", bias=False)
    return forms


def mlp(oracle: GQAOracle, i: int, x: torch.Tensor) -> Forms:
    """ffn_out of the residual stream x between the sublayers."""

    def form(part: str = "MLP", bias: bool = True, norm: str = "post_attention", **normed) -> tuple[torch.Tensor, str]:
        return oracle.mlp(i, oracle.normed(i, norm, x, **normed), bias), part

    y, at = oracle.normed(i, "post_attention", x), f"model.layers.{i}.mlp."
    gate, up = (oracle.map(f"{at}{name}_proj", y) for name in ("gate", "up"))
    down = lambda h: (oracle.map(f"{at}down_proj", h), "MLP gate")
    forms = {
        DEFINED: form(),
        "gate and up exchanged": down(gate * torch.sigmoid(up) * up),
        "sigmoid for silu": down(torch.sigmoid(gate) * up),
        "gelu for silu": down(torch.nn.functional.gelu(gate) * up),
    } | norms(form, "post_attention", "input")
    if oracle.w(f"{at}gate_proj.bias") is not None:
        forms["without its biases"] = form("MLP bias", bias=False)
    return forms


def head(oracle: GQAOracle, x: torch.Tensor) -> Forms:
    """Logits of the last residual stream."""
    part = "tied head" if oracle.shape.tied else "head"
    forms = {
        DEFINED: (oracle.head(x), part),
        "norm without its weight": (oracle.head(x, weight=False), "final norm"),
        "norm without eps": (oracle.head(x, eps=0.0), "final norm, eps"),
    }
    if oracle.shape.tied and (own := oracle.w("lm_head.weight")) is not None:
        forms["by lm_head.weight, not the embedding"] = (
            gqa.rms(x, oracle.w("model.norm.weight"), oracle.shape.eps) @ own.T,
            part,
        )
    return forms


def nearest(subject: Subject, name: str, found: torch.Tensor, forms: Forms, where: str) -> Check:
    """Whether `found` is as defined, by the limit of the numerics; if not, the mistake that is nearest names the
    part."""
    limit, share, source = limit_of(subject)
    wanted, part = forms[DEFINED]
    errors = {form: at_share(far(found, value), share) for form, (value, _) in forms.items()}
    value, best = errors[DEFINED], min(errors, key=errors.get)
    first = next(iter((far(found, wanted) > 3 * limit).nonzero().tolist()), None)
    note = "" if value <= limit else f"first beyond three limits: row {first[0]}, position {first[1]}" if first else ""
    if value > limit and best != DEFINED and errors[best] < 0.5 * value:
        part, note = forms[best][1], f"nearest: {best}, {errors[best]:.2g}"
    return compare(
        f"{name}: {DEFINED}",
        value,
        "<=",
        limit,
        f"{ALONE}; {source}",
        wanted[..., 0].numel(),
        where=where,
        part=part,
        note=note,
        unit="relative",
        chance=chance_of(wanted.flatten(2), token_errors),
    )


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(Decoder)
