"""P9: attention and selection where counts and values are extreme. See edges.md."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from probes.probe import Probe
from probes.result import Check, compare
from probes.subject import Subject

SINK = "fp32: a sink counted twice costs 1.3 % or more, eight unmasked zero slots 0.7 % (known bugs, 2.3)"
MINUS_INF = float("-inf")


@dataclass(frozen=True)
class Edges(Probe):
    """The subject's operations on small tensors, against loops in fp64 written here."""

    name: ClassVar[str] = "edges"
    title: ClassVar[str] = "attention and selection at their edges"
    needs: ClassVar[frozenset[str]] = frozenset({"kernels"})

    def run(self, subject: Subject) -> list[Check]:
        k, checks = 8, []
        for queries in (1, 3):
            for n in (0, 1, k - 1, k, k + 1, 64):
                checks += [self._selected(subject, queries, n, k), self._all(subject, queries, n), self._topk(subject, queries, n, k)]
            checks += [self._ties(subject, queries), self._scores(subject, queries)]
        return checks

    def _inputs(self, queries: int, n: int):
        g = torch.Generator().manual_seed(self.seed + 31 * n + queries)
        H, D, W = 4, 16, 6
        sink = torch.tensor([-8.0, -0.5, 0.5, 8.0])
        return torch.randn(queries, H, D, generator=g), torch.randn(20, D, generator=g), torch.randn(max(1, n), D, generator=g), sink, W, g

    def _selected(self, subject: Subject, queries: int, n: int, k: int) -> Check:
        """−1 first, last and between; a query that sees nothing; NaN in rows that nobody selected."""
        q, window, entries, sink, W, g = self._inputs(queries, n)
        near = torch.randint(0, 20, (queries, W), generator=g)
        near[:, 0], near[-1, 3] = -1, -1
        far = torch.full((queries, k), -1)
        for t in range(queries):
            some = torch.randperm(max(1, n), generator=g)[:min(n, k)]
            far[t, k - len(some):] = some
        near[0], far[0] = (-1, -1) if queries > 1 else (near[0], far[0])  # one query with no key at all
        window[window_unused(near, 20)] = float("nan")
        entries[window_unused(far, len(entries))] = float("nan")
        found = subject.operations["sparse_attention"](q, window, near, entries, far, sink, 0.25)
        wanted = torch.stack([attend(q[t], window, near[t], entries, far[t], sink, 0.25) for t in range(queries)])
        return self._near(found, wanted, f"{queries} queries, {n} entries, k = {k}", "sparse attention")

    def _all(self, subject: Subject, queries: int, n: int) -> Check:
        """Every visible entry; the first query sees none, and NaN lies beyond what is visible."""
        q, window, entries, sink, W, g = self._inputs(queries, n)
        entries = entries[:n].clone()
        near = torch.randint(0, 20, (queries, W), generator=g)
        visible = torch.linspace(0, max(0, n - 1), queries).long() if queries > 1 else torch.tensor([n])
        entries[int(visible.max()):] = float("nan")
        found = subject.operations["hca_attention"](q.unsqueeze(0), window, near, entries.unsqueeze(0), visible.unsqueeze(0), sink, 0.25)[0]
        wanted = torch.stack([attend(q[t], window, near[t], entries, torch.arange(int(visible[t])), sink, 0.25) for t in range(queries)])
        return self._near(found, wanted, f"{queries} queries, {n} entries", "HCA attention")

    def _near(self, found: torch.Tensor, wanted: torch.Tensor, where: str, part: str) -> Check:
        error = ((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-9)).item()
        return compare("attention with sinks of ±8", error, "<=", 1e-5, SINK, found.numel(), where=where, part=part)

    def _topk(self, subject: Subject, queries: int, n: int, k: int) -> Check:
        """min(k, n) picks, −1 for what is not visible, nothing twice, the best of those that are."""
        g = torch.Generator().manual_seed(self.seed + n)
        scores = torch.randn(1, queries, n, generator=g)
        for t in range(queries):
            scores[0, t, n - t * n // 3:] = MINUS_INF
        found = subject.operations["topk_entries"](scores, k)
        wrong = 0 if found.shape[-1] == min(k, n) else 1
        for t in range(queries):
            visible = [e for e in range(n) if scores[0, t, e] > MINUS_INF]
            best = sorted(visible, key=lambda e: (-scores[0, t, e].item(), e))[:k]
            picked = [e for e in found[0, t].tolist() if e >= 0]
            wrong += sorted(picked) != sorted(best)
        return compare("selection with few entries", wrong, "==", 0, "definition: the k best of the visible, −1 elsewhere", queries,
                       where=f"{queries} queries, {n} entries, k = {k}", part="selection")

    def _ties(self, subject: Subject, queries: int) -> Check:
        """Among equal scores the lowest entry; both zeros are equal."""
        scores = torch.tensor([0.0, 2.0, -0.0, 2.0, 0.0, 2.0, -1.0, 0.0]).repeat(1, queries, 1)
        found = subject.operations["topk_entries"](scores, 5)
        wanted = {1, 3, 5, 0, 2}
        wrong = sum(set(row) != wanted for row in found[0].tolist())
        return compare("ties go to the lowest entry", wrong, "==", 0, "the project's one tie rule", queries, where=f"{queries} queries",
                       part="selection")

    def _scores(self, subject: Subject, queries: int) -> Check:
        """ReLU before the head weights, −inf where invisible, NaN beyond not seen."""
        g = torch.Generator().manual_seed(self.seed)
        q, w, keys = (torch.randn(*s, generator=g) for s in ((1, queries, 3, 8), (1, queries, 3), (1, 9, 8)))
        visible = torch.arange(1, queries + 1).unsqueeze(0) * 2
        keys[0, int(visible.max()):] = float("nan")
        found = subject.operations["index_scores"](q, w, keys, visible)
        wrong = 0.0
        for t in range(queries):
            for e in range(9):
                if e >= visible[0, t]:
                    wrong = wrong if found[0, t, e] == MINUS_INF else float("inf")
                else:
                    wanted = sum(w[0, t, h].double() * max(0.0, float(q[0, t, h].double() @ keys[0, e].double())) for h in range(3))
                    wrong = max(wrong, abs(found[0, t, e].double() - wanted).item())
        return compare("index scores", wrong, "<=", 1e-4, "fp32 rounding of sums of 8 and of 3", 9 * queries, where=f"{queries} queries",
                       part="index scores")


def window_unused(index: torch.Tensor, rows: int) -> torch.Tensor:
    """bool [rows]: which rows no index names."""
    unused = torch.ones(rows, dtype=torch.bool)
    unused[index[index >= 0].flatten()] = False
    return unused


def attend(q, window, near, entries, far, sink, scale: float) -> torch.Tensor:
    """One query [H, D] over window[near] and entries[far], −1 skipped, in fp64: the definition, a head at a time."""
    rows = [window[i] for i in near.tolist() if i >= 0] + [entries[i] for i in far.tolist() if i >= 0]
    out = torch.zeros(q.shape, dtype=torch.float64)
    if not rows:
        return out
    keys = torch.stack(rows).double()
    for h in range(len(q)):
        logits = torch.cat((keys @ q[h].double() * scale, sink[h:h + 1].double()))
        out[h] = torch.softmax(logits, 0)[:-1] @ keys
    return out
