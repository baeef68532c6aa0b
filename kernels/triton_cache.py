"""Triton's cache on disk, made to be copied to another place or machine."""

import json

from triton import knobs
from triton.runtime.cache import FileCacheManager


class MovableCache(FileCacheManager):
    """Triton lists the files of a kernel by absolute paths, so that a copied cache holds nothing that it finds. Here
    they are found by name, next to their list."""

    def get_group(self, filename: str) -> dict[str, str] | None:
        listed = self.get_file(f"__grp__{filename}")
        if listed is None:
            return None
        try:
            with open(listed) as file:
                names = list(json.load(file)["child_paths"])
        except (ValueError, KeyError):  # cut off while it was copied
            return None
        return {name: self._make_path(name) for name in names} if all(map(self.has_file, names)) else None


def triton_key() -> str:
    """Triton's key of itself, a hash of all its files (0.5 GB), on which every key of its cache depends: 0.9 s in the
    first call of a process, and of those that are forked from it none."""
    try:
        from triton.runtime.cache import triton_key as key
    except ImportError:  # where older releases have it
        from triton.compiler.compiler import triton_key as key
    return key()


def use() -> None:
    """From now on in this process, unless TRITON_CACHE_MANAGER names another class."""
    if knobs.cache.manager_class is None:
        knobs.cache.manager_class = MovableCache
