"""Paged KV memory: a pool of counted blocks, and the table of blocks that each running slot holds."""

from __future__ import annotations

from collections import Counter

import numpy as np

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
    """Per KV group: a pool, and for every slot the blocks that hold its positions, padded with -1."""

    def __init__(self, *, num_groups: int, num_blocks: int, block_size: int, num_slots: int, max_tokens: int) -> None:
        self.block_size = block_size
        width = self.blocks_for(max_tokens)
        self._pools = [BlockPool(num_blocks) for _ in range(num_groups)]
        self._tables = [np.full((num_slots, width), NO_BLOCK, np.int32) for _ in range(num_groups)]
        self._num_held = [0] * num_slots

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def num_free(self) -> int:
        return min(pool.num_free for pool in self._pools)

    @property
    def num_total(self) -> int:
        return sum(pool.num_blocks for pool in self._pools)

    @property
    def num_used(self) -> int:
        return sum(pool.num_blocks - pool.num_free for pool in self._pools)

    def num_missing(self, slot: int, num_tokens: int) -> int:
        """How many more blocks (per group) the slot needs so that `num_tokens` positions fit."""
        return max(0, self.blocks_for(num_tokens) - self._num_held[slot])

    def grow(self, slot: int, num: int) -> None:
        """Give the slot `num` more blocks in every group. The caller has checked `num_free`."""
        start = self._num_held[slot]
        for pool, table in zip(self._pools, self._tables, strict=True):
            table[slot, start : start + num] = pool.allocate(num)
        self._num_held[slot] = start + num

    def clear(self, slot: int) -> None:
        """Release everything the slot holds."""
        num = self._num_held[slot]
        for pool, table in zip(self._pools, self._tables, strict=True):
            pool.release(table[slot, :num].tolist())
            table[slot, :num] = NO_BLOCK
        self._num_held[slot] = 0

    def rows(self, slots: Int32) -> tuple[Int32, ...]:
        """Copies of the tables of these slots, as wide as the widest of them."""
        width = max(self._num_held[slot] for slot in slots)
        return tuple(table[slots, :width] for table in self._tables)

    def check(self, num_tokens_by_slot: dict[int, int]) -> None:
        """`num_tokens_by_slot`: the computed positions of every slot in use; all other slots must hold nothing."""
        for slot, num in enumerate(self._num_held):
            assert slot in num_tokens_by_slot or not num, "an unused slot holds blocks"
            assert num >= self.blocks_for(num_tokens_by_slot.get(slot, 0)), "computed positions without a block"
        for pool, table in zip(self._pools, self._tables, strict=True):
            held: Counter[int] = Counter()
            for slot, num in enumerate(self._num_held):
                held.update(table[slot, :num].tolist())
                assert (table[slot, num:] == NO_BLOCK).all(), "a table is longer than what the slot holds"
            pool.check(held)
