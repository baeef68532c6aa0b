"""A look at what the layers of a GQA model attend to, before they do."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from dsv4.model.causal import CausalLM
from dsv4.model.step import Step
from dsv4.probes.scenes.patching import wrapped

Look = Callable[[int, object, torch.Tensor, torch.Tensor, torch.Tensor, Step], None]


def attending(model: CausalLM, look: Look) -> AbstractContextManager:
    """look(layer, its SelfAttention, q [B, T, H, D], keys and values [B, KV, S, D], step) before each layer without a
    sliding window attends; keys and values of the queries are among them."""

    def also(i: int, attn, attend: Callable) -> Callable:
        def run(q, keys, values, *rest):  # the step comes last
            look(i, attn, q, keys, values, rest[-1])
            return attend(q, keys, values, *rest)

        return run

    return wrapped(
        [(i, layer.self_attn) for i, layer in enumerate(model.layers) if layer.self_attn.window is None], "attend", also
    )
