"""The version, apart from the package, so that what the package loads may ask for it."""

__version__ = "0.2.0"
