"""Acceptance of drafts and choice of draft sizes, as both decoders use them, against loops and arithmetic written out
here."""

from collections.abc import Iterator

import numpy as np
import torch

from dsv4.cache.streams import MAX_DRAFTS
from dsv4.engine import acceptance as passes
from dsv4.probes.result import Check, compare
from dsv4.sampling import Sampling
from dsv4.speculation import choosing
from dsv4.speculation.accept import Accepted
from dsv4.speculation.cost_aware import CostAware
from dsv4.speculation.costs import BatchCost, CostTable
from dsv4.speculation.policy import Adaptive, AdaptiveParameters, Policy, Static
from dsv4.speculation.policy_device import on_device

TARGET = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05], [0.05, 0.05, 0.6, 0.3, 0.0], [0.0, 0.25, 0.25, 0.25, 0.25]])
PROPOSALS = {  # distributions of drafts at two places; None: always tokens 0 and 2
    "uniform": torch.full((2, 5), 0.2),
    "sharper than the target": torch.tensor([[0.9, 0.1, 0, 0, 0], [0, 0, 1.0, 0, 0]]),
    "apart from the target": torch.tensor([[0.1, 0.1, 0.1, 0.1, 0.6], [0, 0, 0, 0, 1.0]]),
    "a choice": None,
}
DRAWS = 20_000
QUANTILE = {1: 15.14, 2: 18.42, 3: 21.11, 4: 23.51}  # of the chi-square distribution at 0.9999, by degrees of freedom
DEVIATIONS = 4.0
HISTORY, ROWS = 60, 16
EQUAL = "the same choices by definition"


def acceptance(seed: int, device: torch.device) -> Iterator[Check]:
    """Greedy and sampled acceptance, and the policies on `device`."""
    for module, where in ((passes, "generate_speculative"), (choosing, "Rounds")):
        yield from greedy(module.accept_greedy, where, seed)
    for name, q in PROPOSALS.items():
        yield from sampled(name, q, seed)
    yield never_at_zero()
    for policy in policies():
        yield from on_a_device(policy, seed, device)
    yield specified_mean(seed)


def greedy(accept, where: str, seed: int) -> Iterator[Check]:
    """A ragged batch: rows of 0 … W drafts, of which the first few, or all but one in the middle, equal the model's
    choice."""
    g, W, V = torch.Generator().manual_seed(seed), 6, 11
    best = torch.randint(0, V, (200, W + 1), generator=g)
    logits = torch.rand(200, W + 1, V, generator=g).scatter_(2, best.unsqueeze(-1), 2.0)
    right = torch.rand(200, W, generator=g) < 0.7
    drafts = torch.where(right, best[:, :-1], (best[:, :-1] + 1) % V)
    sizes = torch.randint(0, W + 1, (200,), generator=g)
    found, counts, bonus = accept(logits, drafts, sizes), 0, 0
    for b, size in enumerate(sizes.tolist()):
        kept = next((i for i in range(size) if drafts[b, i] != best[b, i]), size)
        counts += int(found.count[b]) != kept
        bonus += found.tokens[b, : kept + 1].tolist() != best[b, : kept + 1].tolist()
    yield compare(
        "rows that keep another prefix than the model's own choices",
        counts,
        "==",
        0,
        EQUAL,
        200,
        unit="rows",
        where=where,
        part="greedy acceptance",
    )
    yield compare(
        "rows that give out other tokens than the kept drafts and the model's next",
        bonus,
        "==",
        0,
        EQUAL,
        200,
        unit="rows",
        where=where,
        part="bonus token",
    )


def sampled(name: str, q: torch.Tensor | None, seed: int) -> Iterator[Check]:
    """Many rows of two drafts: the token at each place must have the target's distribution, and the number of accepted
    drafts must fit."""
    for decoder, decided in (("generate_speculative", by_generator), ("Rounds", by_counted_noise)):
        yield from distributed(f"{decoder}, drafts: {name}", q, *decided(q, seed))


def by_generator(q: torch.Tensor | None, seed: int) -> Accepted:
    """DRAWS rows as `generate_speculative` decides them."""
    g = torch.Generator().manual_seed(seed)
    if q is None:
        drafts = torch.tensor([[0, 2]]).expand(DRAWS, 2)
    else:
        drafts = torch.stack([torch.multinomial(row, DRAWS, True, generator=g) for row in q], 1)
    u = torch.rand(DRAWS, 3, generator=g, dtype=torch.float64)
    return passes.accept_sampled(
        TARGET.expand(DRAWS, 3, 5),
        None if q is None else q.expand(DRAWS, 2, 5),
        drafts,
        torch.full((DRAWS,), 2),
        u[:, 1:],
        u[:, 0],
    )


def by_counted_noise(q: torch.Tensor | None, seed: int) -> Accepted:
    """DRAWS rows as `Rounds` drafts and decides them, at neighbouring seeds."""
    choice, at = choosing.Sampled(Sampling(1.0, seed=seed), DRAWS, "cpu"), torch.zeros(DRAWS, dtype=torch.int64)
    if q is None:
        drafts = torch.tensor([[0, 2]]).expand(DRAWS, 2)
    else:
        drafts = torch.stack(
            [choice.draft(row.log().expand(DRAWS, 5), at + place)[0] for place, row in enumerate(q)], 1
        )
    return choice.accept(
        TARGET.log().expand(DRAWS, 3, 5),
        drafts,
        None if q is None else q.expand(DRAWS, 2, 5),
        torch.full((DRAWS,), 2),
        at,
    )


def distributed(where: str, q: torch.Tensor | None, count: torch.Tensor, tokens: torch.Tensor) -> Iterator[Check]:
    """Drafts of q, accepted against the target."""
    about = dict(where=where, part="rejection sampling")
    worst, samples = 0.0, 0
    for place in range(3):
        emitted = tokens[count >= place, place]
        if len(emitted) > 500:
            worst, samples = max(worst, chi_square(emitted, TARGET[place])), samples + len(emitted)
    yield compare(
        "chi-square of emitted tokens, of what it exceeds once in 10,000",
        worst,
        "<=",
        1.0,
        "each emitted token is distributed as the target, whatever drafts were drawn from",
        samples,
        **about,
    )
    stay = float(torch.minimum(TARGET[0], torch.eye(5)[0] if q is None else q[0]).sum())
    spread = max((stay * (1 - stay) / DRAWS) ** 0.5, 1 / DRAWS)
    yield compare(
        "share of first drafts that stay, from Σ min(p, q), in standard deviations",
        abs(float((count >= 1).double().mean()) - stay) / spread,
        "<=",
        DEVIATIONS,
        "the most that a lossless rule can keep",
        DRAWS,
        **about,
    )


def chi_square(tokens: torch.Tensor, target: torch.Tensor) -> float:
    """The statistic of tokens int64 [n] against target [V], over its quantile; infinite for a token that cannot be."""
    some, counts = target > 0, torch.bincount(tokens.clamp(0, len(target) - 1), minlength=len(target)).double()
    if counts[~some].any() or (tokens >= len(target)).any():
        return float("inf")
    expected = target[some].double() * len(tokens)
    return float(((counts[some] - expected) ** 2 / expected).sum()) / QUANTILE[int(some.sum()) - 1]


def never_at_zero() -> Check:
    """A draft of target probability 0 is rejected even at u = 0; one of target probability 1 is accepted even at the
    largest u."""
    p = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]] * 2)
    count, tokens = passes.accept_sampled(
        p,
        torch.full((2, 1, 2), 0.5),
        torch.tensor([[0], [1]]),
        torch.tensor([1, 1]),
        torch.tensor([[0.0], [1 - 2**-53]], dtype=torch.float64),
        torch.zeros(2, dtype=torch.float64),
    )
    wrong = int(count.tolist() != [0, 1]) + int(tokens[0, 0] != 1) + int(tokens[1].tolist() != [1, 0])
    return compare(
        "decisions at the ends of [0, 1)", wrong, "==", 0, "0 and 1 are certain", 3, part="rejection sampling"
    )


# ---- how many are drafted -----------------------------------------------------------------


def policies() -> list[Policy]:
    """One of each kind, three adaptive ones. The costs are made up: a pass of k drafts takes 1 + k / 16 and k / 10 to
    draft."""
    costs = CostTable(
        "made up", 1.0, {ROWS: BatchCost(0.1, tuple(1 + k / 16 for k in range(9)), (False,) * 9)}, {"source": "made up"}
    )
    odd = AdaptiveParameters(weight=0.3, start=0.55, thresholds=(0.25, 0.5, 0.75), sizes=(1, 3, 5, 7), pressure_cap=4)
    decays = AdaptiveParameters(undrafted="decay")
    return [Static(5), Adaptive(), Adaptive(odd), Adaptive(decays), CostAware(costs, ROWS)]


def on_a_device(policy: Policy, seed: int, at: torch.device) -> Iterator[Check]:
    """A random history of rows that rest, begin anew, and are sometimes short of pages: sizes and states, bit for
    bit."""
    rng, device, states = (
        np.random.default_rng(seed),
        on_device(policy, ROWS, at),
        [policy.initial() for _ in range(ROWS)],
    )
    place = lambda array: torch.from_numpy(array).to(at)
    held = next((getattr(device, name) for name in ("mean", "belief") if hasattr(device, name)), None)
    about = policy.name + (f", weight {policy.parameters.weight}" if isinstance(policy, Adaptive) else "")
    wrong = {"sizes": 0, "pressure cap": 0, "mean": 0}
    for step in range(HISTORY):
        rate = 0.95 if step // 10 % 2 else 0.4  # long enough for sizes to rise and fall
        proposed = rng.integers(0, MAX_DRAFTS + 1, ROWS)
        accepted = np.minimum(rng.geometric(1 - rate, ROWS) - 1, proposed)
        pressure, live, fresh = bool(step % 3 == 0), rng.random(ROWS) < 0.8, rng.random(ROWS) < 0.05
        live[0] = True
        sizes = device.step(place(accepted), place(proposed), torch.tensor(pressure, device=at), place(live))
        states = [policy.observe(state, int(a), int(p)) for state, a, p in zip(states, accepted, proposed)]
        wanted = policy.choose([state if there else None for state, there in zip(states, live)], pressure)
        wrong["pressure cap" if pressure else "sizes"] += sum(a != b for a, b in zip(sizes.tolist(), wanted))
        if held is not None:
            wrong["mean"] += int(
                (held.cpu().numpy().view(np.int32) != np.array(states, np.float32).view(np.int32)).sum()
            )
        device.reset(place(fresh))
        states = [policy.initial() if new else state for state, new in zip(states, fresh)]
    for what, n in wrong.items():
        if what == "mean" and held is None:
            continue
        yield compare(
            f"{what} on the device that differ from the specification's",
            n,
            "==",
            0,
            "each operation rounds by itself",
            HISTORY * ROWS,
            where=about,
            part=f"device policy, {what}",
        )


def specified_mean(seed: int) -> Check:
    """ε ← w · r + (1 − w) · ε of the specification, in fp32 from its parameters."""
    rng, policy, off = np.random.default_rng(seed), Adaptive(), 0
    state = wanted = np.float32(policy.parameters.start)
    for _ in range(200):
        proposed = int(rng.integers(1, MAX_DRAFTS + 1))
        accepted = int(rng.integers(0, proposed + 1))
        state = policy.observe(state, accepted, proposed)
        new, old = np.float32(policy.parameters.weight), np.float32(1 - policy.parameters.weight)
        wanted = new * (np.float32(accepted) / np.float32(proposed)) + old * wanted
        off += bool(state != wanted)
    return compare(
        "means that are not w · newest + (1 − w) · before",
        off,
        "==",
        0,
        "definition of the adaptive policy",
        200,
        where=policy.name,
        part="mean of the specification",
    )
