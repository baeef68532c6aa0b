"""The loop: where it stops, what it reports, which errors it raises, and that a row never depends on its neighbours'
luck."""

import json
from functools import partial

import pytest
import torch

from dsv4 import load_model
from dsv4.engine.generate import check_can_speculate, generate, generate_speculative
from dsv4.errors import ContextOverrun, InputError
from dsv4.sampling import Sampling
from dsv4.speculation.draft import LookupDrafter, MTPDrafter
from dsv4.speculation.policy import Adaptive, Static
from tests.speculation.scripted import Scripted, drafted, plain, prompt_of


@pytest.fixture(scope="module")
def model(brief_golden):
    return load_model(brief_golden, numerics="fp32")


def scripted(model, want, right=9):
    return Scripted([want], right, model.config.vocab_size)


@pytest.mark.parametrize("place", range(6))
def test_a_stop_inside_an_accepted_block(model, place):
    """Drafts behind a stop id were right and do not come out; the stop id is not shown."""
    ids, shown = prompt_of(model, 10), []
    want = plain(model, ids, 8)
    stop = {want[place]}
    out = drafted(
        model, [ids], 8, scripted(model, want), 5, stop_ids=stop, on_token=lambda row, token: shown.append((row, token))
    )[0]
    first = want.index(want[place])
    assert out.token_ids == want[: first + 1] and out.stop_reason == "eos"
    assert shown == [(0, token) for token in want[:first]]


@pytest.mark.parametrize("n", [1, 2, 5, 6, 7])
def test_max_new_tokens_inside_a_block(model, n):
    ids = prompt_of(model, 10)
    want = plain(model, ids, n)
    for context in (None, 40):
        out = drafted(model, [ids], n, scripted(model, want + [0] * 9), 5, max_context=context)[0]
        assert (
            out.token_ids == want and out.stop_reason == "max_new_tokens" and out.max_context == (context or 10 + n - 1)
        )
        assert out.speculation.block_size_history == ([min(5, n - 2)] if n > 1 else [])


@pytest.mark.few(room=[0, 3, 6])
@pytest.mark.parametrize("room", range(7))
def test_the_end_of_the_context_is_the_same_error_after_the_same_tokens(model, room):
    ids, shown, expected = prompt_of(model, 10), [], []
    with pytest.raises(ContextOverrun) as plainly:
        generate(model, ids, 20, max_context=10 + room, on_token=expected.append)
    want = plain(model, ids, 20)
    for right in (0, 2, 9):
        shown.clear()
        with pytest.raises(ContextOverrun) as speculating:
            drafted(
                model,
                [ids],
                20,
                scripted(model, want, right),
                4,
                max_context=10 + room,
                on_token=lambda row, token: shown.append(token),
            )
        assert shown == expected and str(speculating.value) == str(plainly.value)


@pytest.mark.parametrize(
    "prompts, n, context, error",
    [
        ([[]], 3, None, "the prompt is empty"),
        ([], 3, None, "the prompt is empty"),
        ([[1, 2], []], 3, None, "the prompt is empty"),
        ([[1]], 0, None, "max_new_tokens is 0"),
        ([[1, 2, 3]], 3, 2, "the prompt has 3 tokens, max_context is 2"),
        ([[1, 99999]], 3, None, "token id 99999 is outside the vocabulary"),
    ],
)
def test_bad_requests(model, prompts, n, context, error):
    with pytest.raises(InputError, match=error):
        generate_speculative(model, prompts, n, LookupDrafter(), max_context=context)


def test_a_model_without_the_block_is_told_about_lookup(brief_golden):
    without = load_model(brief_golden, numerics="fp32", mtp=False)
    with pytest.raises(InputError, match="has none; use --speculate lookup"):
        generate_speculative(without, [[1, 2]], 3, MTPDrafter())
    check_can_speculate(without, LookupDrafter())
    want = plain(without, [5, 6, 7], 8)
    assert drafted(without, [[5, 6, 7]], 8, LookupDrafter())[0].token_ids == want


def test_a_backend_without_caches_is_refused(model, monkeypatch):
    monkeypatch.setattr(model, "backend", "training")
    with pytest.raises(InputError, match="training backend"):
        generate_speculative(model, [[1, 2]], 3, LookupDrafter())


def test_policies_are_asked_with_what_happened(model):
    """Each row's own, in order: what was accepted of what was proposed; and the pressure of now."""
    told, asked = [], []

    class Watched(Static):
        def observe(self, state, accepted, proposed):
            told.append((accepted, proposed))
            return super().observe(state, accepted, proposed)

        def choose(self, states, pressure=False):
            asked.append(pressure)
            return [0 if state is None else 3 for state in states]

    ids, pressures = prompt_of(model, 10), iter([False, True, False, True])
    want = plain(model, ids, 11)
    out = generate_speculative(
        model, [ids], 11, scripted(model, want, lambda n: n), policy=Watched(3), pressure=lambda: next(pressures)
    )[0]
    assert out.token_ids == want
    assert asked == [False, True, False, True] and told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert out.speculation.block_size_history == [3, 3, 3, 3]


def test_adaptive_sizes_follow_acceptance_row_by_row(model):
    """One row whose drafts are all right, one whose drafts are all wrong: their sizes are those of the
    specification."""
    prompts = [prompt_of(model, 10), prompt_of(model, 7)]
    wants = [plain(model, ids, 40) for ids in prompts]
    out = generate_speculative(model, prompts, 40, Scripted(wants, [99, 0], model.config.vocab_size), policy=Adaptive())
    assert [row.token_ids for row in out] == wants
    # 9 tokens a pass of 39; the last is cut by what is left
    assert out[0].speculation.block_size_history == [8, 8, 8, 8, 2]
    sizes, mean = [], 0.8
    for _ in range(12):
        sizes.append(8 if mean >= 0.8 else 4 if mean >= 0.5 else 1)
        mean *= 0.8
    assert out[1].speculation.block_size_history[:12] == sizes and sizes[3:] == [1] * 9


def test_what_is_reported_adds_up(model):
    ids = prompt_of(model, 10) * 3
    for drafter, steps in ((MTPDrafter(), True), (LookupDrafter(), False)):
        s = (out := drafted(model, [ids], 20, drafter, 3)[0]).speculation
        assert s.proposed == sum(s.block_size_history) and s.verify_passes == len(s.block_size_history)
        assert len(out.token_ids) == 20 == 1 + s.verify_passes + s.accepted
        assert s.draft_steps == (s.proposed if steps else 0)
        document = s.document(20)
        assert document["tokens_per_pass"] == pytest.approx(19 / s.verify_passes) and json.dumps(document)
    assert drafted(model, [ids], 1, LookupDrafter())[0].speculation.document(1)["tokens_per_pass"] is None


@pytest.mark.parametrize("drafter", [MTPDrafter, LookupDrafter], ids=["mtp", "lookup"])
def test_sampled_rows_do_not_depend_on_their_neighbours(model, drafter):
    """A row gets its tokens from its own generator, beside others that draft, accept and stop differently."""
    sampling, ids = Sampling(temperature=0.8, top_p=0.95, seed=3), prompt_of(model, 12) * 2
    alone = drafted(model, [ids], 16, drafter(), sampling=sampling)[0].token_ids
    beside = drafted(model, [ids, prompt_of(model, 5), prompt_of(model, 33)], 16, drafter(), sampling=sampling)
    assert beside[0].token_ids == alone and len({tuple(out.token_ids) for out in beside}) == 3
    assert drafted(model, [ids], 16, drafter(), sampling=Sampling(0.8, 0.95, 4))[0].token_ids != alone


def test_sampled_output_has_the_model_s_distribution(model):
    """The second token of many rows, drafted by the block, against the exact mixture over first tokens; top_p small, so
    few tokens."""
    sampling, ids, B = Sampling(temperature=1.0, top_p=0.3, seed=0), prompt_of(model, 9), 400
    from dsv4.sampling import weights
    from tests.speculation.test_accept import chi2

    out = drafted(model, [ids] * B, 3, MTPDrafter(), 1, sampling=sampling)
    first = weights(model(torch.tensor([ids]))[0, -1], sampling).double()
    first /= first.sum()
    some = first.nonzero().flatten()
    second = weights(
        model(torch.cat((torch.tensor([ids]).expand(len(some), -1), some.unsqueeze(1)), 1))[:, -1], sampling
    ).double()
    wanted = (first[some].unsqueeze(1) * second / second.sum(-1, keepdim=True)).sum(0)
    for place, target in ((0, first), (1, wanted)):
        found = torch.bincount(torch.tensor([row.token_ids[place] for row in out]), minlength=len(target)).double()
        top = target.topk(3).indices
        binned = lambda t: torch.cat((t[top], (t.sum() - t[top].sum()).clamp(min=0).unsqueeze(0)))
        value, limit = chi2(binned(found), binned(target))
        assert value < limit, place
    assert 0 < sum(row.speculation.accepted for row in out) < sum(row.speculation.proposed for row in out)


@pytest.fixture
def run(command_line):
    return partial(command_line, "generate")


@pytest.mark.parametrize("method", ["mtp", "lookup"])
def test_the_command_line_gives_the_same_tokens_and_says_what_was_drafted(run, brief_golden, method):
    args = (brief_golden, "--token-ids", "5,6,7,5,6,7,5,6", "--max-new-tokens", "12", "--numerics", "fp32")
    want = json.loads(run(*args, "--json")[1])
    found = json.loads(run(*args, "--speculate", method, "--draft-tokens", "4", "--json")[1])
    assert found["token_ids"] == want["token_ids"] and want["speculation"] is None
    assert found["speculation"]["method"] == method
    # random weights repeat nothing
    assert max(found["speculation"]["block_size_history"]) == {"mtp": 4, "lookup": 0}[method]
    code, out, err = run(*args, "--speculate", method, "--verbose")
    said = {"mtp": "tokens a verify pass", "lookup": "nothing could be drafted in 11 passes"}[method]
    assert code == 0 and f"speculation by {method}: " in err and said in err


@pytest.mark.parametrize(
    "options, noted",
    [
        (["--speculate", "mtp", "--together"], True),
        (["--speculate", "mtp"], False),
        ([], False),
        (["--speculate", "mtp", "--together", "--numerics", "fp32"], False),
    ],
)
def test_where_rounding_may_choose_otherwise_it_is_said(run, brief_golden, options, noted):
    document = json.loads(run(brief_golden, "--token-ids", "5,6", "--max-new-tokens", "3", *options, "--json")[1])
    assert any("two tokens are close" in note for note in document["notes"]) == noted


@pytest.mark.parametrize(
    "args, message",
    [
        (["--speculate", "eagle"], "--speculate takes off, mtp or lookup; got 'eagle'"),
        (["--draft-tokens", "3"], "add --speculate"),
        (["--together"], "add --speculate"),
        (["--speculate", "mtp", "--draft-tokens", "0"], "1 to 8, adaptive or cost-aware"),
        (["--speculate", "mtp", "--draft-tokens", "many"], "'many'"),
    ],
)
def test_bad_options_are_one_line(run, brief_golden, args, message):
    code, out, err = run(brief_golden, "--token-ids", "5,6", *args)
    assert code == 2 and out == "" and err.count("\n") == 1 and message in err


def test_a_checkpoint_without_the_block_on_the_command_line(run, tmp_path):
    from tests import checkpoints

    raw = {
        **checkpoints.SMALL,
        "num_nextn_predict_layers": 0,
        "compress_ratios": checkpoints.SMALL["compress_ratios"][:-1],
    }
    path = checkpoints.write_official(tmp_path / "c", raw)
    code, out, err = run(path, "--token-ids", "5,6", "--speculate", "mtp")
    assert code == 2 and err.count("\n") == 1 and "use --speculate lookup" in err
    assert run(path, "--token-ids", "5,6", "--speculate", "lookup", "--max-new-tokens", "4")[0] == 0
