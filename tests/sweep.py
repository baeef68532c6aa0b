"""Which cases of a parametrised test `make test` runs: the marker `few`. The others are marked `sweep`, and run in
`make test-all`.

    @pytest.mark.few                            enough cases that each value of each parameter, and of each parametrised
                                                fixture, occurs once
    @pytest.mark.few("fault")                   the same for the values of `fault` alone
    @pytest.mark.few(numerics=["fp32", "qat"])  among the cases with these values, if any was collected
    @pytest.mark.few(each=lambda p: p["probe"])  the first case of each value of this function of the parameters
"""

from collections.abc import Callable, Iterable

import pytest


def mark_sweeps(items: Iterable[pytest.Item]) -> None:
    """Mark what `few` leaves out. Tests that need a GPU are left alone: they have commands of their own."""
    tests: dict[tuple, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and hasattr(item, "callspec") and not item.get_closest_marker("gpu"):
            tests.setdefault((item.parent.nodeid, item.originalname), []).append(item)
    for cases in tests.values():
        marker = cases[0].get_closest_marker("few")
        taken = {id(item) for item in chosen(cases, *marker.args, **marker.kwargs)}
        for item in cases:
            if id(item) not in taken:
                item.add_marker(pytest.mark.sweep)


def chosen(items: list[pytest.Item], *names: str, each: Callable | None = None, **only: list) -> list[pytest.Item]:
    """The items that `few` keeps. Raises UsageError for a parameter that the test does not have."""
    for name in (*names, *only):
        if name not in items[0].callspec.params:
            raise pytest.UsageError(f"{items[0].nodeid}: few names {name!r}, which is no parameter of the test")
    items = [i for i in items if all(i.callspec.params[n] in values for n, values in only.items())] or items
    if each is not None:
        return list({each(i.callspec.params): i for i in reversed(items)}.values())
    return covering(items, [{(n, i.callspec.indices[n]) for n in names or i.callspec.indices} for i in items])


def covering(items: list, values: list[set]) -> list:
    """Items that together have every value: in turn that with most new ones, of equals the first."""
    found, missing = [], set().union(*values)
    while missing:
        best = max(range(len(items)), key=lambda i: len(values[i] & missing))
        found.append(items[best])
        missing -= values[best]
    return found
