"""What counts as a replica's fault, and whether a request may be tried again elsewhere.

A retry is for faults before the answer began, on another replica, once, and within a budget: retries are a share of
all requests, so that a failing fleet is not given more work just because it fails.
"""

from __future__ import annotations

from dataclasses import dataclass

from inferloop.core.clock import Clock
from inferloop.core.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """How one attempt ended. `status` None: no answer began. `error` is HttpError's kind, None without one."""

    status: int | None = None
    error: str | None = None
    answer_began: bool = False
    """A byte of a good answer has arrived; of a stream, it has been passed on."""


def is_replica_fault(outcome: AttemptOutcome) -> bool:
    """A 4xx (429 too) says something about the caller, never about the replica. 503 with a full queue is a fault of
    capacity: worth another replica, so it is in. 501 is what the replicas of this fleet were not started to do."""
    if outcome.error is not None:
        return True
    return outcome.status is not None and outcome.status >= 500 and outcome.status != 501


def may_retry(outcome: AttemptOutcome) -> bool:
    """Only before the answer began. A timeout is not retried: the replica may still be working on it."""
    if outcome.answer_began or outcome.error == "timeout":
        return False
    return is_replica_fault(outcome)


@dataclass(frozen=True, slots=True)
class BudgetConfig:
    """`ratio` of requests may be retries, plus `floor_per_s` so that a quiet service may retry too; at most
    `burst` saved up."""

    ratio: float = 0.1
    floor_per_s: float = 0.5
    burst: float = 10.0


class RetryBudget:
    """A token bucket fed by requests and, slowly, by time. Starts full."""

    def __init__(self, config: BudgetConfig, clock: Clock) -> None:
        self._config, self._clock = config, clock
        self._tokens = config.burst
        self._t_ns = clock.now_ns()

    def deposit(self) -> None:
        """One request was admitted."""
        self._add(self._config.ratio)

    def take(self) -> bool:
        """Spend one retry if there is one."""
        now_ns = self._clock.now_ns()
        self._add((now_ns - self._t_ns) / NS_PER_S * self._config.floor_per_s)
        self._t_ns = now_ns
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def _add(self, tokens: float) -> None:
        self._tokens = min(self._config.burst, self._tokens + tokens)
