"""The server under check, with the few calls that checks are made of."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from inferloop.backends.http import Header, HttpClient, Response
from inferloop.core.units import NS_PER_S

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class FailedCheckError(Exception):
    """The server is wrong; the text says how."""


class RefusedCheckError(Exception):
    """The server says that it does not do this."""


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise FailedCheckError(reason)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: tuple[Header, ...]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def error(self) -> dict[str, Any]:
        """The error object; its shape is checked."""
        error = self.json["error"]
        require(
            isinstance(error, dict) and {"message", "type", "param", "code"} <= set(error),
            f"HTTP {self.status} without an OpenAI error object: {self.body[:200]!r}",
        )
        return dict(error)


@dataclass(frozen=True, slots=True)
class StreamAnswer:
    """`events` are the parsed data lines before [DONE]."""

    status: int
    events: tuple[dict[str, Any], ...]
    done: bool

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [event["choices"][0] for event in self.events if event.get("choices")]

    @property
    def text(self) -> str:
        return "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in self.choices)

    @property
    def finish_reasons(self) -> list[str]:
        return [c["finish_reason"] for c in self.choices if c.get("finish_reason")]

    @property
    def usages(self) -> list[dict[str, Any]]:
        return [event["usage"] for event in self.events if event.get("usage")]


class Target:
    """A ready server and the name of its model."""

    def __init__(self, client: HttpClient, model: str, *, timeout_s: float = 60.0) -> None:
        self.client, self.model, self._timeout_s = client, model, timeout_s

    async def get(self, path: str, *, headers: Iterable[Header] = ()) -> Answer:
        return await self._whole(await self.client.request("GET", path, headers=headers, timeout_s=self._timeout_s))

    async def post(self, path: str, body: dict[str, Any] | bytes, *, headers: Iterable[Header] = ()) -> Answer:
        return await self._whole(await self.open(path, body, headers=headers))

    async def open(self, path: str, body: dict[str, Any] | bytes, *, headers: Iterable[Header] = ()) -> Response:
        """POST; the answer is still to be read or aborted. `model` is filled in when the body has none."""
        data = body if isinstance(body, bytes) else json.dumps({"model": self.model, **body}).encode()
        all_headers = [("content-type", "application/json"), *headers]
        return await self.client.request("POST", path, headers=all_headers, body=data, timeout_s=self._timeout_s)

    async def ok(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON of a successful POST; anything but 200 fails the check."""
        answer = await self.post(path, body)
        require(answer.status == 200, f"POST {path}: HTTP {answer.status}: {answer.body[:300]!r}")
        return answer.json

    async def stream(self, path: str, body: dict[str, Any], *, headers: Iterable[Header] = ()) -> StreamAnswer:
        """A streamed POST, read to its end; anything but 200 fails the check."""
        answer = await self.post(path, {**body, "stream": True}, headers=headers)
        require(answer.status == 200, f"POST {path} (stream): HTTP {answer.status}: {answer.body[:300]!r}")
        kind = answer.header("content-type") or ""
        require(kind.startswith("text/event-stream"), f"a stream came as {kind!r}")
        lines = answer.body.decode().replace("\r\n", "\n").split("\n")
        data = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
        done = bool(data) and data[-1] == "[DONE]"
        return StreamAnswer(answer.status, tuple(json.loads(d) for d in data if d != "[DONE]"), done)

    async def _whole(self, response: Response) -> Answer:
        body = await response.read()
        return Answer(response.status, tuple(response.headers), body)


def chat(content: str, **fields: Any) -> dict[str, Any]:
    """A greedy one-message conversation."""
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}


def completion(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "temperature": 0, **fields}


def deadline_ns(now_ns: int, seconds: float) -> int:
    return now_ns + int(seconds * NS_PER_S)
