"""Generation from prompts, each a request of its own: plain, with drafts that the host verifies, and with rounds that
stay on the device. All are the same loop (`dsv4.engine.steppers.run`) with another stepper."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch

from dsv4.cache.cache import DEFAULT_MAX_REWIND, Cache
from dsv4.engine.acceptance import Rejection
from dsv4.engine.limits import beyond_checkpoint as beyond_checkpoint  # old places of these names, until 0.4
from dsv4.engine.limits import check_ids as check_ids
from dsv4.engine.limits import context_full as context_full
from dsv4.engine.limits import context_limit
from dsv4.engine.limits import context_needed as context_needed
from dsv4.engine.passes import Passes
from dsv4.engine.state import Generation, Request, Work
from dsv4.engine.steppers import DeviceRounds, DraftedPasses, SingleTokens, rounds_in, run
from dsv4.model.causal import CausalLM, capacity
from dsv4.sampling import COLDEST as COLDEST
from dsv4.sampling import HOTTEST as HOTTEST
from dsv4.sampling import Sampling
from dsv4.sampling import distribution as distribution
from dsv4.sampling import sample as sample
from dsv4.sampling import weights as weights
from dsv4.speculation import verify as ways
from dsv4.speculation.draft import Drafter, MTPDrafter, check_can_speculate
from dsv4.speculation.host_loop import AHEAD, check_one_device
from dsv4.speculation.noise import row_seeds
from dsv4.speculation.passes import Verify
from dsv4.speculation.policy import Policy, Static
from dsv4.speculation.result import Speculation
from dsv4.speculation.rounds import Rounds


def generate(
    model: CausalLM,
    ids: list[int],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    max_context: int | None = None,
    stop_ids: Iterable[int] = (),
    on_token: Callable[[int], None] | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
) -> Generation:
    """Generate from a prompt until a stop id or `max_new_tokens`.

    max_context: tokens the cache holds; by default just enough. The last token is not fed back, so a prompt of P
    tokens and N new ones need P + N − 1. on_token(id) as tokens appear; on_prefill(done, total) during prefill.
    Raises InputError for an empty prompt or id outside the vocabulary; ContextOverrun when the prompt does not fit
    max_context, or all that was asked for the checkpoint, and, while generating, when the next token would not fit
    max_context: tokens so far have been passed to on_token.
    """
    limit = context_limit(model, [ids], max_new_tokens, max_context)
    cache = model.new_cache(1, capacity(model, limit))
    told = None if on_token is None else lambda row, token: on_token(token)
    rows = _rows([ids], cache, max_new_tokens, sampling, limit, stop_ids, told)
    return run(SingleTokens(model, cache, rows), on_prefill)[0]


def generate_speculative(
    model: CausalLM,
    prompts: list[list[int]],
    max_new_tokens: int,
    drafter: Drafter,
    sampling: Sampling = Sampling(),
    policy: Policy | None = None,
    max_context: int | None = None,
    stop_ids: Iterable[int] = (),
    on_token: Callable[[int, int], None] | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
    pressure: Callable[[], bool] = lambda: False,
    max_rewind: int = DEFAULT_MAX_REWIND,
    verify: Callable[[CausalLM, Cache], Verify] = ways.default,
) -> list[Generation]:
    """Generate from prompts until a stop id or `max_new_tokens` each, as `generate` does from one prompt.

    policy: chooses how many tokens each row drafts (None: always the drafter's `draft_tokens`). on_token(row, id) as
    tokens become final. Row b draws from its own generator with seed sampling.seed + b, so its tokens do not depend on
    other rows. A pass drafts at most max_rewind − 1 tokens. verify makes the object that runs a pass, by default one
    append. Raises as `generate` does (ContextOverrun as soon as one row's next token has no room), and InputError if
    the model cannot draft.
    """
    check_can_speculate(model, drafter)
    policy = policy or Static(drafter.draft_tokens)
    limit = context_limit(model, prompts, max_new_tokens, max_context)
    cache = model.new_cache(len(prompts), capacity(model, limit), max_rewind)
    rows = _rows(prompts, cache, max_new_tokens, sampling, limit, stop_ids, on_token, drafter, policy)
    passes = Passes(model, cache, drafter, Rejection(sampling), verify, prompts, pressure)
    return run(DraftedPasses(passes, rows), on_prefill)


def generate_on_device(
    model: CausalLM,
    prompts: list[list[int]],
    max_new_tokens: int,
    drafter: Drafter | None = MTPDrafter(),
    sampling: Sampling = Sampling(),
    policy: Policy | None = None,
    max_context: int | None = None,
    stop_ids: Iterable[int] = (),
    on_token: Callable[[int, int], None] | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
    ahead: int = AHEAD,
    make: Callable[..., Rounds] = Rounds,
) -> list[Generation]:
    """Generate as `generate_speculative` does, with the MTP block or prompt lookup, or (None) without drafts.
    on_token(row, id) is called as the host reads tokens.

    Row b draws with the noise of sampling.seed + b (`noise`), so its tokens differ from plain decoding with that seed
    and have its distribution. ahead: as for `Rounds`; make: makes the object that runs the rounds, `Rounds` or
    `OneLaunch`, whose loop runs on the device. The cache holds one token more than the context plus the drafts of a
    round. That is less than the policy wants if the context ends near the checkpoint's. Raises as
    `generate_speculative`, and InputError if the context equals the checkpoint's or layers lie on several devices;
    ContextOverrun when the context ends before the request, after all tokens that fit.
    """
    if drafter is not None:
        check_can_speculate(model, drafter)
    check_one_device(model)
    policy = policy or Static(drafter.draft_tokens if drafter else 0)
    limit = context_limit(model, prompts, max_new_tokens, max_context)
    most, rewind = rounds_in(model.config, limit, drafter, policy)
    cache = model.new_cache(len(prompts), max(capacity(model, limit), limit + most + 1), max_rewind=rewind)
    rows = _rows(prompts, cache, max_new_tokens, sampling, limit, stop_ids, on_token, drafter, policy)
    return run(DeviceRounds(model, cache, rows, drafter, most, ahead, make), on_prefill)


generate_resident = generate_on_device  # its old name, until 0.4


def _rows(
    prompts: list[list[int]],
    cache: Cache,
    max_new_tokens: int,
    sampling: Sampling,
    limit: int,
    stop_ids: Iterable[int],
    on_token: Callable[[int, int], None] | None,
    drafter: Drafter | None = None,
    policy: Policy = Static(0),
) -> list[Work]:
    """The state of each prompt's request, as its call of a generation asks for it."""
    stops, seeds = frozenset(stop_ids), row_seeds(sampling.seed, len(prompts), "cpu").tolist()

    def row(b: int, ids: list[int]) -> Work:
        request = Request(str(b), tuple(ids), max_new_tokens, sampling=replace(sampling, seed=seeds[b]))
        counts = None if drafter is None else Speculation(drafter.name)
        out = Generation(list(ids), cache_bytes=cache.nbytes, max_context=limit, speculation=counts)
        generator, told = torch.Generator().manual_seed(sampling.seed + b), on_token and partial(on_token, b)
        return Work(request, out, limit, generator, policy, stops, b, told)

    return [row(b, ids) for b, ids in enumerate(prompts)]
