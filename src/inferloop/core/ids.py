"""Request ids and W3C Trace Context (https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"^([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$")
_SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def new_id(prefix: str) -> str:
    """`prefix-` and 24 random hex digits; without the hyphen where the prefix ends in `_`."""
    joint = "" if prefix.endswith("_") else "-"
    return f"{prefix}{joint}{os.urandom(12).hex()}"


def accept_request_id(given: str | None) -> str:
    """The caller's `x-request-id` when it is short and printable, else a fresh one (never log hostile bytes)."""
    return given if given and _SAFE_ID.fullmatch(given) else new_id("req")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One position in a trace: the trace, this span, and the span that caused it."""

    trace_id: str
    span_id: str
    parent_span_id: str | None
    sampled: bool

    @classmethod
    def new(cls) -> TraceContext:
        return cls(os.urandom(16).hex(), os.urandom(8).hex(), None, True)

    @classmethod
    def from_header(cls, header: str | None) -> TraceContext:
        """Continue the caller's trace with a fresh span; an absent or malformed header starts a new trace."""
        found = _TRACEPARENT.match(header.strip().lower()) if header else None
        if found is None:
            return cls.new()
        version, trace_id, parent, flags, rest = found.groups()
        malformed = version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(parent, 16)
        if malformed:
            return cls.new()
        return cls(trace_id, os.urandom(8).hex(), parent, bool(int(flags, 16) & 1))

    @property
    def header(self) -> str:
        """What to send downstream as `traceparent`: this span becomes the parent."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"
