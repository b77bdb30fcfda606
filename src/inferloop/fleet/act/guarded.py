"""The only place that starts engines: each below a guard (fleet/act/guard.py), which makes sure that nothing survives
the owner. A socket pair, the lifeline, connects owner and guard: the guard sees our end close, we see its end close."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

_GUARD = Path(__file__).with_name("guard.py")

_lifelines: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _let_go() -> None:
    for lifeline in list(_lifelines):
        lifeline.close()


os.register_at_fork(after_in_child=_let_go)  # a forked copy of the owner must not keep its engines alive


def start_guarded(
    argv: Sequence[str], *, env: Mapping[str, str], stdin: int, output: int
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The guard of a new engine, and our end of the lifeline, on which the engine's pid comes as a line.

    stdout and stderr both go to the file descriptor `output`. Closing the lifeline, or shutting down its sending side,
    kills the whole tree; the guard ends as the engine does. Raises OSError when no process can be started.
    """
    ours, theirs = socket.socketpair()
    _lifelines.add(ours)
    try:
        guard = subprocess.Popen(  # vfork + exec of a small program: about a millisecond
            [sys.executable, "-I", "-S", str(_GUARD), str(theirs.fileno()), "--", *argv],
            stdin=stdin,
            stdout=output,
            stderr=output,
            env=dict(env),
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # a Ctrl-C in the terminal is for the owner, which drains first
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return guard, ours
