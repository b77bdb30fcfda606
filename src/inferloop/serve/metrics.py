"""The one owner of this process's counters and histograms, and their Prometheus text.

Updated on the event loop only, so plain integers suffice. The text format is always 0.0.4: asked for OpenMetrics, the
client library would rename names that hold a colon, and boards would read nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from inferloop.core.request import FinishReason
from inferloop.engine.stats import EngineStats, TierStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# The union of what vLLM's and OpenTelemetry's boards ask for, finer below 10 ms and up to the longest answers: a
# quantile cannot be told below the first or above the last bound.
SECONDS = (
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.08, 0.1, 0.15,
    0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 80.0,
    120.0, 160.0, 240.0, 300.0, 480.0, 600.0, 960.0, 1920.0,
)  # fmt: skip
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))

_HISTOGRAMS = {
    "ttft": (
        "time_to_first_token_seconds",
        "time_to_first_token_seconds",
        "Arrival to first token of any choice.",
        SECONDS,
    ),
    "itl": (
        "inter_token_latency_seconds",
        "inter_token_latency_seconds",
        "Gap before each later token of a choice.",
        SECONDS,
    ),
    "tpot": (
        "time_per_output_token_seconds",
        "request_time_per_output_token_seconds",
        "Per request, mean time per token after the first of a choice.",
        SECONDS,
    ),
    "e2e": (
        "e2e_request_latency_seconds",
        "e2e_request_latency_seconds",
        "Arrival to last token of all choices.",
        SECONDS,
    ),
    "queue": ("request_queue_time_seconds", "request_queue_time_seconds", "Arrival to first schedule.", SECONDS),
    "prefill": ("request_prefill_time_seconds", "request_prefill_time_seconds", "Schedule to first token.", SECONDS),
    "decode": ("request_decode_time_seconds", "request_decode_time_seconds", "First to last token.", SECONDS),
    "prompt": ("request_prompt_tokens", "request_prompt_tokens", "Tokens of all prompts per request.", TOKENS),
    "generation": (
        "request_generation_tokens",
        "request_generation_tokens",
        "Tokens of all choices per request.",
        TOKENS,
    ),
}
"""Key to (our name, vLLM's name, help, bounds)."""

_SHED_REASONS = ("queue_full", "queue_tokens", "late", "stopping", "overloaded")
_CUT_REASONS = ("disconnect", "timeout", "unread", "cancelled", "drain")
_REQUESTS_HELP = "HTTP requests that reached the engine, one however many choices; length when any choice ended so."


class Histogram:
    """Counts per bucket; `le` is inclusive."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        total, rows = 0, []
        for bound, count in zip((*map(repr, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Rows of batch jobs: those without an answer now, and those answered since the start."""

    num_waiting: int
    num_running: int
    completed: int
    failed: int


class Metrics(Collector):
    """Counters only grow. A request is one HTTP request, however many choices it has; choices are what runs and waits,
    and what gaps between tokens are measured in. Requests refused before the engine are counted apart, so that for the
    others sum over finish reasons = TTFT observations + requests that ended without a token. Rows of batch jobs count
    in tokens, else apart."""

    def __init__(self, *, model: str, identity_digest: str, stats: Callable[[], EngineStats], aliases: str | None):
        self._stats, self._model = stats, model
        self._labels = {"model_name": model}
        self._info = {"model_name": model, "identity": identity_digest}
        self._with_vllm = aliases == "vllm"
        self.histograms = {key: Histogram(bounds) for key, (_, _, _, bounds) in _HISTOGRAMS.items()}
        self.finished: dict[FinishReason, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.num_without_token = 0
        self.refused: dict[str, int] = {}
        self.shed: dict[str, int] = dict.fromkeys(_SHED_REASONS, 0)
        self.cut_short: dict[str, int] = dict.fromkeys(_CUT_REASONS, 0)
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0
        self.events_lost: Callable[[], int] = lambda: 0
        self.batch_rows: Callable[[], BatchRows] | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def observe(self, key: str, seconds: float, times: int = 1) -> None:
        self.histograms[key].observe(seconds, times)

    def count_refused(self, code: str) -> None:
        self.refused[code] = self.refused.get(code, 0) + 1

    def render(self) -> bytes:
        """Prometheus text 0.0.4."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield from self._families(stats)
        if self._with_vllm:
            yield from self._vllm_families(stats)

    def _families(self, s: EngineStats) -> Iterator[Metric]:
        yield _gauge("inferloop_build_info", "Which configuration answers; always 1.", self._info, 1)
        yield _gauge(
            "inferloop_requests_running", "Choices of requests in the running batch.", self._labels, s.num_running
        )
        yield _gauge(
            "inferloop_requests_waiting", "Choices of requests waiting for the batch.", self._labels, s.num_waiting
        )
        yield _gauge(
            "inferloop_background_requests_waiting",
            "Those of them that are background work.",
            self._labels,
            s.num_background_waiting,
        )
        yield _gauge("inferloop_queue_tokens", "Tokens of the prompts that wait.", self._labels, s.queue_tokens)
        yield _gauge("inferloop_kv_usage_ratio", "Share of KV blocks in use, 0 to 1.", self._labels, _kv_usage(s))
        yield _gauge("inferloop_engine_alive", "1 while the step loop runs.", self._labels, float(s.alive))
        for name, text, value in (
            ("inferloop_engine_steps", "Steps done.", s.step_counter),
            ("inferloop_preemptions", "Sequences put back for lack of KV blocks.", s.num_preemptions),
            ("inferloop_prefix_cache_queries", "Tokens looked up in the prefix cache.", s.prefix_cache_queries),
            ("inferloop_prefix_cache_hits", "Tokens found in the prefix cache.", s.prefix_cache_hits),
            ("inferloop_prompt_tokens", "Prompt tokens of requests that were answered.", self.prompt_tokens),
            ("inferloop_prompt_tokens_cached", "Those of them that were cached.", self.cached_tokens),
            ("inferloop_generation_tokens", "Output tokens.", self.generation_tokens),
            ("inferloop_requests_without_token", "Requests that ended without a token.", self.num_without_token),
            ("inferloop_events_lost", "Events lost to a full queue or disk.", self.events_lost()),
        ):
            yield _counter(name, text, self._labels, [({}, value)])
        if self.batch_rows is not None:
            yield from self._batch_families(self.batch_rows())
        if s.tier is not None:
            yield from self._tier_families(s.tier)
        finished = [({"finish_reason": str(reason)}, count) for reason, count in self.finished.items()]
        yield _counter("inferloop_requests", _REQUESTS_HELP, self._labels, finished)
        refused = [({"code": code}, count) for code, count in sorted(self.refused.items())]
        yield _counter("inferloop_requests_refused", "Requests refused before the engine.", self._labels, refused)
        shed = [({"reason": reason}, count) for reason, count in self.shed.items()]
        yield _counter("inferloop_requests_shed", "Requests refused for lack of room or time.", self._labels, shed)
        cut = [({"reason": reason}, count) for reason, count in self.cut_short.items()]
        yield _counter("inferloop_requests_cut_short", "Requests that did not run to their end.", self._labels, cut)
        for key, (name, _, text, _) in _HISTOGRAMS.items():
            yield self._histogram(f"inferloop_{name}", text, key, self._labels)

    def _batch_families(self, rows: BatchRows) -> Iterator[Metric]:
        text = "Rows of batch jobs that have no answer yet."
        family = GaugeMetricFamily("inferloop_batch_rows", text, labels=[*self._labels, "state"])
        for state, count in (("waiting", rows.num_waiting), ("running", rows.num_running)):
            family.add_metric([*self._labels.values(), state], count)
        yield family
        answered = [({"state": "completed"}, rows.completed), ({"state": "failed"}, rows.failed)]
        yield _counter("inferloop_batch_rows_answered", "Rows of batch jobs answered.", self._labels, answered)

    def _tier_families(self, t: TierStats) -> Iterator[Metric]:
        held = GaugeMetricFamily(
            "inferloop_prefix_cache_tier_bytes", "What the second tier holds.", labels=[*self._labels, "place"]
        )
        for place, num_bytes in (("memory", t.memory_bytes), ("disk", t.disk_bytes)):
            held.add_metric([*self._labels.values(), place], num_bytes)
        yield held
        for name, text, value in (
            ("queries", "Tokens looked up in the second tier of the prefix cache.", t.queries),
            ("hits", "Tokens found there; they count as found in the prefix cache, too.", t.hits),
            ("loaded_bytes", "Blocks taken from the second tier.", t.loaded_bytes),
            ("saved_bytes", "Blocks written to the second tier.", t.saved_bytes),
            ("dropped_blocks", "Blocks not saved because the disk was behind.", t.dropped_blocks),
            ("damaged_blocks", "Blocks found damaged, and removed.", t.damaged_blocks),
            ("failures", "Reads and writes of blocks that the system refused.", t.failures),
        ):
            yield _counter(f"inferloop_prefix_cache_tier_{name}", text, self._labels, [({}, value)])

    def _vllm_families(self, s: EngineStats) -> Iterator[Metric]:
        labels = {"model_name": self._model, "engine": "0"}
        for name, text, value in (
            ("num_requests_running", "Requests in the running batch.", float(s.num_running)),
            ("num_requests_waiting", "Requests waiting for the batch.", float(s.num_waiting)),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", _kv_usage(s)),
        ):
            yield _gauge(f"vllm:{name}", text, labels, value)
        for name, text, count in (
            ("num_preemptions", "Sequences put back for lack of KV blocks.", s.num_preemptions),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", s.prefix_cache_queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", s.prefix_cache_hits),
            ("prompt_tokens", "Prompt tokens.", self.prompt_tokens),
            ("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", self.cached_tokens),
            ("generation_tokens", "Output tokens.", self.generation_tokens),
        ):
            yield _counter(f"vllm:{name}", text, labels, [({}, count)])
        finished = [({"finished_reason": str(reason)}, count) for reason, count in self.finished.items()]
        yield _counter("vllm:request_success", "Finished requests.", labels, finished)
        for key, (_, name, text, _) in _HISTOGRAMS.items():
            yield self._histogram(f"vllm:{name}", text, key, labels)

    def _histogram(self, name: str, text: str, key: str, labels: dict[str, str]) -> Metric:
        family = HistogramMetricFamily(name, text, labels=list(labels))
        histogram = self.histograms[key]
        family.add_metric(list(labels.values()), buckets=histogram.cumulative(), sum_value=histogram.sum)
        return family


def _kv_usage(s: EngineStats) -> float:
    return s.kv_blocks_used / s.kv_blocks_total if s.kv_blocks_total else 0.0


def _gauge(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, text: str, labels: dict[str, str], rows: Iterable[tuple[dict[str, str], int]]) -> Metric:
    rows = list(rows)
    extra = list(rows[0][0]) if rows else []
    family = CounterMetricFamily(name, text, labels=[*labels, *extra])
    for row, value in rows:
        family.add_metric([*labels.values(), *row.values()], value)
    return family
