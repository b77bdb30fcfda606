"""Sampling parameters of a step's sequences as columns; the rare ones are left out when nobody uses them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from inferloop.engine.schedule.sequence import Sequence
from inferloop.engine.schedule.step import SamplingColumns, SparseRows

_COLDEST = 1e-5
"""Below it a draw is greedy for all that fp32 can tell, and logit / temperature may overflow."""


def are_fixed(sequences: list[Sequence]) -> bool:
    """Whether the columns of these sequences stay as they are, whatever is sampled. Once true it remains so."""
    return not any(s.seen_counts is not None or s.num_output < s.spec.sampling.min_tokens for s in sequences)


def sampling_columns(sequences: list[Sequence], vocab_size: int) -> SamplingColumns:
    """All but the mask."""
    wanted = [s.spec.sampling for s in sequences]
    biases = [_bias_of(s) for s in sequences]
    penalized = any(s.seen_counts is not None for s in sequences)
    return SamplingColumns(
        temperature=np.array([w.temperature if w.temperature >= _COLDEST else 0.0 for w in wanted], np.float32),
        top_p=np.array([w.top_p for w in wanted], np.float32),
        top_k=np.array([min(w.top_k, vocab_size) for w in wanted], np.int32),
        min_p=np.array([w.min_p for w in wanted], np.float32),
        seed=np.array([s.spec.seed for s in sequences], np.uint64),
        num_logprobs=np.array([-1 if w.num_logprobs is None else w.num_logprobs for w in wanted], np.int32),
        bias=_sparse(biases) if any(biases) else None,
        penalties=_sparse([s.seen_counts or {} for s in sequences]) if penalized else None,
        presence=np.array([w.presence_penalty for w in wanted], np.float32) if penalized else None,
        frequency=np.array([w.frequency_penalty for w in wanted], np.float32) if penalized else None,
        repetition=np.array([w.repetition_penalty for w in wanted], np.float32) if penalized else None,
    )


def _bias_of(sequence: Sequence) -> dict[int, float]:
    """The asked-for bias; below min_tokens the ids that would end the sequence are forbidden."""
    sampling = sequence.spec.sampling
    bias = dict(sampling.logit_bias)
    if sequence.num_output < sampling.min_tokens:
        bias.update(dict.fromkeys(sequence.end_token_ids, -np.inf))
    return bias


def _sparse(rows: Iterable[Mapping[int, float]]) -> SparseRows:
    offsets, ids, values = [0], list[int](), list[float]()
    for row in rows:
        ids.extend(row.keys())
        values.extend(row.values())
        offsets.append(len(ids))
    return SparseRows(np.array(offsets, np.int32), np.array(ids, np.int32), np.array(values, np.float32))
