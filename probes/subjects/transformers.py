"""transformers' DeepseekV4ForCausalLM, observed by forward hooks. It shares no code with this project's model.

Where each point is taken, within `model.model.layers[i]`:

- attn_in       first argument of `self_attn` (what `input_layernorm` returned)
- q_after_rope  the `query` that `self_attn` hands to its attention function, [B, H, T, D] there
- kv_window     what `self_attn` gets back from its cache layer's `update`, [B, 1, kept + T, D] there: the kept rows and
  the new
- compressed_kv the cache layer's `compressed_kv["compressor"]` at the end
- index_keys    the cache layer's `compressed_kv["indexer"]` at the end
- index_scores  output of `self_attn.compressor.indexer.scorer`, which masks nothing yet: invisible entries become −inf
  here
- selection     output of `self_attn.compressor.indexer`
- attn_out      first output of `self_attn`
- ffn_out       output of `mlp`
- streams       output of the layer
"""

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from dsv4.errors import InputError
from dsv4.loaders.config_files import to_official
from dsv4.loaders.transformers_names import to_transformers
from dsv4.model.config import ModelConfig
from dsv4.probes.subject import POINTS, Capture, Subject
from dsv4.probes.subjects.dump import Timeline, check_points, steps_of
from dsv4.probes.subjects.files import FilesSubject, plain
from dsv4.probes.subjects.transformers_config import own_values

IN_ATTENTION = tuple(p for p in POINTS if p not in ("ffn_out", "streams"))
SCALES = ("scale", "weight_scale", "weight_scale_2", "input_scale")
EXPERT = {"w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}


class TransformersSubject(Subject):
    """An instance of transformers' model, or one built from a checkpoint directory with dequantised weights.

    dtype: of parameters and activations of a model built here; what transformers itself insists on keeping in fp32
    stays fp32. An instance is taken as it is. Schedules of steps run through `past_key_values`; it cannot rewind, nor
    take rows of different lengths: padding would enter its compressors.
    """

    def __init__(self, model_or_path, dtype: torch.dtype = torch.float32):
        import transformers

        stored = FilesSubject(model_or_path) if isinstance(model_or_path, (str, Path)) else None
        self.model = (build(stored, dtype) if stored else model_or_path).eval()
        dtype = self.model.get_input_embeddings().weight.dtype
        self.can = frozenset({"run", "layer", "block", *(["files"] if stored else [])})
        self.files = stored.files if stored else None
        self.config = (
            stored.config if stored else ModelConfig.from_official(to_official(self.model.config.to_dict())[0])
        )
        self.stated = self.model.config.to_dict()
        self.numerics = {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(dtype, str(dtype).removeprefix("torch."))
        self.name = f"transformers {transformers.__version__}, {self.numerics}"
        self.provenance = (stored.provenance if stored else {}) | {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "attention": self.model.config._attn_implementation,
        }

    @torch.inference_mode()
    def run(self, ids: torch.Tensor, schedule: Sequence[int] = (), want: Sequence[str] = ()) -> Capture:
        """See `Subject.run`. Raises InputError for a negative step and for padding."""
        return self._run(ids, self._steps(ids, schedule), check_points(want))

    @torch.inference_mode()
    def stream(self, ids: torch.Tensor, want: Sequence[str], see: Callable[[int, dict], None]) -> torch.Tensor:
        """See `Subject.stream`: the same pass, each layer's points handed over and forgotten when it is done."""
        return self._run(ids, self._steps(ids, ()), check_points(want), see).logits

    def _run(
        self, ids: torch.Tensor, steps: list[tuple[int, int]], want: frozenset[str], see: Callable | None = None
    ) -> Capture:
        """A run of these steps; with `see`, of one step, whose points go there instead of into the capture."""
        B, T = ids.shape
        cache, timeline, logits = self._cache(), Timeline(B, T), torch.empty(B, T, self.config.vocab_size)
        with _Taps(timeline, want, self.config) as taps:
            for i, layer in enumerate(self.model.model.layers):
                taps.layer(i, layer)
                taps.attention(i, layer.self_attn, cache.layers[i])
                if see is not None:
                    taps.done(layer, partial(_hand_over, see, timeline, i, cache.layers[i], want))
            for start, n in steps:
                taps.start = start
                piece = ids[:, start : start + n].to(self.model.device)
                logits[:, start : start + n] = (
                    self.model(piece, past_key_values=cache, use_cache=True).logits.float().cpu()
                )
        for i in range(self.config.num_hidden_layers if see is None else 0):
            put_entries(timeline, i, cache.layers[i], want)
        with torch.inference_mode(False):
            return timeline.capture(logits.clone())

    @torch.inference_mode()
    def block(self, layer: int, streams: torch.Tensor, ids: torch.Tensor, want: Sequence[str] = ()) -> Capture:
        """See `Subject.block`: the decoder layer, with rotations and mask made as DeepseekV4Model makes them."""
        want, module, cache, timeline = (
            check_points(want),
            self.model.model.layers[layer],
            self._cache(),
            Timeline(*ids.shape),
        )
        cache.layers = [cache.layers[layer]] * len(cache.layers)
        with _Taps(timeline, want, self.config) as taps:
            taps.layer(layer, module)
            taps.attention(layer, module.self_attn, cache.layers[layer])
            x = streams.to(self.model.device, module.self_attn.kv_proj.weight.dtype)
            module(
                x, input_ids=ids.to(self.model.device), past_key_values=cache, **self._positional(x[:, :, 0], 0, cache)
            )
        put_entries(timeline, layer, cache.layers[layer], want)
        with torch.inference_mode(False):
            return timeline.capture()

    @torch.inference_mode()
    def attention(
        self,
        layer: int,
        attn_in: torch.Tensor,
        ids: torch.Tensor,
        schedule: Sequence[int] = (),
        want: Sequence[str] = (),
    ) -> Capture:
        """See `Subject.attention`: `self_attn` of the layer, with rotations and mask made as DeepseekV4Model makes
        them."""
        want, steps = check_points(want, IN_ATTENTION) | {"attn_out"}, self._steps(ids, schedule)
        if attn_in.shape[:2] != ids.shape:
            raise InputError(
                f"attn_in {list(attn_in.shape)} and ids {list(ids.shape)} must have as many tokens in every row"
            )
        attn, cache, timeline = self.model.model.layers[layer].self_attn, self._cache(), Timeline(*ids.shape)
        # the mask is made by the length of the first layer's cache
        cache.layers = [cache.layers[layer]] * len(cache.layers)
        with _Taps(timeline, want, self.config) as taps:
            taps.attention(layer, attn, cache.layers[layer])
            for taps.start, n in steps:
                x = attn_in[:, taps.start : taps.start + n].to(self.model.device, attn.kv_proj.weight.dtype)
                attn(x, past_key_values=cache, **self._positional(x, taps.start, cache))
        put_entries(timeline, layer, cache.layers[layer], want)
        with torch.inference_mode(False):
            return timeline.capture()

    def weight(self, name: str) -> torch.Tensor:
        """Its own parameter or buffer, by official name; an expert's matrix is its part of the stack."""
        held = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        place, of = _place(name)
        if place not in held:
            raise InputError(f"transformers' model holds no parameter for {name!r}")
        return plain(of(held[place]))

    def _cache(self):
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def _steps(self, ids: torch.Tensor, schedule: Sequence[int]) -> list[tuple[int, int]]:
        if any(n < 0 for n in schedule):
            raise InputError("transformers' cache cannot forget tokens; a schedule with negative steps cannot be run")
        if bool((ids < 0).any()):
            raise InputError("transformers' compressors would read padding; rows must be equally long")
        return steps_of(ids.shape[1], schedule)

    def _positional(self, x: torch.Tensor, start: int, cache) -> dict:
        model = self.model.model
        position_ids = start + torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        mask = _modeling().create_sliding_window_causal_mask(
            config=model.config, inputs_embeds=x, attention_mask=None, past_key_values=cache, position_ids=position_ids
        )
        rotations = {
            kind: model.rotary_emb(x, position_ids=position_ids, layer_type=kind) for kind in ("main", "compress")
        }
        return {"position_embeddings": rotations, "position_ids": position_ids, "attention_mask": mask}


class _Taps:
    """Hooks on their modules while the `with` block lasts. `start`: position of the first token of the step that
    runs."""

    def __init__(self, timeline: Timeline, want: frozenset[str], config: ModelConfig):
        self.timeline, self.want, self.config, self.start, self._undo = timeline, want, config, 0, ExitStack()
        self._tapped: dict[torch.nn.Module, int] = {}  # attention modules whose queries are wanted → layer

    def __enter__(self) -> "_Taps":
        if "q_after_rope" in self.want:
            modeling = _modeling()
            self._undo.callback(setattr, modeling, "ALL_ATTENTION_FUNCTIONS", modeling.ALL_ATTENTION_FUNCTIONS)
            modeling.ALL_ATTENTION_FUNCTIONS = _WatchedFunctions(modeling.ALL_ATTENTION_FUNCTIONS, self._queries)
        return self

    def __exit__(self, *error) -> None:
        self._undo.close()

    def layer(self, i: int, layer) -> None:
        """ffn_out and streams of a layer."""
        self._after(layer.mlp, lambda out: self._put(i, "ffn_out", out))
        self._after(layer, lambda out: self._put(i, "streams", out))

    def done(self, layer, then: Callable[[], None]) -> None:
        """Call `then` after the layer, and after what watches it."""
        self._after(layer, lambda out: then())

    def attention(self, i: int, attn, cache_layer) -> None:
        """Every point within a layer's attention."""
        self._tapped[attn] = i
        self._undo.callback(attn.register_forward_pre_hook(lambda _, args: self._put(i, "attn_in", args[0])).remove)
        self._after(attn, lambda out: self._put(i, "attn_out", out[0]))
        # the cache is this run's own: nothing to undo
        cache_layer.update = partial(self._update, i, cache_layer.update)
        indexer = getattr(attn.compressor, "indexer", None)
        if indexer is not None:
            self._after(
                indexer.scorer, lambda out: self._put(i, "index_scores", self._masked(out, indexer.compress_rate))
            )
            self._after(indexer, lambda selection: self._put(i, "selection", selection))

    def _put(self, i: int, point: str, values: torch.Tensor, start: int | None = None) -> None:
        if point in self.want:
            self.timeline.put(i, point, values, [self.start if start is None else start] * values.shape[0])

    def _update(self, i: int, real: Callable, keys: torch.Tensor, values: torch.Tensor, *args, **kwargs):
        full = real(keys, values, *args, **kwargs)
        self._put(i, "kv_window", full[0].squeeze(1), self.start + keys.shape[2] - full[0].shape[2])
        return full

    def _queries(self, module, query: torch.Tensor) -> None:
        if module in self._tapped:
            self._put(self._tapped[module], "q_after_rope", query.transpose(1, 2))

    def _masked(self, scores: torch.Tensor, ratio: int) -> torch.Tensor:
        visible = (self.start + 1 + torch.arange(scores.shape[1], device=scores.device)) // ratio
        hidden = torch.arange(scores.shape[2], device=scores.device) >= visible.unsqueeze(1)
        return scores.masked_fill(hidden, float("-inf"))

    def _after(self, module, see) -> None:
        self._undo.callback(module.register_forward_hook(lambda _, args, out: see(out)).remove)


class _WatchedFunctions:
    """Their registry of attention functions, each of which shows its module and its queries first."""

    def __init__(self, real, see: Callable):
        self.real, self.see = real, see

    def get_interface(self, *args):
        function = self.real.get_interface(*args)

        def watched(module, query, *rest, **kwargs):
            self.see(module, query)
            return function(module, query, *rest, **kwargs)

        return watched


def _hand_over(see: Callable, timeline: Timeline, i: int, cache_layer, want: frozenset[str]) -> None:
    put_entries(timeline, i, cache_layer, want)
    see(i, timeline.take(i))


def put_entries(timeline: Timeline, i: int, cache_layer, want: frozenset[str]) -> None:
    """compressed_kv and index_keys as the cache layer holds them at the end."""
    held = getattr(cache_layer, "compressed_kv", {})
    for point, name in (("compressed_kv", "compressor"), ("index_keys", "indexer")):
        if point in want and name in held:
            timeline.whole(i, point, held[name])


def build(stored: FilesSubject, dtype: torch.dtype):
    """DeepseekV4ForCausalLM of a checkpoint directory, dequantised weights, eager attention.

    config.json in transformers' form is read by transformers' own class; the other forms, which it does not all know,
    by the oracle's table. This project's reader takes no part.
    """
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    model = DeepseekV4ForCausalLM(DeepseekV4Config(**own_values(stored.files.path), attn_implementation="eager"))
    model.load_state_dict(state_of(stored), strict=True)
    kept = tuple(model._keep_in_fp32_modules_strict or ())
    for name, parameter in model.named_parameters():
        if not any(part in name.split(".") for part in kept):
            parameter.data = parameter.data.to(dtype)
    return model


def state_of(stored: FilesSubject) -> dict[str, torch.Tensor]:
    """fp32 state dict in transformers' names, experts stacked."""
    state, E = {}, stored.config.n_routed_experts
    for name in stored.files.sources:
        base, _, leaf = name.rpartition(".")
        scale = base in stored.files.formats and leaf in SCALES
        if not (scale or name.startswith("mtp.") or ".ffn.experts." in name):
            state[to_transformers(name)] = stored.weight(name)
    for i in range(stored.config.num_hidden_layers):
        stack = lambda leaf: torch.stack([stored.weight(f"layers.{i}.ffn.experts.{e}.{leaf}.weight") for e in range(E)])
        state[f"model.layers.{i}.mlp.experts.gate_up_proj"] = torch.cat((stack("w1"), stack("w3")), 1)
        state[f"model.layers.{i}.mlp.experts.down_proj"] = stack("w2")
    return state


def _place(name: str) -> tuple[str, Callable]:
    """(their parameter, the part of it) for an official name."""
    if ".ffn.experts." not in name:
        return to_transformers(name), lambda t: t
    stacked = re.fullmatch(r"layers\.(\d+)\.ffn\.experts\.(\d+)\.(w[123])\.weight", name)
    if stacked is None:  # an expert of an MTP block, which they drop, or a scale, which is multiplied out
        raise InputError(f"transformers' model holds no parameter for {name!r}")
    i, e, leaf = stacked.groups()

    def part(t: torch.Tensor) -> torch.Tensor:
        rows = t.shape[1] // 2
        return {"w1": t[int(e), :rows], "w3": t[int(e), rows:], "w2": t[int(e)]}[leaf]

    return f"model.layers.{i}.mlp.experts.{EXPERT[leaf]}", part


def _modeling():
    from transformers.models.deepseek_v4 import modeling_deepseek_v4

    return modeling_deepseek_v4
