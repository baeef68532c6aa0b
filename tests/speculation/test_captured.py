"""Time of captures is told as that, whether they come before decoding or in the middle of it. A clock and graphs of a
GPU are played."""

import pytest

from dsv4 import load_model
from dsv4.engine import steppers
from dsv4.engine.generate import generate, generate_speculative
from dsv4.errors import ContextOverrun
from dsv4.runtime.graph import BlockGraph, DecodeGraph
from dsv4.sampling import Sampling
from dsv4.speculation import captured, draft
from dsv4.speculation.captured import Captured, CapturedBlock
from dsv4.speculation.draft import LookupDrafter, MTPDrafter
from dsv4.speculation.policy import Adaptive, Static
from tests.speculation.scripted import Scripted, prompt_of

CAPTURE, STEP = 1000.0, 1.0


@pytest.fixture(scope="module")
def model(brief_golden):
    return load_model(brief_golden, numerics="fp32", mtp=True)


class Played:
    """A clock that moves when graphs are captured and replayed, and what was done in order: ("capture" | "step", kind,
    tokens)."""

    def __init__(self):
        self.now, self.done = 0.0, []

    def perf_counter(self):
        return self.now

    def graph(self, kind, name):
        played = self

        class Graph(kind):
            def __init__(self, model, cache, tokens=1, **more):
                super().__init__(model, cache, tokens, **more)
                played.add("capture", name, tokens, CAPTURE)

            def step(self, *given):
                played.add("step", name, self.tokens, STEP)
                return super().step(*given)

        return Graph

    def add(self, what, name, tokens, seconds):
        self.now += seconds
        self.done.append((what, name, tokens))

    def of(self, what, name=None):
        return [tokens for w, n, tokens in self.done if w == what and name in (None, n)]


@pytest.fixture
def played(monkeypatch):
    """Drafts of a single row run as on a GPU."""
    found = Played()
    for module in (steppers, captured):
        monkeypatch.setattr(module, "time", found)
    monkeypatch.setattr(Captured, "graph", found.graph(DecodeGraph, "pass"))
    monkeypatch.setattr(CapturedBlock, "graph", found.graph(BlockGraph, "block"))
    monkeypatch.setattr(draft, "captures", lambda model: True)
    return found


def drafts(model, ids, new, drafter, policy, **more):
    return generate_speculative(model, [ids], new, drafter, policy=policy, verify=Captured, **more)[0]


def before_the_first_step(played):
    kinds = [what for what, _, _ in played.done]
    return kinds.index("step")


@pytest.mark.parametrize("right", [0, 2, 9])
def test_what_is_captured_is_no_time_of_decoding(model, played, right):
    """Also where the last pass has another width than any before."""
    ids = prompt_of(model, 30)
    plain = generate(model, ids, 12).token_ids
    out = drafts(model, ids, 12, Scripted([plain], right, model.config.vocab_size), Static(3))
    captures, steps = played.of("capture"), played.of("step")
    # under pressure a pass has 2 drafts
    assert out.token_ids == plain and captures[:3] == [1, 3, 4] and before_the_first_step(played) == 3
    assert len(captures) == len(set(captures)) and set(steps) <= set(captures)
    assert out.capture_seconds == CAPTURE * len(captures) and out.decode_seconds == STEP * len(steps)


def test_widths_that_are_captured_in_the_middle(model, played):
    """A text of the drafter's own choosing: fewer drafts than the policy wants."""

    class Fewer(Scripted):
        def draft(self, sizes):
            return super().draft([min(size, self.passes % 5) for size in sizes])

    ids = prompt_of(model, 30)
    plain = generate(model, ids, 40).token_ids
    out = drafts(model, ids, 40, Fewer([plain], 9, model.config.vocab_size), Static(4))
    assert out.token_ids == plain and played.of("capture") == [1, 3, 5, 2, 4]
    assert (
        out.capture_seconds == 5 * CAPTURE
        and out.decode_seconds == STEP * len(played.of("step")) == STEP * out.speculation.verify_passes
    )


@pytest.mark.parametrize("policy", [Static(3), Adaptive()], ids=lambda p: p.name)
def test_the_block_of_sampled_drafts(model, played, policy):
    ids = prompt_of(model, 34)  # ends on a pass that keeps what is drafted, not on ever smaller ones
    out = drafts(model, ids, 24, MTPDrafter(), policy, sampling=Sampling(1.0, 0.9, 3))
    widest, first = max(policy.sizes), before_the_first_step(played)
    assert played.of("capture", "pass") == [size + 1 for size in (0, *policy.sizes)] and played.of(
        "capture", "block"
    ) == list(range(1, widest + 2))
    assert first == len(played.of("capture")) and len(out.token_ids) == 24
    assert out.capture_seconds == CAPTURE * first and out.decode_seconds == STEP * len(played.of("step"))


def test_nothing_is_captured_that_will_not_run(model, played):
    ids = prompt_of(model, 30)
    plain = generate(model, ids, 3).token_ids
    assert drafts(model, ids, 1, LookupDrafter(), Static(3)).capture_seconds == 0
    assert drafts(model, ids, 5, LookupDrafter(), Static(3), stop_ids=plain[:1]).capture_seconds == 0
    with pytest.raises(ContextOverrun):
        drafts(model, ids, 5, LookupDrafter(), Static(3), max_context=30)
    assert played.done == []
    drafts(model, ids, 3, Scripted([plain], 9, model.config.vocab_size), Static(8))
    assert played.of("capture") == [1, 2]  # two tokens are left after the first: one draft at most


def test_rows_as_one_batch_are_not_captured(model, played):
    prompts = [prompt_of(model, n) for n in (5, 40)]
    out = generate_speculative(model, prompts, 6, LookupDrafter(), policy=Static(3), verify=Captured)
    assert [o.token_ids for o in out] == [generate(model, ids, 6).token_ids for ids in prompts]
    assert all(o.capture_seconds == CAPTURE * len(played.of("capture")) for o in out) and not played.of("capture")
