"""Run folders: whole at the end, readable after a kill, and a full disk costs nothing that was complete."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.core.clock import VirtualClock
from inferloop.core.errors import RecordError, RecordWriteError, RunVoidError
from inferloop.measure.timing import Chunk, RequestTiming
from inferloop.records.bench import RequestRow, from_json_line, read_parquet, to_json_line, to_parquet
from inferloop.records.files import LineFile, open_unbuffered
from inferloop.records.fingerprint import fingerprint, source_revision
from inferloop.records.run import RunWriter, open_run

TIMING = RequestTiming(
    request_id="req-1",
    t_intended_ns=5,
    t_send_ns=6,
    t_headers_ns=8,
    t_end_ns=40,
    chunks=(Chunk(10, 1), Chunk(20, 4)),
    num_input_tokens=100,
    num_output_tokens=5,
    num_cached_tokens=64,
    finish_reason="length",
    replica="r0",
    queue_ms=1.5,
    trace_id="ab" * 16,
    t_first_answer_ns=20,
    empty_frames_ns=(9, 40),
    session=7,
    turn=1,
    num_turns=3,
)


def numbered(i: int) -> RequestTiming:
    return replace(TIMING, request_id=f"req-{i}")


class FillingDisk:
    """An opener whose files take `room` bytes in all and then fail as a full disk does: after a part was written."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __call__(self, path: Path, mode: str) -> BinaryIO:
        return cast(BinaryIO, _FullFile(open_unbuffered(path, mode), self))


class _FullFile:
    def __init__(self, file: BinaryIO, disk: FillingDisk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: memoryview) -> int:
        if self._disk.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._file.write(data[: self._disk.room])
        self._disk.room -= written
        return written

    def __enter__(self) -> _FullFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_finished_run_reads_back_the_same(tmp_path: Path) -> None:
    clock = VirtualClock(start_ns=1000)
    with RunWriter(tmp_path, verb="bench", service="assistant", clock=clock, seed=7, target="http://x") as run:
        with run.stage("warm-up", num_requests=1):
            run.append(numbered(0), point="open-1", warmup=True)
            clock.advance(500)
        run.append(numbered(1), point="serial")
        run.append(numbered(2), point="open-1")
        run.update(identity={"digest": "d" * 64}, arrivals="poisson")
        assert open_run(run.path).status == "running"
        written = run.finish({"verdict": "pass", "reasons": [], "points": []})
        run.write_file("report.html", "<html></html>")
    record = open_run(run.path)
    assert run.path.name.startswith("20231114T221320Z-bench-assistant-")
    assert (record.complete, record.status, record.torn) == (True, "complete", False)
    assert record.summary == written
    assert written["run"] == str(run.path)
    assert record.header.verdict == "pass"
    assert (record.header.seed, record.header.arrivals) == (7, "poisson")
    assert record.timings == (numbered(1), numbered(2))
    assert record.points() == {"serial": (numbered(1),), "open-1": (numbered(2),)}
    assert record.rows[0] == RequestRow("open-1", True, numbered(0))
    assert [(s.event, s.t_ns) for s in record.stages] == [("started", 1000), ("finished", 1500)]
    assert sorted(p.name for p in run.path.iterdir()) == [
        *("report.html", "requests.parquet", "run.json", "stages.jsonl", "summary.json"),
    ]


def test_header_names_what_it_was_measured_on(tmp_path: Path) -> None:
    with RunWriter(tmp_path, verb="bench", service="s") as run:
        run.finish({"verdict": "void", "reasons": ["client too slow"]})
    header = open_run(run.path).header
    assert header.status == "void"
    assert header.reasons == ("client too slow",)
    found = header.fingerprint
    assert found["num_cores"] >= 1
    assert found["memory_bytes"] > 0
    assert found["packages"]["pyarrow"]
    assert found["python"].startswith("CPython 3.")


def test_leaving_early_is_interrupted_and_readable(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), RunWriter(tmp_path, verb="up", service="s") as run, run.stage("bench"):
        run.append(numbered(1), point="serial")
        raise KeyboardInterrupt
    record = open_run(run.path)
    assert (record.status, record.complete, record.header.reasons) == ("interrupted", False, ("interrupted",))
    assert record.timings == (numbered(1),)
    assert [s.event for s in record.stages] == ["started", "failed"]
    assert record.stages[-1].detail["error"] == "KeyboardInterrupt"


def test_a_void_run_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunVoidError), RunWriter(tmp_path, verb="bench", service="s") as run:
        raise RunVoidError("the client could not keep the schedule")
    record = open_run(run.path)
    assert (record.status, record.complete) == ("void", False)
    assert "keep the schedule" in record.header.reasons[0]


KILLED = """
import sys, time
from dataclasses import replace
from pathlib import Path
from inferloop.measure.timing import Chunk, RequestTiming
from inferloop.records.run import RunWriter
timing = RequestTiming("r", None, 1, 2, 9, (Chunk(3, 1),), 1, 1)
with RunWriter(Path(sys.argv[1]), verb="bench", service="s") as run:
    i = 0
    while True:
        run.append(replace(timing, request_id=str(i)), point="serial")
        if i == 50:
            print(run.path, flush=True)
        if i >= 50:
            time.sleep(0.001)  # until somebody kills it
        i += 1
"""


def test_kill_9_while_writing_leaves_a_readable_run(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    folder = child.stdout.readline().strip()
    assert open_run(folder).status == "running"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    record = open_run(folder)
    assert (record.status, record.complete, record.summary) == ("interrupted", False, None)
    assert len(record.timings) > 50
    assert [t.request_id for t in record.timings] == [str(i) for i in range(len(record.timings))]


def test_a_torn_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), RunWriter(tmp_path, verb="bench", service="s") as run:
        run.append(numbered(1), point="serial")
        raise RuntimeError("stop here")
    with (run.path / "requests.jsonl").open("ab") as file:
        file.write(to_json_line(RequestRow("serial", False, numbered(2)))[:-9])
    record = open_run(run.path)
    assert record.torn
    assert record.timings == (numbered(1),)


@pytest.mark.parametrize("room", [0, 1, 300, 700, 1500, 3000])
def test_a_full_disk_loses_nothing_complete(tmp_path: Path, room: int) -> None:
    disk = FillingDisk(1 << 20)
    taken = 0
    with (
        pytest.raises(RecordWriteError, match="No space left"),
        RunWriter(tmp_path, verb="bench", service="s", opener=disk) as run,
    ):
        disk.room = room
        for i in range(100):
            run.append(numbered(i), point="serial")
            taken += 1
    assert taken < 100
    record = open_run(run.path)
    assert record.timings == tuple(numbered(i) for i in range(taken))
    assert not record.torn
    assert not record.complete
    assert not list(run.path.glob(".*.tmp"))


def test_a_disk_that_fills_up_at_the_end_keeps_the_lines(tmp_path: Path) -> None:
    disk = FillingDisk(1 << 20)
    with pytest.raises(RecordWriteError), RunWriter(tmp_path, verb="bench", service="s", opener=disk) as run:
        run.append(numbered(1), point="serial")
        disk.room = 100  # enough for the summary, not for the table
        run.finish({"verdict": "pass"})
    record = open_run(run.path)
    assert record.timings == (numbered(1),)
    assert not record.complete
    assert not (run.path / "requests.parquet").exists()


def test_the_disk_may_recover(tmp_path: Path) -> None:
    disk = FillingDisk(20)
    file = LineFile(tmp_path / "x.jsonl", disk)
    file.append(b"first")
    with pytest.raises(RecordWriteError):
        file.append(b"much too long for the room that is left")
    disk.room = 1000
    file.append(b"third")
    file.close()
    assert (tmp_path / "x.jsonl").read_bytes() == b"first\nthird\n"
    with pytest.raises(RecordWriteError, match="closed"):
        file.append(b"late")


def test_contradicting_stamps_are_not_recorded(tmp_path: Path) -> None:
    with RunWriter(tmp_path, verb="bench", service="s") as run:
        with pytest.raises(ValueError, match="backwards"):
            run.append(replace(TIMING, t_end_ns=7), point="serial")
        run.finish({"verdict": "not declared"})
    assert open_run(run.path).rows == ()


def test_two_runs_in_one_second_have_two_folders(tmp_path: Path) -> None:
    clock = VirtualClock()
    names = []
    for _ in range(3):
        with RunWriter(tmp_path, verb="bench", service="a/b ../c", clock=clock) as run:
            run.finish({"verdict": "pass"})
        names.append(run.path.name)
        assert run.path.parent == tmp_path
    assert len(set(names)) == 3


def test_what_is_not_a_run_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="nothing-here does not exist"):
        open_run(tmp_path / "nothing-here")
    with pytest.raises(RecordError, match=r"has no run\.json"):
        open_run(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"schema_version": 99}))
    with pytest.raises(RecordError, match="schema version 99"):
        open_run(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RecordError, match=r"run\.json"):
        open_run(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("summary.json", "{", r"summary\.json: damaged: "),
        ("summary.json", "[]", r"summary\.json: not a summary: it holds a list"),
        ("run.json", "{", r"run\.json: damaged: "),
        ("run.json", '{"schema_version": 1}', r"run\.json: damaged: .*missing required field `run`"),
        ("stages.jsonl", "{}\n", r"stages\.jsonl:1: not a stage: "),
        ("stages.jsonl", "[]\n", r"stages\.jsonl:1: not a stage: "),
    ],
)
def test_a_file_that_is_damaged_is_named(tmp_path: Path, file: str, text: str, says: str) -> None:
    with RunWriter(tmp_path, verb="bench", service="s") as run:
        run.finish({"verdict": "pass"})
    (run.path / file).write_text(text)
    with pytest.raises(RecordError, match=says):
        open_run(run.path)


def test_an_unwritable_root_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordWriteError, match=r"run folder.*it is a file\. Choose another --runs-dir"):
        RunWriter(tmp_path / "file", verb="bench", service="s")


timings = st.builds(
    RequestTiming,
    request_id=st.text(max_size=20),
    t_intended_ns=st.none() | st.integers(0, 2**62),
    t_send_ns=st.integers(0, 2**62),
    t_headers_ns=st.none() | st.integers(0, 2**62),
    t_end_ns=st.integers(0, 2**62),
    chunks=st.lists(st.builds(Chunk, st.integers(0, 2**62), st.integers(1, 1000)), max_size=5).map(tuple),
    num_input_tokens=st.integers(0, 10**6),
    num_output_tokens=st.integers(0, 10**6),
    num_cached_tokens=st.integers(0, 10**6),
    error=st.none() | st.sampled_from(["timeout", "http_5xx"]),
    finish_reason=st.none() | st.just("stop"),
    replica=st.none() | st.text(max_size=5),
    queue_ms=st.none() | st.floats(0, 1e9),
    traffic_class=st.text(max_size=5),
    trace_id=st.none() | st.text(max_size=5),
)


@given(st.lists(st.builds(RequestRow, st.text(max_size=5), st.booleans(), timings), max_size=8))
def test_rows_survive_json_and_parquet(rows: list[RequestRow]) -> None:
    assert [from_json_line(to_json_line(row)) for row in rows] == rows
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.parquet"
        path.write_bytes(to_parquet(rows))
        assert read_parquet(path) == rows


def test_revision_of_an_installed_copy_is_not_somebody_elses(tmp_path: Path) -> None:
    assert source_revision(tmp_path) == (None, None)
    assert fingerprint() is fingerprint()


def test_request_tables_from_before_sessions_are_read(tmp_path: Path) -> None:
    """Version 1 had neither answer stamps nor turns."""
    new = {"t_first_answer", "empty_frames", "session", "turn", "num_turns"}
    table = pq.read_table(io.BytesIO(to_parquet([RequestRow("serial", False, TIMING)])))
    pq.write_table(table.drop_columns(sorted(new)), tmp_path / "requests.parquet")
    line = {k: v for k, v in json.loads(to_json_line(RequestRow("serial", False, TIMING))).items() if k not in new}
    old = replace(TIMING, t_first_answer_ns=None, empty_frames_ns=(), session=None, turn=None, num_turns=None)
    assert read_parquet(tmp_path / "requests.parquet") == [RequestRow("serial", False, old)]
    assert from_json_line(json.dumps(line).encode()) == RequestRow("serial", False, old)


def test_rows_without_chunks_and_no_rows_at_all_survive_parquet(tmp_path: Path) -> None:
    empty = RequestRow("p", True, replace(TIMING, chunks=(), error="empty_stream"))
    rows = [
        empty,
        RequestRow("p", False, TIMING),
        empty,
        RequestRow("q", False, replace(TIMING, chunks=(Chunk(7, 2),))),
    ]
    for written in (rows, [empty], []):
        (tmp_path / "r.parquet").write_bytes(to_parquet(written))
        assert read_parquet(tmp_path / "r.parquet") == written


def test_a_wall_clock_set_back_in_mid_run_changes_no_latency(tmp_path: Path) -> None:
    """Only the header's anchor is of the wall clock; whatever is subtracted is monotonic."""

    class SetBack(VirtualClock):
        def wall_ns(self) -> int:
            return super().wall_ns() - (3600 * 10**9 if self.now_ns() > 500 else 0)

    def measured(clock: VirtualClock) -> tuple[RequestTiming, ...]:
        with RunWriter(tmp_path, verb="bench", service="demo", clock=clock) as writer:
            for i in range(10):
                start = clock.now_ns()
                chunks = (Chunk(start + 40, 1), Chunk(start + 90, 1))
                row = RequestTiming(f"r{i}", start, start + 1, None, start + 90, chunks, 1, 2)
                writer.append(row, point="peak")
                clock.advance(100)
            writer.event("peak", "finished")
            writer.finish({"verdict": "pass"})
        return open_run(writer.path).timings

    steady, stepped = measured(VirtualClock()), measured(SetBack())
    assert stepped == steady
    assert all(r.t_end_ns - r.t_send_ns == 89 for r in stepped)
