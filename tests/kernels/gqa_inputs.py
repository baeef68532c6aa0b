"""Inputs of kernels, and oracles of grouped-query attention, shared by tests. Nothing here comes from the kernels."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def turns(n, half, seed=0):
    angle = torch.rand(n, half, generator=torch.Generator().manual_seed(seed)) * 6.28
    return torch.complex(angle.cos(), angle.sin()).to(DEVICE)


def cache(B, T, H, KV, S, D, start, dtype=torch.float32, seed=0):
    """q [B, T, H, D], keys and values [B, KV, S, D] with NaN behind each row's last token, start int64 [B]."""
    q = randn(B, T, H, D, seed=seed, dtype=dtype)
    keys, values = (randn(B, KV, S, D, seed=seed + i, dtype=dtype) for i in (1, 2))
    for b, first in enumerate(start):
        keys[b, :, first + T :], values[b, :, first + T :] = NAN, NAN
    return q, keys, values, torch.tensor(start, device=DEVICE)


def written_out(q, keys, values, start, window, scale, blocks=None, block=128):
    """Softmax in fp64 by its formula, one query and head at a time, over the keys that it sees."""
    (B, T, H, D), KV = q.shape, keys.shape[1]
    out = torch.zeros(B, T, H, D, dtype=torch.float64, device=q.device)
    for b in range(B):
        for t in range(T):
            p = int(start[b]) + t
            for h in range(H):
                kv = h // (H // KV)
                seen = (
                    range(p + 1)
                    if blocks is None
                    else [
                        i
                        for number in blocks[b, t, kv].tolist()
                        if number >= 0
                        for i in range(number * block, number * block + block)
                    ]
                )
                seen = [i for i in seen if i <= p and (window is None or i > p - window)]
                if seen:
                    e = scale * (keys[b, kv, seen].double() @ q[b, t, h].double())
                    e = (e - e.max()).exp()
                    out[b, t, h] = (e / e.sum()) @ values[b, kv, seen].double()
    return out


def close(got, wanted, tolerance=1e-5):
    assert got.shape == wanted.shape and torch.equal(got.isfinite(), wanted.isfinite())
    error = (got.double() - wanted.double()).nan_to_num().norm() / wanted.double().nan_to_num().norm().clamp(min=1e-30)
    assert error <= tolerance, float(error)


def concentrated(S=1024, far=600, D=32, p=1000):
    """One row, one KV head, two query heads: the first looks at token 0 only, the second at tokens `far` and newer
    alike; so the first head's output stands still from the first tile on, and the second's once the traversal has
    passed `far`."""
    q, keys, values, start = cache(1, 1, 2, 1, S, D, [p])
    keys[..., :2] = 0
    q[..., :2], q[..., 2:] = 0, q[..., 2:] * 1e-3
    q[0, 0, 0, 0], q[0, 0, 1, 1] = 40.0, 40.0
    keys[0, 0, 0, 0], keys[0, 0, far : p + 1, 1] = 1.0, 1.0
    return q, keys, values, start


def terminated(q, keys, values, start, tiles, window, scale, tau, phi, patience, use_scale=True, use_direction=True):
    """The definition, in fp64 and head by head: every head walks its tiles alone; a KV head reads as many as its
    slowest head.

    tiles: for (b, t, kv) the list of lists of positions. Returns out [B, T, H, D] fp64 and tiles read [B, T, KV]."""
    (B, T, H, D), KV = q.shape, keys.shape[1]
    G, channels = H // KV, sorted({(5 + 37 * i) % D for i in range(32)}) if D > 32 else range(D)
    out, read = torch.zeros(B, T, H, D, dtype=torch.float64), torch.zeros(B, T, KV, dtype=torch.int32)

    def attend(b, t, h, seen):
        e = scale * (keys[b, h // G, seen].double() @ q[b, t, h].double())
        e = (e - e.max()).exp()
        return ((e / e.sum()) @ values[b, h // G, seen].double()).cpu()

    for b, t, kv in torch.cartesian_prod(torch.arange(B), torch.arange(T), torch.arange(KV)).tolist():
        p = int(start[b]) + t
        lists = [[i for i in tile if 0 <= i <= p and (window is None or i > p - window)] for tile in tiles[b, t, kv]]
        lists = [tile for tile in lists if tile]
        stops = []
        for h in range(kv * G, kv * G + G):
            streak, before, stop = 0, None, len(lists)
            for n in range(1, len(lists) + 1):
                x = attend(b, t, h, sum(lists[:n], []))[list(channels)]
                if before is not None:
                    near = (x - before).norm() < tau
                    along = 1 - torch.dot(x, before) / (x.norm() * before.norm()) < phi
                    streak = streak + 1 if (near or not use_scale) and (along or not use_direction) else 0
                before = x
                if streak >= patience:
                    stop = n
                    break
            stops.append(stop)
        read[b, t, kv] = max(stops)
        for h in range(kv * G, kv * G + G):
            out[b, t, h] = attend(b, t, h, sum(lists[: max(stops)], []))
    return out.to(q.device), read.to(q.device)


def newest_first(p, tile, window=None):
    """Positions of a dense traversal: the sink's tile first if any of it is seen, then from the newest tile back."""
    lowest = 0 if window is None else max(0, p - window + 1) // tile
    order = list(range(p // tile, lowest - 1, -1))
    if lowest == 0:
        order = [0] + order[:-1]
    return [list(range(i * tile, i * tile + tile)) for i in order]
