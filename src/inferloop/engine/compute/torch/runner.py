"""The torch runner: weights, KV blocks and sampling behind the Runner protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inferloop.core.errors import EnvironmentLacksError, ModelFileError, UsageError
from inferloop.core.shape import Product
from inferloop.engine.compute.adapter import Adapter, merged
from inferloop.engine.compute.room import check_room, no_room
from inferloop.engine.compute.runner import GiveUp, RunnerInfo, never
from inferloop.engine.compute.torch.attention import AttentionSpec, StepAttention, TiledAttention
from inferloop.engine.compute.torch.cache import PagedCache
from inferloop.engine.compute.torch.config import TorchConfig
from inferloop.engine.compute.torch.group import ALONE, Group
from inferloop.engine.compute.torch.layers.low_rank import LowRank, adapted_rows
from inferloop.engine.compute.torch.layers.rope import rope_tables
from inferloop.engine.compute.torch.layout import block_layout
from inferloop.engine.compute.torch.model import TILE_ROWS, Decoder, Turns
from inferloop.engine.compute.torch.prompts import (
    Scores,
    add_up,
    logits_of_tiles,
    read_scores,
    rows_at_once,
    rows_to_pool,
    score,
)
from inferloop.engine.compute.torch.sampler import SampleRows, in_parts, logprobs_of, sample, sample_rows
from inferloop.engine.compute.torch.weights import ModelWeights, Progress, load_weights
from inferloop.engine.schedule.step import Float32, Int64, StepPlan, StepResult, TokenLogprob
from inferloop.models.headers import ModelHeader, RopeSpec
from inferloop.models.resolve import ModelFiles

REVISION = "2"
Prepared = dict[tuple[int, Product], LowRank]
"""An adapter's updates by layer and product."""


@dataclass(frozen=True, slots=True)
class _Submitted:
    plan: StepPlan
    rows: SampleRows
    token_ids: Tensor | None
    logits: Tensor | None
    saved: Tensor | None
    scores: list[Scores]
    to_pool: list[Tensor]


_HEAD_ROWS = 8
"""Go through the head together in a step that may be given up; they cost little more than one. Drawing from a whole
vocabulary takes milliseconds for each row, so those are drawn one by one."""


class _GivenUpError(Exception):
    """Ends a step between two parts of it."""


def _go_on() -> None:
    """Between the parts of a step that cannot be given up."""


class TorchRunner:
    """Runs on any torch device. On an accelerator `submit` only enqueues; `wait` fetches the sampled tokens."""

    def __init__(self, header: ModelHeader, weights: ModelWeights, config: TorchConfig, group: Group = ALONE) -> None:
        """`weights` are in the dtype and on the device of `config`. Use `load` for model files. With a `group` all of
        that is of this rank's share, steps are not to be given up, and on other ranks than the first they are followed.
        """
        shape, dtype = header.shape, config.torch_dtype
        self._device = torch.device(config.device)
        context_length = shape.context_length
        block_bytes = shape.kv_bytes_per_token(config.dtype) * config.block_size
        num_blocks = config.num_blocks or int(config.kv_memory_bytes // block_bytes)
        if num_blocks < 1:
            raise UsageError(f"the KV memory of {config.kv_memory_bytes} bytes holds no block of {block_bytes:g} bytes")
        if self._device.type == "cpu":
            check_room(int(num_blocks * block_bytes))
        try:
            self._cache = PagedCache(
                shape, num_blocks=num_blocks, block_size=config.block_size, dtype=dtype, device=self._device
            )
        except torch.OutOfMemoryError as problem:
            raise no_room(int(num_blocks * block_bytes), str(problem)) from problem
        num_positions = min(context_length, num_blocks * config.block_size)
        local = header.structure.local_rope
        self._turns = self._table(header.rope, num_positions, context_length, weights.rope_factors, dtype)
        self._local_turns = None if local is None else self._table(local, num_positions, context_length, None, dtype)
        self._header, self._weights, self._dtype = header, weights, dtype
        self._decoder = Decoder(weights, shape, header.structure, tiled=config.deterministic, group=group)
        self._tile = TILE_ROWS if config.deterministic else None
        self._attention = TiledAttention if config.deterministic else StepAttention
        self._attention_spec = AttentionSpec.of(header)
        self._submitted: _Submitted | StepPlan | None = None
        """A plan alone when its step was given up."""
        revision = f"{REVISION}+torch{torch.__version__}"
        self._info = RunnerInfo(
            name="torch",
            revision=revision,
            device=config.device,
            dtype=config.dtype,
            deterministic=config.deterministic,
            vocab_size=shape.vocab_size,
            context_length=context_length,
            block_size=config.block_size,
            num_blocks=num_blocks,
            hidden_size=shape.hidden_size,
            can_give_up=self._device.type == "cpu",
            weight_bytes=weights.num_bytes,
            kv_bytes=self._cache.num_bytes,
            block_bytes=self._cache.num_bytes // num_blocks,
            block_layout=block_layout(revision, header, config, context_length),
            takes_adapters=group is ALONE,
        )

    @classmethod
    def load(
        cls, files: ModelFiles, config: TorchConfig, *, group: Group = ALONE, progress: Progress | None = None
    ) -> TorchRunner:
        """Read the weights and allocate the KV memory; with a `group`, of a share of the model.

        Raises UsageError for a precision that cannot be, EnvironmentLacksError for a device that is not there or has no
        room for the KV memory, ModelFileError for files that cannot be read.
        """
        dtype = config.torch_dtype
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        try:
            device = torch.device(config.device)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as problem:
            raise EnvironmentLacksError(f"torch cannot use the device {config.device!r}: {problem}") from problem
        with torch.inference_mode():
            weights = load_weights(
                files.header, dtype=dtype, device=device, tiled=config.deterministic, progress=progress
            )
            return cls(files.header, weights, config, group)

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @torch.inference_mode()
    def submit(self, plan: StepPlan, give_up: GiveUp = never) -> None:
        """Compute and sample one step. At most one is in flight. Gives up between parts of a layer, or between a few
        rows that are sampled; on an accelerator all that is enqueued faster than anybody could ask."""
        assert self._submitted is None, "wait for the step in flight first"
        try:
            self._submitted = self._step(plan, give_up)
        except _GivenUpError:
            self._submitted = plan

    def _step(self, plan: StepPlan, give_up: GiveUp) -> _Submitted:
        def between() -> None:
            if give_up():
                raise _GivenUpError

        rows = sample_rows(plan)
        hidden = self._forward(plan, between)
        saved = self._cache.save(plan.saves[0]) if plan.saves else None
        scores = [] if plan.prompt_rows is None else score(hidden, plan.prompt_rows, self._decoder.logits)
        to_pool = [self._decoder.normed(hidden[some]) for some in rows_to_pool(plan)]
        token_ids = logits = None
        if len(rows.flat):
            token_ids, logits = self._sample(hidden, plan, rows, between, in_one=give_up is never)
        return _Submitted(plan, rows, token_ids, logits, saved, scores, to_pool)

    @torch.inference_mode()
    def wait(self) -> StepResult:
        """The oldest submitted step: per sequence, its tokens up to and including the first that is no right draft."""
        done, self._submitted = self._submitted, None
        assert done is not None, "nothing was submitted"
        if isinstance(done, StepPlan):
            return StepResult.of_given_up(done)
        plan, rows = done.plan, done.rows
        sampled = np.empty(0, np.int64) if done.token_ids is None else done.token_ids.cpu().numpy()
        accepted = _accepted(plan, rows, sampled)
        counts = np.bincount(rows.owners[accepted], minlength=plan.num_sequences)
        return StepResult(
            step_id=plan.step_id,
            offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            token_ids=sampled[accepted].astype(np.int32),
            logprobs=_logprobs(done, accepted),
            # A copy each, so that those that are kept do not keep the rest of them in memory.
            saved=() if done.saved is None else tuple(row.copy() for row in done.saved.cpu().numpy()),
            prompt_logprobs=() if plan.prompt_rows is None else read_scores(done.scores, plan.prompt_rows),
            pooled=add_up(done.to_pool),
        )

    def logits(self, plan: StepPlan) -> Tensor:
        """Logits (rows, vocab) of every token of a plan, unprocessed; writes the KV memory as `submit` does. For
        checking this runner and others against each other."""
        with torch.inference_mode():
            return self._decoder.logits(self._forward(plan))

    @torch.inference_mode()
    def follow(self, plan: StepPlan) -> None:
        """Do this rank's share of what the first rank does in `submit`: the same rows meet in the same order."""
        hidden = self._forward(plan)
        if plan.prompt_rows is not None:
            for some in rows_at_once(plan.prompt_rows, self._device):
                logits_of_tiles(hidden[some], self._decoder.logits)
        rows = sample_rows(plan)
        if len(rows.flat):
            self._decoder.logits(self._picked(hidden, rows))

    def prepare_adapter(self, adapter: Adapter) -> Prepared:
        """In the runner's dtype, on its device. Raises ModelFileError for what that dtype cannot hold."""

        def placed(values: Float32) -> Tensor:
            tensor = torch.from_numpy(values).to(device=self._device, dtype=self._dtype)
            if not bool(torch.isfinite(tensor).all()):
                raise ModelFileError(f"an adapter has numbers that {self._info.dtype} cannot hold")
            return tensor

        with torch.inference_mode():
            updates = merged(adapter, self._header)
            return {key: LowRank(placed(update.a), placed(update.b)) for key, update in updates.items()}

    def set_adapter(self, slot: int, prepared: object | None) -> None:
        """`prepared` is what `prepare_adapter` gave; None empties the slot."""
        updates: Prepared = prepared if isinstance(prepared, dict) else {}
        for i, layer in enumerate(self._weights.layers):
            for product, linear in layer.products.items():
                update = updates.get((i, product))
                if update is None:
                    linear.updates.pop(slot, None)
                else:
                    linear.updates[slot] = update

    def _forward(self, plan: StepPlan, between: Callable[[], None] = _go_on) -> Tensor:
        owner = np.repeat(np.arange(plan.num_sequences), np.diff(plan.offsets))
        positions = np.arange(plan.num_tokens) - plan.offsets[owner] + plan.first_positions[owner]
        for pairs in plan.copies:
            self._cache.copy(pairs)
        if plan.loads is not None:
            self._cache.load(plan.loads.blocks[0], np.stack(plan.loads.data))
        attend = self._attention(self._cache, self._attention_spec, plan, positions, self._device)
        token_ids = torch.from_numpy(plan.token_ids.astype(np.int64)).to(self._device)
        where = torch.from_numpy(positions.astype(np.int64)).to(self._device)
        (cos, sin), local = self._turns, self._local_turns
        turns = Turns((cos[where], sin[where]), None if local is None else (local[0][where], local[1][where]))
        adapted = adapted_rows(plan, tile=self._tile)
        return self._decoder.hidden(token_ids, turns, attend, between, adapted)

    def _table(
        self, spec: RopeSpec, num_positions: int, context_length: int, factors: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """cos and sin by position, each (positions, 1, rotated dimensions)."""
        cos, sin = rope_tables(spec, num_positions, context_length, factors)
        return cos.to(self._device, dtype)[:, None], sin.to(self._device, dtype)[:, None]

    def _picked(self, hidden: Tensor, rows: SampleRows) -> Tensor:
        return hidden if len(rows.flat) == len(hidden) else hidden[torch.from_numpy(rows.flat).to(self._device)]

    def _sample(
        self, hidden: Tensor, plan: StepPlan, rows: SampleRows, between: Callable[[], None], *, in_one: bool
    ) -> tuple[Tensor, Tensor]:
        picked = self._picked(hidden, rows)
        num_rows = len(picked)
        parts = []
        for of_head, together in in_parts(rows, num_rows if in_one else _HEAD_ROWS):
            between()
            logits = self._decoder.logits(picked[of_head])
            for part, some in in_parts(together, num_rows if in_one else 1):
                between()
                parts.append(sample(logits[part], plan, some))
        if len(parts) == 1:
            return parts[0]
        token_ids, processed = zip(*parts, strict=True)
        return torch.cat(token_ids), torch.cat(processed)


def _accepted(plan: StepPlan, rows: SampleRows, sampled: Int64) -> list[int]:
    """Indices of sampled rows that count: a row does when all drafts before it are what was sampled there.

    A draft is accepted when the token drawn at its place is the draft itself: the law of plain sampling, and with
    noise keyed by position the very same tokens.
    """
    accepted: list[int] = []
    going = False
    for i, (flat, num_before) in enumerate(zip(rows.flat.tolist(), rows.num_accepted.tolist(), strict=True)):
        going = num_before == 0 or (going and int(plan.token_ids[flat]) == int(sampled[i - 1]))
        if going:
            accepted.append(i)
    return accepted


def _logprobs(done: _Submitted, accepted: list[int]) -> tuple[tuple[TokenLogprob, ...], ...] | None:
    """Per sequence, matching its accepted tokens; empty for those that did not ask. None when nobody did."""
    columns = done.plan.sampling
    if done.logits is None or done.token_ids is None or not (columns.num_logprobs >= 0).any():
        return None
    found = logprobs_of(done.logits, done.token_ids, columns.num_logprobs[done.rows.owners].tolist())
    per_sequence: list[list[TokenLogprob]] = [[] for _ in range(done.plan.num_sequences)]
    for i in accepted:
        value = found[i]
        if value is not None:
            per_sequence[int(done.rows.owners[i])].append(value)
    return tuple(tuple(values) for values in per_sequence)
