"""The clauses of an audit, each a file: `run(scene)` yields checks; what runs beside the kernel is a function of the
harness in the same file."""

from importlib import import_module

from dsv4.probes.kernel_audit.plant import CLAUSES


def clause(name: str):
    """The function of a clause: scene → checks."""
    file = {"empty": "layout"}.get(name, name)
    module = import_module(f"{__name__}.{file}")
    return module.empty if name == "empty" else module.run


ORDER = tuple(name for name in CLAUSES if name != "timing")
