"""Rounds that stay on the device choose what plain decoding chooses, and draft what the MTP block drafts."""

import dataclasses

import pytest
import torch

from dsv4 import load_model
from dsv4.engine.generate import generate
from dsv4.errors import InputError
from dsv4.speculation import CostAware
from dsv4.speculation.device_drafters import Drafted, primed
from dsv4.speculation.policy import Adaptive, Static
from dsv4.speculation.policy_device import DevicePolicy, on_device
from dsv4.speculation.rounds import Rounds
from scripts.bench.speculation_costs import flat

NEW = (21, 9, 14)
COSTS = dataclasses.replace(flat(), batches={3: flat().of(1)})


@pytest.fixture(scope="module")
def model(brief_golden):
    return load_model(brief_golden, numerics="fp32", mtp=True)


def prompts(model, lengths=(5, 131, 30), seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(model.config.vocab_size, (n,), generator=g).tolist() for n in lengths]


def rounds(model, ids, new, sizes, most=8, stop_ids=(), room=0, ahead=2):
    """A batch ready to run, and each row's first token."""
    lengths = [len(row) for row in ids]
    cache = model.new_cache(len(ids), max(n + more for n, more in zip(lengths, new)) + most + room, 16)
    tokens, *start = primed(model, cache, ids)
    return Rounds(
        model, cache, most, tokens, *start, [n - 1 for n in new], stop_ids, sizes, ahead=ahead
    ), tokens.tolist()


def run(model, ids, new, sizes, **more):
    """Tokens of each row, and the rounds that they took."""
    found, first = rounds(model, ids, new, sizes, **more)
    out = found.run()
    assert found.cache.lengths == found.cache.mtp_lengths == [len(row) + len(o) for row, o in zip(ids, out)]
    return [[token, *row] for token, row in zip(first, out)], found.counts


def static(model, batch, size):
    return on_device(Static(size), batch, model.device)


class Cycle(DevicePolicy):
    """A size for each row and round in turn."""

    def __init__(self, *sizes):
        self.all, self.seen = iter(sizes), []

    def observe(self, accepted, proposed):
        self.seen.append((accepted.tolist(), proposed.tolist()))

    def choose(self, pressure, live=None):
        return torch.tensor(next(self.all, (1, 0, 3)))

    def reset(self, fresh):
        pass


@pytest.mark.few(size=[0, 1, 8])
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("size", [0, 1, 2, 5, 8])
def test_tokens_are_those_of_plain_decoding(model, size, ahead):
    ids = prompts(model)
    plain = [generate(model, row, n).token_ids for row, n in zip(ids, NEW)]
    got, counts = run(model, ids, NEW, static(model, 3, size), ahead=ahead)
    assert got == plain and counts.polls == 0


def test_rows_want_different_sizes(model):
    ids, sizes = prompts(model, seed=1), Cycle((0, 4, 1), (3, 0, 8), (2, 2, 2), (0, 0, 0), (8, 1, 0))
    plain = [generate(model, row, n).token_ids for row, n in zip(ids, NEW)]
    got, counts = run(model, ids, NEW, sizes, ahead=1)
    assert got == plain
    assert counts.rounds[:4] == [4, 8, 2, 0]
    assert sizes.seen[0][1] == [0, 4, 1] and sizes.seen[1][1] == [3, 0, 8]
    assert all(a <= p for accepted, proposed in sizes.seen for a, p in zip(accepted, proposed))


def forced(found, ids, plain, wrong):
    """The next round gets what follows in each row as drafts, but for row b's draft number wrong[b]."""

    def drafts(D):
        rows = []
        for b, row in enumerate(plain):
            at = 1 + int(found.written[b])
            rows.append((row[at:] + [0] * D)[:D])
            if wrong[b] < D:
                rows[b][wrong[b]] = (rows[b][wrong[b]] + 1) % found.model.config.vocab_size
        return Drafted(torch.tensor(rows, dtype=torch.int64))

    found._drafts = drafts


def test_no_row_gets_more_than_it_wants(model):
    ids, sizes = prompts(model), Cycle((0, 2, 3), (0, 0, 0))
    plain = [generate(model, row, n).token_ids for row, n in zip(ids, NEW)]
    found, _ = rounds(model, ids, NEW, sizes)
    forced(found, ids, plain, (9, 9, 9))
    found._round(3)
    assert found.written.tolist() == [1, 3, 4] and sizes.seen == [([0, 2, 3], [0, 2, 3])]


def chain(model, row, n):
    """What the block drafts after the tokens `row`, from an empty cache: the model's streams, then its own."""
    cache = model.new_cache(1, len(row) + n)
    _, streams = model.append(torch.tensor([row[:-1]]), cache, return_streams=True)
    logits, own = model.mtp_logits(streams, torch.tensor([row[1:]]), cache, return_streams=True)
    found, streams = [int(logits[0, -1].argmax())], own[:, -1:]
    for _ in range(n - 1):
        logits, streams = model.mtp_logits(streams, torch.tensor([[found[-1]]]), cache, return_streams=True)
        found.append(int(logits[0, -1].argmax()))
    return found


@pytest.mark.few(wrong=[(0, 1, 2), (2, 3, 3)])
@pytest.mark.parametrize("wrong", [(0, 1, 2), (3, 0, 1), (2, 3, 3)])
def test_drafts_after_a_round_are_as_if_all_had_been_appended(model, wrong):
    """Rows that had other drafts accepted; what the round before wrote for refused drafts is not seen."""
    ids = prompts(model, seed=5)
    plain = [generate(model, row, 14).token_ids for row in ids]
    found, _ = rounds(model, ids, (14,) * 3, static(model, 3, 3))
    real = found._drafts
    forced(found, ids, plain, wrong)
    for _ in range(2):
        found._round(3)
    assert found.written.tolist() == [2 * (w + 1) for w in wrong]
    drafts = real(4).tokens.tolist()
    for row, text, w, got in zip(ids, plain, wrong, drafts):
        assert got == chain(model, row + text[: 1 + 2 * (w + 1)], 4)


@pytest.mark.few(length=[1, 4, 126, 127])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 126, 127, 128])
def test_every_residue(model, length):
    """Of windows of 4 and of 128 tokens, and at the sliding window's edge; with all drafts right."""
    ids = prompts(model, (length,), seed=length)
    plain = generate(model, ids[0], 12).token_ids
    assert run(model, ids, (12,), static(model, 1, 3))[0] == [plain]
    found, first = rounds(model, ids, (12,), static(model, 1, 3))
    found._drafts = lambda D: Drafted(
        torch.tensor(
            [plain[1 + int(found.written) :][:D] + [0] * max(0, D - 11 + int(found.written))], dtype=torch.int64
        )
    )
    assert [first + found.run()[0]] == [plain] and len(found.counts.rounds) == 3  # eleven tokens, four a round


def test_only_what_is_right_is_accepted(model):
    ids = prompts(model, (9,))
    plain = generate(model, ids[0], 12).token_ids
    for wrong in range(4):  # place of the first draft that is not what follows
        found, first = rounds(model, ids, (12,), static(model, 1, 3))

        def drafts(D):
            following = torch.tensor([(plain[1 + int(found.written) :] + [0] * D)[:D]], dtype=torch.int64)
            return Drafted(torch.where(torch.arange(D) == wrong, (following + 1) % model.config.vocab_size, following))

        found._drafts = drafts
        assert first + found.run()[0] == plain
        assert len(found.counts.rounds) == -(-11 // (wrong + 1))


def test_a_stop_id_inside_a_block_ends_its_row_alone(model):
    ids = prompts(model)
    plain = [generate(model, row, n).token_ids for row, n in zip(ids, NEW)]
    stop = next(t for t in plain[0][2:] if t not in plain[1] + plain[2])
    wanted = [row[: row.index(stop) + 1] if stop in row else row for row in plain]
    assert len(wanted[0]) < len(plain[0])
    assert run(model, ids, NEW, static(model, 3, 8), stop_ids=(stop,))[0] == wanted


@pytest.mark.few(ahead=[1, 3])
@pytest.mark.parametrize("ahead", [1, 2, 3, 4])
def test_adaptive_sizes_follow_their_specification(model, ahead):
    """Two rows on the device against the policy in plain Python, given what each round proposed and accepted: what it
    says after a round is the sizes of the round `ahead` behind it, within what is left then."""
    ids = prompts(model, (9, 20))
    found, _ = rounds(model, ids, (40, 40), on_device(Adaptive(), 2, model.device), ahead=ahead)
    plain = [generate(model, row, 40).token_ids for row in ids]
    policy, states, decided = Adaptive(), [Adaptive().initial()] * 2, [[8, 8]] * ahead
    assert list(found.decided) == decided
    for number, wrong in enumerate(((9, 0), (9, 0), (9, 0), (0, 9), (1, 9), (0, 4), (0, 0), (2, 1))):
        forced(found, ids, plain, wrong)
        left = found.left.tolist()
        proposed = [max(0, min(size, n - 1)) for size, n in zip(decided[number], left)]
        assert found.sizes.tolist() == proposed
        accepted = [min(w, p) for w, p in zip(wrong, proposed)]
        found._launch(8)
        found._read(None)
        states, sizes = policy.step(states, accepted, proposed)
        # room of what is left
        decided.append([max(0, min(size, n - a - 2)) for size, n, a in zip(sizes, left, accepted)])
        assert found.decided[-1] == decided[-1]
    assert len(set(map(tuple, decided))) > 3 and min(left) <= 8


def test_under_pressure_no_row_drafts_more_than_two(model):
    ids = prompts(model)
    found, first = rounds(model, ids, NEW, on_device(Adaptive(), 3, model.device), ahead=1)
    found.pressure.fill_(True)
    out = found.run()
    # sizes were chosen before there was pressure
    assert found.counts.rounds[0] == 8 and set(found.counts.rounds[1:]) <= {0, 1, 2}
    assert [[t, *row] for t, row in zip(first, out)] == [generate(model, row, n).token_ids for row, n in zip(ids, NEW)]


def test_tokens_are_told_as_they_come(model):
    ids, told = prompts(model), [[], [], []]
    found, _ = rounds(model, ids, NEW, static(model, 3, 2))
    out = found.run(on_tokens=lambda row, tokens: told[row].append(tokens))
    assert [sum(row, []) for row in told] == out and max(map(len, told)) > 2


def test_drafts_are_those_of_the_block(model):
    """With one draft a round, a round gives two tokens exactly where the block, given the model's streams, says what
    follows."""
    ids = prompts(model, (40,), seed=3)
    plain = generate(model, ids[0], 30).token_ids
    whole = torch.tensor([ids[0] + plain])
    cache = model.new_cache(1, 80)
    _, streams = model.append(whole, cache, return_streams=True)
    said = model.mtp_logits(streams[:, :-1], whole[:, 1:]).argmax(-1)[0]  # entry t: what follows token t + 1
    rights, at = 0, 40  # `at`: position of the token chosen last
    expected = 0
    while at < 40 + 29:
        right = at + 1 < len(whole[0]) and int(said[at - 1]) == int(whole[0, at + 1])
        at, expected, rights = at + 1 + right, expected + 1, rights + right
    sizes = Cycle(*[(1,)] * 40)
    _, counts = run(model, ids, (30,), sizes, most=1)
    assert len(counts.rounds) == expected


def test_chained_drafts_feed_the_blocks_own_streams(model):
    ids = prompts(model, (17,), seed=4)
    found, first = rounds(model, ids, (12,), static(model, 1, 4))
    assert found._drafts(4).tokens[0].tolist() == chain(model, ids[0] + first, 4)


@pytest.mark.parametrize("ahead", [1, 2, 3, 4])
def test_sizes_of_the_first_rounds_are_decided_before_any(model, ahead):
    """One decision for each of them, and each is of its round."""
    decisions = [(1, 0), (2, 3), (4, 5), (0, 1), (3, 2), (2, 0)]
    found, _ = rounds(model, prompts(model, (9, 20)), (60, 60), Cycle(*decisions, *[(0, 0)] * ahead), ahead=ahead)
    assert list(found.decided) == [list(sizes) for sizes in decisions[:ahead]]
    for sizes in decisions:
        assert found.sizes.tolist() == list(sizes)
        found._launch(5)
        found._read(None)


def test_what_does_not_fit_is_refused(model):
    ids = prompts(model, (9,))
    with pytest.raises(InputError, match="max_context"):
        rounds(model, ids, (12,), static(model, 1, 3), room=-1)  # rows that are done run on, behind their last token
    cache = model.new_cache(1, 64, 4)
    with pytest.raises(InputError, match="max_rewind"):
        Rounds(model, cache, 8, *primed(model, cache, ids), [3], (), static(model, 1, 3))


def test_other_requests_begin_in_the_same_rows(model):
    """As if the rounds had been made for them: tokens, sizes, and what the policy knows."""
    ids = prompts(model, (9, 20, 33), seed=3)
    found, first = rounds(model, ids, NEW, on_device(Adaptive(), 3, model.device), room=200)
    found.run()
    plain = [generate(model, row, n).token_ids for row, n in zip(ids, NEW)]
    found.cache.reset()
    tokens, *start = primed(model, found.cache, ids)
    found.restart(tokens, *start, [n - 1 for n in NEW])
    assert found.sizes.tolist() == [8, 7, 8] and found.counts.rounds == []
    assert [[t, *row] for t, row in zip(tokens.tolist(), found.run())] == plain
    with pytest.raises(InputError, match="a row may write 21 tokens; these rounds were made for 20: make new ones"):
        found.restart(tokens, *start, [21, 1, 1])


def test_history_is_what_rounds_drafted_and_kept(model):
    ids = prompts(model)
    found, _ = rounds(model, ids, NEW, on_device(Adaptive(), 3, model.device), ahead=1)
    out, sizes = found.run(), found.counts.sizes
    for b, (row, history) in enumerate(zip(out, found.history())):
        assert sum(accepted + 1 for _, accepted in history) == len(row) and all(a <= d for d, a in history)
        assert [d for d, _ in history] == [s[b] for s in sizes[: len(history)]]


def test_until_the_first_row_is_done(model):
    ids = prompts(model)
    found, _ = rounds(model, ids, (21, 4, 21), static(model, 3, 0), ahead=1)
    assert [len(row) for row in found.run(until=any)] == [3, 3, 3]


def test_rounds_of_a_capture_change_nothing(model):
    """A size that is first wanted in the middle of a run is captured there."""
    ids = prompts(model)
    found, first = rounds(model, ids, NEW, on_device(CostAware(COSTS, 3), 3, model.device), ahead=1)
    plain = [generate(model, row, n).token_ids for row, n in zip(ids, NEW)]
    found._launch(4)
    kept = [
        (holder, name, t.clone())
        for holder in (found, found.policy, found.drafter)
        for name, t in vars(holder).items()
        if isinstance(t, torch.Tensor)
    ]
    with found._undisturbed():
        found._round(2)
        found._round(7)
    for holder, name, t in kept:
        assert name == "out" or torch.equal(getattr(holder, name), t), name  # out: columns that count for nothing
    assert [[t, *row] for t, row in zip(first, found.run())] == plain
