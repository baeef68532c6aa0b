"""The differentiable path: the same values as inference, and a gradient for every parameter that is to learn."""

import pytest
import torch

from dsv4 import load_model
from dsv4.cache.sequence import drafts, whole
from dsv4.model.deepseek_v4 import Model
from dsv4.model.linear import Storage
from dsv4.model.numerics import numerics_named
from tests import checkpoints

RAW = {**checkpoints.SMALL, "index_n_heads": 16}


def trainable(model: Model, numerics: str = "fp32") -> Model:
    """A model on the `training` backend with the same weights."""
    with torch.device("meta"):
        made = Model(model.config, numerics_named(numerics), "training", lambda name: Storage(), len(model.mtp) > 0)
    made.to_empty(device="cpu")
    made.load_state_dict(model.state_dict())
    for p in made.parameters():
        p.requires_grad_(p.is_floating_point())
    return made


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    path = checkpoints.write_dense(tmp_path_factory.mktemp("sequence") / "c", RAW)
    model = load_model(path, numerics="fp32", backend="reference")
    return model, trainable(model)


@pytest.mark.parametrize("T", [1, 3, 4, 127, 128, 129, 300])
def test_values_are_those_of_inference(pair, T):
    """Lengths on both sides of a window's end; at 300 the indexer chooses 6 of 75 entries."""
    model, made = pair
    ids = torch.randint(0, 320, (2, T), generator=torch.Generator().manual_seed(T))
    streams, step, sequences = whole(made, ids)
    got = made.head(made.features(streams)).view(2, T, -1)
    wanted, after = model.append(ids, model.new_cache(2, T), return_streams=True)
    assert (got - wanted).abs().max() < 2e-4
    following = torch.roll(ids, -1, 1)
    drafted = made.head(drafts(made, streams, following, step, sequences)).view(2, T, -1)
    assert (drafted - model.mtp_logits(after, following)).abs().max() < 2e-4


def test_every_parameter_learns_but_the_indexer_and_the_routing_bias(pair):
    """A selection is a choice: no gradient of the text's loss goes through it, nor through the bias that balances
    experts."""
    _, made = pair
    ids = torch.randint(0, 320, (2, 200), generator=torch.Generator().manual_seed(0))
    streams, step, sequences = whole(made, ids)
    logits, drafted = (
        made.head(f) for f in (made.features(streams), drafts(made, streams, torch.roll(ids, -1, 1), step, sequences))
    )
    (logits.square().mean() + drafted.square().mean()).backward()
    still = {
        n for n, p in made.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.abs().sum() > 0)
    }
    made.zero_grad()
    assert still == {
        n for n, p in made.named_parameters() if p.requires_grad and (".indexer." in n or n.endswith("gate.bias"))
    }


def test_gradients_are_those_of_finite_differences(tmp_path):
    """Along the gradient of one parameter of each kind. Hashed experts and every visible entry: no choice may flip."""
    path = checkpoints.write_dense(tmp_path / "c", {**RAW, "num_hash_layers": 5, "index_topk": 1000})
    made = trainable(load_model(path, numerics="fp32", backend="reference"))
    ids = torch.randint(0, 320, (1, 150), generator=torch.Generator().manual_seed(1))
    probe = torch.randn(150, 320, generator=torch.Generator().manual_seed(2))
    loss = lambda m: (m.head(m.features(whole(m, ids)[0])) * probe).sum() / 150
    loss(made).backward()
    for name in (
        "layers.1.attn.compressor.wkv_gate.weight",
        "layers.2.attn.compressor.ape",
        "layers.0.hc_attn.fn",
        "layers.3.hc_ffn.base",
        "layers.1.attn.attn_sink",
        "layers.2.ffn.experts.w13.weight",
        "layers.4.attn.wq_b.weight",
    ):
        p = made.get_parameter(name)
        way = p.grad / p.grad.norm()
        held, size = p.detach().clone(), 2e-3
        with torch.no_grad():
            values = []
            for sign in (1, -1):
                p.copy_(held + sign * size * way)
                values.append(loss(made).item())
            p.copy_(held)
        slope = (values[0] - values[1]) / (2 * size)
        assert slope == pytest.approx(p.grad.norm().item(), rel=0.02), name


def test_simulated_numerics_round_forward_and_pass_gradients(pair):
    model, _ = pair
    made = trainable(model, "qat:fp32")
    ids = torch.randint(0, 320, (1, 100), generator=torch.Generator().manual_seed(3))
    streams, _, _ = whole(made, ids)
    plain = whole(trainable(model), ids)[0]
    assert not torch.equal(streams, plain)
    streams.square().mean().backward()
    assert made.get_parameter("layers.2.attn.wkv.weight").grad.abs().sum() > 0  # through the rounding of KV
