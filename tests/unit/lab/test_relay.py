"""The relay between a load generator and a server: what it notes, and that it changes nothing."""

from __future__ import annotations

import asyncio

from lab.load_generators import relay

_FRAMES = (
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"a b"}}],"inferloop":{"num_tokens":2}}\n\n',
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n',
    b"data: [DONE]\n\n",
)
_ANSWER = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"".join(
    b"%x\r\n%s\r\n" % (len(f), f) for f in _FRAMES
)
_END = b"0\r\n\r\n"


async def _run(num: int, *, hang_up: bool) -> tuple[list[bytes], relay.Recorded]:
    """Requests of one connection. With `hang_up` the client leaves at [DONE], and the body's end never comes."""
    recorded, served = relay.Recorded(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(2)
            writer.write(_ANSWER if b"POST" in head else b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            if not hang_up and b"POST" in head:
                writer.write(_END)
        writer.close()
        await writer.wait_closed()
        served.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy = await relay.start(server.sockets[0].getsockname()[1], recorded)
    async with server, proxy:
        reader, writer = await asyncio.open_connection(*proxy.sockets[0].getsockname())
        got = []
        for method in [b"GET", *([b"POST"] * num)]:
            writer.write(method + b" /v1/x HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
            if method == b"GET":
                got.append(await reader.readuntil(b"\r\n\r\n"))
            else:
                got.append(await reader.readexactly(len(_ANSWER) + (0 if hang_up else len(_END))))
        writer.close()
        await asyncio.wait_for(asyncio.gather(recorded.idle.wait(), served.wait(), writer.wait_closed()), 30.0)
    return got, recorded


def test_it_passes_bytes_on_and_notes_streams() -> None:
    got, recorded = asyncio.run(_run(2, hang_up=False))
    assert got[1:] == [_ANSWER + _END] * 2
    first, second = recorded.in_order()
    for r in (first, second):
        assert r.ok and [c.num_tokens for c in r.chunks] == [2] and len(r.empty_frames_ns) == 2
        assert r.t_send_ns <= r.empty_frames_ns[0] <= r.chunks[0].t_ns <= r.t_end_ns
        assert (r.num_input_tokens, r.num_output_tokens, r.finish_reason) == (3, 2, "stop")
    assert first.t_end_ns <= second.t_send_ns


def test_a_client_that_hangs_up_at_done_has_its_answer() -> None:
    _, recorded = asyncio.run(_run(1, hang_up=True))
    (only,) = recorded.timings
    assert only.ok and only.t_end_ns >= only.chunks[0].t_ns
