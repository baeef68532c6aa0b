"""What a trained checkpoint can do, measured on the loaded model: facts, needles, the indexer's picks, loss, MTP
drafts.

Every part takes the model, what to ask it, and `Limits`, and returns figures. Needles and the dense attention's mass
are those of `dsv4.probes.measure.base`.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from dsv4.cache.sequence import whole
from dsv4.model.attention import CSAAttention
from dsv4.model.deepseek_v4 import Model
from dsv4.probes.bounds import lower_bound
from dsv4.probes.measure.base import needles as needles_of
from dsv4.probes.measure.base.haystack import CHANCE, filler
from dsv4.probes.measure.base.mass import dense_mass, watched, window_only
from dsv4.probes.measure.base.models import reach
from dsv4.probes.measure.base.needles import Asked, Haystack, answered, hidden, replies
from scripts.training.facts import RELATIONS
from scripts.training.rows import Encoder, Rows
from scripts.training.tokenizer import BOS_ID

KINDS = ("prose", "code")
LOGIT_TOKENS = 1 << 15  # positions whose logits exist at once
Say = Callable[[str], None]


@dataclass(frozen=True)
class Limits(needles_of.Limits):
    """How much work at once, and samples of each part: rows for the indexer and for MTP, tokens for the loss."""

    rows: int
    loss_tokens: int

    @classmethod
    def of(cls, device: str) -> "Limits":
        if torch.device(device).type == "cpu":
            return cls(tokens=20_000, chunk=256, rows=4, loss_tokens=20_000)
        return cls(tokens=300_000, chunk=1024, rows=32, loss_tokens=200_000)


@dataclass(frozen=True)
class Figure:
    """One measurement: `value` over `count` samples. `details` go with it into the report."""

    part: str
    name: str
    value: float
    count: int
    details: dict = field(default_factory=dict)


# ---- answers -----------------------------------------------------------------------------


def facts(model: Model, tokenizer: Tokenizer, limits: Limits, say: Say) -> list[Figure]:
    """Share of each table's facts that the canonical prompt brings up."""
    encode = Encoder(tokenizer)
    tables = [(form, key, value) for form, table in RELATIONS.items() for key, value in table]
    asked = [Asked([BOS_ID, *encode(form.format(key))], encode(f" {value}")) for form, key, value in tables]
    said = replies(model, asked, limits, lambda text: say(f"facts: {text}"))
    hits = [reply == a.answer for a, reply in zip(asked, said)]
    wrong = {
        f"{form.format(key)} {value}": tokenizer.decode(reply, skip_special_tokens=False)
        for (form, key, value), reply, hit in zip(tables, said, hits)
        if not hit
    }
    figures = [_share("facts", "all", hits, {"wrong": wrong})]
    for form in RELATIONS:
        figures.append(_share("facts", form, [hit for (f, _, _), hit in zip(tables, hits) if f == form]))
    france = tables.index(("The capital of {0} is", "France", "Paris"))
    return figures + [_share("facts", '"The capital of France is" -> " Paris"', [hits[france]])]


def _share(part: str, name: str, hits: list[bool], details: dict | None = None) -> Figure:
    return Figure(part, name, sum(hits) / len(hits), len(hits), {"hits": sum(hits)} | (details or {}))


# ---- needles -----------------------------------------------------------------------------


HAYSTACKS = (
    Haystack("held-out prose", True),
    Haystack("filler", False),
    Haystack("held-out prose, window only", True, True),
)


def needles(
    model: Model,
    rows: Rows,
    lengths: list[int],
    trials: int,
    limits: Limits,
    say: Say,
    haystacks: tuple[Haystack, ...] = HAYSTACKS,
    seed: int = 0,
) -> list[Figure]:
    """Share of needles found by length, in `trials` contexts of one needle each; the same trials whatever the
    numerics."""
    figures = []
    for haystack in haystacks:
        for length in lengths:
            text = rows.streams["prose"] if haystack.prose else filler(rows.tokenizer, length)
            asked = hidden(model, rows.tokenizer, text, length, trials, seed)
            note = lambda text: say(f"needles, {haystack.name}, {length}: {text}")
            with window_only(model) if haystack.window_only else nullcontext():
                hits = answered(model, asked, limits, note)
            figures.append(
                _share(
                    "needles",
                    f"{haystack.name}, {length} tokens",
                    hits,
                    {
                        "at_least": lower_bound(sum(hits), len(hits)),
                        "haystack": haystack.name,
                        "length": length,
                        "beyond": reach(model),
                        "seed": seed,
                        "chance": CHANCE,
                        "trials": [{"depth": round(a.depth, 4), "hit": hit} for a, hit in zip(asked, hits)],
                    },
                )
            )
    return figures


# ---- held-out text -----------------------------------------------------------------------


def text_rows(stream: np.ndarray, length: int, count: int) -> torch.Tensor:
    """int64 [count or fewer, length]: BOS and length − 1 tokens, from places spread evenly, none read twice."""
    count = min(count, len(stream) // (length - 1))
    starts = [i * (len(stream) // count) for i in range(count)]
    text = torch.from_numpy(np.stack([stream[s : s + length - 1] for s in starts]).astype(np.int64))
    return torch.cat((torch.full((count, 1), BOS_ID), text), 1)


def losses(model: Model, rows: Rows, lengths: list[int], limits: Limits, say: Say) -> list[Figure]:
    """Nats per token of the rows' split, each row from an empty context. Training text far below held-out is
    memorised."""
    of = lambda ids: _losses_of(model, ids, limits.chunk)
    return _figures("loss", rows, _row_losses(of, rows, lengths, limits, lambda text: say(f"loss, {text}")))


def state_losses(
    directory: Path, rows: Rows, lengths: list[int], limits: Limits, device: str, say: Say
) -> list[Figure]:
    """Nats per token of a training state: its weights in bf16, nothing quantised, through the training operations."""
    part = "loss before quantisation"
    return _figures(
        part, rows, state_row_losses(directory, rows, lengths, limits, device, lambda text: say(f"{part}, {text}"))
    )


def state_row_losses(
    directory: Path, rows: Rows, lengths: list[int], limits: Limits, device: str, say: Say
) -> dict[tuple[str, int], torch.Tensor]:
    """(kind, length) → nats fp64 [rows, length] of a training state."""
    model = state_model(directory, device)

    @torch.inference_mode()
    def of(ids: torch.Tensor) -> torch.Tensor:
        streams = whole(model, ids[:, :-1].to(device))[0].unflatten(0, (ids.shape[0], -1))
        per = max(1, LOGIT_TOKENS // ids.shape[0])
        return torch.cat(
            [
                _cross_entropy(model.head(model.features(s.flatten(0, 1))), t.to(device))
                for s, t in zip(streams.split(per, 1), ids[:, 1:].split(per, 1))
            ],
            1,
        ).cpu()

    most = 1 << (12 if torch.device(device).type == "cpu" else 16)  # whole rows at once; on a CPU with masks of T × T
    return _row_losses(of, rows, lengths, replace(limits, tokens=min(limits.tokens, most)), say)


def state_model(directory: Path, device: str) -> Model:
    """The model of a training state as `scripts/train_demo.py` saves it, matrices in bf16, without simulation."""
    from scripts.training import state
    from scripts.training.architecture import BF16, CONFIG, WINDOW_ONLY, build, shipped_forms
    from scripts.training.trainee import cast

    model = build(WINDOW_ONLY if state.facts_of(directory).get("window_only") else CONFIG, BF16, device)
    parameters, forms = dict(model.named_parameters()), shipped_forms(model)
    state.load(directory, {f"model.{name}": p for name, p in parameters.items()})
    with torch.no_grad():
        for name, value in cast(parameters, forms, simulate=False).items():
            parameters[name].requires_grad_(False).data = value
    return model


def _row_losses(
    of: Callable, rows: Rows, lengths: list[int], limits: Limits, say: Say
) -> dict[tuple[str, int], torch.Tensor]:
    """of(ids [B, T + 1]) → nats [B, T]; here by (kind, length), fp64 [rows, length]."""
    found = {}
    for kind in KINDS:
        for length in lengths:
            ids = text_rows(rows.streams[kind], length + 1, -(-limits.loss_tokens // length))
            nats = []
            for batch in ids.split(max(1, limits.tokens // length)):
                nats.append(of(batch).double())
                say(f"{rows.split} {kind}, {length}: {sum(map(len, nats))} of {len(ids)} rows")
            found[kind, length] = torch.cat(nats)
    return found


def _figures(part: str, rows: Rows, losses: dict[tuple[str, int], torch.Tensor]) -> list[Figure]:
    text = "training" if rows.split == "train" else "held-out"
    error = lambda nats: (nats.mean(1).std() / len(nats) ** 0.5).item() if len(nats) > 1 else None
    return [
        Figure(
            part,
            f"{text} {kind}, {length} tokens",
            nats.mean().item(),
            nats.numel(),
            {"rows": len(nats), "standard_error": error(nats)},
        )
        for (kind, length), nats in losses.items()
    ]


def _losses_of(model: Model, ids: torch.Tensor, chunk: int) -> torch.Tensor:
    """ids int64 [B, T + 1] → nats of each next token, fp32 [B, T] on the host."""
    B, T = ids.shape[0], ids.shape[1] - 1
    cache, out = model.new_cache(B, T, max_rewind=0), []
    for s in _slices(T, max(1, LOGIT_TOKENS // B)):
        logits = model.append(ids[:, :-1][:, s], cache, chunk=chunk)
        out.append(_cross_entropy(logits, ids[:, 1:][:, s].to(logits.device)).cpu())
    return torch.cat(out, 1)


def _cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """logits [B, T, vocab] or [B·T, vocab], target int64 [B, T] → nats [B, T]."""
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none").view(target.shape)


def _slices(length: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, length)) for i in range(0, length, size)]


# ---- indexer -----------------------------------------------------------------------------

QUERIES = 256  # last queries of a row, whose attention is looked at


def indexer(model: Model, rows: Rows, lengths: list[int], limits: Limits, say: Say) -> list[Figure]:
    """How much of the dense attention over compressed entries each CSA layer's selection holds, on held-out text.

    The model runs as it is (sparse); at each CSA layer the attention over all visible entries is computed beside it.
    """
    figures = []
    for kind in KINDS:
        for length in lengths:
            ids = text_rows(rows.streams[kind], length, limits.rows)
            kept: dict[int, list[torch.Tensor]] = {}
            for batch in ids.split(max(1, min(8, limits.tokens // length))):
                _watch(model, batch, limits.chunk, kept)
                say(
                    f"indexer, {kind}, {length}: {sum(len(m) for m in kept[min(kept)])} of {len(ids) * QUERIES} queries"
                )
            for layer, parts in kept.items():
                figures.append(_kept_figure(f"layer {layer}, {kind}, {length} tokens", torch.cat(parts)))
            figures.append(_kept_figure(f"all CSA layers, {kind}, {length} tokens", torch.cat(sum(kept.values(), []))))
    return figures


def _watch(model: Model, ids: torch.Tensor, chunk: int, kept: dict[int, list[torch.Tensor]]) -> None:
    """Run ids [B, T] and collect `masses` of the last QUERIES queries, layer → [B·QUERIES, 4]."""
    cache = model.new_cache(*ids.shape, max_rewind=0)
    model.append(ids[:, :-QUERIES], cache, logits="none", chunk=chunk)

    def see(layer: int, *held) -> None:
        kept.setdefault(layer, []).append(masses(*held).cpu())

    with watched(model, see):
        model.append(ids[:, -QUERIES:], cache, logits="none", chunk=QUERIES)


def masses(attn: CSAAttention, x, qr, q, window, window_index, step, cache) -> torch.Tensor:
    """Dense attention of each query, summed over heads and divided by them: fp64 [N, 4] of all visible entries, of the
    selected ones, of the best that as many entries could hold, and the share of visible entries that is selected."""
    scores = attn.indexer.scores(x, qr, step, cache)
    selection = attn.op.topk_entries(scores, attn.indexer.topk)
    mass = dense_mass(attn, q, window, window_index, step, cache.main.entries.visible(step))
    k = selection.shape[-1]
    selected = (mass.gather(-1, selection.clamp(min=0)) * (selection >= 0)).sum(-1)
    best = mass.topk(k, dim=-1).values.sum(-1)
    chance = (k / step.visible(attn.ratio)).clamp(max=1)
    return torch.stack((mass.sum(-1), selected, best, chance), -1).flatten(0, 1).double()


def _kept_figure(name: str, found: torch.Tensor) -> Figure:
    """found fp64 [queries, 4] of `masses`. The value is the share summed over queries: those weigh as they use
    entries."""
    total, selected, best, chance = found.unbind(-1)
    used = total > 0
    share = lambda part: (part[used] / total[used]).mean().item()
    return Figure(
        "indexer",
        name,
        (selected.sum() / total.sum()).item(),
        len(found),
        {
            "mean_of_queries": share(selected),
            "of_all_attention": (1 - total + selected).mean().item(),
            "best_possible": (best.sum() / total.sum()).item(),
            "best_mean_of_queries": share(best),
            "best_of_all_attention": (1 - total + best).mean().item(),
            "chance": chance.mean().item(),
            "mass_of_entries": total.mean().item(),
        },
    )


# ---- MTP ---------------------------------------------------------------------------------


def mtp(
    model: Model, rows: Rows, limits: Limits, say: Say, length: int = 1024, prompt: int = 256, new: int = 256
) -> list[Figure]:
    """Share of drafts that greedy verification accepts: on held-out text, and on the model's own greedy
    continuations."""
    figures = []
    for kind in KINDS:
        ids = text_rows(rows.streams[kind], length, limits.rows)
        found = [drafted(model, batch, limits.chunk) for batch in ids.split(max(1, LOGIT_TOKENS // length))]
        main, draft = (torch.cat(part) for part in zip(*found))
        right = (draft[:, :-1] == ids[:, 2:]).double().mean().item()
        figures.append(
            _accepted(f"held-out {kind}", draft == main[:, 1:], {"tokens": length, "draft_is_the_text": right}, say)
        )
        ids = continued(model, text_rows(rows.streams[kind], prompt, limits.rows), new, limits.chunk)
        draft = torch.cat(
            [drafted(model, batch, limits.chunk)[1] for batch in ids.split(max(1, LOGIT_TOKENS // ids.shape[1]))]
        )
        fours = ids[:, prompt:].unfold(1, 4, 1).tolist()
        distinct = sum(len(set(map(tuple, row))) for row in fours) / sum(map(len, fours))
        figures.append(
            _accepted(
                f"greedy continuations of {kind}",
                draft[:, prompt - 1 : -1] == ids[:, prompt + 1 :],
                {"prompt": prompt, "new": new, "distinct_4_grams": distinct},
                say,
            )
        )
    return figures


def _accepted(name: str, agree: torch.Tensor, details: dict, say: Say) -> Figure:
    say(f"mtp, {name}: {agree.double().mean():.3f}")
    return Figure("mtp", name, agree.double().mean().item(), agree.numel(), details)


def drafted(model: Model, ids: torch.Tensor, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int64 [B, T] → the main model's choices [B, T] (entry t: of the token at t + 1) and the drafts [B, T − 1]
    (entry t: of the token at t + 2), both by argmax, on the host."""
    cache = model.new_cache(*ids.shape, max_rewind=0)
    logits, streams = model.append(ids, cache, return_streams=True, chunk=chunk)
    main = logits.argmax(-1).cpu()
    del logits
    return main, model.mtp_logits(streams[:, :-1], ids[:, 1:], chunk=chunk).argmax(-1).cpu()


def continued(model: Model, ids: torch.Tensor, new: int, chunk: int) -> torch.Tensor:
    """ids int64 [B, T] and `new` greedily generated tokens after them, [B, T + new]. Goes on after EOS, as documents
    do."""
    cache, parts = model.new_cache(ids.shape[0], ids.shape[1] + new, max_rewind=0), [ids]
    for _ in range(new):
        parts.append(model.append(parts[-1], cache, logits="last", chunk=chunk).argmax(-1).cpu())
    return torch.cat(parts, 1)
