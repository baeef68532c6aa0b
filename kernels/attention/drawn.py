"""Pools, queries and lists, for the cases of contracts of attention."""

import math

import torch

from dsv4.kernels.cache_rows import PAGE, PackedRows
from dsv4.kernels.contract import doubles

FAMILIES = ("random", "small rows", "pointed", "cancellation", "below every mask", "one row", "rotated part")


FEW_BITS = {  # families whose packed rows, in FP8 already, leave a rounded query nothing to show in
    "one row": "the result is one row",
    "small rows": "logits are near zero whatever the query",
    "cancellation": "q is zero",
    "below every mask": "q is one number, and all logits move alike",
}


def rows_of(family: str, n: int, D: int, draw) -> torch.Tensor:
    """fp32 [n, D]: what the pools of a family hold."""
    rows = draw.rand(n, D)
    if family == "small rows":
        return 0.1 * rows
    if family == "cancellation":  # +a and −a in the two halves of every list, see `lists`
        return rows + torch.where(torch.arange(n) % 2 == 0, 16.0, -16.0).unsqueeze(1)
    return rows


def queries_of(family: str, last: torch.Tensor, K: int, H: int, scale: float, draw) -> tuple:
    """(q fp32 [N, H, D], sink fp32 [H]) for queries whose last live row is `last` [N, D] of K.

    pointed: the last live row and the sink weigh as much as all other rows together. cancellation: q = 0, so that all
    rows weigh the same. below every mask: all logits near −1.2e4, where a mask of −1e4 would win. rotated part: the
    last dims alone decide."""
    N, D = last.shape
    sink = draw.shuffled(torch.linspace(-4, 4, H))
    noise = draw.rand(N, H, D)
    unit = last / last.square().sum(-1, keepdim=True).clamp(min=1e-6)
    aim = lambda logit: (unit * (logit / scale)).unsqueeze(1)
    if family == "pointed":
        want = torch.full((H,), math.log(max(K, 2)))
        return aim(math.log(max(K, 2))) + 0.05 * noise, want
    if family == "cancellation":
        return torch.zeros(N, H, D), sink
    if family == "below every mask":
        return noise, torch.full((H,), -1.2e4)
    if family == "one row":
        return noise, torch.full((H,), float("-inf"))
    if family == "rotated part":
        return torch.cat((0.01 * noise[..., : D // 2], 3 * noise[..., D // 2 :]), -1), sink
    return noise, sink


def lists(family: str, n: int, N: int, K: int, draw) -> torch.Tensor:
    """int64 [N, K]: rows below n, each list with its own holes.

    Row 0 of the pool is never listed, so that a −1 that is gathered as row 0 brings in something. Query 0 has no hole,
    the next ones have −1 at the end, at the start, in the middle, everywhere, everywhere but at the last place, and one
    row twice."""
    index = 1 + draw.choose(n - 1, N, K) if n > K else 1 + draw.below(n - 1, N, K)
    if family == "cancellation":  # even rows first, so that sums grow before they cancel
        index = index.gather(1, (index % 2).argsort(dim=1, stable=True))
    holes = (
        lambda row: row,
        lambda row: torch.cat((row[: K // 2 + 1], torch.full((K - K // 2 - 1,), -1))),
        lambda row: torch.cat((torch.full((K // 3,), -1), row[K // 3 :])),
        lambda row: torch.where((torch.arange(K) // max(1, K // 5)) % 2 == 1, -1, row),
        lambda row: torch.full((K,), -1),
        lambda row: torch.where(torch.arange(K) < K - 1, -1, row),
        lambda row: torch.cat((row[:-1], row[:1])),
    )
    for i in range(N):
        if family != "cancellation":
            index[i] = holes[(i + draw.seed) % len(holes)](index[i])
        if family == "one row":
            index[i] = torch.where(torch.arange(K) == (7 * i) % K, 1 + (3 * i) % (n - 1), -1)
    return index


def last_of(*parts) -> torch.Tensor:
    """The last live row fp32 [N, D] of lists (rows [N, K, D], present [N, K])…; zeros of an empty one."""
    found = None
    for rows, present in parts:
        at = (present.long() * (1 + torch.arange(present.shape[1]))).amax(1)
        row = rows[torch.arange(len(rows)), (at - 1).clamp(min=0)].float()
        found = row if found is None else torch.where((at > 0).unsqueeze(1), row, found)
    return found


def pool(values: torch.Tensor, form, rope: int, draw):
    """Rows fp32 [n, D] in the activations' dtype, or packed."""
    return values.to(draw.dtype) if form is None else draw.packed(form, values, rope)


def unlisted(rows, *indices: torch.Tensor) -> torch.Tensor:
    """What of a pool no list names: bool mask over rows [R, 1], or over the bytes of packed pages."""
    if isinstance(rows, PackedRows):
        return bytes_outside(rows, torch.cat([i.flatten() for i in indices]))
    free = torch.ones(len(rows), 1, dtype=torch.bool)
    for index in indices:
        free[index[index >= 0]] = False
    return free


def bytes_outside(rows: PackedRows, listed: torch.Tensor) -> torch.Tensor:
    """bool like `data`: bytes of rows of a flat pool that are not listed, and the padding of pages."""
    free = rows._replace(data=torch.ones_like(rows.data))
    live = listed[listed >= 0]
    free.payload[live // PAGE, live % PAGE] = 0
    free.scales[live // PAGE, live % PAGE] = 0
    return free.data.bool()


def unseen(rows, live: torch.Tensor) -> torch.Tensor:
    """What of the entries of a batch no query of the row sees: bool mask over [B, n, 1] or over packed bytes; live
    [B]."""
    if not isinstance(rows, PackedRows):
        return (torch.arange(rows.shape[1]) >= live.unsqueeze(1)).unsqueeze(-1)
    runs = [bytes_outside(rows._replace(data=run), torch.arange(int(n))) for run, n in zip(rows.data, live)]
    return torch.stack(runs)


def low(q, window, kept, form, rope, scale, draw):
    """Queries and pools with q·row·scale ≈ −1.2e4 ± 1: row = 1 + noise, q = −a + noise."""
    D = q.shape[-1]
    plain = [1 + 0.02 * torch.randn(len(doubles(p)), D, generator=draw.g) for p in (window, kept)]
    low = torch.full_like(q, -1.2e4 / scale / D)
    return low, *(pool(p, form, rope, draw) for p in plain)
