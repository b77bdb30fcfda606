"""What charts say in words, and which points they show."""

from __future__ import annotations

from typing import Any

from inferloop.pages.chart import both_schemes
from inferloop.pages.charts import frontier_charts

TTFT = [("ttft_ms", "TTFT p95 \u2264 300 ms", 300.0)]


def point(mode: str, qps: float, p50: float, p95: float | None) -> dict[str, Any]:
    return {"mode": mode, "achieved_qps": qps, "output_tok_s": 10 * qps, "ttft_ms": {"p50": p50, "p95": p95}}


def test_the_words_are_about_the_promised_percentile() -> None:
    certified = [point("open", 1, 100, 200), point("open", 2, 150, 290), point("open", 4, 250, 800)]
    words = frontier_charts(certified, TTFT)[0].words
    assert words == (
        "TTFT p95: 200 ms at 1 queries/s, 800 ms at 4 queries/s. The objective is TTFT p95 \u2264 300 ms; "
        "1 of 3 certified points exceed it."
    )


def test_a_percentile_that_nobody_certified_is_not_said_to_be_kept() -> None:
    words = frontier_charts([point("open", 1, 100, None), point("open", 2, 400, None)], TTFT)[0].words
    assert "exceeds it" not in words and words.endswith("no point has the requests to certify p95.")


def test_a_burst_is_not_a_rate_but_counts_as_throughput() -> None:
    points = [point("serial", 0.5, 50, None), point("open", 1, 100, 200), point("open", 2, 150, 290)]
    ttft, tokens = frontier_charts([*points, point("burst", 5, 4000, None)], TTFT)
    assert ttft.chart.series[0].x == (1.0, 2.0) and ttft.chart.series[0].connected
    assert tokens.chart.series[0].x == (0.5, 1.0, 2.0, 5.0)
    assert frontier_charts(points[:2], TTFT)[0].chart.series[0].x == (1.0,)
    closed = frontier_charts([points[0], point("burst", 5, 4000, None)], TTFT)[0]
    assert closed.chart.series[0].x == (0.5, 5.0) and not closed.chart.series[0].connected


def test_points_without_numbers_make_no_chart() -> None:
    assert frontier_charts([{"mode": "open"}, {"mode": "open", "achieved_qps": float("inf")}], TTFT) == []


def test_intervals_become_bands_and_scouts_are_hollow() -> None:
    points = [point("open", 1, 100, 130), point("open", 2, 400, 500)]
    points[0]["ttft_ms"]["intervals"] = {"p95": {"low": 110.0, "high": None, "infinite": ["high"]}}
    points[1]["role"] = "scout"
    made = frontier_charts(points, TTFT)[0]
    p95 = next(s for s in made.chart.series if s.name == "p95")
    assert p95.band == ((110.0, float("inf")), None) and p95.faint == (False, True)
    assert "95 % interval" in made.words and "only scouted" in made.words
    assert "VArea" not in str(both_schemes(made.chart)), "one interval is a whisker"
    points[1]["ttft_ms"]["intervals"] = {"p95": {"low": 450.0, "high": 620.0}}
    assert "VArea" in str(both_schemes(frontier_charts(points, TTFT)[0].chart))
