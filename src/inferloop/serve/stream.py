"""One streamed answer: chunks are written where deltas come up, and no task is woken for a token.

Deltas come on the event loop, outside of any task, and a chunk is sent by running ASGI's `send` as far as it goes:
to its end, while the connection takes what is written. When it has to wait, for a client that reads slowly or for a
thread, the rest of it is left to a task, and deltas queue up behind it until it has caught up. A client that falls too
far behind, or takes nothing for too long, has its answer ended: it holds up memory here and a place in the batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Generator
from types import coroutine
from typing import Any

from inferloop.backends.protocols import Delta
from inferloop.core.units import MIB
from inferloop.serve import sse
from inferloop.serve.answer import Prepared, public_finish
from inferloop.serve.asgi import start
from inferloop.serve.choices import generate_all
from inferloop.serve.endpoint import Answering

MAX_UNSENT_BYTES = 4 * MIB
"""Of one answer, about; some 20 000 chunks, beside what the connection itself holds."""
STALL_S = 60.0


class Stream:
    """`run` sends all but `last`, which ends the answer. The headers go out with the first delta, so that what fails
    before it still gets its own status."""

    def __init__(self, answer: Answering, prepared: Prepared) -> None:
        self._answer, self._attempt, self._send_part = answer, answer.attempt, answer.send_part
        self._encoder, self._requests = prepared.encoder, prepared.requests
        self._num_open = len(prepared.requests)
        self._behind = deque[tuple[int, Delta]]()
        self._num_unsent_bytes, self._gave_up = 0, False
        self._task = asyncio.current_task()
        self._catching_up: asyncio.Task[None] | None = None
        """Sends what had to wait, then what is `_behind` it."""
        self.last = b""

    async def run(self) -> None:
        try:
            await generate_all(self._attempt.replica.generator, self._requests, self._take)
            if self._catching_up is not None:
                await self._catching_up
        finally:
            if self._catching_up is not None:
                self._catching_up.cancel()
                await asyncio.gather(self._catching_up, return_exceptions=True)
        if self._num_open:
            public_finish(None)

    def _take(self, index: int, delta: Delta) -> None:
        if self._gave_up:
            return
        if self._catching_up is not None:
            if not self._catching_up.done():
                self._hold(index, delta)
                return
            self._catching_up.result()
            self._catching_up = None
        plain = delta.finish_reason is None and delta.prompt_logprobs is None
        if plain and self._answer.started:  # nearly always
            self._attempt.on_delta(delta, index)
            chunk = self._encoder.chunk(index, delta)
            if not chunk:
                return
            sending = self._send_part({"type": "http.response.body", "body": chunk, "more_body": True}).__await__()
        else:
            sending = self._handle(index, delta).__await__()
        try:
            awaited = next(sending)
        except StopIteration:
            return
        self._catching_up = asyncio.create_task(self._catch_up(_rest(sending, awaited)))

    def _hold(self, index: int, delta: Delta) -> None:
        self._num_unsent_bytes += _num_bytes(delta)
        if self._num_unsent_bytes > MAX_UNSENT_BYTES:
            self._give_up()
        elif not self._gave_up:
            self._behind.append((index, delta))

    def _give_up(self) -> None:
        self._gave_up = True
        self._behind.clear()
        assert self._task is not None
        self._attempt.interrupt(self._task, "unread")

    async def _catch_up(self, sending: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(STALL_S):
                await sending
            while self._behind:
                index, delta = self._behind.popleft()
                self._num_unsent_bytes -= _num_bytes(delta)
                async with asyncio.timeout(STALL_S):
                    await self._handle(index, delta)
        except TimeoutError:
            self._give_up()

    async def _handle(self, index: int, delta: Delta) -> None:
        answer, encoder = self._answer, self._encoder
        self._attempt.on_delta(delta, index)
        chunk = b"" if answer.started else encoder.opening(delta)
        if delta.prompt_logprobs is None:
            chunk += encoder.chunk(index, delta)
        else:  # of a long prompt they are megabytes, which must not hold up other requests
            chunk += await asyncio.to_thread(encoder.chunk, index, delta)
        if not answer.started:
            await start(answer.send, 200, sse.HEADERS)
            answer.started = True
        if delta.finish_reason is not None:
            chunk += self._end_one(index, delta)
        if chunk:
            await self._send_part({"type": "http.response.body", "body": chunk, "more_body": True})

    def _end_one(self, index: int, delta: Delta) -> bytes:
        finish = public_finish(delta.finish_reason)
        self._num_open -= 1
        if self._num_open:
            return self._encoder.ended(index, finish)
        self.last = self._encoder.closing(index, finish, self._attempt.usage, self._attempt.timings(0))
        return b""


def _num_bytes(delta: Delta) -> int:
    """Of the chunk that it becomes, and of itself; about."""
    num_told = sum(1 + len(told.top) for told in delta.logprobs or ())
    return 256 + len(delta.text) + 8 * len(delta.token_ids) + 128 * num_told


@coroutine
def _rest(begun: Generator[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """What is left of something that waits for `awaited`."""
    try:
        while True:
            try:
                result = yield awaited
            except BaseException as error:
                awaited = begun.throw(error)
            else:
                awaited = begun.send(result)
    except StopIteration:
        return
