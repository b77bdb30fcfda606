"""Runs of several machines become one: rows joined, clocks aligned, quantiles of the union, strangers refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from inferloop.bench.merged import merged_summary
from inferloop.cli.main import app
from inferloop.contract.load import parse
from inferloop.core.clock import VirtualClock
from inferloop.core.errors import RecordError
from inferloop.core.units import NS_PER_MS, NS_PER_S
from inferloop.measure.quantiles import quantile
from inferloop.measure.samples import collect
from inferloop.measure.summary import summarize
from inferloop.measure.timing import DEFINITIONS, Chunk, RequestTiming
from inferloop.records.anchor import boot_id, read_anchor, wall_error_ns
from inferloop.records.merge import merge, write_merged
from inferloop.records.read import RunRecord, open_run
from inferloop.records.run import RunWriter

WALL = 1_790_000_000 * NS_PER_S
CONTRACT = {
    "version": 1,
    "service": "demo",
    "archetype": "chat",
    "model": "smollm2-135m-instruct",
    "traffic": {"qps": 5, "input_tokens": {"p50": 10, "p95": 20}, "output_tokens": {"p50": 5, "p95": 9}},
    "slo": {"ttft_ms": {"p95": 450}},
}


def requests(name: str, start_ns: int, num: int = 200, *, seed: int = 0, every_ms: int = 100) -> list[RequestTiming]:
    """An open loop whose TTFT is random, on a clock that shows `start_ns` when it begins."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(num):
        t = start_ns + i * every_ms * NS_PER_MS
        first = t + int(rng.integers(50 * NS_PER_MS, 300 * NS_PER_MS))
        chunks = (Chunk(first, 1), Chunk(first + 10 * NS_PER_MS, 2))
        made.append(
            RequestTiming(f"{name}-{i}", t, t + 1000, t + 2000, chunks[-1].t_ns, chunks, 10, 3, t_first_answer_ns=first,
                          empty_frames_ns=(chunks[-1].t_ns,), session=i // 2, turn=i % 2, num_turns=2)
        )  # fmt: skip
    return made


Write = Callable[..., RunRecord]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a run of machine `name`, whose monotonic clock reads `mono` when it is WALL; the load begins 1 s later."""

    def make(
        name: str, *, mono: int, wall: int = WALL, rows: list[RequestTiming] | None = None,
        change: dict[str, Any] | None = None, summary: dict[str, Any] | None = None, **known: Any,
    ) -> RunRecord:  # fmt: skip
        clock = VirtualClock(mono, wall)
        header = {"target": "http://10.0.0.1:8000", "seed": 1 if name == "a" else 2, **known}
        made = parse(CONTRACT)
        with RunWriter(tmp_path / name, verb="bench", service="demo", contract=made, clock=clock, **header) as writer:
            rows = requests(name, mono + NS_PER_S, seed=ord(name[0])) if rows is None else rows
            for row in rows:
                writer.append(row, point="peak")
            point = {
                **summarize(rows, mode="open", offered_qps=10.0).as_json(),
                "name": "peak",
                "void": [],
                "notes": [],
            }
            told = {"kind": "bench", "verdict": "pass", "reasons": [], "points": [point], "judged_point": "peak"}
            clock.advance(60 * NS_PER_S)
            writer.finish({**told, "definitions": dict(DEFINITIONS), **(summary or {})})
        header_file = writer.path / "run.json"
        told = json.loads(header_file.read_text())
        header_file.write_text(json.dumps({**told, "host": name, "boot_id": f"boot-{name}", **(change or {})}))
        return open_run(writer.path)

    return make


def test_merged_quantiles_are_those_of_all_requests(write: Write) -> None:
    """Means of the parts' percentiles would be others."""
    slow = [
        replace(r, chunks=tuple(Chunk(c.t_ns + 400 * NS_PER_MS, c.num_tokens) for c in r.chunks),
                t_end_ns=r.t_end_ns + 400 * NS_PER_MS, t_first_answer_ns=None, empty_frames_ns=())
        for r in requests("b", 9 * NS_PER_S, num=100, seed=9, every_ms=200)
    ]  # fmt: skip
    a, b = write("a", mono=5 * NS_PER_S), write("b", mono=8 * NS_PER_S, rows=slow)
    summary = merged_summary(merge([a, b]), [a, b])
    (point,) = summary["points"]
    union = np.sort(np.concatenate([collect("ttft_ms", run.timings).values for run in (a, b)]))
    parts = [quantile(np.sort(collect("ttft_ms", run.timings).values), 0.95) for run in (a, b)]
    assert point["ttft_ms"]["p95"] == quantile(union, 0.95)
    assert point["ttft_ms"]["p50"] == quantile(union, 0.5)
    assert point["ttft_ms"]["p95"] != pytest.approx(sum(parts) / 2)
    assert (point["num_requests"], point["offered_qps"]) == (300, 20.0)
    assert summary["verdict"] == "fail"
    assert summary["judged_point"] == "peak"


def test_clocks_are_aligned_by_their_anchors(write: Write) -> None:
    """B's monotonic clock is 1000 s ahead, and B began 250 ms after A."""
    a = write("a", mono=5 * NS_PER_S)
    b = write("b", mono=1005 * NS_PER_S, wall=WALL + NS_PER_S // 4)
    merged = merge([a, b])
    first = {name: next(r for r in merged.rows if r.timing.request_id == f"{name}-0").timing for name in "ab"}
    assert first["b"].t_send_ns - first["a"].t_send_ns == NS_PER_S // 4
    assert [part.offset_ns for part in merged.parts] == [0, -1000 * NS_PER_S + NS_PER_S // 4]
    assert [part.clock for part in merged.parts] == ["first", "wall"]
    ends = [row.timing.t_end_ns for row in merged.rows]
    assert ends == sorted(ends)
    for row in merged.rows:
        t = row.timing
        source = next(r for r in (a, b)["ab".index(t.request_id[0])].timings if r.request_id == t.request_id)
        moved = t.t_send_ns - source.t_send_ns
        assert t.t_intended_ns is not None and source.t_intended_ns is not None
        assert t.t_intended_ns - source.t_intended_ns == moved == t.t_end_ns - source.t_end_ns
        assert [c.t_ns - moved for c in t.chunks] == [c.t_ns for c in source.chunks]
        assert t.empty_frames_ns[0] - moved == source.empty_frames_ns[0]
        assert t.t_first_answer_ns is not None and t.t_first_answer_ns - moved == source.t_first_answer_ns
    assert "999.750000 s from the first run's" in merged.notes[0]
    assert "did not tell" in merged.notes[0]
    assert merged.points[0].overlap == pytest.approx(1 - 0.25 / 19.9)


def test_how_well_the_offset_is_known_is_told(write: Write) -> None:
    known = {"wall_error_ns": 2_000_000, "anchor_uncertainty_ns": 500}
    a, b = write("a", mono=0, change=known), write("b", mono=9, change=known)
    assert merge([a, b]).parts[1].uncertainty_ns == 4_001_000
    assert "give or take 4.001 ms" in merge([a, b]).notes[0]


def test_machines_of_one_boot_share_a_clock(write: Write) -> None:
    """Even when the wall clock was set in between."""
    a = write("a", mono=5 * NS_PER_S, change={"boot_id": "x"})
    b = write("b", mono=6 * NS_PER_S, wall=WALL - 3600 * NS_PER_S, change={"boot_id": "x"})
    part = merge([a, b]).parts[1]
    assert (part.clock, part.offset_ns, part.uncertainty_ns) == ("shared", 0, 0)


def test_sessions_of_two_machines_stay_apart(write: Write) -> None:
    a, b = write("a", mono=0), write("b", mono=0)
    whole = summarize([row.timing for row in merge([a, b]).rows], mode="open").session_ms
    assert whole is not None and whole.num_samples == 200


def test_runs_that_did_not_meet_are_not_one_load(write: Write) -> None:
    a, b = write("a", mono=0), write("b", mono=0, wall=WALL + 60 * NS_PER_S)
    summary = merged_summary(merge([a, b]), [a, b])
    assert summary["verdict"] == "void"
    assert "sending together for 0%" in summary["reasons"][0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"contract_digest": "ff" * 32}, "different contracts"),
        ({"target": "http://10.0.0.2:8000"}, "different targets: http://10.0.0.1:8000 and http://10.0.0.2:8000"),
        ({"identity": {"digest": "beef"}}, "different serving identities"),
        ({"service": "other"}, "different services"),
        ({"verb": "up"}, "different verbs"),
        ({"status": "void"}, "the run is void"),
        ({"status": "interrupted"}, "the run is interrupted"),
    ],
)
def test_strangers_are_refused_by_name(write: Write, change: dict[str, Any], says: str) -> None:
    with pytest.raises(RecordError, match=says):
        merge([write("a", mono=0), write("b", mono=0, change=change)])


def test_other_definitions_are_refused(write: Write) -> None:
    other = {"definitions": {**DEFINITIONS, "tpot_ms": "(end - send) / tokens"}}
    with pytest.raises(RecordError, match=r"defines tpot_ms as \"\(end - send\) / tokens\""):
        merge([write("a", mono=0), write("b", mono=0, summary=other)])


def test_copies_are_no_parts(write: Write) -> None:
    a = write("a", mono=0)
    with pytest.raises(RecordError, match="given twice"):
        merge([a, a])
    with pytest.raises(RecordError, match="200 requests are in more than one"):
        merge([a, write("b", mono=0, rows=list(a.timings))])
    with pytest.raises(RecordError, match="two runs"):
        merge([a])
    with pytest.raises(RecordError, match="no request"):
        merge([a, write("c", mono=0, rows=[])])


def test_equal_seeds_are_pointed_out(write: Write) -> None:
    a, b = write("a", mono=0, seed=3), write("b", mono=0, seed=3)
    assert "same seed" in merge([a, b]).notes[-1]


def test_a_merged_run_is_a_run(write: Write, tmp_path: Path) -> None:
    a, b, c = (write(name, mono=i * NS_PER_S) for i, name in enumerate("abc"))
    merged = merge([a, b, c])
    record = write_merged(tmp_path / "runs", merged, merged_summary(merged, [a, b, c]))
    assert record.complete
    assert record.rows == merged.rows
    assert record.header.merged is not None and [p["host"] for p in record.header.merged] == ["a", "b", "c"]
    assert record.header.t_end_ns == 60 * NS_PER_S
    assert record.summary is not None and record.summary["points"][0]["num_requests"] == 600


def test_the_verb_merges_and_reports(write: Write, tmp_path: Path) -> None:
    a, b = write("a", mono=0), write("b", mono=7 * NS_PER_S)
    args = ["report", str(a.path), str(b.path), "--merge", "--runs-dir", str(tmp_path / "runs"), "--json"]
    told = CliRunner().invoke(app, args)
    assert told.exit_code == 0, told.output
    folder = Path(json.loads(told.stdout)["run"])
    assert folder.parent == tmp_path / "runs"
    assert (folder / "report.html").exists()
    assert "from the first run's" in told.stderr
    refused = CliRunner().invoke(app, [*args[:2], str(write("z", mono=0, change={"target": "x"}).path), *args[3:]])
    assert refused.exit_code == 2
    assert "different targets" in json.loads(refused.stdout)["error"]["message"]


def test_an_anchor_is_read_between_two_readings() -> None:
    class Slow(VirtualClock):
        def wall_ns(self) -> int:
            self.advance(40)
            return super().wall_ns()

    anchor = read_anchor(Slow(1000, 50_000))
    assert (anchor.t_ns, anchor.wall_ns, anchor.uncertainty_ns) == (1020, 50_040, 20)
    assert wall_error_ns() is None or 0 <= (wall_error_ns() or 0) < 3600 * NS_PER_S
    assert boot_id() == boot_id()
