"""The connections to one endpoint: opened ahead on a ramp, kept alive, bounded."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Callable

from inferloop.backends.endpoint import Endpoint
from inferloop.backends.limit import within
from inferloop.bench.client.connection import Connection

_OUR_LIMITS = frozenset((errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM))
_NUM_AT_ONCE = 32
"""Opening at a time: a server's queue of connections that it has not accepted yet may be as short as 128."""

Got = Callable[[Connection | None, str, str], bool]
"""Called with a connection, or with an error class and a text. Returns whether it takes the connection, which who has
given up in the meantime does not."""


class Pool:
    """Not thread-safe; lives on one event loop. Raises UsageError for an endpoint whose authority cannot be read."""

    def __init__(self, endpoint: Endpoint, *, max_connections: int, connect_timeout_s: float = 5.0) -> None:
        self._endpoint, self._max, self._timeout_s = endpoint, max_connections, connect_timeout_s
        self._tls = endpoint.tls()
        self._addresses: list[tuple[int, str]] = []
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._waiting: deque[Got] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_opened = self.num_late = self.num_waits = 0
        self.num_bytes_received = 0

    async def open(self, count: int) -> None:
        """Have `count` idle connections, or as many as can be had: whoever needs more hears why."""
        count = min(count, self._max) - len(self._open)
        failed = False

        async def some() -> None:
            nonlocal count, failed
            while count > 0 and not failed:
                count -= 1
                try:
                    self.free(await self._connect())
                except OSError:
                    failed = True

        await asyncio.gather(*(some() for _ in range(min(count, _NUM_AT_ONCE))))

    def take(self) -> Connection | None:
        """The connection that was used last, so that those no longer needed grow old."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    @property
    def has_room(self) -> bool:
        """Whether one more may be opened."""
        return len(self._open) + len(self._tasks) < self._max

    def open_for(self, got: Got) -> None:
        """`got` is called with a new connection, or with one that gets free when no more may be opened."""
        if not self.has_room:
            self.num_waits += 1
            self._waiting.append(got)
        else:
            self._begin(got)

    def free(self, connection: Connection) -> None:
        """Of a connection: its answer is complete, and it can be used again."""
        connection.was_idle = True
        while self._waiting and not connection.closed:
            if self._waiting.popleft()(connection, "", ""):
                return
        self._idle.append(connection)

    def gone(self, connection: Connection) -> None:
        """Of a connection: it is closed."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        self._open_for_waiting()

    async def close(self) -> None:
        """Nobody may wait for an answer any more."""
        self._waiting.clear()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        for connection in list(self._open):
            connection.forget()
        self._idle.clear()
        for _ in range(3):  # for the transports to say that they are gone
            await asyncio.sleep(0)

    def _begin(self, got: Got) -> None:
        self.num_late += 1
        task = asyncio.get_running_loop().create_task(self._open_one(got))
        self._tasks.add(task)
        task.add_done_callback(self._begun)

    def _begun(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._open_for_waiting()  # nobody frees a connection that could not be opened

    def _open_for_waiting(self) -> None:
        while self._waiting and self.has_room:
            self._begin(self._waiting.popleft())

    async def _open_one(self, got: Got) -> None:
        try:
            connection = await self._connect()
        except OSError as error:
            got(None, failure_class(error), f"{self._endpoint.url}: {error}")
            return
        connection.was_idle = False
        if not got(connection, "", ""):
            self.free(connection)

    async def _connect(self) -> Connection:
        """Raises OSError, TimeoutError included."""
        loop = asyncio.get_running_loop()
        endpoint = self._endpoint
        if not self._addresses:
            found = await loop.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
            self._addresses = [(family, str(address[0])) for family, _, _, _, address in found]
        problem: OSError = OSError(f"{endpoint.host} has no address")
        for family, address in list(self._addresses):
            try:
                async with within(self._timeout_s):
                    _, connection = await loop.create_connection(
                        lambda: Connection(self),
                        address,
                        endpoint.port,
                        family=family,
                        ssl=self._tls,
                        server_hostname=endpoint.host if self._tls is not None else None,
                    )
            except TimeoutError:
                problem = OSError(errno.ETIMEDOUT, f"no connection in {self._timeout_s:g} s")
            except OSError as error:
                problem = error
            else:
                if connection.closed:  # lost before anybody had it
                    problem = OSError(errno.ECONNRESET, "closed as soon as it was open")
                    continue
                if self._addresses[0] != (family, address):
                    self._addresses = [(family, address)]
                self._open.add(connection)
                self.num_opened += 1
                return connection
        raise problem


def failure_class(error: OSError) -> str:
    """Running out of ports or descriptors, and names that mean nothing here, are our own fault, not the server's."""
    return "client" if error.errno in _OUR_LIMITS or isinstance(error, socket.gaierror) else "connect"
