"""The digest of a model's weights, remembered so that gigabytes are not hashed at every start."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from inferloop.core.digest import digest_of, file_digest
from inferloop.models.cache import cache_root
from inferloop.models.headers.directory import weight_files
from inferloop.models.resolve import ModelFiles


def weights_digest(files: ModelFiles, *, cache_dir: Path | None = None) -> str:
    """sha256 hex: of the GGUF file's bytes, or over names and digests of a directory's safetensors files.

    Each file's digest is remembered under its path, size, inode and modification time. Raises ModelFileError when
    files are missing.
    """
    if files.kind == "gguf":
        return _remembered(files.path, cache_root(cache_dir))
    parts = {file.name: _remembered(file, cache_root(cache_dir)) for file in weight_files(files.path)}
    return digest_of(parts)


def _remembered(file: Path, root: Path) -> str:
    stat = file.stat()
    key = digest_of([str(file.resolve()), stat.st_size, stat.st_ino, stat.st_mtime_ns])
    note = root / "digests" / f"{key}.json"
    try:
        return str(json.loads(note.read_text("utf-8"))["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    digest = file_digest(file)
    _write(note, {"file": str(file), "sha256": digest})
    return digest


def _write(note: Path, value: dict[str, str]) -> None:
    """Best effort: without a writable cache the digest is computed again next time."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=note.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(value, out)
        Path(temporary).replace(note)
    except OSError:
        return
