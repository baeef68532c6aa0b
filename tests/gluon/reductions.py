"""Emulations of reductions and scans of triton.experimental.gluon.language, and the methods of tensors."""

import builtins

import torch
import triton.language as tl
from triton.experimental.gluon.language import SliceLayout

from tests.gluon import language
from tests.gluon.dtypes import from_bits, to_bits
from tests.gluon.errors import refuse
from tests.gluon.language import add, maximum, minimum, ravel
from tests.gluon.values import Tensor, recast


def _without(layout, axis: int):
    try:
        return SliceLayout(axis, layout) if layout.rank > 1 else None
    except ValueError:  # of a layout that was not derived
        return None


def reduce(input, axis, combine_fn, keep_dims=False, reduction_ordering=None):
    """Halves are combined until one element is left."""
    several = isinstance(input, builtins.tuple)
    parts = input if several else (input,)
    if axis is None:
        parts, axis = builtins.tuple(ravel(p) for p in parts), 0
    axis = axis % parts[0].rank
    while (size := parts[0].shape[axis]) > 1:
        low, high = (_pieces(parts, axis, start, size // 2) for start in (0, size // 2))
        got = combine_fn(*low, *high)
        parts = got if several else (got,)
    out = builtins.tuple(
        _reduced(p, axis, keep_dims, source) for p, source in zip(parts, input if several else (input,))
    )
    return out if several else out[0]


def _pieces(parts, axis: int, start: int, length: int):
    return [
        Tensor(from_bits(to_bits(p.data, p.dtype).narrow(axis, start, length), p.dtype), p.dtype, p.layout)
        for p in parts
    ]


def _reduced(x: Tensor, axis: int, keep_dims: bool, source: Tensor) -> Tensor:
    layout = source.layout if keep_dims else _without(source.layout, axis)
    return Tensor(x.data if keep_dims else x.data.squeeze(axis), x.dtype, layout)


def _promoted(x: Tensor) -> Tensor:
    if x.dtype.primitive_bitwidth >= 32:
        return x
    return recast(x, tl.float32 if x.dtype.is_floating() else tl.int32)


def max(input, axis=None, return_indices=False, return_indices_tie_break_left=True, keep_dims=False):
    refuse(return_indices, "max with indices has no emulation: use gl.reduce")
    return reduce(_promoted(input), axis, maximum, keep_dims)


def min(input, axis=None, return_indices=False, return_indices_tie_break_left=True, keep_dims=False):
    refuse(return_indices, "min with indices has no emulation: use gl.reduce")
    return reduce(_promoted(input), axis, minimum, keep_dims)


def sum(input, axis=None, keep_dims=False, dtype=None):
    if dtype is None and input.dtype.is_int() and input.dtype.primitive_bitwidth < 32:
        dtype = tl.int32 if input.dtype.is_int_signed() else tl.uint32
    return reduce(input if dtype is None else recast(input, dtype), axis, add, keep_dims)


def xor_sum(input, axis=None, keep_dims=False):
    return reduce(input, axis, lambda a, b: a ^ b, keep_dims)


def reduce_or(input, axis, keep_dims=False):
    return reduce(input, axis, lambda a, b: a | b, keep_dims)


def associative_scan(input, axis, combine_fn, reverse=False):
    refuse(isinstance(input, builtins.tuple), "a scan of several tensors has no emulation")
    size = input.shape[axis]
    pieces = [_pieces((input,), axis, i, 1)[0] for i in range(size)][:: -1 if reverse else 1]
    for i in range(1, size):
        pieces[i] = combine_fn(pieces[i - 1], pieces[i])
    bits = torch.cat([to_bits(p.data, p.dtype) for p in pieces[:: -1 if reverse else 1]], axis)
    return Tensor(from_bits(bits, pieces[0].dtype), pieces[0].dtype, input.layout)


def cumsum(input, axis=0, reverse=False):
    return associative_scan(input, axis, add, reverse)


METHODS = (
    "reshape permute ravel split broadcast expand_dims cast exp exp2 log log2 sqrt rsqrt abs floor ceil gather"
).split()  # that tensors have too
for _method in (
    *(getattr(language, name) for name in METHODS),
    sum,
    max,
    min,
    xor_sum,
    reduce,
    associative_scan,
    cumsum,
):
    setattr(Tensor, _method.__name__, _method)
