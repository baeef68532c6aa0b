"""P34: several ranks that hold a model together compute what the whole one computes. See parallel.md."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from dsv4.engine.generate import generate
from dsv4.errors import RanksDisagree, UnsupportedInput
from dsv4.loaders.cuts import joint_problems
from dsv4.loaders.errors import CheckpointError
from dsv4.model.together import viewed
from dsv4.parallel.threads import together
from dsv4.probes.catalogue.backend_matrix import LIMITS
from dsv4.probes.catalogue.load_ledger import part_of
from dsv4.probes.catalogue.placement import LARGEST, loaded
from dsv4.probes.compare import agreeing, far, tokens
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.scenes import shared_model
from dsv4.probes.scenes.control import attempted_all, chance_of
from dsv4.probes.scenes.drawn_tokens import drawn_tokens
from dsv4.probes.scenes.shared_model import SAME, Log, choosing, on_ranks, watched
from dsv4.probes.subject import Subject
from dsv4.sampling import Sampling

WAYS = ((2, True), (2, False), (4, True))  # ranks, and whether routed experts are cut by expert
TOKENS, DECODED, REWOUND, WRITTEN = 140, 4, 3, 12  # more tokens than an HCA window; a second row is a half as long
SELECTED = 8  # entries, of those that a prompt of TOKENS has
SHARED = ("num_attention_heads", "o_groups", "n_routed_experts")
ALIKE = "what every rank computes has the same bits on all: they choose tokens, experts and entries without asking"
REPLICA = "the same operation on the same input: equal bits"
PARTS = "parts of one file's tensor, side by side, are that tensor"


@dataclass(frozen=True)
class Parallel(Probe):
    """2 and 4 ranks, as threads that exchange tensors in memory; on the subject's backend, or the reference."""

    name: ClassVar[str] = "parallel"
    title: ClassVar[str] = "ranks together are the whole model"
    needs: ClassVar[frozenset[str]] = frozenset({"files", "run", "cache", "kernels"})

    def run(self, subject: Subject) -> list[Check]:
        model = subject.model
        if model.layer_devices is not None or model.ranks.size > 1:
            return [vacuous(self.title, "the subject lies in several places, and there is no whole one beside it")]
        size = sum(p.nbytes for p in model.parameters())
        if size > LARGEST * self.effort:
            why = f"the model holds {size:,} bytes and would be loaded again; {LARGEST * self.effort:,.0f} are allowed"
            return [vacuous(self.title, why, part="parallel")]
        here = model.device.type == "cpu" and model.backend in ("cpu", "reference")
        whole = model if here else loaded(subject, None, "cpu")
        checks = []
        for n, by_expert in WAYS:
            where = shown(n, by_expert)
            if why := unshared(subject.config, n):
                checks.append(vacuous(self.title, why, where=where, part="parallel"))
                continue
            make = lambda: self._beside(subject, whole, n, by_expert, None if here else "cpu")
            checks += attempted_all("ranks run together", where, broken, make)
        return checks

    def _beside(self, subject: Subject, whole, n: int, by_expert: bool, device: str | None) -> Iterator[Check]:
        where = shown(n, by_expert)
        try:
            models = together(n, lambda ranks: loaded(subject, None, device, replace(ranks, by_expert=by_expert)))
        except UnsupportedInput as error:
            yield vacuous(self.title, str(error), where=where, part="parallel")
            return
        yield ledger(whole, models, where)
        yield from parameters(whole, models, where)
        with choosing([whole, *models], SELECTED):
            yield from self._computed(subject, whole, models, where)

    def _computed(self, subject: Subject, whole, models: Sequence, where: str) -> Iterator[Check]:
        ids = tokens(subject, TOKENS + 2 * DECODED, self.seed, 2)
        log: Log = {}
        with watched(whole, log):
            wanted = served(whole, ids)
        yield from taken_apart(models, log, ids, where)
        yield from answers(wanted, models, ids, subject.numerics, where)
        yield from drawn_tokens(wanted[0][1][0].float(), len(models), self.seed, where)
        yield from texts(whole, models, ids[0, :TOKENS].tolist(), subject.numerics, where)


def shown(n: int, by_expert: bool) -> str:
    return f"{n} ranks" if by_expert else f"{n} ranks by width"


def unshared(config, n: int) -> str:
    """Why n ranks cannot share a model, '' if they can."""
    odd = [name for name in SHARED if getattr(config, name) % n]
    return f"{odd[0]} is {getattr(config, odd[0])}, which {n} ranks cannot share equally" if odd else ""


def broken(error: Exception) -> str:
    """The part at fault where ranks could not be loaded or run to the end."""
    kinds = {CheckpointError: "parallel, ledger", RanksDisagree: "parallel, tokens of ranks"}
    return next((part for kind, part in kinds.items() if isinstance(error, kind)), "parallel")


# ---- what they hold ----------------------------------------------------------------------


def ledger(whole, models: Sequence, where: str) -> Check:
    """The two-way ledger of all ranks together."""
    names = list(whole.ledger.used)
    problems = joint_problems([model.ledger.held for model in models], names)
    return compare(
        "tensors that are not held once, or by all ranks",
        len(problems),
        "==",
        0,
        "every element of the file belongs to one rank, or to every rank",
        len(names),
        unit="tensors",
        where=where,
        part="parallel, ledger",
        note=problems[0] if problems else "",
    )


def parameters(whole, models: Sequence, where: str) -> Iterator[Check]:
    """What ranks hold, against the whole model's parameters: of replicated ones on every rank, of others the parts side
    by side."""
    wrong: dict[str, list[str]] = {"replicated": [], "cut": []}
    counts = dict.fromkeys(wrong, 0)
    held = [dict(model.named_parameters()) for model in models]
    for name, value in whole.named_parameters():
        parts = [own[name] for own in held]
        replica = all(part.shape == value.shape for part in parts)
        kind = "replicated" if replica else "cut"
        counts[kind] += 1
        right = all(same(part, value) for part in parts) if replica else side_by_side(parts, value, models, name)
        wrong[kind] += [] if right else [name]
    for kind, names in wrong.items():
        said = {"replicated": "are not the whole model's", "cut": "are not the whole tensor side by side"}
        yield compare(
            f"{kind} parameters that {said[kind]}",
            len(names),
            "==",
            0,
            REPLICA if kind == "replicated" else PARTS,
            counts[kind],
            unit="parameters",
            where=where,
            part=f"parallel, {kind} {part_of(names[0])}" if names else f"parallel, {kind}",
            note=f"first {names[0]}" if names else "",
        )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bytes."""
    raw = lambda t: t.detach().contiguous().view(torch.uint8)
    return a.shape == b.shape and torch.equal(raw(a), raw(b))


def side_by_side(parts: Sequence[torch.Tensor], value: torch.Tensor, models: Sequence, name: str) -> bool:
    """Whether the parts of all ranks are the whole one; scales of a block that ranks share are held by each of
    these."""
    shown = [viewed(model, name, part) for model, part in zip(models, parts)]
    stacked = next((part for part, _ in shown if part.dim() > value.dim()), None)
    if stacked is not None:
        value = value.unflatten(1, (stacked.shape[1], -1))
        parts = [part.unflatten(1, (stacked.shape[1], -1)) if part.dim() == 3 else part for part, _ in shown]
    axis = next(i for i in range(value.dim()) if any(part.shape[i] != value.shape[i] for part in parts))
    raw = [part.detach().contiguous().view(torch.uint8) if part.numel() else None for part in parts]
    if sum(part.shape[axis] for part in parts) == value.shape[axis]:
        joined = torch.cat([part for part in parts if part.numel()], axis) if raw else value
        return same(joined, value)
    module, _, leaf = name.rpartition(".")
    cuts = [model.get_submodule(module).cuts[leaf] for model in models]
    return all(same(p, value.narrow(axis, c.start, c.size)) for p, c in zip(parts, cuts))


# ---- what they compute -------------------------------------------------------------------


def served(model, ids: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """(what, logits [B, T, vocab]) of a ragged prompt, of tokens decoded after it, of others after a rewind, and of the
    MTP block."""
    cache = model.new_cache(2, TOKENS + DECODED + 1, max_rewind=8)
    counts = [TOKENS, TOKENS // 2]
    out, streams = model.append(ids[:, :TOKENS], cache, n_new=counts, return_streams=True, chunk=TOKENS)
    found = [("a prompt", out[:1]), ("a shorter row of the prompt", out[1:, : counts[1]])]
    after = ids[:, TOKENS : TOKENS + DECODED]
    parts = [model.append(after[:, t : t + 1], cache) for t in range(DECODED)]
    found.append(("decoded tokens", torch.cat(parts, 1)))
    cache.rewind(REWOUND)
    found.append(("tokens after a rewind", model.append(ids[:, TOKENS + DECODED :][:, :REWOUND], cache)))
    if len(model.mtp):
        found.append(("the MTP block", model.mtp_logits(streams[:1, :-1], ids[:1, 1:TOKENS])))
    return found


def taken_apart(models: Sequence, whole: Log, ids: torch.Tensor, where: str) -> Iterator[Check]:
    """Each computation that ranks share, on what the whole model's was given."""
    logs: list[Log] = [{} for _ in models]

    def fed(model) -> None:
        with watched(model, logs[model.ranks.rank], whole):
            served(model, ids)

    on_ranks(models, fed)
    # Fp32 results that are rounded to the dtype of activations before the sum. Of experts cut by width gate and up are,
    # whose sums for fewer rows may have another order, and so step; of routed ones also what a rank gives for each, and
    # the whole model's result. Each rounding is by 2^−9 of a value at most.
    rounding = ("shared expert",) if models[0].ranks.by_expert else ("shared expert", "routed experts")
    for place, stage, _ in shared_model.places(models[0]):
        key = place, stage.name
        wanted, found = whole[key].result, shared_model.combined(stage, logs, key)
        inside = models[0].numerics.activation if stage.name in rounding else wanted.dtype
        yield stage_check(place, stage.name, found, wanted, where, inside)
        before = shared_model.summed_before(stage, logs, place)
        if before is not None:
            yield stage_check(place, f"sum of {stage.name}", found, before.to(found.dtype), where, found.dtype)
        if stage.results == SAME:
            yield alike([log[key].result for log in logs], f"{where}, {place}", f"bits of {stage.name}")


def stage_check(
    place: str, name: str, found: torch.Tensor, wanted: torch.Tensor, where: str, inside: torch.dtype
) -> Check:
    """The worst token of what all ranks computed together, against the whole model's, or their own sum. inside: the
    dtype that it is rounded to before the sum."""
    about = dict(where=f"{where}, {place}", part=f"parallel, {name}", unit="relative error")
    if found.shape != wanted.shape:
        note = f"results of {list(found.shape)}; expected {list(wanted.shape)}"
        return compare(f"{name} of all ranks", float("inf"), "<=", 0.0, REPLICA, len(wanted), note=note, **about)
    errors = far(found.flatten(1).unsqueeze(0), wanted.flatten(1).unsqueeze(0))
    limit, source = (0.0, REPLICA) if name in ("router", "embedding", "selection") else LIMITS[inside]
    chance = far(wanted.flatten(1).roll(1, 0).unsqueeze(0), wanted.flatten(1).unsqueeze(0)).median().item()
    measured = errors.max().item()
    return compare(f"{name} of all ranks", measured, "<=", limit, source, errors.numel(), chance=chance, **about)


def alike(results: Sequence[torch.Tensor], where: str, part: str) -> Check:
    """Elements that are not those of rank 0."""
    first = results[0]
    differ = [int((other != first).sum()) if other.shape == first.shape else first.numel() for other in results[1:]]
    worst = max(range(len(differ)), key=differ.__getitem__)
    return compare(
        "elements that ranks do not agree on",
        differ[worst],
        "==",
        0,
        ALIKE,
        first.numel() * len(differ),
        where=where,
        part=f"parallel, {part}",
        found=f"rank {worst + 1}" if differ[worst] else "",
    )


def answers(wanted: list, models: Sequence, ids: torch.Tensor, numerics: str, where: str) -> Iterator[Check]:
    """Logits of ranks that go by themselves. wanted: what the whole model `served`."""
    found = on_ranks(models, lambda model: served(model, ids))
    for i, (what, logits) in enumerate(wanted):
        own = [logits_of[i][1] for logits_of in found]
        about = dict(where=f"{where}, {what}", part="parallel, logits")
        if own[0].shape == logits.shape:
            measured, source, limit = distance(far(own[0], logits), numerics)
        else:
            measured, source, limit = float("inf"), f"logits of {list(logits.shape)}", 0.0
        chance = chance_of(logits, far)
        yield compare(
            "logits are those of the whole model",
            measured,
            "<=",
            limit,
            source,
            logits.shape[1],
            chance=chance,
            **about,
        )
        yield alike(own, about["where"], "bits of logits")


def distance(errors: torch.Tensor, numerics: str) -> tuple[float, str, float]:
    """(measured, where the limit comes from, the limit) of errors by token. Every token is computed from those before
    it, and every sum over ranks rounds otherwise than the whole model's: so in numerics that round, many tokens err
    together."""
    measured, source, limit = agreeing(errors, numerics, chained=True)
    return (
        (measured, LIMITS[torch.float32][1], LIMITS[torch.float32][0])
        if numerics == "fp32"
        else (measured, source, limit)
    )


def texts(whole, models: Sequence, prompt: list[int], numerics: str, where: str) -> Iterator[Check]:
    """Greedy and sampled text: one on all ranks; the greedy one is what the whole model would say."""
    for name, sampling in (("greedy text", Sampling()), ("sampled text", Sampling(1.0, 0.9, 5))):
        told = on_ranks(models, lambda model: generate(model, prompt, WRITTEN, sampling).token_ids)
        same_text = [torch.tensor(text) for text in told]
        yield alike(same_text, f"{where}, {name}", "tokens of ranks")
        if not sampling.temperature:
            yield spoken(whole, prompt, told[0], numerics, f"{where}, {name}")


def spoken(whole, prompt: list[int], text: list[int], numerics: str, where: str) -> Check:
    """How far below its best token the whole model has the tokens of the text, as a share of its largest logit."""
    ids = torch.tensor([prompt + text])
    logits = whole.append(ids[:, :-1], whole.new_cache(1, ids.shape[1]))[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(text).clamp(max=logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
    least = logits.abs().max(1).values
    measured, source, limit = distance((logits.max(1).values - chosen) / least, numerics)
    chance = ((logits.max(1).values - logits.median(1).values) / least).median().item()
    return compare(
        "the whole model would say the greedy text of ranks",
        measured,
        "<=",
        limit,
        source,
        len(text),
        chance=chance,
        where=where,
        part="parallel, greedy text",
    )


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(Parallel)
