"""The heads of a GQA model that one of several ranks holds: some KV heads, and all query heads that read them.

Attention, caches, summaries, lists and memories have these numbers. So only this module reads the config's numbers of
heads; everything else takes `Heads`, which is no number and has no default.
"""

from dataclasses import dataclass

from dsv4.loaders.cuts import Cut
from dsv4.model.gqa.config import GQAConfig
from dsv4.model.ranks import Ranks


@dataclass(frozen=True)
class Heads:
    """query, kv: this rank's heads among those of the model; query head h reads KV head h // (query.size // kv.size) of
    this rank. width: D, elements of a head."""

    query: Cut
    kv: Cut
    width: int

    @property
    def H(self) -> int:
        """Query heads of this rank."""
        return self.query.size

    @property
    def KV(self) -> int:
        """KV heads of this rank."""
        return self.kv.size

    @property
    def query_rows(self) -> Cut:
        """Rows of q_proj, and columns of o_proj."""
        return self._rows(self.query)

    @property
    def kv_rows(self) -> Cut:
        """Rows of k_proj and v_proj."""
        return self._rows(self.kv)

    def _rows(self, heads: Cut) -> Cut:
        return Cut(0, *(n * self.width for n in (heads.start, heads.stop, heads.whole)))


def heads_of(config: GQAConfig, ranks: Ranks) -> Heads:
    """Equally many KV heads for each rank. Raises InputError where that cannot be."""
    kv, group = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    even = lambda per: ranks.even(kv, "num_key_value_heads", per)
    return Heads(even(group), even(1), config.head_dim)
