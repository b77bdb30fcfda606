"""Environments that hold a made-up engine: a real interpreter, a package's metadata, and a module that may be run."""

from __future__ import annotations

import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

FakeVenv = Callable[..., Path]


@pytest.fixture
def fake_venv(tmp_path: Path) -> FakeVenv:
    """fake_venv(name, {distribution: version}, {file of a module: source}) -> the environment's folder."""

    def make(name: str, packages: dict[str, str], modules: dict[str, str] | None = None) -> Path:
        folder = tmp_path / "venvs" / name
        venv.EnvBuilder(symlinks=True).create(folder)
        site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        for package, version in packages.items():
            info = site / f"{package.replace('-', '_')}-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        for file, source in (modules or {}).items():
            path = site / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        return folder

    return make
