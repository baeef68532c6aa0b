"""Random weights of ranks: parts of those of the whole model of the same seed."""

import pytest
import torch

from dsv4.errors import InputError
from dsv4.loaders.ledger import poison, poisoned
from dsv4.model import dummy
from dsv4.model.dummy import load_dummy
from dsv4.model.gqa.geometries import GEOMETRIES
from dsv4.model.ranks import Ranks
from dsv4.model.together import viewed
from dsv4.parallel.threads import together
from tests.checkpoints import SMALL

WIDE = SMALL | dict(moe_intermediate_size=256, n_routed_experts=8, o_groups=4, vocab_size=321)
THIN = dict(
    hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=101
)


@pytest.fixture(autouse=True)
def thinned(monkeypatch):
    """Flash of few small layers, drawn in pieces that parts begin and end within; and small GQA geometries."""
    for name, raw in GEOMETRIES.items():
        monkeypatch.setitem(GEOMETRIES, name, raw | THIN)
    monkeypatch.setattr(dummy, "preset", lambda name: dict(WIDE) if name == "flash" else None)
    monkeypatch.setattr(dummy, "PIECE", 3000)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("numerics", ["native", "fp32"])
@pytest.mark.parametrize("by_expert", [False, True], ids=["by width", "by expert"])
def test_what_a_rank_holds_is_of_the_whole_model(monkeypatch, size, numerics, by_expert):
    whole = dict(load_dummy("flash", numerics=numerics, mtp=True).named_parameters())
    filled, cut = dummy.fill_weights, set()

    def poisoned_first(model, *given):
        for p in model.parameters():
            poison(p)
        filled(model, *given)

    monkeypatch.setattr(dummy, "fill_weights", poisoned_first)
    for rank in range(size):
        model = load_dummy("flash", numerics=numerics, mtp=True, ranks=Ranks(rank, size, by_expert=by_expert))
        assert {name for name, _ in model.named_parameters()} == set(whole)
        for name, p in model.named_parameters():
            given, (p, part) = whole[name], viewed(model, name, p)
            if p.dim() == 4:
                given = given.unflatten(1, (p.shape[1], -1))
            if part is not None:
                cut.add(name.split(".", 2)[-1] if name.startswith("layers.") else name)
                assert given.shape == part.of(p.shape)
                given = given.narrow(part.axis, part.start, part.size)
            assert not poisoned(p) and torch.equal(bits(p), bits(given)), name
    assert {"embed.weight", "head.weight", "attn.attn_sink", "ffn.experts.w13.weight", "attn.wo_b.weight"} <= cut
    assert {"ffn.shared_experts.w2.weight", "attn.wq_b.weight"} <= cut and "attn.wkv.weight" not in cut


@pytest.mark.parametrize("geometry", ["qwen2.5-7b", "llama-8b"])
def test_a_rank_of_a_gqa_geometry_holds_what_is_of_the_whole_model(geometry):
    whole = dict(load_dummy(geometry, layers=1).named_parameters())
    cut = set()
    for rank in range(2):
        model = load_dummy(geometry, layers=1, ranks=Ranks(rank, 2))
        assert {name for name, _ in model.named_parameters()} == set(whole)
        for name, p in model.named_parameters():
            given, part = whole[name], viewed(model, name, p)[1]
            if part is not None:
                cut.add(name.removeprefix("model.layers.0."))
                given = given.narrow(part.axis, part.start, part.size)
            assert torch.equal(bits(p), bits(given)) and p.isfinite().all() and p.any(), name
    biases = {f"self_attn.{name}_proj.bias" for name in "qkv"} if geometry == "qwen2.5-7b" else set()
    weights = {f"self_attn.{name}_proj.weight" for name in "qkvo"} | {
        f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")
    }
    assert cut == biases | weights | {"model.embed_tokens.weight", "lm_head.weight"}


def test_seeds_names_and_pieces_differ():
    model, other = load_dummy("flash"), load_dummy("flash", seed=1)
    w, v = (m.get_parameter("layers.0.ffn.experts.w2.weight") for m in (model, other))
    assert not torch.equal(w, v) and not torch.equal(w, model.get_parameter("layers.1.ffn.experts.w2.weight"))
    assert len({bytes(bits(expert).numpy()) for expert in w}) == len(w)


def test_ranks_compute_what_the_whole_model_computes():
    ids = torch.randint(321, (2, 150), generator=torch.Generator().manual_seed(0))

    def served(ranks: Ranks) -> list:
        model = load_dummy("flash", numerics="fp32", backend="reference", mtp=True, ranks=ranks)
        cache = model.new_cache(2, 160)
        logits, streams = model.append(ids[:, :148], cache, logits="last", return_streams=True)
        return [logits, model.append(ids[:, 148:], cache), model.mtp_logits(streams[:1, :20], ids[:1, 1:21])]

    wanted = served(Ranks())
    for found in together(2, served):
        for mine, theirs in zip(found, wanted, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


def test_ranks_that_were_asked_for_others_are_refused():
    with pytest.raises(InputError, match="ranks differ in options"):
        together(2, lambda ranks: load_dummy("flash", seed=ranks.rank, ranks=ranks))
    with pytest.raises(InputError, match="num_key_value_heads is 2, which 4 ranks cannot share"):
        load_dummy("qwen2.5-7b", ranks=Ranks(0, 4))
    with pytest.raises(InputError, match="num_attention_heads is 4, which 3 ranks cannot share"):
        load_dummy("flash", ranks=Ranks(0, 3))
