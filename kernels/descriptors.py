"""Descriptors of matrices for copies by TMA, made on the host."""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TYPES = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
    torch.int32: gl.int32,
}


def described(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Of x [M, N], for copies of [rows, columns] to shared memory in its default layout."""
    block = [rows, columns]
    return TensorDescriptor.from_tensor(x, block, gl.NVMMASharedLayout.get_default_for(block, TYPES[x.dtype]))
