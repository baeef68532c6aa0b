"""Drafters of rounds: the drafters of `draft` as tensor operations without the host, so that a round with them can be
captured."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from dsv4.cache.cache import Cache, Lengths
from dsv4.cache.streams import MAX_DRAFTS
from dsv4.errors import InputError
from dsv4.model.causal import CausalLM
from dsv4.model.cut_values import Values, stacked_along
from dsv4.model.deepseek_v4 import Model
from dsv4.model.mtp import run_block
from dsv4.speculation.choosing import Choice, Greedy
from dsv4.speculation.draft import Drafter, LookupDrafter, MTPDrafter, needs_block
from dsv4.speculation.prefill import prefill

# Numbers of waiting tokens of a row that the MTP block runs in one step: a step over many costs little more than one
# over a few, since experts run for the last token alone. Few sizes, because each is compiled and captured.
CATCH_UP_WIDTHS = (2, 8, 32)


class Drafted(NamedTuple):
    """tokens int64 [B, D]; q fp32 [B, D, V]: what they were drawn from; None if they were chosen."""

    tokens: torch.Tensor
    q: Values | None = None


class RoundDrafter(ABC):
    """The interface. A row holds `start` int64 [B] tokens in the model's caches and one more that is chosen, not yet in
    them.

    offered int64 [B]: how many drafts each row can have in the next round. lengths: of its own caches, which the host
    advances with the model's. catch_up_widths: the widths, ascending, of `catch_up` after rounds without drafts. It
    must catch up before it drafts, and when as many tokens wait as the last width says; empty if it has nothing to
    catch up with. All tensors are updated in place, so that replays follow each other.
    """

    offered: torch.Tensor
    lengths: tuple[Lengths, ...] = ()
    catch_up_widths: Sequence[int] = ()

    @abstractmethod
    def take(self, other: "RoundDrafter") -> None:
        """Continue from the state of another drafter of this kind, which was made for as many rows of the same
        cache."""

    @abstractmethod
    def drafts(self, D: int, start: torch.Tensor) -> Drafted:
        """D drafts of each row; those of a row that offers none mean nothing."""

    def note_tokens(self, chosen: torch.Tensor, count: torch.Tensor) -> None:
        """The first count int64 [B] of chosen int64 [B, T] are the rows' next tokens. Called before the sizes of the
        next round are chosen."""

    def update(self, streams: torch.Tensor, chosen: torch.Tensor, count: torch.Tensor, start: torch.Tensor) -> None:
        """Called after `note_tokens` in a round with drafts. streams [B·T, n, d]: the main model's at positions start …
        start + T − 1."""

    def keep(self, streams: torch.Tensor, chosen: torch.Tensor, count: torch.Tensor) -> None:
        """Called instead of `update` in a round without drafts: T is 1, streams [B, n, d]. The drafter catches up
        later."""

    def catch_up(self, width: int, start: torch.Tensor) -> None:
        """Run the waiting tokens, up to `width` a row. A second call changes nothing until `caught_up`."""

    def caught_up(self) -> None:
        """No token waits any more."""


class NoDrafts(RoundDrafter):
    """Rounds of one token a row. rows: how many."""

    def __init__(self, rows: int, device: torch.device):
        self.offered = torch.zeros(rows, dtype=torch.int64, device=device)

    def take(self, other):
        pass

    def drafts(self, D, start):
        return Drafted(start.new_zeros(len(start), D))


class MTPDrafts(RoundDrafter):
    """Chained drafts of the MTP block, which holds as many entries as the model's caches hold tokens, less the waiting
    ones.

    features [B, d], chained [B, n, d]: the block's head input at the last token that it ran, which gives the next
    draft, and its streams there. choice: how drafts are chosen from logits.

    A round without drafts skips the block and its head. Its token and the main model's streams are kept, and run
    through the block later in one step with others: before the next draft, or when no more can wait. A step over more
    tokens than the cache's rewind would overwrite rows that the block's window still needs.
    """

    def __init__(
        self, model: Model, cache: Cache, features: torch.Tensor, chained: torch.Tensor, choice: Choice = Greedy()
    ):
        if not model.mtp:
            raise InputError("this model was loaded without an MTP block; draft by lookup, or load one with a block")
        self.model, self.cache, self.choice, self.lengths = model, cache, choice, (cache._mtp,)
        self.features, self.chained = features.clone(), chained.clone()
        self.offered = torch.full((cache.batch,), MAX_DRAFTS, device=model.device)
        self.catch_up_widths = [n for n in CATCH_UP_WIDTHS if n <= cache.max_rewind + 1] or [1]
        # of a row; the last belongs to rounds that are captured while all others are in use
        places = self.catch_up_widths[-1] + 1
        self.first, kept = torch.arange(cache.batch, device=model.device) * places, cache.batch * places
        self.kept = torch.zeros(cache.batch, dtype=torch.int64, device=model.device)
        self.kept_ids, self.kept_streams = self.kept.new_zeros(kept), chained.new_zeros(kept, *chained.shape[1:])

    @property
    def said(self) -> torch.Tensor:
        """Logits fp32 [B, V] of the first draft, if no token waits."""
        return self.model.head(self.features)

    def take(self, other):
        for name in ("features", "chained", "kept_ids", "kept_streams", "kept"):
            getattr(self, name).copy_(getattr(other, name))

    def drafts(self, D, start):
        if not D:
            return Drafted(start.new_empty(len(start), 0))
        tokens, drawn_from, features, streams = [], [], self.features, self.chained
        for j in range(D):
            if j:
                features, streams = run_block(self.model, self.cache, streams, tokens[-1].unsqueeze(1), start + (j - 1))
            token, q = self.choice.draft(self.model.head.own(features), start + (j + 1))
            tokens.append(token)
            drawn_from += [] if q is None else [q]
        return Drafted(torch.stack(tokens, 1), stacked_along(drawn_from, 1) if drawn_from else None)

    def update(self, streams, chosen, count, start):
        """Run the block over the verified tokens. It then stands after the last token that counts. Other rows do not
        change."""
        features, after = run_block(self.model, self.cache, streams, chosen, start, (count - 1).clamp(min=0))
        moved = (count > 0).unsqueeze(1)
        self.features.copy_(torch.where(moved, features, self.features))
        self.chained.copy_(torch.where(moved.unsqueeze(2), after, self.chained))

    def keep(self, streams, chosen, count):
        place = self.first + self.kept
        self.kept_ids.index_copy_(0, place, chosen.flatten())
        self.kept_streams.index_copy_(0, place, streams.to(self.kept_streams.dtype))
        self.kept += count

    def catch_up(self, width, start):
        some = lambda held: held.view(len(self.kept), -1, *held.shape[1:])[:, :width]
        self.update(some(self.kept_streams).flatten(0, 1), some(self.kept_ids), self.kept, start - self.kept)

    def caught_up(self):
        self.kept.zero_()


class LookupDrafts(RoundDrafter):
    """Prompt lookup as `LookupDrafter` defines it, over texts on the device: the longest suffix of `longest` to
    `shortest` tokens that occurs earlier with a token after it, and of those occurrences the latest. A match that
    reaches the end continues into its own drafts.

    text int64 [B, longest + room]: pads of −1, the row's tokens, then values without meaning. A round searches all of
    it, in about a dozen operations over B · room numbers, without an index. tokens int64 [B]: each row's first after
    its prompt.
    """

    def __init__(self, prompts: list[list[int]], tokens: torch.Tensor, room: int, longest: int, shortest: int):
        self.longest, self.shortest = longest, shortest
        held = torch.full((len(prompts), longest + room), -1, dtype=torch.int64)
        for row, ids in zip(held, prompts):
            row[longest : longest + len(ids)] = torch.tensor(ids)
        self.text = held.to(tokens.device)
        self.length = torch.tensor(list(map(len, prompts)), device=tokens.device)
        self.behind, self.offered = torch.zeros_like(self.length), torch.zeros_like(self.length)
        self.note_tokens(tokens.unsqueeze(1), torch.ones_like(self.length))

    def take(self, other):
        for name in ("text", "length", "behind", "offered"):
            getattr(self, name).copy_(getattr(other, name))

    def drafts(self, D, start):
        period = (self.length - self.behind).unsqueeze(1)  # a draft beyond the end repeats an earlier one
        place = self.longest + self.behind.unsqueeze(1) + torch.arange(D, device=start.device) % period
        return Drafted(self.text.gather(1, place))

    def note_tokens(self, chosen, count):
        place = self.longest + self.length.unsqueeze(1) + torch.arange(chosen.shape[1], device=chosen.device)
        self.text.scatter_(1, place, chosen)  # writes beyond what counts too: that lies after the length
        self.length += count
        self._find()

    def _find(self) -> None:
        """The position where each row's match continues (0 if there is none)."""
        room = self.text.shape[1] - self.longest
        place, length = torch.arange(room, device=self.text.device), self.length.unsqueeze(1)
        # a token follows at `place`; how many tokens before it agree
        alike, run = place < length, torch.zeros_like(place)
        for back in range(1, self.longest + 1):
            last = self.text.gather(1, self.longest + length - back)
            alike = alike & (self.text[:, self.longest - back : self.longest - back + room] == last)
            run = run + alike
        # the longest match, and of those the latest
        best = torch.where(run >= self.shortest, run * room + place, -1).amax(1)
        self.behind.copy_(best.clamp(min=0) % room)
        self.offered.copy_((best >= 0) * MAX_DRAFTS)


def primed(
    model: CausalLM,
    cache: Cache,
    prompts: list[list[int]],
    on_prefill: Callable[[int, int], None] | None = None,
    choice: Choice = Greedy(),
    drafter: Drafter | None = MTPDrafter(),
) -> tuple[torch.Tensor, RoundDrafter]:
    """Append prompts to an empty cache, and to the MTP block's own if it drafts.

    Returns what `Rounds` starts from: the tokens chosen after the prompts int64 [B], and the device's form of
    `drafter` (None: nothing is drafted). Raises InputError for a drafter that has none.
    """
    if drafter is not None and not isinstance(drafter, (MTPDrafter, LookupDrafter)):
        raise InputError(
            f"drafter {drafter.name} has no device implementation; expected {MTPDrafter.name} or {LookupDrafter.name}"
        )
    tell = lambda streams, following, known: model.mtp_logits(streams, following, cache, n_new=known, logits="none")
    told = tell if needs_block(drafter) else None
    logits, streams = prefill(model, cache, prompts, told, on_prefill, cache.piece)
    tokens = choice.own(logits, torch.tensor(cache.lengths, device=model.device)).squeeze(1)
    if drafter is None:
        return tokens, NoDrafts(len(prompts), model.device)
    if isinstance(drafter, LookupDrafter):
        room = cache.max_context + 1  # the last token that a round chooses is not in the caches
        return tokens, LookupDrafts(prompts, tokens, room, drafter.longest, drafter.shortest)
    with torch.inference_mode():
        features, after = run_block(
            model,
            cache,
            streams.flatten(0, 1),
            tokens.unsqueeze(1),
            torch.tensor(cache.mtp_lengths, device=model.device),
        )
    cache._mtp.advance(slice(0, len(prompts)), 1)
    return tokens, MTPDrafts(model, cache, features, after, choice)
