"""The host-memory tier as a captured graph on a CUDA device: the bits of the resident cache at sizes of a model."""

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("slots", [8, 20])
def test_a_captured_step_over_changing_choices(slots):
    from dsv4.host_tier import HOST_OPERATIONS
    from dsv4.host_tier.grouped import HostRows
    from dsv4.timing import capture
    from kernels.block_choice import Policy
    from kernels.block_summaries import summarise_blocks
    from kernels.dispatch import DispatchLedger, bind
    op, policy = bind(HOST_OPERATIONS, "triton", DispatchLedger()), Policy("bound", "bound", 128, 1, 2, 5)
    B, H, KV, S, D, scale, device = 2, 28, 4, 64 * 128, 128, 128 ** -0.5, torch.device("cuda")
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
    graph = capture(lambda: kept.update(out=rows.decode(op, *given, None, cis, start, scale)))
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
            assert torch.equal(far[b, :, :int(start[b])], near[b, :, :int(start[b])])
    assert rows.traffic().hits > 0 and rows.traffic().misses > 0


def test_dense_attention_streamed_in_a_graph():
    from dsv4.host_tier import HOST_OPERATIONS
    from dsv4.host_tier.grouped import HostRows
    from dsv4.host_tier.stream import DenseStream
    from dsv4.timing import capture
    from kernels.block_choice import block_bounds
    from kernels.dispatch import DispatchLedger, bind
    op, device = bind(HOST_OPERATIONS, "triton", DispatchLedger()), torch.device("cuda")
    layers = [HostRows(1, 4, 16384, 128, torch.bfloat16, device, block_bounds(4096)) for _ in range(5)]
    for layer in layers:
        layer.host_keys.normal_(), layer.host_values.normal_()
    q, start = torch.randn(1, 1, 28, 128, dtype=torch.bfloat16, device=device), torch.tensor([16000], device=device)
    stream = DenseStream(layers)
    kept = {}

    def run():
        stream.begin()
        kept["out"] = [op.grouped_attention(q, *stream.layer(i), start, None, 0.1) for i in range(5)]
    graph = capture(run)
    for _ in range(3):
        graph.replay()
    for layer, out in zip(layers, kept["out"]):
        assert torch.equal(out, op.grouped_attention(q, layer.host_keys.clone(), layer.host_values.clone(), start, None, 0.1))


def test_a_guess_on_a_branch_of_the_graph():
    from dsv4.host_tier import HOST_OPERATIONS
    from dsv4.host_tier.ahead import Ahead
    from dsv4.host_tier.grouped import HostRows
    from dsv4.timing import capture
    from kernels.block_choice import Policy
    from kernels.dispatch import DispatchLedger, bind
    op, device, policy = bind(HOST_OPERATIONS, "triton", DispatchLedger()), torch.device("cuda"), Policy("p", "bound", 128, 1, 2, 5)
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
        kept["out"] = rows.attend(op, q, start, 0.1, lists[1])
    graph = capture(run)
    for step in range(20):
        g = torch.Generator().manual_seed(step)
        for i in range(2):
            some = torch.stack([torch.randperm(62, generator=g)[:6].sort().values for _ in range(4)])
            lists[i] = torch.cat((some, torch.tensor([[62, 63]] * 4)), 1).int().view(1, 1, 4, 8)
        graph.replay()
        want = op.gather_attention(q, rows.host_keys.clone(), rows.host_values.clone(), lists[1], start, None, 0.1, 128)
        assert torch.equal(kept["out"], want), step
