"""The second tier of the prefix cache: host memory in front of a folder on disk, either of them alone, or both."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inferloop.core.clock import Clock
from inferloop.core.errors import EnvironmentLacksError, UsageError
from inferloop.core.units import MIB, human_bytes
from inferloop.engine.blockstore.disk import BlockDisk, DiskCounts
from inferloop.engine.blockstore.folder import BlockFolder
from inferloop.engine.blockstore.memory import BlockMemory
from inferloop.engine.blockstore.reader import RunReader
from inferloop.engine.schedule.keys import root_key
from inferloop.engine.schedule.step import BlockData
from inferloop.engine.stats import TierStats


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """`memory_bytes` and `disk_bytes` bound what is kept in host memory (0: nothing) and in `folder` (None: nothing).

    `max_queued_bytes`: what may wait to be written; blocks beyond it are dropped. `patience_s`: how long a request
    waits for its blocks to be read before it computes the rest.
    """

    memory_bytes: int = 0
    folder: Path | None = None
    disk_bytes: int = 4096 * MIB
    max_queued_bytes: int = 256 * MIB
    patience_s: float = 1.0


class BlockStore:
    """Implements schedule.tier.BlockTier for blocks of `block_bytes`. Used from one thread beside its own two.

    Blocks from disk are read by a thread while steps go on; blocks in memory are there at once.
    """

    def __init__(self, config: StoreConfig, *, identity: str, block_bytes: int, clock: Clock) -> None:
        """`identity`: everything that decides the content of blocks beside namespace and tokens. Stores of different
        identities may share a folder, and its size limit, without ever meeting.

        Raises UsageError for a limit below one block, EnvironmentLacksError when the folder cannot be made.
        """
        for what, limit in (("memory", config.memory_bytes), ("disk", config.disk_bytes if config.folder else 0)):
            if 0 < limit < block_bytes:
                raise UsageError(
                    f"{human_bytes(limit)} of {what} for the prefix cache hold no block of {human_bytes(block_bytes)}"
                )
        self.root = root_key(identity)
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._memory = BlockMemory(config.memory_bytes)
        """Guarded by _lock."""
        self._disk: BlockDisk | None = None
        if config.folder is not None:
            self._disk = BlockDisk(
                _open(config.folder),
                max_bytes=config.disk_bytes,
                max_queued_bytes=config.max_queued_bytes,
                clock=clock,
            )
        self._reader = RunReader(self._fetch, patience_s=config.patience_s, clock=clock) if self._disk else None
        self._loaded_bytes = self._saved_bytes = 0

    def load(self, keys: Sequence[bytes], *, wait: bool) -> tuple[BlockData, ...] | None:
        reading = self._reader is not None and self._reader.is_reading(keys)
        found = None if reading else self._in_memory(keys)
        if self._reader is not None and (found is None or (len(found) < len(keys) and self._on_disk(keys[len(found)]))):
            found = self._reader.read(keys, wait=wait)
        self._loaded_bytes += 0 if found is None else len(found) * self._block_bytes
        return found

    def num_held(self, keys: Sequence[bytes]) -> int:
        disk = self._disk
        with self._lock:
            held = (key in self._memory or (disk is not None and disk.knows(key)) for key in keys)
            return sum(itertools.takewhile(bool, held))

    def wants(self, key: bytes) -> bool:
        with self._lock:
            in_memory = self._memory.get(key) is not None
        return self._disk.wants(key) if self._disk is not None else not in_memory

    def save(self, key: bytes, data: BlockData) -> None:
        assert data.nbytes == self._block_bytes, "a block of another layout"
        with self._lock:
            self._memory.put(key, data)
        if self._disk is not None:
            self._disk.write(key, data)
        self._saved_bytes += data.nbytes

    def stats(self) -> TierStats:
        disk = self._disk.counts if self._disk is not None else DiskCounts()
        return TierStats(
            memory_bytes=self._memory.num_bytes,
            disk_bytes=disk.num_bytes,
            loaded_bytes=self._loaded_bytes,
            saved_bytes=self._saved_bytes if self._disk is None else disk.written_bytes,
            dropped_blocks=disk.dropped_blocks,
            damaged_blocks=disk.damaged_blocks,
            failures=disk.failures,
        )

    def close(self) -> None:
        """End the threads, after what is queued has been written. Idempotent."""
        if self._reader is not None:
            self._reader.close()
        if self._disk is not None:
            self._disk.close()

    def _in_memory(self, keys: Sequence[bytes]) -> tuple[BlockData, ...]:
        found: list[BlockData] = []
        with self._lock:
            for key in keys:
                data = self._memory.get(key)
                if data is None:
                    break
                found.append(data)
        return tuple(found)

    def _on_disk(self, key: bytes) -> bool:
        return self._disk is not None and self._disk.holds(key)

    def _fetch(self, key: bytes) -> BlockData | None:
        """On the reader's thread."""
        with self._lock:
            data = self._memory.get(key)
        if data is None and self._disk is not None:
            data = self._disk.read(key, self._block_bytes)
            if data is not None:
                with self._lock:
                    self._memory.put(key, data)
        return data


def _open(folder: Path) -> BlockFolder:
    try:
        return BlockFolder(folder)
    except OSError as problem:
        raise EnvironmentLacksError(
            f"the prefix cache cannot use the folder {folder}: {problem}", fix="Choose another --prefix-cache-dir."
        ) from problem
