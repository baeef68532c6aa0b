"""P27: a pass that verifies drafts says what plain decoding says, at every place. See verification.md."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from dsv4.cache.streams import MAX_DRAFTS
from dsv4.engine.generate import generate_speculative
from dsv4.model.causal import capacity
from dsv4.model.cut_values import Logits, whole
from dsv4.probes.compare import TOLERANCES, agreeing, token_errors, tokens
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.scenes.control import attempted_all
from dsv4.probes.scenes.known_drafts import KnownDrafter, decoded, promises_bits, single
from dsv4.probes.subject import Subject
from dsv4.speculation.draft import MTPDrafter
from dsv4.speculation.policy import Static
from dsv4.speculation.verify import default

PROMPTS = (6, 123)  # the window is not full yet; a pass of 4 drafts ends on 128, longer ones cross it
PASSES = (0, 1, 2, 3, 4, MAX_DRAFTS)  # drafts of passes whose logits are compared
SIZES = (1, MAX_DRAFTS)  # of drafts whose texts are compared
TEXT = 14
ROWS = (1, 4, MAX_DRAFTS + 1)  # tokens of a ragged pass
RUNS = "verification runs"
BITS = "greedy text is plain decoding's: the same steps on the same numbers (dsv4/speculation/README.md)"


@dataclass(frozen=True)
class Verification(Probe):
    """Passes of 0 to 8 drafts as they are run unless something else is asked for, and greedy texts with them."""

    name: ClassVar[str] = "verification"
    title: ClassVar[str] = "verified tokens are plain decoding's"
    needs: ClassVar[frozenset[str]] = frozenset({"run", "cache", "rewind", "batch", "kernels"})

    def run(self, subject: Subject) -> list[Check]:
        room = max(PROMPTS) + TEXT + 2 * MAX_DRAFTS
        if room > subject.config.max_position_embeddings:
            why = f"{room} tokens are needed, the checkpoint allows {subject.config.max_position_embeddings}"
            return [vacuous(self.title, why, part="verification")]
        checks = []
        for length in PROMPTS:
            ids = tokens(subject, length + MAX_DRAFTS + 1, self.seed + length)
            where = f"after {length} tokens"
            checks += attempted_all(RUNS, where, "verification", lambda: places(subject, ids, length))
        prompt = ids[0, :length].tolist()
        checks += attempted_all(RUNS, where, "verification", lambda: texts(subject, prompt))
        where = "ragged rows"
        return [*checks, *attempted_all(RUNS, where, "verification", lambda: ragged(subject, self.seed))]


def places(subject: Subject, ids: torch.Tensor, length: int) -> Iterator[Check]:
    """Passes of 1 to 9 given tokens behind a prompt: the logits after each of them."""
    model = subject.model
    limit = capacity(model, length + MAX_DRAFTS + 1)
    caches = [model.new_cache(1, limit), model.new_cache(1, limit)]
    for cache in caches:
        model.append(ids[:, :length], cache, logits="none")
    one, way = single(model, caches[0]), default(model, caches[1])
    given = ids[:, length:].to(model.device)
    wanted = torch.cat([whole(one(given[:, t : t + 1], [1], False)[0]).cpu().clone() for t in range(given.shape[1])], 1)
    for drafts in PASSES:
        found, _ = way(given[:, : drafts + 1], [drafts + 1], False)
        found = whole(found)[:, : drafts + 1].cpu().clone()
        caches[1].rewind(caches[1].lengths[0] - length)
        yield agree(subject, found, wanted[:, : drafts + 1], f"{drafts} drafts after {length} tokens")


def ragged(subject: Subject, seed: int) -> Iterator[Check]:
    """Rows that verify 0, 3 and 8 drafts in one pass, with pads beside them and without, against each row alone."""
    model, lengths = subject.model, [5, 21, 9]
    ids = tokens(subject, max(lengths) + max(ROWS), seed + 1, rows=len(ROWS))
    given = torch.stack([row[n : n + max(ROWS)] for row, n in zip(ids, lengths)]).to(model.device)
    limit = capacity(model, max(lengths) + 2 * max(ROWS))
    wanted = []
    for b, (n, count) in enumerate(zip(lengths, ROWS)):
        cache = model.new_cache(1, limit)
        model.append(ids[b : b + 1, :n], cache, logits="none")
        step = single(model, cache)
        single_steps = [whole(step(given[b : b + 1, t : t + 1], [1], False)[0]).cpu() for t in range(count)]
        wanted.append(torch.cat(single_steps, 1))
    for pads in (True, False):
        cache = model.new_cache(len(ROWS), limit)
        model.append(ids[:, : max(lengths)], cache, n_new=lengths, logits="none")
        found = whole(default(model, cache, pads)(given, list(ROWS), False)[0]).cpu()
        for b, count in enumerate(ROWS):
            where = f"row {b}, {count - 1} drafts, {'with' if pads else 'without'} pads"
            yield agree(subject, found[b : b + 1, :count], wanted[b], where, exact=False)


def agree(subject: Subject, found: torch.Tensor, wanted: torch.Tensor, where: str, exact: bool | None = None) -> Check:
    """Logits [1, n, vocab] of a pass against those of single steps: bit for bit where that is promised."""
    name, errors = "logits of a pass equal plain decoding's", token_errors(found, wanted)
    part, chance = "verification, logits", token_errors(wanted.roll(1, 2), wanted).median().item()
    value, source, limit = agreeing(errors, subject.numerics, chained=True)
    if not value <= limit and found.shape[1] > 1:
        part = shifted(found, wanted) or part
    if promises_bits(subject) if exact is None else exact:
        wrong = int((found != wanted).sum())
        part = part if wrong else "verification, logits"
        return compare(name, wrong, "==", 0, BITS, wanted.numel(), where=where, part=part)
    return compare(name, value, "<=", limit, source, errors.numel(), where=where, part=part, chance=chance)


def shifted(found: torch.Tensor, wanted: torch.Tensor) -> str:
    """The part that says that logits [1, n, vocab] are those of the place before or after their own; '' if they are
    not."""
    pairs = {"before": (found[:, 1:], wanted[:, :-1]), "behind": (found[:, :-1], wanted[:, 1:])}
    for side, (a, b) in pairs.items():
        if token_errors(a, b).max() < 0.1 * token_errors(found, wanted).median():
            return f"verification, logits of the place {side}"
    return ""


# ---- texts --------------------------------------------------------------------------------


class RecordingDrafter(MTPDrafter):
    """The MTP block's drafter, which records the logits fp32 [1, vocab] of its last drafts."""

    def begin(self, prompts, model, cache, choose) -> None:
        self.said: list[torch.Tensor] = []

        def noted(logits: Logits, rows: list[int]):
            self.said.append(whole(logits).float().cpu().clone())
            return choose(logits, rows)

        super().begin(prompts, model, cache, noted)

    def draft(self, sizes: list[int]):
        self.said.clear()
        return super().draft(sizes)


def texts(subject: Subject, prompt: list[int]) -> Iterator[Check]:
    """Greedy texts of `generate_speculative` with the default verification: drafts that are known to be right or wrong,
    and those of the MTP block."""
    plain, n = decoded(subject, prompt, TEXT), len(prompt)
    for size in SIZES:
        drafter = KnownDrafter([plain.tokens], [size, 0, max(1, size - 1)], subject.config.vocab_size)
        [out] = generate_speculative(subject.model, [prompt], TEXT, drafter, policy=Static(size))
        yield same_text(subject, plain, out.token_ids, f"{size} known drafts after {n} tokens", "verification, text")
    if not len(subject.model.mtp):
        return
    drafter, copied, compared = RecordingDrafter(), 0, 0

    def tapped(model, cache):
        way = default(model, cache)

        def run(ids, counts, want_streams):
            nonlocal copied, compared
            logits, streams = way(ids, counts, want_streams)
            seen = whole(logits)
            for place, own in enumerate(drafter.said[: counts[0] - 1]):
                copied += bool(torch.equal(seen[:, place].float().cpu(), own))
                compared += 1
            return logits, streams

        return run

    [out] = generate_speculative(subject.model, [prompt], TEXT, drafter, policy=Static(3), verify=tapped)
    part = "verification, the draft's own logits"
    where = f"drafts of the MTP block after {n} tokens"
    yield compare(
        "places whose logits are the drafting model's",
        copied,
        "==",
        0,
        "drafts are judged by the main model",
        compared,
        unit="places",
        where=where,
        part=part,
    )
    yield same_text(subject, plain, out.token_ids, where, part if copied else "verification, text")


def same_text(subject: Subject, plain, found: list[int], where: str, part: str) -> Check:
    at = plain.differs(found, subject)
    said = "" if at is None else f"token {at} is {found[at : at + 1]}, expected {plain.tokens[at : at + 1]}"
    source = BITS
    if not promises_bits(subject):
        source = f"where no error of {TOLERANCES[subject.numerics][1]:.0e} of the logits can put another token first"
    return compare(
        "greedy text with drafts is that without",
        0 if at is None else len(plain.tokens) - at,
        "==",
        0,
        source,
        len(plain.tokens),
        unit="tokens",
        where=where,
        part=part,
        note=said,
    )


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(Verification)
