"""Controls for comparisons of a model with itself: proof that they could have failed.

A model whose logits are the same everywhere, or a harness that compares zeros with zeros, agrees with itself in every
schedule (known bugs 147, 148). So each such comparison has the score of a wrong answer as its chance level, and
`controls` fail if the harness cannot tell right from wrong.
"""

from collections.abc import Callable, Iterable

import torch

from dsv4.probes.compare import agreeing
from dsv4.probes.result import Check, Status, compare


def chance_of(logits: torch.Tensor, errors: Callable) -> float:
    """The chance level: the median error of taking each position of logits [B, T, vocab] for the one before."""
    return errors(logits.roll(1, 1), logits)[:, 1:].nanmedian().item()


def attempted(name: str, where: str, part: str, make: Callable[[], Check]) -> Check:
    """make(), or an ERROR that says where it broke: one comparison that cannot be made must not stop the others."""
    try:
        return make()
    except Exception as error:  # an implementation under audit may raise anything
        return Check(
            name, Status.ERROR, where, part, note=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        )


def attempted_all(
    name: str, where: str, part: str | Callable[[Exception], str], make: Callable[[], Iterable[Check]]
) -> list[Check]:
    """The checks of the generator make(). If it raises, an ERROR follows the checks so far. part: also of that
    ERROR."""
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
