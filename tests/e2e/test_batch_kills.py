"""A batch whose server is killed: every row is answered exactly once, as in a run without kills."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import openai
from openai.types import Batch

from inferloop.models.resolve import ModelFiles

NUM_ROWS = 200
CHAT = "/v1/chat/completions"


@contextmanager
def served(folder: Path, model: str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server with batch jobs in `folder`, ended like a machine that loses power: nothing it does on the way out
    counts."""
    command = [sys.executable, "-m", "inferloop", "serve", model, "--port", "0", "--batch-dir", str(folder), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, f"http://127.0.0.1:{json.loads(line)['port']}"
    finally:
        process.kill()
        process.communicate()


def scripted(folder: Path, *flags: str) -> Any:
    script = ("--script", "ttft_ms=20", "--script", "tpot_ms=1", "--script", "max_concurrency=8")
    return served(folder, "m", "--backend", "scripted", *script, *flags)


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def rows(num: int = NUM_ROWS) -> bytes:
    lines = []
    for i in range(num):
        body = {"model": "m", "messages": [{"role": "user", "content": f"question {i}"}], "max_tokens": 1 + i % 40}
        lines.append(json.dumps({"custom_id": f"c{i}", "method": "POST", "url": CHAT, "body": body}))
    return "\n".join(lines).encode()


async def start(
    client: openai.AsyncOpenAI,
    data: bytes,
    endpoint: Literal["/v1/chat/completions", "/v1/embeddings"] = "/v1/chat/completions",
) -> Batch:
    file = await client.files.create(purpose="batch", file=("in.jsonl", data))
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


def num_done(batch: Batch) -> int:
    assert batch.request_counts is not None
    return batch.request_counts.completed


async def wait(client: openai.AsyncOpenAI, batch_id: str, num: int) -> Batch:
    """Until so many rows are done, or the batch has ended."""
    async with asyncio.timeout(120):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ("completed", "failed") or num_done(batch) >= num:
                return batch
            await asyncio.sleep(0.01)


async def output_of(client: openai.AsyncOpenAI, batch: Batch) -> list[dict[str, Any]]:
    assert batch.status == "completed" and batch.error_file_id is None and batch.output_file_id is not None
    return [json.loads(line) for line in (await client.files.content(batch.output_file_id)).text.splitlines()]


def texts(output: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(line["custom_id"], line["response"]["body"]["choices"][0]["message"]["content"]) for line in output]


async def test_two_kills_cost_no_row_and_double_none(tmp_path: Path) -> None:
    rng = random.Random(5)
    first, second = sorted(rng.sample(range(20, NUM_ROWS - 20), 2))
    with scripted(tmp_path / "killed") as (_, url):
        async with client_of(url) as client:
            batch = await start(client, rows())
            seen = num_done(await wait(client, batch.id, first))
    with scripted(tmp_path / "killed") as (_, url):
        async with client_of(url) as client:
            kept = await client.batches.retrieve(batch.id)
            assert num_done(kept) >= seen >= first  # what was told before the kill still holds
            seen = num_done(await wait(client, batch.id, second))
    events = tmp_path / "events.jsonl"
    with scripted(tmp_path / "killed", "--events", str(events)) as (process, url):
        async with client_of(url) as client:
            kept = await client.batches.retrieve(batch.id)
            assert num_done(kept) >= seen >= second
            batch = await wait(client, batch.id, NUM_ROWS + 1)
            output = await output_of(client, batch)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 120) == 0
    with scripted(tmp_path / "whole") as (_, url):
        async with client_of(url) as client:
            whole = await wait(client, (await start(client, rows())).id, NUM_ROWS + 1)
            expected = await output_of(client, whole)
    assert [line["custom_id"] for line in output] == [f"c{i}" for i in range(NUM_ROWS)]
    assert texts(output) == texts(expected)
    assert batch.usage is not None and whole.usage is not None
    assert batch.usage.output_tokens == whole.usage.output_tokens
    # the last server did what was left, once: some of it, perhaps, before it could be asked how much that was
    assert NUM_ROWS - num_done(kept) <= len(events.read_bytes().splitlines()) <= NUM_ROWS - seen


async def test_requests_beside_a_batch_are_answered(tmp_path: Path) -> None:
    with scripted(tmp_path, "--script", "max_waiting=8") as (_, url):
        async with client_of(url) as client:
            batch = await start(client, rows())
            await wait(client, batch.id, 10)
            for i in range(20):
                answer = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": f"now {i}"}], max_tokens=3
                )
                assert answer.choices[0].message.content == "The"
            assert (await wait(client, batch.id, NUM_ROWS + 1)).status == "completed"


def test_a_second_server_on_the_folder_is_refused(tmp_path: Path) -> None:
    with scripted(tmp_path):
        command = [sys.executable, "-m", "inferloop", "serve", "m", "--backend", "scripted", "--port", "0"]
        done = subprocess.run([*command, "--batch-dir", str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "another server is using it" in " ".join(done.stderr.split()) and "Traceback" not in done.stderr


async def test_the_real_model_answers_a_batch_as_it_answers_requests(
    tmp_path: Path, embedded_model: ModelFiles
) -> None:
    questions = ["What is the capital of Germany?", "Name a colour.", "Count to three."]
    name = embedded_model.model_id
    bodies = [
        {"model": name, "messages": [{"role": "user", "content": q}], "temperature": 0, "max_tokens": 12}
        for q in questions
    ]
    lines = [
        json.dumps({"custom_id": f"q{i}", "method": "POST", "url": CHAT, "body": body}) for i, body in enumerate(bodies)
    ]
    flags = ("--served-model-name", name, "--deterministic")
    with served(tmp_path, str(embedded_model.path), *flags) as (_, url):
        async with client_of(url) as client:
            batch = await wait(client, (await start(client, "\n".join(lines).encode())).id, 99)
            output = await output_of(client, batch)
            alone = []
            for q in questions:
                answer = await client.chat.completions.create(
                    model=name, messages=[{"role": "user", "content": q}], temperature=0, max_tokens=12
                )
                alone.append(answer.choices[0].message.content)
            asked = [{"model": name, "input": questions}, {"model": name, "input": questions[0]}]
            lines = [
                json.dumps({"custom_id": f"e{i}", "method": "POST", "url": "/v1/embeddings", "body": body})
                for i, body in enumerate(asked)
            ]
            data = "\n".join(lines).encode()
            embedded = await wait(client, (await start(client, data, "/v1/embeddings")).id, 99)
            vectors = [line["response"]["body"]["data"] for line in await output_of(client, embedded)]
            direct = await client.embeddings.create(model=name, input=questions, encoding_format="float")
    assert [text for _, text in texts(output)] == alone and "Berlin" in texts(output)[0][1]
    assert [len(v) for v in vectors] == [3, 1] and vectors[1][0]["embedding"] == vectors[0][0]["embedding"]
    assert [v["embedding"] for v in vectors[0]] == [v.embedding for v in direct.data]
    assert embedded.usage is not None and embedded.usage.input_tokens > 0 == embedded.usage.output_tokens
