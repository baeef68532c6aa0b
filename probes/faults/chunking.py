"""Section 1.17: prompts in chunks: fusion of the two phases, column sums, what the memory keeps."""

from collections.abc import Callable

import torch

from dsv4.kernels.chunked_prefill import Memory, reference
from dsv4.kernels.chunked_prefill.reference import Partial
from dsv4.kernels.rope import rotation
from dsv4.model.gqa import prefill
from dsv4.model.gqa.attention import SelfAttention
from dsv4.model.gqa.cache import LayerRows
from dsv4.model.step import Step
from dsv4.probes.faults import Site, mutation

SECTION = "1.17", "Chunked sparse prefill"

CHUNKS = dict(probes=("chunked_prefill",), profile="qwen2")


def rewritten(site: Site, name: str, change: Callable[[Callable], Callable]) -> None:
    """Chunked prefill runs as its definition, in which function `name` is change(what it was)."""
    real = getattr(reference, name)

    def run(*given):
        setattr(reference, name, change(real))
        try:
            return reference.chunked_prefill(*given)
        finally:
            setattr(reference, name, real)

    site.kernel("chunked_prefill", lambda _: run)


def kept(site: Site, change: Callable[[Memory, tuple], Memory]) -> None:
    """What a call keeps is change(what it kept, its arguments)."""

    def keeping(real):
        def run(*given):
            out, memory = real(*given)
            return out, change(memory, given)

        return run

    site.kernel("chunked_prefill", keeping)


# ---- fusion -------------------------------------------------------------------------------


@mutation("1.17", bugs=(), parts=("phases added without scaling",), **CHUNKS)
def fusion_without_scaling(site: Site) -> None:
    """Sums of both phases are added as they are, each below its own largest logit: e^(m − m′) is missing."""
    rewritten(site, "fuse", lambda real: lambda a, b: Partial(torch.maximum(a.m, b.m), a.l + b.l, a.o + b.o))


@mutation("1.17", bugs=(), parts=("mean of both phases",), **CHUNKS)
def phases_averaged(site: Site) -> None:
    """Both phases are divided by their own sums, and averaged."""

    def mean(a: Partial, b: Partial) -> Partial:
        each = [p.o / p.l.unsqueeze(-1) for p in (a, b)]
        return Partial(torch.maximum(a.m, b.m), torch.full_like(a.l, 2.0), each[0] + each[1])

    rewritten(site, "fuse", lambda real: mean)


@mutation("1.17", bugs=(), parts=("logits of ±100",), **CHUNKS)
def fusion_by_the_chunks_largest_logit(site: Site) -> None:
    """Both phases are brought below the largest logit of the chunk: right for small logits, and beyond fp32 for large
    ones."""

    def near(a: Partial, b: Partial) -> Partial:
        y = torch.exp(b.m - a.m)
        return Partial(a.m, a.l + b.l * y, a.o + b.o * y.unsqueeze(-1))

    rewritten(site, "fuse", lambda real: near)


@mutation("1.17", bugs=(), parts=("memory left out",), **CHUNKS)
def last_partial_chunk_without_memory(site: Site) -> None:
    """A chunk that is not whole is attended to alone."""

    def alone(real):
        def attend(q, keys, values, first, past, scale, chunking):
            if len(q) == 32 or not first:
                return real(q, keys, values, first, past, scale, chunking)
            s = slice(first, first + len(q))
            out, mass, _ = real(q, keys[:, s], values[:, s], 0, past._replace(scores=0), scale, chunking)
            return out, mass, past.scores

        return attend

    rewritten(site, "attend_chunk", alone)


@mutation("1.17", bugs=(), parts=("chunked prefill, future", "chunked prefill, first chunk"), **CHUNKS)
def chunks_attend_to_their_own_future(site: Site) -> None:
    """Phase 1 has no causal mask."""
    rewritten(site, "attend", lambda real: lambda q, k, v, scale, seen=None: real(q, k, v, scale))


# ---- scores -------------------------------------------------------------------------------


@mutation("1.17", bugs=(), parts=("column sums, before normalisation",), **CHUNKS)
def column_sums_before_normalisation(site: Site) -> None:
    """Exponentials are summed before they are divided: queries with many likely keys count more."""
    rewritten(site, "column_sums", lambda real: lambda s, total: torch.exp(s - total.m.unsqueeze(-1)).sum((1, 2)))


@mutation("1.17", bugs=(), parts=("column sums, phase 1 by the fused softmax",), **CHUNKS)
def first_scores_by_the_fused_softmax(site: Site) -> None:
    """What phase 1 gives is taken after phase 2 has widened the softmax."""

    def widened(s, own, t, far, total, score):
        return reference.column_sums(s, total), reference.column_sums(t, far if score == "memory" else total)

    rewritten(site, "given", lambda real: widened)


@mutation("1.17", bugs=(), parts=("column sums, phase 2 by its own softmax",), **CHUNKS)
def scores_of_the_memory_alone_where_the_fused_were_asked_for(site: Site) -> None:
    """score=memory, the published rule, is computed for score=fused too: each query gives the memory as much as the
    chunk."""
    rewritten(site, "given", lambda real: lambda *given: real(*given[:-1], "memory"))


@mutation("1.17", bugs=(), parts=("column sums, phase 2 by the fused softmax",), **CHUNKS)
def fused_scores_where_those_of_the_memory_alone_were_asked_for(site: Site) -> None:
    """score=fused is computed for score=memory too: a query gives the memory its real mass, and not 1."""
    rewritten(site, "given", lambda real: lambda *given: real(*given[:-1], "fused"))


@mutation("1.17", bugs=(), parts=("column sums, phase 2 not added",), **CHUNKS)
def memory_scores_never_grow(site: Site) -> None:
    """Tokens keep the score of their own chunk, whatever later chunks give them."""

    def first_alone(real):
        return lambda *given: (mass := real(*given))[:1] + (torch.zeros_like(mass[1]),)

    rewritten(site, "given", first_alone)


@mutation("1.17", bugs=(), parts=("scores fall",), **CHUNKS)
def scores_decay(site: Site) -> None:
    """Scores are halved with each chunk, in favour of what is new."""

    def halved(real):
        def select(positions, scores, heavy):
            positions, scores = real(positions, scores, heavy)
            return positions, scores / 2

        return select

    rewritten(site, "select", halved)


# ---- memory -------------------------------------------------------------------------------


@mutation("1.17", bugs=(), parts=("memory, overlap",), **CHUNKS)
def memory_overlaps_the_local_tokens(site: Site) -> None:
    """The heaviest tokens are chosen among the local ones too, which are then kept twice."""

    def twice(memory, given):
        heavy = given[5].heavy
        memory.positions[1:, ..., heavy - 1] = memory.positions[1:, ..., heavy]
        return memory

    kept(site, twice)


@mutation("1.17", bugs=(), parts=("heavy tokens of each head",), **CHUNKS)
def heavy_tokens_over_all_heads(site: Site) -> None:
    """Scores are summed over the KV heads before the heaviest are chosen: all heads keep the same tokens."""

    def shared(real):
        def select(positions, scores, heavy):
            best = (
                scores.sum(0).sort(descending=True, stable=True).indices[:heavy].sort().values.expand(len(scores), -1)
            )
            return positions.gather(1, best), scores.gather(1, best)

        return select

    rewritten(site, "select", shared)


@mutation("1.17", bugs=(), parts=("heavy tokens of each head",), **CHUNKS)
def query_heads_share_the_heavy_tokens_of_their_group(site: Site) -> None:
    """Where each query head was to choose by its own scores (heads=query), those of the group are summed first."""

    def shared(real):
        def select(positions, scores, heavy):
            if len(scores) < 6:  # the profile has 6 query heads, in groups of 3
                return real(positions, scores, heavy)
            of_group = scores.view(-1, 3, scores.shape[-1]).sum(1).repeat_interleave(3, 0)
            best = of_group.sort(descending=True, stable=True).indices[:, :heavy].sort().values
            return positions.gather(1, best), scores.gather(1, best)

        return select

    rewritten(site, "select", shared)


@mutation("1.17", bugs=(), parts=("chunked prefill, fusion",), **CHUNKS)
def query_heads_attend_to_their_neighbours_memory(site: Site) -> None:
    """With heads=query, a head attends to the memory that the head before it in the group keeps."""

    def turned(real):
        def attend(q, keys, values, first, past, scale, chunking):
            if not first or chunking.heads != "query":
                return real(q, keys, values, first, past, scale, chunking)
            places = past.positions.unflatten(0, (len(keys), -1)).roll(1, 1).flatten(0, 1)
            return real(q, keys, values, first, past._replace(positions=places), scale, chunking)

        return attend

    rewritten(site, "attend_chunk", turned)


@mutation("1.17", bugs=(), parts=("survival",), **CHUNKS)
def newest_tokens_are_kept(site: Site) -> None:
    """The memory is a window: of the candidates the newest are kept."""
    rewritten(site, "select", lambda real: lambda positions, scores, heavy: (positions[:, -heavy:], scores[:, -heavy:]))


@mutation("1.17", bugs=(), parts=("chunked prefill, heavy tokens",), **CHUNKS)
def lightest_tokens_are_kept(site: Site) -> None:
    """The comparison is inverted."""

    def lightest(real):
        def select(positions, scores, heavy):
            order = scores.sort(dim=-1, stable=True).indices[:, :heavy].sort(-1).values
            return positions.gather(1, order), scores.gather(1, order)

        return select

    rewritten(site, "select", lightest)


@mutation("1.17", bugs=(), parts=("memory, positions",), **CHUNKS)
def memory_positions_local_to_the_chunk(site: Site) -> None:
    """Positions of the memory are counted from the beginning of the chunk that they come from."""

    def local(memory, given):
        memory.positions[1:] = torch.where(memory.positions[1:] < 0, -1, memory.positions[1:] % given[5].chunk)
        return memory

    kept(site, local)


@mutation("1.17", bugs=(), parts=("memory, local tokens",), **CHUNKS)
def local_tokens_end_one_early(site: Site) -> None:
    """The newest token of a chunk is not kept; the one before the local ones is, in its place."""

    def early(memory, given):
        L = given[5].local
        memory.positions[1:, ..., -L:] = torch.where(
            memory.positions[1:, ..., -L:] < 0, -1, memory.positions[1:, ..., -L:] - 1
        )
        return memory

    kept(site, early)


@mutation("1.17", bugs=(), parts=("memory handed on",), **CHUNKS)
def next_piece_gets_an_older_memory(site: Site) -> None:
    """A prompt that goes on begins with the memory of the chunk before the last."""

    def remember(self, step, memory):
        back = slice(-2, None)
        older = memory._replace(positions=memory.positions[back].flip(0), scores=memory.scores[back].flip(0))
        real(self, step, older if len(memory.positions) > 2 else memory)

    real = site.patch(LayerRows, "remember", remember)


@mutation("1.17", bugs=(), parts=("chunked prefill, updates",), **CHUNKS)
def updates_counted_anew_in_each_call(site: Site) -> None:
    """The count of updates begins at 0 with every piece of a prompt."""

    def anew(memory, given):
        before = given[7] if len(given) > 7 else None
        return memory if before is None else memory._replace(updates=memory.updates - before.updates)

    kept(site, anew)


@mutation("1.17", bugs=(), parts=("chunked prefill, positions",), **CHUNKS)
def positions_local_to_the_piece(site: Site) -> None:
    """Tokens are rotated by their place in the piece of the prompt that runs, not in the prompt."""

    class Local(Step):
        def cis(self, base):
            return rotation((self.pos - self.starts[0]).flatten(), self.frequencies[base])

    site.patch(prefill, "Step", Local)


@mutation("1.17", bugs=(), parts=("decode afterwards",), **CHUNKS)
def decoding_reads_the_last_chunk_alone(site: Site) -> None:
    """After a prompt in chunks, tokens attend to as many tokens as a chunk has."""

    def attend(self, q, keys, values, summaries, step):
        chunking = self.reading.prefill
        if chunking is None or step.prompt:
            return real(self, q, keys, values, summaries, step)
        return self.op.grouped_attention(q, keys, values, step.start, chunking.chunk, self.scale)

    real = site.patch(SelfAttention, "attend", attend)
