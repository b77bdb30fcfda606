"""What the engine expects of a queue is learnt from requests that generate; what can never be in it together."""

from __future__ import annotations

import pytest

from inferloop.core.errors import RequestError
from inferloop.engine.roster import ClassLoad, Load, Roster
from inferloop.engine.schedule.policy import ScheduleConfig, check_together
from inferloop.engine.schedule.sequence import SequenceUpdate


def ended(name: str, num_tokens: int) -> SequenceUpdate:
    return SequenceUpdate(name, (1,) * num_tokens, None, "length", None, 0, 0)


def test_prompts_that_are_only_scored_or_embedded_say_nothing_about_answers() -> None:
    roster = Roster()
    roster.add("waits", 10, 1000, background=False)
    before = roster.load().foreground.output_tokens
    for i in range(50):
        roster.add(f"scored {i}", 10, 0, background=False)
        roster.advance(ended(f"scored {i}", 0), 0)
    assert roster.load().foreground.output_tokens == before
    for i in range(50):
        roster.add(f"short {i}", 10, 1000, background=False)
        roster.advance(ended(f"short {i}", 3), 0)
    assert roster.load().foreground.output_tokens < before / 4


@pytest.mark.parametrize("max_waiting_tokens", [1, 9, 10, 20, 29, 30, 1000])
@pytest.mark.parametrize("max_waiting", [0, 1, 3])
@pytest.mark.parametrize("n", range(1, 8))
def test_what_never_fits_together_is_what_an_idle_engine_refuses_at_its_best(
    n: int, max_waiting: int, max_waiting_tokens: int
) -> None:
    """At its best every choice runs as soon as it comes, while there is a place."""
    config = ScheduleConfig(
        vocab_size=9, context_length=64, block_size=4, num_blocks=99,
        max_sequences=2, max_waiting=max_waiting, max_waiting_tokens=max_waiting_tokens,
    )  # fmt: skip
    load, refused = Load(ClassLoad(), ClassLoad()), False
    for i in range(n):
        refused |= load.refuses(config, 10, background=False) is not None
        load.foreground.num_present += 1
        load.foreground.prompt_tokens += 10 if i >= config.max_sequences else 0
    if refused:
        with pytest.raises(RequestError) as caught:
            check_together(config, 10, n, n)
        assert caught.value.param == "n"
    else:
        check_together(config, 10, n, n)
