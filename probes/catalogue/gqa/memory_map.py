"""`memory_map` on GQA models: a slot a token, in whole blocks of 128, also in layers with a window."""

import torch

from dsv4.cache.streams import Stream, zeros
from dsv4.model.gqa.cache import cache_streams
from dsv4.model.gqa.config import GQAConfig
from dsv4.model.gqa.heads import heads_of
from dsv4.model.numerics import Numerics
from dsv4.probes.catalogue.memory_map import FAR, WIDTH, MemoryMap, listed
from dsv4.probes.joint import ranks_of
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.subject import Subject


class GQAMemoryMap(MemoryMap):
    """Keys and values, of which no stream is packed."""

    def _beyond(self, subject: Subject) -> list[Check]:
        return listed("rows beyond 2^31", "keys", lambda: [far_keys(subject)])

    def _formula(self, subject: Subject, batch: int, context: int, mtp: bool = True) -> dict[tuple[str, str], int]:
        c = subject.config
        rows = batch * kv_heads(subject) * -(-context // 128) * 128
        size = rows * c.head_dim * WIDTH[subject.numerics]
        return {(f"layer {i}", stream): size for i in range(c.num_hidden_layers) for stream in ("keys", "values")}

    def _per_token(self, subject: Subject) -> float:
        c = subject.config
        return 2 * c.num_hidden_layers * kv_heads(subject) * c.head_dim * WIDTH[subject.numerics]

    def _planned(self, subject: Subject, context: int, numerics: Numerics) -> list:
        return cache_streams(subject.config, heads_of(subject.config, ranks_of(subject)), 1, context, numerics)

    def _kind(self, config: GQAConfig, label: str) -> str:
        return "full" if config.windows[int(label.split()[1])] is None else "sliding"


def kv_heads(subject: Subject) -> int:
    """KV heads whose keys and values are in the cache: of several ranks, those of this one."""
    return subject.config.num_key_value_heads // ranks_of(subject).size


def far_keys(subject: Subject) -> Check:
    """The row of a KV head that begins at or beyond element 2^31 of the keys: written in place, and no other."""
    config = subject.config
    KV, D, H = config.num_key_value_heads, config.head_dim, config.num_attention_heads
    S = -(-FAR // (KV * D)) // 128 * 128 + 256  # so that the last rows of the last head lie beyond
    about = dict(where=f"position {S - 1} of {KV} heads of {D} dims", part="keys", unit="rows")
    device, dtype = subject.model.device, torch.bfloat16 if subject.model.backend == "triton" else torch.float16
    try:  # pages are taken when they are written
        keys, values = (zeros(Stream(name, (1, KV, S, D), dtype, ""), device) for name in ("keys", "values"))
    except (RuntimeError, MemoryError) as error:
        return vacuous(
            "rows beyond 2^31 elements", f"{4 * KV * S * D} B cannot be reserved: {str(error).splitlines()[0]}", **about
        )
    one = lambda heads: torch.ones(1, heads * D, dtype=dtype, device=device)
    still = torch.ones(1, D // 2, dtype=torch.complex64, device=device)  # turned by nothing
    subject.model.op.rotary_rows(
        one(H), one(KV), one(KV), None, still, keys, values, torch.tensor([S - 1], device=device)
    )
    right = all(
        bool((t[0, :, S - 1] == 1).all()) and not t[0, :, 0].any() and not t[0, :, S - 2].any() for t in (keys, values)
    )
    return compare(
        "rows beyond 2^31 elements that are written in place",
        int(right),
        "==",
        1,
        "offsets are 64 bits wide; int32 ones wrap here",
        2 * KV,
        **about,
    )
