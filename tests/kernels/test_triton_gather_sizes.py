"""Grouped attention, block choice and gather attention on a GPU: Qwen2.5's and Llama's heads up to 1M tokens, under
CUDA graphs, repeated, terminated."""

import pytest
import torch
import torch.nn.functional as F

from dsv4.kernels.block_choice import (
    Policy,
    block_bounds,
    block_means,
    block_scores,
    choose_blocks,
    page_bounds,
    sink_window,
)
from dsv4.kernels.block_choice.reference import distant_blocks
from dsv4.kernels.block_summaries import summarise_blocks
from dsv4.kernels.gather_attention import gather_attention
from dsv4.kernels.grouped_attention import Termination, grouped_attention
from tests.kernels.gqa_inputs import NAN, close, concentrated
from tests.kernels.test_triton_attention import poison  # noqa: F401 (a fixture)

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16, F32 = torch.bfloat16, torch.float32
HEADS = [(28, 4, 128), (32, 8, 128), (8, 8, 64), (8, 2, 64), (5, 1, 128), (6, 2, 80)]
LENGTHS = {"8K": 8192, "32K": 32768, "128K": 131072}


def made(B, T, H, KV, S, D, dtype=BF16, seed=0):
    """On the device: keys and values of 1M tokens take seconds to make on the host."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=g, device=DEVICE, dtype=dtype)
    return make(B, T, H, D), make(B, KV, S, D), make(B, KV, S, D)


def torchs(q, keys, values, start, scale, window=None):
    """torch's SDPA in fp32 of the same values, row by row, on the keys that exist."""
    outs = []
    for b in range(q.shape[0]):
        n = int(start[b]) + q.shape[1]
        place, p = torch.arange(n, device=DEVICE), int(start[b]) + torch.arange(q.shape[1], device=DEVICE).unsqueeze(1)
        mask = (place <= p) & (True if window is None else place > p - window)
        k, v = (x[b, :, :n].float() for x in (keys, values))
        heads, G = q[b].float().transpose(0, 1), q.shape[2] // keys.shape[1]
        outs.append(
            torch.cat(
                [
                    F.scaled_dot_product_attention(
                        heads[kv * G : kv * G + G],
                        k[kv : kv + 1].expand(G, -1, -1),
                        v[kv : kv + 1].expand(G, -1, -1),
                        mask,
                        scale=scale,
                    )
                    for kv in range(keys.shape[1])
                ]
            ).transpose(0, 1)
        )
    return torch.stack(outs)


def summarised(keys, end, block):
    B, KV, S, D = keys.shape
    held = [torch.full((B, KV, S // block, D), NAN, dtype=keys.dtype, device=DEVICE) for _ in range(3)]
    summarise_blocks(keys, torch.zeros(B, dtype=torch.int64, device=DEVICE), end, *held, block, backend="triton")
    return held


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(
    "B,start,window", [(1, [0], None), (2, [126, 4000], None), (3, [127, 128, 5000], None), (1, [6000], 1000)], ids=str
)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "fp32"])
def test_decode(heads, B, start, window, dtype):
    H, KV, D = heads
    q, keys, values = made(B, 1, H, KV, 8192, D, dtype)
    begin = torch.tensor(start, device=DEVICE)
    for b, p in enumerate(start):
        keys[b, :, p + 1 :], values[b, :, p + 1 :] = NAN, NAN
    got = grouped_attention(q, keys, values, begin, window, D**-0.5, backend="triton")
    close(got.float(), torchs(q, keys, values, begin, D**-0.5, window), 4e-3 if dtype is BF16 else 1e-5)


@pytest.mark.parametrize("length", [*LENGTHS, "1M"])
@pytest.mark.parametrize("heads", HEADS[:2], ids=str)
def test_decode_of_long_contexts(length, heads):
    H, KV, D = heads
    S = LENGTHS.get(length, 1 << 20)
    q, keys, values = made(1, 1, H, KV, S, D)
    for end in (S - 1, S // 3):
        start = torch.tensor([end], device=DEVICE)
        close(
            grouped_attention(q, keys, values, start, None, D**-0.5, backend="triton").float(),
            torchs(q, keys, values, start, D**-0.5),
            6e-3,
        )  # near averages of random values: rounding weighs more


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(
    "T,start,window",
    [(17, [0], None), (512, [0, 1000], None), (2048, [3000], None), (700, [2000], 500), (128, [127], 1)],
    ids=str,
)
def test_prefill(heads, T, start, window):
    H, KV, D = heads
    for dtype, tolerance in ((BF16, 4e-3), (F32, 1e-5)):
        if dtype is F32 and T > 600:
            continue
        q, keys, values = made(len(start), T, H, KV, 5120, D, dtype)
        begin = torch.tensor(start, device=DEVICE)
        for b, p in enumerate(start):
            keys[b, :, p + T :], values[b, :, p + T :] = NAN, NAN
        got = grouped_attention(q, keys, values, begin, window, D**-0.5, backend="triton")
        close(got.float(), torchs(q, keys, values, begin, D**-0.5, window), tolerance)


@pytest.mark.parametrize("T", [2, 16])
def test_tokens_of_a_row_have_the_bits_that_each_has_alone(T):
    q, keys, values = made(2, T, 28, 4, 8192, 128)
    start = torch.tensor([5000, 120], device=DEVICE)
    alone = [grouped_attention(q[:, t : t + 1], keys, values, start + t, None, 0.1, backend="triton") for t in range(T)]
    assert torch.equal(grouped_attention(q, keys, values, start, None, 0.1, backend="triton"), torch.cat(alone, 1))


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("block,n", [(128, 32), (16, 256), (16, 251), (64, 7)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "fp32"])
def test_kept_blocks(heads, block, n, dtype):
    H, KV, D = heads
    q, keys, values = made(2, 1, H, KV, 16384, D, dtype)
    start = torch.tensor([16383, 5000], device=DEVICE)
    blocks = torch.rand(2, 1, KV, 16384 // block, device=DEVICE).topk(n, -1).indices.int()
    blocks[torch.rand(blocks.shape, device=DEVICE) < 0.1] = -1
    keys[1, :, 5001:], values[1, :, 5001:] = NAN, NAN
    for window in (None, 3000):
        args = keys, values, blocks, start, window, D**-0.5, block
        close(
            gather_attention(q, *args, backend="triton").float(),
            gather_attention(q.float(), *args),
            4e-3 if dtype is BF16 else 1e-5,
        )


@pytest.mark.parametrize("length", ["128K", "1M"])
@pytest.mark.parametrize("policy", [block_bounds(), block_means(), page_bounds(), sink_window()], ids=lambda p: p.name)
def test_choice_and_attention_of_long_contexts(length, policy):
    """The choice keeps the best scores there are; then attention to it. Triton's own scores are held against the
    reference's."""
    S = LENGTHS.get(length, 1 << 20)
    q, keys, values = made(1, 1, 32, 8, S, 128)
    start, held = torch.tensor([S - 77], device=DEVICE), summarised(keys, S - 76, policy.block)
    blocks = choose_blocks(q, 8, *held, start, policy, backend="triton")
    found = blocks[0, 0]
    assert (
        (found.diff(dim=-1) > 0).all() and (found[:, 0] == 0).all() and (found[:, -1] == (S - 77) // policy.block).all()
    )
    assert found.shape[1] == policy.kept
    if policy.topk:
        scores, wanted = block_scores(q, *held, start, policy, backend="triton"), block_scores(q, *held, start, policy)
        close(scores.nan_to_num(), wanted.nan_to_num(), 1e-5)
        assert torch.equal(scores.isneginf(), wanted.isneginf())
        distant = found[:, policy.sink : policy.kept - policy.local].long()
        assert int(distant.max()) < int(distant_blocks(start, 1, policy))
        assert torch.equal(
            scores[0, 0].gather(1, distant).sort(-1).values, scores[0, 0].topk(policy.topk, -1).values.sort(-1).values
        )
        ranked = choose_blocks(q, 8, *held, start, policy, True, backend="triton")[0, 0]
        assert torch.equal(ranked.sort(-1).values, found)
        assert (scores[0, 0].gather(1, ranked[:, policy.kept - policy.topk :].long()).diff(dim=-1) <= 0).all()
    args = keys, values, blocks, start, None, 128**-0.5, policy.block
    close(gather_attention(q, *args, backend="triton").float(), gather_attention(q.float(), *args), 4e-3)


def test_ties_are_won_by_the_lowest_block():
    """Whole numbers, so that scores are exact whatever the order of their sums; most are equal."""
    for N, block in ((8192, 128), (65536, 16)):
        g = torch.Generator(DEVICE).manual_seed(0)
        draw = lambda *shape: torch.randint(-1, 2, shape, generator=g, device=DEVICE).to(BF16)
        low, high, q = draw(2, 2, N, 64), draw(2, 2, N, 64), draw(2, 1, 8, 64)
        start = torch.tensor([N * block - 1, 3000 * block + 5], device=DEVICE)
        for k in (1, 29, 250, 900):
            for by_importance in (False, True):
                policy = Policy("p", "bound", block, 1, 2, k)
                args = q, 2, torch.minimum(low, high), torch.maximum(low, high), None, start, policy, by_importance
                assert torch.equal(choose_blocks(*args, backend="triton"), choose_blocks(*args)), (N, k, by_importance)


def step(q, keys, values, start, held, policy, rule=None):
    """What a decode step does in one layer, once its key is written."""
    summarise_blocks(keys, start, 1, *held, policy.block, backend="triton")
    blocks = choose_blocks(q, keys.shape[1], *held, start, policy, rule is not None, backend="triton")
    return gather_attention(q, keys, values, blocks, start, None, 0.1, policy.block, rule, backend="triton")


@pytest.mark.parametrize("policy", [block_bounds(), page_bounds(), sink_window()], ids=lambda p: p.name)
def test_a_captured_step_is_valid_at_every_position_and_repeats_its_bits(policy):
    q, keys, values = made(2, 1, 28, 4, 32768, 128)
    start, held = torch.tensor([20000, 3], device=DEVICE), summarised(keys, 32768, policy.block)
    step(q, keys, values, start, held, policy), grouped_attention(q, keys, values, start, None, 0.1, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sparse, dense = (
            step(q, keys, values, start, held, policy),
            grouped_attention(q, keys, values, start, None, 0.1, backend="triton"),
        )
    for at in ([20000, 3], [0, 127], [128, 129], [31999, 4095], [32767, 255], [4096, 4097]):  # forwards and back
        start.copy_(torch.tensor(at))
        # a jump forwards passes over steps that complete blocks
        for tensor, whole in zip(held, summarised(keys, 32768, policy.block)):
            if tensor is not None:
                tensor.copy_(whole)
        graph.replay()
        assert torch.equal(dense, grouped_attention(q, keys, values, start, None, 0.1, backend="triton"))
        close(dense.float(), torchs(q, keys, values, start, 0.1), 6e-3)
        for b, p in enumerate(at):  # a row that was never longer
            short = keys[b : b + 1].clone(), values[b : b + 1].clone()
            for pool in short:
                pool[:, :, p + 1 :] = NAN
            mine = summarised(short[0], p + 1, policy.block)
            # other splits than in a batch: near, not equal
            alone = step(q[b : b + 1], *short, start[b : b + 1], mine, policy)
            close(alone.float(), sparse[b : b + 1].float(), 6e-3)
        first = sparse.clone()
        for _ in range(20):
            graph.replay()
            assert torch.equal(sparse, first)


@pytest.mark.parametrize("T", [1, 16, 300])
def test_twenty_repeats_give_the_same_bits(T):
    for D in (64, 128):
        q, keys, values = made(2, T, 28, 4, 16384, D)
        start = torch.tensor([16384 - T, 5000], device=DEVICE)
        first = grouped_attention(q, keys, values, start, None, 0.1, backend="triton")
        assert all(
            torch.equal(grouped_attention(q, keys, values, start, None, 0.1, backend="triton"), first)
            for _ in range(20)
        )


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("B", [1, 8])
def test_never_stopping_has_the_bits_of_attention_without_it(heads, B):
    H, KV, D = heads
    q, keys, values = made(B, 1, H, KV, 32768, D)
    start = torch.randint(0, 32768, (B,), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    args = q, keys, values, start, None, D**-0.5
    out, read = grouped_attention(*args, Termination(tau=0), backend="triton")
    assert torch.equal(out, grouped_attention(*args, backend="triton"))
    assert torch.equal(read, (start // 128 + 1).int().view(B, 1, 1).expand(B, 1, KV))
    for policy in (block_bounds(), page_bounds()):
        blocks = choose_blocks(q, KV, *summarised(keys, 32768, policy.block), start, policy, True, backend="triton")
        args = q, keys, values, blocks, start, None, D**-0.5, policy.block
        assert torch.equal(
            gather_attention(*args, Termination(tau=0), backend="triton")[0], gather_attention(*args, backend="triton")
        )


@pytest.mark.parametrize("many", [1, 2, 5])
def test_termination(many):
    """fp32, where both sides see the same probes; then bf16 on the same inputs, which may stop a tile earlier or
    later."""
    q, keys, values, start = concentrated(S=8192, far=6000, D=64, p=8100)
    rule = Termination(tile=64, splits=many)
    wanted, count = grouped_attention(q, keys, values, start, None, 1.0, rule)
    out, read = grouped_attention(q, keys, values, start, None, 1.0, rule, backend="triton")
    assert torch.equal(read, count) and read.item() < 127
    close(out, wanted)
    out, read = grouped_attention(
        q.bfloat16(), keys.bfloat16(), values.bfloat16(), start, None, 1.0, rule, backend="triton"
    )
    close(out.float(), wanted, 1e-2)
    assert abs(int(read) - int(count)) <= 2 * many


def test_offsets_past_2_gib():
    """Numbers of a cache behind 2^31: the last row of a batch."""
    q, keys, values = made(1, 1, 8, 4, 65536, 128)
    start = torch.tensor([65000], device=DEVICE)
    blocks = torch.tensor([0, 100, 507], dtype=torch.int32, device=DEVICE).expand(1, 1, 4, 3).contiguous()
    many = (1 << 31) // keys.numel() + 1
    far_k, far_v = (torch.zeros(many, *x.shape[1:], dtype=BF16, device=DEVICE) for x in (keys, values))
    far_k[-1:], far_v[-1:] = keys, values
    spread = lambda x: x.expand(many, *x.shape[1:]).contiguous()
    args = spread(q), far_k, far_v
    close(
        grouped_attention(*args, spread(start), None, 0.1, backend="triton")[-1:].float(),
        grouped_attention(q, keys, values, start, None, 0.1, backend="triton").float(),
        6e-3,
    )
    close(
        gather_attention(*args, spread(blocks), spread(start), None, 0.1, 128, backend="triton")[-1:].float(),
        gather_attention(q, keys, values, blocks, start, None, 0.1, 128, backend="triton").float(),
        4e-3,
    )
