"""A tokenizer behind a URL: /tokenize of the target, asked before the measured window, never in it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from inferloop.core.errors import EnvironmentLacksError, RequestError


class HttpCodec:
    """Blocking; call it off the event loop. One connection, not thread-safe.

    Raises RequestError for what the target cannot encode, EnvironmentLacksError when it has no /tokenize.
    """

    def __init__(self, base_url: str, model: str, *, timeout_s: float = 10.0) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http(s) URL: {base_url!r}")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname, parts.port, timeout=timeout_s)
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/tokenize"
        self._model, self._url = model, base_url

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /) -> tuple[int, ...]:
        return self._ask({"model": self._model, "messages": [dict(m) for m in messages]})

    def encode_text(self, text: str, /) -> tuple[int, ...]:
        return self._ask({"model": self._model, "prompt": text})

    def close(self) -> None:
        self._connection.close()

    def _ask(self, body: dict[str, Any]) -> tuple[int, ...]:
        payload = json.dumps(body).encode()
        try:
            try:
                answer = self._send(payload)
            except ConnectionError:  # an idle connection, which the server has closed in the meantime
                self._connection.close()
                answer = self._send(payload)
            data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise EnvironmentLacksError(f"{self._url}: /tokenize does not answer: {error}") from error
        if answer.status == 400:
            raise RequestError(f"{self._url}: /tokenize: {data[:200].decode(errors='replace')}")
        try:
            if answer.status == 200:
                return tuple(json.loads(data)["tokens"])
        except (ValueError, KeyError, TypeError):
            pass
        raise EnvironmentLacksError(
            f"{self._url} has no usable /tokenize (HTTP {answer.status})",
            fix="Exact prompt lengths need the target's tokenizer; name a model directory or file for it.",
        )

    def _send(self, payload: bytes) -> http.client.HTTPResponse:
        self._connection.request("POST", self._path, payload, {"content-type": "application/json"})
        return self._connection.getresponse()
