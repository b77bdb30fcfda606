"""Opening a model while the event loop goes on."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from inferloop.cli.wire import open_model


async def test_cancelling_ends_a_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun, ended = threading.Event(), threading.Event()

    def endless(model_id: str, *, cache_dir: Path, progress: Any) -> None:
        try:
            while True:
                progress("download", 1, 2)
                begun.set()
        finally:
            ended.set()

    monkeypatch.setattr("inferloop.models.resolve.resolve", endless)
    told: list[tuple[str, int, int]] = []
    task = asyncio.create_task(open_model("m", tmp_path, lambda *news: told.append(news)))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ended.wait, 30), "the thread would keep the command from leaving"
    assert told[0] == ("download", 1, 2)
