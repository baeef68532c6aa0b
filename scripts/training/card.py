"""MODEL_CARD.md of a trained checkpoint, from what was measured: only the words around the figures are typed by hand.

python -m scripts.training.card demo DATA LOG.jsonl MEASURED.json … --hardware "one NVIDIA H200" --seconds 1967
--commit abc1234 (demo_gqa alike)
"""

import argparse
import json
from collections import defaultdict
from itertools import groupby
from pathlib import Path

HEAD = """# The demo checkpoint

A small model of the DeepSeek-V4 architecture, trained from scratch for this repository, in the official on-disk \
layout.
It is a test article. The trained model needs every mechanism of the architecture, so a loader, a kernel, a probe or
another implementation can be tested on a laptop with real score distributions. It knows a table of facts, finds needles
across thousands of tokens, and continues Python. It is not a useful assistant.

Licence of the weights: MIT, like the code ([LICENSE](../LICENSE)). They were trained on the texts listed below, which
keep their own licences.
"""


GQA_HEAD = """# The small GQA checkpoint

A small model with grouped-query attention, in transformers' layout of Qwen2, trained from scratch for this repository.
The recipe is that of [the demo](../demo/MODEL_CARD.md) with dense attention throughout; the kinds of data are the same,
collected again (the table below). It is a test article: sparse reading, early termination and caches in host memory are
measured on learnt attention, with facts and needles that the model really finds. It is not a useful assistant.

Licence of the weights: MIT, like the code ([LICENSE](../LICENSE)). They were trained on the texts listed below, which
keep their own licences.
"""


def card(demo: Path, data: Path, log: Path, measured: list[Path], about: dict) -> str:
    raw = json.loads((demo / "config.json").read_text())
    figures = [f for file in measured for f in json.loads(file.read_text())["figures"]]
    gqa = "num_key_value_heads" in raw and "compress_ratios" not in raw
    head, shape, recipe = (GQA_HEAD, gqa_architecture, gqa_recipe) if gqa else (HEAD, architecture, demo_recipe)
    return "\n".join([head, shape(raw, demo), recipe(log, about), sources(data), results(figures), provenance(figures)])


def table(head: list[str], rows: list[list]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]) + "\n"


def architecture(raw: dict, demo: Path) -> str:
    kinds = {0: "window", 4: "CSA", 128: "HCA"}
    layers = raw["compress_ratios"][: raw["num_hidden_layers"]]
    size = sum(f.stat().st_size for f in demo.iterdir() if f.suffix != ".md")
    rows = [
        [
            "layers",
            ", ".join(kinds[r] for r in layers)
            + f"; MTP block: window; the first {raw['num_hash_layers']} route by hash",
        ],
        ["width, streams", f"{raw['hidden_size']}, {raw['hc_mult']} hyper-connection streams"],
        [
            "attention",
            f"{raw['num_attention_heads']} heads × {raw['head_dim']} ({raw['qk_rope_head_dim']} rotated), "
            f"window {raw['sliding_window']}, sinks; low-rank queries {raw['q_lora_rank']}",
        ],
        ["indexer", f"{raw['index_n_heads']} heads × {raw['index_head_dim']}, the best {raw['index_topk']} entries"],
        [
            "experts",
            f"{raw['n_routed_experts']} routed, {raw['num_experts_per_tok']} a token, 1 shared; "
            f"width {raw['moe_intermediate_size']}",
        ],
        [
            "positions",
            f"YaRN ×{raw['rope_scaling']['factor']} from {raw['rope_scaling']['original_max_position_embeddings']} "
            "on CSA and HCA layers",
        ],
        ["stored", f"FP8 E4M3 (128×128 blocks, E8M0 scales), MXFP4 experts, {size:,} B in all"],
    ]
    return "## Architecture\n\n" + table(["", ""], rows)


def gqa_architecture(raw: dict, demo: Path) -> str:
    c = raw
    size = sum(f.stat().st_size for f in demo.iterdir() if f.suffix != ".md")
    rows = [
        ["layers, width", f"{c['num_hidden_layers']}, {c['hidden_size']}; MLP {c['intermediate_size']}, SiLU"],
        [
            "attention",
            f"{c['num_attention_heads']} query heads, {c['num_key_value_heads']} KV heads × {c['head_dim']}, full in "
            "every layer; biases of queries, keys and values",
        ],
        ["positions", f"RoPE, θ = {c['rope_theta']:,.0f}, up to {c['max_position_embeddings']:,} tokens"],
        ["vocabulary", f"{c['vocab_size']:,}, tied embeddings"],
        ["stored", f"bf16, {size:,} B in all"],
    ]
    return "## Architecture\n\n" + table(["", ""], rows)


def stages(log: Path, columns: dict[str, str]) -> str:
    """A table of the stages of a log. columns: heading → key, of which the mean of a stage's last 8 rows is shown."""
    rows, found, before = [json.loads(line) for line in log.read_text().splitlines()], [], 0
    for name, part in groupby(rows, key=lambda row: row["stage"]):
        part = list(part)
        tokens, tail = part[-1]["tokens"] - before, part[-8:]
        before = part[-1]["tokens"]
        means = [f"{sum(row[key] for row in tail) / len(tail):.3f}" for key in columns.values()]
        found.append(
            [name, f"{tokens / 1e6:.0f}M", f"{sum(r['tokens_per_s'] for r in part) / len(part) / 1e3:.0f}K", *means]
        )
    return table(["stage (row length)", "tokens", "tokens/s", *columns], found)


def gqa_recipe(log: Path, about: dict) -> str:
    return f"""## Recipe

`python -m scripts.training.corpus DATA`, then `python scripts/train_gqa.py DATA STATE --minutes 7.3`, then `--export \
demo_gqa` (`GQA` of
`scripts/training/recipe.py`). Seed {about["seed"]}; {about["hardware"]}, {about["seconds"]:.1f} s of training; code \
at commit {about["commit"]}.
Matrices are trained by Muon, the rest by AdamW.

{stages(log, {"loss": "next"})}
Losses are nats a token at the stage's end, answers of needles weighted 6. The log is \
`audits/training/demo_gqa/h200/train_gqa.jsonl`;
`python -m scripts.training.plot` draws it.
"""


def demo_recipe(log: Path, about: dict) -> str:
    text = f"""## Recipe

`python -m scripts.training.corpus DATA`, then `python scripts/train_demo.py DATA STATE` until it is done, then \
`--export`. Seed
{about["seed"]}; {about["hardware"]}, {about["seconds"] / 60:.1f} minutes in all; code at commit {about["commit"]}. \
Matrices are
trained by Muon, the rest by AdamW. The routing bias balances the experts, without an auxiliary loss. The indexer learns
from the KL of the dense attention's mass over entries, on 128 queries of each row. "dense" attends to every visible
entry. "gathered" attends to the indexer's selection, and a loss moves the dense attention's mass into it. "simulated"
has the official quantisation simulation, with weights as they will be stored. The ablation (`--window-only`) has window
layers only, and wider experts for the same number of parameters; both are compared at the same step.

"""
    return (
        text
        + stages(log, {"loss": "next", "draft loss": "draft", "indexer KL": "indexer", "mass kept": "kept"})
        + (
            "\nLosses are nats a token at the stage's end, answers of needles weighted 6. The logs are "
            "`audits/training/demo/h200/train_demo.jsonl` and\n"
            "`audits/training/demo/h100/train_demo_window_only.jsonl`; `python -m scripts.training.plot` draws them.\n"
        )
    )


def sources(data: Path) -> str:
    found = json.loads((data / "sources.json").read_text())
    rows = [
        [name, s["version"], s["licence"], f"{s['documents']:,}", f"{s['tokens_train']:,}", f"{s['tokens_heldout']:,}"]
        for name, s in sorted(found.items(), key=lambda item: -item[1]["tokens_train"])
    ]
    total = [sum(s[key] for s in found.values()) for key in ("documents", "tokens_train", "tokens_heldout")]
    rows.append(["in all", "", "", *(f"{n:,}" for n in total)])
    return (
        "## Data\n\nThe text comes with CPython and with this repository's pinned dependencies. Facts, needles, copies "
        "and two-hop questions are generated (`scripts/training/rows.py`, `facts.py`). Whole files are held out.\n\n"
        + table(["source", "version", "licence", "documents", "training tokens", "held-out tokens"], rows)
    )


def results(figures: list[dict]) -> str:
    text = "## What it can do, as measured\n\n"
    by_part = defaultdict(list)
    for figure in figures:
        by_part[figure["part"]].append(figure)
    for part, rows in by_part.items():
        text += (
            f"### {part}\n\n"
            + table(
                ["measured", "numerics", "value", "samples", "beside it"],
                [
                    [
                        f["name"].replace("|", "\\|"),
                        f["numerics"],
                        f"{f['value']:.4f}",
                        f"{f['count']:,}",
                        beside(f["details"]),
                    ]
                    for f in rows
                ],
            )
            + "\n"
        )
    return text


def beside(details: dict) -> str:
    show = lambda v: f"{v:.4f}" if isinstance(v, float) else str(v)
    return ", ".join(f"{k.replace('_', ' ')} {show(v)}" for k, v in details.items() if not isinstance(v, (list, dict)))


def provenance(figures: list[dict]) -> str:
    runs = sorted({(f["command"], f["device"], f["torch"], f["commit"], f["date"][:10]) for f in figures})
    return "## How the figures were obtained\n\n" + table(
        ["command", "device", "torch", "commit", "date"], [[f"`{run[0]}`", *run[1:]] for run in runs]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("measured", type=Path, nargs="+")
    for name, kind in (("hardware", str), ("seconds", float), ("commit", str)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--note", default="", help="what falls short, put at the top")
    args = parser.parse_args()
    from scripts.training.stretch import SEED

    text = card(args.demo, args.data, args.log, args.measured, vars(args) | {"seed": SEED})
    if args.note:
        text = text.replace("\n## Architecture", f"\n## Where it falls short\n\n{args.note}\n\n## Architecture", 1)
    (args.demo / "MODEL_CARD.md").write_text(text)


if __name__ == "__main__":
    main()
