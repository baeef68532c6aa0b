"""The positions of the tokens of one append.

A step is a uniform piece of work: rows [first, first + B) of the batch, T new tokens each.
Row b's tokens stand at positions starts[b] … starts[b] + T − 1; rows may differ in starts.
Everything that layers derive from positions alone (slots, masks, rotations) is computed once
a step and shared by all layers through `memo`.

`starts` on the host sizes the work (how many entries are visible at most); the positions that
enter the arithmetic are device tensors.
"""

from collections.abc import Callable
from typing import Any

import torch

from dsv4.errors import UnsupportedInput
from dsv4.kernels.fusions.compositions import Kept
from dsv4.kernels.rope import rotation
from dsv4.model.module import Separate, Together


class Step:
    """ids int64 [B·T] (row-major), pos int64 [B, T], first row of the batch, host starts [B]."""

    def __init__(self, ids: torch.Tensor, first: int, starts: list[int], frequencies: dict[str, torch.Tensor]):
        self.B, self.T = ids.shape
        self.N = self.B * self.T
        self.ids = ids.flatten()
        self.first, self.starts = first, starts
        self.device = ids.device
        # filled on the device: a copy from the host would wait for all earlier work
        even = min(starts) == max(starts)
        self.start = (
            torch.full((self.B,), starts[0], device=self.device) if even else torch.tensor(starts, device=self.device)
        )
        self.pos = self.start.unsqueeze(1) + torch.arange(self.T, device=self.device)
        self.row = torch.arange(first, first + self.B, device=self.device).unsqueeze(1)  # [B, 1]
        self.frequencies = frequencies
        self._memo: dict = {}
        self._cis: dict[str, torch.Tensor] = {}
        self._inverse: dict[str, torch.Tensor] = {}

    captured = False  # see CapturedStep
    parts = Separate()  # how the parts of a layer run
    prompt = False  # tokens of a prompt: GQA models then read the whole cache, whatever their policy
    piece: Any = None  # dsv4.model.gqa.prefill.Piece of a prompt that GQA models attend to in chunks

    @property
    def end(self) -> int:
        """Most tokens that any row holds after this step (host)."""
        return max(self.starts) + self.T

    def on(self, device: torch.device) -> "Step":
        """A copy of this step whose tensors are on `device`: this one where they are already."""
        if self._is_on(device):
            return self
        return self.memo(("on", device), lambda: self._copied(device))

    def _copied(self, device: torch.device) -> "Step":
        frequencies = {k: f.to(device) for k, f in self.frequencies.items()}
        there = Step(self.ids.view(self.B, self.T).to(device), self.first, self.starts, frequencies)
        there.prompt, there.piece = self.prompt, self.piece and self.piece.on(device)
        return there

    def _is_on(self, device: torch.device) -> bool:
        """A model may be on 'cuda', whose tensors are on 'cuda:0': the current device, as every step's."""
        return device.type == self.device.type and device.index in (None, self.device.index)

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.B)

    def memo(self, key, compute: Callable):
        """The value of `compute()`, kept for this step under `key`."""
        value = self._memo.get(key)
        if value is None:
            value = self._memo[key] = compute()
        return value

    def cis(self, base: str) -> torch.Tensor:
        """Rotation of each token at its position, complex64 [N, d/2]; base 'main' or 'compress'."""
        if base not in self._cis:
            self._cis[base] = rotation(self.pos.flatten(), self.frequencies[base])
        return self._cis[base]

    def inverse_cis(self, base: str) -> torch.Tensor:
        """Conjugate of `cis`."""
        if base not in self._inverse:
            self._inverse[base] = self.cis(base).conj().resolve_conj()
        return self._inverse[base]

    def visible(self, ratio: int) -> torch.Tensor:
        """int64 [B, T]: query t sees entries w < ⌊(t+1)/ratio⌋, whose last token is at or before t."""
        return self.memo(("visible", ratio), lambda: (self.pos + 1) // ratio)

    def max_visible(self, ratio: int) -> int:
        """Most entries that any query of this step sees (host)."""
        return self.end // ratio

    def min_visible(self, ratio: int) -> int:
        """Fewest entries that any query of this step sees (host)."""
        return (min(self.starts) + 1) // ratio

    def window_full(self, window: int) -> bool:
        """Whether every query of this step has `window` tokens up to and including itself (host)."""
        return min(self.starts) + 1 >= window

    def completed(self, ratio: int) -> int:
        """Most windows of `ratio` tokens that this step completes in any row (host)."""
        return max((start + self.T) // ratio - start // ratio for start in self.starts)

    def new_windows(self, ratio: int) -> torch.Tensor:
        """int64 [B, completed]: windows from the first one this step can complete.

        A row that completes fewer than another gets windows that are not complete yet; their
        entries lie beyond what any query sees and are written again when they complete.
        """
        return self.memo(
            ("windows", ratio),
            lambda: self.start.unsqueeze(1) // ratio + torch.arange(self.completed(ratio), device=self.device),
        )

    def completes(self, ratio: int) -> torch.Tensor:
        """bool [B·completed]: which of `new_windows` are complete after this step."""
        return self.memo(
            ("completes", ratio),
            lambda: ((self.new_windows(ratio) + 1) * ratio <= self.start.unsqueeze(1) + self.T).flatten(),
        )

    def window_cis(self, ratio: int, base: str) -> torch.Tensor:
        """Rotation of each new entry at its window's first token, complex64 [B·completed, d/2]."""
        return self.memo(
            ("window_cis", ratio, base),
            lambda: rotation((self.new_windows(ratio) * ratio).flatten(), self.frequencies[base]),
        )


class CapturedStep(Step):
    """A step whose positions are known on the device alone, so that it can be captured once and replayed at any
    position.

    ids int64 [B, T] and start int64 [B] are read in place: a replay sees their values at that time. The host only knows
    that no row ends beyond `capacity` tokens, so buffers are read up to what the device says is visible, not up to a
    length.
    """

    captured = True

    def __init__(self, ids: torch.Tensor, start: torch.Tensor, capacity: int, frequencies: dict[str, torch.Tensor]):
        self.B, self.T = ids.shape
        self.N, self.device, self.first, self.capacity = self.B * self.T, ids.device, 0, capacity
        self.ids, self.start, self.frequencies = ids.flatten(), start, frequencies
        self.pos = start.unsqueeze(1) + torch.arange(self.T, device=self.device)
        self.row = torch.arange(self.B, device=self.device).unsqueeze(1)
        self._memo, self._cis, self._inverse = {}, {}, {}
        self.parts = Together()

    def place(self, place: Callable, window: tuple[int, int], kept: tuple[Kept, ...]) -> None:
        """Keep the results of the composition `place` under the names that layers use. kept: with slots of `ratio`
        each."""
        (W, R), bases = window, tuple(self.frequencies)
        found = iter(place(self.start, self.T, tuple(self.frequencies.values()), window, kept))
        take = lambda *keys: self._memo.update((key, next(found)) for key in keys)
        take(("window", W, R, W - 1, True), ("slots", R, "pos"))
        for base in bases:
            self._cis[base], self._inverse[base] = (torch.view_as_complex(next(found)) for _ in range(2))
        for k in kept:
            take(
                ("visible", k.ratio),
                ("phase", k.ratio),
                ("slots", k.ring, "pos"),
                ("windows", k.ratio),
                ("completes", k.ratio),
                ("rows of windows", k.ratio, k.overlap, k.ring, k.overlap * k.ratio - 1, True),
            )
            self._memo["window_cis", k.ratio, bases[-1]] = torch.view_as_complex(next(found))
            take(*(("entry_slots", k.ratio, n) for n in k.entries))

    @property
    def end(self) -> int:
        """The capacity: an upper bound for every replay."""
        return self.capacity

    def on(self, device: torch.device) -> "CapturedStep":
        """This step itself: captured layers are all on one device. Raises UnsupportedInput otherwise."""
        if not self._is_on(device):
            raise UnsupportedInput(
                f"a captured step on {self.device} met a layer on {device}; captured decoding runs on one device"
            )
        return self

    def min_visible(self, ratio: int) -> int:
        return 0

    def window_full(self, window: int) -> bool:
        return False

    def completed(self, ratio: int) -> int:
        """The most windows that T tokens can complete, from any start."""
        return (self.T + ratio - 1) // ratio
