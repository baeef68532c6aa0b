"""The layout of help: the order of the commands, the groups of their options, two examples of each.

It is applied to the finished tree of commands, so an option is in one group whichever command has it.
"""

import re
import sys
from types import MethodType

ORDER = (
    *("demo", "generate", "batch", "inspect", "plan", "warm", "convert"),
    *("audit", "kernel", "recall", "fidelity", "sparse-prefill", "termination", "regime"),
)
GROUPS = {  # heading → names of parameters; a name of one command only may be given with its command: 'batch.rows'
    "Prompt": "prompt prompt_file token_ids prompt_tokens chat think system",
    "Generation": "max_new_tokens max_context temperature top_p generate.seed",
    "Running requests": "batch.rows pool_tokens batch.together",
    "Speculation": "speculate draft_tokens draft_costs generate.together loop",
    "Size": "plan.max_context plan.batch max_rewind gpus plan.tensor_parallel_size",
    "What will run": "warm.prompt_tokens warm.max_context warm.batch",
    "The kernel": "convention accuracy out_arguments shapes format",
    "What is asked": "clause case without operation repeats replays limit",
    "What is audited": "subject reference probe point section name fast config ids rename",
    "What is measured": "k topk policy budget block effort cuts tau phi patience tile looser vacuous model contexts "
    "batches policies heads rounds",
    "Text": "text context rows tail new_tokens needles needle_context asked_tasks needles_a_haystack asked_context "
    "in_prompt every queries tokens seed dump",
    "Model": "numerics backend kernel device tensor_parallel_size expert_parallel threads jobs dummy_weights "
    "device_map max_memory expert_memory resident_experts expert_budget embedding_memory layers weights bandwidth "
    "capacity steps tier hit_rate host_memory",
    "Cache and attention": "cache index_cache attention attention_tokens terminate terminate_rule prefill_chunks "
    "kv_memory staged_blocks guess_ahead",
    "Conversion": "to allow_rounding max_shard resume discard_partial",
    "Report": "out as_json quiet verbose report verify gate journal waivers fail_on baseline where map.name force "
    "account audit.budget bisect.budget check redraw",
}
EXAMPLES = {
    "": ('dsv4 generate demo --prompt "The lightning indexer"', "dsv4 plan flash --device h100 --gpus 2"),
    "demo": ("dsv4 demo", 'dsv4 demo --prompt "The chemical symbol of gold is"'),
    "generate": (
        'dsv4 generate demo --prompt "The lightning indexer"',
        "dsv4 generate demo --prompt-file prompt.txt --max-new-tokens 64 --json",
    ),
    "batch": (
        "dsv4 batch requests.jsonl --checkpoint demo",
        "dsv4 batch requests.jsonl --checkpoint demo --rows 4 --together --report out",
    ),
    "inspect": ("dsv4 inspect demo", "dsv4 inspect demo --verify --json"),
    "plan": (
        "dsv4 plan flash --device h100 --tensor-parallel-size 2 --max-context 1M",
        "dsv4 plan demo --batch 8 --json",
    ),
    "warm": (
        "dsv4 warm demo --device h100",
        "dsv4 warm --dummy-weights flash --layers 16 --device h200 --prompt-tokens 8K --max-context 128K",
    ),
    "convert": (
        "dsv4 convert demo demo-bf16 --to bf16",
        "dsv4 convert demo demo-nvfp4 --to nvfp4 --max-shard 1G",
    ),
    "audit": ("dsv4 audit demo", "dsv4 audit selftest --fast"),
    "audit run": ("dsv4 audit run demo --out reports", "dsv4 audit demo --subject files --probe load_ledger"),
    "audit report": (
        "dsv4 audit report reports/demo_ours_fp32.json --out pages",
        "dsv4 audit report after.json --baseline before.json --fail-on warn --out pages",
    ),
    "audit selftest": ("dsv4 audit selftest --fast", "dsv4 audit selftest --name rope --jobs 1"),
    "audit bisect": (
        "dsv4 audit bisect demo --out reports",
        "dsv4 audit bisect demo --subject ours:qat --reference ours:fp32",
    ),
    "audit record": (
        "dsv4 audit record demo --out run.safetensors",
        "dsv4 audit record demo --subject transformers --tokens 300 --out run.safetensors",
    ),
    "audit conform": (
        "dsv4 audit conform my_engine:factory demo",
        "dsv4 audit conform transformers demo --tokens 300",
    ),
    "audit import": (
        "dsv4 audit import sglang dump --config demo --out run.safetensors",
        "dsv4 audit import vllm dump --config demo --rename names.toml --ids ids.json --out run.safetensors",
    ),
    "audit diff": (
        "dsv4 audit diff before.json after.json",
        "dsv4 audit diff before.json after.json --waivers waivers.json --out diff.md",
    ),
    "kernel": (
        "dsv4 kernel list",
        "dsv4 kernel audit sparse_attention --kernel mine.py:attention",
    ),
    "kernel list": ("dsv4 kernel list", "dsv4 kernel list --json"),
    "kernel show": ("dsv4 kernel show sparse_attention --shapes flash", "dsv4 kernel show index_scores --format fib"),
    "kernel export": (
        "dsv4 kernel export --out traces",
        "dsv4 kernel export rms_norm index_scores --format sol --out problems",
    ),
    "kernel bench": (
        "dsv4 kernel bench sparse_attention --kernel ours --kernel flash_mla",
        "dsv4 kernel bench rms_norm --kernel ours --kernel mine.py:norm --shapes pro --out reports",
    ),
    "kernel selftest": (
        "dsv4 kernel selftest --operation rms_norm",
        "dsv4 kernel selftest --clause poison --jobs 2 --out reports",
    ),
    "kernel audit": (
        "dsv4 kernel audit sparse_attention --kernel mine.py:attention",
        "dsv4 kernel audit index_scores --kernel deep_gemm --device cuda --shapes flash --out reports",
    ),
    "kernel replay": (
        "dsv4 kernel replay reports/audit.json",
        'dsv4 kernel replay reports/audit.json "pointed, 8 queries" --out case',
    ),
    "recall": ("dsv4 recall demo --needles 5", "dsv4 recall demo --context 4K --k 32,64 --gate --out reports"),
    "fidelity": (
        "dsv4 fidelity demo --effort quick",
        "dsv4 fidelity demo_gqa --policy block-bound --budget 1K --out reports",
    ),
    "sparse-prefill": (
        "dsv4 sparse-prefill demo_gqa --context 4K",
        "dsv4 sparse-prefill demo_gqa --cuts '512,64,192 1024,128,384' --out reports",
    ),
    "termination": (
        "dsv4 termination demo_gqa --context 2K",
        "dsv4 termination demo_gqa --policy block-bound --budget 1K --looser 1e-3",
    ),
    "regime": (
        "dsv4 regime measure --device cuda",
        "dsv4 regime map audits/regime/gqa/h100/regime_h100.json --capacity 141G",
    ),
    "regime measure": ("dsv4 regime measure --device cuda", "dsv4 regime measure --model csa --batches 1,4"),
    "regime steps": (
        "dsv4 regime steps audits/decode/qwen2.5-7b/h100/bench_decode_gqa_h100.json",
        "dsv4 regime steps audits/decode/flash/h100/bench_decode_h100.json --out DIR",
    ),
    "regime map": (
        "dsv4 regime map audits/regime/gqa/h100/regime_h100.json --name H200 --bandwidth 4.8T --capacity 141G",
        "dsv4 regime map audits/regime/csa/h100/regime_csa_h100.json --name B200 --bandwidth 8T --force",
    ),
}


def dress(command, path: str = ""):
    """Lay out the help of a command and of all below it; returns the command."""
    command.rich_markup_mode = "rich"
    command.format_help = MethodType(_format_help, command)
    if command.help:
        command.help = "\n\n".join(" ".join(part.split()) for part in command.help.split("\n\n"))
        command.short_help = re.split(r"(?<=[.?])\s", command.help)[0]
    if path in EXAMPLES:
        command.epilog = "\n".join(["Examples:", *(f"  {line}" for line in EXAMPLES[path])])
    for parameter in command.params:
        if parameter.param_type_name == "option" and (group := group_of(path, parameter.name)) is not None:
            parameter.rich_help_panel = group
    below = getattr(command, "commands", {})
    if not path:
        command.commands = below = {name: below[name] for name in sorted(below, key=_place)}
    for name, each in below.items():
        dress(each, f"{path} {name}".strip())
    return command


def group_of(path: str, parameter: str) -> str | None:
    """The heading of a parameter of the command `path`; None if it has none."""
    command = path.rpartition(" ")[2]
    for wanted in (f"{command}.{parameter}", parameter):
        for heading, names in GROUPS.items():
            if wanted in names.split():
                return heading
    return None


def _place(name: str) -> int:
    return ORDER.index(name) if name in ORDER else len(ORDER)


def _format_help(command, ctx, formatter) -> None:
    """In a terminal typer draws the help; elsewhere it is plain text with the same groups and no frames."""
    if sys.stdout.isatty():
        type(command).format_help(command, ctx, formatter)
        return
    command.format_usage(ctx, formatter)
    command.format_help_text(ctx, formatter)
    sections: dict[str, list] = {}
    for parameter in command.get_params(ctx):
        kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
        if (row := parameter.get_help_record(ctx)) is not None:
            sections.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(row)
    below = [command.get_command(ctx, name) for name in getattr(command, "commands", {})]
    if shown := [each for each in below if not each.hidden]:
        sections["Commands"] = [(each.name, each.get_short_help_str(200)) for each in shown]
    for heading, rows in sections.items():
        with formatter.section(heading):
            formatter.write_dl(rows)
    if command.epilog:
        formatter.write_paragraph()
        formatter.write(command.epilog + "\n")
