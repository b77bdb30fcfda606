"""Memory to be read without the native extension, and what the system says of such memory."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np

from inferloop.core.units import KIB

_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ")


class NumpyArena:
    """Read by looking for the largest 32-bit number, the fastest that numpy has and one that releases the GIL."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._numbers = np.ones(num_bytes // 4, np.int32)
        self.address = self._numbers.ctypes.data
        self._threads = ThreadPoolExecutor(thread_name_prefix="read")

    def seconds(self, num_bytes: int, num_threads: int, num_passes: int) -> float:
        part = num_bytes // 4 // num_threads

        def read(rank: int) -> None:
            for _ in range(num_passes):
                self._numbers[rank * part : (rank + 1) * part].max()

        begin = time.perf_counter()
        others = [self._threads.submit(read, rank) for rank in range(1, num_threads)]
        read(0)
        wait(others)
        return time.perf_counter() - begin


def huge_page_bytes(address: int, num_bytes: int, table: Path = Path("/proc/self/smaps")) -> int | None:
    """How much of the mappings that lie within these addresses is in huge pages; None where that is not told."""
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return None
    found, inside = 0, False
    for line in lines:
        if mapping := _MAPPING.match(line):
            begin, end = (int(edge, 16) for edge in mapping.groups())
            inside = begin < address + num_bytes and end > address
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) * KIB
    return min(found, num_bytes)
