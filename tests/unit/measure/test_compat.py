"""Definitions of other tools from one set of recorded stamps: every value worked out by hand, exact to the ns."""

from __future__ import annotations

import json

import numpy as np
import pytest

from inferloop.measure.compat import TOOLS, CompatNumber, CompatView, compat_view
from inferloop.measure.timing import Chunk, RequestTiming

T0 = 7_000_000_000_000
A = RequestTiming(  # role; two reasoning chunks of 1 and 3 tokens; an answer of 4 and 2 tokens; finish reason; [DONE]
    "a",
    T0 - 5_000_000,
    T0,
    T0 + 90_000_001,
    T0 + 300_000_009,
    (
        Chunk(T0 + 100_000_001, 1),
        Chunk(T0 + 140_000_003, 3),
        Chunk(T0 + 200_000_007, 4),
        Chunk(T0 + 260_000_009, 2),
    ),
    20,
    10,
    t_first_answer_ns=T0 + 200_000_007,
    empty_frames_ns=(T0 + 95_000_001, T0 + 280_000_009),
)
B = RequestTiming(  # one answer token, and nothing else
    "b", None, T0 + 1, None, T0 + 60_000_001, (Chunk(T0 + 50_000_001, 1),), 20, 1, t_first_answer_ns=T0 + 50_000_001
)
C = RequestTiming(  # 200, a role-only frame, then closed
    "c", None, T0, None, T0 + 30_000_000, (), 20, 0, error="empty_stream", empty_frames_ns=(T0 + 30_000_000,)
)
D = RequestTiming("d", None, T0, None, T0 + 500_000_000, (), 20, 0, error="timeout")


def ns(number: CompatNumber) -> list[int | None]:
    """[mean, p50, p99] in ns."""
    told = (number.mean, number.percentiles["p50"], number.percentiles["p99"])
    return [None if v is None else round(v * 1e6) for v in told]


def only(tool: str, request: RequestTiming) -> dict[str, CompatNumber]:
    view = compat_view(tool, [request])
    assert view.num_used == 1
    return {n.name: n for n in view.numbers}


@pytest.mark.parametrize(
    ("tool", "name", "mean_ns", "num"),
    [
        ("vllm", "TTFT", 95_000_001, 1),
        ("vllm", "TPOT", 185_000_008 / 9, 1),
        ("vllm", "ITL", 185_000_008 / 5, 5),
        ("vllm", "E2EL", 280_000_009, 1),
        ("guidellm", "TTFT", 100_000_001, 1),
        ("guidellm", "TTFOT", 200_000_007, 1),
        ("guidellm", "ITL", 160_000_008 / 9, 1),
        ("guidellm", "TPOT", 260_000_009 / 10, 1),
        ("guidellm", "request latency", 300_000_009, 1),
        ("aiperf", "TTFT", 100_000_001, 1),
        ("aiperf", "TTST", 40_000_002, 1),
        ("aiperf", "TTFO", 200_000_007, 1),
        ("aiperf", "request latency", 260_000_009, 1),
        ("aiperf", "ITL", 160_000_008 / 9, 1),
        ("aiperf", "ICL", 160_000_008 / 3, 3),
        ("sglang", "TTFT", 100_000_001, 1),
        ("sglang", "TPOT", 200_000_008 / 9, 1),
        ("sglang", "ITL", 160_000_008 / 3, 3),
        ("sglang", "E2E latency", 300_000_009, 1),
        ("inference-perf", "TTFT", 200_000_007, 1),
        ("inference-perf", "TPOT", 60_000_002 / 9, 1),
        ("inference-perf", "ITL", 60_000_002 / 5, 5),
        ("inference-perf", "NTPOT", 300_000_009 / 10, 1),
        ("inference-perf", "request latency", 300_000_009, 1),
        ("llmperf", "TTFT", 200_000_007, 1),
        ("llmperf", "inter-token latency", 260_000_009 / 6, 1),
        ("llmperf", "end-to-end latency", 300_000_009, 1),
    ],
)
def test_every_definition_to_the_nanosecond(tool: str, name: str, mean_ns: float, num: int) -> None:
    found = only(tool, A)[name]
    assert found.num_samples == num
    assert ns(found)[0] == round(mean_ns)


def test_every_definition_is_tested() -> None:
    cases = test_every_definition_to_the_nanosecond.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert {(tool, name) for tool, name, *_ in cases} == {
        (t, m.name) for t, tool in TOOLS.items() for m in tool.metrics
    }


def test_pooled_gaps_are_theirs() -> None:
    gaps = only("vllm", A)["ITL"]
    assert ns(gaps)[1] == 40_000_002  # of 5.0, 40.000002, 60.000004, 60.000002 and 20 ms
    assert only("inference-perf", A)["ITL"].percentiles["p50"] == 0.0


@pytest.mark.parametrize(
    ("tool", "absent"),
    [
        ("vllm", {"TPOT", "ITL"}),
        ("guidellm", {"ITL"}),
        ("aiperf", {"TTST", "ITL", "ICL"}),
        ("sglang", {"TPOT", "ITL"}),
        ("inference-perf", {"TTFT", "TPOT", "ITL"}),
        ("llmperf", set()),
    ],
)
def test_an_answer_of_one_token_tells_what_it_tells_them(tool: str, absent: set[str]) -> None:
    assert {name for name, n in only(tool, B).items() if n.mean is None} == absent


def test_who_counts_what_never_had_a_token() -> None:
    """A role-only frame is a success for one of them, whose TTFT it then is."""
    for tool in TOOLS:
        view = compat_view(tool, [A, C, D])
        assert (view.num_used, view.num_left_out) == ((2, 1) if tool == "vllm" else (1, 2))
    assert only("vllm", C)["TTFT"].mean == 30.0
    nothing = compat_view("aiperf", [D])
    assert all(n.mean is None and set(n.percentiles.values()) == {None} for n in nothing.numbers)
    assert json.loads(json.dumps(nothing.as_json(), allow_nan=False))["numbers"][0]["p99"] is None


def many() -> list[RequestTiming]:
    rng = np.random.default_rng(3)
    made = []
    for i in range(40):
        num = int(rng.integers(2, 30))
        times = T0 + np.cumsum(rng.integers(1_000_000, 30_000_000, num))
        chunks = tuple(Chunk(int(t), 1) for t in times)
        made.append(
            RequestTiming(str(i), None, T0, None, int(times[-1]), chunks, 5, num, t_first_answer_ns=int(times[0]))
        )
    return made


def numbers(view: CompatView) -> dict[str, CompatNumber]:
    return {n.name: n for n in view.numbers}


def test_percentiles_are_taken_their_way() -> None:
    requests = many()
    tpots = [(r.chunks[-1].t_ns - r.chunks[0].t_ns) / 1e6 / (r.num_output_tokens - 1) for r in requests]
    linear = numbers(compat_view("aiperf", requests))["ITL"]
    assert linear.percentiles["p95"] == pytest.approx(float(np.percentile(tpots, 95)))
    expanded = np.sort(np.repeat(tpots, [r.num_output_tokens - 1 for r in requests]))
    weighted = numbers(compat_view("guidellm", requests))["ITL"]
    assert weighted.mean == pytest.approx(expanded.mean())
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)):
        assert weighted.percentiles[name] == pytest.approx(expanded[int(np.ceil(q * len(expanded))) - 1])


def test_every_number_names_its_definition_and_the_version_read() -> None:
    for tool in TOOLS:
        told = compat_view(tool, [A]).as_json()
        assert told["read"] and told["counts"]
        assert all(number["definition"] for number in told["numbers"])
    with pytest.raises(KeyError):
        compat_view("wrk", [A])
