"""Decode and prefill against transformers eager on the same tiny checkpoint, paired in one run.

    python scripts/bench_reference.py [--device cpu] [--rounds 12] [--out FILE.json]

Both run fp32 on the tiny golden checkpoint (6 layers of every kind, hidden 64). A round prefills 300 tokens and decodes
24 with one, then with the other. A correctness gate comes first: no figure is printed when the logits differ by more
than 2e-4. Ratios are medians over rounds of (transformers / ours); absolute times on a shared CPU are noise.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch

from dsv4 import load_model
from dsv4.loaders.files import read_json
from scripts.bench.report import out_file

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden" / "tiny_fp32"
PROMPT, NEW = 300, 24


def theirs(device: str):
    """transformers' model with the golden weights, through its own loader."""
    from safetensors.torch import load_file
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    from dsv4.loaders.transformers_names import to_transformers

    raw = read_json(GOLDEN / "config.json")
    config = DeepseekV4Config(
        **{k: v for k, v in raw.items() if k not in ("architectures", "torch_dtype", "model_type")}
    )
    model, values = DeepseekV4ForCausalLM(config), load_file(GOLDEN / "model.safetensors")
    state, E = {}, config.n_routed_experts
    for name in values:
        if not name.startswith("mtp.") and ".ffn.experts." not in name:
            state[to_transformers(name)] = values[name]
    for i in range(config.num_hidden_layers):
        w = lambda k: torch.stack([values[f"layers.{i}.ffn.experts.{e}.{k}.weight"] for e in range(E)])
        state[f"model.layers.{i}.mlp.experts.gate_up_proj"] = torch.cat((w("w1"), w("w3")), 1)
        state[f"model.layers.{i}.mlp.experts.down_proj"] = w("w2")
    model.load_state_dict(state, strict=True)
    return model.eval().to(device)


def timed(device: str, run):
    if device != "cpu":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    value = run()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - begun, value


@torch.inference_mode()
def ours_round(model, ids, device):
    cache = model.new_cache(1, PROMPT + NEW)
    prefill, _ = timed(device, lambda: model.append(ids[:, :PROMPT], cache))
    steps = [timed(device, lambda t=t: model.append(ids[:, t : t + 1], cache))[0] for t in range(NEW)]
    return prefill, median(steps)


@torch.inference_mode()
def theirs_round(model, ids, device):
    on = ids.to(device)
    prefill, out = timed(device, lambda: model(on[:, :PROMPT], use_cache=True))
    past = out.past_key_values
    steps = [
        timed(device, lambda t=t: model(on[:, t : t + 1], past_key_values=past, use_cache=True))[0] for t in range(NEW)
    ]
    return prefill, median(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=out_file)
    args = parser.parse_args()
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    backend = "auto" if args.device == "cpu" else "reference"  # kernels have benchmarks of their own
    a, b = load_model(GOLDEN, numerics="fp32", device=args.device, mtp=False, backend=backend), theirs(args.device)
    ids = torch.randint(0, 512, (1, PROMPT + NEW), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        error = (a(ids).cpu() - b(ids.to(args.device), use_cache=False).logits.cpu()).abs().max().item()
    if not error < 2e-4:
        sys.exit(f"error: logits differ by {error:.1e} from transformers (allowed 2e-4); no timing is printed")
    ours_round(a, ids, args.device), theirs_round(b, ids, args.device)  # warm up
    rounds = [(ours_round(a, ids, args.device), theirs_round(b, ids, args.device)) for _ in range(args.rounds)]
    import transformers

    commit = (
        os.environ.get("DSV4_COMMIT")
        or subprocess.run(  # a copy without .git is told its commit
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
        ).stdout.strip()
    )
    result = {
        "command": " ".join(["python", "scripts/bench_reference.py", *sys.argv[1:]]),
        "commit": commit,
        "backend": a.backend,
        "device": torch.cuda.get_device_name()
        if args.device != "cpu"
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "max_logit_difference": error,
    }
    for i, name in enumerate(("prefill", "decode")):
        ours_ms, theirs_ms = (median(r[who][i] for r in rounds) * 1e3 for who in (0, 1))
        ratio = median(theirs[i] / ours[i] for ours, theirs in rounds)
        result[name] = {"ours_ms": ours_ms, "transformers_ms": theirs_ms, "ratio": ratio}
        what = f"prefill of {PROMPT} tokens" if i == 0 else "decode, one token"
        print(f"{what:22} ours {ours_ms:8.2f} ms   transformers {theirs_ms:8.2f} ms   ratio {ratio:.2f}")
    print(
        f"logits differ by at most {error:.1e}; {result['device']}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}"
    )
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
