"""The runner against a real socket that misbehaves on purpose."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.waiting import until

from inferloop.contract.workload import QualityGate
from inferloop.core.errors import EnvironmentLacksError, UsageError
from inferloop.evals.run import CaseResult, run_suite
from inferloop.evals.suite import Case, Suite


class Target:
    """A tiny OpenAI server: it answers what the prompt says, or fails the way the prompt says."""

    def __init__(self, *, has_tokenize: bool = True, token_field: str = "prompt", num_together: int = 0) -> None:
        """`num_together`: no case is answered before so many were asked at once."""
        self.has_tokenize, self.token_field, self.num_together = has_tokenize, token_field, num_together
        self.in_flight = self.most_in_flight = 0
        self.seen: list[dict[str, Any]] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                method, path, _ = head.decode().split(" ", 2)
                length = next(
                    (int(h.split(":")[1]) for h in head.decode().lower().split("\r\n") if "content-length" in h), 0
                )
                body = json.loads(await reader.readexactly(length)) if length else {}
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
                if "prompt" in body:
                    await until(lambda: self.most_in_flight >= self.num_together)
                self.in_flight -= 1
                if body.get("prompt") == "HANG UP":
                    break
                status, kind, data = self.answer(method, path, body)
                writer.write(
                    f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n".encode()
                    + data
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, str, bytes]:
        if method == "POST" and (not body or body.get("messages") == 0):  # who may ask?
            return 400, "application/json", b'{"error": {"param": "prompt"}}'
        self.seen.append({"path": path, **body})
        if path == "/v1/models":
            return 200, "application/json", b'{"data": [{"id": "tiny"}]}'
        if path == "/identity":
            return (200, "application/json", b'{"digest": "abc"}') if self.has_tokenize else (404, "text/plain", b"no")
        if path in ("/tokenize", "/detokenize") and not self.has_tokenize:
            return 404, "application/json", b'{"error": {}}'
        if path == "/tokenize":
            text = json.dumps(body["messages"]) if "messages" in body else body.get(self.token_field, "")
            return 200, "application/json", json.dumps({"tokens": [ord(c) for c in text]}).encode()
        if path == "/detokenize":
            return 200, "application/json", json.dumps({"prompt": "".join(map(chr, body["tokens"]))}).encode()
        prompt = body["prompt"]
        if prompt == "FAIL":
            return 500, "application/json", b'{"error": {"message": "boom"}}'
        if prompt == "GARBLE":
            return 200, "application/json", b"<html>"
        if body["temperature"] < 0:
            return 400, "application/json", b'{"error": {"param": "temperature"}}'
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 1, "total_tokens": len(prompt) + 1}
        choice = {"text": prompt.upper(), "finish_reason": "stop"}
        if body.get("stream"):
            frames = [{"choices": [choice]}, {"choices": [], "usage": usage}]
            stream = "".join(f"data: {json.dumps(f)}\n\n" for f in frames) + "data: [DONE]\n\n"
            return 200, "text/event-stream", stream.encode()
        return 200, "application/json", json.dumps({"choices": [choice], "usage": usage}).encode()


@asynccontextmanager
async def listening(target: Target) -> AsyncIterator[str]:
    server = await asyncio.start_server(target.handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def asks(id_: str, prompt: str, **more: Any) -> Case:
    given: dict[str, Any] = {"kind": "exact", "expect": prompt.upper(), "why": "w"} | more
    return Case(id=id_, prompt=prompt, sampling={"max_tokens": 4}, **given)


async def test_a_half_broken_target_is_inconclusive_and_every_case_is_counted() -> None:
    right = [asks(f"r{i}", f"word {i}", tags=("golden",)) for i in range(4)]
    broken = [asks("b0", "FAIL"), asks("b1", "HANG UP"), asks("b2", "GARBLE"), asks("b3", "FAIL"), asks("b4", "FAIL")]
    suite = Suite("s", 1, (*right, asks("w", "x", expect="y", tags=("golden", "odd")), *broken))
    ended: list[CaseResult] = []
    async with listening(Target()) as url:
        run = await run_suite(suite, url, concurrency=3, on_result=ended.append)
    summary = run.summary(QualityGate("s", 0.6))
    assert summary["cases"] == {
        "total": 10, "scored": 5, "errored": 4, "unparsed": 1, "judge_failed": 0, "skipped": 0
    }  # fmt: skip
    assert summary["score"] == 0.8 and summary["bounds"] == {"worst": 0.4, "best": 0.9}
    assert summary["verdict"] == "inconclusive"
    assert summary["by_tag"]["golden"]["score"] == 0.8 and summary["by_tag"]["odd"]["total"] == 1
    assert [row["id"] for row in summary["results"]] == [case.id for case in suite.cases], "the suite's order is kept"
    assert {r.case.id for r in ended} == {case.id for case in suite.cases}
    assert summary["identity_digest"] == "abc"
    assert run.model == "tiny" and run.summary()["verdict"] == "not declared"
    json.dumps(summary, allow_nan=False)


async def test_protocol_cases_gather_what_they_need() -> None:
    cases = (
        asks("usage", "abc", kind="protocol", expect={"usage_exact": True, "stream_equal": True, "text": "ABC"}),
        asks("trip", "ça 😀", kind="protocol", expect={"round_trip": True}),
        asks("refusal", "abc", kind="protocol", expect={"status": 400, "param": "temperature"},
             request={"temperature": -1}),
        Case(id="ids", kind="template", why="w", expect=[ord(c) for c in '[{"a": 1}]'], messages=({"a": 1},)),
    )  # fmt: skip
    target = Target()
    async with listening(target) as url:
        run = await run_suite(Suite("s", 1, cases), url)
    assert [(r.case.id, r.score.value, r.score.reason) for r in run.results] == [(case.id, 1.0, "") for case in cases]
    assert all(call["temperature"] == 0 for call in target.seen if call["path"].startswith("/v1/c") and
               call["temperature"] >= 0), "greedy unless the case says otherwise"  # fmt: skip


async def test_a_target_without_token_routes_skips_and_does_not_pass() -> None:
    cases = (asks("a", "abc"), asks("t", "abc", kind="protocol", expect={"round_trip": True}))
    async with listening(Target(has_tokenize=False)) as url:
        run = await run_suite(Suite("s", 1, cases), url, model="tiny")
    skipped = run.results[1].score
    assert skipped.status == "skipped" and "/tokenize" in skipped.reason
    assert run.summary(QualityGate("s", 0.5))["verdict"] == "inconclusive"
    assert run.identity_digest is None


async def test_a_tokenize_route_that_reads_another_field_is_no_wrong_answer() -> None:
    cases = (asks("t", "abc", kind="protocol", expect={"round_trip": True}),)
    async with listening(Target(token_field="content")) as url:
        run = await run_suite(Suite("s", 1, cases), url, model="tiny")
    assert run.results[0].score.status == "skipped" and "does not read prompt" in run.results[0].score.reason


async def test_a_model_that_the_target_does_not_list_is_refused_before_any_case() -> None:
    target = Target()
    async with listening(target) as url:
        with pytest.raises(UsageError, match=r"no model 'huge' \(it has: tiny\)"):
            await run_suite(Suite("s", 1, (asks("a", "abc"),)), url, model="huge")
    assert [call["path"] for call in target.seen] == ["/v1/models"]


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_concurrency_is_bounded(concurrency: int) -> None:
    target = Target(num_together=concurrency)
    suite = Suite("s", 1, tuple(asks(f"c{i}", f"word {i}") for i in range(9)))
    async with listening(target) as url:
        await run_suite(suite, url, concurrency=concurrency)
    assert target.most_in_flight == concurrency


async def test_a_target_that_is_not_there_is_an_error_of_the_run() -> None:
    for model in (None, "named"):
        with pytest.raises(EnvironmentLacksError, match="check the URL"):
            await run_suite(Suite("s", 1, (asks("a", "b"),)), "http://127.0.0.1:9", model=model)
