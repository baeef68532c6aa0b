"""What decoding reads under policies that choose once, after the prompt, against the published rule in float64."""

import math
from collections import defaultdict
from collections.abc import Iterator

import torch

from dsv4.kernels.block_choice import Observed
from dsv4.model.gqa.cache import GroupedCache
from dsv4.model.gqa.choice import Attention
from dsv4.probes.compare import limit_of, tokens
from dsv4.probes.oracle import reading
from dsv4.probes.result import Check, vacuous
from dsv4.probes.scenes.gqa.steps import Tally, Watched, captured, full_layers, out_of_reach, poisoned
from dsv4.probes.subject import Subject

W = 8
OBSERVED = (
    Observed("snapkv", retention=0.3, window=W, kernel=5),
    Observed("snapkv, max pooling", retention=40, window=W, kernel=7, pooling="max"),
    Observed("pyramidkv", retention=0.3, window=W, kernel=5, beta=4),
)
LENGTHS = (150, 97)  # the prompts of two rows
STEPS = (1, 3, 1)  # tokens of the steps after them
PIECE = 49  # tokens of a prompt that run at once: the longer prompt's last piece is shorter than the window
RULE = "SnapKV and PyramidKV as published, in float64 from the cache's keys and the prompt's queries"


def checks(subject: Subject, policy: Observed, seed: int) -> Iterator[Check]:
    """Two ragged prompts in pieces, steps of one token and of several, from caches of NaN."""
    model, room = subject.model, max(LENGTHS) + sum(STEPS) + 4
    if why := out_of_reach(model, room):
        yield vacuous("a choice after the prompt", why, where=policy.name, part="prompt's choice")
        return
    model.attention = Attention(policy)
    look, cache = Look(subject, policy), poisoned(model, len(LENGTHS), room)
    ids = tokens(subject, room, seed, rows=len(LENGTHS))
    with Watched(model, "grouped_attention", "gather_attention") as watched:
        model.append(ids[:, : max(LENGTHS)], cache, n_new=list(LENGTHS), logits="none", chunk=PIECE, prompt=True)
        look.prompt(watched)
        for T in STEPS:
            starts = cache.lengths
            model.append(tokens(subject, T, seed + starts[0], rows=len(LENGTHS)), cache, prompt=False)
            look.step(cache, watched, starts, T)
    yield from look.checks()
    new = tokens(subject, 3, seed + 3, rows=len(LENGTHS))
    yield captured(subject, cache, new, policy.name, "prompt's choice, captured step")


class Look:
    """Lists that steps read by, layer by layer and query by query."""

    def __init__(self, subject: Subject, policy: Observed):
        self.subject, self.model, self.policy = subject, subject.model, policy
        self.tally: dict[str, Tally] = defaultdict(Tally)
        self.queries: dict[int, list[torch.Tensor]] = {}  # by layer, the window's of each row [W, H, D]
        self.first: dict[tuple, set[int]] = {}  # (layer, row, KV head) → tokens of the prompt that its first step read
        self.limit = limit_of(subject)[0]

    def prompt(self, watched: Watched) -> None:
        """The window's queries of each row, from what attention to the prompt was given; it should be dense. Pieces of
        rows that run together come in order; a piece of one row is the longest's."""
        held: dict[int, list[torch.Tensor]] = {}
        dense, listed = watched.taken("grouped_attention"), watched.taken("gather_attention")
        self.tally["prefill"].see(len(listed), len(dense) + len(listed), "the prompt")
        for call, start in [*((c, c.given[3]) for c in dense), *((c, c.given[4]) for c in listed)]:
            q, rows = call.given[0], held.setdefault(call.layer, [torch.empty(0)] * len(LENGTHS))
            for b, first in enumerate(start.tolist()):
                at = self._row(b, first, q.shape[0], rows)
                rows[at] = torch.cat((rows[at], q[b].double().cpu())) if len(rows[at]) else q[b].double().cpu()
        self.queries = {layer: [row[-W:] for row in rows] for layer, rows in held.items()}

    @staticmethod
    def _row(b: int, first: int, together: int, rows: list[torch.Tensor]) -> int:
        """The row of the batch that row b of a piece is: the one that holds as many tokens as stand before it."""
        return b if together == len(rows) else next(r for r, held in enumerate(rows) if len(held) == first < LENGTHS[r])

    def step(self, cache: GroupedCache, watched: Watched, starts: list[int], T: int) -> None:
        gathered = {call.layer: call for call in watched.taken("gather_attention")}
        layers = full_layers(self.model)
        for place, i in enumerate(layers):
            self.tally["calls"].see(int(i not in gathered), 1, f"layer {i}")
            if i not in gathered:
                continue
            q, _, _, lists, _, _, scale, *_ = gathered[i].given
            rows, out = cache.layers[i], gathered[i].out
            KV = rows.keys.shape[1]
            for b, P in enumerate(LENGTHS):
                kept = max(W, round(P * self.policy.retention)) if self.policy.tokens is None else self.policy.tokens
                budget = reading.layer_budgets(kept, W, P, len(layers), self.policy.beta)[place]
                for kv in range(KV):
                    at = f"layer {i}, row {b}, KV head {kv}"
                    heads = q[b].double().cpu().unflatten(1, (KV, -1))[:, kv]
                    keys, values = (t[b, kv, : starts[b] + T].double().cpu() for t in (rows.keys, rows.values))
                    for t in range(T):
                        p = starts[b] + t
                        listed = [s for s in lists[b, t, kv].tolist() if 0 <= s <= p]
                        self._list(listed, P, p, budget, (i, b, kv), rows.keys, scale, at)
                        mine = out[b, t].double().cpu().unflatten(0, (KV, -1))[kv]
                        wanted = reading.attend(heads[t], keys[listed], values[listed], scale)
                        self.tally["attention"].far(mine, wanted, at, self.limit)
            self._path(gathered[i], starts, T, i)

    def _list(self, listed: list[int], P: int, p: int, budget: int, key: tuple, keys, scale: float, at: str) -> None:
        read, tally = {s for s in listed if s < P}, self.tally
        first = self.first.setdefault(key, read)
        tally["fixed"].see(int(read != first), 1, at)
        tally["later"].see(int(not set(range(P, p + 1)) <= set(listed)), 1, at)
        tally["window"].see(int(not set(range(P - W, P)) <= read), 1, at)
        tally["budget"].see(int(len(read) != budget or len(listed) != len(set(listed))), 1, at)
        if read is first and budget < P:  # the choice itself, once
            self._choice({s for s in read if s < P - W}, P, budget - W, key, keys, scale, at)

    def _choice(self, picks: set[int], P: int, count: int, key: tuple, keys, scale: float, at: str) -> None:
        layer, b, kv = key
        KV, among = keys.shape[1], range(P - W)
        q = self.queries[layer][b].unflatten(1, (KV, -1)).permute(1, 2, 0, 3)  # [KV, G, W, D]
        mine = keys[b, :, :P].double().cpu()
        average, kernel = self.policy.pooling == "avg", self.policy.kernel
        score = lambda kv=kv, group=slice(None), kernel=kernel, causal=True: reading.observed(
            q[kv, group], mine[kv], P - W, scale, kernel, average, causal
        )
        right = score()
        left = [float(right[s]) for s in among if s not in picks]
        least = min((float(right[s]) for s in picks), default=math.inf)
        wrong = len(picks) == count and count > 0 and max(left, default=-math.inf) - least > 1e-5 * float(right.max())
        causes = ()
        if wrong:
            others = {"scores of another KV head": [score(o) for o in range(KV) if o != kv]}
            others |= {"first query head instead of the mean over the group": [score(group=slice(0, 1))]}
            others |= {"without pooling": [score(kernel=1)], "without causal order": [score(causal=False)]}
            others |= {"lowest scores": [-right]}
            causes = tuple(n for n, s in others.items() if any(reading.best(o, among, count) == picks for o in s))
        random = 1 - 1 / math.comb(len(among), count) if count else 0.0
        self.tally["choice"].see(int(wrong), int(count > 0), at, causes, random)

    def _path(self, call, starts: list[int], T: int, layer: int) -> None:
        """What the model says that the longest row read."""
        row = LENGTHS.index(max(LENGTHS))
        listed = [s for s in call.given[3][row, -1, 0].tolist() if 0 <= s < starts[row] + T]
        path = self.model.layer_paths()[layer]
        wanted = {"tokens": len(listed), "kept": sum(s < LENGTHS[row] for s in listed), "prompt": LENGTHS[row]}
        self.tally["counters"].see(int(any(path.get(k) != n for k, n in wanted.items())), 1, f"layer {layer}")

    def checks(self) -> Iterator[Check]:
        name, tally = self.policy.name, self.tally
        for key, said, part in (
            ("prefill", "layers that read a piece of a prompt by a list", "dense prefill"),
            ("calls", "layers that did not read by a list", "prompt's choice"),
            ("budget", "lists that keep another number of the prompt's tokens", "prompt's choice, budget"),
            ("window", "lists without a token of the window", "prompt's choice, window"),
            ("later", "lists without a token after the prompt", "prompt's choice, later tokens"),
            ("fixed", "lists that keep other tokens of the prompt than the first step's", "prompt's choice, fixed"),
        ):
            yield tally[key].counted(said, part, RULE, name)
        said, part = "lists of other tokens than the best", "prompt's choice, tokens"
        yield tally["choice"].counted(said, part, RULE, name, chance=tally["choice"].chance)
        said = "attention over the list is one softmax over just its tokens"
        yield tally["attention"].near(said, "gathered attention", self.subject, name)
        said, source = "layers that say they read something else", "the list that attention was given"
        yield tally["counters"].counted(said, "counters of what was read", source, name)
