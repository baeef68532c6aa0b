"""Speculative decoding that stays on the device: a round drafts, verifies, commits and chooses the next block sizes.

A round with D drafts is captured once (a CUDA graph; on a CPU it runs as it is) and serves every position of a ragged
batch. The host chooses which D to replay from sizes that earlier rounds left in pinned memory (`ring`), and never waits
for the device in a call (`host_loop`). In rows that want fewer drafts than D the rest is refused. With two rounds
running, a round decides the sizes of the round after the next, because the next is launched already.

A row holds `start` tokens in the caches; `token` is the last one that it has chosen, not yet in them. A round:

    d_1 … d_D: drafts of what follows `token` (`device_drafters`: the MTP block, or the text itself)
    verify token, d_1 … d_D at start … start + D: what the model itself says after each
    a = how many drafts stay, and which token follows them (`choosing`: greedily, or sampled):  c_0 … c_a are the row's
    next tokens the drafter is told what really follows; the MTP block again at start … start + D, with the model's
    streams: latents of all, the rest of the block for the last that stays alone; or, where nothing was drafted, later
    together with others (`RoundDrafter.keep`)

With the block as drafter, its entry at position t is computed from the main model's streams at t and the token at t +
1, so it holds `start` entries before it drafts. d_1 comes from its last state, d_2 … d_D from its own streams fed back,
from position `start` on.

Rows that verification wrote beyond the new length are written again before they can be read (`dsv4.cache.cache`); so
are the block's entries of chained drafts.
"""

from collections.abc import Iterable, Sequence
from contextlib import contextmanager

import torch

from dsv4.cache.cache import Cache
from dsv4.errors import InputError
from dsv4.kernels.commit_rows import commit, next_sizes
from dsv4.model.causal import CausalLM
from dsv4.model.cut_values import Logits
from dsv4.model.step import CapturedStep
from dsv4.speculation.accept import Accepted
from dsv4.speculation.choosing import Choice, Greedy
from dsv4.speculation.device_drafters import Drafted, RoundDrafter
from dsv4.speculation.host_loop import AHEAD, RING, HostLoop
from dsv4.speculation.policy_device import DevicePolicy

SPARE = 8  # rounds that may run after the last one that gives a row a token


class Rounds(HostLoop):
    """Decodes a batch whose prompts are in `cache`, with up to `most` drafts a round.

    tokens int64 [B]: the token chosen after each prompt; drafter: drafts the tokens after it (`primed`). left: tokens
    that each row may still produce. stop_ids end a row, which keeps them. widths: drafts for which a round is captured
    when it is first wanted (None: every number). ring: rounds whose records are held for the host. ahead: rounds that
    run at once, at most `ring`; sizes are decided that many rounds earlier. choice: how tokens are chosen from logits.
    room: tokens that a row of any later request may produce (`restart`), by default the most of `left`.
    Raises InputError if a round could reach beyond the cache, or if layers lie on several devices.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: Cache,
        most: int,
        tokens: torch.Tensor,
        drafter: RoundDrafter,
        left: Sequence[int],
        stop_ids: Iterable[int],
        policy: DevicePolicy,
        widths: Sequence[int] | None = None,
        ring: int = RING,
        choice: Choice = Greedy(),
        ahead: int = AHEAD,
        room: int | None = None,
    ):
        B, device = cache.batch, model.device
        super().__init__(
            model, cache, most, room or max(left), widths, ring, ahead, drafter.catch_up_widths if most else ()
        )
        self.drafter, self.policy, self.choice = drafter, policy, choice
        rows = lambda: torch.zeros(B, dtype=torch.int64, device=device)
        self.start, self.left, self.written, self.sizes, self.token = rows(), rows(), rows(), rows(), rows()
        self.done = torch.zeros(B, dtype=torch.bool, device=device)
        self.pressure = torch.zeros((), dtype=torch.bool, device=device)
        self.stops = torch.tensor(sorted(set(stop_ids)) or [-1], device=device)
        # of each round: drafted, accepted, tokens
        self.log = torch.zeros(self.room + SPARE, 3, B, dtype=torch.int64, device=device)
        self.round = torch.zeros(1, dtype=torch.int64, device=device)
        self.restart(tokens, drafter, left)

    def restart(
        self, tokens: torch.Tensor, drafter: RoundDrafter, left: Sequence[int], choice: Choice | None = None
    ) -> None:
        """Begin other requests in these rows, from the current state of `cache`; graphs are kept. Arguments as for a
        new object; the choice is of the same temperature and top_p.

        Raises InputError if a round could reach beyond the cache, or if a row could write more than any could when this
        object was made.
        """
        lengths = self.cache.lengths
        # rows that are done keep running, after their last token
        reach = max(length + n for length, n in zip(lengths, left)) + self.most + 1
        if reach > self.cache.max_context or self.most > self.cache.max_rewind:
            raise InputError(
                f"rounds of {self.most} drafts reach {reach} tokens and rewind {self.most}; the cache has max_context "
                f"{self.cache.max_context} and max_rewind {self.cache.max_rewind}; build it larger or draft fewer"
            )
        if max(left) > self.room:
            raise InputError(
                f"a row may write {max(left)} tokens; these rounds were made for {self.room}: make new ones"
            )
        for held, given in ((self.start, lengths), (self.left, list(left)), (self.token, tokens)):
            held.copy_(torch.as_tensor(given))
        self.drafter.take(drafter)
        if choice is not None:
            self.choice.take(choice)
        self.done.copy_(self.left == 0)
        self.written.zero_()
        self.round.zero_()
        self.log.zero_()
        self.ring.clear()
        self.policy.reset(torch.ones_like(self.done))
        first = [next_sizes(self._wanted(), self.drafter.offered, self.left) for _ in range(self.ring.ahead)]
        for number, sizes in enumerate(first):
            self.ring.decide(number, sizes)
        self.sizes.copy_(first[0])
        self._anew([sizes.tolist() for sizes in first], self.done.tolist())

    def _drafts(self, D: int) -> Drafted:
        return self.drafter.drafts(D, self.start)

    def _wanted(self, more: torch.Tensor | int = 0) -> torch.Tensor:
        """Drafts of the next undecided round, as the policy wants them when rows hold start + more tokens: int64
        [B]."""
        if (pressed := self.cache.pressed(self.start, more, self.done)) is not None:
            self.pressure.copy_(pressed)
        return self.policy.choose(self.pressure, ~self.done)

    def _accept(self, logits: Logits, drafts: Drafted, proposed: torch.Tensor) -> Accepted:
        """The number of accepted drafts, and the output tokens; logits fp32 [B, D + 1, V], proposed int64 [B]."""
        return self.choice.accept(logits, drafts.tokens, drafts.q, proposed, self.start + 1)

    @torch.inference_mode()
    def _round(self, D: int) -> None:
        B, drafts = len(self.token), self._drafts(D)
        ids = torch.cat((self.token.unsqueeze(1), drafts.tokens), 1)
        streams, logits = self.model.captured(
            CapturedStep(ids, self.start, self.cache.max_context, self.model.rope_frequencies()), self.cache
        )
        proposed = self.sizes.clamp(0, D).masked_fill(self.done, 0)
        accepted, chosen = self._accept(logits.unflatten(0, (B, D + 1)), drafts, proposed)
        count = commit(
            chosen,
            accepted,
            proposed,
            self.stops,
            self.room,
            self.token,
            self.left,
            self.written,
            self.done,
            self.out,
            self.log,
            self.round,
        )
        with self._aside():  # a dozen tiny kernels, in parallel with the block
            self.policy.observe(accepted, proposed)
            self.drafter.note_tokens(chosen, count)
            self._record(chosen, count)
        if D:
            self.drafter.update(streams, chosen, count, self.start)
        elif self.catch_up_widths:
            self.drafter.keep(streams, chosen, count)
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)
        self.start += count
        self.ring.send()

    def _record(self, chosen: torch.Tensor, count: torch.Tensor) -> None:
        """Write the round's record: of chosen int64 [B, T] the first count[b] tokens, the state of the rows, and the
        sizes that they want next."""
        self.ring.put(
            chosen,
            count,
            self._wanted(count),
            self.drafter.offered,
            self.left,
            self.done,
            self.sizes,
            self.round,
        )

    @contextmanager
    def _aside(self):
        """Run kernels on a side stream, until the round waits for `side`. Tensors of the round that they read must live
        as long as the round."""
        if self.side is None:
            yield
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            yield

    def _state(self) -> list[torch.Tensor]:
        return [
            self.done,
            self.sizes,
            self.round,
            self.ring.records,
            *(t for t in vars(self.policy).values() if isinstance(t, torch.Tensor)),
        ]
