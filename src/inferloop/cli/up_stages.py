"""What `up` does, in order. Every stage leaves its trace in the run folder before the next begins."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inferloop.backends.conformance import CheckResult, run_checks
from inferloop.backends.endpoint import Endpoint
from inferloop.backends.http import HttpClient
from inferloop.backends.protocols import LaunchSpec
from inferloop.backends.serve_process import Value
from inferloop.bench.result import BenchResult
from inferloop.bench.search import BenchOptions, BenchProgress, run_bench
from inferloop.bench.target import describe_target
from inferloop.cli import gates, wire
from inferloop.cli.common import chosen_seed
from inferloop.cli.engines import engine_replica
from inferloop.cli.gates import Gate
from inferloop.cli.narrate import Narrator
from inferloop.cli.prove import Proof, prove
from inferloop.cli.up_models import (
    asked_model,
    beside,
    judge_memory,
    replicas_beside,
    served_models,
    told_of_chats,
    told_of_the_unmeasured,
)
from inferloop.contract.load import load
from inferloop.contract.workload import ModelRef
from inferloop.core.digest import plain
from inferloop.core.errors import UsageError
from inferloop.core.secret import Secret
from inferloop.core.units import human_bytes
from inferloop.engine.text.codec import Codec
from inferloop.evals.load import load_suite
from inferloop.evals.run import run_suite
from inferloop.evals.suite import Suite
from inferloop.fleet.act.gateway.config import GatewayConfig
from inferloop.fleet.act.ports import bind_listener
from inferloop.fleet.act.process import ReplicaProcess
from inferloop.fleet.act.providers.local import machine_capacity
from inferloop.fleet.act.supervise import Fleet, FleetConfig
from inferloop.fleet.decide.fit import FitDecision, ReplicaNeeds, fit
from inferloop.models.resolve import ModelFiles
from inferloop.plan.capacity import Sizing, size
from inferloop.records.run import RunWriter
from inferloop.records.sink import JsonlSink
from inferloop.serve.keys import ApiKeys

_MIN_KV_MIB = 128
_TARGETS = ("embedded", "openvino")
"""Those that run behind our own serve."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """`threads` is what one replica computes with; `kv_memory_mib` its KV pool. `target` is what its replicas are, of
    those that run behind our own serve, and `venvs` are where engines of others may lie. `seed` None: a random one.
    `keys` are what callers need one of, if there are any."""

    contract: Path
    runs_dir: Path
    port: int
    seed: int | None
    bench_budget_s: float
    rho: float
    failure_headroom: int
    threads: int
    kv_memory_mib: int
    cache_dir: Path | None
    target: str = "embedded"
    venvs: tuple[str, ...] = ()
    keys: tuple[Secret, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """What one replica showed. `bench` None: a gate before it did not hold, so speed was not worth measuring."""

    checks: tuple[CheckResult, ...]
    quality: dict[str, Any] | None
    bench: BenchResult | None
    replica_bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The finished run: what is in summary.json, and where."""

    summary: dict[str, Any]
    folder: Path
    gates: tuple[Gate, ...]
    bench: BenchResult | None
    sizing: Sizing | None


class Up:
    """One run of `up`. `run` ends with the sealed run folder; while `serve_until` is awaited the service is up."""

    def __init__(self, options: UpOptions, narrator: Narrator, write_report: Callable[[Path], Path]) -> None:
        self._options, self._narrator, self._write_report = options, narrator, write_report
        self._contract = load(options.contract)
        self._suite: Suite | None = None
        self._models = served_models(self._contract)
        self._measured = next(iter(self._models))
        """The name in the API of the model that is judged and measured."""
        self._kv_memory_mib = max(_MIN_KV_MIB, options.kv_memory_mib)
        self._seed = 0
        # or who may not enter at the gateway would go round it, to a port of a replica
        self._replica_key = Secret(secrets.token_urlsafe(32)) if options.keys else None
        self._folder: Path | None = None

    @property
    def folder(self) -> Path | None:
        """The run folder, once there is one."""
        return self._folder

    async def run(self, serve_until: Callable[[Outcome, Fleet], Awaitable[None]]) -> Outcome:
        """Raises PortInUseError before anything else, InferloopError when something that is needed is missing; a
        verdict, however bad, is an outcome."""
        self._check_first()
        with bind_listener("127.0.0.1", self._options.port) as listener:  # held, lest somebody takes it meanwhile
            return await self._run(listener, serve_until)

    async def _run(self, listener: socket.socket, serve_until: Callable[[Outcome, Fleet], Awaitable[None]]) -> Outcome:
        o, contract = self._options, self._contract
        text = o.contract.read_text(encoding="utf-8")
        with RunWriter(
            o.runs_dir,
            verb="up",
            service=contract.service,
            contract=contract,
            options={"contract_text": text, "target": o.target},
        ) as writer:
            self._folder, self._seed = writer.path, chosen_seed(o.seed)
            self._narrator.news(f"run folder {writer.path}")
            with self._stage(writer, "model", f"model {', '.join(dict.fromkeys(m.id for m in self._models.values()))}"):
                files = {name: await self._fetch(model) for name, model in self._models.items()}
            with self._stage(writer, "memory", "does a replica fit this machine"):
                judged = judge_memory(contract, files, machine_capacity(), self._kv_memory_mib)
                for news in (judged.gate.reason, *(told_of_chats(files) if contract.routing else ())):
                    self._narrator.news(news)
            memory = judged.gate
            if memory.verdict == "fail":
                return self._finish(writer, [memory])
            specs = {
                name: replace(await self._spec(writer.path, name, files[name]), api_key=self._replica_key)
                for name in self._models
            }
            measured = await self._measure(writer, files, specs[self._measured])
            if measured.bench is None:
                return self._finish(writer, [memory], measured)
            sizing = size(
                contract.traffic.qps.peak,
                measured.bench.capacity,
                rho=o.rho,
                failure_headroom=o.failure_headroom,
            )
            room = beside(machine_capacity(), judged.others_bytes)
            fitting = fit(sizing.needed or 0, ReplicaNeeds(measured.replica_bytes, o.threads), room)
            if not fitting.start:
                return self._finish(writer, [memory], measured, sizing, fitting)
            if told := told_of_the_unmeasured(contract):
                self._narrator.news(told)
            async with self._fleet(writer, specs, fitting, listener) as fleet:
                with self._stage(writer, "proof", "real chats through the gateway"):
                    proof = await prove(self._gateway(fleet), self._asked(files), writer.path / "events")
                    self._narrator.news(proof.reason)
                outcome = self._finish(writer, [memory], measured, sizing, fitting, proof)
                await serve_until(outcome, fleet)
            return outcome

    def _check_first(self) -> None:
        """What can be wrong is found out before any work starts. Raises UsageError, ContractError and
        EnvironmentLacksError."""
        if self._options.target not in _TARGETS:
            raise UsageError(
                f"--target {self._options.target}: up proves a service by the rows that each of its replicas writes, "
                f"which {' and '.join(_TARGETS)} do; measure another with bench or compare"
            )
        if self._contract.routing is not None and self._options.target != "embedded":
            raise UsageError(f"--target {self._options.target} runs one model; several of them run embedded")
        for model in self._models.values():
            wire.precision_flags(model)
            wire.check_ready(self._options.target, {}, model, wire.Entry(), self._options.venvs)
        if self._contract.quality is not None:
            self._suite = load_suite(Path(self._contract.quality.suite))

    async def _fetch(self, model: ModelRef) -> ModelFiles:
        return await wire.open_model(model.id, self._options.cache_dir, self._tell_bytes)

    def _tell_bytes(self, stage: str, done: int, total: int) -> None:
        self._narrator.glance(f"{stage} {human_bytes(done)} of {human_bytes(total)}")

    async def _spec(self, folder: Path, name: str, files: ModelFiles) -> LaunchSpec:
        o, model = self._options, self._models[name]
        common: dict[str, Value] = {
            "service": self._contract.service,
            "threads": o.threads,
            "events": str(folder / "events" / "replica-{replica}.jsonl"),
        }
        if name != model.id:
            common["served_model_name"] = name
        if o.target != "embedded":
            flags = {**common, "memory_mib": self._kv_memory_mib}
            return (await engine_replica(o.target, model, files, flags, o.venvs, o.cache_dir)).spec
        objective_ms = wire.tpot_objective_ms(self._contract.slo)
        common |= {"tpot_objective_ms": objective_ms, "kv_memory_mib": self._kv_memory_mib, "replica": "{replica}"}
        return wire.embedded_spec(model, o.cache_dir, **common)

    async def _measure(self, writer: RunWriter, files: Mapping[str, ModelFiles], spec: LaunchSpec) -> Measured:
        """One replica: is it right, then how fast."""
        contract = self._contract
        (writer.path / "events").mkdir(exist_ok=True)
        with self._stage(writer, "replica", "start one replica"):
            if self._options.target == "embedded":
                for name, model in self._models.items():
                    await wire.pack_weights(model, files[name], self._options.cache_dir, self._tell_bytes)
            process = await ReplicaProcess.start_ready(
                spec, log_path=writer.path / "logs" / "measured.log", replica_id="measured"
            )
        grace_s = 0.0
        try:
            writer.update(identity=await self._identity(process.at))
            with self._stage(writer, "protocol", "protocol checks"):
                checks = tuple(await run_checks(process.at, self._measured))
                protocol = gates.protocol_gate(checks)
                self._narrator.news(f"{protocol.verdict}: {protocol.reason}")
            quality = await self._judge_quality(writer, process.at)
            answers_right = protocol.verdict == "pass" and gates.quality_gate(contract, quality).verdict in (
                "pass",
                "not declared",
            )
            bench = await self._bench(writer, files[self._measured], process.at) if answers_right else None
            grace_s = spec.drain_timeout_s
            return Measured(checks, quality, bench, process.memory_bytes())
        finally:
            await process.stop(grace_s)

    def _gateway(self, fleet: Fleet) -> Endpoint:
        return Endpoint(fleet.url, self._options.keys[0] if self._options.keys else None)

    def _asked(self, files: Mapping[str, ModelFiles]) -> dict[str, bool]:
        """The names under which the service is proven, and whether they can be asked chats."""
        if self._contract.routing is None:
            return {self._measured: True}
        chats = {name: one.header.chat_template is not None for name, one in files.items()}
        return {asked_model(self._contract): chats[self._measured], **chats}

    async def _identity(self, at: Endpoint) -> dict[str, Any] | None:
        client = HttpClient(at)
        try:
            return (await describe_target(client, model=self._measured)).identity
        finally:
            await client.close()

    async def _judge_quality(self, writer: RunWriter, at: Endpoint) -> dict[str, Any] | None:
        gate = self._contract.quality
        if gate is None or self._suite is None:
            return None
        with self._stage(writer, "quality", f"quality suite {self._suite.name}"):
            summary = (await run_suite(self._suite, at, model=self._measured)).summary(gate)
            self._narrator.news(f"{summary['verdict']}: {'; '.join(summary['reasons'])}")
            return summary

    async def _bench(self, writer: RunWriter, files: ModelFiles, at: Endpoint) -> BenchResult:
        def progress(news: BenchProgress) -> None:
            if news.text is not None:
                self._narrator.news(news.text)
            else:
                self._narrator.glance(f"{news.stage}: {news.num_done} of {news.num_total} requests")

        with self._stage(writer, "bench", "frontier of one replica"):
            codec = await asyncio.to_thread(Codec, files)
            options = BenchOptions(seed=self._seed, budget_s=self._options.bench_budget_s)
            return await run_bench(self._contract, at, self._measured, codec, options, writer, progress)

    @contextlib.asynccontextmanager
    async def _fleet(
        self, writer: RunWriter, specs: Mapping[str, LaunchSpec], fitting: FitDecision, listener: socket.socket
    ) -> AsyncIterator[Fleet]:
        routing = self._contract.routing
        wanted = {self._measured: fitting.start} | replicas_beside(self._contract)
        n = sum(wanted.values())
        sink = JsonlSink(writer.path / "events" / "gateway.jsonl")
        config = FleetConfig(
            log_dir=writer.path / "logs",
            listener=listener,
            gateway=GatewayConfig(
                service=self._contract.service,
                routing=routing,
                keys=ApiKeys(self._options.keys) if self._options.keys else None,
            ),
        )
        try:
            async with Fleet(specs if routing else specs[self._measured], config, sink=sink) as fleet:
                with self._stage(writer, "fleet", f"gateway and {n} replica" + "s" * (n > 1)):
                    await fleet.start(wanted if routing else fitting.start)
                    self._narrator.news(f"listening on {fleet.url}")
                yield fleet
        finally:
            await asyncio.to_thread(sink.close)

    def _finish(
        self,
        writer: RunWriter,
        found: list[Gate],
        measured: Measured | None = None,
        sizing: Sizing | None = None,
        fitting: FitDecision | None = None,
        proof: Proof | None = None,
    ) -> Outcome:
        """Judge, seal the run folder, write the report. `found` are the gates judged so far."""
        if measured is not None:
            found += self._gates(measured, sizing, fitting)
        if proof is not None:
            found.append(Gate("service", proof.verdict, proof.reason))
        bench = measured.bench if measured else None
        summary = {
            **(bench.as_summary() if bench else {"points": []}),
            "kind": "up",
            "seed": self._seed,
            "verdict": gates.overall(found),
            "reasons": gates.reasons(found),
            "gates": plain(found),
            "protocol": plain(measured.checks) if measured else None,
            "quality": measured.quality if measured else None,
            "replicas": sizing.as_json(started=fitting.start) if sizing and fitting else None,
            "fit": plain(fitting),
            "proof": plain(proof),
        }
        written = writer.finish(summary)
        report = self._write_report(writer.path)
        return Outcome({**written, "report": str(report)}, writer.path, tuple(found), bench, sizing)

    def _gates(self, measured: Measured, sizing: Sizing | None, fitting: FitDecision | None) -> Iterator[Gate]:
        yield gates.protocol_gate(measured.checks)
        yield gates.quality_gate(self._contract, measured.quality)
        bench = measured.bench
        if bench is not None and sizing is not None and fitting is not None:
            share_qps = self._contract.traffic.qps.peak / max(1, fitting.start)
            yield gates.objective_gate(bench.verdict, bench.reasons, bench.frontier, share_qps)
            fleet, unmeasured = gates.fleet_gate(sizing, fitting), told_of_the_unmeasured(self._contract)
            yield fleet if unmeasured is None else replace(fleet, reason=f"{fleet.reason}; {unmeasured}")
        yield gates.cost_gate(self._contract)

    @contextlib.contextmanager
    def _stage(self, writer: RunWriter, name: str, title: str) -> Iterator[None]:
        with writer.stage(name), self._narrator.stage(title):
            yield
