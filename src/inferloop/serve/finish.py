"""One attempt from arrival to its single event: the only place that counts requests and writes events.

An attempt is one HTTP request, however many choices it has: one event, one ending, one time to first token.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from inferloop.backends.protocols import Delta, ServedAdapter, StageTimes
from inferloop.core.digest import digest_of
from inferloop.core.errors import OverloadedError, RequestError
from inferloop.core.ids import TraceContext, new_id
from inferloop.core.request import FinishReason
from inferloop.core.units import NS_PER_S, ns_to_ms
from inferloop.records.event import Content, ReplicaEvent
from inferloop.serve.errors import error_class, error_status
from inferloop.serve.replica import Replica
from inferloop.serve.replies import CachedTokens, Timings, Usage
from inferloop.serve.wire import Call


@dataclass(frozen=True, slots=True)
class Spans:
    """Where the time went; None: not reached. queue counts from arrival, so it includes tokenize, and
    queue + prefill is the server's TTFT."""

    tokenize_ms: float | None
    queue_ms: float | None
    prefill_ms: float | None
    decode_ms: float | None
    preempted_ms: float
    num_preemptions: int


def _span_ms(start_ns: int | None, end_ns: int | None) -> float | None:
    return None if start_ns is None or end_ns is None else ns_to_ms(end_ns - start_ns)


@dataclass(slots=True)
class _Choice:
    """One choice as far as it has come. Ids and texts only when content is captured."""

    t_first_ns: int | None = None
    t_last_ns: int = 0
    num_after_first: int = 0
    finish_reason: FinishReason | None = None
    times: StageTimes | None = None
    input_ids: tuple[int, ...] = ()
    output_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


class Attempt:
    """Mutated by the task that answers the request, on the event loop. `finish` or `fail` ends it, once."""

    def __init__(
        self,
        replica: Replica,
        request_id: str,
        trace: TraceContext,
        *,
        number: int = 1,
        traffic_class: str | None = None,
        background: bool = False,
    ) -> None:
        """`background`: nobody waits for it, so it counts in tokens, and in neither requests nor latencies."""
        self.replica, self.request_id, self.trace = replica, request_id, trace
        self._background = background
        self.number, self.traffic_class = number, traffic_class
        self.event_id = new_id("ev")
        self.t_in_ns, self.t_wall_ns = replica.clock.now_ns(), replica.clock.wall_ns()
        self.call: Call | None = None
        self.adapter: ServedAdapter | None = None
        """What the request asked for beside the model; see `go_through`."""
        self.told: dict[str, bytes] | None = None
        """Where the digest is put that the response tells; see serve.asgi."""
        self.interrupted_by: str | None = None
        self.done = False
        self._choices: dict[int, _Choice] = {}
        self._first: _Choice | None = None
        self._prompts_seen: set[int] = set()
        self._num_input = self._num_cached = self._num_output = 0
        self._t_first_ns: int | None = None
        self._t_last_ns: int | None = None
        self._offsets_us: list[int] = []
        self._gaps = None if background else replica.metrics.histograms["itl"]
        self._keep = replica.config.capture != "none" and replica.content_sink is not None

    def go_through(self, adapter: ServedAdapter | None) -> None:
        """An adapter, or the model alone, is to answer; the response and the event tell it."""
        self.adapter = adapter
        if self.told is not None:
            self.told["identity"] = self.identity_digest.encode("ascii")

    @property
    def model_id(self) -> str:
        """What the request asked: the model, or an adapter of it."""
        return self.replica.info.model_id if self.adapter is None else self.adapter.name

    @property
    def identity_digest(self) -> str:
        """Of what answers it."""
        return self.replica.identity_digest if self.adapter is None else self.adapter.identity.digest

    def interrupt(self, task: asyncio.Task[object], why: str) -> bool:
        """Cancel the answering task for `why` (disconnect, timeout, unread, cancelled or drain). False: it was done,
        or cut short already."""
        if self.done or self.interrupted_by is not None:
            return False
        self.interrupted_by = why
        task.cancel()
        return True

    def on_delta(self, delta: Delta, index: int) -> None:
        """Count a delta's tokens, when they came, and remember how choice `index` ended."""
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _Choice()
        if delta.prompt_token_ids is not None:
            self._count_prompt(index, len(delta.prompt_token_ids), delta.num_cached_tokens)
        if delta.token_ids:
            self._count_tokens(choice, delta.t_ns, len(delta.token_ids))
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
        if delta.times is not None:
            choice.times = delta.times
        if self._keep:
            choice.input_ids = delta.prompt_token_ids or choice.input_ids
            choice.output_ids.extend(delta.token_ids)
            choice.texts.append(delta.text)

    def _count_prompt(self, index: int, num_tokens: int, num_cached: int) -> None:
        """Once per prompt, by the choice that is first to tell: what the others find cached may be this one's work."""
        prompt = index // self.call.num_per_prompt if self.call is not None else index
        if prompt in self._prompts_seen:
            return
        self._prompts_seen.add(prompt)
        self._num_input += num_tokens
        self._num_cached += num_cached
        self.replica.metrics.prompt_tokens += num_tokens
        self.replica.metrics.cached_tokens += num_cached

    def _count_tokens(self, choice: _Choice, t_ns: int, num_tokens: int) -> None:
        metrics = self.replica.metrics
        metrics.generation_tokens += num_tokens
        if self._t_first_ns is None or self._t_last_ns is None:
            self._first, self._t_first_ns = choice, t_ns
            if not self._background:
                metrics.observe("ttft", (t_ns - self.t_in_ns) / NS_PER_S)
        if choice.t_first_ns is None:
            choice.t_first_ns = t_ns
        else:
            choice.num_after_first += num_tokens
            if self._gaps is not None:
                self._gaps.observe((t_ns - choice.t_last_ns) / NS_PER_S / num_tokens, num_tokens)
        choice.t_last_ns = t_ns
        # Choices reach this loop one after the other, so stamps of two of them may come in the wrong order.
        if self._t_last_ns is None or t_ns > self._t_last_ns:
            self._t_last_ns = t_ns
        self._num_output += num_tokens
        self._offsets_us += [max(0, t_ns - self._t_first_ns) // 1000] * num_tokens

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_input,
            completion_tokens=self._num_output,
            total_tokens=self._num_input + self._num_output,
            prompt_tokens_details=CachedTokens(cached_tokens=self._num_cached),
        )

    def timings(self, num_tokens: int) -> Timings:
        """Of the whole answer, beside `num_tokens` of the object that carries it."""
        spans = self._spans()
        return Timings(
            num_tokens=num_tokens,
            queue_ms=spans.queue_ms,
            prefill_ms=spans.prefill_ms,
            decode_ms=spans.decode_ms,
            tokenize_ms=spans.tokenize_ms,
            preempted_ms=spans.preempted_ms,
            num_preemptions=spans.num_preemptions,
        )

    def _stage_times(self) -> StageTimes | None:
        """Those of the choice with the first token, so that queue and prefill make the time to it; what is a sum is
        summed over all choices."""
        known = [c.times for c in self._choices.values() if c.times is not None]
        if not known:
            return None
        first = self._first.times if self._first is not None else None
        return replace(
            first or known[0],
            detokenize_ns=sum(t.detokenize_ns for t in known),
            preempted_ns=sum(t.preempted_ns for t in known),
            num_preemptions=sum(t.num_preemptions for t in known),
        )

    def _spans(self) -> Spans:
        times = self._stage_times() or StageTimes(self.t_in_ns)
        return Spans(
            tokenize_ms=_span_ms(self.t_in_ns, times.t_tokenized_ns),
            queue_ms=_span_ms(self.t_in_ns, times.t_scheduled_ns),
            prefill_ms=_span_ms(times.t_scheduled_ns, self._t_first_ns),
            decode_ms=_span_ms(self._t_first_ns, self._t_last_ns),
            preempted_ms=ns_to_ms(times.preempted_ns),
            num_preemptions=times.num_preemptions,
        )

    def finish(self) -> None:
        """The answer was sent completely. It ended by length when any of its choices did."""
        reasons = {choice.finish_reason for choice in self._choices.values()}
        assert reasons and reasons <= {"stop", "length"}, reasons
        self._end("length" if "length" in reasons else "stop", None, 200)

    def fail(self, error: BaseException, *, status: int | None = None) -> None:
        """The request was refused or the generation failed; `status` is what the client saw, if not the error's own."""
        refused = isinstance(error, RequestError | OverloadedError) and self._num_output == 0
        if refused and not self._background:
            code = error.code if isinstance(error, RequestError) else "overloaded"
            self.replica.metrics.count_refused(code)
        if isinstance(error, OverloadedError):
            shed = self.replica.metrics.shed
            shed[error.reason] = shed.get(error.reason, 0) + 1
        self._end("error", error_class(error), status or error_status(error), count=not refused)

    def abort(self, why: str, *, status: int | None = None) -> None:
        """It was cut short: why is what `interrupt` was told."""
        if not self._background:
            cut_short = self.replica.metrics.cut_short
            cut_short[why] = cut_short.get(why, 0) + 1
        self._end("abort", why, status)

    def _end(self, reason: FinishReason, error: str | None, status: int | None, *, count: bool = True) -> None:
        assert not self.done, "an attempt ends once"
        self.done = True
        if count and not self._background:
            self._count_request(reason)
        event = self._event(reason, error, status)
        self.replica.sink.write(event)
        if event.content_ref is not None and self.replica.content_sink is not None:
            for index in sorted(self._choices):
                self.replica.content_sink.write(self._content(index))

    def _count_request(self, reason: FinishReason) -> None:
        metrics, times = self.replica.metrics, self._stage_times()
        metrics.finished[reason] += 1
        if self._t_first_ns is None or self._t_last_ns is None:
            metrics.num_without_token += 1
            if reason in ("stop", "length"):  # nothing was to be generated
                metrics.observe("e2e", (self.replica.clock.now_ns() - self.t_in_ns) / NS_PER_S)
                metrics.observe("prompt", self._num_input)
            return
        metrics.observe("e2e", (self._t_last_ns - self.t_in_ns) / NS_PER_S)
        metrics.observe("decode", (self._t_last_ns - self._t_first_ns) / NS_PER_S)
        metrics.observe("prompt", self._num_input)
        metrics.observe("generation", self._num_output)
        begun = [(c.t_last_ns - c.t_first_ns, c) for c in self._choices.values() if c.t_first_ns is not None]
        if num_after_first := sum(c.num_after_first for _, c in begun):
            metrics.observe("tpot", sum(span_ns for span_ns, _ in begun) / NS_PER_S / num_after_first)
        if times is not None and times.t_scheduled_ns is not None:
            metrics.observe("queue", (times.t_scheduled_ns - self.t_in_ns) / NS_PER_S)
            metrics.observe("prefill", (self._t_first_ns - times.t_scheduled_ns) / NS_PER_S)

    def _event(self, reason: FinishReason, error: str | None, status: int | None) -> ReplicaEvent:
        config, times, spans = self.replica.config, self._stage_times(), self._spans()
        return ReplicaEvent(
            event_id=self.event_id,
            trace_id=self.trace.trace_id,
            span_id=self.trace.span_id,
            parent_id=self.trace.parent_span_id,
            request_id=self.request_id,
            attempt=self.number,
            service=config.service,
            traffic_class=self.traffic_class,
            replica=config.replica,
            node=config.node,
            region=config.region,
            hardware=config.hardware,
            device_ids=config.device_ids,
            identity_digest=self.identity_digest,
            model_id=self.model_id,
            t_engine_in_ns=self.t_in_ns,
            t_wall_ns=self.t_wall_ns,
            t_tokenized_ns=times.t_tokenized_ns if times else None,
            t_scheduled_ns=times.t_scheduled_ns if times else None,
            t_first_token_ns=self._t_first_ns,
            t_last_token_ns=self._t_last_ns,
            t_sent_ns=self.replica.clock.now_ns() if status is not None else None,
            tokenize_ms=spans.tokenize_ms,
            queue_ms=spans.queue_ms,
            prefill_ms=spans.prefill_ms,
            decode_ms=spans.decode_ms,
            detokenize_ms=ns_to_ms(times.detokenize_ns) if times else None,
            preempted_ms=spans.preempted_ms,
            num_preemptions=spans.num_preemptions,
            num_input_tokens=self._num_input,
            num_cached_tokens=self._num_cached,
            num_output_tokens=self._num_output,
            token_offsets_us=tuple(sorted(self._offsets_us)),
            finish_reason=reason,
            error_class=error,
            status=status,
            sampling_digest=digest_of(self.call.sampling) if self.call is not None else None,
            content_ref=self._content_ref(),
        )

    def _content_ref(self) -> str | None:
        path = self.replica.config.content_path
        known = self._keep and any(choice.input_ids for choice in self._choices.values())
        return f"{path.name}#{self.event_id}" if known and path is not None else None

    def _content(self, index: int) -> Content:
        choice = self._choices[index]
        with_text = self.replica.config.capture == "text"
        codec = self.replica.codec
        return Content(
            event_id=self.event_id,
            choice=index,
            input_token_ids=choice.input_ids,
            output_token_ids=tuple(choice.output_ids),
            input_text=codec.decode(choice.input_ids) if with_text and codec is not None else None,
            output_text="".join(choice.texts) if with_text else None,
        )
