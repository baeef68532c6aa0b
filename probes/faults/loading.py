"""Section 1.1, tensors: weights that never load, or load into another's place."""

import re
from collections.abc import Callable

import torch
from safetensors.torch import load_file, save_file

from dsv4.kernels.quantize import quantize_fp8
from dsv4.loaders import files, layouts
from dsv4.loaders import load as reading
from dsv4.loaders.config_files import read_config
from dsv4.loaders.convert import convert
from dsv4.loaders.ledger import LoadLedger
from dsv4.model import official, parameters
from dsv4.model.config import ModelConfig
from dsv4.probes.faults import Site, mutation

SECTION = "1.1", "Weight loading, key mapping, configuration"

KEYS = r"(layers\.\d+\.attn)\.indexer\.compressor\."


def renamed(site: Site, name_of: Callable[[str], str | None]) -> None:
    """The loader finds each tensor under name_of(its official name); None drops it."""

    def sources(tensors, layout):
        return {name_of(name): source for name, source in real(tensors, layout).items() if name_of(name) is not None}

    real = site.patch(reading, "canonical_sources", sources)


def not_strict(site: Site, start: Callable[[torch.Tensor], None] | None = None) -> None:
    """Nothing is checked: a parameter whose tensors are absent keeps what it was initialised with, random if not
    `start`."""

    def fill(pieces, inventory, parameters, progress=None):
        found = [p for p in pieces if all(name in inventory.sources for name in p.names.values())]
        return real(found, inventory, parameters, progress)

    real = site.patch(parameters, "fill", fill)
    site.patch(LoadLedger, "check", lambda ledger: None)
    site.patch(parameters, "poison", start or at_random)


def at_random(parameter: torch.Tensor) -> None:
    """As a framework initialises: normal, of a size that lets the model talk; tables and packed codes 0."""
    values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())) * 0.1
    parameter.copy_(values if parameter.is_floating_point() else torch.zeros_like(parameter))


def rewritten(site: Site, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """The files with change(name, tensor) in place of each tensor."""
    for file in site.checkpoint.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name: change(name, tensor).contiguous() for name, tensor in tensors.items()}, file)


@mutation("1.1", bugs=(8, 3), parts=("indexer.compressor", "indexer keys"), probes=("load_ledger",))
def indexer_compressor_under_another_prefix(site: Site) -> None:
    """The indexer's compressor is looked for inside the main compressor, not found, and left random: no error, fluent
    text."""
    renamed(site, lambda name: re.sub(KEYS, r"\1.compressor.indexer.", name))
    not_strict(site)


@mutation("1.1", bugs=(8,), parts=("indexer keys",), probes=("index_oracle",))
def indexer_compressor_random_in_memory(site: Site) -> None:
    """The indexer's compressors hold random weights after loading, and no name tells of it."""

    def change(subject):
        for block in subject.model.layers:
            if hasattr(block.attn, "indexer"):
                at_random(block.attn.indexer.compressor.wkv_gate.weight)

    site.after_load(change)


@mutation("1.1", bugs=(1,), parts=("hc_head",), probes=("load_ledger",))
def hc_head_dropped(site: Site) -> None:
    """The key normaliser knows no underscores before `head`: hc_head_fn, base and scale are dropped without an
    error."""
    renamed(site, lambda name: None if name.startswith("hc_head") else name)
    not_strict(site)


@mutation("1.1", bugs=(2,), parts=("experts",), probes=("load_ledger",))
def routed_experts_not_matched(site: Site) -> None:
    """Expert keys match no rule of the stack, and the loader is not strict: the routed experts stay random."""
    renamed(site, lambda name: None if re.match(r"layers\.\d+\.ffn\.experts\.", name) else name)
    not_strict(site)


@mutation("1.1", bugs=(9,), parts=("experts",), probes=("load_ledger",), numerics="native")
def expert_scales_left_out_of_the_stack(site: Site) -> None:
    """Stacking handles the experts' codes, not their scales: all of them are 1."""

    def change(subject):
        for block in subject.model.layers:
            block.ffn.experts.w2.scale.data.view(torch.uint8).fill_(127)

    site.after_load(change)


@mutation("1.1", bugs=(6,), parts=("gate.bias", "router"), probes=("load_ledger",))
def gate_bias_supplied_as_zeros(site: Site) -> None:
    """gate.bias is looked up under another name, and zeros are supplied: other experts in every scored layer."""
    renamed(site, lambda name: name.replace("gate.bias", "gate.e_score_correction_bias"))
    not_strict(site, torch.Tensor.zero_)


@mutation("1.1", bugs=(8,), parts=("attn_norm", "ffn_norm", "norms"), probes=("load_ledger",))
def norms_of_a_layer_exchanged(site: Site) -> None:
    """attn_norm and ffn_norm, alike in shape, are exchanged by the renaming rules."""
    other = {"attn_norm": "ffn_norm", "ffn_norm": "attn_norm"}
    renamed(site, lambda name: re.sub(r"(attn|ffn)_norm(?=\.weight)", lambda m: other[m[0]], name))


@mutation("1.1", bugs=(8, 3), parts=("kv_norm", "window KV"), probes=("load_ledger",))
def kv_norm_of_the_next_layer(site: Site) -> None:
    """The layer number of kv_norm is read one too low: each layer gets the norm of the next."""

    def sources(tensors, layout):
        found = real(tensors, layout)
        following = lambda n: re.sub(r"(?<=layers\.)\d+(?=\.attn\.kv_norm)", lambda m: str(int(m[0]) + 1), n)
        return {n: found.get(following(n), found[n]) for n in found}

    real = site.patch(reading, "canonical_sources", sources)


@mutation("1.1", bugs=(8,), parts=("compressor",), probes=("load_ledger",))
def gate_and_kv_exchanged_in_transformers_names(site: Site) -> None:
    """In a checkpoint of transformers' names, the compressor's kv_proj is taken for wgate and gate_proj for wkv."""
    out = site.checkpoint.with_name("transformers")
    convert(site.checkpoint, out, "transformers", ModelConfig.from_official(read_config(site.checkpoint)[0]))
    site.checkpoint = out
    other = {"kv_proj": "gate_proj", "gate_proj": "kv_proj"}
    swap = lambda p: re.compile(re.sub(r"(?<=compressor\\\.)(kv|gate)_proj", lambda m: other[m[0]], p.pattern))
    rules = tuple((swap(pattern), template) for pattern, template in layouts.TRANSFORMERS.rules)
    wrong = layouts.Layout("transformers", rules, layouts.TRANSFORMERS.stacked)
    site.patch(
        layouts, "LAYOUTS", tuple(wrong if layout is layouts.TRANSFORMERS else layout for layout in layouts.LAYOUTS)
    )


@mutation("1.1", bugs=(3,), parts=("MTP", "mtp."), probes=("load_ledger",))
def mtp_block_ignored_as_unexpected(site: Site) -> None:
    """A list of keys to ignore matches `mtp.*` first: the block is never offered to the model."""
    renamed(site, lambda name: None if name.startswith("mtp.") else name)


@mutation("1.1", bugs=(3,), parts=("MTP", "mtp."), probes=("load_ledger",))
def mtp_block_initialised_at_random(site: Site) -> None:
    """The rules are anchored at `^layers.`: the MTP block exists and keeps its random initialisation."""
    site.after_load(lambda subject: [at_random(p) for p in subject.model.mtp.parameters()])


@mutation("1.1", bugs=(5,), parts=("MTP", "mtp."), probes=("load_ledger",))
def mtp_block_left_out_of_a_quantised_artifact(site: Site) -> None:
    """A quantising tool wrote every tensor but `mtp.*`; config.json still announces the block."""
    tensors = {}
    for file in sorted(site.checkpoint.glob("*.safetensors")):
        tensors |= {n: t for n, t in load_file(file).items() if not n.startswith("mtp.")}
        file.unlink()
    (site.checkpoint / files.INDEX).unlink()
    save_file(tensors, site.checkpoint / files.SINGLE)


@mutation("1.1", bugs=(4,), parts=("MTP", "mtp."), probes=("load_ledger",))
def mtp_attention_of_the_first_layer(site: Site) -> None:
    """The MTP block's attention is filled from backbone layer 0, whose kind it shares."""

    def sources(tensors, layout):
        found = real(tensors, layout)
        return {n: found[n.replace("mtp.0.attn.", "layers.0.attn.")] for n in found}

    real = site.patch(reading, "canonical_sources", sources)


@mutation("1.1", bugs=(8,), parts=("layers.3.attn.indexer", "indexer"), probes=("load_ledger",))
def indexer_of_another_layer(site: Site) -> None:
    """A pattern without an end anchor gives CSA layer 3 the indexer of CSA layer 1."""

    def sources(tensors, layout):
        found = real(tensors, layout)
        return {n: found[n.replace("layers.3.attn.indexer.", "layers.1.attn.indexer.")] for n in found}

    real = site.patch(reading, "canonical_sources", sources)


@mutation("1.1", bugs=(1,), parts=("compressor",), probes=("load_ledger",))
def two_parameters_share_memory(site: Site) -> None:
    """The position biases of two compressors are one tensor: loading the second overwrote the first."""

    def change(subject):
        one, other = (subject.model.layers[i].attn.compressor for i in (1, 3))
        one.ape = other.ape

    site.after_load(change)


@mutation("1.1", bugs=(2,), parts=("wkv_gate", "compressor"), probes=("load_ledger",))
def half_of_a_stack_written_twice(site: Site) -> None:
    """wkv and wgate are both written to the first half of the stacked matrix; the second half never is."""
    real = site.patch(
        official,
        "_matrix_pieces",
        lambda model, name, module, official, index, part=0, parts=1: real(
            model, name, module, official, index, 0 if name.endswith("wkv_gate") else part, parts
        ),
    )


@mutation("1.1", bugs=(2,), parts=("experts",), probes=("load_ledger",))
def gate_and_up_rows_exchanged(site: Site) -> None:
    """Stacked experts hold the up rows first: w1 and w3 of every routed expert are exchanged."""

    def change(subject):
        for block in subject.model.layers:
            w = block.ffn.experts.w13.weight
            w.data = torch.cat(w.data.chunk(2, 1)[::-1], 1)

    site.after_load(change)


@mutation("1.1", bugs=(2,), parts=("two shards",), probes=("load_ledger",))
def a_shard_fetched_twice(site: Site) -> None:
    """The download of the second shard holds the first once more."""
    first, second = sorted(site.checkpoint.glob("*.safetensors"))[:2]
    second.write_bytes(first.read_bytes())


@mutation("1.1", bugs=(7,), parts=("F8_E8M0",), probes=("load_ledger",))
def e8m0_missing_from_the_dtype_map(site: Site) -> None:
    """F8_E8M0 is not in the map of dtypes and counts as four bytes."""
    site.patch_item(files.DTYPES, "F8_E8M0", torch.float32)


@mutation("1.1", bugs=(12,), parts=("tid2eid",), probes=("dtype_ledger",))
def routing_table_taken_for_weights(site: Site) -> None:
    """A quantiser takes the integer table tid2eid for weights and stores it in BF16."""
    rewritten(site, lambda name, t: t.bfloat16() if name.endswith("tid2eid") else t)


@mutation("1.1", bugs=(10,), parts=("weights_proj",), probes=("load_ledger",))
def weights_proj_without_its_format(site: Site) -> None:
    """The quantisation config is not passed on to weights_proj, which is stored in FP8 with a scale that nothing asks
    for."""
    for file in site.checkpoint.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [n for n in tensors if n.endswith("weights_proj.weight")]:
            tensors[name] = quantize_fp8(tensors[name])[0]
        save_file(tensors, file)


@mutation("1.1", bugs=(1,), parts=("head.weight",), probes=("load_ledger",))
def output_head_tied_to_the_embedding(site: Site) -> None:
    """The output head is the embedding, though tie_word_embeddings is false and the file holds a head."""
    site.after_load(lambda subject: setattr(subject.model.head.weight, "data", subject.model.embed.weight.data.clone()))
