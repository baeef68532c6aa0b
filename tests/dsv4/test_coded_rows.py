"""Inputs of sublayers with what they are rounded to: where they come from and go to, and that no hook sees them."""

import pytest
import torch

from dsv4 import load_model
from dsv4.kernels.hyper_connections import triton_merge
from dsv4.kernels.quantize.coded import CodedRows, RoundedRows
from dsv4.kernels.quantize.reference import simulate_fp8_blocks
from dsv4.model.spec import LayerKind
from dsv4.model.step import CapturedStep
from dsv4.runtime.graph import DecodeGraph
from tests import checkpoints
from tests.dsv4.launches import Launches

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FEW = dict(
    hidden_size=256,
    index_n_heads=8,
    n_routed_experts=4,
    moe_intermediate_size=128,
    q_lora_rank=128,
    hc_sinkhorn_iters=2,
    vocab_size=160,
    num_hidden_layers=3,
    compress_ratios=[0, 4, 128, 0],
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return checkpoints.write_official(tmp_path_factory.mktemp("coded") / "c", checkpoints.BRIEF | FEW)


def watched(path, numerics: str, hook: bool = False):
    """A model; and what its `linears` are given from now on, and what a hook of every sublayer sees."""
    model = load_model(path, numerics=numerics, backend="triton", device=DEVICE, mtp=False)
    assert {block.spec.kind for block in model.layers} == {*LayerKind}
    given: dict[str, list] = {"linears": [], "hooks": []}
    real = model.op.linears
    model.op.linears = lambda x, *rest: given["linears"].append(x) or real(x, *rest)
    for block in model.layers if hook else ():
        for sublayer in (block.attn, block.ffn):
            sublayer.register_forward_pre_hook(lambda _, args: given["hooks"].append(args[0]))
    return model, given


def launched(model, monkeypatch) -> None:
    """A captured step of two rows, whose kernels do not run."""
    ids, start = torch.zeros(2, 1, dtype=torch.int64), torch.full((2,), 5)
    with torch.inference_mode(), Launches(monkeypatch):
        model.captured(CapturedStep(ids, start, 8, model.rope_frequencies()), model.new_cache(2, 8))


@pytest.fixture
def as_on_hopper(monkeypatch):
    """Few tokens have codes too."""
    monkeypatch.setattr(triton_merge, "capability", lambda device: (9, 0))
    monkeypatch.setattr(triton_merge, "FEWEST", 2)
    monkeypatch.setattr(triton_merge, "STREAMED", 1)


# Over 5 s: it interprets all kernels of three layers, twice.
def test_codes_go_where_the_input_is_rounded(path, as_on_hopper, monkeypatch):
    """Inputs of CSA layers, whose products have exact sums, come with numbers; low-rank queries and the head with
    nothing. The step has the bits of one without either."""
    ids = torch.tensor([[5], [80]])
    model, given = watched(path, "qat")
    logits = DecodeGraph(model, model.new_cache(2, 8)).step(ids).clone()
    plain, coded = torch.Tensor, CodedRows
    assert [type(x) for x in given["linears"]] == [coded, plain, RoundedRows, plain, coded, plain, plain]
    [each] = (x for x in given["linears"] if isinstance(x, RoundedRows))
    assert torch.equal(each.rounded, simulate_fp8_blocks(each.x, 128))
    for each in (x for found in given.values() for x in found if isinstance(x, CodedRows)):
        numbers = each.codes.view(torch.float8_e4m3fn).float().unflatten(1, (-1, 128)) * each.scales.T.unsqueeze(-1)
        assert torch.equal(numbers.flatten(1), simulate_fp8_blocks(each.x, 128).float())
    monkeypatch.undo()
    model, given = watched(path, "qat")
    assert torch.equal(logits, DecodeGraph(model, model.new_cache(2, 8)).step(ids))
    assert {type(x) for found in given.values() for x in found} == {torch.Tensor}


@pytest.mark.skipif(torch.cuda.is_available(), reason="counted in the interpreter")
@pytest.mark.parametrize("numerics, hook", [("qat", False), ("qat", True), ("native", False)])
def test_hooks_see_numbers_and_inputs_that_nothing_rounds_have_no_codes(
    path, as_on_hopper, monkeypatch, numerics, hook
):
    model, given = watched(path, numerics, hook)
    launched(model, monkeypatch)
    assert [type(x) for x in given["hooks"]] == [torch.Tensor] * (6 if hook else 0)
    rounded = numerics == "qat" and not hook
    assert {type(x) for x in given["linears"]} == {torch.Tensor, *((CodedRows, RoundedRows) if rounded else ())}
