"""The processor and its caches as the system describes them (Linux: /proc/cpuinfo, /sys)."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path

from inferloop.core.units import KIB, MIB

_UNITS = {"K": KIB, "M": MIB}
_KINDS = {"Data": "d", "Instruction": "i", "Unified": ""}


@dataclass(frozen=True, slots=True)
class Cache:
    """`name` like L1d or L3; `count` of them, `size_bytes` each."""

    name: str
    size_bytes: int
    count: int


def model_and_flags() -> tuple[str, frozenset[str]]:
    """Its name and what it says of its instructions."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or "unknown", frozenset()
    model = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    name = model.group(1).strip() if model else platform.processor() or platform.machine()
    return name, frozenset(flags.group(1).split()) if flags else frozenset()


def caches(root: Path = Path("/sys/devices/system/cpu")) -> tuple[Cache, ...]:
    """Those that hold data, from the first level up; empty where the system does not tell. Caches that several cores
    share are counted once."""
    found: dict[tuple[str, int], set[str]] = {}
    for folder in root.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level, kind, size, shared_by = (
                (folder / name).read_text().strip() for name in ("level", "type", "size", "shared_cpu_list")
            )
            num_bytes = int(size[:-1]) * _UNITS[size[-1]]
            name = f"L{int(level)}{_KINDS[kind]}"
        except (OSError, ValueError, KeyError, IndexError):
            continue
        if not name.endswith("i"):
            found.setdefault((name, num_bytes), set()).add(shared_by)
    return tuple(Cache(name, size, len(those)) for (name, size), those in sorted(found.items()))


def huge_pages(setting: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> str | None:
    """When the kernel backs memory with huge pages unasked: always, when asked (madvise), never; None: it has none."""
    try:
        chosen = re.search(r"\[(\w+)\]", setting.read_text())
    except OSError:
        return None
    return chosen.group(1) if chosen else None
