"""Weights in several files: with an index, without, and with one that does not tell the truth."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from inferloop.core.errors import ModelFileError
from inferloop.engine.compute.stored import read_tensor
from inferloop.models.headers import read_header

Write = Callable[..., Path]
FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
INDEX = "model.safetensors.index.json"


@pytest.fixture
def shards(tiny_directory: Write) -> Path:
    """Two files, each with half of the tensors, and their index."""
    folder = tiny_directory()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {FIRST: list(tensors)[::2], SECOND: list(tensors)[1::2]}
    for name, part in parts.items():
        save_file({t: tensors[t] for t in part}, folder / name)
    told(folder, {t: name for name, part in parts.items() for t in part})
    return folder


def told(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def index_of(folder: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return weight_map


@pytest.mark.parametrize("has_index", [True, False])
def test_tensors_are_found_in_whichever_file(shards: Path, has_index: bool) -> None:
    where = index_of(shards)
    if not has_index:
        (shards / INDEX).unlink()
    tensors = read_header(shards).tensors
    assert {name: info.file.name for name, info in tensors.items()} == where
    for name, info in tensors.items():
        np.testing.assert_array_equal(read_tensor(info), load_file(shards / where[name])[name])


@pytest.mark.parametrize(("gone", "named"), [(FIRST, FIRST), (SECOND, SECOND)])
@pytest.mark.parametrize("has_index", [True, False])
def test_a_missing_shard_is_named(shards: Path, gone: str, named: str, has_index: bool) -> None:
    (shards / gone).unlink()
    if not has_index:
        (shards / INDEX).unlink()
    with pytest.raises(ModelFileError, match=rf"{named}: .*missing"):
        read_header(shards)


def test_a_tensor_in_two_shards_is_refused(shards: Path) -> None:
    name = next(t for t, file in index_of(shards).items() if file == FIRST)
    doubled = {**load_file(shards / SECOND), name: load_file(shards / FIRST)[name]}
    save_file(doubled, shards / SECOND)
    with pytest.raises(ModelFileError, match=rf"tensor {name} is also in {FIRST}"):
        read_header(shards)


def test_an_index_that_says_another_file_is_refused(shards: Path) -> None:
    where = index_of(shards)
    name = next(t for t, file in where.items() if file == FIRST)
    told(shards, where | {name: SECOND})
    with pytest.raises(ModelFileError, match=rf"tensor {name} is said to be in {SECOND}, which does not have it"):
        read_header(shards)


@pytest.mark.parametrize("wrong", ["../model.safetensors", "/etc/passwd", "a\0b", "", 7, None, ["a"], "a" * 300])
def test_an_index_names_files_of_its_directory_only(shards: Path, wrong: object) -> None:
    (shards / INDEX).write_text(json.dumps({"weight_map": {**index_of(shards), "x": wrong}}))
    with pytest.raises(ModelFileError, match=r"weight_map must name files of this directory|listed in .* but missing"):
        read_header(shards)
