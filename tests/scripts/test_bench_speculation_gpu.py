"""What the GPU benchmark of speculation does, on a CPU: policies on the device take the sizes of the specification;
traces are recorded."""

import dataclasses
import json
from functools import partial

import numpy as np
import pytest
import torch

from dsv4 import load_model
from dsv4.engine.generate import generate
from dsv4.errors import InputError
from dsv4.runtime.graph import DecodeGraph
from dsv4.speculation import Request, Static, Trace, host_loop, on_device, read_costs
from dsv4.speculation.accept import Accepted
from dsv4.speculation.trace import mixed
from scripts import bench_speculation
from scripts.bench import speculation, speculation_gpu, speculation_report, speculation_traces, warm
from scripts.bench.speculation_costs import moe
from scripts.bench.speculation_journal import SpeculationJournal
from tests.speculation.test_ring import late
from tests.speculation.test_rounds import prompts


@pytest.fixture(scope="module")
def model(brief_golden):
    return load_model(brief_golden, numerics="fp32", mtp=True)


COSTS = dataclasses.replace(moe(), batches={2: moe().of(1)})


def test_policies_take_the_sizes_of_the_specification(model, monkeypatch):
    traces = [("mixed", mixed("m", 0.95, 0.3, 12, requests=6, tokens=64, seed=2))]
    ran = speculation_gpu.race(model, traces, COSTS, 2, 24, 40, (0, 3), lambda line: None)
    assert [r.policy for r in ran] == ["no speculation", "static 3", "ASBS", "cost-aware", "oracle"]
    for r in ran:
        assert r.batch == 2 and 40 <= r.tokens <= 80 and r.rounds == list(map(max, r.sizes))
        assert (
            r.tokens >= len(r.rounds) * 2 if r.policy != "no speculation" else r.tokens == 80 and r.rounds == [0] * 40
        )
    by = {r.policy: r for r in ran}
    assert len(by["oracle"].rounds) < len(by["no speculation"].rounds) and len(set(by["ASBS"].rounds)) > 1
    point = by["static 3"].point()
    assert (
        point.static
        and point.passes == len(by["static 3"].rounds)
        and 0 < point.acceptance < 1
        and 2 < point.mean_block_size <= 3
    )
    text = speculation_report.real(COSTS, ran, [r.point() for r in ran], 2)
    assert "| m | 2 | oracle |" in text and "What a round costs" in text
    monkeypatch.setattr(
        speculation_gpu.Traced, "accept", lambda self, logits, drafts, q, sizes, at: Accepted(sizes, logits.argmax(-1))
    )
    with pytest.raises(RuntimeError, match="chose other sizes than the specification"):
        speculation_gpu.race(model, traces, COSTS, 2, 24, 40, (3,), lambda line: None)


def test_no_speculation_is_plain_decoding(model, monkeypatch):
    """Without the block and without rounds; of a given text, the text is fed and what the model says is still waited
    for."""
    g = torch.Generator().manual_seed(3)
    ids = [torch.randint(model.config.vocab_size, (20,), generator=g).tolist() for _ in range(2)]
    plain = [generate(model, row, 13).token_ids for row in ids]
    monkeypatch.setattr(model.mtp[0], "forward", lambda *given: pytest.fail("the block ran"))

    def steps():
        cache = model.new_cache(2, 64, max_rewind=8)
        model.append(torch.tensor(ids), cache)
        return speculation_gpu.PlainSteps(model, cache)

    timed, said = (ran := steps()).timed([row[0] for row in plain], 12, "t", "mixed", 5.0)
    assert ran.cache.lengths == [32, 32]
    assert said == [row[1:] for row in plain] and (timed.policy, timed.tokens, timed.rounds) == (
        "no speculation",
        24,
        [0] * 12,
    )
    text = [row[1:] for row in plain][::-1]
    _, other = steps().timed([row[0] for row in plain], 12, "t", "mixed", 5.0, text)
    for row, first, fed, out in zip(ids, plain, text, other):
        cache = model.new_cache(1, 64)
        model.append(torch.tensor([row]), cache)
        wanted = model.append(torch.tensor([[first[0], *fed[:11]]]), cache).argmax(-1)[0].tolist()
        assert out == wanted


def test_a_run_that_was_cut_off_goes_on_where_it_stopped(model, tmp_path, monkeypatch):
    traces = [(name, mixed(name, 0.95, 0.3, 12, requests=6, tokens=64, seed=2)) for name in ("a", "b")]
    file, race = (
        tmp_path / "journal",
        lambda journal: speculation_gpu.race(model, traces, COSTS, 2, 24, 20, (3,), lambda line: None, journal),
    )
    whole = SpeculationJournal(file, {"commit": "c"})
    whole.cost(2, COSTS.of(2))
    first = race(whole)
    assert len(first) == 2 * 4 and race(SpeculationJournal(file, {"commit": "c"})) == []
    # the oracle's two and one of cost-aware
    file.write_text("".join(line for line in file.read_text().splitlines(True)[:-3]))
    begun = SpeculationJournal(file, {"commit": "c"})
    rest = race(begun)
    assert [(r.policy, r.trace) for r in rest] == [("cost-aware", "b"), ("oracle", "a"), ("oracle", "b")]
    again = SpeculationJournal(file, {"commit": "c"})
    assert [dataclasses.replace(r, seconds=0) for r in again.ran] == [dataclasses.replace(r, seconds=0) for r in first]
    monkeypatch.setattr(speculation_gpu, "traced", None)  # costs are not measured again
    assert speculation_gpu.measure_costs(model, [2], 24, "n", {"k": "v"}, print, again).of(2) == COSTS.of(2)
    with pytest.raises(InputError, match="commit differ"):
        SpeculationJournal(file, {"commit": "d"})


def test_what_was_under_way_when_a_race_ended_is_not_counted(model):
    """The host hears of the first row's end two rounds after it."""
    rounds, *_ = late(model, prompts(model), (21, 4, 21), on_device(Static(0), 3, "cpu"), ring=3, ahead=3)
    ran = speculation_gpu.UntilOne(rounds)
    assert len(rounds.counts.rounds) == 5 and [len(row) for row in ran.out] == [3] * 3 and ran.tokens == 9
    assert ran.widths == [0] * 3 and ran.sizes == [[0] * 3] * 3 and 0 < ran.seconds


class Played:
    """A graph by calls."""

    def __init__(self, run):
        self.replay = run


def test_costs_are_of_rounds_of_following_and_of_plain_steps(model, monkeypatch):
    """As on a GPU, with graphs that are played and a clock that counts tokens of the model, of the block's experts, and
    those that the block only remembers."""
    clock, step, block = [0], model.captured, model.mtp[0]
    experts, remember = block.ffn.forward, block.attn.remember
    monkeypatch.setattr(
        model, "captured", lambda given, cache: clock.__setitem__(0, clock[0] + given.N) or step(given, cache)
    )
    monkeypatch.setattr(
        block.ffn, "forward", lambda x, *given: clock.__setitem__(0, clock[0] + 100 * len(x)) or experts(x, *given)
    )
    monkeypatch.setattr(
        block.attn, "remember", lambda x, *given: clock.__setitem__(0, clock[0] + 10 * len(x)) or remember(x, *given)
    )

    def replays(graph):
        for _ in range(3):  # each counts the same
            begun = clock[0]
            graph.replay()
        return float(clock[0] - begun)

    def captured(run, pool, keep=False):
        for _ in range(3):
            run()
        return Played(torch.inference_mode()(run))

    class Steps(DecodeGraph):
        def __init__(self, *given):
            super().__init__(*given)
            self.graph = Played(self._run)

    real = speculation_gpu.traced
    monkeypatch.setattr(
        speculation_gpu, "traced", lambda *given: [rounds := real(*given), setattr(rounds, "captures", True)][0]
    )
    monkeypatch.setattr(speculation_gpu, "_replays", replays)
    monkeypatch.setattr(speculation_gpu, "DecodeGraph", Steps)
    for module in (host_loop, speculation_gpu):
        monkeypatch.setattr(module, "captured_graph", captured)
    cost = speculation_gpu.measure_costs(model, [2], 24, "n", {"k": "v"}, lambda line: None).of(2)
    # a token of each row through the model, none through the block
    assert cost.plain == cost.verify[0] == 2 and cost.draft == 200
    assert cost.catch_up == ((2, 200 + 40), (8, 200 + 160), (32, 200 + 640))
    # four of each row through the model; two chained drafts; the last of four that were verified
    assert cost.verify[3] + 3 * cost.draft == 2 * 4 + 200 * 2 + 200 + 80


# over 5 s: three pools of processes that each import torch and load a model
def test_rounds_are_compiled_ahead_by_several_processes(brief_golden, monkeypatch):
    load = partial(load_model, brief_golden, numerics="fp32", mtp=True)
    monkeypatch.setattr(warm, "MAX_DRAFTS", 2)  # sizes 0 to 2
    done, seconds = warm.warm(load, [1], 24, jobs=2)
    assert done == 3 and seconds > 0
    # a process that cannot load ends the pool, and nothing else
    assert warm.warm(partial(load_model, brief_golden / "absent"), [1], 24, jobs=1)[0] == 0
    assert warm.warm(load, [1], 24, jobs=1, seconds=0.01)[0] == 0


def test_the_model_that_is_compiled_for_has_every_kind_of_layer_and_one_set_of_experts(monkeypatch):
    from dsv4.model import dummy

    real = dummy.preset
    small = dict(n_routed_experts=8, moe_intermediate_size=64, vocab_size=256)
    small |= dict(hidden_size=512, q_lora_rank=128, o_lora_rank=128)
    monkeypatch.setattr(dummy, "preset", lambda name: real(name) | small)
    model = warm.small_dummy("flash", "reference", "cpu")
    blocks = (*model.layers, *model.mtp)
    assert {model.config.compress_ratios[i] for i in range(warm.LAYERS)} == {
        0,
        4,
        128,
    } and 0 < model.config.num_hash_layers < warm.LAYERS
    assert (
        len({block.ffn.experts.w13.weight.data_ptr() for block in blocks})
        == 1
        < len({block.attn.wq_a.weight.data_ptr() for block in blocks})
    )
    rounds = speculation_gpu.traced(model, 1, 256, 40, on_device(Static(1), 1, "cpu"), [1])
    with torch.inference_mode():
        rounds._round(1)


@pytest.mark.sweep  # minutes on a busy machine; its parts have tests of their own
def test_a_checkpoints_own_text_is_plain_decodings_under_every_policy(tmp_path, monkeypatch):
    """As on a GPU, with costs of a table: those of a CPU are no matter here."""
    costs = dataclasses.replace(moe(), batches={2: moe().of(1)})
    monkeypatch.setattr(speculation_gpu, "measure_costs", lambda *given: costs)
    args = bench_speculation.arguments(
        [
            "--checkpoint",
            str(speculation_traces.ROOT / "demo"),
            "--numerics",
            "fp32",
            "--batch",
            "2",
            "--tokens",
            "32",
            "--static",
            "3",
            "--out",
            str(tmp_path),
            "--journal",
            str(tmp_path / "journal.jsonl"),
        ]
    )
    bench_speculation.on_checkpoint(args, "cpu")
    first = (tmp_path / "bench_speculation_demo_cpu.json").read_text()
    assert read_costs(tmp_path / "speculation_costs_demo_cpu.json") == costs, "as --draft-costs takes it"
    from scripts.bench import speculation_text

    cut = args.journal.read_text().splitlines(True)
    # cut off within the adaptive sizes: static ones are not run again, and are what the rest is held against
    args.journal.write_text("".join(cut[:-5]))
    ran, timed = [], speculation_text._timed
    with monkeypatch.context() as here:
        here.setattr(
            speculation_text,
            "_timed",
            lambda rounds, kind, name, *given: (ran.append((name, kind)), timed(rounds, kind, name, *given))[1],
        )
        bench_speculation.on_checkpoint(args, "cpu")
    again = (tmp_path / "bench_speculation_demo_cpu.json").read_text()
    same = lambda text: [
        {k: r[k] for k in ("policy", "trace", "tokens", "rounds", "same")} for r in json.loads(text)["setup"]["ran"]
    ]
    assert ran == [
        ("ASBS", "prose"),
        ("cost-aware", "code"),
        ("cost-aware", "prose"),
        ("oracle", "code"),
        ("oracle", "prose"),
    ] and same(again) == same(first)
    monkeypatch.setattr(
        speculation_text, "_trace", lambda *given: pytest.fail("a batch that the journal holds ran again")
    )
    bench_speculation.on_checkpoint(args, "cpu")
    untimed = lambda text: (found := json.loads(text)) | {"about": found["about"] | {"seconds": None}}
    assert untimed((tmp_path / "bench_speculation_demo_cpu.json").read_text()) == untimed(again)
    document, text = (
        json.loads((tmp_path / "bench_speculation_demo_cpu.json").read_text()),
        (tmp_path / "bench_speculation_demo_cpu.md").read_text(),
    )
    ran = document["setup"]["ran"]
    assert {v["of"] for v in document["goals"]} == {"best static size"} and all(
        p["of_oracle"] is None for p in document["points"]
    )
    # it is no bound of a text's own
    assert " (1.00) |" not in text and "of the oracle" not in text and "of oracle" not in text
    assert "static sizes 1, 2, 4, 5, 6, 7, 8 did not run" in text
    assert [r["policy"] for r in ran][::2] == ["no speculation", "static 3", "ASBS", "cost-aware", "oracle"]
    assert {r["trace"] for r in ran} == {"code", "prose"} and all(r["same"] == 2 and r["tokens"] >= 32 for r in ran)
    for r in ran:
        if r["policy"] == "static 3":  # of acceptance as it was recorded: what comes out is what was expected
            wanted = r["expected"] * sum(costs.seconds(2, s) for s in r["sizes"])
            assert len(r["rounds"]) < 24 and abs(r["tokens"] - wanted) <= 0.1 * wanted, (
                r["trace"],
                r["tokens"],
                wanted,
            )
    assert "2 of 2 |" in text


def test_rows_are_cut_one_after_another():
    trace = Trace("t", (Request("a", np.arange(6) % 9), Request("b", np.arange(3))), {"kind": "recorded"})
    rows = [r.accepted.tolist() for r in speculation_gpu.part(trace, 3, 4).requests]
    assert rows[:2] == [[0, 1, 2, 3], [4, 5, 0, 1]] and rows[2] == [2, 2, 2, 2]


def test_turns_alternate():
    a, b = (
        Trace(n, (Request("x", np.full(8, v)), Request("y", np.full(8, v))), {"kind": "recorded"})
        for n, v in (("a", 1), ("b", 2))
    )
    first, second = speculation_traces.by_turns(a, b, 4).requests
    assert first.accepted.tolist() == [1] * 4 + [2] * 4 + [1] * 4 + [2] * 4
    assert second.accepted.tolist() == [2] * 4 + [1] * 4 + [2] * 4 + [1] * 4


def test_what_is_recorded_is_what_drafts_would_do(model):
    """From each position, with that many tokens committed, as many drafts are right as the trace says."""
    g = torch.Generator().manual_seed(4)
    ids = [torch.randint(model.config.vocab_size, (n,), generator=g).tolist() for n in (7, 40)]
    cache = lambda: model.new_cache(2, 90, max_rewind=8)
    seen = speculation_gpu.record(model, cache(), ids, 20)
    assert seen.shape == (2, 20) and 0 <= seen.min() and seen.max() <= 8
    for k in (1, 3):
        from dsv4.speculation.device_drafters import primed
        from dsv4.speculation.rounds import Rounds

        held = cache()
        rounds = Rounds(model, held, 8, *primed(model, held, ids), [30, 30], (), on_device(Static(k), 2, "cpu"))
        at = np.zeros(2, int)
        while at.max() < 12:
            rounds._round(k)
            now = rounds.written.numpy()
            assert (now - at).tolist() == [min(k, seen[b, at[b]]) + 1 for b in range(2)]
            at = now.copy()


def test_refusals(capsys, tmp_path, monkeypatch):
    assert bench_speculation.main(["--tokens", "3"]) == 2
    assert "expected one for each" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert bench_speculation.main(["--out", str(tmp_path)]) == 2
        assert "timed on a CUDA device" in capsys.readouterr().err
    assert bench_speculation.main(["--record", str(tmp_path / "none")]) == 2
    monkeypatch.setattr(speculation_traces, "ROWS", 10**6)
    assert not list(tmp_path.iterdir())


def test_shipped_traces_are_read():
    found = speculation_traces.default_traces()
    assert [kind for kind, _ in found] == ["stationary", "stationary", "mixed"] * 2
    for _kind, trace in found:
        assert all(0 <= r.accepted.min() and r.accepted.max() <= 8 for r in trace.requests)
        assert trace.provenance["kind"] in ("recorded", "synthetic") and json.dumps(dict(trace.provenance))
    assert len(speculation.groups([])) == 0
