"""Policies, termination and chunked prefill on the triton backend: captured steps against the reference, and on a GPU
what a step may not do."""

from dataclasses import replace

import pytest
import torch

from dsv4 import load_model
from dsv4.commands.generate import termination_notes
from dsv4.engine.generate import generate, generate_on_device, generate_speculative
from dsv4.kernels.block_choice import Observed, Policy, block_bounds, dense
from dsv4.kernels.chunked_prefill import Chunking
from dsv4.kernels.grouped_attention import Termination, triton_decode
from dsv4.model.causal import captures
from dsv4.model.dummy import fill_cache, load_dummy
from dsv4.model.gqa.choice import Attention, attention_named
from dsv4.runtime.graph import DecodeGraph
from dsv4.speculation.captured import Captured
from dsv4.speculation.draft import LookupDrafter
from tests.gqa import oracle
from tests.parity import assert_quiet, assert_repeats

GPU = torch.cuda.is_available()
WORDS = 384 if GPU else 96  # of the vocabulary
DEVICE = "cuda" if GPU else "cpu"
NEVER = Termination(tau=0, tile=64)
WAYS = {
    "bound": Attention(Policy("bound", "bound", 16, 1, 2, 2)),
    "mean": Attention(Policy("mean", "mean", 16, 1, 2, 2)),
    "window": Attention(Policy("window", None, 16, 1, 3)),
    "terminating": Attention(Policy("bound", "bound", 16, 1, 2, 2), NEVER),
    "dense, terminating": Attention(dense(), NEVER),
    "block": Attention(Policy("block", "bound", 128, 0, 1, 1)),
    "tokens": Attention(Observed("tokens", retention=0.3, window=8, beta=4)),
    "tokens, terminating": Attention(Observed("tokens", retention=40, window=8), NEVER),
}
SOME = list(WAYS) if GPU else ["bound", "terminating", "dense, terminating", "tokens"]  # the interpreter is slow


@pytest.fixture(scope="module", params=["llama, llama3 rope and biases", "qwen2, yarn and some sliding layers"])
def folder(request, tmp_path_factory):
    config = oracle.CONFIGS[request.param] if GPU else oracle.brief(oracle.CONFIGS[request.param])
    return oracle.save(oracle.randomised(config), config, tmp_path_factory.mktemp("graph") / "m", torch.bfloat16)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("numerics", ["fp32", "native"] if GPU else ["fp32"])
def test_captured_steps_equal_the_reference(folder, name, numerics):
    """A ragged batch across blocks, single tokens and a verify pass, at positions that one captured step passes
    through."""
    reference, ours = (
        load_model(folder, numerics=numerics, backend=b, device=DEVICE, attention=WAYS[name])
        for b in ("reference", "triton")
    )
    ids = torch.randint(0, WORDS, (2, 300), generator=torch.Generator().manual_seed(5))
    counts, a, b = [270, 125], reference.new_cache(2, 300), ours.new_cache(2, 300)
    for cache in (a, b):  # the layout is the same on every backend
        reference.append(ids[:, :270], cache, n_new=counts, logits="none")
    single, wide = DecodeGraph(ours, b), DecodeGraph(ours, b, tokens=3)
    for step, graph in enumerate([single, wide] * (4 if GPU else 1)):
        new = torch.randint(0, WORDS, (2, graph.tokens), generator=torch.Generator().manual_seed(step))
        want, found = reference.append(new, a), graph.step(new)
        error = (found - want).norm() / want.norm()
        assert error < (1e-5 if numerics == "fp32" else 0.03), (step, error)
        for mine, theirs in zip(ours.layer_paths(), reference.layer_paths()):
            assert _read(mine) == _read(theirs) and a.lengths == b.lengths
    ran = {row["operation"]: row["implementation"] for row in ours.dispatch.rows() if row["calls"]}
    assert "reference" not in ran.values() and ("gather_attention" in ran) == ("dense" not in name)
    assert ("choose_blocks" in ran) == ("dense" not in name and "tokens" not in name)


def _read(path: dict) -> dict:
    """Without the traversals of a rule, of which a GPU has more than the reference's one."""
    if "traversals" not in path:
        return path
    return {key: value for key, value in path.items() if key not in ("traversals", "tiles_each", "path")}


@pytest.mark.few(folder=["qwen2, yarn and some sliding layers"])
@pytest.mark.parametrize("name", ["terminating", "dense, terminating"])
def test_the_traversals_that_are_said_are_those_of_the_launch(folder, name, monkeypatch):
    real, launched = triton_decode.traversals, []
    monkeypatch.setattr(triton_decode, "processors", lambda device: 64)
    monkeypatch.setattr(
        triton_decode, "traversals", lambda *given: given[-1] and launched.append(real(*given)[1]) or real(*given)
    )
    for rule, most in ((NEVER, 99), (replace(NEVER, least=2), 3)):
        model = load_model(
            folder, numerics="fp32", backend="triton", device=DEVICE, attention=replace(WAYS[name], termination=rule)
        )
        reference, cache = (
            load_model(folder, numerics="fp32", backend="reference", device=DEVICE, attention=model.attention),
            model.new_cache(1, 300),
        )
        reference.append(
            torch.randint(0, WORDS, (1, 270), generator=torch.Generator().manual_seed(5)),
            cache,
            logits="none",
            prompt=True,
        )
        launched.clear()
        model.append(torch.tensor([[3]]), cache)
        said = [path for path in model.layer_paths() if "traversals" in path]
        assert said and all(path["traversals"] == min(path["of_tiles"], launched[-1]) <= most for path in said)
        assert all(
            path["tiles_each"] == -(-path["of_tiles"] // path["traversals"]) and "cannot stop" in path["path"]
            for path in said
        )
        assert f"in {said[0]['traversals']} split" in termination_notes(model)[0]


# Over 5 s: every kernel of a prefill runs in Triton's interpreter, in two pieces.
@pytest.mark.few(folder=["qwen2, yarn and some sliding layers"])
def test_chunked_prefill_equals_the_reference(folder):
    how = Attention(prefill=Chunking(32, 8, 8))
    reference, ours = (
        load_model(folder, numerics="fp32", backend=b, device=DEVICE, attention=how) for b in ("reference", "triton")
    )
    ids = torch.randint(0, WORDS, (2, 40), generator=torch.Generator().manual_seed(6))
    a, b = (m.append(ids, m.new_cache(2, 40), n_new=[40, 20], chunk=32) for m in (reference, ours))
    assert (a[0] - b[0]).abs().max() < 2e-4 and (a[1, :20] - b[1, :20]).abs().max() < 2e-4 and b[1, 20:].isnan().all()
    full = sum(window is None for window in ours.config.windows)
    calls = {row["operation"]: row["calls"] for row in ours.dispatch.rows() if row["implementation"] == "triton"}
    assert calls["chunked_prefill"] == 2 * full


@pytest.mark.gpu
@pytest.mark.parametrize("name", WAYS)
def test_passes_of_drafts_change_nothing_in_any_numerics(folder, name):
    """Verify passes of up to 9 tokens as captured steps have the bits of single captured steps."""
    for numerics in ("native", "fp32"):
        model = load_model(folder, numerics=numerics, backend="triton", device="cuda", attention=WAYS[name])
        ids = torch.randint(0, 384, (60,), generator=torch.Generator().manual_seed(7)).tolist() * 4
        plain = generate(model, ids, 60).token_ids
        assert generate_speculative(model, [ids], 60, LookupDrafter())[0].token_ids == plain
        assert generate_on_device(model, [ids], 60, LookupDrafter())[0].token_ids == plain
        a, b = model.new_cache(1, 300), model.new_cache(1, 300)
        for cache in (a, b):
            model.append(torch.tensor([ids]), cache, logits="none")
        one, verify = DecodeGraph(model, a), Captured(model, b)
        fed = torch.tensor([ids[:9]])
        want = torch.cat([one.step(fed[:, t : t + 1]).clone() for t in range(9)], 1)
        assert torch.equal(verify(fed, [9], False)[0], want)


CHOICES = [
    Attention(block_bounds(4096)),
    attention_named("page-bound"),
    attention_named("block-mean"),
    attention_named("sink-window"),
    Attention(block_bounds(4096), Termination()),
    Attention(dense(), Termination()),
]


@pytest.mark.gpu
@pytest.mark.parametrize("how", CHOICES, ids=lambda how: f"{how.policy.name} {how.termination is not None}")
def test_a_sparse_step_neither_allocates_nor_waits_nor_compiles(how):
    """Qwen2.5-7B widths, ragged rows, 50 replays, then positions far apart; a replay is the eager step to the bit, and
    repeats."""
    model = load_dummy("qwen2.5-7b", layers=3, backend="triton", device="cuda", max_context=1 << 17, attention=how)
    cache = model.new_cache(2, 1 << 17)
    fill_cache(cache, [100_000, 9_001])
    graph, ids = DecodeGraph(model, cache), torch.tensor([[17], [4000]], device="cuda")
    assert captures(model) and graph.graph is not None
    assert_quiet(graph, cache, ids)
    fill_cache(cache, [100_000, 9_001])
    assert_repeats(graph, cache, ids)


@pytest.mark.gpu
def test_tiles_are_those_of_the_last_replay():
    """Of two captured steps of one model, that which ran last."""
    model = load_dummy(
        "qwen2.5-7b",
        layers=2,
        backend="triton",
        device="cuda",
        max_context=1 << 14,
        attention=Attention(dense(), Termination(tau=0)),
    )
    cache = model.new_cache(1, 1 << 14)
    fill_cache(cache, 9000)
    one, two = DecodeGraph(model, cache), DecodeGraph(model, cache, tokens=2)
    one.step(torch.tensor([[3]]))
    assert (
        model.tiles[0].shape == (1, 1, 4)
        and model.layer_paths()[0]["tiles_read"] == model.layer_paths()[0]["of_tiles"] == 71
    )
    two.step(torch.tensor([[3, 4]]))
    assert model.tiles[0].shape == (1, 2, 4)
