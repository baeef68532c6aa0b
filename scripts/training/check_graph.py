"""Replayed gradients differ from eager ones by no more than eager ones from each other (atomics), on a GPU.

python -m scripts.training.check_graph
"""

import torch

from scripts.training.architecture import BF16, CONFIG, QAT, build, initialise
from scripts.training.replay import LIMIT, Gradients
from scripts.training.trainee import Trainee, Wanted


def main() -> None:
    wrong = 0
    for name, numerics in (("bf16", BF16), ("simulated", QAT)):
        wrong += check(name, numerics)
    raise SystemExit(wrong)


def check(name: str, numerics) -> bool:
    trainee = Trainee(build(CONFIG, numerics, "cuda"))
    initialise(trainee.model, 0)
    parameters = dict(trainee.named_parameters())
    eager, replayed = (Gradients(trainee, parameters, numerics.simulate, limit) for limit in (0, LIMIT))
    g = torch.Generator(device="cuda").manual_seed(0)
    wanted, away = Wanted(sparse=False), {"eager": [0.0, 0.0], "replayed": [0.0, 0.0]}
    for at in (896, 896, 896, 0, 0, 0, 896, 0):
        ids = torch.randint(0, 4096, (8, 1026), device="cuda", generator=g)
        batch = ids, torch.ones(ids.shape, device="cuda"), wanted, at
        want = _run(eager, batch)
        for kind, gradients in (("eager", eager), ("replayed", replayed)):
            found = _run(gradients, batch)
            assert found.keys() == want.keys()
            away[kind][0] += sum((found[key] - want[key]).square().sum().item() for key in want)
            away[kind][1] += sum(value.square().sum().item() for value in want.values())
    floor, difference = ((part / whole) ** 0.5 for part, whole in away.values())
    wrong = not difference <= 2 * floor + 1e-6 or len(replayed.graphs) != 2
    wrong = wrong or len(replayed.trainee.chosen) != len(eager.trainee.chosen) or not replayed.trainee.chosen
    print(
        f"{'WRONG' if wrong else 'ok   '} {name}: relative difference of all gradients and losses from an eager "
        f"step: another eager one {floor:.1e}, a replayed one {difference:.1e}, {len(replayed.graphs)} graphs",
        flush=True,
    )
    return wrong


def _run(gradients: Gradients, batch) -> dict[str, torch.Tensor]:
    out = gradients(*batch)
    found = {f"loss {k}": v.clone() for k, v in out.items()}
    found |= {f"experts chosen by {name}": chosen.float() for name, chosen in gradients.trainee.chosen}
    return found | {n: p.grad.clone() for n, p in gradients.parameters.items() if p.grad is not None}


if __name__ == "__main__":
    main()
