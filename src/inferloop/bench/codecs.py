"""A tokenizer behind a URL: /tokenize of the target, asked before the measured window, never in it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from typing import Any

from inferloop.backends.endpoint import Endpoint, endpoint_of
from inferloop.core.errors import EnvironmentLacksError, RequestError


class HttpCodec:
    """Blocking; call it off the event loop. One connection, not thread-safe.

    Raises RequestError for what the target cannot encode, EnvironmentLacksError when it has no /tokenize or
    refuses our key.
    """

    def __init__(self, target: Endpoint | str, model: str, *, timeout_s: float = 10.0) -> None:
        self._endpoint = endpoint = endpoint_of(target)
        tls = endpoint.tls()
        if tls is None:
            self._connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=timeout_s)
        else:
            self._connection = http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=timeout_s, context=tls)
        self._path = endpoint.base_path + "/tokenize"
        self._headers = {"content-type": "application/json", **dict(endpoint.headers)}
        self._model, self._url = model, endpoint.url

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
        self._endpoint.check_entry(answer.status)
        if answer.status == 400:
            text = self._endpoint.redact(data.decode(errors="replace"))[:200]
            raise RequestError(f"{self._url}: /tokenize: {text}")
        try:
            if answer.status == 200:
                return tuple(json.loads(data)["tokens"])
        except (ValueError, KeyError, TypeError):
            pass
        raise EnvironmentLacksError(
            f"{self._url} has no usable /tokenize (HTTP {answer.status})",
            fix="Prompts of exact lengths need the target's tokenizer, which is asked there. For a target that has no "
            "/tokenize of vLLM's form, --tokenizer names a model with the same tokenizer and chat template.",
        )

    def _send(self, payload: bytes) -> http.client.HTTPResponse:
        self._connection.request("POST", self._path, payload, self._headers)
        return self._connection.getresponse()
