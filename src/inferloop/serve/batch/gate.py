"""How many choices of batch rows are in the engine at once."""

from __future__ import annotations

import asyncio


class Gate:
    """Room for `places` choices; a row that wants more than all of them comes in alone. One task enters at a time."""

    def __init__(self, places: int) -> None:
        assert places >= 1, "a gate nobody passes"
        self.places = places
        self.num_inside = 0
        self._left = asyncio.Event()

    async def enter(self, num: int) -> None:
        """Waits for room. Cancelled, nothing was taken."""
        while self.num_inside and self.num_inside + num > self.places:
            self._left.clear()
            await self._left.wait()
        self.num_inside += num

    def leave(self, num: int) -> None:
        self.num_inside -= num
        self._left.set()
