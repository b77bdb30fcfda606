"""Senders go ahead of others where they may, and as they are where they may not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from inferloop.bench.client.priority import go_first, priority

KINDS = ("real-time", "nice -15", "normal")


class Kernel:
    """What a kernel allows: real-time priority, nice values below 0, or neither."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, realtime: bool, nice: bool, at: int = 0) -> None:
        self.policy, self.nice, self._may = os.SCHED_OTHER, at, (realtime, nice)
        monkeypatch.setattr(os, "sched_getscheduler", lambda _: self.policy)
        monkeypatch.setattr(os, "getpriority", lambda *_: self.nice)
        monkeypatch.setattr(os, "sched_setscheduler", self._schedule)
        monkeypatch.setattr(os, "setpriority", self._renice)

    def _schedule(self, _: int, policy: int, param: os.sched_param) -> None:
        if not self._may[0]:
            raise PermissionError
        self.policy = policy

    def _renice(self, which: int, who: int, value: int) -> None:
        if not self._may[1]:
            raise PermissionError
        self.nice = value


@pytest.mark.skipif(sys.platform != "linux", reason="the classes of Linux's scheduler")
@pytest.mark.parametrize(
    ("may", "becomes"), [((True, True), "real-time"), ((False, True), "nice -15"), ((False, False), "normal")]
)
def test_it_takes_the_best_it_may_have(monkeypatch: pytest.MonkeyPatch, may: tuple[bool, bool], becomes: str) -> None:
    Kernel(monkeypatch, realtime=may[0], nice=may[1])
    go_first()
    assert priority() == becomes


@pytest.mark.skipif(sys.platform != "linux", reason="the classes of Linux's scheduler")
def test_what_somebody_chose_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    Kernel(monkeypatch, realtime=True, nice=True, at=5)
    go_first()
    assert priority() == "nice 5"


def test_a_process_of_our_own_is_told_what_it_got() -> None:
    code = "from inferloop.bench.client.priority import *; go_first(); print(priority())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found in {*KINDS, priority()}
