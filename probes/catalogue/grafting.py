"""P19: a request that borrows the pages of a prefix equals one that ran it, and changes no other request. See
grafting.md."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from dsv4.cache.cache import Cache
from dsv4.cache.paged import PagedCache, new_paged_cache
from dsv4.cache.paging import BLOCK
from dsv4.cache.prefixes import PrefixTree
from dsv4.engine.batch import BatchEngine
from dsv4.engine.state import Request
from dsv4.errors import OutOfPages, PageError
from dsv4.probes.compare import tokens
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.scenes.cache_contents import (
    PARTS,
    SAME,
    Rows,
    bits,
    differing,
    of_output,
    of_snapshot,
    off,
    rows_checks,
    summary,
)
from dsv4.probes.scenes.control import attempted_all
from dsv4.probes.scenes.grafted_rows import Going, Seen, last_grafted, miscounted, state_of
from dsv4.probes.scenes.grafted_steps import stepping
from dsv4.probes.subject import Subject

SHARED = 2 * BLOCK
OWN, BACK = 9, 40  # tokens of the donor beyond the prefix; tokens of the prefix that it rewinds
# pieces after the graft: one to the end of the next window of HCA; one within it
LONG, SHORT = (1, 4, 123, 1), (1, 4, 30)
DONOR, FIRST, SECOND, OTHER = range(4)  # rows of the cache
SCENARIOS = (  # tokens of the prefix, what becomes of the donor, pieces of the first borrower
    (BLOCK, "goes on", LONG),
    (2 * BLOCK, "goes on", SHORT),
    (BLOCK, "has ended", SHORT),
    (BLOCK, "went back behind the prefix", SHORT),
    (BLOCK, "was evicted", SHORT),
)
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1)
REWIND = 64
OTHER_LENGTH = 37  # tokens of the requests that take the pages which came free
RUNS = "a grafted request runs"
NOBODY = "a page that others hold is copied before it is written: no byte of it changes"


@dataclass(frozen=True)
class Grafting(Probe):
    """Two borrowers of one prefix beside the donor, against the same requests from an empty plain cache."""

    name: ClassVar[str] = "grafting"
    title: ClassVar[str] = "a grafted request equals a cold one"
    needs: ClassVar[frozenset[str]] = frozenset({"run", "cache", "pages"})

    def run(self, subject: Subject) -> list[Check]:
        if subject.model.layer_devices is not None:
            return [vacuous(self.title, "layers are spread over devices; a paged cache is on one", part="graft")]
        room = SHARED + sum(LONG) + 8
        if room > subject.config.max_position_embeddings:
            why = f"{room} tokens are needed, the checkpoint allows {subject.config.max_position_embeddings}"
            return [vacuous(self.title, why, part="graft")]
        case, checks = Case(subject, self.seed, room, self._plain), []
        for prefix, fate, pieces in SCENARIOS:
            where = f"{prefix} tokens, the donor {fate}"
            checks += attempted_all(RUNS, where, part_of, lambda: Scenario(case, prefix, fate, pieces, where).checks())
        return [
            *checks,
            *self._mtp(subject),
            *attempted_all(RUNS, "which prefix", part_of, lambda: lengths(case)),
            *attempted_all(RUNS, "captured steps", part_of, lambda: self._stepping(case)),
            *attempted_all(RUNS, "engine", part_of, lambda: engine(case)),
        ]

    @staticmethod
    def _plain(model, room: int) -> Cache:
        """A plain cache of one row, whose results are those of a cold request bit for bit."""
        return model.new_cache(1, room, REWIND)

    def _mtp(self, subject: Subject) -> list[Check]:
        """Of a model whose block is not there to be grafted."""
        missing = vacuous("a graft of the MTP block", "the subject has none", part="graft, MTP window")
        return [] if len(subject.model.mtp) else [missing]

    def _stepping(self, case: "Case") -> Iterator[Check]:
        cache = case.cache()
        plain = case.subject.model.new_cache(cache.batch, cache.max_context)
        return stepping(case.subject, cache, plain, case.shared, self.seed)


class Case:
    """Token ids of the requests, and the results of the borrowers when they run cold, on the cache that
    plain(model, room) makes."""

    def __init__(self, subject: Subject, seed: int, room: int, plain: Callable[..., Cache]):
        self.subject, self.room, self._plain, self._cold = subject, room, plain, {}
        self.shared, self.owns, *self.others = (row.tolist() for row in tokens(subject, room, seed, rows=6))

    def ids(self, prefix: int, borrower: int) -> list[int]:
        """The prefix, then tokens of the borrower's own."""
        return self.shared[:prefix] + self.others[borrower][: self.room - prefix]

    def cache(self, batch: int = 4) -> PagedCache:
        """Free pages hold NaN."""
        return new_paged_cache(self.subject.model, batch, self.room, max_rewind=REWIND, prefixes=4, poison=True)

    def cold(self, prefix: int, borrower: int, pieces: tuple[int, ...]) -> list[Seen]:
        if (prefix, borrower, pieces) not in self._cold:
            plain = self._plain(self.subject.model, self.room)
            going = Going(self.subject, plain, 0, self.ids(prefix, borrower))
            going.prefill(prefix)
            self._cold[prefix, borrower, pieces] = going.pieces(pieces)
        return self._cold[prefix, borrower, pieces]


class Scenario:
    """A donor, two borrowers of `prefix` of its tokens, and what becomes of the donor between them."""

    def __init__(self, case: Case, prefix: int, fate: str, pieces: tuple[int, ...], where: str):
        self.case, self.prefix, self.fate, self.pieces, self.where = case, prefix, fate, (pieces, SHORT), where
        self.subject, self.cache = case.subject, case.cache()
        self.tree = PrefixTree(self.cache)
        self.counts: list[str] = []  # pages whose holders are miscounted
        self.looks = 0
        self.changed: dict[str, list] = {"the donor": [], "the kept prefix": [], "another borrower": []}

    def checks(self) -> Iterator[Check]:
        donor = Going(self.subject, self.cache, DONOR, self.case.shared[: self.prefix] + self.case.owns)
        donor.prefill(self.prefix + OWN, self.tree)
        self._other_request(FIRST, OTHER_LENGTH)  # the row has held another request, of which nothing may be left
        self.cache.leave(FIRST)
        before, seen = self._count("the donor has run"), []
        first = self._borrow(FIRST)
        second = self._borrow(SECOND) if self.fate == "was evicted" else None  # after that nothing is left to borrow
        self._watched({"another borrower": first.rows}, f"the donor {self.fate}", lambda: self._becomes(donor))
        second = second or self._borrow(SECOND)
        seen.append(self._runs(first, self.pieces[0], donor, None))
        seen.append(self._runs(second, self.pieces[1], donor, first))
        yield from self._equal(seen)
        yield from self._untouched()
        yield from self._unpinned(before)

    def _other_request(self, b: int, n: int) -> None:
        Going(self.subject, self.cache, b, self.case.others[2]).prefill(n)

    def _borrow(self, b: int) -> Going:
        ids = self.case.ids(self.prefix, b - FIRST)
        self.tree.graft(b, ids)
        streams = last_grafted(self.tree).streams
        self._count(f"row {b} has borrowed")
        return Going(self.subject, self.cache, b, ids, None if streams is None else streams.view(1, 1, *streams.shape))

    def _becomes(self, donor: Going) -> None:
        """What becomes of the donor; other requests then write the pages that came free."""
        if self.fate == "goes on":
            donor.run(OWN)
        elif self.fate == "went back behind the prefix":
            self.cache.rewind([donor.length - self.prefix + BACK, 0, 0, 0])
            donor.ids, donor.follows = donor.ids[: donor.length] + self.case.others[3], False
            donor.run(BACK + OWN)
        else:
            self.cache.leave(DONOR)
            if self.fate == "was evicted":
                for name, pool in self.cache.pools.items():
                    self.tree.make_free(name, pool.pages)
                self.tree.clear()
            self._other_request(DONOR, OTHER_LENGTH)
            self._other_request(OTHER, OTHER_LENGTH)
        self._count(f"the donor {self.fate}")

    def _runs(
        self, borrower: Going, pieces: tuple[int, ...], donor: Going, other: Going | None
    ) -> tuple[list[Seen], list[Seen]]:
        """The results of a borrower, and its results cold."""
        others = {"the donor": donor.rows} | ({"another borrower": other.rows} if other else {})
        found = self._watched(others, f"row {borrower.b} ran", lambda: borrower.pieces(pieces))
        self._count(f"row {borrower.b} has run")
        return found, self.case.cold(self.prefix, borrower.b - FIRST, pieces)

    def _watched(self, others: dict[str, Callable[[], Rows]], when: str, act: Callable):
        """act(), and a check that it changes nothing that others hold, nor the kept prefix."""
        others = others | {"the kept prefix": self._kept}
        before = {whose: rows() for whose, rows in others.items()}
        done = act()
        for whose, rows in others.items():
            self.changed[whose].append((when, rows(), before[whose]))
        return done

    def _kept(self) -> Rows:
        return {
            (f"{node.snapshot.length} {label}", stream): rows
            for node in self.tree.kept
            for (label, stream), rows in of_snapshot(self.subject, self.cache, node.snapshot).items()
        }

    def _count(self, when: str) -> dict[str, tuple]:
        self.counts += [f"{when}: {said}" for said in miscounted(self.cache, self.tree)]
        self.looks += 1
        return state_of(self.cache)

    # ---- what is said of it --------------------------------------------------------------

    def _equal(self, seen: list[tuple[list[Seen], list[Seen]]]) -> Iterator[Check]:
        begun = [(found[0].rows, cold[0].rows) for found, cold in seen]
        for stream in dict.fromkeys(stream for _, stream in begun[0][1]):
            pairs = [(at, found[at], cold[at]) for found, cold in begun for at in cold if at[1] == stream]
            bad = [(at, int(off(a, b).sum())) for at, a, b in pairs if off(a, b).any()]
            yield compare(
                f"{PARTS[stream]} that a graft holds are a cold request's",
                sum(n for _, n in bad),
                "==",
                0,
                SAME,
                sum(len(b.raw) for _, _, b in pairs),
                unit="rows",
                where=self.where,
                part=f"graft, {PARTS[stream]}",
                note=f"first in {bad[0][0][0]}" if bad else "",
            )
        steps = [
            (f"row {row}, {a.when}", a, b)
            for row, (found, cold) in enumerate(seen, FIRST)
            for a, b in zip(found[1:], cold[1:])
        ]
        rows = [(when, a.rows, b.rows) for when, a, b in steps]
        yield from rows_checks(
            "rows that a grafted request writes are a cold one's", self.where, "graft", self.subject, rows, True
        )
        part = of_output("graft", self.subject, rows, "output")
        yield bits(
            "logits of a grafted request are a cold one's",
            [(a.logits, b.logits) for _, a, b in steps],
            self.where,
            part,
        )
        if steps[0][2].drafts is not None:
            yield bits(
                "drafts of a grafted request are a cold one's",
                [(a.drafts, b.drafts) for _, a, b in steps],
                self.where,
                "graft, MTP window",
            )

    def _untouched(self) -> Iterator[Check]:
        for whose, looks in self.changed.items():
            # some are dropped
            still = [(when, after, {at: before[at] for at in after if at in before}) for when, after, before in looks]
            bad = [(when, differing(after, before)) for when, after, before in still if differing(after, before)]
            count = sum(len(rows.raw) for _, _, before in still for rows in before.values())
            if whose == "the kept prefix" and self.fate == "was evicted":
                continue  # none is kept then
            yield compare(
                f"nobody writes the pages of {whose}",
                sum(sum(d.values()) for _, d in bad),
                "==",
                0,
                NOBODY,
                count,
                unit="rows",
                where=self.where,
                part=f"copy on write, pages of {whose}",
                note=f"{bad[0][0]}: {summary(bad[0][1])}" if bad else "",
            )

    def _unpinned(self, before: dict[str, tuple]) -> Iterator[Check]:
        """Rows end one by one; after that no page is held."""
        about = dict(where=self.where, part="reference counts")
        for b in (FIRST, SECOND):
            self.cache.leave(b)
            after = self._count(f"row {b} has left")
        if self.fate == "goes on":  # it took no page that it did not have, but for those it writes now
            bad = [name for name in before if sum(after[name][0]) > sum(before[name][0]) + 1]
            yield compare(
                "pools that hold more after the borrowers have ended",
                len(bad),
                "==",
                0,
                "a borrower's pages come free with it; the donor has written a page at most",
                len(before),
                unit="pools",
                note=", ".join(bad),
                **about,
            )
        for b in (DONOR, OTHER):
            self.cache.leave(b)
            self._count(f"row {b} has left")
        self.tree.clear()
        self._count("nothing is kept")
        yield compare(
            "pages whose holders are miscounted",
            len(self.counts),
            "==",
            0,
            "counted from tables and snapshots",
            self.looks,
            unit="pages",
            note="; ".join(self.counts[:2]),
            **about,
        )
        left = {
            name: pool.live for name, pool in self.cache.pools.items() if pool.live or len(set(pool.free)) != pool.pages
        }
        yield compare(
            "pools that are not free at the end",
            len(left),
            "==",
            0,
            "whoever held a page has let go",
            len(before),
            unit="pools",
            note=", ".join(f"{n} pages of {name}" for name, n in left.items()),
            **about,
        )


def lengths(case: Case) -> Iterator[Check]:
    """The prefix that a prompt gets: whole blocks that it shares with a kept one and that leave it a token to run."""
    cache = case.cache(2)
    tree, bad, asked = PrefixTree(cache), [], 0
    donor = Going(case.subject, cache, 0, case.shared)
    donor.prefill(SHARED + 1, tree)
    for n in LENGTHS:
        for ids, what in (
            (case.shared[:n], f"a prompt of {n} shared tokens"),
            (case.shared[:n] + case.others[0][:BLOCK], f"{n} shared tokens and {BLOCK} others"),
        ):
            wanted = min(n, len(ids) - 1) // BLOCK * BLOCK
            gained, asked = tree.graft(1, ids), asked + 1
            held = (gained, cache.lengths[1], cache.mtp_lengths[1])
            if held != (wanted, wanted, max(0, wanted - 1) if donor.follows else 0):
                bad.append(f"{what}: {gained} were grafted, the row holds {held[1]} (MTP {held[2]}); expected {wanted}")
            cache.leave(1)
    yield compare(
        "prompts that get another prefix than the longest",
        len(bad),
        "==",
        0,
        f"whole blocks of {BLOCK}, and a token is left to run",
        asked,
        unit="prompts",
        part="graft length",
        note="; ".join(bad[:2]),
    )


def engine(case: Case) -> Iterator[Check]:
    """Two requests of the batch engine that share a block, against the second alone."""
    ask = lambda b: Request(str(b), tuple(case.ids(BLOCK, b)[: BLOCK + 5]), max_tokens=3)
    found = []
    for requests in ((ask(1),), (ask(0), ask(1))):
        results: dict = {}
        runs = BatchEngine(
            case.subject.model, case.cache(2), on_result=lambda result: results.update({result.id: result})
        )
        for request in requests:
            runs.submit(request)
        runs.run()
        found.append((results["1"], runs))
    (alone, _), (beside, both) = found
    yield compare(
        "tokens that the engine grafts",
        beside.grafted,
        "==",
        BLOCK,
        "the block that both share",
        1,
        unit="tokens",
        where="engine",
        part="graft length",
    )
    wrong = sum(a != b for a, b in zip(beside.token_ids, alone.token_ids, strict=True))
    yield compare(
        "tokens of a grafted request are those of the request alone",
        wrong,
        "==",
        0,
        SAME,
        len(alone.token_ids),
        unit="tokens",
        where="engine",
        part="graft, output",
    )
    counts = miscounted(both.cache, both.prefixes)
    both.prefixes.clear()
    counts += [
        f"{pool.live} pages of {name} are held by nobody" for name, pool in both.cache.pools.items() if pool.live
    ]
    yield compare(
        "pages whose holders are miscounted",
        len(counts),
        "==",
        0,
        "counted from tables and snapshots",
        len(both.cache.pools),
        unit="pages",
        where="engine",
        part="reference counts",
        note="; ".join(counts[:2]),
    )


def part_of(error: Exception) -> str:
    """The part at fault if a scenario raises."""
    return "reference counts" if isinstance(error, (PageError, OutOfPages)) else "graft"


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(Grafting)
