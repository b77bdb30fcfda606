"""The database: what is recorded once stays, what is recorded twice counts once, and nobody shares a folder."""

from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferloop.core.errors import UsageError
from inferloop.core.ids import new_id
from inferloop.serve.batch.desk import Desk
from inferloop.serve.batch.folder import Folder
from inferloop.serve.batch.input import Row
from inferloop.serve.batch.records import Answer, BatchRecord, FileRecord, Tokens
from inferloop.serve.batch.store import Store
from inferloop.serve.batch.wire import LineError


def stored(path: Path, num_rows: int = 5) -> Store:
    store = Store(path)
    store.add_file(FileRecord("f", "batch", "in.jsonl", 10, 1))
    add(store, "b", num_rows)
    return store


def add(store: Store, name: str, num_rows: int) -> None:
    assert store.add_batch(BatchRecord(name, "m", "/v1/completions", "f", "validating", 1, 2, {"k": "v"}))
    assert store.begin(name, [Row(i, f"c{i}", 0, 1, 1) for i in range(1, num_rows + 1)], 3)


def answer(number: int, state: str = "completed", name: str = "b") -> Answer:
    assert state in ("completed", "failed")
    line = f"{state} {number}".encode()
    return Answer(name, number, "completed" if state == "completed" else "failed", line, Tokens(4, 2, 3))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "b.sqlite"


def test_a_batch_reads_back_after_a_restart(path: Path) -> None:
    store = stored(path)
    store.record([answer(2), answer(4, "failed")])
    store.close()
    store = Store(path)
    batch = store.batch("b")
    assert batch is not None
    assert (batch.status, batch.metadata, batch.stamps) == ("in_progress", {"k": "v"}, {"in_progress": 3})
    assert (batch.num_rows, batch.num_completed, batch.num_failed, batch.num_left) == (5, 1, 1, 3)
    assert batch.tokens == Tokens(8, 4, 6)
    assert [r.number for r in store.pending("b", after=0, limit=10)] == [1, 3, 5]
    assert [r.number for r in store.pending("b", after=1, limit=1)] == [3]
    assert store.answers("b", after=0, max_bytes=9999)[:2] == [
        (1, "c1", None, None),
        (2, "c2", "completed", b"completed 2"),
    ]
    assert store.unfinished() == [batch]
    store.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A new one for every example would take most of the time."""
    store = stored(tmp_path_factory.mktemp("store") / "b.sqlite")
    yield store
    store.close()


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from(["completed", "failed"])), max_size=20))
def test_the_first_answer_to_a_row_counts(shared: Store, calls: list[tuple[int, str]]) -> None:
    store, name = shared, new_id("batch")
    add(store, name, 5)
    first: dict[int, str] = {}
    for number, state in calls:
        store.record([answer(number, state, name)])
        first.setdefault(number, state)
    batch = store.batch(name)
    assert batch is not None
    states = list(first.values())
    assert (batch.num_completed, batch.num_failed) == (states.count("completed"), states.count("failed"))
    found = {number: state for number, _, state, _ in store.answers(name, after=0, max_bytes=9999) if state}
    assert found == first


def test_answers_are_recorded_together_or_not_at_all(path: Path) -> None:
    store = stored(path)
    bad = Answer("b", 2, "completed", b"x", Tokens(num_output=2**70))  # no SQLite integer
    with pytest.raises(OverflowError):
        store.record([answer(1), bad])
    assert [r.number for r in store.pending("b", after=0, limit=10)] == [1, 2, 3, 4, 5]
    assert store.batch("b") == stored_batch(store)
    store.close()


def stored_batch(store: Store) -> BatchRecord:
    [batch] = store.unfinished()
    assert batch.num_completed == batch.num_failed == 0
    return batch


def test_moves_that_come_too_late_change_nothing(path: Path) -> None:
    store = stored(path)
    assert store.cancel("b", 5)
    assert not store.cancel("b", 6) and not store.begin("b", [], 6) and not store.finalize("b", 6)
    assert not store.refuse("b", [LineError(code="x", message="y")], 6)
    store.finish("b", "cancelled", FileRecord("o", "batch_output", "o.jsonl", 1, 7), None, 7)
    batch = store.batch("b")
    assert batch is not None
    assert (batch.status, batch.output_file_id, batch.error_file_id, batch.errors) == ("cancelled", "o", None, ())
    assert batch.stamps == {"in_progress": 3, "cancelling": 5, "cancelled": 7}
    store.record([answer(1)])  # of a row that was in the engine
    assert store.batch("b") == batch and store.answers("b", after=0, max_bytes=1) == []
    store.close()


def test_a_file_in_use_stays(path: Path) -> None:
    store = stored(path)
    assert store.remove_file("f") == "b" and store.file("f") is not None
    store.finish("b", "completed", None, None, 9)
    assert store.remove_file("f") is None and store.file("f") is None
    assert not store.add_batch(BatchRecord("c", "m", "/v1/completions", "f", "validating", 1, 2))
    store.close()


def test_lists_go_on_where_they_stopped(path: Path) -> None:
    store = Store(path)
    for i in range(5):
        store.add_file(FileRecord(f"f{i}", "batch" if i % 2 else "batch_output", "x", i, i))
    names = [f.id for f in store.files(purpose=None, after=None, limit=2, newest_first=True)]
    assert names == ["f4", "f3"]
    assert [f.id for f in store.files(purpose=None, after="f3", limit=9, newest_first=True)] == ["f2", "f1", "f0"]
    assert [f.id for f in store.files(purpose="batch", after=None, limit=9, newest_first=False)] == ["f1", "f3"]
    assert store.files(purpose=None, after="nobody", limit=9, newest_first=True) == []
    store.close()


def test_what_is_no_database_of_ours_is_refused(path: Path) -> None:
    path.write_bytes(b"not a database, and long enough to be read as one")
    with pytest.raises(UsageError, match="not a database of batch jobs"):
        Store(path)
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA user_version=7")
    other.close()
    with pytest.raises(UsageError, match="schema 7"):
        Store(path)


class Watched(Store):
    """Counts the answers of each transaction; fails them when told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.written: list[int] = []
        self.full = False

    def record(self, answers: Sequence[Answer]) -> None:
        if self.full:
            raise sqlite3.OperationalError("database or disk is full")
        self.written.append(len(answers))
        super().record(answers)


async def test_answers_that_come_together_are_written_together_and_settle_waits(path: Path) -> None:
    stored(path, num_rows=50).close()
    store = Watched(path)
    desk = Desk(store)
    tasks = [asyncio.create_task(desk.record(answer(i))) for i in range(1, 51)]
    await asyncio.sleep(0)
    for task in tasks[10:]:
        task.cancel()  # whoever waits may go; what was given is written all the same
    await desk.settle()
    assert sum(store.written) == 50 and len(store.written) < 10
    assert await desk.ask(store.pending, "b", after=0, limit=99) == []
    await asyncio.gather(*tasks, return_exceptions=True)
    await desk.close()


async def test_a_disk_that_fails_is_told_to_everyone_in_the_transaction(path: Path) -> None:
    stored(path).close()
    store = Watched(path)
    desk = Desk(store)
    store.full = True
    results = await asyncio.gather(*(desk.record(answer(i)) for i in (1, 2)), return_exceptions=True)
    assert [type(r) for r in results] == [sqlite3.OperationalError] * 2
    store.full = False
    await desk.record(answer(1))
    assert store.written == [1]
    await desk.close()


def _hold(path: Path, held: multiprocessing.synchronize.Event) -> None:
    Folder(path)
    held.set()
    multiprocessing.Event().wait()


def test_one_server_per_folder_until_it_dies(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    other = context.Process(target=_hold, args=(tmp_path, held))
    other.start()
    assert held.wait(60)
    with pytest.raises(UsageError, match="another server"):
        Folder(tmp_path)
    other.kill()
    other.join()
    folder = Folder(tmp_path)
    folder.close()
    Folder(tmp_path).close()


def test_leftovers_of_a_killed_server_go(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for name in ("kept", "orphan", "half.partial"):
        (tmp_path / "files" / name).write_text("x")
    folder.remove_others(["kept"])
    assert [p.name for p in (tmp_path / "files").iterdir()] == ["kept"]
    folder.close()


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--batch-dir"):
        Folder(tmp_path / "file")
