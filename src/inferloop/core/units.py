"""Unit constants and the conversions that everybody needs."""

from __future__ import annotations

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def ns_to_ms(ns: int | float) -> float:
    """Nanoseconds to milliseconds."""
    return ns / NS_PER_MS


def figure(value: float) -> str:
    """Three significant digits, never an exponent, for people: `0.512`, `78.1`, `2252`."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def human_bytes(num_bytes: int | float) -> str:
    """`96.4 MiB` style text for people."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
