"""The one response to a request: a whole answer, a stream passed on, or the end of either for a reason of our own."""

from __future__ import annotations

from collections.abc import Callable

from inferloop.backends.http import HttpError
from inferloop.core.clock import Clock
from inferloop.core.units import NS_PER_S
from inferloop.fleet.act.gateway.account import Account
from inferloop.fleet.act.gateway.answers import Answer, Send, error_answer, error_event, send_answer
from inferloop.fleet.act.gateway.frames import FrameBuffer, count_events
from inferloop.fleet.act.gateway.metrics import GatewayMetrics
from inferloop.fleet.act.gateway.upstream import Failed, Streaming, Upstream
from inferloop.fleet.decide.retry import AttemptOutcome


class Reply:
    """Lives as long as its request. Mutates the account's status, first byte and end."""

    def __init__(self, account: Account, send: Send, metrics: GatewayMetrics, clock: Clock) -> None:
        self.account = account
        self._send, self._metrics, self._clock = send, metrics, clock

    async def answer(self, answer: Answer) -> None:
        account = self.account
        account.status, account.answered = answer.status, True
        self._metrics.num_pieces += 1
        if 400 <= answer.status < 500:
            account.error_class = "http_4xx"
        self._mark_first_byte()
        await send_answer(self._send, answer, account.headers())

    async def relay(
        self,
        stream: Streaming,
        upstream: Upstream,
        on_broken: Callable[[Failed], None],
        see: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """Pass an event stream on, event by event. Once begun it ends here: in order, or with an error event, of whose
        cause `on_broken` is told first. `see` gets whole events and says what of them is passed on."""
        account, frames = self.account, FrameBuffer()
        response = stream.response
        account.status = 200
        data: bytes | None = stream.first
        try:
            headers = [*stream.headers, *account.headers()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            while data:
                if account.t_first_byte_ns is None:
                    self._mark_first_byte()
                upstream.num_bytes += len(data)
                self._metrics.num_pieces += 1
                if whole := frames.push(data):
                    if account.num_events is not None:
                        account.num_events += count_events(whole)
                    if shown := see(whole) if see is not None else whole:
                        await self._send({"type": "http.response.body", "body": shown, "more_body": True})
                data = await response.next_bytes()
            last = frames.rest()
        except HttpError as error:
            account.error_class = error.kind
            on_broken(Failed(AttemptOutcome(200, error.kind, answer_began=True), str(error)))
            self._metrics.broken_streams.inc()
            text = f"the replica failed in the middle of the answer: {error}"
            last = error_event(text, "replica_failed", account.num_events)
        finally:
            response.release()
        account.answered = True
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def break_off(self, status: int, message: str, code: str) -> None:
        """End a response for a reason of our own, whether it has begun or not."""
        account = self.account
        account.error_class = code
        if account.status is None:
            await self.answer(error_answer(status, message, code))
        elif not account.answered:
            last = error_event(message, code, account.num_events)
            await self._send({"type": "http.response.body", "body": last, "more_body": False})

    def _mark_first_byte(self) -> None:
        account = self.account
        account.t_first_byte_ns = self._clock.now_ns()
        self._metrics.first_byte.observe((account.t_first_byte_ns - account.t_in_ns) / NS_PER_S)
