"""What is told of an interrupted run, and the port that `up` holds while it measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferloop.cli.common import stderr
from inferloop.cli.interrupted import telling
from inferloop.cli.narrate import Narrator
from inferloop.cli.up_stages import Up, UpOptions
from inferloop.core.clock import RealClock
from inferloop.core.errors import PortInUseError
from inferloop.fleet.act.ports import bind_listener
from inferloop.measure.timing import Chunk, RequestTiming
from inferloop.records.run import RunWriter


def told_of(folder: Path | None) -> str:
    with pytest.raises(KeyboardInterrupt) as caught, telling(lambda: folder):
        raise KeyboardInterrupt
    return str(caught.value)


def test_an_interrupted_run_says_what_it_leaves_and_what_shows_it(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "my runs", verb="bench", service="s") as writer:
        assert told_of(writer.path).startswith(f"interrupted before anything was measured; {writer.path} holds")
        for point in ("warmup", "serial", "serial"):
            writer.append(RequestTiming("r", None, 1, 2, 9, (Chunk(3, 1),), 1, 1), point=point)
        told = told_of(writer.path)
    assert f"{writer.path} has the requests that ended by then (warmup 1, serial 2), and no verdict" in told
    assert f"`inferloop report '{writer.path}'` shows them" in told
    assert told_of(None) == "", "no folder, nothing to say of one"


async def test_up_holds_its_port_from_the_check_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.yaml").write_text(
        "{version: 1, service: s, model: smollm2-135m-instruct, "
        "traffic: {qps: 1, input_tokens: 30, output_tokens: 8}, slo: {ttft_ms: {p95: 900}}}"
    )
    with bind_listener("127.0.0.1", 0) as free:
        port = int(free.getsockname()[1])
    options = UpOptions(tmp_path / "c.yaml", tmp_path, port, 1, 10.0, 0.7, 1, 1, 64, None)

    async def work(*_: object) -> Any:
        with pytest.raises(PortInUseError):
            bind_listener("127.0.0.1", port)

    monkeypatch.setattr(Up, "_run", work)
    job = Up(options, Narrator(stderr, RealClock()), lambda folder: folder)

    async def nobody(*_: object) -> None:
        raise AssertionError("nothing is served")

    await job.run(nobody)
    bind_listener("127.0.0.1", port).close()  # given back
