"""Section 1.3: RoPE and YaRN."""

import random
from collections.abc import Callable
from types import SimpleNamespace

import torch

from dsv4.kernels.rope import inverse_frequencies, rotation
from dsv4.model import deepseek_v4 as models
from dsv4.model import step as steps
from dsv4.model.attention import IndexerKeyCompressor
from dsv4.model.config import Yarn
from dsv4.model.step import Step
from dsv4.probes.faults import Site, mutation

SECTION = "1.3", "RoPE and YaRN"


def halves(real: Callable) -> Callable:
    """Rotation of dims j and j + R/2 as a pair."""

    def rotate(x, cis):
        R = 2 * cis.shape[-1]
        order = torch.arange(R, device=x.device).view(2, -1).T.flatten()
        y, out = x.clone(), x.clone()
        y[..., -R:] = x[..., -R:][..., order]
        out[..., -R:][..., order] = real(y, cis)[..., -R:]
        return out

    return rotate


def operations(module, **others) -> None:
    """The module runs these instead of its operations of the same names."""
    module.op = SimpleNamespace(**{**vars(module.op), **others})


def in_indexers(site: Site, change: Callable, queries: bool = True, keys: bool = True) -> None:
    """change(what ran before) rotates index queries and keys of every CSA layer."""

    def after(subject):
        for block in subject.model.layers:
            indexer = getattr(block.attn, "indexer", None)
            for module, wanted in ((indexer, queries), (getattr(indexer, "compressor", None), keys)):
                if module is not None and wanted:
                    operations(module, rotate=change(module.op.rotate))

    site.after_load(after)


def frequencies(site: Site, change: Callable) -> None:
    """The model rotates by change(config, {'main': …, 'compress': …})."""
    real = site.patch(models, "frequencies", lambda config: change(config, real(config)))


def entries_at(site: Site, position: Callable) -> None:
    """Entries and index keys of window w of `ratio` tokens are rotated at position(w, ratio)."""
    site.patch(
        Step,
        "window_cis",
        lambda step, ratio, base: rotation(position(step.new_windows(ratio), ratio).flatten(), step.frequencies[base]),
    )


@mutation("1.3", bugs=(32, 34), parts=("rotation of queries",), probes=("rope",))
def half_split_rotation(site: Site) -> None:
    """Dims j and j + R/2 are rotated as a pair, as Llama does, instead of neighbours."""
    site.kernel("rotate", halves)


@mutation("1.3", bugs=(32,), parts=("rotation of indexer",), probes=("rope",))
def half_split_rotation_in_the_indexer(site: Site) -> None:
    """The indexer alone rotates halves, as V3.2 did."""
    in_indexers(site, halves)


@mutation("1.3", bugs=(34,), parts=("rotation of queries",), probes=("rope",))
def first_dims_rotated(site: Site) -> None:
    """The first dims are rotated instead of the last, as a docstring of transformers says."""

    def change(real):
        def rotate(x, cis):
            R = 2 * cis.shape[-1]
            return real(x.roll(-R, -1).contiguous(), cis).roll(R, -1).contiguous()

        return rotate

    site.kernel("rotate", change)


@mutation("1.3", bugs=(34,), parts=("rotation of queries",), probes=("rope",))
def rotation_by_the_negative_angle(site: Site) -> None:
    """The sine has the wrong sign: everything turns the other way round."""
    site.kernel("rotate", lambda real: lambda x, cis: real(x, cis.conj().resolve_conj()))


@mutation("1.3", bugs=(35,), parts=("rotation of the output",), probes=("rope",))
def no_inverse_rotation(site: Site) -> None:
    """The attention output is not rotated back before wo_a."""
    site.patch(Step, "inverse_cis", lambda step, base: torch.ones_like(step.cis(base)))


@mutation("1.3", bugs=(36,), parts=("rotation of queries", "base compress", "base main"), probes=("rope",))
def one_base_for_all_layers(site: Site) -> None:
    """Every layer rotates with rope_theta and YaRN: invisible inside the window."""

    def change(config, found):
        both = inverse_frequencies(config.qk_rope_head_dim, config.rope_theta, config.yarn)
        return {"main": both, "compress": both}

    frequencies(site, change)


@mutation("1.3", bugs=(38,), parts=("rotation of queries", "base compress", "base main"), probes=("rope",))
def yarn_on_window_layers(site: Site) -> None:
    """YaRN is applied where compress_ratio is 0."""
    frequencies(site, lambda c, found: found | {"main": inverse_frequencies(c.qk_rope_head_dim, c.rope_theta, c.yarn)})


@mutation("1.3", bugs=(14, 38), parts=("rotation of queries", "base compress", "base main"), probes=("rope",))
def yarn_on_no_layer(site: Site) -> None:
    """YaRN is read and applied nowhere: the compressing layers lack it."""
    frequencies(
        site, lambda c, found: found | {"compress": inverse_frequencies(c.qk_rope_head_dim, c.compress_rope_theta)}
    )


@mutation("1.3", bugs=(39,), parts=("rotation of window rows", "rotation of queries"), probes=("rope",))
def window_and_entries_in_different_bases(site: Site) -> None:
    """In compressing layers, queries and window rows rotate with θ 10000, entries with θ 160000: two bases in one
    softmax."""

    def change(subject):
        for block in subject.model.layers:
            block.attn.base = "main"

    site.after_load(change)


@mutation("1.3", bugs=(39,), parts=("rotation of indexer keys",), probes=("rope",))
def index_keys_in_the_other_base(site: Site) -> None:
    """Index keys alone rotate with θ 10000."""

    def forward(compressor, x, step, cache):
        step.window_cis = lambda ratio, base: Step.window_cis(step, ratio, "main")
        try:
            real(compressor, x, step, cache)
        finally:
            del step.window_cis

    real = site.patch(IndexerKeyCompressor, "forward", forward)


@mutation("1.3", bugs=(40,), parts=("rotation of queries", "base compress", "base main"), probes=("rope",))
def theta_and_factor_of_another_release(site: Site) -> None:
    """θ 40000 with factor 4 where config.json says 160000 and 16."""

    def change(config, found):
        yarn = Yarn(4, config.yarn.beta_fast, config.yarn.beta_slow, config.yarn.original_max_position_embeddings)
        return found | {"compress": inverse_frequencies(config.qk_rope_head_dim, 40000.0, yarn)}

    frequencies(site, change)


@mutation("1.3", bugs=(40,), parts=("rotation of queries", "base compress", "base main"), probes=("rope",))
def linear_interpolation_instead_of_yarn(site: Site) -> None:
    """Every frequency is divided by the factor: no ramp between fast and slow ones."""
    stretched = lambda c: inverse_frequencies(c.qk_rope_head_dim, c.compress_rope_theta) / c.yarn.factor
    frequencies(site, lambda config, found: found | {"compress": stretched(config)})


@mutation("1.3", bugs=(41,), parts=("softmax scale",), probes=("config_ledger",))
def mscale_in_the_softmax(site: Site) -> None:
    """The softmax scale carries V3's mscale, 1.277: logits too sharp."""

    def change(subject):
        for block in subject.model.layers:
            block.attn.scale *= 1.277

    site.after_load(change)


@mutation("1.3", bugs=(41,), parts=("rotation of queries",), probes=("rope",))
def mscale_in_cos_and_sin(site: Site) -> None:
    """cos and sin carry V3's mscale, 1.277: logits of the rotated dims are 1.63 times what they should be."""
    site.patch(steps, "rotation", lambda positions, f: 1.277 * rotation(positions, f))


@mutation("1.3", bugs=(42,), parts=("rotation of compressed entries",), probes=("rope",))
def entries_never_rotated(site: Site) -> None:
    """The rotation of compressed entries is built and never called."""

    def change(subject):
        for block in subject.model.layers:
            if hasattr(block.attn, "compressor"):
                operations(block.attn.compressor, rotate=lambda x, cis: x)

    site.after_load(change)


@mutation("1.3", bugs=(44,), parts=("rotation of queries", "base compress", "base main"), probes=("rope",))
def frequencies_divided_by(site: Site) -> None:
    """Inverse frequencies are passed to a kernel that divides by what it is given."""
    frequencies(site, lambda config, found: {base: 1 / f for base, f in found.items()})


@mutation("1.3", bugs=(46,), parts=("rotation of indexer",), probes=("rope",))
def indexer_unrotated(site: Site) -> None:
    """Neither index queries nor keys are rotated: the indexer is blind to positions."""
    in_indexers(site, lambda real: lambda x, cis: x)


@mutation("1.3", bugs=(46,), parts=("indexer queries",), probes=("index_oracle",))
def index_queries_unrotated(site: Site) -> None:
    """Index keys are rotated, index queries are not."""
    in_indexers(site, lambda real: lambda x, cis: x, keys=False)


@mutation("1.3", bugs=(46,), parts=("rotation of compressed entries", "rotation of indexer keys"), probes=("rope",))
def entries_rotated_at_the_end_of_their_window(site: Site) -> None:
    """Entries and index keys are rotated at their window's last token instead of its first."""
    entries_at(site, lambda w, ratio: w * ratio + ratio - 1)


@mutation("1.3", bugs=(46,), parts=("rotation of compressed entries", "rotation of indexer keys"), probes=("rope",))
def entries_rotated_at_their_number(site: Site) -> None:
    """Entries and index keys are rotated at their number in the pool instead of their window's first token."""
    entries_at(site, lambda w, ratio: w)


@mutation("1.3", bugs=(47,), parts=("determinism", "rotation of queries"), probes=("poison",))
def two_unordered_stores_to_the_rotated_dims(site: Site) -> None:
    """Two unordered stores to the rotated dims: now and then the unrotated one comes last."""
    chance = random.Random(0)
    site.kernel("rotate", lambda real: lambda x, cis: x if chance.random() < 0.01 else real(x, cis))


@mutation("1.3", bugs=(48,), parts=("rotation of queries",), probes=("rope",))
def rows_beyond_the_first_rotated_wrongly_in_decode(site: Site) -> None:
    """With one token a row, rows after the first are rotated as if they stood at position 0."""

    def cis(step, base):
        found = real(step, base)
        return torch.cat((found[:1], torch.ones_like(found[1:]))) if step.T == 1 and step.B > 1 else found

    real = site.patch(Step, "cis", cis)


@mutation("1.3", bugs=(48, 52), parts=("rotation of queries",), probes=("rope",))
def positions_counted_from_the_start_of_a_chunk(site: Site) -> None:
    """Positions of the rotation start at 0 in every chunk."""
    site.patch(
        Step, "cis", lambda step, base: rotation((step.pos - step.start.unsqueeze(1)).flatten(), step.frequencies[base])
    )


@mutation("1.3", bugs=(44,), parts=("rotation of queries", "base compress", "base main"), probes=("rope",))
def frequencies_in_bf16(site: Site) -> None:
    """The frequencies are rounded to bf16: positions in the hundreds turn by wrong angles."""
    frequencies(site, lambda config, found: {base: f.bfloat16().float() for base, f in found.items()})


@mutation("1.3", bugs=(44,), parts=("rotation of queries",), probes=("rope",))
def positions_in_bf16(site: Site) -> None:
    """Positions pass through bf16, which has no odd numbers beyond 256."""
    site.patch(steps, "rotation", lambda positions, f: rotation(positions.bfloat16().long(), f))
