"""One request sent and its answer read: stamps, token counts, and one error class whatever happens."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass

from inferloop.backends.http import Header, HttpClient, HttpError
from inferloop.bench.render import RenderedRequest
from inferloop.bench.stream import StreamReader, StreamResult
from inferloop.core.clock import Clock
from inferloop.core.ids import TraceContext, new_id
from inferloop.measure.samples import CENSORED
from inferloop.measure.timing import RequestTiming

_OUR_LIMITS = frozenset((errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM))
_ASKED: tuple[Header, ...] = (
    ("content-type", "application/json"),
    ("accept", "text/event-stream"),
    ("x-inferloop-timings", "1"),
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """`stream` is None when no stream began. `detail` is for people; the class is in `timing.error`."""

    timing: RequestTiming
    stream: StreamResult | None
    detail: str | None


async def attempt(
    client: HttpClient, request: RenderedRequest, *, t_intended_ns: int | None, timeout_s: float, clock: Clock
) -> Attempt:
    """Send one request and read its answer to the end. Cancelling it gives a censored attempt, not an exception."""
    trace = TraceContext.new()
    request_id = new_id("bench")
    reader = StreamReader()
    headers_ns: int | None = None
    replica: str | None = None
    stream: StreamResult | None = None
    error: str | None = None
    detail: str | None = None
    last_piece_ns = 0
    t_send_ns = clock.now_ns()
    try:
        async with asyncio.timeout(timeout_s):
            response = await client.request(
                "POST",
                request.path,
                headers=(*_ASKED, ("x-request-id", request_id), ("traceparent", trace.header)),
                body=request.body,
            )
            headers_ns = response.t_headers_ns
            replica = response.header("x-inferloop-replica")
            if response.status == 200:
                async for t_ns, piece in response.pieces():
                    last_piece_ns = t_ns
                    reader.feed(t_ns, piece)
                stream = reader.finish()
                error = stream.error
            else:
                error = status_class(response.status)
                detail = f"HTTP {response.status}: {(await response.read())[:300].decode(errors='replace')}"
                last_piece_ns = clock.now_ns()
    except HttpError as problem:
        error, detail = failure_class(problem), str(problem)
    except TimeoutError:
        error, detail = "timeout", f"not complete within {timeout_s:g} s"
    except asyncio.CancelledError:
        error, detail = CENSORED, "unfinished at the cut-off"
    except Exception as problem:
        error, detail = "client", f"{type(problem).__name__}: {problem}"
    if stream is None and headers_ns is not None:
        stream = reader.finish(cut=True)
    t_end_ns = last_piece_ns if error in (None, "empty_stream", "truncated") and last_piece_ns else clock.now_ns()
    timing = RequestTiming(
        request_id=request_id,
        t_intended_ns=t_intended_ns,
        t_send_ns=t_send_ns,
        t_headers_ns=headers_ns,
        t_end_ns=t_end_ns,
        chunks=stream.chunks if stream else (),
        num_input_tokens=request.num_input_tokens,
        num_output_tokens=stream.num_output_tokens if stream else 0,
        num_cached_tokens=stream.num_cached_tokens if stream else 0,
        error=error,
        finish_reason=stream.finish_reason if stream else None,
        replica=replica,
        queue_ms=stream.queue_ms if stream else None,
        traffic_class=request.timed.traffic_class,
        trace_id=trace.trace_id,
        t_first_answer_ns=stream.t_first_answer_ns if stream else None,
        empty_frames_ns=stream.empty_frames_ns if stream else (),
        session=request.timed.session,
    )
    return Attempt(timing, stream, detail)


def status_class(status: int) -> str:
    """The error class of an HTTP status that is not 200."""
    if status == 429:
        return "http_429"
    if 400 <= status < 500:
        return "http_4xx"
    return "http_5xx" if status >= 500 else "protocol"


def failure_class(problem: HttpError) -> str:
    """Running out of ports or descriptors is our own fault, not the server's."""
    cause = problem.__cause__
    if isinstance(cause, OSError) and cause.errno in _OUR_LIMITS:
        return "client"
    return problem.kind
