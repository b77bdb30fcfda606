"""Time that passes when a test says so, for a load generator in this process."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from inferloop.bench import engine, exchange
from inferloop.bench.client.timer import LoopTimer
from inferloop.core.units import NS_PER_S

SkipAhead = Callable[[float], None]


@pytest.fixture
def skip_ahead(monkeypatch: pytest.MonkeyPatch) -> SkipAhead:
    """skip_ahead(s): by the load generator's clock so much has passed. What it has to heed within the skipped time it
    heeds at its next look, some milliseconds later; limits of hours then hold however slow this machine is."""
    skipped_ns, real = 0, time.monotonic_ns

    def now_ns() -> int:
        return real() + skipped_ns

    def skip(seconds: float) -> None:
        nonlocal skipped_ns
        skipped_ns += round(seconds * NS_PER_S)

    monkeypatch.setattr(time, "monotonic_ns", now_ns)
    monkeypatch.setattr(exchange, "monotonic_ns", now_ns)
    monkeypatch.setattr(engine, "make_timer", LoopTimer)  # the kernel's knows nothing of what was skipped
    return skip
