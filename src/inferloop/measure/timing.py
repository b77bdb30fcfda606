"""One request's stamps and the latencies derived from them.

DEFINITIONS says what each number is; all come from one monotonic clock and are in milliseconds. Chunks may hold several
tokens (speculation, servers that bundle), so what is about tokens counts tokens, and what is about chunks says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inferloop.core.units import NS_PER_S, ns_to_ms
from inferloop.measure.chunks import Chunk as Chunk

READING_TOK_S = 5.3
"""238 words a minute, the mean of silent reading in English (Brysbaert 2019), at 4/3 tokens a word."""

DEFINITIONS = {
    "ttft_ms": "first token chunk - send",
    "response_ttft_ms": "first token chunk - intended instant; none in a closed loop",
    "steady_ttft_ms": "ttft_ms without the first requests that MSER-5 takes for the filling of the pipeline",
    "ttfat_ms": "first chunk of the answer itself (neither reasoning nor a tool call) - send; none without an answer",
    "response_ttfat_ms": "first chunk of the answer itself - intended instant",
    "tpot_ms": "(last chunk - first chunk) / tokens after the first chunk",
    "itl_ms": "gap between chunks spread evenly over the later chunk's tokens, pooled over requests",
    "icl_ms": "gap between chunks, whatever they hold, pooled over requests",
    "max_gap_ms": "the longest gap between two chunks of a request",
    "blocked_ms": f"time a reader of {READING_TOK_S:g} tokens/s who starts at the first chunk has nothing left to read",
    "ttlt_ms": "last token chunk - send",
    "response_ttlt_ms": "last token chunk - intended instant; none in a closed loop",
    "session_ms": "last end - first intended instant of a whole session, the time of users and tools included",
    "queue_ms": "engine in -> first scheduled, as told by the server",
    "schedule_delay_ms": "send - intended instant: the load generator's own lateness",
    "tokens_per_chunk": "tokens / chunks of the successful requests",
    "goodput": "requests that succeeded and kept every latency limit / requests offered",
    "goodput_qps": "goodput x arrival rate; in a closed loop good requests / (last end - first send)",
    "achieved_qps": "slope of the count of completions over time (least squares) up to the last send, or of all where "
    "most end later; at least (completions - 1) / (last end - first send), at most most in flight / mean time of one",
    "arrival_qps": "(requests - 1) / (last - first intended instant)",
    "output_tok_s": "tokens after the first token instant / (last - first token instant), all requests together",
}
"""What each number of ours is; `compat` has those of other tools."""


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """All that a load generator saw of one request. `error` None means success.

    error is a class, not free text: http_4xx, http_429, http_5xx, connect, timeout, truncated, empty_stream,
    protocol, client; or censored: unfinished at the cut-off. `t_intended_ns` is None in closed loops, where lateness
    has no meaning. `empty_frames_ns` are the arrivals of frames that belong to the answer and hold no token of it (its
    role, its finish reason): no number of ours counts them, those of other tools do. `session` names the conversation
    or agent loop that the request is turn `turn` (from 0) of; it was planned to have `num_turns`.
    """

    request_id: str
    t_intended_ns: int | None
    t_send_ns: int
    t_headers_ns: int | None
    t_end_ns: int
    chunks: Sequence[Chunk]
    num_input_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    error: str | None = None
    finish_reason: str | None = None
    replica: str | None = None
    queue_ms: float | None = None
    traffic_class: str = "default"
    trace_id: str | None = None
    t_first_answer_ns: int | None = None
    """The first chunk with some of the answer itself: neither reasoning nor a tool call. None when there was none."""
    empty_frames_ns: tuple[int, ...] = ()
    session: int | None = None
    turn: int | None = None
    num_turns: int | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


def ttft_ms(r: RequestTiming) -> float | None:
    """Service TTFT, from the actual send. None when no token arrived."""
    return ns_to_ms(r.chunks[0].t_ns - r.t_send_ns) if r.chunks else None


def response_ttft_ms(r: RequestTiming) -> float | None:
    """TTFT from the instant the request should have been sent: what a user of an open system waits."""
    if not r.chunks or r.t_intended_ns is None:
        return None
    return ns_to_ms(r.chunks[0].t_ns - r.t_intended_ns)


def ttfat_ms(r: RequestTiming) -> float | None:
    """To the first answer token, reasoning excluded. None when the answer never began."""
    return None if r.t_first_answer_ns is None else ns_to_ms(r.t_first_answer_ns - r.t_send_ns)


def response_ttfat_ms(r: RequestTiming) -> float | None:
    if r.t_first_answer_ns is None or r.t_intended_ns is None:
        return None
    return ns_to_ms(r.t_first_answer_ns - r.t_intended_ns)


def tpot_ms(r: RequestTiming) -> float | None:
    if len(r.chunks) < 2:
        return None
    num_later = sum(c.num_tokens for c in r.chunks[1:])
    return ns_to_ms(r.chunks[-1].t_ns - r.chunks[0].t_ns) / num_later if num_later > 0 else None


def itl_ms(r: RequestTiming) -> list[float]:
    """One value per token after the first chunk."""
    gaps: list[float] = []
    for before, chunk in zip(r.chunks, r.chunks[1:], strict=False):
        gaps.extend([ns_to_ms(chunk.t_ns - before.t_ns) / chunk.num_tokens] * chunk.num_tokens)
    return gaps


def icl_ms(r: RequestTiming) -> list[float]:
    """One value per chunk after the first."""
    return [ns_to_ms(b.t_ns - a.t_ns) for a, b in zip(r.chunks, r.chunks[1:], strict=False)]


def max_gap_ms(r: RequestTiming) -> float | None:
    """The longest a reader saw nothing arrive. None below two chunks."""
    return max(icl_ms(r), default=None)


def blocked_ms(r: RequestTiming, reading_tok_s: float = READING_TOK_S) -> float | None:
    """How long a steady reader, who starts at the first chunk, waits in all for more. None without a chunk."""
    if not r.chunks:
        return None
    read_until = float(r.chunks[0].t_ns)
    blocked = 0.0
    for chunk in r.chunks:
        blocked += max(0.0, chunk.t_ns - read_until)
        read_until = max(read_until, chunk.t_ns) + chunk.num_tokens / reading_tok_s * NS_PER_S
    return ns_to_ms(blocked)


def ttlt_ms(r: RequestTiming) -> float | None:
    return ns_to_ms(r.chunks[-1].t_ns - r.t_send_ns) if r.chunks else None


def response_ttlt_ms(r: RequestTiming) -> float | None:
    if not r.chunks or r.t_intended_ns is None:
        return None
    return ns_to_ms(r.chunks[-1].t_ns - r.t_intended_ns)


def schedule_delay_ms(r: RequestTiming) -> float | None:
    """How late the client sent it; the client's fault, never the server's."""
    return None if r.t_intended_ns is None else ns_to_ms(r.t_send_ns - r.t_intended_ns)


def stutter_probability(p: float, num_tokens: int) -> float:
    """Chance that an answer of `num_tokens` tokens meets at least one slow token, each slow with probability p,
    independently: 1-(1-p)^T. Real stalls are correlated, so this is a guide, not a bound."""
    if not 0.0 <= p <= 1.0 or num_tokens < 0:
        raise ValueError(f"need 0 <= p <= 1 and num_tokens >= 0, got p={p}, num_tokens={num_tokens}")
    return 1.0 - (1.0 - p) ** num_tokens
