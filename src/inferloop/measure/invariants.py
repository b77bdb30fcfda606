"""What must hold of every request's stamps, whatever the server did. A violation is a fault of the load generator."""

from __future__ import annotations

from itertools import pairwise

from inferloop.measure.timing import RequestTiming


def violations(r: RequestTiming) -> tuple[str, ...]:
    """In words; empty when the record is sound."""
    found = []
    stamps = [
        r.t_send_ns,
        *([] if r.t_headers_ns is None else [r.t_headers_ns]),
        *(c.t_ns for c in r.chunks),
        r.t_end_ns,
    ]
    if any(b < a for a, b in pairwise(stamps)):
        found.append("stamps run backwards (send, headers, chunks, end)")
    if r.t_intended_ns is not None and r.t_send_ns < r.t_intended_ns:
        found.append("sent before its intended instant")
    inside = (*(() if r.t_first_answer_ns is None else (r.t_first_answer_ns,)), *r.empty_frames_ns)
    if any(not r.t_send_ns <= t <= r.t_end_ns for t in inside):
        found.append("a frame before the send or after the end")
    if any(c.num_tokens <= 0 for c in r.chunks):
        found.append("a chunk without tokens")
    if r.ok and not r.chunks:
        found.append("a success without a token")
    if min(r.num_input_tokens, r.num_output_tokens, r.num_cached_tokens) < 0:
        found.append("a negative token count")
    return tuple(found)
