"""A look at what the layers of a GQA model attend to, before they do."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from dsv4.kernels.block_choice import Observed, Policy, choose_tokens
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


@contextmanager
def observing(model: CausalLM, window: int, observed: dict[int, torch.Tensor]) -> Iterator[None]:
    """Keep in `observed`, by layer, the queries of the last `window` tokens of one row that ran, inside or before:
    [n, H, D], n ≤ window."""

    def look(i: int, attn, q, keys, values, step) -> None:
        before = observed.get(i, q.new_empty(0, *q.shape[2:]))
        observed[i] = torch.cat((before, q[0]))[-window:]

    with attending(model, look):
        yield


def kept_once(
    model: CausalLM, layer: int, observed: torch.Tensor, keys: torch.Tensor, end: int, scale: float, policy: Observed
) -> tuple[torch.Tensor, int]:
    """`choose_tokens` of a layer for a prompt of `end` tokens. observed [n, H, D]: queries of its last tokens; keys [1,
    KV, S, D]."""
    full = [i for i, block in enumerate(model.layers) if block.self_attn.window is None]
    return choose_tokens(observed, keys[0, :, :end], scale, policy, full.index(layer), len(full))


def longest_window(policies: Iterable[Policy | None]) -> int:
    """Tokens of the longest observation window of the policies that choose once; 0 without such."""
    return max((policy.window for policy in policies if isinstance(policy, Observed)), default=0)
