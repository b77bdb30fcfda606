"""What stands beside what, where two runs are shown."""

from __future__ import annotations

import html
import re
from typing import Any

from inferloop.measure.summary import summarize
from inferloop.measure.timing import Chunk, RequestTiming
from inferloop.pages.side_by_side import render_side_by_side

MS = 1_000_000


def rows(ttft_ms: int, num: int) -> list[RequestTiming]:
    found = []
    for i in range(num):
        t = i * 50 * MS
        chunks = (Chunk(t + ttft_ms * MS, 1), Chunk(t + (ttft_ms + 10) * MS, 1))
        found.append(RequestTiming(f"r{i}", t, t, t, chunks[-1].t_ns, chunks, 9, 2, finish_reason="length"))
    return found


def run(**points: tuple[float, int, int]) -> dict[str, Any]:
    """Points by name: (rate, TTFT, requests)."""
    made = {name: rows(ttft_ms, num) for name, (_, ttft_ms, num) in points.items()}
    told = [
        {"name": name, **summarize(made[name], mode="open", offered_qps=rate).as_json()}
        for name, (rate, _, _) in points.items()
    ]
    return {"header": {}, "summary": {"points": told}, "points": made}


def test_of_several_points_at_one_rate_the_longest_is_compared() -> None:
    a = run(scout=(20.0, 90, 40), rate=(20.0, 50, 200), peak=(2.0, 30, 60))
    b = run(peak=(2.0, 31, 60), rate=(20.0, 70, 200), scout=(20.0, 99, 40), other=(9.0, 1, 40))
    page = html.unescape(render_side_by_side({"A": a, "B": b}))
    assert re.findall(r'class="group"[^>]*>([^<]*)', page) == ["peak, 2/s", "rate, 20/s"]
    (at_20,) = re.findall(r"rate, 20/s.*?TTFT p50, ms(.*?)</tr>", page, re.DOTALL)
    assert re.findall(r">([^<\n]+)</td>", at_20)[:3] == ["50", "70", "+20"]


def test_what_differs_between_two_contracts_is_named() -> None:
    runs = [run(peak=(2.0, 30, 60)) for _ in range(2)]
    for one, reuse in zip(runs, (0.4, 0.2), strict=True):
        traffic = {"prefix_reuse": reuse, "qps": {"peak": 2.0}}
        one["header"] = {"contract": {"service": "s", "source": f"{reuse}.yaml", "traffic": traffic}}
    page = html.unescape(render_side_by_side({"A": runs[0], "B": runs[1]}))
    (row,) = re.findall(r"<tr>.*?contract\..*?</tr>", page, re.DOTALL)
    assert "contract.traffic.prefix_reuse" in row and "0.4" in row and "0.2" in row
