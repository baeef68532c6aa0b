"""Two GPUs that hold one model together: what they exchange, their text, and the end of one of them."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.parallel.test_launch import ROOT, children, ended, start

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]
PROMPT = ",".join(map(str, range(3, 43)))
ASKED = ("generate", str(ROOT / "demo"), "--device", "cuda", "--token-ids", PROMPT)
TWO = ("--tensor-parallel-size", "2")
EXCHANGES = """
import torch
from dsv4.model.ranks import in_order
from dsv4.parallel.processes import join
from dsv4.parallel.symmetric import NAMED

ranks = join("cuda")
assert ranks.group.by == NAMED, ranks.group.by
part = lambda r, n, i: torch.randn(n, device="cuda", generator=torch.Generator("cuda").manual_seed(1000 * i + r))
sizes = (1, 4096, 5, 4096 * 64, 4096 * 64 + 8, 4096 * 300, 4096 * 2048)
for i in range(200):
    n, dtype = sizes[i % 7], (torch.bfloat16, torch.float32)[i % 2]
    parts = [part(r, n, i) for r in range(ranks.size)]
    found = ranks.sum(parts[ranks.rank], dtype)
    assert torch.equal(found, in_order(parts, dtype)), (i, n, dtype)
x, ids = part(ranks.rank, 4096, 7), torch.arange(8, device="cuda")
graph = torch.cuda.CUDAGraph()
ranks.same(ids, "token")
stream = torch.cuda.Stream()
with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
    ranks.same(ids, "token")
    out = ranks.sum(x, torch.float32)
wanted = in_order([part(r, 4096, 7) for r in range(ranks.size)], torch.float32)
for i in range(2000):
    graph.replay()
assert torch.equal(out, wanted)
ranks.check()
ids[3] += ranks.rank
graph.replay()
try:
    ranks.check()
except Exception as error:
    print(type(error).__name__, flush=True)
"""

# sums that the first mHC kernel takes, in turns with exchanges by themselves, at once and in a graph
DEFERRED = """
import torch
from dsv4.kernels.collectives.unsummed import Unsummed
from dsv4.kernels.experts.triton_combine import ExpertRows
from dsv4.kernels.hyper_connections.triton import mhc_post_pre_norm
from dsv4.parallel.processes import join

ranks, d, n, k, M = join("cuda"), 4096, 4, 6, 24
few, run, alone = ranks.group.few, ranks.group.few._run, []
few._run = lambda *args: alone.append(args) or run(*args)
def draw(seed, *shape):
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
def case(N):
    rows, indices = draw(100 * N + ranks.rank, N * k, d).bfloat16(), torch.arange(N * k, device="cuda").view(N, k)
    indices = indices.masked_fill((indices + ranks.rank) % 2 == 0, -1)
    rows[indices.flatten() < 0] = float("nan")
    parts = draw(101 * N + ranks.rank, N, d), ExpertRows(rows, indices, draw(102 * N + ranks.rank, N, d))
    streams, rest = draw(N, N, n, d).bfloat16(), (draw(1, M, n * d), draw(2, 3), draw(3, M), 20, 1e-6, 1e-6)
    return parts, (streams, draw(4, N, n), draw(5, N, n, n), *rest, draw(6, d).bfloat16(), 1e-6)
def wanted(part, rest):
    whole = part if isinstance(part, torch.Tensor) else part.combine(torch.float32)
    return mhc_post_pre_norm(ranks.sum(whole, torch.bfloat16), *rest)
def deferred(part, rest):
    return mhc_post_pre_norm(Unsummed(part, torch.bfloat16, few), *rest)
def equal(N, part, found, right):
    for got, want in zip(found, right, strict=True):
        assert torch.equal(got, want) and bool(got.isfinite().all()), (N, type(part))
cases = [(N, part, rest) for N in (1, 2, 3, 8, 16, 32) for parts, rest in [case(N)] for part in parts]
for N, part, rest in cases:
    right = wanted(part, rest)
    alone.clear()
    found = deferred(part, rest)
    assert N in (16, 32) or not alone, (N, "was exchanged by itself")
    equal(N, part, found, right)
def turns():
    return [made for N, part, rest in cases for made in (deferred(part, rest), (few.sum(part, torch.bfloat16),))]
stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
with torch.cuda.stream(stream):
    right = [[t.clone() for t in made] for made in turns()]
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        found = turns()
for i in range(500):
    graph.replay()
for made, want in zip(found, right, strict=True):
    equal("graph", made[0], made, want)
print("equal", flush=True)
"""

# draws and drafts that stay, of parts of the vocabulary, at once and in a graph, against one GPU that has all logits
DRAWS = """
import torch
from dsv4.model.cut_values import cut, stacked_along
from dsv4.parallel.processes import join
from dsv4.sampling import Sampling
from dsv4.speculation.choosing import choice_of

ranks, V, B = join("cuda"), 129280, 6
target = 3 * torch.randn(B, 3, V, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
target[0] = target[0].round()  # many equal logits
proposal = target.roll(1, 0)[:, :2].contiguous()
mine, at = ranks.slots(V), torch.arange(B, device="cuda")
part = lambda x: cut(x[..., mine.start : mine.stop].contiguous(), ranks, V)
def chosen(choice, target, proposal):
    drafts, q = zip(*(choice.draft(proposal[:, i], at + i) for i in range(2)))
    count, tokens = choice.accept(target, torch.stack(drafts, 1), stacked_along(list(q), 1), at * 0 + 2, at)
    stays = torch.arange(3, device="cuda") <= count.unsqueeze(1)
    return torch.cat((choice.own(target, at), torch.stack(drafts, 1), tokens.where(stays, -1)), 1)
for top_p in (1.0, 0.9):
    choice = choice_of(Sampling(0.8, top_p, 3), B, "cuda")
    wanted, own = chosen(choice, target, proposal), (part(target), part(proposal))
    assert torch.equal(chosen(choice, *own), wanted), top_p
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        found = chosen(choice, *own)
    for i in range(200):
        graph.replay()
    assert torch.equal(found, wanted), top_p
print("equal", flush=True)
"""
SCRIPTS = {"sums": (EXCHANGES, "RanksDisagree"), "deferred": (DEFERRED, "equal"), "draws": (DRAWS, "equal")}


@pytest.mark.parametrize("script, said", SCRIPTS.values(), ids=SCRIPTS)
def test_exchanges_have_the_bits_of_one_gpu(script, said):
    runs = [
        start("-c", script, module=(), RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
              MASTER_ADDR="127.0.0.1", MASTER_PORT="29651")
        for r in range(2)
    ]  # fmt: skip
    for code, out, err in map(ended, runs):
        assert code == 0 and out == f"{said}\n", err[-2000:]


SAMPLED = ("--temperature", "0.8", "--top-p", "0.9", "--seed", "3")


@pytest.mark.parametrize(
    "way",
    [(), ("--speculate", "mtp"), SAMPLED, ("--speculate", "mtp", *SAMPLED)],
    ids=["plain", "drafts", "sampled", "sampled drafts"],
)
@pytest.mark.parametrize("cut", [(), ("--expert-parallel",)], ids=["by width", "by expert"])
def test_text_is_that_of_one_gpu(way, cut):
    asked = (*ASKED, "--numerics", "fp32", "--max-new-tokens", "64", "--json", *way)
    found = [ended(start(*asked, *ranks)) for ranks in ((), (*TWO, *cut))]
    assert [code for code, *_ in found] == [0, 0], found
    alone, shared = (json.loads(out)["token_ids"] for _, out, _ in found)
    assert alone == shared and len(alone) == 64


@pytest.mark.parametrize("way", [(), ("--speculate", "mtp")], ids=["plain", "drafts"])
def test_ranks_of_two_hosts_exchange_by_nccl(way):
    """Two hosts as the ranks know them: each has one GPU, and the other is not of its host."""
    asked = (*ASKED, "--numerics", "fp32", "--max-new-tokens", "64", "--json", *way)
    apart = dict(WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29652")
    runs = [start(*asked), *(start(*asked, RANK=str(r), CUDA_VISIBLE_DEVICES=str(r), **apart) for r in range(2))]
    (code, alone, _), *ranks = map(ended, runs)
    assert code == 0 and [code for code, *_ in ranks] == [0, 0], ranks
    shared = json.loads(ranks[0][1])
    assert shared["token_ids"] == json.loads(alone)["token_ids"] and len(shared["token_ids"]) == 64
    assert "NCCL" in shared["ranks"] and "several hosts" in shared["ranks"]


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_that_ends_or_stands_still_ends_all(ending):
    parent = start(*ASKED, "--max-new-tokens", "100000", "--max-context", "128K", *TWO)
    try:
        time.sleep(40)
        found = children(parent.pid)
        os.kill(found[1], ending)
        begun = time.monotonic()
        code, _, err = ended(parent)
    finally:
        parent.kill()
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2 and line.startswith("error: rank 1 of 2 ") and time.monotonic() - begun < 30, err
    assert not any(Path(f"/proc/{pid}").exists() for pid in found)
