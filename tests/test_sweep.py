"""The cases that `make test` keeps of a parametrised test."""

from types import SimpleNamespace

import pytest

from tests.sweep import chosen


def cases(*sizes: int, rows=()) -> list:
    """Items of a test of parameters a, b … with so many values each; rows: names that one `parametrize` has."""
    found = [{}]
    for name, size in zip("abc", sizes):
        found = [case | {name: i} for case in found for i in range(size)]
    marks = [SimpleNamespace(args=(row,)) for row in rows]
    return [
        SimpleNamespace(nodeid="t", callspec=SimpleNamespace(params=p), iter_markers=lambda _: marks) for p in found
    ]


def kept(items, *names, **more) -> list[tuple]:
    return [tuple(i.callspec.params.values()) for i in chosen(items, *names, **more)]


def test_each_value_of_each_parameter_occurs_once():
    assert kept(cases(2, 3)) == [(0, 0), (1, 1), (0, 2)]
    assert len(kept(cases(2, 3, rows=["a, b"]))) == len(kept(cases(2, 3, rows=[("a", "b")]))) == 6
    found = kept(cases(4, 3, 2))
    assert len(found) == 4 and all({row[i] for row in found} == set(range(n)) for i, n in enumerate((4, 3, 2)))


def test_of_one_parameter_alone_among_some_values_and_by_a_function():
    assert kept(cases(2, 3), "b") == [(0, 0), (0, 1), (0, 2)]
    assert kept(cases(2, 3), a=[1]) == [(1, 0), (1, 1), (1, 2)] and kept(cases(2, 3), b=[2]) == [(0, 2), (1, 2)]
    assert sorted(kept(cases(2, 3), each=lambda p: p["b"] > 1)) == [(0, 0), (0, 2)]


def test_values_that_were_not_collected_leave_all_and_unknown_names_raise():
    assert len(kept(cases(3), a=[7])) == 3
    with pytest.raises(pytest.UsageError, match="'z'"):
        chosen(cases(2), "z")


@pytest.mark.few(a=[1])
@pytest.mark.parametrize("a", [0, 1])
def test_what_is_left_out_is_marked(request, a):
    assert (request.node.get_closest_marker("sweep") is None) == (a == 1)
