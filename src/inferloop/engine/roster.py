"""What the engine knows of each request beyond its sequence: when what happened, what it counts for in the queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from inferloop.core.request import FinishReason
from inferloop.engine.schedule.outline import StepChanges
from inferloop.engine.schedule.policy import ScheduleConfig, has_room
from inferloop.engine.schedule.sequence import SequenceUpdate
from inferloop.engine.schedule.step import Float64, TokenLogprob

EndReason = FinishReason | Literal["shed"]
"""How the engine ends a request; "shed": before its first token, which would have come too late."""
_FIRST_GUESS_OUTPUT = 128.0
"""Tokens of an answer, until some have ended."""


class TokenUpdate(Struct, frozen=True, gc=False):
    """What one step gave one request. The last update of a request, and only that one, has a finish reason. A Struct,
    as is SequenceUpdate."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    t_ns: int
    finish_reason: EndReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    t_scheduled_ns: int | None = None
    """When it first entered a step; None when it never did."""
    num_preemptions: int = 0
    preempted_ns: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """Of the prompt's tokens from the second on; in the first update only, when asked for."""
    pooled: Float64 | None = None
    """The sum of the prompt's last hidden states, (hidden,); in the only update of a request that asked for it."""


@dataclass(slots=True)
class _Member:
    num_prompt_tokens: int
    max_tokens: int
    background: bool
    num_output_tokens: int = 0
    t_scheduled_ns: int | None = None
    t_preempted_ns: int | None = None
    preempted_ns: int = 0
    num_preemptions: int = 0
    started: bool = False


@dataclass(slots=True)
class ClassLoad:
    """Who is here of one class, and the tokens of those that wait: of their prompts, and what they will probably
    generate."""

    num_present: int = 0
    num_waiting: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Who is here at one moment."""

    foreground: ClassLoad
    background: ClassLoad

    @property
    def queue_tokens(self) -> int:
        """Of all prompts that wait."""
        return self.foreground.prompt_tokens + self.background.prompt_tokens

    def ahead_of(self, background: bool) -> tuple[int, int]:
        """Prompt and output tokens that wait before a newcomer. Background work is in nobody's way but its own."""
        ahead = (self.foreground, self.background) if background else (self.foreground,)
        return sum(one.prompt_tokens for one in ahead), sum(one.output_tokens for one in ahead)

    def refuses(self, config: ScheduleConfig, num_tokens: int, background: bool, num: int = 1) -> str | None:
        """Why `num` requests with prompts of `num_tokens` altogether have no place any more: "queue_full" or
        "queue_tokens"; None when they have one. An empty queue takes prompts of any length."""
        num_background = self.background.num_present
        if not has_room(config, self.foreground.num_present + num_background, num_background, background, num):
            return "queue_full"
        before, _ = self.ahead_of(background)
        if before and before + num_tokens > config.max_waiting_tokens:
            return "queue_tokens"
        return None


class Roster:
    """Every request from its submission to its last update. Has no lock of its own."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._likely_output = _FIRST_GUESS_OUTPUT
        self.num_prompt_tokens = self.num_output_tokens = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._members

    @property
    def request_ids(self) -> list[str]:
        return list(self._members)

    def add(self, request_id: str, num_prompt_tokens: int, max_tokens: int, *, background: bool) -> None:
        """`max_tokens`: how many it may generate."""
        self._members[request_id] = _Member(num_prompt_tokens, max_tokens, background)

    def load(self) -> Load:
        """Counted anew, so that it cannot drift, in one pass: a flood of requests asks for it again and again."""
        load, likely_output = Load(ClassLoad(), ClassLoad()), int(self._likely_output)
        for member in self._members.values():
            one = load.background if member.background else load.foreground
            one.num_present += 1
            if member.t_scheduled_ns is None or member.t_preempted_ns is not None:
                one.num_waiting += 1
                one.prompt_tokens += member.num_prompt_tokens
                one.output_tokens += min(member.max_tokens, likely_output)
        return load

    def note(self, changes: StepChanges, now_ns: int) -> None:
        """Stamp those that a step let in or put back."""
        for request_id in changes.preempted:
            member = self._members[request_id]
            member.t_preempted_ns = now_ns
            member.num_preemptions += 1
        for request_id in changes.admitted:
            member = self._members[request_id]
            if member.t_scheduled_ns is None:
                member.t_scheduled_ns = now_ns
            if member.t_preempted_ns is not None:
                member.preempted_ns += now_ns - member.t_preempted_ns
                member.t_preempted_ns = None

    def advance(self, update: SequenceUpdate, t_ns: int) -> TokenUpdate:
        """Count what a step gave one request, which leaves when that was the last."""
        member = self._members[update.request_id]
        if not member.started:
            member.started = True
            self.num_prompt_tokens += member.num_prompt_tokens
        member.num_output_tokens += len(update.token_ids)
        self.num_output_tokens += len(update.token_ids)
        if update.finish_reason is not None:
            del self._members[update.request_id]
            if member.max_tokens:  # of those that generate at all
                self._likely_output += 0.1 * (member.num_output_tokens - self._likely_output)
        return TokenUpdate(
            request_id=update.request_id,
            token_ids=update.token_ids,
            logprobs=update.logprobs,
            t_ns=t_ns,
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason,
            num_cached_tokens=update.num_cached_tokens,
            t_scheduled_ns=member.t_scheduled_ns,
            num_preemptions=update.num_preemptions,
            preempted_ns=member.preempted_ns,
            prompt_logprobs=update.prompt_logprobs,
            pooled=update.pooled,
        )

    def end(self, request_id: str, reason: EndReason, t_ns: int) -> TokenUpdate:
        """The last update of one that ends for another reason than its tokens."""
        member = self._members.pop(request_id)
        waited_ns = t_ns - member.t_preempted_ns if member.t_preempted_ns is not None else 0
        return TokenUpdate(
            request_id=request_id,
            token_ids=(),
            logprobs=None,
            t_ns=t_ns,
            finish_reason=reason,
            t_scheduled_ns=member.t_scheduled_ns,
            num_preemptions=member.num_preemptions,
            preempted_ns=member.preempted_ns + waited_ns,
        )
