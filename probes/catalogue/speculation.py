"""P20: speculative decoding keeps what plain decoding would have. See speculation.md."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from dsv4.engine.generate import generate_speculative
from dsv4.model.causal import capacity, captures
from dsv4.model.cut_values import whole
from dsv4.probes.compare import tokens
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.scenes.acceptance import acceptance
from dsv4.probes.scenes.cache_contents import Rows, bits, of_output, rows_checks, visible
from dsv4.probes.scenes.control import attempted_all
from dsv4.probes.scenes.launched import launched
from dsv4.probes.scenes.scripted import STOP, Script, Steered, Watched, came_out, cases
from dsv4.probes.scenes.speculative_rounds import outputs, states
from dsv4.probes.subject import Subject
from dsv4.speculation.captured import CapturedBlock
from dsv4.speculation.draft import MTPDrafter
from dsv4.speculation.passes import Append, SingleSteps
from dsv4.speculation.policy import Static

DRAFTS = 4
# a pass crosses 128, and is at every residue mod 4 with 0 … 4 drafts accepted; the window is not full yet
PROMPTS = (125, 6)
SECOND = 2  # drafts accepted by the second pass, which overwrites what the first left
SPARE = 16  # additional tokens of context, for a decoder that rewinds too little
RUNS = "speculative decoding runs"
NAMES = (
    "what may be read after a pass is as if nothing had been drafted",
    "logits after a pass are as if nothing had been drafted",
    "drafts after a pass are as if nothing had been drafted before",
)


@dataclass(frozen=True)
class Speculation(Probe):
    """Every number of accepted drafts, in `generate_speculative` and in `Rounds`; the rules of acceptance by
    themselves."""

    name: ClassVar[str] = "speculation"
    title: ClassVar[str] = "what is kept of drafts is what plain decoding leaves"
    needs: ClassVar[frozenset[str]] = frozenset({"run", "cache", "rewind", "batch", "drafts"})

    def run(self, subject: Subject) -> list[Check]:
        checks = attempted_all(RUNS, "acceptance", "acceptance", lambda: acceptance(self.seed, subject.model.device))
        room = max(PROMPTS) + 3 * (DRAFTS + 1) + 2 * SPARE
        if room > subject.config.max_position_embeddings:
            why = f"{room} tokens are needed, the checkpoint allows {subject.config.max_position_embeddings}"
            return [*checks, vacuous("state after a pass", why, part="after a pass")]
        for length in PROMPTS:
            for accepted in range(DRAFTS + 1):
                where = f"{accepted} of {DRAFTS} accepted after {length} tokens"
                checks += attempted_all(
                    RUNS, where, "after a pass", lambda: one(subject, length, accepted, where, self.seed)
                )
        checks += attempted_all(RUNS, "ragged rows", "accepted tokens", lambda: ragged(subject, self.seed))
        if not len(subject.model.mtp):
            return [
                *checks,
                vacuous("rounds on the device, and drafts", "the subject has no MTP block", part="MTP window"),
            ]
        if subject.model.layer_devices is not None:
            return [*checks, vacuous("rounds on the device", "layers are spread over devices", part="after a round")]
        checks += attempted_all(RUNS, "Rounds", "after a round", lambda: states(subject, DRAFTS, self.seed))
        checks += attempted_all(RUNS, "Rounds", "accepted tokens", lambda: outputs(subject, DRAFTS, self.seed))
        return [*checks, *attempted_all(RUNS, "a batch", "one launch", lambda: launched(subject, DRAFTS, self.seed))]


class Undrafted:
    """Runs the text without drafts: the main model in single steps, the MTP block in the pieces in which final tokens
    reach it. Holds the prompt, and of the text all but the last token that `feed` was given."""

    def __init__(self, subject: Subject, prompt: list[int], limit: int):
        self.subject, self.model = subject, subject.model
        # as `generate_speculative` has it: captured steps split their sums by it
        self.limit = capacity(subject.model, limit)
        self.cache = subject.model.new_cache(1, self.limit)
        ids = torch.tensor([prompt])
        _, streams = self.model.append(ids, self.cache, logits="last", return_streams=True, chunk=len(prompt))
        self.pending: list[int] = []
        self.last = streams[:, -1:]
        # streams [1, n, S, d], next ids [1, n] of the block; a prompt of one token leaves nothing to it
        self.prompted = len(prompt) > 1
        self.pieces = [(streams[:, :-1], ids[:, 1:])] if self.prompted else []

    def feed(self, final: list[int]) -> torch.Tensor:
        """Tokens that became final: logits [n, vocab] after the one before them and after each of them but the last."""
        found, streams = [], [] if self.pending else [self.last]
        for token in (*self.pending, *final[:-1]):
            logits, after = self.model.append(torch.tensor([[token]]), self.cache, return_streams=True)
            found.append(logits[0].cpu())
            streams.append(after)
        self.pieces.append((torch.cat(streams, 1), torch.tensor([final])))
        self.pending = final[-1:]
        return torch.cat(found) if found else torch.empty(0, self.model.config.vocab_size)

    def look(self, drafts: int) -> tuple[Rows, list[torch.Tensor]]:
        """What may be read now, of the main model and of a block that has run final tokens alone; logits [1, vocab] of
        each of its next drafts."""
        rows = visible(self.subject, self.cache, 0, self.cache.lengths[0])
        rows = {at: held for at, held in rows.items() if at[0] != "mtp 0"}
        if not len(self.model.mtp):
            return rows, []
        block = self.model.new_cache(1, self.limit)
        # as the drafter runs it: other kernels may sum in another order
        step = CapturedBlock(self.model, block, captures(self.model))
        for number, (streams, ids) in enumerate(self.pieces):
            counts = [ids.shape[1]]
            if number == 0 and self.prompted:
                logits, streams = self.model.mtp_logits(
                    streams, ids, block, return_streams=True, logits="last", chunk=counts[0]
                )
            else:
                logits, streams = step(streams, ids, counts)
                logits = whole(logits)
        rows |= {
            at: held
            for at, held in visible(self.subject, block, 0, 0, block.mtp_lengths[0]).items()
            if at[0] == "mtp 0"
        }
        found, streams = [logits[:, 0].clone()], streams[:, -1:]
        for _ in range(drafts - 1):
            logits, streams = step(streams, found[-1].argmax(-1).view(1, 1), [1])
            found.append(whole(logits)[:, 0].clone())
        return rows, [logits.cpu() for logits in found]


def one(
    subject: Subject,
    length: int,
    accepted: int,
    where: str,
    seed: int,
    drafts: int = DRAFTS,
    later: tuple[int, ...] = (SECOND, DRAFTS),
    part: str = "after a pass",
) -> Iterator[Check]:
    """One row, passes of `drafts` as single steps, so that no rounding differs: compared before each of them. accepted,
    later: accepted drafts of the first pass and of later ones."""
    prompt, kept = tokens(subject, length, seed + length)[0].tolist(), (accepted, *later)
    script, looks = Script(subject.config.vocab_size, 1, 24 + drafts, seed), []
    drafter = Steered(script, [list(kept)], MTPDrafter() if len(subject.model.mtp) else None)
    most = 1 + sum(n + 1 for n in kept)
    limit = length + most + SPARE
    [out] = generate_speculative(
        subject.model,
        [prompt],
        most,
        drafter,
        policy=Static(drafts),
        max_context=limit,
        verify=lambda m, c: Watched(subject, c, SingleSteps(m, c), script, [length], looks),
    )
    plain, text, at = Undrafted(subject, prompt, limit), [out.token_ids[0], *script.text[0, 1:].tolist()], 0
    rows, logits, drafted = [], [], []
    for number, n in enumerate((0, *kept)):  # tokens that were final before pass `number`; at the end those of the last
        said = plain.feed(text[at : at + n + 1])
        at += n + 1
        if number:
            logits.append((looks[number - 1].logits[0, : len(said)], said))
        if number < len(kept):
            wanted, chain = plain.look(drafts)
            rows.append((f"before pass {number}", looks[number].rows[0], wanted))
            drafted += zip(drafter.logits[number], chain)
    yield from rows_checks(NAMES[0], where, part, subject, rows, True)
    yield bits(NAMES[1], logits, where, of_output(part, subject, rows))
    if drafted:
        yield bits(NAMES[2], drafted, where, f"{part}, next drafts")


def ragged(subject: Subject, seed: int) -> Iterator[Check]:
    """Rows of different lengths that keep different numbers of drafts, in passes of one append, without the block."""
    rows, most = DRAFTS + 3, 9
    prompts = [row[: 3 + b].tolist() for b, row in enumerate(tokens(subject, rows + 3, seed, rows=rows))]
    script = Script(subject.config.vocab_size, rows, most + DRAFTS + 2, seed)
    right = cases(script, rows, DRAFTS)
    drafter = Steered(script, right)
    found = generate_speculative(
        subject.model,
        prompts,
        most,
        drafter,
        policy=Static(DRAFTS),
        stop_ids=(STOP,),
        max_context=rows + 3 + most + SPARE,
        verify=lambda m, c: Watched(subject, c, Append(m, c), script, [len(p) for p in prompts]),
    )
    yield from came_out(
        "generate_speculative", script, right, [out.token_ids for out in found], None, [most] * rows, DRAFTS
    )
    wanted = [script.outcome(b, out.token_ids[0], DRAFTS, right[b], most)[1] for b, out in enumerate(found)]
    off = [b for b, out in enumerate(found) if out.speculation.verify_passes != len(wanted[b])]
    yield compare(
        "rows that take another number of passes than their right drafts need",
        len(off),
        "==",
        0,
        "the longest right prefix stays, and a token of the model's own",
        rows,
        unit="rows",
        where="generate_speculative",
        part="accepted drafts",
    )


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(Speculation)
