"""A gateway with API keys: what callers say to it stays there, and replicas get keys of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from tests.unit.fleet.gateways import CHAT, Front
from tests.unit.fleet.stubs import ok

from inferloop.backends.endpoint import Endpoint
from inferloop.core.secret import Secret
from inferloop.serve.keys import ApiKeys

KEY = "sk-callers-3f0a"


@pytest.fixture
async def guarded(front: Front) -> AsyncIterator[Front]:
    front.config = replace(front.config, keys=ApiKeys((Secret(KEY),)))
    yield front


async def test_replicas_get_their_own_key_and_never_a_callers(guarded: Front) -> None:
    await guarded.open(ok, ok)
    await guarded.gateway.detach("r1")
    guarded.gateway.attach("r1", Endpoint(guarded.stubs[1].url, Secret("sk-replica")))
    for replica_id in ("r0", "r1"):
        with guarded.busy("r1" if replica_id == "r0" else "r0"):
            assert (await guarded.post(authorization=f"Bearer {KEY}")).status == 200
    first, second = (stub.asked[0].headers for stub in guarded.stubs)
    assert "authorization" not in first and second["authorization"] == "Bearer sk-replica"


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/v1/requests/x/cancel", "/tokenize", "/identity", "/nowhere"])
async def test_who_has_no_key_reaches_no_replica(guarded: Front, path: str) -> None:
    await guarded.open(ok)
    for headers in ([], [("authorization", "Bearer other")], [("authorization", f"Basic {KEY}")]):
        refused = await guarded.client.request("POST", path, headers=headers, body=b"{}")
        assert refused.status == 401 and (await refused.json())["error"]["code"] == "invalid_api_key"
        assert (refused.header("www-authenticate") or "").startswith("Bearer ") and refused.header("x-request-id")
    assert not guarded.stubs[0].asked and not guarded.sink.records, "nobody may fill the disk who may not enter"
    assert await guarded.metric('inferloop_gateway_refusals_total{reason="invalid_api_key"}') == 3
    assert await guarded.metric('inferloop_gateway_requests_total{code="401"}') == 3


async def test_probes_need_no_key(guarded: Front) -> None:
    await guarded.open(ok)
    for path in ("/health", "/health/live", "/health/ready", "/health/progress", "/metrics", "/openapi.json"):
        assert (await guarded.client.request("GET", path)).status == 200, path
    assert (await guarded.client.request("OPTIONS", CHAT)).status == 405


async def test_who_has_no_key_is_answered_before_the_body_has_come(guarded: Front) -> None:
    port = await guarded.open(ok)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabcde\r\n")
    async with asyncio.timeout(60):
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
    writer.close()
