"""A folder of blocks with a size limit, written by a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from inferloop.core.clock import Clock
from inferloop.engine.blockstore.folder import BlockFolder, DamagedBlockError, Entry
from inferloop.engine.schedule.step import BlockData

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_SWEEP_AFTER_SHARE = 0.1
"""Of the limit, written since the last look at the folder. What several processes write between two looks comes on top
of the limit, so it is kept small."""
_TOUCH_AGAIN_AFTER_S = 60.0
_TELL_AGAIN_AFTER_S = 60.0
_CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class DiskCounts:
    num_bytes: int = 0
    written_bytes: int = 0
    dropped_blocks: int = 0
    damaged_blocks: int = 0
    failures: int = 0


class BlockDisk:
    """Writes in the background, forgets the least recently used files of the folder, whoever wrote them.

    Thread-safe; only `read` and `close` wait for the disk. Nothing raises: a disk that is full, slow or broken makes
    blocks be missed. That is counted, and told once in a while.
    """

    def __init__(self, folder: BlockFolder, *, max_bytes: int, max_queued_bytes: int, clock: Clock) -> None:
        self._folder, self._clock = folder, clock
        self._max_bytes, self._max_queued_bytes = max_bytes, max_queued_bytes
        self._changed = threading.Condition()
        # Guarded by _changed.
        self._queue: deque[bytes] = deque()
        """What to write, or to mark as used."""
        self._unwritten: dict[bytes, BlockData] = {}
        self._unwritten_bytes = 0
        self._known: dict[bytes, float] = {}
        """What is on disk or will be, as far as this process knows, and when it last was marked as used (seconds)."""
        self._counts = DiskCounts()
        self._told_s = float("-inf")
        self._closing = False
        # The writer's own.
        self._written_since_sweep = 0
        self._thread = threading.Thread(target=self._write_all, name="inferloop-kv-writer", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> DiskCounts:
        with self._changed:
            return self._counts

    def knows(self, key: bytes) -> bool:
        """Whether the block is there, as far as this process knows."""
        with self._changed:
            return key in self._known

    def holds(self, key: bytes) -> bool:
        """Whether the block seems to be there: known, or written by somebody else meanwhile."""
        return self.knows(key) or bool(self._guard(lambda: self._folder.holds(key)))

    def wants(self, key: bytes) -> bool:
        """False: it is there, and marked as used; or the disk is behind, which is counted."""
        now_s = self._now_s()
        with self._changed:
            used_s = self._known.get(key)
            if used_s is not None:
                if now_s - used_s > _TOUCH_AGAIN_AFTER_S:
                    self._known[key] = now_s
                    self._queue.append(key)
                    self._changed.notify_all()
                return False
            if self._unwritten_bytes >= self._max_queued_bytes or self._closing:
                self._count(dropped_blocks=1)
                return False
        return True

    def write(self, key: bytes, data: BlockData) -> None:
        """Soon. Until then it is read from here."""
        with self._changed:
            if key in self._unwritten:
                return
            self._known[key] = self._now_s()
            self._queue.append(key)
            self._unwritten[key] = data
            self._unwritten_bytes += data.nbytes
            self._changed.notify_all()

    def read(self, key: bytes, num_bytes: int) -> BlockData | None:
        """Now. None: not there, not readable, or not what it should be."""
        with self._changed:
            unwritten = self._unwritten.get(key)
        if unwritten is not None:
            return unwritten
        data = self._guard(lambda: self._folder.read(key, num_bytes))
        with self._changed:
            if data is not None:
                self._known[key] = self._now_s()
            elif key not in self._unwritten:  # it may have been saved again since
                self._known.pop(key, None)
        return data

    def close(self) -> None:
        """Write what is queued, as far as that goes in some seconds. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _write_all(self) -> None:
        self._guard(self._sweep)
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                key = self._queue.popleft()
                data = self._unwritten.get(key)
            if data is None:
                self._guard(lambda key=key: self._folder.touch(key))  # type: ignore[misc]
            else:
                self._write(key, data)

    def _write(self, key: bytes, data: BlockData) -> None:
        num_bytes = self._guard(lambda: self._folder.write(key, data))
        with self._changed:
            self._unwritten_bytes -= self._unwritten.pop(key).nbytes
            if num_bytes is None:
                self._known.pop(key, None)
                return
            self._count(num_bytes=num_bytes, written_bytes=data.nbytes)
        self._written_since_sweep += num_bytes
        if self._written_since_sweep >= self._max_bytes * _SWEEP_AFTER_SHARE:
            self._guard(self._sweep)

    def _sweep(self) -> None:
        """See what is there, and remove the longest unused until the next share fits too."""
        entries = sorted(self._folder.entries(self._clock.wall_ns() / 1e9), key=lambda entry: entry.used_s)
        total = sum(entry.num_bytes for entry in entries)
        target = self._max_bytes * (1 - _SWEEP_AFTER_SHARE)
        kept: list[Entry] = []
        for entry in entries:
            if total > target and self._guard(lambda entry=entry: _removed(entry)):  # type: ignore[misc]
                total -= entry.num_bytes
            else:  # also what cannot be removed: others make room for it
                kept.append(entry)
        self._written_since_sweep = 0
        self._learn(kept, total)

    def _learn(self, entries: list[Entry], total: int) -> None:
        with self._changed:
            before = self._known
            self._known = {entry.key: before.get(entry.key, float("-inf")) for entry in entries}
            self._known.update((key, before[key]) for key in self._unwritten)
            self._count(num_bytes=total - self._counts.num_bytes)

    def _count(self, **changes: int) -> None:
        """Caller holds the lock."""
        counts = self._counts
        self._counts = DiskCounts(
            **{name: getattr(counts, name) + changes.get(name, 0) for name in DiskCounts.__dataclass_fields__}
        )

    def _guard(self, action: Callable[[], _T]) -> _T | None:
        """The result, or None when that is impossible."""
        try:
            return action()
        except DamagedBlockError as problem:
            self._tell("a block of the prefix cache was damaged, and is computed again: %s", problem, damaged_blocks=1)
        except OSError as problem:
            self._tell("the prefix cache on disk fails, serving goes on without: %s", problem, failures=1)
        return None

    def _tell(self, text: str, problem: Exception, **changes: int) -> None:
        with self._changed:
            self._count(**changes)
            now_s = self._now_s()
            if now_s - self._told_s < _TELL_AGAIN_AFTER_S:
                return
            self._told_s = now_s
        _log.warning(text, problem)

    def _now_s(self) -> float:
        return self._clock.now_ns() / 1e9


def _removed(entry: Entry) -> bool:
    entry.path.unlink(missing_ok=True)
    return True
