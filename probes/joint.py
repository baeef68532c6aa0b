"""One list of checks of what several ranks found in one probe."""

import json
from dataclasses import replace

from dsv4.model.ranks import ALONE, Ranks
from dsv4.probes.result import Check, Status
from dsv4.probes.subject import Subject


def ranks_of(subject: Subject) -> Ranks:
    """The ranks that the subject's model is shared by; ALONE for any other subject."""
    return getattr(getattr(subject, "model", None), "ranks", ALONE)


def agreed(ranks: Ranks, value: bool) -> bool:
    """Rank 0's value, on every rank: what depends on a clock must not differ."""
    return value if ranks.size == 1 else json.loads(ranks.group.exchange("a decision", json.dumps(value).encode())[0])


def joint(ranks: Ranks, checks: list[Check]) -> list[Check]:
    """The checks of all ranks, each once and as the rank has it that found the worst. Every rank calls it, and gets the
    same. Checks are the same by name, place and how often both came before. Raises RankLost."""
    if ranks.size == 1:
        return checks
    said = json.dumps([check.to_json() for check in checks]).encode()
    found: dict[tuple, Check] = {}
    for rank, one in enumerate(ranks.group.exchange("the checks of a probe", said)):
        seen: dict[tuple, int] = {}
        for row in json.loads(one):
            check = Check(**row | {"status": Status(row["status"])})
            place = check.name, check.where
            seen[place] = number = seen.get(place, 0) + 1
            known = found.get((*place, number))
            if known is None or check.status.rank > known.status.rank:
                found[(*place, number)] = _of(check, rank) if rank else check
    return list(found.values())


def _of(check: Check, rank: int) -> Check:
    """The check, whose note says which rank it is of."""
    return replace(check, note="; ".join(filter(None, (f"rank {rank}", check.note))))
