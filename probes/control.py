"""What every comparison of a model with itself needs: proof that it could have failed.

A model whose logits are the same everywhere, or a harness that compares zeros with zeros, agrees with itself in every
schedule (known bugs 147, 148). So each such comparison carries what a wrong answer would have scored, and `controls`
fail where the harness cannot tell right from wrong.
"""

from collections.abc import Callable, Iterable

import torch

from dsv4.probes.measure import agreeing
from dsv4.probes.result import Check, Status, compare


def chance_of(logits: torch.Tensor, errors: Callable) -> float:
    """What a wrong answer scores: the median error of taking each position of logits [B, T, vocab] for the one
    before."""
    return errors(logits.roll(1, 1), logits)[:, 1:].nanmedian().item()


def attempted(name: str, where: str, part: str, make: Callable[[], Check]) -> Check:
    """make(), or an ERROR that says where it broke: one comparison that cannot be made must not take the others with
    it."""
    try:
        return make()
    except Exception as error:  # an implementation under audit may raise anything
        return Check(
            name, Status.ERROR, where, part, note=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        )


def attempted_all(
    name: str, where: str, part: str | Callable[[Exception], str], make: Callable[[], Iterable[Check]]
) -> list[Check]:
    """The checks that make() gives one by one; what breaks it is an ERROR after those that it had given. part: also by
    the error."""
    found = []
    try:
        found.extend(make())
    except Exception as error:  # an implementation under audit may raise anything
        found.append(
            Check(
                name,
                Status.ERROR,
                where,
                part(error) if callable(part) else part,
                note=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
            )
        )
    return found


def controls(logits: torch.Tensor, errors: Callable, numerics: str) -> list[Check]:
    """`errors`, a harness's own comparison, finds a run equal to itself and not equal to itself shifted by a token."""
    same, (_, _, limit) = errors(logits, logits.clone()), agreeing(torch.zeros(1, 1), numerics)
    about = dict(where="control", part="harness")
    return [
        compare(
            "a run equals itself",
            same.max().item(),
            "==",
            0.0,
            "equal numbers differ by nothing (known bug 146: a harness that shifted twice)",
            same.numel(),
            **about,
        ),
        compare(
            "a run shifted by one token is told apart",
            chance_of(logits, errors),
            ">=",
            2 * limit,
            "twice what the numerics may explain (known bug 148: both sides near 0)",
            logits.shape[1] - 1,
            **about,
        ),
    ]
