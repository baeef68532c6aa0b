"""The end of a round: the reference against examples written by hand, and Triton's against the reference, bit for
bit."""

from types import SimpleNamespace

import pytest
import torch

from dsv4.kernels import commit_rows
from dsv4.kernels.commit_rows import HEAD, SIZE, reference
from dsv4.kernels.commit_rows import triton as triton_kernels
from dsv4.kernels.errors import UnsupportedInput
from dsv4.speculation import ring

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("where", [reference, triton_kernels], ids=["reference", "triton"])
# elements behind each tensor that nobody may write: more than a round beyond the log's or the ring's end would
GUARD = 8000
STATE = ("token", "left", "written", "done", "out", "log", "round")
gpu = pytest.mark.gpu


def ints(*values):
    return torch.tensor(values, device=DEVICE)


class State:
    """What rounds hold for B rows, each tensor at the front of a buffer that is compared to its end. left, written,
    token, done: lists."""

    def __init__(
        self, room, tokens, left, written=None, token=None, done=None, number=0, entries=4, rounds=3, stops=(-1,)
    ):
        B = len(left)
        self.room, self.stops, self.buffers = room, ints(*stops), {}
        self.put("token", torch.tensor(token or [50 + b for b in range(B)]))
        self.put("left", torch.tensor(left))
        self.put("written", torch.tensor(written or [0] * B))
        self.put("done", torch.tensor(done or [False] * B))
        self.put("sizes", torch.full((B,), 77))
        self.put("round", torch.tensor([number]))
        self.put("out", -1 - torch.arange(B * (room + tokens)).view(B, -1))
        self.put("log", -1000 - torch.arange(entries * 3 * B).view(entries, 3, B))
        self.put("records", -5000 - torch.arange(rounds * B * (HEAD + tokens)).view(rounds, B, -1))

    def put(self, name, value):
        buffer = torch.full(
            (value.numel() + GUARD,), True if value.dtype is torch.bool else -99, dtype=value.dtype, device=DEVICE
        )
        buffer[: value.numel()] = value.flatten()
        self.buffers[name] = buffer
        setattr(self, name, buffer[: value.numel()].view(value.shape))

    def commit(self, where, chosen, accepted, proposed):
        return where.commit(chosen, accepted, proposed, self.stops, self.room, *(getattr(self, name) for name in STATE))

    def record(self, where, chosen, count, wanted, offered, ahead=1):
        where.record(chosen, count, wanted, offered, self.left, self.done, self.sizes, self.round, self.records, ahead)

    def kept(self):
        return {name: buffer.clone() for name, buffer in self.buffers.items()}


def same(got, wanted):
    for name in wanted:
        assert got[name].dtype is wanted[name].dtype and torch.equal(got[name], wanted[name]), name


# Examples -------------------------------------------------------------------------------------------------------------


def example():
    """Rows: all drafts stay; left runs out in the middle; a stop in the middle; done before; a stop behind what stays;
    nothing left; the last place is a stop and the last token that was left."""
    state = State(
        6,
        3,
        left=[5, 1, 4, 3, 4, 0, 3],
        written=[1, 5, 2, 3, 0, 6, 3],
        done=[False, False, False, True, False, False, False],
        number=2,
        stops=(7, 9),
    )
    chosen = ints([1, 2, 3], [4, 5, 6], [8, 9, 7], [11, 7, 12], [13, 7, 9], [7, 15, 16], [17, 18, 7])
    return state, chosen, ints(2, 2, 2, 2, 0, 1, 2), ints(2, 2, 3, 0, 2, 1, 4)


@BOTH
def test_commit_of_an_example(where):
    state, chosen, accepted, proposed = example()
    before, read = state.kept(), [x.clone() for x in (chosen, accepted, proposed, state.stops)]
    count = state.commit(where, chosen, accepted, proposed)
    assert count.tolist() == [3, 1, 2, 0, 1, 0, 3] and count.dtype is torch.int64
    assert state.token.tolist() == [3, 4, 9, 53, 13, 55, 7]
    assert state.left.tolist() == [2, 0, 2, 3, 3, 0, 0]
    assert state.written.tolist() == [4, 6, 4, 3, 1, 6, 6]
    assert state.done.tolist() == [False, True, True, True, False, True, True]
    assert state.out.tolist() == [
        [-1, 1, 2, 3, -5, -6, -7, -8, -9],
        [-10, -11, -12, -13, -14, 4, -16, 5, 6],
        [-19, -20, 8, 9, -23, -24, -25, -26, 7],
        [-28, -29, -30, -31, -32, -33, 11, 7, 12],
        [13, -38, -39, -40, -41, -42, -43, 7, 9],
        [-46, -47, -48, -49, -50, -51, 7, 15, 16],
        [-55, -56, -57, 17, 18, 7, -61, -62, -63],
    ]
    assert state.log[2].tolist() == [[2, 2, 3, 0, 2, 1, 4], [2, 1, 2, 0, 0, 0, 2], [3, 1, 2, 0, 1, 0, 3]]
    assert torch.equal(state.log[[0, 1, 3]], before["log"][:84].view(4, 3, 7)[[0, 1, 3]]) and state.round.item() == 2
    assert all(torch.equal(a, b) for a, b in zip((chosen, accepted, proposed, state.stops), read))


@BOTH
def test_record_of_an_example(where):
    state = State(9, 4, left=[5, 1, 0, 3, 9], done=[False, False, True, True, False], number=7)
    chosen, count = ints([1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12], [13, 14, 15]), ints(3, 1, 2, 0, 3)
    before = state.kept()
    state.record(where, chosen, count, ints(8, 3, 2, 2, 4), ints(6, 8, 8, 1, 8))
    assert state.sizes.tolist() == [4, 0, 0, 1, 4] and state.round.item() == 8
    assert state.records[1].tolist() == [
        [7, 3, 4, 0, 1, 2, 3, 0],
        [7, 1, 0, 0, 4, 5, 6, 0],
        [7, 2, 0, 1, 7, 8, 9, 0],
        [7, 0, 1, 1, 10, 11, 12, 0],
        [7, 3, 4, 0, 13, 14, 15, 0],
    ]
    assert torch.equal(state.records[[0, 2]], before["records"][:120].view(3, 5, 8)[[0, 2]])
    same({name: state.buffers[name] for name in ("left", "done")}, {name: before[name] for name in ("left", "done")})


@BOTH
@pytest.mark.parametrize("number,entry", [(0, 0), (2, 2), (3, 3), (4, 3), (90, 3)], ids=str)
def test_rounds_beyond_the_log_take_its_last_entry(number, entry, where):
    state = State(4, 2, left=[4, 4, 4], number=number, entries=4)
    expected = state.log.clone()
    expected[entry] = ints([1, 0, 1], [1, 0, 0], [2, 1, 1])
    state.commit(where, ints([1, 2], [3, 4], [5, 6]), ints(1, 0, 0), ints(1, 0, 1))
    assert torch.equal(state.log, expected) and state.round.item() == number


@BOTH
@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 3_000_000_001], ids=str)
def test_a_ring_goes_round(number, where):
    state = State(4, 2, left=[4, 4], number=number, rounds=3)
    expected = state.records.clone()
    expected[number % 3] = ints([number, 1, 3, 0, 1, 2], [number, 2, 2, 0, 3, 4])
    state.record(where, ints([1, 2], [3, 4]), ints(1, 2), ints(8, 2), ints(8, 8))
    assert torch.equal(state.records, expected) and state.round.item() == number + 1


@BOTH
@pytest.mark.parametrize("ahead,rounds", [(1, 1), (1, 3), (2, 2), (2, 4), (3, 3), (4, 4), (4, 7)], ids=str)
def test_sizes_are_those_that_were_decided_so_many_rounds_before(ahead, rounds, where):
    """And no more than is offered and left by then. Those of the first rounds are there before."""
    first, wanted = (
        [[8 - n, 1 + n] for n in range(ahead)],
        [[7, 2], [0, 8], [3, 3], [8, 0], [5, 6], [1, 7], [4, 4], [2, 5]],
    )
    state = State(90, 2, left=[60, 9], rounds=rounds)
    for n, sizes in enumerate(first):
        state.records[(n - ahead) % rounds, :, SIZE] = ints(*sizes)
    decided = [*first, *([w, min(v, 8 - n)] for n, (w, v) in enumerate(wanted))]
    for n, sizes in enumerate(wanted):
        state.record(where, ints([1, 2], [3, 4]), ints(1, 1), ints(*sizes), ints(8 if n % 3 else 6, 8), ahead)
        decided[ahead + n][0] = min(decided[ahead + n][0], 8 if n % 3 else 6)
        assert state.records[n % rounds, :, SIZE].tolist() == decided[ahead + n]
        assert state.sizes.tolist() == [min(decided[n + 1][0], 8 if n % 3 else 6), min(decided[n + 1][1], 8 - n)], n
        state.left[1] -= 1


@BOTH
@pytest.mark.parametrize("ahead", [0, 4], ids=str)
def test_no_more_rounds_are_looked_back_than_are_recorded(ahead, where):
    state = State(9, 2, left=[4, 4], rounds=3)
    before = state.kept()
    with pytest.raises(UnsupportedInput, match=f"those of {ahead} rounds before; expected 1 to the 3"):
        state.record(where, ints([1, 2], [3, 4]), ints(1, 2), ints(8, 2), ints(8, 8), ahead)
    same(state.kept(), before)


@BOTH
@pytest.mark.parametrize("T", [1, 2, 9], ids=str)
def test_a_stop_at_each_place(T, where):
    """Row b has one at place b, which is kept. Where one draft fewer stays it is behind them, and stops nothing."""
    place, stops = torch.arange(T, device=DEVICE), (3, 5, 4)
    for stop in stops:
        chosen = 10 + place.repeat(T, 1)
        chosen.diagonal().fill_(stop)
        for fewer in (0, 1):
            state, accepted = State(40, T, left=[20] * T, stops=stops), (place - fewer).clamp(min=0)
            if not fewer:
                accepted = torch.full_like(place, T - 1)
            count = state.commit(where, chosen, accepted, accepted)
            stopped = [not fewer or b == 0 for b in range(T)]
            assert count.tolist() == [b + 1 if stopped[b] else b for b in range(T)] and state.done.tolist() == stopped
            assert state.token.tolist() == [stop if stopped[b] else 9 + b for b in range(T)]


def test_tokens_that_are_0_stop_where_0_is_a_stop_and_padding_does_not():
    for where in (reference, triton_kernels):
        state = State(9, 3, left=[9, 9, 9], stops=(0,))
        count = state.commit(where, ints([1, 2, 3], [1, 0, 3], [4, 5, 0]), ints(2, 2, 1), ints(2, 2, 2))
        assert count.tolist() == [3, 2, 2] and state.done.tolist() == [False, True, False]


# Against the reference ------------------------------------------------------------------------------------------------


def random_state(B, T, tokens, stops, seed):
    """Rows of which some are done and some have next to nothing left; the first rounds are the last that the log has
    entries for."""
    g, room = torch.Generator().manual_seed(seed), 5 * T + 3
    draw = lambda low, high: torch.randint(low, high, (B,), generator=g)
    left = torch.where(draw(0, 4) == 0, draw(0, T + 1), draw(2 * T, 4 * T + 1))
    written = torch.minimum(draw(0, room), room - left)
    return State(
        room,
        tokens,
        left.tolist(),
        written.tolist(),
        (100 + draw(0, 50)).tolist(),
        (draw(0, 5) == 0).tolist(),
        number=2,
        entries=4,
        rounds=3,
        stops=stops,
    )


def random_round(B, T, seed):
    """chosen, accepted, proposed, wanted, offered. Few different tokens, so that every place is a stop now and then."""
    g = torch.Generator().manual_seed(seed)
    chosen, draw = torch.randint(0, 20, (B, T), generator=g), lambda high: torch.randint(0, high, (B,), generator=g)
    accepted = torch.where(draw(3) == 0, T - 1, draw(T))
    return [x.to(DEVICE) for x in (chosen, accepted, accepted + draw(3), draw(9), draw(2) * draw(9))]


def played(state, where, T, rounds, seed):
    """Counts of each round, and everything that is held after each commit and each record."""
    held = []
    for n in range(rounds):
        chosen, accepted, proposed, wanted, offered = random_round(len(state.left), T, seed * 100 + n)
        count = state.commit(where, chosen, accepted, proposed)
        held.append(state.kept() | {"count": count})
        state.record(where, chosen, count, wanted, offered, 1 + seed % 3)
        held.append(state.kept())
    return held


@pytest.mark.parametrize("T", [1, 2, 5, 9], ids=str)
@pytest.mark.parametrize("B", [1, 3, 8, 32, 128], ids=str)
def test_rounds_equal_the_reference(B, T):
    for seed, stops in enumerate(((3,), (-1,), (0, 5), tuple(range(8)))):
        for tokens in (T, 9):
            make = lambda: random_state(B, T, tokens, stops, seed + 10 * B)
            wanted, got = (played(make(), where, T, 5, seed) for where in (reference, triton_kernels))
            for ours, theirs in zip(got, wanted):
                same(ours, theirs)
            if B >= 32:  # rows end in some rounds, and others go on
                assert 0 < int(wanted[0]["done"][:B].sum()) < int(wanted[-1]["done"][:B].sum())


def test_sizes_may_be_what_is_wanted_and_inputs_may_have_strides():
    """A policy whose sizes are the rounds' own; chosen tokens, drafts and flags out of larger tensors."""
    held = []
    for where in (reference, triton_kernels):
        state = random_state(8, 5, 9, (3, 4), 1)
        chosen, accepted, proposed, wanted, offered = random_round(8, 5, 2)
        apart = lambda x: torch.stack((x, x + 1), -1)[..., 0]
        count = state.commit(where, chosen.t().contiguous().t(), apart(accepted), apart(proposed))
        state.sizes.copy_(wanted)
        state.record(where, apart(chosen), apart(count), state.sizes, offered[:1].expand(8))
        held.append(state.kept())
    same(held[1], held[0])


@gpu
@pytest.mark.parametrize("B,T", [(1, 1), (1, 9), (32, 5), (128, 9)], ids=str)
def test_replays_of_a_graph_equal_the_reference(B, T):
    """In-place state carried from replay to replay; the rounds' own tensors are written between."""
    ours, theirs = (random_state(B, T, 9, (3, 5), B) for _ in range(2))
    given, spare = random_round(B, T, 0), random_state(B, T, 9, (3, 5), B)

    def once(state):
        chosen, accepted, proposed, wanted, offered = given
        count = state.commit(triton_kernels, chosen, accepted, proposed)
        state.record(triton_kernels, chosen, count, wanted, offered, 2)

    once(spare)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once(ours)
    for n in range(20):
        for held, fresh in zip(given, random_round(B, T, n)):
            held.copy_(fresh)
        graph.replay()
        count = theirs.commit(reference, *given[:3])
        theirs.record(reference, given[0], count, *given[3:], 2)
        same(ours.kept(), theirs.kept())


# The package ----------------------------------------------------------------------------------------------------------


@BOTH
def test_a_ring_reads_what_was_recorded(where):
    assert ring.HEAD == HEAD
    held = ring.Ring(2, 3, 5, torch.device(DEVICE))
    state = State(9, 5, left=[5, 1, 9], done=[False, True, False], number=4)
    state.records = held.records
    state.record(where, ints([1, 2], [3, 4], [5, 6]), ints(2, 0, 1), ints(8, 8, 2), ints(8, 8, 8))
    held.send(wait=True)
    assert held.read(4) == ring.Record([[1, 2], [], [5]], [4, 0, 2], [False, True, False])


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("name,others", [("commit", 11), ("record", 8)])
def test_a_gpu_takes_the_kernels_and_other_devices_the_reference(name, others, cuda, monkeypatch):
    taken = []
    for module in (reference, triton_kernels):
        monkeypatch.setattr(module, name, lambda *given, module=module: taken.append((module, given)) or "count")
    given = (SimpleNamespace(is_cuda=cuda), *range(others))
    assert getattr(commit_rows, name)(*given) == ("count" if name == "commit" else None)
    assert taken == [(triton_kernels if cuda else reference, given)]


def damaged(operation, name, change):
    """The operation's arguments for three rows of two tokens, one of them changed, and what takes them by name."""
    state, rows = State(4, 2, left=[4, 4, 4]), lambda: ints(1, 1, 1)
    shared = {"chosen": ints([1, 2], [3, 4], [5, 6]), **{key: getattr(state, key) for key in ("left", "done", "round")}}
    own = {
        "commit": {
            "accepted": rows(),
            "proposed": rows(),
            "stops": state.stops,
            "room": 4,
            **{key: getattr(state, key) for key in ("token", "written", "out", "log")},
        },
        "record": {
            "count": rows(),
            "wanted": rows(),
            "offered": rows(),
            "sizes": state.sizes,
            "records": state.records,
        },
    }
    given = shared | own[operation]
    return given | {name: change(given[name])}


OF_BOTH = [
    ("commit", "token", lambda x: x.int()),
    ("commit", "done", lambda x: x.long()),
    ("commit", "chosen", lambda x: x.unsqueeze(0)),
    ("commit", "accepted", lambda x: x[:2]),
    ("commit", "log", lambda x: x[:, :2]),
    ("commit", "log", lambda x: x[:0]),
    ("commit", "stops", lambda x: x[:0]),
    ("commit", "round", lambda x: x[0]),
    ("commit", "out", lambda x: x[:, :5].contiguous()),
    ("commit", "room", lambda x: 5),
    ("commit", "room", lambda x: -1),
    ("commit", "chosen", lambda x: x[:, :0]),
    ("record", "wanted", lambda x: x.int()),
    ("record", "offered", lambda x: x[0]),
    ("record", "done", lambda x: x.byte()),
    ("record", "records", lambda x: x[..., :5].contiguous()),
    ("record", "records", lambda x: x[:, :2].contiguous()),
    ("record", "count", lambda x: x.float()),
]


@BOTH
@pytest.mark.parametrize(
    "operation,name,change", OF_BOTH, ids=[f"{operation} {name} {i}" for i, (operation, name, _) in enumerate(OF_BOTH)]
)
def test_what_is_not_taken_is_named(operation, name, change, where):
    with pytest.raises(UnsupportedInput, match=f"commit_rows.{operation}: {'out' if name == 'room' else name} "):
        getattr(where, operation)(**damaged(operation, name, change))


@pytest.mark.parametrize(
    "operation,name",
    [
        ("commit", "token"),
        ("commit", "log"),
        ("commit", "out"),
        ("commit", "done"),
        ("record", "sizes"),
        ("record", "records"),
    ],
)
def test_what_the_kernels_update_must_be_contiguous(operation, name):
    with pytest.raises(UnsupportedInput, match=f"{name} is updated in place"):
        getattr(triton_kernels, operation)(**damaged(operation, name, lambda x: torch.stack((x, x), -1)[..., 0]))
