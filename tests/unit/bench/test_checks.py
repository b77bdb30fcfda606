"""The load generator voids its own numbers when it is at fault, and only then."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from inferloop.bench.checks import self_checks
from inferloop.bench.drive import DriveResult, SenderStats
from inferloop.bench.pace import Stall
from inferloop.bench.render import RenderedRequest
from inferloop.bench.reuse import Reuse, reuse_of
from inferloop.core.request import Segment, TimedRequest
from inferloop.core.slo import Objective, Slo
from inferloop.core.units import NS_PER_MS, NS_PER_S
from inferloop.measure.timing import Chunk, RequestTiming

SLO = Slo((Objective("ttft_ms", 0.95, 1000.0),))


def timing(i: int, *, late_ms: int = 0, cached: int = 0, error: str | None = None) -> RequestTiming:
    """One request per 100 ms, answered in 200 ms."""
    intended = i * 100 * NS_PER_MS
    send = intended + late_ms * NS_PER_MS
    end = send + 200 * NS_PER_MS
    chunks = () if error else (Chunk(end, 5),)
    return RequestTiming(f"r{i}", intended, send, send, end, chunks, 100, 5, cached, error)


def run(
    timings: list[RequestTiming], *, reuse: float = 0.0, exact_lengths: bool = True, **more: Any
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    span_s = (max(t.t_end_ns for t in timings) - min(t.t_send_ns for t in timings)) / NS_PER_S
    busy_s = sum(t.t_end_ns - t.t_send_ns for t in timings) / NS_PER_S
    counted = Counter({"server": sum(t.ok for t in timings)})
    values: dict[str, Any] = {
        "timings": timings,
        "in_flight": busy_s / span_s,
        "counted_by": counted,
        "num_telling_cache": len(timings),
        "positions": list(range(len(timings))),
        **more,
    }
    planned = [repeating(i, reuse) for i in range(len(timings))]
    found = self_checks(DriveResult(**values), timings, planned, SLO, reuse, exact_lengths=exact_lengths)
    return found.void, found.notes


def repeating(i: int, reuse: float) -> RenderedRequest:
    """100 tokens, of which that share is the same in all."""
    own = 100 - round(100 * reuse)
    segments = (*((Segment(-1, 100 - own),) if own < 100 else ()), Segment(i, own))
    return RenderedRequest(TimedRequest(i, i / 10, segments, 5), "/", b"", 100, 0, False)


def seen(
    planned: list[RenderedRequest], where: list[int], timings: list[RequestTiming], measured: list[RequestTiming]
) -> Reuse:
    found = reuse_of(planned, where, timings, measured, 0.5, is_told=True)
    assert found is not None
    return found


def test_a_sound_point_is_not_void() -> None:
    assert run([timing(i) for i in range(200)]) == ((), ())


def test_late_sends_void() -> None:
    (why,) = run([timing(i, late_ms=80 if i % 10 == 0 else 0) for i in range(200)])[0]
    assert "p95 of sends is 80 ms late, 50 ms are allowed" in why
    (why,) = run([timing(i, late_ms=80 if i % 50 == 0 else 0) for i in range(700)])[0]
    assert "p99 of sends is 80 ms late" in why
    assert run([timing(i, late_ms=80 if i % 50 == 0 else 0) for i in range(200)])[0] == ()
    assert run([timing(i, late_ms=40) for i in range(200)])[0] == ()


def test_drifting_sends_void() -> None:
    drifting = [timing(i, late_ms=2 * i) for i in range(200)]
    assert any("98.0% of the rate" in why for why in run(drifting)[0])


def test_a_stall_voids() -> None:
    (why,) = run([timing(i) for i in range(200)], num_forgone=7, stalls=(Stall(0, 3 * NS_PER_S, 7),))[0]
    assert "stalled for 3.00 s and gave up 7 requests" in why


def test_a_gauge_that_contradicts_the_records_voids() -> None:
    timings = [timing(i) for i in range(200)]
    (why,) = run(timings, in_flight=3.0)[0]
    assert "Little's law is off" in why
    assert run(timings, in_flight=2.008)[0] == ()


def test_a_cache_warmer_or_colder_than_the_workload_makes_it_voids() -> None:
    warm = [timing(i, cached=80) for i in range(200)]
    (why,) = run(warm)[0]
    assert why.startswith("reuse_mismatch: 80%")
    assert run(warm, reuse=0.75) == ((), ())
    cold = [timing(i, cached=30) for i in range(200)]
    (why,) = run(cold, reuse=0.55)[0]
    assert why.startswith("reuse_mismatch: 30% of the input tokens came from the cache, 53% had been computed before")
    assert run(cold, reuse=0.35) == ((), ())


def test_a_window_whose_own_requests_repeat_more_than_the_workload_is_not_warm() -> None:
    """Of a plan that repeats 60 %, the ten requests after the lead happen to repeat 80 %."""
    timings = [timing(i, cached=0 if i < 10 else 78) for i in range(20)]
    result = DriveResult(timings=timings, positions=list(range(20)), num_telling_cache=20)
    planned = [repeating(i, 0.8) for i in range(20)]
    assert self_checks(result, timings[10:], planned, SLO, 0.6).void == ()
    (why,) = self_checks(result, timings[10:], [repeating(i, 0.5) for i in range(20)], SLO, 0.6).void
    assert why.startswith("reuse_mismatch: 78% of the input tokens came from the cache, 60% are the workload's")


def test_a_server_without_a_cache_is_what_it_is() -> None:
    void, notes = run([timing(i) for i in range(200)], reuse=0.5)
    assert void == () and notes == (
        "the server reused nothing, though 50% of the input tokens had been computed before",
    )


def test_a_colder_cache_is_only_told_where_caches_are_compared() -> None:
    timings = [timing(i, cached=10) for i in range(200)]
    result = DriveResult(timings=timings, positions=list(range(200)), num_telling_cache=200)
    found = self_checks(result, timings, [repeating(i, 0.5) for i in range(200)], SLO, 0.5, is_compared=True)
    assert (found.void, found.notes) == ((), ())
    assert found.reuse is not None and (found.reuse.cached, found.reuse.verdict) == (0.1, "less")


def test_what_was_sent_together_has_nothing_of_each_other() -> None:
    """All at once, or again before the first has its first token: no cache could hold anything."""
    timings = [timing(0), timing(1), *(timing(i) for i in range(2, 6))]
    planned = [repeating(i, 0.5) for i in range(6)]
    where = list(range(6))
    # Answers come 200 ms after their sends, which are 100 ms apart: the third finds what the first has left.
    assert seen(planned, where, timings, timings).possible == 4 * 50 / 600
    assert seen(planned, where, timings, timings[3:]).possible == 0.5
    at_once = [replace(t, t_send_ns=0) for t in timings]
    together = seen(planned, where, at_once, at_once)
    assert together.possible == 0 and together.verdict == "less"
    assert together.reason == "requests came before what they share had been computed"
    mixed = [5, 0, 3, 1, 4, 2]
    assert seen(planned, mixed, [timings[i] for i in mixed], timings).possible == 4 * 50 / 600
    assert reuse_of(planned, [], [], [], 0.5, is_told=True) is None


def test_a_cache_of_blocks_keeps_whole_ones() -> None:
    timings = [timing(i, cached=cached) for i, cached in enumerate((0, 0, 32, 48, 32))]
    planned = [repeating(i, 0.6) for i in range(5)]
    blocks = seen(planned, list(range(5)), timings, timings[2:])
    assert (blocks.in_blocks, blocks.possible) == (0.48, 0.6), "16 tokens a block: 48 of 60"
    whole = [replace(p, timed=replace(p.timed, segments=(Segment(7, 100),))) for p in planned]
    assert seen(whole, list(range(5)), timings, timings[2:]).in_blocks == 0.96, "and never the last token"


def test_a_server_that_does_not_tell_of_its_cache_is_said_not_to() -> None:
    """Neither a mismatch nor the nought that an absent count would be."""
    for reuse in (0.0, 0.5):
        void, (note,) = run([timing(i) for i in range(200)], reuse=reuse, num_telling_cache=0)
        assert void == () and note.startswith("no answer says how many of its input tokens came from the cache")


def test_why_a_target_did_not_get_the_declared_reuse() -> None:
    def of(cached: float | None, in_blocks: float = 0.5, possible: float = 0.5, block: int = 16) -> Reuse:
        return Reuse(300, cached, 0.5, possible, in_blocks, block)

    assert (of(0.45).verdict, of(0.45).reason) == ("as declared", "")
    assert (of(0.0).verdict, of(0.0).reason) == ("less", "it reused nothing")
    assert of(0.2).reason == "its cache is too small, or requests go past it"
    assert of(0.2, in_blocks=0.22, block=128).reason == "its cache keeps whole blocks of 128 tokens"
    assert of(0.2, possible=0.22).reason == "requests came before what they share had been computed"
    assert (of(None).verdict, of(None).cached) == ("not told", None)
    assert Reuse.joined([of(0.2), replace(of(0.5), num_input=600)]) == replace(of(0.4), num_input=900)
    joined = Reuse.joined([of(0.2), of(None)])
    assert joined is not None and joined.cached is None
    assert Reuse.joined([]) is None


def test_wrong_counts_void() -> None:
    timings = [timing(i) for i in range(200)]
    assert "token counts" in run(timings, num_count_mismatches=3)[0][0]
    assert "another length" in run(timings, num_length_mismatches=3)[0][0]
    assert run(timings, num_count_mismatches=1)[0] == ()


def test_chunks_that_nobody_counts_are_told() -> None:
    void, (note,) = run([timing(i) for i in range(200)], counted_by=Counter({"frames": 3, "total": 197}))
    assert void == () and note.startswith("3 of 200 answers came without the number of their tokens")


def test_answers_of_another_length_than_asked_for_void() -> None:
    """Less work than the workload has would pass any objective."""
    timings = [timing(i) for i in range(200)]
    for told, share in ((200, "20%"), (800, "80%"), (1200, "120%")):
        (why,), notes = run(timings, num_tokens_told=told, num_tokens_asked=1000)
        assert why.startswith(f"answers have {share} of the tokens that were asked for") and notes == ()
        free = run(timings, num_tokens_told=told, num_tokens_asked=1000, exact_lengths=False)
        assert free == ((), (f"answers have {share} of the tokens that were asked for",))
    assert run(timings, num_tokens_told=920, num_tokens_asked=1000)[0] == ()


def test_requests_that_were_sent_again_are_told() -> None:
    senders = (SenderStats(1, 0.5, 0.1, num_stale_retries=1), SenderStats(2, 0.5, 0.1, num_stale_retries=2))
    void, (note,) = run([timing(i) for i in range(200)], senders=senders)
    assert void == () and note.startswith("3 requests were sent again")


def test_our_own_and_refused_requests_void() -> None:
    for name, words in (("client", "load generator"), ("http_4xx", "refused as wrong")):
        timings = [timing(0, error=name), *(timing(i) for i in range(1, 200))]
        assert words in run(timings)[0][0]
    server = [timing(0, error="http_5xx"), *(timing(i) for i in range(1, 200))]
    details = {"client": "ours", "http_5xx": "HTTP 503: no room" + "!" * 500}
    void, (note,) = run(server, details=details)
    assert void == () and note.startswith("http_5xx, for example: HTTP 503: no room!!!") and len(note) < 200


def test_clipped_prompts_are_told() -> None:
    timings = [timing(i) for i in range(200)]
    planned = [RenderedRequest(TimedRequest(0, 0, (Segment(0, 5),), 5), "/", b"", 15, 0, True)]
    result = DriveResult(timings=timings, positions=[0] * 200, num_telling_cache=200)
    assert any("1 of 1 prompts are longer" in note for note in self_checks(result, timings, planned, SLO, 0.0).notes)


def test_waiting_for_a_connection_voids() -> None:
    timings = [timing(i) for i in range(200)]
    senders = (SenderStats(1, 0.5, 0.1), SenderStats(2, 0.5, 0.1, num_pool_waits=3))
    assert run(timings, senders=senders)[0] == ("3 requests waited in the load generator for one of its connections",)
    assert run(timings, senders=senders[:1])[0] == ()


def test_a_load_generator_that_cannot_keep_up_voids() -> None:
    timings = [timing(i) for i in range(200)]
    quick = (100_000,) * 1000

    def voids(**of_sender: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return run(timings, senders=(SenderStats(1, 20.0, **{"cpu_s": 1.0, "loop_lags_ns": quick, **of_sender}),))

    assert voids(loop_lags_ns=quick) == ((), ())
    (why,) = voids(loop_lags_ns=(*quick, *(80 * NS_PER_MS,) * 20))[0]
    assert "loop was 80 ms late at p99, 50 ms are allowed" in why
    assert voids(loop_lags_ns=(*quick, *(80 * NS_PER_MS,) * 5)) == ((), ())
    (why,) = voids(loop_lags_ns=(200 * NS_PER_MS,) * 90)[0]
    assert "loop was 200 ms late" in why, "19 of 20 ticks never came"
    (why,) = voids(loop_lags_ns=())[0]
    assert "loop was 20000 ms late" in why
    assert run(timings, senders=(SenderStats(1, 0.9, 0.1, loop_lags_ns=(200 * NS_PER_MS,) * 9),)) == ((), ())
    (why,) = voids(collector_pauses_ns=(NS_PER_MS, 80 * NS_PER_MS))[0]
    assert why == "a garbage collection held up the load generator for 80 ms, 50 ms are allowed"
    assert voids(collector_pauses_ns=(NS_PER_MS, 40 * NS_PER_MS)) == ((), ())
    (why,) = voids(cpu_s=19.0)[0]
    assert "used 95% of a core" in why
    void, notes = voids(cpu_s=16.0)
    assert void == () and "80%" in notes[0]


def test_who_was_held_up_is_told_what_to_do_about_it() -> None:
    late = [timing(i, late_ms=80 if i % 10 == 0 else 0) for i in range(200)]
    void, (note,) = run(late, senders=(SenderStats(1, 0.5, 0.1, priority="normal"),))
    assert len(void) == 1 and "ordinary priority" in note
    assert run(late, senders=(SenderStats(1, 0.5, 0.1, priority="real-time"),))[1] == ()
    assert run([timing(i) for i in range(200)], senders=(SenderStats(1, 0.5, 0.1),)) == ((), ())
