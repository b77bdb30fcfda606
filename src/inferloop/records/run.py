"""Run folders: `runs/<utc>-<verb>-<service>-<short digest>/`, readable at every instant, also after a kill.

run.json          header; rewritten whole (status running | complete | interrupted | void)
stages.jsonl      what the run was doing, appended
requests.jsonl    one line per request, appended; becomes requests.parquet at the end
summary.json      the result, once there is one
report.html       and other attachments, whole or absent
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from inferloop.contract.workload import Contract
from inferloop.core.clock import Clock, RealClock
from inferloop.core.digest import digest_of, plain
from inferloop.core.errors import RecordWriteError, RunVoidError
from inferloop.measure.invariants import violations
from inferloop.measure.timing import RequestTiming
from inferloop.records.anchor import boot_id, read_anchor, wall_error_ns
from inferloop.records.bench import RequestRow, from_json_line, to_json_line, to_parquet
from inferloop.records.files import LineFile, Opener, open_unbuffered, whole_lines, write_atomic
from inferloop.records.fingerprint import Fingerprint, fingerprint
from inferloop.records.header import HEADER, LINES, PARQUET, SCHEMA_VERSION, STAGES, SUMMARY, RunHeader, Status
from inferloop.records.read import RunRecord, StageEvent, open_run

__all__ = ["RunWriter", "RunHeader", "RunRecord", "StageEvent", "open_run"]

_LATER = frozenset(
    ("target", "contract_digest", "contract", "identity", "seed", "warmup_s", "window_s", "arrivals", "options")
)


class RunWriter:
    """Owns one run folder while the run goes on. A context manager; leaving without `finish` marks it interrupted.

    Every method that writes raises RecordWriteError and then leaves what was complete in place.
    """

    def __init__(
        self,
        root: Path,
        *,
        verb: str,
        service: str,
        contract: Contract | None = None,
        clock: Clock | None = None,
        opener: Opener = open_unbuffered,
        machine: Fingerprint | None = None,
        **known: Any,
    ) -> None:
        """`known` are header fields already known (target, seed, ...); the rest comes through `update`."""
        _check_later(known)
        self._clock = clock or RealClock()
        self._opener = opener
        anchor = read_anchor(self._clock)
        digest = contract.digest if contract else digest_of([verb, service, known.get("target")])
        self.path = new_folder(root, anchor.wall_ns, verb, service, digest)
        process = psutil.Process()
        self.header = RunHeader(
            schema_version=SCHEMA_VERSION,
            run=self.path.name,
            verb=verb,
            service=service,
            status="running",
            t_start_ns=anchor.t_ns,
            t_start_wall_ns=anchor.wall_ns,
            fingerprint=plain(machine or fingerprint()),
            pid=process.pid,
            process_started_s=process.create_time(),
            host=os.uname().nodename,
            contract_digest=contract.digest if contract else None,
            contract=plain(contract) if contract else None,
            anchor_uncertainty_ns=anchor.uncertainty_ns,
            wall_error_ns=wall_error_ns(),
            boot_id=boot_id(),
        )
        self._lines: LineFile | None = None
        self._stages: LineFile | None = None
        self._settled_ns: dict[str, int] = {}
        self.update(**known)

    def update(self, **known: Any) -> None:
        """Set header fields that became known. Rewrites run.json."""
        _check_later(known)
        self.header = replace(self.header, **{name: plain(value) for name, value in known.items()})
        self._write_header()

    def append(self, timing: RequestTiming, *, point: str, warmup: bool = False) -> None:
        """Record one finished request. Raises ValueError for stamps that contradict each other: a fault of ours."""
        assert self.header.status == "running", "the run is over"
        broken = violations(timing)
        if broken:
            raise ValueError(f"request {timing.request_id}: {'; '.join(broken)}")
        if self._lines is None:
            self._lines = LineFile(self.path / LINES, self._opener)
        self._lines.append(to_json_line(RequestRow(point, warmup, timing)))

    def settle(self, point: str, t_ns: int) -> None:
        """What `point` sent before that instant turned out to be its start: warm-up in the sealed record."""
        self._settled_ns[point] = t_ns

    def event(self, stage: str, event: str, **detail: Any) -> None:
        """Append to stages.jsonl: what happened in which stage, on both clocks."""
        if self._stages is None:
            self._stages = LineFile(self.path / STAGES, self._opener)
        line = {"stage": stage, "event": event, "t_ns": self._clock.now_ns(), "wall_ns": self._clock.wall_ns()}
        self._stages.append(json.dumps({**line, "detail": plain(detail)}, allow_nan=False).encode())

    @contextlib.contextmanager
    def stage(self, name: str, **detail: Any) -> Iterator[None]:
        """Mark a stage started, then finished or failed."""
        self.event(name, "started", **detail)
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(RecordWriteError):
                self.event(name, "failed", error=type(error).__name__, message=str(error))
            raise
        self.event(name, "finished")

    def write_file(self, name: str, content: str | bytes) -> Path:
        """An attachment such as report.html: whole or absent."""
        assert Path(name).name == name, "attachments lie in the run folder itself"
        data = content.encode() if isinstance(content, str) else content
        write_atomic(self.path / name, data, self._opener)
        return self.path / name

    def finish(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Write summary.json, seal the requests as Parquet, and mark the run complete (or void, by its verdict).

        `summary` has at least "verdict" and "reasons"; returned is what was written, with "run" filled in.
        Raises RecordWriteError; the appended lines then stay as they are.
        """
        full = {"run": str(self.path), **plain(dict(summary))}
        assert "verdict" in full, "a summary has a verdict"
        self.write_file(SUMMARY, json.dumps(full, indent=1, ensure_ascii=False, allow_nan=False))
        self._seal()
        status: Status = "void" if full["verdict"] == "void" else "complete"
        self._close(status, full["verdict"], tuple(full.get("reasons", ())))
        return full

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.header.status == "running":
            status: Status = "void" if isinstance(error, RunVoidError) else "interrupted"
            with contextlib.suppress(RecordWriteError):  # the disk may be full; then the reader sees it by the dead pid
                self._close(status, "void" if status == "void" else None, (_why(kind, error),))
        self._close_files()

    def _seal(self) -> None:
        self._close_files()
        lines, _ = whole_lines(self.path / LINES)
        if not lines:
            return
        rows = [self._as_settled(from_json_line(line)) for line in lines]
        write_atomic(self.path / PARQUET, to_parquet(rows), self._opener)
        (self.path / LINES).unlink()

    def _as_settled(self, row: RequestRow) -> RequestRow:
        early = row.timing.t_send_ns < self._settled_ns.get(row.point, 0)
        return replace(row, warmup=True) if early else row

    def _close(self, status: Status, verdict: str | None, reasons: tuple[str, ...]) -> None:
        self.header = replace(
            self.header, status=status, verdict=verdict, reasons=reasons, t_end_ns=self._clock.now_ns()
        )
        self._write_header()

    def _close_files(self) -> None:
        for file in (self._lines, self._stages):
            if file is not None:
                file.close()
        self._lines = self._stages = None

    def _write_header(self) -> None:
        text = json.dumps(plain(self.header), indent=1, ensure_ascii=False, allow_nan=False)
        write_atomic(self.path / HEADER, text.encode(), self._opener)


def _check_later(known: Mapping[str, Any]) -> None:
    unknown = set(known) - _LATER
    assert not unknown, f"not header fields: {sorted(unknown)}"
    assert {f.name for f in fields(RunHeader)} >= _LATER


def new_folder(root: Path, wall_ns: int, verb: str, service: str, digest: str) -> Path:
    """Create the folder of a run that started then. Raises RecordWriteError."""
    moment = datetime.datetime.fromtimestamp(wall_ns / 1e9, datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    safe = re.sub(r"[^A-Za-z0-9._]+", "-", service).strip("-.") or "service"
    name = f"{moment}-{verb}-{safe[:48]}-{digest[:8]}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, 1000):  # two runs of one contract may start in the same second
            folder = root / (name if attempt == 1 else f"{name}-{attempt}")
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                continue
    except OSError as error:
        why = "it is a file" if root.is_file() else error.strerror or error
        raise RecordWriteError(
            f"cannot create a run folder under {root}: {why}", fix="Choose another --runs-dir."
        ) from error
    raise RecordWriteError(f"too many runs named {name} under {root}")


def _why(kind: type[BaseException] | None, error: BaseException | None) -> str:
    if kind is None:
        return "left without a result"
    if issubclass(kind, KeyboardInterrupt | asyncio.CancelledError):
        return "interrupted"
    return f"{kind.__name__}: {error}"
