"""Blocks in memory and on disk: what was saved comes back or is missed, whatever happens to disk and files."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.waiting import PATIENCE_S, wait_until

from inferloop.core.clock import RealClock, VirtualClock
from inferloop.core.errors import EnvironmentLacksError, UsageError
from inferloop.engine.blockstore.disk import BlockDisk
from inferloop.engine.blockstore.folder import BlockFolder, DamagedBlockError
from inferloop.engine.blockstore.memory import BlockMemory
from inferloop.engine.blockstore.reader import RunReader
from inferloop.engine.blockstore.store import BlockStore, StoreConfig
from inferloop.engine.schedule.keys import block_key, root_key
from inferloop.engine.schedule.step import BlockData

SIZE = 1000
Open = Callable[..., BlockStore]


def key(number: int) -> bytes:
    return block_key(root_key("test"), [number])


def data(number: int) -> BlockData:
    return np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def total_size(folder: Path) -> int:
    total = 0
    for path in files(folder):
        with contextlib.suppress(FileNotFoundError):  # files come and go
            total += path.stat().st_size
    return total


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Open]:
    opened: list[BlockStore] = []

    def opener(identity: str = "test", **config: object) -> BlockStore:
        chosen = replace(StoreConfig(folder=tmp_path, patience_s=30.0), **config)  # type: ignore[arg-type]
        opened.append(BlockStore(chosen, identity=identity, block_bytes=SIZE, clock=RealClock()))
        return opened[-1]

    yield opener
    for store in opened:
        store.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("inferloop-kv")]


def load(store: BlockStore, *numbers: int) -> list[bytes]:
    found = store.load([key(n) for n in numbers], wait=True)
    assert found is not None
    return [block.tobytes() for block in found]


def content(*numbers: int) -> list[bytes]:
    return [data(n).tobytes() for n in numbers]


@pytest.mark.parametrize("config", [{"folder": None, "memory_bytes": 10 * SIZE}, {}, {"memory_bytes": 2 * SIZE}])
def test_the_longest_run_from_the_first_block_on_comes_back(config: dict[str, object], open_store: Open) -> None:
    store = open_store(**config)
    for n in (0, 1, 2, 4):
        assert store.wants(key(n))
        store.save(key(n), data(n))
        assert not store.wants(key(n))
    if config.get("folder", ...) is ...:
        store._disk.close()  # type: ignore[union-attr]  # everything is written
    assert load(store, 0, 1, 2, 3, 4) == content(0, 1, 2)
    assert store.num_held([key(n) for n in range(5)]) == 3
    assert store.num_held([key(3), key(4)]) == 0
    assert load(store, 3, 4) == []
    assert load(store, 4) == content(4)
    assert store.stats().loaded_bytes == 4 * SIZE
    assert store.stats().saved_bytes == 4 * SIZE


def test_blocks_survive_the_process_that_saved_them(open_store: Open) -> None:
    first = open_store()
    for n in range(3):
        first.save(key(n), data(n))
    first.close()
    assert load(open_store(), 0, 1, 2) == content(0, 1, 2)


def test_two_stores_see_what_the_other_saves(open_store: Open, tmp_path: Path) -> None:
    one, other = open_store(), open_store()
    assert load(one, 0) == []
    other.save(key(0), data(0))
    other.close()
    assert load(one, 0) == content(0)
    assert not one.wants(key(0))
    assert len(files(tmp_path)) == 1


def test_reading_goes_on_beside_the_one_who_asks(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_store()
    first.save(key(0), data(0))
    first.close()
    store, gate = open_store(), threading.Event()
    read = BlockFolder.read
    monkeypatch.setattr(BlockFolder, "read", lambda *args: gate.wait(PATIENCE_S) and read(*args))
    assert store.load([key(0)], wait=False) is None
    assert store.load([key(0)], wait=False) is None
    gate.set()
    found = None
    while found is None:
        found = store.load([key(0)], wait=False)
    assert [block.tobytes() for block in found] == content(0)
    assert store.load([key(1)], wait=False) == ()  # nothing to read, so nobody waits


def damage_flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def damage_header(path: Path) -> None:
    path.write_bytes(b"GGUF" + path.read_bytes()[4:])


def damage_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def damage_other_block(path: Path) -> None:
    """The whole and sound file of another block under this name."""
    other = path.parent / "other"
    folder = BlockFolder(other)
    folder.write(key(7), data(7))
    path.write_bytes(files(other)[0].read_bytes())
    files(other)[0].unlink()


@pytest.mark.parametrize(
    "damage", [damage_flip, damage_header, damage_cut, damage_empty, damage_longer, damage_other_block]
)
def test_a_damaged_file_is_a_miss_and_is_removed(
    damage: Callable[[Path], None], open_store: Open, tmp_path: Path
) -> None:
    first = open_store()
    first.save(key(0), data(0))
    first.close()
    (path,) = files(tmp_path)
    damage(path)
    store = open_store()
    assert load(store, 0) == []
    assert not path.exists()
    assert store.stats().damaged_blocks == 1
    assert store.wants(key(0))
    store.save(key(0), data(0))
    store.close()
    assert load(open_store(), 0) == content(0)


def test_a_block_of_another_size_is_damaged_too(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path)
    folder.write(key(0), data(0))
    with pytest.raises(DamagedBlockError):
        folder.read(key(0), SIZE - 1)


def test_files_that_are_not_ours_are_left_alone(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    store.save(key(0), data(0))
    store.close()
    folder = files(tmp_path)[0].parent
    for name in ("notes.txt", "ab.kv", "zz" * 32 + ".kv"):
        (folder / name).write_text("mine")
    (folder.parent / "readme").write_text("mine")
    open_store(disk_bytes=SIZE).close()  # must remove all it can
    assert sorted(path.name for path in folder.iterdir()) == sorted(["notes.txt", "ab.kv", "zz" * 32 + ".kv"])


def test_what_a_killed_writer_left_goes_away_and_what_a_live_one_writes_stays(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path)
    folder.write(key(0), data(0))
    part = files(tmp_path)[0].parent
    old, new = part / ".x-1-0.tmp", part / ".x-2-0.tmp"
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (1, 1))
    assert [entry.key for entry in folder.entries(time.time())] == [key(0)]
    assert not old.exists() and new.exists()


WRITER = """
import sys
import numpy as np
from pathlib import Path
from inferloop.engine.blockstore.folder import BlockFolder
from inferloop.engine.schedule.keys import block_key, root_key
folder, number = BlockFolder(Path(sys.argv[1])), 0
while True:
    folder.write(block_key(root_key("test"), [number]), np.full(300_000, number % 251, np.uint8))
    number += 1
"""


def test_a_kill_leaves_whole_blocks_only(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)])
    try:
        while len(files(tmp_path)) < 30:
            assert writer.poll() is None
            time.sleep(0.005)
    finally:
        writer.kill()
        writer.wait()
    folder, num = BlockFolder(tmp_path), len(files(tmp_path))
    for n in range(num):
        found = folder.read(key(n), 300_000)
        assert found is not None and (found == n % 251).all()
    assert folder.read(key(num), 300_000) is None


def test_the_least_recently_used_files_make_room(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path)
    for n in range(20):
        folder.write(key(n), data(n))
        os.utime(folder._path(key(n)), (1000 + n, 1000 + n))
    folder.touch(key(0))
    size = files(tmp_path)[0].stat().st_size
    disk = BlockDisk(folder, max_bytes=10 * size, max_queued_bytes=1 << 20, clock=RealClock())
    disk.close()
    kept = {n for n in range(20) if folder.holds(key(n))}
    assert kept == {0, *range(12, 20)}  # a tenth below the limit, so that the next ones fit
    assert disk.counts.num_bytes == 9 * size


def test_the_limit_holds_beside_what_cannot_be_removed(tmp_path: Path) -> None:
    """A file of somebody else's; a folder stands for it here."""
    folder = BlockFolder(tmp_path)
    for n in range(20):
        folder.write(key(n), data(n))
        os.utime(folder._path(key(n)), (1000 + n, 1000 + n))
    folder._path(key(0)).unlink()
    folder._path(key(0)).mkdir()
    (folder._path(key(0)) / "inside").touch()
    os.utime(folder._path(key(0)), (1, 1))
    size = files(tmp_path)[-1].stat().st_size
    disk = BlockDisk(folder, max_bytes=10 * size, max_queued_bytes=1 << 20, clock=RealClock())
    disk.close()
    left = sum(path.stat().st_size for path in files(tmp_path) if path.is_file())
    assert 5 * size <= left <= 9 * size and disk.counts.failures == 1


def test_the_limit_holds_for_what_several_processes_write(open_store: Open, tmp_path: Path) -> None:
    stores = [open_store(disk_bytes=30 * SIZE) for _ in range(2)]
    most = 0
    for n in range(200):
        stores[n % 2].save(key(n), data(n))
        most = max(most, total_size(tmp_path) if n % 10 == 0 else 0)
    for store in stores:
        store.close()
    left = total_size(tmp_path)
    assert 10 * SIZE < left <= 33 * SIZE
    assert most <= 36 * SIZE
    assert all(store.stats().failures == 0 for store in stores)


def test_a_block_in_use_is_kept_though_it_was_written_first(tmp_path: Path) -> None:
    """`wants` is asked for every block of every prompt, so whatever is used says so."""
    clock = VirtualClock()
    folder = BlockFolder(tmp_path)
    folder.write(key(0), data(0))
    os.utime(folder._path(key(0)), (1, 1))
    disk = BlockDisk(folder, max_bytes=1 << 20, max_queued_bytes=1 << 20, clock=clock)
    wait_until(lambda: not disk.wants(key(0)))  # once the folder has been looked at
    disk.close()
    assert folder._path(key(0)).stat().st_mtime > 1


def test_a_full_disk_is_counted_told_once_and_survived(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(memory_bytes=10 * SIZE)
    write = BlockFolder.write

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(BlockFolder, "write", full)
    for n in range(3):
        store.save(key(n), data(n))
    wait_until(lambda: store.stats().failures >= 3)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "No space left" in caplog.text
    assert load(store, 0, 1, 2) == content(0, 1, 2)  # memory has them
    monkeypatch.setattr(BlockFolder, "write", write)
    assert store.wants(key(0))  # not on disk, so it is tried again
    store.save(key(0), data(0))
    store.close()
    assert load(open_store(), 0) == content(0)


def test_a_folder_that_disappears_is_made_again(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    store.save(key(0), data(0))
    wait_until(lambda: store.stats().saved_bytes >= SIZE)
    shutil.rmtree(tmp_path / "blocks-1")
    assert load(store, 0) == []
    assert store.wants(key(0))
    store.save(key(0), data(0))
    store.close()
    assert load(open_store(), 0) == content(0)


def test_a_disk_that_is_behind_drops_blocks_and_holds_up_nobody(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = threading.Event(), BlockFolder.write

    def slow(*args: object) -> int:
        assert gate.wait(PATIENCE_S)
        return write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockFolder, "write", slow)
    store = open_store(max_queued_bytes=3 * SIZE)
    saved = []
    for n in range(20):
        if store.wants(key(n)):
            store.save(key(n), data(n))
            saved.append(n)
    assert len(saved) in (3, 4)  # one may be with the writer
    assert store.stats().dropped_blocks == 20 - len(saved)
    assert load(store, *saved) == content(*saved), "what waits to be written is not lost meanwhile"
    assert not store.wants(key(saved[0]))
    gate.set()
    store.close()
    assert load(open_store(), *saved) == content(*saved)


def test_a_block_that_is_missed_and_saved_again_at_the_same_time_stays_known(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    reading, saved, checked = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(BlockFolder, "holds", lambda *_: True)

    def miss(*_: object) -> None:
        reading.set()
        assert saved.wait(PATIENCE_S)

    read, write = BlockFolder.read, BlockFolder.write
    monkeypatch.setattr(BlockFolder, "read", miss)
    monkeypatch.setattr(BlockFolder, "write", lambda *args: checked.wait(PATIENCE_S) and write(*args))
    assert store.load([key(0)], wait=False) is None
    assert reading.wait(PATIENCE_S)
    store.save(key(0), data(0))
    saved.set()
    assert load(store, 0) == []
    assert not store.wants(key(0)), "it is about to be written"
    checked.set()
    store.close()
    monkeypatch.setattr(BlockFolder, "read", read)
    assert load(open_store(), 0) == content(0)


def test_a_disk_that_hangs_is_waited_for_no_longer_than_the_patience() -> None:
    clock, gate = VirtualClock(), threading.Event()

    def fetch(wanted: bytes) -> BlockData | None:
        if wanted != key(0):
            gate.wait(PATIENCE_S)
        return data(0)

    reader = RunReader(fetch, patience_s=5.0, clock=clock)
    keys = [key(0), key(1)]
    assert reader.read(keys, wait=False) is None
    wait_until(lambda: reader._run.found)  # type: ignore[union-attr]
    clock.advance(4_900_000_000)
    assert reader.read(keys, wait=False) is None
    clock.advance(200_000_000)
    found = reader.read(keys, wait=True)
    assert found is not None and [block.tobytes() for block in found] == content(0)
    gate.set()
    reader.close()


def test_a_run_that_fails_in_any_way_ends_there() -> None:
    def fetch(wanted: bytes) -> BlockData | None:
        if wanted == key(1):
            raise RuntimeError("unheard of")
        return data(0)

    reader = RunReader(fetch, patience_s=30.0, clock=RealClock())
    found = reader.read([key(0), key(1), key(2)], wait=True)
    assert found is not None and len(found) == 1
    assert len(reader.read([key(0)], wait=True) or ()) == 1  # and the reader is alive
    reader.close()


def test_stores_of_other_identities_never_meet(open_store: Open) -> None:
    assert open_store("model a").root != open_store("model b").root


def test_limits_and_folders_that_cannot_work_are_told_at_the_start(open_store: Open, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="memory for the prefix cache"):
        open_store(memory_bytes=SIZE - 1)
    with pytest.raises(UsageError, match="disk for the prefix cache"):
        open_store(disk_bytes=SIZE - 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentLacksError, match="prefix-cache-dir"):
        open_store(folder=tmp_path / "file")


def test_files_are_the_owners_alone(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    store.save(key(0), data(0))
    store.close()
    (path,) = files(tmp_path)
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0
    assert (tmp_path / "blocks-1").stat().st_mode & 0o077 == 0


def test_memory_forgets_the_least_recently_used() -> None:
    memory = BlockMemory(3 * SIZE)
    for n in range(3):
        memory.put(key(n), data(n))
    assert memory.get(key(0)) is not None
    memory.put(key(3), data(3))
    assert [n for n in range(4) if memory.get(key(n)) is not None] == [0, 2, 3]
    memory.put(key(3), data(3))
    assert memory.num_bytes == 3 * SIZE
    BlockMemory(0).put(key(0), data(0))
