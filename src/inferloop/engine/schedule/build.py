"""What a step computes, as the flat arrays of a StepPlan."""

from __future__ import annotations

import numpy as np

from inferloop.engine.schedule.blocks import BlockTables
from inferloop.engine.schedule.columns import sampling_columns
from inferloop.engine.schedule.mask import MaskFiller
from inferloop.engine.schedule.sequence import Sequence
from inferloop.engine.schedule.step import PromptRows, StepPlan

Chunk = tuple[Sequence, int]
"""A sequence and how many of its known tokens the step computes; its drafts come on top."""


def build_plan(step_id: int, chunks: list[Chunk], tables: BlockTables, vocab_size: int, filler: MaskFiller) -> StepPlan:
    """Reads the sequences and their block tables; changes nothing. Moves no blocks. Has `filler` start on the masks of
    those that are sampled."""
    sequences = [s for s, _ in chunks]
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
    masks = [s.spec.mask if row >= 0 else None for s, row in zip(sequences, sample_rows, strict=True)]
    mask = filler.fill(masks, vocab_size)  # first: the rest of the plan is built meanwhile
    slots = np.array([s.slot for s in sequences], np.int32)
    pooled = [i for i, sequence in enumerate(sequences) if sequence.spec.pool]
    return StepPlan(
        step_id=step_id,
        slots=slots,
        offsets=np.array(offsets, np.int32),
        token_ids=np.array(token_ids, np.int32),
        first_positions=np.array([s.num_computed for s in sequences], np.int32),
        block_tables=tables.rows(slots),
        sample_rows=np.array(sample_rows, np.int32),
        num_drafts=np.array([len(s.drafts) for s in sequences], np.int32),
        sampling=sampling_columns(sequences, vocab_size, mask),
        prompt_rows=PromptRows(*np.array(scored, np.int32).T.copy()) if scored else None,
        pooled=np.array(pooled, np.int32) if pooled else None,
    )
