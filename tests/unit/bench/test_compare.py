"""How a comparison goes about it, and what it makes of its windows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from inferloop.bench.compare import mirrored, prompts_digest
from inferloop.bench.compare_result import CompareResult, Side, SideWindow, Stage
from inferloop.bench.compare_side import salted
from inferloop.bench.render import RenderedRequest
from inferloop.bench.reuse import Reuse
from inferloop.core.request import Segment, TimedRequest
from inferloop.core.slo import Slo
from inferloop.measure.balance import Balance, Kept
from inferloop.measure.samples import CENSORED
from inferloop.measure.timing import Chunk, RequestTiming

MS = 1_000_000


def side_window(
    stage: Stage, label: str, number: int, ttft_ms: float, *, void: Sequence[str] = (), num: int = 40
) -> SideWindow:
    timings = {}
    for i in range(num):
        t = (number * 1000 + i * 20) * MS
        first = t + int((ttft_ms + (i * 7 + number) % 5 * 0.1) * MS)
        chunks = (Chunk(first, 1), Chunk(first + 5 * MS, 1))
        timings[i] = RequestTiming(f"{label}{i}", t, t, t, chunks[-1].t_ns, chunks, 9, 2, finish_reason="length")
    name = f"{stage}/{label}/20/{number + 1}"
    return SideWindow(stage, label, 20.0, number, timings, tuple(void), (), "d", name)


def result(windows: Sequence[SideWindow]) -> CompareResult:
    sides = tuple(Side(label, "scripted", {"label": label}, None) for label in "AB")
    return CompareResult(Slo(), sides, tuple(windows), (20.0,), (), "/v1/completions")


def windows(b_ms: float, **of_b: Sequence[str]) -> list[SideWindow]:
    found = [side_window("self", f"A{i}", n, 10) for n in range(4) for i in (1, 2)]
    found += [side_window("versus", "A", n, 10) for n in range(4)]
    return found + [side_window("versus", "B", n, b_ms, void=of_b.get(f"round_{n}", ())) for n in range(4)]


def test_rounds_are_mirrored() -> None:
    assert [i for number in range(4) for i in mirrored(2, number)] == [0, 1, 1, 0, 0, 1, 1, 0]
    assert list(mirrored(3, 1)) == [2, 1, 0]


def test_the_same_server_twice_gets_the_same_shape_in_other_words() -> None:
    requests = [TimedRequest(i, 0.0, (Segment(7, 20), Segment(i, 5)), 3) for i in range(3)]
    again = salted(requests, 1)
    assert salted(requests, 0) is requests
    assert [r.input_tokens for r in again] == [25] * 3
    assert len({r.segments[0] for r in again}) == 1 and again[0].segments[0] != requests[0].segments[0]


def test_a_slower_target_is_called_and_dominated() -> None:
    summary = result(windows(14.0)).as_summary()
    json.dumps(summary, allow_nan=False)
    called = {d["figure"]: d for d in summary["comparisons"]}
    ttft = called["ttft_ms p50"]
    assert (ttft["called"], ttft["better"], ttft["num_pairs"]) == ("more", False, 4)
    assert abs(ttft["difference"] - 4.0) < 0.2
    assert called["tpot_ms p50"]["called"] == "none"
    assert [p["dominated_by"] for p in summary["points"]] == [None, "A at 20/s"]
    assert summary["verdict"] == "not declared"


def test_chance_dominates_nobody() -> None:
    """B's TTFT is longer in what was seen, as A's is than its own in the next window."""
    noisy = [side_window("self", f"A{i}", n, 10 + (n + i) % 2) for n in range(4) for i in (1, 2)]
    noisy += [side_window("versus", "A", n, 10 + n % 2) for n in range(4)]
    noisy += [side_window("versus", "B", n, 10.4 + (n + 1) % 2) for n in range(4)]
    points = result(noisy).as_summary()["points"]
    assert points[0]["ttft_ms"]["p95"] < points[1]["ttft_ms"]["p95"]
    assert [p["dominated_by"] for p in points] == [None, None]
    assert [p["ranked_by"] for p in points] == [["output_tok_s", "ttft_ms p95", "tpot_ms p95"]] * 2


def test_later_targets_are_ranked_among_each_other_too() -> None:
    found = [side_window("self", f"A{i}", n, 10) for n in range(4) for i in (1, 2)]
    found += [
        side_window("versus", label, n, ms) for n in range(4) for label, ms in zip("ABC", (10, 18, 14), strict=True)
    ]
    sides = tuple(Side(label, "scripted", {"label": label}, None) for label in "ABC")
    compared = CompareResult(Slo(), sides, tuple(found), (20.0,), (), "/v1/completions")
    assert [p["dominated_by"] for p in compared.points] == [None, "A at 20/s", "A at 20/s"]
    assert compared._calls("C", "B", 20.0, ["ttft_ms p95"]) == [True]
    assert compared._calls("B", "C", 20.0, ["ttft_ms p95"]) == [False]


def test_what_cannot_be_certified_is_not_ranked() -> None:
    few = [side_window("self", f"A{i}", n, 10, num=2) for n in range(2) for i in (1, 2)]
    few += [side_window("versus", label, n, ms, num=2) for n in range(2) for label, ms in (("A", 10), ("B", 40))]
    summary = result(few).as_summary()
    assert [(p["dominated_by"], p["ranked_by"]) for p in summary["points"]] == [(None, [])] * 2
    assert any("certify no p95: that takes 130" in note for note in summary["notes"])


def test_what_caches_did_is_told_of_each_target_and_voids_nothing() -> None:
    """A window that is void has no say."""
    used, cold = Reuse(100, 0.5, 0.5, 0.5, 0.5), Reuse(100, 0.1, 0.5, 0.4, 0.0, 128)
    found = [replace(w, reuse=cold if w.label == "B" else used) for w in windows(14.0, round_1=["no"])]
    found[-3] = replace(found[-3], reuse=replace(used, cached=0.9))
    summary = result(found).as_summary()
    a, b = (t["reuse"] for t in summary["targets"])
    assert (a["cached"], a["verdict"]) == (0.5, "as declared")
    assert (b["cached"], b["declared"], b["possible"]) == (0.1, 0.5, 0.4)
    assert (b["verdict"], b["reason"]) == ("less", "its cache keeps whole blocks of 128 tokens")
    assert [p["reuse"] for p in summary["points"]] == [a, b] and summary["verdict"] == "not declared"


def test_void_windows_leave_with_their_partners() -> None:
    summary = result(windows(14.0, round_1=["the client stalled"])).as_summary()
    assert {d["num_pairs"] for d in summary["comparisons"]} == {3}
    assert "versus/B/20/2 is void and left out: the client stalled" in summary["notes"]
    lost = result(windows(14.0, **{f"round_{n}": ["no"] for n in range(4)})).as_summary()
    assert lost["verdict"] == "void" and "B has no pair" in lost["reasons"][0]
    assert lost["comparisons"] == []


def test_without_the_target_against_itself_nothing_is_called() -> None:
    unknown = [w for w in windows(50.0) if w.stage == "versus"]
    assert {d["called"] for d in result(unknown).as_summary()["comparisons"]} == {"none"}


def three(windows: Sequence[SideWindow]) -> CompareResult:
    sides = tuple(Side(label, "scripted", {"label": label}, None) for label in "ABC")
    return CompareResult(Slo(), sides, tuple(windows), (20.0,), (), "/v1/completions")


def test_a_target_whose_checks_fail_is_left_out_alone() -> None:
    why = "9 of 9 answers have other token counts by frame than by total"
    found = [side_window("self", f"A{i}", n, 10) for n in range(4) for i in (1, 2)]
    found += [side_window("versus", "A", n, 10) for n in range(4)]
    found += [side_window("versus", "B", n, 14, void=[why]) for n in range(4)]
    found += [side_window("versus", "C", n, 14) for n in range(4)]
    summary = three(found).as_summary()
    assert summary["verdict"] == "not declared", "one target's fault takes nothing from the others"
    assert summary["reasons"] == [f"B has no pair of usable windows with A: {why}"]
    assert [t["void"] for t in summary["targets"]] == [None, summary["reasons"][0], None]
    assert {d["target"] for d in summary["comparisons"]} == {"C"}
    assert [p["target"] for p in summary["points"]] == ["A", "C"]


def test_a_first_target_that_is_void_leaves_nothing_to_compare_with() -> None:
    found = [side_window("versus", "A", n, 10, void=["the client stalled"]) for n in range(4)]
    found += [side_window("versus", label, n, 14) for n in range(4) for label in "BC"]
    summary = three(found).as_summary()
    assert summary["verdict"] == "void"
    assert summary["reasons"][0].endswith("with A, whose own windows are void: the client stalled")


def balance(verdict: Kept) -> Balance:
    return Balance(verdict, 20, 10, 1, 0.5, 0.3, 0.7, 0.1, 100, 5)


def test_a_queue_that_grows_in_most_windows_is_told_and_not_void() -> None:
    found = [side_window("self", f"A{i}", n, 10) for n in range(4) for i in (1, 2)]
    found += [side_window("versus", "A", n, 10) for n in range(4)]
    kept: list[Kept] = ["saturated", "undecided", "saturated", "sustained"]
    found += [replace(side_window("versus", "B", n, 900), balance=balance(kept[n])) for n in range(4)]
    cut = [side_window("versus", "C", n, 10) for n in range(4)]
    for window in cut:
        timings = {i: replace(t, error=CENSORED) if i % 10 == 0 else t for i, t in window.timings.items()}
        found.append(replace(window, timings=timings))
    summary = three(found).as_summary()
    assert [(p["target"], p["saturated"]) for p in summary["points"]] == [("A", None), ("B", True), ("C", True)]
    assert summary["reasons"] == []


def test_a_queue_that_holds_is_not_saturated() -> None:
    found = [
        replace(side_window("versus", label, n, 10), balance=balance("sustained")) for n in range(2) for label in "AB"
    ]
    assert [p["saturated"] for p in result(found).points] == [False, False]


def test_whose_cache_is_used_makes_no_other_prompt() -> None:
    def digest(**more: str) -> str:
        body = msgspec.json.encode({"prompt": "a b", **more})
        return prompts_digest([RenderedRequest(TimedRequest(0, 0.0, (Segment(0, 2),), 1), "/", body, 2, 0, False)])

    assert digest(model="m", cache_salt="x") == digest(model="n", cache_salt="y") == digest()
    assert digest(prompt="a c") != digest()
