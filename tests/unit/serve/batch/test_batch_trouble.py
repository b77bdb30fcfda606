"""Batches on a disk that is full or fails, in windows that end, behind cancelled callers: nothing is lost, nothing
stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch
from tests.waiting import PATIENCE_S
from tests.waiting import until as until_so

from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.engine.stats import EngineStats
from inferloop.records.sink import DropSink
from inferloop.serve.app import build_app
from inferloop.serve.batch import run
from inferloop.serve.batch.desk import Desk
from inferloop.serve.batch.folder import Folder
from inferloop.serve.batch.input import Checked, Row, check_rows
from inferloop.serve.batch.kinds import Generating
from inferloop.serve.batch.output import write_output
from inferloop.serve.batch.records import Answer, BatchRecord, FileRecord
from inferloop.serve.batch.service import BatchConfig
from inferloop.serve.batch.store import Store
from inferloop.serve.batch.upload import Form
from inferloop.serve.config import ServeConfig
from inferloop.serve.replica import Replica
from inferloop.serve.run import serving

CHAT = "/v1/chat/completions"
Alive = Callable[[], bool]


class Fast(ScriptedGenerator):
    def __init__(self, alive: Alive = lambda: True, model_id: str = "m") -> None:
        super().__init__(Script(ttft_ms=1, tpot_ms=0.1, text="yes", max_concurrency=4), model_id=model_id)
        self._alive = alive

    def describe(self) -> Any:
        return super().describe()[0], EngineStats(alive=self._alive())


@contextlib.asynccontextmanager
async def server(
    folder: Path, generator: Fast | None = None, *, capacity: int = 128
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Replica]]:
    with contextlib.closing(Folder(folder)) as held:
        config = BatchConfig(held, 4, capacity)
        app = build_app(generator or Fast(), ServeConfig(), DropSink(), batch=config)
        async with (
            serving(app, wait_ready=False) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield client, app.state.replica


def line(i: int, **body: Any) -> str:
    whole = {"model": "m", "messages": [{"role": "user", "content": f"q{i}"}], "max_tokens": 2, **body}
    return json.dumps({"custom_id": f"c{i}", "method": "POST", "url": CHAT, "body": whole})


async def start(client: openai.AsyncOpenAI, *rows: str) -> Batch:
    file = await client.files.create(purpose="batch", file=("in.jsonl", "\n".join(rows).encode()))
    return await client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")


async def until(client: openai.AsyncOpenAI, batch: Batch, *status: str) -> Batch:
    async with asyncio.timeout(PATIENCE_S):
        while batch.status not in (status or ("completed", "failed", "expired", "cancelled")):
            await asyncio.sleep(0.01)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def ids(client: openai.AsyncOpenAI, batch: Batch) -> list[str]:
    assert batch.output_file_id is not None
    text = (await client.files.content(batch.output_file_id)).text
    return [json.loads(one)["custom_id"] for one in text.splitlines()]


def fail(*_: object) -> None:
    raise sqlite3.OperationalError("disk I/O error")


async def test_an_end_that_cannot_be_recorded_is_tried_again_and_piles_up_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run, "_RETRY_S", 0.01)
    caplog.set_level(logging.WARNING, "inferloop.serve")
    async with server(tmp_path) as (client, _):
        with monkeypatch.context() as patched:
            patched.setattr(Store, "finish", fail)
            batch = await start(client, *(line(i) for i in range(5)))
            await until_so(lambda: caplog.text.count("goes on") >= 5)
            assert len(list((tmp_path / "files").iterdir())) <= 2  # the input, and one output
        batch = await until(client, batch)
        assert batch.status == "completed" and await ids(client, batch) == [f"c{i}" for i in range(5)]
        assert {p.name for p in (tmp_path / "files").iterdir()} == {batch.input_file_id, batch.output_file_id}


async def test_a_database_that_fails_for_a_while_stops_no_batch_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_RETRY_S", 0.01)
    failures = 0

    def count(*_: object) -> None:
        nonlocal failures
        failures += 1
        fail()

    async with server(tmp_path) as (client, _):
        with monkeypatch.context() as patched:
            patched.setattr(Store, "record", count)
            patched.setattr(Store, "batch", count)  # what is asked after a failure
            batch = await start(client, *(line(i) for i in range(5)))
            await until_so(lambda: failures >= 10)
        assert await ids(client, await until(client, batch)) == [f"c{i}" for i in range(5)]


async def test_a_batch_whose_rows_were_answered_in_time_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its files take, and without an engine."""
    monkeypatch.setattr(run, "_RETRY_S", 0.01)
    with monkeypatch.context() as patched:
        patched.setattr(Store, "finish", fail)
        async with server(tmp_path) as (client, _):
            batch = await until(client, await start(client, line(0)), "finalizing")
    with contextlib.closing(sqlite3.connect(tmp_path / "batches.sqlite")) as db, db:
        db.execute("UPDATE batches SET expires_at = created_at - 1")
    async with server(tmp_path, Fast(lambda: False)) as (client, _):
        batch = await until(client, batch)
        assert batch.status == "completed" and await ids(client, batch) == ["c0"]


async def test_a_batch_waits_for_its_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one would fail all the rows that are left, or answer them in the name of the first."""
    async with server(tmp_path, Fast(lambda: False)) as (client, _):
        batch = await start(client, line(0), line(1))
    async with server(tmp_path, Fast(model_id="other")) as (client, _):
        other = await start(client, line(0, model="other"))
        assert (await until(client, other)).status == "completed"
        batch = await client.batches.retrieve(batch.id)
        assert (batch.status, batch.model) == ("validating", "m")
        assert other.model == "other"
    monkeypatch.setattr(run, "_RETRY_S", 0.01)
    unfinished, num_tries = Store.unfinished, 0

    def fail_once(store: Store) -> list[BatchRecord]:
        nonlocal num_tries
        num_tries += 1
        if num_tries == 1:
            fail()
        return unfinished(store)

    monkeypatch.setattr(Store, "unfinished", fail_once)
    async with server(tmp_path) as (client, _):
        batch = await until(client, batch)
        assert batch.request_counts is not None and batch.request_counts.completed == 2


async def test_waiting_rows_are_never_fewer_than_none(tmp_path: Path) -> None:
    async with server(tmp_path) as (client, replica):
        assert replica.metrics.batch_rows is not None
        batch = asyncio.create_task(start(client, *(line(i) for i in range(12))))
        least, answered = 0, 0
        async with asyncio.timeout(PATIENCE_S):
            while answered < 12:
                rows = replica.metrics.batch_rows()
                least, answered = min(least, rows.num_waiting), rows.completed
                await asyncio.sleep(0)
        assert least == 0
        assert (await until(client, await batch)).status == "completed"


async def test_a_row_that_never_fits_is_refused_with_the_file(tmp_path: Path) -> None:
    """It would meet a full queue each time it is tried, until the window ends."""
    async with server(tmp_path, capacity=6) as (client, _):
        batch = await until(client, await start(client, line(0, n=6), line(1, n=7)))
    assert batch.status == "failed" and batch.errors is not None
    assert [(e.line, e.param, e.code) for e in batch.errors.data or []] == [(2, "n", "too_many_choices")]


async def test_a_cancelled_check_of_a_large_file_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stops would wait for it."""
    num_checked, go_on, ended = 0, threading.Event(), threading.Event()

    def check(*_: object) -> int:
        nonlocal num_checked
        num_checked += 1
        assert num_checked < 20 or go_on.wait(PATIENCE_S)
        return 1

    def to_its_end(*args: Any, **options: Any) -> Checked:
        try:
            return check_rows(*args, **options)
        finally:
            ended.set()

    monkeypatch.setattr(Generating, "check", check)
    monkeypatch.setattr(run, "check_rows", to_its_end)
    async with server(tmp_path) as (client, _):
        batch = await start(client, *(line(i) for i in range(300)))
        await until_so(lambda: num_checked == 20)
        await client.batches.cancel(batch.id)
        assert (await until(client, batch)).status == "cancelled"
        go_on.set()
        await until_so(ended.is_set)
        assert num_checked <= 20 + 16  # it looks up every so many rows


FORM = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'


def test_an_upload_that_a_full_disk_stops_gives_its_room_back(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.symlink_to("/dev/full")
    form = Form(b"x", path)
    form.feed(FORM + b"some lines" + b"\r\n--x--\r\n")
    with pytest.raises(OSError, match="No space"):
        form.close()
    form.drop()
    assert not path.is_symlink()


def stored(folder: Folder, num_rows: int) -> tuple[Store, BatchRecord]:
    store = Store(folder.database)
    store.add_file(FileRecord("f", "batch", "in.jsonl", 10, 1))
    batch = BatchRecord("batch-1", "m", CHAT, "f", "validating", 1, 2)
    assert store.add_batch(batch)
    assert store.begin(batch.id, [Row(i, f"c{i}", 0, 1, 1) for i in range(1, num_rows + 1)], 3)
    return store, batch


async def test_an_output_that_a_full_disk_stops_gives_its_room_back(tmp_path: Path) -> None:
    with contextlib.closing(Folder(tmp_path)) as folder:
        store, batch = stored(folder, 4)
        store.record([Answer(batch.id, i, "completed" if i < 3 else "failed", b"x" * 10) for i in range(1, 5)])
        (tmp_path / "files" / "file-1-output.partial").symlink_to("/dev/full")
        desk = Desk(store)
        with pytest.raises(OSError, match="No space"):
            await write_output(desk, folder, batch, "completed", 9)
        assert list((tmp_path / "files").iterdir()) == []
        output, errors = await write_output(desk, folder, batch, "completed", 9)
        assert output is not None and errors is not None
        assert {p.name for p in (tmp_path / "files").iterdir()} == {output.id, errors.id}
        assert (output.num_bytes, errors.num_bytes) == (22, 22)
        await desk.close()


async def test_an_output_that_is_cut_short_leaves_no_file_to_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, partial = threading.Event(), threading.Event(), Folder.partial

    def held(folder: Folder, file_id: str) -> Path:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return partial(folder, file_id)

    with contextlib.closing(Folder(tmp_path)) as folder:
        store, batch = stored(folder, 1)
        store.record([Answer(batch.id, 1, "completed", b"x")])
        desk = Desk(store)
        monkeypatch.setattr(Folder, "partial", held)
        writing = asyncio.create_task(write_output(desk, folder, batch, "completed", 9))
        await until_so(begun.is_set)
        writing.cancel()
        await asyncio.sleep(0.01)
        assert not writing.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert list((tmp_path / "files").iterdir()) == []
        await desk.close()


async def test_what_was_asked_of_the_database_is_done_though_nobody_waits(tmp_path: Path) -> None:
    store = Store(tmp_path / "b.sqlite")
    desk, gate = Desk(store), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold() -> None:
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()

    first = asyncio.create_task(desk.ask(hold))
    second = asyncio.create_task(desk.ask(store.add_file, FileRecord("f", "batch", "in.jsonl", 10, 1)))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    gate.set()
    await first
    assert await desk.ask(store.file_ids) == ["f"]
    await desk.close()


def test_answers_come_in_pieces_of_bounded_size(tmp_path: Path) -> None:
    with contextlib.closing(Folder(tmp_path)) as folder:
        store, batch = stored(folder, 6)
        store.record([Answer(batch.id, i, "completed", b"x" * 100_000) for i in (1, 2, 4, 5)])
        sizes, after = list[int](), 0
        while piece := store.answers(batch.id, after=after, max_bytes=150_000):
            sizes.append(len(piece))
            after = piece[-1][0]
        assert sizes == [2, 3, 1]
        store.close()


def test_the_folder_is_its_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    Folder(folder).close()
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "files")] == [0o700, 0o700]
