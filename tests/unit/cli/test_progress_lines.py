"""Progress in logs: by the clock that is given, on stderr alone."""

from __future__ import annotations

import pytest

from inferloop.cli.models import model_progress
from inferloop.cli.progress import EVERY_S, ProgressLines
from inferloop.core.clock import VirtualClock
from inferloop.core.units import MIB


def test_a_line_every_few_seconds_and_one_at_the_end() -> None:
    clock, lines = VirtualClock(), list[str]()
    tell = ProgressLines(clock, lines.append)
    for second in range(10 * EVERY_S):  # four calls a second
        for quarter in range(4):
            tell("pack", (4 * second + quarter + 1) * MIB, 40 * EVERY_S * MIB)
            clock.advance(250_000_000)
    assert len(lines) == 10
    assert lines[0] == f"pack: {4 * EVERY_S + 1:.1f} MiB of 120.0 MiB"
    assert lines[-1] == "pack: 120.0 MiB of 120.0 MiB"
    tell("pack", 40 * EVERY_S * MIB, 40 * EVERY_S * MIB)
    assert len(lines) == 10


def test_what_is_done_soon_tells_nothing() -> None:
    clock, lines = VirtualClock(), list[str]()
    tell = ProgressLines(clock, lines.append)
    for stage in ("hash", "load"):
        for done in range(11):
            tell(stage, done, 10)
            clock.advance(EVERY_S * 10**9 // 20)
    assert lines == []


def test_stdout_stays_clean(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferloop.cli.progress.EVERY_S", 0)
    with model_progress() as progress:
        progress("load", 1, 2)
        progress("load", 2, 2)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "load: 1 B of 2 B\nload: 2 B of 2 B\n")
