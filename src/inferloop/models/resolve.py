"""A model id as people write it -> files on this machine and their header."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from inferloop.catalog.models import known_models
from inferloop.core.errors import EnvironmentLacksError, ModelFileError, UsageError, nearest
from inferloop.models.fetch import Progress, fetch
from inferloop.models.headers import ModelHeader, read_header

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model that is here. `path` is the GGUF file, or the directory of a Hugging Face model."""

    model_id: str
    kind: Literal["gguf", "hf"]
    path: Path
    header: ModelHeader


def resolve(model_id: str, *, cache_dir: Path | None = None, progress: Progress | None = None) -> ModelFiles:
    """Catalogue name (fetched when it is not cached yet), Hugging Face directory, or GGUF file.

    Raises UsageError for a name nobody knows, EnvironmentLacksError for a hub id (downloading from the hub is not
    available), for terms that nobody has accepted, or when a fetch fails, ModelFileError for a file that is absent,
    damaged or not supported.
    """
    path = locate(model_id)
    return open_files(model_id, path or fetch(known_models()[model_id], cache_dir, progress))


def resolve_text(model_id: str, *, cache_dir: Path | None = None, progress: Progress | None = None) -> ModelFiles:
    """As `resolve`, for who needs the tokenizer and the chat template alone: a directory may be without weights."""
    path = locate(model_id)
    if path is not None and path.is_dir():
        resolved = path.resolve()
        return ModelFiles(model_id, "hf", resolved, read_header(resolved, with_weights=False))
    return resolve(model_id, cache_dir=cache_dir, progress=progress)


def locate(model_id: str) -> Path | None:
    """Where the user keeps a model; None for one of the catalogue, which is fetched. Reads nothing of it. Raises what
    `resolve` raises for a name nobody knows, a hub id and a file that is absent."""
    known = known_models()
    if model_id in known:
        return None
    path = Path(model_id).expanduser()
    if path.exists():
        return path
    if path.suffix == ".gguf" or path.is_absolute() or model_id.startswith(("./", "../", "~")):
        raise ModelFileError(f"{path}: no such file or directory")
    if _HUB_ID.match(model_id):
        raise EnvironmentLacksError(
            f"{model_id!r} looks like a hub id, and downloading from the hub is not available",
            fix="Download the repository with your own tool and give the path of its local directory.",
        )
    close = nearest(model_id, known)
    hint = f"did you mean {close!r}" if close else f"known: {', '.join(sorted(known))}"
    raise UsageError(f"unknown model {model_id!r} ({hint}; the path of a directory or of a .gguf file works too)")


def open_files(model_id: str, path: Path) -> ModelFiles:
    """Read the header of what lies at `path`. Raises ModelFileError."""
    resolved = path.resolve()
    return ModelFiles(model_id, "hf" if resolved.is_dir() else "gguf", resolved, read_header(resolved))
