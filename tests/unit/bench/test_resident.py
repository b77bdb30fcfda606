"""A target that takes time from the others while it is idle is seen and held still."""

from __future__ import annotations

import pytest

from inferloop.backends.endpoint import Endpoint
from inferloop.backends.http import HttpClient
from inferloop.bench.compare_side import Contender, Runner
from inferloop.bench.fresh_cache import FreshCache
from inferloop.bench.resident import at_rest, idle_share
from inferloop.bench.target import TargetInfo


class Processes:
    """Uses `per_look` seconds of processor time between two looks, while it runs; `looks_left` of them, or for ever."""

    def __init__(self, per_look: float, looks_left: int = 10**9) -> None:
        self.per_look, self.looks_left = per_look, looks_left
        self.used, self.running = 0.0, True

    def cpu_s(self) -> float:
        if self.running and self.looks_left > 0:
            self.used += self.per_look
            self.looks_left -= 1
        return self.used

    def suspend(self) -> None:
        self.running = False

    def resume(self) -> None:
        self.running = True

    def held(self) -> bool:
        return not self.running


async def test_idle_share_is_processor_time_over_time() -> None:
    assert await idle_share(Processes(0.0), 0.01) == 0.0
    assert await idle_share(Processes(10.0), 0.01) > 1.0


async def test_rest_is_waited_for_and_not_for_ever() -> None:
    assert await at_rest(Processes(10.0, looks_left=6), 60.0, look_s=0.01)
    assert not await at_rest(Processes(10.0), 0.05, look_s=0.01)


def runner(processes: Processes, rest_timeout_s: float = 0.0) -> Runner:
    at = Endpoint("http://127.0.0.1:1")
    info, fresh = TargetInfo(at, "m", None, None), FreshCache(HttpClient(at), None)
    return Runner("B", Contender("x", "http://127.0.0.1:1", process=processes), info, None, fresh, 0, rest_timeout_s)  # type: ignore[arg-type]


async def test_who_spins_is_held_still_between_its_turns() -> None:
    spinning = Processes(10.0)
    side = runner(spinning)
    await side.watch_idle()
    assert side.told()["suspended"] and spinning.held()
    assert "suspended while others are measured" in side.notes[0]
    async with side.turn():
        assert not spinning.held()
    assert spinning.held()
    with pytest.raises(KeyError):
        async with side.turn():
            raise KeyError
    assert spinning.held()


async def test_who_waits_is_left_alone_and_told_of_when_it_does_not_come_to_rest() -> None:
    waiting = Processes(0.0)
    side = runner(waiting)
    await side.watch_idle()
    assert side.told()["idle_cpu"] == 0.0 and not side.told()["suspended"]
    async with side.turn():
        waiting.per_look = 10.0  # a backlog that nobody waits for any more
    assert not waiting.held() and "still computed 0 s after a window" in side.notes[0]
