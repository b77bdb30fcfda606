"""One request and its answer: stamps, token counts, and one error class whatever happens."""

from __future__ import annotations

from time import monotonic_ns
from typing import Protocol

import msgspec

from inferloop.bench.client.connection import Connection
from inferloop.bench.plain import PlainReader
from inferloop.bench.stream import MAX_EXCERPT, StreamReader, StreamResult
from inferloop.core.units import NS_PER_S

STALE_S = 1.0
"""An idle connection that the server has closed shows within a round trip. One that is closed later had its request
given up, which is the service's failure: sent again it would be hidden."""
_ENDED_BY_ITSELF = (None, "empty_stream", "truncated")


class Outcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What became of the request at `position` of the plan. All times are monotonic ns.

    `stream` is None when no answer began. `detail` is for people; the class is in `error`.
    """

    position: int
    t_intended_ns: int | None
    t_send_ns: int
    t_headers_ns: int | None
    t_end_ns: int
    error: str | None
    detail: str | None
    replica: str | None
    stream: StreamResult | None


class Reader(Protocol):
    """Makes sense of an answer's body. `detail` is what in it made the answer fail, in the server's words."""

    detail: str | None

    def feed(self, t_ns: int, piece: bytes) -> None: ...
    def finish(self, *, cut: bool = False) -> StreamResult: ...


class Owner(Protocol):
    """Who sends."""

    def ended(self, exchange: Exchange, outcome: Outcome) -> None:
        """Called once for each exchange, whatever happens."""
        ...

    def answered(self, exchange: Exchange) -> None:
        """The answer is complete, and the end of its HTTP body is still to come. Who waits no longer calls `leave`."""
        ...

    def left(self, exchange: Exchange) -> None:
        """Called before `ended` where that end did not come."""
        ...

    def send_again(self, exchange: Exchange, *, sure: bool) -> bool:
        """Asked for another connection, once, when an idle one turns out to be dead; `sure`: the server never got the
        request. False: it is to fail."""
        ...


class Exchange:
    """The receiver of one answer. `place` is the request's in its sender's share, `position` that in the plan."""

    __slots__ = (
        *("_owner", "place", "position", "payload", "t_intended_ns", "t_begin_ns", "t_send_ns", "done"),
        *("_connection", "_reader", "_status", "_t_headers_ns", "_t_last_ns", "_replica", "_excerpt", "_sent_again"),
        "t_done_ns",
    )

    def __init__(self, owner: Owner, place: int, position: int, payload: bytes, t_intended_ns: int | None) -> None:
        self._owner, self.place, self.position = owner, place, position
        self.payload, self.t_intended_ns = payload, t_intended_ns
        self.t_begin_ns = monotonic_ns()
        self.t_send_ns = self._t_last_ns = self._status = 0
        self.t_done_ns = 0
        """When the answer said that it was complete; 0 before."""
        self._t_headers_ns: int | None = None
        self._connection: Connection | None = None
        self._reader: Reader | None = None
        self._replica: str | None = None
        self._excerpt = b""
        self.done = self._sent_again = False

    def start(self, connection: Connection | None) -> None:
        """Send it now; without a connection yet, what it costs to open one counts as the server's."""
        if not self.t_send_ns:
            self.t_send_ns = monotonic_ns()
        if connection is not None:
            self._connection = connection
            connection.send(self, self.payload)

    def fail(self, error: str, detail: str) -> None:
        """End it without an answer, unless all of it has come."""
        if self.t_done_ns:
            self.leave()
        if self.done:
            return
        if self._connection is not None:
            self._connection.forget()
        if not self.t_send_ns:
            self.t_send_ns = monotonic_ns()
        self._close(error, detail, cut=True)

    def leave(self) -> None:
        """End it with the answer that is complete; its connection cannot be used again."""
        if self.done:
            return
        if self._connection is not None:
            self._connection.forget()
        self._owner.left(self)
        self._t_last_ns = self.t_done_ns
        self._close(None, None, cut=False)

    def _answered(self, t_ns: int) -> None:
        self.t_done_ns = t_ns
        if self._connection is not None and not self._connection.complete:
            self._owner.answered(self)

    # Receiver
    def head(self, t_ns: int, status: int, headers: dict[bytes, bytes]) -> None:
        self._status, self._t_headers_ns = status, t_ns
        replica = headers.get(b"x-inferloop-replica")
        if replica is not None:
            self._replica = replica.decode("latin-1")
        if status == 200:
            is_plain = b"json" in headers.get(b"content-type", b"").lower()
            self._reader = PlainReader() if is_plain else StreamReader(on_done=self._answered)

    def body(self, t_ns: int, data: bytes) -> None:
        self._t_last_ns = t_ns
        if self._reader is not None:
            self._reader.feed(t_ns, data)
        elif len(self._excerpt) < MAX_EXCERPT:
            self._excerpt += data[:MAX_EXCERPT]

    def end(self, t_ns: int, problem: str | None, detail: str) -> None:
        self._connection = None
        is_dead = problem in ("stale", "lost")
        if is_dead and not self._sent_again and monotonic_ns() - self.t_send_ns < STALE_S * NS_PER_S:
            self._sent_again = True
            if self._owner.send_again(self, sure=problem == "stale"):
                return
        self._t_last_ns = max(self._t_last_ns, t_ns)
        if problem is None and self._status != 200:
            text = self._excerpt[:MAX_EXCERPT].decode(errors="replace")
            self._close(status_class(self._status), f"HTTP {self._status}: {text}", cut=False)
        elif problem is None:
            self._close(None, None, cut=False)
        elif self.t_done_ns:
            self.leave()
        else:
            self._close("truncated" if is_dead else problem, detail, cut=True)

    def _close(self, error: str | None, detail: str | None, *, cut: bool) -> None:
        self.done = True
        stream = None if self._reader is None else self._reader.finish(cut=cut)
        if error is None and stream is not None and self._reader is not None:
            error, detail = stream.error, self._reader.detail
        t_end_ns = self._t_last_ns if error in _ENDED_BY_ITSELF and self._t_last_ns else monotonic_ns()
        outcome = Outcome(
            self.position,
            self.t_intended_ns,
            self.t_send_ns,
            self._t_headers_ns,
            t_end_ns,
            error,
            detail,
            self._replica,
            stream,
        )
        self._reader = None
        self.payload = b""
        self._owner.ended(self, outcome)


def status_class(status: int) -> str:
    """The error class of an HTTP status that is not 200."""
    if status == 429:
        return "http_429"
    if 400 <= status < 500:
        return "http_4xx"
    return "http_5xx" if status >= 500 else "protocol"


CUT_OFF = ("censored", "unfinished at the cut-off")
