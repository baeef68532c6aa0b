"""Inputs of hyper-connections, by what they make visible. The contracts of their compositions take them too."""

import torch

FAMILIES = {
    "random": "",
    "asymmetric": "comb far from its transpose, after one to three iterations of large logits",
    "closed gates": "σ of −40: eps alone decides what passes",
    "open gates": "σ of 20 and more",
    "where eps decides": "mean squares of the size of norm_eps",
    "sizes": "tokens of sizes 2^−20 to 2^20",
    "uneven streams": "streams of one token of sizes 1 to 2^6: a mean square of one stream is another",
    "coded": "each row of fn looks at one number of its own",
    "cancellation": "long sums that grow before they cancel",
    "zeros": "one token of zeros",
    "steep gates": "large products that base takes away, so that their rounding decides the gates",
}


def streams_of(family: str, N: int, n: int, d: int, draw) -> torch.Tensor:
    """fp32 [N, n, d]."""
    x = draw.rand(N, n, d)
    match family:
        case "where eps decides":
            return 1e-3 * x
        case "sizes":
            return x * 2.0 ** torch.linspace(-20, 20, N).round().view(N, 1, 1)
        case "uneven streams":
            return x * 2.0 ** (2 * ((torch.arange(n) + torch.arange(N).unsqueeze(1)) % n)).unsqueeze(-1)
        case "coded":
            return draw.coded(N * n, d).float().view(N, n, d)
        case "cancellation":  # +16 in the first half of all columns, −16 in the second
            half = torch.where(torch.arange(n * d) < n * d // 2, 16.0, -16.0).view(n, d)
            return x + half
        case "zeros":
            x[0] = 0
    return x


def mixing(family: str, M: int, n: int, d: int, draw) -> tuple[torch.Tensor, torch.Tensor]:
    """fn [M, n·d] and base [M], fp32. The first 2n rows make gates, the last n² make comb."""
    fn, base = draw.matrix(M, n * d), draw.rand(M)
    if family == "asymmetric":  # an upper triangle: its transpose is a lower one
        base[2 * n :] = (8 * torch.triu(torch.ones(n, n)) + 3 * draw.rand(n, n)).flatten()[: max(0, M - 2 * n)]
    if family == "closed gates":
        base[: 2 * n] = -40
    if family == "open gates":
        base[: 2 * n] = 20 + draw.rand(min(M, 2 * n)).abs()
    if family == "coded":
        fn = torch.zeros(M, n * d)
        fn[torch.arange(M), (torch.arange(M) * (n * d // M + 1) + 3) % (n * d)] = 0.5
    if family == "cancellation":
        fn = (1 + 0.1 * draw.rand(M, n * d)) / (n * d) ** 0.5
    return fn, base


def steep(N: int, fn, scales, n: int, d: int, draw) -> tuple:
    """streams, fn and base: tokens of nearly one direction, and logits of size 64 from products, −64 − 3 from base."""
    one = draw.rand(n, d)
    streams = one + 0.01 * draw.rand(N, n, d)
    products = 64 * fn @ (one / one.square().mean().sqrt()).flatten()
    return streams, 64 * fn, -products * scales - 3


def sinkhorn_iterations(family: str, w, turn: int) -> int:
    """Few iterations make visible which of the steps comes first, and one that is missing."""
    return 1 + turn % 3 if family == "asymmetric" else w.hc_sinkhorn_iters


def connection(family: str, N: int, w, draw, turn: int = 0) -> tuple:
    """streams, fn, scale, base, iterations, eps and norm_eps of `mhc_pre`."""
    n, d = w.hc_mult, w.hidden_size
    fn, base = mixing(family, 2 * n + n * n, n, d, draw)
    scale, streams = torch.tensor([0.7, 1.3, 2.0], device=draw.device), streams_of(family, N, n, d, draw)
    if family == "steep gates":
        streams, fn, base = steep(N, fn, scale.repeat_interleave(torch.tensor([n, n, n * n])), n, d, draw)
    return streams.to(draw.dtype), fn, scale, base, sinkhorn_iterations(family, w, turn), w.hc_eps, w.rms_norm_eps


def head(family: str, N: int, w, draw) -> tuple:
    """streams, fn, scale, base, eps and norm_eps of `mhc_head`."""
    n, d = w.hc_mult, w.hidden_size
    fn, base = mixing(family, n, n, d, draw)
    scale, streams = torch.tensor([0.7], device=draw.device), streams_of(family, N, n, d, draw)
    if family == "steep gates":
        streams, fn, base = steep(N, fn, scale.expand(n), n, d, draw)
    return streams.to(draw.dtype), fn, scale, base, w.hc_eps, w.rms_norm_eps


MERGES = ("random", "asymmetric", "permutation", "coded", "integers", "cancellation", "closed gates", "sizes")


def merge(family: str, N: int, w, draw) -> tuple:
    """out, streams, post and comb of `mhc_post`."""
    n, d = w.hc_mult, w.hidden_size
    out, streams = draw.rand(N, d), draw.rand(N, n, d)
    post, comb = draw.uniform(0, 2, N, n), draw.uniform(0, 1, N, n, n)
    match family:
        case "asymmetric":
            comb = torch.triu(comb) + 0.01 * torch.tril(comb)
        case "permutation":  # old stream j becomes new stream j + 1
            comb = torch.eye(n).roll(1, 1).expand(N, n, n).clone()
        case "coded":
            out, streams = draw.coded(N, d).float(), draw.coded(N * n, d).float().view(N, n, d)
            place = torch.arange(n * n).view(n, n)
            comb = (2.0 ** (place % 5 - 2)).expand(N, n, n).clone()
            post = (2.0 ** torch.arange(n)).expand(N, n).clone()
        case "integers":
            out, streams = draw.integers(-3, 3, N, d).float(), draw.integers(-3, 3, N, n, d).float()
            post, comb = draw.integers(0, 2, N, n).float(), draw.integers(0, 2, N, n, n).float()
        case "cancellation":  # what the streams give, the output takes away but for noise
            streams, post = (64 * draw.rand(N, n, d)).to(draw.dtype).float(), torch.ones(N, n)
            comb = draw.uniform(0, 1, N, n, 1).expand(N, n, n).clone()
            out = 0.25 * draw.rand(N, d) - (comb[:, :, :1] * streams).sum(1)
        case "closed gates":  # the output counts as little as gates of σ(−12) let it
            post = post * 2.0**-16
            streams = streams * 2.0**-14
        case "sizes":
            size = 2.0 ** torch.linspace(-20, 20, N).round()
            out, streams = out * size.view(N, 1), streams * size.flip(0).view(N, 1, 1)
    return out.to(draw.dtype), streams.to(draw.dtype), post, comb
