"""dsv4 runs, measures and audits DeepSeek-V4-style models.

>>> from dsv4 import load_model
>>> model = load_model("path/to/checkpoint", numerics="native")
>>> cache = model.new_cache(batch=1, max_context=4096)
>>> logits = model.append(ids, cache)
"""

from dsv4.load import load_model

__all__ = ["load_model"]
