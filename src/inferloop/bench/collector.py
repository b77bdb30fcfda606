"""What senders tell, made into records, in the calling process: away from the loop that stamps."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from inferloop.bench.agenda import turns_of
from inferloop.bench.client.head import request_id, trace_id
from inferloop.bench.engine import EngineReport
from inferloop.bench.exchange import Outcome
from inferloop.bench.messages import add_outcome, outcomes_in
from inferloop.bench.pace import Stall
from inferloop.bench.render import RenderedRequest
from inferloop.bench.timings import Timings
from inferloop.bench.window import DriveResult, OnDone, Stop, StopWhen
from inferloop.core.errors import UsageError
from inferloop.measure.timing import RequestTiming


class Collector:
    """Owns the result of a window. `halt` is called, once, when the window is to end early.
    `redact` takes out of a server's words what must not be recorded.

    Where nobody wants to hear of requests as they end, they are kept as the bytes that they came in: in the window that
    costs next to nothing, and their rows are made after it.
    """

    def __init__(
        self,
        requests: Sequence[RenderedRequest],
        id_base: int,
        halt: Callable[[Stop], None],
        *,
        on_done: OnDone | None,
        stop_when: StopWhen | None,
        keep_timings: bool,
        redact: Callable[[str], str],
    ) -> None:
        """Raises UsageError for a `stop_when` that would never be shown anything."""
        if stop_when is not None and not keep_timings:
            raise UsageError("stop_when judges the timings of a window, which are not kept")
        self._redact = redact
        self._requests, self._id_base, self._halt = requests, id_base, halt
        self._on_done, self._stop_when, self._keep = on_done, stop_when, keep_timings
        self._turns = turns_of([r.timed for r in requests])
        self._seen = bytearray(len(requests))
        self._result = DriveResult()
        self._rows: list[RequestTiming] = []
        self._positions = array("i")
        self._kept = bytearray()
        self._num_counted = 0
        self._is_deferred = keep_timings and on_done is None and stop_when is None
        self._failure: Exception | None = None

    def take(self, outcome: Outcome) -> None:
        """Count it, and tell those who asked to be told. What they raise is kept for `result`."""
        if self._is_deferred:
            add_outcome(self._kept, outcome)
            return
        timing = self._timing(outcome)
        self._count(outcome)
        if self._keep:
            self._rows.append(timing)
        if self._failure is not None:
            return
        r = self._result
        try:
            if self._on_done is not None:
                self._on_done(outcome.position, timing)
            if self._stop_when is not None and r.stopped is None:
                r.stopped = self._stop_when(self._rows)
                if r.stopped is not None:
                    self._halt(r.stopped)
        except Exception as failure:  # raised into an event loop's callback it would be lost
            self._failure = failure
            self._halt("cut")

    def take_all(self, outcomes: bytes) -> None:
        """What a sender told, as messages.add_outcome writes it."""
        if self._is_deferred:
            self._kept += outcomes
            return
        for _, outcome in outcomes_in(outcomes):
            self.take(outcome)

    def _count(self, outcome: Outcome) -> None:
        self._seen[outcome.position] = 1
        if self._keep:
            self._positions.append(outcome.position)
        r = self._result
        if outcome.error is not None and outcome.detail is not None:
            r.details.setdefault(outcome.error, self._redact(outcome.detail))
        stream = outcome.stream
        if stream is not None and outcome.error is None:
            r.counted_by[stream.counted_by] += 1
            r.num_count_mismatches += stream.count_mismatch
            r.num_telling_cache += stream.tells_cached
            request, told = self._requests[outcome.position], stream.num_input_tokens
            r.num_length_mismatches += told is not None and told != request.num_input_tokens
            if stream.counted_by != "frames":
                r.num_tokens_told += stream.num_output_tokens
                r.num_tokens_asked += request.timed.output_tokens

    def _count_kept(self) -> None:
        """Those that were not counted as they came."""
        for _, outcome in outcomes_in(self._kept, self._num_counted):
            self._count(outcome)
        self._num_counted = len(self._kept)

    def lost(self, share: Sequence[int], until_s: float, now_ns: int, why: str) -> None:
        """A sender died: what it had to send by now, and did not tell of, failed in the load generator."""
        self._count_kept()
        missing = [i for i in share if not self._seen[i] and self._requests[i].timed.after is None]
        due = [i for i in missing if self._requests[i].timed.at_s <= max(0.0, until_s)] or missing[:1]
        due = due or [i for i in share if not self._seen[i]][:1] or list(share[:1])
        for position in due:
            self.take(Outcome(position, None, now_ns, None, now_ns, "client", why, None, None))

    def result(self, reports: Sequence[EngineReport]) -> DriveResult:
        """All in all. Raises what `on_done` or `stop_when` raised."""
        if self._failure is not None:
            raise self._failure
        self._count_kept()
        r = self._result
        r.timings, r.positions = self._rows, self._positions
        if self._is_deferred:
            r.timings = Timings(self._kept, self._timing)
        r.num_forgone = sum(report.num_forgone for report in reports)
        r.num_dropped_turns = sum(report.num_dropped_turns for report in reports)
        r.num_capped = sum(report.num_capped for report in reports)
        r.num_unsent = len(self._requests) - sum(self._seen) - r.num_forgone - r.num_dropped_turns
        r.stalls = tuple(sorted((Stall(*s) for report in reports for s in report.stalls), key=lambda s: s.t_ns))
        r.senders = tuple(report.stats for report in reports)
        begun = [report.first_send_ns for report in reports if report.first_send_ns is not None]
        if begun:
            span_ns = max(report.last_end_ns for report in reports) - min(begun)
            r.in_flight = sum(report.in_flight_ns for report in reports) / span_ns if span_ns > 0 else None
        return r

    def _timing(self, outcome: Outcome) -> RequestTiming:
        position, stream = outcome.position, outcome.stream
        request = self._requests[position]
        trace = trace_id(self._id_base, position)
        turn, num_turns = self._turns.get(position, (None, None)) if self._turns else (None, None)
        return RequestTiming(
            request_id=request_id(trace),
            t_intended_ns=outcome.t_intended_ns,
            t_send_ns=outcome.t_send_ns,
            t_headers_ns=outcome.t_headers_ns,
            t_end_ns=outcome.t_end_ns,
            chunks=stream.chunks if stream else (),
            num_input_tokens=request.num_input_tokens,
            num_output_tokens=stream.num_output_tokens if stream else 0,
            num_cached_tokens=stream.num_cached_tokens if stream else 0,
            error=outcome.error,
            finish_reason=stream.finish_reason if stream else None,
            replica=outcome.replica,
            queue_ms=stream.queue_ms if stream else None,
            traffic_class=request.timed.traffic_class,
            trace_id=trace,
            t_first_answer_ns=stream.t_first_answer_ns if stream else None,
            empty_frames_ns=stream.empty_frames_ns if stream else (),
            session=request.timed.session,
            turn=turn,
            num_turns=num_turns,
        )
