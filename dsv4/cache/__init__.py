"""What a model remembers of a context, and where it lies: linear, in rings, in pages, in host memory."""

from dsv4.moved import former

__getattr__ = former(
    __name__, "dsv4.cache.cache", "dsv4.cache.layer", "dsv4.cache.rows"
)  # the names that `dsv4.cache` had as a module
