"""Stub replicas, and gateways over them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from tests.unit.fleet.gateways import Desk, Front
from tests.unit.fleet.stubs import Handler, MakeStub, Stub


@pytest_asyncio.fixture
async def make_stub() -> AsyncIterator[MakeStub]:
    stubs: list[Stub] = []

    async def make(handle: Handler) -> Stub:
        stub = Stub(handle)
        await stub.open()
        stubs.append(stub)
        return stub

    yield make
    for stub in stubs:
        await stub.close()


@pytest_asyncio.fixture
async def front(make_stub: MakeStub) -> AsyncIterator[Front]:
    made = Front(make_stub)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def desk(make_stub: MakeStub) -> AsyncIterator[Desk]:
    made = Desk(make_stub)
    yield made
    await made.close()
