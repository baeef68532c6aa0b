"""What a checkpoint of a given configuration must hold: names, dtypes and shapes, in official names.

Independent of any file, so that a file can be held against it, and so that sizes can be planned
without one. Configurations of the published Flash and Pro releases lie in `presets/`.
"""

from collections.abc import Mapping
from importlib import resources

from dsv4.loaders.errors import CheckpointError
from dsv4.loaders.files import parse_json

FP8_MATRICES = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")  # and the indexer's wq_b, the shared experts, e_proj, h_proj
Shape = tuple[int, ...]
Tensors = dict[str, tuple[str, Shape]]


def preset(name: str) -> dict | None:
    """Official config of a published release ('flash' or 'pro'), or None."""
    file = resources.files("dsv4.loaders") / "presets" / f"{name}.json"
    return parse_json(file.read_bytes(), file.name) if name in ("flash", "pro") else None


def official_tensors(
    config, mtp: bool = True, dense: str = "FP8", experts: str = "MXFP4", scale: str = "F8_E8M0"
) -> Tensors:
    """Official name → (dtype, shape) of every tensor.

    config: dsv4.model.config.ModelConfig. dense: 'FP8' (official) or a float dtype for the attention and
    shared-expert matrices; experts: 'MXFP4', 'FP8', 'NVFP4' or a float dtype for routed experts (NVFP4
    for backbone experts only; those of MTP blocks stay MXFP4). scale: dtype of FP8 block scales.
    """
    t: Tensors = {}
    d, plain = config.hidden_size, "BF16" if dense == "FP8" else dense
    _plain(t, "embed.weight", plain, config.vocab_size, d)
    _plain(t, "head.weight", plain, config.vocab_size, d)
    _plain(t, "norm.weight", plain, d)
    _hyper_head(t, "", config)
    for spec in config.layers:
        _block(t, spec, config, dense, experts, scale)
    for spec in config.mtp_layers if mtp else ():
        p = spec.prefix
        _block(t, spec, config, dense, "MXFP4" if experts == "NVFP4" else experts, scale)
        for name in ("e_proj", "h_proj"):
            matrix(t, f"{p}.{name}", (d, d), dense, config.weight_block_size, scale)
        for name in ("enorm", "hnorm", "norm"):
            _plain(t, f"{p}.{name}.weight", plain, d)
        _hyper_head(t, f"{p}.", config)
    return t


def check_extent(sources: Mapping, config) -> None:
    """Raise CheckpointError where a config asks for far more tensors than the file holds, before any is listed.

    sources: official tensor name → where it is. Only what a mistaken number can bring about is refused here (twice the
    tensors of the file, and some more); single absent tensors are named by whoever lists them.
    """
    blocks = config.num_hidden_layers + config.num_mtp_layers
    asked, there = blocks * (3 * config.n_routed_experts + 16), len(sources)
    if asked <= 2 * there + 1000:
        return
    experts = {n.split(".")[4] for n in sources if ".ffn.experts." in n}
    layers = {n.split(".")[1] for n in sources if n.startswith("layers.")}
    raise CheckpointError(
        f"config.json asks for n_routed_experts {config.n_routed_experts} in num_hidden_layers "
        f"{config.num_hidden_layers}, {asked} tensors or more; the file holds {there}, of {len(experts)} experts in "
        f"{len(layers)} layers: correct config.json, or fetch the missing shards"
    )


def matrix(t: Tensors, name: str, shape: Shape, form: str, block: Shape, scale: str) -> None:
    """Add the tensors of one matrix [O, K] in a format."""
    O, K = shape
    match form:
        case "FP8":
            t[f"{name}.weight"] = ("F8_E4M3", shape)
            t[f"{name}.scale"] = (scale, (-(-O // block[0]), -(-K // block[1])))
        case "MXFP4":
            t[f"{name}.weight"] = ("I8", (O, K // 2))
            t[f"{name}.scale"] = ("F8_E8M0", (O, K // 32))
        case "NVFP4":
            t[f"{name}.weight"] = ("U8", (O, K // 2))
            t[f"{name}.weight_scale"] = ("F8_E4M3", (O, K // 16))
            t[f"{name}.weight_scale_2"] = ("F32", ())
            t[f"{name}.input_scale"] = ("F32", ())
        case dtype:
            t[f"{name}.weight"] = (dtype, shape)


def _plain(t: Tensors, name: str, dtype: str, *shape: int) -> None:
    t[name] = (dtype, shape)


def _hyper_head(t: Tensors, prefix: str, c) -> None:
    _plain(t, f"{prefix}hc_head_fn", "F32", c.hc_mult, c.hc_mult * c.hidden_size)
    _plain(t, f"{prefix}hc_head_base", "F32", c.hc_mult)
    _plain(t, f"{prefix}hc_head_scale", "F32", 1)


def _block(t: Tensors, spec, c, dense: str, experts: str, scale: str) -> None:
    p, d, n, plain = spec.prefix, c.hidden_size, c.hc_mult, "BF16" if dense == "FP8" else dense
    for which in ("attn", "ffn"):
        _plain(t, f"{p}.{which}_norm.weight", plain, d)
        _plain(t, f"{p}.hc_{which}_fn", "F32", 2 * n + n * n, n * d)
        _plain(t, f"{p}.hc_{which}_base", "F32", 2 * n + n * n)
        _plain(t, f"{p}.hc_{which}_scale", "F32", 3)
    _attention(t, f"{p}.attn", c, spec, dense, plain, scale)
    E, I = c.n_routed_experts, c.moe_intermediate_size
    _plain(t, f"{p}.ffn.gate.weight", plain, E, d)
    if spec.hashed:
        _plain(t, f"{p}.ffn.gate.tid2eid", "I64", c.vocab_size, c.num_experts_per_tok)
    else:
        _plain(t, f"{p}.ffn.gate.bias", "F32", E)
    shapes = {"w1": (I, d), "w2": (d, I), "w3": (I, d)}
    for w, shape in shapes.items():
        matrix(t, f"{p}.ffn.shared_experts.{w}", shape, dense, c.weight_block_size, scale)
        for e in range(E):
            matrix(t, f"{p}.ffn.experts.{e}.{w}", shape, experts, c.weight_block_size, scale)


def _attention(t: Tensors, p: str, c, spec, dense: str, plain: str, scale: str) -> None:
    d, H, D, q = c.hidden_size, c.num_attention_heads, c.head_dim, c.q_lora_rank
    _plain(t, f"{p}.attn_sink", "F32", H)
    _plain(t, f"{p}.q_norm.weight", plain, q)
    _plain(t, f"{p}.kv_norm.weight", plain, D)
    shapes = (
        (q, d),
        (H * D, q),
        (D, d),
        (c.o_groups * c.o_lora_rank, H * D // c.o_groups),
        (d, c.o_groups * c.o_lora_rank),
    )
    for name, shape in zip(FP8_MATRICES, shapes, strict=True):
        matrix(t, f"{p}.{name}", shape, dense, c.weight_block_size, scale)
    if spec.compresses:
        _compressor(t, f"{p}.compressor", d, spec, D, plain)
    if spec.selects:
        matrix(t, f"{p}.indexer.wq_b", (c.index_n_heads * c.index_head_dim, q), dense, c.weight_block_size, scale)
        _plain(t, f"{p}.indexer.weights_proj.weight", plain, c.index_n_heads, d)
        _compressor(t, f"{p}.indexer.compressor", d, spec, c.index_head_dim, plain)


def _compressor(t: Tensors, p: str, d: int, spec, D: int, plain: str) -> None:
    width = spec.overlap * D  # where windows overlap each token feeds two entries
    _plain(t, f"{p}.ape", "F32", spec.ratio, width)
    _plain(t, f"{p}.wkv.weight", plain, width, d)
    _plain(t, f"{p}.wgate.weight", plain, width, d)
    _plain(t, f"{p}.norm.weight", plain, D)
