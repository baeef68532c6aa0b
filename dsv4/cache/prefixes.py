"""Which prefixes of past prompts are still in the pools.

A tree of blocks of 128 token ids. A child is found by its whole block of ids, so a graft starts from exactly these
tokens, not from tokens of the same hash. A node may hold a snapshot of the cache at its end; nodes without one only
lead to others.

Snapshots outlive the requests that made them. They are dropped, least recently used first, when a pool has too few free
pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dsv4.cache.paged import PagedCache, Snapshot
from dsv4.cache.paging import BLOCK


@dataclass(eq=False)
class Node:
    """The prefix that ends with this block."""

    parent: "Node | None"
    block: tuple[int, ...]
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    snapshot: Snapshot | None = None


def borrowable(tokens: int) -> int:
    """Tokens of a prompt that a kept prefix could hold: whole blocks that leave a token to run, whether or not they are
    kept."""
    return max(0, tokens - 1) // BLOCK * BLOCK


def hit_rate(borrowed: int, tokens: int) -> float | None:
    """Prefix hit rate of one request, whose prompt has `tokens`: the blocks that it borrowed, with their pages, of
    those that it could have borrowed. None if it could have borrowed none."""
    return borrowed / possible if (possible := borrowable(tokens)) else None


class PrefixTree:
    """Snapshots of `cache` by the ids that led to them; drops them when the cache runs short of pages.

    hit_tokens of asked_tokens: prompt tokens that were grafted, of those that could have been (`borrowable`). Each
    request counts once: tokens that it gets when it resumes are no hit.
    """

    def __init__(self, cache: PagedCache):
        self.cache, self.root = cache, Node(None, ())
        self.kept: dict[Node, None] = {}  # nodes with a snapshot, least recently used first
        self.hit_tokens = self.asked_tokens = self.dropped = 0
        cache.on_shortage = self.make_free

    def ask(self, ids: Sequence[int]) -> None:
        """Count a new request's prompt tokens that could be grafted."""
        self.asked_tokens += borrowable(len(ids))

    def longest(self, b: int, ids: Sequence[int]) -> Node | None:
        """The longest kept prefix of `ids` that leaves a token to run, if it is longer than what row b holds."""
        best = None
        for node in self._walk(ids[: borrowable(len(ids))]):
            best = node if node.snapshot is not None else best
        return None if best is None or best.snapshot.length <= self.cache.lengths[b] else best

    def graft(self, b: int, ids: Sequence[int], resumes: bool = False) -> int:
        """Let row b of the cache, which holds a prefix of `ids` or nothing, start from the `longest` kept prefix, if
        there is one. Returns how many tokens were gained, which are no hit where the request resumes."""
        held, best = self.cache.lengths[b], self.longest(b, ids)
        if best is None:
            return 0
        self.cache.leave(b)
        self.cache.graft(b, best.snapshot)
        self.hit_tokens += 0 if resumes else best.snapshot.length - held
        self._touch(best)
        return best.snapshot.length - held

    def remember(self, b: int, ids: Sequence[int], streams=None) -> None:
        """Keep a snapshot of row b, which holds exactly `ids`, a multiple of BLOCK tokens. Existing ones are not made
        again."""
        node = self.root
        for start in range(0, len(ids), BLOCK):
            block = tuple(ids[start : start + BLOCK])
            node = node.children.get(block) or node.children.setdefault(block, Node(node, block))
        if node.snapshot is None:
            node.snapshot = self.cache.snapshot(b, streams)
        self._touch(node)

    def make_free(self, group: str, pages: int, copies: Sequence[int] = ()) -> None:
        """Drop snapshots, least recently used first, until `pages` pages of a pool are free. Snapshots that free no
        page stay, unless that does not suffice and they hold one of `copies`: pages that a row must copy before it
        writes them, because others hold them too. The last holder of such a page writes it in place, and so needs one
        page less."""
        pool, running = self.cache.pools[group], self.cache.running_pages(group)
        wanted = len(pool.free) + pages
        while len(pool.free) < wanted:
            # a page of several snapshots is free when the last of them is dropped
            node = next((n for n in self.kept if not running.issuperset(n.snapshot.pages[group].values())), None)
            if node is None:
                break
            self.forget(node)
        wanted -= len(pool.free)
        for page in copies if wanted > 0 else ():
            if pool.state[page].refs - sum(page in n.snapshot.pages[group].values() for n in self.kept) > 1:
                continue  # another row holds it, so it would be copied all the same
            for node in [n for n in self.kept if page in n.snapshot.pages[group].values()]:
                self.forget(node)
            wanted -= 1
            if wanted <= 0:
                return

    def forget(self, node: Node) -> None:
        """Drop a node's snapshot, and the nodes that then lead nowhere."""
        self.cache.drop(node.snapshot)
        node.snapshot = None
        del self.kept[node]
        self.dropped += 1
        while node.parent is not None and node.snapshot is None and not node.children:
            del node.parent.children[node.block]
            node = node.parent

    def clear(self) -> None:
        """Drop every snapshot."""
        for node in list(self.kept):
            self.forget(node)

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else 0.0

    def _walk(self, ids: Sequence[int]):
        node = self.root
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            node = node.children.get(tuple(ids[start : start + BLOCK]))
            if node is None:
                return
            yield node

    def _touch(self, node: Node) -> None:
        self.kept.pop(node, None)
        self.kept[node] = None  # a dict keeps the order in which keys came
