"""What crosses to the host of rounds on a device: every token once and in order, through a ring that does not grow with
the response.

A GPU's copies are played by `Late`: they arrive number by number, and a round's event passes with its last one.
"""

import pytest
import torch

from dsv4 import load_model
from dsv4.engine.generate import generate
from dsv4.errors import InputError
from dsv4.speculation import host_loop
from dsv4.speculation.device_drafters import primed
from dsv4.speculation.policy import Adaptive
from dsv4.speculation.policy_device import on_device
from dsv4.speculation.ring import HEAD, Ring
from dsv4.speculation.rounds import Rounds
from tests.speculation.test_rounds import NEW, forced, prompts, static

# columns of a record as they arrive: whether a row is done before what it wrote
DONE_FIRST = [3, 2, *range(HEAD, HEAD + 9), 1, 0]


@pytest.fixture(scope="module")
def model(brief_golden):
    return load_model(brief_golden, numerics="fp32", mtp=True)


class Event:
    """Passes when the copies that were begun before it have arrived; asking lets some more of them arrive."""

    def __init__(self, copies, at_once):
        self.copies, self.awaited, self.at_once = copies, list(copies), at_once

    def query(self):
        for _ in range(self.at_once):
            if self.copies:
                self.copies.pop(0)()
        return not any(copy in self.copies for copy in self.awaited)


class Late(Rounds):
    """Rounds whose records arrive late and piece by piece."""

    at_once = 5

    def __init__(self, *arguments, **more):
        self.copies = []
        super().__init__(*arguments, **more)
        self.ring.send = self.send

    def drain(self):
        while self.copies:
            self.copies.pop(0)()

    def send(self, wait=False):
        records = self.ring.records.clone()
        for column in DONE_FIRST:
            self.copies.append(lambda column=column: self.ring.host[:, :, column].copy_(records[:, :, column]))
        if wait:
            self.drain()

    def _mark(self):
        return Event(self.copies, self.at_once)


def late(model, ids, new, policy, stop_ids=(), kind=Late, **more):
    """A batch ready to run with up to 8 drafts, each row's first token, and lists that `told` fills."""
    cache = model.new_cache(len(ids), max(len(row) + n for row, n in zip(ids, new)) + 8, 16)
    tokens, *start = primed(model, cache, ids)
    found = kind(model, cache, 8, tokens, *start, [n - 1 for n in new], stop_ids, policy, **more)
    heard = [[] for _ in ids]
    return found, tokens.tolist(), heard, lambda row, tokens: heard[row].extend(tokens)


@pytest.mark.few(ring=[1, 2, 5])
@pytest.mark.parametrize("ring, ahead", [(1, 1), (2, 1), (2, 2), (3, 2), (3, 3), (5, 4)])
@pytest.mark.parametrize("at_once", [1, 5, 40])
def test_every_token_is_told_once_and_in_order(model, ring, ahead, at_once, monkeypatch):
    """Whatever arrives first: rows that are done long before what they wrote is there."""
    monkeypatch.setattr(Late, "at_once", at_once)
    ids = prompts(model)
    found, first, heard, tell = late(model, ids, NEW, on_device(Adaptive(), 3, model.device), ring=ring, ahead=ahead)
    out = found.run(tell)
    assert heard == out and [[t, *row] for t, row in zip(first, out)] == [
        generate(model, row, n).token_ids for row, n in zip(ids, NEW)
    ]
    assert len(found.counts.rounds) > ring and found.known.rounds == len(found.counts.rounds)


def test_rounds_that_give_the_most_tokens(model):
    ids = prompts(model)
    plain = [generate(model, row, n).token_ids for row, n in zip(ids, NEW)]
    found, first, heard, tell = late(model, ids, NEW, static(model, 3, 8), ring=2, ahead=2)
    forced(found, ids, [row + [0] * 9 for row in plain], (9, 9, 9))
    out = found.run(tell)
    assert heard == out and [[t, *row] for t, row in zip(first, out)] == plain
    assert (
        found.counts.rounds[0] == 8
        and found.written.tolist() == [n - 1 for n in NEW]
        and found.log[0, 2].tolist() == [9, 8, 9]
    )


def test_stops_and_the_first_row_that_is_done(model):
    """Rounds that are under way when it ends tell what they gave, too."""
    ids = prompts(model)
    plain = [generate(model, row, n).token_ids for row, n in zip(ids, NEW)]
    stop = next(t for t in plain[0][2:] if t not in plain[1] + plain[2])
    found, first, heard, tell = late(model, ids, NEW, static(model, 3, 3), stop_ids=(stop,), ring=2)
    out = found.run(tell)
    assert (
        heard == out and [first[0], *out[0]] == plain[0][: plain[0].index(stop) + 1] and [first[1], *out[1]] == plain[1]
    )
    found, _, heard, tell = late(model, ids, (21, 4, 21), static(model, 3, 0), ring=3, ahead=3)
    assert heard == [[]] * 3 and [len(row) for row in found.run(tell, until=any)] == [5, 3, 5]
    assert heard == [row[1:6] if b != 1 else row[1:4] for b, row in enumerate(plain)]


def test_other_requests_through_the_same_ring(model):
    ids = prompts(model, (9, 20, 33), seed=3)
    found, *_, tell = late(model, ids, NEW, on_device(Adaptive(), 3, model.device), ring=2)
    found.run(tell)
    found.cache.reset()
    tokens, *start = primed(model, found.cache, ids)
    found.restart(tokens, *start, [n - 1 for n in NEW])
    assert (found.ring.host == -1).all()
    heard = [[token] for token in tokens.tolist()]
    found.run(lambda row, tokens: heard[row].extend(tokens))
    assert heard == [generate(model, row, n).token_ids for row, n in zip(ids, NEW)]


def test_a_capture_between_rounds_leaves_what_is_not_read_yet(model):
    """Its rounds take places in the ring, and on a GPU it may begin while others are under way."""
    ids = prompts(model)
    found, first, heard, tell = late(model, ids, NEW, static(model, 3, 3), ring=2)
    real = found._launch

    def launch(D):
        with found._undisturbed():
            found._round(1)
            found._round(2)
            found.drain()  # a capture waits for all that is under way
        real(D)

    found._launch = launch
    out = found.run(tell)
    assert heard == out and [[t, *row] for t, row in zip(first, out)] == [
        generate(model, row, n).token_ids for row, n in zip(ids, NEW)
    ]


def test_what_crosses_does_not_grow_with_the_response(model):
    sizes = [
        late(model, prompts(model), (new,) * 3, static(model, 3, 3), kind=Rounds)[0].ring.nbytes for new in (16, 400)
    ]
    assert sizes[0] == sizes[1] == 4 * 3 * (HEAD + 9) * 8


def test_no_round_takes_the_place_of_one_that_is_not_read(model):
    ids = prompts(model)
    for ahead in (0, 3):
        with pytest.raises(InputError, match="ring of 2: expected 1 to that many"):
            late(model, ids, NEW, static(model, 3, 0), ring=2, ahead=ahead)
    found, *_ = late(model, ids, NEW, static(model, 3, 0), ring=2)
    found._launch(0)
    found._launch(0)
    with pytest.raises(RuntimeError, match="2 rounds are not read yet"):
        found._launch(0)


def test_a_record_of_another_round_is_not_taken_for_it():
    ring, two = Ring(2, 2, 3, torch.device("cpu")), torch.tensor([1, 2])
    for n in range(3):
        ring.put(
            torch.tensor([[5, 6], [7, 8]]) + n,
            two,
            two + n,
            two + 9,
            two + 20,
            two == n,
            torch.zeros(2, dtype=torch.int64),
            torch.tensor([n]),
        )
        ring.send()
    read = ring.read(2)
    assert (read.tokens, read.sizes, read.done) == ([[7], [9, 10]], [3, 4], [False, True])
    assert ring.read(1).tokens == [[6], [8, 9]]
    with pytest.raises(RuntimeError, match=r"round 0 was to be read, and rounds \[2\] are in its place in a ring of 2"):
        ring.read(0)


class Clock:
    """Time as `time` gives it: asking takes a µs, a nap what it says and 50 µs."""

    def __init__(self):
        self.now, self.naps = 0.0, []

    def perf_counter(self):
        self.now += 1e-6
        return self.now

    def sleep(self, seconds):
        self.naps.append(self.now)
        self.now += seconds + 50e-6


@pytest.mark.parametrize("idle, seconds, napped", [(False, 1e-3, True), (True, 3e-3, False), (True, 10e-3, True)])
def test_polls_leave_the_processor_to_others(model, monkeypatch, idle, seconds, napped):
    """At once where another round is behind the one that is waited for, else only where it is long: then a nap's length
    does not matter."""
    found, *_ = late(model, prompts(model), NEW, static(model, 3, 0), kind=Rounds)
    clock = Clock()
    monkeypatch.setattr(host_loop, "time", clock)

    class Timed:
        def query(self):
            return clock.perf_counter() >= seconds

    found._wait(Timed(), idle)
    assert bool(clock.naps) == napped and clock.now < seconds + 100e-6
    assert (len(clock.naps) <= found.counts.polls < seconds / 1e-6) and (
        not napped or idle or found.counts.polls <= seconds / 70e-6 + 1
    )
    assert all(at > host_loop.SPIN for at in clock.naps) or not idle


@pytest.mark.few(ahead=[1, 2])
@pytest.mark.parametrize("ahead, naps", [(1, False), (2, True), (3, True)])
def test_rounds_nap_where_another_is_behind(model, ahead, naps, monkeypatch):
    found, *_ = late(model, prompts(model), NEW, static(model, 3, 2), ahead=ahead)
    clock = Clock()
    monkeypatch.setattr(host_loop, "time", clock)
    monkeypatch.setattr(found, "_settle", lambda: None)  # which naps: nothing comes after it
    found.run()
    assert bool(clock.naps) == naps and found.counts.polls > 10
