"""A busy machine is told, a quiet one is not."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from inferloop.backends.endpoint import Endpoint
from inferloop.bench.host import OtherWork, _worked_s, busy_note, busy_percent, others_note


def test_only_a_busy_machine_is_told() -> None:
    assert busy_note(3.0) is None
    note = busy_note(85.2)
    assert note is not None
    assert "85 % busy" in note


async def test_it_is_a_percentage() -> None:
    assert 0.0 <= await busy_percent() <= 100.0


def test_only_much_other_work_is_told() -> None:
    assert others_note(None) is None and others_note(4.0) is None
    assert others_note(37.4) == "other programs kept this machine 37 % busy meanwhile"


def test_what_our_processes_work_is_not_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 s on 4 processors: 5 s of work, of which 3 are ours."""
    seen = iter([(10.0, 100.0, 1.0), (12.0, 105.0, 4.0), (13.0, 106.0, 9.0)])
    others = OtherWork([])
    monkeypatch.setattr(others, "_seen", lambda: next(seen))
    monkeypatch.setattr("inferloop.bench.host.psutil.cpu_count", lambda: 4)
    others.begin()
    assert others.percent() == 25.0
    assert others.percent() == 0.0, "clocks of two kinds: never less than nothing"


def test_work_of_a_child_that_has_ended_is_still_ours() -> None:
    ours = psutil.Process()
    before_s = sum(_worked_s([ours]))
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert sum(_worked_s([ours])) - before_s >= 0.45, "a few ticks of the kernel's 10 ms are rounded off"


def test_a_target_of_this_machine_is_found_by_its_port() -> None:
    listen = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", listen], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        others = OtherWork([Endpoint(f"http://127.0.0.1:{port}"), Endpoint("http://192.0.2.1:80")])
        others.begin()
        assert {p.pid for p in others._roots() or []} == {os.getpid(), server.pid}
        assert others.percent() is not None
        server.communicate("\n")
    others.begin()
    assert others.percent() is None, "whoever serves there cannot be told from the others"
