"""Asks the replicas, of one model where there are several: a lease while one works, and a second one after a fault."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from inferloop.core.clock import Clock
from inferloop.fleet.act.gateway.account import Hop
from inferloop.fleet.act.gateway.answers import Answer, error_answer
from inferloop.fleet.act.gateway.config import GatewayConfig
from inferloop.fleet.act.gateway.metrics import GatewayMetrics
from inferloop.fleet.act.gateway.upstream import Failed, Streaming, Upstream, UpstreamRequest, attempt, told_identity
from inferloop.fleet.decide.retry import RetryBudget, is_replica_fault, may_retry
from inferloop.fleet.decide.router import Choice, Router

log = logging.getLogger(__name__)
_MAX_ATTEMPTS = 2
_REFUSALS = {"no_replica_ready": "no replica is ready", "saturated": "every replica is at its limit"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What came of it. A stream has `upstream`, whose lease is held while the context of `Asker.ask` lasts. A refusal
    means that no replica was asked at all."""

    result: Answer | Streaming | Failed | Choice
    upstream: Upstream | None = None


class Asker:
    """Shares `router` and `upstreams` with the gateway. `on_fault(replica_id, why)` is told of connections that a
    replica refused or broke."""

    def __init__(
        self,
        router: Router,
        upstreams: Mapping[str, Upstream],
        config: GatewayConfig,
        metrics: GatewayMetrics,
        clock: Clock,
        on_fault: Callable[[str, str], None] | None,
    ) -> None:
        self._router, self._upstreams, self._config = router, upstreams, config
        self._metrics, self._clock, self._on_fault = metrics, clock, on_fault
        self._budget = RetryBudget(config.retry_budget, clock)

    @contextlib.asynccontextmanager
    async def ask(self, request: UpstreamRequest, hop: Hop) -> AsyncIterator[Asked]:
        """Ask up to two replicas of the hop's model and keep the hop up to date, also when the caller leaves."""
        self._budget.deposit()
        failed: Failed | None = None
        tried: list[str] = []
        try:
            while len(tried) < _MAX_ATTEMPTS:
                lease = self._router.admit(exclude=tried, model=hop.model)
                if isinstance(lease, Choice):
                    break
                with lease:
                    tried.append(lease.replica_id)
                    hop.replica, hop.why, hop.num_retries = lease.replica_id, lease.why, len(tried) - 1
                    upstream = self._upstreams[lease.replica_id]
                    result = await attempt(upstream, request)
                    hop.identity_digest = told_identity(result)
                    if isinstance(result, Streaming):
                        hop.status = 200
                        yield Asked(result, upstream)
                        return
                if isinstance(result, Answer):
                    hop.status = result.status
                    yield Asked(result)
                    return
                failed = result
                self.note_fault(lease.replica_id, failed)
                if len(tried) < _MAX_ATTEMPTS and may_retry(failed.outcome) and self._budget.take():
                    self._metrics.retries.inc()
                    continue
                break
            if failed is None:
                assert isinstance(lease, Choice) and lease.refusal is not None
                hop.error_class = "overloaded"
                self._metrics.refusals.labels(lease.refusal).inc()
                yield Asked(lease)
                return
            hop.status, hop.error_class = failed.outcome.status, failed.outcome.error or "http_5xx"
            yield Asked(failed)
        finally:
            hop.t_end_ns = self._clock.now_ns()

    def note_fault(self, replica_id: str, failed: Failed) -> None:
        if not is_replica_fault(failed.outcome):
            return
        kind = failed.outcome.error or "http_5xx"
        self._metrics.faults.labels(replica_id, kind).inc()
        log.warning("replica %s: %s", replica_id, failed.message)
        if self._on_fault is not None and failed.outcome.error in ("connect", "truncated", "protocol"):
            self._on_fault(replica_id, failed.message)


def refusal_answer(reason: str, retry_after_s: int, model: str | None = None) -> Answer:
    of = f" of model {model}" if model is not None else ""
    text = _REFUSALS[reason].replace("replica", f"replica{of}")
    return error_answer(503, f"{text}; try again", reason, retry_after_s=retry_after_s)


def failure_answer(failed: Failed, retry_after_s: int) -> Answer:
    """The replica's own 5xx, else what became of it."""
    if failed.answer is not None:
        return failed.answer
    if failed.outcome.error == "connect":
        text = f"no replica can be reached: {failed.message}"
        return error_answer(503, text, "replica_unreachable", retry_after_s=retry_after_s)
    if failed.outcome.error == "timeout":
        return error_answer(504, f"the replica did not answer in time: {failed.message}", "replica_timeout")
    return error_answer(502, f"the replica failed before its answer was complete: {failed.message}", "replica_failed")
