"""Runs the gateway on the current event loop with uvicorn and the replicas' own HTTP protocol, on a socket that is
bound before anything starts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from inferloop.fleet.act.gateway.app import Gateway
from inferloop.fleet.act.gateway.unread import DropUnread
from inferloop.fleet.act.ports import bind_listener
from inferloop.serve.http import HttpProtocol
from inferloop.serve.stream import STALL_S

_BACKLOG = 2048


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the owner of the process, not to a server inside it."""
        yield


class GatewayServer:
    """A gateway that accepts connections. Made by `start`."""

    def __init__(self, server: _Server, task: asyncio.Task[None], url: str) -> None:
        self._server, self._task, self.url = server, task, url

    @classmethod
    async def start(
        cls,
        gateway: Gateway,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        listener: socket.socket | None = None,
        stall_s: float = STALL_S,
    ) -> GatewayServer:
        """Listen; port 0 picks a free one. On `listener` instead, where one is given, which is the server's from then
        on. A caller who takes nothing of an answer for `stall_s` is hung up on. Raises PortInUseError when the address
        is taken."""
        listener = listener or bind_listener(host, port)
        host, bound_port = listener.getsockname()[:2]
        config = uvicorn.Config(
            DropUnread(gateway, stall_s),
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            access_log=False,
            log_config=None,
            log_level="critical",  # the gateway answers and logs its own failures
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=None,
        )
        server = _Server(config)
        task = asyncio.create_task(server.serve([listener]), name="inferloop-gateway")
        while not server.started:
            if task.done():
                listener.close()
                task.result()
                raise RuntimeError("the gateway's server ended before it had started")
            await asyncio.sleep(0.001)
        shown = f"[{host}]" if ":" in host else host
        return cls(server, task, f"http://{shown}:{bound_port}")

    async def stop(self, drain_timeout_s: float = 30.0) -> None:
        """Accept nothing new, let running requests end for up to `drain_timeout_s`, then cut them. Idempotent; when
        cancelled it cuts at once and raises."""
        # uvicorn takes whole seconds and reads them when the shutdown begins
        self._server.config.timeout_graceful_shutdown = max(0, round(drain_timeout_s))
        self._server.should_exit = True
        try:
            await asyncio.wait([self._task])  # neither cancels the server with us nor raises for it
        except asyncio.CancelledError:
            self._task.cancel()
            for listening in self._server.servers:
                listening.close()
            raise
