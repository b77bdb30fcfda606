"""One run out of several that load generators on different machines made of one service at the same time.

Rows are joined, never numbers: percentiles of the merged rows are those of all requests, which no average of the parts'
percentiles is. Times are put on the first run's monotonic clock. Runs of one boot share that clock; else the offset is
told by the wall anchors in the headers, which is as good as the hosts' wall clocks agree. An offset moves a machine's
requests as a whole: latencies are differences on one clock, and stay exact.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from inferloop.core.digest import plain
from inferloop.core.errors import RecordError
from inferloop.measure.timing import DEFINITIONS, Chunk, RequestTiming
from inferloop.records.bench import RequestRow, to_parquet
from inferloop.records.files import write_atomic
from inferloop.records.header import HEADER, PARQUET, SCHEMA_VERSION, SUMMARY, RunHeader
from inferloop.records.read import RunRecord, open_run
from inferloop.records.run import new_folder


@dataclass(frozen=True, slots=True)
class Part:
    """One of the merged runs. `offset_ns` was added to its times. `uncertainty_ns` is of the offset: 0 on a shared
    clock, None where a host did not tell how well its wall clock is kept."""

    run: str
    host: str
    seed: int | None
    num_requests: int
    offset_ns: int
    clock: str
    """first | shared | wall"""
    uncertainty_ns: int | None


@dataclass(frozen=True, slots=True)
class PointParts:
    """How the parts of one point lay in time: `overlap` is the share of the longest part's sends during which every
    run that has the point was sending, 1 for a single one."""

    name: str
    runs: tuple[str, ...]
    overlap: float


@dataclass(frozen=True, slots=True)
class Merged:
    """Rows in the order in which they ended, on the first run's clock."""

    header: RunHeader
    parts: tuple[Part, ...]
    points: tuple[PointParts, ...]
    rows: tuple[RequestRow, ...]
    notes: tuple[str, ...]

    def timings(self) -> dict[str, tuple[RequestTiming, ...]]:
        """The measured requests by point."""
        grouped: dict[str, list[RequestTiming]] = {point.name: [] for point in self.points}
        for row in self.rows:
            if not row.warmup:
                grouped[row.point].append(row.timing)
        return {name: tuple(timings) for name, timings in grouped.items()}


def merge(runs: Sequence[RunRecord]) -> Merged:
    """Join the rows. Mutates nothing. Raises RecordError, naming run and difference, for runs that are not parts of one
    measurement: of different contracts, services, targets, serving identities or definitions, unfinished or void."""
    if len(runs) < 2:
        raise RecordError("merging takes two runs at least")
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise RecordError("a run is given twice")
    first = runs[0]
    for run in runs:
        _check_usable(run)
        _check_same(first, run)
    parts = tuple(_part(first.header, run, is_first=run is first) for run in runs)
    pieces = [
        [_moved(row, part.offset_ns, i, len(runs)) for row in run.rows]
        for i, (run, part) in enumerate(zip(runs, parts, strict=True))
    ]
    names = dict.fromkeys(row.point for rows in pieces for row in rows)
    points = tuple(_point(name, parts, pieces) for name in names)
    rows = sorted((row for rows in pieces for row in rows), key=lambda row: row.timing.t_end_ns)
    doubled = len(rows) - len({row.timing.request_id for row in rows})
    if doubled:
        raise RecordError(f"{doubled} requests are in more than one of the runs: they are copies, not parts")
    ends = [run.header.t_end_ns + p.offset_ns for run, p in zip(runs, parts, strict=True) if run.header.t_end_ns]
    header = replace(
        first.header,
        schema_version=SCHEMA_VERSION,
        status="complete",
        t_end_ns=max(ends, default=None),
        merged=[asdict(part) for part in parts],
    )
    return Merged(header, parts, points, tuple(rows), _notes(parts, points))


def write_merged(root: Path, merged: Merged, summary: Mapping[str, Any]) -> RunRecord:
    """Write the run folder; its header comes last, so that a folder with one is whole. Raises RecordWriteError."""
    first = merged.header
    folder = new_folder(root, first.t_start_wall_ns, first.verb, first.service, first.contract_digest or "merged")
    full = {"run": str(folder), **plain(dict(summary))}
    header = replace(first, run=folder.name, verdict=full["verdict"], reasons=tuple(full.get("reasons", ())))
    write_atomic(folder / PARQUET, to_parquet(merged.rows))
    write_atomic(folder / SUMMARY, json.dumps(full, indent=1, ensure_ascii=False, allow_nan=False).encode())
    text = json.dumps(plain(header), indent=1, ensure_ascii=False, allow_nan=False)
    write_atomic(folder / HEADER, text.encode())
    return open_run(folder)


def _check_usable(run: RunRecord) -> None:
    if run.status != "complete":
        raise RecordError(f"{run.path}: the run is {run.status}; only complete ones can be merged")
    if not run.rows:
        raise RecordError(f"{run.path}: the run holds no request")


def _check_same(first: RunRecord, other: RunRecord) -> None:
    a, b = first.header, other.header
    pairs: list[tuple[str, Any, Any]] = [
        ("verbs", a.verb, b.verb),
        ("services", a.service, b.service),
        ("contracts", a.contract_digest, b.contract_digest),
        ("targets", a.target, b.target),
        ("serving identities", (a.identity or {}).get("digest"), (b.identity or {}).get("digest")),
    ]
    for what, here, there in pairs:
        if here != there:
            raise RecordError(f"{first.path} and {other.path} have different {what}: {here} and {there}")
    for run in (first, other):
        known = (run.summary or {}).get("definitions") or {}
        for name, text in known.items():
            if name in DEFINITIONS and text != DEFINITIONS[name]:
                raise RecordError(f'{run.path} defines {name} as "{text}", here it is "{DEFINITIONS[name]}"')


def _part(first: RunHeader, run: RunRecord, *, is_first: bool) -> Part:
    h = run.header
    uncertainty: int | None = 0
    if is_first:
        offset, clock = 0, "first"
    elif h.boot_id is not None and h.boot_id == first.boot_id:
        offset, clock = 0, "shared"
    else:
        offset = (h.t_start_wall_ns - h.t_start_ns) - (first.t_start_wall_ns - first.t_start_ns)
        clock = "wall"
        errors = [first.anchor_uncertainty_ns, h.anchor_uncertainty_ns, first.wall_error_ns, h.wall_error_ns]
        known = [e for e in errors if e is not None]
        uncertainty = sum(known) if len(known) == len(errors) else None
    return Part(h.run, h.host, h.seed, len(run.rows), offset, clock, uncertainty)


def _moved(row: RequestRow, offset_ns: int, index: int, num_runs: int) -> RequestRow:
    """On the first run's clock. Sessions of different runs stay apart."""
    r = row.timing
    if not offset_ns and r.session is None:
        return row

    def at(t: int | None) -> int | None:
        return None if t is None else t + offset_ns

    timing = replace(
        r,
        t_intended_ns=at(r.t_intended_ns),
        t_send_ns=r.t_send_ns + offset_ns,
        t_headers_ns=at(r.t_headers_ns),
        t_end_ns=r.t_end_ns + offset_ns,
        chunks=tuple(Chunk(c.t_ns + offset_ns, c.num_tokens) for c in r.chunks),
        t_first_answer_ns=at(r.t_first_answer_ns),
        empty_frames_ns=tuple(t + offset_ns for t in r.empty_frames_ns),
        session=None if r.session is None else r.session * num_runs + index,
    )
    return replace(row, timing=timing)


def _point(name: str, parts: Sequence[Part], pieces: Sequence[Sequence[RequestRow]]) -> PointParts:
    spans: list[tuple[int, int]] = []
    runs = []  # two machines may have begun in the same second, with folders of one name
    for part, rows in zip(parts, pieces, strict=True):
        sends = [row.timing.t_send_ns for row in rows if row.point == name and not row.warmup]
        if sends:
            spans.append((min(sends), max(sends)))
            runs.append(part.run)
    common = min((end for _, end in spans), default=0) - max((begin for begin, _ in spans), default=0)
    longest = max((end - begin for begin, end in spans), default=0)
    overlap = 1.0 if len(spans) < 2 else max(0, common) / longest if longest else 0.0
    return PointParts(name, tuple(runs), overlap)


def _notes(parts: Sequence[Part], points: Sequence[PointParts]) -> tuple[str, ...]:
    notes = []
    for part in parts[1:]:
        where = f"{part.run} on {part.host}"
        if part.clock == "shared":
            notes.append(f"{where} shares the first run's clock")
            continue
        unknown = "as well as the wall clocks of the hosts agree, which they did not tell"
        sure = unknown if part.uncertainty_ns is None else f"give or take {part.uncertainty_ns / 1e6:.3f} ms"
        notes.append(f"{where}: its clock is {-part.offset_ns / 1e9:+.6f} s from the first run's, {sure}")
    seeds = [part.seed for part in parts if part.seed is not None]
    if len(set(seeds)) < len(seeds):
        notes.append("runs have the same seed, so they sent the same prompts: the server's cache may have known them")
    return tuple(notes)
