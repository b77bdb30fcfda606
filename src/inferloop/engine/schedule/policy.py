"""The choices of the scheduler: what may be asked for, who goes first, who is admitted, who gives way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from inferloop.core.errors import ContextLengthError, RequestError
from inferloop.engine.schedule.sequence import Sequence, SequenceSpec

BACKGROUND_EVERY = 20
"""One step in so many takes background work along while others are served: a row or a small chunk, some percent of a
step, and twenty steps are well under the seconds after which a batch job's caller would take it for dead."""


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """Limits of one engine. `max_step_tokens` is the token budget of a step, `max_sequences` the most that run
    together, `max_waiting` how many more may queue, with prompts of `max_waiting_tokens` in all."""

    vocab_size: int
    context_length: int
    block_size: int
    num_blocks: int
    num_kv_groups: int = 1
    eos_token_ids: tuple[int, ...] = ()
    max_step_tokens: int = 256
    max_sequences: int = 32
    max_waiting: int = 256
    max_waiting_tokens: int = 1 << 30
    share_prefixes: bool = True
    """Keep what finished sequences computed, and let those that begin alike start from it."""

    @property
    def max_total_tokens(self) -> int:
        """The longest sequence that can finish alone. Its last token is sampled but never computed, so it needs
        no place in the KV memory."""
        return min(self.context_length, self.num_blocks * self.block_size + 1)

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that can be computed whole, which is what a sequence without output needs."""
        return min(self.context_length, self.num_blocks * self.block_size)


def resolve_max_tokens(config: ScheduleConfig, spec: SequenceSpec) -> int:
    """How many tokens the request may generate: what it asked for, or what remains.

    Raises RequestError for ids outside the vocabulary and impossible counts, ContextLengthError when prompt and
    output can never fit. Reads the config only, so any thread may call it.
    """
    sampling, num_prompt = spec.sampling, len(spec.prompt_token_ids)
    assert not spec.pool or sampling.max_tokens == 0, "what is pooled generates nothing"
    if not num_prompt:
        raise RequestError("the prompt has no tokens", param="prompt")
    for param, ids in (
        ("prompt", spec.prompt_token_ids),
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", tuple(token for token, _ in sampling.logit_bias)),
    ):
        if ids and not (min(ids) >= 0 and max(ids) < config.vocab_size):
            wrong = next(token for token in ids if not 0 <= token < config.vocab_size)
            raise RequestError(f"token id {wrong} is not in the vocabulary of {config.vocab_size}", param=param)
    if sampling.max_tokens is not None and sampling.max_tokens < 0:
        raise RequestError(f"max_tokens must not be negative, got {sampling.max_tokens}", param="max_tokens")
    asked = 1 if sampling.max_tokens is None or sampling.cut_max_tokens else sampling.max_tokens
    limit = config.max_total_tokens if asked else config.max_prompt_tokens
    if num_prompt + asked > limit:
        what = "the context length" if limit == config.context_length else "what the KV memory can hold"
        output = f" and max_tokens {asked}" if asked == sampling.max_tokens else " and one token of output"
        exceed = f"{output} exceed" if asked else " exceeds"
        raise ContextLengthError(
            f"a prompt of {num_prompt} tokens{exceed} {what}, {limit} tokens",
            param="prompt" if num_prompt >= limit else "max_tokens",
        )
    remaining = limit - num_prompt
    return remaining if sampling.max_tokens is None else min(sampling.max_tokens, remaining)


def check_together(config: ScheduleConfig, num_prompt_tokens: int, n: int, num_choices: int) -> None:
    """Raise RequestError for a request whose choices can never be here together, were the engine ever so idle:
    `num_choices` in all, `n` of them of one prompt of `num_prompt_tokens`. Reads the config only, so any thread may
    call it."""
    running = config.max_sequences
    if num_choices > running + config.max_waiting:
        raise RequestError(
            f"{num_choices} choices never fit together into a server that runs {running} and queues "
            f"{config.max_waiting} more",
            param="n" if n > 1 else "prompt",
        )
    num_waiting = n - running
    if num_waiting > 1 and num_waiting * num_prompt_tokens > config.max_waiting_tokens:
        raise RequestError(
            f"n = {n} choices of a prompt of {num_prompt_tokens} tokens never fit together into a server that runs "
            f"{running} and queues prompts of {config.max_waiting_tokens} tokens",
            param="n",
        )


def default_waiting_tokens(context_length: int, num_kv_tokens: int) -> int:
    """How many prompt tokens may queue when nobody says: what fills the KV memory sixteen times over. More would wait
    for so many generations of the batch that whoever asked is gone; one whole context always fits."""
    return max(context_length, 16 * num_kv_tokens)


def num_drafts_allowed(sequence: Sequence, budget: int) -> int:
    """Within the budget, short of max_tokens, and not across min_tokens: a step has one set of forbidden ids. None
    under a mask, which is for one position."""
    if sequence.spec.mask is not None:
        return 0
    allowed = max(0, min(budget, sequence.num_remaining - 1))
    num_forced = sequence.spec.sampling.min_tokens - sequence.num_output
    return min(allowed, num_forced - 1) if num_forced > 0 else allowed


def choose_victim(running: Iterable[Sequence], needy: Sequence, planned: set[int]) -> Sequence | None:
    """Who gives its blocks to `needy`: the last in order among those behind it that this step does not compute yet.

    `planned` holds the slots already in the step. None: nobody; `needy` sits this step out and keeps its blocks.
    """
    behind = [s for s in running if s.order > needy.order and s.slot not in planned]
    return max(behind, key=lambda s: s.order, default=None)


def may_admit(num_missing: int, num_free: int, num_running: int) -> bool:
    """A sequence enters only with room for all its known tokens and one block of growth for each that runs, lest the
    next step must preempt what this one admitted."""
    return num_missing + num_running <= num_free


def has_room(config: ScheduleConfig, num_present: int, num_background: int, background: bool, num: int = 1) -> bool:
    """Whether `num` more may run or wait. Background work counts for itself only: however much of it is queued, nobody
    else is turned away for it."""
    num_before = num_present if background else num_present - num_background
    return num_before + num <= config.max_sequences + config.max_waiting
