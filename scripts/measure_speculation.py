"""Whether speculative text is plain text, and how fast: a checkpoint's greedy continuations with and without drafts, on
this machine.

    python scripts/measure_speculation.py [CHECKPOINT] [--numerics native,qat,fp32] [--texts 12] [--tokens 64]
    [--draft-tokens 3]
                                          [--rows 4] [--together] [--out DIR]

Each text is continued plainly, then with either drafter, as `dsv4 generate` runs it and as a request of the batch
engine beside the others. --together: as those commands do with it, a pass is verified as one append unless steps are
captured, and rows of the engine decode as one batch, with drafts and without, beside plain rows alone; this rounds
otherwise than single steps do. Writes speculation_identity_<device>.json and .md to DIR; exit code 1 when a
text differs where it should not (without --together).
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4 import load_model
from dsv4.cache.paged import new_paged_cache
from dsv4.engine import BatchEngine, Request
from dsv4.engine.batch import REWIND
from dsv4.engine.generate import generate, generate_on_device, generate_speculative
from dsv4.model.causal import captures
from dsv4.model.tokenizer import Tokenizer
from dsv4.speculation import Static
from dsv4.speculation.draft import LookupDrafter, MTPDrafter
from dsv4.speculation.passes import Append
from dsv4.speculation.verify import default
from scripts.bench import report, speculation_traces
from scripts.places import folder

SCRIPT = "scripts/measure_speculation.py"
DRAFTERS = {"mtp": MTPDrafter, "lookup": LookupDrafter}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, default=Path("demo"))
    parser.add_argument("--numerics", default="native,qat,fp32")
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4, help="of the engine")
    parser.add_argument("--together", action="store_true")
    parser.add_argument(
        "--out", type=report.out_folder, metavar="DIR", help="default: the folder that scripts/places.py names"
    )
    return parser.parse_args()


def measure(model, texts: list[list[int]], tokens: int, size: int, rows: int, together: bool) -> list[dict]:
    """A row for each drafter: how many texts are plain decoding's, where the others leave it, tokens/s beside plain
    decoding's."""
    engine = partial(in_engine, model, texts, tokens, size, rows)
    by_itself = partial(alone, model, texts, tokens, size, Append if together else default)
    ways = [
        ("", by_itself, by_itself, DRAFTERS),
        (
            ", in the engine",
            partial(engine, together),
            partial(engine, False),
            [*(["off"] if together else []), *DRAFTERS],
        ),
    ]
    found = []
    for where, run, plainly, names in ways:
        plain, spent, _ = plainly("off")
        for name in names:
            ids, seconds, counted = run(name)
            left = [
                next(i for i, (a, b) in enumerate(zip(*pair)) if a != b)
                for pair in zip(ids, plain)
                if pair[0] != pair[1]
            ]
            found.append(
                {
                    "numerics": model.numerics.name,
                    "drafter": name + where,
                    "texts": len(texts),
                    "same": len(texts) - len(left),
                    "left_at": left,
                    "tokens_a_pass": sum(len(text) - 1 for text in ids) / sum(s.verify_passes for s in counted),
                    "speed": spent / seconds,
                    "plain_tokens_per_second": sum(len(text) - 1 for text in plain) / spent,
                }
            )
            print(line(found[-1]), flush=True)
    return found


def alone(
    model, texts: list[list[int]], tokens: int, size: int, verify, name: str
) -> tuple[list[list[int]], float, list]:
    """Each text's tokens with that drafter ("off": without), the seconds of decoding in all, what was counted."""
    outs = [
        generate(model, ids, tokens) if name == "off" else drafted(model, name, ids, tokens, size, verify)
        for ids in texts
    ]
    return [out.token_ids for out in outs], sum(out.decode_seconds for out in outs), [out.speculation for out in outs]


def drafted(model, name: str, ids: list[int], tokens: int, size: int, verify):
    """The Generation of one text with drafts."""
    if captures(model):
        return generate_on_device(model, [ids], tokens, DRAFTERS[name](), policy=Static(size))[0]
    return generate_speculative(model, [ids], tokens, DRAFTERS[name](), policy=Static(size), verify=verify)[0]


def in_engine(
    model, texts: list[list[int]], tokens: int, size: int, rows: int, together: bool, name: str
) -> tuple[list[list[int]], float, list]:
    """Generations of requests of one engine, `rows` at a time. The engine ran them all once before; seconds include
    prompts."""
    cache = new_paged_cache(model, rows, max(map(len, texts)) + tokens, max_rewind=REWIND)
    results, drafts = {}, name in DRAFTERS
    engine = BatchEngine(
        model,
        cache,
        together=together,
        on_result=lambda r: results.update({r.id: r}),
        drafter=DRAFTERS[name]() if drafts else None,
        policy=Static(size) if drafts else None,
    )
    for _ in range(2):
        for i, ids in enumerate(texts):
            engine.submit(Request(i, tuple(ids), tokens))
        begun = time.perf_counter()
        engine.run()
        seconds = time.perf_counter() - begun
    found = [results[i] for i in range(len(texts))]
    return [r.token_ids for r in found], seconds, [r.speculation for r in found]


def line(row: dict) -> str:
    return (
        f"| {row['numerics']} | {row['drafter']} | {row['same']} of {row['texts']} | "
        f"{', '.join(map(str, row['left_at'])) or '–'} | {row['tokens_a_pass']:.2f} | {row['speed']:.2f} | "
        f"{row['plain_tokens_per_second']:.0f} |"
    )


def main() -> int:
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    rows = []
    for numerics in args.numerics.split(","):
        model = load_model(args.checkpoint, numerics=numerics, mtp=True, device=device)
        encode = Tokenizer(args.checkpoint, model.config.vocab_size).encode
        prompts = [speculation_traces.prompts(pattern, encode) for pattern in speculation_traces.KINDS.values()]
        texts = [ids for _, pair in zip(range(-(-args.texts // 2)), zip(*prompts)) for ids in pair][: args.texts]
        rows += measure(model, texts, args.tokens, args.draft_tokens, args.rows, args.together)
    about = report.provenance(SCRIPT)
    together = "decoded as one batch, beside plain ones each alone in its steps"
    text = [
        "# Speculative text beside plain text",
        "",
        f"{report.headline(about)}.",
        "",
        f"    {about['command']}",
        "",
        f"{args.texts} texts of this project (code and prose by turns), {speculation_traces.PROMPT} tokens each, "
        f"{args.tokens} more, greedy; {args.draft_tokens} drafts a pass, backend {model.backend}, one thread. Left "
        "at: the first token that differs. Speed: plain decoding's time over that with drafts: of decoding, and in "
        f"the engine of everything ({args.rows} requests at a time, "
        f"{together if args.together else 'each alone in its steps'}).",
        "",
        "| numerics | drafter | same text | left at | tokens a pass | speed | plain tokens/s |",
        "|---|---|---:|---|---:|---:|---:|",
        *map(line, rows),
    ]
    name = f"speculation_identity_{report.device_slug(about['device'])}" + ("_together" if args.together else "")
    out = folder(args.out, "speculation", args.checkpoint.resolve().name, about["device"])
    for path in report.write(out, name, {"about": about, "rows": rows}, "\n".join(text), None):
        print(f"wrote {path}")
    return int(not args.together and any(row["same"] < row["texts"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
