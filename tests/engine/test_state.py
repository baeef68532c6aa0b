"""Where a request stops, what it may still get, and what is counted of it: beside values computed by hand."""

import pytest
import torch

from dsv4.engine.state import Generation, PagedWork, Pass, Request, Result, Verdict, Work
from dsv4.speculation import Adaptive, Static
from dsv4.speculation.result import Speculation


def work(kind=Work, result=None, most: int = 5, limit: int = 20, **more):
    """A request with a prompt of 4 tokens that stops at 9; its clock moves by a second each time it is asked."""
    times = iter(range(100))
    result = Generation([1, 2, 3, 4], speculation=Speculation("known")) if result is None else result
    request, generator = Request("r", (1, 2, 3, 4), most), torch.Generator()
    return kind(request, result, limit, generator, stops=frozenset({9}), clock=lambda: float(next(times)), **more)


@pytest.mark.parametrize(
    "passes, output, reason, told",
    [
        ([[5], [6, 7]], [5, 6, 7], "", [5, 6, 7]),
        ([[5], [6, 9, 7]], [5, 6, 9], "eos", [5, 6]),
        ([[9]], [9], "eos", []),
        ([[5, 5, 5], [6, 7, 8]], [5, 5, 5, 6, 7], "max_new_tokens", [5, 5, 5, 6, 7]),
        ([[5, 5, 5, 5], [9, 7]], [5, 5, 5, 5, 9], "eos", [5, 5, 5, 5]),
    ],
    ids=["goes on", "a stop id amid a pass", "a stop id at once", "all tokens amid a pass", "both at once"],
)
def test_tokens_come_out_until_it_stops(passes, output, reason, told):
    heard = []
    found = work(on_token=heard.append)
    counts = [found.give(tokens) for tokens in passes]
    assert found.result.token_ids == output and found.ids == [1, 2, 3, 4, *output] and heard == told
    assert (found.result.stop_reason, found.active, sum(counts)) == (reason, not reason, len(output))
    of_paged = work(PagedWork, Result("r"))
    for tokens in passes:
        of_paged.give(tokens)
    assert of_paged.result.stop_reason == {"max_new_tokens": "max_tokens"}.get(reason, reason)


def test_tokens_of_a_pass_come_at_once():
    found = work()
    for tokens in ([5], [6, 7], [8]):
        found.give(tokens)
    assert (found.result.first_token, found.result.between_tokens) == (1.0, [1.0, 0.0, 1.0])


@pytest.mark.parametrize(
    "most, limit, wanted, rewind, drafts, room",
    [(9, 20, 3, 99, 3, 8), (4, 20, 5, 99, 2, 3), (9, 7, 5, 99, 2, 3), (9, 20, 5, 3, 2, 8), (2, 20, 5, 99, 0, 1)],
    ids=["as the policy wants", "tokens left", "context", "rewind", "the last token"],
)
def test_drafts_have_room(most, limit, wanted, rewind, drafts, room):
    """After one token of output the context holds 4 tokens, and the fifth is not run yet."""
    found = work(most=most, limit=limit)
    found.give([5])
    assert (found.drafts(wanted, rewind), found.room) == (drafts, room)
    found.give([9])
    assert found.drafts(wanted, rewind) == found.room == 0


def test_a_full_context_has_no_room_but_has_not_stopped():
    found = work(limit=4)
    found.give([5])
    assert found.active and found.left == 4 and found.free == found.room == found.drafts(3, 9) == 0


def test_what_a_pass_decided_is_counted_as_far_as_it_came_out():
    found = work(PagedWork, Result("r", speculation=Speculation("known")), most=9, policy=Adaptive())
    found.take(Verdict([5, 6, 7], 2, [5, 6, 8]), 3, True)
    found.take(Verdict([], 0, [1]), 1, False)  # logits that were not finite: it was no pass
    found.take(Verdict([5, 9, 7], 2, [5, 9]), 2, False)
    counts = found.result.speculation
    assert (counts.block_size_history, counts.accepted_history, counts.draft_steps) == ([3, 2], [2, 2], 5)
    assert found.result.pressed_history == [True, False] and found.passes == [Pass([5, 6, 8], 3), Pass([5, 9], 2)]
    mean = Adaptive().observe(Adaptive().observe(Adaptive().initial(), 2, 3), 2, 2)
    assert found.again == 2 and found.epsilon == found.state == mean
    plain = work(policy=Static(3))
    plain.take(Verdict([5, 9, 7, 8], 3, [5, 9, 7]), 3, False)
    assert plain.result.speculation.accepted_history == [2]
