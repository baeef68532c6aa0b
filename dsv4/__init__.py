"""dsv4 runs, measures and audits DeepSeek-V4-style models.

>>> from dsv4 import load_model
>>> model = load_model("path/to/checkpoint", numerics="native")
>>> cache = model.new_cache(batch=1, max_context=4096)
>>> logits = model.append(ids, cache)

`import dsv4` is cheap: torch is imported on the first access to `load_model`.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from dsv4.moved import install
from dsv4.version import __version__

if TYPE_CHECKING:
    from dsv4.model.load import load_model

__all__ = ["__version__", "load_model"]

_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file() and (_checkout / "kernels" / "operations.py").is_file():
    # In a checkout kernels, loaders and probes lie beside this folder. A wheel has them inside it (setup.py).
    __path__.append(str(_checkout))


install()


def __getattr__(name: str):
    if name == "load_model":
        from dsv4.model.load import load_model

        return load_model
    raise AttributeError(f"module 'dsv4' has no attribute {name!r}")
