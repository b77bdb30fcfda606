"""A runner without tensors, for tests of everything around one: paged memory holds the tokens themselves, and the
answer is a hash of all that is found there. A wrong block, position or rollback gives a wrong answer."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from inferloop.engine.compute.runner import GiveUp, RunnerInfo, never
from inferloop.engine.schedule.step import BlockData, Float64, StepPlan, StepResult, TokenLogprob

HIDDEN_SIZE = 4


def next_token(context: Sequence[int], vocab_size: int) -> int:
    """The one true continuation of a context: a pure function of its ids."""
    return zlib.crc32(np.array(context, np.int32).tobytes()) % vocab_size


def continuation(prompt: Sequence[int], num: int, vocab_size: int) -> list[int]:
    """The `num` tokens that an EchoRunner generates after `prompt`."""
    context = list(prompt)
    for _ in range(num):
        context.append(next_token(context, vocab_size))
    return context[len(prompt) :]


def prompt_logprob(context: Sequence[int], target: int, num_top: int, vocab_size: int) -> TokenLogprob:
    """What an EchoRunner tells about `target` after `context`: a pure function of these ids, without equals."""
    values = -((next_token(context, 1 << 32) + np.arange(vocab_size) * 7919) % (vocab_size * 8191)) / 8192
    best = np.argsort(-values, kind="stable")[:num_top].tolist()
    top = tuple((token, float(values[token])) for token in best)
    return TokenLogprob(float(values[target]), top, rank=int((values > values[target]).sum()) + 1)


def hidden_state(context: Sequence[int]) -> Float64:
    """The "hidden state" of the last token of a context, whole numbers, so that sums are exact."""
    return np.frombuffer(next_token(context, 1 << 32).to_bytes(HIDDEN_SIZE, "little"), np.uint8).astype(np.float64)


class EchoRunner:
    """Reads its context through the block tables only. Sampling parameters are ignored; log-probabilities of sampled
    tokens are 0."""

    def __init__(
        self,
        *,
        vocab_size: int = 97,
        context_length: int = 256,
        block_size: int = 4,
        num_blocks: int = 256,
        num_kv_groups: int = 1,
    ) -> None:
        self._info = RunnerInfo(
            name="echo",
            revision="1",
            device="cpu",
            dtype="int",
            deterministic=True,
            vocab_size=vocab_size,
            context_length=context_length,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_group_windows=(None,) * num_kv_groups,
            block_bytes=num_kv_groups * block_size * np.dtype(np.int64).itemsize,
            block_layout=f"echo 1, {num_kv_groups} x {block_size} int64",
            hidden_size=HIDDEN_SIZE,
            can_give_up=True,
        )
        self._memory = [np.full((num_blocks, block_size), -1, np.int64) for _ in range(num_kv_groups)]
        self._result: StepResult | None = None

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def submit(self, plan: StepPlan, give_up: GiveUp = never) -> None:
        assert self._result is None, "one step at a time"
        offsets, token_ids = [0], list[int]()
        for memory, pairs in zip(self._memory, plan.copies, strict=bool(plan.copies)):
            memory[pairs[:, 1]] = memory[pairs[:, 0]]
        self._load(plan)
        for i in range(plan.num_sequences):
            if give_up():
                self._result = StepResult.of_given_up(plan)
                return
            tokens = plan.token_ids[plan.offsets[i] : plan.offsets[i + 1]].tolist()
            self._write(plan, i, tokens)
            if plan.sample_rows[i] >= 0:
                token_ids += self._sample(plan, i, tokens)
            offsets.append(len(token_ids))
        logprobs = None
        if (plan.sampling.num_logprobs >= 0).any():
            lengths = np.diff(offsets).tolist()
            logprobs = tuple(tuple(TokenLogprob(0.0, ()) for _ in range(length)) for length in lengths)
        self._result = StepResult(
            plan.step_id,
            np.array(offsets, np.int32),
            np.array(token_ids, np.int32),
            logprobs=logprobs,
            saved=tuple(self._save(plan)),
            prompt_logprobs=tuple(self._prompt_logprobs(plan)),
            pooled=self._pooled(plan),
        )

    def wait(self) -> StepResult:
        result, self._result = self._result, None
        assert result is not None, "nothing was submitted"
        return result

    def _load(self, plan: StepPlan) -> None:
        for j, data in enumerate(plan.loads.data if plan.loads else ()):
            assert plan.loads is not None and data.nbytes == self._info.block_bytes, "data of another layout"
            parts = data.view(np.int64).reshape(len(self._memory), -1)
            for memory, blocks, part in zip(self._memory, plan.loads.blocks, parts, strict=True):
                memory[blocks[j]] = part

    def _save(self, plan: StepPlan) -> Iterator[BlockData]:
        for blocks in zip(*plan.saves, strict=True):
            parts = [memory[block] for memory, block in zip(self._memory, blocks, strict=True)]
            yield np.concatenate(parts).view(np.uint8)

    def _write(self, plan: StepPlan, i: int, tokens: list[int]) -> None:
        size = self._info.block_size
        for table, memory in zip(plan.block_tables, self._memory, strict=True):
            for position, token in enumerate(tokens, start=int(plan.first_positions[i])):
                block = table[i, position // size]
                assert block >= 0, "a token without a block"
                memory[block, position % size] = token

    def _sample(self, plan: StepPlan, i: int, tokens: list[int]) -> list[int]:
        """The continuation after the last known token, and on through the drafts as long as they are right."""
        num_drafts = int(plan.num_drafts[i])
        drafts = tokens[len(tokens) - num_drafts :]
        num_context = int(plan.first_positions[i] + plan.sample_rows[i] - plan.offsets[i]) + 1
        sampled: list[int] = []
        for k in range(num_drafts + 1):
            sampled.append(next_token(self._context(plan, i, num_context + k), self._info.vocab_size))
            if k < num_drafts and sampled[-1] != drafts[k]:
                break
        return sampled

    def _prompt_logprobs(self, plan: StepPlan) -> Iterator[TokenLogprob]:
        rows = plan.prompt_rows
        if rows is None:
            return
        for flat, i, target, num_top in zip(rows.flat, rows.owners, rows.targets, rows.num_top, strict=True):
            num_context = int(plan.first_positions[i] + flat - plan.offsets[i]) + 1
            yield prompt_logprob(
                self._context(plan, int(i), num_context), int(target), int(num_top), self._info.vocab_size
            )

    def _pooled(self, plan: StepPlan) -> Float64 | None:
        if plan.pooled is None:
            return None
        sums = []
        for i in plan.pooled.tolist():
            start, num = int(plan.first_positions[i]), int(plan.offsets[i + 1] - plan.offsets[i])
            context = self._context(plan, i, start + num)
            sums.append(sum((hidden_state(context[: start + k + 1]) for k in range(num)), np.zeros(HIDDEN_SIZE)))
        return np.array(sums)

    def _context(self, plan: StepPlan, i: int, num: int) -> list[int]:
        size = self._info.block_size
        positions = np.arange(num)
        found = [
            memory[table[i][positions // size], positions % size].tolist()
            for table, memory in zip(plan.block_tables, self._memory, strict=True)
        ]
        assert all(context == found[0] for context in found), "KV groups disagree"
        return list(found[0])
