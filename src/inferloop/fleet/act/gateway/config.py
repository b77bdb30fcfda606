"""What the gateway needs to know."""

from __future__ import annotations

from dataclasses import dataclass, field

from inferloop.contract.workload import Routing
from inferloop.fleet.decide.retry import BudgetConfig
from inferloop.serve.keys import ApiKeys


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """`upstream_timeout_s` bounds connect plus headers of one attempt (an answer that does not stream has its headers
    only when it is finished). None: no bound. With a `routing`, requests are read and go to the replicas of one of its
    models; without one any replica takes any request, unread. With `keys` callers need one of them, which stays here:
    replicas get the one of their own endpoint, or none."""

    service: str | None = None
    max_body_bytes: int = 16 << 20
    upstream_timeout_s: float | None = 600.0
    retry_after_s: int = 1
    retry_budget: BudgetConfig = field(default_factory=BudgetConfig)
    routing: Routing | None = None
    keys: ApiKeys | None = None
