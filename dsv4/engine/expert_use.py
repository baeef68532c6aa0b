"""What routed experts in host memory cost a run: hits, bytes over the link, and what the link allows."""

from typing import Any

from dsv4.model.causal import CausalLM
from dsv4.model.host_experts import Counts


class ExpertUse:
    """Counts at moments of a run; does nothing for a model with its experts on the device. A mark waits for the
    device."""

    def __init__(self, model: CausalLM):
        self.tier: Any = model.expert_tier
        self.marks: list[Counts] = []

    def mark(self) -> None:
        if self.tier is not None:
            self.marks.append(self.tier.counts())

    def document(self, tokens: int, seconds: float) -> dict | None:
        """As JSON values: of the whole run, and of what lies between the last two marks ("decode"), in which so many
        tokens came in so many seconds. Sizes in bytes. None without a tier."""
        if self.tier is None:
            return None
        tier, link = self.tier, self.tier.link()
        found = self.marks[-1].since(self.marks[-2])
        each = found.nbytes / tokens if tokens else 0.0
        return {
            "resident": tier.slots,
            "of": tier.sizes.experts,
            "layers": len(tier.layers),
            "pinned_bytes": tier.host_bytes,
            "device_bytes": tier.device_bytes,
            "fetched_bytes": self.marks[-1].since(self.marks[0]).nbytes,
            "decode": {
                "hits": found.hits,
                "misses": found.misses,
                "hit_rate": found.hit_rate,
                "fetched_bytes": found.nbytes,
                "fetched_bytes_per_token": each,
                "over_slots": found.wholes,
                "tokens_per_second": tokens / seconds if seconds else 0.0,
                "link_bytes_per_second": link,
                "link_tokens_per_second": link / each if link and each else None,
            },
        }
