"""A model that several ranks hold together, against the whole one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4.errors import InputError, RanksDisagree, UnsupportedInput
from dsv4.loaders.cuts import Cut, joint_problems
from dsv4.loaders.errors import CheckpointError
from dsv4.model.load import load_model
from dsv4.model.ranks import Ranks
from dsv4.parallel.threads import together
from tests.parallel.held import close, run

DEMO = Path(__file__).resolve().parents[2] / "demo"
TOKENS = 300


@pytest.fixture(scope="module")
def whole():
    return load_model(DEMO, numerics="fp32", backend="reference")


@pytest.fixture(scope="module", params=[(2, False), (4, False), (2, True), (4, True)], ids=lambda p: f"{p[0]}, {p[1]}")
def models(request):
    """By width and by expert."""
    size, by_expert = request.param
    one = lambda ranks: replace(ranks, by_expert=by_expert)
    return together(size, lambda ranks: load_model(DEMO, numerics="fp32", backend="reference", ranks=one(ranks)))


def ids(rows=2, tokens=TOKENS, seed=0):
    return torch.randint(3, 4000, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def served(model):
    """A ragged prompt, decoding, a rewind and drafting: logits of each."""
    cache, found = model.new_cache(2, TOKENS + 20, max_rewind=8), []
    logits, streams = model.append(ids(), cache, n_new=[TOKENS, 170], logits="last", return_streams=True)
    found.append(logits)
    for t in range(6):
        found.append(model.append(ids(seed=1)[:, t : t + 1], cache))
    cache.rewind(4)
    found.append(model.append(ids(seed=2)[:, :3], cache))
    found.append(model.mtp_logits(streams[:1, :20], ids(1, 20, seed=3)))
    return found


def test_ranks_compute_what_the_whole_model_computes(whole, models):
    wanted, found = served(whole), run(models, served)
    for mine, theirs, *others in zip(wanted, *found, strict=True):
        close(theirs, mine)
        assert all(torch.equal(theirs, other) for other in others), "ranks disagree"


def test_greedy_text_is_equal(whole, models):
    def greedy(model):
        cache, tokens = model.new_cache(1, 80), []
        logits = model.append(ids(1, 40), cache, logits="last")
        for _ in range(24):
            tokens.append(int(logits[0, -1].argmax()))
            logits = model.append(torch.tensor([tokens[-1:]]), cache)
        return tokens

    wanted = greedy(whole)
    assert all(found == wanted for found in run(models, greedy))


def test_all_parts_of_all_ranks_are_the_checkpoint(whole, models):
    names, accounts = list(whole.ledger.used), [model.ledger.held for model in models]
    assert joint_problems(accounts, names) == []
    cut = {name for name, part in accounts[0].items() if part is not None}
    leaves = {
        name.split(".", 2)[-1].removesuffix(".weight").removesuffix(".scale") for name in cut if "layers.0" in name
    }
    leaves = {leaf for leaf in leaves if "experts" not in leaf}
    assert leaves == {"attn.wq_b", "attn.attn_sink", "attn.wo_a", "attn.wo_b"}
    assert {"embed.weight", "head.weight"} <= cut
    experts = [{n for n in account if ".experts." in n and ".shared" not in n} for account in accounts]
    if models[0].ranks.by_expert:
        assert not set.intersection(*experts) and len(set.union(*experts)) == sum(map(len, experts))
    else:
        assert all(account[name] is not None for account, mine in zip(accounts, experts) for name in mine)
    held = sum(model.nbytes for model in models)
    again = sum(p.nbytes for n, p in whole.named_parameters() if not part_of(n, models[0])) * (len(models) - 1)
    assert held == whole.nbytes + again


def part_of(name: str, model) -> bool:
    """Whether a rank holds a part only of that parameter."""
    own = model.get_parameter(name)
    base, _, leaf = name.rpartition(".")
    return leaf in model.get_submodule(base).cuts or ".experts." in name and own is not None


def test_each_rank_reads_its_part_only(models, monkeypatch):
    from dsv4.loaders.files import Files

    read, bytes_read = Files.read, []

    def counted(self, tensor, start=0, nbytes=None):
        found = read(self, tensor, start, nbytes)
        bytes_read.append(found.numel())
        return found

    part = Files.read_part

    def counted_part(self, tensor, start, nbytes, shape, cut):
        before = len(bytes_read)
        found = part(self, tensor, start, nbytes, shape, cut)
        bytes_read[before:] = [found.numel()]
        return found

    monkeypatch.setattr(Files, "read", counted)
    monkeypatch.setattr(Files, "read_part", counted_part)
    ranks = replace(models[1].ranks, group=None)
    model = load_model(DEMO, numerics="native", backend="reference", ranks=ranks)
    assert sum(bytes_read) <= model.nbytes  # indices of hash layers are held in 8 bytes and stored in 4
    assert sum(bytes_read) > 0.8 * model.nbytes


def test_numbers_that_cannot_be_shared_are_refused():
    with pytest.raises(InputError, match="o_groups is 4, which 8 ranks cannot share"):
        load_model(DEMO, ranks=Ranks(0, 8))
    with pytest.raises(InputError, match="num_attention_heads is 8, which 3 ranks"):
        load_model(DEMO, ranks=Ranks(0, 3))
    with pytest.raises(InputError, match="leave out one"):
        load_model(DEMO, ranks=Ranks(0, 2), device_map="auto")
    with pytest.raises(UnsupportedInput, match="within a block of 128"):
        Cut(0, 192, 384, 400).stored(128, "w")
    with pytest.raises(InputError, match="exchanges nothing"):
        Ranks(0, 2).sum(torch.zeros(1))


@pytest.mark.parametrize(
    "held, said",
    [
        ([{"a": Cut(0, 0, 4, 8)}, {"a": Cut(0, 4, 8, 8)}], None),
        ([{"a": None}, {"a": None}], None),
        ([{"a": None}, {}], None),
        ([{"a": Cut(0, 0, 0, 8)}, {"a": None}], None),
        ([{"a": Cut(0, 0, 0, 8)}, {}], "held by no rank"),
        ([{}, {}], "held by no rank"),
        ([{"a": Cut(0, 0, 4, 8)}, {"a": Cut(0, 5, 8, 8)}], "ranks hold 0 to 4, 5 to 8"),
        ([{"a": Cut(0, 0, 4, 8)}, {"a": Cut(0, 0, 4, 8)}], "ranks hold 0 to 4, 0 to 4"),
        ([{"a": Cut(0, 0, 4, 8)}, {"a": Cut(1, 4, 8, 8)}], "otherwise than by others"),
        ([{"a": Cut(0, 0, 4, 8)}, {"a": None}], "otherwise than by others"),
        ([{"a": None}, {"a": None}, {}], "by 2 of 3 ranks"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_gaps_and_overlaps_are_found(held, said):
    found = joint_problems(held, ["a"])
    assert found == [] if said is None else len(found) == 1 and said in found[0]


def test_sums_have_one_order_and_joined_parts_no_padding():
    given = [torch.tensor([1e8, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([-1e8, 4.0])]
    found = together(3, lambda ranks: ranks.sum(given[ranks.rank]))
    wanted = (given[0] + given[1]) + given[2]
    assert all(torch.equal(total, wanted) for total in found)
    row = torch.arange(10.0).view(1, 10)
    parts = lambda ranks: row[:, ranks.slots(10).start : ranks.slots(10).stop]
    assert all(torch.equal(r, row) for r in together(4, lambda ranks: ranks.joined(parts(ranks), 10)))
    assert [Ranks(r, 4).blocks(160, 128).size for r in range(4)] == [0, 128, 0, 32]


def test_ranks_that_run_different_tokens_end(models):
    def parted(model):
        given = ids(1, 8, seed=model.ranks.rank)
        return model.append(given, model.new_cache(1, 8))

    with pytest.raises(RanksDisagree, match="rank . has token .* where rank . has"):
        run(models, parted)


def test_other_options_and_missing_parts_are_refused():
    with pytest.raises(InputError, match="ranks differ in options"):
        together(2, lambda ranks: load_model(DEMO, numerics=("fp32", "native")[ranks.rank], ranks=ranks))
    with pytest.raises(CheckpointError, match="ranks hold 0 to 2048, 0 to 2048"):
        together(2, lambda ranks: load_model(DEMO, ranks=replace(ranks, rank=0)))
