"""The files and batches of an OpenAI-compatible server, from the client's side."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec import Struct

from inferloop.backends.endpoint import Endpoint
from inferloop.backends.http import HttpClient, HttpError, Response
from inferloop.core.errors import EnvironmentLacksError, RecordWriteError, UsageError

RUNNING = ("validating", "in_progress", "finalizing", "cancelling")
_TIMEOUT_S = 60.0
_PIECE_BYTES = 1 << 16
_PAGE = 100


class Counts(Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Usage(Struct):
    input_tokens: int = 0
    output_tokens: int = 0


class LineProblem(Struct):
    message: str = ""
    line: int | None = None
    param: str | None = None


class Problems(Struct):
    data: list[LineProblem] = []


class Extension(Struct):
    rows_per_s: float | None = None
    eta_s: float | None = None


class BatchView(Struct):
    """What we need of a batch. `inferloop` only our own server sends."""

    id: str
    status: str
    input_file_id: str | None = None
    request_counts: Counts | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: Problems | None = None
    usage: Usage | None = None
    metadata: dict[str, str] | None = None
    inferloop: Extension | None = None


class BatchClient:
    """One server. Methods raise HttpError when it is not there, UsageError when it keeps no batch jobs,
    EnvironmentLacksError for any other answer that is none. `download` raises RecordWriteError, too."""

    def __init__(self, at: Endpoint | str) -> None:
        self._http = HttpClient(at)
        self._endpoint = self._http.endpoint
        self._url = self._http.base_url

    async def close(self) -> None:
        await self._http.close()

    async def upload(self, path: Path) -> str:
        """The file's id. What is held in memory is a piece of it."""
        abandoned = threading.Event()
        try:
            status, body = await asyncio.to_thread(_post_form, self._endpoint, path, abandoned)
        except (OSError, http.client.HTTPException) as error:
            raise HttpError("connect", f"{self._url}: {error}") from error
        except asyncio.CancelledError:
            abandoned.set()  # nothing else stops the thread
            raise
        if status != 200:
            self._refused(status, body)
        return str(json.loads(body)["id"])

    async def create(self, file_id: str, endpoint: str, metadata: dict[str, str]) -> BatchView:
        asked = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", "metadata": metadata}
        return _view(await self._json("POST", "/v1/batches", asked))

    async def batch(self, batch_id: str) -> BatchView:
        return _view(await self._json("GET", f"/v1/batches/{batch_id}"))

    async def find(self, metadata: dict[str, str]) -> BatchView | None:
        """The newest batch with exactly these metadata."""
        after = ""
        while True:
            page = await self._json("GET", f"/v1/batches?limit={_PAGE}{after}")
            for entry in page["data"]:
                if entry.get("metadata") == metadata:
                    return _view(entry)
            if not page.get("has_more") or not page["data"]:
                return None
            after = f"&after={page['data'][-1]['id']}"

    async def download(self, file_id: str, path: Path) -> None:
        response = await self._http.request("GET", f"/v1/files/{file_id}/content", timeout_s=_TIMEOUT_S)
        if response.status != 200:
            self._refused(response.status, await response.read())
        try:
            with path.open("wb") as file:
                async for _, piece in response.pieces():
                    file.write(piece)
        except OSError as error:
            raise RecordWriteError(f"cannot write {path}: {error.strerror}") from None

    async def delete(self, file_id: str) -> None:
        await self._json("DELETE", f"/v1/files/{file_id}")

    async def _json(self, method: str, path: str, value: Any = None) -> Any:
        body = None if value is None else json.dumps(value).encode()
        headers = [] if body is None else [("content-type", "application/json")]
        response: Response = await self._http.request(method, path, headers=headers, body=body, timeout_s=_TIMEOUT_S)
        data = await response.read()
        if response.status != 200:
            self._refused(response.status, data)
        try:
            return json.loads(data)
        except ValueError:
            raise EnvironmentLacksError(f"{self._url}{path} does not answer like an OpenAI API") from None

    def _refused(self, status: int, body: bytes) -> NoReturn:
        self._endpoint.check_entry(status)
        body = self._endpoint.redact_bytes(body)
        try:
            error = json.loads(body)["error"]
            message, code = str(error["message"]), error.get("code")
        except (ValueError, KeyError, TypeError):
            message, code = body[:200].decode(errors="replace"), None
        if code == "batches_not_enabled" or status == 404:
            raise UsageError(f"{self._url} keeps no batch jobs: {message}")
        raise EnvironmentLacksError(f"{self._url} answered with HTTP {status}: {message}")


def _view(value: Any) -> BatchView:
    try:
        return msgspec.convert(value, BatchView)
    except msgspec.ValidationError as error:
        raise EnvironmentLacksError(f"the server's batch is none of OpenAI's: {error}") from None


def _post_form(endpoint: Endpoint, path: Path, abandoned: threading.Event) -> tuple[int, bytes]:
    """Upload `path` with the purpose `batch`; blocks. Raises OSError, http.client.HTTPException."""
    boundary = os.urandom(16).hex()
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="input.jsonl"\r\n'
        "Content-Type: application/jsonl\r\n\r\n"
    ).encode()
    tail = f"\r\n--{boundary}--\r\n".encode()

    def pieces() -> Iterator[bytes]:
        yield head
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                if abandoned.is_set():
                    raise OSError("abandoned")
                yield piece
        yield tail

    tls = endpoint.tls()
    connection = (
        http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=_TIMEOUT_S)
        if tls is None
        else http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=_TIMEOUT_S, context=tls)
    )
    try:
        length = len(head) + path.stat().st_size + len(tail)
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}", "Content-Length": str(length)}
        headers |= dict(endpoint.headers)
        connection.request("POST", f"{endpoint.base_path}/v1/files", body=pieces(), headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
