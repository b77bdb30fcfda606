"""What each number of six other load generators is, as a function of our stamps, as read from their sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from inferloop.measure.timing import RequestTiming

Pairs = list[tuple[float, float]]
"""(value in ns, weight) of what one request adds."""


@dataclass(frozen=True, slots=True)
class ToolMetric:
    """One number of another tool. `of` gives what a request adds to its distribution."""

    name: str
    definition: str
    of: Callable[[RequestTiming], Pairs]


@dataclass(frozen=True, slots=True)
class Tool:
    """`read` says which version its definitions were read in. `weighted`: percentiles are of the weighted distribution,
    always an observed value; else they are interpolated linearly between samples, and weights are 1."""

    name: str
    read: str
    counts: str
    """Which requests and frames it counts."""
    used: Callable[[RequestTiming], bool]
    metrics: tuple[ToolMetric, ...]
    weighted: bool = False


def _one(value: float) -> Pairs:
    return [(value, 1.0)]


def _gaps(times: Sequence[int]) -> Pairs:
    return [(float(b - a), 1.0) for a, b in pairwise(times)]


def _ok(r: RequestTiming) -> bool:
    return r.ok and bool(r.chunks)


def _frames(r: RequestTiming) -> list[int]:
    """Every frame of the answer, with a token or without."""
    return sorted([*(c.t_ns for c in r.chunks), *r.empty_frames_ns])


def _first(r: RequestTiming) -> int:
    return r.chunks[0].t_ns


def _last(r: RequestTiming) -> int:
    return r.chunks[-1].t_ns


def _answer_times(r: RequestTiming) -> list[int]:
    """The arrival of each token of the answer itself: its chunks follow the reasoning."""
    begin = r.t_first_answer_ns
    return [] if begin is None else [c.t_ns for c in r.chunks if c.t_ns >= begin for _ in range(c.num_tokens)]


def _answer_chunks(r: RequestTiming) -> list[int]:
    begin = r.t_first_answer_ns
    return [] if begin is None else [c.t_ns for c in r.chunks if c.t_ns >= begin]


def _per_later_token(span: Callable[[RequestTiming], int]) -> Callable[[RequestTiming], Pairs]:
    """span / (output tokens - 1), nothing below two tokens."""
    return lambda r: _one(span(r) / (r.num_output_tokens - 1)) if r.num_output_tokens > 1 else []


def _infperf(of: Callable[[RequestTiming, list[int]], Pairs]) -> Callable[[RequestTiming], Pairs]:
    """Only answers with two tokens at least are taken for streams."""

    def pairs(r: RequestTiming) -> Pairs:
        times = _answer_times(r)
        return of(r, times) if len(times) > 1 else []

    return pairs


VLLM = Tool(
    name="vllm bench serve",
    read="vLLM main, benchmarks/lib/endpoint_request_func.py at 02cfb534 and benchmarks/serve.py at 009e6d4a",
    counts="every frame with a choice, also one without a token; a stream of such frames alone is a success",
    used=lambda r: (r.ok or r.error == "empty_stream") and bool(_frames(r)),
    metrics=(
        ToolMetric("TTFT", "first frame with a choice - send", lambda r: _one(_frames(r)[0] - r.t_send_ns)),
        ToolMetric(
            "TPOT",
            "(last frame - first frame) / (output tokens - 1)",
            _per_later_token(lambda r: _frames(r)[-1] - _frames(r)[0]),
        ),
        ToolMetric("ITL", "gap between frames, pooled: a gap between chunks, not tokens", lambda r: _gaps(_frames(r))),
        ToolMetric("E2EL", "last frame with a choice - send", lambda r: _one(_frames(r)[-1] - r.t_send_ns)),
    ),
)
GUIDELLM = Tool(
    name="guidellm",
    read="GuideLLM main, schemas/request_stats.py at ee7a774 (2026-08-07), base/request_stats.py at 31c74ea2",
    counts="frames with text, reasoning or a tool call; percentiles of ITL and TPOT are weighted by tokens",
    used=_ok,
    weighted=True,
    metrics=(
        ToolMetric("TTFT", "first token frame - send", lambda r: _one(_first(r) - r.t_send_ns)),
        ToolMetric(
            "TTFOT",
            "first frame of the answer, reasoning excluded - send; 0 where there is none",
            lambda r: _one(0.0 if r.t_first_answer_ns is None else r.t_first_answer_ns - r.t_send_ns),
        ),
        ToolMetric(
            "ITL",
            "(last - first token frame) / (output tokens - 1): a mean per request, weighted by output tokens - 1",
            lambda r: (
                [((_last(r) - _first(r)) / (r.num_output_tokens - 1), r.num_output_tokens - 1.0)]
                if r.num_output_tokens > 1
                else []
            ),
        ),
        ToolMetric(
            "TPOT",
            "(last token frame - send) / output tokens: TTFT included, weighted by output tokens",
            lambda r: (
                [((_last(r) - r.t_send_ns) / r.num_output_tokens, float(r.num_output_tokens))]
                if r.num_output_tokens
                else []
            ),
        ),
        ToolMetric(
            "request latency",
            "end of the response, which it leaves at [DONE], - send",
            lambda r: _one(r.t_end_ns - r.t_send_ns),
        ),
    ),
)
AIPERF = Tool(
    name="aiperf",
    read="AIPerf main, metrics/types/: ttft at 58028d5b, inter_token_latency at 58dd5dea, request_latency at 4f7ccffd",
    counts="responses with content; output tokens are the server's (by default it counts with its own tokenizer)",
    used=_ok,
    metrics=(
        ToolMetric("TTFT", "first content response - send", lambda r: _one(_first(r) - r.t_send_ns)),
        ToolMetric("TTST", "second - first content response", lambda r: _gaps([c.t_ns for c in r.chunks[:2]])),
        ToolMetric(
            "TTFO",
            "first content response that is not reasoning - send (tool calls, which it counts, are left out here)",
            lambda r: [] if r.t_first_answer_ns is None else _one(r.t_first_answer_ns - r.t_send_ns),
        ),
        ToolMetric("request latency", "last content response - send", lambda r: _one(_last(r) - r.t_send_ns)),
        ToolMetric(
            "ITL",
            "(request latency - TTFT) / (output tokens - 1): a mean per request",
            _per_later_token(lambda r: _last(r) - _first(r)),
        ),
        ToolMetric("ICL", "gap between content responses, pooled", lambda r: _gaps([c.t_ns for c in r.chunks])),
    ),
)
SGLANG = Tool(
    name="sglang bench_serving",
    read="SGLang, benchmark/backends/oai_chat_client.py at 55c7579c and benchmark/metrics.py at 1291c7fc",
    counts="chunks with text or reasoning",
    used=_ok,
    metrics=(
        ToolMetric("TTFT", "first chunk with text - send", lambda r: _one(_first(r) - r.t_send_ns)),
        ToolMetric(
            "TPOT",
            "(end of the stream - first chunk) / (output tokens - 1)",
            _per_later_token(lambda r: r.t_end_ns - _first(r)),
        ),
        ToolMetric("ITL", "gap between chunks, pooled: not tokens", lambda r: _gaps([c.t_ns for c in r.chunks])),
        ToolMetric("E2E latency", "end of the stream - send", lambda r: _one(r.t_end_ns - r.t_send_ns)),
    ),
)
INFERENCE_PERF = Tool(
    name="inference-perf",
    read="inference-perf 7de5ef2 (2026-08-19), reportgen/base.py",
    counts="chunks with content, reasoning left out; every token of a chunk arrives with the chunk",
    used=_ok,
    metrics=(
        ToolMetric("TTFT", "first content chunk - send", _infperf(lambda r, times: _one(times[0] - r.t_send_ns))),
        ToolMetric(
            "TPOT",
            "(last - first content chunk) / (output tokens - 1)",
            _infperf(
                lambda r, times: (
                    _one((times[-1] - times[0]) / (r.num_output_tokens - 1)) if r.num_output_tokens > 1 else []
                )
            ),
        ),
        ToolMetric(
            "ITL",
            "gap between tokens, 0 within a chunk, pooled",
            _infperf(lambda _, times: _gaps(times)),
        ),
        ToolMetric(
            "NTPOT",
            "(end - send) / output tokens: TTFT included",
            lambda r: _one((r.t_end_ns - r.t_send_ns) / r.num_output_tokens if r.num_output_tokens else 0.0),
        ),
        ToolMetric("request latency", "end - send", lambda r: _one(r.t_end_ns - r.t_send_ns)),
    ),
)
LLMPERF = Tool(
    name="llmperf",
    read="LLMPerf f1d6bed (2024-12-08), openai_chat_completions_client.py and token_benchmark_ray.py",
    counts="chunks with content, reasoning left out; every frame counts as a token",
    used=_ok,
    metrics=(
        ToolMetric(
            "TTFT", "first content chunk - send", lambda r: _one(t[0] - r.t_send_ns) if (t := _answer_chunks(r)) else []
        ),
        ToolMetric(
            "inter-token latency",
            "(last content chunk - send) / frames: TTFT included, frames for tokens",
            lambda r: _one((t[-1] - r.t_send_ns) / len(_frames(r))) if (t := _answer_chunks(r)) else [],
        ),
        ToolMetric("end-to-end latency", "end of the stream - send", lambda r: _one(r.t_end_ns - r.t_send_ns)),
    ),
)
TOOLS = {
    "vllm": VLLM,
    "guidellm": GUIDELLM,
    "aiperf": AIPERF,
    "sglang": SGLANG,
    "inference-perf": INFERENCE_PERF,
    "llmperf": LLMPERF,
}
