"""Training speed on random tokens, a stage at a time, and where the time goes.

python -m scripts.training.speed [--gqa] [--lengths 1024 4096] [--batch 65536] [--profile] [--out speed.json]
"""

import argparse
import json
import os
import sys
import time

import torch

from scripts.bench.report import out_file
from scripts.training import gqa, recipe
from scripts.training.architecture import BF16, CONFIG, QAT, build, initialise
from scripts.training.optimiser import Optimiser
from scripts.training.replay import Gradients
from scripts.training.trainee import Trainee


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="*")
    parser.add_argument("--batch", type=int, default=recipe.DEMO.batch, help="tokens a step")
    parser.add_argument("--gqa", action="store_true", help="the GQA model instead of the demo")
    parser.add_argument("--out", type=out_file, help="also write the figures here, as JSON")
    args = parser.parse_args()
    rows = []
    torch.backends.cuda.matmul.allow_tf32 = True
    stages = (recipe.GQA if args.gqa else recipe.DEMO).stages
    for simulate in sorted({stage.simulate for stage in stages}):
        trainee = (
            gqa.Trainee(gqa.build(gqa.CONFIG, "cuda"))
            if args.gqa
            else Trainee(build(CONFIG, QAT if simulate else BF16, "cuda"))
        )
        (gqa.initialise if args.gqa else initialise)(trainee.model, 0)
        parameters = dict(trainee.named_parameters())
        gradients = Gradients(trainee, parameters, simulate)
        optimiser = Optimiser(parameters)
        for stage in {(s.length, s.wanted): s for s in stages if s.simulate == simulate}.values():
            if args.lengths and stage.length not in args.lengths:
                continue
            ids = torch.randint(0, 4096, (args.batch // stage.length, stage.length + 2), device="cuda")
            weight = torch.ones(ids.shape, device="cuda")

            def step():
                out = gradients(ids, weight, stage.wanted, stage.length - stage.wanted.chunk if stage.wanted else 0)
                torch.nn.utils.clip_grad_norm_(
                    [p for p in parameters.values() if p.grad is not None], 1.0, foreach=True
                )
                optimiser.step(1e-4)
                return out

            for _ in range(4):
                out = step()
            torch.cuda.synchronize()
            begun = time.time()
            for _ in range(args.steps):
                step()
            torch.cuda.synchronize()
            spent = (time.time() - begun) / args.steps
            peak = torch.cuda.max_memory_allocated()
            rows.append(
                {
                    "stage": stage.name,
                    "length": stage.length,
                    "tokens_a_step": args.batch,
                    "step_ms": round(spent * 1e3, 2),
                    "tokens_per_s": round(args.batch / spent),
                    "peak_bytes": peak,
                }
            )
            print(
                f"{stage.name:14} {spent * 1e3:7.1f} ms a step of {args.batch} tokens, "
                f"{args.batch / spent / 1e3:6.0f}K tokens/s, peak {peak / 2**30:.1f} GiB, loss "
                f"{out['next'].item():.3f}",
                flush=True,
            )
            torch.cuda.reset_peak_memory_stats()
            if args.profile and stage.length in (1024, 16384):
                from torch.profiler import ProfilerActivity, profile

                with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p:
                    step()
                    torch.cuda.synchronize()
                print(
                    p.key_averages().table(sort_by="self_cuda_time_total", row_limit=48, max_name_column_width=60),
                    flush=True,
                )
    if args.out is not None:
        facts = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "commit": os.environ.get("DSV4_COMMIT"),
            "command": "python -m scripts.training.speed " + " ".join(sys.argv[1:]),
        }
        args.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
