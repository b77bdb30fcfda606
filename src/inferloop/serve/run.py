"""One replica as a process: take the port, serve, drain on SIGTERM, leave with 0."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FrameType

import uvicorn
import uvloop
from starlette.applications import Starlette

from inferloop.core.errors import InferloopError, PortInUseError
from inferloop.serve.asgi import Outermost
from inferloop.serve.http import HttpProtocol
from inferloop.serve.replica import Replica


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, not yet listening, so that the port is ours before a model is loaded. Port 0: any free one.

    Raises PortInUseError, also when the host is not one of this machine's addresses.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off on accepted connections only where the protocol number is spelled out
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if port:  # with a free choice it would let two starting processes share a port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise _port_error(host, port, error) from None
    return sock


def _port_error(host: str, port: int, error: OSError) -> PortInUseError:
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(f"port {port} on {host} is in use", fix="Stop that server, or choose another --port.")
    return PortInUseError(f"cannot listen on {host}:{port}: {error.strerror}", fix="Choose another --host or --port.")


def _config(app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        Outermost(app),
        http=HttpProtocol,
        ws="none",
        loop="none",
        lifespan="on",
        access_log=False,
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,
    )


class _Server(uvicorn.Server):
    """SIGTERM and the first SIGINT drain; a second signal aborts what still runs."""

    def __init__(
        self,
        config: uvicorn.Config,
        replica: Replica,
        on_started: Callable[[], None],
        lost: Future[InferloopError] | None,
    ) -> None:
        super().__init__(config)
        self._replica, self._on_started, self._lost = replica, on_started, lost
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)
        if self.started:
            _spare_collector()
            self._on_started()
        if self._lost is not None:
            self._lost.add_done_callback(self._on_lost)

    def _on_lost(self, _: object) -> None:
        """What the generator needs is gone. Its answers have ended, and no new ones begin. Any thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._begin_drain)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None:
            raise KeyboardInterrupt
        self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        if self._drain is None:
            self._drain = asyncio.create_task(self._drain_and_exit())
        else:
            self._replica.abort_all("drain")

    async def _drain_and_exit(self) -> None:
        try:
            await self._replica.drain()
        finally:
            self.should_exit = True


def _spare_collector() -> None:
    """What is loaded by now stays for good and need not be looked through, not even once, which would hold up the first
    request; what comes with requests hardly ever refers to itself, so that it can be looked through more rarely."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


def serve(
    app: Starlette,
    sock: socket.socket,
    *,
    port_file: Path | None = None,
    announce: bool = True,
    tell: Callable[[str], None] | None = None,
    lost: Future[InferloopError] | None = None,
) -> None:
    """Serve `app` (of serve.app.build_app) until SIGTERM or SIGINT, then drain and return. Blocks; main thread only.
    Serving ends, too, when `lost` is set: its error is raised then.

    Once listening, the bound port is printed as one JSON line on stdout, or written to `port_file` (whole or not at
    all), and `tell` gets the URL. Raises PortInUseError when another process began to listen on the port after `bind`.
    """
    host, port = sock.getsockname()[:2]

    def started() -> None:
        line = json.dumps({"host": host, "port": port, "pid": os.getpid()})
        if port_file is not None:
            partial = port_file.with_name(port_file.name + ".partial")
            partial.write_text(line + "\n")
            partial.rename(port_file)
        elif announce:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
        if tell is not None:
            tell(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    server = _Server(_config(app), app.state.replica, started, lost)
    thresholds = gc.get_threshold()
    try:
        sock.listen(2048)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server.serve(sockets=[sock]))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise _port_error(host, port, error) from None
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        sock.close()
    if lost is not None and lost.done():
        raise lost.result()


class _QuietServer(uvicorn.Server):
    """Leaves the process's signal handlers alone, and ends as soon as it is told instead of at its next tick."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.leave = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.leave.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(app: Starlette, *, wait_ready: bool = False) -> AsyncIterator[str]:
    """Serve `app` on a free local port of the running event loop, for tests and tools; gives the base URL.
    `wait_ready`: only once its replica is ready."""
    with bind("127.0.0.1", 0) as sock:
        server = _QuietServer(_config(app))
        task = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started and not task.done():  # noqa: ASYNC110  uvicorn offers no event
            await asyncio.sleep(0.005)
        replica = getattr(app.state, "replica", None)
        try:
            while wait_ready and replica is not None and replica.not_ready():  # noqa: ASYNC110  as above
                await asyncio.sleep(0.005)
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            if isinstance(replica, Replica):
                replica.abort_all("drain")
            server.leave.set()
            await task
