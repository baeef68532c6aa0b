"""The host-memory tier as a captured graph on a CUDA device: the bits of the resident cache at sizes of a model."""

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("slots", [8, 20])
def test_a_captured_step_over_changing_choices(slots):
    from dsv4.cache.host_tier.grouped import HostRows
    from dsv4.kernels.block_choice import Policy
    from dsv4.kernels.block_summaries import summarise_blocks
    from dsv4.kernels.dispatch import DispatchLedger, bind
    from dsv4.kernels.operations import GQA_OPERATIONS
    from dsv4.runtime.timing import capture

    op, policy = bind(GQA_OPERATIONS, "triton", DispatchLedger()), Policy("bound", "bound", 128, 1, 2, 5)
    B, H, KV, S, D, scale, device = 2, 28, 4, 64 * 128, 128, 128**-0.5, torch.device("cuda")
    rows = HostRows(B, KV, S, D, torch.bfloat16, device, policy, slots)
    g = torch.Generator(device).manual_seed(0)
    new = lambda *shape: torch.randn(*shape, generator=g, device=device, dtype=torch.bfloat16)
    keys, values, start = new(B, KV, S, D), new(B, KV, S, D), torch.zeros(B, dtype=torch.int64, device=device)
    low, high = (torch.zeros(B, KV, S // 128, D, dtype=torch.bfloat16, device=device) for _ in range(2))
    for near in (rows.keys, rows.values):
        near.fill_(float("nan"))
    summarise_blocks(keys, start, 6000, low, high, None, 128, backend="triton")
    rows.low.copy_(low), rows.high.copy_(high)
    rows.store(keys, values, start, 6000)
    given = [new(B, H * D), new(B, KV * D), new(B, KV * D)]
    cis = torch.polar(torch.ones(B, D // 2, device=device), torch.rand(B, D // 2, generator=g, device=device))
    start.copy_(torch.tensor([6000, 3001]))
    kept = {}
    graph = capture(lambda: kept.update(out=rows.decode(op, *given, None, cis, rows.places(start), scale)[0]))
    rows.table.forget()
    for near in (rows.keys, rows.values):
        near.fill_(float("nan"))
    for step in range(300):
        for x in given:
            x.copy_(new(*x.shape))
        graph.replay()
        q = op.rotary_rows(*given, None, cis, keys, values, start)
        summarise_blocks(keys, start, 1, low, high, None, 128, backend="triton")
        blocks = op.choose_blocks(q, KV, low, high, None, start, policy)
        assert torch.equal(kept["out"], op.gather_attention(q, keys, values, blocks, start, None, scale, 128)), step
        start += 1
        if step % 50 == 49:
            start -= torch.tensor([130 + step, 7], device=device)
    for far, near in ((rows.host_keys, keys), (rows.host_values, values)):
        for b in range(B):
            assert torch.equal(far[b, :, : int(start[b])], near[b, :, : int(start[b])])
    assert rows.traffic().hits > 0 and rows.traffic().misses > 0


def test_dense_attention_streamed_in_a_graph():
    from dsv4.cache.host_tier.grouped import HostRows
    from dsv4.cache.host_tier.stream import DenseStream
    from dsv4.kernels.block_choice import block_bounds
    from dsv4.kernels.dispatch import DispatchLedger, bind
    from dsv4.kernels.operations import GQA_OPERATIONS
    from dsv4.runtime.timing import capture

    op, device = bind(GQA_OPERATIONS, "triton", DispatchLedger()), torch.device("cuda")
    layers = [HostRows(1, 4, 16384, 128, torch.bfloat16, device, block_bounds(4096)) for _ in range(5)]
    for layer in layers:
        layer.host_keys.normal_(), layer.host_values.normal_()
    q, start = torch.randn(1, 1, 28, 128, dtype=torch.bfloat16, device=device), torch.tensor([16000], device=device)
    stream = DenseStream(layers)
    kept = {}

    def run():
        kept["out"] = [op.grouped_attention(q, *stream.layer(i), start, None, 0.1) for i in range(5)]

    graph = capture(run)
    for _ in range(3):
        graph.replay()
    for layer, out in zip(layers, kept["out"]):
        assert torch.equal(
            out, op.grouped_attention(q, layer.host_keys.clone(), layer.host_values.clone(), start, None, 0.1)
        )


def test_a_guess_on_a_branch_of_the_graph():
    from dsv4.cache.host_tier.ahead import Ahead
    from dsv4.cache.host_tier.grouped import HostRows
    from dsv4.kernels.block_choice import Policy
    from dsv4.kernels.dispatch import DispatchLedger, bind
    from dsv4.kernels.operations import GQA_OPERATIONS
    from dsv4.runtime.timing import capture

    op, device, policy = (
        bind(GQA_OPERATIONS, "triton", DispatchLedger()),
        torch.device("cuda"),
        Policy("p", "bound", 128, 1, 2, 5),
    )
    rows, ahead = HostRows(1, 4, 8192, 128, torch.bfloat16, device, policy), Ahead(device)
    rows.host_keys.normal_(), rows.host_values.normal_()
    start, q = torch.tensor([8191], device=device), torch.randn(1, 1, 28, 128, dtype=torch.bfloat16, device=device)
    for near, far in ((rows.keys, rows.host_keys), (rows.values, rows.host_values)):
        near[:, :, -128:] = far[:, :, -128:]
    lists = torch.zeros(2, 1, 1, 4, 8, dtype=torch.int32, device=device)
    kept, weight = {}, torch.randn(2048, 2048, device=device)

    def run():
        ahead.start(lambda: rows.prefetch(op, None, start, lists[0]))
        kept["other"] = weight @ weight
        ahead.join()
        kept["out"] = rows.attend(op, q, rows.places(start)[0], 0.1, lists[1])[0]

    graph = capture(run)
    for step in range(20):
        g = torch.Generator().manual_seed(step)
        for i in range(2):
            some = torch.stack([torch.randperm(62, generator=g)[:6].sort().values for _ in range(4)])
            lists[i] = torch.cat((some, torch.tensor([[62, 63]] * 4)), 1).int().view(1, 1, 4, 8)
        graph.replay()
        want = op.gather_attention(q, rows.host_keys.clone(), rows.host_values.clone(), lists[1], start, None, 0.1, 128)
        assert torch.equal(kept["out"], want), step


@pytest.fixture(scope="module")
def gqa_folder(tmp_path_factory):
    from tests.gqa import oracle

    config = oracle.CONFIGS["qwen2, bias and tied head"]
    return oracle.save(oracle.randomised(config), config, tmp_path_factory.mktemp("tier") / "m", torch.bfloat16)


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "in line"])
@pytest.mark.parametrize("name", ["bound", "mean", "window", "terminating", "dense"])
def test_captured_steps_of_a_model(gqa_folder, name, ahead):
    """Two hundred replays over changing choices, with rewinds and an append between them: the logits of the resident
    cache's own graph, no wait for the device and no allocation."""
    from dsv4 import load_model
    from dsv4.cache.host_tier.choice import HostMemory
    from dsv4.kernels.block_choice import Policy
    from dsv4.kernels.grouped_attention import Termination
    from dsv4.model.gqa.choice import Attention
    from dsv4.runtime.graph import DecodeGraph

    ways = {
        "bound": Attention(Policy("bound", "bound", 16, 1, 2, 3)),
        "mean": Attention(Policy("mean", "mean", 16, 1, 1, 3)),
        "window": Attention(Policy("window", None, 16, 2, 4)),
        "dense": Attention(),
        "terminating": Attention(
            Policy("bound", "bound", 16, 1, 2, 6), Termination(tau=1e9, phi=2, patience=1, tile=64)
        ),
    }
    model = load_model(gqa_folder, numerics="native", device="cuda", attention=ways[name])
    ids, caches = torch.randint(0, 384, (2, 500), generator=torch.Generator().manual_seed(0)), []
    for choice in (None, HostMemory(ahead=ahead)):
        model.kv_memory = choice
        caches.append(model.new_cache(2, 512))
        model.append(ids[:, :200], caches[-1], n_new=[200, 133], logits="none", chunk=64)
    graphs = [[DecodeGraph(model, cache, tokens=n) for n in (1, 3)] for cache in caches]
    for step in range(200):
        which = int(step % 9 == 4)
        x = torch.randint(0, 384, (2, (1, 3)[which]), generator=torch.Generator().manual_seed(step)).cuda()
        want, got = (mine[which].step(x).clone() for mine in graphs)
        assert torch.equal(want, got), step
        if step % 40 == 39:
            for cache in caches:
                cache.rewind([90, 17])
                model.append(ids[:, :20], cache, logits="none", prompt=True)
    graphs[1][0].step()  # positions were set anew
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            graphs[1][0].step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    traffic = caches[1].traffic()
    assert name == "dense" or traffic.hits > 0 and traffic.misses > 0
    assert (caches[1].traffic(guessed=True).misses > 0) == (ahead and name != "dense")


@pytest.mark.parametrize("speculate", [None, "passes", "rounds"])
def test_text_of_a_model(gqa_folder, speculate):
    from dsv4 import load_model
    from dsv4.cache.host_tier.choice import HostMemory
    from dsv4.engine.generate import generate, generate_on_device, generate_speculative
    from dsv4.kernels.block_choice import Policy
    from dsv4.model.gqa.choice import Attention
    from dsv4.speculation.draft import LookupDrafter

    model = load_model(
        gqa_folder, numerics="native", device="cuda", attention=Attention(Policy("bound", "bound", 16, 1, 2, 3))
    )
    ids = torch.randint(0, 384, (60,), generator=torch.Generator().manual_seed(7)).tolist() * 4
    found = []
    for choice in (None, HostMemory()):
        model.kv_memory = choice
        drafted = generate_speculative if speculate == "passes" else generate_on_device
        found.append(drafted(model, [ids], 60, LookupDrafter())[0] if speculate else generate(model, ids, 60))
    assert found[0].token_ids == found[1].token_ids and found[1].host["misses"] > 0


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_entries_under_captured_steps(tmp_path, cache):
    """A prompt long enough that the entries are brought whole, then captured steps of one and three tokens."""
    from dsv4 import load_model
    from dsv4.cache.host_tier.choice import HostMemory
    from dsv4.runtime.graph import DecodeGraph
    from tests import checkpoints

    model = load_model(checkpoints.write_official(tmp_path / "official"), numerics="native", device="cuda", cache=cache)
    g, caches = torch.Generator().manual_seed(0), []
    ids = torch.randint(0, model.config.vocab_size, (2, 90), generator=g)
    for choice in (None, HostMemory(model.config.index_topk)):
        model.kv_memory = choice
        caches.append(model.new_cache(2, 200))
        model.append(ids, caches[-1], n_new=[90, 61], logits="none")
    graphs = [[DecodeGraph(model, cache, tokens=n) for n in (1, 3)] for cache in caches]
    for step in range(60):
        which = int(step % 7 == 3)
        x = torch.randint(0, model.config.vocab_size, (2, (1, 3)[which]), generator=g).cuda()
        want, got = (mine[which].step(x).clone() for mine in graphs)
        assert torch.equal(want, got), step
        if step % 20 == 19:
            for held in caches:
                held.rewind([21, 3])
    traffic = caches[1].traffic()
    assert traffic.hits > 0 and traffic.misses > 0
