"""How often the host waits for the device in speculative generation, and what crosses to it, by the length of the
response.

    python scripts/measure_host_waits.py [CHECKPOINT] [--tokens 16,128,1024] [--draft-tokens 3 adaptive]
                                         [--speculate off,mtp,lookup] [--temperatures 0,0.8] [--loops host,device]
                                         [--dummy-weights flash --layers 16 --prompt-tokens 8192] [--numerics native]
                                         [--device cuda] [--out DIR]

Runs what `dsv4 generate --speculate … --loop …` runs on a GPU, without a stop: each drafter, policy and loop, greedily
and sampled. Writes host_waits_<device>.json and .md to DIR. Exit code 1 where a response that is longer made the host
wait more often, launch a loop more than once, or copies more a round; and where the two loops differ in a token.
"""

import argparse
import sys
import time
from contextlib import ExitStack
from functools import partial
from itertools import groupby, product
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dsv4 import load_model
from dsv4.commands.generate import make_drafter
from dsv4.engine.generate import generate_on_device
from dsv4.model.causal import captures
from dsv4.model.chat import plain_ids
from dsv4.model.dummy import load_dummy
from dsv4.model.tokenizer import Tokenizer
from dsv4.sampling import Sampling
from dsv4.speculation.choice import policy_named
from dsv4.speculation.one_launch import OneLaunch
from dsv4.speculation.rounds import Rounds
from scripts.bench import report
from scripts.bench.waits import counted_syncs
from scripts.places import folder

SCRIPT, PROMPT = "scripts/measure_host_waits.py", "def quicksort(values):"
ON_HOST = (
    "These rounds ran on the host and had ended when the call returned: nothing was there to wait for or to "
    "poll, and counts of 0 say nothing of a GPU."
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, default=ROOT / "demo")
    parser.add_argument("--tokens", default="16,128,1024")
    parser.add_argument("--draft-tokens", nargs="+", default=["3", "adaptive"])
    parser.add_argument("--speculate", default="mtp,lookup", help="drafters; off: none, which has no policy")
    parser.add_argument("--loops", default="host,device" if torch.cuda.is_available() else "host")
    parser.add_argument("--dummy-weights", help="a published geometry with random weights, instead of a checkpoint")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--prompt-tokens", type=int, default=8192, help="random ones, of random weights")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--numerics", default="native")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--out", type=report.out_folder, metavar="DIR", help="default: the folder that scripts/places.py names"
    )
    return parser.parse_args()


class Watched:
    """Of rounds: they are timed and their waits counted, from when they are prepared until they have ended: `waits`,
    `seconds`."""

    def prepare(self):
        super().prepare()
        self.counting, self.begun = ExitStack(), time.perf_counter()
        self.waits = self.counting.enter_context(counted_syncs())

    def finish(self, on_tokens=None):
        with self.counting:
            out = super().finish(on_tokens)
        self.seconds = time.perf_counter() - self.begun
        return out


class WatchedOnHost(Watched, Rounds):
    @property
    def launches(self) -> int:
        """Launches of graphs that the host made."""
        return len(self.counts.rounds) + len(self.counts.caught_up)


class WatchedOnDevice(Watched, OneLaunch):
    pass


LOOPS = {"host": (Rounds, WatchedOnHost), "device": (OneLaunch, WatchedOnDevice)}


def measure(model, ids: list[int], tokens: int, policy: str, drafter: str, temperature: float, loop: str) -> dict:
    """One row. The whole request is counted in a run of its own, because counts do not nest, and after one in which
    kernels compile."""
    how = (None, None) if drafter == "off" else (make_drafter(drafter), policy_named(policy))
    run = partial(generate_on_device, model, [ids], tokens, how[0], Sampling(temperature), how[1])
    plain, watched = LOOPS[loop]
    made: list[Watched] = []
    make = lambda *of, **more: made.append(watched(*of, **more)) or made[-1]
    run(make=make)
    with counted_syncs() as whole:
        run(make=plain)
    (out,) = run(make=make)
    rounds = made[-1]
    return {
        "loop": loop,
        "drafter": drafter,
        "policy": policy,
        "temperature": temperature,
        "tokens": len(out.token_ids),
        "token_ids": out.token_ids,
        "rounds": len(rounds.counts.rounds),
        "launches": rounds.launches,
        "synchronisations": len(rounds.waits),
        "synchronisations_of_the_request": len(whole),
        "polls": rounds.counts.polls,
        "seconds": rounds.seconds,
        "polls_per_second": rounds.counts.polls / rounds.seconds,
        "bytes_a_round": rounds.ring.nbytes,
        "bytes_at_the_end": rounds.host_out.nbytes,
        "tokens_per_second": out.decode_rate,
        "why": sorted(set(rounds.waits)),
    }


def markdown(about: dict, setup: dict, rows: list[dict]) -> str:
    lines = [
        "# Waits of the host in speculative generation",
        "",
        f"{report.headline(about)}.",
        "",
        f"    {about['command']}",
        "",
        f"{setup['checkpoint']}, numerics {setup['numerics']}, backend {setup['backend']} on {setup['device']}, one "
        "row, without a stop. Policy: drafts a round. Synchronisations: copies and calls that return only when the "
        "device has ended, while decoding, and in the whole request with its prompt and captures. Polls: how often "
        "the host asked whether a round had ended and it had not. Launches: of graphs, by the host, while decoding. "
        "Loop host: the ring crosses every round; the whole output once, at the end. Loop device: "
        "one record a round is written to host memory.",
        "",
    ]
    lines += [] if setup["captured"] else [ON_HOST, ""]
    lines += [
        "| loop | drafter | policy | temperature | tokens | rounds | launches | synchronisations, decoding | of the "
        "request | polls | polls a second | bytes a round | at the end | tokens/s |",
        "|---|---|---|" + "---:|" * 11,
    ]
    lines += [
        f"| {r['loop']} | {r['drafter']} | {r['policy']} | {r['temperature']:g} | {r['tokens']} | {r['rounds']} | "
        f"{r['launches']} | "
        f"{r['synchronisations']} | {r['synchronisations_of_the_request']} | {r['polls']} | "
        f"{r['polls_per_second']:.0f} | {r['bytes_a_round']} | {r['bytes_at_the_end']} | {r['tokens_per_second']:.0f} "
        "|"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def grows(rows: list[dict]) -> list[str]:
    """What is not the same for every length and must be, a line each."""
    found = []
    for way, group in groupby(rows, lambda r: (r["loop"], r["drafter"], r["policy"], r["temperature"])):
        some, told = list(group), f"loop {way[0]}, {way[1]}, {way[2]}, at temperature {way[3]:g}"
        alike = ("launches",) if way[0] == "device" else ("bytes_a_round",)
        for name in ("synchronisations", "synchronisations_of_the_request", *alike):
            if len({r[name] for r in some}) > 1:
                found.append(
                    f"{told}, {name}: {[r[name] for r in some]} for {[r['tokens'] for r in some]} tokens; expected the "
                    "same for all"
                )
    return found


def differ(rows: list[dict]) -> list[str]:
    """Rows whose text is not that of the host's loop, a line each."""
    key = lambda r: (r["drafter"], r["policy"], r["temperature"], r["tokens"])
    texts = {key(r): r["token_ids"] for r in rows if r["loop"] == "host"}
    return [
        f"loop {r['loop']}, {r['drafter']}, {r['policy']}, at temperature {r['temperature']:g}: another text of "
        f"{r['tokens']} tokens than the host's loop"
        for r in rows
        if texts.get(key(r), r["token_ids"]) != r["token_ids"]
    ]


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)
    if args.dummy_weights:
        model = load_dummy(args.dummy_weights, args.layers, numerics=args.numerics, mtp=True, device=args.device)
        g = torch.Generator().manual_seed(0)
        ids = torch.randint(model.config.vocab_size, (args.prompt_tokens,), generator=g).tolist()
        name = (
            f"{args.dummy_weights}, random weights, {args.layers or 'all'} layers, {args.prompt_tokens} tokens before"
        )
    else:
        name, model = "", load_model(args.checkpoint, numerics=args.numerics, mtp=True, device=args.device)
        ids = plain_ids(Tokenizer(args.checkpoint, model.config.vocab_size), PROMPT, model.config.bos_token_id)
    rows = []
    each = lambda given, kind=str: map(kind, given.split(","))
    for drafter, policy, temperature, tokens, loop in sorted(
        product(
            each(args.speculate),
            args.draft_tokens,
            each(args.temperatures, float),
            each(args.tokens, int),
            each(args.loops),
        ),
        key=lambda way: way[4] == "device",
    ):
        if drafter == "off" and policy != args.draft_tokens[0]:
            continue
        rows.append(measure(model, ids, tokens, "–" if drafter == "off" else policy, drafter, temperature, loop))
        print(
            f"loop {loop}, {drafter}, {policy}, at temperature {temperature:g}, {tokens} tokens: "
            f"{rows[-1]['launches']} launches, {rows[-1]['synchronisations']} synchronisations, "
            f"{rows[-1]['polls']} polls, {rows[-1]['tokens_per_second']:.0f} tokens/s",
            flush=True,
        )
    about = report.provenance(SCRIPT)
    setup = {
        "checkpoint": name or args.checkpoint.name,
        "numerics": model.numerics.name,
        "backend": model.backend,
        "device": str(model.device),
        "captured": captures(model),
        "draft_tokens": args.draft_tokens,
        "note": "" if captures(model) else ON_HOST,
    }
    wrong = grows(rows) + differ(rows)
    for row in rows:
        row.pop("token_ids")
    name = report.device_slug(about["device"] if model.device.type == "cuda" else "cpu")
    for path in report.write(
        folder(args.out, "speculation", args.dummy_weights or args.checkpoint.resolve().name, name),
        f"host_waits_{name}",
        {"about": about, "setup": setup, "rows": rows},
        markdown(about, setup, rows),
        None,
    ):
        print(f"wrote {path}")
    for said in wrong:
        print(said)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
