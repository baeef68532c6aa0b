"""P5: every rotation of every layer has the right base, pairing, position and direction. See rope.md."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from dsv4.probes.compare import (
    at_share,
    attended,
    far,
    heavy_tailed,
    limit_of,
    oracle_of,
    picks_of,
    starts_of,
    steps_of_all_sizes,
    zeros_like_ids,
)
from dsv4.probes.oracle import Oracle, OracleConfig, kinds
from dsv4.probes.oracle import attention as steps
from dsv4.probes.oracle.attention import Layer
from dsv4.probes.oracle.config import Rotation
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.subject import Subject

WANT = ("q_after_rope", "kv_window", "compressed_kv", "index_keys", "selection")
Form = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Turned:
    """Rotated values: before rotation [B, n, (H,) R dims last], their positions, and the operation after it.

    at: positions as in the specification; others: wrong ones by name; form: rounding and storage after the rotation;
    mixed:
    whether `form` mixes pairs, so that they cannot be looked at one by one.
    """

    point: str
    plain: torch.Tensor
    at: torch.Tensor
    others: dict[str, torch.Tensor]
    form: Form
    part: str
    mixed: bool = False

    def turned(self, freqs: torch.Tensor, at: torch.Tensor, half_split: bool = False) -> torch.Tensor:
        """The values, rotated by freqs [R/2] at positions `at`, as the subject should show them."""
        R, x = 2 * len(freqs), self.plain
        order = torch.arange(R).view(2, -1).T.flatten() if half_split else torch.arange(R)
        x = torch.cat((x[..., :-R], x[..., -R:][..., order]), -1)
        x = (steps.rotate_heads if x.dim() == 4 else steps.rotate)(x, at, freqs)
        return self.form(torch.cat((x[..., :-R], x[..., -R:][..., order.argsort()]), -1))


@dataclass(frozen=True)
class Rope(Probe):
    """Queries, window rows, entries, index keys and the rotation back, against the oracle and its plausible
    mistakes."""

    name: ClassVar[str] = "rope"
    title: ClassVar[str] = "rotations have the right base, pairs, positions and direction"
    needs: ClassVar[frozenset[str]] = frozenset({"layer"})
    reads: ClassVar[frozenset[str]] = frozenset(WANT)

    def run(self, subject: Subject) -> list[Check]:
        oracle, checks = oracle_of(subject), []
        T = min(max(600, 4 * subject.config.sliding_window), subject.config.max_position_embeddings)
        x, rows, schedule = (
            heavy_tailed(subject, T, self.seed),
            2 if "batch" in subject.can else 1,
            steps_of_all_sizes(T),
        )
        same = x.repeat(rows, 1, 1)  # what is right for the first row is right for the others
        for i in range(subject.config.num_hidden_layers):
            layer, points = oracle.layer(i), subject.attention(i, same, zeros_like_ids(same), schedule, WANT).points
            for turned in rotated_things(layer, x.double(), starts_of(schedule)):
                checks += self._thing(subject, layer, turned, points.get((i, turned.point)), f"layer {i}")
            checks.append(self._back(subject, oracle, i, x, {key: value[:1] for key, value in points.items()}))
        return checks

    def _thing(
        self, subject: Subject, layer: Layer, thing: Turned, found: torch.Tensor | None, where: str
    ) -> list[Check]:
        title = f"{thing.point}: rotated pairs turn by the right angles"
        wanted = thing.turned(layer.frequencies, thing.at)
        if found is None or found.numel() == 0 or found.shape[1:] != wanted.shape[1:]:
            why = (
                "the subject gives none"
                if found is None
                else f"shape {list(found.shape)}, expected {list(wanted.shape)}"
            )
            return [vacuous(title, why, where=where, part=f"rotation of {thing.part}")]
        checks = [self._nearest(subject, layer, thing, found, where)]
        R = 2 * len(layer.frequencies)
        if thing.mixed:
            return checks
        return [*self._pairs(subject, title, thing, found, wanted.expand(found.shape), R, where), *checks]

    def _pairs(self, subject: Subject, title: str, thing: Turned, found, wanted, R: int, where: str) -> list[Check]:
        """The worst pair's angle error, where positions count by the size of the pair there; and the values as a
        whole."""
        limit, share, source = limit_of(subject)
        errors, still = far(found, wanted), at_share(far(found[..., :-R], wanted[..., :-R]), share)
        # in simulated numerics a step moves its row; NaN is never left out
        kept = (errors <= at_share(errors, share)) | errors.isinf()
        angles = angle_errors(found[kept], wanted[kept], R)
        worst = int(angles.argmax())
        sane = still <= limit
        first = next(iter((errors > 3 * limit).nonzero().tolist()), None)
        note = f"worst pair {worst} of {R // 2}; dims that are not rotated differ by {still:.2g}"
        note += f"; first beyond three limits: row {first[0]}, number {first[1]}" if first else ""
        about = dict(where=where, part=f"rotation of {thing.part}" if sane else thing.part, note=note)
        return [
            compare(
                title,
                angles[worst].item(),
                "<=",
                limit * 2,
                f"{source}; twice that, as an angle",
                found[..., 0].numel(),
                unit="rad",
                **about,
            ),
            compare(
                f"{thing.point}: equal the oracle's",
                at_share(errors, share),
                "<=",
                limit,
                source,
                errors.numel(),
                unit="relative",
                **about,
            ),
        ]

    def _nearest(self, subject: Subject, layer: Layer, thing: Turned, found: torch.Tensor, where: str) -> Check:
        """The rotation that explains the values best."""
        limit, share, source = limit_of(subject)
        forms = {"as specified": thing.turned(layer.frequencies, thing.at)} | mistakes(layer, thing)
        R = 0 if thing.mixed else 2 * len(layer.frequencies)
        errors = {name: at_share(far(found[..., -R:], form[..., -R:]), 0.5) for name, form in forms.items()}
        apart = {
            name: at_share(far(form[..., -R:], forms["as specified"][..., -R:]), 0.9) for name, form in forms.items()
        }
        seen = {name: e for name, e in errors.items() if name == "as specified" or apart[name] > 3 * limit}
        name, part = f"{thing.point}: the rotation that explains it", f"rotation of {thing.part}"
        note = "; ".join(f"{name} {e:.2g}" for name, e in sorted(seen.items(), key=lambda item: item[1])[:4])
        if len(seen) == 1:
            return vacuous(name, "no mistaken rotation differs at these positions", where=where, part=part)
        return compare(
            name,
            min(seen, key=seen.get),
            "==",
            "as specified",
            "the nearest of the oracle's variants, median error",
            found[..., 0].numel(),
            where=where,
            part=part,
            note=note,
        )

    def _back(self, subject: Subject, oracle: Oracle, i: int, x: torch.Tensor, points: dict) -> Check:
        """The rotation of the output back at the query's position."""
        layer, found, positions = oracle.layer(i), oracle.attention_layer(i, x), torch.arange(x.shape[1])
        selection = picks_of(points, i, found, found["compressed_kv"].shape[1]) if layer.ratio == kinds.CSA else None
        o, _ = attended(layer, found, selection)
        forms = {"rotated back": o}
        forms["not rotated back"] = steps.rotate_heads(o, positions, layer.frequencies)
        forms["rotated forwards again"] = steps.rotate_heads(forms["not rotated back"], positions, layer.frequencies)
        out = points[i, "attn_out"]
        errors = {name: at_share(far(out, steps.output(layer, form, positions)), 0.5) for name, form in forms.items()}
        note = "; ".join(f"{name} {e:.2g}" for name, e in errors.items())
        return compare(
            "attn_out: rotated back before the output projection",
            min(errors, key=errors.get),
            "==",
            "rotated back",
            "the nearest of the oracle's variants, median error",
            out[..., 0].numel(),
            where=f"layer {i}",
            part="rotation of the output",
            note=note,
        )


def rotated_things(layer: Layer, x: torch.Tensor, starts: torch.Tensor) -> list[Turned]:
    """Everything of a layer that is rotated, on attn_in x [B, T, d] in steps that begin at `starts`."""
    c, freqs, positions = layer.config, layer.frequencies, torch.arange(x.shape[1])
    q = steps.rotate_heads(steps.queries(layer, x, positions)[1], positions, freqs, inverse=True)
    kv = steps.rms(layer.linear("attn.wkv", x), layer.w("attn.kv_norm.weight"), c.rms_norm_eps)
    main = lambda values: steps.main_kv(layer, values)
    late = {"one position late": positions + 1, "positions counted from the start of the step": positions - starts}
    things = [
        Turned("q_after_rope", q, positions, late, lambda values: values, "queries"),
        Turned("kv_window", kv, positions, late, main, "window rows"),
    ]
    if layer.ratio:
        things.append(_entries(layer, x, "attn.compressor", "compressed_kv", main, "compressed entries"))
    if layer.ratio == kinds.CSA:
        form = lambda values: layer.store(steps.index_form(layer, values))
        things.append(_entries(layer, x, "attn.indexer.compressor", "index_keys", form, "indexer keys"))
    return things


def _entries(layer: Layer, x: torch.Tensor, name: str, point: str, form: Form, part: str) -> Turned:
    values = steps.compress(layer, x, name)
    w = torch.arange(values.shape[1])
    others = {
        "at the entry's number": w,
        "at the window's end": layer.ratio * w + layer.ratio - 1,
        "one window late": layer.ratio * (w + 1),
    }
    plain = steps.rotate(values, layer.ratio * w, layer.frequencies, inverse=True)
    return Turned(point, plain, layer.ratio * w, others, form, part, mixed=layer.simulate and point == "index_keys")


def mistakes(layer: Layer, thing: Turned) -> dict[str, torch.Tensor]:
    """The values under rotations that implementations really got wrong."""
    freqs, c = layer.frequencies, layer.config
    forms = {
        "not rotated": thing.turned(freqs, 0 * thing.at),
        "half-split pairs": thing.turned(freqs, thing.at, half_split=True),
        "the other way round": thing.turned(-freqs, thing.at),
    }
    forms |= {name: thing.turned(freqs, at) for name, at in thing.others.items()}
    compressed = layer.ratio > 0
    return forms | {name: thing.turned(f, thing.at) for name, f in other_bases(c, compressed).items()}


def other_bases(c: OracleConfig, compressed: bool) -> dict[str, torch.Tensor]:
    """Frequencies [R/2] by another base, or with another scaling, than a layer of that kind has."""
    main, scaled, of = c.main, c.compress, lambda rotation: rotation.frequencies(c.qk_rope_head_dim)
    if scaled.kind == "default":
        return {"base of the other layer kind": of(main if compressed else scaled)}
    if not compressed:
        stretched = replace(scaled, theta=main.theta)
        return {"base of the other layer kind": of(scaled), "YaRN where none belongs": of(stretched)}
    return {
        "YaRN missing": of(Rotation(scaled.theta)),
        "base of the other kind, with YaRN": of(replace(scaled, theta=main.theta)),
        "base of the other kind, no YaRN": of(main),
    }


def angle_errors(found: torch.Tensor, wanted: torch.Tensor, R: int) -> torch.Tensor:
    """RMS angle [R/2] between the pairs of the last R dims of [..., D], over everything else, weighted by their
    squares."""
    pair = lambda v: torch.view_as_complex(v[..., -R:].double().unflatten(-1, (-1, 2)).contiguous()).flatten(0, -2)
    a, b = pair(found), pair(wanted)
    weight = b.abs().square()
    errors = ((a * b.conj()).angle().square() * weight).sum(0) / weight.sum(0).clamp(min=1e-30)
    return torch.nan_to_num(errors.sqrt(), nan=torch.pi)


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(Rope)
