"""A run like a real one: three points of load, the last beyond the objective, judged by the real definitions."""

from __future__ import annotations

import random
from typing import Any

import pytest

from inferloop.core.digest import plain
from inferloop.core.slo import Objective, Slo
from inferloop.measure.frontier import Frontier, FrontierPoint
from inferloop.measure.summary import summarize
from inferloop.measure.timing import Chunk, RequestTiming
from inferloop.measure.verdict import judge

MS = 1_000_000
SLO = Slo(
    (Objective("ttft_ms", 0.95, 450.0), Objective("tpot_ms", 0.95, 40.0), Objective("ttlt_ms", 0.95, 6000.0)), 0.01
)


def requests(rng: random.Random, *, qps: float, num: int, slow: float, failing: int = 0) -> list[RequestTiming]:
    """Poisson arrivals at `qps`; latencies grow with `slow`."""
    at, made = 0.0, []
    for i in range(num):
        at += rng.expovariate(qps)
        t_due = int(at * 1000 * MS)
        t_send = t_due + int(rng.expovariate(1) * 0.3 * MS)
        t_first = t_send + int((60 + slow * rng.expovariate(1)) * MS)
        gap = int((18 + slow / 25 * rng.random()) * MS)
        chunks = tuple(Chunk(t_first + k * gap, 1) for k in range(rng.randint(8, 60)))
        bad = i < failing
        made.append(
            RequestTiming(
                request_id=f"req-{i}",
                t_intended_ns=t_due,
                t_send_ns=t_send,
                t_headers_ns=t_send + MS,
                t_end_ns=chunks[-1].t_ns + MS // 10,
                chunks=() if bad else chunks,
                num_input_tokens=rng.randint(20, 300),
                num_output_tokens=0 if bad else len(chunks),
                error="http_5xx" if bad else None,
                finish_reason=None if bad else "length",
                queue_ms=None if bad else rng.random() * slow / 10,
            )
        )
    return made


@pytest.fixture
def run() -> dict[str, Any]:
    rng = random.Random(7)
    loads = [(1.0, 140, 30.0, 0), (2.5, 160, 70.0, 0), (5.0, 700, 260.0, 3)]
    groups = [(q, requests(rng, qps=q, num=n, slow=s, failing=f)) for q, n, s, f in loads]
    points, frontier = [], []
    for qps, group in groups:
        summary, slo = summarize(group, mode="open", offered_qps=qps), judge(SLO, group)
        points.append({**summary.as_json(), "slo": plain(slo)})
        frontier.append(FrontierPoint(qps, summary.achieved_qps, summary.output_tok_s, slo.verdict, slo.margin))
    capacity = Frontier.of(frontier).capacity()
    cases = [
        {"id": "rome", "kind": "contains", "status": "scored", "score": 1.0, "reason": "", "why": "geography"},
        {"id": "stop", "kind": "regex", "status": "scored", "score": 0.0, "reason": "leaked", "why": "w"},
        {"id": "gone", "kind": "exact", "status": "errored", "score": None, "reason": "timeout", "why": "w"},
    ]  # fmt: skip
    return {
        "header": {
            "schema_version": 1,
            "run": "20260102T030405Z-up-assistant-0a1b2c3d",
            "verb": "up",
            "service": "assistant",
            "status": "complete",
            "t_start_ns": 0,
            "t_end_ns": 185_000 * MS,
            "t_start_wall_ns": 1_767_323_045_000_000_000,
            "fingerprint": {
                "cpu_model": "Example CPU 3000",
                "cpu_flags": ["avx2"],
                "num_cores": 2,
                "num_physical_cores": 1,
                "memory_bytes": 8 << 30,
                "devices": [],
                "system": "Linux 6.1 x86_64",
                "python": "CPython 3.11.9",
                "packages": {"torch": "2.13.0", "numpy": "2.3.0"},
                "inferloop_version": "0.1.0",
                "git_revision": "0123456789abcdef",
                "git_dirty": True,
            },
            "target": "http://127.0.0.1:8000",
            "identity": {"model_id": "smollm2-135m-instruct", "precision": "bf16", "engine": "inferloop",
                         "digest": "f00d" * 16},
            "seed": 42,
            "warmup_s": 5.0,
            "window_s": 60.0,
            "arrivals": "poisson",
            "contract_digest": "c0de" * 16,
            "contract": {"service": "assistant", "slo": plain(SLO),
                         "traffic": {"qps": {"avg": 4.0, "p95": 7.0, "peak": 9.0}}},
        },
        "summary": {
            "verdict": "fail",
            "reasons": ["2 replicas are missing"],
            "notes": ["the budget left no time to measure 9 queries/s"],
            "gates": [{"name": "protocol", "verdict": "pass", "reason": "12 checks passed"}],
            "protocol": [{"name": "usage", "outcome": "passed", "reason": ""}, {"name": "n", "outcome": "refused"}],
            "proof": {"chats": [{"question": "Capital of Italy?", "answer": "Rome.", "streamed": True,
                                 "num_output_tokens": 3, "problem": ""}]},
            "fit": {"start": 1, "missing": 4, "reasons": ["memory holds 1 replica"]},
            "points": points,
            "capacity": plain(capacity),
            "replicas": {"needed": 5, "rho": 0.8, "failure_headroom": 1, "started": 1},
            "quality": {
                "verdict": "inconclusive",
                "reasons": ["1 of 3 cases has no score"],
                "suite": {"name": "assistant", "version": 1},
                "cases": {"total": 3, "scored": 2, "errored": 1, "unparsed": 0, "judge_failed": 0, "skipped": 0},
                "score": 0.5,
                "interval": [0.09, 0.91],
                "bounds": {"worst": 0.33, "best": 0.67},
                "mde": 0.8,
                "minimum": 0.9,
                "results": cases,
            },
        },
        "requests": groups[1][1],
        "stages": [
            {"stage": "fetch", "event": "started", "t_ns": 0},
            {"stage": "fetch", "event": "finished", "t_ns": 2_000 * MS},
            {"stage": "bench", "event": "started", "t_ns": 3_000 * MS},
        ],
    }  # fmt: skip
