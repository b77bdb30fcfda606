"""The engine: one thread that takes requests in, asks the scheduler, feeds the runner and hands tokens out."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from inferloop.core.clock import Clock
from inferloop.core.errors import EngineError, OverloadedError, RequestError
from inferloop.core.request import BATCH_PRIORITY, TokenRequest
from inferloop.core.units import NS_PER_MS, ns_to_ms
from inferloop.engine.compute.runner import GiveUp, Runner, RunnerInfo, never
from inferloop.engine.config import EngineConfig
from inferloop.engine.roster import EndReason, Roster, TokenUpdate
from inferloop.engine.schedule.mask import Mask
from inferloop.engine.schedule.pace import StepLimits
from inferloop.engine.schedule.pacer import Pacer, late_ones
from inferloop.engine.schedule.policy import check_together, resolve_max_tokens
from inferloop.engine.schedule.radix import Namespace
from inferloop.engine.schedule.scheduler import Scheduler
from inferloop.engine.schedule.sequence import SequenceSpec
from inferloop.engine.schedule.step import NO_ADAPTER
from inferloop.engine.schedule.tier import BlockTier
from inferloop.engine.stats import EngineStats

STOP_TIMEOUT_S = 10.0
"""Longer than any step that makes sense, shorter than the patience of whoever stops processes."""
_log = logging.getLogger(__name__)


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
        self._config = config.for_runner(info)
        assert tier is None or info.block_bytes, "this runner cannot load blocks"
        self._scheduler = Scheduler(self._config, tier)
        self._max_ttft_ms = config.max_ttft_ms
        self._pacer = Pacer(
            max_step_tokens=config.max_step_tokens,
            max_sequences=config.max_sequences,
            tpot_objective_ms=config.tpot_objective_ms,
            bounds_background=not info.can_give_up,
        )
        self._thread = threading.Thread(target=self._run, name="inferloop-engine", daemon=True)
        self._changed = threading.Condition()
        self._urgent = GiveUp()
        """Somebody came who is no background work: what a step of that would still compute can wait."""
        # Guarded by _changed.
        self._inbox: deque[SequenceSpec] = deque()
        self._aborts: deque[str] = deque()
        self._errands: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._roster = Roster()
        self._stats = EngineStats(kv_blocks_total=self._scheduler.num_blocks_total, alive=False)
        self._draining = False
        self._stopping = False
        self._failure: BaseException | None = None
        self._ended = False

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

    def check_together(self, num_prompt_tokens: int, n: int, num_choices: int) -> None:
        """Raise RequestError for choices that this engine can never have at once; see `policy.check_together`."""
        check_together(self._config, num_prompt_tokens, n, num_choices)

    def start(self) -> None:
        self._thread.start()

    def stop(self, drain_timeout_s: float = 0.0) -> None:
        """Refuse new requests, let the present ones finish for up to `drain_timeout_s`, abort the rest, end the thread.

        Idempotent. Every request has had its last update when this returns: a device that hangs in a step is waited for
        no longer than STOP_TIMEOUT_S, then its requests end as errors and its thread is left behind.
        """
        deadline = time.monotonic() + drain_timeout_s
        with self._changed:
            self._draining = True
            while self._roster and self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, 0.5))
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(STOP_TIMEOUT_S)
            if self._thread.is_alive():
                _log.error("the engine's step does not end; its thread is left behind")
                self.fail(EngineError("the device hangs"))

    def submit(self, request: TokenRequest, mask: Mask | None = None) -> None:
        """Queue a request; see `submit_all`."""
        self.submit_all([(request, mask)])

    def submit_all(self, requests: Sequence[tuple[TokenRequest, Mask | None]]) -> None:
        """Queue requests of one class, all of them or none; what `sampling.grammar` asks for comes compiled, as a fresh
        mask that is the engine's from here on. Any thread.

        Raises RequestError or ContextLengthError for what can never be served, OverloadedError when the queue is full
        or the engine is going away, EngineError when it has failed.
        """
        for request, mask in requests:
            assert not request.pool or self.info.hidden_size, "this runner cannot pool"
            assert (mask is None) == (request.sampling.grammar is None), "a grammar comes with its mask"
        specs = [_spec_of(request, mask) for request, mask in requests]
        limits = [resolve_max_tokens(self._config, spec) for spec in specs]
        [background] = {spec.priority >= BATCH_PRIORITY for spec in specs}
        with self._changed:
            self._check_open(sum(len(spec.prompt_token_ids) for spec in specs), background, num=len(specs))
            if len({spec.request_id for spec in specs if spec.request_id not in self._roster}) < len(specs):
                raise RequestError("a request id is already in use", param="request_id")
            for spec, max_tokens in zip(specs, limits, strict=True):
                self._roster.add(spec.request_id, len(spec.prompt_token_ids), max_tokens, background=background)
            self._inbox += specs
            if not background:
                self._urgent.set()
            self._changed.notify_all()

    def check_open(self, priority: int) -> None:
        """Raise what `submit` would raise even for the shortest prompt, before any work is done for it. Any thread."""
        with self._changed:
            self._check_open(1, priority >= BATCH_PRIORITY)

    def retry_after_s(self) -> float:
        """When what waits now, background work aside, will be through, by the measured speed; between 1 and 60 seconds.
        Any thread."""
        with self._changed:
            return self._pacer.retry_after_s(*self._roster.load().ahead_of(background=False))

    def _check_open(self, num_prompt: int, background: bool, num: int = 1) -> None:
        """For `num` requests with prompts of `num_prompt` tokens altogether. Caller holds the lock."""
        if self._failure is not None:
            raise EngineError(f"the engine has failed: {self._failure}")
        if self._draining:
            raise OverloadedError("the engine is stopping", reason="stopping")
        load = self._roster.load()
        reason = load.refuses(self._config, num_prompt, background, num)
        if reason is not None:
            retry_after_s = self._pacer.retry_after_s(*load.ahead_of(background))
            raise OverloadedError("the queue is full", retry_after_s=retry_after_s, reason=reason)

    def abort(self, request_id: str) -> None:
        """End a request with finish reason "abort", within two steps. Unknown ids are ignored. Any thread."""
        with self._changed:
            if request_id in self._roster:
                self._aborts.append(request_id)
                self._changed.notify_all()

    def between_steps(self, errand: Callable[[], None]) -> Future[None]:
        """Have something done to the runner while no step runs, after all that was submitted and aborted before, and
        after earlier errands. Any thread. The future fails when the engine ends first."""
        done: Future[None] = Future()
        with self._changed:
            if self._failure is not None or self._ended:
                raise EngineError("the engine has stopped")
            self._errands.append((errand, done))
            self._changed.notify_all()
        return done

    def stats(self) -> EngineStats:
        with self._changed:
            alive = self._failure is None and not self._stopping and self._thread.is_alive()
            load = self._roster.load()
            return replace(
                self._stats,
                num_waiting=len(self._roster) - self._stats.num_running,
                num_background_waiting=load.background.num_waiting,
                queue_tokens=load.queue_tokens,
                alive=alive,
                tier=self._scheduler.tier_stats,  # it goes on between steps, and may be read at any time
            )

    def _run(self) -> None:
        try:
            while self._drain_doors():
                self._step()
        except EngineError as error:  # says all that there is to say
            _log.error("the engine failed: %s", error)
            self.fail(error)
        except BaseException as error:  # a panic of native code is no Exception
            _log.exception("the engine failed")
            self.fail(error)
        finally:
            self._scheduler.close()
            with self._changed:
                self._ended = True
            self._drop_errands()

    def _drain_doors(self) -> bool:
        """Take in what came from outside; sleep while there is nothing to do. False: the engine is to end."""
        with self._changed:
            if self._failure is not None:
                return False  # given up while it hung in a step
            while not (self._inbox or self._aborts or self._errands or self._stopping or not self._scheduler.is_empty):
                self._changed.wait()
            while self._inbox:
                self._scheduler.add(self._inbox.popleft())
            self._urgent.clear()
            aborted = list(self._scheduler.request_ids) if self._stopping else list(self._aborts)
            self._aborts.clear()
            aborted = [request_id for request_id in aborted if self._scheduler.abort(request_id)]
            stopping = self._stopping
            errands, self._errands = self._errands, deque()
        self._finish(aborted, "abort")
        for errand, done in errands:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(errand())
                except Exception as error:
                    done.set_exception(error)
        return not stopping

    def _step(self) -> None:
        t_begin_ns = self._clock.now_ns()
        limits = self._pacer.limits(t_begin_ns // NS_PER_MS, self._scheduler.has_foreground)
        if self._max_ttft_ms is not None:
            self._shed(self._max_ttft_ms, limits, t_begin_ns // NS_PER_MS)
        plan = self._scheduler.schedule(limits)
        if plan is None:
            return
        with self._changed:
            if self._has_failed():
                return  # given up while it planned
            self._roster.note(self._scheduler.changes, self._clock.now_ns())
            self._update_stats()
        self._runner.submit(plan, never if self._scheduler.has_foreground else self._urgent)
        result = self._runner.wait()
        if self._has_failed():
            return
        t_ns = self._clock.now_ns()
        if not result.given_up:
            self._pacer.observe(plan, ns_to_ms(t_ns - t_begin_ns))
        updates = self._scheduler.commit(plan, result)
        with self._changed:
            if self._has_failed():
                return  # given up just now: everybody has been told
            emitted = [self._roster.advance(update, t_ns) for update in updates]
            self._update_stats(num_steps=1)
            if not self._roster:
                self._changed.notify_all()
        if emitted:
            self._on_updates(emitted)

    def _shed(self, max_ttft_ms: float, limits: StepLimits, now_ms: int) -> None:
        """Give up who would get a first token too late to be of use."""
        scheduler, pacer = self._scheduler, self._pacer
        num_queries = scheduler.num_prefix_queries
        late = late_ones(
            scheduler.waiting(),
            lambda num_tokens: pacer.prefill_ms(num_tokens, pacer.num_decodes, limits) if pacer.knows else 0.0,
            scheduler.num_uncached,
            now_ms=now_ms,
            max_ttft_ms=max_ttft_ms,
            share_uncached=1 - scheduler.num_prefix_hits / num_queries if num_queries else 1.0,
        )
        self._finish([request_id for request_id in late if scheduler.abort(request_id)], "shed")

    def _finish(self, request_ids: Sequence[str], reason: EndReason) -> None:
        """Give these requests their last update. The scheduler has let go of them already."""
        if not request_ids:
            return
        t_ns = self._clock.now_ns()
        with self._changed:
            emitted = [self._roster.end(name, reason, t_ns) for name in request_ids if name in self._roster]
            self._update_stats()
            if not self._roster:
                self._changed.notify_all()
        self._on_updates(emitted)

    def _has_failed(self) -> bool:
        """Also through another thread, that gave this one up while it hung."""
        return self._failure is not None

    def fail(self, error: BaseException) -> None:
        """The runner's state is unknown: everybody is told, nobody is let in any more. Any thread."""
        with self._changed:
            self._failure = error
            self._inbox.clear()
            request_ids = self._roster.request_ids
        self._drop_errands()
        with contextlib.suppress(Exception):  # the failure may have come from on_updates itself
            self._finish(request_ids, "error")
        with self._changed:
            self._changed.notify_all()

    def _drop_errands(self) -> None:
        """Nobody does them any more, and nobody gives new ones."""
        with self._changed:
            left, self._errands = self._errands, deque()
        for _, done in left:
            if done.set_running_or_notify_cancel():
                done.set_exception(EngineError("the engine has stopped"))

    def _update_stats(self, num_steps: int = 0) -> None:
        """Caller holds the lock."""
        scheduler = self._scheduler
        self._stats = EngineStats(
            num_running=scheduler.num_running if self._failure is None else 0,
            step_counter=self._stats.step_counter + num_steps,
            kv_blocks_total=scheduler.num_blocks_total,
            kv_blocks_used=scheduler.num_blocks_used if self._failure is None else 0,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=scheduler.num_prefix_queries,
            prefix_cache_hits=scheduler.num_prefix_hits,
            prompt_tokens=self._roster.num_prompt_tokens,
            generation_tokens=self._roster.num_output_tokens,
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
        namespace=_namespace(request),
        mask=mask,
        pool=request.pool,
        sheddable=request.sheddable and not request.pool,
        adapter_slot=NO_ADAPTER if request.adapter is None else request.adapter.slot,
    )


def _namespace(request: TokenRequest) -> Namespace:
    """Each value behind a tag of its own, so that no two kinds of name meet. An adapter counts by its content: one that
    was loaded under the name of another has another namespace."""
    adapter = () if request.adapter is None else ("adapter", request.adapter.digest)
    return (*adapter, "salt", request.cache_salt) if request.cache_salt else adapter
