"""A busy machine is told, a quiet one is not."""

from __future__ import annotations

from inferloop.bench.host import busy_note, busy_percent


def test_only_a_busy_machine_is_told() -> None:
    assert busy_note(3.0) is None
    note = busy_note(85.2)
    assert note is not None
    assert "85 % busy" in note


async def test_it_is_a_percentage() -> None:
    assert 0.0 <= await busy_percent() <= 100.0
