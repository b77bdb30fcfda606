"""Serves a request of a service with several models: one model after another until an answer holds.

A client never sees half of one model's answer and then another's: an answer that a check can send on to the next
model is held back until it is complete and checked. Everything else streams as it comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from inferloop.backends.http import Header, HttpError
from inferloop.contract.workload import Routing
from inferloop.core.clock import Clock
from inferloop.core.units import NS_PER_MS, NS_PER_S
from inferloop.fleet.act.gateway.account import Hop
from inferloop.fleet.act.gateway.answers import Answer, error_answer
from inferloop.fleet.act.gateway.ask import Asked, Asker, failure_answer, refusal_answer
from inferloop.fleet.act.gateway.body import RoutedBody, read_body
from inferloop.fleet.act.gateway.config import GatewayConfig
from inferloop.fleet.act.gateway.metrics import GatewayMetrics
from inferloop.fleet.act.gateway.model_list import MODELS_PATH, list_models
from inferloop.fleet.act.gateway.read_answer import (
    BrokenStreamError,
    Read,
    UnreadableError,
    UsageTap,
    clean_stream,
    read_stream,
    read_whole,
    tokens_alone,
    without_logprobs,
)
from inferloop.fleet.act.gateway.reply import Reply
from inferloop.fleet.act.gateway.upstream import Failed, Streaming, Upstream, UpstreamRequest
from inferloop.fleet.decide.answer_checks import UNAVAILABLE, AnswerSummary, Wants, failed_checks, may_fail
from inferloop.fleet.decide.retry import AttemptOutcome, is_replica_fault
from inferloop.fleet.decide.router import Choice
from inferloop.fleet.decide.routes import HANDOVER_S, Ask, Deliver, Route, choose_route, class_names, next_step

_THREAD_ABOVE_BYTES = 65536
_SHOWN_CHARS = 100
_GRACE_S = HANDOVER_S / 2
"""How much later than the replica, which is told the deadline, we give up ourselves."""
_CANCELLED = 499
_CLASS_HEADER = "x-inferloop-class"
_DEADLINE_HEADER, _ATTEMPT_HEADER = "x-request-timeout-ms", "x-inferloop-attempt"


@dataclass(slots=True)
class _Work:
    """One request under way. `kept` is the latest good answer, with the hop that gave it: delivered when nothing
    better comes."""

    request: UpstreamRequest
    body: RoutedBody
    route: Route
    wants: Wants
    deadline_ns: int | None
    kept: tuple[Answer, Hop] | None = None


class RoutedServing:
    """Shares `upstreams` with the gateway."""

    def __init__(
        self,
        routing: Routing,
        asker: Asker,
        config: GatewayConfig,
        metrics: GatewayMetrics,
        clock: Clock,
        upstreams: Mapping[str, Upstream],
    ) -> None:
        self._routing, self._asker, self._config = routing, asker, config
        self._metrics, self._clock, self._upstreams = metrics, clock, upstreams

    async def serve(self, path: str, request: UpstreamRequest, reply: Reply) -> None:
        """Exactly one response is sent, unless the caller leaves first: then the hop that runs is cancelled."""
        account = reply.account
        if request.method == "GET" and path.startswith(MODELS_PATH):
            models = await list_models(self._config, self._asker, request, account)
            await reply.answer(models)
            return
        raw = request.body or b""
        body = await asyncio.to_thread(read_body, path, raw) if len(raw) > _THREAD_ABOVE_BYTES else read_body(path, raw)
        if place := body.not_text:
            text = f"{place}: only text content is supported by the models of this service"
            await reply.answer(error_answer(400, text, "unsupported_content", param=place))
            return
        service, asked, classes = self._config.service, body.model, class_names(self._routing, self._config.service)
        if asked in classes:
            account.traffic_class, asked = classes[asked].traffic_class, service
            others = [pair for pair in request.headers if pair[0] != _CLASS_HEADER]
            request = replace(request, headers=[*others, (_CLASS_HEADER, account.traffic_class)])
        route = choose_route(self._routing, service, asked, account.traffic_class)
        if route is None:
            known = ", ".join(filter(None, (service, *classes, *(m.name for m in self._routing.models))))
            text = f"the model {(body.model or '')[:_SHOWN_CHARS]!r} does not exist; known: {known}"
            await reply.answer(error_answer(404, text, "model_not_found", param="model"))
            return
        deadline_ns = _deadline_ns(request.headers, account.t_in_ns)
        await self._run(_Work(request, body, route, body.expecting(route), deadline_ns), reply)

    async def _run(self, work: _Work, reply: Reply) -> None:
        account, route = reply.account, work.route
        step: Ask | Deliver = Ask(route.models[0], self._left_s(work))
        because = route.why
        while isinstance(step, Ask):
            hop = account.begin_hop(self._clock.now_ns(), step.model, because, self._routing.model(step.model).price)
            self._metrics.hops.labels(step.model).inc()
            is_last = len(account.hops) == len(route.models)
            held = not is_last and work.body.dialect is not None and may_fail(self._routing, work.wants)
            sent = self._request(work, hop, len(account.hops), step.within_s, held=held)
            try:
                async with (
                    asyncio.timeout(None if step.within_s is None else step.within_s + _GRACE_S) as limit,
                    self._asker.ask(sent, hop) as asked,
                ):
                    if isinstance(asked.result, Streaming) and not held:
                        limit.reschedule(None)  # what has begun is ended by the replica, which knows the deadline too
                        await self._relay(asked, work, hop, reply)
                        return
                    outcome: Answer | Failed | Choice = await self._whole(asked, work, hop, held=held)
            except TimeoutError:
                hop.status, hop.error_class = None, "timeout"
                outcome = Failed(AttemptOutcome(None, "timeout"), "the answer was not complete in time")
            step = self._judge(outcome, work, reply, hop)
            because = f"escalated:{','.join(hop.failed_checks)}"
            if isinstance(step, Deliver):
                await self._deliver(outcome, work, step, reply, hop)

    async def _relay(self, asked: Asked, work: _Work, hop: Hop, reply: Reply) -> None:
        assert isinstance(asked.result, Streaming) and asked.upstream is not None
        upstream, tap = asked.upstream, UsageTap(hides=not work.body.asks_usage)

        def note(failed: Failed) -> None:
            hop.error_class = failed.outcome.error
            self._asker.note_fault(upstream.replica_id, failed)

        try:
            await reply.relay(asked.result, upstream, note, tap)
        finally:
            hop.tokens = tap.tokens
            self._count_cost(hop)

    async def _whole(self, asked: Asked, work: _Work, hop: Hop, *, held: bool) -> Answer | Failed | Choice:
        """The result with a stream read to its end, and what the answer says of itself noted on the hop."""
        result = asked.result
        streamed = isinstance(result, Streaming)
        if isinstance(result, Streaming):
            assert asked.upstream is not None
            result = await self._hold(result, asked.upstream, hop)
        if not isinstance(result, Answer):
            return result
        if result.status != 200:
            hop.error_class = "http_4xx"
            return result
        try:
            read = await self._read(result.body, work, streamed=streamed, held=held)
        except BrokenStreamError as error:
            if error.ended is not None:  # by its caller or its deadline, as it is told before a stream begins
                hop.status, hop.error_class = error.ended, "http_4xx"
                return Answer(error.ended, error.body)
            hop.status, hop.error_class = 502, "truncated"
            return Failed(AttemptOutcome(502, "truncated", answer_began=True), str(error))
        except UnreadableError:
            return result
        hop.tokens = read.tokens
        self._count_cost(hop)
        if held:
            check = partial(failed_checks, self._routing, work.wants, read.summary)
            hop.failed_checks = await asyncio.to_thread(check) if work.wants.has_schema else check()
        return self._cleaned(result, work, streamed=streamed, held=held)

    async def _hold(self, stream: Streaming, upstream: Upstream, hop: Hop) -> Answer | Failed:
        """Read a stream to its end, unseen. Once it has begun, the work is not done twice (as for whole answers)."""
        parts, response = [], stream.response
        data: bytes | None = stream.first
        try:
            while data:
                parts.append(data)
                upstream.num_bytes += len(data)
                self._metrics.num_pieces += 1
                data = await response.next_bytes()
            return Answer(200, b"".join(parts), tuple(stream.headers))
        except HttpError as error:
            hop.error_class = error.kind
            failed = Failed(AttemptOutcome(200, error.kind, answer_began=True), str(error))
            self._asker.note_fault(upstream.replica_id, failed)
            return failed
        finally:
            response.release()

    async def _read(self, answer: bytes, work: _Work, *, streamed: bool, held: bool) -> Read:
        """Raises BrokenStreamError, UnreadableError. What is checked is read whole, a large answer beside the loop."""
        dialect = work.body.dialect
        if dialect is None or not held:
            return Read(AnswerSummary(()), tokens_alone(answer))
        read = partial(read_stream if streamed else read_whole, reads_logprobs=work.body.reads_logprobs)
        if len(answer) > _THREAD_ABOVE_BYTES:
            return await asyncio.to_thread(read, answer, dialect)
        return read(answer, dialect)

    def _cleaned(self, answer: Answer, work: _Work, *, streamed: bool, held: bool) -> Answer:
        """Without what only we asked for."""
        logprobs = held and work.body.adds_logprobs(self._needs_logprobs())
        usage = streamed and not work.body.asks_usage
        if streamed and (logprobs or usage):
            return replace(answer, body=clean_stream(answer.body, usage=usage, logprobs=logprobs))
        return replace(answer, body=without_logprobs(answer.body)) if logprobs else answer

    def _judge(self, outcome: Answer | Failed | Choice, work: _Work, reply: Reply, hop: Hop) -> Ask | Deliver:
        """Who is asked next. Keeps a good answer."""
        escalation, num_asked = self._routing.escalation, len(reply.account.hops)
        if isinstance(outcome, Answer) and outcome.status == 200:
            work.kept = (outcome, hop)
        elif escalation is not None and escalation.unavailable and _is_missing(outcome):
            hop.failed_checks = (UNAVAILABLE,) if num_asked < len(work.route.models) else ()
        step = next_step(work.route, num_asked, hop.failed_checks, self._left_s(work))
        for check in hop.failed_checks:
            following = step.model if isinstance(step, Ask) else step.missed or "none"
            self._metrics.escalations.labels(hop.model, check, following).inc()
        return step

    async def _deliver(
        self, outcome: Answer | Failed | Choice, work: _Work, step: Deliver, reply: Reply, hop: Hop
    ) -> None:
        """The last answer that there is; without any, or for who has cancelled, what became of the last attempt."""
        account, retry_after_s = reply.account, self._config.retry_after_s
        account.missed = step.missed
        cancelled = isinstance(outcome, Answer) and outcome.status == _CANCELLED
        if work.kept is not None and not cancelled:
            answer, account.answered_by = work.kept
            if account.answered_by is not hop:
                account.missed = _why_missed(outcome)
            await reply.answer(answer)
        elif isinstance(outcome, Choice):
            assert outcome.refusal is not None
            account.admission, account.error_class = f"refused:{outcome.refusal}", "overloaded"
            await reply.answer(refusal_answer(outcome.refusal, retry_after_s, hop.model))
        elif isinstance(outcome, Failed):
            account.error_class = hop.error_class
            await reply.answer(failure_answer(outcome, retry_after_s))
        else:
            await reply.answer(outcome)

    def _request(self, work: _Work, hop: Hop, number: int, within_s: float | None, *, held: bool) -> UpstreamRequest:
        """The request for one hop: its own span, its number, what is left of the deadline, and the model's name."""
        assert hop.model is not None
        ours = {"traceparent", _ATTEMPT_HEADER} | ({_DEADLINE_HEADER} if within_s is not None else set())
        headers: list[Header] = [pair for pair in work.request.headers if pair[0] not in ours]
        headers += [("traceparent", hop.trace.header), (_ATTEMPT_HEADER, str(number))]
        if within_s is not None:
            headers.append((_DEADLINE_HEADER, str(max(1, round(within_s * 1000)))))
        body = work.body.for_model(hop.model, needs_logprobs=held and self._needs_logprobs())
        sent_body = None if work.request.body is None else body
        return replace(work.request, headers=headers, body=sent_body)

    def _needs_logprobs(self) -> bool:
        return self._routing.escalation is not None and self._routing.escalation.low_logprob is not None

    def _left_s(self, work: _Work) -> float | None:
        return None if work.deadline_ns is None else (work.deadline_ns - self._clock.now_ns()) / NS_PER_S

    def _count_cost(self, hop: Hop) -> None:
        if hop.cost_usd is not None:
            self._metrics.cost.labels(hop.model).inc(hop.cost_usd)


def _deadline_ns(headers: list[Header], t_in_ns: int) -> int | None:
    """What the caller allows, as replicas read it; a value that they refuse is left to them."""
    told = next((value for name, value in headers if name == _DEADLINE_HEADER), "")
    if not (told.isascii() and told.isdecimal() and len(told) < 10 and int(told) > 0):
        return None
    return t_in_ns + int(told) * NS_PER_MS


def _is_missing(outcome: Answer | Failed | Choice) -> bool:
    """No answer, by nobody's fault but the model's replicas'; a refusal of the request itself would be repeated."""
    return isinstance(outcome, Choice) or (isinstance(outcome, Failed) and is_replica_fault(outcome.outcome))


def _why_missed(outcome: Answer | Failed | Choice) -> str:
    """Why the model that was asked last did not give the answer, in one word."""
    if isinstance(outcome, Choice):
        return outcome.refusal or "refused"
    if isinstance(outcome, Failed):
        return outcome.outcome.error or f"http_{outcome.outcome.status}"
    return f"http_{outcome.status}"
