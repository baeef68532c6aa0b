"""Rows of a GQA model's cache: those of every buffer, and those that the next steps of a row may read."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dsv4.cache.cache import Cache
from dsv4.cache.paged import PagedCache
from dsv4.model.gqa.cache import BLOCK
from dsv4.probes.families.cache_rows import UNWRITTEN, Buffer, Rows, held, span
from dsv4.probes.subject import Subject


@dataclass(frozen=True)
class HeadBuffer(Buffer):
    """One stream of a GQA layer, [batch, KV, S, D]: keys or values, a slot a position; or summaries, a slot `each`
    positions. Slots that a window has left behind are still a row's own, and may be read with no weight.
    """

    each: int = 1

    def held(self, length: int, back: int = 0) -> torch.Tensor:
        """See `Buffer.held`."""
        return torch.arange(-(-length // self.each), device=self.tensor.device)

    def offsets(self, row: int, slots: torch.Tensor) -> torch.Tensor:
        """See `Buffer.offsets`: of all KV heads."""
        (KV, S, D), size = self.tensor.shape[1:], self.tensor.element_size()
        heads = (row * KV + torch.arange(KV, device=slots.device)).view(1, KV, 1)
        places = (heads * S + slots.view(-1, 1, 1)) * D * size + torch.arange(D * size, device=slots.device)
        return places.flatten(1)

    def spans(self, row: int) -> list[tuple[int, int]]:
        return [span(self.tensor[row])]


def buffers(cache: Cache) -> Iterator[HeadBuffer]:
    """See `ProbedFamily.buffers`."""
    for plan, layer in zip(cache.plan, cache.layers, strict=True):
        for stream, tensor in layer.tensors.items():
            each = 1 if stream in ("keys", "values") else layer.block
            yield HeadBuffer(plan.label, stream, tensor, cache.batch, tensor.shape[2], each=each)


def visible(subject: Subject, cache: Cache, b: int, length: int) -> Rows:
    """See `ProbedFamily.visible`."""
    return {
        (buffer.label, buffer.stream): held(
            buffer.rows(b, tokens_read(subject, buffer.label, buffer.each, length)), buffer.tensor.dtype, None
        )
        for buffer in buffers(cache)
    }


def of_pages(subject: Subject, cache: PagedCache, pages: dict[str, dict[int, int]], length: int) -> Rows:
    """See `ProbedFamily.of_pages`: a page holds tokens, or blocks of them, of every KV head."""
    found = {}
    for plan, layer in zip(cache.plan, cache.layers, strict=True):
        for stream, pool in layer.tensors.items():
            rows, table = pool.shape[2], pages[layer.groups[stream]]
            at = tokens_read(subject, plan.label, BLOCK // rows, length)
            page = torch.tensor([table.get(int(p) // rows, 0) for p in at], dtype=torch.int64)
            raw = (
                pool[page.to(pool.device), :, (at % rows).to(pool.device)]
                .contiguous()
                .view(torch.uint8)
                .flatten(1)
                .clone()
            )
            raw[page.to(raw.device) == 0] = UNWRITTEN
            found[plan.label, stream] = held(raw, pool.dtype, None)
    return found


def tokens_read(subject: Subject, label: str, each: int, length: int) -> torch.Tensor:
    """int64: of a layer of a GQA model, the tokens that its next step may read, or whole blocks of `each` tokens: one
    that is not whole is summarised again before it is read."""
    window = subject.model.config.windows[int(label.rpartition(" ")[2])]
    return torch.arange(0 if window is None else max(0, length - window + 1) // each, length // each)
