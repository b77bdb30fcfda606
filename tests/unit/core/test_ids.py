from __future__ import annotations

import pytest

from inferloop.core.ids import TraceContext, accept_request_id

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_valid_traceparent_is_continued_with_a_fresh_span() -> None:
    context = TraceContext.from_header(f"00-{TRACE}-{SPAN}-01")
    assert (context.trace_id, context.parent_span_id, context.sampled) == (TRACE, SPAN, True)
    assert context.span_id != SPAN
    assert context.header == f"00-{TRACE}-{context.span_id}-01"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "garbage",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-extra",
        f"00-{TRACE[:-1]}-{SPAN}-01",
    ],
)
def test_a_malformed_traceparent_starts_a_new_trace(header: str | None) -> None:
    context = TraceContext.from_header(header)
    assert context.trace_id != TRACE
    assert context.parent_span_id is None


def test_a_later_version_with_more_fields_is_understood() -> None:
    assert TraceContext.from_header(f"01-{TRACE}-{SPAN}-00-later").trace_id == TRACE


def test_the_unsampled_flag_travels_on() -> None:
    assert TraceContext.from_header(f"00-{TRACE}-{SPAN}-00").header.endswith("-00")


@pytest.mark.parametrize("hostile", ["a b", "x" * 129, "new\nline", "end\n", "", "caf\u00e9"])
def test_a_hostile_request_id_is_replaced(hostile: str) -> None:
    assert accept_request_id(hostile) != hostile


def test_a_decent_request_id_is_kept() -> None:
    assert accept_request_id("chatcmpl-42:a_b.c") == "chatcmpl-42:a_b.c"
