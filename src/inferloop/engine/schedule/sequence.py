"""One sequence: what was asked for, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from inferloop.core.request import BATCH_PRIORITY, FinishReason, Sampling
from inferloop.engine.schedule.mask import Mask
from inferloop.engine.schedule.radix import Namespace
from inferloop.engine.schedule.step import NO_ADAPTER, Float64, TokenLogprob

NO_SLOT = -1
PRIORITY_LEVEL_MS = 1000
"""How much earlier a request stands in the queue for each level of priority that it is ahead. Waiting therefore makes
up for priority: who is p levels behind is overtaken only by those who come within the next p seconds, so that nobody
starves, and equal priorities are first come, first served."""


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """A request as the scheduler takes it. `seed` is resolved (0 <= seed < 2**64); lower `priority` goes first, from
    BATCH_PRIORITY on it is background work. `arrived_ms` is when it came, on any one clock."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    seed: int = 0
    priority: int = 0
    arrived_ms: int = 0
    sheddable: bool = True
    """May be given up when its first token would come too late."""
    namespace: Namespace = ()
    """Sequences share beginnings only within one namespace: tagged, so that no two kinds of name can collide."""
    mask: Mask | None = None
    """At the state before the first output token; the sequence moves it on."""
    pool: bool = False
    """Sum the last hidden states of the prompt; goes with max_tokens 0."""
    adapter_slot: int = NO_ADAPTER
    """What it goes through in every step, however often it is preempted. `namespace` tells which adapter that is."""


class SequenceUpdate(Struct, frozen=True, gc=False):
    """What one step added to one sequence. An end token that was generated is among `token_ids`; one that generates
    nothing has a single update, without tokens, when its prompt is computed. One is made for every token: a frozen
    dataclass takes fifteen times as long as a Struct."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None
    stop_reason: int | None
    """The stop_token_ids entry that ended it; None for the model's own end token and for a length stop."""
    num_cached_tokens: int
    num_preemptions: int
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """Of the prompt's tokens from the second on; once, in the first update, when asked for."""
    pooled: Float64 | None = None
    """The sum that `pool` asked for, (hidden,)."""


class Sequence:
    """Mutable state, owned by the scheduler.

    `num_computed` positions have their keys and values in the cache; it chases `num_known`, the prompt and output so
    far. Prefill, decode and resuming after preemption differ in nothing but the distance between the two.

    The log-probabilities of the first `num_scored` prompt tokens after the first are known already, and stay so through
    preemption; `pooled` is the sum over all `num_computed` positions, and starts again with them.
    """

    __slots__ = (
        "aborted",
        "background",
        "block_keys",
        "drafts",
        "end_token_ids",
        "max_tokens",
        "num_cached_tokens",
        "num_computed",
        "num_least",
        "num_most",
        "num_preemptions",
        "num_saved",
        "num_scored",
        "order",
        "pooled",
        "prompt_logprobs",
        "seen_counts",
        "slot",
        "spec",
        "token_ids",
    )

    def __init__(self, spec: SequenceSpec, arrival: int, max_tokens: int, eos_token_ids: frozenset[int]) -> None:
        sampling = spec.sampling
        self.spec = spec
        self.background = spec.priority >= BATCH_PRIORITY
        # Smaller goes first. Fixed for life, so a preempted sequence has its old place and any heap of these stays one.
        self.order = (int(self.background), spec.priority * PRIORITY_LEVEL_MS + spec.arrived_ms, arrival)
        self.max_tokens = max_tokens
        num_prompt = len(spec.prompt_token_ids)
        self.num_least, self.num_most = num_prompt + sampling.min_tokens, num_prompt + max_tokens
        """Known tokens, prompt included: up to how many no end token counts, and with how many it has ended."""
        self.end_token_ids = (frozenset() if sampling.ignore_eos else eos_token_ids) | set(sampling.stop_token_ids)
        self.token_ids: list[int] = list(spec.prompt_token_ids)
        self.drafts: tuple[int, ...] = ()
        self.num_computed = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_saved = 0
        """Full blocks that the second tier has been offered."""
        self.block_keys: list[bytes] = []
        self.num_scored = 0
        self.prompt_logprobs: list[TokenLogprob] | None = None if sampling.num_prompt_logprobs is None else []
        self.pooled: Float64 | None = None
        self.slot = NO_SLOT
        self.aborted = False
        penalized = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0
        self.seen_counts: dict[int, int] | None = dict.fromkeys(spec.prompt_token_ids, 0) if penalized else None

    @property
    def num_known(self) -> int:
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.spec.prompt_token_ids)

    @property
    def num_remaining(self) -> int:
        return self.max_tokens - self.num_output

    @property
    def _num_to_score(self) -> int:
        return len(self.spec.prompt_token_ids) - 1

    @property
    def generates(self) -> bool:
        """False: only its prompt is of interest."""
        return self.max_tokens > 0

    @property
    def num_reusable(self) -> int:
        """How many of the known tokens may be taken from the cache. Never the last, whose hidden state is what the next
        one is sampled from, and none whose logits or hidden state are themselves wanted."""
        if self.spec.pool:
            return 0
        missing = self.spec.sampling.num_prompt_logprobs is not None and self.num_scored < self._num_to_score
        return self.num_scored if missing else self.num_known - 1

    @property
    def decoding(self) -> bool:
        """Exactly the newest token waits to be computed."""
        return len(self.token_ids) - self.num_computed == 1

    def to_score(self, num: int) -> range:
        """Positions among the next `num` to compute whose logits tell about a prompt token not known about yet."""
        if self.spec.sampling.num_prompt_logprobs is None:
            return range(0)
        assert self.num_computed <= self.num_scored or self.num_scored == self._num_to_score, "values were skipped"
        return range(self.num_scored, min(self.num_computed + num, self._num_to_score))

    def add_scores(self, values: tuple[TokenLogprob, ...]) -> None:
        """What `to_score` asked for."""
        if values:
            assert self.prompt_logprobs is not None, "values that nobody waits for"
            self.prompt_logprobs.extend(values)
            self.num_scored += len(values)

    def add_pooled(self, values: Float64) -> None:
        self.pooled = values if self.pooled is None else self.pooled + values

    def take_scores(self) -> tuple[TokenLogprob, ...] | None:
        """All of the prompt's values, the first time when they are wanted, else None."""
        found, self.prompt_logprobs = self.prompt_logprobs, None
        return None if found is None else tuple(found)

    def accept(self, sampled: list[int]) -> tuple[int, FinishReason | None, int | None]:
        """Append sampled tokens left to right until one ends the sequence; a stop is seen before the length cap.
        A mask that fails ends it as an error, before either. One that generates nothing has ended with its prompt.

        Returns (how many were kept, finish reason, stop reason).
        """
        spec, token_ids = self.spec, self.token_ids
        if not self.generates:
            return 0, "stop" if spec.pool else "length", None
        for num_kept, token in enumerate(sampled, start=1):
            token_ids.append(token)
            if spec.mask is not None:
                spec.mask.accept([token])
                if spec.mask.failed:
                    return num_kept, "error", None
            if self.seen_counts is not None:
                self.seen_counts[token] = self.seen_counts.get(token, 0) + 1
            if token in self.end_token_ids and len(token_ids) > self.num_least:
                return num_kept, "stop", token if token in spec.sampling.stop_token_ids else None
            if len(token_ids) >= self.num_most:
                return num_kept, "length", None
        return len(sampled), None, None

    def advance(self, sampled: list[int], logprobs: tuple[TokenLogprob, ...]) -> SequenceUpdate:
        """`accept`, told to the outside."""
        num_kept, finish_reason, stop_reason = self.accept(sampled)
        return SequenceUpdate(
            request_id=self.spec.request_id,
            token_ids=tuple(sampled[:num_kept]),
            logprobs=logprobs[:num_kept] if logprobs and self.spec.sampling.num_logprobs is not None else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            prompt_logprobs=None if self.prompt_logprobs is None else self.take_scores(),
            pooled=self.pooled,
        )

    def reset_computed(self) -> None:
        """Forget the cache, keep every token: what preemption by recompute does."""
        self.num_computed = 0
        self.pooled = None
        self.drafts = ()
