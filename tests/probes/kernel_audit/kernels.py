"""Kernels of rms_norm that tests write to a file: an honest one, and one for each way to go wrong."""

from pathlib import Path

SOURCE = """
import os
import time

import torch


def good(x, weight, eps):
    y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)


def wrong(x, weight, eps):
    return good(x, weight, eps + 1e-3)


def written(x, weight, eps, out):
    out.copy_(good(x, weight, eps))


def exits(x, weight, eps):
    os._exit(3)


def hangs(x, weight, eps):
    time.sleep(3600)


def raises(x, weight, eps):
    raise RuntimeError("the third tile is missing\\nand a second line")


def refuses(x, weight, eps):
    if weight is None:
        raise NotImplementedError("a weight is needed")
    return good(x, weight, eps)


def refuses_all(x, weight, eps):
    raise NotImplementedError("no such GPU")


def prints(x, weight, eps):
    print("x" * 100_000, flush=True)
    return good(x, weight, eps)


def two(x, weight):
    return good(x, weight, 1e-6)
"""


def written(folder: Path, source: str = SOURCE) -> Path:
    """The file of these kernels."""
    path = folder / "mine.py"
    path.write_text(source)
    return path
