"""An engine with more work than it can do: bounded queues, honest times, nobody left without an answer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.waiting import PATIENCE_S

from inferloop.core.clock import RealClock, VirtualClock
from inferloop.core.errors import EngineError, OverloadedError
from inferloop.core.ids import TraceContext
from inferloop.core.request import BATCH_PRIORITY, Sampling, TokenRequest
from inferloop.engine import loop
from inferloop.engine.compute.echo import EchoRunner
from inferloop.engine.compute.runner import GiveUp, never
from inferloop.engine.config import EngineConfig
from inferloop.engine.loop import Engine
from inferloop.engine.roster import TokenUpdate
from inferloop.engine.schedule.pace import StepTime
from inferloop.engine.schedule.step import StepPlan, StepResult


class Ends:
    """Last updates, and a way to wait for them."""

    def __init__(self) -> None:
        self.of: dict[str, TokenUpdate] = {}
        self._changed = threading.Condition()

    def __call__(self, updates: Sequence[TokenUpdate]) -> None:
        with self._changed:
            self.of |= {u.request_id: u for u in updates if u.finish_reason is not None}
            self._changed.notify_all()

    def wait(self, *names: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: set(names) <= set(self.of), PATIENCE_S), self.of


class Timed(EchoRunner):
    """Moves a virtual clock by what a step costs; each step waits for a permit, unless `free`."""

    def __init__(self, clock: VirtualClock, time: StepTime, **options: int) -> None:
        super().__init__(**options)
        self.clock, self.time, self.free = clock, time, False
        self.permits, self.entered = threading.Semaphore(0), threading.Semaphore(0)
        self.steps: list[tuple[int, int]] = []

    def submit(self, plan: StepPlan, give_up: GiveUp = never) -> None:
        num_decodes = int((plan.offsets[1:] - plan.offsets[:-1] == 1).sum())
        self.steps.append((plan.num_tokens - num_decodes, num_decodes))
        super().submit(plan, give_up)

    def wait(self) -> StepResult:
        self.entered.release()
        if not self.free:
            assert self.permits.acquire(timeout=PATIENCE_S)
        self.clock.advance(int(self.time.predict(*self.steps[-1]) * 1e6))
        return super().wait()

    def release(self) -> None:
        self.free = True
        self.permits.release()


def request(name: str, num_prompt: int = 4, *, priority: int = 0, at_ms: int = 0, max_tokens: int = 4) -> TokenRequest:
    prompt = tuple((11 * i + len(name)) % 97 for i in range(num_prompt))
    sampling = Sampling(max_tokens=max_tokens)
    return TokenRequest(name, prompt, sampling, TraceContext.new(), at_ms * 10**6, priority=priority)


def engine_of(runner: EchoRunner, ends: Ends, clock: VirtualClock | None = None, **options: object) -> Engine:
    config = replace(EngineConfig(max_sequences=1), **options)  # type: ignore[arg-type]
    engine = Engine(runner, config, clock or RealClock(), ends)
    engine.start()
    return engine


def hold(engine: Engine, runner: Timed) -> None:
    """One request in a step that goes on, so that all others wait."""
    engine.submit(request("held", max_tokens=1))
    assert runner.entered.acquire(timeout=PATIENCE_S)


def test_the_queue_is_bounded_by_tokens_and_says_when_to_come_back() -> None:
    clock, ends = VirtualClock(), Ends()
    runner = Timed(clock, StepTime())
    engine = engine_of(runner, ends, clock, max_waiting=100, max_waiting_tokens=100)
    hold(engine, runner)
    engine.submit(request("long", 200))  # an empty queue takes any prompt
    with pytest.raises(OverloadedError) as caught:
        engine.submit(request("b", 1))
    assert caught.value.reason == "queue_tokens"
    assert 1 <= caught.value.retry_after_s <= 60
    with pytest.raises(OverloadedError):
        engine.check_open(0)
    assert engine.stats().queue_tokens == 200
    engine.abort("long")
    runner.release()
    ends.wait("held", "long")
    engine.submit(request("b", 1))
    ends.wait("b")
    assert engine.stats().queue_tokens == 0
    engine.stop()


def test_how_long_to_wait_follows_the_queue_and_the_speed() -> None:
    def told(num_waiting: int, time: StepTime) -> float:
        clock, ends = VirtualClock(), Ends()
        runner = Timed(clock, time)
        engine = engine_of(runner, ends, clock, max_waiting=num_waiting)
        runner.permits.release(200)
        engine.submit(request("teaches the speed", 150, max_tokens=100))
        ends.wait("teaches the speed")
        while runner.permits.acquire(blocking=False) or runner.entered.acquire(blocking=False):
            pass
        hold(engine, runner)
        for i in range(num_waiting):
            engine.submit(request(f"r{i}", 100, max_tokens=100))
        with pytest.raises(OverloadedError) as caught:
            engine.submit(request("one too many"))
        assert caught.value.reason == "queue_full"
        runner.release()
        engine.stop(PATIENCE_S)
        return caught.value.retry_after_s

    slow, fast = StepTime(10.0, 2.0, 0.1), StepTime(2.0, 0.4, 0.02)
    assert told(10, slow) == pytest.approx(10 * 100 * 12.0 / 1000, rel=0.3)
    assert told(20, slow) == pytest.approx(2 * told(10, slow), rel=0.1)
    assert told(20, fast) == pytest.approx(told(20, slow) / 5, rel=0.3)


def test_background_work_takes_nobodys_place_in_the_queue() -> None:
    clock, ends = VirtualClock(), Ends()
    runner = Timed(clock, StepTime())
    engine = engine_of(runner, ends, clock, max_waiting=2, max_waiting_tokens=12)
    hold(engine, runner)
    engine.submit(request("job0", priority=BATCH_PRIORITY))
    engine.submit(request("job1", priority=BATCH_PRIORITY))
    with pytest.raises(OverloadedError):
        engine.submit(request("job2", priority=BATCH_PRIORITY))
    engine.submit(request("a", 4))
    engine.submit(request("b", 8))
    with pytest.raises(OverloadedError):
        engine.submit(request("c", 1))
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_background_waiting, stats.queue_tokens) == (4, 2, 20)
    runner.release()
    ends.wait("held", "a", "b", "job0", "job1")
    engine.stop()


def test_background_work_makes_nobody_wait_longer_before_they_come_again() -> None:
    def told(num_jobs: int, priority: int) -> float:
        clock, ends = VirtualClock(), Ends()
        runner = Timed(clock, StepTime())
        engine = engine_of(runner, ends, clock, max_waiting=40)
        hold(engine, runner)
        for i in range(num_jobs):
            engine.submit(request(f"job{i}", 20, priority=BATCH_PRIORITY, max_tokens=10))
        for i in range(40):
            engine.submit(request(f"r{i}", 20, max_tokens=10))
        with pytest.raises(OverloadedError) as caught:
            engine.submit(request("one too many", priority=priority))
        if not priority:
            assert engine.retry_after_s() == caught.value.retry_after_s
        runner.release()
        engine.stop()
        return caught.value.retry_after_s

    assert told(20, 0) == told(0, 0) < told(20, BATCH_PRIORITY)


def test_who_can_no_longer_be_in_time_is_told_at_once() -> None:
    clock, ends = VirtualClock(), Ends()
    runner = Timed(clock, StepTime(fixed_ms=100.0, per_decode_ms=0.0, per_prefill_ms=0.0))
    engine = engine_of(runner, ends, clock, max_ttft_ms=450.0)
    hold(engine, runner)
    engine.submit(request("long", at_ms=0, max_tokens=8))
    engine.submit(request("waits in vain", at_ms=0))
    engine.submit(request("job", at_ms=0, priority=BATCH_PRIORITY))
    runner.release()
    ends.wait("held", "long", "waits in vain", "job")
    assert {name: u.finish_reason for name, u in ends.of.items()} == {
        "held": "length",
        "long": "length",
        "waits in vain": "shed",
        "job": "length",
    }
    assert ends.of["waits in vain"].t_scheduled_ns is None
    assert 300 <= ends.of["waits in vain"].t_ns / 1e6 <= 500, "not only when a slot was free"
    engine.stop()


def test_without_an_objective_nobody_is_given_up() -> None:
    clock, ends = VirtualClock(), Ends()
    runner = Timed(clock, StepTime(fixed_ms=1e6))
    runner.release()
    engine = engine_of(runner, ends, clock)
    names = [f"r{i}" for i in range(5)]
    for name in names:
        engine.submit(request(name))
    ends.wait(*names)
    assert {u.finish_reason for u in ends.of.values()} == {"length"}
    engine.stop()


@pytest.mark.parametrize("objective_ms", [None, 30.0])
def test_a_long_prompt_beside_decodes_keeps_to_the_objective(objective_ms: float | None) -> None:
    clock, ends = VirtualClock(), Ends()
    time = StepTime(fixed_ms=10.0, per_decode_ms=1.0, per_prefill_ms=0.5)
    runner = Timed(clock, time, context_length=2048, num_blocks=2048)
    engine = engine_of(
        runner, ends, clock, max_sequences=4, max_step_tokens=512, tpot_objective_ms=objective_ms, share_prefixes=False
    )
    for i in range(3):  # teaches the speed
        engine.submit(request(f"t{i}", 100 + 37 * i, max_tokens=40))
    runner.release()
    ends.wait("t0", "t1", "t2")
    num_before, runner.free = len(runner.steps), False
    engine.submit(request("decodes", max_tokens=600))
    engine.submit(request("long", 1500, max_tokens=1))
    runner.release()
    ends.wait("decodes", "long")
    engine.stop()
    beside = [time.predict(*step) for step in runner.steps[num_before:] if step[1] and step[0]]
    assert sum(step[0] for step in runner.steps[num_before:]) >= 1500
    if objective_ms is None:
        assert max(beside) > 200
    else:
        assert max(beside) <= objective_ms * 1.15
        assert sorted(beside)[len(beside) // 2] >= objective_ms * 0.85, "and makes use of it"


@pytest.mark.parametrize("moment", ["schedule", "commit"])
def test_who_was_given_up_while_a_step_went_on_is_told_once(moment: str, caplog: pytest.LogCaptureFixture) -> None:
    clock, ends = VirtualClock(), Ends()
    runner = Timed(clock, StepTime())
    runner.release()
    engine = Engine(runner, EngineConfig(), clock, ends)
    inner = getattr(engine._scheduler, moment)

    def outer(*args: object) -> object:
        engine.fail(EngineError("the device hangs"))
        return inner(*args)

    setattr(engine._scheduler, moment, outer)
    engine.start()
    engine.submit(request("a", max_tokens=1))
    ends.wait("a")
    engine._thread.join(PATIENCE_S)
    assert not engine._thread.is_alive()
    assert ends.of["a"].finish_reason == "error"
    assert not caplog.records, "nothing broke on top"


def test_a_device_that_hangs_does_not_hang_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, ends = VirtualClock(), Ends()
    runner = Timed(clock, StepTime())
    engine = engine_of(runner, ends, clock)
    hold(engine, runner)
    engine.submit(request("waits"))
    monkeypatch.setattr(loop, "STOP_TIMEOUT_S", 0.05)
    engine.stop()
    assert {name: u.finish_reason for name, u in ends.of.items()} == {"held": "error", "waits": "error"}
    assert "left behind" in caplog.text
    assert not engine.stats().alive
    with pytest.raises(EngineError):
        engine.submit(request("late"))
    caplog.clear()
    runner.release()  # the device comes back: nobody is told twice, nothing breaks
    engine._thread.join(PATIENCE_S)
    assert not engine._thread.is_alive()
    assert not caplog.records
    engine.stop()


def test_a_slow_spell_does_not_shut_everybody_out_for_good() -> None:
    """Who could start at once is never given up, so that the speed is measured again."""
    clock, ends = VirtualClock(), Ends()
    runner = Timed(clock, StepTime(fixed_ms=1000.0, per_decode_ms=0.0, per_prefill_ms=10.0))
    runner.release()
    engine = engine_of(runner, ends, clock, max_ttft_ms=500.0, share_prefixes=False)
    for i in range(5):  # nothing but long prompts, one after the other, all hopeless by what was measured
        engine.submit(request(f"slow{i}", 200, at_ms=clock.now_ns() // 10**6, max_tokens=1))
        ends.wait(f"slow{i}")
    runner.time = StepTime(fixed_ms=1.0, per_decode_ms=0.0, per_prefill_ms=0.01)
    for i in range(20):
        engine.submit(request(f"fast{i}", 200, at_ms=clock.now_ns() // 10**6, max_tokens=1))
        ends.wait(f"fast{i}")
    assert {update.finish_reason for update in ends.of.values()} == {"length"}
    engine.stop()
