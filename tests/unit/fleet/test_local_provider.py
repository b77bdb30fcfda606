from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from inferloop.fleet.act.providers.local import _cgroup_left, machine_capacity


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory_dot_max": "1000", "memory_dot_current": "400"}, 600),
        ({"memory_dot_max": "1000", "memory_dot_current": "1400"}, 0),
        ({"memory__memory_dot_limit_in_bytes": "500", "memory__memory_dot_usage_in_bytes": "100"}, 400),
    ],
)
def test_the_control_groups_limit_counts(tmp_path: Path, files: dict[str, str], left: int) -> None:
    assert _cgroup_left(write(tmp_path, **files)) == left


@pytest.mark.parametrize(
    "files",
    [{}, {"memory_dot_max": "max", "memory_dot_current": "1"}, {"memory_dot_max": "?", "memory_dot_current": "1"}],
)
def test_without_a_limit_the_machine_is_the_limit(tmp_path: Path, files: dict[str, str]) -> None:
    assert _cgroup_left(write(tmp_path, **files)) > 1 << 60


def test_capacity_is_within_the_machine() -> None:
    capacity = machine_capacity()
    assert 0 < capacity.memory_bytes <= psutil.virtual_memory().total
    assert 1 <= capacity.num_cores <= (psutil.cpu_count() or 1)
