"""Which KV blocks already hold the beginning of a prompt: a tree whose every node is one full block.

A path from a root spells tokens, block by block, and each node stands for one block in every KV group. Roots are
namespaces: sequences of different tenants or adapters never meet, whatever their tokens. A block is the unit of sharing
and of eviction, so nodes are not merged into longer edges; a lookup costs two dictionary accesses per block.

Whoever uses a node uses all its ancestors too, so an idle node has no used descendant: everything idle can be evicted,
leaves first, the least recently used before others. (RadixAttention: Zheng et al., arXiv:2312.07104.)
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from inferloop.engine.schedule.step import BlockData

Namespace = tuple[str, ...]
Tokens = tuple[int, ...]
Blocks = tuple[int, ...]
"""One block number per KV group."""
_MIN_STALE = 64
_MAX_NEAR = 64
"""Near misses looked at. Behind a common system prompt thousands of conversations begin with the same token."""


class Node:
    """One full block of tokens. `num_users` counts the slots that use it."""

    __slots__ = ("blocks", "children", "last_used", "num_users", "parent", "tokens")

    def __init__(self, tokens: Tokens, blocks: Blocks, parent: Node | None) -> None:
        self.tokens, self.blocks, self.parent = tokens, blocks, parent
        self.children: dict[int, dict[Tokens, Node]] = {}
        """By first token, then by all: near misses are looked for among those that begin alike."""
        self.num_users = 0
        self.last_used = 0


class Root(Node):
    """Where the tokens of one namespace begin; it stands for no block and has no parent."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__((), (), None)
        self.namespace = namespace


@dataclass(frozen=True, slots=True)
class Match:
    """The longest known beginning. `nodes` cover whole blocks; `partial` agrees with the first `num_partial` tokens of
    the block after them (None and 0: no such node). `loads` is the content of the blocks after them, where that is
    known from elsewhere."""

    nodes: tuple[Node, ...] = ()
    partial: Node | None = None
    num_partial: int = 0
    loads: tuple[BlockData, ...] = ()

    @property
    def num_idle(self) -> int:
        """How many of `nodes` nobody uses yet."""
        return sum(node.num_users == 0 for node in self.nodes)


class RadixTree:
    """Owns the nodes; counting the holders of blocks is the pool's business. Not thread-safe."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_nodes = 0
        self.num_idle = 0
        self._roots: dict[Namespace, Root] = {}
        self._now = 0
        self._queue: list[tuple[int, int, Node]] = []
        """Idle leaves by when they were last used. Entries that are no longer true are skipped when they come up."""
        self._pushes = itertools.count()

    def match(self, namespace: Namespace, tokens: Sequence[int], limit: int) -> Match:
        """What of tokens[:limit] is known. Marks it as used now; nobody holds it yet."""
        root = self._roots.get(namespace)
        if root is None:
            return Match()
        node: Node = root
        path: list[Node] = []
        start, size = 0, self.block_size
        while start + size <= limit:
            child = _child(node, tuple(tokens[start : start + size]))
            if child is None:
                break
            path.append(child)
            node, start = child, start + size
        self._touch(path)
        partial, num_partial = _closest(node, tuple(tokens[start : min(start + size, limit)]))
        return Match(tuple(path), partial, num_partial)

    def child(self, namespace: Namespace, parent: Node | None, tokens: Tokens, blocks: Blocks) -> tuple[Node, bool]:
        """The node of the block `tokens` that follows `parent` (None: the namespace's root), and whether it is new.

        A new one stands for `blocks`, and the tree then needs a holder of its own for them. One that was there stands
        for other blocks with the same content, which the caller should use instead of its own.
        """
        assert len(tokens) == self.block_size, "only full blocks can be known"
        node = parent or self._roots.setdefault(namespace, Root(namespace))
        found = _child(node, tokens)
        if found is None:
            found = Node(tokens, blocks, node)
            node.children.setdefault(tokens[0], {})[tokens] = found
            self.num_nodes += 1
            self.num_idle += 1
            self._touch((found,))
            return found, True
        self._touch((found,))
        return found, False

    def use(self, node: Node) -> None:
        """A slot uses the node's blocks, and those of all its ancestors."""
        self.num_idle -= node.num_users == 0
        node.num_users += 1

    def let_go(self, node: Node) -> None:
        """A slot no longer does; descendants are let go first."""
        assert node.num_users > 0, "nobody uses this node"
        node.num_users -= 1
        if node.num_users == 0:
            self.num_idle += 1
            self._offer(node)

    def evict(self) -> Blocks | None:
        """Forget the least recently used idle leaf; returns its blocks, or None when everything is in use."""
        while self._queue:
            last_used, _, node = heapq.heappop(self._queue)
            if not _is_idle_leaf(node) or node.last_used != last_used:
                continue
            parent, node.parent = node.parent, None
            assert parent is not None
            alike = parent.children[node.tokens[0]]
            del alike[node.tokens]
            if not alike:
                del parent.children[node.tokens[0]]
            self.num_nodes -= 1
            self.num_idle -= 1
            if isinstance(parent, Root) and not parent.children:
                del self._roots[parent.namespace]  # tenants come and go
            self._offer(parent)
            return node.blocks
        return None

    def nodes(self) -> Iterator[Node]:
        """Every node, parents before children; for checks."""
        stack: list[Node] = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(child for alike in node.children.values() for child in alike.values())

    def _touch(self, path: Sequence[Node]) -> None:
        self._now += 1
        for node in path:
            node.last_used = self._now
            self._offer(node)

    def _offer(self, node: Node) -> None:
        if not _is_idle_leaf(node):
            return
        heapq.heappush(self._queue, (node.last_used, next(self._pushes), node))
        if len(self._queue) > 2 * self.num_nodes + _MIN_STALE:  # mostly stale: keep what is true
            self._queue = [e for e in self._queue if _is_idle_leaf(e[2]) and e[2].last_used == e[0]]
            heapq.heapify(self._queue)


def _is_idle_leaf(node: Node) -> bool:
    return node.parent is not None and not node.num_users and not node.children


def _child(node: Node, tokens: Tokens) -> Node | None:
    return node.children.get(tokens[0], {}).get(tokens)


def _closest(node: Node, tokens: Tokens) -> tuple[Node | None, int]:
    """The child that agrees with the most of `tokens`, which are fewer than a block or match none; of many that begin
    alike, among the newest."""
    best, most = None, 0
    alike = node.children.get(tokens[0], {}) if tokens else {}
    for key, child in itertools.islice(reversed(alike.items()), _MAX_NEAR):
        num = next((i for i, (a, b) in enumerate(zip(key, tokens, strict=False)) if a != b), len(tokens))
        if num > most:
            best, most = child, num
    return best, most
