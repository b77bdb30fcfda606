from __future__ import annotations

import asyncio

import pytest
from tests.unit.fleet.stubs import Asked, MakeStub, Talk
from tests.waiting import PATIENCE_S

from inferloop.fleet.act.probe import Prober
from inferloop.fleet.decide.life import NotReady, ProbeFailed, Progress, Ready

PROGRESS = b'{"alive": true, "step_counter": 7, "running": 2, "waiting": 3, "in_flight": 5}'


@pytest.mark.parametrize(
    ("ready", "progress", "expected"),
    [
        (200, PROGRESS, [Ready(), Progress(7, 5)]),
        (503, PROGRESS, [NotReady("/health/ready answered 503: b'{}'"), Progress(7, 5)]),
        (200, PROGRESS.replace(b"true", b"false"), [Ready(), Progress(7, 5, alive=False)]),
    ],
)
async def test_answers_become_events(make_stub: MakeStub, ready: int, progress: bytes, expected: list[object]) -> None:
    async def handle(asked: Asked, talk: Talk) -> None:
        is_ready = asked.target == "/health/ready"
        await talk.json(ready if is_ready else 200, b"{}" if is_ready else progress)

    stub = await make_stub(handle)
    prober = Prober(stub.url, ready_path="/health/ready", timeout_s=PATIENCE_S, num_bytes=lambda: 0)
    assert await prober.probe() == expected
    await prober.close()


async def test_an_engine_without_progress_is_judged_by_what_it_has(make_stub: MakeStub) -> None:
    async def handle(asked: Asked, talk: Talk) -> None:
        await talk.json(200 if asked.target == "/health" else 404, b"{}")

    stub = await make_stub(handle)
    prober = Prober(stub.url, ready_path="/health", timeout_s=PATIENCE_S, num_bytes=lambda: 0)
    assert await prober.probe() == [Ready()] == await prober.probe()
    assert [asked.target for asked in stub.asked] == ["/health", "/health/progress", "/health"], "asked for it once"
    await prober.close()


@pytest.mark.parametrize("garbage", [b"not json", b"{}", b'{"step_counter": null, "running": 1, "waiting": 0}'])
async def test_garbage_is_a_failed_probe_not_a_crash(make_stub: MakeStub, garbage: bytes) -> None:
    async def handle(asked: Asked, talk: Talk) -> None:
        await talk.json(200, garbage)

    stub = await make_stub(handle)
    prober = Prober(stub.url, ready_path="/health/ready", timeout_s=PATIENCE_S, num_bytes=lambda: 0)
    ready, failed = await prober.probe()
    assert ready == Ready() and isinstance(failed, ProbeFailed) and "not understood" in failed.why
    await prober.close()


async def test_a_late_answer_of_a_busy_replica_comes_after_its_tokens(make_stub: MakeStub) -> None:
    async def late(asked: Asked, talk: Talk) -> None:
        await asyncio.sleep(15)

    stub = await make_stub(late)
    num_bytes = 0
    prober = Prober(stub.url, ready_path="/health/ready", timeout_s=0.05, num_bytes=lambda: num_bytes)
    num_bytes = 100
    first, second = await prober.probe()
    assert first == Progress(relayed=True) and isinstance(second, ProbeFailed)
    assert len(await prober.probe()) == 1, "no new bytes, no sign of work"
    await prober.close()
