"""Keys and values of a GQA layer in host memory, its summaries and the blocks it reads on the device.

The block of the current position is being written, so it has a staging slot of its own, the last: `rotary_rows` writes
the token's key and value there, and `write_back` copies them to host memory. All other slots hold complete blocks.
Attention reads the staging buffer as a cache in which the query is in the last block: every other slot is before it and
visible as a whole, like its block. So the kernels, the order of the list and every bit of the result are those of the
resident cache.
"""

from copy import copy

import torch

from dsv4.cache.cache import Cache, Traffic
from dsv4.cache.host_tier.memory import HostBuffer
from dsv4.errors import CapacityError
from dsv4.kernels.block_choice import Policy
from dsv4.kernels.grouped_attention import Termination
from dsv4.kernels.staging import Pool, SlotTable, items_of, new_table, paired

BLOCK = 128


def host_use(cache: Cache) -> dict | None:
    """What a cache keeps in host memory and has fetched from it, as JSON values; None for a cache on the device. Waits
    for the device."""
    if not cache.host_bytes:
        return None
    chosen, guessed = (cache.traffic(g) for g in (False, True))
    return {
        "pinned_bytes": cache.host_bytes,
        "hits": chosen.hits,
        "misses": chosen.misses,
        "hit_rate": chosen.hit_rate,
        "fetched_bytes": chosen.nbytes,
        "guessed_bytes": guessed.nbytes,
    }


def staged_blocks(policy: Policy, max_context: int, asked: int | None = None) -> int:
    """Blocks staged a row and KV head, beside the current one; by default as many again as a step chooses, where there
    are so many. Raises CapacityError for fewer than a step chooses."""
    if policy.dense:
        return 0
    if asked is None:
        return max(policy.kept, min(2 * policy.kept, -(-max_context // policy.block)))
    if asked < policy.kept:
        raise CapacityError(
            f"a step of {policy.name} reads {policy.kept} blocks a KV head at once, and staging has {asked} slots; "
            f"make at least {policy.kept}"
        )
    return asked


class HostRows:
    """Cache of one layer: keys and values [B, KV, S, D] in host memory. slots: staged blocks a row and KV head, beside
    the current one; those beyond what a step chooses keep what was chosen lately (default: `staged_blocks`). A dense
    policy chooses and stages nothing: such a layer is read whole (`DenseStream`).

    Raises CapacityError if a step chooses more blocks than there are slots, PinnedMemoryError if host memory is short.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        max_context: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        policy: Policy,
        slots: int | None = None,
    ):
        unit = BLOCK if policy.dense else max(BLOCK, policy.block)
        self.shape, self.dtype, self.home = (batch, kv_heads, -(-max_context // unit) * unit, head_dim), dtype, device
        wanted = staged_blocks(policy, self.shape[2], slots)
        self.buffers = [HostBuffer(self.shape, dtype, device) for _ in range(2)]
        self.host_keys, self.host_values = (buffer.device for buffer in self.buffers)
        self.stage(policy, wanted)

    def stage(self, policy: Policy, slots: int) -> None:
        """Allocate on the device what `policy` chooses and searches. It holds nothing yet."""
        B, KV, S, D = self.shape
        self.policy, self.block, self.slots = policy, policy.block, slots
        self.keys = self.values = self.low = self.high = self.mean = self.table = self.guesses = None
        if policy.dense:
            return
        new = lambda rows: torch.zeros(B, KV, rows, D, dtype=self.dtype, device=self.home)
        self.keys, self.values = (new((slots + 1) * self.block) for _ in range(2))
        summary = lambda kind: new(S // self.block) if policy.selector == kind else None
        self.low, self.high, self.mean = summary("bound"), summary("bound"), summary("mean")
        self.table = new_table(B * KV, S // self.block, slots, self.home)
        self.guesses = torch.zeros_like(self.table.count)
        self.pools = tuple(
            paired(items_of(far, self.block), items_of(near, self.block))
            for far, near in ((self.host_keys, self.keys), (self.host_values, self.values))
        )

    def part(self, rows: slice) -> "HostRows":
        """Views of some of the batch's rows."""
        B, KV = self.shape[:2]
        if (rows.start, rows.stop) == (0, B):
            return self
        found, groups = copy(self), slice(rows.start * KV, rows.stop * KV)
        found.shape, found.buffers = (rows.stop - rows.start, *self.shape[1:]), ()
        for name in ("keys", "values", "host_keys", "host_values", "low", "high", "mean"):
            whole = getattr(self, name)
            setattr(found, name, None if whole is None else whole[rows])
        if self.table is not None:
            found.table, found.guesses = SlotTable(*(t[groups] for t in self.table)), self.guesses[groups]
            found.pools = tuple(Pool(pool.host[groups], pool.staged[groups]) for pool in self.pools)
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors on the device, by the names of the plan."""
        if self.table is None:
            return {}
        held = {
            "staged keys": self.keys,
            "staged values": self.values,
            "low": self.low,
            "high": self.high,
            "mean": self.mean,
            **self.table._asdict(),
            "guesses": self.guesses,
        }
        return {name: t for name, t in held.items() if t is not None}

    @property
    def host_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def device_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors().values())

    def traffic(self, guessed: bool = False) -> Traffic:
        """Counts of the fetches of choices (or of guesses) so far. Waits for the device."""
        if self.table is None:
            return Traffic(0, 0, 0)
        hits, misses = (self.guesses if guessed else self.table.count).sum(0).tolist()
        return Traffic(hits, misses, misses * sum(pool.item_bytes for pool in self.pools))

    def places(self, start: torch.Tensor, tokens: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each token from start[b] on: its position, and its place in the staging buffer, in the last slot. All
        layers of a step share them."""
        found = [start + t if t else start for t in range(tokens)]
        return [(at, at % self.block + self.slots * self.block) for at in found]

    def decode(
        self,
        op,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        biases,
        cis: torch.Tensor,
        places,
        scale: float,
        policy: Policy | None = None,
        rule: Termination | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Write the tokens at `places` and attend: [B, T, H, D], the bits of the resident cache, and with a rule the
        tiles read int32 [B, T, KV].

        q [N, H·D], k and v [N, KV·D], N = B·T, not yet rotated; biases, cis as in `rotary_rows`. Tokens of a row run
        one after the other, because each may choose as many blocks as there are slots. The device decides everything.
        """
        B, T, found = self.shape[0], len(places), []
        for t, place in enumerate(places):
            mine = (q, k, v, cis) if T == 1 else (x.view(B, T, -1)[:, t] for x in (q, k, v, cis))
            found.append(self._token(op, *mine, biases, place, scale, policy, rule))
        if T == 1:
            return found[0]
        out, tiles = zip(*found)
        return torch.cat(out, 1), None if rule is None else torch.cat(tiles, 1)

    def _token(self, op, q, k, v, cis, biases, place, scale, policy, rule):
        start, here = place
        q = op.rotary_rows(q, k, v, biases, cis, self.keys, self.values, here)
        op.write_back(
            self.keys,
            self.values,
            self.host_keys,
            self.host_values,
            start,
            self.table,
            self.low,
            self.high,
            self.mean,
            self.block,
        )
        return self.attend(op, q, place, scale, None, policy, rule)

    def attend(
        self,
        op,
        q: torch.Tensor,
        place,
        scale: float,
        blocks: torch.Tensor | None = None,
        policy: Policy | None = None,
        rule: Termination | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """q [B, 1, H, D], rotated; the token is already written at `place` (of `places`). blocks int32 [B, 1, KV, n]: a
        choice made elsewhere. Returns what `decode` does."""
        (B, KV), (start, here) = self.shape[:2], place
        if blocks is None:
            blocks = self._chosen(op, q, start, policy, rule)
        found = op.fetch(self.table, self.pools, blocks.view(B * KV, -1), start, self.block, True)
        o = op.gather_attention(
            q, self.keys, self.values, found.view(B, 1, KV, -1), here, None, scale, self.block, rule
        )
        return (o, None) if rule is None else o

    def _chosen(self, op, q, start, policy, rule) -> torch.Tensor:
        return op.choose_blocks(
            q, self.shape[1], self.low, self.high, self.mean, start, policy or self.policy, rule is not None
        )

    def prefetch(
        self, op, q: torch.Tensor, start: torch.Tensor, blocks: torch.Tensor | None = None, policy: Policy | None = None
    ) -> None:
        """Stage what a guess of the query, or of its blocks, chooses. It changes no result: the blocks that it misses
        are fetched when the query is known. start: of the next token, or of the one before. Guesses are counted
        separately (`traffic(guessed=True)`)."""
        B, KV = self.shape[:2]
        if blocks is None:
            blocks = self._chosen(op, q, start, policy, None)
        op.fetch(self.table._replace(count=self.guesses), self.pools, blocks.view(B * KV, -1), start, self.block, True)

    def store(self, keys: torch.Tensor, values: torch.Tensor, start: torch.Tensor, tokens: int) -> None:
        """Copy rows start[b] … start[b] + tokens − 1 of keys and values [B, KV, S, D] to host memory, and drop what was
        staged of them."""
        B, KV, S, D = self.shape
        position = start.unsqueeze(1) + torch.arange(tokens, device=start.device)
        rows = (torch.arange(B * KV, device=start.device).view(B, KV, 1) * S + position.unsqueeze(1)).flatten()
        for here, there in ((keys, self.host_keys), (values, self.host_values)):
            there.view(-1, D).index_copy_(0, rows, here.view(-1, D).index_select(0, rows))
        if self.table is not None:
            self.table.forget((start // self.block).repeat_interleave(KV).unsqueeze(1))

    def summarise(self, tokens: int, write) -> None:
        """Summaries of the first `tokens` keys of every row, read from host memory. write: the operation
        `summarise_blocks`."""
        if tokens and self.policy.selector is not None:
            start = torch.zeros(self.shape[0], dtype=torch.int64, device=self.home)
            write(self.host_keys, start, tokens, self.low, self.high, self.mean, self.block)
