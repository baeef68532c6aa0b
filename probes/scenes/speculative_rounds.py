"""Rounds that stay on the device: what each leaves for the next, and its output. The rounds themselves run, not their
graphs."""

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from dsv4.cache.cache import Cache
from dsv4.probes.catalogue.captured import exactly
from dsv4.probes.compare import agreeing, token_errors, tokens
from dsv4.probes.result import Check, compare
from dsv4.probes.scenes.cache_contents import Rows, bits, of_output, rows_checks, visible
from dsv4.probes.scenes.patching import replaced, wrapped
from dsv4.probes.scenes.scripted import STOP, Script, came_out, cases, obeying
from dsv4.probes.subject import Subject
from dsv4.runtime.graph import DecodeGraph
from dsv4.speculation.device_drafters import Drafted, primed
from dsv4.speculation.policy import Static
from dsv4.speculation.policy_device import on_device
from dsv4.speculation.rounds import Rounds

LENGTHS = (125, 126, 127, 6, 131)  # of the rows that keep 0, 1, … drafts; a round crosses 128 in most of them
ROUNDS = 3
NAMES = (
    "what may be read after a round is as if {}",
    "logits of a round are as if {}",
    "drafts of a round are as if {}",
)
REWOUND, NEVER = "its tokens had been run by themselves and the others rewound", "nothing had been drafted"


def cut(ids: torch.Tensor, lengths: list[int]) -> list[list[int]]:
    """Rows of ids int64 [B, T] without their padding."""
    return [row[:n] for row, n in zip(ids.tolist(), lengths)]


class Plain:
    """Runs the text, final token by final token. rejected: by captured steps (of as many tokens as the rounds', so that
    sums are in the same order) with the drafts that go, which are rewound; else by `append` without them."""

    def __init__(self, subject: Subject, ids: torch.Tensor, lengths: list[int], limit: int, rejected: bool):
        self.subject, self.model, self.rejected = subject, subject.model, rejected
        self.cache: Cache = subject.model.new_cache(len(lengths), limit)
        self.tokens, drafter = primed(self.model, self.cache, cut(ids, lengths))
        # logits [B, vocab] of the first draft, the block's streams [B, n, d] there
        self.said, self.chained = drafter.said, drafter.chained
        self.graphs: dict[int, DecodeGraph] = {}  # by the tokens of a step

    def rows(self) -> list[Rows]:
        lengths = self.cache.lengths
        return [
            visible(self.subject, self.cache, b, n, m) for b, (n, m) in enumerate(zip(lengths, self.cache.mtp_lengths))
        ]

    def regrets(self, drafts: torch.Tensor) -> torch.Tensor:
        """What the block's own chain, led by drafts int64 [B, D], loses by each of them: (its best logit − that of the
        draft) / 2‖logits‖, [B, D]; an error e of the logits, relative in norm, explains no more than e. Leaves nothing
        behind."""
        logits, streams, found = self.said, self.chained.unsqueeze(1), []
        for j in range(drafts.shape[1]):
            token = drafts[:, j : j + 1].to(logits.device)
            if j:
                logits, streams = self.model.mtp_logits(streams, drafts[:, j - 1 : j], self.cache, return_streams=True)
                logits = logits[:, 0]
            lost = logits.amax(1) - logits.gather(1, token).squeeze(1)
            found.append(lost.double() / (2 * logits.double().norm(dim=1)))
        self.cache.rewind_mtp(drafts.shape[1] - 1)
        return torch.stack(found, 1).cpu()

    def go_on(self, ids: torch.Tensor, chosen: torch.Tensor, kept: list[int], width: int) -> torch.Tensor:
        """ids int64 [B, W]: the pending token and drafts, of which kept[b] stay; chosen int64 [B, W]: what follows
        each. width: tokens of the block's step, W or more, of which those behind W mean nothing. Logits [B, W, vocab],
        of places that stay."""
        W = ids.shape[1]
        if self.rejected:
            graph = self.graphs[W] = self.graphs.get(W) or DecodeGraph(self.model, self.cache, W)
            logits = graph.step(ids)
            streams = graph.streams.view(*ids.shape, *graph.streams.shape[1:])
            self.cache.rewind([W - 1 - n for n in kept])
            self._follow(pad(streams, (0, 0, 0, 0, 0, width - W)), pad(chosen, (0, width - W)), kept)
            return logits
        counts = [n + 1 for n in kept]
        logits, streams = self.model.append(ids, self.cache, n_new=counts, return_streams=True, chunk=W)
        said, after = self.model.mtp_logits(streams, chosen, self.cache, n_new=counts, return_streams=True, chunk=width)
        rows, last = torch.arange(len(kept), device=said.device), torch.tensor(kept, device=said.device)
        self.said, self.chained = said[rows, last], after[rows, last]
        return logits

    def _follow(self, streams: torch.Tensor, chosen: torch.Tensor, kept: list[int]) -> None:
        """The block over all tokens, streams [B, T, n, d] and chosen int64 [B, T]; then, those forgotten, over the last
        that stays of each row again, of what the first run put into the block: a product of other rows may sum in
        another order, and rounds run the rest of the block for that token alone."""
        (B, T), block, seen = chosen.shape, self.model.mtp[0], []
        with wrapped([(0, block)], "_mixed", lambda _, __, real: lambda *given: seen.append(real(*given)) or seen[-1]):
            self.model.mtp_logits(streams, chosen, self.cache, chunk=T, logits="none")
        self.cache.rewind_mtp([T - n for n in kept])
        rows, last = torch.arange(B, device=streams.device), torch.tensor(kept, device=streams.device)
        with replaced([block], "_mixed", lambda *_: seen[0].unflatten(0, (B, T))[rows, last]):
            said, after = self.model.mtp_logits(
                streams[rows, last].unsqueeze(1), chosen[rows, last].unsqueeze(1), self.cache, return_streams=True
            )
        self.said, self.chained = said[:, 0], after[:, 0]


def states(subject: Subject, drafts: int, seed: int) -> Iterator[Check]:
    """Three rounds of rows that keep 0, 1, … drafts, and then others; the block drafts, and the script decides. Between
    them rounds without drafts, which the block follows afterwards."""
    B = drafts + 1
    lengths, room = list(LENGTHS[:B]), (ROUNDS + 1) * (drafts + 1) + ROUNDS
    limit = max(LENGTHS) + room
    ids = tokens(subject, max(lengths), seed, rows=B)
    script = Script(subject.config.vocab_size, B, room, seed)
    others = [(REWOUND, exactly(subject), Plain(subject, ids, lengths, limit, True))]
    if subject.numerics == "fp32":  # elsewhere a rounding may move a choice, and what follows is another text
        others.append((NEVER, False, Plain(subject, ids, lengths, limit, False)))
    cache = subject.model.new_cache(B, limit)
    rounds = Rounds(
        subject.model,
        cache,
        drafts,
        *primed(subject.model, cache, cut(ids, lengths)),
        [room - drafts - 1] * B,
        (),
        on_device(Static(drafts), B, subject.model.device),
    )
    passes = [
        passed
        for number in range(ROUNDS)
        for passed in ((drafts, [(b + 2 * number) % B for b in range(B)]), (0, [0] * B))
    ][:-1]
    seen = list(_run(subject, rounds, script, passes))
    for name, exact, other in others:
        yield from _compared(subject, seen, passes, other, name, exact, rounds.catch_up_widths[0])


def _run(subject: Subject, rounds: Rounds, script: Script, passes: list[tuple[int, list[int]]]) -> Iterator[tuple]:
    """passes: (drafts, how many of each row stay). (rows before it, its ids, logits [B, D + 1, vocab], drafts that the
    block really made, what was chosen) of each round."""
    said, passed, real = [], [], rounds._drafts
    at = lambda: [1 + n for n in rounds.written.tolist()]
    for D, right in passes:
        lengths, begun = rounds.start.tolist(), at()

        def steered(D: int) -> Drafted:
            said.append(real(D).tokens.cpu())
            return Drafted(script.drafts(begun, [D] * len(right), right).to(rounds.token.device))

        rounds._drafts = steered
        rows = [visible(subject, rounds.cache, b, n, n) for b, n in enumerate(lengths)]
        with obeying(
            subject.model, script, at, lambda ids, streams, logits: passed.append((ids.clone(), logits.clone()))
        ):
            rounds._round(D)
        if not D:
            rounds._catch_up(rounds.catch_up_widths[0])
            rounds.drafter.caught_up()
        ids, logits = passed[-1]
        yield rows, ids, logits.view(*ids.shape, -1), said[-1], script.chosen(ids, begun)


def _compared(
    subject: Subject,
    seen: list[tuple],
    passes: list[tuple[int, list[int]]],
    other: Plain,
    name: str,
    exact: bool,
    following: int,
) -> Iterator[Check]:
    """following: tokens of the step by which the block follows a round without drafts."""
    pairs, logits, lost = [], [], []
    for number, ((rows, ids, found, said, chosen), (D, right)) in enumerate(zip(seen, passes)):
        pairs += [
            (f"before round {number}, row {b}", mine, theirs)
            for b, (mine, theirs) in enumerate(zip(rows, other.rows()))
        ]
        lost += [other.regrets(said)] if D else []
        wanted = other.go_on(ids, chosen.to(ids.device), right, D + 1 if D else following)
        logits += [(found[b, : n + 1].cpu(), wanted[b, : n + 1].cpu()) for b, n in enumerate(right)]
    where, names = "Rounds", [text.format(name) for text in NAMES]
    yield from rows_checks(names[0], where, "after a round", subject, pairs, exact)
    of_drafts = {"where": where, "part": "after a round, next drafts"}
    if exact:
        yield bits(names[1], logits, where, of_output("after a round", subject, pairs))
        wrong = sum(int((row != 0).sum()) for row in lost)
        yield compare(
            names[2],
            wrong,
            "==",
            0,
            "the same block on the same streams",
            sum(row.numel() for row in lost),
            **of_drafts,
        )
        return
    errors = torch.cat([token_errors(a.unsqueeze(0), b.unsqueeze(0)).flatten() for a, b in logits])
    value, source, limit = agreeing(errors, subject.numerics)
    yield compare(names[1], value, "<=", limit, source, errors.numel(), where=where, part="after a round, next logits")
    if subject.numerics == "fp32":  # elsewhere a rounding explains any draft
        value, source, limit = agreeing(torch.cat(lost), subject.numerics)
        yield compare(names[2], value, "<=", limit, source, sum(row.numel() for row in lost), **of_drafts)


def outputs(subject: Subject, drafts: int, seed: int) -> Iterator[Check]:
    """What `run` gives out, where rows end, and what the policy is told; the block does not draft."""
    B, most = drafts + 3, 9
    lengths = [3 + b for b in range(B)]
    ids, cache = tokens(subject, max(lengths), seed, rows=B), subject.model.new_cache(B, max(lengths) + most + drafts)
    script = Script(subject.config.vocab_size, B, most + drafts + 2, seed)
    right, told = cases(script, B, drafts), [[] for _ in range(B)]
    first, *start = primed(subject.model, cache, cut(ids, lengths))
    policy = on_device(Static(drafts), B, subject.model.device)
    rounds = Rounds(subject.model, cache, drafts, first, *start, [most - 1] * B, (STOP,), policy, ahead=1)
    at, live, observe = lambda: [1 + n for n in rounds.written.tolist()], [], policy.observe

    def steered(D: int) -> Drafted:
        live.append((~rounds.done).tolist())
        now = [row[min(len(told[b]), len(row) - 1)] for b, row in enumerate(right)]
        return Drafted(script.drafts(at(), [D] * B, now).to(first.device))

    def noted(accepted: torch.Tensor, proposed: torch.Tensor) -> None:
        for b, (n, there) in enumerate(zip(accepted.tolist(), live[-1])):
            told[b] += [n] if there else []
        observe(accepted, proposed)

    rounds._drafts, policy.observe, rounds.captures = steered, noted, False  # a graph would not call them again
    with obeying(subject.model, script, at):
        out = rounds.run()
    found = [[token, *row] for token, row in zip(first.tolist(), out)]
    yield from came_out("Rounds", script, right, found, told, [most] * B, drafts, first_ends=False)
    held = [n + len(row) - 1 for n, row in zip(lengths, found)]
    off = [b for b, n in enumerate(held) if (cache.lengths[b], cache.mtp_lengths[b]) != (n, n)]
    yield compare(
        "rows whose caches hold another number of tokens than came out",
        len(off),
        "==",
        0,
        "all but the last one that was chosen",
        B,
        unit="rows",
        where="Rounds",
        part="accepted tokens",
    )
