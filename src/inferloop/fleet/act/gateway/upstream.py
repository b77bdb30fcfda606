"""Where replicas are, and one attempt at one of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from inferloop.backends.http import Header, HttpClient, HttpError, Response
from inferloop.fleet.act.gateway.answers import Answer, RawHeaders
from inferloop.fleet.decide.retry import AttemptOutcome, is_replica_fault

_HOP_BY_HOP = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    )
)
"""RFC 9110 section 7.6.1: each connection has its own."""
_NOT_FORWARDED = _HOP_BY_HOP | {"host", "content-length", "expect", "traceparent", "x-request-id", "accept-encoding"}
"""Without accept-encoding replicas answer in the clear, so that events can be told apart."""
_NOT_RETURNED = _HOP_BY_HOP | {"content-length", "date", "server", "x-request-id", "x-inferloop-replica"}


@dataclass(slots=True)
class Upstream:
    """One replica as the gateway sees it. `num_bytes` only grows: the sign that work comes out of it."""

    replica_id: str
    client: HttpClient
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """What is sent to whichever replica is chosen; the same bytes on every attempt."""

    method: str
    target: str
    headers: list[Header]
    body: bytes | None
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Failed:
    """An attempt without an answer to pass on, except perhaps the replica's own 5xx."""

    outcome: AttemptOutcome
    message: str
    answer: Answer | None = None


@dataclass(frozen=True, slots=True)
class Streaming:
    """An event stream whose first bytes have arrived; the owner reads on and releases the response."""

    response: Response
    first: bytes
    headers: RawHeaders = field(default_factory=list)


def forwarded_headers(raw: RawHeaders, traceparent: str, request_id: str) -> list[Header]:
    """The caller's headers without those that belong to its own connection."""
    listed = {
        token.strip().lower()
        for name, value in raw
        if name == b"connection"
        for token in value.decode("latin-1").split(",")
    }
    kept = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in raw]
    headers = [(n, v) for n, v in kept if n not in _NOT_FORWARDED and n not in listed]
    return [*headers, ("traceparent", traceparent), ("x-request-id", request_id)]


def returned_headers(headers: list[Header]) -> RawHeaders:
    return [(n.encode("latin-1"), v.encode("latin-1")) for n, v in headers if n not in _NOT_RETURNED]


def told_identity(result: Answer | Streaming | Failed) -> str | None:
    """The digest of the serving identity that the replica put on its answer."""
    answer = result.answer if isinstance(result, Failed) else result
    headers = dict(answer.headers) if answer is not None else {}
    told = headers.get(b"x-inferloop-identity")
    return None if told is None else told.decode("latin-1")


async def attempt(upstream: Upstream, request: UpstreamRequest) -> Answer | Streaming | Failed:
    """Ask one replica. An event stream is returned when its first bytes are there, so that a replica which dies
    before its first token can still be replaced unseen; everything else is returned whole."""
    try:
        response = await upstream.client.request(
            request.method, request.target, headers=request.headers, body=request.body, timeout_s=request.timeout_s
        )
    except HttpError as error:
        return Failed(AttemptOutcome(error=error.kind), str(error))
    handed_on = False
    try:
        headers = returned_headers(response.headers)
        if response.status == 200 and (response.header("content-type") or "").startswith("text/event-stream"):
            first = await response.next_bytes() or b""
            handed_on = True
            return Streaming(response, first, headers)
        answer = Answer(response.status, await response.read(), tuple(headers))
        upstream.num_bytes += len(answer.body)
    except HttpError as error:
        began = response.status < 500 and not _is_stream(response)
        return Failed(AttemptOutcome(response.status, error.kind, answer_began=began), str(error))
    finally:
        if not handed_on:
            response.release()
    outcome = AttemptOutcome(response.status)
    if is_replica_fault(outcome):
        return Failed(outcome, f"HTTP {response.status}", answer)
    return answer


def _is_stream(response: Response) -> bool:
    return (response.header("content-type") or "").startswith("text/event-stream")
