"""The line from the first rank to another: messages, each behind its length, over a connected socket."""

from __future__ import annotations

import socket
import time

_LENGTH_BYTES = 4


class Link:
    """One end; used by one thread at a time. Its other end is gone when a call raises ConnectionError."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, data: bytes) -> None:
        self._sock.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    def receive(self, timeout_s: float | None = None) -> bytearray:
        """The next message. Raises TimeoutError when it is not there in time; after that the line cannot be used."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            return self._exactly(int.from_bytes(self._exactly(_LENGTH_BYTES, deadline_s), "big"), deadline_s)
        finally:
            self._sock.settimeout(None)

    def _exactly(self, num: int, deadline_s: float | None) -> bytearray:
        data = bytearray(num)
        left = memoryview(data)
        while left:
            if deadline_s is not None:
                self._sock.settimeout(max(deadline_s - time.monotonic(), 1e-3))
            got = self._sock.recv_into(left)
            if not got:
                raise ConnectionError("the other end is closed")
            left = left[got:]
        return data

    def close(self) -> None:
        self._sock.close()
