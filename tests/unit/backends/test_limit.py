from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

import pytest
import uvloop

from inferloop.backends.limit import within

Loops = Callable[[], asyncio.AbstractEventLoop]


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connection_that_is_there_when_the_loop_gets_to_look_is_no_timeout(new_loop: Loops) -> None:
    async def connect() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(time.sleep, 0.2)  # as on a machine that has no time for this process
        async with within(0.05):
            transport, _ = await loop.create_connection(asyncio.Protocol, *server.getsockname())
        transport.close()

    with socket.create_server(("127.0.0.1", 0)) as server, asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(connect())


async def test_what_never_comes_is_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        async with within(0.01):
            await asyncio.sleep(3600)
    async with within(3600):
        pass
