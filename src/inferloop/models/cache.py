"""Where fetched models and remembered digests lie. The caller may name the folder; the environment is not read here."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from inferloop.catalog.models import KnownModel


def cache_root(cache_dir: Path | None = None) -> Path:
    """`cache_dir`, else the user's cache folder for inferloop. Not created."""
    return cache_dir if cache_dir is not None else platformdirs.user_cache_path("inferloop")


def model_folder(known: KnownModel, cache_dir: Path | None = None) -> Path:
    """One folder per pinned content: a new pin never meets files of an old one."""
    return cache_root(cache_dir) / "models" / f"{known.name}-{known.file_sha256[:12]}"


def cached_path(known: KnownModel, cache_dir: Path | None = None) -> Path | None:
    """The model's file when it is here and has its full size, else None. Does not hash (see fetch.verify)."""
    path = model_folder(known, cache_dir) / known.file_name
    try:
        return path if path.stat().st_size == known.file_bytes else None
    except OSError:
        return None


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
