"""P31: drafts of every depth, up to the edges of blocks and of the window, and what is accepted at each position. See
draft_depth.md."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from dsv4.cache.streams import MAX_DRAFTS
from dsv4.engine.generate import generate_speculative
from dsv4.probes.catalogue.speculation import SPARE, one
from dsv4.probes.compare import tokens, window_of
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.scenes.control import attempted_all
from dsv4.probes.scenes.known_drafts import KnownDrafter, decoded
from dsv4.probes.subject import Subject
from dsv4.speculation.draft import Drafts, MTPDrafter
from dsv4.speculation.policy import Static

DEPTHS = (1, 3, 4, 5, MAX_DRAFTS)  # below, at and beyond the ratio of CSA
PROMPT, TEXT = 9, 2 * MAX_DRAFTS
RUNS = "drafts of this depth run"


@dataclass(frozen=True)
class DraftDepth(Probe):
    """Depths of 1 to 8 whose drafts end at, or stand across, the end of a block and of the window."""

    name: ClassVar[str] = "draft_depth"
    title: ClassVar[str] = "every depth of drafts is as good as one"
    needs: ClassVar[frozenset[str]] = frozenset({"run", "cache", "rewind", "batch", "drafts"})

    def run(self, subject: Subject) -> list[Check]:
        checks, most = [], subject.config.max_position_embeddings
        for depth, length, edge in edges(subject) if len(subject.model.mtp) else ():
            where = f"depth {depth} after {length} tokens, {edge}"
            if length + 4 * MAX_DRAFTS + SPARE > most:
                checks.append(vacuous("state at an edge", f"the checkpoint allows {most} tokens", where=where))
                continue
            make = lambda: one(
                subject, length, depth - 1, where, self.seed, depth, (depth,), f"draft depth, at {edge.split(' ')[-1]}"
            )
            checks += attempted_all(RUNS, where, "draft depth", make)
        where = "acceptance by position"
        return [*checks, *attempted_all(RUNS, where, "draft depth", lambda: accepted(subject, self.seed))]


def edges(subject: Subject) -> list[tuple[int, int, str]]:
    """(depth, tokens before, edge): the pass, a token and its drafts, ends at the edge or crosses it."""
    window = window_of(subject.config)
    found = [(3, 128 - 4, "ends at a block"), (4, 128 - 4, "goes one beyond a block")]
    at = max(1, window - MAX_DRAFTS)
    found += [(window - at, at, "drafts end at the window")] if window - at <= MAX_DRAFTS else []
    return [*found, (MAX_DRAFTS, max(1, window - MAX_DRAFTS + 1), "goes one beyond the window")]


class Kept(MTPDrafter):
    """The MTP block's drafter, with the drafts of each pass."""

    def begin(self, prompts, model, cache, choose) -> None:
        self.drafted: list[list[int]] = []
        super().begin(prompts, model, cache, choose)

    def draft(self, sizes: list[int]) -> Drafts:
        found = super().draft(sizes)
        self.drafted.append(found.tokens[0, : sizes[0]].tolist())
        return found


def accepted(subject: Subject, seed: int) -> Iterator[Check]:
    """Right drafts of each depth must be accepted at every position; of the MTP block's drafts as many as are right."""
    prompt = tokens(subject, PROMPT, seed + 1)[0].tolist()
    plain = decoded(subject, prompt, TEXT)
    sure = next((i for i in range(TEXT) if not plain.tells(i, subject)), TEXT)
    for depth in DEPTHS:
        drafter = KnownDrafter([plain.tokens], [depth], subject.config.vocab_size)
        [out] = generate_speculative(subject.model, [prompt], TEXT, drafter, policy=Static(depth))
        at, lost, asked = 1, [0] * depth, 0
        for size, stay in zip(out.speculation.block_size_history, out.speculation.accepted_history):
            if at + size > sure:
                break
            asked, at = asked + size, at + stay + 1
            if stay < size:
                lost[stay] += 1
        yield compare(
            "right drafts that do not stay",
            sum(lost),
            "==",
            0,
            "greedy decoding without drafts chose them",
            asked,
            unit="drafts",
            where=f"depth {depth}",
            part="draft depth, acceptance by position",
            note=f"by position: {lost}" if any(lost) else "",
        )
    if len(subject.model.mtp):
        yield from counted(subject, prompt)


def counted(subject: Subject, prompt: list[int]) -> Iterator[Check]:
    """Acceptance by position of the MTP block's own drafts at the largest depth, against a count from its text."""
    drafter = Kept()
    [out] = generate_speculative(subject.model, [prompt], 2 * TEXT, drafter, policy=Static(MAX_DRAFTS))
    at, wrong, right, asked = 1, [], torch.zeros(MAX_DRAFTS), torch.zeros(MAX_DRAFTS)
    for drafts, told in zip(drafter.drafted, out.speculation.accepted_history):
        text = out.token_ids[at : at + len(drafts)]
        stay = next((i for i, (a, b) in enumerate(zip(drafts, text)) if a != b), min(len(drafts), len(text)))
        wrong += [] if stay == told else [f"{told} told, {stay} are right after {at} tokens"]
        right[:stay] += 1
        asked[: min(stay + 1, len(drafts))] += 1  # a draft after a wrong one was not judged
        at += told + 1
    shares = [f"{r / n:.0%}" if n else "–" for r, n in zip(right.tolist(), asked.tolist())]
    yield compare(
        "passes whose accepted drafts are miscounted",
        len(wrong),
        "==",
        0,
        "the longest prefix of drafts that came out",
        len(drafter.drafted),
        unit="passes",
        where=f"depth {MAX_DRAFTS}, the MTP block",
        part="draft depth, acceptance by position",
        note="; ".join([*wrong[:1], f"accepted by position, of those judged: {', '.join(shares)}"]),
    )


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(DraftDepth)
