"""torch's scaled dot-product attention as peers of grouped-query decode: every backend, in each way to hand it grouped
heads.

A single token sees every key, so there is no mask. `grouped`: enable_gqa. `folded`: the queries of a group as rows of
one head, which is what reads each key once where a backend does not know of groups.
"""

import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dsv4.kernels.widths import Widths
from scripts.bench.inputs import difference
from scripts.bench.peers import peer
from scripts.bench.rows_gather import TOLERANCE, inputs

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
DENSE = "gqa_decode", "gqa_gather"
MATH_TOKENS = 1 << 18  # of all rows: the math backend writes copies of keys and logits


def _attend(form: str, backend: SDPBackend, q, keys, values):
    """[B, 1, H, D] of q [B, 1, H, D] over all keys [B, KV, S, D]."""
    (B, _, H, D), KV = q.shape, keys.shape[1]
    G = H // KV
    with sdpa_kernel(backend):
        if form == "folded":
            return F.scaled_dot_product_attention(q.view(B, KV, G, D), keys, values).view(B, 1, H, D)
        return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, enable_gqa=True).transpose(1, 2)


def _register(name: str, backend: SDPBackend, form: str) -> None:
    @peer(
        f"SDPA {name}, {form}",
        *DENSE,
        when=lambda facts: name != "math" or facts["batch"] * facts["tokens"] <= MATH_TOKENS,
    )
    def make(row, i):
        f = row.facts
        widths = Widths(0, f["heads"], f["width"], num_key_value_heads=f["kv_heads"])
        q, keys, values, _ = inputs(i, f["tokens"], f["batch"], widths, "cuda")
        run = lambda: _attend(form, backend, q, keys, values)

        def check():
            one = lambda x: x[-1:].float()
            return difference(run()[-1:], _attend("folded", SDPBackend.MATH, one(q), one(keys), one(values))), TOLERANCE

        return run, check


for _name, _backend in BACKENDS.items():
    for _form in ("grouped", "folded"):
        _register(_name, _backend, _form)
