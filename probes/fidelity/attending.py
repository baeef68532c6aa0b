"""A look at what the layers of a GQA model attend to, before they do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from dsv4.causal import CausalLM
from dsv4.step import Step

Look = Callable[[int, object, torch.Tensor, torch.Tensor, torch.Tensor, Step], None]


@contextmanager
def attending(model: CausalLM, look: Look) -> Iterator[None]:
    """look(layer, its SelfAttention, q [B, T, H, D], keys and values [B, KV, S, D], step) before each layer without a sliding window
    attends; keys and values of the queries are among them."""
    attns = [(i, layer.self_attn) for i, layer in enumerate(model.layers) if layer.self_attn.window is None]
    before = [vars(attn).get("attend") for _, attn in attns]  # what somebody else has put there

    def also(i: int, attn, attend: Callable) -> Callable:
        def run(q, keys, values, *rest):  # the step comes last
            look(i, attn, q, keys, values, rest[-1])
            return attend(q, keys, values, *rest)
        return run
    for i, attn in attns:
        attn.attend = also(i, attn, attn.attend)
    try:
        yield
    finally:
        for (_, attn), held in zip(attns, before):
            if held is None:
                del attn.attend
            else:
                attn.attend = held
