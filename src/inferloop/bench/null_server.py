"""A server that answers at once with a stream of one-token frames: python -m inferloop.bench.null_server NUM_TOKENS.

Prints its port; ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import cast

import uvloop

_HEAD_END = b"\r\n\r\n"


def _answer(num_tokens: int) -> bytes:
    frames = [b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'] * num_tokens
    usage = f'{{"prompt_tokens":1,"completion_tokens":{num_tokens}}}'
    last = f'data: {{"choices":[{{"index":0,"delta":{{}},"finish_reason":"length"}}],"usage":{usage}}}\n\n'
    body = b"".join([*frames, last.encode(), b"data: [DONE]\n\n"])
    head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head.encode() + f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"


class _Answers(asyncio.Protocol):
    def __init__(self, answer: bytes) -> None:
        self._answer, self._seen = answer, bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._seen += data
        while (end := self._seen.find(_HEAD_END)) >= 0:
            head = bytes(self._seen[:end]).lower()
            found = head.find(b"content-length:")
            length = int(head[found + 15 :].split(b"\r\n", 1)[0]) if found >= 0 else 0
            if len(self._seen) < end + 4 + length:
                return
            del self._seen[: end + 4 + length]
            self._transport.write(self._answer)


async def _serve(num_tokens: int) -> None:
    loop = asyncio.get_running_loop()
    answer = _answer(num_tokens)
    server = await loop.create_server(lambda: _Answers(answer), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.buffer.read)
    server.close()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve(int(sys.argv[1])))
