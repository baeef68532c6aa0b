"""The watch of ranks, with a clock and a store that a test holds."""

from types import SimpleNamespace

import pytest

from dsv4.parallel import watch
from dsv4.parallel.store import PATIENCE
from dsv4.parallel.watch import LEFT, SLACK, Watch


class Held(dict):
    """A store of this process."""

    def set(self, key, value):
        self[key] = value if isinstance(value, bytes) else value.encode()

    def check(self, keys):
        return all(key in self for key in keys)


@pytest.fixture
def ranks(monkeypatch):
    """Three ranks, a clock, and `pass_time(seconds, *ranks)`: those look and exchange once a second, and what each of
    them found is returned."""
    held, clock = Held(), SimpleNamespace(now=100.0)
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock.now)
    watches = [
        Watch(SimpleNamespace(store=SimpleNamespace(rank=r, size=3, store=held), issued=0), end=lambda why: None)
        for r in range(3)
    ]

    def pass_time(seconds, *living, still=()):
        found = {}
        for _ in range(int(seconds)):
            clock.now += 1
            for r in living:
                watches[r].group.issued += r not in still
                found[r] = found.get(r) or watches[r].look()
        return found

    return SimpleNamespace(watches=watches, store=held, pass_time=pass_time)


def test_ranks_that_go_on_find_nothing(ranks):
    assert ranks.pass_time(100, 0, 1, 2) == {0: None, 1: None, 2: None}


def test_a_silent_rank_is_named_by_all(ranks):
    ranks.pass_time(5, 0, 1, 2)
    assert ranks.pass_time(PATIENCE - 1, 0, 2) == {0: None, 2: None}
    found = ranks.pass_time(3, 0, 2)
    assert found[0] == found[2] == "rank 1 of 3 said nothing for 15 s; others wait for it"


def test_a_rank_whose_main_thread_stands_still_is_named_by_all_but_itself(ranks):
    ranks.pass_time(5, 0, 1, 2)
    assert not any(ranks.pass_time(PATIENCE + SLACK - 1, 0, 1, 2, still=(2,)).values())
    found = ranks.pass_time(3, 0, 1, 2, still=(2,))
    assert found[0] == found[1] == "rank 2 of 3 stalled: it exchanged nothing for 20 s; others wait for it"
    assert found[2] is None


def test_ranks_that_all_wait_for_work_find_nothing(ranks):
    ranks.pass_time(5, 0, 1, 2)
    assert not any(ranks.pass_time(100, 0, 1, 2, still=(0, 1, 2)).values())


def test_a_rank_that_is_done_may_be_silent(ranks):
    ranks.pass_time(5, 0, 1, 2)
    ranks.store.set("dsv4/at/1", LEFT)
    assert not any(ranks.pass_time(100, 0, 2).values())


def test_a_rank_that_has_not_begun_is_waited_for(ranks):
    assert not any(ranks.pass_time(100, 0, 1).values())


def test_when_the_store_is_gone_a_rank_ends(ranks, monkeypatch):
    said, mine = [], ranks.watches[1]
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(
        mine, "store", SimpleNamespace(set=lambda *given: (_ for _ in ()).throw(RuntimeError("closed")))
    )
    mine.end = said.append
    mine.run()
    assert said == ["rank 0 of 3 is gone"]
