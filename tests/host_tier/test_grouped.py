"""Keys and values in host memory: the bits of the resident cache, over sequences of steps. On a GPU with pinned
memory."""

import pytest
import torch

from dsv4.cache.host_tier.ahead import Ahead
from dsv4.cache.host_tier.grouped import HostRows
from dsv4.cache.host_tier.stream import DenseStream
from dsv4.errors import CapacityError
from dsv4.kernels.block_choice import Policy, dense, sink_window
from dsv4.kernels.block_summaries import summarise_blocks
from dsv4.kernels.dispatch import DispatchLedger, bind
from dsv4.kernels.operations import GQA_OPERATIONS
from tests.kernels.gqa_inputs import DEVICE, NAN, randn

BACKENDS = pytest.mark.parametrize("backend", ["reference", "triton"])
B, H, KV, D, SCALE = 2, 2, 1, 16, 0.3
BOUND, MEAN = Policy("bound", "bound", 16, 1, 1, 2), Policy("mean", "mean", 16, 1, 1, 2)


class Resident:
    """A layer with everything on the device."""

    def __init__(self, op, backend, policy, S, dtype):
        self.op, self.backend, self.policy = op, backend, policy
        self.keys, self.values = (torch.full((B, KV, S, D), NAN, dtype=dtype, device=DEVICE) for _ in range(2))
        make = lambda kind: (
            torch.zeros(B, KV, S // policy.block, D, dtype=dtype, device=DEVICE) if policy.selector == kind else None
        )
        self.low, self.high, self.mean = make("bound"), make("bound"), make("mean")

    def take(self, q, k, v, biases, cis, start, tokens):
        q = self.op.rotary_rows(q, k, v, biases, cis, self.keys, self.values, start)
        summarise_blocks(
            self.keys, start, tokens, self.low, self.high, self.mean, self.policy.block, backend=self.backend
        )
        return q

    def decode(self, q, k, v, biases, cis, start):
        T = q.shape[0] // B
        q = self.take(q, k, v, biases, cis, start, T)
        self.blocks = self.op.choose_blocks(q, KV, self.low, self.high, self.mean, start, self.policy)
        return self.op.gather_attention(q, self.keys, self.values, self.blocks, start, None, SCALE, self.policy.block)


def tokens(T, seed, dtype):
    """q, k, v of T tokens of every row, biases, and turns."""
    q, k, v = (randn(B * T, n * D, seed=seed + i, dtype=dtype) for i, n in enumerate((H, KV, KV)))
    biases = tuple(randn(n * D, seed=90 + i, dtype=dtype) for i, n in enumerate((H, KV, KV)))
    angle = randn(B * T, D // 2, seed=seed + 3)
    return q, k, v, biases, torch.polar(torch.ones_like(angle), angle)


def pair(policy, backend, S=128, slots=None, dtype=torch.float32):
    op = bind(GQA_OPERATIONS, backend, DispatchLedger())
    rows = HostRows(B, KV, S, D, dtype, torch.device(DEVICE), policy, slots)
    for t in (rows.keys, rows.values, rows.host_keys, rows.host_values):
        t.fill_(NAN)
    return op, Resident(op, backend, policy, S, dtype), rows


def filled(resident, rows, T, seed, dtype=torch.float32):
    """T tokens of every row, by the reference."""
    op, start = bind(GQA_OPERATIONS, "reference", DispatchLedger()), torch.zeros(B, dtype=torch.int64, device=DEVICE)
    other = Resident(op, "reference", resident.policy, resident.keys.shape[2], dtype)
    other.take(*tokens(T, seed, dtype), start, T)
    for name in ("keys", "values", "low", "high", "mean"):
        for to in (resident, rows):
            if getattr(other, name) is not None and (to is resident or name not in ("keys", "values")):
                getattr(to, name).copy_(getattr(other, name))
    rows.store(resident.keys, resident.values, start, T)


def appended(op, resident, rows, start, T, seed, dtype=torch.float32):
    """T tokens of every row by dense attention, here and there."""
    given, (keys, values) = tokens(T, seed, dtype), DenseStream([rows]).layer(0)
    q = resident.take(*given, start, T)
    want = op.grouped_attention(q, resident.keys, resident.values, start, None, SCALE)
    mine = op.rotary_rows(*given, keys, values, start)
    rows.store(keys, values, start, T)
    summarise_blocks(keys, start, T, rows.low, rows.high, rows.mean, rows.block, backend=resident.backend)
    assert torch.equal(op.grouped_attention(mine, keys, values, start, None, SCALE), want)


# Over 5 s: every step of either cache runs in Triton's interpreter.
@BACKENDS
@pytest.mark.parametrize(
    "policy,slots,dtype",
    [
        (BOUND, 4, torch.float32),
        (BOUND, 6, torch.bfloat16),
        (MEAN, 4, torch.float32),
        (sink_window(48, 16), None, torch.float32),
    ],
    ids=str,
)
def test_every_step_has_the_bits_of_the_resident_cache(policy, slots, dtype, backend):
    """Ragged rows; single tokens and a few at once, over borders of blocks; rewinds within the block, to a border, by
    many blocks and to nothing, each followed by other tokens; an append in between. Staging and host memory begin as
    NaN."""
    op, resident, rows = pair(policy, backend, 128, slots, dtype)
    filled(resident, rows, 100, 1000, dtype)
    start = torch.tensor([100, 61], device=DEVICE)  # the rows' lengths: what stands behind is of no row
    moves = {2: [-3, -5], 4: [-20, -33], 6: [-2, 0], 8: [-80, -1]}
    for step in range(11):
        T = 3 if step in (3, 7) else 1
        given = tokens(T, 10 * step, dtype)
        want = resident.decode(*given, start)
        got = rows.decode(op, *given, rows.places(start, T), SCALE)[0]
        assert got.isfinite().all() and torch.equal(got, want), step
        start = start + T + torch.tensor(moves.get(step, [0, 0]), device=DEVICE)
        if step == 6:
            appended(op, resident, rows, start, 18, 5000, dtype)
            start = start + 18
    assert torch.equal(rows.host_keys.nan_to_num(), resident.keys.nan_to_num())
    assert torch.equal(rows.host_values.nan_to_num(), resident.values.nan_to_num())
    hits, misses, nbytes = rows.traffic()
    assert hits > 0 and misses > 0 and nbytes == misses * 2 * policy.block * D * dtype.itemsize


@BACKENDS
def test_a_guess_changes_no_bit_and_spares_misses(backend):
    """Guesses of the right query, of a wrong one and of listed blocks, on a branch of their own."""
    op, resident, rows = pair(BOUND, backend)
    _, _, alone = pair(BOUND, backend)
    filled(resident, rows, 110, 1)
    filled(resident, alone, 110, 1)
    ahead, start = Ahead(torch.device(DEVICE)), torch.tensor([109, 93], device=DEVICE)
    for step in range(6):
        given = tokens(1, 10 * step, torch.float32)
        want = resident.decode(*given, start)
        if step % 3 == 0:  # the right blocks
            guess = lambda: rows.prefetch(op, None, start, resident.blocks)
        else:  # of another query
            guess = lambda: rows.prefetch(op, randn(B, 1, H, D, seed=step), start)
        ahead.start(guess)
        ahead.join()
        before = rows.traffic().misses
        assert torch.equal(rows.decode(op, *given, rows.places(start), SCALE)[0], want)
        assert torch.equal(alone.decode(op, *given, alone.places(start), SCALE)[0], want)
        assert step % 3 or rows.traffic().misses == before
        start = start + 1
    assert rows.traffic(guessed=True).misses > 0 and rows.traffic().misses < alone.traffic().misses


@BACKENDS
def test_what_is_staged_stays(backend):
    """A choice that is made again costs nothing; one more distant block costs one block of keys and of values a
    head."""
    op, resident, rows = pair(BOUND, backend)
    filled(resident, rows, 112, 1)
    rows.keys[:, :, -16:], rows.values[:, :, -16:] = resident.keys[:, :, 96:112], resident.values[:, :, 96:112]
    start, q = torch.full((B,), 111, device=DEVICE), randn(B, 1, H, D)
    lists = lambda *numbers: torch.tensor(numbers, dtype=torch.int32, device=DEVICE).expand(B, 1, KV, -1).contiguous()
    for numbers, misses in (((0, 2, 4, 6), 3), ((0, 2, 4, 6), 3), ((0, 3, 4, 6), 4), ((4, 2, 0, 6), 4)):
        got = rows.attend(op, q, rows.places(start)[0], SCALE, lists(*numbers))[0]
        assert torch.equal(
            got, op.gather_attention(q, resident.keys, resident.values, lists(*numbers), start, None, SCALE, 16)
        )
        assert rows.traffic().misses == misses * B * KV


@BACKENDS
@pytest.mark.parametrize("count", [1, 2, 3])
def test_layers_are_streamed_in_turn(count, backend):
    made = [pair(BOUND, backend)[2] for _ in range(count)]
    for i, rows in enumerate(made):
        rows.host_keys.fill_(i)
        rows.host_values.fill_(-i)
    stream = DenseStream(made)
    assert stream.nbytes == sum(r.host_bytes for r in made) == count * 2 * B * KV * 128 * D * 4
    for _ in range(2):
        for i in range(count):
            keys, values = stream.layer(i)
            assert (keys == i).all() and (values == -i).all()


def test_what_cannot_be_is_an_error():
    make = lambda policy, slots: HostRows(B, KV, 128, D, torch.float32, torch.device(DEVICE), policy, slots)
    with pytest.raises(CapacityError, match="4 blocks.*3 slots"):
        make(BOUND, 3)
    whole = make(dense(), None)
    assert whole.table is None and whole.device_bytes == 0 and whole.traffic() == (0, 0, 0)


@BACKENDS
@pytest.mark.parametrize("end", [84, 80], ids=["in the block of the tail", "at a border"])
def test_an_append_over_staged_blocks_drops_them(end, backend):
    """Decode at 85 (block 4 is staged, 5 the tail), rewind to 66, append other tokens, decode again: both hold other
    rows now."""
    op, resident, rows = pair(sink_window(64, 16), backend)
    filled(resident, rows, 85, 1)
    for start, seed in ((85, 10), (end, 20)):
        start = torch.full((B,), start, device=DEVICE)
        if seed == 20:
            appended(op, resident, rows, torch.full((B,), 66, device=DEVICE), end - 66, 5000)
        for step in range(2):
            given = tokens(1, seed + 4 * step, torch.float32)
            want = resident.decode(*given, start + step)
            assert torch.equal(rows.decode(op, *given, rows.places(start + step), SCALE)[0], want)
