"""Which drafts are accepted, and the token after them: vectorised over a ragged batch, without waiting for the device.

Greedy: the longest prefix of drafts that are each the target's argmax, then the target's own next token.

Sampling is rejection sampling (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1; Chen et al. 2023, arXiv
2302.01318): a draft x ~ q stays with probability min(1, p(x) / q(x)); in place of the first that does not, a token is
drawn from the residual max(p − q, 0), normalised; when all stay, the bonus token is drawn from p. Each emitted token is
then distributed as p, whatever q.

`accept_drawn`, and `accept_chosen` with draws, is rejection sampling of drafts that were chosen (q is 1 at the draft),
with the draws of plain decoding: the output is y ~ p, and the draft is accepted if it equals y. That has probability
p(x); otherwise y has the residual's distribution. So tokens do not depend on how many were drafted where. With
`accept_sampled` they do, through its uniform numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from dsv4.model.cut_values import CutValues, Logits, Values, in_parts
from dsv4.sampling import draw


class Accepted(NamedTuple):
    """count int64 [B]: accepted drafts. tokens int64 [B, W + 1]: the first count + 1 of a row are its output, the rest
    mean nothing."""

    count: torch.Tensor
    tokens: torch.Tensor


def accept_greedy(logits: Logits, drafts: torch.Tensor, sizes: torch.Tensor) -> Accepted:
    """logits fp32 [B, W + 1, V] after the last token and after each draft; drafts int64 [B, W]; sizes int64 [B]: drafts
    of each row."""
    return accept_chosen(logits.argmax(-1), drafts, sizes)


def accept_chosen(chosen: torch.Tensor, drafts: torch.Tensor, sizes: torch.Tensor) -> Accepted:
    """Accept drafts that equal the choice of decoding without drafts in their place: chosen int64 [B, W + 1], drafts
    int64 [B, W], sizes int64 [B]."""
    # an accepted draft equals the chosen token, so the chosen tokens are the output everywhere
    return Accepted(_prefix(chosen[:, :-1] == drafts, sizes), chosen)


def accept_sampled(
    p: Values,
    q: Values | None,
    drafts: torch.Tensor,
    sizes: torch.Tensor,
    u: torch.Tensor,
    u_last: torch.Tensor,
) -> Accepted:
    """Rejection sampling.

    p [B, W + 1, V]: target probabilities after the last token and after each draft. q [B, W, V]: those that the drafts
    were drawn from; None if they were chosen, so that q is 1 at the draft. drafts int64 [B, W], sizes int64 [B]. u [B,
    W] and u_last [B]: uniform in [0, 1), independent of the drafts. Places beyond a row's size may hold anything, NaN
    included.

    Of several ranks that whose part has a draft decides whether it stays, and the residual is drawn from as p is: a
    rank sends a byte for each draft, and 24 for each row.
    """
    target, proposal = in_parts(p), None if q is None else in_parts(q)
    (B, W), row = drafts.shape, torch.arange(len(drafts), device=drafts.device)
    count = _prefix(_stays(target[:, :W], proposal, drafts, u), sizes)
    last = target[row, count]
    if W:
        place = count.clamp(max=W - 1)
        drawn = last.indicator(drafts[row, place]) if proposal is None else proposal[row, place]
        residual = last.map(lambda p, q: (p - q).clamp(min=0), drawn)
        # if p = q up to rounding, nothing is left; the rejection was rounding too, and p itself is right
        rejected = ((count < sizes) & (residual.sum() > 0)).unsqueeze(-1)
        last = last.map(lambda p, left: torch.where(rejected, left, p), residual)
    tokens = torch.cat((drafts, drafts.new_zeros(B, 1)), 1)
    return Accepted(count, tokens.scatter(1, count.unsqueeze(1), draw(last, u_last).unsqueeze(1)))


def _stays(p: CutValues, q: CutValues | None, drafts: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Whether each of drafts [B, W] would stay by itself: bool [B, W]. p and q of a draft are on one rank."""
    if not drafts.numel():  # ranks have nothing to exchange
        return drafts.bool()
    px = p.at(drafts)
    qx = torch.ones_like(px) if q is None else q.at(drafts)
    # strict: a draft of target probability 0 never stays, even at u = 0
    return p.ranks.every(~p.mine(drafts) | (u * qx < px))


def accept_drawn(drafts: Sequence[int], draw: Callable[[int], int]) -> Iterator[int]:
    """The output tokens of one row. draw(i) is what plain decoding draws after i drafts. It is called only as long as
    the earlier drafts equal their draws, so the generator advances exactly as in plain decoding, also if the caller
    stops in between."""
    for place, draft in enumerate(drafts):
        token = draw(place)
        yield token
        if token != draft:
            return
    yield draw(len(drafts))


def _prefix(good: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """good bool [B, W] → int64 [B]: the length of the run of good places at the start of a row's first `sizes`
    places."""
    within = torch.arange(good.shape[1], device=good.device) < sizes.unsqueeze(1)
    return (good & within).long().cumprod(1).sum(1)
