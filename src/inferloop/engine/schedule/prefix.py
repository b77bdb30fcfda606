"""The prefix cache as sequences see it: what they need not compute, from the blocks of others or from a second tier."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from inferloop.engine.schedule.blocks import BlockTables
from inferloop.engine.schedule.build import Chunk
from inferloop.engine.schedule.policy import ScheduleConfig
from inferloop.engine.schedule.radix import Blocks, Match
from inferloop.engine.schedule.sequence import Sequence
from inferloop.engine.schedule.step import BlockData, StepPlan
from inferloop.engine.schedule.tier import BlockTier, TierTraffic, by_group
from inferloop.engine.stats import TierStats

_COPY_ABOVE_SHARE = 0.25
"""A block is copied when at least this share of it is of use; below, computing those few tokens is as cheap."""


class PrefixCache:
    """Lets sequences begin with known blocks, and makes theirs known. Moves their blocks through the plan of the step.

    `num_queries` counts the tokens that were looked up, `num_hits` those of them that need not be computed.
    """

    def __init__(self, config: ScheduleConfig, tables: BlockTables, tier: BlockTier | None) -> None:
        assert tier is None or config.share_prefixes, "a second tier without a first"
        self.num_queries = self.num_hits = 0
        self._block_size = config.block_size
        self._tables = tables
        self._tier = None if tier is None else TierTraffic(tier, config)
        self._copies: list[tuple[Blocks, Blocks]] = []

    @property
    def tier_stats(self) -> TierStats | None:
        return None if self._tier is None else self._tier.stats()

    def find(self, sequence: Sequence) -> Match:
        """What of a sequence lies in blocks already."""
        return self._tables.find(sequence.spec.namespace, sequence.token_ids, sequence.num_reusable)

    def num_uncached(self, sequence: Sequence) -> int:
        """How many tokens of a sequence are in neither tier, as far as that can be told at once."""
        match = self.find(sequence)
        num_held = 0 if self._tier is None else self._tier.num_held(match, sequence)
        return sequence.num_known - (len(match.nodes) + num_held) * self._block_size

    def complete(self, match: Match, sequence: Sequence, *, wait: bool) -> Match | None:
        """The match with what follows it elsewhere. None: that is on its way, so ask again with the next step; never
        with `wait`, for when there is nothing to do meanwhile."""
        return match if self._tier is None else self._tier.extend(match, sequence, wait=wait)

    def start(self, sequence: Sequence, match: Match) -> None:
        """Give a sequence with an empty slot its blocks, and let it begin with those of the match."""
        slot = sequence.slot
        self._tables.attach(slot, match)
        self._tables.grow(slot, self._tables.num_missing(slot, sequence.num_known))
        sequence.num_computed = (len(match.nodes) + len(match.loads)) * self._block_size
        if match.partial is not None and _COPY_ABOVE_SHARE * self._block_size <= match.num_partial:
            self._copies.append((match.partial.blocks, self._tables.blocks_at(slot, len(match.nodes))))
            sequence.num_computed += match.num_partial
        if self._tier is not None:
            self._tier.start(sequence, match, self._tables)
        if not sequence.num_preemptions:
            sequence.num_cached_tokens = sequence.num_computed
            self.num_queries += sequence.num_known if sequence.num_reusable else 0
            self.num_hits += sequence.num_computed

    def publish(self, sequence: Sequence) -> None:
        """Let others start from what is computed and kept of it; drafts that were not accepted are not."""
        num = min(sequence.num_computed, sequence.num_known)
        self._tables.publish(sequence.slot, sequence.spec.namespace, sequence.token_ids, num)

    def add_transfers(self, plan: StepPlan, chunks: list[Chunk]) -> StepPlan:
        """The plan with all that moves whole blocks: copies, loads and saves."""
        if self._copies:
            sources, targets = (by_group(blocks) for blocks in zip(*self._copies, strict=True))
            pairs = zip(sources, targets, strict=True)
            plan = replace(plan, copies=tuple(np.stack(pair, 1) for pair in pairs))
            self._copies.clear()
        return plan if self._tier is None else self._tier.add_transfers(plan, chunks, self._tables)

    def commit(self, saved: tuple[BlockData, ...]) -> None:
        """The step is done; `saved` is what its plan asked for."""
        if self._tier is not None:
            self._tier.commit(saved)

    def give_up(self, sequences: list[Sequence]) -> None:
        """The step of these was given up: what it was to save is saved by a later one."""
        if self._tier is not None:
            self._tier.give_up(sequences)
