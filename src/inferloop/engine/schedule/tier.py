"""The second tier of the prefix cache: what the pool of blocks no longer holds, or never did.

The radix tree knows what lies in blocks now. Where its match ends the tier is asked for the blocks that follow; what it
has is loaded into blocks that are allocated like fresh ones, and from there on they are as good as computed. Every full
block goes the other way once, in the step that completes it: the tier is written through, not on eviction, so that it
survives the process too.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Protocol

import numpy as np

from inferloop.engine.schedule.blocks import BlockTables
from inferloop.engine.schedule.build import Chunk
from inferloop.engine.schedule.keys import block_key, namespace_key
from inferloop.engine.schedule.policy import ScheduleConfig
from inferloop.engine.schedule.radix import Blocks, Match
from inferloop.engine.schedule.sequence import Sequence
from inferloop.engine.schedule.step import BlockData, BlockLoads, Int32, StepPlan
from inferloop.engine.stats import TierStats


class BlockTier(Protocol):
    """Keeps blocks by their keys. It may forget any of them, but never gives other content than was saved.

    Called from one thread, which runs the steps: nothing here may take long, except `load` with `wait`.
    """

    @property
    def root(self) -> bytes:
        """The key that all keys of this tier's blocks begin with; see schedule.keys."""
        ...

    def load(self, keys: Seq[bytes], *, wait: bool) -> tuple[BlockData, ...] | None:
        """The longest run of blocks from the first key on that is there.

        None: they are on their way; ask again with the same keys. Never None with `wait`, which may block for a while.
        """
        ...

    def num_held(self, keys: Seq[bytes]) -> int:
        """How many blocks `load` would find, as far as is known without looking."""
        ...

    def wants(self, key: bytes) -> bool:
        """Whether the block should be saved. False marks one that is there as used, too."""
        ...

    def save(self, key: bytes, data: BlockData) -> None: ...

    def stats(self) -> TierStats:
        """Everything but queries and hits."""
        ...


class TierTraffic:
    """What goes in and out of a tier. Owns `block_keys` and `num_saved` of every sequence."""

    def __init__(self, tier: BlockTier, config: ScheduleConfig) -> None:
        self._tier = tier
        self._block_size = config.block_size
        self._max_saves = -(-config.max_step_tokens // config.block_size) + config.max_sequences
        """As many blocks as one step can complete, at least; what was not saved in time is caught up with at that rate
        and holds up no step for long."""
        self._num_queries = self._num_hits = 0
        self._loads: list[tuple[Blocks, BlockData]] = []
        self._saving: dict[bytes, None] = {}
        """Keys of what the plan in flight saves."""

    def stats(self) -> TierStats:
        return replace(self._tier.stats(), queries=self._num_queries, hits=self._num_hits)

    def extend(self, match: Match, sequence: Sequence, *, wait: bool) -> Match | None:
        """The match with the full blocks that follow it. None: they are on their way; see BlockTier.load."""
        keys = self._keys_after(match, sequence)
        found = self._tier.load(keys, wait=wait) if keys else ()
        if found is None:
            return None
        return replace(match, loads=found, partial=None, num_partial=0) if found else match

    def num_held(self, match: Match, sequence: Sequence) -> int:
        """How many full blocks after the match seem to be there."""
        return self._tier.num_held(self._keys_after(match, sequence))

    def start(self, sequence: Sequence, match: Match, tables: BlockTables) -> None:
        """The sequence begins with `match` in its slot, and has all its blocks."""
        start = len(match.nodes)
        for index, data in enumerate(match.loads, start):
            self._loads.append((tables.blocks_at(sequence.slot, index), data))
        sequence.num_saved = 0  # what was dropped before gets another chance
        if not sequence.num_preemptions:
            self._num_queries += sequence.num_known - start * self._block_size if sequence.num_reusable else 0
            self._num_hits += len(match.loads) * self._block_size

    def add_transfers(self, plan: StepPlan, chunks: list[Chunk], tables: BlockTables) -> StepPlan:
        """The plan with what it is to load, and to save of the blocks that it completes."""
        saves: list[Blocks] = []
        for sequence, num in chunks:
            num_full = (sequence.num_computed + num) // self._block_size
            while sequence.num_saved < num_full and len(saves) < self._max_saves:
                index, sequence.num_saved = sequence.num_saved, sequence.num_saved + 1
                key = self._keys(sequence, num_full)[index]
                if key not in self._saving and self._tier.wants(key):
                    self._saving[key] = None
                    saves.append(tables.blocks_at(sequence.slot, index))
        loads, self._loads = self._loads, []
        if not loads and not saves:
            return plan
        data = tuple(data for _, data in loads)
        return replace(
            plan,
            loads=BlockLoads(by_group([blocks for blocks, _ in loads]), data) if loads else None,
            saves=by_group(saves),
        )

    def commit(self, saved: Seq[BlockData]) -> None:
        """The step is done; `saved` is what its plan asked for."""
        for key, data in zip(self._saving, saved, strict=True):
            self._tier.save(key, data)
        self._saving.clear()

    def give_up(self, sequences: list[Sequence]) -> None:
        """Nothing was saved in the step of these."""
        self._saving.clear()
        for sequence in sequences:
            sequence.num_saved = 0

    def _keys_after(self, match: Match, sequence: Sequence) -> list[bytes]:
        """The keys of the blocks after the match that need not be computed if they are known."""
        start, end = len(match.nodes), sequence.num_reusable // self._block_size
        return self._keys(sequence, end)[start:end]

    def _keys(self, sequence: Sequence, num: int) -> list[bytes]:
        """The keys of at least the first `num` blocks of a sequence, which are full."""
        keys, size = sequence.block_keys, self._block_size
        for index in range(len(keys), num):
            parent = keys[-1] if keys else namespace_key(self._tier.root, sequence.spec.namespace)
            keys.append(block_key(parent, sequence.token_ids[index * size : (index + 1) * size]))
        return keys


def by_group(blocks: Seq[Blocks]) -> tuple[Int32, ...]:
    """An array for each KV group; nothing at all without blocks."""
    return tuple(np.array(group, np.int32) for group in zip(*blocks, strict=True))
