"""Model ids as people write them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from inferloop.core.digest import file_digest
from inferloop.core.errors import EnvironmentLacksError, ModelFileError, UsageError
from inferloop.models.digests import weights_digest
from inferloop.models.resolve import ModelFiles, resolve, resolve_text


def test_the_catalogue_name_gives_the_cached_file(embedded_model: ModelFiles) -> None:
    assert (embedded_model.model_id, embedded_model.kind) == ("smollm2-135m-instruct", "gguf")
    assert embedded_model.path.is_file()


def test_paths_of_both_kinds_resolve(tiny_directory: Callable[..., Path], tiny_gguf: Callable[..., Path]) -> None:
    assert resolve(str(tiny_directory())).kind == "hf"
    assert resolve(str(tiny_gguf())).kind == "gguf"


def test_text_needs_no_weights(tiny_directory: Callable[..., Path], tiny_gguf: Callable[..., Path]) -> None:
    folder = tiny_directory(template="{{ messages }}")
    whole = resolve(str(folder)).header
    (folder / "model.safetensors").unlink()
    header = resolve_text(str(folder)).header
    assert (header.shape, header.chat_template, header.tensors) == (whole.shape, whole.chat_template, {})
    with pytest.raises(ModelFileError, match=r"holds no \*\.safetensors"):
        resolve(str(folder))
    assert resolve_text(str(tiny_gguf())).kind == "gguf"


def test_a_misspelt_name_gets_the_nearest_one() -> None:
    with pytest.raises(UsageError, match="did you mean 'smollm2-135m-instruct'"):
        resolve("smolm2-135m-instruct")


def test_an_unknown_name_lists_what_is_known() -> None:
    with pytest.raises(UsageError, match=r"known: gemma3-270m, smollm2-135m-instruct; the path of a directory"):
        resolve("gpt-17")


def test_a_hub_id_is_told_how_to_go_on() -> None:
    with pytest.raises(EnvironmentLacksError, match="local directory") as caught:
        resolve("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("missing", ["absent.gguf", "./absent", "/nowhere/at/all"])
def test_a_missing_path_is_named(missing: str) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        resolve(missing)


def test_a_folder_without_a_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"not a Hugging Face model directory, it has no config\.json"):
        resolve(str(tmp_path))


def test_a_truncated_file_is_refused(tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)
    with pytest.raises(ModelFileError, match="truncated"):
        resolve(str(path))


def test_the_weights_digest_follows_the_bytes(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    path, cache = tiny_gguf(), tmp_path / "cache"
    files = resolve(str(path))
    first = weights_digest(files, cache_dir=cache)
    assert first == file_digest(path) == weights_digest(files, cache_dir=cache)
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\x01\x02\x03\x04")
    os.utime(path, ns=(1, 1))
    assert weights_digest(files, cache_dir=cache) == file_digest(path) != first


def test_a_file_written_over_with_the_same_size_and_time_is_noticed(
    tiny_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    """As unpacking an archive over the old file does, where all entries are of 1980."""
    path, cache = tiny_gguf(), tmp_path / "cache"
    os.utime(path, ns=(1, 1))
    files = resolve(str(path))
    first = weights_digest(files, cache_dir=cache)
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\x01\x02\x03\x04")
    os.utime(path, ns=(1, 1))
    assert weights_digest(files, cache_dir=cache) == file_digest(path) != first


def test_a_file_replaced_while_it_is_hashed_is_refused(
    tiny_gguf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = tiny_gguf(), tmp_path / "cache"
    files = resolve(str(path))

    def replaced(file: Path, tell: object) -> str:
        digest = file_digest(file)
        tiny_gguf("other.gguf", num_layers=1).replace(file)
        return digest

    monkeypatch.setattr("inferloop.models.digests.file_digest", replaced)
    with pytest.raises(ModelFileError, match=r"tiny\.gguf: was changed while it was read"):
        weights_digest(files, cache_dir=cache)
    assert not cache.exists()


def test_a_remembered_digest_is_used_and_a_broken_note_is_not(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    cache, files = tmp_path / "cache", resolve(str(tiny_gguf()))
    truth = weights_digest(files, cache_dir=cache)
    (note,) = (cache / "digests").iterdir()
    note.write_text('{"sha256": "remembered"}')
    assert weights_digest(files, cache_dir=cache) == "remembered"
    note.write_text('{"sha2')
    assert weights_digest(files, cache_dir=cache) == truth


def test_a_directorys_digest_covers_every_weight_file(tiny_directory: Callable[..., Path], tmp_path: Path) -> None:
    folder, cache = tiny_directory(), tmp_path / "cache"
    files = resolve(str(folder))
    first = weights_digest(files, cache_dir=cache)
    (folder / "model.safetensors").rename(folder / "renamed.safetensors")
    assert weights_digest(files, cache_dir=cache) != first
