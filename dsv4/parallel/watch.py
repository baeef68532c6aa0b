"""Ranks on GPUs watch each other: a host that waits for its GPU, which waits for another one, would wait for ever."""

import os
import sys
import threading
import time
from typing import Protocol

from dsv4.parallel.ranks_asked import LOST, WATCHED
from dsv4.parallel.store import PATIENCE, Store

EVERY = 1.0  # seconds between two looks
SLACK = 5.0  # seconds that a rank's main thread may stand still beyond its patience: kernels may compile
LEFT = b"left"  # what a rank says last, when nothing failed
ENDING = 5.0  # seconds for this process to end after rank 0, which keeps the store, has


class Watched(Protocol):
    store: Store
    issued: int


class Watch(threading.Thread):
    """A thread that tells the other ranks that this process lives and how many exchanges its host has asked for, and
    ends it with one line when another is silent for PATIENCE, or behind and asks for none for `patience` + SLACK
    seconds."""

    def __init__(self, group: Watched, patience: float = PATIENCE, end=None):
        super().__init__(daemon=True, name="watch of ranks")
        store = group.store.store
        self.group, self.rank, self.size = group, group.store.rank, group.store.size
        self.store = store.clone() if hasattr(store, "clone") else store  # two threads would wait for each other
        self.heard = {r: (time.monotonic(), b"") for r in range(self.size) if r != self.rank}
        self.moved = {r: (time.monotonic(), -1) for r in self.heard}
        self.told, self.patience, self.end = 0, patience, end or ended

    def run(self) -> None:
        while True:
            try:
                found = self.look()
            except RuntimeError:  # rank 0 has ended: this one does too, or is lost
                time.sleep(ENDING)
                found = f"rank 0 of {self.size} is gone"
            if found:
                return self.end(found)
            time.sleep(EVERY)

    def look(self) -> str | None:
        """Tell how far this rank is, and whom it waits for in vain, if anyone."""
        self.told, now = self.told + 1, time.monotonic()
        self.store.set(f"dsv4/at/{self.rank}", f"{self.told} {self.group.issued}")
        for rank in self.heard:
            key = f"dsv4/at/{rank}"
            said = self.store.get(key) if self.store.check([key]) else b""
            if said == LEFT:
                continue
            if said != self.heard[rank][1]:
                self.heard[rank] = now, said
            issued = int(said.split()[1]) if said else -1
            if issued != self.moved[rank][1] or issued >= self.group.issued:
                self.moved[rank] = now, issued
            if said and now - self.heard[rank][0] > PATIENCE:
                return f"rank {rank} of {self.size} said nothing for {PATIENCE:.0f} s; others wait for it"
            if said and now - self.moved[rank][0] > (still := self.patience + SLACK):
                return f"rank {rank} of {self.size} stalled: it exchanged nothing for {still:.0f} s; others wait for it"
        return None


def ended(why: str) -> None:
    """End this process at once: its main thread may wait for a GPU that waits for ever."""
    if WATCHED not in os.environ:  # else who started the ranks says which one it was
        print(f"error: {why}", file=sys.stderr, flush=True)
    os._exit(LOST if WATCHED in os.environ else 2)
