"""The digest of a model's weights, remembered so that gigabytes are not hashed at every start."""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
from collections.abc import Callable
from pathlib import Path

from inferloop.core.digest import digest_of, file_digest
from inferloop.core.errors import ModelFileError
from inferloop.models.cache import cache_root
from inferloop.models.headers.directory import weight_files
from inferloop.models.resolve import ModelFiles


def weights_digest(
    files: ModelFiles, *, cache_dir: Path | None = None, progress: Callable[[int, int], None] | None = None
) -> str:
    """sha256 hex: of the GGUF file's bytes, or over names and digests of a directory's safetensors files.

    Each file's digest is remembered under its path, size, inode and times (of change too, which no tool sets back, as
    unpacking an archive does with that of modification). Raises ModelFileError when files are missing or change
    meanwhile. `progress` gets bytes hashed, of how many, for those that are not remembered.
    """
    root = cache_root(cache_dir)
    paths = [files.path] if files.kind == "gguf" else weight_files(files.path)
    try:
        sizes = [path.stat().st_size for path in paths]
    except OSError as problem:
        raise ModelFileError(f"{files.path}: cannot be read: {problem}") from problem
    digests = {}
    for i, path in enumerate(paths):
        tell = None if progress is None else functools.partial(_add_up, progress, sum(sizes[:i]), sum(sizes))
        digests[path.name] = _remembered(path, root, tell)
    return digests[files.path.name] if files.kind == "gguf" else digest_of(digests)


def _add_up(progress: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    progress(before + done, total)


def _remembered(file: Path, root: Path, tell: Callable[[int], None] | None) -> str:
    try:
        key = _key(file)
        note = root / "digests" / f"{key}.json"
        try:
            return str(json.loads(note.read_text("utf-8"))["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        digest = file_digest(file, tell)
        if _key(file) != key:
            raise ModelFileError(f"{file}: was changed while it was read")
    except OSError as problem:
        raise ModelFileError(f"{file}: cannot be read: {problem}") from problem
    _write(note, {"file": str(file), "sha256": digest})
    return digest


def _key(file: Path) -> str:
    stat = file.stat()
    return digest_of([str(file.resolve()), stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns])


def _write(note: Path, value: dict[str, str]) -> None:
    """Best effort: without a writable cache the digest is computed again next time."""
    temporary = note.with_name(f".{note.name}.{secrets.token_hex(4)}")  # readable as the umask says, unlike tempfile's
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(value), "utf-8")
        temporary.replace(note)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
