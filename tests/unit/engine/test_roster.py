"""What the engine expects of a queue is learnt from requests that generate."""

from __future__ import annotations

from inferloop.engine.roster import Roster
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
