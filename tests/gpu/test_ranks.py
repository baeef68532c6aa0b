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


def test_exchanges_have_the_bits_of_sums_in_order():
    runs = [
        start("-c", EXCHANGES, module=(), RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
              MASTER_ADDR="127.0.0.1", MASTER_PORT="29651")
        for r in range(2)
    ]  # fmt: skip
    for code, out, err in map(ended, runs):
        assert code == 0 and out == "RanksDisagree\n", err[-2000:]


@pytest.mark.parametrize("way", [(), ("--speculate", "mtp")], ids=["plain", "drafts"])
@pytest.mark.parametrize("cut", [(), ("--expert-parallel",)], ids=["by width", "by expert"])
def test_text_is_that_of_one_gpu(way, cut):
    asked = (*ASKED, "--numerics", "fp32", "--max-new-tokens", "64", "--json", *way)
    found = [ended(start(*asked, *ranks)) for ranks in ((), (*TWO, *cut))]
    assert [code for code, *_ in found] == [0, 0], found
    alone, shared = (json.loads(out)["token_ids"] for _, out, _ in found)
    assert alone == shared and len(alone) == 64


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
