"""How a verify pass runs: it takes tokens, returns the logits after each, and leaves all tokens in the caches until
they are rewound."""

from dsv4.cache.cache import Cache
from dsv4.model.causal import CausalLM, captures
from dsv4.speculation.captured import Captured
from dsv4.speculation.passes import Append, SingleSteps, Verify

HOST = ("cpu", "reference")  # backends that sum products of several rows in another order than products of one row


def default(model: CausalLM, cache: Cache, pads: bool = True) -> Verify:
    """The default way to run passes: greedy text is then that of plain decoding."""
    if captures(model):
        return Captured(model, cache, pads)  # appends what it cannot capture
    # fp32: sums differ by 4e-5, and no choice was seen to
    exact = model.backend in HOST and model.numerics.name != "fp32"
    return (SingleSteps if exact else Append)(model, cache, pads)
