"""What ranks say to each other between exchanges of tensors, by torch.distributed's store."""

import time
from collections.abc import Sequence

from dsv4.errors import RankLost

PATIENCE = 15.0  # seconds that a rank may be silent
# seconds that ranks may be apart where each computes long by itself: an oracle in float64 beside the model
UNHURRIED = 300.0
POLL = 0.05  # seconds between looks at what others said


class Store:
    """One rank's. store: torch.distributed's, which rank 0 keeps; patience: seconds that a rank may be silent."""

    def __init__(self, rank: int, size: int, store, patience: float = PATIENCE):
        self.rank, self.size, self.store, self.patience = rank, size, store, patience
        self.exchanges, self.beats, self._told = 0, 0, 0.0

    def exchange(self, what: str, said: bytes) -> Sequence[bytes]:
        """As `dsv4.model.ranks.Group.exchange`."""
        self.exchanges += 1
        place = f"dsv4/{self.exchanges}"
        try:
            self.store.set(f"{place}/{self.rank}", said)
            for rank in range(self.size):
                self._await(f"{place}/{rank}", rank, what)
            return [self.store.get(f"{place}/{rank}") for rank in range(self.size)]
        except RuntimeError as failure:
            raise self._gone(failure) from None

    def beat(self) -> None:
        """Say that this rank goes on, at most once a second: others then wait longer for what it will say."""
        if time.monotonic() - self._told > 1:
            self.beats, self._told = self.beats + 1, time.monotonic()
            try:
                self.store.set(f"dsv4/beat/{self.rank}", str(self.beats))
            except RuntimeError as failure:
                raise self._gone(failure) from None

    def depart(self) -> None:
        """Say that this rank will ask for nothing any more; rank 0 waits for that of the others, at most PATIENCE."""
        self.store.set(f"dsv4/left/{self.rank}", "left")
        others, until = [f"dsv4/left/{r}" for r in range(1, self.size)], time.monotonic() + PATIENCE
        while self.rank == 0 and others and not self.store.check(others) and time.monotonic() < until:
            time.sleep(POLL)

    def missing(self, failure: Exception) -> str:
        """Who did not come to an exchange: those that do not answer now. Those that wait too get here as well."""
        try:
            self.store.set(f"dsv4/lost/{self.rank}", "here")
            until = time.monotonic() + 2
            absent = [r for r in range(self.size) if r != self.rank]
            while absent and time.monotonic() < until:
                absent = [r for r in absent if not self.store.check([f"dsv4/lost/{r}"])]
                time.sleep(POLL)
        except RuntimeError:
            absent = [0]
        who = f"rank {', '.join(map(str, absent))} of {self.size} died or stalled" if absent else "an exchange failed"
        return f"{who}, and the others wait for nobody ({' '.join(str(failure).split())[:80]})"

    def _await(self, key: str, rank: int, what: str) -> None:
        """Wait until a rank has said `key`. Raises RankLost when it was silent for `patience`."""
        heard, last = time.monotonic(), None
        while not self.store.check([key]):
            beat = f"dsv4/beat/{rank}"
            now = self.store.get(beat) if self.store.check([beat]) else None
            if now != last:
                heard, last = time.monotonic(), now
            if time.monotonic() - heard > self.patience:
                raise RankLost(f"rank {rank} of {self.size} said nothing for {self.patience:.0f} s; expected {what}")
            self.beat()
            time.sleep(POLL)

    def _gone(self, failure: Exception) -> RankLost:
        return RankLost(f"rank 0 of {self.size} is gone ({' '.join(str(failure).split())[:80]})")
