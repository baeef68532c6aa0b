"""What block sizes of drafts do to a pool of pages under pressure.

    python scripts/measure_pressure.py [CHECKPOINT] [--requests FILE] [--pool-tokens 2048,3072]
                                       [--policies off 8 4 adaptive …] [--rows 8] [--clock costs|real]
                                       [--numerics fp32] [--backend auto] [--device cpu] [--out DIR]

Runs the same requests through the batch engine once a policy and pool. Requests are split in halves by their
acceptance under the first policy that drafts, so that one split serves all. With ",dropped" after a policy, prefixes
that no request uses are dropped as soon as more than 85 % of a pool is live, and not only when pages are short.

Fragmentation: the share of the bytes of live pages that holds nothing, mean over the engine's steps. Times: what passes
cost by a table measured at Flash widths (`--clock costs`), so that the demo on a host decides the tokens and an H100
the time; a piece of a prompt is assumed to cost as much as the longest pass. Or this machine's own (`--clock real`).
Writes pressure_<device>.json and .md.
"""

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dsv4 import load_model
from dsv4.cache.paging import PRESSURE_PERCENT, under_pressure
from dsv4.commands.batch import Options, new_pool
from dsv4.commands.generate import make_drafter
from dsv4.engine.batch import BatchEngine
from dsv4.engine.requests import read_requests
from dsv4.engine.state import Result
from dsv4.model import families
from dsv4.model.tokenizer import Tokenizer
from dsv4.speculation.choice import policy_named
from dsv4.speculation.costs import read_costs
from scripts.bench import report
from scripts.places import folder

SCRIPT = "scripts/measure_pressure.py"
COSTS = ROOT / "audits/speculation/flash/h100/speculation_costs_h100.json"
REQUESTS = ROOT / "audits/batch/demo/cpu/shared_prefixes.jsonl"
DROPPED = ("8,dropped", "4,dropped", "adaptive,dropped", "cost-aware,dropped")
SAMPLED = 4  # steps between two samples of the fragmentation
PAGES = (8, 16, 32, 64, 128, 256)  # tokens


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, default=ROOT / "demo")
    parser.add_argument("--requests", type=Path, default=REQUESTS)
    parser.add_argument("--pool-tokens", default="2048,3072")
    parser.add_argument(
        "--policies",
        nargs="+",
        default=["8", "off", "4", "adaptive", "adaptive:undrafted=decay", "cost-aware", *DROPPED],
    )
    parser.add_argument("--speculate", default="mtp", choices=("mtp", "lookup"))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--clock", default="costs", choices=("costs", "real"))
    for name, value in (("numerics", "fp32"), ("backend", "auto"), ("device", "cpu")):
        parser.add_argument(f"--{name}", default=value)
    parser.add_argument("--out", type=report.out_folder, metavar="DIR")
    return parser.parse_args()


def measure(model, asked: list, policy: str, pool: int, rows: int, drafter: str, clock: "Priced | None") -> dict:
    """One run of the requests: figures of the engine, and of each request what it drafted."""
    # room to rewind whatever the policy: the pools are then the same for all
    cache, ended = new_pool(model, asked, Options(rows, pool_tokens=str(pool), speculate=drafter)), []
    name, comma, _ = policy.partition(",dropped")
    drafts = {} if name == "off" else {"drafter": make_drafter(drafter), "policy": _policy(name)}
    how = {} if clock is None else {"clock": clock}
    engine, empty = BatchEngine(model, cache, (), on_result=ended.append, **drafts, **how), []
    if clock is not None:
        clock.time(engine.passes)
    if comma:
        engine._relieve = partial(drop_prefixes, engine)
    for request in asked:
        engine.submit(request)
    while engine.busy:
        engine.step()
        if engine.steps % SAMPLED == 0:
            empty.append(fragmentation(cache))
    if failed := [r for r in ended if r.error is not None]:
        raise failed[0].error
    found = {"figures": engine.figures(), "fragmentation": statistics.mean(empty)}
    return found | {"requests": [_row(r) for r in sorted(ended, key=lambda r: r.id)]}


def drop_prefixes(engine: BatchEngine) -> None:
    """Drop kept prefixes until at most 85 % of each pool is live, where those alone bring it above."""
    for name, pool in engine.cache.pools.items():
        if pool.under_pressure and not under_pressure(len(engine.cache.running_pages(name)), pool.pages):
            engine.prefixes.make_free(name, pool.live - pool.pages * PRESSURE_PERCENT // 100)


class Priced:
    """A clock that only the passes of an engine advance, by what they cost in a table. now: seconds."""

    def __init__(self, costs: Path):
        self.costs, self.now = read_costs(costs), 0.0

    def __call__(self) -> float:
        return self.now

    def time(self, passes) -> None:
        """Let passes and pieces of prompts take time: before their tokens are given."""
        verify, read = passes.verify, passes.read

        def timed_verify(ids, counts, *more):
            self.now += self.costs.uniform(1, max(counts) - 1)
            return verify(ids, counts, *more)

        def timed_read(*of, **more):
            self.now += self.costs.of(1).verify[-1]
            return read(*of, **more)

        passes.verify, passes.read = timed_verify, timed_read


def fragmentation(cache) -> float:
    """The share of the bytes of live pages that holds nothing."""
    live, empty = 0.0, 0.0
    for name, pool in cache.figures().items():
        held = pool["live"] * sum(t[0].nbytes for t in cache._tensors[name])
        live, empty = live + held, empty + held * pool["fragmentation"]
    return empty / live if live else 0.0


def _policy(name: str):
    return policy_named(name, COSTS if name == "cost-aware" else None)


def _row(result: Result) -> dict:
    spec = result.speculation
    return {
        "id": result.id,
        "prompt": result.prompt_tokens,
        "tokens": len(result.token_ids),
        "acceptance": spec.acceptance or 0.0,  # None: nothing was drafted
        "mean_block_size": spec.mean_block_size,
        "drafted": spec.block_size_history,
        "accepted": spec.accepted_history,
        "gaps": result.between_tokens,
    }


def summary(run: dict, high: set[str]) -> dict:
    """The figures of a table's row. high: requests of high acceptance."""
    rows = run["requests"]
    size = lambda inside: statistics.mean([r["mean_block_size"] for r in rows if (r["id"] in high) == inside] or [0.0])
    gaps = [1e3 * g for r in rows for g in r["gaps"]]
    return {
        "steps": run["figures"]["steps"],
        "evictions": run["figures"]["evictions"],
        "hit_rate": run["figures"]["prefix_hit_rate"],
        "under_pressure": run["figures"]["share_of_steps_under_pressure"],
        "fragmentation": run["fragmentation"],
        "size_high": size(True),
        "size_low": size(False),
        "gap_ms": {"mean": statistics.mean(gaps)} | {f"p{p}": float(np.percentile(gaps, p)) for p in (50, 95, 99)},
        "tokens": sum(r["tokens"] for r in rows),
        "by_page": {str(size): by_page(rows, size) for size in PAGES},
    }


def by_page(rows: list[dict], page: int) -> dict[str, float]:
    """What pages of `page` tokens would hold over the passes of these requests, each alone. A pass over n tokens with D
    drafts, of which a stay, needs ⌈(n + 1 + D)/page⌉ pages while it runs and ⌈(n + 1 + a)/page⌉ when it has ended.

    Means over passes: the share of the pages of a running pass that its drafts alone need, and fragmentation after the
    pass."""
    during = after = tokens = 0
    for r in rows:
        n = r["prompt"]
        for drafted, accepted in zip(r["drafted"], r["accepted"]):
            during += -(-(n + 1 + drafted) // page)
            n += 1 + accepted
            after += -(-n // page)
            tokens += n
    return {"for_drafts": 1 - after / during, "fragmentation": 1 - tokens / (after * page)}


def markdown(about: dict, setup: dict, rows: list[dict]) -> str:
    lines = [
        "# Block sizes of drafts and a pool under pressure",
        "",
        f"{report.headline(about)}.",
        "",
        f"    {about['command']}",
        "",
        f"{setup['checkpoint']}, numerics {setup['numerics']}, backend {setup['backend']} on {setup['device']}; "
        f"{setup['requests']} requests of {setup['file']}, {setup['rows']} rows, drafts of {setup['drafter']}. High, "
        f"low: the halves of the requests by acceptance under policy {setup['split']}. Fragmentation: of the bytes of "
        f"live pages. Between tokens: {setup['clock']}; tokens of one pass come at once.",
        "",
        "| pool, tokens | policy | steps | evictions | steps under pressure | hit rate | fragmentation | mean block, "
        "high | low | between tokens, ms: mean | p50 | p95 | p99 |",
        "|---:|---|" + "---:|" * 11,
    ]
    for r in rows:
        gaps = " | ".join(f"{ms:.1f}" for ms in r["gap_ms"].values())
        lines.append(
            f"| {r['pool']} | {r['policy']} | {r['steps']} | {r['evictions']} | {r['under_pressure']:.1%} | "
            f"{r['hit_rate']:.1%} | {r['fragmentation']:.1%} | {r['size_high']:.2f} | {r['size_low']:.2f} | {gaps} |"
        )
    lines += [
        "",
        "## By the size of a page",
        "",
        "Counted from the passes of the first pool, each request alone: the share of a running pass's pages that only "
        "its drafts need, and, after the slash, fragmentation when it has ended. The engine's pages hold 128 tokens or "
        "more.",
        "",
        "| policy | " + " | ".join(f"{page} tokens" for page in PAGES) + " |",
        "|---|" + "---:|" * len(PAGES),
    ]
    for r in rows:
        if r["pool"] == rows[0]["pool"]:
            cells = (f"{c['for_drafts']:.2%} / {c['fragmentation']:.1%}" for c in r["by_page"].values())
            lines.append(f"| {r['policy']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)
    choices = {"numerics": args.numerics, "backend": args.backend, "device": args.device}
    model = load_model(args.checkpoint, mtp=args.speculate == "mtp", **choices)
    tokenizer = Tokenizer(args.checkpoint, model.config.vocab_size)
    encode = lambda text: families.of(model.config).prompt_ids(tokenizer, text, model.config)
    asked = list(read_requests(args.requests.read_text().splitlines(), encode, args.speculate))
    drafting = next((p for p in args.policies if p != "off"), args.policies[0])
    rows, high = [], set()
    for pool in map(int, args.pool_tokens.split(",")):
        for policy in sorted(args.policies, key=lambda p: p != drafting):
            clock = Priced(COSTS) if args.clock == "costs" else None
            run = measure(model, asked, policy, pool, args.rows, args.speculate, clock)
            if not high:
                ordered = sorted(run["requests"], key=lambda r: r["acceptance"])
                high = {r["id"] for r in ordered[len(ordered) // 2 :]}
            rows.append({"pool": pool, "policy": policy} | summary(run, high))
            print({k: v for k, v in rows[-1].items() if k != "by_page"}, flush=True)
    about = report.provenance(SCRIPT)
    setup = choices | {
        "checkpoint": args.checkpoint.name,
        "backend": model.backend,
        "file": args.requests.name,
        "requests": len(asked),
        "rows": args.rows,
        "drafter": args.speculate,
        "split": drafting,
        "clock": "this machine's time" if args.clock == "real" else f"by the costs of {COSTS.name}",
        "high": sorted(high),
    }
    name = report.device_slug(about["device"] if args.device != "cpu" else "cpu")
    place = folder(args.out, "batch", args.checkpoint.resolve().name, name)
    contents = {"about": about, "setup": setup, "rows": rows}
    for path in report.write(place, f"pressure_{name}", contents, markdown(about, setup, rows), None):
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
