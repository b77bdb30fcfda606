"""A request's bytes: all that can be known ahead is made ahead; ids are patched in when it is sent."""

from __future__ import annotations

import secrets

from inferloop.backends.endpoint import Endpoint

_MASK = (1 << 128) - 1
_STRIDE = 0x9E3779B97F4A7C15F39CC0605CEDC835
"""Golden ratio times 2^128, odd: steps of it fill the ring evenly, so that any part of an id tells requests apart."""


def new_base() -> int:
    """What the ids of one window are counted from."""
    return secrets.randbits(128)


def trace_id(base: int, position: int) -> str:
    """32 hex digits."""
    return f"{(base + position * _STRIDE) & _MASK:032x}"


def request_id(trace: str) -> str:
    """The trace's id again: some servers refuse a request whose id is not a UUID, which 32 hex digits are."""
    return trace


class HeadWriter:
    """Makes the bytes of requests to one endpoint."""

    def __init__(self, endpoint: Endpoint, base: int) -> None:
        fixed = [
            f"host: {endpoint.authority}",
            "content-type: application/json",
            "accept: text/event-stream",
            "x-inferloop-timings: 1",
        ]
        fixed += [f"{name}: {value}" for name, value in endpoint.headers]
        self._fixed = "\r\n".join([*fixed, "x-request-id: "])
        self._base_path, self._base = endpoint.base_path, base
        self._heads: dict[str, str] = {}

    def write(self, position: int, path: str, body: bytes) -> bytes:
        """Head and body of the request at a position of the plan."""
        head = self._heads.get(path)
        if head is None:
            head = self._heads[path] = f"POST {self._base_path}{path} HTTP/1.1\r\n{self._fixed}"
        trace = trace_id(self._base, position)
        ids = f"{request_id(trace)}\r\ntraceparent: 00-{trace}-{trace[16:]}-01"
        rest = f"{head}{ids}\r\ncontent-length: {len(body)}\r\n\r\n"
        return rest.encode("latin-1") + body
