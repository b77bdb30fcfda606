"""`inferloop report --compat`: another tool's numbers beside ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inferloop.cli.main import app
from inferloop.measure.timing import Chunk, RequestTiming
from inferloop.records.run import RunWriter

MS = 1_000_000


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Twenty answers in frames of four tokens, every 40 ms."""
    with RunWriter(tmp_path / "runs", verb="bench", service="demo") as writer:
        for i in range(20):
            t = 10**12 + i * 10 * MS
            chunks = tuple(Chunk(t + ms * MS, 4) for ms in (100, 140, 180, 220))
            writer.append(RequestTiming(f"r{i}", t, t, None, t + 220 * MS, chunks, 9, 16), point="peak", warmup=i == 0)
        writer.finish({"kind": "bench", "verdict": "pass", "reasons": [], "points": []})
        return writer.path


def test_other_tools_numbers_are_printed_with_their_definitions(run: Path) -> None:
    told = CliRunner().invoke(app, ["report", str(run), "--compat", "vllm", "--compat", "guidellm"])
    assert told.exit_code == 0, told.output
    assert "peak as vllm bench serve defines it" in told.stdout
    assert "19 requests used" in told.stdout
    assert "40.00" in told.stdout
    assert "gap between chunks, not tokens" in " ".join(told.stdout.split())
    assert "TTFT included" in " ".join(told.stdout.split())


def test_scripts_get_them_too(run: Path) -> None:
    told = CliRunner().invoke(app, ["report", str(run), "--compat", "aiperf", "--json"])
    numbers = {n["name"]: n for n in json.loads(told.stdout)["compat"]["aiperf"]["peak"]["numbers"]}
    assert (numbers["ITL"]["mean"], numbers["ICL"]["p99"]) == (8.0, 40.0)
    assert "compat" not in json.loads(CliRunner().invoke(app, ["report", str(run), "--json"]).stdout)


@pytest.mark.parametrize("verb", [["report", "runs/none"], ["bench", "contracts/assistant.yaml"]])
def test_an_unknown_tool_is_refused_before_anything_is_done(verb: list[str]) -> None:
    told = CliRunner().invoke(app, [*verb, "--compat", "wrk"])
    assert told.exit_code == 2
    assert "--compat wrk: not known" in told.stderr and "inference-perf" in told.stderr
