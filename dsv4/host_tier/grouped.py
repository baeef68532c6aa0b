"""Keys and values of a GQA layer in host memory, its summaries and the blocks it reads on the device.

The block of the current position is being written, so it has a staging slot of its own, the last: `rotary_rows` writes the token's key
and value there, `write_back` copies them to host memory. All other slots hold complete blocks. To attention the staging buffer is a
cache of its own, in which the query stands in the last block: every other slot lies before it and is seen whole, as its block is.
So the kernels, the order of the list and every bit of the result are those of the resident cache.
"""

from typing import NamedTuple

import torch

from dsv4.errors import CapacityError
from dsv4.host_tier.memory import HostBuffer
from kernels.block_choice import Policy
from kernels.errors import UnsupportedInput
from kernels.staging import items_of, new_table, paired

BLOCK = 128


class Traffic(NamedTuple):
    """What fetches did so far: blocks (or entries) found staged and copied, and the bytes copied."""

    hits: int
    misses: int
    nbytes: int

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)


class HostRows:
    """Cache of one layer: keys and values [B, KV, S, D] in host memory. slots: staged blocks a row and KV head, beside the current
    one; those beyond what a step chooses keep what was chosen lately (default: as many again).

    Raises CapacityError where a step chooses more blocks than there are slots, PinnedMemoryError where host memory is short."""

    def __init__(self, batch: int, kv_heads: int, max_context: int, head_dim: int, dtype: torch.dtype, device: torch.device,
                 policy: Policy, slots: int | None = None):
        if policy.dense:
            raise UnsupportedInput("a host-memory cache is read by blocks, and the dense policy chooses none; see DenseStream")
        self.policy, self.block = policy, policy.block
        self.slots = 2 * policy.kept if slots is None else slots
        if self.slots < policy.kept:
            raise CapacityError(f"a step of {policy.name} reads {policy.kept} blocks a KV head at once, and staging has {self.slots} "
                                f"slots; make at least {policy.kept}")
        unit = max(BLOCK, self.block)
        B, KV, S, D = self.shape = batch, kv_heads, -(-max_context // unit) * unit, head_dim
        self.buffers = [HostBuffer(self.shape, dtype, device) for _ in range(2)]
        self.host_keys, self.host_values = (buffer.device for buffer in self.buffers)
        self.keys, self.values = (torch.zeros(B, KV, (self.slots + 1) * self.block, D, dtype=dtype, device=device) for _ in range(2))
        summary = lambda kind: torch.zeros(B, KV, S // self.block, D, dtype=dtype, device=device) if policy.selector == kind else None
        self.low, self.high, self.mean = summary("bound"), summary("bound"), summary("mean")
        self.table = new_table(B * KV, S // self.block, self.slots, device)
        self.guesses = torch.zeros_like(self.table.count)
        self.pools = tuple(paired(items_of(far, self.block), items_of(near, self.block))
                           for far, near in ((self.host_keys, self.keys), (self.host_values, self.values)))

    @property
    def host_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def device_bytes(self) -> int:
        held = (self.keys, self.values, self.low, self.high, self.mean, *self.table)
        return sum(t.nbytes for t in held if t is not None)

    def traffic(self, guessed: bool = False) -> Traffic:
        """What fetches of choices (or of guesses) did so far. Waits for the device."""
        hits, misses = (self.guesses if guessed else self.table.count).sum(0).tolist()
        return Traffic(hits, misses, misses * sum(pool.item_bytes for pool in self.pools))

    def decode(self, op, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, biases, cis: torch.Tensor, start: torch.Tensor,
               scale: float) -> torch.Tensor:
        """Take in the tokens at start[b] … and attend: [B, T, H, D], the bits of the resident cache.

        q [N, H·D], k and v [N, KV·D], N = B·T, not yet rotated; biases, cis as in `rotary_rows`; start int64 [B]. Tokens of a row go
        one after the other: each may choose as many blocks as there are slots. Everything is decided on the device.
        """
        B, D = self.shape[0], self.shape[3]
        parts = [x.view(B, -1, x.shape[-1]) for x in (q, k, v, cis)]
        out = [self._token(op, *(x[:, t] for x in parts), biases, start + t if t else start, scale) for t in range(parts[0].shape[1])]
        return out[0] if len(out) == 1 else torch.cat(out, 1)

    def _token(self, op, q, k, v, cis, biases, start, scale):
        here = self._here(start)
        q = op.rotary_rows(q, k, v, biases, cis, self.keys, self.values, here)
        op.write_back(self.keys, self.values, self.host_keys, self.host_values, start, self.table, self.low, self.high, self.mean,
                      self.block)
        return self.attend(op, q, start, scale)

    def attend(self, op, q: torch.Tensor, start: torch.Tensor, scale: float, blocks: torch.Tensor | None = None) -> torch.Tensor:
        """q [B, 1, H, D], rotated; the token is in. blocks int32 [B, 1, KV, n]: a choice made elsewhere."""
        B, KV = self.shape[:2]
        if blocks is None:
            blocks = op.choose_blocks(q, KV, self.low, self.high, self.mean, start, self.policy)
        found = op.fetch(self.table, self.pools, blocks.view(B * KV, -1), start // self.block, True)
        return op.gather_attention(q, self.keys, self.values, found.view(B, 1, KV, -1), self._here(start), None, scale, self.block)

    def prefetch(self, op, q: torch.Tensor, start: torch.Tensor, blocks: torch.Tensor | None = None) -> None:
        """Stage what a guess of the query, or of its blocks, chooses. It changes no result: what it leaves out is fetched when the
        query is there. start: of the coming token, or of the one before; counted apart (`traffic(guessed=True)`)."""
        B, KV = self.shape[:2]
        if blocks is None:
            blocks = op.choose_blocks(q, KV, self.low, self.high, self.mean, start, self.policy)
        op.fetch(self.table._replace(count=self.guesses), self.pools, blocks.view(B * KV, -1), start // self.block, True)

    def _here(self, start: torch.Tensor) -> torch.Tensor:
        """Where the token stands in the staging buffer: in its last slot."""
        return start % self.block + self.slots * self.block

    def append(self, op, keys: torch.Tensor, values: torch.Tensor, q, k, v, biases, cis, start: torch.Tensor, scale: float,
               summarise) -> torch.Tensor:
        """Take in many tokens of every row by dense attention: [B, T, H, D].

        keys, values [B, KV, S, D] on the device: what `DenseStream.layer` brought. summarise: the operation `summarise_blocks`.
        """
        tokens = q.shape[0] // self.shape[0]
        q = op.rotary_rows(q, k, v, biases, cis, keys, values, start)
        self.store(keys, values, start, tokens)
        if self.policy.selector is not None:
            summarise(keys, start, tokens, self.low, self.high, self.mean, self.block)
        return op.grouped_attention(q, keys, values, start, None, scale)

    def store(self, keys: torch.Tensor, values: torch.Tensor, start: torch.Tensor, tokens: int) -> None:
        """Copy rows start[b] … start[b] + tokens − 1 of keys and values [B, KV, S, D] to host memory, and drop what was staged of
        them."""
        B, KV, S, D = self.shape
        position = start.unsqueeze(1) + torch.arange(tokens, device=start.device)
        rows = (torch.arange(B * KV, device=start.device).view(B, KV, 1) * S + position.unsqueeze(1)).flatten()
        for here, there in ((keys, self.host_keys), (values, self.host_values)):
            there.view(-1, D).index_copy_(0, rows, here.view(-1, D).index_select(0, rows))
        self.table.forget((start // self.block).repeat_interleave(KV).unsqueeze(1))
