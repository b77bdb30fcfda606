"""One replica's parts and its state, handed to the endpoints."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from inferloop.backends.protocols import GenerateRequest, Generator, Prompt, TextCodec
from inferloop.core.clock import Clock, RealClock
from inferloop.core.errors import OverloadedError
from inferloop.core.ids import TraceContext, new_id
from inferloop.core.request import Sampling
from inferloop.records.sink import Sink
from inferloop.serve.config import ServeConfig
from inferloop.serve.metrics import Metrics

log = logging.getLogger("inferloop.serve")

_WARMUP_RETRY_S = 2.0
_ABORT_TIMEOUT_S = 5.0


class Interruptible(Protocol):
    """An answer under way; serve.finish.Attempt is one."""

    request_id: str

    def interrupt(self, task: asyncio.Task[object], why: str) -> bool: ...


class Replica:
    """Owned by the event loop. `attempts` are the requests being answered, by the task that answers them."""

    def __init__(
        self,
        generator: Generator,
        config: ServeConfig,
        sink: Sink,
        *,
        content_sink: Sink | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.generator, self.config, self.sink, self.content_sink = generator, config, sink, content_sink
        self.clock = clock or RealClock()
        self.info, _ = generator.describe()
        self.identity_digest = self.info.identity.digest
        self.codec: TextCodec | None = generator if isinstance(generator, TextCodec) else None
        self.created_s = self.clock.wall_ns() // 1_000_000_000
        self.metrics = Metrics(
            model=self.info.model_id,
            identity_digest=self.identity_digest,
            stats=lambda: generator.describe()[1],
            aliases=config.metric_aliases,
        )
        self.metrics.events_lost = lambda: getattr(sink, "num_lost", 0)
        self.attempts: dict[asyncio.Task[object], Interruptible] = {}
        self.drain_began = asyncio.Event()
        self._warm = False
        self._warm_problem = "no token produced yet"

    def refresh(self) -> None:
        """What the generator is has changed: adapters came or went."""
        self.info, _ = self.generator.describe()

    @property
    def draining(self) -> bool:
        return self.drain_began.is_set()

    def not_ready(self) -> str | None:
        """Why this replica must not get traffic; None when it may."""
        if self.draining:
            return "draining"
        if not self.generator.describe()[1].alive:
            return "the engine has stopped"
        return None if self._warm else self._warm_problem

    def admit(self) -> None:
        """Raises OverloadedError while draining; another replica can take the request."""
        if self.draining:
            raise OverloadedError("this replica is shutting down", reason="stopping")

    async def warm_up(self) -> None:
        """Generate until one real token came out; then the replica is ready."""
        while not self._warm:
            try:
                await self._generate_one()
            except Exception as error:
                self._warm_problem = f"warm-up failed: {error}"
                log.warning("%s", self._warm_problem)
                await asyncio.sleep(_WARMUP_RETRY_S)

    async def _generate_one(self) -> None:
        request = GenerateRequest(
            request_id=new_id("warm"),
            trace=TraceContext.new(),
            prompt=Prompt(text="Hello"),
            sampling=Sampling(temperature=0.0, max_tokens=1, ignore_eos=True),
            t_engine_in_ns=self.clock.now_ns(),
        )
        async for delta in self.generator.generate(request):
            self._warm = self._warm or bool(delta.token_ids)

    async def drain(self) -> None:
        """Refuse new requests, let the running ones finish for `drain_timeout_s`, then abort what is left."""
        self.drain_began.set()
        if self.attempts:
            await asyncio.wait(list(self.attempts), timeout=self.config.drain_timeout_s)
        self.abort_all("drain")
        if self.attempts:
            await asyncio.wait(list(self.attempts), timeout=_ABORT_TIMEOUT_S)

    def interrupt(self, request_id: str, why: str) -> int:
        """End all requests with this id; returns how many there were."""
        found = [(t, a) for t, a in self.attempts.items() if a.request_id == request_id]
        return sum(attempt.interrupt(task, why) for task, attempt in found)

    def abort_all(self, why: str) -> None:
        for task, attempt in list(self.attempts.items()):
            attempt.interrupt(task, why)
