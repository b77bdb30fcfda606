"""Prometheus text: names, buckets and counts."""

from __future__ import annotations

import re

from inferloop.engine.stats import EngineStats, TierStats
from inferloop.serve.metrics import SECONDS, Histogram, Metrics


def samples(text: bytes) -> dict[str, float]:
    return {m[1]: float(m[2]) for m in re.finditer(r"^([^#\s]\S*) (\S+)$", text.decode(), re.MULTILINE)}


def names(text: bytes, kind: str) -> set[str]:
    pattern = r"^# TYPE (\S+)" if kind == "type" else r"^([^#{\s]+)"
    return set(re.findall(pattern, text.decode(), re.MULTILINE))


def make(aliases: str | None = None) -> Metrics:
    stats = EngineStats(num_running=3, num_waiting=1, kv_blocks_total=10, kv_blocks_used=4, prefix_cache_hits=7)
    return Metrics(model="m", identity_digest="d", stats=lambda: stats, aliases=aliases)


def test_bounds_are_inclusive_and_sums_exact() -> None:
    histogram = Histogram((1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 1), (1.5, 3), (9.0, 1)):
        histogram.observe(value, times)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 5.0), ("+Inf", 6.0)]
    assert (histogram.count, histogram.sum) == (6, 15.0)


def test_buckets_resolve_sub_ten_milliseconds_and_ten_minutes() -> None:
    assert list(SECONDS) == sorted(set(SECONDS))
    assert sum(bound < 0.01 for bound in SECONDS) >= 5
    assert {0.3, 0.5, 1.0, 10.0, 60.0, 120.0, 600.0} <= set(SECONDS)
    assert SECONDS[-1] >= 600


def test_our_names_always_vllm_names_on_demand() -> None:
    ours, both = make().render(), make("vllm").render()
    assert b"vllm" not in ours
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
        "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total", "num_preemptions_total",
        "request_success_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_count",
        "request_time_per_output_token_seconds_sum", "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket", "request_prefill_time_seconds_sum", "request_decode_time_seconds_count",
        "request_prompt_tokens_bucket", "request_generation_tokens_bucket",
    ):  # fmt: skip
        assert f"vllm:{name}" in names(both, "sample"), name
    assert names(ours, "sample") < names(both, "sample")


def test_metadata_and_samples_have_the_same_names() -> None:
    metrics = make("vllm")
    metrics.refused["invalid_value"] = 1
    text = metrics.render()
    suffixes = re.compile(r"_(bucket|sum|count)$")
    sampled = {suffixes.sub("", name) for name in names(text, "sample")}
    assert names(text, "type") == sampled


def test_values_and_labels() -> None:
    metrics = make("vllm")
    metrics.finished["stop"] += 2
    metrics.refused["invalid_value"] = 1
    metrics.observe("itl", 0.0015, 4)
    found = samples(metrics.render())
    assert found['inferloop_requests_total{finish_reason="stop",model_name="m"}'] == 2
    assert found['vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"}'] == 2
    assert found['inferloop_requests_refused_total{code="invalid_value",model_name="m"}'] == 1
    assert found['inferloop_kv_usage_ratio{model_name="m"}'] == 0.4
    assert found['vllm:num_requests_running{engine="0",model_name="m"}'] == 3
    assert found['inferloop_inter_token_latency_seconds_bucket{le="0.001",model_name="m"}'] == 0
    assert found['inferloop_inter_token_latency_seconds_bucket{le="0.002",model_name="m"}'] == 4
    assert found['inferloop_inter_token_latency_seconds_bucket{le="+Inf",model_name="m"}'] == 4


def test_a_second_tier_of_the_prefix_cache_has_counters_of_its_own() -> None:
    assert b"prefix_cache_tier" not in make().render()
    tier = TierStats(queries=90, hits=64, memory_bytes=1000, disk_bytes=2000, saved_bytes=7, dropped_blocks=3)
    stats = EngineStats(prefix_cache_queries=100, prefix_cache_hits=70, tier=tier)
    metrics = Metrics(model="m", identity_digest="d", stats=lambda: stats, aliases=None)
    found = samples(metrics.render())
    label = '{model_name="m"}'
    names = ("queries", "hits", "saved_bytes", "loaded_bytes", "dropped_blocks", "damaged_blocks", "failures")
    assert [found[f"inferloop_prefix_cache_tier_{name}_total{label}"] for name in names] == [90, 64, 7, 0, 3, 0, 0]
    for place, num_bytes in (("memory", 1000), ("disk", 2000)):
        assert found[f'inferloop_prefix_cache_tier_bytes{{model_name="m",place="{place}"}}'] == num_bytes
