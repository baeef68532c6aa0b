"""transformers' GQA models, observed by forward hooks. They share no code with this project's.

Within `model.model.layers[i]`: attn_in is the first argument of `input_layernorm`, q_after_rope the `query` that
`self_attn` hands to its attention function, attn_out the first output of `self_attn`, ffn_out that of `mlp`, streams
that of the layer; keys and values are what the cache layer's `update` is given, which it holds as they are.
"""

import importlib
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from dsv4.errors import InputError
from dsv4.loaders.decoders import DECODERS
from dsv4.probes.subject import GQA_POINTS, Capture, Subject
from dsv4.probes.subjects.dump import Timeline, check_points, steps_of
from dsv4.probes.subjects.files import FilesSubject, plain
from dsv4.probes.subjects.gqa import IN_ATTENTION
from dsv4.probes.subjects.transformers import _WatchedFunctions


class TransformersGQASubject(Subject):
    """transformers' model of a checkpoint directory, in `dtype`, with eager attention.

    Schedules of steps run through `past_key_values`; negative steps crop it, which caches of sliding windows cannot do.
    Rows of different lengths are not run: padding would need masks that no probe asks for.
    """

    family = "gqa"

    def __init__(self, path: str | Path, dtype: torch.dtype = torch.float32):
        import transformers

        stored = FilesSubject(path)
        self.files, self.config = stored.files, stored.config
        name = DECODERS[self.config.model_type]
        self._module = importlib.import_module(getattr(transformers, name).__module__)
        opened = getattr(transformers, name).from_pretrained(
            path, dtype=dtype, attn_implementation="eager", local_files_only=True
        )
        self.model = opened.eval()
        self.can = frozenset({"files", "run", "layer", *(["rewind"] if set(self.config.windows) == {None} else [])})
        self.numerics = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
        self.name = f"transformers {transformers.__version__}, {self.numerics}"
        self.provenance = stored.provenance | {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "attention": "eager",
        }

    @torch.inference_mode()
    def run(self, ids: torch.Tensor, schedule: Sequence[int] = (), want: Sequence[str] = ()) -> Capture:
        """See `Subject.run`. Raises InputError for padding, and for rewinds of sliding windows."""
        from transformers import DynamicCache

        want, (B, T), steps = check_points(want, GQA_POINTS), ids.shape, steps_of(ids.shape[1], schedule)
        if any(n < 0 for _, n in steps) and "rewind" not in self.can:
            raise InputError(
                "transformers' caches of sliding windows cannot forget tokens; a schedule with negative steps "
                "cannot be run"
            )
        if bool((ids < 0).any()):
            raise InputError("this subject runs rows of equal lengths only; some ids are padding")
        cache, timeline, logits = (
            DynamicCache(config=self.model.config),
            Timeline(B, T),
            torch.empty(B, T, self.config.vocab_size),
        )
        with _Taps(self.model, self._module, timeline, want, cache) as taps:
            for start, n in steps:
                if n < 0:
                    cache.crop(n)
                    continue
                taps.start = start
                piece = ids[:, start : start + n].to(self.model.device)
                logits[:, start : start + n] = (
                    self.model(piece, past_key_values=cache, use_cache=True).logits.float().cpu()
                )
        with torch.inference_mode(False):
            return timeline.capture(logits.clone())

    @torch.inference_mode()
    def attention(
        self,
        layer: int,
        attn_in: torch.Tensor,
        ids: torch.Tensor,
        schedule: Sequence[int] = (),
        want: Sequence[str] = (),
    ) -> Capture:
        """See `Subject.attention`: norm and `self_attn` of the layer, with rotation and mask made as their model makes
        them."""
        from transformers import DynamicCache, masking_utils

        want, (B, T), steps = (
            check_points(want, IN_ATTENTION) | {"attn_out"},
            ids.shape,
            steps_of(ids.shape[1], schedule),
        )
        model, timeline, cache = self.model.model, Timeline(B, T), DynamicCache(config=self.model.config)
        module, sliding = model.layers[layer], self.config.windows[layer] is not None
        # masks are made by the length of the first layer of their kind
        cache.layers = [cache.layers[layer]] * len(cache.layers)
        masked = masking_utils.create_sliding_window_causal_mask if sliding else masking_utils.create_causal_mask
        with _Taps(self.model, self._module, timeline, want, cache) as taps:
            for taps.start, n in steps:
                x = attn_in[:, taps.start : taps.start + n].to(self.model.device, self.model.dtype)
                at = taps.start + torch.arange(n, device=x.device).unsqueeze(0)
                mask = masked(
                    config=self.model.config,
                    inputs_embeds=x,
                    attention_mask=None,
                    past_key_values=cache,
                    position_ids=at,
                )
                module.self_attn(
                    module.input_layernorm(x),
                    position_embeddings=model.rotary_emb(x, position_ids=at),
                    attention_mask=mask,
                    past_key_values=cache,
                    position_ids=at,
                )
        with torch.inference_mode(False):
            return timeline.capture()

    def weight(self, name: str) -> torch.Tensor:
        """Its own parameter of that name. Raises InputError."""
        held = dict(self.model.named_parameters())
        if name not in held:
            raise InputError(f"transformers' model holds no parameter for {name!r}")
        return plain(held[name])


class _Taps:
    """Hooks on their modules while the `with` block lasts. `start`: position of the first token of the step that
    runs."""

    def __init__(self, model, modeling, timeline: Timeline, want: frozenset[str], cache):
        self.model, self.modeling, self.timeline, self.want, self.start, self._undo = (
            model,
            modeling,
            timeline,
            want,
            0,
            ExitStack(),
        )
        self.layers = {layer.self_attn: i for i, layer in enumerate(model.model.layers)}
        self.factor = model.model.rotary_emb.attention_scaling  # YaRN's, which is no part of the points
        real = cache.update  # the cache is this run's own: nothing to undo

        def update(keys, values, layer_idx, *args, **kwargs):
            self._put(layer_idx, "keys", keys.transpose(1, 2) / self.factor)
            self._put(layer_idx, "values", values.transpose(1, 2))
            return real(keys, values, layer_idx, *args, **kwargs)

        cache.update = update

    def __enter__(self) -> "_Taps":
        registry = self.modeling.ALL_ATTENTION_FUNCTIONS
        self._undo.callback(setattr, self.modeling, "ALL_ATTENTION_FUNCTIONS", registry)
        self.modeling.ALL_ATTENTION_FUNCTIONS = _WatchedFunctions(registry, self._queries)
        for i, layer in enumerate(self.model.model.layers):
            self._undo.callback(layer.input_layernorm.register_forward_pre_hook(partial(self._before, i)).remove)
            for point, module in (("attn_out", layer.self_attn), ("ffn_out", layer.mlp), ("streams", layer)):
                self._undo.callback(module.register_forward_hook(partial(self._after, i, point)).remove)
        return self

    def __exit__(self, *error) -> None:
        self._undo.close()

    def _before(self, i: int, module, args) -> None:
        self._put(i, "attn_in", args[0])

    def _after(self, i: int, point: str, module, args, out) -> None:
        self._put(i, point, out[0] if isinstance(out, tuple) else out)

    def _queries(self, module, query: torch.Tensor) -> None:
        self._put(self.layers[module], "q_after_rope", query.transpose(1, 2) / self.factor)

    def _put(self, i: int, point: str, values: torch.Tensor) -> None:
        if point in self.want:
            self.timeline.put(i, point, values, [self.start] * values.shape[0])
