"""A server with API keys: who enters, what stays open, and what a refusal costs."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from inferloop.backends.endpoint import Endpoint
from inferloop.backends.entry import check_entry
from inferloop.backends.http import HttpClient
from inferloop.backends.protocols import GenerateRequest
from inferloop.backends.scripted import Script, ScriptedGenerator
from inferloop.core.errors import EnvironmentLacksError
from inferloop.core.secret import Secret
from inferloop.serve.app import build_app
from inferloop.serve.batch.folder import Folder
from inferloop.serve.batch.service import BatchConfig
from inferloop.serve.config import ServeConfig
from inferloop.serve.keys import OPEN_PATHS, ApiKeys
from inferloop.serve.run import serving

KEY, SECOND = "sk-first-3f0a", "sk-second-77c1"
PROMPT = b'{"model": "m", "prompt": "x", "max_tokens": 2}'


class Counting(ScriptedGenerator):
    """`num_asked`: beside its warm-up."""

    num_asked = -1

    def generate(self, request: GenerateRequest) -> Any:
        self.num_asked += 1
        return super().generate(request)


class Events:
    def __init__(self) -> None:
        self.rows: list[object] = []

    def write(self, record: object) -> None:
        self.rows.append(record)

    def close(self) -> None:
        pass


class Guarded:
    """The application, whose generator and events are counted, and a client that says what a test wants it to."""

    def __init__(self, jobs: Folder | None = None) -> None:
        self.generator, self.events = Counting(Script(ttft_ms=1, tpot_ms=0.5), model_id="m"), Events()
        config = ServeConfig(keys=ApiKeys((Secret(KEY), Secret(SECOND))))
        batch = None if jobs is None else BatchConfig(jobs)
        self.app: Starlette = build_app(self.generator, config, self.events, batch=batch)

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[HttpClient]:
        async with serving(self.app, wait_ready=True) as url:
            client = HttpClient(url)
            try:
                yield client
            finally:
                await client.close()


def bearer(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


async def test_all_paths_but_those_that_are_listed_ask_for_a_key(tmp_path: Path) -> None:
    with contextlib.closing(Folder(tmp_path / "jobs")) as jobs:
        guarded = Guarded(jobs)
        routes = [
            (route.path.partition("{")[0], route.methods or ())
            for route in guarded.app.routes
            if isinstance(route, Route)
        ]
        asked = [(method, path) for path, methods in routes for method in methods]
        assert len(asked) > 30 and {path for _, path in asked} > OPEN_PATHS
        asked += [
            ("GET", path)
            for path in ("/", "/nowhere", "/v1%2Fmodels", "//v1/models", "/health/", "/health/../v1/models")
        ]
        async with guarded.client() as client:
            for method, path in asked:
                refused = await client.request(method, path, body=None if method in ("GET", "HEAD") else PROMPT)
                assert (refused.status == 401) == (path not in OPEN_PATHS), (method, path)
                refused.abort()  # the answer to a HEAD has no body to be read
            entered = await client.request("POST", "/v1/completions", body=PROMPT, headers=bearer(KEY))
            assert entered.status == 200 and await entered.read()
    assert guarded.generator.num_asked == len(guarded.events.rows) == 1


async def test_a_refusal_is_an_openai_error_that_is_counted() -> None:
    async with Guarded().client() as client:
        none = await client.request("GET", "/v1/models")
        wrong = await client.request("GET", "/v1/models", headers=bearer("hush-hush"))
        for refused, challenge in (
            (none, 'Bearer realm="inferloop"'),
            (wrong, 'Bearer realm="inferloop", error="invalid_token"'),
        ):
            error = (await refused.json())["error"]
            assert (error["code"], error["type"], error["param"]) == ("invalid_api_key", "invalid_request_error", None)
            assert refused.header("www-authenticate") == challenge
            assert refused.header("x-should-retry") == "false" and refused.header("x-request-id")
            assert "hush" not in error["message"]
        metrics = (await (await client.request("GET", "/metrics")).read()).decode()
        assert 'inferloop_requests_refused_total{code="invalid_api_key",model_name="m"} 2.0' in metrics
        assert KEY not in metrics and "hush" not in metrics


ENTRIES = [
    ([f"Bearer {KEY}"], 200),
    ([f"Bearer {SECOND}"], 200),
    ([f"bEARER  {KEY} "], 200),
    ([f"Bearer {KEY}x"], 401),
    ([f"Bearer {KEY[:-1]}"], 401),
    ([f"Bearer {KEY.upper()}"], 401),
    ([f"Bearer {KEY},{SECOND}"], 401),
    (["Bearer schl\u00fcssel"], 401),
    (["Bearer"], 401),
    (["Bearer "], 401),
    (["Bearer " + "k" * 60_000], 401),
    ([KEY], 401),
    ([f"Basic {KEY}"], 401),
    ([f"Bearer{KEY}"], 401),
    ([f"Bearer {KEY}", "Bearer other"], 401),
    (["Bearer other", f"Bearer {KEY}"], 401),
]


async def test_a_key_is_one_whole_bearer_token() -> None:
    async with Guarded().client() as client:
        for values, status in ENTRIES:
            headers = [("authorization", value) for value in values]
            assert (await client.request("GET", "/v1/models", headers=headers)).status == status, values


async def test_browsers_ask_their_question_without_a_key() -> None:
    guarded = Guarded()
    unguarded = build_app(ScriptedGenerator(Script(), model_id="m"), ServeConfig(), Events())
    headers = [("origin", "http://a.example"), ("access-control-request-headers", "authorization")]
    async with guarded.client() as client, serving(unguarded) as url:
        other = HttpClient(url)
        for path in ("/v1/chat/completions", "/v1/models"):
            mine = await client.request("OPTIONS", path, headers=headers)
            theirs = await other.request("OPTIONS", path, headers=headers)
            assert (mine.status, mine.header("allow")) == (theirs.status, theirs.header("allow"))
        await other.close()
    assert not guarded.generator.num_asked


@pytest.mark.parametrize(
    "head",
    [
        b"transfer-encoding: chunked\r\n\r\n10\r\n0123456789abcdef\r\n",
        b"content-length: 1000000000\r\n\r\n{",
        b"content-length: 50\r\nexpect: 100-continue\r\n\r\n",
    ],
    ids=["endless", "long", "expecting"],
)
async def test_who_has_no_key_is_answered_before_the_body_has_come(head: bytes) -> None:
    async with Guarded().client() as client:
        reader, writer = await asyncio.open_connection(client.endpoint.host, client.endpoint.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n" + head)
        async with asyncio.timeout(60):
            assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()


async def test_clients_learn_of_the_key_from_the_document() -> None:
    async with Guarded().client() as client:
        document = await client.get_json("/openapi.json")
    assert document["components"]["securitySchemes"] == {"api_key": {"type": "http", "scheme": "bearer"}}
    assert document["security"] == [{"api_key": []}]
    unguarded = {
        path for path, told in document["paths"].items() if any(op.get("security") == [] for op in told.values())
    }
    assert unguarded == OPEN_PATHS
    plain = build_app(ScriptedGenerator(Script(), model_id="m"), ServeConfig(), Events())
    async with serving(plain) as url:
        other = HttpClient(url)
        assert "securit" not in json.dumps(await other.get_json("/openapi.json"))
        await other.close()


async def test_our_own_verbs_find_out_before_they_begin() -> None:
    async with Guarded().client() as client:
        for key, says in (
            (None, "asks for an API key"),
            (Secret("other"), "does not know the API key"),
            (Secret(SECOND), ""),
        ):
            ours = HttpClient(Endpoint(client.base_url, key))
            with pytest.raises(EnvironmentLacksError, match=says) if says else contextlib.nullcontext():
                await check_entry(ours)
            await ours.close()


def test_keys_are_not_shown() -> None:
    config = ServeConfig(keys=ApiKeys((Secret(KEY),)))
    assert KEY not in repr(config) and KEY not in repr(vars(config.keys))
