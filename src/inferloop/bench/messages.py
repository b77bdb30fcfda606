"""What the calling process and a sender tell each other: MessagePack messages, each behind its length."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from inferloop.bench.engine import EngineReport
from inferloop.bench.exchange import Outcome
from inferloop.bench.share import Part
from inferloop.bench.window import DriveOptions, Stop

_LENGTH = struct.Struct(">I")


class Job(msgspec.Struct, tag="job", array_like=True):
    """To a sender, first of all; `num_requests` follow in parts. Its options are its share of the window's. The key
    travels here, never in arguments that others can read."""

    url: str
    api_key: str | None
    ca_file: str | None
    insecure: bool
    options: DriveOptions
    core: int | None
    id_base: bytes
    num_requests: int


class Start(msgspec.Struct, tag="start", array_like=True):
    """To a sender that is ready: when the window begins, by the clock that all share."""

    start_ns: int


class Halt(msgspec.Struct, tag="halt", array_like=True):
    how: Stop


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """From a sender whose connections are open."""


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """From a sender that cannot use its job: the user's mistake, in words."""

    text: str


class Ended(msgspec.Struct, tag="ended", array_like=True):
    """From a sender: requests that have ended, in that order, as `add_outcome` writes them."""

    outcomes: bytes


class Report(msgspec.Struct, tag="report", array_like=True):
    """From a sender, last of all."""

    report: EngineReport


ToSender = Job | Part | Start | Halt
FromSender = Ready | Ended | Refused | Report

_encode_into = msgspec.msgpack.Encoder().encode_into
decode_to_sender = msgspec.msgpack.Decoder(ToSender).decode
decode_from_sender = msgspec.msgpack.Decoder(FromSender).decode
_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


def framed(message: ToSender | FromSender) -> bytes:
    """Behind its length."""
    out = bytearray(_LENGTH.size)
    _encode_into(message, out, -1)
    _LENGTH.pack_into(out, 0, len(out) - _LENGTH.size)
    return bytes(out)


def add_outcome(outbox: bytearray, outcome: Outcome) -> None:
    """Append it, behind its length."""
    start = len(outbox)
    outbox += b"\0\0\0\0"
    _encode_into(outcome, outbox, -1)
    _LENGTH.pack_into(outbox, start, len(outbox) - start - _LENGTH.size)


def outcomes_in(data: bytes | bytearray, start: int = 0) -> Iterator[tuple[int, Outcome]]:
    """(where it begins, it) of all that `add_outcome` appended, from one that begins at `start` on."""
    with memoryview(data) as view:
        while start < len(view):
            end = start + _LENGTH.size + _LENGTH.unpack_from(view, start)[0]
            yield start, _decode_outcome(view[start + _LENGTH.size : end])
            start = end


class Frames:
    """Takes bytes as they come and gives back whole messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[memoryview]:
        """Each is valid until the next is asked for."""
        self._buffer += data
        start = 0
        with memoryview(self._buffer) as view:
            while len(view) - start >= _LENGTH.size:
                end = start + _LENGTH.size + _LENGTH.unpack_from(view, start)[0]
                if end > len(view):
                    break
                with view[start + _LENGTH.size : end] as message:
                    yield message
                start = end
        del self._buffer[:start]
