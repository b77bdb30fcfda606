"""Blocks in host memory, the least recently used forgotten first."""

from __future__ import annotations

from collections import OrderedDict

from inferloop.engine.schedule.step import BlockData


class BlockMemory:
    """At most `max_bytes` of content; 0 keeps nothing. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._blocks: OrderedDict[bytes, BlockData] = OrderedDict()
        self.num_bytes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def get(self, key: bytes) -> BlockData | None:
        """The content, which is thereby used now."""
        data = self._blocks.get(key)
        if data is not None:
            self._blocks.move_to_end(key)
        return data

    def put(self, key: bytes, data: BlockData) -> None:
        """Keep a block, unless it alone is larger than all that may be kept."""
        if data.nbytes > self._max_bytes:
            return
        old = self._blocks.pop(key, None)
        self.num_bytes += data.nbytes - (0 if old is None else old.nbytes)
        self._blocks[key] = data
        while self.num_bytes > self._max_bytes:
            _, forgotten = self._blocks.popitem(last=False)
            self.num_bytes -= forgotten.nbytes
