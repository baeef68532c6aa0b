"""Numerics: one explicit choice, made at load."""

from dataclasses import dataclass, replace

import torch

from dsv4.errors import InputError
from dsv4.kernels.cache_rows import STREAM_FORMATS, RowFormat


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
    kv_rows, index_rows: byte format of window rows and entries, of index keys; None: plain numbers of dtype `cache`.
    """

    name: str
    activation: torch.dtype
    cache: torch.dtype
    simulate: bool
    dense: bool
    kv_rows: RowFormat | None = None
    index_rows: RowFormat | None = None

    @property
    def simulate_kv(self) -> bool:
        """Whether main KV passes through FP8 before it is used. With an FP8 cache it does in all numerics, so that a
        token's own step reads what later steps will read."""
        return self.simulate or self.kv_rows is not None and self.kv_rows.simulated

    @property
    def simulate_index(self) -> bool:
        """Whether index queries and keys pass through Hadamard and FP4. With an FP4 index cache both do."""
        return self.simulate or self.index_rows is not None and self.index_rows.simulated

    def with_caches(self, cache: str, index_cache: str) -> "Numerics":
        """A copy whose caches, and whose index keys, have the formats of these names: 'auto', or one of STREAM_FORMATS.

        'auto' is the activations' dtype. Raises InputError for a name that is unknown, or a format narrower than fp32
        where activations are fp32.
        """
        kv, index = STREAM_FORMATS["kv"], STREAM_FORMATS["index"]
        for option, name, known in (("cache", cache, kv), ("index cache", index_cache, index)):
            if name != "auto" and name not in known:
                raise InputError(f"{option} format {name!r} is unknown; expected auto, {', '.join(known)}")
            if name != "auto" and self.activation is torch.float32:
                raise InputError(
                    f"{option} format {name!r} was asked for with numerics {self.name}, whose caches are fp32; "
                    "use native or qat"
                )
        return replace(self, kv_rows=kv.get(cache), index_rows=index.get(index_cache))


NUMERICS = {
    n.name: n
    for n in (
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
