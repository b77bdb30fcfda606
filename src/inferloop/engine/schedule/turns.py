"""When background work gets a little further although others are served."""

from __future__ import annotations

from collections.abc import Callable

from inferloop.engine.schedule.outline import Outline
from inferloop.engine.schedule.pace import MIN_PREFILL_TOKENS
from inferloop.engine.schedule.policy import BACKGROUND_EVERY
from inferloop.engine.schedule.sequence import Sequence


class BackgroundTurns:
    """Counts the steps in which background work pauses. In every BACKGROUND_EVERY-th the first of those that pause gets
    a little further, or one is let in when none runs. It takes nothing that another wants, neither budget nor blocks
    nor time, so its turn may be lost."""

    def __init__(
        self, make_room: Callable[[Sequence, Outline], bool], let_in: Callable[[Sequence, Outline], bool]
    ) -> None:
        """`make_room` finds blocks for what a sequence knows, `let_in` admits the head of the queue if it may enter."""
        self._make_room, self._let_in = make_room, let_in
        self._num_paused = 0

    @property
    def num_before(self) -> int:
        """How many steps come before the next turn."""
        return BACKGROUND_EVERY - 1 - self._num_paused

    def reset(self) -> None:
        """Nobody pauses."""
        self._num_paused = 0

    def plan(self, step: Outline, paused: Sequence | None, head: Sequence | None) -> None:
        """`step` is complete but for this; `paused` is the first that pauses, `head` the first that waits."""
        self._num_paused = (self._num_paused + 1) % BACKGROUND_EVERY
        step.prefill = min(step.prefill, MIN_PREFILL_TOKENS)
        if self._num_paused or step.preempted or not step.budget or not step.prefill:
            return
        if paused is not None and paused.decoding:
            paused.drafts = ()
            if self._make_room(paused, step):
                step.decode(paused)
        elif paused is not None:
            step.extend(paused)
        elif head is not None and head.background:
            self._let_in(head, step)
