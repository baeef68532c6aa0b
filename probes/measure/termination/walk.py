"""What an attention's output is after each of its tiles, in fp64: the definition that stopping is judged by."""

from dataclasses import dataclass, fields

import torch

from dsv4.kernels.grouped_attention.termination import probed_channels


@dataclass(frozen=True)
class Walk:
    """N queries of groups of G heads that share their tiles, n tiles at most; fp64, entry t − 1 of [N, G, n] is after
    tile t.

    tiles int64 [N]: tiles that a query has, T; what lies beyond repeats the last one. moved: ‖x⁽ᵗ⁾ − x⁽ᵗ⁻¹⁾‖₂ of the
    probed channels, turned: 1 − cos(x⁽ᵗ⁾, x⁽ᵗ⁻¹⁾); changed and veered: the same two of o, over all channels; all
    infinite at the first tile. left: ‖o⁽ᵗ⁾ − o⁽ᵀ⁾‖₂, astray: 1 − cos(o⁽ᵗ⁾, o⁽ᵀ⁾). mass: ℓ⁽ᵗ⁾, the sum of exponentials
    so far, in units of the largest one. size [N, G]: ‖o⁽ᵀ⁾‖₂.
    """

    tiles: torch.Tensor
    moved: torch.Tensor
    turned: torch.Tensor
    changed: torch.Tensor
    veered: torch.Tensor
    left: torch.Tensor
    astray: torch.Tensor
    mass: torch.Tensor
    size: torch.Tensor


def walk(logits: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None = None) -> Walk:
    """One query's walk (N = 1) through its tiles in their order.

    logits [G, n, tile], −inf where nothing is (each tile has something); values [n, tile, D]; sink [G]: a logit with no
    value, which is there before the first tile (None: none).
    """
    tiles = torch.tensor([logits.shape[1]], device=logits.device)
    return together(logits.unsqueeze(0), values.unsqueeze(0), tiles, sink)


def together(logits: torch.Tensor, values: torch.Tensor, tiles: torch.Tensor, sink: torch.Tensor | None = None) -> Walk:
    """The walks of N queries, in fp64 on the device of `logits`; what is found is on the host.

    logits [N, G, n, tile], values [N, n, tile, D] and sink [G] as `walk` takes them, of each query in its first `tiles`
    int64 [N] tiles (one at least). Beyond these, logits are −inf, and values finite.
    """
    logits, values = logits.double(), values.double()
    top = logits.amax((-2, -1), keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink.double().view(-1, 1, 1))
    p = (logits - top).exp()
    first = 0 if sink is None else (sink.double().view(-1, 1, 1) - top).exp()[..., 0]
    mass = p.sum(-1).cumsum(-1) + first  # [N, G, n]
    o = torch.einsum("bgnt,bntd->bgnd", p, values).cumsum(2) / mass.unsqueeze(-1)
    last, nothing = o[:, :, -1:], torch.full_like(mass[..., :1], torch.inf)
    x = o[..., probed_channels(o.shape[-1]).to(o.device)]
    moved = torch.cat((nothing, (x[:, :, 1:] - x[:, :, :-1]).norm(dim=-1)), -1)
    turned = torch.cat((nothing, _turn(x[:, :, 1:], x[:, :, :-1])), -1)
    changed = torch.cat((nothing, (o[:, :, 1:] - o[:, :, :-1]).norm(dim=-1)), -1)
    veered = torch.cat((nothing, _turn(o[:, :, 1:], o[:, :, :-1])), -1)
    found = moved, turned, changed, veered, (o - last).norm(dim=-1), _turn(o, last), mass
    at = torch.minimum(torch.arange(mass.shape[-1], device=tiles.device), tiles.unsqueeze(-1) - 1).unsqueeze(1)
    found = (t.gather(-1, at.expand_as(t)).cpu() for t in found)
    return Walk(tiles.cpu(), *found, last[:, :, 0].norm(dim=-1).cpu())


def _turn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """1 − cos; infinite where one is zero and has no direction."""
    scale = a.norm(dim=-1) * b.norm(dim=-1)
    return torch.where(scale > 0, 1 - (a * b).sum(-1) / scale, torch.inf)


def joined(walks: list[Walk]) -> Walk:
    """Queries one after the other; all of the same G."""
    n = max(w.moved.shape[-1] for w in walks)
    pad = lambda t: (
        t if t.dim() < 3 or t.shape[-1] == n else torch.cat((t, t[..., -1:].expand(*t.shape[:-1], n - t.shape[-1])), -1)
    )
    return Walk(*(torch.cat([pad(getattr(w, f.name)) for w in walks]) for f in fields(Walk)))
