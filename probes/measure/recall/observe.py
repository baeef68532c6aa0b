"""The results of a subject's CSA layers at the last queries of each context, and the right ones.

One pass serves all contexts: a shorter one is the beginning of a longer one. Of this project's model only the measured
queries are kept, one layer at a time; other subjects are captured whole.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from dsv4.errors import CapacityError, InputError
from dsv4.model.deepseek_v4 import Model
from dsv4.probes.compare import oracle_of
from dsv4.probes.measure.base.mass import by_blocks, row_mass, watched
from dsv4.probes.measure.base.models import csa_layers
from dsv4.probes.measure.recall.oracle import GrowingOracle
from dsv4.probes.oracle import kinds
from dsv4.probes.oracle.attention import Layer
from dsv4.probes.subject import Subject
from dsv4.units import format_bytes

WANTED = ("attn_in", "q_after_rope", "kv_window", "compressed_kv", "index_scores", "selection")
MOST_CAPTURED = 8 << 30  # bytes of a subject that can only be captured whole
PIECE = 256  # tokens a step of such a subject


@dataclass(frozen=True)
class Seen:
    """One CSA layer at the last queries of one context; n entries are visible to the last of them.

    positions int64 [Q], consecutive; scores fp32 [Q, n], the subject's own; selection int64 [Q, k], its own, −1 for
    none; mass fp32 [Q, n], of the dense attention; exact and matched float64 [Q, n], the oracles' scores. −inf where
    invisible. Host.
    """

    layer: int
    context: int
    positions: torch.Tensor
    scores: torch.Tensor
    selection: torch.Tensor
    mass: torch.Tensor
    exact: torch.Tensor
    matched: torch.Tensor


See = Callable[[Seen], None]
Progress = Callable[[int], None]


class Oracles:
    """Both oracles' layers of a subject; `fresh` ones for each row of text."""

    def __init__(self, subject: Subject):
        exact, matched = oracle_of(subject, matched=False), oracle_of(subject)
        layers = csa_layers(subject.config)
        self.layers: dict[int, tuple[Layer, Layer]] = {i: (exact.layer(i), matched.layer(i)) for i in layers}

    def fresh(self) -> dict[int, GrowingOracle]:
        return {i: GrowingOracle(*layers) for i, layers in self.layers.items()}


# ---- this project's model -------------------------------------------------------------------


def observe_model(
    model: Model,
    oracles: Oracles,
    ids: torch.Tensor,
    contexts: list[int],
    queries: int,
    chunk: int,
    see: See,
    progress: Progress = lambda tokens: None,
) -> None:
    """Run ids int64 [T] through the model; `see` gets each layer at the last `queries` queries of each context."""
    growing, cache, at = oracles.fresh(), model.new_cache(1, len(ids), max_rewind=0), 0
    with _followed(model, growing):
        for context in contexts:
            while at < context - queries:
                size = min(chunk, context - queries - at)
                model.append(ids[None, at : at + size], cache, logits="none", chunk=chunk)
                at += size
                progress(size)
            with _selections(model) as chosen, watched(model, _seer(growing, chosen, context, see)):
                model.append(ids[None, at:context], cache, logits="none", chunk=queries)
            progress(context - at)
            at = context


@contextmanager
def _followed(model: Model, growing: dict[int, GrowingOracle]) -> Iterator[None]:
    """Each oracle gets the inputs of its layer's attention, before the layer runs."""
    with ExitStack() as undo:
        for i, oracle in growing.items():
            extend = lambda _, args, oracle=oracle: oracle.extend(args[0])
            undo.callback(model.layers[i].attn.register_forward_pre_hook(extend).remove)
        yield


@contextmanager
def _selections(model: Model) -> Iterator[dict[int, torch.Tensor]]:
    """What each layer's indexer returned last."""
    chosen = {}
    with ExitStack() as undo:
        for i in csa_layers(model.config):
            keep = lambda _, args, out, i=i: chosen.__setitem__(i, out)
            undo.callback(model.layers[i].attn.indexer.register_forward_hook(keep).remove)
        yield chosen


def _seer(growing: dict[int, GrowingOracle], chosen: dict[int, torch.Tensor], context: int, see: See) -> Callable:
    """What `watched` calls; B = 1."""

    def look(layer: int, attn, x, qr, q, window, window_index, step, cache) -> None:
        positions = step.pos[0].cpu()
        scores = attn.indexer.scores(x, qr, step, cache)[0]
        mass = row_mass(attn, q, window, window_index, step, cache)
        exact, matched = growing[layer].scores(x, positions)
        see(Seen(layer, context, positions, scores.float().cpu(), chosen[layer][0].cpu(), mass.cpu(), exact, matched))

    return look


# ---- other subjects -------------------------------------------------------------------------


def observe_capture(
    subject: Subject,
    oracles: Oracles,
    ids: torch.Tensor,
    contexts: list[int],
    queries: int,
    see: See,
    progress: Progress = lambda tokens: None,
) -> None:
    """Look at a subject that captures whole runs, on ids int64 [B, T]; a recorded dump answers for its own ids
    alone.

    Raises CapacityError when the capture would be larger than MOST_CAPTURED, InputError when points are missing.
    """
    B, T = ids.shape
    recorded = "recorded" in subject.can
    if not recorded:
        check_room(subject.config, B, T)
    schedule = subject.schedule if recorded else [min(PIECE, T - start) for start in range(0, T, PIECE)]
    points = subject.run(ids, schedule, want=WANTED).points
    progress(B * T)
    for layer, (exact, _) in oracles.layers.items():
        missing = [point for point in WANTED if (layer, point) not in points]
        if missing:
            raise InputError(
                f"{subject.name} gives no {', '.join(missing)} of layer {layer}; recall needs {', '.join(WANTED)}"
            )
        sink = exact.w("attn.attn_sink").float()
        for b in range(B):
            of = {point: points[layer, point][b] for point in WANTED}
            growing, at = oracles.fresh()[layer], 0
            for context in contexts:
                growing.extend(of["attn_in"][at:context])
                at = context
                see(_slice(of, growing, sink, exact.config, layer, torch.arange(context - queries, context), context))


def check_room(config, batch: int, tokens: int) -> None:
    n = tokens // kinds.CSA
    width = config.vocab_size + len(csa_layers(config)) * (
        n + config.index_topk + config.hidden_size + (config.num_attention_heads + 1) * config.head_dim
    )
    if 4 * batch * tokens * width > MOST_CAPTURED:
        raise CapacityError(
            f"capturing {batch} × {tokens} tokens whole would take {format_bytes(4 * batch * tokens * width)}, more "
            f"than {format_bytes(MOST_CAPTURED)}; pass a shorter --context, or --subject ours, which keeps the "
            "measured queries alone"
        )


def _slice(
    of: dict[str, torch.Tensor],
    growing: GrowingOracle,
    sink: torch.Tensor,
    config,
    layer: int,
    t: torch.Tensor,
    context: int,
) -> Seen:
    """The queries at positions t [Q] of one row's captured points."""
    n, W = int(t[-1] + 1) // kinds.CSA, config.sliding_window
    back = t.unsqueeze(1) + torch.arange(1 - W, 1)
    mass = by_blocks(
        of["q_after_rope"][t],
        of["kv_window"][back.clamp(min=0)],
        back < 0,
        of["compressed_kv"][:n],
        (t + 1) // kinds.CSA,
        sink,
        config.softmax_scale,
    )
    exact, matched = growing.scores(of["attn_in"][t], t)
    return Seen(layer, context, t, of["index_scores"][t, :n], of["selection"][t], mass, exact, matched)
