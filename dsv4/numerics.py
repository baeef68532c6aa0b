"""Numerics: one explicit choice, made at load."""

from dataclasses import dataclass

import torch

from dsv4.errors import InputError


@dataclass(frozen=True)
class Numerics:
    """How numbers are held and rounded.

    Whatever the choice, these stay fp32: mHC, router scores, softmax, compressor pooling,
    RoPE, sinks, index scores, logits.

    activation: dtype of activations and of the residual streams.
    cache: dtype of window rows, compressed entries and index keys.
    simulate: the official quantisation simulation (FP8 activations of linears whose weight is
        FP8 or FP4; FP8 main KV; Hadamard and FP4 of index queries and keys).
    dense: weights are dequantised to fp32 when loaded; else they stay as stored.
    """

    name: str
    activation: torch.dtype
    cache: torch.dtype
    simulate: bool
    dense: bool


NUMERICS = {
    n.name: n for n in (
        Numerics("fp32", torch.float32, torch.float32, simulate=False, dense=True),
        Numerics("native", torch.bfloat16, torch.bfloat16, simulate=False, dense=False),
        Numerics("qat", torch.bfloat16, torch.bfloat16, simulate=True, dense=False),
        Numerics("qat:fp32", torch.float32, torch.float32, simulate=True, dense=False),
    )
}


def numerics_named(name: str) -> Numerics:
    """The choice called `name`. Raises InputError listing the choices."""
    if name not in NUMERICS:
        raise InputError(f"numerics {name!r} is unknown; expected one of {', '.join(NUMERICS)}")
    return NUMERICS[name]
