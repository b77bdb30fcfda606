"""A running fleet: replicas kept alive, a gateway in front of them, and an orderly end.

Carries out what fleet.decide.replicas decides and tells it what happened; decides nothing itself. Everything lives on
one event loop: the replica table, the router and the gateway share their state without locks.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from inferloop.backends.protocols import LaunchSpec
from inferloop.core.clock import Clock, RealClock
from inferloop.core.errors import LaunchError
from inferloop.fleet.act.gateway.app import Gateway
from inferloop.fleet.act.gateway.config import GatewayConfig
from inferloop.fleet.act.gateway.server import GatewayServer
from inferloop.fleet.act.probe import Prober
from inferloop.fleet.act.process import ReplicaProcess
from inferloop.fleet.act.providers.local import LocalProvider
from inferloop.fleet.decide.life import (
    Decision,
    Drain,
    Event,
    Exited,
    ProbeFailed,
    Ready,
    Restart,
    SetReady,
    Start,
    Started,
    State,
    Stop,
)
from inferloop.fleet.decide.replicas import ReplicaPolicy, ReplicaTable
from inferloop.fleet.decide.router import Router
from inferloop.records.sink import Sink

log = logging.getLogger(__name__)
_TICK_S = 0.1
_KILL_TIMEOUT_S = 30.0
_NUM_RECENT = 100


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """`port` 0 picks a free one for the gateway, which takes `listener` instead where one is given, and closes it.
    `max_in_flight_per_replica` is the admission bound; None: no bound. `drain_timeout_s` is how long running requests
    may take when the fleet stops."""

    log_dir: Path
    host: str = "127.0.0.1"
    port: int = 0
    listener: socket.socket | None = None
    max_in_flight_per_replica: int | None = 512
    probe_period_s: float = 1.0
    probe_timeout_s: float = 5.0
    drain_timeout_s: float = 30.0
    policy: ReplicaPolicy = field(default_factory=ReplicaPolicy)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica for the command line and the dashboard. `url` and `pid` None: no process now. `model`: its name where
    a service has several."""

    replica_id: str
    state: str
    in_flight: int
    num_restarts: int
    why: str
    url: str | None
    pid: int | None
    log_path: Path
    model: str | None = None


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """A snapshot. `recent` are the last decisions, oldest first, with their time (monotonic ns)."""

    url: str | None
    replicas: tuple[ReplicaStatus, ...]
    num_ready: int
    num_in_flight: int
    recent: tuple[tuple[int, Decision], ...]


class Fleet:
    """n replicas of one LaunchSpec behind one gateway; or, with a LaunchSpec for each model of a service that has
    several, some of each. Use as an async context manager, or call `stop` in the end."""

    def __init__(
        self,
        spec: LaunchSpec | Mapping[str, LaunchSpec],
        config: FleetConfig,
        *,
        sink: Sink | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Several specs by the names that the gateway's routing gives to the models."""
        self._specs: dict[str | None, LaunchSpec] = {None: spec} if isinstance(spec, LaunchSpec) else dict(spec.items())
        self._config, self._clock = config, clock or RealClock()
        self._provider = LocalProvider(config.log_dir, self._clock)
        grace_s = max(one.drain_timeout_s for one in self._specs.values())
        self._table = ReplicaTable(config.policy, self._clock, drain_grace_s=grace_s)
        self._router = Router(seed=config.seed, max_in_flight=config.max_in_flight_per_replica)
        self._gateway = Gateway(
            self._router, config=config.gateway, sink=sink, clock=self._clock, on_fault=self._on_gateway_fault
        )
        self._server: GatewayServer | None = None
        self._processes: dict[str, ReplicaProcess] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._stops: set[asyncio.Task[int]] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._recent: deque[tuple[int, Decision]] = deque(maxlen=_NUM_RECENT)
        self._failed_launches: dict[str, LaunchError] = {}
        self._changed = asyncio.Event()
        self._num_added: dict[str | None, int] = dict.fromkeys(self._specs, 0)
        self._models: dict[str, str | None] = {}
        self._stop_lock = asyncio.Lock()
        self._closing = False

    @property
    def url(self) -> str:
        """The gateway's. Only after `start`."""
        assert self._server is not None, "start the fleet first"
        return self._server.url

    async def start(self, num_replicas: int | Mapping[str, int]) -> None:
        """Open the gateway, launch, and return when all replicas are ready. With several models so many of each.

        Raises PortInUseError (before anything is launched) and LaunchError (one could not start; then nothing runs
        any more). From then on replicas that die are restarted.
        """
        address = self._config
        self._server = await GatewayServer.start(
            self._gateway, host=address.host, port=address.port, listener=address.listener
        )
        self._ticker = asyncio.create_task(self._tick_forever())
        try:
            await self._add([(None, num_replicas)] if isinstance(num_replicas, int) else num_replicas.items())
        except BaseException:
            await self.stop(0)
            raise

    async def add_replicas(self, num_replicas: int, model: str | None = None) -> list[str]:
        """Launch more; returns their ids when all of them are ready. Raises LaunchError for the first that fails
        before it was ever ready; the ones added here are then taken down again. Raises KeyError for a model that has
        no LaunchSpec."""
        return await self._add([(model, num_replicas)])

    async def _add(self, wanted: Iterable[tuple[str | None, int]]) -> list[str]:
        added = [self._new_id(model) for model, number in wanted for _ in range(number)]
        for replica_id in added:
            self._apply(self._table.add(replica_id))
        try:
            while not all(self._table.state(name) is State.READY for name in added):
                if failed := next((self._failed_launches[n] for n in added if n in self._failed_launches), None):
                    raise failed
                await self._next_change()
        except BaseException:
            await asyncio.shield(asyncio.gather(*(self.remove_replica(name, 0) for name in added)))
            raise
        return added

    def _new_id(self, model: str | None) -> str:
        number = self._num_added[model]
        self._num_added[model] += 1
        replica_id = f"r{number}" if model is None else f"{model}-r{number}"
        self._models[replica_id] = model
        if model is not None:
            self._router.assign(replica_id, model)
        return replica_id

    async def remove_replica(self, replica_id: str, drain_timeout_s: float | None = None) -> None:
        """Take a replica out of routing, let what runs there finish for up to `drain_timeout_s`, stop and forget it.
        Raises KeyError for an unknown one."""
        timeout_s = self._config.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        if self._table.state(replica_id) is not State.STOPPED:
            self._apply(self._table.handle(replica_id, Drain(timeout_s)))
        while replica_id in self._table and self._table.state(replica_id) is not State.STOPPED:
            await self._next_change()
        if replica_id in self._table:  # else somebody else who waited for the same was faster
            self._table.remove(replica_id)
            self._router.forget(replica_id)
            del self._models[replica_id]
            await self._gateway.detach(replica_id)
            self._changed.set()

    async def stop(self, drain_timeout_s: float | None = None) -> None:
        """Accept nothing new, let running requests end, stop every replica. Idempotent. When cancelled, everything is
        killed at once."""
        timeout_s = self._config.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        async with self._stop_lock:
            if self._closing:
                return
            try:
                if self._server is not None:
                    await self._server.stop(timeout_s)
                names = [view.replica_id for view in self._table.view()]
                await asyncio.gather(*(self.remove_replica(name, 0) for name in names))
            finally:
                await self._kill_everything()
                await self._gateway.close()

    def status(self) -> FleetStatus:
        replicas = []
        for view in self._table.view():
            process = self._processes.get(view.replica_id)
            replicas.append(
                ReplicaStatus(
                    view.replica_id,
                    view.state.value,
                    self._router.in_flight(view.replica_id),
                    view.num_restarts,
                    view.why,
                    process.url if process else None,
                    process.pid if process else None,
                    self._provider.log_path(view.replica_id),
                    self._models.get(view.replica_id),
                )
            )
        return FleetStatus(
            self._server.url if self._server else None,
            tuple(replicas),
            self._router.num_ready,
            self._router.num_in_flight,
            tuple(self._recent),
        )

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop(0 if kind is not None else None)

    # what happened -> the table -> what is to be done
    def _tell(self, replica_id: str, event: Event) -> None:
        self._apply(self._table.handle(replica_id, event))

    def _apply(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            log.info("%s", decision)
            self._recent.append((self._clock.now_ns(), decision))
            match decision:
                case Start(replica_id):
                    self._launch(replica_id, 0.0)
                case Restart(replica_id, after_s, _):
                    self._launch(replica_id, after_s)
                case Stop(replica_id, grace_s, _):
                    self._end(replica_id, grace_s)
                case SetReady(replica_id, ready, _):
                    self._router.set_ready(replica_id, ready)
        self._changed.set()

    def _launch(self, replica_id: str, after_s: float) -> None:
        if not self._closing:
            self._keepers[replica_id] = asyncio.create_task(self._keep(replica_id, after_s), name=f"keep-{replica_id}")

    def _end(self, replica_id: str, grace_s: float) -> None:
        """Stop the process; without one, cancel the launch that is under way or waits for its time."""
        if process := self._processes.get(replica_id):
            task = asyncio.create_task(process.stop(grace_s))
            self._stops.add(task)
            task.add_done_callback(self._stops.discard)
        elif keeper := self._keepers.get(replica_id):
            keeper.cancel()

    async def _keep(self, replica_id: str, after_s: float) -> None:
        """One life of a replica, from the wait before its launch to its exit."""
        why = "its launch was called off"
        try:
            await asyncio.sleep(after_s)
            process = await self._provider.launch(self._specs[self._models[replica_id]], replica_id)
            self._processes[replica_id] = process
            try:
                why = await self._live(replica_id, process)
            finally:
                process.kill()  # only when we leave early: a process that has exited is gone with all its tree
                del self._processes[replica_id]
        except LaunchError as error:
            why = str(error)
            self._failed_launches[replica_id] = error
        finally:
            known = replica_id in self._table and self._table.state(replica_id) is not State.STOPPED
            if known and not self._closing:
                if self._table.state(replica_id) is State.RESTARTING:
                    self._tell(replica_id, Started())  # it was attempted
                self._tell(replica_id, Exited(why))
            self._changed.set()

    async def _live(self, replica_id: str, process: ReplicaProcess) -> str:
        """From launch to exit; returns why it ended. Raises LaunchError when it never got ready."""
        self._tell(replica_id, Started(process.pid))
        try:
            await process.wait_ready()
        except LaunchError:
            await process.stop(0)
            raise
        self._failed_launches.pop(replica_id, None)
        await self._gateway.detach(replica_id)  # where it was in its earlier life
        self._gateway.attach(replica_id, process.at)
        self._tell(replica_id, Ready())
        prober = Prober(
            process.url,
            ready_path=self._specs[self._models[replica_id]].ready.path,
            timeout_s=self._config.probe_timeout_s,
            num_bytes=lambda: self._gateway.num_bytes_from(replica_id),
        )
        probing = asyncio.create_task(self._probe_forever(replica_id, prober))
        try:
            code = await process.wait()
        finally:
            probing.cancel()
            await asyncio.wait([probing])
            await prober.close()
        return f"killed by signal {-code}" if code < 0 else f"exited with code {code}"

    async def _probe_forever(self, replica_id: str, prober: Prober) -> None:
        while True:
            await asyncio.sleep(self._config.probe_period_s)
            try:
                for event in await prober.probe():
                    self._tell(replica_id, event)
            except Exception:  # a fault of ours must not leave a replica unwatched
                log.exception("probing %s", replica_id)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            if decisions := self._table.tick({r.replica_id: r.in_flight for r in self._router.snapshot()}):
                self._apply(decisions)

    def _on_gateway_fault(self, replica_id: str, why: str) -> None:
        if replica_id in self._processes and self._table.state(replica_id) in (State.READY, State.UNREADY):
            self._tell(replica_id, ProbeFailed(why))

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _kill_everything(self) -> None:
        """What an orderly stop has left: nothing. After a cancelled one, every process; they are gone on return."""
        self._closing = True
        processes = list(self._processes.values())
        for process in processes:
            process.kill()
        for task in (self._ticker, *self._keepers.values(), *self._stops):
            if task is not None:
                task.cancel()
        if processes:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await asyncio.gather(*(process.wait() for process in processes))
