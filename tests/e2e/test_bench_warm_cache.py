"""What a run must not be: measured on a cache that an earlier one warmed, or on a server that contradicts the client.

Of a run's reasons to be void only those in question are looked at: a busy machine may add others.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.prefix_server import Behaviour, prefix_server

from inferloop.bench.compare import CompareOptions, Contender, run_compare
from inferloop.bench.result import BenchResult
from inferloop.bench.search import BenchOptions, run_bench
from inferloop.contract.load import parse
from inferloop.records.run import RunWriter, open_run

CONTRACT: dict[str, Any] = {
    "version": 1,
    "service": "tiny",
    "archetype": "chat",
    "model": {"id": "demo"},
    "traffic": {
        "qps": {"avg": 30, "p95": 50, "peak": 60},
        "input_tokens": {"p50": 64, "p95": 90},
        "output_tokens": {"p50": 3, "p95": 5},
        "prefix_reuse": 0,
    },
    "slo": {"ttft_ms": {"p95": 2000}},
}


async def bench(tmp_path: Path, server: Behaviour, *, seed: int = 5, fresh: bool = True) -> BenchResult:
    """Serial and burst."""
    options = BenchOptions(
        seed=seed, num_points=0, peak_qps=0.0, calibrate=False, fresh_cache=fresh, num_serial=6, num_burst=12
    )
    contract = parse(CONTRACT, base=tmp_path)
    with RunWriter(tmp_path / "runs", verb="bench", service="tiny", contract=contract) as writer:
        result = await run_bench(contract, server.url, None, None, options, writer)
        writer.finish(result.as_summary())
    told = open_run(writer.path).header.options
    assert told["fresh_cache"] == (
        None if not fresh else {"vllm": "cache_salt", "sglang": "POST /flush_cache"}.get(server.owner)
    )
    return result


def voids(result: BenchResult, word: str) -> list[str]:
    return [text for point in result.points for text in point.void if word in text]


async def test_the_same_seed_again_on_a_server_that_still_runs_is_void(tmp_path: Path) -> None:
    with prefix_server() as server:
        first = await bench(tmp_path, server)
        assert first.points[0].name == "serial" and voids(first, "reuse_mismatch") == []
        again = await bench(tmp_path, server)
        assert again.verdict == "void"
        (why,) = voids(again, "reuse_mismatch")
        assert why.endswith("0% are the workload's")
        other = await bench(tmp_path, server, seed=6)
        assert voids(other, "reuse_mismatch") == [], "another seed has other prompts"
        assert set(server.salts) == {None} and server.flushed_after == []


async def test_a_salt_keeps_the_cache_of_before_out(tmp_path: Path) -> None:
    with prefix_server(owner="vllm") as server:
        for _ in range(2):
            assert voids(await bench(tmp_path, server), "reuse_mismatch") == []
        salts = {salt for salt in server.salts if salt is not None}
        assert None not in server.salts and {salt.rpartition("-")[2] for salt in salts} <= {"warmup", "serial", "burst"}
        assert len(salts) >= 4, "of its own for each part of each run"
        for _ in range(2):
            again = await bench(tmp_path, server, fresh=False)
        assert again.verdict == "void" and voids(again, "reuse_mismatch")


async def test_a_cache_is_emptied_before_each_part(tmp_path: Path) -> None:
    with prefix_server(owner="sglang", busy_flushes=1) as server:
        for _ in range(2):
            assert voids(await bench(tmp_path, server), "reuse_mismatch") == []
        assert len(server.flushed_after) >= 4
        assert server.flushed_after == sorted(set(server.flushed_after)), "answers lie between any two"


async def test_a_cache_that_cannot_be_emptied_is_noted_and_fails_nothing(tmp_path: Path) -> None:
    with prefix_server(owner="sglang", busy_flushes=10_000) as server:
        result = await bench(tmp_path, server)
        assert any("not emptied before each part: POST /flush_cache: HTTP 400" in note for note in result.notes)
        assert result.points and server.num_answers > 6


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"lies": {"completion": 4}}, "answers have other token counts by frame than by total"),
        ({"lies": {"prompt": 7}}, "prompts have another length at the server than was sent"),
        ({"status": 422}, "were refused as wrong: HTTP 422"),
    ],
)
async def test_a_server_that_contradicts_the_client_voids_the_run(
    tmp_path: Path, how: dict[str, Any], why: str
) -> None:
    with prefix_server(**how) as server:
        result = await bench(tmp_path, server)
        assert result.verdict == "void" and voids(result, why)


def test_void_exits_4(tmp_path: Path) -> None:
    file = tmp_path / "contract.json"
    file.write_text(json.dumps(CONTRACT))
    with prefix_server(lies={"prompt": 7}) as server:
        words = [sys.executable, "-m", "inferloop", "bench", str(file), "--target", server.url, "--json"]
        words += ["--seed", "5", "--runs-dir", str(tmp_path / "runs")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 4, done.stderr
    summary = json.loads(done.stdout)
    assert summary["verdict"] == "void"
    assert any("prompts have another length at the server" in why for why in summary["reasons"])


@pytest.mark.parametrize(("owner", "fresh"), [("vllm", True), ("sglang", True), ("nobody", True), ("vllm", False)])
async def test_no_window_of_a_comparison_meets_the_cache_of_another(tmp_path: Path, owner: str, fresh: bool) -> None:
    """One server, twice: by a salt or a flush it may get the same words again, else it gets others."""
    contract = parse(CONTRACT, base=tmp_path)
    options = CompareOptions((30.0,), seed=5, num_rounds=2, window_s=0.5, fresh_cache=fresh)
    with prefix_server(owner=owner) as server, RunWriter(tmp_path / "runs", verb="compare", service="tiny") as writer:
        contenders = [Contender(name, server.url) for name in ("one", "two")]
        result = await run_compare(contract, contenders, options, writer)
        writer.finish(result.as_summary())
    assert len(result.windows) == 8
    assert not [text for w in result.windows for text in w.void if "reuse_mismatch" in text]
    is_salted = owner == "vllm" and fresh
    assert any("in other words: the same server stands twice" in note for note in result.notes) == (not is_salted)
    prompts = {w.name: w.prompts for w in result.windows}
    assert (prompts["self/A1/30/1"] == prompts["self/A2/30/1"]) == is_salted
    if is_salted:
        parts = {salt.partition("-")[2].partition("-")[2] for salt in server.salts if salt}
        assert {w.name.replace("/", "-") for w in result.windows} <= parts, "a salt for each window, without slashes"
        assert len({salt for salt in server.salts if salt and salt.endswith("versus-A-30-1")}) == 1
    else:
        assert set(server.salts) == {None}
    assert bool(server.flushed_after) == (owner == "sglang")
