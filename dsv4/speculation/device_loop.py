"""Speculative generation whose rounds stay on the device: the host launches graphs and reads the records of earlier
ones."""

import time
from collections.abc import Callable, Iterable

from dsv4.cache.host_tier.grouped import host_use
from dsv4.engine.generate import Generation, context_full, context_limit
from dsv4.errors import InputError
from dsv4.model.causal import CausalLM, capacity
from dsv4.sampling import Sampling
from dsv4.speculation.choosing import choice_of
from dsv4.speculation.device_drafters import CATCH_UP_WIDTHS, primed
from dsv4.speculation.draft import Drafter, MTPDrafter
from dsv4.speculation.host_loop import AHEAD, check_one_device
from dsv4.speculation.loop import check_can_speculate
from dsv4.speculation.policy import Policy, Static
from dsv4.speculation.policy_device import on_device
from dsv4.speculation.result import Speculation
from dsv4.speculation.rounds import Rounds


def generate_on_device(
    model: CausalLM,
    prompts: list[list[int]],
    max_new_tokens: int,
    drafter: Drafter = MTPDrafter(),
    sampling: Sampling = Sampling(),
    policy: Policy | None = None,
    max_context: int | None = None,
    stop_ids: Iterable[int] = (),
    on_token: Callable[[int, int], None] | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
    ahead: int = AHEAD,
    make: Callable[..., Rounds] = Rounds,
) -> list[Generation]:
    """Generate as `generate_speculative` does, with the MTP block or prompt lookup. on_token(row, id) is called as the
    host reads tokens.

    Row b draws with the noise of sampling.seed + b (`noise`), so its tokens differ from plain decoding with that seed
    and have its distribution. ahead: as for `Rounds`; make: makes the object that runs the rounds, for callers that
    watch them. The cache holds one token more than the context plus the drafts of a round. That is less than the policy
    wants if the context ends near the checkpoint's. Raises as `generate_speculative`, and InputError if the context
    equals the checkpoint's or layers lie on several devices; ContextOverrun when the context ends before the request,
    after all tokens that fit.
    """
    check_can_speculate(model, drafter)
    check_one_device(model)
    policy = policy or Static(drafter.draft_tokens)
    limit, stops, longest = (
        context_limit(model, prompts, max_new_tokens, max_context),
        frozenset(stop_ids),
        model.config.max_position_embeddings,
    )
    most = min(max(policy.sizes), longest - limit - 1)
    if most < 0:
        raise InputError(
            f"a context of {limit} tokens is all that the checkpoint takes; rounds with drafts run one token behind "
            "it: lower --max-context or --max-new-tokens by one, or leave out --speculate"
        )
    # so that the block can run many rounds without drafts at once
    back = CATCH_UP_WIDTHS[-1] - 1 if drafter.needs_mtp and 0 in policy.sizes else 1
    cache = model.new_cache(len(prompts), max(capacity(model, limit), limit + most + 1), max_rewind=max(most, back))
    outs = [
        Generation(list(ids), cache_bytes=cache.nbytes, max_context=limit, speculation=Speculation(drafter.name))
        for ids in prompts
    ]
    choice, begun = choice_of(sampling, len(prompts), model.device), time.perf_counter()
    tokens, drafts = primed(model, cache, prompts, on_prefill, choice, drafter)
    firsts = tokens.tolist()  # wait for the prompts, whose time ends here
    seconds = time.perf_counter() - begun
    left = [0 if token in stops else min(max_new_tokens - 1, limit - len(ids)) for token, ids in zip(firsts, prompts)]

    def tell(row: int, found: list[int]) -> None:
        for token in found:
            if on_token is not None and token not in stops:
                on_token(row, token)

    for b, token in enumerate(firsts):
        tell(b, [token])
    begun = time.perf_counter()
    # a text without repeats drafts nothing
    widths = [n for n in (policy.sizes if drafter.needs_mtp else (0, *policy.sizes)) if n <= most]
    rounds = make(
        model,
        cache,
        most,
        tokens,
        drafts,
        left,
        stops,
        on_device(policy, len(prompts), model.device),
        widths,
        choice=choice,
        ahead=ahead,
    )
    if any(left):
        rounds.prepare()
    captured = time.perf_counter() - begun
    begun = time.perf_counter()
    found = rounds.run(tell)
    for out, token, rest, history in zip(outs, firsts, found, rounds.history()):
        out.token_ids, out.host = [token, *rest], host_use(cache)
        out.prefill_seconds, out.capture_seconds, out.decode_seconds = seconds, captured, time.perf_counter() - begun
        for proposed, accepted in history:
            out.speculation.passed(proposed, accepted, proposed if drafter.needs_mtp else 0)
        out.stop_reason = "eos" if out.token_ids[-1] in stops else "max_new_tokens"
        if out.stop_reason == "max_new_tokens" and len(out.token_ids) < max_new_tokens:
            raise context_full(limit, len(out.token_ids))
    return outs


generate_resident = generate_on_device  # its old name, until 0.4
