"""The endpoints that generate: check, generate, answer whole or as a stream."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.datastructures import Headers
from starlette.types import Send

from inferloop.core.errors import RequestError
from inferloop.serve import sse
from inferloop.serve.answer import Dialect, Prepared, answer_whole, prepare, public_finish
from inferloop.serve.asgi import send_body, send_json, start
from inferloop.serve.choices import generate_all
from inferloop.serve.endpoint import Answering, Endpoint
from inferloop.serve.finish import Attempt
from inferloop.serve.replica import Replica


class GenerateEndpoint(Endpoint):
    def __init__(self, replica: Replica, dialect: Dialect) -> None:
        super().__init__(replica)
        self._dialect = dialect

    def answering(self, attempt: Attempt, headers: Headers, send: Send) -> Answering:
        return _Answer(attempt, self._dialect, send, with_timings=headers.get("x-inferloop-timings") == "1")


class _Answer(Answering):
    def __init__(self, attempt: Attempt, dialect: Dialect, send: Send, *, with_timings: bool) -> None:
        super().__init__(attempt, send)
        self._dialect, self._with_timings = dialect, with_timings
        self._encoder: sse.Encoder | None = None

    async def run(self, body: bytes) -> None:
        prepared = await prepare(self.attempt, self._dialect, body, with_timings=self._with_timings)
        self._encoder = prepared.encoder
        await (self._stream(prepared) if prepared.stream else self._whole(prepared))

    def broken(self, error: BaseException) -> bytes:
        assert self._encoder is not None, "only a stream begins before it is complete"
        return self._encoder.broken(error)

    async def failed(self, error: BaseException) -> None:
        if isinstance(error, RequestError):
            self._dialect.in_its_words(error)
        await super().failed(error)

    async def _whole(self, prepared: Prepared) -> None:
        body = await answer_whole(self.attempt, prepared)
        self.started = True
        self.attempt.finish()
        await send_json(self.send, 200, body)

    async def _stream(self, prepared: Prepared) -> None:
        """The headers go out with the first delta, so that what fails before it still gets its own status."""
        attempt, encoder, requests = self.attempt, prepared.encoder, prepared.requests
        num_open, last, send = len(requests), b"", self.send
        async with contextlib.aclosing(generate_all(attempt.replica.generator, requests)) as deltas:
            async for index, delta in deltas:
                attempt.on_delta(delta, index)
                opening = b"" if self.started else encoder.opening(delta)
                if delta.prompt_logprobs is None:
                    chunk = opening + encoder.chunk(index, delta)
                else:  # of a long prompt they are megabytes, which must not hold up other requests
                    chunk = opening + await asyncio.to_thread(encoder.chunk, index, delta)
                if not self.started:
                    self.started = True
                    await start(self.send, 200, sse.HEADERS)
                if delta.finish_reason is not None:
                    finish = public_finish(delta.finish_reason)
                    num_open -= 1
                    if num_open:
                        chunk += encoder.ended(index, finish)
                    else:
                        last = encoder.closing(index, finish, attempt.usage, attempt.timings(0))
                if chunk:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        if num_open:
            public_finish(None)
        attempt.finish()
        await send_body(self.send, last)
