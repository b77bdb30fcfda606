"""The radix tree against a plain list of prefixes, under random operations."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from inferloop.engine.schedule.radix import Namespace, Node, RadixTree

SIZE = 3
Prefix = tuple[Namespace, tuple[int, ...]]


@dataclass
class Naive:
    """Every known prefix of whole blocks, with its block, its users and when it was last used."""

    blocks: dict[Prefix, int] = field(default_factory=dict)
    users: dict[Prefix, int] = field(default_factory=dict)
    used: dict[Prefix, int] = field(default_factory=dict)
    now: int = 0

    def match(self, namespace: Namespace, tokens: tuple[int, ...]) -> tuple[list[int], int]:
        """(blocks of the longest known beginning, most further tokens that some known block agrees with)."""
        found: list[int] = []
        while (key := (namespace, tokens[: (len(found) + 1) * SIZE])) in self.blocks and len(key[1]) == (
            len(found) + 1
        ) * SIZE:
            found.append(self.blocks[key])
        self.now += 1
        for i in range(len(found)):
            self.used[namespace, tokens[: (i + 1) * SIZE]] = self.now
        start = tokens[: len(found) * SIZE]
        rest = tokens[len(start) : len(start) + SIZE]
        most = 0
        for known_namespace, known in self.blocks:
            if known_namespace == namespace and len(known) == len(start) + SIZE and known[: len(start)] == start:
                agree = 0
                for a, b in zip(known[len(start) :], rest, strict=False):
                    if a != b:
                        break
                    agree += 1
                most = max(most, agree)
        return found, most

    def leaves(self) -> list[Prefix]:
        inner = {(namespace, known[:-SIZE]) for namespace, known in self.blocks}
        return [p for p in self.blocks if p not in inner and not self.users[p]]


def tokens_of(node: Node) -> tuple[int, ...]:
    return (tokens_of(node.parent) if node.parent is not None else ()) + node.tokens


@pytest.mark.parametrize("seed", range(40))
def test_random_operations_agree_with_the_list(seed: int) -> None:
    rng = random.Random(seed)
    tree, naive = RadixTree(SIZE), Naive()
    fresh = iter(range(10_000))
    held: list[tuple[Namespace, list[Node]]] = []
    for _ in range(300):
        namespace: Namespace = rng.choice([(), ("salt", "a"), ("adapter", "a")])
        tokens = tuple(rng.randrange(2) for _ in range(rng.randrange(14)))
        action = rng.random()
        if action < 0.4:
            limit = rng.randrange(len(tokens) + 1)
            found = tree.match(namespace, tokens, limit)
            blocks, most = naive.match(namespace, tokens[:limit])
            assert [node.blocks for node in found.nodes] == [(b,) for b in blocks]
            assert found.num_partial == most
            assert (found.partial is None) == (most == 0)
            if found.partial is not None:
                start = len(blocks) * SIZE
                assert found.partial.tokens[:most] == tokens[start : start + most]
            if found.nodes and rng.random() < 0.5:
                for node in found.nodes:
                    tree.use(node)
                    naive.users[namespace, tokens_of(node)] += 1
                held.append((namespace, list(found.nodes)))
        elif action < 0.7:
            parent: Node | None = None
            for end in range(SIZE, len(tokens) + 1, SIZE):
                key = (namespace, tokens[:end])
                own = next(fresh)
                parent, is_new = tree.child(namespace, parent, tokens[end - SIZE : end], (own,))
                assert is_new == (key not in naive.blocks)
                naive.blocks.setdefault(key, own)
                naive.users.setdefault(key, 0)
                naive.now += 1
                naive.used[key] = naive.now
                assert parent.blocks == (naive.blocks[key],)
        elif action < 0.85 and held:
            namespace, nodes = held.pop(rng.randrange(len(held)))
            for node in reversed(nodes):
                naive.users[namespace, tokens_of(node)] -= 1
                tree.let_go(node)
        else:
            leaves = naive.leaves()
            evicted = tree.evict()
            if not leaves:
                assert evicted is None
            else:
                oldest = min(naive.used[p] for p in leaves)
                victim = next(p for p in leaves if (naive.blocks[p],) == evicted)
                assert naive.used[victim] == oldest
                for book in (naive.blocks, naive.users, naive.used):
                    del book[victim]
        assert tree.num_nodes == len(naive.blocks) == len(list(tree.nodes()))
        assert tree.num_idle == sum(not n for n in naive.users.values())


def test_everything_idle_can_be_evicted_and_nothing_is_left() -> None:
    tree = RadixTree(SIZE)
    for tenant in range(100):
        parent: Node | None = None
        for depth in range(5):
            parent, _ = tree.child(("salt", str(tenant)), parent, (depth, tenant, 0), (tenant * 5 + depth,))
    evicted = [tree.evict() for _ in range(500)]
    assert sorted(b[0] for b in evicted if b) == list(range(500))
    assert tree.evict() is None
    assert (tree.num_nodes, tree.num_idle, len(tree._roots)) == (0, 0, 0)


def test_the_queue_does_not_grow_with_lookups() -> None:
    tree = RadixTree(SIZE)
    tree.child((), None, (1, 2, 3), (0,))
    for _ in range(10_000):
        tree.match((), (1, 2, 3, 4), 4)
    assert len(tree._queue) < 200


def test_near_misses_are_looked_for_among_the_newest_only() -> None:
    """Thousands of conversations go on alike behind one beginning; a look-up must not compare them all."""
    tree = RadixTree(SIZE)
    for i in range(1000):
        tree.child((), None, (1, i, 0), (i,))
    assert tree.match((), (1, 999, 5), 3).num_partial == 2
    assert tree.match((), (1, 0, 5), 3).num_partial == 1
    assert len(tree.match((), (1, 0, 0, 7), 4).nodes) == 1, "whole blocks are found wherever they are"
