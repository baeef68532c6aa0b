"""What references take from other libraries, in plain torch."""

import math


def rearrange(x, pattern: str, **sizes: int):
    """einops.rearrange: axes by name, in groups within parentheses on either side of `->`."""
    left, right = (groups(side) for side in pattern.split("->"))
    for extent, group in zip(x.shape, left):
        known = math.prod(sizes.get(axis, 1) for axis in group)
        for axis in group:
            sizes.setdefault(axis, extent // known)
    names = [axis for group in left for axis in group]
    x = x.reshape([sizes[axis] for axis in names]).permute([names.index(axis) for group in right for axis in group])
    return x.reshape([math.prod(sizes[axis] for axis in group) for group in right])


def groups(side: str) -> list[list[str]]:
    """'b (t h) d' → [['b'], ['t', 'h'], ['d']]."""
    found, inside = [], False
    for word in side.replace("(", " ( ").replace(")", " ) ").split():
        if word in "()":
            inside = word == "("
            found += [[]] if inside else []
        elif inside:
            found[-1].append(word)
        else:
            found.append([word])
    return found
