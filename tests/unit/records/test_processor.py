"""What the system tells of processor and memory, and where it tells nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferloop.core.units import KIB, MIB
from inferloop.records.processor import Cache, caches, huge_pages


def write_cache(root: Path, cpu: int, index: int, **values: str) -> None:
    folder = root / f"cpu{cpu}" / "cache" / f"index{index}"
    folder.mkdir(parents=True)
    for name, value in values.items():
        (folder / name).write_text(value + "\n")


def test_caches_that_cores_share_count_once_and_instructions_do_not(tmp_path: Path) -> None:
    for cpu in (0, 1):
        write_cache(tmp_path, cpu, 0, level="1", type="Data", size="48K", shared_cpu_list=str(cpu))
        write_cache(tmp_path, cpu, 1, level="1", type="Instruction", size="32K", shared_cpu_list=str(cpu))
        write_cache(tmp_path, cpu, 2, level="2", type="Unified", size="1024K", shared_cpu_list=str(cpu))
        write_cache(tmp_path, cpu, 3, level="3", type="Unified", size="32M", shared_cpu_list="0-1")
    assert caches(tmp_path) == (Cache("L1d", 48 * KIB, 2), Cache("L2", MIB, 2), Cache("L3", 32 * MIB, 1))


def test_what_is_not_told_is_left_out(tmp_path: Path) -> None:
    write_cache(tmp_path, 0, 0, level="1", type="Data", size="", shared_cpu_list="0")
    write_cache(tmp_path, 0, 1, level="2", type="Unified")
    assert caches(tmp_path) == ()


@pytest.mark.parametrize(("text", "chosen"), [("always [madvise] never", "madvise"), ("[never]", "never"), ("", None)])
def test_huge_pages_are_the_word_in_brackets(tmp_path: Path, text: str, chosen: str | None) -> None:
    (tmp_path / "enabled").write_text(text)
    assert huge_pages(tmp_path / "enabled") == chosen
    assert huge_pages(tmp_path / "absent") is None
