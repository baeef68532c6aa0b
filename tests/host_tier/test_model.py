"""GQA models with their cache in host memory: the logits of the resident cache, bit for bit. On a GPU with pinned
memory."""

import pytest
import torch

from dsv4 import load_model
from dsv4.cache.host_tier.choice import HostMemory
from dsv4.cache.host_tier.grouped import host_use
from dsv4.cache.host_tier.layer import HostLayer
from dsv4.engine.generate import generate, generate_on_device, generate_speculative
from dsv4.errors import CapacityError, InputError, MissingSummaries
from dsv4.kernels.block_choice import Policy, dense
from dsv4.kernels.chunked_prefill import Chunking
from dsv4.kernels.grouped_attention import Termination
from dsv4.model.gqa.choice import Attention
from dsv4.runtime.graph import DecodeGraph
from dsv4.speculation.draft import LookupDrafter
from dsv4.speculation.passes import Append
from tests.gqa import oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, TOKENS = 384, 260
STOP = Termination(tau=1e9, phi=2, patience=1, tile=64)  # after the second tile
WAYS = {
    "bound": Attention(Policy("bound", "bound", 16, 1, 2, 3)),
    "mean": Attention(Policy("mean", "mean", 16, 1, 1, 3)),
    "block": Attention(Policy("block", "bound", 128, 0, 1, 1)),
    "window": Attention(Policy("window", None, 16, 2, 4)),
    "bound, terminating": Attention(Policy("bound", "bound", 16, 1, 2, 6), STOP),
    "dense": Attention(),
    "dense, terminating": Attention(dense(), STOP),
    "chunks": Attention(Policy("bound", "bound", 16, 1, 2, 3), None, Chunking(32, 8, 8)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of two configs: every layer full, and some with a sliding window."""
    return [
        oracle.save(oracle.randomised(config), config, tmp_path_factory.mktemp("host") / "m", torch.bfloat16)
        for config in map(oracle.CONFIGS.get, ("qwen2, bias and tied head", "qwen2, yarn and some sliding layers"))
    ]


@pytest.fixture(scope="module")
def brief_folder(tmp_path_factory):
    """Two full layers, so that one guesses for the other; small, for the interpreter."""
    config = oracle.brief(oracle.CONFIGS["llama, llama3 rope and biases"])
    return oracle.save(oracle.randomised(config), config, tmp_path_factory.mktemp("host") / "m", torch.bfloat16)


def caches(model, choice, batch=1, tokens=TOKENS):
    """A resident cache, and one in host memory of which nothing that was not fetched may be read."""
    model.kv_memory = None
    resident = model.new_cache(batch, tokens)
    model.kv_memory = choice
    tier = model.new_cache(batch, tokens)
    for held in [*tier.shared, *(t for rows in tier.far for t in (rows.keys, rows.values))]:
        if held is not None:
            held.fill_(float("nan"))
    return resident, tier


@pytest.mark.few(
    name=["bound", "bound, terminating", "dense", "chunks"],
    choice=[HostMemory(9, ahead=True), HostMemory(), HostMemory(ahead=True)],
)
@pytest.mark.parametrize(
    "name, choice",
    [
        ("bound", HostMemory(6)),
        ("bound", HostMemory(9, ahead=True)),
        ("mean", HostMemory()),
        ("block", HostMemory(2)),
        ("window", HostMemory(6)),
        ("bound, terminating", HostMemory(ahead=True)),
        ("dense", HostMemory()),
        ("dense, terminating", HostMemory()),
        ("chunks", HostMemory()),
    ],
    ids=str,
)
def test_every_step_has_the_logits_of_the_resident_cache(folders, name, choice):
    """Ragged rows; the prompt in several cuts; single tokens, some at once, and none of a row; rewinds within a block,
    over blocks and to nothing; an append of many after decoding."""
    both = zip(folders, ("native", "fp32")) if name in ("bound", "dense") else [(folders[0], "native")]
    for folder, numerics in both:
        model = load_model(folder, numerics=numerics, backend="reference", device=DEVICE, attention=WAYS[name])
        pair, g = caches(model, choice, 2), torch.Generator().manual_seed(3)
        new = lambda n: torch.randint(0, VOCABULARY, (2, n), generator=g)

        def run(ids, **options):
            want, got = (model.append(ids, cache, **options) for cache in pair)
            assert torch.equal(want.nan_to_num(7), got.nan_to_num(7)), options
            assert [layer["tokens"] for layer in model.layer_paths()] and pair[0].lengths == pair[1].lengths

        run(new(160), n_new=[160, 96], chunk=64)
        for step in range(14):
            run(new(1), prompt=False)
            if step in (3, 8, 11):
                back = {3: [2, 1], 8: [40, 3], 11: [pair[0].lengths[0], 17]}[step]
                for cache in pair:
                    cache.rewind(back)
            if step == 8 and name != "chunks":
                run(new(37), n_new=[37, 20], chunk=16, prompt=True)
            if step in (5, 9):
                run(new(5), n_new=[5, 3] if step == 5 else [0, 5], prompt=False)
            if step in (6, 10):
                run(new(1), n_new=[0, 1] if step == 6 else [1, 0], prompt=False)
        use = host_use(pair[1])
        assert host_use(pair[0]) is None and use["pinned_bytes"] == sum(
            rows.host_keys.nbytes + rows.host_values.nbytes for rows in pair[1].far
        )
        assert (use["hits"] > 0 and use["misses"] > 0) != WAYS[name].policy.dense
        assert (use["guessed_bytes"] > 0) == bool(choice.ahead and len(pair[1].far) > 1)
        for mine, other in zip(pair[1].layers, pair[0].layers):
            for b, n in enumerate(pair[0].lengths):
                assert torch.equal(mine.keys[b, :, :n], other.keys[b, :, :n]) and torch.equal(
                    mine.values[b, :, :n], other.values[b, :, :n]
                )


# Over 5 s: every kernel of a step runs in Triton's interpreter, eight steps a case.
@pytest.mark.few(name=["bound", "dense"], layers=["full"])
@pytest.mark.parametrize("name", ["bound", "bound, terminating", "dense"])
@pytest.mark.parametrize("layers", ["full", "some sliding"])
def test_captured_steps_of_the_triton_backend(folders, brief_folder, name, layers):
    """Steps of one and of three tokens, both staged; a guess ahead; in the interpreter without a GPU."""
    folder = brief_folder if layers == "full" else folders[1]
    reference, ours = (
        load_model(folder, numerics="fp32", backend=b, device=DEVICE, attention=WAYS[name])
        for b in ("reference", "triton")
    )
    resident, tier = caches(ours, HostMemory(9 if name != "dense" else None, ahead=True), 2, 140)
    words = ours.config.vocab_size
    ids = torch.randint(0, words, (2, 120), generator=torch.Generator().manual_seed(5))
    for cache in (resident, tier):
        reference.append(ids, cache, n_new=[120, 77], logits="none")
    graphs = [[DecodeGraph(ours, cache, tokens=n) for n in (1, 3)] for cache in (resident, tier)]
    for which, n in enumerate((1, 3)):
        x = torch.randint(0, words, (2, n), generator=torch.Generator().manual_seed(which))
        want, got = (mine[which].step(x).clone() for mine in graphs)
        assert torch.equal(want, got), n
        for cache in (resident, tier):
            cache.rewind([19, 2])
    ran = {row["operation"]: row["implementation"] for row in ours.dispatch.rows() if row["calls"]}
    assert name == "dense" or ran["fetch"] == ran["write_back"] == "triton"


def test_drafts_give_the_text_of_the_resident_cache(folders):
    """Greedy text with and without drafts, in passes that are one append and in rounds, which draft as much where one
    is under way."""
    model = load_model(folders[0], numerics="fp32", device=DEVICE, attention=WAYS["bound"])
    ids = torch.randint(0, VOCABULARY, (60,), generator=torch.Generator().manual_seed(1)).tolist() * 3
    found = []
    for choice in (None, HostMemory(7)):
        model.kv_memory = choice
        found += [
            generate(model, ids, 24),
            *generate_speculative(model, [ids], 24, LookupDrafter(), verify=Append),
            *generate_on_device(model, [ids], 24, LookupDrafter(), ahead=1),
        ]
    assert (
        all(f.token_ids == found[0].token_ids for f in found)
        and found[4].speculation.proposed == found[5].speculation.proposed > 5
    )
    assert found[0].host is None and found[3].host["misses"] > 0 and all(f.host["pinned_bytes"] > 0 for f in found[4:])


def test_another_policy_for_a_filled_cache(folders):
    model = load_model(folders[0], numerics="fp32", device=DEVICE, attention=WAYS["bound"])
    pair, ids = (
        caches(model, HostMemory()),
        torch.randint(0, VOCABULARY, (1, 200), generator=torch.Generator().manual_seed(2)),
    )
    for cache in pair:
        model.append(ids, cache, logits="none")
    for name in ("mean", "block", "window", "bound"):
        model.attention = WAYS[name]
        if name in ("mean", "block"):
            with pytest.raises(MissingSummaries, match="cache.adopt"):
                model.append(ids[:, :1], pair[1])
        want, got = (
            [cache.adopt(WAYS[name].policy), *(model.append(ids[:, t : t + 1], cache) for t in range(3))]
            for cache in pair
        )
        assert all(torch.equal(a, b) for a, b in zip(want[1:], got[1:])), name
        assert pair[1].nbytes == sum(
            s.nbytes for layer in pair[1].plan for s in layer.streams if s.place != "pinned"
        ) + sum(t.nbytes for t in pair[1].shared)


def test_what_makes_no_sense_is_refused(folders, tmp_path):
    model = load_model(folders[1], numerics="fp32", device=DEVICE, attention=WAYS["bound"])
    model.kv_memory = HostMemory(5)
    with pytest.raises(CapacityError, match="6 blocks.*5 slots"):
        model.new_cache(1, TOKENS)
    model.attention = Attention()
    with pytest.raises(InputError, match="dense attention chooses no blocks"):
        model.new_cache(1, TOKENS)
    with pytest.raises(InputError, match="at least 1"):
        HostMemory(0)
    sliding = oracle.CONFIGS["mistral, sliding window"]
    model = load_model(oracle.save(oracle.randomised(sliding), sliding, tmp_path / "m"), numerics="fp32")
    model.kv_memory = HostMemory()
    with pytest.raises(InputError, match="every layer of this model has a sliding window"):
        model.new_cache(1, 100)
    with pytest.raises(InputError, match="--device-map"):
        load_model(folders[0], device_map="auto", kv_memory=HostMemory())


def test_layers_with_a_window_stay_on_the_device(folders):
    model = load_model(folders[1], numerics="fp32", device=DEVICE, attention=WAYS["bound"])
    tier = caches(model, HostMemory())[1]
    assert [isinstance(layer, HostLayer) for layer in tier.layers] == [w is None for w in model.config.windows]
    assert 0 < len(tier.far) < len(tier.layers)
