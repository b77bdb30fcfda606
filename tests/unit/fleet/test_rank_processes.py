"""Processes of ranks: started, watched, gone with whoever started them. Scripts stand for ranks here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import psutil
import pytest
from tests.waiting import PATIENCE_S, wait_until

from inferloop.core.errors import LaunchError
from inferloop.engine.compute.torch.parallel.messages import Failed, encode
from inferloop.fleet.act.ranks import RankProcesses

WAITS = (sys.executable, "-c", "import sys; sys.stdin.buffer.read()")  # until its link closes, as ranks do
DEAF = (sys.executable, "-c", "import time; time.sleep(600)")


def wait_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))


@pytest.mark.parametrize("argv", [WAITS, DEAF], ids=["ends by itself", "has to be killed"])
def test_none_is_left_at_the_end(argv: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferloop.fleet.act.ranks._END_S", PATIENCE_S if argv is WAITS else 0.1)
    with RankProcesses(3, argv) as processes:
        processes.watch()
        assert len(set(processes.pids)) == 2 and all(map(psutil.pid_exists, processes.pids))
    wait_gone(processes.pids)
    assert not processes.ranks.lost.done()  # it was asked for


def test_a_killed_rank_is_told_with_its_number_and_pid() -> None:
    with RankProcesses(3, WAITS) as processes:
        processes.watch()
        os.kill(processes.pids[1], signal.SIGKILL)
        error = str(processes.ranks.lost.result(PATIENCE_S))
    assert error == f"rank 2 of 3 (pid {processes.pids[1]}) was killed by SIGKILL: this replica cannot go on"
    wait_gone(processes.pids)


def test_a_rank_that_can_still_speak_says_why() -> None:
    frame = encode(Failed("RuntimeError", "out of memory"))
    said = len(frame).to_bytes(4, "big") + frame
    script = f"import os, sys; os.read(0, 1); os.write(0, {said!r}); sys.exit(9)"
    with RankProcesses(2, (sys.executable, "-c", script)) as processes:
        processes.watch()
        processes.ranks.links[0].send(b"")
        error = str(processes.ranks.lost.result(PATIENCE_S))
    assert "ended with code 9 (RuntimeError: out of memory)" in error


def test_the_one_that_was_killed_is_named_and_not_those_that_it_took_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """They say of what they end. The second is killed while it is gathered who else has ended."""
    frame = encode(Failed("RuntimeError", "Connection closed by peer"))
    said = len(frame).to_bytes(4, "big") + frame
    script = f"import os, sys; os.read(0, 1); os.write(0, {said!r}); sys.exit(1)"
    with RankProcesses(3, (sys.executable, "-c", script)) as processes:
        guard = psutil.Process(psutil.Process(processes.pids[1]).ppid())

        class Gathering(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                os.kill(processes.pids[1], signal.SIGKILL)
                wait_until(lambda: guard.status() == psutil.STATUS_ZOMBIE)
                return False

        monkeypatch.setattr(processes, "_closing", Gathering())
        processes.watch()
        processes.ranks.links[0].send(b"")
        error = str(processes.ranks.lost.result(PATIENCE_S))
    assert error.startswith(f"rank 2 of 3 (pid {processes.pids[1]}) was killed by SIGKILL")


def test_a_program_that_does_not_start_leaves_none_behind() -> None:
    with RankProcesses(2, ("/no/such/program",)) as processes:
        processes.watch()
        assert "ended with code 127" in str(processes.ranks.lost.result(PATIENCE_S))
    with pytest.raises(LaunchError, match="rank 1 of 2 cannot be started"):
        RankProcesses(2, ("a\0b",))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_no_rank_survives_the_first_one(tmp_path: Path, signum: signal.Signals) -> None:
    script = f"""
        import time
        from inferloop.fleet.act.ranks import RankProcesses
        processes = RankProcesses(3, {DEAF!r})
        print(*processes.pids, flush=True)
        time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2
        owner.send_signal(signum)
    wait_gone(pids)
