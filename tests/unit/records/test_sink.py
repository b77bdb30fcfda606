"""Events are whole lines or nothing, and the caller never waits."""

from __future__ import annotations

import errno
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.waiting import PATIENCE_S, wait_until

from inferloop.core.errors import UsageError
from inferloop.records.event import Content, ReplicaEvent
from inferloop.records.sink import JsonlSink


def event(i: int) -> ReplicaEvent:
    return ReplicaEvent(
        event_id=f"ev-{i}",
        trace_id="0" * 32,
        span_id="0" * 16,
        request_id=f"req-{i}",
        identity_digest="d" * 64,
        model_id="m",
        t_engine_in_ns=i,
        t_wall_ns=i,
        finish_reason="stop",
        token_offsets_us=(0, 10, 10),
    )


def read(path: Path) -> list[ReplicaEvent]:
    data = path.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [msgspec.json.decode(line, type=ReplicaEvent) for line in data.splitlines()]


class SmallDisk:
    """A file on a disk with `room` bytes left. Writes what fits, then reports ENOSPC, as the kernel does."""

    def __init__(self, path: Path, room: int, *, truncate_fails: int = 0) -> None:
        self.file = path.open("a+b", buffering=0)
        self.room = room
        self.truncate_fails = truncate_fails

    def write(self, data: bytes, /) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = data[: self.room]
        self.room -= len(part)
        return self.file.write(part)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self.file.seek(offset, whence)

    def truncate(self, size: int, /) -> int:
        if self.truncate_fails > 0:
            self.truncate_fails -= 1
            raise OSError(errno.EIO, "Input/output error")
        return self.file.truncate(size)

    def close(self) -> None:
        self.file.close()


def drain(sink: JsonlSink, num: int) -> None:
    """Wait until the writer has dealt with `num` records in all."""
    wait_until(lambda: sink.num_written + sink.num_lost >= num)


def test_a_record_that_json_cannot_hold_costs_only_itself(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "events.jsonl")
    for record in (event(1), replace(event(2), replica="a name from argv \udcff"), event(3)):
        sink.write(record)
        drain(sink, record.t_engine_in_ns)
    sink.close()
    assert read(sink.path) == [event(1), event(3)]
    assert (sink.num_written, sink.num_lost) == (2, 1)


def test_round_trip_and_append(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for start in (0, 10):
        sink = JsonlSink(path)
        for i in range(start, start + 10):
            sink.write(event(i))
        sink.close()
        sink.close()
        assert (sink.num_written, sink.num_lost) == (10, 0)
    assert read(path) == [event(i) for i in range(20)]


def test_torn_last_line_of_a_killed_writer_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(msgspec.json.encode(event(0)) + b"\n" + msgspec.json.encode(event(1))[:25])
    sink = JsonlSink(path)
    sink.write(event(2))
    sink.close()
    assert [e.event_id for e in read(path)] == ["ev-0", "ev-2"]


@pytest.mark.parametrize("truncate_fails", [0, 1])
def test_full_disk_keeps_whole_lines_and_recovers(tmp_path: Path, truncate_fails: int) -> None:
    path = tmp_path / "events.jsonl"
    line = len(msgspec.json.encode(event(0))) + 1
    disk: list[SmallDisk] = []

    def opener(p: Path) -> SmallDisk:
        disk.append(SmallDisk(p, room=2 * line + line // 2, truncate_fails=truncate_fails))
        return disk[0]

    sink = JsonlSink(path, opener=opener)
    for i in range(5):
        sink.write(event(i))
        drain(sink, i + 1)
    assert (sink.num_written, sink.num_lost) == (2, 3)
    if not truncate_fails:
        assert [e.event_id for e in read(path)] == ["ev-0", "ev-1"]

    disk[0].room = 10 * line
    sink.write(event(5))
    sink.close()
    assert [e.event_id for e in read(path)] == ["ev-0", "ev-1", "ev-5"]
    assert (sink.num_written, sink.num_lost) == (3, 3)


def test_full_queue_drops_and_counts_without_waiting(tmp_path: Path) -> None:
    started, go_on = threading.Event(), threading.Event()

    class Stuck(SmallDisk):
        def write(self, data: bytes, /) -> int:
            started.set()
            assert go_on.wait(PATIENCE_S)
            return super().write(data)

    sink = JsonlSink(tmp_path / "e.jsonl", capacity=2, opener=lambda p: Stuck(p, room=1 << 20))
    sink.write(event(0))
    assert started.wait(PATIENCE_S)
    for i in range(1, 6):
        sink.write(event(i))
    assert sink.num_lost == 3
    go_on.set()
    sink.close()
    assert sink.num_written == 3
    sink.write(event(9))
    assert sink.num_lost == 4


def test_bad_path_and_second_writer_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write events"):
        JsonlSink(tmp_path)
    first = JsonlSink(tmp_path / "e.jsonl")
    with pytest.raises(UsageError, match="another process"):
        JsonlSink(tmp_path / "e.jsonl")
    first.close()


def test_file_is_private_and_content_goes_its_own_way(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "content.jsonl")
    sink.write(Content(event_id="ev-1", input_token_ids=(1, 2), output_token_ids=(3,)))
    sink.close()
    assert (tmp_path / "content.jsonl").stat().st_mode & 0o077 == 0
    fields = set(ReplicaEvent.__dataclass_fields__)
    assert not any("text" in name or "prompt" in name or name.endswith("token_ids") for name in fields)
