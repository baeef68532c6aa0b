"""What ranks say to each other by a store, and who leaves first."""

import threading
import time

import pytest
from torch.distributed import HashStore

from dsv4.parallel import store as stores
from dsv4.parallel.store import Store


@pytest.fixture
def two():
    shared = HashStore()
    return [Store(rank, 2, shared) for rank in range(2)]


def test_rank_0_keeps_the_store_until_the_others_leave(two):
    waiting = threading.Thread(target=two[0].depart, daemon=True)
    waiting.start()
    time.sleep(4 * stores.POLL)
    assert waiting.is_alive()
    two[1].depart()  # which waits for nobody
    waiting.join(2)
    assert not waiting.is_alive()


def test_rank_0_does_not_wait_for_ever(two, monkeypatch):
    monkeypatch.setattr(stores, "PATIENCE", 0.2)
    begun = time.monotonic()
    two[0].depart()
    assert 0.2 <= time.monotonic() - begun < 2
