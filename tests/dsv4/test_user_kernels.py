"""Kernels of users inside models: the same numbers where they compute the same, findings where they do not, and a
ledger that shows nothing else ran."""

import pytest
import torch

from dsv4 import load_model
from dsv4.cache.host_tier.choice import memory_named
from dsv4.cache.paged import new_paged_cache
from dsv4.engine.batch import BatchEngine
from dsv4.engine.generate import generate, generate_speculative
from dsv4.engine.state import Request
from dsv4.errors import InputError, KernelFailed, KernelMismatch, KernelNotReached
from dsv4.kernels.dispatch import DispatchLedger, bind
from dsv4.kernels.fusions import COMPOSITIONS
from dsv4.kernels.operations import GQA_OPERATIONS, OPERATIONS
from dsv4.model.gqa.choice import attention_named
from dsv4.runtime import user_kernels
from dsv4.runtime.graph import DecodeGraph
from dsv4.sampling import Sampling
from dsv4.speculation.draft import MTPDrafter
from tests.conftest import ROOT

SOURCE = """
from dsv4.kernels.operations import OPERATIONS

attention, scores = OPERATIONS["sparse_attention"], OPERATIONS["index_scores"]

def same(q, window, window_index, entries, entry_index, sink, scale):
    return attention(q, window, window_index, entries, entry_index, sink, scale)

def sinkless(q, window, window_index, entries, entry_index, sink, scale):
    return attention(q, window, window_index, entries, entry_index, sink - 1e9, scale)

def halved(*arguments):
    return attention(*arguments)[..., ::2]

def broken(*arguments):
    raise RuntimeError("out of tiles")

def scored(q, weights, keys, visible):
    return scores(q, weights, keys, visible)
"""
IDS = torch.randint(0, 320, (1, 60), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("kernels") / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def models(official, file):
    """(the reference's model, the model with two kernels that call the reference)."""
    kernels = {"sparse_attention": f"{file}:same", "index_scores": f"{file}:scored"}
    return [load_model(official, numerics="qat", backend="reference", kernels=k) for k in ({}, kernels)]


def through_users_alone(model) -> None:
    assert all(a.calls and not a.missing and not a.other_calls for a in user_kernels.accounts(model))
    user_kernels.check_reached(model)


def test_a_right_kernel_changes_no_bit_of_prefill_decode_and_captured_steps(models):
    found = []
    for model in models:
        cache = model.new_cache(1, 80)
        logits = [model.append(IDS, cache), model.append(IDS[:, :1], cache)]
        found.append([*logits, DecodeGraph(model, cache).step(IDS[:, 1:2]).clone()])
    assert all(map(torch.equal, *found))
    through_users_alone(models[1])


def test_a_right_kernel_changes_no_draft_and_no_row_of_a_batch(models):
    texts = []
    for model in models:
        before = model.dispatch.counter("sparse_attention", "mine.py:same", "in place of the reference backend's")[0]
        (drafted,) = generate_speculative(model, [IDS[0, :40].tolist()], 4, MTPDrafter())
        results = {}
        cache = new_paged_cache(model, 2, 64)
        engine = BatchEngine(model, cache, on_result=lambda r: results.setdefault(r.id, r.token_ids), together=True)
        for i in range(2):
            engine.submit(Request(str(i), IDS[0, i : i + 30].tolist(), 4, sampling=Sampling()))
        engine.run()
        texts.append((drafted.token_ids, results))
        after = model.dispatch.counter("sparse_attention", "mine.py:same", "in place of the reference backend's")[0]
        assert (after > before) == bool(model.replacements)
    assert texts[0] == texts[1] and len(texts[0][1]) == 2
    through_users_alone(models[1])


def test_the_ledger_has_the_user_s_kernel_alone(models):
    rows = [row for row in models[1].dispatch.rows() if row["operation"] == "sparse_attention" and row["calls"]]
    assert [row["implementation"] for row in rows] == ["mine.py:same"]
    document = user_kernels.documents(models[1])["sparse_attention"]
    assert document["kernel"] == "mine.py:same" and len(document["sha256"]) == 64
    assert document["dropped"] == ["complete", "together"] and document["other_calls"] == 0


def test_every_operation_of_a_model_goes_through_what_it_bound(official):
    """All of them replaced, with packed caches: whatever else is counted computes no operation."""
    model = load_model(
        official, numerics="qat", cache="fp8", index_cache="fp4", kernels=dict.fromkeys(OPERATIONS, "reference")
    )
    assert torch.equal(
        generated(model), generated(load_model(official, "qat", "reference", cache="fp8", index_cache="fp4"))
    )
    ran = {r["operation"] for r in model.dispatch.rows() if r["calls"]}
    assert ran <= set(OPERATIONS) and not [a.operation for a in user_kernels.accounts(model) if a.missing]


def generated(model) -> torch.Tensor:
    cache = model.new_cache(1, 160)
    model.append(IDS.repeat(1, 2), cache, logits="none")
    return model.append(IDS[:, 20:50], cache)


@pytest.mark.few("settings", "missing")
@pytest.mark.parametrize(
    "settings, missing",
    [
        ({}, {"chunked_prefill", "choose_blocks", "fetch", "gather_attention", "summarise_blocks", "write_back"}),
        ({"policy": "page-bound", "chunks": "64,8,24"}, {"fetch", "grouped_attention", "write_back"}),
        ({"policy": "block-bound", "host": True}, {"chunked_prefill"}),
    ],
)
def test_every_operation_of_a_gqa_model_too(settings, missing):
    reads = attention_named(settings.get("policy"), "512" if settings else None, False, settings.get("chunks"))
    where = memory_named("host" if settings.get("host") else "device", None, False, bool(settings.get("host")))
    kernels = dict.fromkeys(GQA_OPERATIONS, "reference")
    model = load_model(ROOT / "demo_gqa", attention=reads, kv_memory=where, kernels=kernels)
    generate(model, list(range(4, 404)), 3)
    assert {a.operation for a in user_kernels.accounts(model) if a.missing} == missing
    assert all(a.other_calls == 0 for a in user_kernels.accounts(model))


@pytest.mark.parametrize(
    "operation, apart",
    [
        ("sparse_attention", ()),
        ("experts", ("moe",)),
        ("index_scores", ("select_entries",)),
        ("grouped_linear", ("project_heads",)),
        ("mhc_post", ("mhc_post_pre_norm", "mhc_post_head_norm")),
        ("write_rows", ("attention_inputs",)),
    ],
)
def test_compositions_that_would_bypass_a_kernel_are_taken_apart_and_said(official, operation, apart):
    op = bind(OPERATIONS, "triton", DispatchLedger(), COMPOSITIONS, {operation: "reference"})
    assert op.unfused == apart and op.fused.isdisjoint(apart) and len(op.fused) == len(COMPOSITIONS) - 1 - len(apart)
    if operation == "mhc_post":
        model = load_model(official, backend="triton", kernels={operation: "reference"})
        (said,) = user_kernels.before(model)
        assert said == f"kernel: mhc_post runs reference; taken apart for it: {', '.join(apart)}"


def test_a_fault_of_a_kernel_is_an_error_that_names_it(official, file):
    ids = IDS[:, :10]
    with pytest.raises(
        KernelMismatch, match=r"sparse_attention: kernel mine.py:halved returned .* 32\]; expected .* 64\]"
    ):
        load_model(official, kernels={"sparse_attention": f"{file}:halved"})(ids)
    with pytest.raises(KernelFailed, match=r"mine.py:broken raised RuntimeError: out of tiles at mine.py:16"):
        load_model(official, kernels={"sparse_attention": f"{file}:broken"})(ids)


def test_a_kernel_that_the_model_never_reached_is_refused(official, file):
    model = load_model(official, kernels={"index_scores": f"{file}:scored"})
    with pytest.raises(KernelNotReached, match="the model, which ran no step"):
        user_kernels.check_reached(model)
    model(IDS[:, :10])
    with pytest.raises(KernelNotReached, match="mine.py:scored never ran: the model calls index_scores only where"):
        user_kernels.check_reached(model)


def test_calls_through_something_else_are_told(models):
    model = load_model(ROOT / "demo_gqa", kernels={"silu_mul": "reference"})
    model.dispatch.counter("silu_mul", "triton", "by mistake")[0] += 2
    (account,) = user_kernels.accounts(model)
    assert account.other_calls == 2 and "ran 2 times through something else" in account.missing


def test_a_function_runs_too_and_no_other_process_can_load_it(official):
    model = load_model(official, kernels={"sparse_attention": lambda *a: OPERATIONS["sparse_attention"](*a)})
    model(IDS[:, :10])
    through_users_alone(model)
    with pytest.raises(InputError, match="given as a function"):
        user_kernels.asked(model.replacements)


# ---- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("operation", ["sparse_attention", "rotate", "experts", "linear", "mhc_post"])
def test_fused_kernels_taken_apart_give_the_same_on_a_gpu(official, operation):
    """The reference in one operation's place, its fused kernels apart, beside the triton backend's own: prefill, and
    steps that are not captured."""
    ids, found = IDS.repeat(1, 3), []
    for kernels in ({}, {operation: "reference"}):
        model = load_model(official, numerics="fp32", device="cuda", mtp=False, kernels=kernels)
        cache = model.new_cache(1, 200)
        parts = [model.append(ids[:, :170], cache)]
        step = DecodeGraph(model, cache)
        parts += [step.step(ids[:, t : t + 1]).clone() for t in range(170, 178)]
        assert (step.graph is None) == bool(kernels)
        found.append(torch.cat(parts, 1))
        user_kernels.check_reached(model)  # without one there is nothing to reach
    assert (found[0] - found[1]).abs().max() < 2e-4
