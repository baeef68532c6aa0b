"""Which cases of a parametrised test `make test` runs. The others are marked `sweep` and run in `make test-all`.

Unless a marker says otherwise these are enough cases that each value of each parameter, and of each parametrised
fixture, occurs once.

    @pytest.mark.few("fault")                    the values of `fault` alone need to occur
    @pytest.mark.few(numerics=["fp32", "qat"])   among the cases with these values
    @pytest.mark.few(each=lambda p: p["probe"])  the first case of each value of this function of the parameters
    @pytest.mark.every                           all cases: where the combinations are what matters
"""

from collections.abc import Callable, Iterable

import pytest


def mark_sweeps(items: Iterable[pytest.Item]) -> None:
    """Mark what is left out. Tests that need a GPU are left alone: they have commands of their own."""
    tests: dict[tuple, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and not (item.get_closest_marker("every") or item.get_closest_marker("gpu")):
            tests.setdefault((item.parent.nodeid, item.originalname), []).append(item)
    for cases in tests.values():
        few = cases[0].get_closest_marker("few") or pytest.mark.few.mark
        taken = {id(item) for item in chosen(cases, *few.args, **few.kwargs)}
        for item in cases:
            if id(item) not in taken:
                item.add_marker(pytest.mark.sweep)


def chosen(items: list[pytest.Item], *names: str, each: Callable | None = None, **only: list) -> list[pytest.Item]:
    """The items that `few` keeps. Raises UsageError for a parameter that the test does not have.

    Where no item has the values of `only`, as when one case was asked for by its id, all items count.
    """
    for name in (*names, *only):
        if name not in items[0].callspec.params:
            raise pytest.UsageError(f"{items[0].nodeid}: few names {name!r}, which is no parameter of the test")
    items = [i for i in items if all(i.callspec.params[n] in values for n, values in only.items())] or items
    if each is not None:
        return list({each(i.callspec.params): i for i in reversed(items)}.values())
    rows = [(name,) for name in names] or together(items[0])
    return covering(items, [{(row, tuple(id(i.callspec.params[n]) for n in row)) for row in rows} for i in items])


def together(item: pytest.Item) -> list[tuple[str, ...]]:
    """Names of the parameters, those together that one `parametrize` gives values to."""
    given = [marker.args[0] for marker in item.iter_markers("parametrize")]
    rows = [tuple(name.strip() for name in (row.split(",") if isinstance(row, str) else row)) for row in given]
    return rows + [(name,) for name in item.callspec.params if not any(name in row for row in rows)]


def covering(items: list, values: list[set]) -> list:
    """Items that together have every value: in turn that with most new ones, of equals the first."""
    found, missing = [], set().union(*values)
    while missing:
        best = max(range(len(items)), key=lambda i: len(values[i] & missing))
        found.append(items[best])
        missing -= values[best]
    return found
