"""Placeholder until the next commit."""

from dsv4.probes.kernel_audit.scene import not_run


def run(scene):
    yield not_run("capture", "needs a CUDA device")
