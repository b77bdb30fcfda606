"""What a stream says does not depend on how the network cut it, and tokens are counted, never frames."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.bench import stream
from inferloop.bench.frames import Frame, decode_frame
from inferloop.bench.sse import EventParser
from inferloop.bench.stream import StreamReader, StreamResult
from inferloop.measure.timing import Chunk


def frame(delta: dict[str, Any] | None, *, finish: str | None = None, **more: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices, **more}, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
ANSWER = b"".join(
    (
        b": ping\n\n",
        frame({"role": "assistant", "content": ""}),
        frame({"content": "Grüße  aus"}),
        b"event: message\nid: 7\n",
        frame({"content": " München \u2014 \U0001f600"}).replace(b"data: ", b"data:"),
        frame({"content": " end"}).replace(b"\n\n", b"\r\n\r\n"),
        frame({}, finish="stop"),
        frame(None, usage={"prompt_tokens": 9, "completion_tokens": 12, "prompt_tokens_details": {"cached_tokens": 4}}),
        DONE,
    )
)


def read(pieces: list[tuple[int, bytes]], *, cut: bool = False) -> StreamResult:
    reader = StreamReader(keep_text=True)
    for t, piece in pieces:
        reader.feed(t, piece)
    return reader.finish(cut=cut)


WHOLE = read([(5, ANSWER)])


def test_the_whole_answer() -> None:
    assert WHOLE.text == "Grüße  aus München \u2014 \U0001f600 end"
    assert WHOLE.error is None
    assert [c.num_tokens for c in WHOLE.chunks] == [4, 4, 4]
    assert (WHOLE.num_input_tokens, WHOLE.num_output_tokens, WHOLE.num_cached_tokens) == (9, 12, 4)
    assert (WHOLE.finish_reason, WHOLE.counted_by, WHOLE.count_mismatch) == ("stop", "total", False)


def test_event_by_event_reads_the_same() -> None:
    """As servers write them, and so that what is held of one counts for the next, which is a whole event by itself."""
    lines = ANSWER.split(b"\n\n")[:-1]
    assert read([(5, line + b"\n\n") for line in lines]) == WHOLE
    for held in (b"data: {\n", b"data: 1\r", b"x", b"data: x"):
        whole, cut = EventParser(), EventParser()
        event = b'data: {"a": 1}\n\n'
        assert cut.feed(event) + cut.feed(held) + cut.feed(event) == whole.feed(event + held + event), held


def test_every_split_position_reads_the_same() -> None:
    for cut in range(len(ANSWER) + 1):
        assert read([(5, ANSWER[:cut]), (5, ANSWER[cut:])]) == WHOLE, cut
    assert read([(5, ANSWER[i : i + 1]) for i in range(len(ANSWER))]) == WHOLE
    windows = ANSWER.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
    for cut in range(len(windows) + 1):
        assert read([(5, windows[:cut]), (5, windows[cut:])]) == WHOLE, cut


def test_every_split_position_reads_the_same_where_frames_are_not_decoded() -> None:
    """As in a run: the text is not kept, and a frame like the one before is only recognized."""
    plain = [frame({"content": text}) for text in (" one", " two  words", " Gr\u00fc\u00dfe", ' "q\\"', " end")]
    usage = frame(
        None, usage={"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    )
    body = b"".join([frame({"role": "assistant"}), *plain, b": ping\n\n", frame({}, finish="stop"), usage, DONE])
    for data in (body, body.replace(b"\n", b"\r\n"), ANSWER):
        truth = msgspec.structs.replace(read([(5, data)]), text="")
        assert (truth.error, truth.finish_reason, truth.num_cached_tokens) == (None, "stop", 4)
        for cut in range(len(data) + 1):
            reader = StreamReader()
            reader.feed(5, data[:cut])
            reader.feed(5, data[cut:])
            assert reader.finish() == truth, cut
        reader = StreamReader()
        for i in range(len(data)):
            reader.feed(5, data[i : i + 1])
        assert reader.finish() == truth


@given(st.lists(st.integers(1, 40), max_size=60))
def test_any_cutting_reads_the_same(sizes: list[int]) -> None:
    pieces, start = [], 0
    for size in sizes:
        pieces.append((5, ANSWER[start : start + size]))
        start += size
    assert read([*pieces, (5, ANSWER[start:])]) == WHOLE


@given(
    st.lists(st.text(alphabet="ab :\u00fc\U0001f600", max_size=6), max_size=4), st.sampled_from(["\n", "\r\n", "\r"])
)
def test_data_lines_come_back_in_any_line_ending(lines: list[str], ending: str) -> None:
    data = "".join(f"data: {line}{ending}" for line in lines) + ending + f"data: end{ending}{ending}"
    parser = EventParser()
    events = [event for byte in data.encode() for event in parser.feed(bytes([byte]))]
    expected = (["\n".join(lines)] if lines else []) + ["end"]
    assert [e.decode() for e in events] == expected
    assert not parser.unfinished


def test_a_byte_order_mark_may_be_cut_anywhere() -> None:
    whole = b"\xef\xbb\xbfdata: a\n\n"
    for cut in range(len(whole)):
        for second in range(cut, len(whole)):
            parser = EventParser()
            pieces = whole[:cut], whole[cut:second], whole[second:]
            assert [event for piece in pieces for event in parser.feed(piece)] == [b"a"], pieces


def test_the_servers_own_count_wins() -> None:
    result = read(
        [
            (1, frame({"role": "assistant"}, inferloop={"num_tokens": 0})),
            (2, frame({"content": "a"}, inferloop={"num_tokens": 1})),
            (3, frame({"content": ""}, inferloop={"num_tokens": 1})),  # text held back, tokens are there
            (4, frame({"content": "bcd"}, inferloop={"num_tokens": 4})),
            (5, frame({}, finish="length", inferloop={"num_tokens": 0})),
            (6, frame(None, usage={"completion_tokens": 6}, inferloop={"num_tokens": 6, "queue_ms": 1.25}) + DONE),
        ]
    )
    assert result.chunks == (Chunk(2, 1), Chunk(3, 1), Chunk(4, 4))
    assert (result.counted_by, result.queue_ms, result.count_mismatch) == ("server", 1.25, False)


def test_usage_in_every_frame_is_counted_by_its_growth() -> None:
    frames = [(t, frame({"content": "x"}, usage={"completion_tokens": n})) for t, n in ((1, 1), (2, 5), (3, 8))]
    result = read([*frames, (4, DONE)])
    assert result.chunks == (Chunk(1, 1), Chunk(2, 4), Chunk(3, 3))
    assert result.counted_by == "usage"


def test_a_count_that_contradicts_the_total_is_told() -> None:
    frames = frame({"content": "x"}, inferloop={"num_tokens": 3}) + frame(None, usage={"completion_tokens": 9}) + DONE
    assert read([(1, frames)]).count_mismatch


@pytest.mark.parametrize(("total", "seen"), [(1, [10, 14]), (2, [10, 14]), (3, [10, 12, 14]), (4, [10, 11, 12, 14])])
def test_more_frames_than_tokens_keep_the_total_and_the_first_and_last_instant(total: int, seen: list[int]) -> None:
    """As of servers that cut the text of a token into pieces, or leave what was thought out of their total."""
    frames = [(t, frame({"reasoning": "x"} if t < 12 else {"content": "x"})) for t in range(10, 15)]
    result = read([*frames, (15, frame(None, usage={"completion_tokens": total}) + DONE)])
    assert result.chunks == tuple(Chunk(t, 1) for t in seen)
    assert (result.num_output_tokens, result.t_first_answer_ns, result.count_mismatch) == (total, 12, False)


@pytest.mark.parametrize(
    ("so_far", "total", "counts", "counted_by"),
    [
        ([0, 0, 0], 6, [2, 2, 2], "total"),  # told at the end alone
        ([0, 1, 2], 3, [1, 1, 1], "total"),  # each frame tells of those before it
        ([0, 0, 0], 0, [1, 1, 1], "frames"),  # not at all
        ([None, None, None], None, [1, 1, 1], "frames"),
    ],
)
def test_usage_that_does_not_count_along_loses_no_frame(
    so_far: list[int | None], total: int | None, counts: list[int], counted_by: str
) -> None:
    def usage(count: int | None) -> dict[str, int] | None:
        return None if count is None else {"completion_tokens": count}

    frames = [(t, frame({"content": "x"}, usage=usage(n))) for t, n in enumerate(so_far)]
    last = frame({}, finish="stop", usage=usage(total))
    result = read([*frames, (9, last + DONE)])
    assert result.chunks == tuple(Chunk(t, n) for t, n in enumerate(counts))
    assert (result.error, result.counted_by, result.count_mismatch) == (None, counted_by, total == 0)


def test_a_role_only_stream_is_empty() -> None:
    assert read([(1, frame({"role": "assistant", "content": ""}) + DONE)]).error == "empty_stream"
    assert read([(1, b"")]).error == "empty_stream"
    assert read([(1, frame({"role": "assistant"}))], cut=True).error == "truncated"


def test_a_stream_that_stops_short_is_truncated() -> None:
    assert read([(1, frame({"content": "half"}))]).error == "truncated"
    assert read([(1, frame({"content": "half"}) + b'data: {"choices": [{"del')], cut=True).error == "truncated"
    failed = frame({"content": "half"}) + b'data: {"error": {"message": "replica lost"}}\n\n'
    assert read([(1, failed)]).error == "truncated"
    assert read([(1, frame({"content": "x"}, finish="stop"))]).error is None  # [DONE] is courtesy
    assert read([(1, frame({"content": "x"}, finish="stop"))], cut=True).error == "truncated"
    assert read([(1, frame({"content": "x"}) + DONE)], cut=True).error is None  # and is the end where it is said


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_nothing_counts_after_the_end(size: int) -> None:
    more = frame({"content": " b"})
    usage = frame(None, usage={"completion_tokens": 9}) + b"data: no frame\n\n"
    told: list[int] = []
    reader = StreamReader(on_done=told.append)
    body = frame({"content": " a"}) + more + DONE
    for i, at in enumerate(range(0, len(body), size)):
        reader.feed(i, body[at : at + size])
    num_read = i
    for i, at in enumerate(range(0, len(body := more + usage + DONE), size)):
        reader.feed(1000 + i, body[at : at + size])
    found = reader.finish()
    assert (found.error, found.num_output_tokens, len(found.times_ns)) == (None, 2, 2)
    assert told == [num_read]


def test_what_is_not_json_is_a_protocol_error() -> None:
    assert read([(1, b"data: <html>\n\n" + DONE)]).error == "protocol"
    for body in (b"5", b'{"choices": [5]}', b'{"choices": 5}', b'{"choices": [{"text": 5}], "usage": 3}'):
        assert read([(1, b"data: " + body + b"\n\n" + DONE)], cut=False).error in ("protocol", "empty_stream")


@pytest.mark.parametrize(
    "more",
    [
        {"usage": {"completion_tokens": "12"}},
        {"usage": {"completion_tokens": 3.5}},
        {"usage": {"prompt_tokens": -1}},
        {"usage": {"prompt_tokens": 2**31}},
        {"usage": {"prompt_tokens_details": 5}},
        {"usage": {"prompt_tokens_details": {"cached_tokens": "x"}}},
        {"inferloop": {"num_tokens": "7"}},
        {"inferloop": {"num_tokens": -7}},
        {"inferloop": {"num_tokens": True}},
        {"inferloop": {"queue_ms": -1.0}},
        {"inferloop": {"queue_ms": "soon"}},
    ],
)
def test_counts_that_are_none_are_a_protocol_error_and_reach_no_record(more: dict[str, Any]) -> None:
    found = read([(1, frame({"content": "a"}, **more) + frame({"content": "b"}) + DONE)])
    assert found.error == "protocol"
    assert [c.num_tokens for c in found.chunks] in ([1], [1, 1])
    assert (found.num_input_tokens, found.num_cached_tokens, found.queue_ms) == (None, 0, None)


def test_nothing_a_server_sends_raises() -> None:
    assert read([(1, frame({"content": "a"}) + b"data: " + b"[" * 100_000 + b"\n\n" + DONE)]).error == "protocol"
    assert read([(1, frame({"content": "a"}, finish=7) + DONE)]).error == "protocol"  # type: ignore[arg-type]


def test_thinking_is_output_but_not_the_answer() -> None:
    for name in ("reasoning", "reasoning_content"):
        result = read([(100, frame({name: "hm"})), (200, frame({name: "so"})), (5000, frame({"content": "4"}) + DONE)])
        assert result.chunks[0].t_ns == 100
        assert result.t_first_answer_ns == 5000
        assert result.num_output_tokens == 3
        only = read([(100, frame({name: "hm"}, finish="length") + DONE)])
        assert (only.t_first_answer_ns, only.error) == (None, None)
    tool = read([(100, frame({"tool_calls": [{"index": 0}]}, finish="tool_calls") + DONE)])
    assert (tool.chunks[0].t_ns, tool.t_first_answer_ns, tool.error) == (100, None, None)


def test_completions_frames() -> None:
    body = b'data: {"choices":[{"text":" a"}]}\n\ndata: {"choices":[{"text":"","finish_reason":"length"}]}\n\n' + DONE
    result = read([(1, body)])
    assert (result.text, len(result.chunks), result.finish_reason) == (" a", 1, "length")


@given(
    st.lists(st.text(max_size=8), max_size=12),
    st.sampled_from(["delta", "text", "reasoning"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 1, 2]),
    st.integers(1, 300),
    st.sampled_from(["", ": ping\n\n", "event: word\n", "\n\n", "data:\n"]),
    st.sampled_from(["\n", "\n", "\r\n", "\r"]),
)
def test_frames_read_by_their_surroundings_are_read_as_decoded_ones(
    texts: list[str],
    kind: str,
    compact: bool,
    ascii_only: bool,
    told: int | None,
    size: int,
    between: str,
    line_end: str,
) -> None:
    """Keeping the text decodes every frame: the slow truth."""
    frames = []
    for i, text in enumerate(texts):
        inner = {"text": text} if kind == "text" else {"delta": {"content" if kind == "delta" or i > 4 else kind: text}}
        event: dict[str, Any] = {"id": "x", "choices": [{"index": 0, **inner, "finish_reason": None}]}
        if told is not None:
            event["inferloop"] = {"num_tokens": told if i % 5 else 3}
        separators = (",", ":") if compact else (", ", ": ")
        frames.append(f"data: {json.dumps(event, ensure_ascii=ascii_only, separators=separators)}\n\n".encode())
    body = between.encode().join(frames) + DONE
    body = body.replace(b"\n", line_end.encode())
    slow, fast = StreamReader(keep_text=True), StreamReader()
    for i in range(0, len(body), size):
        slow.feed(i, body[i : i + size])
        fast.feed(i, body[i : i + size])
    truth = slow.finish()
    assert truth.text == "".join(texts)
    assert msgspec.structs.replace(truth, text="") == fast.finish()


@pytest.mark.parametrize(
    ("piece", "error", "num_tokens"),
    [
        (frame({"content": " b"}), None, 2),
        (frame({"content": ""}), None, 1),
        (frame({"content": " b"}).replace(b" b", b" \n"), "protocol", 1),
        (frame({"content": " b"}).replace(b" b", b" \r"), "protocol", 1),
        (frame({"content": " b"}).replace(b" b", b"\\q"), "protocol", 1),
        (frame({"content": " b"}).replace(b" b", b"\\n"), None, 2),
    ],
)
def test_what_only_looks_like_the_frame_before_is_read_for_what_it_is(
    piece: bytes, error: str | None, num_tokens: int
) -> None:
    for pieces in ((frame({"content": " a"}), piece, DONE), (frame({"content": " a"}) + piece + DONE,)):
        reader = StreamReader()
        for t_ns, read in enumerate(pieces):
            reader.feed(t_ns, read)
        found = reader.finish()
        assert (found.error, len(found.times_ns)) == (error, num_tokens)


def test_a_frame_inside_a_line_that_has_begun_is_none() -> None:
    reader = StreamReader()
    for t_ns, read in enumerate((frame({"content": " a"}), b'data: {"half": ', frame({"content": " b"}), DONE)):
        reader.feed(t_ns, read)
    found = reader.finish()
    assert (found.error, len(found.times_ns)) == ("protocol", 1)


def test_most_frames_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    def watched(data: bytes) -> Frame:
        seen.append(data)
        return decode_frame(data)

    monkeypatch.setattr(stream, "decode_frame", watched)
    body = b"".join(frame({"content": f" w{i}"}) for i in range(64))
    assert len(undecoded(body).times_ns) == 64
    assert len(seen) == 1


def undecoded(body: bytes) -> StreamResult:
    reader = StreamReader()
    reader.feed(1, body)
    return reader.finish()
