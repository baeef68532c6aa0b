"""Experts on a GPU (in Triton's interpreter without one) against the literal sum over pairs."""

import pytest
import torch

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.experts import reference, triton_order, triton_prefill, triton_stream
from dsv4.kernels.experts import triton as gpu
from dsv4.kernels.linear import triton as linear_gpu
from dsv4.kernels.linear import triton_fp8, triton_streams
from dsv4.kernels.quantize import PackedWeight, to_float
from dsv4.kernels.quantize.reference import simulate_fp8_blocks
from dsv4.kernels.quantize.weights import expert
from dsv4.kernels.router import triton as router_gpu
from tests.kernels.products import CUDA, DEVICE, DTYPES, distance, graphed, needs_gpu, pack, poison, randn, stack  # noqa: F401
from tests.kernels.ptx import compiled

FORMATS = ["dense fp32", "dense bf16", "fp8", "fp8 fp32 scales", "mxfp4", "nvfp4"]
QUANTISED = FORMATS[2:]
LIMIT = 3.0


def choices(N: int, k: int, E: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    indices = (
        torch.stack([torch.randperm(E, generator=g)[:k] for _ in range(N)])
        if N
        else torch.empty(0, k, dtype=torch.int64)
    )
    return indices.to(DEVICE), torch.rand(N, k, generator=g).to(DEVICE)


def silu_product(gate, up):
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(gate) * up


def literal(x, indices, routing, w13, w2, simulate):
    """The sum in fp64, with the roundings of the definition."""
    sim = (lambda t: simulate_fp8_blocks(t, 128)) if simulate else (lambda t: t)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    xs = sim(x).double()
    for e in set(indices.flatten().tolist()):
        first, second = to_float(expert(w13, e)).double(), to_float(expert(w2, e)).double()
        for t, j in (indices == e).nonzero().tolist():
            gate, up = (first @ xs[t]).to(x.dtype).double().chunk(2)
            h = (silu_product(gate, up) * routing[t, j].double()).to(x.dtype)
            out[t] += (second @ sim(h.unsqueeze(0))[0].double()).to(x.dtype).double()
    return out


def literal_shared(x, w1, w3, w2, simulate):
    sim = (lambda t: simulate_fp8_blocks(t, 128)) if simulate else (lambda t: t)
    gate, up = ((sim(x).double() @ to_float(w).double().T).to(x.dtype).double() for w in (w1, w3))
    return (sim(silu_product(gate, up).to(x.dtype)).double() @ to_float(w2).double().T).to(x.dtype).double()


def tolerance(dtype: torch.dtype, simulate: bool) -> float:
    """A hidden value on the edge between two FP8 codes may fall either way."""
    return 6e-3 if dtype is torch.bfloat16 else 5e-3 if simulate else 1e-5


CASES = [(form, False) for form in FORMATS] + [(form, True) for form in QUANTISED]
# whose tiles the interpreter takes time for
SOME = [("mxfp4", True), ("nvfp4", False), ("dense bf16", False), ("fp8", True)]


@pytest.mark.few("N", "d", "form", "simulate", "dtype")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "N,k,d,form,simulate",
    [
        *((1, 2, 64, *case) for case in (CASES if CUDA else SOME)),
        *((3, 2, 32, *case) for case in (CASES if CUDA else SOME[:3])),
        *((18, 2, 32, *case) for case in CASES),
        (3, 2, 160, "mxfp4", True),
    ],
    ids=str,
)
def test_experts(dtype, N, k, d, form, simulate):
    E, I = 3, 128 if CUDA or N == 1 and form == "fp8" else 40 if form.startswith("dense") else 32
    x, (indices, routing) = randn(N, d).to(dtype), choices(N, k, E)
    w13, w2 = stack(E, 2 * I, d, form, 2), stack(E, d, I, form, 1, 100)
    got = gpu.experts(x, indices, routing, w13, w2, LIMIT, simulate)
    assert got.dtype is torch.float32
    assert distance(got, literal(x, indices, routing, w13, w2, simulate)) < tolerance(dtype, simulate)
    if CUDA or d == 32:
        assert torch.equal(got, gpu.experts(x, indices, routing, w13, w2, LIMIT, simulate))


@pytest.mark.parametrize("N", [1, 2] if CUDA else [2])
def test_an_intermediate_width_that_is_no_power_of_two(N):
    E, d, I = 3, 32, 160
    x, (indices, routing) = randn(N, d), choices(N, 2, E)
    w13, w2 = stack(E, 2 * I, d, "mxfp4", 2), stack(E, d, I, "mxfp4", 1, 100)
    got = gpu.experts(x, indices, routing, w13, w2, LIMIT, False)
    assert distance(got, literal(x, indices, routing, w13, w2, False)) < 1e-5


@pytest.mark.parametrize("N", [2, 40])
def test_one_expert_takes_all_tokens_and_a_token_an_expert_twice(N):
    E, d, I = 3, 32, 32
    w13, w2 = stack(E, 2 * I, d, "mxfp4", 2), stack(E, d, I, "mxfp4", 1, 100)
    x, routing = randn(N, d), torch.rand(N, 2, device=DEVICE)
    indices = torch.full((N, 2), 1, device=DEVICE)
    indices[0, 1] = 2
    got = gpu.experts(x, indices, routing, w13, w2, LIMIT, False)
    assert distance(got, literal(x, indices, routing, w13, w2, False)) < 1e-5


@pytest.mark.parametrize("form,simulate", [("fp8", True), ("fp8", False), ("dense bf16", False), ("nvfp4", True)])
@pytest.mark.parametrize("N", [1, 10, 20])
def test_shared_expert(form, simulate, N):
    d, I = 160, 32
    w = pack(randn(I, d, seed=1), form), pack(randn(I, d, seed=2) * 2, form), pack(randn(d, I, seed=3), form)
    for dtype in DTYPES:
        x = randn(N, d).to(dtype)
        got = gpu.shared_expert(x, *w, LIMIT, simulate)
        assert got.dtype is torch.float32
        assert distance(got, literal_shared(x, *w, simulate)) < tolerance(dtype, simulate)


@pytest.mark.parametrize("shared_form,simulate", [("fp8", True), ("fp8", False), ("dense bf16", False)])
def test_a_shared_expert_beside_the_streamed_experts_of_more_tokens(shared_form, simulate):
    """Its tiles have groups of tokens, and each token has the bits that it has in a group alone."""
    N, E, d, I, k = 40, 64, 32, 32, 2
    w13, w2 = stack(E, 2 * I, d, "mxfp4", 2), stack(E, d, I, "mxfp4", 1, 100)
    shared = tuple(pack(randn(*shape, seed=i), shared_form) for i, shape in enumerate(((I, d), (I, d), (d, I))))
    x, (indices, routing) = randn(N, d), choices(N, k, E)
    got = gpu.moe(x, indices, routing, w13, w2, shared, LIMIT, simulate, simulate, combine=False)
    wanted = literal(x, indices, routing, w13, w2, simulate) + literal_shared(x, *shared, simulate)
    assert distance(got.combine(torch.float32), wanted) < tolerance(x.dtype, simulate)
    for few in (slice(0, 16), slice(16, 32)):
        alone = gpu.shared_expert(x[few], *shared, LIMIT, simulate)
        assert torch.equal(got.shared[few], alone)


@pytest.mark.parametrize("N", [1, 4, 24])
@pytest.mark.parametrize(
    "form,shared_form,simulate",
    [("mxfp4", "fp8", True), ("mxfp4", "fp8", False), ("dense bf16", "dense bf16", False), ("nvfp4", "mxfp4", False)],
)
def test_moe(form, shared_form, simulate, N):
    E, d, I, k = 3, 32, 32, 2
    w13, w2 = stack(E, 2 * I, d, form, 2), stack(E, d, I, form, 1, 100)
    shared = tuple(pack(randn(*shape, seed=i), shared_form) for i, shape in enumerate(((I, d), (I, d), (d, I))))
    indices, routing = choices(N, k, E)
    for dtype in DTYPES:
        x = randn(N, d).to(dtype)
        got = gpu.moe(x, indices, routing, w13, w2, shared, LIMIT, simulate, simulate)
        wanted = literal(x, indices, routing, w13, w2, simulate) + literal_shared(x, *shared, simulate)
        assert got.dtype is dtype and distance(got, wanted) < tolerance(dtype, simulate)
        part = gpu.moe(x, indices, routing, w13, w2, shared, LIMIT, simulate, simulate, torch.float32)
        assert part.dtype is torch.float32 and torch.equal(part.to(dtype), got)  # cast once, by whoever sums parts


@pytest.mark.few(N=[1])
@pytest.mark.parametrize("N,programs", [(1, 3), (16, 7)])
def test_programs_that_take_several_tiles_in_turn(N, programs, monkeypatch):
    monkeypatch.setattr(triton_stream, "_grid", lambda *args: (programs, 1))
    E, d, I, k = 24, 64, 96, 10
    w13, w2 = stack(E, 2 * I, d, "mxfp4", 2), stack(E, d, I, "mxfp4", 1, 100)
    shared = tuple(pack(randn(*shape, seed=i), "fp8") for i, shape in enumerate(((I, d), (I, d), (d, I))))
    x, (indices, routing) = randn(N, d), choices(N, k, E)
    got = gpu.moe(x, indices, routing, w13, w2, shared, LIMIT, False, False)
    assert distance(got, literal(x, indices, routing, w13, w2, False) + literal_shared(x, *shared, False)) < 1e-5


def test_tokens_of_nan_and_of_no_number():
    E, d, I = 4, 32, 32
    w13, w2 = stack(E, 2 * I, d, "mxfp4", 2), stack(E, d, I, "mxfp4", 1, 100)
    x, (indices, routing) = randn(3, d), choices(3, 2, E)
    x[1, 5] = float("nan")
    got = gpu.experts(x, indices, routing, w13, w2, LIMIT, False)
    assert got[1].isnan().all() and not got[[0, 2]].isnan().any()
    assert gpu.experts(x[:0], indices[:0], routing[:0], w13, w2, LIMIT, False).shape == (0, d)


def test_what_is_refused():
    w13, w2 = stack(2, 64, 64, "dense fp32", 2), stack(2, 64, 32, "dense fp32", 1)
    indices, routing = choices(1, 1, 2)
    with pytest.raises(UnsupportedInput, match="dense"):
        gpu.experts(randn(1, 64), indices, routing, w13, w2, LIMIT, True)
    with pytest.raises(UnsupportedInput, match="belong together"):
        gpu.experts(randn(1, 32), indices, routing, w13, w2, LIMIT, False)


@pytest.mark.parametrize(
    "N,k,E,T,few",
    [(1, 4, 9, 8, 512), (7, 3, 5, 8, 512), (50, 4, 6, 16, 512), (50, 4, 6, 16, 0), (9, 2, 20, 8, 0), (33, 2, 3, 32, 0)],
)
@pytest.mark.parametrize("foreign", [0, 2], ids=["own experts", "two of another rank"])
def test_pairs_in_the_order_of_their_experts(N, k, E, T, few, foreign, monkeypatch):
    monkeypatch.setattr(triton_order, "FEW", few)
    indices, _ = choices(N, k, E, seed=N)
    indices = indices - foreign  # experts of no number first
    indices[indices < 0] = -1
    order, table, _ = triton_order.sort_pairs(indices, E, T)
    x = randn(N, 1300)
    assert torch.equal(triton_order.sort_pairs(indices, E, T, x)[2], simulate_fp8_blocks(x, 128))
    flat, stable = indices.flatten().sort(stable=True)
    place = int((flat < 0).sum())
    assert order[place:].tolist() == stable[place:].tolist()
    blocks = (len(table) - 1) // 3
    assert blocks == triton_order.blocks_of(N * k, E, T) and table[0] <= blocks
    found = []
    for b in range(int(table[0])):
        e, first, count = (int(table[1 + i * blocks + b]) for i in range(3))
        assert e >= 0 or not few, "pairs of no expert have no block"
        if e >= 0:
            assert 1 <= count <= T and first == place and (flat[first : first + count] == e).all()
            found.append(e)
            place += count
    assert place == N * k and found == sorted(found)
    for e in set(found):  # no expert has more blocks than it needs
        assert found.count(e) == -(-int((flat == e).sum()) // T)


@pytest.mark.parametrize("form,simulate", [("mxfp4", False), ("dense bf16", False), ("fp8", True)])
@pytest.mark.parametrize("N,few", [(1, 512), (3, 512), (40, 512), (40, 0)])
def test_experts_of_another_rank_are_skipped(form, simulate, N, few, monkeypatch):
    """With the bits of a local expert with weight 0, and without reading any. In the interpreter only to rounding where
    a block has many tokens: on some processors NumPy's product of a row depends on the row's place."""
    monkeypatch.setattr(triton_order, "FEW", few)
    E, d, I, k = 4, 32, 32, 3
    w13, w2 = stack(E, 2 * I, d, form, 2), stack(E, d, I, form, 1, 100)
    indices, routing = choices(N, k, E + 3, seed=2)
    foreign = indices >= E
    assert foreign.any() and not foreign.all()
    for dtype in DTYPES:
        x = randn(N, d).to(dtype)
        zero = gpu.experts(x, indices % E, routing.masked_fill(foreign, 0.0), w13, w2, LIMIT, simulate)
        skipped = gpu.experts(x, indices.masked_fill(foreign, -1), routing, w13, w2, LIMIT, simulate)
        if DEVICE == "cpu" and N > 3:
            torch.testing.assert_close(skipped, zero, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(skipped.view(torch.int32), zero.view(torch.int32))
    none = gpu.experts(x, torch.full_like(indices, -1), routing, w13, w2, LIMIT, simulate)
    assert torch.equal(none.view(torch.int32), torch.zeros_like(none).view(torch.int32))
    if form == "dense bf16":
        unread = torch.tensor([e not in indices.masked_fill(foreign, -1) for e in range(E)], device=DEVICE)
        for w in (w13, w2):
            w.weight[unread] = float("nan")
        again = gpu.experts(x, indices.masked_fill(foreign, -1), routing, w13, w2, LIMIT, simulate)
        assert torch.equal(again, skipped)


@pytest.mark.skipif(CUDA, reason="a GPU runs the assembly itself, above")
@pytest.mark.parametrize("form,simulate", [("mxfp4", True), ("nvfp4", False), ("dense bf16", False)])
@pytest.mark.parametrize("N", [1, 2, 6, 30])
def test_products_of_bf16_as_a_gpu_makes_them(form, simulate, N, monkeypatch):
    compiled(monkeypatch, triton_prefill, triton_stream, linear_gpu, triton_streams)
    E, d, I, k = 3, 32, 32, 1
    w13, w2 = stack(E, 2 * I, d, form, 2), stack(E, d, I, form, 1, 100)
    x, (indices, routing) = randn(N, d).bfloat16(), choices(N, k, E)
    if N == 6:
        indices = torch.tensor([[1], [0], [1], [2], [1], [0]])  # one, two and three pairs
    got = gpu.experts(x, indices, routing, w13, w2, LIMIT, simulate)
    assert distance(got, literal(x, indices, routing, w13, w2, simulate)) < 8e-3


# Over 5 s: three launches in Triton's interpreter, over blocks of 128 columns.
@pytest.mark.few(N=[2])
@pytest.mark.parametrize("simulate", [False, True])
@pytest.mark.parametrize("N", [2, 5, 16])
def test_a_token_among_a_few_has_the_bits_that_it_has_alone(N, simulate, monkeypatch):
    """A pass that verifies drafts is compared with steps of one token. Large products cancel, so that the order of sums
    is seen. Where activations go through E4M3, the small columns of a block of 128 are rounded by its large ones."""
    if not CUDA:
        compiled(monkeypatch, triton_prefill, triton_stream, linear_gpu, triton_streams)
    E, d, I, k = 3, 128, 32, 2
    base, x = randn(E * 2 * I, 32, seed=5), randn(N, d) * (1 if simulate else 1e-2)
    w13 = pack(torch.cat((base, -base, randn(E * 2 * I, 64, seed=6)), 1), "mxfp4")
    w13 = w13._replace(weight=w13.weight.view(E, 2 * I, -1), scale=w13.scale.view(E, 2 * I, -1))
    x[:, :32] = x[:, 32:64] = randn(N, 32, seed=7) * 1e4
    (indices, routing), w2 = choices(N, k, E), stack(E, d, I, "mxfp4", 1, 100)
    run = lambda some: gpu.experts(x[some].bfloat16(), indices[some], routing[some], w13, w2, LIMIT, simulate)
    assert torch.equal(run(slice(0, N)), torch.cat([run(slice(t, t + 1)) for t in range(N)]))


# At production shapes, on a GPU ---------------------------------------------------------------------------------------


def flash(E: int, form: str, shared_form: str):
    g = torch.Generator("cuda").manual_seed(0)
    make = lambda *shape: torch.randn(*shape, device="cuda", generator=g) * shape[-1] ** -0.5
    some = [pack(make(4096, 4096), form) for _ in range(3)], [pack(make(4096, 2048), form) for _ in range(3)]
    raw = lambda t: t.view(torch.uint8) if t.dtype.itemsize == 1 else t

    def put(ws, i):
        return None if ws[0][i] is None else torch.stack([raw(ws[e % 3][i]) for e in range(E)]).view(ws[0][i].dtype)

    w13, w2 = (PackedWeight(ws[0].format, *(put(ws, i) for i in (1, 2, 3)), ws[0].block) for ws in some)
    return w13, w2, tuple(pack(make(*shape), shared_form) for shape in ((2048, 4096), (2048, 4096), (4096, 2048)))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("N", [1, 2, 8, 17, 64, 300, 1500])
@pytest.mark.parametrize("form,simulate", [("mxfp4", False), ("mxfp4", True), ("nvfp4", False)])
def test_production_shapes(form, simulate, N):
    E, k = 256, 6
    w13, w2, shared = flash(E, form, "fp8")
    x, (indices, routing) = torch.randn(N, 4096, device="cuda").bfloat16(), choices(N, k, E, seed=N)
    part = slice(0, 40)  # tokens that the fp64 sum is made for
    wanted = literal(x[part], indices[part], routing[part], w13, w2, simulate)
    got = gpu.experts(x, indices, routing, w13, w2, LIMIT, simulate)
    assert distance(got[part], wanted) < 1e-2
    repeats = 20 if N < 100 else 3
    assert all(torch.equal(got, gpu.experts(x, indices, routing, w13, w2, LIMIT, simulate)) for _ in range(repeats))
    both = graphed(lambda: gpu.moe(x, indices, routing, w13, w2, shared, LIMIT, simulate, simulate))
    assert torch.equal(both, gpu.moe(x, indices, routing, w13, w2, shared, LIMIT, simulate, simulate))
    assert distance(both[part], wanted + literal_shared(x[part], *shared, simulate)) < 1e-2
    exact = gpu.experts(x[:16].float(), indices[:16], routing[:16], w13, w2, LIMIT, False)
    assert distance(exact, literal(x[:16].float(), indices[:16], routing[:16], w13, w2, False)) < 1e-5
    assert distance(exact, reference.experts(x[:16].float(), indices[:16], routing[:16], w13, w2, LIMIT, False)) < 1e-5


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("N", [1, 2, 8])
def test_launches_that_overlap_wait_for_what_they_read(N):
    """A chain of launches as a graph, replayed on other inputs each time, against the same chain with pauses."""
    E = 32
    w13, w2, shared = flash(E, "mxfp4", "fp8")
    first, last = (pack(torch.randn(4096, 4096, device="cuda") / 64, form) for form in ("fp8", "mxfp4"))
    gate, bias = (torch.randn(E, 4096, device="cuda") / 64).bfloat16(), torch.zeros(E, device="cuda")

    def chain(x, pause):
        for _ in range(3):
            x = linear_gpu.linear(x, first)
            pause()
            indices, routing = router_gpu.route_scored(x, gate, bias, 6, 1.5)
            pause()
            x = gpu.moe(x, indices, routing, w13, w2, shared, LIMIT, False, False)
            pause()
            x = linear_gpu.linear(x, last)
            pause()
        return x

    x = torch.empty(N, 4096, device="cuda", dtype=torch.bfloat16)
    x.normal_()
    chain(x, torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x, lambda: None)
    for _ in range(10):
        x.normal_()
        graph.replay()
        assert torch.equal(out, chain(x, torch.cuda.synchronize))
        assert torch.equal(out, chain(x, lambda: None))


@pytest.mark.parametrize("N, I", [(5, 384), (3, 2048)])
def test_swiglu_leaves_the_codes_that_rounding_gives(N, I, monkeypatch):
    """Between the products of a shared expert by codes."""
    x, w, found = randn(N, 128).bfloat16(), [pack(randn(*s, seed=1), "fp8") for s in ((I, 128), (I, 128), (128, I))], []
    second = lambda name, x, *rest: found.append(x) or [torch.zeros(N, 128, device=DEVICE)]
    run = lambda: triton_prefill.tile_shared("shared_expert", x, tuple(w), LIMIT, True)
    first = triton_prefill.products
    monkeypatch.setattr(triton_prefill, "products", lambda *given: (first if len(given[4]) == 2 else second)(*given))
    monkeypatch.setattr(triton_prefill, "product", lambda codes, scales, *rest: found.append((codes, scales)))
    for coded in (False, True):
        monkeypatch.setattr(triton_prefill, "multiplies_codes", lambda *given, coded=coded: coded)
        run()
    h, (codes, scales) = found
    assert all(map(torch.equal, (codes, scales), triton_fp8.quantised(h)))
