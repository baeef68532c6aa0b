"""Where caches live: the choice that a model is loaded with."""

from dataclasses import dataclass

from dsv4.errors import InputError

NAMES = ("device", "host")  # of the command line


@dataclass(frozen=True)
class HostMemory:
    """Caches in pinned host memory. The device holds what chooses from them, and a staging buffer for what was chosen.

    staged: of a GQA model blocks a row and KV head, of a DeepSeek-V4 model entries a row, in each layer (None: twice
    what a step chooses). Staged items that a step does not choose again stay while there is room, so the hot blocks
    stay staged. ahead: a GQA layer's blocks are guessed and fetched while the layer before it multiplies. That is
    slower on an H100 with random weights, whose guesses are wrong, and not yet measured with trained ones.
    """

    staged: int | None = None
    ahead: bool = False

    def __post_init__(self):
        if self.staged is not None and self.staged < 1:
            raise InputError(f"{self.staged} staged blocks were asked for; expected at least 1")


def memory_named(name: str, staged: int | None = None, ahead: bool = False, chooses: bool = True) -> HostMemory | None:
    """The memory that --kv-memory, --staged-blocks and --guess-ahead ask for; None for caches on the device. chooses:
    whether the policy chooses blocks, which could be guessed. Raises InputError for options that contradict each
    other."""
    if name not in NAMES:
        raise InputError(f"--kv-memory {name!r} is unknown; expected {' or '.join(NAMES)}")
    if name == "device":
        if staged is not None:
            raise InputError(
                f"--staged-blocks {staged} says how much of a cache in host memory is kept on the device, and this "
                "cache is there already; add --kv-memory host"
            )
        if ahead:
            raise InputError(
                "--guess-ahead fetches blocks from host memory, and this cache is on the device already; add "
                "--kv-memory host"
            )
        return None
    if ahead and not chooses:
        raise InputError(
            "--guess-ahead guesses the blocks that a GQA model chooses, and none are chosen here (entries of CSA "
            "layers are not guessed); add --attention block-bound, or leave it out"
        )
    return HostMemory(staged, ahead)
