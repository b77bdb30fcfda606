"""The gateway as a raw ASGI application: admit, choose, forward, relay, account.

Every route to a replica goes through `Asker.ask` and holds a Lease while the replica works, so load is counted on all
of them alike. Request bodies are never parsed and answers are relayed as bytes, unless the service has several models
(see `routed`). What streams is told by the replica's content type.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from inferloop.backends.endpoint import Endpoint
from inferloop.backends.http import HttpClient
from inferloop.core.clock import Clock, RealClock
from inferloop.core.ids import TraceContext, accept_request_id
from inferloop.fleet.act.gateway.account import Account
from inferloop.fleet.act.gateway.answers import Answer, Message, RawHeaders, Receive, Send, error_answer, send_answer
from inferloop.fleet.act.gateway.ask import Asker, failure_answer, refusal_answer
from inferloop.fleet.act.gateway.cancel import cancel_everywhere, is_cancel
from inferloop.fleet.act.gateway.config import GatewayConfig
from inferloop.fleet.act.gateway.disconnect import UntilDisconnect
from inferloop.fleet.act.gateway.metrics import GatewayMetrics
from inferloop.fleet.act.gateway.own import own_answer
from inferloop.fleet.act.gateway.reply import Reply
from inferloop.fleet.act.gateway.routed import RoutedServing
from inferloop.fleet.act.gateway.upstream import Failed, Streaming, Upstream, UpstreamRequest, forwarded_headers
from inferloop.fleet.decide.router import Choice, Router
from inferloop.records.sink import Sink
from inferloop.serve.errors import error_headers, error_object

log = logging.getLogger(__name__)
_TYPED_STREAMS = ("/v1/responses",)
_READ = (b"x-request-id", b"traceparent", b"x-inferloop-class")


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
        self._upstreams: dict[str, Upstream] = {}
        self._asker = Asker(router, self._upstreams, self._config, self.metrics, self._clock, on_fault)
        self._routed: RoutedServing | None = None
        if self._config.routing is not None:
            self._routed = RoutedServing(
                self._config.routing, self._asker, self._config, self.metrics, self._clock, self._upstreams
            )

    def attach(self, replica_id: str, at: Endpoint | str) -> None:
        """Tell where a replica is. It gets requests once the router says it is ready."""
        self._upstreams[replica_id] = Upstream(replica_id, HttpClient(at, connect_timeout_s=2.0))

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
        given = {name: value.decode("latin-1") for name, value in headers if name in _READ}
        account = Account(
            accept_request_id(given.get(b"x-request-id")),
            TraceContext.from_header(given.get(b"traceparent")),
            self._clock.now_ns(),
            self._clock.wall_ns(),
            _short(given.get(b"x-inferloop-class")),
        )
        path: str = scope["path"]
        account.num_events = 0 if path in _TYPED_STREAMS else None
        own = self._unauthorized(scope) or own_answer(scope["method"], path, self.router, self.metrics, self._config)
        if own is not None:
            await send_answer(send, own, account.headers())
            return
        body = await self._read_body(receive)
        if body is None:
            return  # the caller left before it had said everything
        caller, reply = UntilDisconnect(receive), Reply(account, send, self.metrics, self._clock)
        try:
            async with caller:
                await self._serve(scope, body, reply)
            if caller.disconnected and account.error_class is None:
                account.error_class = "disconnect"
                self.metrics.disconnects.inc()
        except asyncio.CancelledError:  # the server is cut short: say so, and end in order
            await reply.break_off(503, "the service is stopping", "stopping")
        except Exception:
            log.exception("request %s failed in the gateway", account.request_id)
            await reply.break_off(500, "the gateway failed", "gateway_failed")
        finally:
            self._book(account)

    def _unauthorized(self, scope: Message) -> Answer | None:
        """Counted, but no event: nobody may fill the disk who may not enter."""
        keys = self._config.keys
        refusal = None if keys is None else keys.refusal(scope["method"], scope["path"], scope["headers"])
        if refusal is None:
            return None
        self.metrics.refusals.labels(refusal.code).inc()
        self.metrics.requests.labels(str(refusal.status)).inc()
        headers = ((b"content-type", b"application/json"), *error_headers(refusal))
        return Answer(refusal.status, error_object(refusal), headers)

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

    async def _serve(self, scope: Message, body: bytes, reply: Reply) -> None:
        """Exactly one response is sent, unless the caller leaves first."""
        limit = self._config.max_body_bytes
        if len(body) > limit:
            text = f"the request body is larger than {limit} bytes"
            await reply.answer(error_answer(413, text, "request_too_large"))
            return
        request = _request_of(scope, reply.account, body, self._config)
        if is_cancel(scope["method"], scope["path"]):
            upstreams = list(self._upstreams.values())
            await reply.answer(await cancel_everywhere(scope["path"], upstreams, request))
        elif self._routed is not None:
            await self._routed.serve(scope["path"], request, reply)
        else:
            await self._forward(request, reply)

    async def _forward(self, request: UpstreamRequest, reply: Reply) -> None:
        """Any replica takes any request, unread."""
        account = reply.account
        hop = account.begin_hop(self._clock.now_ns(), None, None, None)
        async with self._asker.ask(request, hop) as asked:
            result = asked.result
            if isinstance(result, Streaming):
                assert asked.upstream is not None
                upstream = asked.upstream
                await reply.relay(result, upstream, partial(self._asker.note_fault, upstream.replica_id))
                return
        if isinstance(result, Choice):
            assert result.refusal is not None
            account.admission, account.error_class = f"refused:{result.refusal}", "overloaded"
            await reply.answer(refusal_answer(result.refusal, self._config.retry_after_s))
        elif isinstance(result, Failed):
            account.error_class = hop.error_class
            await reply.answer(failure_answer(result, self._config.retry_after_s))
        else:
            await reply.answer(result)

    def _book(self, account: Account) -> None:
        """Count the request and write its one event."""
        self.metrics.requests.labels(str(account.status or 499)).inc()
        if self._sink is not None:
            self._sink.write(account.event(self._config.service, self._clock.now_ns()))


def _short(text: str | None) -> str | None:
    """A traffic class as replicas take it too."""
    return text if text and text.isascii() and text.isprintable() and len(text) <= 64 else None


def _request_of(scope: Message, account: Account, body: bytes, config: GatewayConfig) -> UpstreamRequest:
    query: bytes = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    given: RawHeaders = scope["headers"]
    if config.keys is not None:
        given = [(name, value) for name, value in given if name != b"authorization"]
    headers = forwarded_headers(given, account.trace.header, account.request_id)
    sent_body = body if body or scope["method"] == "POST" else None
    return UpstreamRequest(scope["method"], target.decode("latin-1"), headers, sent_body, config.upstream_timeout_s)
