"""Paged KV memory: a pool of counted blocks, and the table of blocks that each running slot holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from inferloop.engine.schedule.radix import Blocks, Match, Namespace, Node, RadixTree
from inferloop.engine.schedule.step import Int32

NO_BLOCK = -1


class BlockPool:
    """Blocks 0..num_blocks-1. A block is free when nobody holds it; several holders may share one."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_holders = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num: int) -> list[int]:
        """`num` free blocks, held once each. The caller has checked `num_free`."""
        assert num <= len(self._free), "allocating more blocks than are free"
        taken = [self._free.pop() for _ in range(num)]
        for block in taken:
            self._num_holders[block] = 1
        return taken

    def share(self, blocks: list[int]) -> None:
        """One more holder for blocks that are already held."""
        for block in blocks:
            assert self._num_holders[block] > 0, "sharing a free block"
            self._num_holders[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One holder fewer; the last one frees the block."""
        for block in blocks:
            assert self._num_holders[block] > 0, "releasing a free block"
            self._num_holders[block] -= 1
            if not self._num_holders[block]:
                self._free.append(block)

    def check(self, held: Counter[int]) -> None:
        """`held` counts every holder there is; nothing may be leaked, lost or owned twice."""
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert not set(self._free) & set(held), "a held block is free"
        assert len(self._free) + len(held) == self.num_blocks, "a block is leaked"
        assert all(self._num_holders[block] == count for block, count in held.items()), "holders miscounted"


class BlockTables:
    """Per KV group: a pool, and for every slot the blocks that hold its positions, padded with -1.

    With a radix tree, full blocks outlive their sequence until somebody needs the room, and sequences with a common
    beginning share them. The first blocks of a slot are then those of the nodes it uses; the rest are its own.
    """

    def __init__(
        self,
        *,
        num_groups: int,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        max_tokens: int,
        share_prefixes: bool = False,
    ) -> None:
        self.block_size = block_size
        width = self.blocks_for(max_tokens)
        self._pools = [BlockPool(num_blocks) for _ in range(num_groups)]
        self._num_total = num_groups * num_blocks
        self._tables = [np.full((num_slots, width), NO_BLOCK, np.int32) for _ in range(num_groups)]
        self._num_held = [0] * num_slots
        self._nodes: list[list[Node]] = [[] for _ in range(num_slots)]
        self._tree = RadixTree(block_size) if share_prefixes else None

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def num_free(self) -> int:
        """Blocks that can be had: free ones, and known ones that nobody uses."""
        return min([pool.num_free for pool in self._pools]) + (self._tree.num_idle if self._tree else 0)

    @property
    def num_total(self) -> int:
        return self._num_total

    @property
    def num_used(self) -> int:
        """Blocks in use by sequences; what is only remembered is not counted."""
        num_idle = self._tree.num_idle if self._tree else 0
        return sum([pool.num_blocks - pool.num_free - num_idle for pool in self._pools])

    def fits(self, slot: int, num_tokens: int) -> bool:
        """Whether the slot has the blocks for `num_tokens` positions."""
        return num_tokens <= self._num_held[slot] * self.block_size

    def num_missing(self, slot: int, num_tokens: int) -> int:
        """How many more blocks (per group) the slot needs so that `num_tokens` positions fit."""
        return max(0, self.blocks_for(num_tokens) - self._num_held[slot])

    def find(self, namespace: Namespace, tokens: Sequence[int], limit: int) -> Match:
        """What of tokens[:limit] lies in blocks already."""
        return self._tree.match(namespace, tokens, limit) if self._tree else Match()

    def attach(self, slot: int, match: Match) -> None:
        """Let an empty slot begin with the blocks of a match."""
        assert not self._num_held[slot], "only an empty slot can begin with known blocks"
        for index, node in enumerate(match.nodes):
            self._use(slot, index, node)
        self._num_held[slot] = len(match.nodes)

    def grow(self, slot: int, num: int) -> None:
        """Give the slot `num` more blocks in every group. The caller has checked `num_free`."""
        start = self._num_held[slot]
        for pool, table in zip(self._pools, self._tables, strict=True):
            while pool.num_free < num and self._evict():
                pass
            table[slot, start : start + num] = pool.allocate(num)
        self._num_held[slot] = start + num

    def publish(self, slot: int, namespace: Namespace, tokens: Sequence[int], num_computed: int) -> None:
        """Make the full blocks of tokens[:num_computed] known, which the slot has computed."""
        nodes, size = self._nodes[slot], self.block_size
        if self._tree is None or num_computed < (len(nodes) + 1) * size:
            return
        for index in range(len(nodes), num_computed // size):
            own = self.blocks_at(slot, index)
            key = tuple(tokens[index * size : (index + 1) * size])
            node, is_new = self._tree.child(namespace, nodes[-1] if nodes else None, key, own)
            if is_new:
                for pool, block in zip(self._pools, own, strict=True):
                    pool.share([block])
                self._tree.use(node)
                nodes.append(node)
            else:  # somebody computed the same meanwhile: one copy is enough
                self._use(slot, index, node)
                for pool, block in zip(self._pools, own, strict=True):
                    pool.release([block])

    def clear(self, slot: int) -> None:
        """Release everything the slot holds. What is known stays known until its room is needed."""
        num = self._num_held[slot]
        for pool, table in zip(self._pools, self._tables, strict=True):
            pool.release(table[slot, :num].tolist())
            table[slot, :num] = NO_BLOCK
        self._num_held[slot] = 0
        nodes, self._nodes[slot] = self._nodes[slot], []
        for node in reversed(nodes):
            assert self._tree is not None
            self._tree.let_go(node)

    def blocks_at(self, slot: int, index: int) -> Blocks:
        """The blocks of one index of a slot, one per group."""
        return tuple(int(table[slot, index]) for table in self._tables)

    def rows(self, slots: list[int]) -> tuple[Int32, ...]:
        """Copies of the tables of these slots, as wide as the widest of them."""
        width = max([self._num_held[slot] for slot in slots])
        return tuple([table[slots, :width] for table in self._tables])

    def check(self, num_tokens_by_slot: dict[int, int]) -> None:
        """`num_tokens_by_slot`: the computed positions of every slot in use; all other slots must hold nothing."""
        for slot, num in enumerate(self._num_held):
            assert slot in num_tokens_by_slot or not num, "an unused slot holds blocks"
            assert num >= self.blocks_for(num_tokens_by_slot.get(slot, 0)), "computed positions without a block"
        known = list(self._tree.nodes()) if self._tree else []
        for group, (pool, table) in enumerate(zip(self._pools, self._tables, strict=True)):
            held: Counter[int] = Counter(node.blocks[group] for node in known)
            assert len(held) == len(known), "two nodes stand for one block"
            for slot, num in enumerate(self._num_held):
                held.update(table[slot, :num].tolist())
                assert (table[slot, num:] == NO_BLOCK).all(), "a table is longer than what the slot holds"
                mine = [node.blocks[group] for node in self._nodes[slot]]
                assert mine == table[slot, : len(mine)].tolist(), "a slot does not hold the nodes it uses"
            pool.check(held)
        users = Counter(id(node) for nodes in self._nodes for node in nodes)
        assert all(node.num_users == users[id(node)] for node in known), "users miscounted"
        assert not self._tree or self._tree.num_idle == sum(not node.num_users for node in known), "idle miscounted"
        assert not self._tree or self._tree.num_nodes == len(known), "nodes miscounted"

    def _use(self, slot: int, index: int, node: Node) -> None:
        assert self._tree is not None
        for pool, table, block in zip(self._pools, self._tables, node.blocks, strict=True):
            pool.share([block])
            table[slot, index] = block
        self._tree.use(node)
        self._nodes[slot].append(node)

    def _evict(self) -> bool:
        blocks = self._tree.evict() if self._tree else None
        for pool, block in zip(self._pools, blocks or (), strict=bool(blocks)):
            pool.release([block])
        return blocks is not None
