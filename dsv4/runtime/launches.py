"""Which kernels a request will launch, found before its weights are loaded.

A model that was planned and not loaded has parameters on the device `meta`. A prompt and the steps after it run on them
in host time alone: what reads no numbers on the host, as captured steps and prompts of the triton backend do, launches
there what it will launch on the GPU.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from dsv4.cache.cache import Cache
from dsv4.cache.paged import PagedCache
from dsv4.cache.paged_view import PagedView
from dsv4.kernels.launch import GPU
from dsv4.kernels.recording import Launch, recorded
from dsv4.model.causal import DEFAULT_MAX_REWIND, CausalLM, captured_capacity
from dsv4.runtime.graph import BlockGraph, DecodeGraph

META = torch.device("meta")


class Runs(Protocol):
    """What a request makes a model do. Its repr says all that `run` depends on, beside the model."""

    def run(self, model: CausalLM) -> None:
        """Launch on the device `meta` what the request launches. The model serves for nothing else after that."""
        ...


class Work(NamedTuple):
    """Prompts of `prompt` tokens, one at a time, then steps of `batch` rows over caches of `max_context` tokens, with
    drafts in any of those numbers. rewind: tokens that caches can forget; None: as by default."""

    prompt: int
    max_context: int
    batch: int = 1
    drafts: tuple[int, ...] = ()
    rewind: int | None = None

    def run(self, model: CausalLM) -> None:
        room, rewind = captured_capacity(model, self.max_context), self.rewind
        cache = model.new_cache(self.batch, room, DEFAULT_MAX_REWIND if rewind is None else rewind)
        keep_kinds(model, cache)
        left = self.prompt
        for tokens, skipped in pieces(self.prompt, model.chunk_beside(cache)):
            left -= skipped + tokens
            cache._main.advance(slice(0, self.batch), skipped)
            cache._mtp.advance(slice(0, self.batch), skipped)
            ids, counts = torch.zeros(self.batch, tokens, dtype=torch.int64, device=META), [tokens]
            counts += [0] * (self.batch - 1)
            out = model.append(ids, cache, counts, "last", return_streams=bool(len(model.mtp)), whole=False)
            if len(model.mtp) and self.drafts:
                block(model, cache, out[1], ids, [tokens - (not left), *counts[1:]])  # the next token must be known
        steps(model, cache, self.drafts)


@torch.inference_mode()
def launches(model: CausalLM, gpu: GPU, work: Runs) -> list[Launch]:
    """Launches that Triton compiles separately. model: planned, with parameters on the device `meta`, and of the
    backend triton; it serves for nothing else after that. Raises CapacityError and InputError as `new_cache` does."""
    model.to(META)
    model.device = META
    with recorded(gpu) as found:
        work.run(model)
    return found.distinct


def block(model: CausalLM, cache: Cache, streams: torch.Tensor, ids: torch.Tensor, counts: list[int]) -> None:
    """The MTP block over a piece of a prompt: streams [B, T, n, d], ids [B, T]."""
    if any(counts):
        model.mtp_logits(streams[:, : max(counts)], ids[:, : max(counts)], cache, n_new=counts, logits="none")


def steps(model: CausalLM, cache: Cache | PagedView, drafts: Sequence[int]) -> None:
    """Steps of all rows of a cache, of one token and of these numbers of drafts more, and the MTP block's, which runs
    as many tokens as a pass kept."""
    for width in sorted({1, *(1 + n for n in drafts)}):
        DecodeGraph(model, cache, width, whole=False)._run()
    for width in range(1, max(drafts) + 2) if len(model.mtp) and drafts else ():
        BlockGraph(model, cache, width, whole=False)._run()


def keep_kinds(model: CausalLM, cache: Cache) -> None:
    """Leave one layer of each kind: layers whose parameters and caches have the same names, shapes and dtypes launch
    the same."""
    kinds: dict[tuple, int] = {}
    for i, (layer, place) in enumerate(zip(model.layers, cache.layers)):
        held = (*layer.named_parameters(), *layer.named_buffers(), *place.tensors.items())
        kinds.setdefault(tuple((name, t.shape, t.dtype) for name, t in held), i)
    if isinstance(cache, PagedCache):
        cache.plan = [cache.plan[i] for i in kinds.values()] + list(cache.plan[len(cache.layers) :])
    for i in sorted(set(range(len(model.layers))) - set(kinds.values()), reverse=True):
        del model.layers[i]
    cache.layers = [cache.layers[i] for i in kinds.values()]


def pieces(prompt: int, chunk: int) -> list[tuple[int, int]]:
    """(tokens, tokens that are left out before them) of chunks of a prompt. Sizes of kernels grow with powers of two of
    what lies before, so of the whole chunks those are left out that lie between them."""
    whole, rest = divmod(prompt, chunk)
    powers = [1 << n for n in range(whole.bit_length())]
    kept = sorted({i for power in powers for i in (power - 1, power)} & set(range(whole)) | set(range(whole)[-1:]))
    found = [(chunk, (i - before - 1) * chunk) for before, i in zip([-1, *kept], kept)]
    return [*found, (rest, 0)] if rest else found
