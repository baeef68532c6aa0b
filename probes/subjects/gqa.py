"""This project's GQA models, observed from outside as `dsv4.probes.subjects.ours` observes the others."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from dsv4.errors import InputError
from dsv4.kernels.operations import GQA_OPERATIONS
from dsv4.model.gqa.cache import LayerRows, cache_streams
from dsv4.model.gqa.model import GQA_COMPOSITIONS
from dsv4.model.ranks import Ranks
from dsv4.model.step import Step
from dsv4.model.together import part_of, whole_of
from dsv4.probes.subject import GQA_POINTS, Capture
from dsv4.probes.subjects.dump import Timeline, check_points, steps_of
from dsv4.probes.subjects.files import plain
from dsv4.probes.subjects.ours import OurSubject, _lengths, _restore, _watched

IN_ATTENTION = tuple(p for p in GQA_POINTS if p not in ("ffn_out", "streams"))


class OurGQASubject(OurSubject):
    """`dsv4.load_model(path, numerics, backend, device)` of a GQA checkpoint. Points are those of GQA_POINTS.

    Its policy of attention is the model's own (`subject.model.attention`), dense unless a caller sets another.
    """

    family = "gqa"
    can = frozenset({"files", "run", "layer", "rewind", "batch", "cache", "pages", "kernels"})
    tables = GQA_OPERATIONS, GQA_COMPOSITIONS

    @staticmethod
    def check_caches(numerics: str, cache: str, index_cache: str) -> None:
        """Loading such a model refuses every packed cache."""

    def _run(
        self, ids: torch.Tensor, steps: list[tuple[int, int]], want: frozenset[str], see: Callable | None = None
    ) -> Capture:
        (B, T), lengths = ids.shape, _lengths(ids)
        cache = self.model.new_cache(B, T)
        timeline, logits = Timeline(B, T), torch.full((B, T, self.config.vocab_size), float("nan"))
        with Taps(timeline, want) as taps:
            for i, layer in enumerate(self.model.layers):
                taps.layer(i, layer)
                if see is not None:
                    taps.after(layer, partial(self._hand_over, see, timeline, i, cache.layers[i], lengths, want))
            for start, n in steps:
                self._step(ids, lengths, start, n, cache, logits)
        for i, rows in enumerate(cache.layers if see is None else ()):
            put_rows(timeline, i, rows, lengths, want, self.model.ranks)
        return timeline.capture(logits)

    def run(self, ids: torch.Tensor, schedule: Sequence[int] = (), want: Sequence[str] = ()) -> Capture:
        """See `Subject.run`. Each step is one piece of work, however long it is."""
        return self._run(ids, steps_of(ids.shape[1], schedule), check_points(want, GQA_POINTS))

    def stream(self, ids: torch.Tensor, want: Sequence[str], see: Callable[[int, dict], None]) -> torch.Tensor:
        """See `Subject.stream`."""
        return self._run(ids, steps_of(ids.shape[1], ()), check_points(want, GQA_POINTS), see).logits

    def block(self, *given, **more) -> Capture:
        """Nothing asks for whole layers of a GQA model alone. Raises InputError."""
        raise InputError("a layer of a GQA model cannot be run alone here; run the model and look at its points")

    @torch.inference_mode()
    def attention(
        self,
        layer: int,
        attn_in: torch.Tensor,
        ids: torch.Tensor,
        schedule: Sequence[int] = (),
        want: Sequence[str] = (),
    ) -> Capture:
        """See `Subject.attention`; attn_in [B, T, d] is not yet normalised: the layer's own norm is part of it here."""
        want, (B, T), model = check_points(want, IN_ATTENTION) | {"attn_out"}, ids.shape, self.model
        if attn_in.shape[:2] != (B, T):
            raise InputError(f"attn_in {list(attn_in.shape)} and ids {[B, T]} must have as many tokens in every row")
        block, plan = model.layers[layer], cache_streams(self.config, model.heads, B, T, model.numerics)[layer]
        device = model.devices[layer]
        rows, timeline = LayerRows(plan, device), Timeline(B, T)
        with Taps(timeline, want) as taps:
            taps.attention(layer, block.self_attn)
            for start, n in (step for step in steps_of(T, schedule) if step[1] > 0):
                step = Step(ids[:, start : start + n].to(model.device), 0, [start] * B, model.rope_frequencies())
                x = attn_in[:, start : start + n].to(device, model.numerics.activation).flatten(0, 1)
                block.self_attn(x, block.input_layernorm, step.on(device), rows)
        put_rows(timeline, layer, rows, [T] * B, want, model.ranks)
        return timeline.capture()

    def weight(self, name: str) -> torch.Tensor:
        """The parameter of that name, as the model holds it; of several ranks all of it. Raises InputError for a tensor
        that the model does not hold."""
        held = dict(self.model.named_parameters())
        if name not in held:
            raise InputError(f"the model holds no parameter for {name!r}")
        return whole_of(self.model.ranks, plain(held[name]), part_of(self.model, name), self.model.device)

    def cache_bytes(self, batch: int, max_context: int) -> dict[tuple[str, str], int]:
        """Sizes of the storages of a cache that is allocated for this."""
        cache = self.model.new_cache(batch, max_context)
        return {
            (plan.label, name): t.untyped_storage().nbytes()
            for plan, rows in zip(cache.plan, cache.layers, strict=True)
            for name, t in rows.tensors.items()
        }

    def _hand_over(
        self, see: Callable, timeline: Timeline, i: int, rows: LayerRows, lengths: list[int], want: frozenset[str], *_
    ) -> None:
        put_rows(timeline, i, rows, lengths, want, self.model.ranks)
        see(i, timeline.take(i))


class Taps:
    """Hooks on the modules of layers while the `with` block lasts; what they see goes to a timeline."""

    def __init__(self, timeline: Timeline, want: frozenset[str]):
        self.timeline, self.want, self._undo = timeline, want, ExitStack()
        self._step: Step | None = None  # of the layer that is running

    def __enter__(self) -> "Taps":
        return self

    def __exit__(self, *error) -> None:
        self._undo.close()

    def layer(self, i: int, layer) -> None:
        """Every point of a layer."""
        self._undo.callback(layer.register_forward_pre_hook(lambda _, args: setattr(self, "_step", args[1])).remove)
        self.attention(i, layer.self_attn)
        self.after(layer.mlp, lambda args, out: self._put(i, "ffn_out", out, self._step))
        self.after(layer, lambda args, out: self._put(i, "streams", out, args[1]))

    def attention(self, i: int, attn) -> None:
        """attn_in, q_after_rope, attn_out."""
        self._undo.callback(
            attn.register_forward_pre_hook(lambda _, args: self._put(i, "attn_in", args[0], args[2])).remove
        )
        self.after(attn, lambda args, out: self._put(i, "attn_out", out, args[2]))
        self._undo.callback(_restore, attn, "attend", vars(attn).get("attend"))
        attn.attend = partial(
            _watched, attn.attend, lambda args, out: self._queries(i, attn, args[0].flatten(0, 1), args[4])
        )

    def _queries(self, i: int, attn, q: torch.Tensor, step: Step) -> None:
        """q [B·T, H, D] of this rank's heads."""
        if "q_after_rope" in self.want:
            self._put(i, "q_after_rope", attn.o_proj.ranks.of_all_heads(q), step)

    def after(self, module, see: Callable) -> None:
        self._undo.callback(module.register_forward_hook(lambda _, args, out: see(args, out)).remove)

    def _put(self, i: int, point: str, values: torch.Tensor, step: Step) -> None:
        """values [B·T, ...] of a step."""
        if point in self.want:
            self.timeline.put(i, point, values.unflatten(0, (step.B, step.T)), step.starts, step.first)


def put_rows(
    timeline: Timeline, i: int, rows: LayerRows, lengths: list[int], want: frozenset[str], ranks: Ranks
) -> None:
    """keys and values as the cache holds them at the end, of the heads of all ranks; NaN beyond a row's own tokens."""
    beyond = (torch.arange(timeline.tokens) >= torch.tensor(lengths).unsqueeze(1))[..., None, None]
    for point in {"keys", "values"} & want:
        held = ranks.of_all_heads(rows.tensors[point][:, :, : timeline.tokens].transpose(1, 2)).float().cpu()
        timeline.whole(i, point, held.masked_fill(beyond, float("nan")))
