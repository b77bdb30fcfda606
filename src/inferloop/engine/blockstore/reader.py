"""Runs of blocks brought in from disk by a thread of its own, while steps go on."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from inferloop.core.clock import Clock
from inferloop.engine.schedule.step import BlockData

_log = logging.getLogger(__name__)


class _Run:
    """Blocks that follow each other; `found` grows from the thread, and only there."""

    def __init__(self, keys: Sequence[bytes], started_ns: int) -> None:
        self.keys = tuple(keys)
        self.started_ns = started_ns
        self.found: list[BlockData] = []
        self.done = threading.Event()
        self.abandoned = False


class RunReader:
    """One run at a time is of interest: that of the sequence which may enter next.

    `fetch` gives one block or None. Whatever it raises ends the run there.
    """

    def __init__(self, fetch: Callable[[bytes], BlockData | None], *, patience_s: float, clock: Clock) -> None:
        self._fetch, self._clock = fetch, clock
        self._patience_s = patience_s
        self._run: _Run | None = None
        self._inbox: queue.SimpleQueue[_Run | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read_all, name="inferloop-kv-reader", daemon=True)
        self._thread.start()

    def is_reading(self, keys: Sequence[bytes]) -> bool:
        """Whether `read` was asked for these keys last, and has not answered."""
        return self._run is not None and self._run.keys == tuple(keys)

    def read(self, keys: Sequence[bytes], *, wait: bool) -> tuple[BlockData, ...] | None:
        """The blocks from the first key on that were found, None: not yet. Other keys than before end that run.

        No run is waited for longer than the patience, counted from its first call; then what has come by then is all.
        """
        run = self._run
        if run is None or run.keys != tuple(keys):
            self.abandon()
            run = self._run = _Run(keys, self._clock.now_ns())
            self._inbox.put(run)
        waited_s = (self._clock.now_ns() - run.started_ns) / 1e9
        left_s = self._patience_s - waited_s
        if not run.done.wait(max(0.0, left_s) if wait else 0.0) and not wait and left_s > 0:
            return None
        self.abandon()
        return tuple(run.found)

    def abandon(self) -> None:
        """Nobody is interested in the run any more."""
        if self._run is not None:
            self._run.abandoned = True
            self._run = None

    def close(self) -> None:
        """Idempotent. A read that hangs is left behind."""
        self.abandon()
        self._inbox.put(None)
        self._thread.join(1.0)

    def _read_all(self) -> None:
        while (run := self._inbox.get()) is not None:
            try:
                for key in run.keys:
                    data = None if run.abandoned else self._fetch(key)
                    if data is None:
                        break
                    run.found.append(data)
            except Exception:
                _log.exception("reading blocks of the prefix cache failed")
            finally:
                run.done.set()
