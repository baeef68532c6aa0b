"""Many requests at once over one pool of pages."""

import importlib
from typing import Any

_PLACES = {"BatchEngine": "batch", "Request": "requests", "Result": "requests", "read_requests": "requests"}
__all__ = ["BatchEngine", "Request", "Result", "read_requests"]


def __getattr__(name: str) -> Any:
    """A name of `__all__`, whose module is imported then: speculation takes `dsv4.engine.generate`, the engine
    speculation."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
