"""Captured steps and the triton backend of GQA models: what they compute is what `append` on the reference computes."""

from types import MappingProxyType

import pytest
import torch

from dsv4 import load_model
from dsv4.engine.generate import generate, generate_on_device, generate_speculative
from dsv4.errors import ContextOverrun
from dsv4.kernels import operations
from dsv4.kernels.dispatch import Operation
from dsv4.model.causal import captures
from dsv4.runtime.graph import DecodeGraph
from dsv4.speculation.captured import Captured
from dsv4.speculation.draft import LookupDrafter
from tests.gqa import oracle
from tests.speculation.scripted import Scripted, drafted

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


@pytest.fixture(autouse=True)
def attention(monkeypatch):
    """Where `grouped_attention` has no Triton kernel yet, the reference stands in for it: the rest of the binding is
    what is tested."""
    op = operations.GQA_OPERATIONS["grouped_attention"]
    if "triton" not in op.implementations:
        real = op.implementations["reference"]
        monkeypatch.setitem(
            operations.GQA_OPERATIONS,
            op.name,
            Operation(op.name, MappingProxyType({"reference": real, "triton": real})),
        )


# the interpreter is slow: there, the configs with biases of their own, and those with windows in some layers
SOME = [name for name in oracle.CONFIGS if GPU or "biases" in name or "some sliding layers" in name]


@pytest.fixture(scope="module", params=SOME)
def folder(request, tmp_path_factory):
    config = oracle.CONFIGS[request.param] if GPU else oracle.brief(oracle.CONFIGS[request.param])
    return oracle.save(oracle.randomised(config), config, tmp_path_factory.mktemp("graph") / "m", torch.bfloat16)


def models(folder, numerics):
    return [
        load_model(folder, numerics=numerics, backend=backend, device=DEVICE) for backend in ("reference", "triton")
    ]


def prompts(model, *lengths):
    g = torch.Generator().manual_seed(3)
    return torch.randint(0, model.config.vocab_size, (len(lengths), max(lengths)), generator=g), list(lengths)


@pytest.mark.parametrize("numerics", ["fp32", "native"])
def test_captured_steps_equal_append(folder, numerics):
    """A ragged batch, across a block of 128 tokens, past windows and original contexts, against append token by token;
    in bf16 both round, and neither may be much further from fp32."""
    (reference, ours), exact = (
        models(folder, numerics),
        load_model(folder, numerics="fp32", backend="reference", device=DEVICE),
    )
    ids, counts = prompts(reference, 5, 127, 63)
    a, b = reference.new_cache(3, 180), reference.new_cache(3, 180)
    c, d = ours.new_cache(3, 180), exact.new_cache(3, 180)
    for cache in (a, b, c):  # the layout is the same on every backend
        reference.append(ids, cache, n_new=counts, logits="last")
    exact.append(ids, d, n_new=counts, logits="last")
    plain, fused = DecodeGraph(reference, b), DecodeGraph(ours, c)
    g, worst = torch.Generator().manual_seed(4), 0.0
    for step in range(5 if GPU else 2):
        new = torch.randint(0, ours.config.vocab_size, (3, 1), generator=g)
        want, same, found = reference.append(new, a), plain.step(new), fused.step(new)
        assert torch.equal(want, same) and a.lengths == b.lengths == c.lengths, step
        true = exact.append(new, d)
        error, rounding = ((logits - true).norm() / true.norm() for logits in (found, want))
        assert error < max(1e-5, 1.5 * rounding), (step, error, rounding)
        worst = max(worst, error)
    assert worst < (1e-5 if numerics == "fp32" else 0.1)
    assert "reference" not in {
        row["implementation"] for row in ours.dispatch.rows() if row["operation"] != "grouped_attention"
    }
    if GPU:
        assert captures(ours) and fused.graph is not None


@pytest.mark.few(folder=["qwen2, yarn and some sliding layers"])
def test_prompts_of_every_size_equal_the_reference(folder):
    reference, ours = models(folder, "fp32")
    ids, counts = prompts(reference, 40, 23) if GPU else prompts(reference, 5, 3)
    for chunk in (1, 15, 40) if GPU else (4,):
        a, b = (m.append(ids, m.new_cache(2, 60), n_new=counts, chunk=chunk) for m in (reference, ours))
        for row, n in enumerate(counts):
            assert (a[row, :n] - b[row, :n]).abs().max() < 2e-4, chunk


def test_a_captured_step_reads_positions_and_ids_where_they_are(folder):
    """One step object run again at other positions and with other ids: nothing of the first run was kept by value."""
    from dsv4.model.step import CapturedStep

    model = load_model(folder, numerics="fp32", device=DEVICE, backend="reference")
    ids, _ = prompts(model, 50)
    cache, want = model.new_cache(1, 60), model.new_cache(1, 60)
    model.append(ids[:, :30], cache, logits="none"), model.append(ids[:, :30], want, logits="none")
    fed, start = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for t in range(30, 34):
        fed.fill_(int(ids[0, t])), start.fill_(t)
        with torch.inference_mode():
            _, logits = model.captured(CapturedStep(fed, start, 60, model.rope_frequencies()), cache)
        assert (logits - model.append(ids[:, t : t + 1], want)[0]).abs().max() < 1e-5


def test_rows_that_rest_and_the_end_of_the_context(folder):
    model = load_model(folder, numerics="fp32", device=DEVICE, backend="reference")
    ids, counts = prompts(model, 9, 30)
    cache, want = model.new_cache(2, 40), model.new_cache(2, 40)
    for c in (cache, want):
        model.append(ids, c, n_new=counts, logits="none")
    graph, new = DecodeGraph(model, cache), torch.tensor([[7], [8]])
    graph.step(new, active=[False, True])
    assert cache.lengths == [9, 31]
    model.append(new, want, n_new=[0, 1], logits="none")
    assert (graph.step(new) - model.append(new, want)).abs().max() < 1e-5
    cache.rewind([1, 2]), want.rewind([1, 2])
    assert (graph.step(new) - model.append(new, want)).abs().max() < 1e-5
    wide = DecodeGraph(model, cache, tokens=4)
    ids4 = torch.arange(8).view(2, 4)
    assert (wide.step(ids4) - model.append(ids4, want)).abs().max() < 1e-5
    wide.step(ids4)
    with pytest.raises(ContextOverrun):
        wide.step(ids4)
    assert cache.lengths == [18, 39]


# Over 5 s: every kernel of a prompt and of steps runs in Triton's interpreter.
@pytest.mark.few(folder=["qwen2, yarn and some sliding layers"])
def test_generation_on_the_triton_backend(folder):
    reference, ours = models(folder, "fp32")
    ids = prompts(reference, 4 if GPU else 2)[0][0].tolist()
    want = generate(reference, ids, n := 20 if GPU else 2).token_ids
    assert generate(ours, ids, n).token_ids == want
    assert generate_speculative(ours, [ids], n, LookupDrafter())[0].token_ids == want
    assert generate_on_device(ours, [ids], n, LookupDrafter())[0].token_ids == want
    assert all("tokens" in row["path"] for row in ours.layer_paths())


@pytest.mark.few(folder=["qwen2, yarn and some sliding layers"])
def test_a_watched_module_runs_by_itself(folder):
    _, ours = models(folder, "fp32")
    ids = prompts(ours, 3)[0]
    want, seen = ours(ids), []
    layer = ours.layers[0]
    for module in (layer.input_layernorm, layer.self_attn.q_proj, layer.mlp.up_proj):
        module.register_forward_hook(lambda *args: seen.append(args[2]))
    assert (ours(ids) - want).abs().max() < 1e-4 and len(seen) == 3
    assert seen[1].shape == (3, ours.config.num_attention_heads * ours.config.head_dim)


@pytest.mark.parametrize("right", [0, 2, 3])
def test_passes_as_captured_steps_change_nothing(folder, right):
    """Two texts, each up to the last token that the context holds."""
    model = load_model(folder, numerics="fp32", device=DEVICE, backend="triton" if GPU else "reference")
    ids, counts = prompts(model, 20, 33)
    ways = []

    def verify(model, cache):
        ways.append(Captured(model, cache))
        return ways[-1]

    for text in (row[:n].tolist() for row, n in zip(ids, counts)):
        plain = generate(model, text, 30).token_ids
        [out] = drafted(
            model,
            [text],
            30,
            Scripted([plain], [right], model.config.vocab_size),
            5,
            verify=verify,
            max_context=len(text) + 29,
        )
        assert out.token_ids == plain and (1, 6) in ways[-1].graphs
