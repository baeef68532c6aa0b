"""The batch engine on a GPU: passes are captured steps on pages, and greedy text is that of the engine without
drafts."""

import pytest
import torch

from dsv4 import load_model
from dsv4.cache.paged import new_paged_cache
from dsv4.engine import BatchEngine, Request
from dsv4.engine.batch import REWIND
from dsv4.engine.generate import generate, generate_speculative
from dsv4.kernels.block_choice import Policy
from dsv4.model.gqa.choice import Attention
from dsv4.model.tokenizer import Tokenizer
from dsv4.sampling import Sampling
from dsv4.speculation import Adaptive, Static
from dsv4.speculation.captured import Captured
from dsv4.speculation.draft import LookupDrafter, MTPDrafter
from scripts.bench.speculation_traces import PROMPT, ROOT
from scripts.bench.waits import counted_syncs
from tests.texts import CODE, PROSE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NUMERICS = {
    "fp32": ("fp32", "auto", "auto"),
    "native": ("native", "auto", "auto"),
    "qat, packed caches": ("qat", "fp8", "fp4"),
}


@pytest.fixture(scope="module", params=NUMERICS.values(), ids=NUMERICS)
def model(request):
    numerics, cache, index = request.param
    return load_model(
        ROOT / "demo", numerics=numerics, mtp=True, device="cuda", backend="triton", cache=cache, index_cache=index
    )


@pytest.fixture(scope="module")
def texts(model):
    encode = Tokenizer(ROOT / "demo", model.config.vocab_size).encode
    return [ids[at : at + PROMPT] for ids in map(encode, (CODE, PROSE)) for at in range(0, 6 * PROMPT, 2 * PROMPT)]


def through_engine(model, texts, drafter=None, policy=None, pages=None, sampling=Sampling(), context=320, **how):
    cache = new_paged_cache(model, 3, context, max_rewind=REWIND, prefixes=4, pages=pages)
    found = {}
    engine = BatchEngine(
        model, cache, on_result=lambda r: found.update({r.id: r}), drafter=drafter, policy=policy, **how
    )
    for i, ids in enumerate(texts):
        engine.submit(Request(str(i), tuple(ids), 48, sampling=sampling))
    engine.run()
    assert not any(r.error for r in found.values()), [str(r.error) for r in found.values()]
    return [found[str(i)].token_ids for i in range(len(texts))], engine


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 0.9, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "drafter,policy",
    [(MTPDrafter, Static(3)), (MTPDrafter, Adaptive()), (LookupDrafter, Static(4))],
    ids=["mtp", "mtp, adaptive", "lookup"],
)
def test_tokens_are_those_without_drafts(model, texts, drafter, policy, sampling):
    plain, bare = through_engine(model, texts, sampling=sampling)
    found, engine = through_engine(model, texts, drafter(), policy, sampling=sampling)
    assert found == plain
    assert all(graph.graph is not None for e in (bare, engine) for graph in e.passes.verify.graphs.values())
    assert len(engine.passes.verify.graphs) > 1 and (drafter is LookupDrafter or engine.passes.drafter._run.graphs)


@pytest.mark.parametrize(
    "drafter,policy",
    [(None, None), (MTPDrafter, Static(1)), (MTPDrafter, Adaptive()), (LookupDrafter, Static(4))],
    ids=["plain", "mtp", "mtp, adaptive", "lookup"],
)
def test_rows_together_share_captured_passes(model, texts, drafter, policy):
    """In fp32 their text is that of rows alone; joins, leaves and a prefix of a block that all borrow."""
    prefix = (texts[0] * 2)[:128]
    asked = [prefix + ids[: 9 + 5 * i] for i, ids in enumerate(texts)]
    found, engine = through_engine(model, asked, drafter and drafter(), policy, together=True)
    graphs = engine.passes.verify.graphs
    assert {rows for rows, _ in graphs} >= {3} and all(graph.graph is not None for graph in graphs.values())
    if drafter is MTPDrafter:
        assert {rows for rows, _ in engine.passes.drafter._run.graphs} >= {3}
    if model.numerics.name == "fp32":
        assert found == through_engine(model, asked)[0]
    assert engine.prefixes.hit_tokens > 0
    engine.prefixes.clear()
    assert all(pool.live == 0 for pool in engine.cache.pools.values())


@pytest.mark.parametrize("drafter,drafts", [(MTPDrafter, 3), (LookupDrafter, 4)], ids=["mtp", "lookup"])
def test_joint_passes_are_steps_up_to_the_end_of_the_context(model, texts, drafter, drafts):
    """Requests as long as the context. One is near its end while another drafts: the pass is as wide as the widest."""

    def steps_only(model, cache):
        verify = Captured(model, cache)
        verify.append = lambda *_: pytest.fail("a pass was an append")
        return verify

    context = max(map(len, texts)) + 47
    found, _ = through_engine(
        model, texts, drafter(), Static(drafts), context=context, together=True, verify=steps_only
    )
    assert model.numerics.name != "fp32" or found == through_engine(model, texts, context=context)[0]


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize(
    "drafter,policy",
    [(None, None), (MTPDrafter, Static(1)), (LookupDrafter, Static(3))],
    ids=["plain", "mtp", "lookup"],
)
def test_the_host_waits_once_a_pass(model, texts, drafter, policy, together):
    """Greedy rows in the midst of their answers, whose graphs have all been captured."""
    _, engine = through_engine(model, texts[:3], drafter and drafter(), policy, together=together)
    for i, ids in enumerate(texts[:3]):
        engine.submit(Request(f"again {i}", tuple(ids), 48))
    while not (len(engine.running) == 3 and all(len(w.result.token_ids) > 4 for w in engine.running)):
        engine.step()
    passes, advance = [], engine.passes.advance
    engine.passes.advance = lambda works: (passes.append(len(works)), advance(works))[1]
    with counted_syncs() as waits:
        for _ in range(5):
            engine.step()
    assert len(engine.running) == 3 and sum(passes) == 15 and len(passes) == (5 if together else 15)
    assert len(waits) == len(passes), waits


def test_prefixes_and_rows_leave_no_trace(model, texts):
    """Requests over one prefix of two blocks, borrowed and written behind, against each by itself."""
    prefix = (texts[0] * 3)[:256]
    prompts_ = [prefix + ids[:9] for ids in texts]
    found, engine = through_engine(model, prompts_, MTPDrafter(), Static(3))
    assert engine.prefixes.hit_tokens > 0
    assert found == [through_engine(model, [ids])[0][0] for ids in prompts_]


def test_lookup_drafts_of_one_text(model, texts):
    plain = [generate(model, ids, 48).token_ids for ids in texts]
    assert [
        generate_speculative(model, [ids], 48, LookupDrafter(), policy=Static(4))[0].token_ids for ids in texts
    ] == plain


@pytest.mark.parametrize("policy", [None, Policy("bounds of 16", "bound", 16, 1, 2, 3)], ids=["all", "bound"])
@pytest.mark.parametrize("numerics", ["fp32", "native"])
def test_a_gqa_model_says_the_same_with_drafts_on_borrowed_pages(numerics, policy):
    """Captured passes that gather pages: with drafts and without, beside others over one prefix and alone."""
    attention = None if policy is None else Attention(policy)
    model = load_model(ROOT / "demo_gqa", numerics=numerics, device="cuda", backend="triton", attention=attention)
    encode = Tokenizer(ROOT / "demo_gqa", model.config.vocab_size).encode
    asked = [ids[at : at + PROMPT] for ids in map(encode, (CODE, PROSE)) for at in (0, 2 * PROMPT)]
    prefix = (asked[0] * 3)[:256]
    asked = [prefix + ids[:9] for ids in asked]
    plain, _ = through_engine(model, asked)
    found, engine = through_engine(model, asked, LookupDrafter(), Static(4))
    assert found == plain and engine.prefixes.hit_tokens > 0
    assert all(graph.graph is not None for graph in engine.passes.verify.graphs.values())
    assert plain == [through_engine(model, [ids])[0][0] for ids in asked]
