"""P24: a prompt in chunks attends as chunked sparse prefill defines, and keeps what its scores say. See
chunked_prefill.md."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from dsv4.kernels.chunked_prefill import RULES, Chunking
from dsv4.kernels.errors import UnsupportedInput
from dsv4.model.gqa.choice import Attention
from dsv4.probes.compare import agreeing, limit_of, token_errors, tokens
from dsv4.probes.oracle import reading
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.scenes.control import attempted_all, chance_of
from dsv4.probes.scenes.gqa.chunked_walk import Walk
from dsv4.probes.scenes.gqa.steps import Call, Tally, Watched, full_layers, out_of_reach, poisoned
from dsv4.probes.scenes.patching import kept
from dsv4.probes.subject import Subject

CUTS = [Chunking(32, 8, 12, score, heads) for heads in RULES["heads"] for score in RULES["score"]]
CUT = CUTS[0]
# the last chunk partial, whole, the only one; several calls; tokens decoded afterwards
LENGTHS, MORE, PIECE = [189, 96, 31, 128], 3, 64
RULE = "the definition in float64, from the keys of the cache and the memory that the chunk was given"
EXTREME = 100.0  # size of logits that overflow fp32 in a softmax that does not subtract its largest logit


@dataclass(frozen=True)
class ChunkedPrefill(Probe):
    """Ragged prompts through the model in pieces of two chunks, decoded afterwards; and the operation alone on logits
    of ±100."""

    name: ClassVar[str] = "chunked_prefill"
    title: ClassVar[str] = "prompts in chunks and a memory"
    needs: ClassVar[frozenset[str]] = frozenset({"run", "cache", "kernels", "batch"})

    def run(self, subject: Subject) -> list[Check]:
        model = subject.model
        if why := out_of_reach(model, max(LENGTHS) + MORE):
            return [vacuous(self.title, why, part="chunked prefill")]
        checks = []
        with kept(model, "attention"):
            for what, make in (
                *((f"a prompt runs {cut.rule}".strip(), partial(self._model, cut=cut)) for cut in CUTS),
                ("the future", self._future),
                ("one chunk", self._one),
                ("extreme logits", self._extreme),
                ("a token of the first chunk", self._survival),
            ):
                checks += attempted_all(what, "", "chunked prefill", lambda: guarded(make(subject)))
        return checks

    # ---- the model ------------------------------------------------------------------------

    def _model(self, subject: Subject, cut: Chunking) -> Iterator[Check]:
        """All checks of the default rule, and of the others those of what is attended to and kept."""
        model, ids = subject.model, tokens(subject, max(LENGTHS) + MORE, self.seed, rows=len(LENGTHS))
        model.attention, tally, limit = Attention(prefill=cut), defaultdict(Tally), limit_of(subject)[0]
        cache = poisoned(model, len(LENGTHS), max(LENGTHS) + MORE)
        with Watched(model, "chunked_prefill", "grouped_attention") as watched:
            model.append(ids[:, : max(LENGTHS)], cache, n_new=LENGTHS, logits="none", prompt=True, chunk=PIECE)
            calls = watched.taken("chunked_prefill")
            watched.taken("grouped_attention")
            for i in full_layers(model):
                mine, rows = [call for call in calls if call.layer == i], cache.layers[i]
                tally["calls"].see(int(len(mine) != -(-max(LENGTHS) // PIECE)), 1, f"layer {i}")
                if mine:
                    Walk(mine, rows.keys, rows.values, LENGTHS, f"layer {i}", limit).judge(tally)
            yield from walked(subject, tally, cut)
            if not cut.rule:
                yield self._positions(subject, ids, cache, limit)
                yield from self._decode(subject, ids, cache, watched, limit)

    def _positions(self, subject: Subject, ids: torch.Tensor, cache, limit: float) -> Check:
        """Keys of layer 0, which depend on no attention: rotated by the positions of tokens in the text."""
        model = subject.model
        model.attention = Attention()
        plain = model.new_cache(len(LENGTHS), max(LENGTHS) + MORE)
        model.append(ids[:, : max(LENGTHS)], plain, n_new=LENGTHS, logits="none", prompt=True, chunk=PIECE)
        model.attention = Attention(prefill=CUT)
        errors = []
        for row, n in enumerate(LENGTHS):
            a, b = (c.layers[0].keys[row, :, :n].transpose(0, 1).double().cpu() for c in (cache, plain))
            errors.append((a - b).norm(dim=(1, 2)) / b.norm(dim=(1, 2)))
        found = torch.cat(errors)
        return compare(
            "keys of layer 0 are those of dense prefill",
            torch.nan_to_num(found, nan=float("inf")).max().item(),
            "<=",
            limit,
            "rotation by the position in the whole text",
            len(found),
            where="layer 0",
            part="chunked prefill, positions",
        )

    def _decode(self, subject: Subject, ids: torch.Tensor, cache, watched: Watched, limit: float) -> Iterator[Check]:
        """Steps after the prompt read the whole cache, by one softmax."""
        model, tally, missed = subject.model, Tally(), Tally()
        for t in range(MORE):
            watched.taken("grouped_attention")
            starts = cache.lengths
            model.append(torch.stack([ids[b, n + t : n + t + 1] for b, n in enumerate(LENGTHS)]), cache, prompt=False)
            calls = {call.layer: call for call in watched.taken("grouped_attention")}
            for i in full_layers(model):
                missed.see(int(i not in calls), 1, f"layer {i}")
                if i not in calls:
                    continue
                q, rows, scale = calls[i].given[0].double().cpu(), cache.layers[i], calls[i].given[5]
                KV = rows.keys.shape[1]
                for b, p in enumerate(starts):
                    for kv, (mine, out) in enumerate(
                        zip(q[b, 0].view(KV, -1, q.shape[-1]), calls[i].out[b, 0].view(KV, -1, q.shape[-1]))
                    ):
                        k, v = (x[b, kv, : p + 1].double().cpu() for x in (rows.keys, rows.values))
                        tally.far(out, reading.attend(mine, k, v, scale), f"layer {i}, row {b}", limit)
        yield tally.near(
            "a step after the prompt is one softmax over the whole cache",
            "chunked prefill, decode afterwards",
            subject,
            "",
        )
        yield missed.counted(
            "layers that did not attend to the cache in a step after the prompt",
            "chunked prefill, decode afterwards",
            RULE,
            "",
        )

    def _future(self, subject: Subject) -> Iterator[Check]:
        """Other tokens from the middle of a chunk on change nothing before it."""
        model, T, cut = subject.model, 5 * CUT.chunk - 9, 3 * CUT.chunk + 11
        model.attention = Attention(prefill=CUT)
        ids = tokens(subject, T, self.seed + 1)
        other = ids.clone()
        other[:, cut:] = (other[:, cut:] + 1) % subject.config.vocab_size
        run = lambda text: model.append(text, model.new_cache(1, T), prompt=True, chunk=PIECE).cpu()
        a, b = run(ids), run(other)
        wrong, changed = int((a[:, :cut] != b[:, :cut]).sum()), int((a[:, cut:] != b[:, cut:]).sum())
        yield compare(
            "logits before a token that depend on it",
            wrong,
            "==",
            0,
            "the same operations on the same numbers",
            a[:, :cut].numel(),
            where=f"text changed from token {cut} on",
            part="chunked prefill, future",
            chance=float(changed),
        )

    def _one(self, subject: Subject) -> Iterator[Check]:
        """A prompt of at most one chunk attends densely."""
        model, T = subject.model, CUT.chunk
        ids, logits = tokens(subject, T, self.seed + 2), []
        for attention in (Attention(), Attention(prefill=CUT)):
            model.attention = attention
            logits.append(model.append(ids, model.new_cache(1, T), prompt=True).cpu())
        errors = token_errors(logits[1], logits[0])
        value, source, limit = agreeing(errors, subject.numerics)
        yield compare(
            "logits of one chunk are dense attention's",
            value,
            "<=",
            limit,
            source,
            errors.numel(),
            where=f"{T} tokens",
            part="chunked prefill, first chunk",
            chance=chance_of(logits[0], token_errors),
        )

    # ---- the operation --------------------------------------------------------------------

    def _extreme(self, subject: Subject) -> Iterator[Check]:
        """Logits of +100 in the memory and −100 in the chunk, and the other way round."""
        for where, high in (("memory above the chunk", (1, -1)), ("chunk above the memory", (-1, 1))):
            q, k, v, scale = made(subject, 4 * CUT.chunk, self.seed)
            first = torch.arange(k.shape[2]) // CUT.chunk % 2 == 0
            k[..., 0] = torch.where(first, high[0] * EXTREME, high[1] * EXTREME)
            q[..., 0], limit = 1 / scale, limit_of(subject)[0]
            tally = played(subject, q, k, v, scale, where, limit)
            yield tally["fusion"].near(
                "fusion is one softmax over the union",
                "chunked prefill, fusion",
                subject,
                f"logits of ±{EXTREME:.0f}, {where}",
            )

    def _survival(self, subject: Subject) -> Iterator[Check]:
        """A token of chunk 0 that every query attends to is in the last memory."""
        q, k, v, scale = made(subject, 6 * CUT.chunk, self.seed + 3)
        q[..., 0], k[..., 0] = 1 / scale, 0
        k[:, :, 5, 0] = 8.0
        memory = operation(subject, q, k, v, scale)[1]
        held = (memory.positions[-2] == 5).any(-1)
        yield compare(
            "KV heads that have lost the token of chunk 0 that all look at",
            int((~held).sum()),
            "==",
            0,
            "the heaviest tokens stay, however old",
            held.numel(),
            where="memory of the last of 6 chunks",
            part="chunked prefill, survival",
        )


def guarded(checks: Iterator[Check]) -> Iterator[Check]:
    """The checks; VACUOUS for inputs that the backend's operation refuses."""
    try:
        yield from checks
    except UnsupportedInput as error:
        yield vacuous("chunked prefill", f"the backend does not take this: {error}", part="chunked prefill")


def made(subject: Subject, T: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """q [1, T, H, D], keys and values [1, KV, T, D] of the model's heads and dtype, and a scale; they are small
    compared with planted values."""
    c, g = subject.config, torch.Generator().manual_seed(seed)
    dtype, D = subject.model.numerics.cache, c.head_dim
    shapes = (T, c.num_attention_heads), (c.num_key_value_heads, T), (c.num_key_value_heads, T)
    q, k, v = (torch.randn(1, *shape, D, generator=g).to(dtype) for shape in shapes)
    return q / 4, k, v, 0.25


def operation(subject: Subject, q, k, v, scale: float):
    """The result of the model's own operation for a prompt of T tokens in one call; every chunk but the last has a
    chunk after it."""
    model, T = subject.model, q.shape[1]
    q, k, v = (t.contiguous().to(model.device) for t in (q, k, v))
    return model.op.chunked_prefill(q, k, v, 0, torch.tensor([T], device=model.device), CUT, scale, None)


def played(subject: Subject, q, k, v, scale: float, where: str, limit: float) -> dict[str, Tally]:
    """The walk through one call of the operation."""
    out = operation(subject, q, k, v, scale)
    call = Call(0, (q, k, v, 0, torch.tensor([q.shape[1]]), CUT, scale, None), out)
    tally: dict[str, Tally] = defaultdict(Tally)
    Walk([call], k, v, [q.shape[1]], where, limit).judge(tally)
    return tally


def walked(subject: Subject, tally: dict[str, Tally], cut: Chunking) -> Iterator[Check]:
    """The checks of a model's prompts."""
    part, where = "chunked prefill, ", cut.rule
    yield tally["calls"].counted(
        "layers that were not read in as many pieces", f"{part}pieces", "every layer without a window", where
    )
    yield tally["first chunk"].near(
        "the first chunk is causal attention to itself", f"{part}first chunk", subject, where
    )
    yield tally["fusion"].near("a chunk and its memory are one softmax", f"{part}fusion", subject, where)
    yield tally["handed on"].counted(
        "chunks that were given another memory than was kept",
        f"{part}memory handed on",
        "what the chunk before kept",
        where,
    )
    yield tally["size"].counted(
        "memories with a token twice, or not L + H", f"{part}memory, overlap", "|M| = L + H", where
    )
    yield tally["sorted"].counted("memories that are not ascending", f"{part}memory, order", RULE, where)
    yield tally["local"].counted(
        "memories without one of the last L tokens", f"{part}memory, local tokens", RULE, where
    )
    yield tally["positions"].counted(
        "memories with tokens that were not to be chosen from", f"{part}memory, positions", RULE, where
    )
    yield tally["heavy"].counted(
        "memories of other tokens than the heaviest", f"{part}heavy tokens", RULE, where, chance=tally["heavy"].chance
    )
    yield _heads(tally["heads"], cut)
    scores = tally["scores"]
    cause = scores.cause
    value = torch.cat(scores.errors).max().item() if scores.errors else None
    yield compare(
        "scores are what the tokens were given",
        value,
        "<=",
        2 * limit_of(subject)[0],
        f"twice the limit of {subject.numerics}: sums of two phases",
        scores.samples,
        where=where,
        found=scores.first,
        part=f"{part}column sums" + (f", {cause}" if cause else ""),
    )
    yield tally["fall"].counted("scores that fell", f"{part}scores fall", "what a query gave is not taken back", where)
    yield tally["updates"].counted(
        "rows whose memory was chosen another number of times than chunks − 1", f"{part}updates", "chunks − 1", where
    )


def _heads(tally: Tally, cut: Chunking) -> Check:
    """All heads may agree once; if they always do, the choice is over all heads (of a group)."""
    each = "query head of a group" if cut.heads == "query" else "KV head"
    if not tally.samples:
        return vacuous(
            f"each {each} keeps tokens of its own",
            f"there is one {each}",
            where=cut.rule,
            part="chunked prefill, heavy tokens of each head",
        )
    return compare(
        f"share of memories that are the same for every {each}",
        tally.wrong / tally.samples,
        "<=",
        0.5,
        "heads choose by their own scores",
        tally.samples,
        where=cut.rule,
        found=tally.first,
        part="chunked prefill, heavy tokens of each head",
        chance=1.0,
    )


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(ChunkedPrefill)
