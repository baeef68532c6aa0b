"""Chunked sparse prefill of one GQA layer beside dense causal attention, whole and in chunks, timed in turn."""

import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dsv4.kernels.chunked_prefill import Chunking, chunked_prefill
from dsv4.kernels.contracts import productions
from dsv4.kernels.grouped_attention.exact import sizes
from dsv4.kernels.widths import LLAMA
from scripts.bench.inputs import difference
from scripts.bench.row import Beside, Row

PRODUCTION = productions()["chunked_prefill"]
H, KV, D = sizes(LLAMA)
# relative Frobenius error of sampled queries against fp32 under the mask; bf16 rounding twice is 3e-3
TOLERANCE = 5e-3
SAMPLED = 48
WANTED = 0.55 * 800e12  # FLOP/s on kept pairs
FASTER = {4096: 1.5, 131072: 5.0}  # times as fast as the best dense peer of the same run
DENSE_CHUNK = 2048  # tokens a call of dense chunked prefill
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def rows(device: str) -> Iterator[Row]:
    for each in PRODUCTION.sizes(LLAMA)["bench"]:
        T, c = each["tokens"], each["chunking"]
        flops = 4 * H * D * kept_pairs(T, c)
        peers = {f"SDPA {name}, whole": partial(_whole, T, backend, device) for name, backend in BACKENDS.items()}
        peers[f"SDPA flash, chunks of {DENSE_CHUNK}"] = partial(_in_chunks, T, device)
        peers[f"SDPA cuDNN, chunks of {DENSE_CHUNK}"] = partial(_merged_chunks, T, device)
        yield Row(
            "chunked_prefill",
            f"{T} tokens, chunk {c.chunk}, {c.local} local + {c.heavy} heavy{c.rule and ', ' + c.rule}",
            partial(_ours, T, c, device),
            T * 4 * (H + KV) * D,
            flops,
            flops / WANTED * 1e6,
            peers,
            interleaved=True,
            beside=(Beside(FASTER[T]),) if T in FASTER else (),
            facts=dict(
                tokens=T,
                heads=H,
                kv_heads=KV,
                head=D,
                chunk=c.chunk,
                local=c.local,
                heavy=c.heavy,
                score=c.score,
                sets=c.sets(H, KV),
            ),
        )


def kept_pairs(tokens: int, c: Chunking) -> int:
    """Pairs of a query and a key that one head keeps: the causal half of its chunk, and the memory from the second
    chunk on."""
    sizes = [min(c.chunk, tokens - first) for first in range(0, tokens, c.chunk)]
    return sum(n * (n + 1) // 2 for n in sizes) + c.memory * sum(sizes[1:])


def _inputs(T: int, i: int, device: str):
    """q, keys and values."""
    return PRODUCTION.drawn(LLAMA, i, device, tokens=T, chunking=None)[:3]


def _ours(T: int, c: Chunking, device: str, i: int):
    arguments = PRODUCTION.drawn(LLAMA, i, device, tokens=T, chunking=c)
    (q, k, v), sets = arguments[:3], c.sets(H, KV)

    def run():
        return chunked_prefill(*arguments, backend="triton")

    def check():
        """Sampled queries against one softmax over their own chunk and the memory that they were given."""
        out, memory = run()
        got, wanted = [], []
        for t in torch.linspace(0, T - 1, SAMPLED).long().tolist():
            chunk = t // c.chunk
            own = torch.arange(chunk * c.chunk, t + 1, device=device)
            for one in range(sets):
                head = one * KV // sets
                seen = torch.cat((memory.positions[chunk, 0, one].long(), own)) if chunk else own
                group = slice(one * (H // sets), (one + 1) * (H // sets))
                weights = (q[0, t, group].float() @ k[0, head, seen].float().T * D**-0.5).softmax(-1)
                wanted.append(weights @ v[0, head, seen].float())
                got.append(out[0, t, group].float())
        updates = memory.updates == math.ceil(T / c.chunk) - 1
        return difference(torch.cat(got), torch.cat(wanted)) if updates.all() else float("nan"), TOLERANCE

    return run, check


def _whole(T: int, backend: SDPBackend, device: str, i: int):
    q, k, v = _inputs(T, i, device)

    def run():
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True, enable_gqa=True)

    return run


def _in_chunks(T: int, device: str, i: int):
    """Dense chunked prefill: each chunk attends to all keys so far."""
    from torch.nn.attention.bias import causal_lower_right  # takes seconds to import

    q, k, v = _inputs(T, i, device)

    def run():
        out = []
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            for first in range(0, T, DENSE_CHUNK):
                last = min(first + DENSE_CHUNK, T)
                out.append(
                    F.scaled_dot_product_attention(
                        q[:, first:last].transpose(1, 2),
                        k[:, :, :last],
                        v[:, :, :last],
                        causal_lower_right(last - first, last),
                        enable_gqa=True,
                    )
                )
        return out

    return run


def _merged_chunks(T: int, device: str, i: int):
    """Dense chunked prefill by cuDNN, whose causal mask begins at the first key: a chunk attends to itself and to all
    keys before it, and the two are merged by their log-sum-exps. Nothing is copied: cuDNN reads grouped heads and
    slices of the cache as they are."""
    q, k, v = _inputs(T, i, device)

    def run():
        out = []
        for first in range(0, T, DENSE_CHUNK):
            here = slice(first, min(first + DENSE_CHUNK, T))
            mine = q[:, here].transpose(1, 2)
            own = with_lse(mine, k[:, :, here], v[:, :, here], True)
            out.append(merge(own, with_lse(mine, k[:, :, :first], v[:, :, :first], False)) if first else own[0])
        return out

    def check():
        return difference(torch.cat(run(), 2), _whole(T, SDPBackend.CUDNN_ATTENTION, device, i)()), TOLERANCE

    return run, check


def with_lse(q, k, v, causal: bool, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [B, H, n, D], fp32 natural log-sum-exp [B, H, n, 1]) of q [B, H, n, D] over k and v [B, KV, m, D].
    scale: of q·k, None: D^(−1/2)."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, compute_log_sumexp=True, is_causal=causal, scale=scale
    )
    return out, lse.view(*out.shape[:3], 1)


def merge(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """One softmax over the keys of both: b has e^lse_b of e^lse_a + e^lse_b."""
    return torch.lerp(a[0], b[0], torch.sigmoid(b[1] - a[1]).to(a[0].dtype))
