"""Chunked sparse prefill, reference and Triton, against a dense softmax in fp64 under an explicit mask."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from dsv4.kernels.chunked_prefill import Chunking, Memory, chunked_prefill
from dsv4.kernels.chunked_prefill import triton as kernels
from dsv4.kernels.chunked_prefill.reference import Partial, attend, column_sums, fuse, select
from dsv4.kernels.errors import UnsupportedInput
from tests.kernels.products import CUDA, DEVICE, distance, graphed, needs_gpu, poison, randn  # noqa: F401

BACKENDS = ["reference", "triton", "triton, memory in a loop"]
SMALL = Chunking(32, 8, 12)
RULES = [dict(score=score, heads=heads) for score in ("fused", "memory") for heads in ("kv", "query")]
CASES = {  # tokens, lengths, query heads, KV heads, columns, chunking
    "four chunks and a partial one": (150, [150], 4, 2, 16, SMALL),
    "whole chunks": (128, [128], 4, 2, 16, SMALL),
    "a last chunk of one token": (97, [97, 65], 4, 2, 16, SMALL),
    "ragged: partial, whole, one chunk, one token, none": (100, [100, 64, 32, 1, 0], 2, 1, 32, SMALL),
    "no heavy tokens": (96, [96, 70], 2, 2, 16, Chunking(32, 8, 0)),
    "heavy tokens alone, as many as there may be": (130, [130], 3, 1, 16, Chunking(32, 0, 31)),
    "chunk of no power of two": (150, [150, 101], 4, 4, 16, Chunking(48, 16, 20)),
    "groups of seven, a memory of no multiple of 16": (150, [150, 64, 96], 7, 1, 16, Chunking(32, 3, 10)),
}


def inputs(case, seed=0, spread=1.0, dtype=torch.float32):
    """q, keys, values, lengths; what no token has written is NaN, in q as well."""
    T, lengths, H, KV, D, _ = case
    B = len(lengths)
    q, k, v = (
        randn(B, *shape, seed=seed + i).to(dtype) for i, shape in enumerate(((T, H, D), (KV, T + 7, D), (KV, T + 7, D)))
    )
    for b, n in enumerate(lengths):
        q[b, n:], k[b, :, n:], v[b, :, n:] = float("nan"), float("nan"), float("nan")
    return q * spread, k, v, torch.tensor(lengths, device=DEVICE)


def definition(q, k, v, n: int, c: Chunking, scale: float, sets=None):
    """One row in fp64, by one softmax under a mask: of both phases, and with score=memory another one of phase 2 alone.

    Returns (out [n, H, D], memory sets {chunk: [KV lists]}, scores of all that could be chosen {chunk: [KV dicts]}).
    sets: memory sets to follow, instead of those that the scores say; those returned are what the scores say after
    them.
    """
    q, k, v = q[:n].double(), k[:, :n].double(), v[:, :n].double()
    if c.heads == "query":  # a model in which each query head has a KV head of its own
        k, v = (x.repeat_interleave(q.shape[1] // len(x), 0) for x in (k, v))
    KV, G = k.shape[0], q.shape[1] // k.shape[0]
    logits = torch.einsum("tkgd,ksd->kgts", q.unflatten(1, (KV, G)), k) * scale
    t = torch.arange(n, device=q.device)
    own = (t[:, None] // c.chunk == t // c.chunk) & (t <= t[:, None])
    within = logits.masked_fill(~own, float("-inf")).softmax(-1).sum((1, 2)).tolist()  # what phase 1 gives each key
    seen, chosen, held = own.repeat(KV, 1, 1), {}, {}
    for head in range(KV):
        score, kept = {}, []
        for first in range(0, n, c.chunk):
            last = min(first + c.chunk, n)
            if first:
                chosen.setdefault(first // c.chunk, []).append(kept)
                held.setdefault(first // c.chunk, []).append(score)
                kept = sets[first // c.chunk][head] if sets else kept
                seen[head, first:last, kept] = True
                shared = seen[head, first:last].clone()
                if c.score == "memory":
                    shared[:, first:last] = False
                given = logits[head, :, first:last].masked_fill(~shared, float("-inf")).softmax(-1).sum((0, 1))
                score = {j: score[j] + given[j].item() for j in kept}
            score |= {j: within[head][j] for j in range(first, last)}
            older = sorted((j for j in score if j < last - c.local), key=lambda j: (-score[j], j))
            kept = sorted(older[: c.heavy]) + list(range(last - c.local, last))
    weights = logits.masked_fill(~seen.unsqueeze(1), float("-inf")).softmax(-1)
    return torch.einsum("kgts,ksd->tkgd", weights, v).flatten(1, 2), chosen, held


def chosen_but_for_ties(got: list, best: list, score: dict, c: Chunking, tie: float) -> bool:
    """Whether `got` is the memory set `best`, but for heavy tokens whose scores lie within `tie` of those they stand
    for.

    With logits of ±100 a query gives nearly 1 to one key, so that scores of several keys are 1 to within what fp32
    tells apart.
    """
    swapped = [score[j] for j in set(got) ^ set(best)]
    return (
        got == sorted(set(got))
        and len(got) == len(best)
        and got[len(got) - c.local :] == best[len(best) - c.local :]
        and (not swapped or max(swapped) - min(swapped) <= tie)
    )


@pytest.fixture(params=BACKENDS)
def run(request, monkeypatch):
    """Function: prefill of a case's inputs."""
    backend, _, loop = request.param.partition(", ")
    if loop:
        in_a_loop(monkeypatch)

    def call(q, k, v, lengths, c, start=0, memory=None, scale=None):
        return chunked_prefill(q, k, v, start, lengths, c, scale or q.shape[-1] ** -0.5, memory, backend=backend)

    return call


def in_a_loop(monkeypatch):
    """Memories are attended to 16 tokens at a time."""
    usual = kernels.tiles
    monkeypatch.setattr(kernels, "tiles", lambda *about: usual(*about)._replace(memory=kernels.Tile(16, 16, 4, 1)))


@pytest.mark.parametrize("spread", [1.0, 30.0], ids=["logits of a few", "logits of ±100"])
@pytest.mark.parametrize(
    "name,rule",
    [(name, rule) for n, name in enumerate(CASES) for rule in (RULES if n in (0, 3, 6) else [RULES[0], RULES[n % 4]])],
    ids=lambda v: v if isinstance(v, str) else "-".join(v.values()),
)
def test_it_is_one_softmax_over_the_own_chunk_and_the_memory(run, name, rule, spread):
    *case, c = CASES[name]
    case = (*case, replace(c, **rule))
    q, k, v, lengths = inputs(case, spread=spread)
    out, kept = run(q, k, v, lengths, case[-1])
    assert not out.isnan().any()
    for b, n in enumerate(case[1]):
        assert not out[b, n:].any()
        if n:
            sets = {i: kept.positions[i, b].tolist() for i in range(1, case[-1].chunks(n))}
            wanted, chosen, held = definition(q[b], k[b], v[b], n, case[-1], q.shape[-1] ** -0.5, sets)
            assert chosen.keys() == sets.keys()
            for i in sets:
                for got, best, score in zip(sets[i], chosen[i], held[i], strict=True):
                    assert chosen_but_for_ties(got, best, score, case[-1], 0 if spread == 1 else 1e-5)
                expected = torch.tensor([[score[j] for j in got] for got, score in zip(sets[i], held[i])]).double()
                assert torch.allclose(kept.scores[i, b].double().cpu(), expected, rtol=2e-4)
            assert distance(out[b, :n], wanted) < (2e-6 if spread == 1 else 5e-5)
        assert kept.updates[b].tolist() == [max(0, case[-1].chunks(n) - 1)] * case[-1].sets(*case[2:4])
        assert (
            kept.positions[max(1, case[-1].chunks(n)) :, b] == -1
        ).all()  # nothing is kept behind a row's last chunk


def test_one_chunk_is_plain_attention(run):
    q, k, v, lengths = inputs((32, [32, 20], 4, 2, 16, SMALL))
    out, kept = run(q, k, v, lengths, SMALL)
    for b, n in enumerate((32, 20)):
        row = slice(b, b + 1)
        plain = F.scaled_dot_product_attention(
            q[row, :n].transpose(1, 2), k[row, :, :n], v[row, :, :n], is_causal=True, enable_gqa=True
        )
        assert distance(out[b, :n], plain[0].transpose(0, 1)) < 2e-6
    assert not kept.updates.any() and (kept.positions == -1).all()


@pytest.mark.few(run=["triton, memory in a loop"])
def test_later_tokens_change_nothing_before_them(run):
    case = CASES["four chunks and a partial one"]
    q, k, v, lengths = inputs(case)
    out, _ = run(q, k, v, lengths, SMALL)
    for t in (149, 128, 33):
        changed = [x.clone() for x in (q, k, v)]
        changed[0][:, t], changed[1][:, :, t], changed[2][:, :, t] = 9.0, -5.0, 7.0
        other, _ = run(*changed, lengths, SMALL)
        assert torch.equal(out[:, :t], other[:, :t]) and not torch.equal(out[:, t], other[:, t])


@pytest.mark.few(run=["triton"])
def test_scores_never_fall_and_memory_is_local_and_heavy_without_overlap(run):
    c = Chunking(32, 8, 12)
    q, k, v, lengths = inputs((32 * 12 + 5, [32 * 12 + 5], 4, 2, 16, c), seed=3)
    out, kept = run(q, k, v, lengths, c)
    for head in range(2):
        before = {}
        for i in range(1, 13):
            positions, scores = kept.positions[i, 0, head].tolist(), kept.scores[i, 0, head].tolist()
            assert (
                len(set(positions)) == 20
                and positions == sorted(positions)
                and positions[-8:] == list(range(32 * i - 8, 32 * i))
            )
            for j, score in zip(positions, scores):
                assert score >= before.get(j, kept.mass[0, head, j].item()) and (j in before or j >= 32 * (i - 1))
                if j in before:
                    assert score > before[j]  # every query of the chunk gave it something
            before = dict(zip(positions, scores))


@pytest.mark.few(run=["triton, memory in a loop"])
def test_a_query_hands_out_one_in_phase_one_and_its_share_in_phase_two(run):
    case = CASES["whole chunks"]
    q, k, v, lengths = inputs(case, seed=5)
    _, kept = run(q, k, v, lengths, SMALL)
    given = kept.mass[0].view(2, 4, 32).sum(-1)
    # queries × heads of the group
    assert torch.allclose(given[:, :3], torch.tensor(32.0 * 2, device=DEVICE)) and not given[:, 3].any()
    same = torch.zeros_like(q)  # every key of a query alike: the memory gets 20 of 20 + t + 1 shares
    _, kept = run(same, k, v, lengths, Chunking(32, 8, 12))
    grown = (kept.scores[2, 0, 0] - kept.mass[0, 0][kept.positions[2, 0, 0].long()])[kept.positions[2, 0, 0] < 32]
    assert torch.allclose(grown, torch.full_like(grown, 2 * sum(1 / (20 + t + 1) for t in range(32))), rtol=1e-4)


@pytest.mark.few(run=["reference", "triton"])
@pytest.mark.parametrize("heads", ["kv", "query"])
def test_with_scores_of_the_memory_alone_a_query_hands_out_one_in_each_phase(run, heads):
    c = replace(SMALL, score="memory", heads=heads)
    q, k, v, lengths = inputs((96, [96], 4, 2, 16, c), seed=5)
    out, kept = run(q, k, v, lengths, c)
    each = 4 // c.sets(4, 2)  # query heads of a set
    every = Chunking(32, 0, 31, c.score, heads)  # so large that it keeps nearly all that phase 2 gave
    _, most = run(q, k, v, lengths, every)
    before, after = (dict(zip(*(t[i, 0, 0].tolist() for t in most[:2]))) for i in (1, 2))
    grown = [after[p] - before[p] for p in before if p in after]
    assert len(grown) > 8 and 0 < sum(grown) <= 32 * each + 1e-3
    same, _ = run(q, k, v, lengths, replace(SMALL, heads=heads))
    assert torch.equal(out[:, :32], same[:, :32])  # phase 1 knows no rule
    memory = torch.zeros_like(q)  # every key of a query alike: 20 tokens of the memory share its 1
    _, kept = run(memory, k, v, lengths, c)
    old = kept.positions[2, 0, 0] < 32
    grown = (kept.scores[2, 0, 0] - kept.mass[0, 0][kept.positions[2, 0, 0].long()])[old]
    assert torch.allclose(grown, torch.full_like(grown, each * 32 / 20), rtol=1e-4)


@pytest.mark.few(run=["triton"])
def test_each_query_head_keeps_what_its_own_queries_ask_for(run):
    """Heads of one group look at two different tokens of chunk 0; a memory of the group's alone must hold both."""
    q, k, v, lengths = inputs((32 * 6, [32 * 6], 4, 2, 16, SMALL), seed=1)
    one, other = torch.eye(16, device=DEVICE)[:2]
    k[..., :2] = 0.0
    q[:, :, 0::2] += 40 * one
    q[:, :, 1::2] += 40 * other
    k[:, :, 5] += 3 * one
    k[:, :, 9] += 3 * other
    _, kept = run(q, k, v, lengths, replace(SMALL, heavy=1, local=8, heads="query"))
    assert kept.positions[-2, 0, :, 0].tolist() == [5, 9, 5, 9]
    _, kept = run(q, k, v, lengths, replace(SMALL, heavy=2, local=8))
    assert kept.positions[-2, 0, :, :2].tolist() == [[5, 9], [5, 9]]


@pytest.mark.few(run=["triton"])
def test_a_token_of_the_first_chunk_can_survive_to_the_end_and_be_found(run):
    q, k, v, lengths = inputs((32 * 10, [32 * 10], 4, 2, 16, SMALL), seed=1)
    direction = randn(16, seed=8)
    direction /= direction.norm()
    k -= (k @ direction).unsqueeze(-1) * direction  # nobody else is asked for
    q += 40 * direction
    k[:, 1, 5], v[:, 1, 5] = 3 * direction, 100.0
    out, kept = run(q, k, v, lengths, SMALL)
    assert (
        all(5 in kept.positions[i, 0, 1].tolist() for i in range(1, 10)) and 5 not in kept.positions[9, 0, 0].tolist()
    )
    assert torch.allclose(out[0, -1, 2:], torch.tensor(100.0, device=DEVICE), rtol=1e-3)


@pytest.mark.few(run=["triton"])
def test_a_local_token_with_the_most_mass_is_kept_once(run):
    """Two tokens from each chunk's end, where few queries have seen it, it has more than most; the other tests' local
    tokens never have."""
    q, k, v, lengths = inputs((32 * 4, [32 * 4], 4, 2, 16, SMALL), seed=1)
    direction = randn(16, seed=8)
    direction /= direction.norm()
    k -= (k @ direction).unsqueeze(-1) * direction
    q += 40 * direction
    k[:, :, 30::32] = 3 * direction
    _, kept = run(q, k, v, lengths, SMALL)
    # heavy enough for a place
    assert (kept.mass[0, :, 30] > kept.mass[0, :, :24].sort(-1, descending=True).values[:, 11]).all()
    for i in (1, 2, 3):
        for positions in kept.positions[i, 0].tolist():
            assert (
                len(set(positions)) == 20
                and positions == sorted(positions)
                and positions[-8:] == list(range(32 * i - 8, 32 * i))
            )
            assert positions.count(32 * i - 2) == 1 and set(range(30, 32 * i, 32)) <= set(positions)


@pytest.mark.few(run=["reference", "triton"])
def test_of_equal_scores_the_earliest_are_kept(run):
    q, k, v, lengths = inputs((96, [96], 2, 1, 16, SMALL))
    q[:], k[:] = 1.0, 0.0
    k[:, :, [0, 32]] = 60.0  # all others get nothing, to the bit
    _, kept = run(q, k, v, lengths, Chunking(32, 4, 5), scale=1.0)
    assert kept.positions[1:, 0, 0].tolist()[:2] == [[0, 1, 2, 3, 4, 28, 29, 30, 31], [0, 1, 2, 3, 32, 60, 61, 62, 63]]
    assert (kept.scores[2, 0, 0] == 0).sum() == 7


@pytest.mark.few(run=["triton, memory in a loop"])
def test_calls_may_follow_each_other(run):
    case = CASES["four chunks and a partial one"]
    q, k, v, _ = inputs((150, [150, 150], *case[2:]))
    lengths = torch.tensor([150, 70], device=DEVICE)
    whole, kept = run(q, k, v, lengths, SMALL)
    memory, parts, sets = None, [], []
    for first, last in ((0, 32), (32, 96), (96, 150)):
        out, memory = run(q[:, first:last], k, v, lengths, SMALL, first, memory)
        parts.append(out)
        sets.append(memory.positions[:-1])
    assert torch.equal(torch.cat(parts, 1), whole) and torch.equal(torch.cat(sets), kept.positions[:-1])
    assert torch.equal(memory.updates, kept.updates) and kept.updates.tolist() == [[4, 4], [2, 2]]


@pytest.mark.few(run=["triton"])
def test_queries_may_be_a_view(run):
    q, k, v, lengths = inputs(CASES["whole chunks"])
    wide = torch.cat((q, q + 1), -2)
    assert torch.equal(run(wide[:, :, :4], k, v, lengths, SMALL)[0], run(q, k, v, lengths, SMALL)[0])


@pytest.mark.few(run=["reference", "triton, memory in a loop"])
def test_bf16_is_close_to_the_definition(run):
    case = CASES["four chunks and a partial one"]
    q, k, v, lengths = inputs(case, dtype=torch.bfloat16)
    out, kept = run(q, k, v, lengths, SMALL)
    sets = {i: kept.positions[i, 0].tolist() for i in range(1, 5)}
    assert out.dtype is torch.bfloat16
    assert distance(out[0], definition(q[0], k[0], v[0], 150, SMALL, 0.25, sets)[0]) < 6e-3


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(start=16), "multiple of the chunk"),
        (dict(start=32), "without a memory"),
        (dict(scale=-1.0), "positive number"),
        (dict(lengths=torch.tensor([150], dtype=torch.int32)), "int64"),
        (dict(k=torch.zeros(1, 2, 100, 16)), "a cache of 100"),
        (dict(k=torch.zeros(1, 3, 160, 16)), "KV dividing H"),
        (dict(k=torch.zeros(1, 2, 160, 16).bfloat16()), "one type"),
        (dict(dtype=torch.float16), "float16"),
        (dict(memory=True), "with a memory"),
    ],
    ids=lambda v: v if isinstance(v, str) else next(iter(v)),
)
def test_what_is_refused(change, message):
    q, k, v, lengths = inputs(CASES["four chunks and a partial one"])
    if "dtype" in change:
        q, k, v = (x.half() for x in (q, k, v))
    q = q[:, :100] if "start" in change else q
    k, v = (change["k"].to(DEVICE),) * 2 if "k" in change else (k, v)
    memory = Memory(*(torch.zeros(2, 1, 2, 20, device=DEVICE),) * 4) if "memory" in change else None
    with pytest.raises(UnsupportedInput, match=message):
        chunked_prefill(
            q,
            k,
            v,
            change.get("start", 0),
            change.get("lengths", lengths).to(DEVICE),
            SMALL,
            change.get("scale", 0.25),
            memory,
            backend="triton",
        )


@pytest.mark.parametrize("rule", [dict(score="both"), dict(heads="all")], ids=str)
def test_rules_have_names(rule):
    with pytest.raises(UnsupportedInput, match="is unknown; expected (fused or memory|kv or query)"):
        Chunking(32, 8, 12, **rule)


@pytest.mark.parametrize("sizes", [(32, 16, 16), (32, 40, 2), (32, -1, 4), (32, 0, 0)], ids=str)
def test_memory_is_smaller_than_a_chunk(sizes):
    with pytest.raises(UnsupportedInput, match="less than the chunk"):
        Chunking(*sizes)


def test_a_row_that_goes_on_inside_a_chunk_is_refused():
    q, k, v, lengths = inputs(CASES["whole chunks"])
    with pytest.raises(UnsupportedInput, match="inside a chunk"):
        chunked_prefill(q[:, :40], k, v, 0, lengths, SMALL, 0.25)


@pytest.mark.parametrize(
    "size,apart", [(1.0, 0.0), (100.0, 0.0), (5.0, 190.0)], ids=["small logits", "logits of ±100", "−100 beside 100"]
)
def test_fusion_is_one_softmax_over_the_union_in_either_order(size, apart):
    s, v = (torch.rand(3, 7, 50, generator=torch.Generator().manual_seed(1)) * 2 - 1) * size, torch.randn(3, 50, 16)
    s += apart * (torch.arange(50) < 20) - apart / 2
    q, k = s, torch.eye(50).expand(3, 50, 50)
    parts = [attend(q[..., keys], k[:, keys, keys], v[:, keys], 1.0)[1] for keys in (slice(0, 20), slice(20, 50))]
    wanted = s.double().softmax(-1) @ v.double()
    for a, b in (parts, parts[::-1]):
        got = fuse(a, b)
        assert distance(got.o / got.l.unsqueeze(-1), wanted) < 2e-6
    nothing = Partial(torch.full((3, 7), float("-inf")), torch.zeros(3, 7), torch.zeros(3, 7, 16))
    assert all(torch.equal(x, y) for x, y in zip(fuse(parts[0], nothing), parts[0]))
    assert torch.allclose(column_sums(s[None], fuse(*parts))[0].sum(), torch.tensor(21.0))


def test_selection_breaks_ties_by_position():
    positions, scores = torch.arange(10, 16).expand(2, -1), torch.tensor([[1.0, 2, 2, 0, 2, 1], [0, 0, 0, 0, 0, 0]])
    assert select(positions, scores, 4)[0].tolist() == [[10, 11, 12, 14], [10, 11, 12, 13]]


def best_by_its_own_scores(kept: Memory, i: int, b: int, head: int, c: Chunking) -> bool:
    """Whether memory i holds the local tokens, and no token that was left out has more than the heavy ones that were
    kept."""
    now, before = (set(kept.positions[n, b, head].tolist()) - {-1} for n in (i, i - 1))
    new = torch.arange((i - 1) * c.chunk, i * c.chunk - c.local, device=DEVICE)
    dropped = [kept.mass[b, head, t] for t in new.tolist() if t not in now]
    dropped += [
        score
        for t, score in zip(kept.positions[i - 1, b, head].tolist(), kept.scores[i - 1, b, head])
        if before and t not in now
    ]
    heavy, local = kept.scores[i, b, head, : c.heavy], range(i * c.chunk - c.local, i * c.chunk)
    return len(now) == c.memory and now >= set(local) and (not c.heavy or max(dropped) <= heavy.min())


@pytest.mark.few(run=["triton", "triton, memory in a loop"])
@pytest.mark.parametrize("name", CASES)
def test_nothing_that_was_left_out_had_more(run, name):
    case = CASES[name]
    _, kept = run(*inputs(case, seed=4), case[-1])
    for b, n in enumerate(case[1]):
        assert all(
            best_by_its_own_scores(kept, i, b, head, case[-1])
            for i in range(1, case[-1].chunks(n))
            for head in range(case[3])
        )


@pytest.mark.few(memory=[257])  # over 5 s: a chunk is larger than a memory that is read in a loop
@pytest.mark.parametrize("memory", [244, 256, 257])
def test_memories_about_as_large_as_are_attended_to_at_once(memory):
    c = Chunking(288, 60, memory - 60)
    q, k, v, lengths = inputs((600, [600, 300], 2, 1, 16, c))
    (out, kept), (again, theirs) = (chunked_prefill(q, k, v, 0, lengths, c, 0.25, backend="triton") for _ in range(2))
    for b, n in enumerate((600, 300)):
        wanted, chosen, _ = definition(q[b], k[b], v[b], n, c, 0.25)
        assert {i: kept.positions[i, b].tolist() for i in chosen} == chosen and distance(out[b, :n], wanted) < 2e-6
    assert torch.equal(out, again) and all(torch.equal(*pair) for pair in zip(kept, theirs))


def test_where_a_memory_is_attended_to_at_once(monkeypatch):
    def columns(memory, D=128, capability=(9, 0), fp32=False):
        return kernels.tiles(fp32, D, Chunking(512, 64, memory - 64), capability).memory.columns

    if kernels.interpreting():
        assert columns(256, 16, (0, 0), True) == 256 and columns(257, 16, (0, 0), True) < 257
    monkeypatch.setattr(kernels, "interpreting", lambda: False)
    assert [columns(m) for m in (100, 129, 256, 257)] == [128, 256, 256, 64] and columns(256, 64, (10, 0)) == 256
    assert max(columns(256, capability=other) for other in ((8, 0), (8, 6), (8, 9), (12, 0))) == 64
    assert columns(256, 256) == 64 and columns(256, fp32=True) == 32  # keys and values, or logits, would not fit


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "H,KV,D,T,c",
    [
        (32, 8, 128, 4096, Chunking(512, 64, 192)),
        (28, 4, 128, 4000, Chunking(512, 64, 180)),
        (14, 2, 64, 4196, Chunking(512, 0, 100)),
        (32, 8, 128, 8192, Chunking(2048, 256, 768)),
        (28, 4, 128, 6500, Chunking(1024, 128, 383)),
        (14, 2, 64, 8292, Chunking(4096, 512, 1536)),
        (32, 8, 128, 4096, Chunking(1536, 100, 412)),
        (32, 8, 128, 4096, Chunking(1024, 256, 256, "memory", "query")),
        (28, 4, 128, 4000, Chunking(512, 64, 180, "memory", "query")),
        (14, 2, 64, 4196, Chunking(512, 64, 180, "memory")),
        (32, 8, 128, 6500, Chunking(1024, 256, 256, heads="query")),
    ],
    ids=str,
)
def test_production_shapes(H, KV, D, T, c):
    lengths, R = torch.tensor([T, T - 700], device="cuda"), c.sets(H, KV)
    q, k, v = (
        torch.randn(2, *s, device="cuda", dtype=torch.bfloat16) for s in ((T, H, D), (KV, T + 60, D), (KV, T + 60, D))
    )
    for b, n in enumerate(lengths.tolist()):
        k[b, :, n:], v[b, :, n:] = float("nan"), float("nan")
    call = lambda: chunked_prefill(q, k, v, 0, lengths, c, D**-0.5, backend="triton")
    out, kept = graphed(call)
    assert out.isfinite().all()
    for b, n in enumerate(lengths.tolist()):
        for one in range(R):  # each softmax by itself: the mask of all heads would not fit
            query, head = slice(one * (H // R), one * (H // R) + 1), one * KV // R
            sets = {i: kept.positions[i, b, one : one + 1].tolist() for i in range(1, c.chunks(n))}
            wanted = definition(q[b, :, query], k[b, head : head + 1], v[b, head : head + 1], n, c, D**-0.5, sets)[0]
            assert distance(out[b, :n, query], wanted) < 5e-3
    wanted, theirs = chunked_prefill(q[:1], k[:1], v[:1], 0, lengths[:1], c, D**-0.5)
    assert torch.allclose(kept.mass[0], theirs.mass[0], rtol=1e-3)
    assert torch.allclose(*(memory.scores[1, 0].sort(-1).values for memory in (kept, theirs)), rtol=1e-3)
    assert torch.equal(kept.updates, torch.tensor([[c.chunks(T) - 1] * R, [c.chunks(T - 700) - 1] * R], device="cuda"))
    for i in range(1, c.chunks(T)):
        for one in range(R):
            assert best_by_its_own_scores(kept, i, 0, one, c)
    again = [call() for _ in range(20)]
    assert all(
        torch.equal(out, o) and torch.equal(kept.positions, m.positions) and torch.equal(kept.scores, m.scores)
        for o, m in again
    )
