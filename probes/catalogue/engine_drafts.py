"""P28: the batch engine leaves on pages what plain decoding leaves. See engine_drafts.md."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from dsv4.cache.streams import MAX_DRAFTS
from dsv4.engine.state import Result
from dsv4.errors import RewindError
from dsv4.probes.catalogue.speculation import Undrafted
from dsv4.probes.compare import agreeing, token_errors
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.scenes.cache_contents import bits, of_output, rows_checks
from dsv4.probes.scenes.control import attempted_all
from dsv4.probes.scenes.engine_scene import LENGTHS, SPARE, Scene
from dsv4.probes.subject import Subject

TOGETHER = (0, 1, 3, MAX_DRAFTS)  # accepted by rows that share a pass
SCRIPT = "the scripted choices of the model: greedy decoding of the same logits"
RUNS = "the engine speculates"
NAMES = (
    "what may be read after an engine's pass is as if nothing had been drafted",
    "logits of an engine's pass are as if nothing had been drafted",
)


@dataclass(frozen=True)
class EngineDrafts(Probe):
    """Requests of which 0 to 8 drafts are accepted: each row in passes of its own, rows that share passes, and one that
    is cancelled."""

    name: ClassVar[str] = "engine_drafts"
    title: ClassVar[str] = "the batch engine keeps of drafts what plain decoding leaves"
    needs: ClassVar[frozenset[str]] = frozenset({"run", "cache", "rewind", "batch", "pages", "kernels"})

    def run(self, subject: Subject) -> list[Check]:
        room = max(LENGTHS) + 3 * (MAX_DRAFTS + 1) + SPARE
        if room > subject.config.max_position_embeddings:
            why = f"{room} tokens are needed, the checkpoint allows {subject.config.max_position_embeddings}"
            return [vacuous(self.title, why, part="engine")]
        if subject.model.layer_devices is not None:
            return [vacuous(self.title, "layers are spread over devices, and pages lie on one", part="engine")]
        # the second pass overwrites what the first left
        alone = [[a, max(1, MAX_DRAFTS - a)] for a in range(0, MAX_DRAFTS + 1, 1 if self.effort >= 1 else 4)]
        shared = [[a, max(1, MAX_DRAFTS - a)] for a in TOGETHER]
        part = lambda error: "engine rewind" if isinstance(error, RewindError) else "engine"
        checks = attempted_all(RUNS, "alone", part, lambda: kept(Scene(subject, alone, False, self.seed), "alone"))
        where = "together"
        checks += attempted_all(RUNS, where, part, lambda: kept(Scene(subject, shared, True, self.seed), where))
        return [*checks, *attempted_all(RUNS, "a cancelled row", part, lambda: cancelled(subject, self.seed))]


def kept(scene: Scene, where: str) -> Iterator[Check]:
    """Texts, lengths, and the state and logits of each pass, of requests that end by themselves."""
    model = scene.subject.model  # torch's products on a GPU choose the order of their sums by shape
    exact = not scene.together and not (model.backend == "reference" and model.device.type == "cuda")
    try:
        found = scene.run()
    except Exception:  # what its rows held before it raised shows where
        yield from lengths(scene, where)
        raise
    yield from ended(scene, where)
    yield from lengths(scene, where)
    yield came_out(scene, found, where)
    for b, row in enumerate(found):
        at = f"{where}, {scene.right[b][0]} of {MAX_DRAFTS} accepted after {len(scene.prompts[b])} tokens"
        yield from passes(scene, b, row, at, exact)


def ended(scene: Scene, where: str) -> Iterator[Check]:
    errors = [(b, r.error) for b, r in scene.results.items() if r.error is not None]
    rewinds = [(b, str(error)) for b, error in errors if isinstance(error, RewindError)]
    other = any(not error.startswith(f"row {b} ") for b, error in rewinds)  # request b has row b
    part = "engine rewind, of another row" if other else "engine rewind" if rewinds else "engine"
    yield compare(
        "requests that end with an error",
        len(errors),
        "==",
        0,
        "every request fits the cache, and drafts can be rewound",
        len(scene.results),
        unit="requests",
        where=where,
        part=part,
        note="; ".join(f"request {b}: {error}" for b, error in errors[:1]),
    )


def lengths(scene: Scene, where: str) -> Iterator[Check]:
    kinds = list(scene.off)
    yield compare(
        "rows that hold other tokens than those that came out, when a pass begins",
        len(kinds),
        "==",
        0,
        "a pass rewinds its own row by what it rejected",
        sum(map(len, scene.passes.values())),
        unit="kinds of rows",
        where=where,
        part=next((k for k in kinds if "another" in k), kinds[0]) if kinds else "engine rewind, length",
        note="; ".join(scene.off.values()),
    )


def came_out(scene: Scene, found: list[list[int]], where: str) -> Check:
    """Tokens of each request against the script's; the first that differs shows which wrong place it came from."""
    wrong, part, note = 0, "engine, accepted tokens", ""
    for b, row in enumerate(found):
        wanted, accepted = scene.script.outcome(b, row[0], MAX_DRAFTS, scene.right[b], scene.most[b])
        at = next((i for i, (x, y) in enumerate(zip(row, wanted)) if x != y), None)
        if at is None and len(row) == len(wanted):
            continue
        wrong += 1
        bonus = [sum(n + 1 for n in accepted[: k + 1]) for k in range(len(accepted))]
        if not note:
            at = min(len(row), len(wanted)) if at is None else at
            part = "engine, bonus token" if at in bonus else part
            note = f"request {b}: token {at} is {row[at : at + 1]}, expected {wanted[at : at + 1]}"
    about = dict(unit="requests", where=where, part=part, note=note)
    return compare("requests whose tokens the model did not choose", wrong, "==", 0, SCRIPT, len(found), **about)


def passes(scene: Scene, b: int, text: list[int], where: str, exact: bool) -> Iterator[Check]:
    """What a row held as each pass began, and the logits of the accepted tokens, against plain single steps."""
    subject = scene.subject
    plain, at = Undrafted(subject, scene.prompts[b], scene.limit), 0
    text = [text[0], *scene.script.text[b, 1:].tolist()]
    rows, logits = [], []
    for number, n in enumerate((0, *scene.right[b])):
        said = plain.feed(text[at : at + n + 1])
        at += n + 1
        if number:
            logits.append((scene.passes[b][number - 1].logits[: len(said)], said))
        if number < len(scene.right[b]):
            rows.append((f"before pass {number}", scene.passes[b][number].rows, plain.look(1)[0]))
    yield from rows_checks(NAMES[0], where, "engine", subject, rows, exact)
    part = of_output("engine", subject, rows) if exact else "engine, next logits"
    if exact:
        yield bits(NAMES[1], logits, where, part)
        return
    found, wanted = (torch.cat(side).unsqueeze(0) for side in zip(*logits))
    errors = token_errors(found, wanted)
    value, source, limit = agreeing(errors, subject.numerics, chained=True)
    yield compare(NAMES[1], value, "<=", limit, source, errors.numel(), where=where, part=part)


def cancelled(subject: Subject, seed: int) -> Iterator[Check]:
    """Two rows share passes; the end of the first request cancels the second within a pass whose drafts are not
    verified yet. Two more requests take the two free rows."""
    where, part = "a cancelled row", "engine, after a cancelled row"
    scene = Scene(subject, [[MAX_DRAFTS], [0, 0, MAX_DRAFTS], [MAX_DRAFTS], [0, 0, MAX_DRAFTS]], True, seed + 1, rows=2)
    scene.script.text[:] = scene.script.text[0]  # one text for all: a row does not show whose request it holds
    scene.most = [MAX_DRAFTS + 2, 2 * MAX_DRAFTS, MAX_DRAFTS + 2, MAX_DRAFTS + 2]  # the first ends with its first pass

    def told(result: Result) -> None:
        scene.results[result.id] = result
        if result.id == "0":
            scene.engine.cancel("1")
            for b in (2, 3):
                scene.submit(b)

    scene.engine.on_result = told
    for b in (0, 1):
        scene.submit(b)
    begin, join_rows = {}, scene.engine._join

    def join() -> None:
        before, held = {w.row for w in scene.engine.running}, scene.cache.lengths
        join_rows()
        begin.update({w.request.id: held[w.row] for w in scene.engine.running if w.row not in before})

    scene.engine._join = join
    try:
        scene.engine.run()
    except Exception:  # what rows held before it raised shows where
        yield joined(begin, where, part)
        raise
    yield joined(begin, where, part)
    left = [f"{pool.live} pages of {name}" for name, pool in scene.cache.pools.items() if pool.live]
    yield compare(
        "pools with pages that nobody holds any more",
        len(left),
        "==",
        0,
        "every request has ended, and no prefix is as long as a block",
        len(scene.cache.pools),
        unit="pools",
        where=where,
        part=part,
        note="; ".join(left[:2]),
    )
    wrong, note = 0, ""
    for b in (2, 3):
        result, wanted = scene.results[str(b)], scene.script.text[0, 1 : scene.most[b]].tolist()
        if result.token_ids[1:] != wanted:
            wrong, note = wrong + 1, note or f"request {b}: {result.error or result.token_ids[1:9]}"
    yield compare(
        "requests after it whose tokens the model did not choose",
        wrong,
        "==",
        0,
        SCRIPT,
        2,
        unit="requests",
        where=where,
        part=part,
        note=note,
    )


def joined(begin: dict[str, int], where: str, part: str) -> Check:
    """begin: tokens of each request's row as it joined."""
    return compare(
        "tokens that a row holds before a request joins it",
        sum(begin.values()),
        "==",
        0,
        "a request begins in an empty row",
        len(begin),
        unit="tokens",
        where=where,
        part=part,
    )


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(EngineDrafts)
