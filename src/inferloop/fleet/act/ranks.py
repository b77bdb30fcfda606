"""The processes that compute beside a replica's own: one for each rank but the first, each below a guard."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from inferloop.core.errors import EngineError, LaunchError
from inferloop.engine.compute.torch.parallel.link import Link
from inferloop.engine.compute.torch.parallel.ranks import Ranks
from inferloop.fleet.act.guarded import start_guarded

_ARGV = (sys.executable, "-m", "inferloop.engine.compute.torch.parallel.worker")
_END_S = 5.0
_GATHER_S = 0.2
_STDERR = 2


class RankProcesses:
    """Started when made; gone at the end of the `with` block, and when this process dies, however that happens."""

    def __init__(self, size: int, argv: Sequence[str] = _ARGV) -> None:
        """`size` counts this process, the first rank. Raises LaunchError."""
        pairs = [socket.socketpair() for _ in range(1, size)]
        self.ranks = Ranks([Link(ours) for ours, _ in pairs])
        self.pids: list[int] = []
        self._guards: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        self._closing = threading.Event()
        try:
            for _, theirs in pairs:
                # Its stdout too goes to our stderr: our stdout may be a pipe that somebody reads a port from.
                guard, lifeline = start_guarded(argv, env=os.environ, stdin=theirs.fileno(), output=_STDERR)
                self._guards.append((guard, lifeline))
                self.pids.append(int(lifeline.recv(32)))
        except BaseException as problem:
            self.close()
            if isinstance(problem, OSError | ValueError):
                who = f"rank {len(self.pids) + 1} of {size}"
                raise LaunchError(f"{who} cannot be started: {problem}") from problem
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        self.close(_END_S if error is None else 0.0)

    def watch(self) -> None:
        """From now on a rank that ends is told to `ranks.lost`. Nobody else may read from the ranks any more."""
        threading.Thread(target=self._watch, name="inferloop-ranks", daemon=True).start()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, (_, lifeline) in enumerate(self._guards, 1):
                selector.register(lifeline, selectors.EVENT_READ, rank)
            selector.select()
            # A rank that dies takes others with it, whose broken connections are not the reason.
            self._closing.wait(_GATHER_S)
            ended = [key.data for key, _ in selector.select()]
        if self._closing.is_set():
            return
        codes = {rank: self._guards[rank - 1][0].wait() for rank in ended}
        said = {rank: self.ranks.last_word(rank) for rank in ended}
        rank = min(ended, key=lambda rank: (said[rank] is not None, rank))
        how = _how(codes[rank]) + (f" ({said[rank]})" if said[rank] else "")
        who = f"rank {rank} of {self.ranks.size} (pid {self.pids[rank - 1]})"
        self.ranks.lose(EngineError(f"{who} {how}: this replica cannot go on"))

    def close(self, grace_s: float = 0.0) -> None:
        """Idempotent. Ranks that are waiting for a step end by themselves, others are killed after `grace_s`."""
        self._closing.set()
        self.ranks.close()
        for guard, lifeline in self._guards:
            with contextlib.suppress(subprocess.TimeoutExpired):
                guard.wait(0.0 if self.ranks.lost.done() else grace_s)
            with contextlib.suppress(OSError):
                lifeline.shutdown(socket.SHUT_WR)  # kills the tree, if there still is one
            guard.wait()
            lifeline.close()


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
