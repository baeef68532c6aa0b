"""`dsv4 audit bisect`: the first point of the first layer where a subject leaves the reference, and proof of its cause.

The pass goes through the subject once, layer by layer, and holds one layer at a time. Each point is compared with the
reference's result from the subject's own values before it, against a floor that rounding alone explains. Then the
module behind the first difference is swapped for the oracle's, and the difference must vanish, there and in the layers
after it (confirm.py). See bisect.md.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dsv4.errors import InputError
from dsv4.probes.blame.by_layer import Accumulated, Difference, differences, dtype_of, expected, far, rounded
from dsv4.probes.compare import oracle_of
from dsv4.probes.oracle import Oracle
from dsv4.probes.oracle.attention import rms
from dsv4.probes.oracle.blocks import collapse
from dsv4.probes.subject import POINTS, Subject

LAST = 64  # tokens whose logits are compared: a vocabulary of 129,280 in float64 is 1 MB a token


@dataclass
class Reference:
    """The oracle of the subject's numerics on its own files; with `other`, another subject gives the wanted values.

    A recorded `other` has one run only, so that everything is compared with that run, differences of layers before
    included.
    """

    oracle: Oracle
    other: Subject | None = None

    @property
    def name(self) -> str:
        how = " with quantisation simulation" if self.oracle.simulate else ""
        return f"the float64 oracle{how}" if self.other is None else self.other.name

    @property
    def recorded(self) -> bool:
        return self.other is not None and "recorded" in self.other.can

    def wanted(self, i: int, before: torch.Tensor, ids: torch.Tensor) -> dict:
        """Points of layer i of the other subject, run on the streams before it, or as it recorded them."""
        return self.other.layer(i) if self.recorded else block_of(self.other, i, before, ids)


def block_of(subject: Subject, i: int, before: torch.Tensor, ids: torch.Tensor) -> dict:
    """Every point of layer i of a subject, run alone on the streams before it."""
    return {point: value for (_, point), value in subject.block(i, before, ids, tuple(POINTS)).points.items()}


@dataclass
class Reading:
    """What was measured in one layer. accumulated: streams after it against the reference's own run, of which the
    caller keeps the streams; None where the subject gives no streams."""

    index: int
    found: list[Difference]
    accumulated: Difference | None = None


class Bisection:
    """One pass. ids int64 [1, T]; budget: seconds after which layers are no longer compared.

    layers: what was read, in order; head: the logits from the subject's own last streams, logits: from the ids on;
    before: the subject's streams after the last layer; fault: the first difference, the streams before its layer, and
    the layer's points.
    """

    def __init__(
        self,
        subject: Subject,
        reference: Reference,
        ids: torch.Tensor,
        budget: float | None = None,
        say: Callable[[str], None] = lambda text: None,
    ):
        self.subject, self.reference, self.ids, self.say = subject, reference, ids, say
        self.oracle, self.config = reference.oracle, subject.config
        self.deadline = None if budget is None else time.monotonic() + budget
        self.layers: list[Reading] = []
        self.head: Difference | None = None
        self.logits: Difference | None = None
        self.fault: tuple[Difference, torch.Tensor | None, dict] | None = None
        # the reference's streams, so that memory holds one layer
        self._kept = tempfile.TemporaryDirectory(prefix="bisect-")

    # ---- the pass -----------------------------------------------------------------------

    def run(self) -> "Bisection":
        """Compare every layer; `fault` is then the first difference above its floor."""
        start = self.oracle.weights("embed.weight")[self.ids].unsqueeze(2).repeat(1, 1, self.config.hc_mult, 1)
        self.before, self._exact, self._noisy, self._wanted = start, start, start, start
        logits = self.subject.stream(self.ids, tuple(POINTS), self._layer)
        if logits is not None and len(self.layers) == self.config.num_hidden_layers:
            self._logits(logits)
        return self

    def _layer(self, i: int, points: dict) -> None:
        if self.deadline is not None and time.monotonic() > self.deadline:
            return
        before, oracle = self.before, self.oracle.layer(i)
        exact = expected(oracle, self._exact, self.ids, {})
        noisy = expected(rounded(oracle, self.subject.numerics), self._noisy, self.ids, {})
        found = self._local(i, before, points, exact, noisy)
        layer = Reading(i, found, self._accumulated(i, points, exact["streams"], noisy["streams"]))
        self.layers.append(layer)
        first = next((d for d in found if d.found), None)
        if first is not None and self.fault is None:
            self.fault = (first, before, points)
        self.before = points.get("streams")
        self._exact, self._noisy = exact["streams"], noisy["streams"]
        worst = max((d.ratio for d in found), default=0.0)
        self.say(
            f"layer {i}: largest difference {worst:.2g} of its floor" + (f", first at {first.point}" if first else "")
        )

    def _local(self, i: int, before, points: dict, exact: dict, noisy: dict) -> list[Difference]:
        """exact, noisy: the oracle's accumulated run, whose distance is the floor for a recorded reference."""
        numerics, wanted = self.subject.numerics, None
        if self.reference.recorded:
            wanted = self.reference.wanted(i, before, self.ids)
            return differences(i, points, exact, noisy, self.oracle.config, numerics, wanted, chained=False)
        chained = self.reference.other is None
        if not chained:
            if before is None:
                return []
            wanted = self.reference.wanted(i, before, self.ids)
        exact, noisy = self.pair(i, before, points if chained else {})
        return differences(i, points, exact, noisy, self.oracle.config, numerics, wanted, chained)

    def pair(self, i: int, before, given: dict) -> tuple[dict, dict]:
        layer = self.oracle.layer(i)
        return (
            expected(layer, before, self.ids, given),
            expected(rounded(layer, self.subject.numerics), before, self.ids, given),
        )

    def _accumulated(self, i: int, points: dict, exact: torch.Tensor, noisy: torch.Tensor) -> Difference | None:
        """The streams after the layer from the ids on, against the reference's own."""
        if self.reference.other is None:
            self._wanted = exact
        elif self._wanted is not None:
            self._wanted = self.reference.wanted(i, self._wanted, self.ids).get("streams")
        if self._wanted is None or "streams" not in points:
            return None
        torch.save((self._wanted.float(), far(noisy, exact).float()), self.file(i))
        return Accumulated(i, "streams", far(points["streams"], self._wanted), far(noisy, exact), self.subject.numerics)

    def file(self, i: int) -> Path:
        return Path(self._kept.name) / f"{i}.pt"

    def _logits(self, logits: torch.Tensor) -> None:
        """The head on the subject's own streams, and the logits from the ids on."""
        found, last = logits[:, -LAST:], slice(-LAST, None)
        noisy = self.end(self._noisy[:, last], hold=True)
        wanted = self.end(self._exact[:, last])
        self.logits = Accumulated(-1, "logits", far(found, wanted), far(noisy, wanted), self.subject.numerics)
        self.wanted_logits = wanted
        if self.before is None:
            return
        own = self.before[:, last].double()
        wanted, noisy = self.end(own), self.end(own, hold=True)
        self.head = Difference(-1, "logits", far(found, wanted), far(noisy, wanted), self.subject.numerics)
        if self.head.found and self.fault is None:
            self.fault = (self.head, None, {})

    def end(self, streams: torch.Tensor, hold: bool = False) -> torch.Tensor:
        """streams [1, T, S, d] → logits; hold: with its input and output of the norm rounded as activations."""
        dtype, w = dtype_of(self.subject.numerics), self.oracle.weights
        held = (lambda x: x.to(dtype).double()) if hold else (lambda x: x)
        y = held(collapse(self.oracle.config, streams.double(), w("hc_head_fn"), w("hc_head_base"), w("hc_head_scale")))
        return held(rms(y, w("norm.weight"), self.oracle.config.rms_norm_eps)) @ w(self.oracle.config.output_weight).T


def reference_of(subject: Subject, other: Subject | None) -> Reference:
    """The oracle in the subject's numerics on its files, and the other reference. Raises InputError if there is
    none."""
    if getattr(subject, "files", None) is None:
        raise InputError(f"{subject.name} has no checkpoint directory; the reference needs its weights")
    if other is not None and "block" not in other.can and "recorded" not in other.can:
        raise InputError(f"{other.name} cannot be a reference: it runs nothing")
    oracle = oracle_of(subject)
    oracle.cache = None  # the floor rounds cached values; the reference does not
    return Reference(oracle, other)
