"""One entrance to headers: a GGUF file or a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

from inferloop.core.errors import ModelFileError
from inferloop.models.headers.directory import read_directory
from inferloop.models.headers.gguf_header import read_gguf
from inferloop.models.headers.header import ModelHeader


def read_header(path: Path, *, with_weights: bool = True) -> ModelHeader:
    """The header of a `.gguf` file or of a directory with config.json and safetensors; the latter may be absent when
    the weights are of no interest, and the header then has no tensors.

    Raises ModelFileError naming the file and what is wrong with it.
    """
    if path.is_dir():
        return read_directory(path, with_weights=with_weights)
    if not path.is_file():
        raise ModelFileError(f"{path}: no such file or directory")
    return read_gguf(path)
