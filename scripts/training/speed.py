"""Training speed on random tokens, a stage at a time, and where the time goes.

    python -m scripts.training.speed [--profile]
"""

import argparse
import time

import torch
from torch.func import functional_call

from scripts.training import recipe
from scripts.training.architecture import BF16, CONFIG, QAT, build, initialise
from scripts.training.optimiser import Optimiser
from scripts.training.trainee import Trainee, cast, forms_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="*")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    for simulate in (False, True):
        trainee = Trainee(build(CONFIG, QAT if simulate else BF16, "cuda"))
        initialise(trainee.model, 0)
        parameters, forms = dict(trainee.named_parameters()), forms_of(trainee)
        optimiser = Optimiser(parameters)
        for stage in {(s.length, s.sparse): s for s in recipe.STAGES if s.simulate == simulate}.values():
            if args.lengths and stage.length not in args.lengths:
                continue
            ids = torch.randint(0, 4096, (recipe.BATCH // stage.length, stage.length + 2), device="cuda")
            weight = torch.ones(ids.shape, device="cuda")

            def step():
                out = functional_call(trainee, cast(parameters, forms, simulate), (ids, weight, stage.wanted, stage.length - 128))
                out["total"].backward()
                torch.nn.utils.clip_grad_norm_([p for p in parameters.values() if p.grad is not None], 1.0, foreach=True)
                optimiser.step(1e-4)
                for p in parameters.values():
                    p.grad = None
                return out
            for _ in range(3):
                out = step()
            torch.cuda.synchronize()
            begun = time.time()
            for _ in range(args.steps):
                step()
            torch.cuda.synchronize()
            spent = (time.time() - begun) / args.steps
            print(f"{stage.name:14} {spent * 1e3:7.1f} ms a step of {recipe.BATCH} tokens, {recipe.BATCH / spent / 1e3:6.0f}K tokens/s, "
                  f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, loss {out['next'].item():.3f}", flush=True)
            if args.profile and stage.length in (1024, 16384):
                from torch.profiler import ProfilerActivity, profile
                with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p:
                    step()
                    torch.cuda.synchronize()
                print(p.key_averages().table(sort_by="self_cuda_time_total", row_limit=32, max_name_column_width=60), flush=True)


if __name__ == "__main__":
    main()
