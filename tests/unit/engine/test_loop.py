"""The engine's thread: every request gets exactly one last update, whatever happens to it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from tests.waiting import PATIENCE_S

from inferloop.core.clock import RealClock, VirtualClock
from inferloop.core.errors import ContextLengthError, EngineError, OverloadedError, RequestError
from inferloop.core.ids import TraceContext
from inferloop.core.request import BATCH_PRIORITY, Sampling, TokenRequest
from inferloop.engine.compute.echo import EchoRunner, continuation
from inferloop.engine.compute.runner import GiveUp, never
from inferloop.engine.config import EngineConfig
from inferloop.engine.loop import Engine
from inferloop.engine.roster import TokenUpdate
from inferloop.engine.schedule.step import StepPlan, StepResult


class Inbox:
    """Collects updates and lets a test wait for ends."""

    def __init__(self) -> None:
        self.updates: dict[str, list[TokenUpdate]] = {}
        self._changed = threading.Condition()

    def __call__(self, updates: Sequence[TokenUpdate]) -> None:
        with self._changed:
            for update in updates:
                self.updates.setdefault(update.request_id, []).append(update)
            self._changed.notify_all()

    def ended(self, request_id: str) -> bool:
        return any(u.finish_reason for u in self.updates.get(request_id, []))

    def wait_end(self, *request_ids: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: all(map(self.ended, request_ids)), PATIENCE_S), "no end"

    def wait_first(self, request_id: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: request_id in self.updates, PATIENCE_S), "no token"

    def tokens(self, request_id: str) -> list[int]:
        return [t for u in self.updates[request_id] for t in u.token_ids]


class GatedRunner(EchoRunner):
    """Each step tells that it was entered and waits for a permit, so that a test decides what has happened when;
    `break_at` raises in that step."""

    failure: type[BaseException] = RuntimeError

    def __init__(self, break_at: int | None = None, **options: int) -> None:
        super().__init__(**options)
        self.permits, self.entered = threading.Semaphore(0), threading.Semaphore(0)
        self.break_at = break_at

    def submit(self, plan: StepPlan, give_up: GiveUp = never) -> None:
        if plan.step_id == self.break_at:
            raise self.failure("out of luck")
        super().submit(plan, give_up)

    def wait(self) -> StepResult:
        self.entered.release()
        assert self.permits.acquire(timeout=PATIENCE_S)
        return super().wait()


def request(name: str, num_prompt: int = 4, **sampling: object) -> TokenRequest:
    prompt = tuple((11 * i + len(name)) % 97 for i in range(num_prompt))
    return TokenRequest(name, prompt, Sampling(**sampling), TraceContext.new(), 0)  # type: ignore[arg-type]


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def engine(inbox: Inbox) -> Iterator[Engine]:
    engine = Engine(EchoRunner(num_blocks=24), EngineConfig(max_sequences=4, max_waiting=60), RealClock(), inbox)
    engine.start()
    yield engine
    engine.stop()


def test_many_requests_get_their_own_answers(engine: Engine, inbox: Inbox) -> None:
    requests = [request("r" * (i + 1), num_prompt=1 + i % 7, max_tokens=1 + i % 9) for i in range(40)]
    for r in requests:
        engine.submit(r)
    inbox.wait_end(*(r.request_id for r in requests))
    for r in requests:
        assert inbox.tokens(r.request_id) == continuation(r.prompt_token_ids, r.sampling.max_tokens or 0, 97)
        updates = inbox.updates[r.request_id]
        assert [u.finish_reason for u in updates] == [None] * (len(updates) - 1) + ["length"]
        assert updates[-1].t_scheduled_ns is not None and updates[-1].t_scheduled_ns <= updates[0].t_ns
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert stats.generation_tokens == sum(r.sampling.max_tokens or 0 for r in requests)
    assert stats.prompt_tokens == sum(len(r.prompt_token_ids) for r in requests)
    assert stats.alive and stats.step_counter > 0


def test_what_cannot_be_served_is_refused_at_the_door(engine: Engine, inbox: Inbox) -> None:
    with pytest.raises(ContextLengthError):
        engine.submit(request("a", num_prompt=90, max_tokens=20))
    with pytest.raises(RequestError):
        engine.submit(request("a", max_tokens=-1))
    engine.submit(request("a", max_tokens=1))
    inbox.wait_end("a")


def test_queue_of_one_and_twelve_clients_all_get_an_answer_at_once(inbox: Inbox) -> None:
    runner = GatedRunner()
    engine = Engine(runner, EngineConfig(max_sequences=1, max_waiting=1), RealClock(), inbox)
    engine.start()
    refused = 0
    for i in range(12):
        try:
            engine.submit(request(f"r{i}", max_tokens=1))
        except OverloadedError as error:
            refused += 1
            assert error.retry_after_s > 0
    assert refused == 10
    runner.permits.release(2)
    inbox.wait_end("r0", "r1")
    engine.stop()


def test_who_waits_for_a_step_that_hangs_is_seen(inbox: Inbox) -> None:
    runner = GatedRunner()
    engine = Engine(runner, EngineConfig(max_sequences=1), RealClock(), inbox)
    engine.start()
    for i, name in enumerate(("running", "waiting"), start=1):
        engine.submit(request(name, max_tokens=1))
        stats = engine.stats()
        assert stats.num_running + stats.num_waiting == i
    runner.entered.acquire(timeout=PATIENCE_S)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.step_counter) == (1, 1, 0)
    assert stats.kv_blocks_used > 0
    runner.permits.release(2)
    inbox.wait_end("running", "waiting")
    engine.stop()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)


class Panic(BaseException):
    """What a panic of native code arrives as."""


@pytest.mark.parametrize("failure", [RuntimeError, Panic])
def test_a_failing_runner_ends_everybody_with_an_error(inbox: Inbox, failure: type[BaseException]) -> None:
    runner = GatedRunner(break_at=3)
    runner.failure = failure
    engine = Engine(runner, EngineConfig(max_sequences=1), RealClock(), inbox)
    engine.start()
    for name in ("running", "waiting"):
        engine.submit(request(name, max_tokens=8))
    runner.permits.release(2)
    inbox.wait_end("running", "waiting")
    assert inbox.updates["running"][-1].finish_reason == "error"
    assert inbox.updates["waiting"][-1].finish_reason == "error"
    assert not engine.stats().alive
    with pytest.raises(EngineError, match="out of luck"):
        engine.submit(request("late"))
    engine.stop(drain_timeout_s=PATIENCE_S)


def test_stop_drains_then_refuses(inbox: Inbox) -> None:
    runner = GatedRunner()
    engine = Engine(runner, EngineConfig(), RealClock(), inbox)
    engine.start()
    engine.submit(request("a", max_tokens=3))
    stopper = threading.Thread(target=engine.stop, args=(PATIENCE_S,))
    stopper.start()
    while True:
        try:
            engine.submit(request("a", max_tokens=3))
        except RequestError:
            continue  # the id is in use: the stopper has not come to its turn yet
        except OverloadedError:
            break
    runner.permits.release(3)
    stopper.join(PATIENCE_S)
    assert not stopper.is_alive()
    assert inbox.updates["a"][-1].finish_reason == "length"
    assert not engine.stats().alive


def test_stop_without_patience_aborts(inbox: Inbox) -> None:
    runner = GatedRunner()
    engine = Engine(runner, EngineConfig(max_sequences=1), RealClock(), inbox)
    engine.start()
    engine.submit(request("a", max_tokens=50))
    engine.submit(request("b", max_tokens=50))
    runner.permits.release(1)
    inbox.wait_first("a")
    stopper = threading.Thread(target=engine.stop)
    stopper.start()
    runner.permits.release(2)
    stopper.join(PATIENCE_S)
    assert not stopper.is_alive()
    assert inbox.updates["a"][-1].finish_reason == "abort"
    assert inbox.updates["b"][-1].finish_reason == "abort"
    engine.stop()


def test_times_come_from_the_injected_clock(inbox: Inbox) -> None:
    clock, runner = VirtualClock(start_ns=1000), GatedRunner(num_blocks=3, block_size=4)
    engine = Engine(runner, EngineConfig(max_sequences=2), clock, inbox)
    engine.start()
    engine.submit(request("a", num_prompt=3, max_tokens=2))
    clock.advance(0)
    while engine.stats().step_counter == 0 and not inbox.updates:
        runner.permits.release()
    inbox.wait_first("a")
    clock.advance(500)
    runner.permits.release(2)
    inbox.wait_end("a")
    assert inbox.updates["a"][0].t_scheduled_ns == 1000
    engine.stop()


def test_random_aborts_leave_nothing_behind(engine: Engine, inbox: Inbox) -> None:
    rng = random.Random(7)
    names = [f"r{i}" for i in range(150)]
    survivors = []
    for name in names:
        r = request(name, num_prompt=rng.randint(1, 30), max_tokens=rng.randint(1, 20))
        while True:
            try:
                engine.submit(r)
                break
            except OverloadedError:
                inbox.wait_end(names[names.index(name) - 40])
        if rng.random() < 0.6:
            engine.abort(rng.choice(names[: names.index(name) + 1]))
        else:
            survivors.append(r)
    inbox.wait_end(*names)
    for name in names:
        assert sum(u.finish_reason is not None for u in inbox.updates[name]) == 1
    untouched = [r for r in survivors if inbox.updates[r.request_id][-1].finish_reason == "length"]
    assert untouched
    for r in untouched:
        assert inbox.tokens(r.request_id) == continuation(r.prompt_token_ids, r.sampling.max_tokens or 0, 97)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)


def test_a_consumer_that_raises_does_not_hang_the_engine() -> None:
    def broken(updates: Sequence[TokenUpdate]) -> None:
        raise ValueError("consumer bug")

    engine = Engine(EchoRunner(), EngineConfig(), RealClock(), broken)
    engine.start()
    engine.submit(request("a", max_tokens=4))
    engine.stop(drain_timeout_s=PATIENCE_S)
    assert not engine.stats().alive


def test_a_background_step_is_given_up_for_whoever_comes(inbox: Inbox) -> None:
    """The step of a job has begun when a request comes; asked between its parts, it stops, and nothing is lost."""

    class Held(EchoRunner):
        def __init__(self) -> None:
            super().__init__()
            self.begun, self.go_on = threading.Event(), threading.Event()
            self.given_up: list[bool] = []

        def submit(self, plan: StepPlan, give_up: GiveUp = never) -> None:
            self.begun.set()
            assert self.go_on.wait(PATIENCE_S)
            super().submit(plan, give_up)

        def wait(self) -> StepResult:
            result = super().wait()
            self.given_up.append(result.given_up)
            return result

    runner = Held()
    engine = Engine(runner, EngineConfig(), RealClock(), inbox)
    engine.start()
    jobs = [replace(request(f"job {i}", 40, max_tokens=6), priority=BATCH_PRIORITY) for i in range(2)]
    engine.submit(jobs[0])
    assert runner.begun.wait(PATIENCE_S)
    engine.submit(jobs[1])
    caller = request("caller", 8, max_tokens=6)
    engine.submit(caller)
    runner.go_on.set()
    inbox.wait_end("caller", "job 0", "job 1")
    engine.stop()
    assert runner.given_up[0] and not any(runner.given_up[1:])
    assert inbox.updates["caller"][-1].t_ns < inbox.updates["job 0"][0].t_ns
    for asked in (caller, *jobs):
        truth = continuation(asked.prompt_token_ids, 6, runner.info.vocab_size)
        assert inbox.tokens(asked.request_id) == truth


def test_no_step_is_given_up_for_background_work(inbox: Inbox) -> None:
    runner = GatedRunner()
    engine = Engine(runner, EngineConfig(), RealClock(), inbox)
    engine.start()
    jobs = [replace(request(f"job {i}", 8, max_tokens=2), priority=BATCH_PRIORITY) for i in range(2)]
    engine.submit(jobs[0])
    assert runner.entered.acquire(timeout=PATIENCE_S)
    engine.submit(jobs[1])
    runner.permits.release(10)
    inbox.wait_end("job 0", "job 1")
    engine.stop()
    assert engine.stats().step_counter == 3, "two steps each, one of them together"


def test_errands_are_done_between_steps_after_what_came_before(inbox: Inbox) -> None:
    """Also while there is nothing else to do; an errand that fails is its own affair."""
    runner, seen = GatedRunner(num_blocks=8), list[str]()
    engine = Engine(runner, EngineConfig(max_sequences=2), RealClock(), inbox)
    engine.start()
    engine.between_steps(lambda: seen.append("idle")).result(PATIENCE_S)
    engine.submit(request("a", max_tokens=20))
    assert runner.entered.acquire(timeout=PATIENCE_S)
    engine.abort("a")
    first = engine.between_steps(lambda: seen.append("running" if not inbox.ended("a") else "aborted"))
    broken = engine.between_steps(lambda: [].pop())
    assert seen == ["idle"], "a step runs"
    runner.permits.release()
    first.result(PATIENCE_S)
    assert seen == ["idle", "aborted"]
    assert isinstance(broken.exception(PATIENCE_S), IndexError)
    runner.permits.release(1000)
    engine.submit(request("b", max_tokens=2))
    inbox.wait_end("b")
    engine.stop()
    with pytest.raises(EngineError, match="has stopped"):
        engine.between_steps(lambda: seen.append("never"))


def test_errands_of_an_engine_that_ends_fail(inbox: Inbox) -> None:
    runner = GatedRunner(num_blocks=8)
    engine = Engine(runner, EngineConfig(max_sequences=2), RealClock(), inbox)
    engine.start()
    engine.submit(request("a", max_tokens=20))
    assert runner.entered.acquire(timeout=PATIENCE_S)
    pending = engine.between_steps(lambda: None)
    engine.fail(EngineError("given up while it hangs in a step"))
    assert isinstance(pending.exception(PATIENCE_S), EngineError)
    with pytest.raises(EngineError, match="has stopped"):
        engine.between_steps(lambda: None)
    runner.permits.release(100)
    engine.stop()
