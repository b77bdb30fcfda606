"""Files and batches over HTTP, through the official client, with a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch
from tests.waiting import PATIENCE_S, skip, until, until_async

from inferloop.backends.http import HttpClient
from inferloop.backends.protocols import Delta, GenerateRequest
from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.core.errors import OverloadedError
from inferloop.core.request import BATCH_PRIORITY
from inferloop.engine.stats import EngineStats
from inferloop.records.event import ReplicaEvent
from inferloop.records.sink import DropSink, Record
from inferloop.serve.app import build_app
from inferloop.serve.batch import run
from inferloop.serve.batch.folder import Folder
from inferloop.serve.batch.service import BatchConfig
from inferloop.serve.batch.store import Store
from inferloop.serve.config import ServeConfig
from inferloop.serve.replica import Replica
from inferloop.serve.run import serving

CHAT = "/v1/chat/completions"
FAST = Script(ttft_ms=1, tpot_ms=0.1, text="yes")
NEVER = Script(ttft_ms=3_600_000, text="yes")


class Watched(ScriptedGenerator):
    """Remembers what it was asked, and how many were in it at once."""

    def __init__(self, script: Script = FAST) -> None:
        super().__init__(script, model_id="m")
        self.asked: list[GenerateRequest] = []
        self.num_inside = self.most_inside = self.num_left = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.alive = True
        self.refuse: Callable[[GenerateRequest], BaseException | None] = lambda _: None

    def describe(self) -> Any:
        info, stats = super().describe()
        return info, EngineStats(num_running=stats.num_running, alive=self.alive)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        self.asked.append(request)
        if (error := self.refuse(request)) is not None:
            raise error
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        try:
            await self.gate.wait()
            async with contextlib.aclosing(super().generate(request)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self.num_inside -= 1
            self.num_left += 1

    @property
    def rows(self) -> list[GenerateRequest]:
        return [request for request in self.asked if request.priority >= BATCH_PRIORITY]


class ListSink(DropSink):
    def __init__(self) -> None:
        self.events: list[Record] = []

    def write(self, record: Record) -> None:
        self.events.append(record)


@contextlib.asynccontextmanager
async def server(
    folder: Path, generator: Watched, sink: DropSink | None = None, max_choices: int = 4
) -> AsyncIterator[tuple[openai.AsyncOpenAI, HttpClient, Replica]]:
    with contextlib.closing(Folder(folder)) as held:
        app = build_app(generator, ServeConfig(), sink or DropSink(), batch=BatchConfig(held, max_choices))
        async with serving(app, wait_ready=generator.script is not NEVER) as url:
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            raw = HttpClient(url)
            try:
                yield client, raw, app.state.replica
            finally:
                await client.close()
                await raw.close()


def row(i: int, **body: Any) -> str:
    messages = [{"role": "user", "content": f"q{i}"}]
    whole = {"model": "m", "messages": messages, "max_tokens": 1 + i % 3, **body}
    return json.dumps({"custom_id": f"c{i}", "method": "POST", "url": CHAT, "body": whole})


async def start(client: openai.AsyncOpenAI, *rows: str) -> Batch:
    file = await client.files.create(purpose="batch", file=("in.jsonl", "\n".join(rows).encode()))
    return await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"run": "7"}
    )


async def ended(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    async with asyncio.timeout(PATIENCE_S):
        while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
            await asyncio.sleep(0.01)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def answered(client: openai.AsyncOpenAI, batch: Batch, num: int) -> bool:
    """Whether so many rows are."""
    counts = (await client.batches.retrieve(batch.id)).request_counts
    return counts is not None and counts.completed >= num


async def lines(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()]


async def test_round_trip_through_the_official_client(tmp_path: Path) -> None:
    generator, sink = Watched(), ListSink()
    async with server(tmp_path, generator, sink) as (client, raw, _):
        generator.gate.clear()
        batch = await start(client, *(row(i) for i in range(30)))
        await until(lambda: generator.num_inside == 4)
        generator.gate.set()
        assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"run": "7"})
        assert batch.expires_at == batch.created_at + 24 * 3600
        batch = await ended(client, batch)
        assert batch.status == "completed" and batch.error_file_id is None and batch.errors is None
        counts = batch.request_counts
        assert counts is not None and (counts.total, counts.completed, counts.failed) == (30, 30, 0)
        output = await lines(client, batch.output_file_id)
        metrics = (await (await raw.request("GET", "/metrics")).read()).decode()
        listed = [f.purpose async for f in client.files.list()]
        assert [b.id async for b in client.batches.list(limit=1)] == [batch.id]
    assert [line["custom_id"] for line in output] == [f"c{i}" for i in range(30)]
    assert listed == ["batch_output", "batch"]
    for i, line in enumerate(output):
        assert line["error"] is None and line["response"]["status_code"] == 200
        body = line["response"]["body"]
        assert body["choices"][0]["message"]["content"] == "yes"[: 1 + i % 3] and body["object"] == "chat.completion"
    assert len({line["id"] for line in output}) == 30
    usage = batch.usage
    assert usage is not None
    assert usage.output_tokens == sum(line["response"]["body"]["usage"]["completion_tokens"] for line in output)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    # at most four at once, one event each; no request metric moved, all tokens were counted
    assert generator.most_inside == 4 and len(generator.rows) == 30
    events = [e for e in sink.events if isinstance(e, ReplicaEvent)]
    assert {e.request_id for e in events} == {line["response"]["request_id"] for line in output}
    assert len(events) == 30 and {(e.traffic_class, e.status) for e in events} == {("batch", 200)}
    assert 'inferloop_batch_rows_answered_total{model_name="m",state="completed"} 30.0' in metrics
    assert 'inferloop_batch_rows{model_name="m",state="waiting"} 0.0' in metrics
    assert 'inferloop_requests_total{finish_reason="length",model_name="m"} 0.0' in metrics
    assert 'inferloop_time_to_first_token_seconds_count{model_name="m"} 0.0' in metrics
    assert f'inferloop_generation_tokens_total{{model_name="m"}} {usage.output_tokens}.0' in metrics


@pytest.mark.parametrize(
    ("endpoint", "body", "object_"),
    [
        ("/v1/completions", {"prompt": ["x", "y"], "n": 2, "max_tokens": 2}, "text_completion"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 16}, "response"),
    ],
)
async def test_rows_for_every_endpoint(tmp_path: Path, endpoint: Any, body: dict[str, Any], object_: str) -> None:
    line = json.dumps({"custom_id": "c", "method": "POST", "url": endpoint, "body": {"model": "m", **body}})
    async with server(tmp_path, Watched()) as (client, _, _):
        file = await client.files.create(purpose="batch", file=line.encode())
        batch = await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
        [answer] = await lines(client, (await ended(client, batch)).output_file_id)
    assert answer["response"]["body"]["object"] == object_


async def test_rows_that_this_engine_cannot_answer_fail_the_file(tmp_path: Path) -> None:
    line = json.dumps(
        {"custom_id": "c", "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", "input": "x"}}
    )
    async with server(tmp_path, Watched()) as (client, _, _):
        file = await client.files.create(purpose="batch", file=line.encode())
        batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        batch = await ended(client, batch)
    assert batch.errors is not None
    assert [(e.line, e.code) for e in batch.errors.data or []] == [(1, "unsupported_endpoint")]


async def test_a_wrong_file_fails_with_all_its_errors_before_any_work(tmp_path: Path) -> None:
    generator = Watched()
    async with server(tmp_path, generator) as (client, _, _):
        batch = await ended(client, await start(client, row(0), "{", row(2, stream=True), row(3, priority=1), row(0)))
    assert batch.status == "failed" and batch.errors is not None and batch.output_file_id is None
    told = [(e.line, e.param) for e in batch.errors.data or []]
    assert told == [(2, None), (3, "stream"), (4, "priority"), (5, "custom_id")]
    assert generator.rows == []


async def test_rows_that_fail_are_told_apart(tmp_path: Path) -> None:
    """A row the engine refuses, one that fails for ever, one that fails once, and one that meets a full queue."""
    generator, sink, tries = Watched(), ListSink(), dict[str, int]()

    def refuse(request: GenerateRequest) -> BaseException | None:
        assert request.prompt.messages is not None
        text = request.prompt.messages[0]["content"]
        tries[text] = tries.get(text, 0) + 1
        if text == "q1" or (text == "q2" and tries[text] == 1):
            return RuntimeError("secret text of the prompt")
        if text == "q3" and tries[text] < 5:
            return OverloadedError("full", retry_after_s=0.01)
        return None

    async with server(tmp_path, generator, sink) as (client, _, _):
        await until(lambda: len(generator.asked) > 0)
        generator.refuse = refuse
        too_long = row(4, max_tokens=10**6)
        batch = await ended(client, await start(client, *(row(i) for i in range(4)), too_long, row(5)))
        output, failed = await lines(client, batch.output_file_id), await lines(client, batch.error_file_id)
    assert batch.status == "completed" and batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (4, 2)
    assert [line["custom_id"] for line in output] == ["c0", "c2", "c3", "c5"]
    assert [(line["custom_id"], line["response"]["status_code"]) for line in failed] == [("c1", 500), ("c4", 400)]
    errors = [line["response"]["body"]["error"] for line in failed]
    assert [(e["code"], e["type"]) for e in errors] == [
        ("internal_error", "server_error"), ("context_length_exceeded", "invalid_request_error")
    ]  # fmt: skip
    assert "secret" not in json.dumps(failed)
    assert tries == {"q0": 1, "q1": 3, "q2": 2, "q3": 5, "q4": 1, "q5": 1}
    events = [e for e in sink.events if isinstance(e, ReplicaEvent)]
    assert len(events) == 4 + 1 + 3 + 1  # a full queue leaves none: nothing was begun


async def test_a_cancel_aborts_rows_and_keeps_answers(tmp_path: Path) -> None:
    generator = Watched(Script(ttft_ms=1, tpot_ms=5, text="yes"))
    async with server(tmp_path, generator) as (client, raw, _):
        batch = await start(client, row(0), row(1), *(row(i, max_tokens=30_000, ignore_eos=True) for i in range(2, 20)))
        await until_async(lambda: answered(client, batch, 2))
        await until(lambda: generator.num_inside == 4)
        batch = await client.batches.cancel(batch.id)
        assert batch.status in ("cancelling", "cancelled")
        batch = await ended(client, batch)
        assert generator.num_inside == 0
        output, rest = await lines(client, batch.output_file_id), await lines(client, batch.error_file_id)
        metrics = (await (await raw.request("GET", "/metrics")).read()).decode()
        with pytest.raises(openai.ConflictError, match="too late"):
            await client.batches.cancel(batch.id)
    assert batch.status == "cancelled" and batch.cancelling_at and batch.cancelled_at
    assert [line["custom_id"] for line in output] == ["c0", "c1"]
    assert [line["custom_id"] for line in rest] == [f"c{i}" for i in range(2, 20)]
    assert {(line["response"], line["error"]["code"]) for line in rest} == {(None, "batch_cancelled")}
    cut = [line for line in metrics.splitlines() if line.startswith("inferloop_requests_cut_short_total")]
    assert cut and all(line.endswith(" 0.0") for line in cut)  # rows are no requests


async def test_an_unfinished_batch_goes_on_after_a_restart_and_expires(tmp_path: Path) -> None:
    """What has an answer is not asked again; the clock of the completion window runs on while the server is down."""
    stuck = Watched(Script(ttft_ms=1, tpot_ms=0.1, text="yes", max_concurrency=4))
    async with server(tmp_path, stuck) as (client, _, _):
        endless = [row(i, max_tokens=30_000, ignore_eos=True) for i in range(3, 6)]
        batch = await start(client, row(0), row(1), row(2), *endless)
        await until_async(lambda: answered(client, batch, 3))
        await until(lambda: stuck.num_inside == 3)
    assert stuck.num_inside == 0
    with contextlib.closing(sqlite3.connect(tmp_path / "batches.sqlite")) as db, db:
        db.execute("UPDATE batches SET expires_at = ?", (int(time.time()) + 50,))
    again = Watched()
    again.refuse = lambda request: OverloadedError("full", retry_after_s=0.01) if request.priority else None
    async with server(tmp_path, again) as (client, _, _):
        await until(lambda: again.rows)
        skip(50)
        batch = await ended(client, await client.batches.retrieve(batch.id))
        output, rest = await lines(client, batch.output_file_id), await lines(client, batch.error_file_id)
    assert batch.status == "expired" and batch.expired_at is not None
    assert {r.request_id for r in again.rows} <= {f"{batch.id}.{i}" for i in (4, 5, 6)}
    assert [line["custom_id"] for line in output] == ["c0", "c1", "c2"]
    assert [(line["custom_id"], line["error"]["code"]) for line in rest] == [
        (f"c{i}", "batch_expired") for i in (3, 4, 5)
    ]  # fmt: skip


async def test_a_dead_engine_fails_no_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The rows wait for the next start of the server."""
    dead = Watched()
    async with server(tmp_path, dead) as (client, _, _):
        await until(lambda: len(dead.asked) > 0)

        def die(request: GenerateRequest) -> BaseException | None:
            dead.alive = False
            return RuntimeError("the device fell off the bus")

        dead.refuse = die
        batch = await start(client, *(row(i) for i in range(6)))
        await until(lambda: "goes on in" in caplog.text)
        batch = await client.batches.retrieve(batch.id)
        assert batch.status == "in_progress" and batch.request_counts is not None and batch.request_counts.failed == 0
        other = await start(client, row(0))
        await client.batches.cancel(other.id)  # to end a batch takes no engine
        assert (await ended(client, other)).status == "cancelled"
    async with server(tmp_path, Watched()) as (client, _, _):
        batch = await ended(client, batch)
        assert batch.request_counts is not None and batch.request_counts.completed == 6


async def test_a_drain_drops_rows_at_once_and_the_next_start_runs_them(tmp_path: Path) -> None:
    slow = Watched(Script(ttft_ms=1, tpot_ms=5, text="yes"))
    async with server(tmp_path, slow) as (client, _, replica):
        batch = await start(client, *(row(i, max_tokens=30_000, ignore_eos=True) for i in range(6)))
        await until(lambda: slow.num_inside == 4)
        await replica.drain()
        await until(lambda: slow.num_inside == 0)
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            await client.files.create(purpose="batch", file=b"{}")
    again = Watched(Script(ttft_ms=0, tpot_ms=0, tokens_per_chunk=30_000, text="yes"))
    async with server(tmp_path, again) as (client, _, _):
        assert (await ended(client, batch)).status == "completed"
        assert len(again.rows) == 6


async def test_files(tmp_path: Path) -> None:
    async with server(tmp_path, Watched(Script(ttft_ms=1, tpot_ms=5, text="yes"))) as (client, raw, _):
        batch = await start(client, row(0, max_tokens=30_000, ignore_eos=True))
        with pytest.raises(openai.ConflictError, match="has not ended"):
            await client.files.delete(batch.input_file_id)
        await client.batches.cancel(batch.id)
        batch = await ended(client, batch)
        assert (await client.files.delete(batch.input_file_id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(batch.input_file_id)
        assert not (tmp_path / "files" / batch.input_file_id).exists()
        assert (await client.batches.retrieve(batch.id)).status == "cancelled"
        file = await client.files.create(purpose="batch", file=("../../etc/x.jsonl", b"123"))
        assert (file.bytes, file.filename) == (3, "../../etc/x.jsonl")  # a name, never a path
        assert {p.name for p in (tmp_path / "files").iterdir()} == {file.id, batch.error_file_id}
        assert (await client.files.content(file.id)).content == b"123"
        for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order")):
            refused = await raw.request("GET", f"/v1/files?{query}")
            assert (refused.status, (await refused.json())["error"]["param"]) == (400, param)


async def test_a_file_that_is_deleted_while_it_is_read_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    async with server(tmp_path, Watched()) as (client, raw, _):
        content = b"x" * (8 << 20)
        file = await client.files.create(purpose="batch", file=("ñ 1.jsonl", content))
        path = f"/v1/files/{file.id}/content"
        head = await raw.request("HEAD", path)
        assert (head.status, head.header("content-length")) == (200, str(len(content)))
        head.abort()
        reading = await raw.request("GET", path)
        await client.files.delete(file.id)
        assert await reading.read() == content
        assert reading.header("content-disposition") == "attachment; filename*=utf-8''%C3%B1%201.jsonl"
        gone = await client.files.create(purpose="batch", file=b"1")
        (tmp_path / "files" / gone.id).unlink()  # as a delete does between finding and opening
        for method in ("GET", "HEAD"):
            assert (await raw.request(method, f"/v1/files/{gone.id}/content")).status == 404


async def test_requests_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    async with server(tmp_path, Watched()) as (client, raw, _):
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await client.files.create(purpose="fine-tune", file=b"x")
        with pytest.raises(openai.BadRequestError, match="expires_after"):
            expiry: Any = {"anchor": "created_at", "seconds": 3600}
            await client.files.create(purpose="batch", file=b"x", expires_after=expiry)
        not_a_form = await raw.request("POST", "/v1/files", body=b"{}", headers=[("content-type", "application/json")])
        assert not_a_form.status == 400 and "multipart" in (await not_a_form.json())["error"]["message"]
        file = await client.files.create(purpose="batch", file=b"x")
        good: dict[str, Any] = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        for change, param in (
            ({"input_file_id": "file-none"}, "input_file_id"),
            ({"endpoint": "/v1/moderations"}, "endpoint"),
            ({"completion_window": "1h"}, "completion_window"),
            ({"metadata": {"k": "v" * 600}}, "metadata[...]"),
            ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
            ({"surprise": 1}, "surprise"),
        ):
            refused = await raw.request("POST", "/v1/batches", body=json.dumps({**good, **change}).encode())
            assert (refused.status, (await refused.json())["error"]["param"]) == (400, param)
        with pytest.raises(openai.NotFoundError):
            await client.batches.retrieve("batch-none")
        assert [p.name for p in (tmp_path / "files").iterdir()] == [file.id]  # refused uploads leave nothing


async def test_a_disk_that_fails_is_told_and_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request gets a bug's 500, and no answer is lost: its row runs again."""
    monkeypatch.setattr(run, "_RETRY_S", 0.01)
    num_failures = 0
    record, add_file = Store.record, Store.add_file

    def fail_at_first(store: Store, answers: Any) -> None:
        nonlocal num_failures
        num_failures += 1
        if num_failures <= 3:
            raise sqlite3.OperationalError("database or disk is full")
        record(store, answers)

    def fail(store: Store, file: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async with server(tmp_path, Watched()) as (client, _, _):
        monkeypatch.setattr(Store, "record", fail_at_first)
        batch = await ended(client, await start(client, *(row(i) for i in range(12))))
        assert [line["custom_id"] for line in await lines(client, batch.output_file_id)] == [f"c{i}" for i in range(12)]
        assert num_failures > 3
        monkeypatch.setattr(Store, "add_file", fail)
        with pytest.raises(openai.APIStatusError, match="disk is full") as caught:
            await client.files.create(purpose="batch", file=b"x")
        assert caught.value.status_code == 507
        monkeypatch.setattr(Store, "add_file", add_file)
        assert {p.name for p in (tmp_path / "files").iterdir()} == {batch.input_file_id, batch.output_file_id}


async def test_a_server_that_stops_between_output_and_end_leaves_one_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_failures = 0

    def fail(*_: Any) -> None:
        nonlocal num_failures
        num_failures += 1
        raise sqlite3.OperationalError("as if killed here")

    with monkeypatch.context() as patched:
        patched.setattr(Store, "finish", fail)
        async with server(tmp_path, Watched()) as (client, _, _):
            batch = await start(client, *(row(i) for i in range(5)))
            await until(lambda: num_failures > 0)
            assert len(list((tmp_path / "files").iterdir())) == 2
            with pytest.raises(openai.ConflictError, match="finalizing"):
                await client.batches.cancel(batch.id)
    again = Watched()
    async with server(tmp_path, again) as (client, _, _):
        batch = await ended(client, batch)
        assert [line["custom_id"] for line in await lines(client, batch.output_file_id)] == [f"c{i}" for i in range(5)]
        assert {p.name for p in (tmp_path / "files").iterdir()} == {batch.input_file_id, batch.output_file_id}
    assert again.rows == []


async def test_without_a_folder_every_path_says_how_to_get_batches() -> None:
    app = build_app(ScriptedGenerator(FAST, model_id="m"), ServeConfig(), DropSink())
    async with serving(app) as url:
        raw = HttpClient(url)
        for method, path in (("GET", "/v1/files"), ("POST", "/v1/batches"), ("POST", "/v1/batches/x/cancel")):
            answer = await raw.request(method, path, body=b"{}" if method == "POST" else None)
            error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (501, "batches_not_enabled") and "--batch-dir" in error["message"]
            assert answer.header("x-should-retry") == "false"  # or clients of OpenAI's ask three times
        wrong = await raw.request("DELETE", "/v1/files")
        assert wrong.status == 405 and set((wrong.header("allow") or "").split(", ")) == {"GET", "HEAD", "POST"}
        await raw.close()
