"""What is known of one request while it runs, and the one event that it becomes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from inferloop.contract.workload import Price
from inferloop.core.ids import TraceContext, new_id
from inferloop.fleet.act.gateway.answers import RawHeaders
from inferloop.records.event import GatewayEvent, HopEvent


@dataclass(frozen=True, slots=True)
class Tokens:
    """What an answer says it took. `num_cached` of the `num_input` came from the prefix cache."""

    num_input: int
    num_cached: int
    num_output: int


@dataclass(slots=True)
class Hop:
    """One model asked. Without routing there is one hop, of no model, in the span of the request itself."""

    trace: TraceContext
    t_start_ns: int
    model: str | None = None
    route: str | None = None
    price: Price | None = None
    t_end_ns: int | None = None
    replica: str | None = None
    why: str | None = None
    identity_digest: str | None = None
    num_retries: int = 0
    status: int | None = None
    error_class: str | None = None
    failed_checks: tuple[str, ...] = ()
    tokens: Tokens | None = None

    @property
    def cost_usd(self) -> float | None:
        if self.price is None or self.tokens is None:
            return None
        return self.price.usd(self.tokens.num_input, self.tokens.num_cached, self.tokens.num_output)


@dataclass(slots=True)
class Account:
    """Mutated by the task that serves the request."""

    request_id: str
    trace: TraceContext
    t_in_ns: int
    t_wall_ns: int
    traffic_class: str | None = None
    status: int | None = None
    t_first_byte_ns: int | None = None
    hops: list[Hop] = field(default_factory=list)
    answered_by: Hop | None = None
    """Whose answer is delivered; until that is known, the last one asked."""
    admission: str = "accepted"
    missed: str | None = None
    """Why an answer that failed its checks is delivered although there was another model to ask."""
    error_class: str | None = None
    answered: bool = False
    num_events: int | None = None
    """Events passed on so far, where their type and number matter; see error_event."""

    def begin_hop(self, now_ns: int, model: str | None, route: str | None, price: Price | None) -> Hop:
        """A hop to a model has a span of its own, whose parent is the request's."""
        trace = self.trace
        if model is not None:
            trace = TraceContext(trace.trace_id, os.urandom(8).hex(), trace.span_id, trace.sampled)
        hop = Hop(trace, now_ns, model, route, price)
        self.hops.append(hop)
        self.answered_by = hop
        return hop

    def headers(self) -> RawHeaders:
        """What the gateway adds to every answer."""
        headers = [(b"x-request-id", self.request_id.encode())]
        by = self.answered_by
        if by is not None and by.replica is not None:
            headers.append((b"x-inferloop-replica", by.replica.encode()))
        if by is None or by.model is None:
            return headers
        headers += [(b"x-inferloop-model", by.model.encode()), (b"x-inferloop-hops", str(len(self.hops)).encode())]
        if failed := ",".join(dict.fromkeys(name for hop in self.hops for name in hop.failed_checks)):
            headers.append((b"x-inferloop-failed-checks", failed.encode()))
        if self.missed is not None:
            headers.append((b"x-inferloop-escalation-missed", self.missed.encode()))
        return headers

    def event(self, service: str | None, now_ns: int) -> GatewayEvent:
        by = self.answered_by
        hops = tuple(self._hop_event(hop, now_ns) for hop in self.hops if hop.model is not None)
        costs = [hop.cost_usd for hop in hops if hop.cost_usd is not None]
        return GatewayEvent(
            event_id=new_id("evt"),
            trace_id=self.trace.trace_id,
            span_id=self.trace.span_id,
            parent_id=self.trace.parent_span_id,
            request_id=self.request_id,
            t_router_in_ns=self.t_in_ns,
            t_wall_ns=self.t_wall_ns,
            status=self.status,
            t_first_byte_ns=self.t_first_byte_ns,
            t_last_byte_ns=now_ns if self.t_first_byte_ns is not None else None,
            service=service,
            traffic_class=self.traffic_class,
            model=by.model if by else None,
            replica=by.replica if by else None,
            identity_digest=by.identity_digest if by else None,
            why=by.why if by else None,
            num_retries=sum(hop.num_retries for hop in self.hops),
            admission=self.admission,
            error_class=self.error_class,
            hops=hops,
            escalation_missed=self.missed,
            cost_usd=sum(costs) if costs else None,
        )

    def _hop_event(self, hop: Hop, now_ns: int) -> HopEvent:
        assert hop.model is not None
        cut = self.error_class if hop.status is None and hop.error_class is None else hop.error_class
        tokens = hop.tokens
        return HopEvent(
            model=hop.model,
            route=hop.route or "",
            span_id=hop.trace.span_id,
            parent_id=self.trace.span_id,
            t_start_ns=hop.t_start_ns,
            t_end_ns=now_ns if hop.t_end_ns is None else hop.t_end_ns,
            replica=hop.replica,
            identity_digest=hop.identity_digest,
            why=hop.why,
            num_retries=hop.num_retries,
            status=hop.status,
            error_class=cut,
            failed_checks=hop.failed_checks,
            delivered=hop is self.answered_by and self.status is not None,
            num_input_tokens=tokens.num_input if tokens else None,
            num_cached_tokens=tokens.num_cached if tokens else None,
            num_output_tokens=tokens.num_output if tokens else None,
            cost_usd=hop.cost_usd,
        )
