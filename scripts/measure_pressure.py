"""What block sizes of drafts do to a pool of pages under pressure.

    python scripts/measure_pressure.py [CHECKPOINT] [--requests FILE] [--pool-tokens 1536,2048,4096]
                                       [--policies off 8 4 adaptive adaptive:undrafted=decay cost-aware] [--rows 4]
                                       [--numerics fp32] [--backend auto] [--device cpu] [--out DIR]

Runs the same requests through the batch engine once a policy and pool. Requests are split in halves by their
acceptance under the first policy that drafts, so that one split serves all. Times are in steps of the engine, which are
the same on every machine; on a GPU also in milliseconds. Fragmentation: the share of rows of live pages that hold
nothing, mean over the steps and pools. Writes pressure_<device>.json and .md.
"""

import argparse
import statistics
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dsv4 import load_model
from dsv4.commands.batch import Options, new_pool
from dsv4.commands.generate import make_drafter
from dsv4.engine.batch import BatchEngine
from dsv4.engine.requests import read_requests
from dsv4.engine.state import Result
from dsv4.model import families
from dsv4.model.tokenizer import Tokenizer
from dsv4.speculation.choice import policy_named
from scripts.bench import report
from scripts.places import folder

SCRIPT = "scripts/measure_pressure.py"
COSTS = ROOT / "audits/speculation/flash/h100/speculation_costs_h100.json"
REQUESTS = ROOT / "audits/batch/demo/cpu/demo_pressure.jsonl"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, default=ROOT / "demo")
    parser.add_argument("--requests", type=Path, default=REQUESTS)
    parser.add_argument("--pool-tokens", default="1536,2048,4096")
    parser.add_argument(
        "--policies", nargs="+", default=["off", "8", "4", "adaptive", "adaptive:undrafted=decay", "cost-aware"]
    )
    parser.add_argument("--speculate", default="mtp", choices=("mtp", "lookup"))
    parser.add_argument("--rows", type=int, default=4)
    for name, value in (("numerics", "fp32"), ("backend", "auto"), ("device", "cpu")):
        parser.add_argument(f"--{name}", default=value)
    parser.add_argument("--out", type=report.out_folder, metavar="DIR")
    return parser.parse_args()


def measure(model, asked: list, policy: str, pool: int, rows: int, drafter: str) -> dict:
    """One run of the requests: figures of the engine, and of each request what it drafted."""
    # room to rewind whatever the policy: the pools are then the same for all
    cache, ended = new_pool(model, asked, Options(rows, pool_tokens=str(pool), speculate=drafter)), []
    drafts = {} if policy == "off" else {"drafter": make_drafter(drafter), "policy": _policy(policy)}
    engine = BatchEngine(model, cache, (), on_result=ended.append, **drafts)
    steps: dict[str, list[int]] = {}
    for request in asked:
        engine.submit(request)
    while engine.waiting or engine.running:
        results = [work.result for work in engine.waiting + engine.running]
        engine.step()
        for result in results:
            told = steps.setdefault(result.id, [])
            told.extend([engine.steps] * (len(result.token_ids) - len(told)))
    if failed := [r for r in ended if r.error is not None]:
        raise failed[0].error
    return {"figures": engine.figures(), "requests": [_row(r, steps[r.id]) for r in sorted(ended, key=lambda r: r.id)]}


def _policy(name: str):
    return policy_named(name, COSTS if name == "cost-aware" else None)


def _row(result: Result, steps: list[int]) -> dict:
    spec = result.speculation
    return {
        "id": result.id,
        "tokens": len(result.token_ids),
        "acceptance": spec.acceptance or 0.0,  # None: nothing was drafted
        "mean_block_size": spec.mean_block_size,
        "gaps_in_steps": np.diff(steps).tolist(),
        "gaps_in_seconds": result.between_tokens,
    }


def summary(run: dict, high: set[str], gpu: bool) -> dict:
    """The figures of a table's row. high: requests of high acceptance."""
    rows, pools = run["requests"], run["figures"]["pools"]
    size = lambda inside: [r["mean_block_size"] for r in rows if (r["id"] in high) == inside]
    gaps = lambda key: np.percentile([g for r in rows for g in r[key]], 95)
    return {
        "steps": run["figures"]["steps"],
        "evictions": run["figures"]["evictions"],
        "hit_rate": run["figures"]["prefix_hit_rate"],
        "under_pressure": run["figures"]["share_of_steps_under_pressure"],
        "fragmentation": statistics.mean(p["mean_fragmentation"] for p in pools.values()),
        "size_high": statistics.mean(size(True)),
        "size_low": statistics.mean(size(False) or [0.0]),
        "p95_steps": float(gaps("gaps_in_steps")),
        "p95_ms": 1e3 * float(gaps("gaps_in_seconds")) if gpu else None,
        "tokens": sum(r["tokens"] for r in rows),
    }


def markdown(about: dict, setup: dict, rows: list[dict]) -> str:
    timed = rows[0]["p95_ms"] is not None
    lines = [
        "# Block sizes of drafts and a pool under pressure",
        "",
        f"{report.headline(about)}.",
        "",
        f"    {about['command']}",
        "",
        f"{setup['checkpoint']}, numerics {setup['numerics']}, backend {setup['backend']} on {setup['device']}; "
        f"{setup['requests']} requests of {setup['file']}, {setup['rows']} rows, drafts of {setup['drafter']}. High, "
        f"low: the halves of the requests by acceptance under policy {setup['split']}. Between tokens: in steps "
        "of the engine; tokens of one pass come at once.",
        "",
        "| pool, tokens | policy | steps | evictions | steps under pressure | hit rate | fragmentation | mean block, "
        "high | low | p95 between tokens, steps |" + (" ms |" if timed else ""),
        "|---:|---|" + "---:|" * (9 if timed else 8),
    ]
    for r in rows:
        lines.append(
            f"| {r['pool']} | {r['policy']} | {r['steps']} | {r['evictions']} | {r['under_pressure']:.1%} | "
            f"{r['hit_rate']:.1%} | {r['fragmentation']:.1%} | {r['size_high']:.2f} | {r['size_low']:.2f} | "
            f"{r['p95_steps']:.0f} |" + (f" {r['p95_ms']:.1f} |" if timed else "")
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)
    choices = {"numerics": args.numerics, "backend": args.backend, "device": args.device}
    model = load_model(args.checkpoint, mtp=args.speculate == "mtp", **choices)
    tokenizer = Tokenizer(args.checkpoint, model.config.vocab_size)
    encode = lambda text: families.of(model.config).prompt_ids(tokenizer, text, model.config)
    asked = list(read_requests(args.requests.read_text().splitlines(), encode, args.speculate))
    drafting = next(p for p in args.policies if p != "off")
    rows, high = [], set()
    for pool in map(int, args.pool_tokens.split(",")):
        for policy in sorted(args.policies, key=lambda p: p != drafting):
            run = measure(model, asked, policy, pool, args.rows, args.speculate)
            if not high:
                ordered = sorted(run["requests"], key=lambda r: r["acceptance"])
                high = {r["id"] for r in ordered[len(ordered) // 2 :]}
            rows.append({"pool": pool, "policy": policy} | summary(run, high, args.device != "cpu"))
            print(rows[-1], flush=True)
    about = report.provenance(SCRIPT)
    setup = choices | {
        "checkpoint": args.checkpoint.name,
        "backend": model.backend,
        "file": args.requests.name,
        "requests": len(asked),
        "rows": args.rows,
        "drafter": args.speculate,
        "split": drafting,
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
