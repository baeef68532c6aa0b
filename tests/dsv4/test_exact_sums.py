"""What the index queries are made of has exact sums: FP8 tensor cores would move some over a boundary of FP4."""

from dsv4.model.dummy import plan_dummy
from dsv4.model.spec import LayerKind


def test_inputs_of_csa_layers_have_exact_sums():
    model = plan_dummy("flash", 4, "qat", "triton", "fp8", "fp4")
    for layer in model.layers:
        csa = layer.attn.kind is LayerKind.CSA
        for part in (layer.attn.wq_a, layer.attn.wkv):
            assert part.packed().exact_sums is csa
        assert not layer.attn.wq_b.packed().exact_sums and not layer.attn.wo_b.packed().exact_sums
    assert {layer.attn.kind for layer in model.layers} >= {LayerKind.CSA, LayerKind.HCA}
