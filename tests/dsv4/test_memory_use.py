"""Peak memory of a long prefill and of loading, each measured in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import checkpoints

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30


def peak_of(code: str, *args) -> list[int]:
    """Integers that a fresh process prints."""
    prelude = (
        "import sys, torch\ntorch.set_num_threads(1)\nfrom dsv4 import load_model\nfrom dsv4.runtime.memory import "
        "peak_bytes\n"
        "peak = lambda: peak_bytes(torch.device('cpu'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", prelude + code, *map(str, args)], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


@pytest.mark.few(tokens=[4096])  # over 5 s: with fewer tokens T² scores are no more than everything else
@pytest.mark.parametrize("tokens", [4096, 8192])
def test_prefill_takes_far_less_than_the_scores_of_one_layer(tokens):
    peak, n, tokens = peak_of(
        """
tokens = int(sys.argv[2])
ids = torch.randint(0, 4096, (1, tokens), generator=torch.Generator().manual_seed(0))
model = load_model(sys.argv[1])
model.append(ids[:, :64], model.new_cache(1, 64))  # libraries that load on first use are there before the count starts
cache, before = model.new_cache(1, tokens), peak()
logits = model.append(ids, cache, logits="last")
assert torch.isfinite(logits).all() and cache.lengths == [tokens]
print(peak() - before, model.layer_paths()[2]["visible"], tokens)
""",
        ROOT / "demo",
        tokens,
    )
    assert n == tokens // 4  # entries that the last query chose from
    assert 0 < peak < 4 * tokens**2 // 2  # half of T² scores of one layer in fp32


@pytest.mark.few(numerics=["native"])  # over 5 s: what a loader holds is seen beside hundreds of MB of a model
@pytest.mark.parametrize("numerics", ["native", "fp32"])
def test_loading_takes_the_model_and_one_tensor(tmp_path, numerics):
    raw = {
        **checkpoints.SMALL,
        "hidden_size": 512,
        "moe_intermediate_size": 512,
        "n_routed_experts": 24,
        "vocab_size": 4096,
    }
    path = checkpoints.write_dense(tmp_path / "wide", raw, dtype="F32")
    before, after, model, largest = peak_of(
        """
load_model("tests/golden/tiny_fp32", numerics=sys.argv[2])  # libraries that load on first use are there before the \
count starts
before = peak()
model = load_model(sys.argv[1], numerics=sys.argv[2])
print(before, peak(), model.nbytes, max(t.nbytes for t in model.inventory.files.tensors.values()))
""",
        path,
        numerics,
    )
    assert model > 300 << 20
    slack = 64 << 20  # freed pieces that the allocator keeps
    assert after - before < model + 2 * largest + slack, (numerics, after - before, model, largest)
