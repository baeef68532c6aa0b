"""What is measured of logits and of continuations, as pure functions; the definitions of README.md."""

from dataclasses import dataclass, fields

import torch

from dsv4.errors import NotFinite

CONFIDENT = 1.0  # logits between the first and the second choice of the exact run


@dataclass(frozen=True)
class Positions:
    """Measured positions, each of the tensors [n] on the host.

    exact_choice, choice int64: argmax of the exact run and of the variant; margin: first less second logit of the exact
    run; kl: of `divergence`, nats; exact_nll, nll: −log p of the token that the text goes on with, nats. float64.
    """

    exact_choice: torch.Tensor
    choice: torch.Tensor
    margin: torch.Tensor
    kl: torch.Tensor
    exact_nll: torch.Tensor
    nll: torch.Tensor


def positions(exact: torch.Tensor, variant: torch.Tensor, following: torch.Tensor) -> Positions:
    """exact, variant: logits [n, vocab] at the same positions of the same text; following int64 [n], the text's next
    tokens.

    Raises NotFinite for logits that are infinite or NaN: they would be averaged away, or spoil every mean.
    """
    for name, logits in (("exact run", exact), ("variant", variant)):
        if not torch.isfinite(logits).all():
            raise NotFinite(
                f"logits of the {name} are infinite or NaN at {int((~torch.isfinite(logits)).any(-1).sum())} of "
                f"{len(logits)} positions; its fidelity means nothing: audit the checkpoint first"
            )
    p, q = (logits.double().log_softmax(-1) for logits in (exact, variant))
    nll = lambda logs: -logs.gather(-1, following.to(logs.device).unsqueeze(-1)).squeeze(-1)
    first, second = exact.double().topk(2, dim=-1).values.unbind(-1)
    found = exact.argmax(-1), variant.argmax(-1), first - second, divergence(p, q), nll(p), nll(q)
    return Positions(*(t.cpu() for t in found))


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(P ‖ Q) = Σ_v P(v) (log P(v) − log Q(v)) in nats, of log-probabilities p (exact), q (variant) [n, vocab] →
    [n]."""
    return (p.exp() * (p - q)).sum(-1)


def joined(parts: list[Positions]) -> Positions:
    return Positions(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Positions)))


def figures(of: Positions) -> dict:
    """As JSON values; None where nothing was there to be divided by.

    agreement: share of positions where both have the same argmax. agreement_chance: of two argmaxes drawn
    independently, each by its own frequencies. agreement_confident: agreement where the exact run's margin exceeds
    CONFIDENT, of `confident` positions.
    kl: mean over positions; kl_p99: its 99th percentile. perplexity: exp of the mean −log p of the text's next token.
    """
    agree, sure = of.exact_choice == of.choice, of.margin > CONFIDENT
    share = lambda x: x.double().mean().item() if len(x) else None
    size = 1 + int(max(of.exact_choice.max(), of.choice.max()))
    frequencies = [
        torch.bincount(choice, minlength=size).double() / len(choice) for choice in (of.exact_choice, of.choice)
    ]
    return {
        "positions": len(agree),
        "agreement": share(agree),
        "agreement_chance": (frequencies[0] * frequencies[1]).sum().item(),
        "confident": int(sure.sum()),
        "agreement_confident": share(agree[sure]),
        "kl": share(of.kl),
        "kl_p99": of.kl.quantile(0.99).item(),
        "perplexity_exact": of.exact_nll.mean().exp().item(),
        "perplexity": of.nll.mean().exp().item(),
    }


def exact_prefixes(exact: torch.Tensor, variant: torch.Tensor) -> list[int]:
    """Tokens of each greedy continuation before the first that differs: exact, variant int64 [B, N] → B lengths of 0 …
    N."""
    return (exact == variant).long().cumprod(-1).sum(-1).tolist()


def prefix_figures(lengths: list[int], new: int) -> dict:
    """The distribution of `exact_prefixes` over prompts, of continuations of `new` tokens; full: the share without any
    difference."""
    of = torch.tensor(lengths, dtype=torch.float64)
    return {
        "prompts": len(lengths),
        "new_tokens": new,
        "prefix_mean": of.mean().item(),
        "prefix_median": of.quantile(0.5).item(),
        "prefix_full": (of == new).double().mean().item(),
        "prefixes": sorted(int(n) for n in lengths),
    }
