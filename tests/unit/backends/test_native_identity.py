"""Replicas that may answer differently have different identities."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferloop.backends.native_load import native_identity
from inferloop.backends.native_options import NativeOptions
from inferloop.engine.compute.echo import EchoRunner
from inferloop.engine.text.codec import Codec
from inferloop.models.identity import ServingIdentity
from inferloop.models.resolve import open_files


def identity(folder: Path, cache: Path) -> ServingIdentity:
    files = open_files("m", folder)
    return native_identity(files, Codec(files), EchoRunner().info, NativeOptions(cache_dir=cache), "m")


@pytest.mark.parametrize(
    "changed",
    [
        {"rope_theta": 500.0},
        {"rms_norm_eps": 0.5},
        {"max_position_embeddings": 32},
        {"model_type": "mistral", "sliding_window": 8},
    ],
)
def test_what_config_json_says_of_the_model_counts(
    tiny_directory: Callable[..., Path], tmp_path: Path, changed: dict[str, Any]
) -> None:
    folder = tiny_directory()
    first = identity(folder, tmp_path / "cache")
    config = folder / "config.json"
    old = json.loads(config.read_text())
    config.write_text(json.dumps({**old, "transformers_version": "9.9"}))
    assert identity(folder, tmp_path / "cache").digest == first.digest
    config.write_text(json.dumps({**old, **changed}))
    other = identity(folder, tmp_path / "cache")
    assert other.weights_digest == first.weights_digest and other.digest != first.digest


def test_digests_are_remembered_in_the_folder_that_was_named(
    tiny_directory: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_directory()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    identity(folder, tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "digests").iterdir())) == 1
    assert not (tmp_path / "home").exists()
