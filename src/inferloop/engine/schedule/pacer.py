"""How long the next step may take, and who waits in vain. Decisions on values; the caller has the clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from inferloop.engine.schedule.pace import StepLimits, StepTime, StepTimeFit, TimeLimit
from inferloop.engine.schedule.step import StepPlan

BACKGROUND_STEP_MS = 25.0
"""A step of background work alone, while others may come any moment: about what one of them then waits for it at most,
and little beside a time to first token."""
_BACKGROUND_FILL = 1.25
"""Where an empty step takes as long already, one of so many times that is no great harm, and far more than one row."""
FOREGROUND_MEMORY_MS = 5000
"""Who asked within this time is taken to ask again: longer than an agent pauses between two calls of a burst."""
_BACKGROUND_SHARE = 0.25
"""A step of background work that can be given up takes this share of the time that it had between two others at the
last: what is given up is done again, and longer steps would hardly ever come to their end."""
MAX_RETRY_AFTER_S = 60.0
_NUM_PREFILLED_TO_KNOW = 256


@dataclass(frozen=True, slots=True)
class Waiting:
    """One of those who wait, as far as lateness goes."""

    request_id: str
    arrived_ms: int
    num_tokens: int
    """Of its prompt."""
    sheddable: bool = True


class Pacer:
    """Owned by the engine's thread; `time` may be read on any other.

    `tpot_objective_ms` None: no step is shortened for the sake of those that decode. `bounds_background`: no step can
    be given up for the sake of those that come, so those of background work are kept short; otherwise they are as long
    as they can be without being given up again and again.
    """

    def __init__(
        self,
        *,
        max_step_tokens: int,
        max_sequences: int,
        tpot_objective_ms: float | None = None,
        bounds_background: bool = True,
    ) -> None:
        self.time = StepTime()
        self._fit = StepTimeFit(self.time)
        self._max_step_tokens, self._max_sequences = max_step_tokens, max_sequences
        self._tpot_objective_ms = tpot_objective_ms
        self._bounds_background = bounds_background
        self._t_foreground_ms: int | None = None
        self._in_background = False
        self._gap_ms: int | None = None
        """How long background work had the machine to itself before somebody came, at the last."""
        self._num_prefilled = 0
        self.num_decodes = 0
        """Rows that decoded in the step before."""

    @property
    def knows(self) -> bool:
        """Whether enough was measured to hold a prompt's length against it."""
        return self._num_prefilled >= _NUM_PREFILLED_TO_KNOW

    def limits(self, now_ms: int, has_foreground: bool) -> StepLimits:
        """Of the step that is about to be planned."""
        if has_foreground:
            if self._in_background and self._t_foreground_ms is not None:
                self._gap_ms = now_ms - self._t_foreground_ms
            self._t_foreground_ms = now_ms
        self._in_background = not has_foreground
        objective, background_ms = self._tpot_objective_ms, self._background_ms(now_ms)
        return StepLimits(
            # short of it by what a step usually misses its estimate, lest every other one misses the objective
            foreground=None if objective is None else TimeLimit(objective / (1 + self._fit.noise), self.time),
            background=None if background_ms is None else TimeLimit(background_ms, self.time),
        )

    def _background_ms(self, now_ms: int) -> float | None:
        if self._t_foreground_ms is None or now_ms - self._t_foreground_ms >= FOREGROUND_MEMORY_MS:
            return None
        least = max(BACKGROUND_STEP_MS, self.time.fixed_ms * _BACKGROUND_FILL)
        if self._bounds_background:
            return least
        return None if self._gap_ms is None else max(least, self._gap_ms * _BACKGROUND_SHARE)

    def observe(self, plan: StepPlan, ms: float) -> None:
        """Learn from a step. Stopped clocks teach nothing, nor does a step that waited for blocks from elsewhere."""
        self.num_decodes = num_decoding(plan)
        if ms > 0 and plan.loads is None:
            num_prefill = plan.num_tokens - self.num_decodes
            self._num_prefilled += num_prefill
            self._fit.observe(num_prefill, self.num_decodes, ms)
            self.time = self._fit.time

    def retry_after_s(self, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """When what waits now will be through: its tokens at the measured speed. 1 to MAX_RETRY_AFTER_S seconds."""
        num_steps = max(num_prompt_tokens / self._max_step_tokens, num_output_tokens / self._max_sequences)
        time = self.time
        ms = num_steps * time.fixed_ms + num_prompt_tokens * time.per_prefill_ms
        return min(max(1.0, (ms + num_output_tokens * time.per_decode_ms) / 1000), MAX_RETRY_AFTER_S)

    def prefill_ms(self, num_tokens: int, num_decodes: int, limits: StepLimits) -> float:
        """How long a prompt of which `num_tokens` must be computed takes beside `num_decodes` rows."""
        room = min(max(1, self._max_step_tokens - num_decodes), limits.num_prefill(False, num_decodes))
        num_steps = math.ceil(num_tokens / room)
        return num_steps * self.time.predict(0, num_decodes) + num_tokens * self.time.per_prefill_ms


def num_decoding(plan: StepPlan) -> int:
    """Sequences of the plan with one token beside their drafts."""
    if plan.num_tokens == plan.num_sequences:  # each has one at least
        return plan.num_sequences
    return int((plan.offsets[1:] - plan.offsets[:-1] - plan.num_drafts == 1).sum())


def late_ones(
    waiting: Iterable[Waiting],
    first_ms: Callable[[int], float],
    num_uncached: Callable[[str], int],
    *,
    now_ms: int,
    max_ttft_ms: float,
    share_uncached: float,
) -> list[str]:
    """Which of the sheddable that wait (all in order) can no longer have a first token within `max_ttft_ms` of arrival,
    even if nothing but prompts, those ahead and their own, is waited for. Those behind one that is given up no longer
    wait for it. `first_ms(n)` is how long n tokens of prompts take. How many of a prompt must be computed is guessed by
    `share_uncached`; nobody is given up for a guess: `num_uncached`, which is slow, says it exactly."""
    late, num_ahead = list[str](), 0
    for one in waiting:
        left_ms = max_ttft_ms - (now_ms - one.arrived_ms)
        num = math.ceil(one.num_tokens * share_uncached)
        if one.sheddable and first_ms(num_ahead + num) > left_ms:
            num = num_uncached(one.request_id)
            if first_ms(num_ahead + num) > left_ms:
                late.append(one.request_id)
                continue
        num_ahead += num
    return late
