"""A server whose answers differ in all that other tools' definitions tell apart: python -m lab.load_generators.jittered

A frame with a role alone, tokens after a while, one to three of them in a frame, at times a long pause, a frame with
only the finish reason, the usage, and [DONE], each at an instant of its own. Drawn from the number of the request.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator

_MODELS = b'{"object":"list","data":[{"id":"lab","object":"model"}]}'
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
Choice = dict[str, object]


def answer(rng: random.Random) -> Iterator[tuple[float, bytes]]:
    """(seconds since the last, the data of a frame)."""
    yield rng.uniform(0.5, 1.0), _frame({"delta": {"role": "assistant", "content": ""}})
    num_tokens, gap_s = 0, rng.uniform(0.2, 0.6)
    for _ in range(rng.randint(8, 24)):
        count = rng.choice((1, 1, 1, 2, 3))
        num_tokens += count
        yield gap_s, _frame({"delta": {"content": " word" * count}}, inferloop={"num_tokens": count})
        gap_s = 0.4 if rng.random() < 0.03 else rng.uniform(0.03, 0.09)
    yield 0.06, _frame({"delta": {}, "finish_reason": "length"})
    usage = {"prompt_tokens": 20, "completion_tokens": num_tokens, "total_tokens": 20 + num_tokens}
    yield 0.01, _frame(usage=usage)
    yield 0.02, b"[DONE]"


def _frame(choice: Choice | None = None, **more: object) -> bytes:
    frame = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "lab"}
    return json.dumps(frame | {"choices": [] if choice is None else [{"index": 0, **choice}]} | more).encode()


class _Server:
    def __init__(self) -> None:
        self._num = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                _, found, rest = head.partition(b"content-length:")
                if found:
                    await reader.readexactly(int(rest.split(b"\r\n")[0]))
                if head.startswith(b"get"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
                    writer.write(b"content-length: %d\r\n\r\n%s" % (len(_MODELS), _MODELS))
                else:
                    await self._stream(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        self._num += 1
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        writer.write(_HEAD)
        for gap_s, data in answer(random.Random(self._num)):
            due_s += gap_s
            await asyncio.sleep(due_s - loop.time())
            frame = b"data: %s\n\n" % data
            writer.write(b"%x\r\n%s\r\n" % (len(frame), frame))
        await asyncio.sleep(0.02)
        writer.write(b"0\r\n\r\n")


async def start() -> asyncio.Server:
    """Listens on a free port of this machine."""
    return await asyncio.start_server(_Server().serve, "127.0.0.1", 0)
