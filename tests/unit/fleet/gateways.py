"""Running gateways over stubs, each with a client of it: of one model, and of several."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tests.unit.fleet.stubs import Handler, MakeStub, Stub, Talk
from tests.waiting import until

from inferloop.backends.http import HttpClient, Response
from inferloop.contract.workload import Escalation, EvalTag, ModelRef, NamedModel, Price, Routing, RoutingRule
from inferloop.core.clock import Clock, RealClock
from inferloop.core.units import NS_PER_MS
from inferloop.fleet.act.gateway.app import Gateway
from inferloop.fleet.act.gateway.config import GatewayConfig
from inferloop.fleet.act.gateway.server import GatewayServer
from inferloop.fleet.decide.retry import BudgetConfig
from inferloop.fleet.decide.router import Lease, Router
from inferloop.records.event import GatewayEvent

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
NO_RETRIES = BudgetConfig(0, 0, 0)
ROUTING = Routing(
    models=(
        NamedModel("cheap", ModelRef("small"), Price(1.0, 0.5, 2.0)),
        NamedModel("strong", ModelRef("large"), Price(10.0, 5.0, 20.0)),
    ),
    default="cheap",
    rules=(
        RoutingRule("code", "strong"),
        RoutingRule("extract", "cheap", "json"),
        RoutingRule("do", "cheap", "tool_call"),
    ),
    eval_tags=(EvalTag("polite", lacks=("damn",)),),
    escalation=Escalation("cheap", ("strong",), 2, invalid_json=True, refused_tool=True),
)


def escalating(**checks: Any) -> Routing:
    assert ROUTING.escalation is not None
    return replace(ROUTING, escalation=replace(ROUTING.escalation, **checks))


class StandingClock:
    """Stands still but for what a test lets pass."""

    def __init__(self) -> None:
        self.now = 1_000_000_000

    def now_ns(self) -> int:
        return self.now

    def wall_ns(self) -> int:
        return self.now


class ListSink:
    def __init__(self) -> None:
        self.records: list[Any] = []

    def write(self, record: Any) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


class _Running:
    """`faults`: (replica, why) as they were told."""

    def __init__(self, make_stub: MakeStub, config: GatewayConfig, clock: Clock) -> None:
        self._make_stub, self.config, self._clock = make_stub, config, clock
        self.router, self.sink = Router(seed=0, max_in_flight=100), ListSink()
        self.faults: list[tuple[str, str]] = []

    async def _start(self, **how: Any) -> None:
        self.server = await GatewayServer.start(self.gateway, **how)
        self.client = HttpClient(self.server.url)

    def _make_gateway(self) -> None:
        self.gateway = Gateway(
            self.router,
            config=self.config,
            sink=self.sink,
            clock=self._clock,
            on_fault=lambda *fault: self.faults.append(fault),
        )

    async def add(self, replica_id: str, handler: Handler, model: str | None = None) -> Stub:
        """A replica that is ready."""
        stub = await self._make_stub(handler)
        self.gateway.attach(replica_id, stub.url)
        if model is not None:
            self.router.assign(replica_id, model)
        self.router.set_ready(replica_id, True)
        return stub

    async def event(self) -> GatewayEvent:
        """The one event of the last request; the caller may see the end before it is written."""
        await until(lambda: len(self.sink.records) > 0)
        (record,) = self.sink.records
        assert isinstance(record, GatewayEvent)
        self.sink.records.clear()
        return record

    async def metric(self, line: str) -> float:
        text = (await (await self.client.request("GET", "/metrics")).read()).decode()
        return next(float(row.rpartition(" ")[2]) for row in text.splitlines() if row.rpartition(" ")[0] == line)

    async def close(self) -> None:
        await self.client.close()
        await self.server.stop(0)
        await self.gateway.close()
        assert self.router.num_in_flight == 0, "every test gives every lease back"


class Front(_Running):
    """Over stubs r0, r1, ... of one model."""

    def __init__(self, make_stub: MakeStub) -> None:
        super().__init__(make_stub, GatewayConfig(service="svc", max_body_bytes=100_000), RealClock())
        self.stubs: list[Stub] = []

    async def open(self, *handlers: Handler, **how: Any) -> int:
        """The gateway's port."""
        self._make_gateway()
        for i, handler in enumerate(handlers):
            self.stubs.append(await self.add(f"r{i}", handler))
        await self._start(**how)
        return int(self.server.url.rpartition(":")[2])

    async def post(self, body: bytes = b"{}", path: str = CHAT, **headers: str) -> Response:
        pairs = [(name.replace("_", "-"), value) for name, value in headers.items()]
        return await self.client.request("POST", path, body=body, headers=pairs, timeout_s=60)

    @contextmanager
    def busy(self, replica_id: str) -> Iterator[None]:
        """Count one request at this replica, so that the others are asked first."""
        others = [load.replica_id for load in self.router.snapshot() if load.replica_id != replica_id]
        for other in others:
            self.router.set_ready(other, False)
        lease = self.router.admit()
        for other in others:
            self.router.set_ready(other, True)
        assert isinstance(lease, Lease)
        with lease:
            yield


class Desk(_Running):
    """Over one stub per model, of a service that has several."""

    def __init__(self, make_stub: MakeStub) -> None:
        self.clock = StandingClock()
        super().__init__(make_stub, GatewayConfig(service="desk"), self.clock)
        self.stubs: dict[str, Stub] = {}

    async def open(self, *, routing: Routing = ROUTING, budget: BudgetConfig | None = None, **models: Handler) -> None:
        self.config = replace(self.config, routing=routing, retry_budget=budget or BudgetConfig())
        self._make_gateway()
        for name, handler in models.items():
            self.stubs[name] = await self.add(f"{name}-r0", handler, name)
        await self._start()

    async def post(self, path: str = CHAT, headers: dict[str, str] | None = None, **body: Any) -> Response:
        start: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}]} if path == CHAT else {}
        data = json.dumps(start | body).encode()
        return await self.client.request("POST", path, body=data, headers=list((headers or {}).items()), timeout_s=60)

    def taking(self, ms: int) -> Callable[[Talk], Awaitable[None]]:
        """For a model that uses up so much of a deadline, in no time."""

        async def takes(_: Talk) -> None:
            self.clock.now += ms * NS_PER_MS

        return takes

    def sent(self, model: str, i: int = -1) -> Any:
        return json.loads(self.stubs[model].asked[i].body)
