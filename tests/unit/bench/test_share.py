"""What a sender has to send, in columns, and what it tells, in bytes: nothing of it is lost on the way."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.bench.collector import Collector
from inferloop.bench.engine import EngineReport
from inferloop.bench.exchange import Outcome
from inferloop.bench.messages import add_outcome, decode_to_sender, framed
from inferloop.bench.plan import NONE, share_out, steps_of
from inferloop.bench.render import RenderedRequest
from inferloop.bench.share import Part, Share, parts
from inferloop.bench.stream import StreamResult
from inferloop.bench.window import DriveResult, OnDone, SenderStats
from inferloop.core.errors import UsageError
from inferloop.core.request import Segment, TimedRequest

OWN = (Segment(1, 10),)


def rendered(timed: TimedRequest, body: bytes, path: str = "/v1/chat/completions") -> RenderedRequest:
    return RenderedRequest(timed, path, body, 10, 0, False)


def arrive(plan: list[RenderedRequest], places: Any) -> Share:
    """Over the link, in parts."""
    share = Share()
    for part in parts(plan, steps_of([r.timed for r in plan]), places):
        arrived = decode_to_sender(framed(part)[4:])
        assert isinstance(arrived, Part)
        share.append(arrived)
    return share


@given(st.lists(st.tuples(st.integers(-3, 60), st.floats(0, 1e6), st.integers(0, 3)), max_size=60), st.integers(1, 4))
def test_every_request_arrives_at_one_sender_as_it_was_planned(rows: list[Any], num_shares: int) -> None:
    plan = [
        rendered(
            TimedRequest(100 + i, at_s, OWN, 5, "default", 100 + after if 0 <= after < i else None, -after or None),
            *(b"body %d" % kind, f"/{kind % 2}"),
        )
        for i, (after, at_s, kind) in enumerate(rows)
    ]
    seen = []
    for places in share_out(steps_of([r.timed for r in plan]), num_shares):
        share = arrive(plan, places)
        sessions: dict[int, int] = {}
        for place in range(len(share)):
            position, path, body = share.take(place)
            request, steps = plan[position], share.steps
            seen.append(position)
            assert (path, body) == (request.path, request.body)
            assert steps.at_ns[place] == round(request.timed.at_s * 1e9)
            before = None if steps.after[place] == NONE else plan[share.positions[steps.after[place]]].timed.index
            assert before == request.timed.after
            if request.timed.session is None:
                assert steps.session[place] == NONE
            else:
                assert sessions.setdefault(request.timed.session, steps.session[place]) == steps.session[place] != NONE
        assert len(set(sessions.values())) == len(sessions)
    assert sorted(seen) == list(range(len(plan)))


def test_large_bodies_come_in_parts_of_their_own_and_are_forgotten_when_taken() -> None:
    plan = [rendered(TimedRequest(i, 0.0, OWN, 5), bytes([i]) * 400_000) for i in range(7)]
    steps = steps_of([r.timed for r in plan])
    assert [len(part.bodies) for part in parts(plan, steps, range(7))] == [3, 3, 1]
    share = arrive(plan, range(7))
    assert share.take(6)[2] == bytes([6]) * 400_000
    assert share.take(6)[2] == b""


def test_what_many_requests_share_is_there_once() -> None:
    """Some 50 bytes a request in the sender, which as objects with a body each were 600."""
    body = b"x" * 1000
    plan = [rendered(TimedRequest(i, i / 1000, OWN, 5), body) for i in range(20_000)]
    tracemalloc.start()
    share = arrive(plan, range(20_000))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(share) == 20_000 and size < 64 * 20_000


def outcome(position: int, error: str | None = None) -> Outcome:
    t = 10**15 + position
    stream = StreamResult(error, (t + 5, t + 9), (1, 2), 11, 3, 0, "length", None, t + 5, "usage", position == 3)
    return Outcome(position, t, t + 1, t + 2, t + 9, error, None if error is None else "a secret", "r", stream)


def collect(count: int, *, on_done: OnDone | None, keep: bool = True) -> DriveResult:
    plan = [rendered(TimedRequest(i, i // 7, OWN, 5, session=i % 2), b"{}") for i in range(10)]
    collector = Collector(
        *(plan, 77, lambda _: None),
        on_done=on_done,
        stop_when=None,
        keep_timings=keep,
        redact=lambda text: text.replace("secret", "..."),
    )
    told = bytearray()
    for position in range(count):
        add_outcome(told, outcome(position, "truncated" if position == 2 else None))
    collector.take_all(bytes(told))
    collector.lost(range(10), 0.5, 10**15, "it died")  # of those due by then, number 6 was not told of
    return collector.result([EngineReport(SenderStats(1, 1.0, 0.1), count, 0, 0, 0, [], 0, None, 0)])


def test_rows_made_after_the_window_are_those_made_in_it() -> None:
    heard = []
    during, after = collect(6, on_done=lambda _, t: heard.append(t)), collect(6, on_done=None)
    assert list(after.timings) == list(during.timings) == heard and len(after.timings) == 7
    assert after.timings == during.timings and after.timings[:6] != during.timings
    assert list(after.positions) == list(during.positions) == list(range(7))
    assert after.timings[-1] == heard[-1] and after.timings[1:3] == heard[1:3]
    with pytest.raises(IndexError):
        after.timings[7]
    assert (heard[2].error, heard[3].turn, heard[6].error) == ("truncated", 1, "client")
    unkept = collect(6, on_done=None, keep=False)
    assert len(unkept.timings) == len(unkept.positions) == 0
    for result in (during, after, unkept):
        assert result.details == {"truncated": "a ...", "client": "it died"}
        assert (result.num_unsent, result.counted_by, result.num_count_mismatches) == (3, {"usage": 5}, 1)
        assert result.num_length_mismatches == 5


def test_kept_timings_are_small() -> None:
    data = bytearray()
    for position in range(1000):
        add_outcome(data, outcome(position))
    assert len(data) < 110 * 1000


def test_what_is_not_kept_cannot_be_judged() -> None:
    with pytest.raises(UsageError, match="not kept"):
        Collector([], 0, lambda _: None, on_done=None, stop_when=lambda _: None, keep_timings=False, redact=str)


def test_a_sender_loads_nothing_that_it_does_not_need() -> None:
    """Its memory is what every core given to it costs."""
    code = "import sys, inferloop.bench.sender; print({'numpy', 'torch', 'yaml'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
