"""What a bench run is asked for, and the news that it tells while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """`budget_s` is for the whole run; the peak's share is kept for it. `peak_qps` replaces the contract's peak; 0
    leaves the peak out. `num_points` bounds the search. `profile` plays the contract's rate profile, which then sets
    the rate itself."""

    seed: int = 0
    budget_s: float = 240.0
    num_points: int = 12
    num_warmup: int = 4
    num_serial: int = 12  # a median can be certified with 11
    num_burst: int = 32
    peak_qps: float | None = None
    profile: bool = False
    calibrate: bool = True
    fresh_cache: bool = True
    """No part meets what the target's prefix cache holds from before it, where the target has a way to that."""
    as_chat: bool = True
    ignore_eos: bool = True
    request_timeout_s: float = 120.0
    max_warmup_s: float = 10.0
    max_drain_s: float = 30.0
    extra_body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BenchProgress:
    """News of a run. `num_done` of `num_total` requests of the stage; `text` when a stage ended."""

    stage: str
    num_done: int
    num_total: int
    text: str | None = None


Progress = Callable[[BenchProgress], None]
