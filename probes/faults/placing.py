"""Sections 1.7, 1.9 and 1.11: layers that are brought from another place than the one where they run."""

import torch

from dsv4.model.causal import CausalLM
from dsv4.model.gqa.cache import LayerRows, Summaries
from dsv4.model.offload import BesideEmbedding, CheckpointWeights
from dsv4.model.step import Step
from dsv4.probes.faults import Site, mutation

GROUPED = dict(probes=("placement",), profile="qwen2")


def brought(site: Site, ending: str, change) -> None:
    """What is brought of parameters whose names end so is change(read, name, all such names) instead, where read(name)
    reads one."""

    def get(weights, name):
        if name.endswith(ending):
            alike = [other for other in weights if other.endswith(ending)]
            return change(lambda other: real(weights, other), name, alike)
        return real(weights, name)

    real = site.patch(CheckpointWeights, "__getitem__", get)


@mutation("1.7", bugs=(103,), parts=("placement, sink",), probes=("placement",))
def every_placed_layer_gets_the_first_sinks(site: Site) -> None:
    """The sinks of the first layer that is brought are given to every layer that is: ranks ≥ 1 with rank 0's sinks."""
    brought(site, "attn.attn_sink", lambda read, name, alike: read(alike[0]))


@mutation("1.11", bugs=(145,), parts=("placement, experts",), probes=("placement",))
def experts_of_another_placed_layer(site: Site) -> None:
    """The stack of experts that is brought is the one of the layer that was brought before."""
    brought(site, ".ffn.experts.w2.weight", lambda read, name, alike: read(alike[alike.index(name) - 1]))


@mutation("1.9", bugs=(6,), parts=("placement, router",), probes=("placement",))
def a_placed_layers_bias_is_not_moved(site: Site) -> None:
    """The router's bias stays behind where a layer is brought: the layer runs with zeros."""
    brought(site, "gate.bias", lambda read, name, alike: torch.zeros_like(read(name)))


# ---- GQA models --------------------------------------------------------------------------


@mutation("1.9", bugs=(), parts=("placement, QKV bias",), **GROUPED)
def biases_of_the_keys_of_another_placed_layer(site: Site) -> None:
    """The bias of the key projection that is brought is the one of the layer that was brought before."""
    brought(site, ".k_proj.bias", lambda read, name, alike: read(alike[alike.index(name) - 1]))


@mutation("1.9", bugs=(), parts=("placement, logits",), **GROUPED)
def a_tied_head_gets_other_rows_than_its_embedding(site: Site) -> None:
    """The embedding's matrix that is brought for a tied head begins with its second row."""

    def pre_forward(hook, module, *args, **kwargs):
        given = real(hook, module, *args, **kwargs)
        held = hook.embedding._parameters
        held["weight"] = torch.nn.Parameter(held["weight"].roll(-1, 0), requires_grad=False)
        return given

    def post_forward(hook, module, output):
        held = hook.embedding._parameters
        held["weight"] = torch.nn.Parameter(held["weight"].roll(1, 0), requires_grad=False)
        return done(hook, module, output)

    real = site.patch(BesideEmbedding, "pre_forward", pre_forward)
    done = site.patch(BesideEmbedding, "post_forward", post_forward)


@mutation("1.9", bugs=(), parts=("placement, positions",), **GROUPED)
def positions_stay_on_the_first_device(site: Site) -> None:
    """Streams go to the device of the next layer, and positions and rotations do not."""

    def entering(model, i, step, *streams):
        return step, *real(model, i, step, *streams)[1:]

    real = site.patch(CausalLM, "entering", entering)


@mutation("1.9", bugs=(), parts=("placement, streams",), **GROUPED)
def the_residual_stream_is_not_moved(site: Site) -> None:
    """Positions go to the device of the next layer, and the residual stream stays where the last one ran."""

    def entering(model, i, step, *streams):
        return real(model, i, step)[0], *streams

    real = site.patch(CausalLM, "entering", entering)


@mutation("1.9", bugs=(), parts=("placement, caches",), **GROUPED)
def caches_of_all_layers_on_the_first_device(site: Site) -> None:
    """Every layer has its cache where the embedding is."""
    site.patch(CausalLM, "devices", property(lambda model: [model.device] * len(model.layers)))


@mutation("1.9", bugs=(), parts=("low in the cache", "high in the cache", "mean in the cache"), **GROUPED)
def summaries_are_written_to_a_copy(site: Site) -> None:
    """On other devices than the first, summaries of blocks are computed in a copy, which is forgotten."""

    def summaries(rows, step):
        found = real(rows, step)
        if found is None or rows.keys.device.index in (None, 0):
            return found
        return Summaries(*(t if t is None else t.clone() for t in found[:3]), found.block)

    real = site.patch(LayerRows, "summaries", summaries)


def forgetting(site: Site, name: str) -> None:
    """A step that is copied to another device lacks one of its attributes there."""

    def copied(step, device):
        there = real(step, device)
        setattr(there, name, getattr(Step, name))
        return there

    real = site.patch(Step, "_copied", copied)


@mutation("1.9", bugs=(), parts=("placement, page bounds", "placement, block means"), **GROUPED)
def a_prompt_is_none_on_the_second_device(site: Site) -> None:
    """Layers on another device than the first read prompts by the policy of decoding."""
    forgetting(site, "prompt")


@mutation("1.9", bugs=(), parts=("placement, chunks",), **GROUPED)
def chunks_of_a_prompt_on_the_first_device_only(site: Site) -> None:
    """Layers on another device than the first attend to the whole prompt where it should go in chunks."""
    forgetting(site, "piece")
