"""The seam between schedule and compute: one step as flat arrays, and what came of it.

A plan covers `n` sequences and `t` tokens. Sequence i owns tokens offsets[i]:offsets[i+1], at absolute positions
first_positions[i], first_positions[i]+1, ... A decode step has one token, a prefill chunk many, a verification step
one known token and `num_drafts[i]` drafts: all the same case.

Block tables are padded with -1 to the widest sequence, one array per KV group (full attention, a sliding window, ...).
Position p of sequence i lives in block block_tables[g][i, p // block_size], row p % block_size.

Sampling happens inside the runner, so its parameters are data in the plan. `sample_rows[i]` indexes the flat tokens
whose hidden state is sampled from, or -1 when the sequence's known tokens are not all computed yet. With d drafts
the rows sample_rows[i] .. sample_rows[i]+d are the ones to verify. Draw number 0 at absolute position p of a request
uses Philox-4x32-10 with key = seed, counter = (p, draw), see engine.compute.philox.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
UInt32 = NDArray[np.uint32]
UInt64 = NDArray[np.uint64]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
UInt8 = NDArray[np.uint8]
NO_ADAPTER = -1
BlockData = UInt8
"""The keys and values of one block in every layer and KV group, as `RunnerInfo.block_bytes` bytes in an order that is
the runner's own. Never written to once it is made, so that it can be passed on without a copy."""


@dataclass(frozen=True, slots=True)
class SparseRows:
    """CSR over a plan's sequences: row i owns ids[offsets[i]:offsets[i+1]] with the matching values."""

    offsets: Int32
    ids: Int32
    values: Float32


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Per sequence, length n. temperature 0 is greedy; top_k 0, top_p 1, min_p 0 are off.

    num_logprobs -1: none wanted; k >= 0: the chosen token's and the k best. The optional columns are None when no
    sequence of the plan uses them, so that a runner may take its fast path:
    `bias` is added to the logits; `penalties` holds, per token id seen, its count in the output (value), prompt-only
    ids with 0; `presence`, `frequency` and `repetition` are the factors that go with it; `mask` gives a packed
    bitmask of allowed tokens, uint32[n, ceil(vocab / 32)], bit j of word w allows token 32 * w + j. It is computed
    beside the step, so its result is best taken just before sampling.
    """

    temperature: Float32
    top_p: Float32
    top_k: Int32
    min_p: Float32
    seed: UInt64
    num_logprobs: Int32
    bias: SparseRows | None = None
    penalties: SparseRows | None = None
    presence: Float32 | None = None
    frequency: Float32 | None = None
    repetition: Float32 | None = None
    mask: Future[UInt32] | None = None


@dataclass(frozen=True, slots=True)
class BlockLoads:
    """Blocks whose content is known from before: blocks[g][j] of KV group g takes its part of data[j]."""

    blocks: tuple[Int32, ...]
    data: tuple[BlockData, ...]


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Flat tokens of a plan that are followed by a known token of their prompt, whose log-probability is wanted:
    `targets[r]` after everything up to `flat[r]`, and the `num_top[r]` likeliest in its place. All have one length."""

    flat: Int32
    owners: Int32
    """Which sequence of the plan each is of; never decreasing."""
    targets: Int32
    num_top: Int32

    def of(self, i: int) -> slice:
        """The rows of sequence i."""
        low, high = np.searchsorted(self.owners, [i, i + 1]).tolist()
        return slice(low, high)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Values only, which nobody writes to: the next plan may share arrays with this one. The runner must not
    keep references past `wait`."""

    step_id: int
    slots: Int32
    """Stable small integer per running sequence, for state that a runner keeps beside the KV."""
    offsets: Int32
    """n + 1 offsets into `token_ids`."""
    token_ids: Int32
    first_positions: Int32
    block_tables: tuple[Int32, ...]
    sample_rows: Int32
    num_drafts: Int32
    sampling: SamplingColumns
    copies: tuple[Int32, ...] = ()
    """Per KV group an array (m, 2) of blocks to copy, from and to, before anything is computed. Every source is read
    before any destination is written. Empty when there is nothing to copy."""
    loads: BlockLoads | None = None
    """Blocks to fill after the copies, whose sources they may replace, and before anything is computed."""
    saves: tuple[Int32, ...] = ()
    """Per KV group the blocks (m) whose content is wanted as it is after the step; none of them can change any more.
    Empty when there are none."""
    prompt_rows: PromptRows | None = None
    pooled: Int32 | None = None
    """Sequences of the plan (their places, ascending) whose tokens' last hidden states are to be summed. None for none,
    as with `prompt_rows`, so that a runner may take its fast path."""
    adapters: Int32 | None = None
    """Of each sequence the slot of the adapter that it goes through, NO_ADAPTER for the model alone. None when all do
    without."""

    @property
    def num_sequences(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural) of one token, and the likeliest in its place, best first. Of a sampled token: after
    penalties, bias and mask, before temperature. Of a prompt's token: of the logits as they are."""

    chosen: float
    top: tuple[tuple[int, float], ...]
    rank: int | None = None
    """One more than the number of likelier tokens; told for a prompt's tokens only."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sequence i of the plan produced token_ids[offsets[i]:offsets[i+1]]: none for a chunk that does not finish the
    known tokens, one for plain decode, up to 1 + num_drafts[i] for verification. `logprobs[i]` matches, when asked.
    `saved[j]` is the content of the j-th block of the plan's `saves`.
    `prompt_logprobs` matches the plan's `prompt_rows`, and row k of `pooled`, (len(plan.pooled), hidden), is the sum of
    what sequence plan.pooled[k] computed in this step, after the model's final norm."""

    step_id: int
    offsets: Int32
    token_ids: Int32
    logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    saved: tuple[BlockData, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    pooled: Float64 | None = None
    given_up: bool = False
    """Copies and loads were done, nothing else that counts; everything here is empty."""

    @classmethod
    def of_given_up(cls, plan: StepPlan) -> StepResult:
        empty = np.zeros(plan.num_sequences + 1, np.int32)
        return cls(plan.step_id, empty, empty[:0], given_up=True)

    def pooled_of(self, plan: StepPlan, i: int) -> Float64:
        assert self.pooled is not None and plan.pooled is not None, "nothing was pooled"
        row: Float64 = self.pooled[np.searchsorted(plan.pooled, i)]
        return row

    def tokens_of(self, i: int) -> list[int]:
        return [int(t) for t in self.token_ids[self.offsets[i] : self.offsets[i + 1]]]
