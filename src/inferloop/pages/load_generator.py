"""What the load generator itself reaches and adds on the machine that it ran on, beside the numbers that it took."""

from __future__ import annotations

from markupsafe import Markup

from inferloop.pages.html import Child, facts, join, tag
from inferloop.pages.text import ABSENT, number
from inferloop.pages.verdicts import Json, mapping


def load_generator(summary: Json) -> Markup | None:
    """None for a run that was not calibrated."""
    found = mapping(summary.get("calibration"))
    if not found:
        return None
    paced = number(found.get("paced_qps"))
    rows: list[tuple[str, Child]] = [
        ("Adds to a TTFT, p50", _ms(found.get("ttft_p50_ms"))),
        ("Adds to a TTFT, p95", _ms(found.get("ttft_p95_ms"))),
        ("Sends late by, p95", _ms(found.get("send_delay_p95_ms"))),
        (f"Reaches, of streams of {number(found.get('num_tokens'))} tokens", _rate(found.get("max_qps"))),
        ("Requests that failed", number(found.get("num_failed"))),
    ]
    text = (
        f"Measured on the same machine just before this run, against a server that answers at once; the latencies at "
        f"{paced} requests/s. It is part of every latency here and is never subtracted."
    )
    return join([tag("h3", "The load generator alone"), tag("p", text, class_="soft"), facts(rows)])


def _ms(value: object) -> str:
    return ABSENT if number(value) == ABSENT else f"{number(value)} ms"


def _rate(value: object) -> str:
    return ABSENT if number(value) == ABSENT else f"{number(value)} streams/s"
