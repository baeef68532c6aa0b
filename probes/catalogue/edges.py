"""P9: attention and selection with extreme counts and values. See edges.md."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from dsv4.probes.oracle.pools import MINUS_INF, attend
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, Status, compare
from dsv4.probes.subject import Subject

SINK = "fp32: a sink counted twice costs 1.3 % or more, eight unmasked zero slots 0.7 % (known bugs, 2.3)"
K = 8
COUNTS = (0, 1, K - 1, K, K + 1, 64)  # entries
WIDTHS = ((4096, 512), (4096, 1024), (40_000, K), (1 << 20, K))  # (entries, k): known bugs 95, and k of Pro


@dataclass(frozen=True)
class Edges(Probe):
    """The subject's operations on small tensors, against loops in fp64 written here."""

    name: ClassVar[str] = "edges"
    title: ClassVar[str] = "attention and selection at their edges"
    needs: ClassVar[frozenset[str]] = frozenset({"kernels"})

    def run(self, subject: Subject) -> list[Check]:
        checks = []
        for queries in (1, 3, 70):  # some kernels serve one query, others a block of 64
            at = [f"{queries} queries, {n} entries" for n in COUNTS]
            for n, where in zip(COUNTS, at):
                for full in (False, True):
                    case = f"{where}, {'all keys present' if full else 'k = 8'}"
                    checks += [guarded(case, "sparse attention", self._selected, subject, queries, n, full, case)]
                    hca = f"{case}, HCA"
                    checks += [guarded(hca, "HCA attention", self._all, subject, queries, n, full, hca)]
                checks += [guarded(where, "selection", self._topk, subject, queries, n, where)]
            where = f"{queries} queries"
            checks += [
                guarded(where, "selection", self._ties, subject, queries, where),
                guarded(where, "selection", self._nan, subject, queries, where),
                guarded(where, "index scores", self._scores, subject, queries, where),
            ]
        return checks + [guarded(f"{n} entries, k = {k}", "selection", self._wide, subject, n, k) for n, k in WIDTHS]

    def _inputs(self, queries: int, n: int):
        g = torch.Generator().manual_seed(self.seed + 31 * n + queries)
        H, D, W = 4, 16, 6
        sink = torch.tensor([-8.0, -0.5, 0.5, 8.0])
        q, window, entries = (torch.randn(*shape, generator=g) for shape in ((queries, H, D), (20, D), (max(1, n), D)))
        return q, window, entries, sink, W, g

    def _selected(self, subject: Subject, queries: int, n: int, full: bool, where: str) -> Check:
        """−1 first, last and between, and a query that sees nothing; or no −1, with the hint that there is none. Rows
        that are not selected hold NaN."""
        q, window, entries, sink, W, g = self._inputs(queries, n)
        near = torch.randint(0, 20, (queries, W), generator=g)
        far = torch.full((queries, min(n, K) if full else K), -1)
        for t in range(queries):
            some = torch.randperm(max(1, n), generator=g)[: min(n, K)]
            far[t, far.shape[1] - len(some) :] = some
        if not full:
            near[:, 0], near[-1, 3] = -1, -1
            near[0], far[0] = (-1, -1) if queries > 1 else (near[0], far[0])  # one query with no key at all
        window[window_unused(near, 20)] = float("nan")
        entries[window_unused(far, len(entries))] = float("nan")
        found = subject.operations["sparse_attention"](q, window, near, entries, far, sink, 0.25, full)
        return self._near(found, q, window, near, entries, far, sink, where, "sparse attention")

    def _all(self, subject: Subject, queries: int, n: int, full: bool, where: str) -> Check:
        """Every visible entry. Unless `full`, the first query sees none, and entries beyond the visible ones are
        NaN."""
        q, window, entries, sink, W, g = self._inputs(queries, n)
        entries = entries[:n].clone()
        near = torch.randint(0, 20, (queries, W), generator=g)
        visible = (
            torch.full((queries,), n) if full or queries == 1 else torch.linspace(0, max(0, n - 1), queries).long()
        )
        entries[int(visible.max()) :] = float("nan")
        found = subject.operations["hca_attention"](
            q.unsqueeze(0), window, near, entries.unsqueeze(0), visible.unsqueeze(0), sink, 0.25, full
        )[0]
        far = torch.arange(n).expand(queries, n)
        return self._near(
            found,
            q,
            window,
            near,
            entries,
            torch.where(far < visible.unsqueeze(-1), far, -1),
            sink,
            where,
            "HCA attention",
        )

    def _near(self, found, q, window, near, entries, far, sink, where: str, part: str) -> Check:
        wanted = attend(q, window, near, entries, far, sink, 0.25)
        error = ((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-9)).item()
        note = ""
        if not error <= 1e-5:
            part, note = blame(
                found, wanted, lambda **other: attend(q, window, near, entries, far, sink, 0.25, **other), part
            )
        return compare(
            "attention equals its definition", error, "<=", 1e-5, SINK, found.numel(), where=where, part=part, note=note
        )

    def _topk(self, subject: Subject, queries: int, n: int, where: str) -> Check:
        """min(k, n) picks, −1 for what is not visible, nothing twice, the best of those that are."""
        g = torch.Generator().manual_seed(self.seed + n)
        scores = torch.randn(1, queries, n, generator=g)
        for t in range(queries):
            scores[0, t, n - t * n // queries :] = MINUS_INF
        found = subject.operations["topk_entries"](scores, K)
        wrong = 0 if found.shape[-1] == min(K, n) else 1
        for t in range(queries):
            row = scores[0, t].tolist()
            visible = [e for e in range(n) if row[e] > MINUS_INF]
            best = sorted(visible, key=lambda e: (-row[e], e))[:K]
            picked = [e for e in found[0, t].tolist() if e >= 0]
            wrong += sorted(picked) != sorted(best)
        return compare(
            "selection with few entries",
            wrong,
            "==",
            0,
            "definition: the k best of the visible, −1 elsewhere",
            queries,
            where=where,
            part="selection",
        )

    def _wide(self, subject: Subject, n: int, k: int) -> Check:
        """As many entries and picks as in long contexts, with the best entries at the far end."""
        scores = torch.randn(1, 1, n, generator=torch.Generator().manual_seed(self.seed)).double()
        scores += torch.linspace(0, 3, n, dtype=torch.float64)
        scores = scores.float()
        found = set(subject.operations["topk_entries"](scores, k)[0, 0].tolist())
        best = set(torch.sort(scores[0, 0], descending=True, stable=True).indices[:k].tolist())
        return compare(
            "selection among many entries",
            len(best - found),
            "==",
            0,
            "definition: the k best",
            k,
            where=f"{n} entries, k = {k}",
            part="selection",
            chance=k - k * k / n,
            unit="picks",
        )

    def _ties(self, subject: Subject, queries: int, where: str) -> Check:
        """Among equal scores the lowest entry; both zeros are equal."""
        scores = torch.tensor([0.0, 2.0, -0.0, 2.0, 0.0, 2.0, -1.0, 0.0]).repeat(1, queries, 1)
        found = subject.operations["topk_entries"](scores, 5)
        wanted = {1, 3, 5, 0, 2}
        wrong = sum(set(row) != wanted for row in found[0].tolist())
        return compare(
            "ties go to the lowest entry",
            wrong,
            "==",
            0,
            "the project's one tie rule",
            queries,
            where=where,
            part="selection",
        )

    def _nan(self, subject: Subject, queries: int, where: str) -> Check:
        """A NaN score may be picked or not; all picks must still be entries, each once."""
        scores = torch.randn(1, queries, 20, generator=torch.Generator().manual_seed(self.seed))
        scores[:, :, 3] = float("nan")
        found = subject.operations["topk_entries"](scores, K)
        rows = [[e for e in row if e != -1] for row in found[0].tolist()]
        wrong = sum(any(not 0 <= e < 20 for e in row) or len(set(row)) < len(row) for row in rows)
        return compare(
            "a NaN among the scores selects no entry that does not exist",
            wrong,
            "==",
            0,
            "known bugs, 87: such a lane gave uninitialised memory",
            queries,
            where=where,
            part="selection",
        )

    def _scores(self, subject: Subject, queries: int, where: str) -> Check:
        """ReLU before the head weights, −inf where invisible, NaN beyond not seen."""
        g = torch.Generator().manual_seed(self.seed)
        n = max(9, 2 * queries + 2)
        q, w, keys = (torch.randn(*s, generator=g) for s in ((1, queries, 3, 8), (1, queries, 3), (1, n, 8)))
        visible = torch.arange(1, queries + 1).unsqueeze(0) * 2
        keys[0, int(visible.max()) :] = float("nan")
        found = subject.operations["index_scores"](q, w, keys, visible)[0].double()
        hidden = torch.arange(n) >= visible[0].unsqueeze(-1)
        dots = torch.relu(torch.einsum("thd,nd->thn", q[0].double(), keys[0].double().nan_to_num()))
        wanted = (w[0].double().unsqueeze(-1) * dots).sum(1)
        wrong = (
            (found - wanted)[~hidden].abs().max().item() if bool((found[hidden] == MINUS_INF).all()) else float("inf")
        )
        return compare(
            "index scores",
            wrong,
            "<=",
            1e-4,
            "fp32 rounding of sums of 8 and of 3",
            n * queries,
            where=where,
            part="index scores",
        )


def guarded(where: str, part: str, check: Callable[..., Check], *args) -> Check:
    """The check. If an operation raises, that is an ERROR of its own part, and the other checks still run."""
    try:
        return check(*args)
    except Exception as error:  # an implementation under audit may raise anything
        note = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return Check("the operation takes these shapes", Status.ERROR, where=where, part=part, note=note)


def window_unused(index: torch.Tensor, rows: int) -> torch.Tensor:
    """bool [rows]: which rows no index names."""
    unused = torch.ones(rows, dtype=torch.bool)
    unused[index[index >= 0].flatten()] = False
    return unused


def blame(
    found: torch.Tensor, wanted: torch.Tensor, by_mistake: Callable[..., torch.Tensor], part: str
) -> tuple[str, str]:
    """(part, note): a mistake that leaves at most a tenth of the difference, or the operation itself."""
    forms = {
        "no sink": ("sink", dict(sinks=0.0)),
        "sink twice": ("sink", dict(sinks=2.0)),
        "rows of −1 counted": ("absent keys", dict(absent=0.0)),
    }
    away = lambda made: torch.nan_to_num((found.double() - made).norm(), nan=math.inf).item()
    errors = {name: away(by_mistake(**other)) for name, (_, other) in forms.items()}
    best, whole = min(errors, key=errors.get), away(wanted)
    if whole == math.inf:
        return part, "NaN"
    note = "; ".join(f"{name}: {e / max(whole, 1e-30):.2g} of the difference is left" for name, e in errors.items())
    return (forms[best][0] if errors[best] <= 0.1 * whole else part), note


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(Edges)
