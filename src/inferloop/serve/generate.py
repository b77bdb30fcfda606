"""The endpoints that generate: check, generate, answer whole or as a stream."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import Send

from inferloop.core.errors import RequestError
from inferloop.serve.answer import Dialect, Prepared, answer_whole, prepare
from inferloop.serve.asgi import send_body, send_json
from inferloop.serve.endpoint import Answering, Endpoint
from inferloop.serve.finish import Attempt
from inferloop.serve.replica import Replica
from inferloop.serve.sse import Encoder
from inferloop.serve.stream import Stream


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
        self._encoder: Encoder | None = None

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
        stream = Stream(self, prepared)
        await stream.run()
        self.attempt.finish()
        await send_body(self.send, stream.last)
