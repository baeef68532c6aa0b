"""Section 1.2: number formats and dtypes."""

import torch

from dsv4.kernels.fusions.compositions import INDEX_KEY_BLOCK
from dsv4.kernels.quantize import WeightFormat, formats, quantize_mxfp4, to_float, weights
from dsv4.loaders.load import Inventory
from dsv4.model.attention import GroupedLinear
from dsv4.model.linear import Linear
from dsv4.probes.faults import Site, mutation
from dsv4.probes.faults.configuration import stated
from dsv4.probes.faults.loading import rewritten

SECTION = "1.2", "Number formats and dtypes"

# leaves that are fp32 on disk, of modules that are no matrices
ISLANDS = ("attn_sink", "ape", "bias", "fn", "base", "scale")


def e8m0(site: Site, value_of) -> None:
    """E8M0 scales of weights are decoded by value_of(bytes uint8)."""
    site.patch(weights, "decode_e8m0", lambda scale: value_of(scale.view(torch.uint8)))


def decoded(site: Site, value_of) -> None:
    """The loader dequantises FP8 matrices by value_of(codes float8, fp32 scale of each value)."""

    def read(inventory, base, block, cut=None):
        if inventory.formats[base] is not WeightFormat.FP8:
            return real(inventory, base, block, cut)
        w = inventory.read_packed(base, block, cut)
        (O, K), (bo, bk) = w.weight.shape, block
        scale = weights.spread(weights.spread(weights.scale_to_float(w.scale), bk, K, -1), bo, O, -2)
        return value_of(w.weight, scale)

    real = site.patch(Inventory, "read_matrix", read)


def stored_as(site: Site, leaf: str, change) -> None:
    """What is read of the official tensors ending in `leaf` passes through change(tensor)."""

    def read(inventory, name, cut=None):
        found = real(inventory, name, cut)
        return change(found) if name.endswith(leaf) else found

    real = site.patch(Inventory, "read", read)


@mutation("1.2", bugs=(17,), parts=("E8M0", "scale"), probes=("format_decode",))
def e8m0_byte_as_a_number(site: Site) -> None:
    """The E8M0 byte of a scale is copied into a float: 120 becomes 120.0, not 2^−7."""
    e8m0(site, lambda byte: byte.float())


@mutation("1.2", bugs=(17, 30), parts=("E8M0", "scale"), probes=("format_decode",))
def e8m0_bias_off_by_one(site: Site) -> None:
    """The bias of E8M0 is taken for 128: every quantised weight is half of what it should be, cos 1.000."""
    real = formats.decode_e8m0
    e8m0(site, lambda byte: real(byte) / 2)


@mutation("1.2", bugs=(31,), parts=("E8M0", "scale"), probes=("format_decode",))
def e8m0_byte_as_e4m3(site: Site) -> None:
    """E8M0 scales reach a kernel for E4M3 scales."""
    e8m0(site, lambda byte: byte.view(torch.float8_e4m3fn).float().nan_to_num(448.0))


@mutation("1.2", bugs=(30,), parts=("nibbles", "experts"), probes=("format_decode",))
def nibbles_swapped(site: Site) -> None:
    """The high nibble is taken for the even column: same std, same histogram, cos 0."""
    real = formats.unpack_e2m1
    site.patch(weights, "unpack_e2m1", lambda packed: real((packed >> 4) | (packed << 4)))


@mutation("1.2", bugs=(30,), parts=("nibbles", "experts"), probes=("format_decode",))
def codes_of_the_two_halves_in_a_byte(site: Site) -> None:
    """A byte is taken to hold columns k and k + K/2 instead of neighbours."""
    real = formats.unpack_e2m1

    def halves(packed):
        values = real(packed)
        return torch.cat((values[..., 0::2], values[..., 1::2]), -1)

    site.patch(weights, "unpack_e2m1", halves)


@mutation("1.2", bugs=(30,), parts=("experts",), probes=("format_decode",))
def scale_group_off_by_one(site: Site) -> None:
    """Each group of 32 columns of an FP4 row takes the scale of the group after it."""
    real = weights.scale_to_float
    site.patch(weights, "scale_to_float", lambda scale: real(scale).roll(-1, -1))


@mutation("1.2", bugs=(19,), parts=("fp8",), probes=("format_decode",))
def fp8_codes_cast_as_integers(site: Site) -> None:
    """The uint8 codes of FP8 matrices are cast to float as the integers 0 … 255."""
    decoded(site, lambda codes, scale: codes.view(torch.uint8).float() * scale)


@mutation("1.2", bugs=(24,), parts=("fp8",), probes=("format_decode",))
def fp8_read_as_fnuz(site: Site) -> None:
    """OCP E4M3 codes are read as FNUZ: half the value, and 0x80 is NaN, made 0 here."""
    decoded(
        site, lambda codes, scale: codes.view(torch.uint8).view(torch.float8_e4m3fnuz).float().nan_to_num(0) * scale
    )


@mutation("1.2", bugs=(21,), parts=("fp32 scales",), probes=("format_decode",))
def fp32_scales_cut_to_powers_of_two(site: Site) -> None:
    """A kernel keeps the exponents of fp32 block scales and drops their mantissas; the codes were made with all of
    it."""
    real = weights.scale_to_float
    cut = lambda scale: torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent - 1)
    site.patch(weights, "scale_to_float", lambda scale: cut(scale) if scale.dtype is torch.float32 else real(scale))


@mutation("1.2", bugs=(20,), parts=("FP8 simulation",), probes=("format_decode",), numerics="qat:fp32")
def activation_scale_rounded_down(site: Site) -> None:
    """The scale of quantised activations drops its mantissa instead of rounding up to a power of two: the largest
    saturate."""

    def change(real):
        def simulate(x, block, keep=0):
            if keep:
                return torch.cat((simulate(x[..., :-keep], block), x[..., -keep:]), -1)
            K = x.shape[-1]
            y = torch.nn.functional.pad(x.float(), (0, -K % block)).unflatten(-1, (-1, block))
            scale = torch.exp2(torch.floor(torch.log2(y.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
            return (formats.round_e4m3(y / scale).float() * scale).flatten(-2)[..., :K].to(x.dtype)

        return simulate

    site.kernel("simulate_fp8_blocks", change)


@mutation("1.2", bugs=(21,), parts=("FP8 simulation",), probes=("format_decode",), numerics="qat:fp32")
def rotated_dims_of_kv_quantised_too(site: Site) -> None:
    """The FP8 of main KV covers all dims, the rotated ones as well, which stay BF16 in the official code."""
    site.kernel("simulate_fp8_blocks", lambda real: lambda x, block, keep=0: real(x, block))


@mutation("1.2", bugs=(29,), parts=("indexer keys",), probes=("index_oracle",), numerics="qat:fp32")
def scale_of_index_keys_never_stored(site: Site) -> None:
    """The FP4 scale of index keys is computed and never stored: keys come back by a scale of 1."""

    def change(real):
        def simulate(x, block=INDEX_KEY_BLOCK):
            if x.dim() > 2:  # queries have a dim of heads
                return real(x, block)
            y = x.unflatten(-1, (-1, block))
            quantised = real(x, block).unflatten(-1, (-1, block))
            scale = torch.exp2(torch.ceil(torch.log2(y.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 6)))
            return (quantised / scale).flatten(-2)

        return simulate

    site.kernel("simulate_fp4_blocks", change)


@mutation("1.2", bugs=(18,), parts=("sink",), probes=("load_ledger",))
def fp32_sink_read_with_bf16_stride(site: Site) -> None:
    """attn_sink is fp32 on disk and read as if it were bf16: every other head gets the low half of a number."""

    def change(sink):
        halves = sink.view(torch.bfloat16)[: len(sink)].float()
        return torch.where(halves.isfinite(), halves, 0)

    stored_as(site, "attn_sink", change)


@mutation("1.2", bugs=(25,), parts=("fp32 island",), probes=("dtype_ledger",))
def fp32_islands_cast_to_bf16(site: Site) -> None:
    """A blanket cast to bf16 takes the fp32 islands along: sinks, ape, mHC, gate.bias."""

    def change(subject):
        for module in subject.model.modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                if leaf in ISLANDS and parameter.dtype is torch.float32:
                    parameter.data = parameter.data.bfloat16()

    site.after_load(change)


@mutation("1.2", bugs=(25,), parts=("ape", "compressor"), probes=("dtype_ledger",))
def position_biases_through_bf16(site: Site) -> None:
    """ape passes through bf16 on its way into an fp32 parameter: the dtype is right, the bits are gone."""
    stored_as(site, ".ape", lambda t: t.bfloat16().float())


@mutation("1.2", bugs=(25,), parts=("attn_sink",), probes=("dtype_ledger",))
def sinks_written_in_bf16(site: Site) -> None:
    """A converter writes attn_sink in BF16."""
    rewritten(site, lambda name, t: t.bfloat16() if name.endswith("attn_sink") else t)


@mutation("1.2", bugs=(27,), parts=("router",), probes=("load_ledger",))
def router_requantised(site: Site) -> None:
    """The BF16 router weights are requantised to 4 bits: picks flip from token to token."""

    def change(subject):
        for block in subject.model.layers:
            gate = block.ffn.gate.weight
            packed = weights.PackedWeight(WeightFormat.MXFP4, *quantize_mxfp4(gate.data))
            gate.data = to_float(packed).to(gate.dtype)

    site.after_load(change)


@mutation("1.2", bugs=(26,), parts=("route_scored",), probes=("backend_matrix",))
def router_scores_in_bf16(site: Site) -> None:
    """sqrt(softplus) of the router's scores is computed in bf16: near ties go to the wrong expert."""
    rounded = lambda t: t.bfloat16().to(t.dtype)
    site.kernel(
        "route_scored", lambda real: lambda x, w, bias, *rest: real(rounded(x), rounded(w), rounded(bias), *rest)
    )


@mutation(
    "1.2", bugs=(26,), parts=("sparse attention", "sparse_attention", "attention core"), probes=("edges", "influence")
)
def sink_softmax_in_bf16(site: Site) -> None:
    """The softmax with the sink is computed in bf16."""
    rounded = lambda t: None if t is None else t.bfloat16().to(t.dtype)
    site.kernel(
        "sparse_attention",
        lambda real: (
            lambda q, window, near, entries, far, sink, *rest: rounded(
                real(q, rounded(window), near, rounded(entries), far, rounded(sink), *rest)
            )
        ),
    )


@mutation("1.2", bugs=(22,), parts=("wo_a", "output projection"), probes=("load_ledger",), numerics="native")
def wo_a_repacked_for_another_kernel(site: Site) -> None:
    """wo_a is repacked in memory for a kernel that does not run it: the grouped product reads the tiles as rows."""

    def change(subject):
        for module in subject.model.modules():
            if isinstance(module, GroupedLinear):
                codes = module.weight.data.view(torch.uint8)
                tiles = codes.unflatten(1, (-1, 8)).unflatten(0, (-1, 8)).transpose(1, 2)
                module.weight.data = tiles.reshape(codes.shape).view(torch.float8_e4m3fn)

    site.after_load(change)


@mutation("1.2", bugs=(64,), parts=("inputs",), probes=("dtype_ledger",), numerics="qat:fp32")
def inputs_of_fp8_linears_not_quantised(site: Site) -> None:
    """In simulated numerics, the inputs of FP8 matrices stay as they are."""

    def change(subject):
        for module in subject.model.modules():
            if isinstance(module, Linear):
                module.simulate = False

    site.after_load(change)


@mutation("1.2", bugs=(30,), parts=("expert_dtype",), probes=("config_ledger",))
def expert_dtype_of_the_base_release(site: Site) -> None:
    """config.json says expert_dtype fp8, as Flash-Base does, and the experts are packed FP4."""
    stated(site, expert_dtype="fp8")
