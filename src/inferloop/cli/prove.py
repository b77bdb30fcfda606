"""Prove a running service with real chats through its gateway, and check that the evidence of each one arrived."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferloop.backends.endpoint import Endpoint
from inferloop.backends.http import HttpClient, HttpError
from inferloop.core.ids import TraceContext, new_id

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write one short sentence about the sea.",
    "How many days has a week?",
    "Say hello in Spanish.",
    "What do bees make?",
)
_TIMEOUT_S = 60.0
_EVENT_WAIT_S = 5.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class ProvenChat:
    """One chat: what came back, and whether gateway and replica each left their row for it. `problem` empty: good."""

    request_id: str
    trace_id: str
    streamed: bool
    question: str
    answer: str
    num_output_tokens: int
    problem: str


@dataclass(frozen=True, slots=True)
class Proof:
    chats: tuple[ProvenChat, ...]

    @property
    def verdict(self) -> str:
        return "pass" if self.chats and not any(chat.problem for chat in self.chats) else "fail"

    @property
    def reason(self) -> str:
        bad = [chat for chat in self.chats if chat.problem]
        if bad:
            return f"{len(bad)} of {len(self.chats)} chats failed: {bad[0].problem}"
        return f"{len(self.chats)} chats answered, each with a gateway row and a replica row of the same trace"


async def prove(at: Endpoint, models: Mapping[str, bool], events_dir: Path) -> Proof:
    """Ask every question once, every other one streamed, all at the same time; every model at least one. `models` by
    name, and whether it can be asked chats: else it is asked to complete the question. Never raises for a bad answer.
    """
    client = HttpClient(at)
    names = [name for name, _ in zip(itertools.cycle(models), range(max(len(QUESTIONS), len(models))), strict=False)]
    try:
        chats = await asyncio.gather(
            *(
                _chat(client, name, models[name], question, (i // len(models)) % 2 == 1)
                for i, (name, question) in enumerate(zip(names, itertools.cycle(QUESTIONS), strict=False))
            )
        )
    finally:
        await client.close()
    for _ in range(round(_EVENT_WAIT_S / _POLL_S)):  # sinks write behind the answer
        missing = _missing_rows(chats, events_dir)
        if not missing:
            break
        await asyncio.sleep(_POLL_S)
    return Proof(tuple(_with_evidence(chat, missing) for chat in chats))


async def _chat(client: HttpClient, model: str, can_chat: bool, question: str, streamed: bool) -> ProvenChat:
    request_id, trace = new_id("proof"), TraceContext.new()
    body = {
        "model": model,
        **({"messages": [{"role": "user", "content": question}]} if can_chat else {"prompt": question}),
        "max_tokens": 24,
        "temperature": 0,
        "stream": streamed,
        **({"stream_options": {"include_usage": True}} if streamed else {}),
    }
    headers = [
        ("content-type", "application/json"),
        ("x-request-id", request_id),
        ("traceparent", trace.header),
    ]
    answer, num_tokens, problem = "", 0, ""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            response = await client.request(
                "POST",
                "/v1/chat/completions" if can_chat else "/v1/completions",
                headers=headers,
                body=json.dumps(body).encode(),
            )
            data = await response.read()
        if response.status != 200:
            problem = f"HTTP {response.status}: {data[:200].decode(errors='replace')}"
        elif response.header("x-request-id") != request_id:
            problem = "x-request-id did not come back"
        else:
            answer, num_tokens = _read_stream(data) if streamed else _read_whole(data)
            problem = "" if answer.strip() and num_tokens else "the answer is empty"
    except HttpError as error:
        problem = f"{error.kind}: {error}"
    except TimeoutError:
        problem = f"no complete answer within {_TIMEOUT_S:g} s"
    except (ValueError, KeyError, IndexError, TypeError) as error:
        problem = f"not an OpenAI answer: {error}"
    return ProvenChat(request_id, trace.trace_id, streamed, question, answer, num_tokens, problem)


def _read_whole(data: bytes) -> tuple[str, int]:
    answer = json.loads(data)
    choice = answer["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return text, answer["usage"]["completion_tokens"]


def _read_stream(data: bytes) -> tuple[str, int]:
    frames = [line.removeprefix(b"data: ") for line in data.split(b"\n") if line.startswith(b"data: ")]
    if not frames or frames[-1] != b"[DONE]":
        raise ValueError("the stream did not end with [DONE]")
    chunks = [json.loads(frame) for frame in frames[:-1]]
    choices = [c["choices"][0] for c in chunks if c["choices"]]
    text = "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices)
    return text, next(c["usage"]["completion_tokens"] for c in reversed(chunks) if c.get("usage"))


def _missing_rows(chats: Iterable[ProvenChat], events_dir: Path) -> dict[str, str]:
    """request id -> which rows have not arrived yet."""
    gateway = {(row["request_id"], row["trace_id"]) for row in _rows(events_dir.glob("gateway*.jsonl"))}
    replica = {(row["request_id"], row["trace_id"]) for row in _rows(events_dir.glob("replica*.jsonl"))}
    missing = {}
    for chat in chats:
        key = (chat.request_id, chat.trace_id)
        absent = [name for name, seen in (("gateway", gateway), ("replica", replica)) if key not in seen]
        if absent:
            missing[chat.request_id] = " and ".join(absent)
    return missing


def _rows(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        for line in path.read_bytes().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue  # the last line may still be on its way


def _with_evidence(chat: ProvenChat, missing: dict[str, str]) -> ProvenChat:
    absent = missing.get(chat.request_id)
    if chat.problem or absent is None:
        return chat
    return ProvenChat(
        chat.request_id,
        chat.trace_id,
        chat.streamed,
        chat.question,
        chat.answer,
        chat.num_output_tokens,
        f"no {absent} row for request {chat.request_id}",
    )
