"""The engine: one thread that takes requests in, asks the scheduler, feeds the runner and hands tokens out."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from inferloop.core.clock import Clock
from inferloop.core.errors import EngineError, OverloadedError, RequestError
from inferloop.core.request import BATCH_PRIORITY, FinishReason, TokenRequest
from inferloop.core.units import NS_PER_MS
from inferloop.engine.compute.runner import Runner, RunnerInfo
from inferloop.engine.schedule.mask import Mask
from inferloop.engine.schedule.policy import ScheduleConfig, has_room, resolve_max_tokens
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec, SequenceUpdate
from inferloop.engine.schedule.step import Float64, TokenLogprob
from inferloop.engine.schedule.tier import BlockTier
from inferloop.engine.stats import EngineStats

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`max_step_tokens`: token budget of a step; `max_sequences`: most that run together; `max_waiting`: most that
    queue behind them. `eos_token_ids` end a sequence unless it ignores them. `context_length` below the model's own
    bounds prompt and output together. `share_prefixes`: keep what finished sequences computed, and let those that begin
    alike start from it."""

    eos_token_ids: tuple[int, ...] = ()
    context_length: int | None = None
    max_step_tokens: int = 256
    max_sequences: int = 32
    max_waiting: int = 256
    retry_after_s: float = 1.0
    share_prefixes: bool = True


@dataclass(frozen=True, slots=True)
class TokenUpdate:
    """What one step gave one request. The last update of a request, and only that one, has a finish reason."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    t_ns: int
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    t_scheduled_ns: int | None = None
    """When it first entered a step; None when it never did."""
    num_preemptions: int = 0
    preempted_ns: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """Of the prompt's tokens from the second on; in the first update only, when asked for."""
    pooled: Float64 | None = None
    """The sum of the prompt's last hidden states, (hidden,); in the only update of a request that asked for it."""


@dataclass(slots=True)
class _Tracked:
    """Times of one request that the scheduler, which has no clock, cannot know."""

    num_prompt_tokens: int
    background: bool = False
    t_scheduled_ns: int | None = None
    t_preempted_ns: int | None = None
    preempted_ns: int = 0
    started: bool = False
    num_preemptions: int = 0


class Engine:
    """Thread-safe door to one runner. `on_updates` runs on the engine's thread, once per step; it must not block."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        clock: Clock,
        on_updates: Callable[[Sequence[TokenUpdate]], None],
        tier: BlockTier | None = None,
    ) -> None:
        """`tier` keeps blocks outside the runner, which must be able to load and save them."""
        info = runner.info
        self._runner, self._clock, self._on_updates = runner, clock, on_updates
        self._config = ScheduleConfig(
            vocab_size=info.vocab_size,
            context_length=min(info.context_length, config.context_length or info.context_length),
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            num_kv_groups=len(info.kv_group_windows),
            eos_token_ids=config.eos_token_ids,
            max_step_tokens=config.max_step_tokens,
            max_sequences=config.max_sequences,
            max_waiting=config.max_waiting,
            retry_after_s=config.retry_after_s,
            share_prefixes=config.share_prefixes,
        )
        assert tier is None or info.block_bytes, "this runner cannot load blocks"
        self._scheduler = Scheduler(self._config, tier)
        self._thread = threading.Thread(target=self._run, name="inferloop-engine", daemon=True)
        self._changed = threading.Condition()
        # Guarded by _changed.
        self._inbox: deque[SequenceSpec] = deque()
        self._aborts: deque[str] = deque()
        self._tracked: dict[str, _Tracked] = {}
        self._stats = EngineStats(kv_blocks_total=self._scheduler.num_blocks_total, alive=False)
        self._draining = False
        self._stopping = False
        self._failure: BaseException | None = None

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    @property
    def max_total_tokens(self) -> int:
        """The longest prompt plus output that can be served: the context length, or less with little KV memory."""
        return self._config.max_total_tokens

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that can be computed whole, with nothing generated after it."""
        return self._config.max_prompt_tokens

    def max_tokens_of(self, request: TokenRequest) -> int:
        """How many tokens `request` may generate. Raises what `submit` does for what can never be served."""
        return resolve_max_tokens(self._config, _spec_of(request, None))

    def start(self) -> None:
        self._thread.start()

    def stop(self, drain_timeout_s: float = 0.0) -> None:
        """Refuse new requests, let the present ones finish for up to `drain_timeout_s`, abort the rest, end the thread.

        Idempotent. Every request has had its last update when this returns.
        """
        deadline = time.monotonic() + drain_timeout_s
        with self._changed:
            self._draining = True
            while self._tracked and self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, 0.5))
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def submit(self, request: TokenRequest, mask: Mask | None = None) -> None:
        """Queue a request; what `sampling.grammar` asks for comes compiled, as a fresh `mask` that is the engine's from
        here on. Any thread.

        Raises RequestError or ContextLengthError for what can never be served, OverloadedError when the queue is full
        or the engine is going away, EngineError when it has failed.
        """
        assert not request.pool or self.info.hidden_size, "this runner cannot pool"
        assert (mask is None) == (request.sampling.grammar is None), "a grammar comes with its mask"
        spec = _spec_of(request, mask)
        resolve_max_tokens(self._config, spec)
        with self._changed:
            if self._failure is not None:
                raise EngineError(f"the engine has failed: {self._failure}")
            if self._draining:
                raise OverloadedError("the engine is stopping", retry_after_s=self._config.retry_after_s)
            if spec.request_id in self._tracked:
                raise RequestError(f"request id {spec.request_id!r} is already in use", param="request_id")
            background = spec.priority >= BATCH_PRIORITY
            num_background = sum(tracked.background for tracked in self._tracked.values())
            if not has_room(self._config, len(self._tracked), num_background, background):
                raise OverloadedError("the queue is full", retry_after_s=self._config.retry_after_s)
            self._tracked[spec.request_id] = _Tracked(len(spec.prompt_token_ids), background)
            self._inbox.append(spec)
            self._changed.notify_all()

    def abort(self, request_id: str) -> None:
        """End a request with finish reason "abort", within two steps. Unknown ids are ignored. Any thread."""
        with self._changed:
            if request_id in self._tracked:
                self._aborts.append(request_id)
                self._changed.notify_all()

    def stats(self) -> EngineStats:
        with self._changed:
            alive = self._failure is None and not self._stopping and self._thread.is_alive()
            return replace(self._stats, num_waiting=len(self._tracked) - self._stats.num_running, alive=alive)

    def _run(self) -> None:
        try:
            while self._drain_doors():
                self._step()
        except BaseException as error:  # a panic of native code is no Exception
            _log.exception("the engine failed")
            self._fail(error)

    def _drain_doors(self) -> bool:
        """Take in what came from outside; sleep while there is nothing to do. False: the engine is to end."""
        with self._changed:
            while not (self._inbox or self._aborts or self._stopping or self._scheduler.request_ids):
                self._changed.wait()
            while self._inbox:
                self._scheduler.add(self._inbox.popleft())
            aborted = list(self._scheduler.request_ids) if self._stopping else list(self._aborts)
            self._aborts.clear()
            aborted = [request_id for request_id in aborted if self._scheduler.abort(request_id)]
            stopping = self._stopping
        self._finish(aborted, "abort")
        return not stopping

    def _step(self) -> None:
        plan = self._scheduler.schedule()
        if plan is None:
            return
        self._note_changes()
        self._runner.submit(plan)
        result = self._runner.wait()
        t_ns = self._clock.now_ns()
        updates = self._scheduler.commit(plan, result)
        with self._changed:
            emitted = [self._token_update(update, t_ns) for update in updates]
            self._update_stats(num_steps=1, updates=updates)
            for update in updates:
                if update.finish_reason is not None:
                    del self._tracked[update.request_id]
            if not self._tracked:
                self._changed.notify_all()
        if emitted:
            self._on_updates(emitted)

    def _note_changes(self) -> None:
        now_ns = self._clock.now_ns()
        changes = self._scheduler.changes
        for request_id in changes.preempted:
            self._tracked[request_id].t_preempted_ns = now_ns
            self._tracked[request_id].num_preemptions += 1
        for request_id in changes.admitted:
            tracked = self._tracked[request_id]
            if tracked.t_scheduled_ns is None:
                tracked.t_scheduled_ns = now_ns
            if tracked.t_preempted_ns is not None:
                tracked.preempted_ns += now_ns - tracked.t_preempted_ns
                tracked.t_preempted_ns = None
        with self._changed:
            self._update_stats()

    def _token_update(self, update: SequenceUpdate, t_ns: int) -> TokenUpdate:
        tracked = self._tracked[update.request_id]
        return TokenUpdate(
            request_id=update.request_id,
            token_ids=update.token_ids,
            logprobs=update.logprobs,
            t_ns=t_ns,
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason,
            num_cached_tokens=update.num_cached_tokens,
            t_scheduled_ns=tracked.t_scheduled_ns,
            num_preemptions=update.num_preemptions,
            preempted_ns=tracked.preempted_ns,
            prompt_logprobs=update.prompt_logprobs,
            pooled=update.pooled,
        )

    def _finish(self, request_ids: Sequence[str], reason: FinishReason) -> None:
        """Give these requests their last update. The scheduler has let go of them already."""
        if not request_ids:
            return
        t_ns = self._clock.now_ns()
        emitted = []
        with self._changed:
            for request_id in request_ids:
                tracked = self._tracked.pop(request_id)
                waited_ns = t_ns - tracked.t_preempted_ns if tracked.t_preempted_ns is not None else 0
                emitted.append(
                    TokenUpdate(
                        request_id=request_id,
                        token_ids=(),
                        logprobs=None,
                        t_ns=t_ns,
                        finish_reason=reason,
                        t_scheduled_ns=tracked.t_scheduled_ns,
                        num_preemptions=tracked.num_preemptions,
                        preempted_ns=tracked.preempted_ns + waited_ns,
                    )
                )
            self._update_stats()
            if not self._tracked:
                self._changed.notify_all()
        self._on_updates(emitted)

    def _fail(self, error: BaseException) -> None:
        """The runner's state is unknown: everybody is told, nobody is let in any more."""
        with self._changed:
            self._failure = error
            self._inbox.clear()
            request_ids = list(self._tracked)
        with contextlib.suppress(Exception):  # the failure may have come from on_updates itself
            self._finish(request_ids, "error")
        with self._changed:
            self._changed.notify_all()

    def _update_stats(self, num_steps: int = 0, updates: Sequence[SequenceUpdate] = ()) -> None:
        """Caller holds the lock."""
        before, scheduler = self._stats, self._scheduler
        num_prompt = 0
        for update in updates:
            tracked = self._tracked[update.request_id]
            num_prompt += 0 if tracked.started else tracked.num_prompt_tokens
            tracked.started = True
        self._stats = EngineStats(
            num_running=scheduler.num_running if self._failure is None else 0,
            step_counter=before.step_counter + num_steps,
            kv_blocks_total=scheduler.num_blocks_total,
            kv_blocks_used=scheduler.num_blocks_used if self._failure is None else 0,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=scheduler.num_prefix_queries,
            prefix_cache_hits=scheduler.num_prefix_hits,
            tier=scheduler.tier_stats,
            prompt_tokens=before.prompt_tokens + num_prompt,
            generation_tokens=before.generation_tokens + sum(len(u.token_ids) for u in updates),
        )


def _spec_of(request: TokenRequest, mask: Mask | None) -> SequenceSpec:
    """A request without a seed gets a fresh one; any integer seed is taken modulo 2**64."""
    seed = request.sampling.seed
    return SequenceSpec(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        seed=secrets.randbits(64) if seed is None else seed & 0xFFFF_FFFF_FFFF_FFFF,
        priority=request.priority,
        arrived_ms=request.t_engine_in_ns // NS_PER_MS,
        namespace=("salt", request.cache_salt) if request.cache_salt else (),
        mask=mask,
        pool=request.pool,
    )
