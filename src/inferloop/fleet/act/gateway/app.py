"""The gateway as a raw ASGI application: admit, choose, forward, relay, account.

Every route to a replica goes through `_serve` and holds a Lease while the replica works, so load is counted on all of
them alike. Request bodies are never parsed; answers are relayed as bytes. What streams is told by the replica's
content type.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from inferloop.backends.http import HttpClient, HttpError
from inferloop.core.clock import Clock, RealClock
from inferloop.core.ids import TraceContext, accept_request_id, new_id
from inferloop.core.units import NS_PER_S
from inferloop.fleet.act.gateway.answers import (
    Answer,
    Message,
    RawHeaders,
    Receive,
    Send,
    error_answer,
    error_event,
    send_answer,
)
from inferloop.fleet.act.gateway.cancel import cancel_everywhere, is_cancel
from inferloop.fleet.act.gateway.disconnect import UntilDisconnect
from inferloop.fleet.act.gateway.frames import FrameBuffer, count_events
from inferloop.fleet.act.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from inferloop.fleet.act.gateway.upstream import (
    Failed,
    Streaming,
    Upstream,
    UpstreamRequest,
    attempt,
    forwarded_headers,
    told_identity,
)
from inferloop.fleet.decide.retry import AttemptOutcome, BudgetConfig, RetryBudget, is_replica_fault, may_retry
from inferloop.fleet.decide.router import Choice, Router
from inferloop.records.event import GatewayEvent
from inferloop.records.sink import Sink

log = logging.getLogger(__name__)
_METHODS = ("GET", "POST", "DELETE")
_FORWARDED_PATHS = ("/tokenize", "/detokenize", "/openapi.json")
_TYPED_STREAMS = ("/v1/responses",)
_MAX_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """`upstream_timeout_s` bounds connect plus headers of one attempt (an answer that does not stream has its headers
    only when it is finished). None: no bound."""

    service: str | None = None
    max_body_bytes: int = 16 << 20
    upstream_timeout_s: float | None = 600.0
    retry_after_s: int = 1
    retry_budget: BudgetConfig = field(default_factory=BudgetConfig)


@dataclass(slots=True)
class _Account:
    """What is known of one request so far; becomes its event."""

    request_id: str
    trace: TraceContext
    t_in_ns: int
    t_wall_ns: int
    status: int | None = None
    t_first_byte_ns: int | None = None
    replica: str | None = None
    identity_digest: str | None = None
    why: str | None = None
    num_retries: int = 0
    admission: str = "accepted"
    error_class: str | None = None
    answered: bool = False
    num_events: int | None = None
    """Events passed on so far, where their type and number matter; see error_event."""


class Gateway:
    """An ASGI application. Lives on one event loop; shares `router` with whoever manages the replicas there.

    `on_fault(replica_id, why)` is told of connections that a replica refused or broke.
    """

    def __init__(
        self,
        router: Router,
        *,
        config: GatewayConfig | None = None,
        sink: Sink | None = None,
        clock: Clock | None = None,
        on_fault: Callable[[str, str], None] | None = None,
    ) -> None:
        self.router, self.metrics = router, GatewayMetrics(router)
        self._config, self._sink, self._clock = config or GatewayConfig(), sink, clock or RealClock()
        self._on_fault = on_fault
        self._upstreams: dict[str, Upstream] = {}
        self._num_pieces = 0
        self._budget = RetryBudget(self._config.retry_budget, self._clock)

    def attach(self, replica_id: str, url: str) -> None:
        """Tell where a replica is. It gets requests once the router says it is ready."""
        self._upstreams[replica_id] = Upstream(replica_id, HttpClient(url, connect_timeout_s=2.0))

    async def detach(self, replica_id: str) -> None:
        """Forget where a replica is and close the connections to it: streams still open there end with an error."""
        if upstream := self._upstreams.pop(replica_id, None):
            await upstream.client.close()

    def num_bytes_from(self, replica_id: str) -> int:
        """Bytes of answers relayed from a replica since it was attached; 0 for an unknown one."""
        upstream = self._upstreams.get(replica_id)
        return upstream.num_bytes if upstream else 0

    async def close(self) -> None:
        for replica_id in list(self._upstreams):
            await self.detach(replica_id)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "lifespan and websockets are off"
        headers: RawHeaders = scope["headers"]
        given = {name: value.decode("latin-1") for name, value in headers if name in (b"x-request-id", b"traceparent")}
        account = _Account(
            accept_request_id(given.get(b"x-request-id")),
            TraceContext.from_header(given.get(b"traceparent")),
            self._clock.now_ns(),
            self._clock.wall_ns(),
        )
        path: str = scope["path"]
        account.num_events = 0 if path in _TYPED_STREAMS else None
        own = self._own_answer(scope["method"], path)
        if own is not None:
            await send_answer(send, own, _identity_headers(account))
            return
        body = await self._read_body(receive)
        if body is None:
            return  # the caller left before it had said everything
        caller = UntilDisconnect(receive)
        try:
            async with caller:
                if len(body) > self._config.max_body_bytes:
                    await self._answer(send, account, _too_large(self._config.max_body_bytes))
                elif is_cancel(scope["method"], path):
                    request = _request_of(scope, account, body, self._config)
                    upstreams = list(self._upstreams.values())
                    await self._answer(send, account, await cancel_everywhere(path, upstreams, request))
                else:
                    await self._serve(_request_of(scope, account, body, self._config), account, send)
            if caller.disconnected and account.error_class is None:
                account.error_class = "disconnect"
                self.metrics.disconnects.inc()
        except asyncio.CancelledError:  # the server is cut short: say so, and end in order
            await self._break_off(account, send, 503, "the service is stopping", "stopping")
        except Exception:
            log.exception("request %s failed in the gateway", account.request_id)
            await self._break_off(account, send, 500, "the gateway failed", "gateway_failed")
        finally:
            self._book(account)

    def _own_answer(self, method: str, path: str) -> Answer | None:
        """What the gateway answers by itself; None for what goes to a replica."""
        if path == "/health/live":
            return Answer(200, b'{"status":"live"}')
        if path == "/health/ready":
            if self.router.num_ready:
                return Answer(200, b'{"status":"ready","replicas":%d}' % self.router.num_ready)
            return self._refusal("no_replica_ready")
        if path == "/health/progress":
            return self._progress()
        if path == "/metrics":
            return Answer(200, self.metrics.render(), ((b"content-type", CONTENT_TYPE),))
        if not path.startswith("/v1/") and path not in _FORWARDED_PATHS:
            return error_answer(404, f"no such path: {path}", "not_found")
        if method not in _METHODS:
            return error_answer(405, f"{method} is not supported here", "method_not_allowed")
        return None

    def _progress(self) -> Answer:
        """The same fields as a replica's: a step is one piece of an answer passed on; nothing waits here."""
        told = {
            "alive": True,
            "draining": False,
            "step_counter": self._num_pieces,
            "running": self.router.num_in_flight,
            "waiting": 0,
            "in_flight": self.router.num_in_flight,
        }
        return Answer(200, msgspec.json.encode(told))

    async def _read_body(self, receive: Receive) -> bytes | None:
        """The whole body, cut just past the limit so that it cannot fill the memory; None when the caller left."""
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part: bytes = message.get("body", b"")
            if num_bytes <= self._config.max_body_bytes:
                parts.append(part)
                num_bytes += len(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _serve(self, request: UpstreamRequest, account: _Account, send: Send) -> None:
        """Ask up to two replicas; exactly one response is sent, unless the caller leaves first."""
        self._budget.deposit()
        failed: Failed | None = None
        tried: list[str] = []
        while len(tried) < _MAX_ATTEMPTS:
            lease = self.router.admit(exclude=tried)
            if isinstance(lease, Choice):
                break
            with lease:
                tried.append(lease.replica_id)
                account.replica, account.why, account.num_retries = lease.replica_id, lease.why, len(tried) - 1
                upstream = self._upstreams[lease.replica_id]
                result = await attempt(upstream, request)
                account.identity_digest = told_identity(result)
                if isinstance(result, Streaming):
                    await self._relay(result, upstream, account, send)
                    return
            if isinstance(result, Answer):
                await self._answer(send, account, result)
                return
            failed = result
            self._note_fault(lease.replica_id, failed)
            if len(tried) < _MAX_ATTEMPTS and may_retry(failed.outcome) and self._budget.take():
                self.metrics.retries.inc()
                continue
            break
        if failed is None:
            assert isinstance(lease, Choice) and lease.refusal is not None
            account.admission, account.error_class = f"refused:{lease.refusal}", "overloaded"
            self.metrics.refusals.labels(lease.refusal).inc()
            await self._answer(send, account, self._refusal(lease.refusal))
            return
        account.error_class = failed.outcome.error or "http_5xx"
        await self._answer(send, account, failed.answer or _failure_answer(failed, self._config.retry_after_s))

    async def _relay(self, stream: Streaming, upstream: Upstream, account: _Account, send: Send) -> None:
        """Pass an event stream on, event by event. Once begun it ends here: in order, or with an error event."""
        frames = FrameBuffer()
        response = stream.response
        headers = [*stream.headers, *_identity_headers(account)]
        account.status = 200
        data: bytes | None = stream.first
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while data:
                if account.t_first_byte_ns is None:
                    self._mark_first_byte(account)
                upstream.num_bytes += len(data)
                self._num_pieces += 1
                if whole := frames.push(data):
                    if account.num_events is not None:
                        account.num_events += count_events(whole)
                    await send({"type": "http.response.body", "body": whole, "more_body": True})
                data = await response.next_bytes()
            last = frames.rest()
        except HttpError as error:
            account.error_class = error.kind
            self._note_fault(
                upstream.replica_id, Failed(AttemptOutcome(200, error.kind, answer_began=True), str(error))
            )
            self.metrics.broken_streams.inc()
            text = f"the replica failed in the middle of the answer: {error}"
            last = error_event(text, "replica_failed", account.num_events)
        finally:
            response.release()
        account.answered = True
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _break_off(self, account: _Account, send: Send, status: int, message: str, code: str) -> None:
        """End a response for a reason of our own, whether it has begun or not."""
        account.error_class = code
        if account.status is None:
            await self._answer(send, account, error_answer(status, message, code))
        elif not account.answered:
            last = error_event(message, code, account.num_events)
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _answer(self, send: Send, account: _Account, answer: Answer) -> None:
        account.status, account.answered = answer.status, True
        self._num_pieces += 1
        if 400 <= answer.status < 500:
            account.error_class = "http_4xx"
        self._mark_first_byte(account)
        await send_answer(send, answer, _identity_headers(account))

    def _mark_first_byte(self, account: _Account) -> None:
        account.t_first_byte_ns = self._clock.now_ns()
        self.metrics.first_byte.observe((account.t_first_byte_ns - account.t_in_ns) / NS_PER_S)

    def _refusal(self, reason: str) -> Answer:
        text = {"no_replica_ready": "no replica is ready", "saturated": "every replica is at its limit"}[reason]
        return error_answer(503, f"{text}; try again", reason, retry_after_s=self._config.retry_after_s)

    def _note_fault(self, replica_id: str, failed: Failed) -> None:
        if not is_replica_fault(failed.outcome):
            return
        kind = failed.outcome.error or "http_5xx"
        self.metrics.faults.labels(replica_id, kind).inc()
        log.warning("replica %s: %s", replica_id, failed.message)
        if self._on_fault is not None and failed.outcome.error in ("connect", "truncated", "protocol"):
            self._on_fault(replica_id, failed.message)

    def _book(self, account: _Account) -> None:
        """Count the request and write its one event."""
        self.metrics.requests.labels(str(account.status or 499)).inc()
        if self._sink is None:
            return
        self._sink.write(
            GatewayEvent(
                event_id=new_id("evt"),
                trace_id=account.trace.trace_id,
                span_id=account.trace.span_id,
                request_id=account.request_id,
                t_router_in_ns=account.t_in_ns,
                t_wall_ns=account.t_wall_ns,
                status=account.status,
                t_first_byte_ns=account.t_first_byte_ns,
                t_last_byte_ns=self._clock.now_ns() if account.t_first_byte_ns is not None else None,
                service=self._config.service,
                replica=account.replica,
                identity_digest=account.identity_digest,
                why=account.why,
                num_retries=account.num_retries,
                admission=account.admission,
                error_class=account.error_class,
            )
        )


def _identity_headers(account: _Account) -> RawHeaders:
    headers = [(b"x-request-id", account.request_id.encode())]
    if account.replica is not None:
        headers.append((b"x-inferloop-replica", account.replica.encode()))
    return headers


def _request_of(scope: Message, account: _Account, body: bytes, config: GatewayConfig) -> UpstreamRequest:
    query: bytes = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    headers = forwarded_headers(scope["headers"], account.trace.header, account.request_id)
    sent_body = body if body or scope["method"] == "POST" else None
    return UpstreamRequest(scope["method"], target.decode("latin-1"), headers, sent_body, config.upstream_timeout_s)


def _too_large(limit: int) -> Answer:
    return error_answer(413, f"the request body is larger than {limit} bytes", "request_too_large")


def _failure_answer(failed: Failed, retry_after_s: int) -> Answer:
    if failed.outcome.error == "connect":
        text = f"no replica can be reached: {failed.message}"
        return error_answer(503, text, "replica_unreachable", retry_after_s=retry_after_s)
    if failed.outcome.error == "timeout":
        return error_answer(504, f"the replica did not answer in time: {failed.message}", "replica_timeout")
    return error_answer(502, f"the replica failed before its answer was complete: {failed.message}", "replica_failed")
