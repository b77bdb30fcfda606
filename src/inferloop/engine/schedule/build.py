"""What a step computes, as the flat arrays of a StepPlan."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from inferloop.engine.schedule.blocks import BlockTables
from inferloop.engine.schedule.columns import are_fixed, sampling_columns
from inferloop.engine.schedule.mask import MaskFiller
from inferloop.engine.schedule.sequence import Sequence
from inferloop.engine.schedule.step import NO_ADAPTER, Int32, PromptRows, SamplingColumns, StepPlan

Chunk = tuple[Sequence, int]
"""A sequence and how many of its known tokens the step computes; its drafts come on top."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """What plans of the same sequences in the same slots have in common. `columns` None: they change with each step."""

    sequences: list[Sequence]
    slots: list[int]
    slot_column: Int32
    pooled: Int32 | None
    adapters: Int32 | None
    has_masks: bool
    columns: SamplingColumns | None


@dataclass(frozen=True, slots=True)
class _Rows:
    """Which tokens a step computes and which of them it samples from."""

    token_ids: Int32
    offsets: Int32
    sample_rows: Int32
    num_drafts: Int32
    prompt_rows: PromptRows | None = None


class PlanBuilder:
    """Makes the plans of one scheduler. Most steps go on with the sequences of the step before, one token each: what is
    the same then is not made again."""

    def __init__(self, tables: BlockTables, vocab_size: int, max_sequences: int) -> None:
        self._tables, self._vocab_size = tables, vocab_size
        self._filler = MaskFiller()
        self._kept: _Kept | None = None
        self._counting, self._zeros = np.arange(max_sequences + 1, dtype=np.int32), np.zeros(max_sequences, np.int32)

    def build(self, step_id: int, chunks: list[Chunk]) -> StepPlan:
        """Reads the sequences and their block tables; changes nothing. Moves no blocks. Starts to fill the masks of
        those that are sampled."""
        sequences = [sequence for sequence, _ in chunks]
        kept = self._keep(sequences)
        rows = self._mixed(chunks) if _mixes(chunks) else self._decodes(sequences)
        mask = None
        if kept.has_masks:  # first: the rest of the plan is made meanwhile
            is_sampled = (rows.sample_rows >= 0).tolist()
            masks = [s.spec.mask if yes else None for s, yes in zip(sequences, is_sampled, strict=True)]
            mask = self._filler.fill(masks, self._vocab_size)
        columns = kept.columns or sampling_columns(sequences, self._vocab_size)
        return StepPlan(
            step_id=step_id,
            slots=kept.slot_column,
            offsets=rows.offsets,
            token_ids=rows.token_ids,
            first_positions=np.array([s.num_computed for s in sequences], np.int32),
            block_tables=self._tables.rows(kept.slots),
            sample_rows=rows.sample_rows,
            num_drafts=rows.num_drafts,
            sampling=columns if mask is None else replace(columns, mask=mask),
            prompt_rows=rows.prompt_rows,
            pooled=kept.pooled,
            adapters=kept.adapters,
        )

    def close(self) -> None:
        """Nothing is planned any more: let go of threads."""
        self._filler.close()

    def _keep(self, sequences: list[Sequence]) -> _Kept:
        slots, kept = [s.slot for s in sequences], self._kept
        is_same = kept is not None and kept.slots == slots and kept.sequences == sequences
        if kept is None or not is_same or (kept.columns is None and are_fixed(sequences)):
            pooled = [i for i, s in enumerate(sequences) if s.spec.pool]
            kept = self._kept = _Kept(
                sequences,
                slots,
                np.array(slots, np.int32),
                np.array(pooled, np.int32) if pooled else None,
                _adapters(sequences),
                any(s.spec.mask is not None for s in sequences),
                sampling_columns(sequences, self._vocab_size) if are_fixed(sequences) else None,
            )
        return kept

    def _decodes(self, sequences: list[Sequence]) -> _Rows:
        """Every sequence computes the last token that is known of it, and samples the next."""
        num = len(sequences)
        token_ids = np.array([s.token_ids[-1] for s in sequences], np.int32)
        return _Rows(token_ids, self._counting[: num + 1], self._counting[:num], self._zeros[:num])

    def _mixed(self, chunks: list[Chunk]) -> _Rows:
        token_ids = list[int]()
        offsets, sample_rows = [0], list[int]()
        scored = list[tuple[int, int, int, int]]()
        for i, (sequence, num) in enumerate(chunks):
            start, end = sequence.num_computed, sequence.num_computed + num
            num_top = sequence.spec.sampling.num_prompt_logprobs
            if num_top is not None:
                for position in sequence.to_score(num):
                    scored.append((offsets[i] + position - start, i, sequence.token_ids[position + 1], num_top))
            token_ids += sequence.token_ids[start:end]
            is_sampled = end == sequence.num_known and sequence.generates
            sample_rows.append(len(token_ids) - 1 if is_sampled else -1)
            token_ids += sequence.drafts
            offsets.append(len(token_ids))
        return _Rows(
            token_ids=np.array(token_ids, np.int32),
            offsets=np.array(offsets, np.int32),
            sample_rows=np.array(sample_rows, np.int32),
            num_drafts=np.array([len(s.drafts) for s, _ in chunks], np.int32),
            prompt_rows=PromptRows(*np.array(scored, np.int32).T.copy()) if scored else None,
        )


def _adapters(sequences: list[Sequence]) -> Int32 | None:
    slots = [s.spec.adapter_slot for s in sequences]
    return np.array(slots, np.int32) if any(slot != NO_ADAPTER for slot in slots) else None


def _mixes(chunks: list[Chunk]) -> bool:
    """Whether anybody does anything but compute the newest token of an answer that goes on. The newest of a prompt may
    be one whose logits are wanted as well."""
    for sequence, num in chunks:
        if num != 1 or sequence.drafts or len(sequence.token_ids) - sequence.num_computed != 1:
            return True
        if not sequence.num_output:
            return True
    return False
