"""Runs one engine as its child, and takes the whole tree down when the owner is gone. Standard library only.

Started by fleet.act.process as `python -I -S guard.py FD -- ARGV...`. FD is one end of a socket pair; the owner holds
the other end. The kernel closes the owner's end however the owner dies (kill -9, a crash, the OOM killer), and that
end of file is the order to kill. Why a process and not PR_SET_PDEATHSIG in the owner: that signal follows the *thread*
that forked, so it misfires under thread pools; it needs preexec_fn, which is unsafe beside threads; and it reaches
only the direct child. The guard is single-threaded, so towards its own child the signal is right and used as well:
it covers the case that the guard itself is killed.

The guard is a subreaper: whatever the engine forks, daemonized or not, stays below the guard and can be found.
SIGTERM and SIGINT are passed on to the engine alone; how its workers stop is the engine's affair. Once the engine has
exited, what it left behind is killed, and the guard ends the way the engine did (same code, same signal).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_EXIT_CANNOT_EXECUTE = 127


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _descendants() -> list[int]:
    """Pids of every process below this one, from /proc. A process that ends meanwhile is skipped."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _reap(engine: int) -> int | None:
    """Collect everything that has ended; the engine's wait status if it is among them."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == engine:
            status = ended


def _kill_all(engine: int) -> int | None:
    """SIGKILL everything below until nothing is left (a fork may win one race, not all; to give much memory back takes
    seconds); the engine's wait status."""
    status = None
    for _ in range(800):
        pids = _descendants()
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        ended = _reap(engine)
        status = ended if ended is not None else status
    return status


def _become_engine(guard_pid: int, argv: list[str]) -> None:
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard_pid:
            os._exit(_EXIT_CANNOT_EXECUTE)  # the guard died before the death signal was armed
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"cannot execute {argv[0]}: {error}", file=sys.stderr, flush=True)
    os._exit(_EXIT_CANNOT_EXECUTE)


def _end_like(status: int) -> None:
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the engine has left its own core dump; no second one
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def main() -> None:
    owner = int(sys.argv[1])
    argv = sys.argv[3:]
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for handled in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(handled, lambda *_: None)
    guard_pid = os.getpid()
    engine = os.fork()
    if engine == 0:
        os.close(owner)
        _become_engine(guard_pid, argv)
    with contextlib.suppress(BrokenPipeError):  # the owner has gone already, which the select below notices
        os.write(owner, f"{engine}\n".encode())

    status: int | None = None
    while status is None:
        readable, _, _ = select.select([owner, wake_read], [], [])
        if owner in readable and not os.read(owner, 64):
            status = _kill_all(engine)
            break
        if wake_read in readable:
            for number in os.read(wake_read, 64):
                if number in (signal.SIGTERM, signal.SIGINT):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(engine, number)
            status = _reap(engine)
    _kill_all(engine)
    _end_like(signal.SIGKILL if status is None else status)


if __name__ == "__main__":
    main()
