"""What decoding tokens of one layer read under a policy that chooses once, after the prompt
(`dsv4.kernels.block_choice.Observed`).

A prompt's steps leave the queries of its last tokens here, and each step chooses anew, so that after the last one the
choice is that of the whole prompt. Then it is fixed: the list of a row has every position from the end of the cache
back to the window's first token, then the chosen tokens before the window by falling score. A step at position p reads
the list from p on, captured or not, in the order of a traversal that may stop, and a rewind to any place after the
prompt changes nothing.

A prompt is an unbroken run of prompt tokens. One that follows decoded tokens chooses again, over the whole context, by
its own queries. A rewind into a prompt drops the choice: until the next prompt everything is read.
"""

import torch

from dsv4.cache.streams import Stream
from dsv4.kernels.block_choice import Observed, choose_tokens
from dsv4.model.gqa.heads import Heads
from dsv4.model.numerics import Numerics
from dsv4.model.step import Step


def selection_streams(heads: Heads, batch: int, slots: int, numerics: Numerics, policy: Observed) -> tuple[Stream, ...]:
    """Buffers of one layer: the list of each row and KV head, whose last entry is always −1, and the queries of the
    window."""
    KV, H, D, W, dtype = heads.KV, heads.H, heads.width, policy.window, numerics.activation
    return (
        Stream(
            "kept tokens",
            (batch, KV, slots + 1),
            torch.int32,
            f"{batch} rows × {KV} heads × ({slots} + 1) tokens × 4 B",
        ),
        Stream(
            "observed queries",
            (batch, W, H, D),
            dtype,
            f"{batch} rows × window of {W} × {H} heads × {D} × {dtype.itemsize} B",
        ),
    )


class Selection:
    """Of the `layer`-th of `layers` layers that choose. tensors: the buffers of `selection_streams`, by name."""

    def __init__(self, tensors: dict[str, torch.Tensor], policy: Observed, layer: int, layers: int):
        self.kept, self.queries = tensors["kept tokens"], tensors["observed queries"]
        self.policy, self.place = policy, (layer, layers)
        batch, self.slots = len(self.kept), self.kept.shape[2] - 1
        self.runs = [(0, 0)] * batch  # the positions of each row's last prompt: from the first up to the second
        # of each row: chosen tokens before the window, and the position from which on everything is read
        self.chosen = [(0, 0)] * batch
        for b in range(batch):
            self.drop(b)

    def drop(self, b: int) -> None:
        """Row b reads everything."""
        self.runs[b] = (0, 0)
        self._keep(b, self.kept.new_empty(self.kept.shape[1], 0), 0)

    def rewound(self, lengths: list[int]) -> None:
        """Rows hold `lengths` tokens after a rewind: those that end within their prompt lose the choice."""
        for b, length in enumerate(lengths):
            if length < self.runs[b][1]:
                self.drop(b)

    def observe(self, step: Step, q: torch.Tensor, keys: torch.Tensor, scale: float) -> None:
        """Tokens of prompts: q [B, T, H, D], rotated, and keys [B, KV, S, D] that hold the step's own."""
        for i, start in enumerate(step.starts):
            b, end = step.first + i, start + step.T
            self.runs[b] = (self.runs[b][0] if self.runs[b][1] == start else start, end)
            new = q[i, -self.policy.window :]
            at = torch.arange(end - len(new), end, device=q.device) % self.policy.window
            self.queries[b, at] = new
            self._choose(b, keys[i], scale)

    def draw(self, keys: torch.Tensor, lengths: list[int], generator: torch.Generator) -> None:
        """Choose as if row b were a prompt of lengths[b] tokens with random queries; keys [batch, KV, S, D]."""
        self.queries.normal_(generator=generator)
        for b, length in enumerate(lengths):
            self.runs[b] = (0, length)
            self._choose(b, keys[b], keys.shape[-1] ** -0.5)

    def _choose(self, b: int, keys: torch.Tensor, scale: float) -> None:
        begun, end = self.runs[b]
        own = min(self.policy.window, end - begun)
        at = torch.arange(end - own, end, device=keys.device) % self.policy.window
        self._keep(b, *choose_tokens(self.queries[b, at], keys[:, :end], scale, self.policy, *self.place))

    def _keep(self, b: int, best: torch.Tensor, since: int) -> None:
        """Row b reads `best` int [KV, k], and everything from `since` on."""
        k, row, own = best.shape[1], self.kept[b], self.slots - since
        self.chosen[b] = k, since
        row.fill_(-1)
        row[:, :own] = torch.arange(self.slots - 1, since - 1, -1, dtype=row.dtype, device=row.device)
        row[:, own : own + k] = best.to(row.dtype)

    @property
    def width(self) -> int:
        """Entries of the longest list, up to the end of the cache: what a captured step reads lists by."""
        return max(k + self.slots - since for k, since in self.chosen)

    def lists(self, step: Step) -> torch.Tensor:
        """The list of every query of a step: int32 [B, T, KV, n], −1 where nothing is. From the query's own token back
        to the window's first, then the chosen by falling score."""
        if step.captured:
            n = self.width
        else:
            n = max(
                k + start + step.T - since
                for (k, since), start in zip(self.chosen[step.rows], step.starts, strict=True)
            )
        shape = (step.B, step.T, self.kept.shape[1], n)
        rows = self.kept[step.rows].unsqueeze(1).expand(*shape[:3], self.slots + 1)
        return rows.gather(-1, step.memo(("places of lists", n), lambda: self._places(step, n)).expand(shape))

    def _places(self, step: Step, n: int) -> torch.Tensor:
        """Where the n entries that each query reads lie: int64 [B, T, 1, n]. Layers with lists of one length share
        them."""
        own = self.slots - 1 - step.pos.view(step.B, step.T, 1, 1)
        return (own + torch.arange(n, device=own.device)).clamp_(max=self.slots)

    def read(self, end: int) -> dict:
        """What the last token of a row that holds `end` tokens reads, by the row of the longest prompt: `tokens`, those
        `kept` of the prompt, and the `prompt`'s number."""
        b = max(range(len(self.runs)), key=lambda b: self.runs[b][1])
        (k, since), prompt = self.chosen[b], self.runs[b][1]
        return {"tokens": k + end - since, "kept": k + prompt - since, "prompt": prompt}
